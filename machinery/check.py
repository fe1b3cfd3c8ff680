"""The check before a run: what else would only be found after the processes have started."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from urllib.parse import urlsplit

import torch
from torch import nn
from torch.utils.data import Dataset

import common
from common import UsageError
from machinery.files import find_checkpoint
from machinery.options import refuse
from machinery.processes import resolve_device_type
from machinery.rendezvous import check_address
from machinery.tasks import Task, blame, build_net, load_task
from sampling import GlobalBatchSampler, KeyedDataset, ShardSampler, leave_signals_to_parent

# Names in a line of metrics.jsonl that are no metric.
RESERVED = {"loss", "count", "event", "epoch", "step", "global_step", "lr", "images_per_s"}
RESERVED |= {"grad_norm", "skipped", "data_wait", "train_s", "eval_s", "save_s"}


def check_run(args: argparse.Namespace) -> None:
    """Raise UsageError if the task, a data set, the model or the checkpoint is wrong.

    A forked child looks, so that nothing of it is left here: no random number drawn, no state of
    the task, no thread.
    """
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # it ends the other ranks if one is wrong
    if "LAUNCH_PID" in os.environ or (torchrun and os.environ.get("LOCAL_RANK", "0") != "0"):
        return  # the launcher did it, or the first rank of this machine does it
    on_cpu = resolve_device_type(args.device) == "cpu"  # a forked child cannot ask
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, context, leave_signals_to_parent) as pool:
        try:
            pool.submit(check, args, on_cpu).result()
        except UsageError as error:
            # A task that uses the accelerator by itself cannot do so in a fork.
            if "forked subprocess" not in str(error):
                raise


def check(args: argparse.Namespace, on_cpu: bool) -> None:
    """Build all that a run builds, and send a few samples through it, on the CPU."""
    torch.set_num_threads(1)  # a fork does not have the threads of its parent
    if getattr(args, "dist_url", None):
        url, option = urlsplit(args.dist_url), f"--dist-url {args.dist_url}"
        with blame(option):
            check_address(option, url.hostname, url.port, args.node_rank, args.nnodes)
    if args.tensorboard:
        with blame("--tensorboard needs the package tensorboard"):
            importlib.import_module("torch.utils.tensorboard")
    task = load_task(args)
    with blame(f"--task {args.task}: build_datasets", args.task):
        train_set, val_set = task.build_datasets(args)
        length = len(train_set)
        if hasattr(train_set, "set_epoch"):
            advice = "draw in __getitem__, where each sample has its own seed in each epoch"
            raise UsageError(f"--task {args.task}: set_epoch of a data set is not called; {advice}")
        batch_size = ShardSampler(len(val_set), args.eval_batch_size).batch_size
    GlobalBatchSampler(train_set, args.batch_size, args.seed, balanced=args.balanced)
    default = " with --weights default" if args.weights == "default" else ""
    silent = contextlib.redirect_stdout(io.StringIO())  # the run prints it
    with silent, blame(f"--task {args.task}: build_model{default}", args.task):
        net = build_net(args, task, torch.device("cpu"))
    where = f"--task {args.task}: build_optimizer"
    with blame(where, args.task):
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
        torch.save(optimizer.state_dict(), file := io.BytesIO())
        file.seek(0)
        torch.load(file, weights_only=True)  # else no run could go on
    with blame(f"--resume {args.resume}: not a checkpoint of this program"):
        _, checkpoint = find_checkpoint(args, length)
    if checkpoint:
        with blame(f"--resume {args.resume}: its weights do not fit the model"):
            net.load_state_dict(checkpoint["model"])
    common.train_mode(net)
    meter = common.Meter(torch.device("cpu"))  # it minds the names of the metrics
    first = [*range(min(2, args.batch_size))]  # no batch that never comes
    check_samples(args, task, net, train_set, first, on_cpu, meter)
    net.eval()
    n, first = len(val_set), [*range(min(2, batch_size))]
    last = min(2, n % batch_size or batch_size)  # samples of the last batch
    for indices in first, [*range(n - last, n)]:
        check_samples(args, task, net, val_set, indices, on_cpu, meter)
    unknown = args.best not in (None, *meter.sums) and meter.count and not task.dataset_metrics
    refuse(unknown, f"--best {args.best}: no such metric; use one of {', '.join(meter.sums)}")


@torch.no_grad()
def check_samples(
    args: argparse.Namespace,
    task: Task,
    net: nn.Module,
    dataset: Dataset,
    indices: list[int],
    on_cpu: bool,
    meter: common.Meter,
) -> None:
    """Fetch samples as a run does, and compute their losses and, in evaluation, their metrics."""
    kind = "training" if net.training else "evaluation"
    where = f"--task {args.task}: samples {indices} of the {kind} set"
    with blame(where, args.task):
        batch = KeyedDataset(dataset, args.seed, args.skip_corrupt).__getitems__((0, indices))
        common.tree_map(lambda tensor: tensor, batch)  # raises if there is something else in it
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
    where = f"--task {args.task}: per_sample_loss"
    with blame(where, args.task):
        losses = task.per_sample_loss(outputs, targets)
        common.Meter(meter.device).add(loss=losses)
        if len(losses) != len(indices):
            raise UsageError(f"{where}: {len(losses)} numbers for {len(indices)} samples")
    function = task.train_metrics if net.training else task.per_sample_metrics
    name = task.train_metrics.__name__ if net.training else "per_sample_metrics"
    where = f"--task {args.task}: {name}"
    with blame(where, args.task):
        metrics = function(outputs, targets)
        if not (metrics or net.training) or RESERVED & metrics.keys():
            wanted = f"at least one metric, and none named {', '.join(sorted(RESERVED))}"
            raise UsageError(f"{where} must return {wanted}; got {metrics}")
        (common.Meter(meter.device) if net.training else meter).add(loss=losses, **metrics)
