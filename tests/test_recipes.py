"""The programs of examples/recipes/ run, pass the check before a run, and are exact."""

import functools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys

import made_data
import numpy as np
import pytest
import torch
from harness import (
    ROOT,
    deviation,
    loader_of,
    make_args,
    order_of,
    run_processes,
    sampler_of,
    train,
)
from patches import checked, stop_after
from runs import CPU

import sampling

PROGRAMS = {path.stem: path.read_text() for path in (ROOT / "examples/recipes").glob("*.py")}
OTHERS = {"swa", "follow"}  # no tasks
SLOW = {"vectors", "segmentation", "drawn", "distill", "folds", "packed", "mixup"}
NEEDS = {"timm_layers": ["timm"], "hf": ["transformers", "datasets"]}  # the project does not
SLOW |= {"diffusion", *NEEDS}
OPTIONS = "--dtype float64 --epochs 2 --batch-size 7 --lr 0.1 --log-every 1 --keep-every 1"
OPTIONS = (*OPTIONS.split(), "--workers", "0", "--warmup-epochs", "0", "--device", "cpu")
OF_RECIPE = {
    "diffusion": ["--batch-size", "91", "--lr", "0.01"],  # of 1,437 digits
    "timm_layers": ["--batch-size", "91", "--lr", "0.003"],
    "hf": ["--batch-size", "13", "--lr", "0.003"],
}


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(ROOT / "examples/recipes", tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_page_names_every_program():
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert all(name == "vectors" or f"| `{name}.py` |" in page for name in PROGRAMS)


def write_tars(folder):
    generator = np.random.default_rng(0)
    for part, count in (("train", 80), ("val", 20)):
        made_data.write_tar(folder / f"{part}.tar", generator.normal(size=(count, 8)))


def slow_or_not(name):
    return pytest.param(name, marks=pytest.mark.full if name in SLOW else ())


@pytest.mark.parametrize("name", [*map(slow_or_not, sorted(PROGRAMS.keys() - OTHERS))])
def test_recipe_is_the_same_on_two_devices(name, folder):
    """Those with `loss_weights` also with accumulation, and BatchNorm over all ranks: both must change nothing."""
    for package in NEEDS.get(name, []):
        pytest.importorskip(package, reason=f"{name}.py needs {package}")
    argv = ["--task", folder / f"{name}.py", *OPTIONS, *OF_RECIPE.get(name, [])]
    if name == "tars":
        write_tars(folder)
        argv += ["--tars", folder]
    if name == "shards":
        made_data.main(name, folder / "made", 6, 3)
        argv += ["--data-dir", folder / "made", "--shuffle-window", "2"]
    accumulates = "def loss_weights" in PROGRAMS[name] or name == "diffusion"
    more = ["--accum-steps", "2"] if accumulates else []
    more += ["--sync-bn"] if "BatchNorm" in PROGRAMS[name] else []
    single = train("single", 1, *argv, folder=folder / "single", patch=checked)
    assert single.code == 0, single.err
    first, last = (single.checkpoint(f"epoch-000{i}.pt")["model"] for i in (1, 2))
    assert distance(last, first) > 1e-3, "it learns"
    for mode in ["ddp", "fsdp"] if name == "packed" else ["ddp"]:  # an LSTM lists its weights
        ranks = train(mode, 2, *argv, *more, folder=folder / mode, patch=checked)
        assert ranks.code == 0, ranks.err
        assert deviation(ranks.checkpoint()["model"], last) < 1e-10
        for ours, wanted in zip(ranks.eval_lines(), single.eval_lines(), strict=True):
            assert ours.pop("event") == wanted.pop("event") == "eval"
            assert ours == pytest.approx(wanted, rel=1e-10)


def test_shards_are_read_once_an_epoch(folder):
    made_data.main("shards", folder / "made", 12, 3)
    argv = ["--task", str(folder / "shards.py"), "--data-dir", str(folder / "made")]
    argv += ["--batch-size", "7", "--shuffle-window", "3"]
    sys.path.insert(0, str(folder))
    args = make_args("single", *argv)
    data, held_out = runpy.run_path(str(folder / "shards.py"))["build_datasets"](args)
    for _, (batch,) in sampler_of(args, data):
        assert all(len(data[index][0]) == 8 for index in batch)
    assert data.read.cache_info().misses == 12 and data.read.cache_info().hits > 100
    values = [held_out[index][0] for index in range(len(held_out))]
    assert len(torch.stack(values).unique(dim=0)) == len(values) == sum(held_out.shards)
    assert held_out.read.cache_info().misses == 3


def distance(state, other):
    """Of what is no counter."""
    return max(
        (value - other[name]).abs().max().item()
        for name, value in state.items()
        if value.is_floating_point()
    )


def test_teacher_follows_as_in_a_plain_program(folder):
    argv = ["--task", str(folder / "teacher.py"), *OPTIONS, "--schedule", "constant"]
    run = train("single", 1, *argv, folder=folder)
    assert run.code == 0, run.err
    sys.path.insert(0, str(folder))
    task, args = runpy.run_path(str(folder / "teacher.py")), make_args("single", *argv)
    torch.manual_seed(0)
    net, data = task["build_model"](args).double(), task["build_datasets"](args)[0]
    trained = [*net.student.parameters(), *net.predictor.parameters()]
    optimizer, sampler = torch.optim.SGD(trained, 0.1, 0.9), sampler_of(args, data)
    loader = loader_of(args, data, sampler, CPU)
    for epoch in (0, 1):
        sampler.set_position(epoch, 0)
        for (((first, second), _),) in loader:
            wanted = [net.teacher(view).detach() for view in (first, second)]
            loss = 0
            for view, other in ((first, wanted[1]), (second, wanted[0])):
                guess = net.predictor(net.student(view))
                loss += (
                    guess / guess.norm(dim=1, keepdim=True)
                    - other / other.norm(dim=1, keepdim=True)
                ).square().sum() / 7
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for mean, new in zip(net.teacher.parameters(), net.student.parameters()):
                mean.data = 0.95 * mean.data + 0.05 * new.data
    assert deviation(run.checkpoint()["model"], net.state_dict()) < 1e-10


def plain_batches(args, data):
    """The batches of one epoch."""
    sampler = sampler_of(args, data)
    return (batch for (batch,) in loader_of(args, data, sampler, CPU))


def test_diffusion_begins_as_in_a_plain_program(folder):
    """Which makes the first batch from the digits, by the formula of the paper."""
    argv = ["--task", str(folder / "diffusion.py"), *OPTIONS, *OF_RECIPE["diffusion"]]
    argv += ["--epochs", "1"]
    run = train("ddp", 2, *argv, folder=folder)
    assert run.code == 0, run.err
    task, args = runpy.run_path(str(folder / "diffusion.py")), make_args("single", *argv)
    digits, _ = task["task"].build_datasets(args)
    kept, left = [], 1.0
    for beta in np.linspace(1e-3, 0.1, 100):
        left *= 1 - beta
        kept.append(left)
    torch.manual_seed(0)
    net, losses = task["build_model"](args).double(), []
    for index in order_of(len(digits), 0, 0)[:91]:
        sampling.KeyedDataset.key = sampling.splitmix64(0, 0, index)
        sampling.seed_generators(sampling.sample_key(index))
        picture = digits[index][0].double() / 120 - 1
        time = int(torch.randint(100, ()))
        noise = torch.randn(1, 8, 8, dtype=torch.float64)
        noisy = kept[time] ** 0.5 * picture + (1 - kept[time]) ** 0.5 * noise
        guess = net((noisy[None], torch.tensor([time])))
        losses.append(((guess[0] - noise) ** 2).mean().item())
    assert np.std(losses) > 0.01
    assert run.train_lines()[0]["loss"] == pytest.approx(np.mean(losses), rel=1e-10)


def test_diffusion_draws_digits(folder):
    """A network that guesses all of the noise finds the picture."""
    task = runpy.run_path(str(folder / "diffusion.py"))
    picture, kept = torch.linspace(-1, 1, 64).view(1, 1, 8, 8).double(), task["KEPT"]

    class Oracle(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.own = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, inputs):
            noisy, times = inputs
            share = kept[times].view(-1, 1, 1, 1)
            return (noisy - share.sqrt() * picture) / (1 - share).sqrt()

    drawn = task["draw"](Oracle(), 2)
    assert (drawn - picture).abs().max() < 1e-10 and drawn.shape == (2, 1, 8, 8)


@pytest.mark.full
def test_digits_of_a_trained_diffusion_are_printed(folder):
    argv = ["--task", str(folder / "diffusion.py"), "--output-dir", str(folder / "run")]
    run = train("single", 1, *argv, "--epochs", "1", folder=folder)
    assert run.code == 0, run.err
    command = [sys.executable, folder / "diffusion.py", folder / "run/best.pt"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 8 and {len(line) for line in lines} == {64} and "@" in result.stdout


SEEDED = """
from vectors import *

class Seeded(Vectors):
    def __getitem__(self, index):
        return (self.x[index], torch.randint(2**62, ())), self.targets[index]

def build_datasets(args):
    return Seeded(args, 80), Seeded(args, 20)

class Net(nn.Linear):
    def forward(self, inputs):
        x, seeds = inputs
        draws = [torch.Generator().manual_seed(seed) for seed in seeds.tolist()]
        noise = [torch.randn(8, generator=one, dtype=x.dtype) for one in draws]
        return super().forward(x + torch.stack(noise))

def build_model(args):
    return Net(8, 2)
"""


def test_forward_may_draw_from_a_seed_in_the_input(folder):
    """As the page says of a large noise. What it draws without that seed gets a warning."""
    (folder / "seeded.py").write_text(SEEDED)
    (folder / "drawn.py").write_text(SEEDED.replace("torch.stack(noise)", "torch.randn_like(x)"))
    runs = {}
    for name in ("seeded", "drawn"):
        for mode, n in (("single", 1), ("ddp", 2)):
            argv = ["--task", folder / f"{name}.py", *OPTIONS]
            run = train(mode, n, *argv, folder=folder / f"{name}-{mode}", patch=checked)
            assert run.code == 0, run.err
            assert ("draw in __getitem__" in run.out) == (name == "drawn")
            runs[name, mode] = run.checkpoint()["model"]
    assert deviation(runs["seeded", "ddp"], runs["seeded", "single"]) < 1e-10
    assert deviation(runs["drawn", "ddp"], runs["drawn", "single"]) > 1e-3


def test_lora_trains_adapters_alone_and_merges_them(folder):
    """From a base that was trained; stopped and resumed; merged into weights of the base's network."""
    base = train("single", 1, "--task", folder / "vectors.py", *OPTIONS, folder=folder / "base")
    assert base.code == 0, base.err
    argv = ["--task", folder / "lora.py", *OPTIONS, "--weights", folder / "base/run/best.pt"]
    whole = train("ddp", 2, *argv, folder=folder / "whole")
    assert whole.code == 0, whole.err
    model, start = whole.checkpoint()["model"], base.checkpoint("best.pt")["model"]
    assert len(model) == 8 and len(whole.checkpoint()["optimizer"]["state"]) == 4
    assert all(model[name].equal(value) for name, value in start.items())
    assert all(value.abs().max() > 1e-3 for name, value in model.items() if ".up" in name)

    stop = functools.partial(stop_after, 14)
    parts = [*argv, "--output-dir", folder / "parts"]
    assert train("ddp", 2, *parts, folder=folder, patch=stop).code == 143
    resumed = train("ddp", 2, *parts, "--resume", "auto", folder=folder)
    assert resumed.code == 0 and "resumed at epoch 2, step " in resumed.out
    for name, value in resumed.checkpoint()["model"].items():
        assert value.equal(model[name]), name

    command = [sys.executable, folder / "lora.py", folder / "whole/run/last.pt"]
    subprocess.run([*command, folder / "merged.pt"], check=True, timeout=60, cwd=folder)
    merged = torch.load(folder / "merged.pt", weights_only=True)
    sys.path.insert(0, str(folder))
    lora, args = runpy.run_path(str(folder / "lora.py")), make_args("single", *map(str, argv))
    adapted = lora["build_model"](args).double()
    plain = lora["vectors"].build_model(args).double()
    x = torch.randn(50, 8, dtype=torch.float64)
    plain.load_state_dict(start)
    before = plain(x)
    adapted.load_state_dict(model)
    plain.load_state_dict(merged)
    assert (adapted(x) - before).abs().max() > 0.1
    assert adapted(x).sub(plain(x)).abs().max() < 1e-12


def test_early_stopping_stops_in_the_same_epoch(folder):
    """In both modes, three epochs after the best one. A resumed run remembers the earlier scores."""
    argv = ["--task", folder / "early_stopping.py", *OPTIONS, "--epochs", "40"]
    lines = []
    for mode, n in (("single", 1), ("ddp", 2)):
        own = [*argv, "--output-dir", folder / mode]
        run = train(mode, n, *own, "--patience", "3", folder=folder, patch=checked)
        assert run.code == 0 and "stopped by SIGUSR1" in run.err, run.err
        lines.append([line["top1"] for line in run.eval_lines()])
        best = lines[-1].index(max(lines[-1]))
        assert 5 < len(lines[-1]) == best + 4 < 40
        assert run.checkpoint("best.pt")["best"] == (lines[-1][best], best + 1)
        own += ["--resume", "auto"]
        longer = train(mode, n, *own, "--patience", "5", folder=folder)
        assert longer.code == 0 and len(longer.eval_lines()) == best + 6, longer.err
        evaluated = train(mode, n, *own, "--eval-only", folder=folder)
        assert evaluated.code == 0, evaluated.err
    assert lines[0] == lines[1]


@pytest.mark.full
def test_layer_decay_is_that_of_a_plain_program(folder):
    """With timm's own groups: a rate is the run's, times the group's lr_scale."""
    timm_optim = pytest.importorskip("timm.optim", reason="timm_layers.py needs timm")
    argv = ["--task", str(folder / "timm_layers.py"), *OPTIONS, *OF_RECIPE["timm_layers"]]
    argv += ["--epochs", "1", "--schedule", "constant"]
    run = train("ddp", 2, *argv, folder=folder)
    assert run.code == 0, run.err
    task, args = runpy.run_path(str(folder / "timm_layers.py")), make_args("single", *argv)
    data = task["build_datasets"](args)[0]
    torch.manual_seed(0)
    net = task["build_model"](args).double()
    no_decay = net.no_weight_decay()  # as its embeddings of positions
    groups = timm_optim.param_groups_layer_decay(net, 1e-3, no_decay, layer_decay=0.75)
    assert min(group["lr_scale"] for group in groups) < 0.33
    optimizer = torch.optim.AdamW(groups)
    for group in optimizer.param_groups:
        group["lr"] = 0.003 * group["lr_scale"]
    for pictures, labels in plain_batches(args, data):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(pictures), labels, label_smoothing=0.1).backward()
        optimizer.step()
    assert deviation(run.checkpoint()["model"], net.state_dict()) < 1e-10


PICTURES = """
from vectors import *

class Pictures(torch.utils.data.TensorDataset):
    def __init__(self, n):
        x = torch.randn(n, 3, 8, 8, dtype=torch.float64)
        super().__init__(x, x.mean((2, 3)).argmax(1))

def build_datasets(args):
    return Mixed(Pictures(80)), Pictures(20)

def build_model(args):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
"""


@pytest.mark.full
def test_mixup_of_torchvision(folder):
    """On a pair of samples, by the lines of the page. In collate, by those of torchvision's page, it is refused."""
    page = (ROOT / "docs" / "recipes.md").read_text()
    (code,) = re.findall(r"```python\n(from torchvision.*?)```", page, re.DOTALL)
    (folder / "pairs.py").write_text(f"import torch\n{code}\n{PICTURES}")
    runs = [
        train(mode, n, "--task", folder / "pairs.py", *OPTIONS, folder=folder / mode, patch=checked)
        for mode, n in (("single", 1), ("ddp", 2))
    ]
    assert [run.code for run in runs] == [0, 0], runs[0].err + runs[1].err
    one, two = (run.checkpoint()["model"] for run in runs)
    assert deviation(two, one) < 1e-10
    assert distance(one, runs[0].checkpoint("epoch-0001.pt")["model"]) > 1e-3
    in_collate = "\nMixed = lambda data: data\ndef collate(samples):\n"
    in_collate += "    return mix(*torch.utils.data.default_collate(samples))\n"
    (folder / "batch.py").write_text(f"import torch\n{code}\n{PICTURES}{in_collate}")
    run = train("single", 1, "--task", folder / "batch.py", *OPTIONS, folder=folder, patch=checked)
    assert run.code == 2 and "draw and mix in __getitem__, not in collate" in run.err, run.err


def test_auc_counts_a_tie_as_half(folder):
    """Compared with a count over all pairs; most scores are tied."""
    sys.path.insert(0, str(folder))
    auc = runpy.run_path(str(folder / "auc.py"))["dataset_metrics"]
    score, label = torch.randint(4, (300,)).tolist(), torch.randint(2, (300,)).tolist()
    pairs = [
        (a > b) + (a == b) / 2 for a, i in zip(score, label) for b, j in zip(score, label) if i > j
    ]
    assert auc({"score": score, "label": label})["auc"] == pytest.approx(np.mean(pairs), rel=1e-12)


NORMED = "import vectors\nfrom vectors import *\ndef build_model(args):\n"
NORMED += "    return nn.Sequential(nn.BatchNorm1d(8), vectors.build_model(args))\n"


def run_program(folder, name):
    os.chdir(folder)
    sys.path[:0] = [str(folder), str(ROOT)]
    runpy.run_path(f"{name}.py", run_name="__main__")


def test_stochastic_weight_averaging(folder):
    """At the low ends of a sawtooth, whose one tooth is the linear decay of docs/recipes.md."""
    (folder / "normed.py").write_text(NORMED)
    path = folder / "swa.py"
    path.write_text(PROGRAMS["swa"].replace("vectors as task", "normed as task"))
    argv = ["--task", folder / "normed.py", *OPTIONS, "--output-dir", folder / "runs/mine"]
    decay = ["--schedule", "sawtooth", "--step-gamma", "0"]
    run = train("single", 1, *argv, *decay, "--step-epochs", "1", folder=folder)
    assert run.code == 0, run.err
    rates = [line["lr"] for line in run.train_lines()]
    assert rates[:11] == rates[11:] and rates[10] < 0.01, "two teeth"
    assert np.diff(rates[:11]) == pytest.approx((rates[10] - rates[0]) / 10), "linear"
    ((code, _, err),) = run_processes([functools.partial(run_program, folder, "swa")], folder)
    assert code == 0, err
    first, last, mean = (
        run.checkpoint(f"{name}.pt") for name in ("epoch-0001", "epoch-0002", "swa")
    )
    weight = (first["model"]["1.0.weight"] + last["model"]["1.0.weight"]) / 2
    assert mean["1.0.weight"].equal(weight) and distance(last["model"], first["model"]) > 1e-3
    assert mean["0.num_batches_tracked"] == 12, "statistics of one epoch of batches of 7"
    argv[-1] = folder / "evaluated"
    argv += ["--eval-only", "--weights", folder / "runs/mine/swa.pt"]
    assert train("single", 1, *argv, folder=folder).eval_lines()[0]["loss"] > 0


@pytest.mark.full
def test_cross_validation(folder):
    ((code, _, err),) = run_processes([functools.partial(run_program, folder, "folds")], folder)
    assert code == 0, err
    assert len({path.read_text() for path in folder.glob("runs/*/metrics.jsonl")}) == 4


def test_log_is_followed(folder):
    """By a made-up wandb."""
    (folder / "wandb.py").write_text(
        "import json\ndef init(project): pass\n"
        "def log(values, step): print(json.dumps([step, values]))\n"
    )
    lines = [
        {"event": "train", "global_step": 3, "loss": 0.5, "lr": 0.1},
        {"event": "eval", "global_step": 3, "loss": 0.25},
    ]
    log = "".join(json.dumps(line) + "\n" for line in lines)
    command = [sys.executable, "follow.py"]
    result = subprocess.run(command, cwd=folder, input=log, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert found == [[3, {"train/loss": 0.5, "train/lr": 0.1}], [3, {"eval/loss": 0.25}]]
