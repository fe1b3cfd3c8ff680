"""A `Run` in the process of the test, on a small network, and a clock that the test moves."""

import time
from argparse import Namespace

import torch
from harness import make_args, make_sampler
from torch import nn

import checkpoint
import common

CPU = torch.device("cpu")


class Clock:
    """Stands where checkpoint.py has the module `time`."""

    def __init__(self):
        self.seconds = 1000.0

    def __getattr__(self, name):
        known = ("perf_counter", "monotonic", "time")
        return (lambda: self.seconds) if name in known else getattr(time, name)


def make_run(folder, *argv, length=185, batch_size=30, net=None, rank=0, world_size=1):
    """Return a Run that writes to `folder / "run"`; by default an epoch has 6 steps."""
    torch.manual_seed(0)
    net = net or nn.Linear(2, 2).double()
    options = [
        "--batch-size",
        str(batch_size),
        "--warmup-epochs",
        "0",
        "--device",
        "cpu",
        *map(str, argv),
    ]
    args = make_args("single", "--output-dir", str(folder / "run"), *options)
    sampler = make_sampler(length, batch_size, rank, world_size)
    optimizer = common.build_optimizer(args, net)
    scheduler = common.build_scheduler(args, optimizer, sampler.steps_per_epoch)
    parts = optimizer, scheduler, common.Scaler(args, CPU, net), common.build_average(args, net)
    return checkpoint.Run(args, checkpoint.State(net, *parts), sampler, Namespace(length=57), CPU)


def start_epoch(run, batches=100):
    """Return the iterator of `run.batches` over made-up batches; the first is on its way."""
    iterator = run.batches([(torch.zeros(1), torch.zeros(1))] * batches)
    next(iterator)
    return iterator


def make_step(run, losses, norm=1.0):
    """Count a step with these losses, one a sample."""
    run.meter.add(loss=torch.as_tensor(losses, dtype=torch.float64))
    run.end_step(torch.tensor(norm, dtype=torch.float64))
