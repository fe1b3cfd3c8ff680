"""Does the loss of a sample depend on other samples? Try it before the run.

Another number of ranks would cut the batch elsewhere, and train another network.
"""

import functools
import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

import common
from common import fail, print0
from engine.task_file import Task
from sampling import seed_rng

DIVIDED = "do not divide by the number of samples"
LOSS = "keep padding out of the model and the loss; docs/recipes.md has more causes"
METRIC = "leave padding out; dataset_metrics may compare samples"


@torch.no_grad()
def check_run(
    task: Task, net: nn.Module, device: torch.device, train: DataLoader, val: DataLoader
) -> None:
    """End the run if a loss or metric of a sample changes when its batch is cut.

    What the model draws, and a loss that asks for the samples of all ranks, cannot be compared. All
    ranks make the same number of forwards, as sharded networks need. The network and the generators
    are left as they were.
    """
    buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    net.eval()
    for kind, loader in [("training", train), ("evaluation", val)] if task.args.check else ():
        fetch, length = loader.dataset.__getitems__, loader.batch_sampler.length
        n, common.gather_samples.used = min(13, length), False
        indices = random.Random(0).sample(range(length), n)
        parts = [part for part in (indices[:1], indices[1:]) if part]  # one sample is alone
        batch, *pieces = [common.to_device(fetch((0, some)), device) for some in (indices, *parts)]
        values_in = functools.partial(per_sample_values, task, net, device, kind == "evaluation")
        together, again = values_in(batch, 0), values_in(batch, 1)
        apart = [values_in(piece, 0) for piece in pieces]
        rounds = device.type != "cpu" or task.args.amp != "off"  # a metric like top1 may jump
        for name, values in together.items() if not common.gather_samples.used else ():
            if not torch.allclose(values, again[name], rtol=1e-4, equal_nan=True):
                print0(f"warning: not checked, as the model draws it: {name} of the {kind} set")
                continue
            cut = torch.cat([piece[name] for piece in apart])
            allowed = 1e-6 + (0.01 if rounds else 0.001) * values.nan_to_num().abs().max().item()
            close = torch.isclose(values, cut, rtol=0, atol=allowed, equal_nan=True)
            if ("loss" in name or not rounds) and not close.all():
                i = int(close.int().argmin())
                found = f"{values[i]:.6g} in a batch, and {cut[i]:.6g} in a part of it"
                divided = torch.isclose(cut[i], values[i] * n / (n - 1 if i else 1))
                advice = DIVIDED if divided else LOSS if "loss" in name else METRIC
                where = f"--task {task.args.task}: {name} of {kind} sample {indices[i]}"
                fail(f"{where} is {found}: other samples must not change it; {advice}")
    for buffer, before in buffers:
        buffer.copy_(before)
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    common.train_mode(net)


def per_sample_values(
    task: Task, net: nn.Module, device: torch.device, metrics: bool, batch: tuple, draw: int
) -> dict[str, Tensor]:
    """Return loss, weights and metrics of the samples of a batch: float64 [n] each."""
    args, (inputs, targets) = task.args, batch
    seed_rng(args.seed, -3, draw)
    with common.autocast(device, args.amp):
        try:
            outputs = net(inputs)
        except TypeError as error:
            advice = "the model is called as model(input); several inputs are one tuple"
            raise TypeError(f"{error}; {advice}") from error
        losses = task.per_sample_loss(outputs, targets)
        found = {"loss": task.weigh(losses, targets)}
        found |= task.per_sample_metrics(outputs, targets) if metrics else {}
    try:
        common.Meter().add(**found)
    except ValueError as error:  # it is not one number per sample
        fail(f"--task {args.task}: {error}")
    if args.parallel_mode == "dp":
        lengths = {getattr(leaf, "shape", (0,))[:1] for leaf in tree_leaves(batch)}
        if lengths != {losses.shape} or common.gather_samples.used:
            fail(f"--task {args.task}: dp cuts tensors [n, ...] alone, no gather_samples; use ddp")
    for name in [name for name, value in found.items() if isinstance(value, tuple)]:
        found[name], found[f"weight of {name}"] = found[name]
    return {n: value.double().cpu() for n, value in found.items() if isinstance(value, Tensor)}
