"""The faults of tests/campaigns/faults.py in short, and that the campaign itself notices a loss."""

import functools
import itertools
import os
import shutil
import signal

import faults
import pytest
import torch
from harness import TASKS, single_run, train
from patches import Patches, set_environment, stop_after, without_speed

import common

SMALL = ("--task", TASKS / "faulty.py", "--epochs", "3", "--batch-size", "30", "--save-every", "4")
SMALL += ("--average", "ema", "--dtype", "float64", "--log-every", "1")


def kill_at_call(number, rank):
    """SIGKILL just before the number-th of the system calls of which a save is made."""
    calls = itertools.count(1)
    for name in ("fsync", "replace"):
        original = getattr(os, name)

        def call(*arguments, original=original):
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments)

        setattr(os, name, call)


def assert_same(result, reference):
    """Both runs left the same, to the bit."""
    assert result.code == 0, result.err
    for name in ("last.pt", "best.pt"):
        ours, theirs = result.checkpoint(name), reference.checkpoint(name)
        for part in theirs.keys() - {"config"}:
            assert not list(faults.differences(ours[part], theirs[part], part))
    assert without_speed(result.lines) == without_speed(reference.lines)
    assert not list(result.folder.glob(".*"))


# Before the first file is whole; as a new last.pt comes into its place after an evaluation.
@pytest.mark.parametrize("number", [2, 14])
def test_killed_within_a_save(number, tmp_path):
    patch = functools.partial(kill_at_call, number)
    killed = train("single", 1, *SMALL, folder=tmp_path, patch=patch)
    assert killed.code == -signal.SIGKILL
    files = [common.load_checkpoint(path)["global_step"] for path in killed.folder.glob("*.pt")]
    assert len(files) == (0 if number == 2 else 2), files
    assert_same(train("single", 1, *SMALL, "--resume", "auto", folder=tmp_path), single_run(*SMALL))


@pytest.mark.full
def test_a_step_that_is_skipped_is_skipped_again(tmp_path):
    values = {"FAULT": "NaN input", "FAULT_AT": faults.sample_at(1, 60)}  # third batch, rank 0
    patch = functools.partial(set_environment, values)
    straight = train("ddp", 2, *SMALL, folder=tmp_path / "straight", patch=patch)
    assert sum(line["skipped"] for line in straight.train_lines()) == 1
    assert straight.checkpoint()["epoch"] == 3, "BatchNorm's statistics are finite, or no save"
    both = Patches(patch, functools.partial(stop_after, 9))
    assert train("ddp", 2, *SMALL, folder=tmp_path, patch=both).code == 143
    assert_same(train("ddp", 2, *SMALL, "--resume", "auto", folder=tmp_path, patch=patch), straight)


def test_a_difference_is_a_loss(tmp_path):
    """One bit of a weight differs; the campaign itself must say so."""
    trial = faults.Trial(faults.Campaign(0, tmp_path), 0, faults.FAULTS[0])
    reference = tmp_path / "reference"
    for folder in (trial.output, reference):
        folder.parent.mkdir(exist_ok=True)
        shutil.copytree(single_run(*SMALL).folder, folder)
    trial.reference = faults.Reference(reference, 1.0, 12)
    trial.compare()
    checkpoint = torch.load(trial.output / "last.pt", weights_only=True)
    checkpoint["model"]["1.weight"].view(torch.int64)[0] += 1
    torch.save(checkpoint, trial.output / "last.pt")
    with pytest.raises(faults.Lost, match=r"last.pt differs .*: model.1.weight"):
        trial.compare()
