"""Bad input is refused before any process is started: exit code 2, one clear line that names the option, nothing written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import ROOT, check
from runs import make_run

import common
import machinery.cli

FILES = {
    "three.py": "def build_datasets(args): ...\ndef build_model(args): ...\ndef per_sample_loss(outputs, targets): ...\n",
    "syntax.py": "def build_datasets(args:\n",
    "raises.py": "import no_such_module_at_all\n",
    "leaves.py": "import sys\n\nsys.exit('usage: leaves.py FILE')\n",
    "asks.py": "build_datasets = build_model = per_sample_metrics = print\ndef per_sample_loss(outputs, targets, *, colour): ...\n",
    "junk.pt": "this is no checkpoint",
}
# A task that is the default one but for one function: what is wrong must be found before a process is started, and named
HEAD = "import torch\nfrom torch import nn\nfrom task import build_datasets, build_model, per_sample_loss, per_sample_metrics\n"
LOSS = "def per_sample_loss(outputs, targets):\n    return "
METRICS = "def per_sample_metrics(outputs, targets):\n    return "
MODEL = "class Net(nn.Linear):\n    def __init__(self, *_):\n        super().__init__(64, 10)\n    def forward(self, images):\n        return "
DATA = "def build_datasets(args):\n    return "
TASKS = {
    "one": "from task import build_datasets as both\n"
    + DATA
    + "[torch.utils.data.Subset(part, [0]) for part in both(args)]\n",
    "loss-mean": LOSS + "nn.functional.cross_entropy(outputs, targets)\n",
    "loss-target": LOSS + "nn.functional.cross_entropy(outputs, targets.double() / 3)\n",
    "metrics-empty": METRICS + "{}\n",
    "metrics-loss": METRICS + "{'top1': targets, 'loss': targets}\n",
    "model-empty": "build_model = lambda args: nn.Flatten()\n",
    "model-raises": "def build_model(args):\n    return nn.Linear(-1, 10, colour='red')\n",
    "model-shape": MODEL + "super().forward(images.float())\nbuild_model = Net\n",
    "loss-of-all": LOSS + "(outputs[:, :1].double() - targets).abs().mean(1)\n",
    "metric-of-all": METRICS + "{'r2': (outputs[:, 0] - outputs.mean()).square()}\n",
    "model-of-all": MODEL
    + "super().forward((images.double() - images.double().mean(0)).flatten(1))\nbuild_model = Net\n",
    "model-looks-back": MODEL
    + "super().forward(images.flatten(1).double()).cumsum(0)\nbuild_model = Net\n",
    "loss-of-class": LOSS  # of a set that is sorted by class: a first batch would have one alone
    + "nn.functional.cross_entropy(outputs, targets, reduction='none') * len(targets) / targets.bincount()[targets]\n"
    + "from task import build_datasets as both\n"
    + DATA
    + "[torch.utils.data.Subset(part, part.targets.argsort().tolist()) for part in both(args)]\n",
    "weights-of-all": "def loss_weights(targets):\n    return (targets + 1) / (targets + 1).sum()\n",
    "data-packed": DATA
    + "[[(torch.zeros(i + 1), i) for i in range(99)]] * 2\n"
    + "def collate(samples):\n    inputs, targets = zip(*samples)\n"
    + "    return nn.utils.rnn.pack_sequence(inputs, False), torch.tensor(targets) % 10\n"
    + MODEL
    + "super().forward(torch.zeros(len(images.unsorted_indices), 64))\nbuild_model = Net\n",
    "data-loaders": DATA + "[torch.utils.data.DataLoader([(torch.zeros(1), 0)])] * 2\n",
    "data-stream": "class Stream(torch.utils.data.IterableDataset): __iter__ = None\n"
    + DATA
    + "Stream(), Stream()\n",
    "data-one": DATA + "[1, 2, 3]\n",
    "data-empty": DATA + "[1] * 99, []\n",
    "data-missing": DATA + "open('no such file')\n",
    "data-triple": DATA + "[(torch.zeros(1), 0, 0)] * 99, [(torch.zeros(1), 0, 0)]\n",
    "data-told": "class Told(list):\n    def set_epoch(self, epoch): pass\n"
    + DATA
    + "Told([(torch.zeros(1), 0)] * 99), [(torch.zeros(1), 0)]\n",
    "data-ragged": DATA + "[[(torch.zeros(i + 1), i) for i in range(99)]] * 2\n",
    "renorm": "build_model = lambda args: nn.Sequential(nn.Embedding(9, 9, max_norm=1.0))\n",
    "data-unreadable": "class Torn(list):\n    def __getitem__(self, index):\n        raise OSError('image file is truncated')\n"
    + DATA
    + "Torn([0] * 99), Torn([0])\n",
}
# mode and N, options, what the error must say: " ... " stands for any text. TMP is a folder with FILES in it and a finished run in TMP/run
CASES = r"""
single 1 | --batch-size 0 | --batch-size: must be a whole number, at least 1, got 0
single 1 | --batch-size 1438 | --batch-size 1438 is larger than the training set (1437 samples)
single 1 | --accum-steps 65 | --batch-size 64 cannot be cut into 1 devices x 65 accumulation steps; it must be at least 65
single 1 | --resume TMP/missing.pt | --resume TMP/missing.pt: no such file
single 1 | --resume TMP | --resume TMP: is a directory; name a file in it
single 1 | --resume auto | --resume auto needs --output-dir
single 1 | --eval-only | --eval-only needs --resume FILE
single 1 | --amp fp16 --dtype float64 | --amp fp16 is half precision; use --amp off
single 1 | --schedule step | --schedule step needs --step-epochs
single 1 | --nesterov --momentum 0 | --optimizer sgd: Nesterov momentum requires a momentum
single 1 | --freeze conv9.* | --freeze conv9.*: no parameter has such a name; there are conv1.weight
single 1 | --freeze * | --freeze *: it freezes all, and nothing trains
single 1 | --device cuda:7 | --device cuda:7: not on this machine; available: auto, cpu
single 1 | --no-such-option | unrecognized arguments: --no-such-option
single 1 | --batch 32 | unrecognized arguments: --batch 32 (--help lists the options)
dp 2 | --compile | --compile does not follow nn.DataParallel
dp 2 | --sync-bn | --sync-bn does not work in nn.DataParallel
single 1 | --task TMP/data-loaders.py | build_datasets made a DataLoader; return the data sets: the script makes the loaders
single 1 | --batch_size 32 | unrecognized arguments: --batch_size 32 (--help lists the options); did you mean --batch-size?
single 1 | --task TMP/none.py | --task TMP/none.py: no such file
single 1 | --task TMP/three.py | missing: per_sample_metrics
single 1 | --task TMP/syntax.py | --task TMP/syntax.py ... SyntaxError
single 1 | --task TMP/raises.py | --task TMP/raises.py ... ModuleNotFoundError: No module named 'no_such_module_at_all'
single 1 | --task TMP/asks.py | per_sample_loss asks for colour, which is no option
single 1 | --output-dir TMP/junk.pt/run | --output-dir TMP/junk.pt/run: cannot write in TMP/junk.pt
single 1 | --output-dir TMP/run | --output-dir TMP/run already holds a run; continue it with --resume auto
single 1 | --output-dir TMP/logged | --output-dir TMP/logged already holds a run without a checkpoint; start it anew with --resume auto
single 1 | --schedule cyclic --step-epochs 3 6 | --schedule cyclic takes one of --step-epochs
single 1 | --output-dir TMP/closed/run | --output-dir TMP/closed/run: cannot write in TMP/closed
single 1 | --task TMP/leaves.py | --task TMP/leaves.py ... SystemExit: usage: leaves.py FILE
single 1 | --task TMP/loss-mean.py | --task TMP/loss-mean.py: per_sample_loss or loss_weights, for samples 788, 861, 82, ... of the training set: ValueError: loss must be one number per sample, shape [n], as with reduction="none"; got shape []
single 1 | --task TMP/loss-target.py | --task TMP/loss-target.py: per_sample_loss ... RuntimeError:
single 1 | --task TMP/metrics-empty.py | --task TMP/metrics-empty.py ... per_sample_metrics must return at least one metric, and none named count ... got {}
single 1 | --task TMP/metrics-loss.py | --task TMP/metrics-loss.py ... per_sample_metrics must return at least one metric, and none named count
single 1 | --task TMP/model-empty.py | --task TMP/model-empty.py: build_model must return an nn.Module with parameters, got Flatten
single 1 | --task TMP/model-raises.py | --task TMP/model-raises.py: build_model ... TypeError: Linear.__init__() got an unexpected keyword argument 'colour'
single 1 | --task TMP/model-shape.py | --task TMP/model-shape.py: the forward of the model, for samples ... RuntimeError:
single 1 | --task TMP/data-one.py | --task TMP/data-one.py: build_datasets: ValueError: too many values to unpack (expected 2)
single 1 | --task TMP/data-missing.py | --task TMP/data-missing.py: build_datasets ... FileNotFoundError: [Errno 2] No such file or directory: 'no such file'
single 1 | --task TMP/data-triple.py | --task TMP/data-triple.py ... samples 49, 97, 53, ... of the training set: a sample must be (input, target), got a list of 3
single 1 | --task TMP/data-told.py | --task TMP/data-told.py: set_epoch of a data set is not called; draw in __getitem__
single 1 | --task TMP/data-unreadable.py | --task TMP/data-unreadable.py: __getitem__ or collate, for samples 49, 97, 53, ... of the training set: RuntimeError: sample 49 cannot be read: OSError: image file is truncated
single 1 | --task TMP/data-empty.py | the evaluation set is empty
single 1 | --task imges | --task: must be a file with a name that ends in .py, or one of detect, gpt, images, pose, digits; got 'imges'
single 1 | --task images | --dataset imagefolder needs --data-dir
single 1 | --task images --dataset cifar10 --data-dir TMP | --data-dir TMP: cifar10 is not here; --download fetches it
single 1 | --task images --dataset cifar10 --data-dir TMP --image-size 16 | --image-size 16 has no effect on --dataset cifar10
single 1 | --task images --dataset synthetic --model resnet81 | ValueError: Unknown model resnet81
single 1 | --task images --dataset synthetic --pretrained | --pretrained: torchvision has no weights for resnet9; see --weights
fsdp 2 | --grad-compress bf16 | --grad-compress bf16 belongs to DDP; use ddp or spawn
fsdp 2 | --amp fp16 | --amp fp16 is not tested with sharded gradients; use --amp bf16
single 1 | --amp bf16-shards | --amp bf16-shards is for fsdp alone; use --amp bf16
dp 2 | --amp bf16-shards | --amp bf16-shards is for fsdp alone; use --amp bf16
fsdp 2 | --amp bf16-shards --dtype float64 | --amp bf16-shards is half precision; use --amp off
fsdp 2 | --channels-last | --channels-last: fsdp cannot shard it
fsdp 2 | --shard-size 3 | --shard-size 3 must divide the number of devices, 2
ddp 2 | --task TMP/renorm.py | build_model: 0 changes its weights in each forward, on each rank others; leave out max_norm
single 1 | --task TMP/data-ragged.py | --task TMP/data-ragged.py: __getitem__ or collate, for samples 49, 97, 53, ... of the training set: RuntimeError: stack expects each tensor to be equal size, but got [50] at entry 0 and [98] at entry 1
ddp 2 | --task TMP/loss-of-all.py --dtype float64 | loss of sample 788 is
ddp 2 | --task TMP/model-of-all.py --dtype float64 | in half of it: other samples must not change it; keep padding out of the model and the loss; draw and mix in __getitem__, not in collate; for a mean over tokens return sums, undivided, and define loss_weights; a loss that compares samples needs gather_samples
single 1 | --task TMP/metric-of-all.py --dtype float64 | in half of it: other samples must not change it; use dataset_metrics for the whole set
ddp 2 | --task TMP/model-looks-back.py --dtype float64 | in half of it: other samples must not change it; keep padding out of the model
single 1 | --task TMP/loss-of-class.py --batch-size 16 | in half of it: other samples must not change it; keep padding out
ddp 2 | --task TMP/weights-of-all.py | weight of loss of sample 788 is
dp 2 | --task TMP/data-packed.py | dp can only cut a batch of tensors [n, ...]; use ddp or spawn, or pad in collate
single 1 | --shuffle-window 0 | --shuffle-window: must be a whole number, at least 1, got 0
ddp 2 | --shuffle-window 4 | --shuffle-window 4 needs a training set with `shards = [n0, n1, ...]`
single 1 | --shuffle-window 4 --balanced | --shuffle-window 4 and --balanced are two different orders; leave one
single 1 | --task TMP/data-stream.py | an IterableDataset has no order; it needs __len__ and __getitem__, which finds a record by its number; to read in sequence: --shuffle-window, examples/recipes/shards.py
"""
CASES = [line.split(" | ") for line in CASES.strip().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad input")
    for name, text in [
        *FILES.items(),
        *((f"{name}.py", HEAD + text) for name, text in TASKS.items()),
    ]:
        (folder / name).write_text(text)
    for name in ("closed", "run", "logged"):
        (folder / name).mkdir()
    (folder / "run" / "last.pt").write_bytes(b"")
    (folder / "logged" / "metrics.jsonl").write_text("{}")
    return folder


def contents(folder):
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("device", "arguments", "message"),
    CASES,
    ids=[f"{mode.replace(' ', '-')} {text}" for mode, text, _ in CASES],
)
def test_bad_input_is_refused_by_name(device, arguments, message, folder, monkeypatch, capfd):
    mode, n = device.split()
    monkeypatch.setattr(
        "torch.accelerator.is_available", lambda: False
    )  # the same words on every machine
    access = os.access  # to root no folder is read-only
    monkeypatch.setattr(
        os, "access", lambda path, how: Path(path).name != "closed" and access(path, how)
    )
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.chdir(folder)
    before = contents(folder)
    argv = [part.replace("TMP", str(folder)) for part in arguments.split()]
    with pytest.raises(common.UsageError) as error:
        check(mode, int(n), *argv)
    parts = message.replace("TMP", str(folder)).split(" ... ")
    assert re.search(".*".join(map(re.escape, parts)), str(error.value), re.DOTALL)
    assert "\n" not in str(error.value), "one line"
    assert contents(folder) == before, "nothing written"
    out, err = capfd.readouterr()
    assert (out, err) == ("", ""), "and nothing else printed"


ENVIRONMENT = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ["bash", "run.sh", "fdsp", "2"],
            "unknown mode 'fdsp' (did you mean fsdp?); use: bash run.sh single|dp|ddp|spawn|fsdp",
        ),
        (
            ["bash", "run.sh", "ddp", "a[$(touch owned)]"],
            "N = a[$(touch owned)]: must be a whole number, at least 1",
        ),
        (["bash", "run.sh", "single", "2"], "N = 2: single trains on one device"),
        (
            ["bash", "run.sh", "ddp", "08", "--batch-size", "7", "--device", "cpu"],
            "train_ddp.py: error: --batch-size 7 cannot be cut into 8 devices",
        ),
        (
            [sys.executable, "train_ddp.py"],
            "no launcher has set RANK, LOCAL_RANK, WORLD_SIZE ('RANK'). Start it with torchrun",
        ),
        pytest.param(
            [sys.executable, "train_spawn.py", "--batch-size", "5000", "--device", "cpu"],
            "--batch-size 5000 is larger than the training set",
            marks=pytest.mark.full,
        ),
        pytest.param(
            [sys.executable, "train_single.py", "--lr", "fast"],
            "--lr: must be a number, at least 0, got fast",
            marks=pytest.mark.full,
        ),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)
def test_bad_command_line_ends_with_code_2_and_one_line(command, message, tmp_path):
    command = [str(ROOT / part) if (ROOT / part).is_file() else part for part in command]
    (tmp_path / "difflib.py").write_text("open('owned', 'w')")  # anybody's, and never run
    finished = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    (tmp_path / "difflib.py").unlink()
    assert finished.returncode == 2
    assert message in finished.stderr and finished.stderr.count("\n") == 1, finished.stderr
    assert finished.stdout == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0)])
def test_run_sh_shows_its_usage(arguments, code):
    command = ["bash", ROOT / "run.sh", *arguments]
    finished = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    shown, rest = finished.stdout, finished.stderr
    if code != 0:
        shown, rest = rest, shown
    assert finished.returncode == code and rest == ""
    assert shown.startswith("bash run.sh MODE [N] [options]")
    assert "N defaults to" in shown and "set -" not in shown


def test_more_processes_than_accelerators_is_refused(monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    message = "3 processes or replicas, but only 2 accelerators; use 2, or --device cpu"
    for mode, argv, world_size in [
        ("ddp", [], 3),
        ("dp", ["--replicas", "3"], None),
        ("spawn", ["--nproc", "3"], None),
    ]:
        with pytest.raises(common.UsageError, match=message):
            machinery.cli.parse_args(mode, argv, world_size)
        machinery.cli.parse_args(mode, [*argv, "--device", "cpu"], world_size)
    # A launcher around run.sh may have set it; run.sh says how many it is going to start.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    machinery.cli.parse_args("ddp", [], 2)
    assert machinery.cli.parse_args("dp", []).replicas == 2, "by default all accelerators"
    assert machinery.cli.parse_args("spawn", []).nproc == 2
    # SLURM may show each of 8 tasks two devices of its own.
    monkeypatch.setattr("machinery.cli.take_ranks_of_slurm", lambda: True)
    machinery.cli.parse_args("ddp", [])


@pytest.mark.parametrize(
    "arguments",
    [
        "--epochs 1",  # shorter than the default warm-up
        "--epochs 10 --schedule step --step-epochs 5 15",  # a part of a longer run
        "--seed 9223372036854775807 --lr 0 --weight-decay 0 --momentum 1 --timeout 1e9",
        "--task TMP/one.py --batch-size 1",
        "--output-dir TMP/new/folder/of/many",
    ],
)
def test_unusual_but_good_input_is_accepted(arguments, folder, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    check("single", 1, *(part.replace("TMP", str(folder)) for part in arguments.split()))
    assert not (folder / "new").exists(), "a check writes nothing"


def test_what_is_missing_is_said_before_the_run(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(common.UsageError, match="--tensorboard needs the package tensorboard"):
        check("single", 1, "--tensorboard")

    def no_network(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("torch.hub.urlopen", no_network)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    argv = "--task images --dataset synthetic --model resnet18 --pretrained"
    with pytest.raises(common.UsageError, match="OSError: no network"):
        check("single", 1, *argv.split())


def test_nothing_to_resume_is_said(tmp_path, capsys):
    (tmp_path / "junk.pt").write_text("this is no checkpoint")
    with pytest.raises(common.UsageError, match=r"junk\.pt: damaged, or no file of tensors"):
        make_run(tmp_path, "--resume", tmp_path / "junk.pt")
    with pytest.raises(common.UsageError, match=r"--resume auto: no checkpoint in .* to evaluate"):
        make_run(tmp_path / "new", "--resume", "auto", "--eval-only")
    make_run(tmp_path / "new", "--resume", "auto")
    assert "nothing to resume: a new run\n" in capsys.readouterr().out
