"""Pitfalls of data, losses and terminals that any program with several processes has; docs/pitfalls.md names them."""

import json
import os

import numpy as np
import pytest
import torch
from harness import check, in_group, make_args
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.datasets import ImageFolder

import common
import machinery.process
import machinery.run
import machinery.usertask
import sampling

TASK = "from task import *\n"


def test_pitfall_50_file_that_a_fork_shares(tmp_path):
    """A loader worker is a fork: what it reads moves the position for all."""
    np.arange(4).tofile(tmp_path / "records")
    with open(tmp_path / "records", "rb", buffering=0) as file:
        if os.fork() == 0:
            file.read(16)
            os._exit(0)
        os.wait()
        assert np.frombuffer(file.read(8), np.int64) == [2], "and not the first record"

    text = f"""
def build_datasets(args):
    data = open({str(tmp_path / "records")!r}, "rb")
    return [data] * 9, [data]
"""
    (tmp_path / "opens.py").write_text(TASK + text)
    args = make_args("single", "--task", str(tmp_path / "opens.py"))
    kept = machinery.usertask.Task(args).build_datasets()
    assert args.workers == 0 and kept


def test_pitfall_51_one_stream_for_two_generators():
    """A crop drawn by torch and a colour drawn by numpy would go together."""

    def both():
        return torch.randint(0, 8, (2000,)).numpy(), np.random.randint(0, 8, 2000)

    torch.manual_seed(5)
    np.random.seed(5)
    crops, colours = both()
    assert (crops == colours).all()
    sampling.seed_generators(5)
    crops, colours = both()
    assert 0.05 < (crops == colours).mean() < 0.2, "by chance: one of eight"


def test_pitfall_52_loss_that_broadcasts(tmp_path):
    outputs, targets = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 2.0, 4.0])
    assert (outputs - targets).abs().mean() > 1, "[3, 1] - [3] is [3, 3]: no error, a wrong loss"

    loss = "def per_sample_loss(outputs, targets): return (outputs[:, :1] - targets).abs().mean(1)"
    (tmp_path / "broadcasts.py").write_text(TASK + loss)
    with pytest.raises(common.UsageError, match="alone; keep padding out of the model"):
        check("ddp", 2, "--task", str(tmp_path / "broadcasts.py"))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.words = nn.Embedding(4, 3, sparse=True)
        self.last = nn.Linear(3, 3)

    def forward(self, inputs, numbers):
        return self.last(torch.tanh(self.first(inputs)) + self.words(numbers)).square().sum()


def backward_of_words():
    torch.manual_seed(0)
    net, found = Words(), []
    inputs, numbers = torch.ones(2, 3), torch.tensor([0, 1])  # the same on both ranks
    for model in (net, DistributedDataParallel(net)):
        net.zero_grad()
        model(inputs, numbers).backward()
        found.append([p.grad.to_dense().norm().item() for p in net.parameters()])
    print(json.dumps(found))


def test_pitfall_53_sparse_gradients(tmp_path):
    """DDP divides the values of a sparse gradient in place, and with them what shares their memory."""
    for out in in_group(2, backward_of_words):
        alone, ranks = json.loads(out)
        ratios = [theirs / one for theirs, one in zip(ranks, alone)]  # on two equal ranks
        assert ratios == pytest.approx([0.5, 0.5, 1, 1, 1], rel=1e-5), "the layers before it"

    model = "build_model = lambda args: nn.Sequential(nn.Embedding(9, 9, sparse=True))\n"
    (tmp_path / "sparse.py").write_text(TASK + model)
    with pytest.raises(common.UsageError, match="sparse gradients, which ranks cannot average"):
        check("ddp", 2, "--task", str(tmp_path / "sparse.py"))


def test_pitfall_54_pipe_that_ctrl_c_has_closed():
    """Ctrl-C ends `tee` at once. The run has still to save."""
    end, begin = os.pipe()
    os.close(end)
    pipe = os.fdopen(begin, "w")
    with pytest.raises(BrokenPipeError):
        print("saving", file=pipe, flush=True)
    print("saving", file=machinery.process.Output(pipe), flush=True)
    with pytest.raises(BrokenPipeError):
        pipe.close()


def test_pitfall_55_classes_by_the_names_of_directories(tmp_path):
    """A directory that is renamed exchanges the numbers of its classes."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "0.png")

    def keyed():
        return sampling.KeyedDataset(ImageFolder(tmp_path, np.array), seed=0)

    before = keyed()
    recorded = machinery.run.identity(before, before)["classes"]
    (tmp_path / "cat").rename(tmp_path / "pet cat")
    after = keyed()
    assert before.dataset.class_to_idx["dog"] == 1 and after.dataset.class_to_idx["dog"] == 0
    found = machinery.run.identity(after, after)["classes"]
    assert recorded == ["cat", "dog"] and found == ["dog", "pet cat"], "compared at each resume"
