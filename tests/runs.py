"""A `Run` in the process of the test, on a small network."""

import torch
from harness import CPU, make_args, make_sampler, state_of
from torch import nn

import engine.run
import sampling


class Batches(list):
    """Stands in for a loader."""

    num_workers = 0


def make_run(folder, *argv, length=185, batch_size=30, net=None, rank=0, world_size=1):
    """Return a Run that writes to `folder / "run"`; by default an epoch has 6 steps."""
    torch.manual_seed(0)
    net = net or nn.Linear(2, 2).double()
    options = ["--batch-size", str(batch_size), *"--warmup-epochs 0 --device cpu".split()]
    argv = [*options, *map(str, argv)]
    args = make_args("single", "--output-dir", str(folder / "run"), *argv)
    sampler = make_sampler(length, batch_size, rank, world_size)
    loader = sampling.build_loader(range(length), sampler, CPU, 0, 0)
    val_loader = sampling.build_loader(range(57), sampling.ShardSampler(57, 8), CPU, 0, 0)
    state = state_of(args, net, sampler.steps_per_epoch)
    run = engine.run.Run(state, loader, val_loader, CPU, args)
    run.open()
    return run


def start_epoch(run, batches=100):
    """Return the iterator of `run.batches` over made-up batches; the first is on its way."""
    iterator = run.batches(Batches([(torch.zeros(1), torch.zeros(1))] * batches))
    next(iterator)
    return iterator


def make_step(run, losses, norm=1.0):
    """Count a step with these losses, one a sample."""
    run.state.meter.add(loss=torch.as_tensor(losses, dtype=torch.float64))
    run.state.scheduler.step()
    run.state.average.after_step()
    run.end_step(torch.tensor(norm, dtype=torch.float64))
