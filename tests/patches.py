"""A run of a second, and patches that watch or interrupt the ranks of a run.

A patch is called in every process of a run, with its rank, before the script's `main`; see `harness.train`.
"""

import functools
import itertools
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp
from harness import TASKS, run_processes
from launches import MEASURED
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

import common
import machinery.check
import machinery.process
import machinery.usertask

# 203 training samples in batches of 30: 6 steps an epoch, 18 in all; neither 4 ranks nor 4 micro-batches divide a batch
BASE = (
    "--task",
    str(TASKS / "pit_models.py"),
    *"--dtype float64 --device cpu --epochs 3 --batch-size 30".split(),
)
BASE += ("--log-every", "1", "--warmup-epochs", "1", "--timeout", "30")


class Operations(TorchDispatchMode):
    """Notes what torch computes, by its own names."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*arguments, **(options or {}))


def in_process(function):
    """Run a picklable function in a process of its own; return what it printed. If it raises, the test fails."""
    with tempfile.TemporaryDirectory() as name:
        ((code, out, err),) = run_processes([function], Path(name))
    assert code == 0, err
    return out


def printed(out, name):
    """The values of all lines `name JSON` in the output."""
    return [
        json.loads(line.removeprefix(name))
        for line in out.splitlines()
        if line.startswith(f"{name} ")
    ]


def after_step(step, action):
    """Call `action()` in this process after its optimizer step number `step`, from 1."""
    steps = itertools.count(1)
    register_optimizer_step_post_hook(lambda *_: action() if next(steps) == step else None)


def stop_after(step, rank):
    """SIGTERM for rank 0, as a cluster sends it: the run stops there, or one step later if it has to agree with other ranks."""
    if rank == 0:
        after_step(step, lambda: os.kill(os.getpid(), signal.SIGTERM))


def wrap_in_task(name, wrapped):
    """Let `wrapped(original, *arguments)` stand for a function of the task in this process."""
    make = machinery.usertask.Task.__init__

    def made(self, args):
        make(self, args)
        setattr(self, name, functools.partial(wrapped, getattr(self, name)))

    machinery.usertask.Task.__init__ = made


def change_training_loss(change, rank):
    """Let `change(losses, k)` replace the losses of the k-th forward in training, from 0, of this process."""
    calls = itertools.count()

    def per_sample_loss(original, outputs, targets):
        losses = original(outputs, targets)
        if not losses.requires_grad:  # of the check before a run, or of an evaluation
            return losses
        return change(losses, next(calls))

    wrap_in_task("per_sample_loss", per_sample_loss)


def on_rank_1(change, call):
    """Let `change(losses)` replace the losses of rank 1 in one step of the training, counted from 0.

    It asks for the rank at the time: this is called before ranks are forked.
    """

    def changed(losses, k):
        return change(losses) if k == call and dist.get_rank() == 1 else losses

    change_training_loss(changed, None)


def set_environment(values, rank):
    os.environ.update(values)


class Patches:
    """Several patches as one."""

    def __init__(self, *patches):
        self.patches = patches

    def __call__(self, rank):
        for patch in self.patches:
            patch(rank)


def checked(rank):
    """Let the script check, as it does outside of these tests."""
    for mode in ("single", "dp", "ddp", "spawn", "fsdp"):
        if script := sys.modules.get(f"train_{mode}"):
            script.check_run = machinery.check.check_run


def without_speed(lines):
    """Lines of metrics.jsonl without what differs from run to run."""
    return [{key: value for key, value in line.items() if key not in MEASURED} for line in lines]


def spawn_launcher(argv, change=None, call=2):
    """train_spawn.py as launched by hand, but for the start of its ranks by fork, which saves importing torch in each."""
    import train_spawn

    mp.spawn = functools.partial(mp.start_processes, start_method="fork")
    if change:
        on_rank_1(change, call)
    return machinery.process.run_main(functools.partial(train_spawn.main, argv))


def scale_as_fp16(rank):
    """The loss scale of --amp fp16 in float64, where it must not change a bit: that shows the order of what is done with the gradient."""
    init = common.StepGuard.__init__

    def scaled(self, amp, *arguments):
        init(self, "fp16", *arguments)

    common.StepGuard.__init__ = scaled


def call_in_task(name, at, function, rank_to_call=0, rank=0):
    """Let rank `rank_to_call` call `function()` in the `at`-th call, from 0, of a function of the task. Bind all but the rank."""
    if rank != rank_to_call:
        return
    calls = itertools.count()

    def watched(original, *arguments):
        if next(calls) == at:
            function()
        return original(*arguments)

    wrap_in_task(name, watched)
