"""Saving beside the next steps: a thread writes a copy of the state, and whoever needs the file waits for it."""

import functools
import io
import itertools
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from harness import TASKS, train, undisturbed
from patches import Patches, after_step, call_in_task, stop_after, without_speed
from runs import make_run, make_step, start_epoch
from torch import nn

import common
import machinery.files
import machinery.processes

pytestmark = pytest.mark.usefixtures("handlers")
PATIENCE = 30  # seconds after which a test fails that would wait for ever


class Disk:
    """A disk on which each save takes until somebody waits for it: the sync of the log returns then."""

    def __init__(self):
        self.reached, self.asked = threading.Event(), threading.Event()
        self.fsync, self.waits = os.fsync, 0
        self.wait, self.join = machinery.files.RunFiles.wait, machinery.processes.wait_for_writer
        os.fsync = self.slow_fsync
        machinery.files.RunFiles.wait = lambda files: self.wait_for(files)
        machinery.processes.wait_for_writer = self.wait_for_writer

    def slow_fsync(self, descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("metrics.jsonl"):
            self.reached.set()
            if not self.asked.wait(PATIENCE):
                raise OSError("nobody has waited for this save")
            self.asked.clear()
        self.fsync(descriptor)

    def wait_for(self, files):
        if files.writing and not files.writing.done():
            self.waits += 1
            self.asked.set()
        self.wait(files)

    def wait_for_writer(self, *seconds):
        self.asked.set()
        self.join(*seconds)

    def back_to_normal(self):
        self.asked.set()
        os.fsync = self.fsync
        machinery.files.RunFiles.wait = self.wait
        machinery.processes.wait_for_writer = self.join


@pytest.fixture
def disk():
    disk = Disk()
    yield disk
    disk.back_to_normal()
    machinery.processes.wait_for_writer()


def slow_disk(rank):
    """Let each save of a run be written only when the run waits for it: after all steps that follow."""
    Disk()


def step_in(path):
    return torch.load(path, weights_only=True)["global_step"] if path.exists() else None


# ------------------------------------------------------------------------------ beside the next steps


def test_steps_go_on_while_the_disk_is_busy_and_the_next_save_waits(disk, tmp_path):
    run = make_run(tmp_path, "--save-every", 2, "--log-every", 50)
    last, found = run.files.directory / "last.pt", []
    collect = run.state.checkpoint
    run.state.checkpoint = lambda: (found.append(step_in(last)), collect())[1]
    start_epoch(run)
    for _ in range(3):
        make_step(run, [1.0])
    assert disk.reached.wait(PATIENCE) and disk.waits == 0
    assert run.state.global_step == 3 and not last.exists(), "the save after step 2 is not written"
    make_step(run, [1.0])
    assert found == [None, 2], "a copy is taken after the one before is on the disk"
    run.files.wait()
    assert step_in(last) == 4


def flat(value, name=""):
    """Return the tensors in nested dicts and lists, by the way to them."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    parts = [flat(v, f"{name}.{k}") for k, v in items if isinstance(v, (dict, list, torch.Tensor))]
    return {name: tensor for part in parts for name, tensor in part.items()}


def test_steps_that_follow_do_not_change_what_is_saved(disk, tmp_path):
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
    run = make_run(tmp_path, "--average", "ema", "--optimizer", "adamw", net=net)
    start_epoch(run)

    def step():
        net(torch.randn(5, 2).double()).square().sum().backward()
        run.state.optimizer.step()
        run.state.optimizer.zero_grad()
        make_step(run, [1.0])

    step()
    run.save("last.pt")
    torch.save(run.state.checkpoint(), before := io.BytesIO())
    before.seek(0)
    wanted = torch.load(before, weights_only=True)
    step()
    step()
    assert disk.reached.wait(PATIENCE) and not (run.files.directory / "last.pt").exists()
    now = flat(run.state.checkpoint())
    run.files.wait()
    saved = torch.load(run.files.directory / "last.pt", weights_only=True)
    then = flat(wanted)
    assert len(then) == len(now) == 4 + 3 + 4 * 3 + 8, "weights, statistics, optimizer, average"
    for name, tensor in then.items():
        assert not tensor.equal(now[name]), f"{name} has changed since"
        assert tensor.equal(flat(saved)[name]), name
    assert {key: saved[key] for key in ("scheduler", "scaler", "global_step")} == {
        key: wanted[key] for key in ("scheduler", "scaler", "global_step")
    }
    assert wanted["scheduler"] != run.state.scheduler.state_dict()


EVERY = ("--task", str(TASKS / "everything.py"), "--dtype", "float64", "--epochs", "3")
EVERY += ("--batch-size", "30", "--log-every", "1", "--keep-every", "1", "--average", "ema")
FILES = ("last.pt", "best.pt", "epoch-0001.pt", "epoch-0002.pt", "epoch-0003.pt")


def assert_same_files(result, reference, names=FILES):
    for name in names:
        ours, theirs = result.checkpoint(name), reference.checkpoint(name)
        assert {k: v for k, v in ours.items() if not isinstance(v, dict)} == {
            k: v for k, v in theirs.items() if not isinstance(v, dict)
        }
        ours, theirs = flat(ours), flat(theirs)
        assert ours.keys() == theirs.keys()
        assert all(tensor.equal(theirs[key]) for key, tensor in ours.items()), name
    assert without_speed(result.lines) == without_speed(reference.lines)
    assert not list(result.folder.glob(".*"))


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("dp", 2), ("ddp", 2), ("fsdp", 2)])
def test_files_do_not_depend_on_when_they_are_written(mode, n, tmp_path):
    reference = undisturbed(mode, n, *EVERY)
    first, second = (reference.checkpoint(f"epoch-000{i}.pt")["model"] for i in (1, 2))
    assert not any(first[name].equal(second[name]) for name in first if "weight" in name)
    slow = train(mode, n, *EVERY, folder=tmp_path, patch=slow_disk)
    assert slow.code == 0, slow.err
    assert_same_files(slow, reference)


# ---------------------------------------------------------------------------------- ways out of a run


def test_run_that_finishes_waits_for_its_last_save(disk, tmp_path):
    run = make_run(tmp_path)
    run.save("last.pt")
    run.finish()
    assert step_in(run.files.directory / "last.pt") == 0


def test_end_of_the_last_epoch_names_a_file_that_is_there(disk, tmp_path, capsys):
    run = make_run(tmp_path, "--epochs", 1)
    run.state.step = run.sampler.steps_per_epoch
    run.end_epoch({"loss": 1.0, "top1": 0.5, "count": 57})
    best = run.files.directory / "best.pt"
    assert f"in epoch 1: {best}" in capsys.readouterr().out and best.exists()


def test_run_that_diverged_waits_for_its_last_save(disk, tmp_path):
    run = make_run(tmp_path, "--log-every", 1)
    start_epoch(run)
    make_step(run, [1.0])
    run.save("last.pt")
    run.state.scaler.in_a_row.fill_(common.MAX_SKIPPED_IN_A_ROW)
    with pytest.raises(machinery.processes.Stopped, match="diverged"):
        make_step(run, [1.0])
    assert step_in(run.files.directory / "last.pt") == 1


@pytest.mark.parametrize("number", machinery.processes.SIGNALS)
def test_stop_while_a_save_is_under_way_comes_after_its_own_save(number, disk, tmp_path):
    run = make_run(tmp_path, "--log-every", 50, "--save-every", 2)
    start_epoch(run)
    make_step(run, [1.0])
    make_step(run, [1.0])
    assert disk.reached.wait(PATIENCE)
    os.kill(os.getpid(), number)
    with pytest.raises(machinery.processes.Stopped, match="after saving step 3"):
        make_step(run, [1.0])
    assert step_in(run.files.directory / "last.pt") == 3 and disk.waits == 2


def test_notebook_that_leaves_a_run_by_an_error_has_its_last_save(disk, tmp_path, monkeypatch):
    monkeypatch.setattr(machinery.processes, "at_end", machinery.processes.contextlib.ExitStack())
    monkeypatch.setattr(machinery.processes, "_is_program", False)  # as in a new notebook

    @machinery.processes.leaves_no_trace
    def main():
        run = make_run(tmp_path)
        run.save("last.pt")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        main()
    assert step_in(tmp_path / "run" / "last.pt") == 0


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("ddp", 2)])
def test_sigterm_while_a_save_is_under_way(mode, n, tmp_path):
    argv = (*EVERY, "--save-every", "4")
    reference = undisturbed(mode, n, *argv)
    patch = Patches(slow_disk, functools.partial(stop_after, 5))
    stopped = train(mode, n, *argv, folder=tmp_path, patch=patch)
    step = 5 if mode == "single" else 6  # ranks have to agree
    assert stopped.code == 143 and f"stopped by SIGTERM after saving step {step}" in stopped.err
    assert stopped.checkpoint()["global_step"] == step
    resumed = train(mode, n, *argv, "--resume", "auto", folder=tmp_path)
    assert resumed.code == 0, resumed.err
    assert_same_files(resumed, reference)


def divide_by_zero():
    return 1 / 0


def die():
    os._exit(1)


@pytest.mark.parametrize(
    ("mode", "n", "failing", "rank", "cause"),
    [
        ("single", 1, divide_by_zero, 0, "ZeroDivisionError"),
        ("ddp", 2, divide_by_zero, 0, "ZeroDivisionError"),
        ("ddp", 2, divide_by_zero, 1, "ZeroDivisionError"),
        ("ddp", 2, die, 1, ""),
    ],
)
def test_rank_that_fails_lets_its_save_end(mode, n, failing, rank, cause, tmp_path):
    """The save of the fourth step is under way when the sixth fails: a restart goes on from it."""
    argv = (*EVERY, "--save-every", "4")
    at = 5 + (mode == "ddp")  # the first call is for the order of DDP's buckets
    fault = functools.partial(call_in_task, "per_sample_loss", at, failing, rank)
    broken = train(mode, n, *argv, folder=tmp_path, patch=Patches(slow_disk, fault))
    assert broken.code == 1 and cause in broken.err
    assert broken.checkpoint()["global_step"] == 4
    resumed = train(mode, n, *argv, "--resume", "auto", folder=tmp_path)
    assert resumed.code == 0 and "resumed at epoch 1, step 4" in resumed.out, resumed.err
    assert_same_files(resumed, undisturbed(mode, n, *argv))


def hang_in_a_save(rank):
    """The disk does not answer for long; a rank has a tenth of a second after a failure."""
    machinery.processes.GRACE = 0.1
    os.fsync = lambda descriptor: threading.Event().wait(20)


def test_rank_that_fails_does_not_wait_for_a_disk_that_hangs(tmp_path):
    fault = functools.partial(call_in_task, "per_sample_loss", 5, divide_by_zero)
    argv = (*EVERY, "--save-every", "4")
    broken = train("single", 1, *argv, folder=tmp_path, patch=Patches(hang_in_a_save, fault))
    assert broken.code == 1 and "ZeroDivisionError" in broken.err
    assert not (broken.folder / "last.pt").exists()


# ------------------------------------------------------------------------------------------- errors


@pytest.fixture
def full_run(tmp_path, monkeypatch):
    """A run whose save after step 2 was written, and whose save after step 3 has met a full disk."""
    run = make_run(tmp_path, "--log-every", 4)
    start_epoch(run)
    make_step(run, [1.0])
    make_step(run, [1.0])
    run.save("last.pt")
    run.files.wait()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    make_step(run, [1.0])
    run.save("last.pt")
    machinery.processes.wait_for_writer()
    monkeypatch.undo()
    return run


WAYS = {
    "the next log line": lambda run: make_step(run, [1.0]),
    "the next save": lambda run: run.save("last.pt"),
    "the end": lambda run: run.finish(),
}


@pytest.mark.parametrize("way", WAYS)
def test_error_of_the_thread_is_raised_at(way, full_run):
    last = full_run.files.directory / "last.pt"
    with pytest.raises(OSError, match=r"last.pt could not be written .is the disk full.*No space"):
        WAYS[way](full_run)
    assert step_in(last) == 2 and not list(last.parent.glob(".*"))


def full_from_second_save(rank):
    replace, calls = os.replace, itertools.count(1)

    def full(*arguments):
        if next(calls) > 1:
            raise OSError(28, "No space left on device")
        replace(*arguments)

    os.replace = full


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("ddp", 2)])
def test_full_disk_ends_the_run_as_a_failure(mode, n, tmp_path):
    argv = (*EVERY, "--save-every", "2", "--log-every", "50")
    broken = train(mode, n, *argv, folder=tmp_path, patch=full_from_second_save)
    assert broken.code == 1 and "last.pt could not be written (is the disk full?)" in broken.err
    assert "No space left" in broken.err.splitlines()[-1]
    assert broken.checkpoint()["global_step"] == 2
    resumed = train(mode, n, *argv, "--resume", "auto", folder=tmp_path)
    assert resumed.code == 0, resumed.err
    assert_same_files(resumed, undisturbed(mode, n, *argv))


# -------------------------------------------------------------------------------------------- kills


def kill_beside_a_save(rank):
    """SIGKILL for rank 0 after its fifth step, while the save of the fourth is written but not synced."""
    fsync, saves, reached = os.fsync, itertools.count(1), threading.Event()

    def stuck(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.name == ".last.pt.tmp" and next(saves) == 2:
            assert path.stat().st_size > 1000
            reached.set()
            threading.Event().wait(PATIENCE)
        fsync(descriptor)

    def kill():
        if reached.wait(PATIENCE):
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == 0:
        os.fsync = stuck
        after_step(5, kill)


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("ddp", 2)])
def test_killed_while_the_thread_writes(mode, n, tmp_path):
    argv = (*EVERY, "--save-every", "2")
    killed = train(mode, n, *argv, folder=tmp_path, patch=kill_beside_a_save)
    assert killed.code == -signal.SIGKILL and (killed.folder / ".last.pt.tmp").exists()
    assert common.load_checkpoint(killed.folder / "last.pt")["global_step"] == 2
    assert killed.lines[-1]["global_step"] > 2, "the log is ahead of it"
    resumed = train(mode, n, *argv, "--resume", "auto", folder=tmp_path)
    assert resumed.code == 0 and "resumed at epoch 1, step 2" in resumed.out, resumed.err
    assert_same_files(resumed, undisturbed(mode, n, *argv))


# ---------------------------------------------------------------------------------------- several names


def test_names_of_one_save_are_files_of_their_own(run, monkeypatch):
    """What damages one of them leaves the other; and all of them are serialised once."""
    saves, save = [], torch.save
    monkeypatch.setattr(torch, "save", lambda *a: (saves.append(a), save(*a)))
    run.end_epoch({"loss": 1.0, "top1": 0.75, "count": 57})
    run.files.wait()
    assert len(saves) == 1
    paths = [run.files.directory / name for name in ("best.pt", "epoch-0002.pt", "last.pt")]
    contents = [path.read_bytes() for path in paths]
    assert contents[0] == contents[1] == contents[2] and step_in(paths[0]) == 12
    paths[2].write_bytes(b"damaged")
    assert [path.read_bytes() for path in paths[:2]] == contents[:2]
    run.save("last.pt")
    run.files.wait()
    assert paths[0].read_bytes() == contents[0] and step_in(paths[2]) == 12


def test_copy_that_fails_leaves_all_names_as_they_were(run, monkeypatch):
    run.save("best.pt", "last.pt")
    run.files.wait()
    before = {path.name: path.read_bytes() for path in run.files.directory.glob("*.pt")}
    run.state.global_step += 1

    def full(source, target):
        Path(target).write_bytes(Path(source).read_bytes()[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(common.shutil, "copyfile", full)
    run.save("best.pt", "last.pt")
    with pytest.raises(OSError, match=r"last.pt could not be written .is the disk full"):
        run.files.wait()
    files = {path.name: path.read_bytes() for path in run.files.directory.iterdir()}
    files.pop("metrics.jsonl")
    assert files == before
