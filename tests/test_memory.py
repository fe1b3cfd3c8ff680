"""What a run keeps in memory."""

import itertools
import json
import re
import resource
from pathlib import Path

import pytest
from harness import train
from patches import BASE, printed

import machinery.run
import machinery.tasks


def print_memory(rank):
    end_epoch = machinery.run.Run.end_epoch

    def watched(run, metrics):
        end_epoch(run, metrics)
        print(
            "memory",
            json.dumps(
                int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
            ),
        )

    machinery.run.Run.end_epoch = watched


def test_memory_does_not_grow_with_the_epochs(tmp_path):
    result = train(
        "ddp",
        2,
        *BASE,
        "--epochs",
        "24",
        "--average",
        "ema",
        "--workers",
        "1",
        folder=tmp_path,
        patch=print_memory,
    )
    assert result.code == 0, result.err
    sizes = printed(result.out, "memory")
    per_rank = [sizes[rank * 24 : (rank + 1) * 24] for rank in range(2)]
    for size in per_rank:
        assert max(size[4:]) <= 1.01 * size[3], f"kB after each epoch: {size}"


WIDE = """from torch import nn
from small import build_datasets, per_sample_loss, per_sample_metrics
class Wide(nn.Sequential):
    def forward(self, images):
        return super().forward(images.flatten(1).float() / 90)
def build_model(args):
    return Wide(nn.Linear(64, 2**16), nn.ReLU(), nn.Linear(2**16, 10))
"""


def print_page_faults(rank):
    end_step = machinery.run.Run.end_step

    def watched(run, grad_norm):
        end_step(run, grad_norm)
        print("faults", json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_minflt))

    machinery.run.Run.end_step = watched


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("dp", 2)])  # DDP keeps its buckets
def test_memory_of_the_gradients_is_kept_from_step_to_step(mode, n, tmp_path):
    """They are freed in every step, 20 MB here. If they went back to the system, their 5,000 pages would be missed in the next."""
    (tmp_path / "wide.py").write_text(WIDE)
    argv = (
        "--task",
        tmp_path / "wide.py",
        "--epochs",
        "1",
        "--batch-size",
        "16",
        "--device",
        "cpu",
    )
    result = train(mode, n, *argv, folder=tmp_path / "run", patch=print_page_faults)
    assert result.code == 0, result.err
    faults = [after - before for before, after in itertools.pairwise(printed(result.out, "faults"))]
    assert len(faults) >= 10 and sorted(faults)[len(faults) // 2] < 500, faults
