"""Try a run before it begins: random samples of each set, as one batch and as its two halves.

It finds what would stop the run later, and a loss of one sample that depends on other samples:
another number of ranks would cut the batch elsewhere, and train another network. The network and
the CPU's generators are put back; those of an accelerator are seeded before every forward.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import common
from common import UsageError, print0
from machinery.identity import digest
from machinery.usertask import RESERVED, Task
from sampling import KeyedDataset, seed_rng

# Of the largest value, by whether values are rough: above the rounding of bf16, else of float32.
TOLERANCE = {True: 0.01, False: 0.001}
LOSS_ADVICE = (
    "keep padding out of the model and the loss; draw and mix in __getitem__, not in collate; for "
    "a mean over tokens return sums, undivided, and define loss_weights; a loss that compares "
    "samples needs gather_samples; shapes [n] and [n, 1] mix all; or --no-check"
)
SET_ADVICE = "use dataset_metrics for the whole set; or --no-check"


@torch.no_grad()
def check_run(
    task: Task, net: nn.Module, device: torch.device, train: DataLoader, val: DataLoader
) -> None:
    """Raise UsageError if a batch of either set shows that something is wrong.

    `net` is on the device. All ranks make the same number of forwards, as sharded networks need.
    """
    args = task.args
    if not args.check:
        return
    names = net.state_dict().keys()
    common.gather_samples.used = False  # by another run in this process
    with unchanged(net):
        net.eval()
        # Of both sets, as the samples of one may all have one length.
        compare_halves(task, net, device, train, min(13, args.eval_batch_size), "training")
        found = compare_halves(task, net, device, val, val.batch_sampler.batch_size, "evaluation")
        if made := ", ".join(sorted(net.state_dict().keys() - names)):
            advice = "no new run could load it; register it in __init__"
            raise UsageError(f"--task {args.task}: the forward of the model makes {made}; {advice}")
    if args.best and args.best.removesuffix(":min") not in found and not task.dataset_metrics:
        known = ", ".join(name for name in found if not name.startswith("weight of "))
        raise UsageError(f"--best {args.best}: no such metric; use one of {known}")


@contextlib.contextmanager
def unchanged(net: nn.Module) -> Iterator[None]:
    """Put back what changes within this context in the network and the CPU's generators."""
    tensors = [(tensor, tensor.clone()) for tensor in (*net.parameters(), *net.buffers())]
    attributes = [(module, dict(vars(module))) for module in net.modules()]
    contents = [
        (value, copy.copy(value))
        for _, values in attributes
        for name, value in values.items()
        if isinstance(value, (dict, list, set)) and "hooks" not in name  # fsdp adds its own
    ]
    generators = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),
    ]
    try:
        yield
    finally:
        for put_back, state in generators:
            put_back(state)
        common.reshard(net)
        for module, values in attributes:
            vars(module).clear()
            vars(module).update(values)
        for value, before in contents:  # the same objects, which others may hold
            value.clear()
            if isinstance(value, list):
                value.extend(before)
            else:
                value.update(before)
        for tensor, before in tensors:
            if tensor.shape != before.shape:  # an observer of quantization begins with none
                tensor.resize_(before.shape)
            tensor.copy_(before)


def values_of(
    task: Task,
    net: nn.Module,
    device: torch.device,
    keyed: KeyedDataset,
    indices: list[int],
    kind: str,
    draw: int = 0,
) -> dict[str, Tensor]:
    """Return loss, weights and metrics of these samples, fetched as a run does: float64 [n] each.

    Of the training set without metrics: train_metrics expects outputs of the training mode.
    """
    args, n = task.args, len(indices)
    more = ", ..." if n > 3 else ""
    samples = f"for samples {', '.join(map(str, indices[:3]))}{more} of the {kind} set"
    where = f"--task {task.path}, {samples}"
    with task.errors_of(f"__getitem__ or collate, {samples}"):
        inputs, targets = common.to_device(fetch(keyed, indices, where), device)
    if args.parallel_mode == "dp":
        if common.gather_samples.used:
            raise UsageError(f"{where}: dp cannot gather_samples; use ddp or spawn")
        refuse_uncut((inputs, targets), where, n)
    seed_rng(args.seed, -3, draw)
    with common.autocast(device, args.amp):
        with task.errors_of(f"the forward of the model, {samples}"):
            outputs = net(inputs)
        with task.errors_of(f"per_sample_loss or loss_weights, {samples}"):
            losses = task.per_sample_loss(outputs, targets)
            found = {"loss": task.weigh(losses, targets)}
            common.Meter(device).add(**found)  # raises if it is not one number per sample
            if len(losses) != n:
                raise UsageError(f"{where}: per_sample_loss returned {len(losses)} numbers for {n}")
        if kind == "evaluation":
            with task.errors_of(f"per_sample_metrics, {samples}"):
                metrics = task.per_sample_metrics(outputs, targets)
                if not metrics or RESERVED & metrics.keys():
                    wanted = f"at least one metric, and none named {', '.join(sorted(RESERVED))}"
                    got = ", ".join(metrics) if metrics else metrics
                    raise UsageError(f"{where}: per_sample_metrics must return {wanted}; got {got}")
                found |= metrics
                common.Meter(device).add(**found)
    for name in [name for name, value in found.items() if isinstance(value, tuple)]:
        sums, weights = found[name]
        found |= {name: sums, f"weight of {name}": weights}
    return {
        name: value.double().cpu() for name, value in found.items() if isinstance(value, Tensor)
    }


def fetch(keyed: KeyedDataset, indices: list[int], where: str) -> tuple[Any, Any]:
    """Return the batch of these samples. Raises UsageError if it cannot be one of a run."""
    first, again = (digest(keyed.__getitems__((0, indices[:2]))) for _ in range(2))
    if first != again:
        wanted = "draw from the global generator of torch, Python or numpy, which is seeded"
        raise UsageError(f"{where}: they differ when they are fetched again; {wanted}")
    batch = keyed.__getitems__((0, indices))
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        found = type(batch).__name__
        if isinstance(batch, (tuple, list, dict)):
            found += f" of {len(batch)}"
        raise UsageError(f"{where}: a sample must be (input, target), got a {found}")
    return batch


def refuse_uncut(batch: Any, where: str, n: int) -> None:
    """Raise UsageError if dp cannot cut the batch: if it holds more than tensors [n, ...]."""

    def check(leaf: Any) -> Any:
        if not torch.is_tensor(leaf) or leaf.shape[:1] != (n,):
            problem = "dp can only cut a batch of tensors [n, ...]"
            raise UsageError(f"{where}: {problem}; use ddp or spawn, or pad in collate")
        return leaf

    common.tree_map(check, batch, lambda leaf: not isinstance(leaf, (tuple, list, dict)))


def compare_halves(
    task: Task, net: nn.Module, device: torch.device, loader: DataLoader, size: int, kind: str
) -> dict[str, Tensor]:
    """Return what values_of returns for `size` random samples of a set, which may be sorted.

    Raises UsageError if a loss, weight or metric changes when its batch is cut in half. What a
    model draws cannot be compared, nor can a loss that asks for the samples of all ranks.
    """
    keyed, n = loader.dataset, loader.batch_sampler.length
    indices = random.Random(0).sample(range(n), min(size, n))

    def run_part(part: list[int], draw: int = 0) -> dict[str, Tensor]:
        return values_of(task, net, device, keyed, part, kind, draw)

    half = len(indices) // 2
    whole, other_draw = run_part(indices), run_part(indices, draw=1)
    halves = [run_part(part) for part in (indices[:half], indices[half:]) if part]
    if not half or common.gather_samples.used:
        return whole
    same = {
        name: torch.isclose(values, other_draw[name], rtol=1e-4, equal_nan=True)
        for name, values in whole.items()
    }
    if not same["loss"].all():
        i = int(same["loss"].int().argmin())
        twice = f"{whole['loss'][i]:.6g}, and {other_draw['loss'][i]:.6g} the second time"
        found = f"the loss of sample {indices[i]} of the {kind} set is {twice}"
        advice = "draw in __getitem__, or another number of ranks trains another run"
        print0(f"warning: {found}; {advice}")
        if kind == "training":
            refuse_mixing(task, net, device, keyed, indices)
        return whole
    rough = device.type != "cpu" or task.args.amp != "off"  # a metric like top1 may jump
    for part in halves:
        if only := ", ".join(sorted(part.keys() ^ whole.keys())):
            problem = "the metrics must have the same names for every batch"
            raise UsageError(f"--task {task.path}: {problem}; only some batches have {only}")
    for name, values in whole.items():
        if not same[name].all() or (rough and "loss" not in name):
            continue  # drawn, or rounded
        apart = torch.cat([part[name] for part in halves])
        allowed = 1e-6 + TOLERANCE[rough] * values.nan_to_num().abs().max().item()
        close = torch.isclose(values, apart, rtol=0, atol=allowed, equal_nan=True)
        if not close.all():
            i = int(close.int().argmin())
            problem = f"{name} of sample {indices[i]} is {values[i]:.6g} in a batch"
            advice = LOSS_ADVICE if "loss" in name else SET_ADVICE
            raise UsageError(
                f"--task {task.path}: {problem}, and {apart[i]:.6g} in half of it: other samples "
                f"must not change it; {advice}"
            )
    return whole


def refuse_mixing(
    task: Task, net: nn.Module, device: torch.device, keyed: KeyedDataset, indices: list[int]
) -> None:
    """Raise UsageError if a sample's loss has a gradient with respect to another one's outputs.

    It needs no tolerance, and finds what a draw would hide. Outputs are looked at that are tensors
    [n, ...] without another dimension of that length.
    """
    inputs, targets = common.to_device(keyed.__getitems__((0, indices)), device)
    n, leaves = len(indices), []

    def cut_off(tensor: Tensor) -> Tensor:
        leaf = tensor.detach().requires_grad_(tensor.is_floating_point())
        if leaf.requires_grad and leaf.shape[:1] == (n,) and [*leaf.shape].count(n) == 1:
            leaves.append(leaf)
        return leaf.clone()  # the loss may change it in place

    with common.autocast(device, task.args.amp):
        outputs = net(inputs)
        try:
            with torch.enable_grad():
                losses = task.per_sample_loss(common.tree_map(cut_off, outputs), targets)
                middle = losses[n // 2]
        except Exception:  # it expects what the model returns in training
            return
    if not leaves or not middle.requires_grad:
        return
    for gradient in torch.autograd.grad(middle, leaves, materialize_grads=True):
        gradient[n // 2] = 0
        if gradient.nan_to_num().any():
            other = indices[int(gradient.flatten(1).any(1).int().argmax())]
            found = f"the loss of sample {indices[n // 2]} depends on the outputs of sample {other}"
            raise UsageError(f"--task {task.path}: {found}; {LOSS_ADVICE}")
