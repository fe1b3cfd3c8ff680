"""The programs of examples/recipes/ run, pass the check before a run, and are exact."""

import functools
import json
import os
import runpy
import shutil
import subprocess
import sys

import made_data
import numpy as np
import pytest
import torch
from harness import ROOT, deviation, loader_of, make_args, run_processes, sampler_of, train
from patches import checked
from runs import CPU

PROGRAMS = {path.stem: path.read_text() for path in (ROOT / "examples/recipes").glob("*.py")}
OTHERS = {"swa", "follow"}  # no tasks
SLOW = {"vectors", "segmentation", "drawn", "distill", "folds", "packed", "mixup"}
OPTIONS = "--dtype float64 --epochs 2 --batch-size 7 --lr 0.1 --log-every 1 --keep-every 1"
OPTIONS = (*OPTIONS.split(), "--workers", "0", "--warmup-epochs", "0", "--device", "cpu")


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
    argv = ["--task", folder / f"{name}.py", *OPTIONS]
    if name == "tars":
        write_tars(folder)
        argv += ["--tars", folder]
    if name == "shards":
        made_data.main(name, folder / "made", 6, 3)
        argv += ["--data-dir", folder / "made", "--shuffle-window", "2"]
    more = ["--accum-steps", "2"] if "def loss_weights" in PROGRAMS[name] else []
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
