"""The pitfalls of going from one device to many: checkpoints and resume. Each test shows the wrong way failing, then this project's way."""

import argparse
import copy
import fcntl
import functools
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import ROOT, deviation, in_group, order_of, single_run, train, undisturbed
from launches import treats
from patches import BASE, after_step, in_process, print_batches, printed, stop_after, without_speed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data._utils import signal_handling

import common
import machinery.cli
import machinery.launch
import machinery.modes
import machinery.process
import machinery.run
import sampling

# ----------------------------------------------------------------------------------------------- 04


@pytest.mark.full
def test_pitfall_04_resume_is_exact(tmp_path):
    """The loss jumps at resume: only the weights were saved, and momentum, schedule, or place in the epoch begin anew."""
    argv = (*BASE, "--model", "dropout", "--average", "ema")
    straight = single_run(*argv)
    stopped = train("single", 1, *argv, folder=tmp_path, patch=functools.partial(stop_after, 8))
    saved = stopped.checkpoint()
    assert stopped.code == 143 and (saved["epoch"], saved["step"], saved["global_step"]) == (
        1,
        2,
        8,
    )

    momenta = [state["momentum_buffer"] for state in saved["optimizer"]["state"].values()]
    assert max(momentum.abs().max() for momentum in momenta) > 1e-3
    for momentum in momenta:
        momentum.zero_()
    torch.save(saved, tmp_path / "weights.pt")
    wrong = (*argv, "--resume", tmp_path / "weights.pt", "--output-dir", tmp_path / "wrong")
    forgetful = train("single", 1, *wrong, folder=tmp_path)
    assert forgetful.code == 0
    assert deviation(forgetful.checkpoint()["model"], straight.checkpoint()["model"]) > 1e-3

    resumed = train("single", 1, *argv, "--resume", "auto", folder=tmp_path)
    assert resumed.code == 0 and without_speed(resumed.lines) == without_speed(straight.lines)
    for part in ("model", "average"):
        assert deviation(resumed.checkpoint()[part], straight.checkpoint()[part]) == 0, "bitwise"
    states = [run.checkpoint()["optimizer"]["state"] for run in (resumed, straight)]
    assert all(
        states[0][i]["momentum_buffer"].equal(states[1][i]["momentum_buffer"]) for i in states[1]
    )


# ----------------------------------------------------------------------------------------------- 10


def save_on_a_full_disk():
    signal.signal(
        signal.SIGXFSZ, signal.SIG_IGN
    )  # so that a write beyond the limit is an error and not the end
    old, new = {"weight": torch.zeros(100)}, {"weight": torch.ones(100_000)}
    with tempfile.TemporaryDirectory() as name:
        for path, save in (
            (Path(name) / "direct.pt", torch.save),
            (Path(name) / "last.pt", common.save_checkpoint),
        ):
            save(old, path)
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
            try:
                save(new, path)
                outcome = "saved"
            except (OSError, RuntimeError):
                outcome = "failed"
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
            try:
                content = torch.load(path)["weight"].sum().item()
            except Exception:
                content = "unreadable"
            print(json.dumps([path.name, outcome, content]))
        print(json.dumps(sorted(os.listdir(name))))


def test_pitfall_10_full_disk_leaves_the_old_checkpoint():
    """A crash or a full disk during a save destroys the only checkpoint: it was written over the old file."""
    direct, atomic, files = map(json.loads, in_process(save_on_a_full_disk).splitlines())
    assert direct == ["direct.pt", "failed", "unreadable"]
    assert atomic == ["last.pt", "failed", 0.0]
    assert files == ["direct.pt", "last.pt"]  # no half-written file stays behind


# ----------------------------------------------------------------------------------------------- 11


def terminate_group(rank):
    """SIGTERM, as batch systems send it: to the process and its loader workers at once. Only one rank gets it."""
    multiprocessing.set_start_method(
        "fork", force=True
    )  # loader workers are then in the process group of their rank
    if rank == 1:
        os.setsid()
        after_step(3, kill_own_group)


def kill_own_group():
    subprocess.run(
        ["kill", "-TERM", "--", f"-{os.getpgrp()}"], start_new_session=True
    )  # from outside: its parent may end a worker
    for worker in multiprocessing.active_children():
        if not treats(worker.pid, signal.SIGTERM, "SigIgn"):  # it dies, for the loader to find
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)


def terminate_group_with_plain_workers(rank):
    multiprocessing.set_start_method("fork", force=True)
    sampling.leave_signals_to_parent = lambda worker: None  # as DataLoader's workers are by default
    signal_handling._SIGCHLD_handler_set = (
        False  # torch sets it once; a fork inherits the mark alone
    )
    os.setsid()
    after_step(3, kill_own_group)


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.full)])
def test_pitfall_11_sigterm_saves(workers, tmp_path):
    """SIGTERM ends the job without a checkpoint: it reaches the loader workers too, and the run dies of their death before it can save."""
    if workers == "2":
        plain = terminate_group_with_plain_workers
        folder = tmp_path / "wrong"
        wrong = train("single", 1, *BASE, "--workers", "2", folder=folder, patch=plain)
        assert "DataLoader worker" in wrong.err and not (wrong.folder / "last.pt").exists()

    argv = (*BASE, "--workers", workers)
    stopped = train("ddp", 2, *argv, folder=tmp_path, patch=terminate_group)
    assert stopped.code == 143 and "stopped by SIGTERM" in stopped.err
    assert stopped.checkpoint()["global_step"] == 4  # both ranks: one step was needed to agree
    resumed = train("ddp", 2, *argv, "--resume", "auto", folder=tmp_path)
    assert resumed.code == 0, resumed.err
    straight = undisturbed("ddp", 2, *BASE)
    assert without_speed(resumed.lines) == without_speed(straight.lines)
    assert all(
        tensor.equal(straight.checkpoint()["model"][name])
        for name, tensor in resumed.checkpoint()["model"].items()
    )


# ----------------------------------------------------------------------------------------------- 12


def print_batches_and_stop(rank):
    print_batches(rank)
    stop_after(8, rank)


@pytest.mark.full
def test_pitfall_12_resume_within_an_epoch_repeats_nothing(tmp_path):
    """A run resumed in the middle of an epoch repeats some samples and skips others: it draws a new order and skips in that."""
    first, again = torch.randperm(203).tolist(), torch.randperm(203).tolist()
    assert len(set(first[:90] + again[90:])) < 203

    stopped = train("ddp", 2, *BASE, folder=tmp_path, patch=print_batches_and_stop)
    assert stopped.code == 143 and stopped.checkpoint()["step"] == 3
    argv = (*BASE, "--resume", "auto", "--workers", "1")
    resumed = train("ddp", 2, *argv, folder=tmp_path, patch=print_batches)
    loaded = printed(resumed.out, "batch")
    assert {epoch for epoch, _, _ in loaded} == {1, 2}, "nothing of the epoch that is done"
    before, after = (
        [b for b in batches if b[0] == 1] for batches in (printed(stopped.out, "batch"), loaded)
    )
    assert (
        len(before) == len(after) == 2 * 3
    )  # three steps of each rank; nothing is loaded only to be skipped
    seen = [index for _, _, indices in before + after for index in indices]
    assert len(seen) == len(set(seen)) == 180
    assert set(seen) == set(order_of(203, seed=0, epoch=1)[:180])


# ----------------------------------------------------------------------------------------------- 13


@pytest.mark.full
def test_pitfall_13_resume_at_another_world_size(tmp_path):
    """Resuming on another number of devices skips or repeats data: the position was counted in batches of one rank."""
    order = list(range(180))
    trained = {
        i for rank in range(2) for i in order[rank::2][: 3 * 15]
    }  # three steps on two ranks, 15 samples each
    left = {
        i for rank in range(4) for i in order[rank::4][3 * 15 :]
    }  # the same position on four ranks
    assert len(trained) == 90 and not left

    stopped = train("ddp", 2, *BASE, folder=tmp_path, patch=functools.partial(stop_after, 8))
    assert stopped.code == 143 and stopped.checkpoint()["global_step"] == 9
    straight = single_run(*BASE)
    assert deviation(stopped.checkpoint()["model"], straight.checkpoint()["model"]) > 1e-3
    resumed = train("ddp", 3, *BASE, "--resume", "auto", folder=tmp_path)
    assert resumed.code == 0, resumed.err
    assert deviation(resumed.checkpoint()["model"], straight.checkpoint()["model"]) <= 1e-10
    assert [line["global_step"] for line in resumed.train_lines()] == list(range(1, 19))


# ----------------------------------------------------------------------------------------------- 14


class Hostile:
    """Runs code where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def plain(value):
    """Whether there is nothing in a nested value but what `weights_only=True` accepts without being told."""
    if isinstance(value, dict):
        return all(plain(item) for pair in value.items() for item in pair)
    if isinstance(value, (list, tuple)):
        return all(plain(item) for item in value)
    return value is None or type(value) in (torch.Tensor, int, float, str, bool)


def test_pitfall_14_checkpoints_hold_plain_values(tmp_path):
    """UnpicklingError at load, or code from the file runs: objects were pickled into the checkpoint, and weights_only was switched off."""
    for value in (np.float64(0.5), Path("runs"), argparse.Namespace(lr=0.1)):
        assert not plain({"config": [value]})
        torch.save({"config": value}, tmp_path / "objects.pt")
        with pytest.raises(Exception, match="Weights only load failed"):
            torch.load(tmp_path / "objects.pt", weights_only=True)

    result = train("single", 1, *BASE, "--average", "ema", "--epochs", "1", folder=tmp_path)
    saved = torch.load(result.folder / "last.pt", weights_only=True)
    assert {"format", "model", "optimizer", "scheduler", "average", "global_step"} <= saved.keys()
    assert plain({**saved, "model": dict(saved["model"])}) and saved["config"]["batch_size"] == 30

    torch.save({**saved, "best": Hostile(tmp_path / "intruder")}, tmp_path / "hostile.pt")
    with pytest.raises(common.UsageError, match="Weights only load failed"):
        common.load_checkpoint(tmp_path / "hostile.pt")
    assert not (tmp_path / "intruder").exists()
    torch.load(tmp_path / "hostile.pt", weights_only=False)
    assert (tmp_path / "intruder").exists()  # the file was hostile
    product = [*ROOT.glob("*.py"), *ROOT.glob("machinery/*.py")]
    assert len(product) > 10 and not any(
        "weights_only=False" in path.read_text() for path in product
    )


# ----------------------------------------------------------------------------------------------- 23


def test_pitfall_23_learning_rate_goes_on_at_resume(tmp_path):
    """The learning rate jumps at resume: a scheduler that is built after the optimizer's state was loaded resets it to its start."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    scheduler.step()
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = torch.optim.SGD(nn.Linear(1, 1).parameters(), 1.0)
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["lr"] == 0.5
    torch.optim.lr_scheduler.LambdaLR(resumed, lambda step: 0.5**step)
    assert resumed.param_groups[0]["lr"] == 1.0  # jumped

    straight = [line["lr"] for line in single_run(*BASE).train_lines()]
    assert (
        len(set(straight[6:])) == 12
    )  # no plateau that would hide a jump after the stop at step 8
    stopped = train("single", 1, *BASE, folder=tmp_path, patch=functools.partial(stop_after, 8))
    assert stopped.code == 143 and len(stopped.train_lines()) == 8
    resumed = train("single", 1, *BASE, "--resume", "auto", folder=tmp_path)
    assert [line["lr"] for line in resumed.train_lines()] == straight


# ----------------------------------------------------------------------------------------------- 31


def each_rank_looks_for_itself():
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("folder", dist.__file__)
        print(store.check(["last.pt"]))
        store.set("last.pt", "")  # rank 0 goes on, and soon saves
        store.set("saved", "")
    else:
        store.wait(["saved"])  # rank 1 comes later
        print(store.check(["last.pt"]))


def hide_files_from_rank_1(rank):
    """As with a folder on each machine: only rank 0 has the checkpoint."""

    def missing(path):
        raise FileNotFoundError(path)

    if rank == 1:
        machinery.run.load_checkpoint = missing


def save_slowly(rank):
    """Rank 0 has a slow disk; print when it has saved, and when each rank leaves."""
    save, destroy = machinery.run.save_checkpoint, dist.destroy_process_group

    def slow_save(*arguments):
        time.sleep(0.5)
        save(*arguments)
        print("saved", time.monotonic())

    machinery.run.save_checkpoint = slow_save
    dist.destroy_process_group = lambda: (print("left", time.monotonic()), destroy())


def stop_and_save_slowly(rank):
    stop_after(3, rank)
    save_slowly(rank)


@pytest.mark.full
def test_pitfall_31_rank_0_reads_and_decides(tmp_path):
    """Some ranks resume and others start anew, or read half a file: each looked for itself, while rank 0 was writing."""
    assert [out.strip() for out in in_group(2, each_rank_looks_for_itself)] == ["False", "True"]

    stopped = train("ddp", 2, *BASE, folder=tmp_path, patch=functools.partial(stop_after, 8))
    resumed = train(
        "ddp", 2, *BASE, "--resume", "auto", folder=tmp_path, patch=hide_files_from_rank_1
    )
    assert stopped.code == 143 and resumed.code == 0, resumed.err
    assert without_speed(resumed.lines) == without_speed(undisturbed("ddp", 2, *BASE).lines)

    with open(tmp_path / "run" / "metrics.jsonl") as other_run:
        fcntl.flock(other_run, fcntl.LOCK_EX)
        second = train("ddp", 2, *BASE, "--resume", "auto", folder=tmp_path)
    assert second.code == 2 and "another run is writing there" in second.err

    for code, patch in ((143, stop_and_save_slowly), (0, save_slowly)):
        slow = train(
            "ddp", 2, *BASE, "--epochs", "1", folder=tmp_path / f"slow-{code}", patch=patch
        )
        assert slow.code == code
        assert min(printed(slow.out, "left")) > max(
            printed(slow.out, "saved")
        )  # a launcher ends the rest when one leaves with a code


# ----------------------------------------------------------------------------------------------- 32


def on_two_nodes(rank):
    """Each rank is the first, and only, process of its machine."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    save = machinery.run.save_checkpoint
    machinery.run.save_checkpoint = lambda content, *paths: (
        [print("saves", rank) for _ in paths],
        save(content, *paths),
    )


def gate_on_local_rank(rank):
    on_two_nodes(rank)
    machinery.run.get_rank = common.get_rank = lambda: int(os.environ["LOCAL_RANK"])
    machinery.run.Run._open = open_own_folder


def open_own_folder(self):
    # or the lock of metrics.jsonl would notice that two write there
    self.directory = Path(f"{self.directory}-{dist.get_rank()}")
    return _open(self)


_open = machinery.run.Run._open


@pytest.mark.full
def test_pitfall_32_one_rank_of_all_machines_saves(tmp_path):
    """Several ranks write the same checkpoint: on more than one machine, each has a process whose local rank is 0."""
    wrong = train(
        "ddp", 2, *BASE, "--epochs", "1", folder=tmp_path / "wrong", patch=gate_on_local_rank
    )
    assert set(printed(wrong.out, "saves")) == {0, 1}

    right = train("ddp", 2, *BASE, "--epochs", "1", folder=tmp_path / "right", patch=on_two_nodes)
    assert right.code == 0 and printed(right.out, "saves") == [
        0,
        0,
        0,
    ]  # last.pt before the evaluation, best.pt and last.pt after it


# ----------------------------------------------------------------------------------------------- 42


def strict_about_old_interfaces(rank):
    warnings.simplefilter("error", FutureWarning)
    nn.Module.compile = functools.partialmethod(
        nn.Module.compile, backend="eager"
    )  # what is tested are names, not kernels


def prefixed_names():
    net = nn.Linear(2, 1)
    print(
        *DistributedDataParallel(net).state_dict(), *torch.compile(copy.deepcopy(net)).state_dict()
    )


@pytest.mark.full
def test_pitfall_42_old_interfaces_and_prefixed_names(tmp_path):
    """FutureWarnings in every process, and checkpoints that no other mode can load: old AMP names, and those of the wrapper."""
    with pytest.warns(FutureWarning, match=r"torch.amp.GradScaler"):
        torch.cuda.amp.GradScaler(enabled=False)
    assert in_group(1, prefixed_names)[0].split() == [
        "module.weight",
        "module.bias",
        "_orig_mod.weight",
        "_orig_mod.bias",
    ]

    argv = (*BASE, "--dtype", "float32", "--amp", "bf16", "--average", "ema", "--epochs", "1")
    names = {"first.weight", "first.bias", "last.weight", "last.bias"}
    for mode, n, *compiled in (("single", 1), ("dp", 2), ("ddp", 2, "--compile"), ("spawn", 2)):
        result = train(
            mode, n, *argv, *compiled, folder=tmp_path / mode, patch=strict_about_old_interfaces
        )
        assert result.code == 0, result.err
        saved = result.checkpoint()
        assert saved["model"].keys() == names
        assert saved["average"].keys() - {"n_averaged"} == names
