"""A resumed run is the run that it resumes, bitwise; another run is refused; what the folder of a run holds by then."""

import functools
import json
import os
import re
from pathlib import Path

import pytest
import torch
from harness import (
    TASKS,
    average_of,
    deviation,
    factor_of,
    guard_of,
    make_args,
    optimizer_of,
    prove,
    scheduler_of,
    single_run,
    train,
    undisturbed,
    walk,
)
from patches import (
    BASE,
    call_in_task,
    in_process,
    printed,
    stop_after,
    without_speed,
    wrap_in_task,
)
from runs import (
    CPU,
    assert_same_log,
    end,
    end_epoch,
    load,
    make_run,
    make_step,
    start_epoch,
)
from short_runs import EVERYTHING, SMALL
from torch import nn

import common
import machinery.cli
import machinery.process
import machinery.run

ALL = (*EVERYTHING, "--average", "ema")  # dropout and BatchNorm too
RUNS = [("single", 1, 9), ("ddp", 2, 9)]
RUNS += [
    pytest.param(*run, marks=pytest.mark.full)
    for run in (("dp", 2, 6), ("spawn", 3, 9), ("fsdp", 2, 9))
]


@pytest.mark.parametrize(("mode", "n", "step"), RUNS)
def test_interrupted_and_resumed_run_is_bitwise_the_uninterrupted_one(mode, n, step, tmp_path):
    straight = undisturbed(mode, n, *ALL)
    stop = functools.partial(stop_after, step)
    stopped = train(mode, n, *ALL, folder=tmp_path / "resumed", patch=stop)
    assert stopped.code == 143, stopped.err
    reached = stopped.checkpoint()["global_step"]
    assert step <= reached <= step + 2, (
        "the boundary that all ranks agree on comes at most a step later"
    )
    resumed = train(mode, n, *ALL, "--resume", "auto", folder=tmp_path / "resumed")
    assert resumed.code == 0, resumed.err
    prove_bitwise(resumed, straight)
    assert_same_log(resumed, straight, reached)


def prove_bitwise(resumed, straight):
    """Prove that a resumed run has left the checkpoint of the uninterrupted one."""
    left, wanted = resumed.checkpoint(), straight.checkpoint()
    worst = 0.0
    for a, b in zip(walk(left), walk(wanted), strict=True):
        if isinstance(a, torch.Tensor):
            worst = max(worst, (a - b).abs().max().item() if a.numel() else 0)
            assert a.equal(b)
        else:
            assert isinstance(a, dict) or a == b
    prove("resumed run, same world size", "uninterrupted run", worst, 0)


# Many of another value than the default, an option of the task's own among them.
MANY = ("--task", str(TASKS / "pit_models.py"), *"--model batchnorm --dtype float64".split())
MANY += tuple("--epochs 3 --batch-size 28 --accum-steps 2 --eval-batch-size 9 --seed 3".split())
MANY += tuple("--optimizer adamw --lr 0.02 --momentum 0.8 --weight-decay 0.1".split())
MANY += tuple("--schedule step --step-epochs 1 2 --step-gamma 0.5 --warmup-epochs 0.5".split())
MANY += tuple("--scale-lr sqrt --clip-grad-norm 0.5 --average ema --ema-decay 0.9".split())
MANY += tuple("--freeze *.bias !last.* --balanced --best loss --sync-bn --log-every 3".split())
MANY += tuple("--save-every 5 --keep-every 2 --timeout 50".split())


@pytest.mark.parametrize(
    ("mode", "n"), [("single", 1), pytest.param("ddp", 2, marks=pytest.mark.full)]
)
def test_resume_needs_no_other_option(mode, n, tmp_path):
    straight = undisturbed(mode, n, *MANY)
    stop = functools.partial(stop_after, 10)
    stopped = train(mode, n, *MANY, folder=tmp_path, patch=stop)
    assert stopped.code == 143, stopped.err
    reached = stopped.checkpoint()["global_step"]
    assert stopped.checkpoint()["step"] > 0, "within an epoch"
    resumed = train(mode, n, "--resume", "auto", folder=tmp_path)
    assert resumed.code == 0, resumed.err
    assert "before)" not in resumed.out, "nothing is called a change"
    prove_bitwise(resumed, straight)
    assert_same_log(resumed, straight, reached)
    assert {path.name for path in resumed.folder.iterdir()} == {
        path.name for path in straight.folder.iterdir()
    }


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("ddp", 2), ("single", 1)),
        pytest.param(("ddp", 4), ("fsdp", 3), marks=pytest.mark.full),
        pytest.param(("fsdp", 3), ("spawn", 2), marks=pytest.mark.full),
    ],
)
def test_run_goes_on_in_another_mode_and_at_another_world_size(first, then, tmp_path):
    stopped = train(*first, *BASE, folder=tmp_path, patch=functools.partial(stop_after, 8))
    assert stopped.code == 143 and stopped.checkpoint()["global_step"] == 9
    straight = single_run(*BASE).checkpoint()["model"]
    assert deviation(stopped.checkpoint()["model"], straight) > 1e-3
    resumed = train(*then, *BASE, "--resume", "auto", folder=tmp_path)
    assert resumed.code == 0, resumed.err
    found = deviation(resumed.checkpoint()["model"], straight)
    prove("resumed run, other mode or world size", "uninterrupted run", found, 1e-10)
    assert [line["global_step"] for line in resumed.train_lines()] == list(range(1, 19))


def test_loss_scale_of_fp16_goes_on_at_resume(tmp_path):
    argv = (*BASE, "--dtype", "float32", "--amp", "fp16", "--epochs", "2")
    straight = single_run(*argv)
    stopped = train("single", 1, *argv, folder=tmp_path, patch=functools.partial(stop_after, 5))
    assert stopped.code == 143
    half_way = stopped.checkpoint()["scaler"]
    resumed = train("single", 1, *argv, "--resume", "auto", folder=tmp_path).checkpoint()
    assert resumed["scaler"] == straight.checkpoint()["scaler"] != half_way
    assert deviation(resumed["model"], straight.checkpoint()["model"]) == 0


def test_resume_auto_goes_on_or_begins_anew(tmp_path, monkeypatch, handlers):
    first = make_run(tmp_path)
    start_epoch(first)
    make_step(first, [1.0])
    first.save("last.pt", "best.pt")
    end(first)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # torchrun's, maybe left over
    find, folder = machinery.run.find_checkpoint, tmp_path / "run"
    assert find(folder, None) is None
    assert find(folder, "auto") == folder / "last.pt"
    assert find(tmp_path / "empty", "auto") is None


# ---------------------------------------------------------------------- the same run or another one


@pytest.mark.parametrize("change", ["--seed 1", "--dtype float64", "--task TASKS/everything.py"])
def test_changed_option_that_would_change_the_run_is_refused_by_name(change, finished, tmp_path):
    option, *value = change.replace("TASKS", str(TASKS)).split()
    resume = ("--resume", finished.folder / "last.pt")
    result = train("single", 1, *SMALL, option, *value, *resume, folder=tmp_path)
    assert result.code == 2 and result.err.count("\n") == 1
    assert f"error: {option} " in result.err and ": the checkpoint has " in result.err


@pytest.mark.parametrize(
    "option", ["--batch-size 29", "--accum-steps 2", "--balanced", "--shuffle-window 2"]
)
def test_batches_that_are_cut_otherwise_are_refused_within_an_epoch(option, tmp_path, handlers):
    """The samples that are left of the epoch would be others."""
    run = make_run(tmp_path)
    start_epoch(run)
    make_step(run, [1.0])
    run.save("last.pt")
    end(run)
    name = option.split()[0]
    with pytest.raises(common.UsageError, match=f"^{name} .* within an epoch; leave it out$"):
        make_run(tmp_path, "--resume", "auto", *option.split())


def test_named_option_wins_and_is_printed(tmp_path, capsys, handlers):
    first = make_run(tmp_path, "--epochs", "5", "--momentum", "0.8")
    start_epoch(first)
    make_step(first, [1.0])
    first.save("last.pt")
    end(first)
    capsys.readouterr()
    run = make_run(tmp_path, "--resume", "auto", "--lr", "0.05", "--epochs", "5")
    said = capsys.readouterr().out.splitlines()[1:]
    assert said == ["resumed at epoch 1, step 1", "--lr 0.05 (0.1 before)"], "what is new, alone"
    (group,) = run.state.optimizer.param_groups
    assert group["momentum"] == 0.8
    args = make_args("single", "--epochs", "5", "--warmup-epochs", "0")
    assert group["lr"] == pytest.approx(0.05 * factor_of(args, 1, 6), rel=1e-12)
    run.save("last.pt")
    assert load(run.files.directory / "last.pt")["config"]["lr"] == 0.05, "for the next resume"


def test_another_batch_size_goes_on_between_two_epochs(tmp_path, handlers):
    """An epoch has fewer steps then: the rate is that of the schedule, and no line of the log goes."""
    first = make_run(tmp_path, "--epochs", "4", "--log-every", "1")
    for _ in range(2):
        train_epoch(first)
    end(first)
    argv = ("--resume", "auto", "--epochs", "4", "--log-every", "1")
    second = make_run(tmp_path, *argv, batch_size=60)  # 3 steps an epoch, and no more 6
    train_epoch(second)
    start_epoch(second)
    make_step(second, [1.0])
    second.save("last.pt")
    end(second)
    third = make_run(tmp_path, "--resume", "auto", batch_size=60)
    start_epoch(third)
    for _ in range(2):
        make_step(third, [1.0])
    end_epoch(third)
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    lines = [line for line in map(json.loads, text.splitlines()) if line["event"] == "train"]
    steps = [(epoch, step, 6) for epoch in (0, 1) for step in range(6)]
    steps += [(epoch, step, 3) for epoch in (2, 3) for step in range(3)]
    found = [(line["epoch"], line["step"] - 1) for line in lines]
    assert found == [(epoch, step) for epoch, step, _ in steps]
    args = make_args("single", "--epochs", "4", "--warmup-epochs", "0")
    rates = [0.1 * factor_of(args, epoch * n + step, n) for epoch, step, n in steps]
    assert [line["lr"] for line in lines] == pytest.approx(rates, rel=1e-12)


def train_epoch(run):
    start_epoch(run)
    for _ in range(run.sampler.steps_per_epoch):
        make_step(run, [1.0])
    end_epoch(run)


def test_harmless_changes_are_accepted(finished, tmp_path):
    changes = "--workers 1 --log-every 3 --epochs 6 --save-every 2 --keep-every 1 --timeout 60"
    resume = ("--channels-last", "--resume", finished.folder / "last.pt")
    result = train("single", 1, *SMALL, *changes.split(), *resume, folder=tmp_path)
    assert result.code == 0, result.err
    assert result.checkpoint()["global_step"] == 36
    args = make_args("single", *SMALL, "--epochs", "6")
    rates = [0.1 * factor_of(args, line["global_step"] - 1, 6) for line in result.train_lines()]
    assert [line["lr"] for line in result.train_lines()] == pytest.approx(rates, rel=1e-12)
    assert len(rates) == 4, "all of them of the longer schedule"


def test_checkpoint_that_does_not_fit_leaves_the_files_as_they_were(tmp_path, handlers):
    """Without a check before the run, or when the task has changed since."""
    run = make_run(tmp_path, "--log-every", "1", "--keep-every", "1")
    end_epoch(run)  # it is the best
    start_epoch(run)
    make_step(run, [1.0])
    run.save("early.pt")
    make_step(run, [2.0])
    run.save("last.pt")
    folder = run.files.directory
    end(run)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for other in (tmp_path, tmp_path / "other"):
        with pytest.raises(common.UsageError, match="does not fit the model or the optimizer"):
            make_run(other, "--resume", folder / "early.pt", net=nn.Linear(3, 2).double())
    assert not list((tmp_path / "other").rglob("*.pt")), "it would be in the way of the next try"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    make_run(tmp_path, "--resume", folder / "early.pt")
    assert (folder / "last.pt").read_bytes() != before["last.pt"], "one that fits takes its place"


def change_task(name, change, rank):
    """Let `change(what the task's method returned)` take its place. Bind all but the rank."""
    wrap_in_task(name, lambda original: change(original()))


def fewer_samples(datasets):
    datasets[0].targets = datasets[0].targets[:-1]
    return datasets


def fewer_evaluated(datasets):
    datasets[1].targets = datasets[1].targets[:-1]
    return datasets


def renamed_classes(datasets):
    for dataset in datasets:
        dataset.classes = ["null", *dataset.classes[1:]]
    return datasets


def another_model(model):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "build_datasets",
            fewer_samples,
            "training samples: 203 in the run of this file, and 202 now; that is other data",
        ),
        ("build_datasets", renamed_classes, "classes: ['0', '1', "),
        ("build_net", another_model, "does not fit the model or the optimizer"),
    ],
    ids=["samples", "classes", "model"],
)
def test_checkpoint_of_other_data_or_another_model_is_refused(name, change, message, tmp_path):
    argv = (*SMALL, "--epochs", "1")
    assert train("single", 1, *argv, folder=tmp_path).code == 0
    patch = functools.partial(change_task, name, change)
    resumed = train("ddp", 2, *argv, "--resume", "auto", folder=tmp_path, patch=patch)
    assert resumed.code == 2 and message in resumed.err and "Traceback" not in resumed.err
    assert len(resumed.err.splitlines()) == 1, "rank 0 speaks for all"


def test_evaluation_of_other_data_needs_the_same_classes(tmp_path):
    assert train("single", 1, *SMALL, "--epochs", "1", folder=tmp_path).code == 0
    argv = ("--eval-only", "--resume", "auto")
    patch = functools.partial(change_task, "build_datasets", renamed_classes)
    refused = train("single", 1, *argv, folder=tmp_path, patch=patch)
    assert refused.code == 2 and "classes: " in refused.err, refused.err
    patch = functools.partial(change_task, "build_datasets", fewer_evaluated)
    other = train("single", 1, *argv, folder=tmp_path, patch=patch)
    assert other.code == 0 and "(56 samples)" in other.out, other.err
    assert "warning: other hashes of evaluation samples than in" in other.out


def test_resume_auto_does_not_replace_a_run_of_which_only_the_best_is_left(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "best.pt").write_text("a run of days")
    with pytest.raises(common.UsageError, match=r"--resume auto: no last.pt in .*, but best.pt"):
        make_run(tmp_path, "--resume", "auto")


def test_checkpoint_of_another_format_is_refused(tmp_path):
    torch.save({"format": common.FORMAT + 1}, tmp_path / "later.pt")
    with pytest.raises(
        common.UsageError, match=f"not a checkpoint of this program .format {common.FORMAT}"
    ):
        common.load_checkpoint(tmp_path / "later.pt")


# ------------------------------------------------------------------------------ memory of a resume


def large_state():
    torch.manual_seed(0)
    net = nn.Linear(4096, 3840)  # 60 MiB; adamw holds twice as much
    args = make_args("single", "--optimizer", "adamw")
    optimizer = optimizer_of(args, net)
    guard, average = guard_of(args, CPU, net), average_of(args, net)
    return common.State(net, optimizer, scheduler_of(args, optimizer, 1), guard, average)


def save_large_state(path):
    state = large_state()
    state.net(torch.ones(1, 4096)).sum().backward()
    state.optimizer.step()
    common.save_checkpoint(state.checkpoint(), path)


def restore_large_state(path):
    state = large_state()
    before = anonymous_memory()
    checkpoint = common.load_checkpoint(path)
    state.restore(checkpoint)
    print("grown", anonymous_memory() - before)
    checkpoint.clear()


def anonymous_memory():
    """Return how many MiB of this process are in no file."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s*(\d+) kB", text)[1]) / 1024


def test_checkpoint_is_read_in_place(tmp_path):
    """A resume needs memory for what the optimizer keeps, and none for the file."""
    path = tmp_path / "last.pt"
    in_process(functools.partial(save_large_state, path))
    out = in_process(functools.partial(restore_large_state, path))
    (grown,) = printed(out, "grown")
    assert path.stat().st_size > 3 * 60 * 2**20 and 110 < grown < 140, grown


# ------------------------------------------------------------------------------ the folder of a run


def test_going_back_to_an_older_checkpoint_is_going_back(tmp_path):
    """Killed before its first save, the run must not go on from the later last.pt of before, up to which the log is gone."""
    argv = (*EVERYTHING, "--keep-every", "1")
    straight = train("single", 1, *argv, folder=tmp_path)
    before = without_speed(straight.lines)
    kept = tmp_path / "run" / "epoch-0001.pt"
    patch = functools.partial(call_in_task, "per_sample_loss", 2, functools.partial(os._exit, 9))
    killed = train("single", 1, *argv, "--resume", kept, folder=tmp_path, patch=patch)
    assert killed.code == 9
    resumed = train("single", 1, *argv, "--resume", "auto", folder=tmp_path)
    assert "resumed at epoch 2, step 0" in resumed.out
    assert without_speed(resumed.lines) == before
