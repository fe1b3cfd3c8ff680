"""Load the file of --task, and call its functions as the scripts need them."""

import functools
import importlib.util
import inspect
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import common
from common import fail
from sampling import seed_generators, seed_rng, splitmix64

REQUIRED = ("build_datasets", "build_model", "per_sample_loss", "per_sample_metrics")


@functools.cache
def load_module(file: str) -> ModuleType:
    """Run the file of a task once, and return it as a module."""
    path = Path(file).resolve()
    sys.path.append(str(path.parent))  # it may import its neighbours; last, so they replace nothing
    name = f"task_{path.stem}"  # not the name of another module
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    seed_generators(splitmix64(-1))  # what the file draws at its top is the same on every rank
    spec.loader.exec_module(module)
    if missing := [name for name in REQUIRED if not hasattr(module, name)]:
        fail(f"--task {file}: the file must define {', '.join(missing)}; see task.py")
    return module


def class_names(dataset: Any) -> list[str]:
    """Return the names of the classes, if the data set has a list of them, as torchvision's."""
    classes = getattr(dataset, "classes", None)
    return [str(name) for name in classes] if isinstance(classes, (list, tuple)) else []


class Task:
    """The functions of a task, as the scripts call them; task.py says what each returns."""

    def __init__(self, args: Namespace) -> None:
        self.args, self.module = args, load_module(args.task)
        self.per_sample_loss = self._function("per_sample_loss")
        self.per_sample_metrics = self._function("per_sample_metrics")
        # These are None if the task has no such function.
        self.collate = self._function("collate")
        self.shard_modules = self._function("shard_modules")
        self.loss_weights = self._function("loss_weights")
        self._train_metrics = self._function("train_metrics")
        self._dataset_metrics = self._function("dataset_metrics")

    def _function(self, name: str) -> Callable | None:
        """Return a function; a keyword-only parameter of it gets the option of that name."""
        if not (function := getattr(self.module, name, None)):
            return None
        asked = inspect.signature(function).parameters.values()
        names = [p.name for p in asked if p.kind is p.KEYWORD_ONLY and hasattr(self.args, p.name)]
        return functools.partial(function, **{name: getattr(self.args, name) for name in names})

    def build_datasets(self) -> tuple[Dataset, Dataset]:
        """Return the training and the evaluation set; what they draw is the same on all ranks."""
        seed_generators(splitmix64(self.args.seed, -4))  # other numbers than those of the model
        train_set, val_set = self.module.build_datasets(self.args)
        if hasattr(train_set, "set_epoch"):
            fail(f"--task {self.args.task}: set_epoch is not called; draw in __getitem__")
        self.classes = class_names(train_set)
        return train_set, val_set

    def build_net(self) -> nn.Module:
        """Return the model on the CPU, from --seed or --weights, with --freeze applied."""
        args = self.args
        torch.manual_seed(args.seed)
        net = self.module.build_model(args)
        if args.dtype == "float64":  # else the task's own types stay: a half base, a precise clock
            net.double()
        self._refuse_local_gradients(net)
        if args.weights:
            content = common.load_file(args.weights, "--weights")
            ours = args.eval_only and "config" in content  # a checkpoint of this program
            if ours and (before := content["data"]["classes"]) != self.classes:
                fail(f"--weights {args.weights}: its classes are {before}, not {self.classes}")
            common.load_weights(net, content, f"--weights {args.weights}", complete=args.eval_only)
        common.freeze(net, args.freeze)
        return net.to(memory_format=torch.channels_last) if args.channels_last else net

    def build_optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        """Return the task's optimizer, or that of --optimizer."""
        args = self.args
        if not hasattr(self.module, "build_optimizer"):
            settings = args.lr, args.momentum, args.weight_decay
            return common.build_optimizer(net, args.optimizer, *settings)
        optimizer = self.module.build_optimizer(args, net)
        self._refuse_local_gradients(net)  # hooks of a task's optimizer
        return optimizer

    def _refuse_local_gradients(self, net: nn.Module) -> None:
        """End the run if ranks would spoil its gradients."""
        if self.args.parallel_mode in ("single", "dp"):
            return
        where = f"--task {self.args.task}"
        for name, parameter in net.named_parameters():
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                problem = f"{name} has a hook, which would see the gradient of one rank alone"
                fail(f"{where}: {problem}; use optimizer.register_step_pre_hook")
        for name, module in net.named_modules():
            if getattr(module, "sparse", False):
                fail(f"{where}: {name} has sparse gradients: ranks cannot average them")

    def total_weight(self, micro_batches: list) -> int | Tensor:
        """Return what the losses of a step are divided by: the global batch size, or its weights.

        The weights are summed over all micro-batches of all ranks. If all are zero, the result is
        infinite: the gradient is zero, whatever the loss divides by.
        """
        if not self.loss_weights:
            return self.args.batch_size
        sums = [self._weights(targets).sum() for _, targets in micro_batches]
        total = common.reduce_value(torch.stack(sums).sum(), average=False)
        return torch.where(total == 0, torch.inf, total)

    def weigh(self, losses: Tensor, targets: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Return the losses for a Meter, with their weights if the task has weights."""
        return (losses, self._weights(targets)) if self.loss_weights else losses

    def _weights(self, targets: Any) -> Tensor:
        return self.loss_weights(targets).to(getattr(torch, self.args.dtype))

    @torch.no_grad()
    def train_metrics(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """Return the metrics of the training log, without the lists, which an evaluation needs."""
        found = self._train_metrics(outputs, targets) if self._train_metrics else {}
        return {name: value for name, value in found.items() if not isinstance(value, list)}

    def dataset_metrics(self, lists: dict[str, list]) -> dict[str, float]:
        """Return metrics of the whole set, seeded: they draw the same numbers in every mode."""
        seed_rng(self.args.seed, -2, 0)  # no training step and no batch has this number
        found = self._dataset_metrics(lists) if self._dataset_metrics else {}
        return {name: float(value) for name, value in found.items()}
