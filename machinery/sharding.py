"""Cut the parameters of a network among the ranks, for train_fsdp.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from common import autocast, to_device


def mesh_of_ranks(device: torch.device, shard_size: int | None) -> DeviceMesh:
    """Return all ranks in one row, or in rows of `shard_size`: each row holds the whole network.

    8 ranks with --shard-size 4 are two rows, each with a whole copy.
    """
    world_size = dist.get_world_size()
    if shard_size in (None, world_size):
        return init_device_mesh(device.type, (world_size,))
    shape = (world_size // shard_size, shard_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def shard(net: nn.Module, modules: list[nn.Module], mesh: DeviceMesh) -> None:
    """Cut the parameters of each of the modules, and then all others, among the ranks.

    Before the forward and the backward of a module the ranks collect its parameters, and forget
    them afterwards. They travel in their own type: with --amp bf16 autocast rounds them, as in DDP.
    """
    for module in modules:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    # What is left is small, and the backward begins with it: it is kept after the forward.
    fully_shard(net, mesh=mesh, reshard_after_forward=False)
    for module in net.modules():  # gloo's mean of shards is a sum in torch 2.8
        if isinstance(module, FSDPModule) and mesh.device_type == "cpu":
            module.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def join_forwards(model: nn.Module, loader: DataLoader, device: torch.device, amp: str) -> None:
    """Run the forward that other ranks have still to make, if they have a batch more.

    In each forward of a sharded network every rank sends its part of the parameters.
    """
    for _ in range(loader.batch_sampler.missing):
        inputs, _ = to_device(loader.dataset.__getitems__((0, [0])), device)
        with autocast(device, amp):
            model(inputs)
