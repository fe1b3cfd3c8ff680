"""Load the file of --task, and call its functions as the scripts need them."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import common
from common import UsageError, freeze, load_weights, print0, read_tensors
from machinery.process import TaskError
from sampling import seed_generators, seed_rng, splitmix64

# Names in a line of metrics.jsonl that no metric may have.
RESERVED = {
    *("loss", "count", "event", "epoch", "step", "global_step", "lr", "samples_per_s"),
    *("grad_norm", "skipped", "data_wait", "train_s", "eval_s", "save_s"),
}
REQUIRED = ["build_datasets", "build_model", "per_sample_loss", "per_sample_metrics"]
OPTIONAL = [
    *("collate", "loss_weights", "train_metrics", "dataset_metrics", "build_optimizer"),
    "shard_modules",
]
MODES_WITH_RANKS = "ddp", "spawn", "fsdp"
ROOT = Path(common.__file__).resolve().parent
# What --sync-bn can replace.
CONVERTIBLE = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm}
loaded: dict[Path, ModuleType] = {}  # by parse_args: the file of a task is not run twice


@contextlib.contextmanager
def as_task_error(where: str) -> Iterator[None]:
    """Raise as a TaskError what the block raises; its message begins with `where`.

    The error itself is the cause: run_main prints its traceback. A UsageError stays as it is.
    """
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # a script without a main guard may call sys.exit
        raise TaskError(f"{where}: {type(error).__name__}: {error}") from error


def open_files() -> set[str]:
    """Return the files that this process has open, without memory-mapped ones."""
    numbers = os.listdir("/proc/self/fd")
    paths = {os.path.realpath(os.path.join("/proc/self/fd", number)) for number in numbers}
    mapped = Path("/proc/self/maps").read_text()  # as np.memmap, which has no position
    return {path for path in paths if os.path.isfile(path) and path not in mapped}


def warn_of_names(folder: str) -> None:
    """Warn of files beside the task whose names the project has too: ours are imported."""
    for name in ("task", "common", "sampling"):
        file = Path(folder, f"{name}.py")
        if file.exists() and file.read_bytes() != (ROOT / file.name).read_bytes():
            problem = "cannot be imported: the project has such a file"
            print0(f"warning: {name} in {folder} {problem}")


def load_module(path: Path) -> ModuleType:
    """Run the file of a task, and return it as a module."""
    with as_task_error(f"--task {path}"):
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.append(folder)  # it may import its neighbours; last, so they replace nothing
        if folder != str(ROOT):
            warn_of_names(folder)
        name = f"task_{path.stem}"  # not the name of another module
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        seed_generators(splitmix64(-1))  # what the file draws at its top is the same on every rank
        spec.loader.exec_module(module)
    loaded[path] = module
    return module


class Task:
    """The functions of a task, as the scripts call them; task.py says what each returns."""

    def __init__(self, args: Namespace) -> None:
        self.args, self.path = args, Path(args.task)
        # A spawned process has not parsed the command line.
        module = loaded.get(self.path) or load_module(self.path)
        self.globals, names = vars(module), (*REQUIRED, *OPTIONAL)
        self.functions = {n: f for n, f in self.globals.items() if n in names and callable(f)}
        if missing := [name for name in REQUIRED if name not in self.functions]:
            problem = f"must define {', '.join(REQUIRED)}; missing: {', '.join(missing)}"
            raise UsageError(f"--task {self.path} {problem}")
        self.functions = {n: self._with_options(n, f) for n, f in self.functions.items()}
        self.per_sample_loss = self.functions["per_sample_loss"]
        self.per_sample_metrics = self.functions["per_sample_metrics"]
        # These are None if the task has no such function.
        self.shard_modules = self.functions.get("shard_modules")
        self.collate = self.functions.get("collate")
        self.dataset_metrics = (
            self._dataset_metrics if "dataset_metrics" in self.functions else None
        )

    def _with_options(self, name: str, function: Callable) -> Callable:
        """Bind the options that a function names as keyword-only parameters."""
        bound = getattr(function, "keywords", {})  # of a functools.partial
        known = {}
        for asked in inspect.signature(function).parameters.values():
            if asked.kind is asked.KEYWORD_ONLY and asked.name not in bound:
                if hasattr(self.args, asked.name):
                    known[asked.name] = getattr(self.args, asked.name)
                elif asked.default is asked.empty:
                    problem = f"{name} asks for {asked.name}, which is no option"
                    raise UsageError(f"--task {self.path}: {problem}")
        return functools.partial(function, **known)

    def errors_of(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Return the context that names this function and its file in what the block raises."""
        return as_task_error(f"--task {self.path}: {name}")

    def build_datasets(self) -> tuple[Dataset, Dataset]:
        """Return the training and the evaluation set; what they draw is the same on all ranks."""
        seed_generators(splitmix64(self.args.seed, -4))  # other numbers than those of the model
        before = open_files()
        with self.errors_of("build_datasets"):
            train_set, val_set = self.functions["build_datasets"](self.args)
            if any(isinstance(data, IterableDataset) for data in (train_set, val_set)):
                advice = "it needs __len__ and __getitem__, which finds a record by its number"
                advice += "; to read in sequence: --shuffle-window, examples/recipes/shards.py"
                raise UsageError(f"--task {self.path}: an IterableDataset has no order; {advice}")
            if any(isinstance(data, DataLoader) for data in (train_set, val_set)):
                advice = "return the data sets: the script makes the loaders"
                raise UsageError(f"--task {self.path}: build_datasets made a DataLoader; {advice}")
            len(train_set), len(val_set)  # raises if a set has no length
        if hasattr(train_set, "set_epoch"):
            advice = "draw in __getitem__, where each sample has its own seed in each epoch"
            raise UsageError(f"--task {self.path}: set_epoch of a data set is not called; {advice}")
        if (left := open_files() - before) and self.args.workers != 0:
            advice = "loader workers would share its position; open it in __getitem__"
            names = ", ".join(sorted(left))
            print0(f"warning: the task has left open {names}: {advice}", file=sys.stderr)
        return train_set, val_set

    def build_net(self) -> nn.Module:
        """Return the model on the CPU, from --seed or --weights, with --freeze applied."""
        args = self.args
        torch.manual_seed(args.seed)
        where = f"--task {self.path}: build_model"
        with as_task_error(where):
            net = self.functions["build_model"](args)
        self._refuse(net, where)
        if args.dtype == "float64":  # else the task's own types stay: a half base, a precise clock
            net.double()
        if args.weights:
            option = f"--weights {args.weights}"
            with as_task_error(option):
                content = read_tensors(args.weights, "--weights")
                load_weights(net, content, option, complete=args.eval_only)
        if args.freeze:
            freeze(net, args.freeze)
        if args.channels_last:
            with as_task_error("--channels-last"):
                net = net.to(memory_format=torch.channels_last)
        return net

    def _refuse(self, net: Any, where: str) -> None:
        """Raise UsageError if the model cannot train, or not in this mode."""
        if not isinstance(net, nn.Module) or not list(net.parameters()):
            found = type(net).__name__
            raise UsageError(f"{where} must return an nn.Module with parameters, got {found}")
        kinds = nn.Embedding, nn.EmbeddingBag
        for name, module in [(n, m) for n, m in net.named_modules() if isinstance(m, kinds)]:
            if module.sparse:  # DDP would spoil other gradients
                problem = f"{name} has sparse gradients, which ranks cannot average"
                raise UsageError(f"{where}: {problem}; leave out sparse=True")
            if self.args.parallel_mode != "single" and module.max_norm:
                problem = f"{name} changes its weights in each forward, on each rank others"
                raise UsageError(f"{where}: {problem}; leave out max_norm")
        if self.args.sync_bn and (odd := {*map(type, common.batch_norms(net))} - CONVERTIBLE):
            names = ", ".join(sorted(kind.__name__ for kind in odd))
            raise UsageError(f"--sync-bn would drop the code of {names}; leave it out")
        own = {*net.parameters()}
        beside = [
            name
            for name, value in self.globals.items()
            if isinstance(value, nn.Module)
            and any(parameter.requires_grad for parameter in {*value.parameters()} - own)
        ]
        if beside:
            problem = f"nothing trains or saves the parameters of {', '.join(beside)}"
            print0(f"warning: {where}: {problem}; put them into the model, or freeze them")
        self._refuse_hooks(net, where)

    def _refuse_hooks(self, net: nn.Module, where: str) -> None:
        """Raise UsageError if a parameter has a hook: it would see the gradient of one rank."""
        parameters = net.named_parameters()
        for name, parameter in parameters if self.args.parallel_mode in MODES_WITH_RANKS else ():
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                problem = f"{name} has a hook, which would see the gradient of one rank alone"
                advice = "use optimizer.register_step_pre_hook, or single"
                raise UsageError(f"{where}: {problem}; {advice}")

    def build_optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        """Return the task's optimizer, or that of --optimizer."""
        args = self.args
        if "build_optimizer" not in self.functions:
            settings = args.lr, args.momentum, args.weight_decay, args.nesterov
            try:
                return common.build_optimizer(net, args.optimizer, *settings)
            except ValueError as error:  # as --nesterov without --momentum
                raise UsageError(f"--optimizer {args.optimizer}: {error}") from error
        where = f"--task {self.path}: build_optimizer"
        with as_task_error(where):
            hooks = len(net._forward_pre_hooks)  # fsdp has its own
            optimizer = self.functions["build_optimizer"](args, net)
            if not isinstance(optimizer, torch.optim.Optimizer):
                found = type(optimizer).__name__
                raise UsageError(f"{where} must return one optimizer with groups, got {found}")
            inspect.signature(optimizer.step).bind()  # raises if it needs a closure: there is none
            if any(group["lr"] is None for group in optimizer.param_groups):
                raise UsageError(f"{where}: lr is None; give a number, which --schedule scales")
            if hasattr(optimizer, "eval") and len(net._forward_pre_hooks) == hooks:
                problem = "the optimizer has eval(), which no script calls"
                print0(f"warning: {where}: {problem}; docs/recipes.md has a hook that does")
            common.make_momentum(optimizer)
        parts = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained = {id(p) for p in net.parameters() if p.requires_grad}
        if not trained <= parts <= {id(p) for p in net.parameters()}:
            wanted = "every parameter of the model that trains, and no other; see also --freeze"
            raise UsageError(f"{where}: the groups must hold {wanted}")
        self._refuse_hooks(net, where)
        return optimizer

    def total_weight(self, micro_batches: list) -> int | Tensor:
        """Return what the losses of a step are divided by: the global batch size, or its weights.

        The weights are summed over all micro-batches of all ranks. If all are zero, the result is
        infinite: the gradient is zero, whatever the loss divides by.
        """
        if "loss_weights" not in self.functions:
            return self.args.batch_size
        sums = [self._weights(targets).sum() for _, targets in micro_batches]
        total = common.reduce_value(torch.stack(sums).sum(), average=False)
        return torch.where(total == 0, torch.inf, total)

    def weigh(self, losses: Tensor, targets: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Return the losses for a Meter, with their weights if the task has weights."""
        return (losses, self._weights(targets)) if "loss_weights" in self.functions else losses

    def _weights(self, targets: Any) -> Tensor:
        return self.functions["loss_weights"](targets).to(getattr(torch, self.args.dtype))

    @torch.no_grad()
    def train_metrics(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """Return the metrics of the training log, without the lists, which an evaluation needs."""
        if "train_metrics" not in self.functions:
            return {}
        found = self.functions["train_metrics"](outputs, targets) or {}
        return {name: value for name, value in found.items() if not isinstance(value, list)}

    def _dataset_metrics(self, lists: dict[str, list]) -> dict[str, float]:
        """Return metrics of the whole set, seeded: they draw the same numbers in every mode."""
        seed_rng(self.args.seed, -2, 0)  # no training step and no batch has this number
        found = {str(n): float(v) for n, v in self.functions["dataset_metrics"](lists).items()}
        if taken := ", ".join(sorted(RESERVED & found.keys())):
            raise ValueError(f"dataset_metrics: the log itself uses the name {taken}")
        return found
