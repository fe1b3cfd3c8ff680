"""The checks before the first step: of what a run has built, and between its ranks."""

from __future__ import annotations

import gc
import hashlib
import inspect
import io
import itertools
import math
import multiprocessing
import os
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import common
from common import UsageError
from machinery.files import find_checkpoint
from machinery.options import PER_NODE, declared, keys, refuse
from machinery.processes import error_on_all, resolve_device_type
from machinery.tasks import RESERVED, Task, blame
from sampling import GlobalBatchSampler, KeyedDataset, ShardSampler, leave_signals_to_parent

_given: tuple = ()  # in the child: the arguments of check, which the fork has brought


def check_run(
    args: Namespace, task: Task, train_set: Dataset, val_set: Dataset, net: nn.Module
) -> None:
    """Raise UsageError if the data sets, the model, the task or the checkpoint is wrong.

    `net` is on the CPU. A forked child calls `check`, so that nothing of it is left here: no random
    number drawn, no state of the task, no thread.
    """
    # Under run.sh, spawn and torchrun only the first rank of a machine looks: if it fails, all end.
    # Under srun each rank looks.
    if not args.check:
        return
    launched = {"LAUNCH_PID", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
    if launched and os.environ.get("LOCAL_RANK", "0") != "0":
        return
    on_cpu = resolve_device_type(args.device) == "cpu"  # a forked child cannot ask
    given = (torch.get_device_module(), args, task, train_set, val_set, net, on_cpu)
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), become_child, given) as pool:
        try:
            pool.submit(check_given).result()
        except UsageError as error:
            # A task that uses the accelerator by itself cannot do so in a fork.
            if "forked subprocess" not in str(error):
                raise


def become_child(accelerator: Any, *given: Any) -> None:
    """Keep what the fork has brought along, for check_given: a pipe would copy it."""
    global _given
    leave_signals_to_parent()
    # A fork cannot use the accelerator. torch's Adam would ask it before a step.
    accelerator.is_available = lambda: False
    torch.set_num_threads(1)  # a fork does not have the threads of its parent
    gc.freeze()  # to look for garbage in what the two share would copy it, page by page
    _given = given


def check_given() -> None:
    check(*_given)


def check(
    args: Namespace, task: Task, train_set: Dataset, val_set: Dataset, net: nn.Module, on_cpu: bool
) -> None:
    """Send a few samples through all that a run has built, on the CPU."""
    with blame(f"--task {args.task}: build_datasets", args.task):
        length = len(train_set)
        if hasattr(train_set, "set_epoch"):
            advice = "draw in __getitem__, where each sample has its own seed in each epoch"
            raise UsageError(f"--task {args.task}: set_epoch of a data set is not called; {advice}")
        batch_size = ShardSampler(len(val_set), args.eval_batch_size).batch_size
    GlobalBatchSampler(train_set, args.batch_size, args.seed, balanced=args.balanced)
    check_optimizer(args, task, net)

    with blame(f"--task {args.task}: get_extra_state of the model", args.task):
        read_back({n: v for n, v in net.state_dict().items() if not isinstance(v, torch.Tensor)})
    with blame(f"--resume {args.resume}: not a checkpoint of this program"):
        _, checkpoint = find_checkpoint(args, length)
    if checkpoint:
        with blame(f"--resume {args.resume}: its weights do not fit the model"):
            net.load_state_dict(checkpoint["model"])

    tensors = names_of_tensors(args, net)
    common.train_mode(net)
    meter = common.Meter(torch.device("cpu"))  # raises if the metrics' names differ
    few = [*range(min(2, args.batch_size))]  # two samples, or one if a batch holds only one
    check_samples(args, task, net, train_set, few, on_cpu, meter)
    net.eval()
    n, few = len(val_set), [*range(min(2, batch_size))]
    last = min(2, n % batch_size or batch_size)  # the last batch may hold only one too
    for indices in few, [*range(n - last, n)]:
        check_samples(args, task, net, val_set, indices, on_cpu, meter)

    made = ", ".join(sorted(names_of_tensors(args, net) - tensors))
    advice = "no checkpoint or average would have it; register it in __init__"
    refuse(made, f"--task {args.task}: the forward of the model makes the buffer {made}; {advice}")
    unknown = args.best not in (None, *meter.sums) and meter.count and not task.dataset_metrics
    refuse(unknown, f"--best {args.best}: no such metric; use one of {', '.join(meter.sums)}")
    lists = "" if task.dataset_metrics else ", ".join(meter.lists)
    advice = "without a function of this name in the task nobody uses them"
    refuse(lists, f"--task {args.task}: {lists}: lists are for dataset_metrics; {advice}")


def check_optimizer(args: Namespace, task: Task, net: nn.Module) -> None:
    """Build the optimizer, make a step (in this child), and read its state as a resume does."""
    with blame(f"--task {args.task}: build_optimizer", args.task) as where:
        optimizer = task.build_optimizer(args, net)
        if not isinstance(optimizer, torch.optim.Optimizer):
            found = type(optimizer).__name__
            raise UsageError(f"{where} must return an optimizer of torch.optim, got {found}")
        inspect.signature(optimizer.step).bind()  # a step that needs a closure is none of ours
        parts = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained = {id(p) for p in net.parameters() if p.requires_grad}
        if not trained <= parts <= {id(p) for p in net.parameters()}:
            wanted = "every parameter of the model that trains, and no other; see also --freeze"
            raise UsageError(f"{where}: the groups must hold {wanted}")
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        read_back(optimizer.state_dict())


def names_of_tensors(args: Namespace, net: nn.Module) -> set[str]:
    """Return the names of what the run keeps: the state, and for an average every buffer."""
    buffers = [name for name, _ in net.named_buffers()] if args.average != "none" else []
    return {*net.state_dict(), *buffers}


def read_back(value: Any) -> None:
    """Raise if a checkpoint could hold the value, but no run could load it."""
    torch.save(value, file := io.BytesIO())
    file.seek(0)
    torch.load(file, weights_only=True)


def fetch(args: Namespace, dataset: Dataset, indices: list[int]) -> Any:
    """Return these samples as the first epoch has them."""
    return KeyedDataset(dataset, args.seed, args.skip_corrupt).__getitems__((0, indices))


def digest(batch: Any) -> str:
    """Return a hash of all numbers of a batch. Raises TypeError if it holds more than tensors."""
    # Clones, as a view would be hashed with all the memory behind it.
    torch.save(common.tree_map(torch.clone, batch), file := io.BytesIO())
    return hashlib.sha256(file.getvalue()).hexdigest()[:12]


@torch.no_grad()
def check_samples(
    args: Namespace,
    task: Task,
    net: nn.Module,
    dataset: Dataset,
    indices: list[int],
    on_cpu: bool,
    meter: common.Meter,
) -> None:
    """Fetch samples as a run does, and compute their losses and metrics."""
    kind = "training" if net.training else "evaluation"
    with blame(f"--task {args.task}: samples {indices} of the {kind} set", args.task) as where:
        batch = fetch(args, dataset, indices)
        if digest(batch) != digest(fetch(args, dataset, indices)):
            wanted = "draw from the global generator of torch, Python or numpy, which is seeded"
            raise UsageError(f"{where}: they differ when they are fetched again; {wanted}")
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            found = f"{type(batch).__name__} of {len(batch)}"
            raise UsageError(f"{where}: a sample must be (input, target), got a {found}")
    inputs, targets = batch
    with blame(f"--task {args.task}: the model of build_model", args.task):
        try:
            outputs = net(inputs)
        except Exception:
            if on_cpu:
                raise
            return  # perhaps only the accelerator can do it
    with blame(f"--task {args.task}: per_sample_loss", args.task) as where:
        losses = task.per_sample_loss(outputs, targets)
        common.Meter(meter.device).add(loss=losses)
        if len(losses) != len(indices):
            raise UsageError(f"{where}: {len(losses)} numbers for {len(indices)} samples")
    function = task.train_metrics if net.training else task.per_sample_metrics
    name = "train_metrics" if net.training else "per_sample_metrics"
    with blame(f"--task {args.task}: {name}", args.task) as where:
        metrics = function(outputs, targets)
        if not (metrics or net.training) or RESERVED & metrics.keys():
            wanted = f"at least one metric, and none named {', '.join(sorted(RESERVED))}"
            raise UsageError(f"{where} must return {wanted}; got {metrics}")
        (common.Meter(meter.device) if net.training else meter).add(loss=losses, **metrics)


def check_agreement(
    args: Namespace, train_length: int, val_set: Dataset, device: torch.device
) -> None:
    """Raise on every rank if the ranks do not mean the same run. Call it on every rank.

    With another --batch-size on one node the ranks would hang. With another --seed, code or data
    set they would go on to a wrong result.
    """
    if not dist.is_initialized():
        return
    root = Path(__file__).resolve().parent.parent
    files = [*sorted(root.glob("*.py")), *sorted(root.glob("machinery/*.py")), Path(args.task)]
    code = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    per_node = keys(PER_NODE)
    given = {name: v for name, v in declared(args).items() if name not in per_node}
    must_agree = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    must_agree |= {"the number of training samples": train_length}
    n = len(val_set)
    must_agree |= {"the number of evaluation samples": n}
    # Ranks that list files or classes in another order would train on other data.
    some = digest(fetch(args, val_set, [*range(0, n, math.ceil(n / 8))]))
    must_agree |= {"the hash of some evaluation samples": some}
    must_agree |= {"the code": code[:12], "torch": torch.__version__, "the device": device.type}
    ranks: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, must_agree)
    for name, (rank, theirs) in itertools.product(ranks[0], enumerate(ranks)):
        first, other = ranks[0][name], theirs.get(name, "unknown")
        if first != other:
            found = f"{first} on rank 0, but {other} on rank {rank}"
            raise error_on_all(f"{name} is {found}; all nodes need the same")
