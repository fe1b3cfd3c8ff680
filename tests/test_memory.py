"""What a run keeps in memory."""

import re
from pathlib import Path

import pytest
from harness import train
from patches import BASE, printed

import engine.run


def print_memory(rank):
    end_epoch = engine.run.Run.end_epoch

    def watched(run, metrics):
        end_epoch(run, metrics)
        status = Path("/proc/self/status").read_text()
        print("memory", re.search(r"VmRSS:\s+(\d+) kB", status)[1])

    engine.run.Run.end_epoch = watched


@pytest.mark.full
def test_memory_does_not_grow_with_the_epochs(tmp_path):
    argv = (*BASE, "--epochs", "24", "--average", "ema", "--workers", "1")
    result = train("ddp", 2, *argv, folder=tmp_path, patch=print_memory)
    assert result.code == 0, result.err
    sizes = printed(result.out, "memory")
    for size in (sizes[:24], sizes[24:]):  # of each rank
        assert max(size[4:]) <= 1.01 * size[3], f"kB after each epoch: {size}"


TABLE = r"""import re, torch
from pathlib import Path
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 16
    def __getitem__(self, index):
        if torch.utils.data.get_worker_info(): show("worker")
        return torch.tensor(index), torch.tensor(0.)
def show(process):
    status = Path("/proc/self/status").read_text()
    print(process, re.search(r"RssAnon:\s+(\d+) kB", status)[1], flush=True)
def build_datasets(args): return Numbers(), Numbers()
def build_model(args): return torch.nn.Embedding(ROWS, 1)
def per_sample_loss(outputs, targets): return outputs.square().sum(1)
def per_sample_metrics(outputs, targets):
    show("rank")
    return {"loss_again": -per_sample_loss(outputs, targets)}
"""


@pytest.mark.parametrize(
    ("mode", "n"), [("single", 1), pytest.param("fsdp", 2, marks=pytest.mark.full)]
)
def test_loader_worker_keeps_no_copy_of_the_network(mode, n, tmp_path):
    """Beside a network of 40 MB it has no more memory than beside one of 64 bytes."""
    largest = {}
    for rows in (16, 10_000_000):
        (tmp_path / f"table{rows}.py").write_text(TABLE.replace("ROWS", str(rows)))
        argv = ["--task", tmp_path / f"table{rows}.py", "--epochs", "1", "--batch-size", "4"]
        argv += ["--workers", "1", "--device", "cpu"]
        result = train(mode, n, *argv, folder=tmp_path / f"{mode}{rows}")
        assert result.code == 0, result.err
        for process in ("worker", "rank"):
            largest[process, rows] = max(printed(result.out, process))
    more = {name: largest[name, 10_000_000] - largest[name, 16] for name in ("worker", "rank")}
    assert more["worker"] < 10_000 < 40_000 / n < more["rank"], f"kB: {more}"
