"""A run of a second, and patches that watch or interrupt the ranks of a run.

A patch is called in every process of a run, with its rank, before the script's `main`; see `harness.train`.
"""

import dataclasses
import functools
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import MODES, TASKS
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import common
import engine.check
import sampling
from engine.task_file import Task

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


def printed(out, name):
    """The values of all lines `name JSON` in the output."""
    lines = [line.split(" ", 1) for line in out.splitlines() if line.startswith(f"{name} ")]
    return [json.loads(value) for _, value in lines]


def after_step(step, action):
    """Call `action()` in this process after its optimizer step number `step`, from 1."""
    steps = itertools.count(1)
    register_optimizer_step_post_hook(lambda *_: action() if next(steps) == step else None)


def stop_after(step, rank):
    """SIGTERM for rank 0, as a cluster sends it: the run stops there."""
    if rank == 0:
        after_step(step, lambda: os.kill(os.getpid(), signal.SIGTERM))


def wrap_in_task(name, wrapped):
    """Let `wrapped(original, *arguments)` stand for a function of the task in this process."""
    make = Task.__init__

    def made(self, args):
        make(self, args)
        setattr(self, name, functools.partial(wrapped, getattr(self, name)))

    Task.__init__ = made


def change_training_loss(change, rank):
    """Let `change(losses, k)` replace the losses of the k-th forward in training, from 0, of this process."""
    calls = itertools.count()

    def per_sample_loss(original, outputs, targets):
        losses = original(outputs, targets)
        if not losses.requires_grad:  # of the check before a run, or of an evaluation
            return losses
        return change(losses, next(calls))

    wrap_in_task("per_sample_loss", per_sample_loss)


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


def checked(rank):
    """Let the script check, as it does outside of these tests."""
    for mode in MODES:
        if script := sys.modules.get(f"train_{mode}"):
            script.check_run = engine.check.check_run


# ------------------------------------------------------------------ what the rows of test_runs.py name


@dataclasses.dataclass(frozen=True)
class Events:
    """Disturb a run: pairs of a name in EVENTS, and when. The same pairs are the same run."""

    events: tuple[tuple[str, str], ...] = ()

    def __call__(self, rank: int) -> None:
        for name, at in self.events:
            EVENTS[name](at, rank)


def signal_after_step(number: int) -> Callable[[str, int], None]:
    """Send it to rank 0, as a cluster does: the run stops there."""

    def event(at: str, rank: int) -> None:
        if rank == 0:
            after_step(int(at), lambda: os.kill(os.getpid(), number))

    return event


def kill_at_call(at: str, rank: int) -> None:
    """SIGKILL for a rank just before the K-th system call of which saves are made: K, or K.RANK."""
    number, who = map(int, f"{at}.0".split(".")[:2])
    calls = itertools.count(1)

    def counted(original: Callable, *arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    for name in ("mkdir", "fsync", "rename", "replace", "rmdir") if rank == who else ():
        setattr(os, name, functools.partial(counted, getattr(os, name)))


def fill_disk(at: str, rank: int) -> None:
    """From the K-th rename on there is no space left."""
    replace, calls = os.replace, itertools.count(1)

    def full(*arguments: Any) -> None:
        if next(calls) >= int(at):
            raise OSError(28, "No space left on device")
        replace(*arguments)

    os.replace = full


def make_nan(at: str, rank: int) -> None:
    """The losses of these forwards, counted from 0, are NaN: K or K-L; with ranks on rank 1 alone."""
    first, last = map(int, f"{at}-{at}".split("-")[:2])

    def change(losses: torch.Tensor, k: int) -> torch.Tensor:
        hit = first <= k <= last and os.environ.get("RANK", "1") == "1"
        return losses * float("nan") if hit else losses

    change_training_loss(change, rank)


def in_task(name: str, function: Callable[[], Any]) -> Callable[[str, int], None]:
    """Call it in the K-th call, from 0, of a function of the task, on the last rank."""

    def event(at: str, rank: int) -> None:
        last = int(os.environ.get("WORLD_SIZE", "1")) - 1
        call_in_task(name, int(at), function, last, rank)

    return event


def break_down() -> None:
    raise RuntimeError("broken on purpose")


EVENTS = {
    # At the end of the run the last checkpoint is of this EPOCH.STEP.
    "saved": lambda at, rank: None,
    "stop": signal_after_step(signal.SIGTERM),
    "int": signal_after_step(signal.SIGINT),
    "hup": signal_after_step(signal.SIGHUP),
    "usr1": signal_after_step(signal.SIGUSR1),
    "kill": kill_at_call,
    "full": fill_disk,
    "nan": make_nan,
    "raise": in_task("per_sample_loss", break_down),
    "hang": in_task("per_sample_loss", functools.partial(time.sleep, 15)),
    "evalstop": in_task("per_sample_metrics", lambda: os.kill(os.getpid(), signal.SIGTERM)),
    "evalkill": in_task("per_sample_metrics", lambda: os.kill(os.getpid(), signal.SIGKILL)),
}
KILLED = {1, -signal.SIGKILL}
# The exit codes with which a run ends by an event; what is not here ends none.
ENDING = {"stop": {143}, "int": {130}, "hup": {129}, "usr1": {0}, "kill": KILLED, "full": {1}}
ENDING |= {"raise": {1}, "evalstop": {143}, "evalkill": KILLED}


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Let one device compute what N ranks of a mode compute, one slice after the other.

    Each slice has the dropout masks of its rank, and its own statistics of BatchNorm, of which rank
    0's are kept. How a batch is cut is written anew here, with nothing from the scripts.
    """

    mode: str
    n: int

    def __call__(self, rank: int) -> None:
        import train_single

        train_single.train_one_epoch = self.train_one_epoch

    def cut(self, micro_batches: list) -> list[tuple[int, int, Any]]:
        """Return (micro-batch, rank, samples) of each forward."""
        # as nn.DataParallel cuts, and as the sampler does
        cut = torch.Tensor.chunk if self.mode == "dp" else torch.Tensor.tensor_split
        return [
            (i, r, tree_map(lambda tensor, places=places: tensor[places], micro_batch))
            for i, micro_batch in enumerate(micro_batches)
            for r, places in enumerate(cut(torch.arange(len(micro_batch[1])), self.n))
        ]

    def train_one_epoch(self, args, task, model, loader, state, run):
        common.train_mode(model)
        for micro_batches in run.batches(loader):
            total = task.total_weight(micro_batches)
            for i, rank, (inputs, targets) in self.cut(micro_batches):
                buffers = [buffer.clone() for buffer in model.buffers()]
                sampling.seed_rng(args.seed, state.global_step, i, rank)
                outputs = model(inputs)
                losses = task.per_sample_loss(outputs, targets)
                (losses.sum() / total).backward()
                for buffer, before in zip(model.buffers(), buffers if rank else ()):
                    buffer.copy_(before)
                metrics = task.train_metrics(outputs, targets)
                state.meter.add(loss=task.weigh(losses, targets), **metrics)
            norm = common.clip_grad_norm(state.parameters, args.clip_grad_norm)
            state.optimizer.step()
            state.optimizer.zero_grad(set_to_none=True)
            state.scheduler.step()
            state.average.after_step()
            run.end_step(norm)
