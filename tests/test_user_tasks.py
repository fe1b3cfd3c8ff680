"""Tasks of users: what is unusual but right gives the right result in every mode; what the check before a run says."""

import random
import sys

import numpy as np
import pytest
import torch
from harness import ROOT, compare, deviation, differences, log_lines, train
from patches import checked
from single import SMALL, single, task_file

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 10)
    def forward(self, images):
        return self.last(self.first(images.flatten(1).to(self.first.weight.dtype) / 90 - 0.8).tanh())
def build_model(args):
    return Net()
"""
FLOAT64 = "--dtype float64 --epochs 9 --log-every 1 --lr 0.05 --warmup-epochs 0.5".split()


# ----------------------------------------------------------------------- the same in every mode

GROUPS = """
def build_optimizer(args, net):
    biases = [p for p in net.parameters() if p.dim() == 1]
    weights = [p for p in net.parameters() if p.dim() > 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": args.lr / 10}]
    return torch.optim.Adam(groups, lr=args.lr)
"""
DRAWN = """
import random, numpy
from torch.utils.data import TensorDataset, random_split
def build_datasets(args):
    x = 90 * (torch.randn(120, 64, dtype=torch.float64) + random.random() + numpy.random.rand())
    return random_split(TensorDataset(x, x[:, :10].argmax(1)), [93, 27])
"""
SKIPS = """
CALLS = []
def per_sample_loss(outputs, targets):
    CALLS.append(outputs.requires_grad)
    losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 1
    hit = outputs.requires_grad and sum(CALLS) in (1, 4, 5, 18) and rank == 1
    return losses * float("nan") if hit else losses
"""
SAME = {"an optimizer with groups": GROUPS, "data that are drawn": DRAWN, "steps skipped": SKIPS}


def seed_by_rank(rank):
    torch.manual_seed(rank + 100)
    random.seed(rank + 100)
    np.random.seed(rank + 100)


@pytest.mark.parametrize("name", SAME)
def test_task_is_the_same_on_three_ranks(name, tmp_path):
    """A step that is NaN on one rank is skipped on all; data that forget a seed are the same on all."""
    argv = [*task_file(tmp_path, NET + SAME[name]), *FLOAT64]
    argv += ["--lr", "0.02" if "groups" in name else "0.3"]
    one = train("single", 1, *argv, folder=tmp_path / "one", patch=seed_by_rank)
    many = train("ddp", 3, *argv, folder=tmp_path / "many", patch=seed_by_rank)
    assert one.code == many.code == 0, one.err + many.err
    assert deviation(many.checkpoint()["model"], one.checkpoint()["model"]) < 1e-10
    skipped = [
        [line["step"] for line in r.train_lines() if line["grad_norm"] is None] for r in (one, many)
    ]
    assert skipped[0] == skipped[1] == ([1, 4, 5, 6] if "skipped" in name else [])
    if "skipped" not in name:  # its losses are NaN on one rank, and so in the mean
        assert max(compare(many, one).values()) < 1e-10
    if "groups" in name:
        groups = one.checkpoint()["optimizer"]["param_groups"]
        assert [group["initial_lr"] for group in groups] == pytest.approx([0.02, 0.002])
        assert groups[0]["weight_decay"] == 0.1


TYPES = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter((torch.randn(64, 10) / 8).to(torch.DTYPE))
        self.bias = nn.Parameter(torch.zeros(10))
    def forward(self, images):
        outputs = images.flatten(1).to(self.weight.dtype) / 90 @ self.weight
        return (outputs.abs() if outputs.is_complex() else outputs).float() + self.bias
def build_model(args):
    return Net()
"""


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64"])
def test_parameters_of_any_type_train_and_resume(dtype, optimizer, tmp_path):
    argv = [*task_file(tmp_path, TYPES.replace("DTYPE", dtype)), "--optimizer", optimizer]
    argv += ["--lr", {"sgd": "0.1", "adamw": "0.03"}[optimizer], "--warmup-epochs", "0"]
    argv += ["--schedule", "constant"]
    argv += "--average ema --ema-decay 0.5 --clip-grad-norm 5".split()
    results = [single(tmp_path / "one", *argv, "--epochs", "4")]
    many = train("ddp", 2, *argv, folder=tmp_path / "many")
    assert many.code == 0, many.err
    results.append(single(tmp_path / "many", "--resume", "auto", "--epochs", "4"))
    for result in results:
        first, *_, last = result.eval_lines()
        assert result.code == 0 and last["loss"] < 0.9 * first["loss"], result.err
        saved = result.checkpoint()
        assert saved["model"]["weight"].dtype == getattr(torch, dtype)
        assert saved["average"]["tensors"]["weight"].dtype in (torch.float32, torch.complex64)
    assert results[0].eval_lines()[-1]["loss"] == pytest.approx(results[1].eval_lines()[-1]["loss"], rel=0.05)  # fmt: skip


# ------------------------------------------------------------------------- the check before a run


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("ddp", 2)])
def test_check_changes_no_bit_of_the_run(mode, n, tmp_path):
    """Not the weights, the statistics of BatchNorm, the momentum, or what is drawn."""
    task = ["--task", str(ROOT / "tests" / "tasks" / "everything.py"), *SMALL[2:]]
    results = [
        train(mode, n, *task, "--average", "ema", *more, folder=tmp_path / name, patch=checked)
        for name, more in (("plain", ["--no-check"]), ("checked", []))
    ]
    assert [result.code for result in results] == [0, 0], results[1].err
    assert log_lines(results[0].folder) == log_lines(results[1].folder)
    assert not differences(results[1].checkpoint(), results[0].checkpoint(), "")


LAZY = """
class Records(torch.utils.data.Dataset):
    file = None
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, index):
        if self.file is None:  # each loader worker opens its own
            self.file = open(PATH, "rb", buffering=0)
        self.file.seek(8 * index)
        number = self.file.read(4) + self.file.read(4)
        return torch.zeros(64), torch.tensor(int(int.from_bytes(number, "little") == index))
def build_datasets(args): return Records(400), Records(100)
def per_sample_metrics(outputs, targets): return {"right": targets.float()}
train_metrics = per_sample_metrics
"""


def test_loader_workers_share_no_file_with_the_check(tmp_path):
    """They are forked before the check reads a sample: a fork would share the place in an open file."""
    (tmp_path / "numbers").write_bytes(b"".join(i.to_bytes(8, "little") for i in range(400)))
    argv = task_file(tmp_path, NET + LAZY.replace("PATH", repr(str(tmp_path / "numbers"))))
    argv += "--batch-size 8 --eval-batch-size 2 --workers 4".split()
    result = train("single", 1, *argv, folder=tmp_path, patch=checked)
    assert result.code == 0, result.err
    assert [line["right"] for line in result.lines] == [1.0] * 4


PASSES = {
    "a loss near zero": ("def per_sample_loss(outputs, targets):\n    return outputs[:, 0] * 0 + 1e-8 * len(targets)\n", []),
    "a metric that jumps, in half precision": (f"{NET}def per_sample_metrics(outputs, targets):\n    return {{'n': outputs[:, 0] * 0 + len(targets)}}\n", ["--amp", "bf16"]),
    "a model that draws": (NET.replace(".tanh())", ".tanh()) + torch.rand(10)"), []),
    "a loss that compares samples": ("import common\ndef per_sample_loss(outputs, targets):\n    every, first = common.gather_samples(outputs)\n    return (outputs - every.mean(0)).square().sum(1)\n", []),
    "pictures of many sizes": ("def build_datasets(args):\n    return [[(torch.ones(8 * i, 8), 1)] for i in (1, 2)]\n" + NET.replace("images.flatten(1)", "images[:, :8].flatten(1)"), ["--batch-size", "1", "--no-check"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSES)
def test_check_takes_what_is_right(name, tmp_path):
    text, more = PASSES[name]
    result = single(tmp_path, *task_file(tmp_path, text), "--epochs", "1", "--lr", "0.01", *more)
    assert result.code == 0, result.err
    assert ("not checked, as the model draws it: loss" in result.out) == ("draws" in name)


RAISES = {
    "def forward(self, images, sizes)": (TypeError, r"called as model\(input\)"),
    "def forward(self, images, *, sizes)": (TypeError, r"called as model\(input\)"),
}


@pytest.mark.parametrize("text", RAISES)
def test_forward_of_two_arguments_gets_advice(text, tmp_path):
    kind, message = RAISES[text]
    with pytest.raises(kind, match=message):
        single(tmp_path, *task_file(tmp_path, NET.replace("def forward(self, images)", text)))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("loss", ["outputs.mean()", "(outputs.mean(), targets)", "outputs"])
def test_loss_must_be_one_number_per_sample(loss, tmp_path):
    text = f"{NET}def per_sample_loss(outputs, targets):\n    return {loss}\n"
    result = single(tmp_path, *task_file(tmp_path, text))
    assert result.code == 2 and "loss must be one number per sample" in result.err, result.err
    assert result.err.count("\n") == 1 and not (tmp_path / "run").exists()


# -------------------------------------------------------------------------------- the file itself

PLACES = """
top = torch.rand(5)
def add_options(parser): parser.add_argument("--smoothing", type=float, default=0.25)
def build_datasets(args):
    seen.append(torch.rand(5))
    return original(args)
def build_model(args):
    seen.append(torch.rand(5))
    return Net()
original, seen = __import__("small").build_datasets, [top]
def per_sample_loss(outputs, targets, *, smoothing, lr=5):
    found.add((smoothing, lr))
    return nn.functional.cross_entropy(outputs, targets, reduction="none")
found = set()
"""


def test_file_is_run_once_and_its_parts_draw_different_numbers_and_get_their_options(tmp_path):
    """A teacher that the top of a task makes would be the student that build_model makes."""
    argv = task_file(tmp_path, NET + PLACES, "places")
    result = single(tmp_path, *argv, "--epochs", "1", "--lr", "0.03")
    module = sys.modules["task_places"]
    assert result.code == 0 and module.found == {(0.25, 0.03)}, result.err
    assert len(module.seen) == 3 and len(torch.cat(module.seen).unique()) == 15


def test_neighbours_of_a_task_replace_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "task.py").write_text("from neighbour import *\n")
    (tmp_path / "neighbour.py").write_text(
        f"import torch\nfrom torch import nn\nfrom small import *\n{NET}"
    )
    (tmp_path / "common.py").write_text("raise AssertionError\n")
    result = single(tmp_path, "--task", tmp_path / "task.py", *SMALL[2:], "--epochs", "1")
    assert result.code == 0 and "DigitNet" not in result.out, result.err
    assert sys.path.index(str(tmp_path)) == len(sys.path) - 1
