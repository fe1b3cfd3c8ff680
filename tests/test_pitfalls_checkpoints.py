"""The pitfalls of going from one device to many: checkpoints and resume. Each test shows the wrong way failing, then this project's way."""

import copy
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

import pytest
import torch
import torch.distributed as dist
from harness import in_group, train, undisturbed
from launches import treats
from patches import BASE, after_step, in_process, printed, stop_after, without_speed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import common
import machinery.run

# ----------------------------------------------------------------------------------------------- 10


def save_on_a_full_disk(save):
    """Print what is left of an old file when the new one, over it, is larger than the disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is then an error
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "last.pt"
        save({"weight": torch.zeros(100)}, path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        with pytest.raises((OSError, RuntimeError)):
            save({"weight": torch.ones(100_000)}, path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        try:
            content = torch.load(path)["weight"].sum().item()
        except Exception:
            content = "unreadable"
        print(json.dumps([content, os.listdir(name)]))


def test_pitfall_10_full_disk_leaves_the_old_checkpoint():
    """A crash or a full disk during a save destroys the only checkpoint: it was written over the old file."""
    wrong = in_process(functools.partial(save_on_a_full_disk, torch.save))
    assert json.loads(wrong) == ["unreadable", ["last.pt"]]
    right = in_process(functools.partial(save_on_a_full_disk, common.save_checkpoint))
    assert json.loads(right) == [0.0, ["last.pt"]], "nor does a half-written file stay behind"


# ----------------------------------------------------------------------------------------------- 11


def terminate_group(rank):
    """SIGTERM, as batch systems send it: to the process and its loader workers at once. Only one rank gets it."""
    # Loader workers are then in the process group of their rank.
    multiprocessing.set_start_method("fork", force=True)
    if rank == 1:
        os.setsid()
        after_step(3, kill_own_group)


def kill_own_group():
    # From outside: its parent may end a worker.
    subprocess.run(["kill", "-TERM", "--", f"-{os.getpgrp()}"], start_new_session=True)
    for worker in multiprocessing.active_children():
        while treats(worker.pid, signal.SIGTERM, "ShdPnd"):  # until it has it; it may die of it
            time.sleep(0.01)


@pytest.mark.full
def test_pitfall_11_sigterm_saves(tmp_path):
    """SIGTERM ends the job without a checkpoint: it reaches the loader workers too, and the run dies of their death before it can save."""
    argv = (*BASE, "--workers", "2")
    stopped = train("ddp", 2, *argv, folder=tmp_path, patch=terminate_group)
    assert stopped.code == 143 and "stopped by SIGTERM" in stopped.err
    assert stopped.checkpoint()["global_step"] == 4  # both ranks: one step was needed to agree
    resumed = train("ddp", 2, *argv, "--resume", "auto", folder=tmp_path)
    assert resumed.code == 0, resumed.err
    assert without_speed(resumed.lines) == without_speed(undisturbed("ddp", 2, *BASE).lines)


# ----------------------------------------------------------------------------------------------- 12


def test_pitfall_12_resume_within_an_epoch_repeats_nothing():
    """A run resumed in the middle of an epoch repeats some samples and skips others: it draws a new order and skips in that."""
    first, again = torch.randperm(203).tolist(), torch.randperm(203).tolist()
    assert len(set(first[:90] + again[90:])) < 203


# ----------------------------------------------------------------------------------------------- 31


def each_rank_looks_for_itself(path):
    if dist.get_rank() == 0:
        print(path.exists())
        path.touch()  # rank 0 goes on, and soon saves
    dist.barrier()
    if dist.get_rank() == 1:  # it comes later
        print(path.exists())


def other_folder_for_rank_1(name, rank):
    """As with a folder on each machine: rank 1 finds `name` where rank 0 has last.pt."""
    load, fingerprint = machinery.run.load_checkpoint, machinery.run.fingerprint
    if rank == 1:
        machinery.run.load_checkpoint = lambda path, **kw: load(path.with_name(name), **kw)
        machinery.run.fingerprint = lambda path: fingerprint(path.with_name(name))


@pytest.mark.full
def test_pitfall_31_rank_0_decides_and_all_read_its_file(tmp_path):
    """Some ranks resume and others start anew, or read half a file: each looked for itself, while rank 0 was writing."""
    look = functools.partial(each_rank_looks_for_itself, tmp_path / "last.pt")
    assert in_group(2, look) == ["False\n", "True\n"]

    stop = functools.partial(stop_after, 8)
    stopped = train("ddp", 2, *BASE, "--keep-every", "1", folder=tmp_path, patch=stop)
    assert stopped.code == 143
    argv = ("--output-dir", str(stopped.folder), "--resume", "auto")
    for name, problem in (("no.pt", "No such file"), ("epoch-0001.pt", "another file than that")):
        patch = functools.partial(other_folder_for_rank_1, name)
        refused = train("ddp", 2, *argv, folder=tmp_path, patch=patch)
        assert refused.code == 2 and problem in refused.err and "(rank 1)" in refused.err
    resumed = train("ddp", 2, *argv, folder=tmp_path)
    assert resumed.code == 0, resumed.err
    assert without_speed(resumed.lines) == without_speed(undisturbed("ddp", 2, *BASE).lines)


# ----------------------------------------------------------------------------------------------- 32


def on_two_nodes(rank):
    """Each rank is the first, and only, process of its machine."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    save = machinery.run.save_checkpoint

    def watched(content, *paths):
        for _ in paths:
            print("saves", rank)
        save(content, *paths)

    machinery.run.save_checkpoint = watched


@pytest.mark.full
def test_pitfall_32_one_rank_of_all_machines_saves(tmp_path):
    """Several ranks write the same checkpoint: on more than one machine, each has a process whose local rank is 0."""
    result = train("ddp", 2, *BASE, "--epochs", "1", folder=tmp_path, patch=on_two_nodes)
    # last.pt before the evaluation, best.pt and last.pt after it
    assert result.code == 0 and printed(result.out, "saves") == [0, 0, 0], result.err


# ----------------------------------------------------------------------------------------------- 42


def strict_about_old_interfaces(rank):
    warnings.simplefilter("error", FutureWarning)
    # What is tested are names, not kernels.
    nn.Module.compile = functools.partialmethod(nn.Module.compile, backend="eager")


def prefixed_names():
    net = nn.Linear(2, 1, bias=False)
    print(*DistributedDataParallel(net).state_dict(), *torch.compile(net).state_dict())


@pytest.mark.full
def test_pitfall_42_old_interfaces_and_prefixed_names(tmp_path):
    """FutureWarnings in every process, and checkpoints that no other mode can load: old AMP names, and those of the wrapper."""
    with pytest.warns(FutureWarning, match=r"torch.amp.GradScaler"):
        torch.cuda.amp.GradScaler(enabled=False)
    assert in_group(1, prefixed_names) == ["module.weight _orig_mod.weight\n"]

    argv = (*BASE, *"--dtype float32 --amp bf16 --average ema --epochs 1 --compile".split())
    result = train("ddp", 2, *argv, folder=tmp_path, patch=strict_about_old_interfaces)
    assert result.code == 0, result.err
    names = {"first.weight", "first.bias", "last.weight", "last.bias"}
    saved = result.checkpoint()
    assert (
        saved["model"].keys()
        == saved["weights"].keys()
        == saved["average"]["tensors"].keys()
        == names
    )


# ----------------------------------------------------------------------------------------------- 57


def momentum(order):
    """Return an optimizer with these groups of two, a network's weights."""
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD([{"params": net[i].weight} for i in order], 0.1, 0.9)
    for i in (0, 1):
        optimizer.state[net[i].weight]["momentum_buffer"] = torch.full((2, 2), float(i))
    return net, optimizer


def test_pitfall_57_groups_from_a_set():
    """After a resume each weight has another one's momentum: state dicts number the weights, and groups from a `set` have another order in each process."""
    (before, saved), (net, optimizer) = momentum([0, 1]), momentum([1, 0])
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.state[net[0].weight]["momentum_buffer"].eq(1).all()

    named = common.State(before, saved, None, None, None).optimizer_by_name()
    common.State(net, optimizer, None, None, None).load_optimizer(named)
    assert optimizer.state[net[0].weight]["momentum_buffer"].eq(0).all()


# ----------------------------------------------------------------------------------------------- 60


def test_pitfall_60_other_weights_in_training():
    """The wrong weights are evaluated and saved: a schedule-free optimizer has its average in the network only after `optimizer.eval()`."""
    torch.manual_seed(0)
    net = nn.Linear(1, 1, bias=False).double()  # the best weight is 0
    average = common.WeightAverage(net, 0.999)
    y, z, x = net.weight.data, torch.ones(1, 1).double(), torch.ones(1, 1).double()
    for k in range(1, 1001):
        y.copy_(0.1 * z + 0.9 * x)  # where the gradient is taken: the method's own result is x
        z -= 0.5 * (y + torch.randn(1, 1))
        x.lerp_(z, 1 / k)
        average.after_step()
    wrong = y.abs().item()
    assert wrong > 2 * x.abs().item()
    with average.swapped_in():
        assert wrong > 2 * y.abs().item()


# ----------------------------------------------------------------------------------------------- 62


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, stored = nn.Linear(2, 2), nn.Linear(2, 1), {}
        self.body.register_forward_hook(lambda *values: stored.update(body=values[2]))
        self.stored = stored

    def forward(self, inputs):
        self.body(inputs)
        return self.head(self.stored["body"])


def test_pitfall_62_copy_of_a_model_with_closures():
    """The average is evaluated with the features of another batch: in a copy hooks still write into the original's dict, and the copy reads its own."""
    torch.manual_seed(0)
    net, inputs = Features().requires_grad_(False), torch.ones(3, 2)
    net(torch.zeros(3, 2))
    wrong, average, right = copy.deepcopy(net), common.WeightAverage(net, 0.9), net(inputs)
    assert not torch.equal(wrong(inputs), right)

    average.after_step()
    net.body.weight += 1
    with average.swapped_in():
        assert torch.equal(net(inputs), right)
