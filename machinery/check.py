"""The check before a run: what else would only be found after the processes have started."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from common import (
    UsageError,
    different_names,
    freeze,
    load_weights,
    read_tensors,
    train_mode,
    tree_map,
)
from machinery.files import find_checkpoint
from machinery.processes import resolve_device_type
from machinery.rendezvous import check_address
from machinery.tasks import Task, blame, load_task
from sampling import GlobalBatchSampler, KeyedDataset, ShardSampler, leave_signals_to_parent

RESERVED = {"loss", "count", "event", "epoch", "global_step"}  # in a line of metrics.jsonl


def check_run(args: argparse.Namespace) -> None:
    """Raise UsageError if the task, a data set, the model or the checkpoint is wrong.

    A forked child looks, so that nothing of it is left here: no random number drawn, no state of
    the task, no thread.
    """
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # it ends the other ranks if one is wrong
    if "LAUNCH_PID" in os.environ or (torchrun and os.environ.get("LOCAL_RANK", "0") != "0"):
        return  # the launcher did it, or the first rank of this machine does it
    device_type = resolve_device_type(args.device)  # a forked child cannot ask
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, context, leave_signals_to_parent) as pool:
        try:
            pool.submit(check, args, device_type).result()
        except UsageError as error:
            # A task that uses the accelerator by itself cannot do so in a fork.
            if "forked subprocess" not in str(error):
                raise


def check(args: argparse.Namespace, device_type: str) -> None:
    torch.set_num_threads(1)  # a fork does not have the threads of its parent
    if getattr(args, "dist_url", None):
        url, option = urlsplit(args.dist_url), f"--dist-url {args.dist_url}"
        check_address(option, url.hostname, url.port, args.node_rank, args.nnodes)
    if args.tensorboard:
        with blame("--tensorboard needs the package tensorboard"):
            importlib.import_module("torch.utils.tensorboard")
    task = load_task(args)
    with blame(f"--task {args.task}: build_datasets", args.task):
        train_set, val_set = task.build_datasets(args)
        length = len(train_set)
        batch_size = ShardSampler(len(val_set), args.eval_batch_size).batch_size
    GlobalBatchSampler(train_set, args.batch_size, args.seed, balanced=args.balanced)
    with contextlib.redirect_stdout(io.StringIO()):  # the run prints it
        net = check_model(args, task)
    with blame(f"--resume {args.resume}: not a checkpoint of this program"):
        _, checkpoint = find_checkpoint(args, length)
    if checkpoint:
        with blame(f"--resume {args.resume}: its weights do not fit the model"):
            net.load_state_dict(checkpoint["model"])
    samples = Samples(args, task, net, device_type)
    train_mode(net)
    n = min(2, length)
    samples.check(train_set, list(range(n)), f"the first {n} samples of the training set")
    net.eval()
    n, length = min(2, len(val_set)), len(val_set)
    first = samples.check(val_set, list(range(n)), f"the first {n} samples of the evaluation set")
    last = min(n, length % batch_size or batch_size)  # of the last batch
    indices = list(range(length - last, length))
    others = samples.check(val_set, indices, "the end of the evaluation set")
    if first and (problem := different_names(first, others)):
        raise UsageError(f"--task {args.task}: {problem}")


def check_model(args: argparse.Namespace, task: Task) -> nn.Module:
    """Return the model on the CPU with --weights and --freeze."""
    asked = " with --weights default" if args.weights == "default" else ""
    where = f"--task {args.task}: build_model{asked}"
    with blame(where, args.task):
        torch.manual_seed(args.seed)
        net = task.build_model(args)
        if not isinstance(net, nn.Module) or not list(net.parameters()):
            found = type(net).__name__
            raise UsageError(f"{where} must return an nn.Module with parameters, got {found}")
        tensors = dict([*net.named_parameters(), *net.named_buffers()])
        if lazy := [name for name, tensor in tensors.items() if nn.parameter.is_lazy(tensor)]:
            advice = "send a batch through lazy modules in build_model"
            raise UsageError(f"{where}: {', '.join(lazy[:5])} has no shape yet; {advice}")
        if names := [name for name, tensor in tensors.items() if tensor.is_complex()]:
            advice = "--dtype would cut it; keep torch.view_as_real of it"
            raise UsageError(f"{where}: {', '.join(names[:5])} is complex; {advice}")
        net.to(getattr(torch, args.dtype))
        freeze(net, args.freeze)
    if args.weights not in (None, "default"):
        option = f"--weights {args.weights}"
        try:
            load_weights(net, read_tensors(args.weights, old=True), option)
        except UsageError:
            raise
        except Exception as error:  # torch's own words would advise to run the file's code
            words = f"{type(error).__name__}: {str(error).partition('. ')[0]}"
            raise UsageError(f"{option}: damaged, or not a file of weights: {words}") from error
    return net


class Samples:
    """Sends samples through all of the task, on the CPU, fetched as a run fetches them."""

    def __init__(self, args: argparse.Namespace, task: Task, net: nn.Module, device: str) -> None:
        self.args, self.task, self.net, self.device_type = args, task, net, device

    @torch.no_grad()
    def check(self, dataset: Dataset, indices: list[int], what: str) -> dict[str, Tensor]:
        """Return the metrics, none in training. Raises UsageError that tells what is wrong."""
        args, task, n = self.args, self.task, len(indices)
        where = f"--task {args.task}: {what}"
        with blame(where, args.task):
            batch = KeyedDataset(dataset, args.seed, args.skip_corrupt).__getitems__((0, indices))
            tree_map(lambda tensor: tensor, batch)  # raises if there is something else in it
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                parts = f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else None
                got = parts or type(batch).__name__
                raise UsageError(f"{where}: a sample must be (input, target), got {got}")
        inputs, targets = batch
        with blame(f"--task {args.task}: the model of build_model", args.task):
            try:
                outputs = self.net(inputs)
            except Exception:
                if self.device_type == "cpu":
                    raise
                return {}  # perhaps only the accelerator can do it
        where = f"--task {args.task}: per_sample_loss"
        with blame(where, args.task):
            one_per_sample(where, task.per_sample_loss(outputs, targets), n)
        if self.net.training:
            return {}
        where = f"--task {args.task}: per_sample_metrics"
        with blame(where, args.task):
            metrics = task.per_sample_metrics(outputs, targets)
            if not isinstance(metrics, dict) or not metrics:
                wanted = "at least one metric, as {'accuracy': tensor of [n]}"
                raise UsageError(f"{where} must return {wanted}, got {metrics!r}")
            for name, value in metrics.items():
                if name in RESERVED or not isinstance(name, str):
                    wanted = "a metric must be named by a text that the log does not use itself"
                    raise UsageError(f"{where}: {wanted}, got {name!r}")
                one_per_sample(f"{where}: {name}", value, n)
        return metrics


def one_per_sample(where: str, value: Any, n: int) -> None:
    """Raise UsageError if `value` is not one number for each of n samples."""
    if not isinstance(value, Tensor) or value.shape != (n,):
        shape = f"shape {list(value.shape)}" if isinstance(value, Tensor) else None
        wanted = f"one number per sample, shape [{n}] for {n} samples"
        raise UsageError(f"{where} must be {wanted}, got {shape or type(value).__name__}")
