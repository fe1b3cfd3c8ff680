"""The programs of examples/recipes/ run, pass the check before a run, and are the same on two devices."""

import functools
import importlib
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
from harness import ROOT, deviation, loaders_of, make_args, run_processes, train
from patches import checked, stop_after
from single import single

PROGRAMS = {path.stem: path.read_text() for path in (ROOT / "examples/recipes").glob("*.py")}
OTHERS = {"swa", "follow"}  # no tasks
NEEDS = {"timm_layers": ["timm"], "hf": ["transformers", "datasets"]}  # the project does not
QUICK = {"auc", "orders", "sentences", "contrast"}  # the others have the marker full
OPTIONS = "--dtype float64 --epochs 2 --batch-size 7 --lr 0.1 --log-every 1 --keep-every 1"
OPTIONS = (*OPTIONS.split(), "--workers", "0", "--warmup-epochs", "0", "--device", "cpu")
OF_RECIPE = {
    "diffusion": ["--batch-size", "91", "--lr", "0.01"],  # of 1,437 digits
    "timm_layers": ["--batch-size", "91", "--lr", "0.003"],
    "hf": ["--batch-size", "13", "--lr", "0.003"],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "examples/recipes", tmp_path, dirs_exist_ok=True)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in PROGRAMS:  # the next test imports its own copy
        sys.modules.pop(name, None)


def test_page_names_every_program():
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert [name for name in PROGRAMS if name != "vectors" and f"`{name}.py`" not in page] == []


def distance(state, other):
    floats = [name for name, value in state.items() if value.is_floating_point()]
    return max((state[name] - other[name]).abs().max().item() for name in floats)


def slow_or_not(name):
    return pytest.param(name, marks=() if name in QUICK else pytest.mark.full)


@pytest.mark.parametrize("name", [*map(slow_or_not, sorted(PROGRAMS.keys() - OTHERS))])
def test_recipe_is_the_same_on_two_devices(name, folder):
    """Those with `loss_weights` also with accumulation, and BatchNorm over all ranks: both must change nothing."""
    for package in NEEDS.get(name, []):
        pytest.importorskip(package, reason=f"{name}.py needs {package}")
    argv = ["--task", folder / f"{name}.py", *OPTIONS, *OF_RECIPE.get(name, [])]
    if name == "tars":
        generator = np.random.default_rng(0)
        for part, count in (("train", 80), ("val", 20)):
            made_data.write_tar(folder / f"{part}.tar", generator.normal(size=(count, 8)))
        argv += ["--tars", folder]
    if name == "shards":
        made_data.main(name, folder / "made", 6, 3)
        argv += ["--data-dir", folder / "made", "--window", "2"]
    accumulates = "def loss_weights" in PROGRAMS[name] or name == "diffusion"
    more = ["--accum-steps", "2"] * accumulates + ["--sync-bn"] * ("BatchNorm" in PROGRAMS[name])
    one = train("single", 1, *argv, folder=folder / "single", patch=checked)
    assert one.code == 0, one.err
    first, last = (one.checkpoint(f"epoch-000{i}.pt")["model"] for i in (1, 2))
    assert distance(last, first) > 1e-3, "it learns"
    for mode in ["ddp", "fsdp"] if name == "packed" else ["ddp"]:  # an LSTM lists its weights
        ranks = train(mode, 2, *argv, *more, folder=folder / mode, patch=checked)
        assert ranks.code == 0, ranks.err
        assert deviation(ranks.checkpoint()["model"], last) < 1e-10
        for ours, wanted in zip(ranks.eval_lines(), one.eval_lines(), strict=True):
            assert ours.pop("event") == wanted.pop("event") == "eval"
            assert ours == pytest.approx(wanted, rel=1e-10)


def test_balanced_order_draws_each_class_equally_often(folder):
    """A sample that comes again has another number: it is augmented anew."""
    orders, args = importlib.import_module("orders"), make_args("single", *OPTIONS)
    data = orders.Vectors(args, 1000)
    data.targets = (torch.arange(1000) < 900).long()  # nine of ten are of one class
    numbers = orders.Balanced(data).epoch_order(0, 1)
    assert len({*numbers.tolist()}) == len(numbers) == 1000 and max(numbers) >= 1000
    assert 400 < (numbers % 1000 < 900).sum() < 600
    assert not np.array_equal(numbers, orders.Balanced(data).epoch_order(0, 2))


def test_shards_are_read_once_an_epoch(folder):
    made_data.main("shards", folder / "made", 12, 3)
    argv = ["--task", str(folder / "shards.py"), "--data-dir", str(folder / "made")]
    args = make_args("single", *argv, "--window", "3")
    data, held_out = importlib.import_module("shards").build_datasets(args)
    seen = [index for index in data.epoch_order(0, 0) if len(data[index][0]) == 8]
    assert sorted(seen) == [*range(len(data))]
    assert data.read.cache_info().misses == 12 and data.read.cache_info().hits > 100
    values = torch.stack([held_out[index][0] for index in range(len(held_out))])
    assert len(values.unique(dim=0)) == len(values) == sum(held_out.sizes)


def test_teacher_follows_as_in_a_plain_program(folder):
    argv = ["--task", str(folder / "teacher.py"), *OPTIONS, "--schedule", "constant"]
    run = single(folder, *argv)
    assert run.code == 0, run.err
    task, args = importlib.import_module("teacher"), make_args("single", *argv)
    torch.manual_seed(0)
    net, sets = task.build_model(args).double(), task.build_datasets(args)
    trained = [*net.student.parameters(), *net.predictor.parameters()]
    optimizer = torch.optim.SGD(trained, 0.1, 0.9)
    loader, _ = loaders_of(args, *sets)
    for epoch in (0, 1):
        loader.batch_sampler.set_position(epoch, 0)
        for (((first, second), _),) in loader:
            wanted = [net.teacher(view).detach() for view in (first, second)]
            loss = 0
            for view, other in ((first, wanted[1]), (second, wanted[0])):
                guess = net.predictor(net.student(view))
                guess, other = (x / x.norm(dim=1, keepdim=True) for x in (guess, other))
                loss += (guess - other).square().sum() / 7
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for mean, new in zip(net.teacher.parameters(), net.student.parameters()):
                mean.data = 0.95 * mean.data + 0.05 * new.data
    assert deviation(run.checkpoint()["model"], net.state_dict()) < 1e-10


@pytest.mark.full
def test_digits_of_a_trained_diffusion_are_printed(folder):
    run = single(folder, "--task", folder / "diffusion.py", "--epochs", "1", "--device", "cpu")
    assert run.code == 0, run.err
    command = [sys.executable, folder / "diffusion.py", folder / "run/best.pt"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 8 and {len(line) for line in lines} == {64} and "@" in result.stdout


@pytest.mark.full
def test_lora_trains_adapters_alone_and_merges_them(folder):
    """From a base that was trained; stopped and resumed; merged into weights of the base's network."""
    assert single(folder, "--task", folder / "vectors.py", *OPTIONS).code == 0
    argv = ["--task", folder / "lora.py", *OPTIONS, "--weights", folder / "run/best.pt"]
    whole = train("ddp", 2, *argv, folder=folder / "whole")
    assert whole.code == 0, whole.err
    model = whole.checkpoint()["model"]
    start = torch.load(folder / "run/best.pt", weights_only=True)["model"]
    assert len(model) == 8 and len(whole.checkpoint()["optimizer"]["state"]) == 4
    assert all(model[name].equal(value) for name, value in start.items())
    parts, stop = [*argv, "--output-dir", folder / "parts"], functools.partial(stop_after, 14)
    assert train("ddp", 2, *parts, folder=folder, patch=stop).code == 143
    resumed = train("ddp", 2, *parts, "--resume", "auto", folder=folder)
    assert resumed.code == 0, resumed.err
    assert all(value.equal(model[name]) for name, value in resumed.checkpoint()["model"].items())

    command = [sys.executable, folder / "lora.py", folder / "whole/run/last.pt"]
    subprocess.run([*command, folder / "merged.pt"], check=True, timeout=60, cwd=folder)
    lora, args = importlib.import_module("lora"), make_args("single", *map(str, argv))
    adapted, plain = (
        build(args).double() for build in (lora.build_model, lora.vectors.build_model)
    )
    x = torch.randn(50, 8, dtype=torch.float64)
    plain.load_state_dict(start)
    adapted.load_state_dict(model)
    assert (adapted(x) - plain(x)).abs().max() > 0.1
    plain.load_state_dict(torch.load(folder / "merged.pt", weights_only=True))
    assert (adapted(x) - plain(x)).abs().max() < 1e-12


@pytest.mark.full
def test_early_stopping_stops_in_the_same_epoch(folder):
    """In both modes, three epochs after the best one. A resumed run remembers the earlier scores."""
    argv = ["--task", folder / "early_stopping.py", *OPTIONS, "--epochs", "40"]
    scores = []
    for mode, n in (("single", 1), ("ddp", 2)):
        own = [*argv, "--output-dir", folder / mode]
        run = train(mode, n, *own, "--patience", "3", folder=folder, patch=checked)
        assert run.code == 0 and "stopped by SIGUSR1" in run.err, run.err
        scores.append([line["top1"] for line in run.eval_lines()])
        best = scores[-1].index(max(scores[-1]))
        assert 5 < len(scores[-1]) == best + 4 < 40
        longer = train(mode, n, *own, "--patience", "5", "--resume", "auto", folder=folder)
        assert longer.code == 0 and len(longer.eval_lines()) == best + 6, longer.err
    assert scores[0] == scores[1]


def test_auc_counts_a_tie_as_half(folder):
    """Compared with a count over all pairs; most scores are tied."""
    auc = importlib.import_module("auc").dataset_metrics
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
    """At the low ends of a sawtooth."""
    (folder / "normed.py").write_text(NORMED)
    (folder / "swa.py").write_text(PROGRAMS["swa"].replace("vectors as task", "normed as task"))
    argv = ["--task", folder / "normed.py", *OPTIONS, "--output-dir", folder / "runs/mine"]
    decay = ["--schedule", "sawtooth", "--step-gamma", "0", "--step-epochs", "1"]
    run = single(folder, *argv, *decay)
    assert run.code == 0, run.err
    ((code, _, err),) = run_processes([functools.partial(run_program, folder, "swa")], folder)
    assert code == 0, err
    first, last, mean = (
        torch.load(folder / f"runs/mine/{name}.pt", weights_only=True)
        for name in ("epoch-0001", "epoch-0002", "swa")
    )
    weight = (first["model"]["1.0.weight"] + last["model"]["1.0.weight"]) / 2
    assert mean["1.0.weight"].equal(weight) and distance(last["model"], first["model"]) > 1e-3
    assert mean["0.num_batches_tracked"] == 12, "statistics of one epoch of batches of 7"
    argv[-1] = folder / "evaluated"
    evaluated = single(folder, *argv, "--eval-only", "--weights", folder / "runs/mine/swa.pt")
    assert evaluated.code == 0 and "  eval  loss " in evaluated.out, evaluated.err


@pytest.mark.full
def test_cross_validation(folder):
    ((code, _, err),) = run_processes([functools.partial(run_program, folder, "folds")], folder)
    assert code == 0, err
    logs = [path.read_text() for path in folder.glob("runs/*/metrics.jsonl")]
    assert len({re.sub(r'"(samples_per_s|data_wait)": [^,]*', "", log) for log in logs}) == 4


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
    log, command = "".join(json.dumps(line) + "\n" for line in lines), [sys.executable, "follow.py"]
    result = subprocess.run(command, cwd=folder, input=log, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert found == [[3, {"train/loss": 0.5, "train/lr": 0.1}], [3, {"eval/loss": 0.25}]]
