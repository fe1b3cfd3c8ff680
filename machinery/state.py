"""What a checkpoint holds, and how sharded tensors become whole ones and shards again."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import common
from common import get_rank


@dataclasses.dataclass
class State:
    """What training changes. `epoch` and the `step` within it tell what comes next."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    scaler: common.StepGuard
    average: common.WeightAverage | common.NoAverage
    epoch: int = 0
    step: int = 0
    global_step: int = 0
    best: float | None = None

    def checkpoint(self) -> dict[str, Any]:
        """Return plain tensors and values, with the names of the bare model.

        Call it on every rank: they put the parts of sharded tensors together. Rank 0 gets them, and
        Run.save adds the rest of a checkpoint.
        """
        return {
            "format": common.FORMAT,
            "model": whole(self.net.state_dict()),
            "optimizer": whole(self.optimizer.state_dict()),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "average": whole(self.average.state_dict()),
            "epoch": self.epoch,
            "step": self.step,
            "global_step": self.global_step,
            "best": self.best,
        }

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Load a checkpoint. Raises if it does not fit the network or the optimizer."""
        for group, now in zip(checkpoint["optimizer"]["param_groups"], self.optimizer.param_groups):
            for name in {"fused", "foreach"} & now.keys():  # they belong to the device and the mode
                group[name] = now[name]
        self.net.load_state_dict(cut_like(checkpoint["model"], self.net.state_dict()))
        groups = self.optimizer.param_groups
        parameters = dict(enumerate(p for group in groups for p in group["params"]))
        saved = dict(checkpoint["optimizer"]["state"])  # by number; some add other keys
        numbers = parameters.keys() & saved.keys()
        for i in numbers:
            saved[i] = cut_like(saved[i], dict.fromkeys(saved[i], parameters[i]))
        self.optimizer.load_state_dict(checkpoint["optimizer"] | {"state": saved})
        for i in numbers:
            restore_types(self.optimizer.state[parameters[i]], saved[i], parameters[i])
        for name in ("scheduler", "scaler"):
            getattr(self, name).load_state_dict(checkpoint[name])
        own = self.average.state_dict()
        self.average.load_state_dict(cut_like(checkpoint["average"], own))
        for name in ("epoch", "step", "global_step", "best"):
            setattr(self, name, checkpoint[name])
        # Compute the rates anew, so that more --epochs take effect at once.
        schedule = zip(self.scheduler.base_lrs, self.scheduler.lr_lambdas)
        for group, (peak, factor) in zip(self.optimizer.param_groups, schedule):
            group["lr"] = peak * factor(self.global_step)


def restore_types(now: dict[str, Any], saved: dict[str, Any], parameter: Tensor) -> None:
    """Give an optimizer's tensors their saved types: load_state_dict casts to the parameter's.

    They get the parameter's strides, which fused kernels need: --channels-last may have changed.
    """
    for name, value in saved.items():
        if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
            now[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        elif isinstance(value, Tensor):
            now[name] = value.to(now[name].device)


def whole(value: Any) -> Any:
    """Return a copy with whole tensors on rank 0's CPU, and None for each tensor on other ranks.

    Call it on every rank.
    """
    if isinstance(value, dict):
        found = copy.copy(value)  # keeps the versions of the modules, which some modules ask for
        found.update({name: whole(item) for name, item in value.items()})
        return found
    if isinstance(value, (list, tuple)):
        return type(value)(whole(item) for item in value)
    if not isinstance(value, Tensor):
        return value
    value = joined(value) if hasattr(value, "full_tensor") else value
    return value.to("cpu", copy=True) if get_rank() == 0 else None  # steps go on while it is saved


def joined(shards: Tensor) -> Tensor:
    """Return the whole of a tensor that is cut among the ranks. Call it on every rank.

    `full_tensor` does the same by another collective call, in which gloo crashed once.
    """
    *copies, last = shards.placements
    if not (last.is_shard(0) and all(place.is_replicate() for place in copies)):
        return shards.full_tensor()  # of an optimizer of the task, as a norm over all shards
    own, group = shards.to_local(), shards.device_mesh.get_group(-1)
    ranks = dist.get_world_size(group)
    rows = math.ceil(len(shards) / ranks)  # on each rank; the last ones may have fewer, or none
    padded = own.new_zeros(rows, *shards.shape[1:])
    padded[: len(own)] = own
    gathered = own.new_empty(rows * ranks, *shards.shape[1:])
    dist.all_gather([*gathered.tensor_split(ranks)], padded, group=group)  # writes into it
    return gathered[: len(shards)]


def cut_like(values: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the whole tensors, each cut among the ranks as the tensor of that name in `own`."""
    found = copy.copy(values)
    for name, value in values.items():
        like = own.get(name)
        if hasattr(like, "full_tensor") and getattr(value, "shape", None) == like.shape:
            from torch.distributed.tensor import distribute_tensor  # slow to import

            place = like.device_mesh, like.placements
            found[name] = distribute_tensor(value.to(like.device), *place, src_data_rank=None)
    return found
