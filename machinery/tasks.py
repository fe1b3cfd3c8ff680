"""Load the file of --task, bind its options, build its model; name the file in what it raises."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import sys
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import common
from common import UsageError, freeze, load_weights, read_tensors
from sampling import seed_generators, seed_rng

# Names in a line of metrics.jsonl that are no metric.
RESERVED = {"loss", "count", "event", "epoch", "step", "global_step", "lr", "images_per_s"}
RESERVED |= {"grad_norm", "skipped", "data_wait", "train_s", "eval_s", "save_s"}
BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
fresh: dict[Path, ModuleType] = {}  # what parse_args has loaded: load_task runs no file twice


@contextlib.contextmanager
def blame(where: str, path: str | None = None) -> Iterator[str]:
    """Yield `where`, and turn whatever the block raises into a UsageError that begins with it.

    `path` is the file whose line number helps.
    """
    try:
        yield where
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # a script without a main guard may call sys.exit
        frames = traceback.extract_tb(error.__traceback__)
        places = [(frame.filename, frame.lineno) for frame in frames]
        if isinstance(error, SyntaxError):
            places.append((error.filename, error.lineno))
        same = os.path.realpath(path or "")
        lines = [line for name, line in places if path and name and os.path.realpath(name) == same]
        line = f", line {lines[-1]}" if lines else ""
        raise UsageError(f"{where}{line}: {type(error).__name__}: {error}") from error


def default_optimizer(args: Namespace, net: nn.Module) -> torch.optim.Optimizer:
    with blame(f"--optimizer {args.optimizer}"):
        settings = args.lr, args.momentum, args.weight_decay, args.nesterov
        return common.build_optimizer(net, args.optimizer, *settings)


# They read the weights of their parts without calling them.
READ_THEIR_PARTS = nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer


def large_modules(net: nn.Module) -> list[nn.Module]:
    """Return the parts of the network that fsdp shards each for itself.

    They are the topmost modules with at most an eighth of the parameters; one without parts may be
    larger. Left out are modules with less than 1/256, modules that share a weight with another, and
    modules of vectors alone: torch warns that a norm returns a view, which must not be changed.
    Attention and torch's transformer layers stay whole: they read the weights of their parts
    without a call.
    """
    total = sum(parameter.numel() for parameter in net.parameters())
    uses = Counter(id(p) for module in net.modules() for p in module.parameters(recurse=False))

    def visit(module: nn.Module) -> list[nn.Module]:
        size = sum(parameter.numel() for parameter in module.parameters())
        only_vectors = all(p.dim() < 2 for p in module.parameters())
        no_forward = isinstance(module, (nn.ParameterList, nn.ParameterDict))
        if 256 * size < total or only_vectors or no_forward:
            return []
        is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict))  # no forward, but parts
        inside = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
        shares_weight = any(uses[key] > times for key, times in inside.items())
        if isinstance(module, READ_THEIR_PARTS):
            return [] if shares_weight else [module]
        fits = 8 * size <= total or not [*module.children()]
        if fits and not is_list and not shares_weight:
            return [module]
        return [found for child in module.children() for found in visit(child)]

    return [module for module in visit(net) if module is not net]


def no_metrics(outputs: Any, targets: Any) -> dict[str, Tensor]:
    return {}


class Task(NamedTuple):
    """The functions of a task; task.py says what each returns."""

    build_datasets: Callable[[Namespace], tuple[Dataset, Dataset]]
    build_model: Callable[[Namespace], nn.Module]
    per_sample_loss: Callable[[Any, Any], Tensor]
    per_sample_metrics: Callable[[Any, Any], dict[str, Tensor]]
    build_optimizer: Callable[..., torch.optim.Optimizer] = default_optimizer
    dataset_metrics: Callable[[dict[str, list]], dict[str, float]] | None = None
    train_metrics: Callable[[Any, Any], dict[str, Tensor]] = no_metrics
    shard_modules: Callable[[nn.Module], list[nn.Module]] = large_modules


def load_module(path: Path) -> ModuleType:
    with blame(f"--task {path}", str(path)):
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.append(folder)  # it may import its neighbours; last, so they replace nothing
        beside = folder == str(Path(__file__).resolve().parent.parent)
        name = path.stem if beside else f"task_{path.stem}"  # not the name of another module
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        seed_generators(0)  # what the file draws at its top is the same on every rank
        spec.loader.exec_module(module)
    return module


def load_task(args: Namespace) -> Task:
    """Load --task. Keyword-only parameters of loss and metrics get the options that they name."""
    path = Path(args.task)
    module = fresh.pop(path, None) or load_module(path)
    found = {n: getattr(module, n) for n in Task._fields if callable(getattr(module, n, None))}
    needed = [name for name in Task._fields if name not in Task._field_defaults]
    if missing := [name for name in needed if name not in found]:
        wanted = ", ".join(needed)
        raise UsageError(f"--task {path} must define {wanted}; missing: {', '.join(missing)}")
    found.setdefault("train_metrics", no_metrics)
    for name in ("per_sample_loss", "per_sample_metrics", "train_metrics"):
        found[name] = fill_in(path, found[name], args)
    found["train_metrics"] = means_only(found["train_metrics"])
    if "dataset_metrics" in found:
        function = fill_in(path, found["dataset_metrics"], args)
        found["dataset_metrics"] = functools.partial(metrics_of_set, path, args.seed, function)
    found["build_datasets"] = functools.partial(two_sets, path, found["build_datasets"])
    return Task(**found)


def two_sets(path: Path, build: Callable, args: Namespace) -> tuple[Dataset, Dataset]:
    """Call the task's build_datasets, seeded: data that it draws are the same on every rank."""
    seed_generators(args.seed)
    with blame(f"--task {path}: build_datasets", str(path)):
        train_set, val_set = build(args)
        return train_set, val_set


def metrics_of_set(
    path: Path, seed: int, function: Callable, outputs: dict[str, list]
) -> dict[str, float]:
    """Call the task's dataset_metrics, seeded: it draws the same numbers in every mode."""
    seed_rng(seed, -2, 0)  # no training step and no batch has this number
    with blame(f"--task {path}: dataset_metrics", str(path)) as where:
        found = {str(name): float(value) for name, value in function(outputs).items()}
        if taken := ", ".join(sorted(RESERVED & found.keys())):
            raise UsageError(f"{where}: the log itself uses the name {taken}")
        return found


def means_only(metrics: functools.partial) -> Callable:
    """Return the metrics without gradients, and without the lists, which an evaluation needs."""

    @functools.wraps(metrics.func)
    @torch.no_grad()
    def without_lists(outputs: Any, targets: Any) -> dict[str, Tensor]:
        found = metrics(outputs, targets) or {}
        return {name: value for name, value in found.items() if not isinstance(value, list)}

    return without_lists


def fill_in(path: Path, function: Callable, args: Namespace) -> Callable:
    """Bind the options that a function names as keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if unknown := [name for name in names if not hasattr(args, name)]:
        asked = f"{function.__name__} asks for {', '.join(unknown)}"
        raise UsageError(f"--task {path}: {asked}, which is no option")
    return functools.partial(function, **{name: getattr(args, name) for name in names})


def build_net(args: Namespace, task: Task) -> nn.Module:
    """Return the task's model on the CPU, from --seed or --weights, with --freeze applied."""
    where = f"--task {args.task}: build_model"
    default = " with --weights default" if args.weights == "default" else ""
    torch.manual_seed(args.seed)
    with blame(where + default, args.task):
        net = task.build_model(args)
    if not isinstance(net, nn.Module) or not list(net.parameters()):
        found = type(net).__name__
        raise UsageError(f"{where} must return an nn.Module with parameters, got {found}")
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise UsageError(f"{where}: {name} has no shape yet; run a batch first")
        if tensor.is_complex():
            raise UsageError(f"{where}: {name} is complex; keep torch.view_as_real of it")
        if 0 in tensor.stride() and not tensor.is_contiguous():  # as torch.ones(1).expand(8) is
            raise UsageError(f"{where}: {name} is expanded and cannot be loaded; clone it")
        if args.channels_last and tensor.dim() == 5:
            raise UsageError(f"--channels-last needs 4 dimensions, {name} has 5; leave it out")
        if hasattr(args, "shard_size") and isinstance(tensor, nn.Parameter) and not tensor.dim():
            raise UsageError(f"{where}: fsdp cannot cut {name}; give it the shape [1]")
    own = {type(norm) for norm in common.batch_norms(net)} - set(BATCH_NORMS)
    if args.sync_bn and own:
        names = ", ".join(sorted(kind.__name__ for kind in own))
        raise UsageError(f"--sync-bn would drop the code of {names}; leave it out")
    net.to(getattr(torch, args.dtype))
    if args.weights not in (None, "default"):  # only the task knows the default ones
        option = f"--weights {args.weights}"
        with blame(option):
            load_weights(net, read_tensors(args.weights, "--weights"), option)
    freeze(net, args.freeze)
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    return net.to(memory_format=memory_format)
