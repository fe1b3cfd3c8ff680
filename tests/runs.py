"""A `Run` in the process of the test, on a small network, and a clock that the test moves."""

import time

import torch
from harness import average_of, guard_of, make_args, make_sampler, optimizer_of, scheduler_of
from patches import without_speed
from torch import nn

import common
import machinery.run
import sampling

CPU = torch.device("cpu")


class Clock:
    """Stands where machinery/run.py has the module `time`."""

    def __init__(self):
        self.seconds = 1000.0

    def __getattr__(self, name):
        known = ("perf_counter", "monotonic", "time")
        return (lambda: self.seconds) if name in known else getattr(time, name)


class Batches(list):
    """Stands in for a loader."""

    num_workers = 0


def make_run(folder, *argv, length=185, batch_size=30, net=None, rank=0, world_size=1):
    """Return a Run that writes to `folder / "run"`; by default an epoch has 6 steps."""
    torch.manual_seed(0)
    net = net or nn.Linear(2, 2).double()
    options = [
        "--batch-size",
        str(batch_size),
        *"--warmup-epochs 0 --device cpu".split(),
        *map(str, argv),
    ]
    args = make_args("single", "--output-dir", str(folder / "run"), *options)
    sampler = make_sampler(length, batch_size, rank, world_size)
    optimizer = optimizer_of(args, net)
    scheduler = scheduler_of(args, optimizer, sampler.steps_per_epoch)
    parts = optimizer, scheduler, guard_of(args, CPU, net), average_of(args, net)
    loader = sampling.build_loader(range(length), sampler, CPU, 0, 0)
    val_loader = sampling.build_loader(range(57), sampling.ShardSampler(57, 8), CPU, 0, 0)
    run = machinery.run.Run(common.State(net, *parts), loader, val_loader, CPU, args)
    run.resume()
    return run


def start_epoch(run, batches=100):
    """Return the iterator of `run.batches` over made-up batches; the first is on its way."""
    iterator = run.batches(Batches([(torch.zeros(1), torch.zeros(1))] * batches))
    next(iterator)
    return iterator


def make_step(run, losses, norm=1.0):
    """Count a step with these losses, one a sample."""
    run.meter.add(loss=torch.as_tensor(losses, dtype=torch.float64))
    run.state.scheduler.step()
    run.state.average.after_step()
    run.end_step(torch.tensor(norm, dtype=torch.float64))


def end_epoch(run, loss=1.0, **metrics):
    """End an epoch with these metrics, by default top1 0.5, as the scripts do."""
    run.state.epoch, run.state.step = run.state.epoch + 1, 0
    run.end_epoch({"loss": loss, **(metrics or {"top1": 0.5}), "count": 57})


def end(run):
    """Leave a run as a process that ends: its lock is free."""
    run.files.metrics_file.close()


def load(path):
    """Return what is in a checkpoint."""
    return torch.load(path, weights_only=True)


def assert_same_log(resumed, reference, step):
    """Fail unless a run that was resumed after `step` has logged each line once, as the reference has.

    The means of the first line after it may differ: they are of the steps since then.
    """
    ours, theirs = without_speed(resumed.lines), without_speed(reference.lines)
    steps = [line["global_step"] for line in ours if line["event"] == "train"]
    if step not in steps:  # it lies between two lines
        i = next(i for i, line in enumerate(ours) if line["global_step"] > step)
        kept = ("event", "epoch", "step", "global_step", "lr", "grad_norm")
        ours[i], theirs[i] = ({name: lines[i][name] for name in kept} for lines in (ours, theirs))
    assert ours == theirs
