"""The files of a checkpoint: what is in them, in which order they appear, and that writing one never loses one."""

import errno
import functools
import itertools
import os
import random
import re
import shutil
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import differences
from harness import ROOT, deviation, train, undisturbed, walk
from patches import BASE, without_speed
from runs import assert_same_log, end_epoch, make_run
from short_runs import EVERYTHING, ODD, SMALL

import common
import machinery.run

pytestmark = pytest.mark.usefixtures("handlers")

# -------------------------------------------------------------------------------- what is in a file


KEYS = {
    *"format weights model average optimizer scheduler scaler epoch step global_step best".split()
}
KEYS |= {"config", "data"}


@pytest.mark.parametrize(
    ("mode", "n"),
    [("ddp", 2), *(pytest.param(*run, marks=pytest.mark.full) for run in (("dp", 2), ("fsdp", 2)))],
)
def test_keys_are_those_of_the_format_and_values_are_plain(mode, n, tmp_path):
    argv = (*SMALL, "--epochs", "1", "--average", "ema")
    saved = train(mode, n, *argv, folder=tmp_path).checkpoint()
    assert saved.keys() == KEYS
    known = {dict, list, tuple, str, int, float, bool, type(None), torch.Tensor}
    assert {type(value) for value in walk(saved)} <= known | {type(saved["model"])}
    layers = ("conv1", "conv2", "conv3", "head")
    names = [f"{layer}.{name}" for layer in layers for name in ("weight", "bias")]
    assert list(saved["model"]) == names, "neither module. nor _orig_mod."
    assert saved["average"].keys() == {"tensors", "n_averaged"}
    assert saved["average"]["n_averaged"] == 6
    assert {*saved["average"]["tensors"]} == {*saved["optimizer"]["state"]} == {*names}
    assert list(saved["weights"]) == names
    assert all(saved["weights"][n].equal(saved["average"]["tensors"][n]) for n in names)
    assert (saved["epoch"], saved["step"], saved["global_step"]) == (1, 0, 6)


@pytest.mark.parametrize(
    ("dtype", "average"),
    [("float32", "ema"), pytest.param("float64", "none", marks=pytest.mark.full)],
)
def test_lines_of_the_page_read_digits_as_the_run_did(dtype, average, tmp_path):
    argv = ("--epochs", "2", "--average", average, "--dtype", dtype)
    result = train("single", 1, *argv, folder=tmp_path)
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    (code,) = re.findall(r"```python\n(import argparse.*?)```", page, re.DOTALL)
    changes = {"runs/mine": str(result.folder), "data/digits.npz": str(ROOT / "data/digits.npz")}
    changes |= {"[1500:1504]": "[1437:]", "print(": "guesses = ("}  # all that are held out
    for old, new in changes.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    names = {}
    exec(textwrap.dedent(code), names)
    with np.load(ROOT / "data" / "digits.npz") as file:
        labels = file["labels"][1437:]
    guesses = names["guesses"].numpy()
    best = max(line["top1"] for line in result.eval_lines())
    assert (guesses == labels).mean() == pytest.approx(best) and best > 0.5


# ----------------------------------------------------------------------------------------- one file


def test_damaged_file_is_named_and_the_run_goes_on_from_another_one(finished, tmp_path):
    shutil.copytree(finished.folder, tmp_path / "run")
    path = tmp_path / "run" / "last.pt"
    path.write_bytes(path.read_bytes()[:-1000])
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    for resume, folder in ((path, tmp_path / "other"), ("auto", tmp_path)):
        refused = train("single", 1, *SMALL, "--resume", resume, folder=folder)
        assert refused.code == 2 and not refused.out
        assert f"--resume {path}: damaged, or no file of tensors" in refused.err
        assert refused.err.endswith("; name another file\n") and refused.err.count("\n") == 1
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before
    kept = path.with_name("epoch-0003.pt")
    resumed = train("single", 1, *SMALL, "--resume", kept, folder=tmp_path)
    assert resumed.code == 0, resumed.err
    assert deviation(resumed.checkpoint()["model"], finished.checkpoint()["model"]) == 0
    assert without_speed(resumed.lines) == without_speed(finished.lines)


def test_damage_anywhere_in_a_file_is_seen_or_does_no_harm(run):
    """The end is cut off, or one bit is flipped."""
    run.save("last.pt")
    path = run.files.directory / "last.pt"
    content, wanted = path.read_bytes(), common.load_checkpoint(path)
    rng, refused = random.Random(0), 0
    for _ in range(300):
        place = rng.randrange(len(content))
        flipped = bytearray(content)
        flipped[place] ^= 1 << rng.randrange(8)
        path.write_bytes(rng.choice([content[:place], flipped]))
        try:
            found = common.load_checkpoint(path)
        except common.UsageError as error:
            refused += 1
            assert "last.pt: damaged, or no file of tensors" in str(error)
        else:
            assert not differences(found, wanted, "")
    assert 200 < refused < 300


# --------------------------------------------------------------------- never a file of a ruined run


def poison_in_epoch_2(part, rank):
    end_epoch = machinery.run.Run.end_epoch

    def poison(run, metrics):
        if run.state.epoch == 2:
            state = run.state
            tensors = state.average.tensors if part == "average" else state.net.state_dict()
            tensors["first.weight"][0] = float("nan")
        end_epoch(run, metrics)

    machinery.run.Run.end_epoch = poison


@pytest.mark.parametrize("part", ["average", pytest.param("net", marks=pytest.mark.full)])
def test_non_finite_average_never_reaches_a_file(part, tmp_path):
    """Nor do weights whose average is finite: both stand under the same names."""
    patch = functools.partial(poison_in_epoch_2, part)
    result = train(
        "single", 1, *BASE, "--epochs", "2", "--average", "ema", folder=tmp_path, patch=patch
    )
    assert (
        "not saved, the last good checkpoint stays: non-finite values in first.weight" in result.err
    )
    assert result.code == 3
    assert result.checkpoint()["epoch"] == 1


def test_what_became_non_finite_is_never_saved_and_the_run_does_not_end_well(tmp_path):
    """A parameter that nothing trains, and in which a value becomes NaN."""
    result = train("ddp", 2, *ODD, "--model", "ruined", folder=tmp_path)
    assert result.code == 3 and "non-finite values in ruined" in result.err
    assert not list(result.folder.glob("*.pt"))


def step_in(path):
    """Return the global step in a checkpoint; None if it is not whole."""
    try:
        return torch.load(path, weights_only=True)["global_step"]
    except Exception:
        return None


# ------------------------------------------------------------------------ several files in one save


def test_files_of_a_save_are_on_the_disk_before_they_appear(run, monkeypatch):
    """What survives a power cut: first the log; then each file and its name, and last.pt last."""
    calls, fsync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        calls.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def appears(source, target):
        calls.append((step_in(source), target.name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", appears)
    end_epoch(run, top1=0.75)
    names = ["best.pt", "epoch-0002.pt", "last.pt"]
    each = [((12, name), ("fsync", "run")) for name in names]
    first = [("fsync", "metrics.jsonl"), ("fsync", ".best.pt.tmp")]
    assert calls == [*first, *itertools.chain(*each)]
    assert not list(run.files.directory.glob(".*")), "no temporary file stays"


@pytest.mark.parametrize("failing", ["best.pt", "last.pt"])
def test_failed_save_leaves_the_last_checkpoint(failing, run, monkeypatch):
    run.state.global_step = 7
    run.save("last.pt")
    run.state.global_step = 12
    replace = os.replace

    def full(source, target):
        if Path(target).name == failing:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        OSError, match=f"{failing} could not be written .is the disk full.*No space left"
    ):
        end_epoch(run, top1=0.75)
    assert step_in(run.files.directory / "last.pt") == 7
    assert not list(run.files.directory.glob(".*")), "what was begun is gone"


def test_file_system_without_locks_and_syncs_of_directories_will_do(tmp_path, monkeypatch, capsys):
    """Lustre without flock, NFS without lockd, some of FUSE."""
    fsync = os.fsync

    def lacks(descriptor, *_):
        if _ or os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSYS, "Function not implemented")
        fsync(descriptor)

    monkeypatch.setattr("fcntl.lockf", lacks)
    monkeypatch.setattr(os, "fsync", lacks)
    run = make_run(tmp_path)
    run.save("last.pt")
    assert step_in(run.files.directory / "last.pt") == 0
    assert capsys.readouterr().err.count("cannot be locked: Function not implemented") == 1


@pytest.mark.parametrize("links", [True, False])
def test_names_of_one_save_have_one_content(links, run, monkeypatch):
    """It is on the disk once, unless the file system has no links; the next save changes the files of no other name."""
    synced, fsync, link = [], os.fsync, os.link

    def noted(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def linked(*arguments):
        if not links:
            raise OSError(errno.EPERM, "Operation not permitted")
        link(*arguments)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "link", linked)
    end_epoch(run, top1=0.75)
    names = ("best.pt", "epoch-0002.pt", "last.pt")
    contents = [(run.files.directory / name).read_bytes() for name in names]
    assert contents[0] == contents[1] == contents[2]
    written = [name for name in synced if name.endswith(".tmp")]
    assert written == [f".{name}.tmp" for name in (names[:1] if links else names)]
    run.state.global_step = 13
    run.save("last.pt")
    assert [step_in(run.files.directory / name) for name in names] == [12, 12, 13]


def test_what_a_kill_has_left_spoils_no_file(run):
    """A run may die between the link under a temporary name and its last name: the next save must not write into that file."""
    end_epoch(run, top1=0.75)
    folder = run.files.directory
    before = (folder / "best.pt").read_bytes()
    os.link(folder / "best.pt", folder / ".last.pt.tmp")
    run.state.global_step = 13
    run.save("last.pt")
    assert (folder / "best.pt").read_bytes() == before
    assert step_in(folder / "last.pt") == 13


# ------------------------------------------------------------------- a save that the run cannot make

EVERY = (*EVERYTHING, "--save-every", "2", "--average", "ema")


def full_from_second_save(rank):
    replace, calls = os.replace, itertools.count(1)

    def full(*arguments):
        if next(calls) > 1:
            raise OSError(28, "No space left on device")
        replace(*arguments)

    os.replace = full


def test_run_goes_on_from_the_save_before_the_broken_one(tmp_path):
    ended = train("ddp", 2, *EVERY, folder=tmp_path, patch=full_from_second_save)
    assert ended.code == 1 and "last.pt could not be written (is the disk full?)" in ended.err
    assert "No space left" in ended.err.splitlines()[-1]
    assert ended.checkpoint()["global_step"] == 2
    resumed = train("ddp", 2, *EVERY, "--resume", "auto", folder=tmp_path)
    assert resumed.code == 0 and "resumed at epoch 1, step 2" in resumed.out, resumed.err
    reference = undisturbed("ddp", 2, *EVERY)
    for name in ("last.pt", "best.pt"):
        ours, theirs = resumed.checkpoint(name), reference.checkpoint(name)
        assert not differences(ours, theirs, name)
    assert_same_log(resumed, reference, 2)
    assert not list(resumed.folder.glob(".*"))
