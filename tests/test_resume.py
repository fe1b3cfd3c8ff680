"""A resumed run is the run that it resumes, bitwise; another run is refused; what the folder of a run holds by then."""

import functools
import os
import shutil

import pytest
import torch
from harness import (
    TASKS,
    factor_of,
    make_args,
    single_run,
    train,
    undisturbed,
    walk,
)
from patches import BASE, call_in_task, stop_after, without_speed, wrap_in_task
from runs import make_run, make_step, start_epoch
from short_runs import EVERYTHING, SMALL
from torch import nn

import common
import machinery.cli
import machinery.launch
import machinery.process
import machinery.run
import machinery.usertask


@pytest.mark.parametrize("step", [*(pytest.param(s, marks=pytest.mark.long) for s in (1, 5)), 6, 9])
@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("dp", 2), ("ddp", 2), ("spawn", 3)])
def test_interrupted_and_resumed_run_is_bitwise_the_uninterrupted_one(mode, n, step, tmp_path):
    argv = (
        *SMALL,
        "--task",
        TASKS / "everything.py",
        "--average",
        "ema",
    )  # dropout and BatchNorm too
    straight = undisturbed(mode, n, *argv)
    stopped = train(
        mode, n, *argv, folder=tmp_path / "resumed", patch=functools.partial(stop_after, step)
    )
    assert stopped.code == 143, stopped.err
    assert step <= stopped.checkpoint()["global_step"] <= step + 2, (
        "the boundary that all ranks agree on comes at most a step later"
    )
    resumed = train(mode, n, *argv, "--resume", "auto", folder=tmp_path / "resumed")
    assert resumed.code == 0, resumed.err
    for part in ("model", "optimizer", "average"):
        pairs = list(zip(walk(straight.checkpoint()[part]), walk(resumed.checkpoint()[part])))
        assert len(pairs) > 8
        assert all(
            torch.equal(a, b) if isinstance(a, torch.Tensor) else isinstance(a, dict) or a == b
            for a, b in pairs
        )
    assert without_speed(resumed.lines) == without_speed(straight.lines), (
        "each line once, and the same"
    )


def test_loss_scale_of_fp16_goes_on_at_resume(tmp_path):
    argv = (*BASE, "--dtype", "float32", "--amp", "fp16", "--epochs", "2")
    straight = single_run(*argv)
    stopped = train("single", 1, *argv, folder=tmp_path, patch=functools.partial(stop_after, 5))
    assert stopped.code == 143
    resumed = train("single", 1, *argv, "--resume", "auto", folder=tmp_path)
    assert resumed.checkpoint()["scaler"] == straight.checkpoint()["scaler"]
    assert resumed.checkpoint()["scaler"]["_growth_tracker"] > 0
    assert all(
        tensor.equal(straight.checkpoint()["model"][name])
        for name, tensor in resumed.checkpoint()["model"].items()
    )


def test_restarted_process_goes_on_or_begins_anew(tmp_path, monkeypatch):
    """What a launcher starts again goes on without --resume, in the directory of the first attempt."""
    result = train("single", 1, *BASE, "--epochs", "1", folder=tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    find = machinery.run.find_checkpoint
    path, found = find(
        make_args("ddp", *BASE, "--epochs", "1", "--output-dir", str(result.folder)), 203
    )
    assert found["global_step"] == 6 and path == result.folder / "last.pt"
    assert find(make_args("ddp", *BASE, "--output-dir", str(tmp_path / "empty")), 203) == (
        None,
        None,
    )
    shutil.copytree(
        result.folder, tmp_path / "best alone", ignore=shutil.ignore_patterns("last.pt")
    )
    with pytest.raises(
        common.UsageError, match=r"no last\.pt in .*best alone, but best\.pt"
    ):  # which a new run would overwrite
        find(make_args("ddp", *BASE, "--output-dir", str(tmp_path / "best alone")), 203)
    started_from = ("--resume", str(tmp_path / "best alone" / "best.pt"))
    argv = (*BASE, "--epochs", "1", *started_from, "--output-dir", str(result.folder))
    assert find(make_args("ddp", *argv), 203)[0] == result.folder / "last.pt", "which is later"
    looked = find(make_args("ddp", *argv, "--eval-only"), 203)[0]
    assert looked == tmp_path / "best alone" / "best.pt", "an evaluation is of the file it names"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun without --rdzv-id
    with pytest.raises(common.UsageError, match="--output-dir is needed for torchrun"):
        find(make_args("ddp", *BASE), 203)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    shutil.copytree(result.folder, machinery.run.output_directory(make_args("ddp", *BASE)))
    path, found = find(make_args("ddp", *BASE), 203)
    assert found["global_step"] == 6 and path.parts[-3:] == ("runs", "pit_models-one", "last.pt")


# ---------------------------------------------------------------------- the same run or another one


REFUSED = [
    "--seed 1",
    "--batch-size 29",
    "--lr 0.2",
    "--schedule constant",
    "--optimizer adamw",
    "--average ema",
    "--dataset synthetic",
]
REFUSED += [
    "--label-smoothing 0",
    "--accum-steps 2",
    "--clip-grad-norm 1",
    "--weight-decay 0",
    "--dtype float64",
    "--task TASKS/everything.py",
    "--balanced",
]


@pytest.mark.parametrize("change", REFUSED)
def test_changed_option_that_would_change_the_run_is_refused_by_name(change, finished, tmp_path):
    option, *value = change.replace("TASKS", str(TASKS)).split()
    result = train(
        "single",
        1,
        *SMALL,
        option,
        *value,
        "--resume",
        finished.folder / "last.pt",
        folder=tmp_path,
    )
    assert result.code == 2
    assert (
        f"error: {option} " in result.err
        and "was made with" in result.err
        and result.err.count("\n") == 1
    )


ACCEPTED = [
    "--workers 1",
    "--log-every 3",
    "--epochs 6",
    "--save-every 2",
    "--keep-every 1",
    "--timeout 60",
    "--channels-last",
]


@pytest.mark.parametrize("change", ACCEPTED)
def test_harmless_change_is_accepted(change, finished, tmp_path):
    result = train(
        "single",
        1,
        *SMALL,
        *change.split(),
        "--resume",
        finished.folder / "last.pt",
        folder=tmp_path,
    )
    assert result.code == 0, result.err
    assert (
        result.checkpoint()["global_step"] == (36 if "epochs 6" in change else 24)
        if (tmp_path / "run" / "last.pt").exists()
        else True
    )


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
    start_epoch(run)
    make_step(run, [1.0])
    run.save("early.pt")
    make_step(run, [2.0])
    run.save("last.pt")
    folder = run.files.directory
    machinery.process.at_end.close()  # its lock
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(common.UsageError, match="does not fit the model or the optimizer"):
        make_run(tmp_path, "--resume", folder / "early.pt", net=nn.Linear(3, 2).double())
    machinery.process.at_end.close()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    make_run(tmp_path, "--resume", folder / "early.pt")
    assert (folder / "last.pt").read_bytes() != before["last.pt"], "one that fits takes its place"


def test_checkpoint_lacks_nothing(tmp_path, handlers):
    """A file without one of its parts is refused by name."""
    run = make_run(tmp_path)
    run.save("last.pt")
    whole = torch.load(run.files.directory / "last.pt", weights_only=True)
    names = ["model", "optimizer", "scheduler", "scaler", "average", "log", "config"]
    names += ["epoch", "step", "global_step", "samples", "classes"]
    assert set(names) | {"format", "best"} == whole.keys()
    path = tmp_path / "changed.pt"
    for name in names:
        torch.save({key: value for key, value in whole.items() if key != name}, path)
        with pytest.raises(common.UsageError, match=f"of this program: {name} missing"):
            common.load_checkpoint(path)


def change_task(name, change, rank):
    """Let `change(what the task's function returned)` take its place. Bind all but the rank."""
    wrap_in_task(name, lambda original, args: change(original(args), args))


def fewer_samples(datasets, args):
    datasets[0].targets = datasets[0].targets[:-1]
    return datasets


def another_model(model, args):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "build_datasets",
            fewer_samples,
            "the training set had 1437 samples, and has 1436 now; that would be another run",
        ),
        ("build_model", another_model, "does not fit the model or the optimizer"),
    ],
)
def test_checkpoint_of_other_data_or_another_model_is_refused(name, change, message, tmp_path):
    argv = ["--batch-size", "500", "--epochs", "1"]
    assert train("single", 1, *argv, folder=tmp_path).code == 0
    for mode, n in (("single", 1), ("ddp", 2)):
        resumed = train(
            mode,
            n,
            *argv,
            "--resume",
            "auto",
            folder=tmp_path,
            patch=functools.partial(change_task, name, change),
        )
        assert resumed.code == 2 and message in resumed.err and "Traceback" not in resumed.err
        assert len(resumed.err.splitlines()) == 1, "rank 0 speaks for all"


def test_checkpoint_of_another_format_is_refused(tmp_path):
    torch.save({"format": common.FORMAT + 1}, tmp_path / "later.pt")
    with pytest.raises(
        common.UsageError, match=f"not a checkpoint of this program .format {common.FORMAT}"
    ):
        common.load_checkpoint(tmp_path / "later.pt")


# ------------------------------------------------------------------------------ the folder of a run


def test_going_back_to_an_older_checkpoint_is_going_back(tmp_path):
    """Killed before its first save, the run must not go on from the later last.pt of before, up to which the log is gone."""
    straight = train("single", 1, *EVERYTHING, "--keep-every", "1", folder=tmp_path)
    kept = tmp_path / "run" / "epoch-0001.pt"
    patch = functools.partial(call_in_task, "per_sample_loss", 2, functools.partial(os._exit, 9))
    before = without_speed(straight.lines)
    assert (
        train(
            "single",
            1,
            *EVERYTHING,
            "--keep-every",
            "1",
            "--resume",
            kept,
            folder=tmp_path,
            patch=patch,
        ).code
        == 9
    )
    resumed = train(
        "single", 1, *EVERYTHING, "--keep-every", "1", "--resume", "auto", folder=tmp_path
    )
    assert "resumed at epoch 2, step 0" in resumed.out and without_speed(resumed.lines) == before
