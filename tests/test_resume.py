"""A resumed run is the run that it resumes, bitwise; another run is refused; what the folder of a run holds by then."""

import functools
import os

import pytest
import torch
from harness import (
    TASKS,
    deviation,
    factor_of,
    prove,
    single_run,
    train,
    undisturbed,
    walk,
)
from patches import BASE, call_in_task, stop_after, without_speed, wrap_in_task
from runs import end, end_epoch, make_run, make_step, start_epoch
from short_runs import EVERYTHING, SMALL
from torch import nn

import common
import machinery.cli
import machinery.process
import machinery.run

ALL = (*EVERYTHING, "--average", "ema")  # dropout and BatchNorm too
RUNS = [("single", 1, 9), ("ddp", 2, 9), ("fsdp", 2, 9)]
RUNS += [
    pytest.param(*run, marks=pytest.mark.full)
    for run in (("single", 1, 6), ("dp", 2, 6), ("ddp", 3, 1), ("spawn", 3, 9))
]


@pytest.mark.parametrize(("mode", "n", "step"), RUNS)
def test_interrupted_and_resumed_run_is_bitwise_the_uninterrupted_one(mode, n, step, tmp_path):
    straight = undisturbed(mode, n, *ALL)
    stop = functools.partial(stop_after, step)
    stopped = train(mode, n, *ALL, folder=tmp_path / "resumed", patch=stop)
    assert stopped.code == 143, stopped.err
    assert step <= stopped.checkpoint()["global_step"] <= step + 2, (
        "the boundary that all ranks agree on comes at most a step later"
    )
    resumed = train(mode, n, *ALL, "--resume", "auto", folder=tmp_path / "resumed")
    assert resumed.code == 0, resumed.err
    worst = 0.0
    for part in ("model", "optimizer", "average"):
        pairs = list(zip(walk(straight.checkpoint()[part]), walk(resumed.checkpoint()[part])))
        assert len(pairs) > 8
        tensors = [pair for pair in pairs if isinstance(pair[0], torch.Tensor)]
        worst = max(worst, *((a - b).abs().max().item() for a, b in tensors if a.numel()))
        assert all(torch.equal(a, b) for a, b in tensors)
        assert all(isinstance(a, (dict, torch.Tensor)) or a == b for a, b in pairs)
    prove("resumed run, same world size", "uninterrupted run", worst, 0)
    assert without_speed(resumed.lines) == without_speed(straight.lines), (
        "each line once, and the same"
    )


@pytest.mark.parametrize(
    ("mode", "n"),
    [
        ("single", 1),
        *(pytest.param(*o, marks=pytest.mark.full) for o in (("dp", 2), ("spawn", 4))),
    ],
)
def test_run_goes_on_in_another_mode_and_at_another_world_size(mode, n, tmp_path):
    stopped = train("ddp", 2, *BASE, folder=tmp_path, patch=functools.partial(stop_after, 8))
    assert stopped.code == 143 and stopped.checkpoint()["global_step"] == 9
    straight = single_run(*BASE).checkpoint()["model"]
    assert deviation(stopped.checkpoint()["model"], straight) > 1e-3
    resumed = train(mode, n, *BASE, "--resume", "auto", folder=tmp_path)
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
    assert find(folder, None) == (None, None)
    path, found = find(folder, "auto")
    assert found["global_step"] == 1 and path == folder / "last.pt"
    assert find(tmp_path / "empty", "auto") == (None, None)


# ---------------------------------------------------------------------- the same run or another one


@pytest.mark.parametrize("change", ["--seed 1", "--dtype float64", "--task TASKS/everything.py"])
def test_changed_option_that_would_change_the_run_is_refused_by_name(change, finished, tmp_path):
    option, *value = change.replace("TASKS", str(TASKS)).split()
    resume = ("--resume", finished.folder / "last.pt")
    result = train("single", 1, *SMALL, option, *value, *resume, folder=tmp_path)
    assert result.code == 2 and result.err.count("\n") == 1
    assert f"error: {option} " in result.err and "was made with" in result.err


@pytest.mark.parametrize("option", ["--batch-size 29", "--accum-steps 2", "--balanced"])
def test_batches_that_are_cut_otherwise_are_refused_within_an_epoch(option, tmp_path, handlers):
    """The samples that are left of the epoch would be others."""
    run = make_run(tmp_path)
    start_epoch(run)
    make_step(run, [1.0])
    run.save("last.pt")
    end(run)
    with pytest.raises(common.UsageError, match=option):
        make_run(tmp_path, "--resume", "auto", *option.split())


def test_harmless_changes_are_accepted(finished, tmp_path):
    changes = "--workers 1 --log-every 3 --epochs 6 --save-every 2 --keep-every 1 --timeout 60"
    resume = ("--channels-last", "--resume", finished.folder / "last.pt")
    result = train("single", 1, *SMALL, *changes.split(), *resume, folder=tmp_path)
    assert result.code == 0, result.err
    assert result.checkpoint()["global_step"] == 36


def test_more_epochs_follow_the_longer_schedule_from_the_first_step(finished, tmp_path):
    longer = train(
        "single",
        1,
        *SMALL,
        *"--epochs 6 --log-every 1 --resume".split(),
        finished.folder / "last.pt",
        folder=tmp_path,
    )
    args = machinery.cli.parse_args("single", [*SMALL, "--epochs", "6"])
    expected = [0.1 * factor_of(args, step, 6) for step in range(24, 36)]
    assert [line["lr"] for line in longer.train_lines()] == pytest.approx(expected, rel=1e-12)


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
    machinery.process.at_end.close()  # its lock
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for other in (tmp_path, tmp_path / "other"):
        with pytest.raises(common.UsageError, match="does not fit the model or the optimizer"):
            make_run(other, "--resume", folder / "early.pt", net=nn.Linear(3, 2).double())
        machinery.process.at_end.close()
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


NAMES_ITS_SET = f"""
import sys
sys.path.append({str(TASKS)!r})
import small
from small import *
def add_options(parser):
    parser.add_argument("--part", type=int, default=57).may_change = True
def build_datasets(args):
    train_set, val_set = small.build_datasets(args)
    val_set.targets = val_set.targets[: args.part]
    return train_set, val_set
"""


def test_evaluation_of_other_data_is_refused_unless_an_option_names_them(tmp_path):
    (tmp_path / "task.py").write_text(NAMES_ITS_SET)
    argv = (*SMALL, "--epochs", "1", "--task", tmp_path / "task.py")
    assert train("single", 1, *argv, folder=tmp_path).code == 0
    argv = (*argv, "--eval-only", "--resume", "auto")
    for change, words in ((renamed_classes, "classes: "), (fewer_evaluated, "evaluation samples")):
        patch = functools.partial(change_task, "build_datasets", change)
        refused = train("single", 1, *argv, folder=tmp_path, patch=patch)
        assert refused.code == 2 and words in refused.err, refused.err
    other = train("single", 1, *argv, "--part", "40", folder=tmp_path)
    assert other.code == 0 and "(40 samples)" in other.out, other.err
    patch = functools.partial(change_task, "build_datasets", renamed_classes)
    refused = train("single", 1, *argv, "--part", "40", folder=tmp_path, patch=patch)
    assert refused.code == 2 and "classes: " in refused.err


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


# ------------------------------------------------------------------------------ the folder of a run


def test_going_back_to_an_older_checkpoint_is_going_back(tmp_path):
    """Killed before its first save, the run must not go on from the later last.pt of before, up to which the log is gone."""
    argv = (*EVERYTHING, "--keep-every", "1")
    straight = train("single", 1, *argv, folder=tmp_path)
    kept = tmp_path / "run" / "epoch-0001.pt"
    patch = functools.partial(call_in_task, "per_sample_loss", 2, functools.partial(os._exit, 9))
    before = without_speed(straight.lines)
    killed = train("single", 1, *argv, "--resume", kept, folder=tmp_path, patch=patch)
    assert killed.code == 9
    resumed = train("single", 1, *argv, "--resume", "auto", folder=tmp_path)
    assert "resumed at epoch 2, step 0" in resumed.out and without_speed(resumed.lines) == before
