"""Cut the parameters of a network among the ranks, for train_fsdp.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader

from common import autocast, to_device

NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)


def mesh_of_ranks(device: torch.device, shard_size: int | None) -> DeviceMesh:
    """Return all ranks in one row, or in rows of `shard_size`: each row holds the whole network."""
    world_size = dist.get_world_size()
    if shard_size in (None, world_size):
        return init_device_mesh(device.type, (world_size,))
    shape = (world_size // shard_size, shard_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def shard(net: nn.Module, modules: list[nn.Module], mesh: DeviceMesh, amp: str) -> None:
    """Cut the parameters of each of the modules, and then all others, among the ranks.

    Before the forward and the backward of a module the ranks collect its parameters, and forget
    them afterwards. With --amp bf16 they travel as bf16, and the gradients as float32.
    """
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if amp == "bf16":
        # torch refuses bf16 weights beside float32 inputs, statistics or other buffers.
        exact = [module for module in net.modules() if needs_float32(module)]
        for module in reversed(exact):  # parts before the whole
            if module is not net:
                fully_shard(module, mesh=mesh, mp_policy=policy)
        done = {part for module in exact for part in module.modules()}
        modules = [module for module in modules if module not in done]
        if net not in exact:
            half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
            policy = MixedPrecisionPolicy(**half, cast_forward_inputs=False)
    for module in modules:
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    # What is left is small, and the backward needs it next.
    fully_shard(net, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    for module in net.modules():  # gloo's mean of shards is a sum in torch 2.8
        if isinstance(module, FSDPModule) and mesh.device_type == "cpu":
            module.set_force_sum_reduction_for_comms(True)


def needs_float32(module: nn.Module) -> bool:
    """Return whether a module computes with its parameters outside of autocast.

    Norms do, and what holds a buffer beside parameters, as spectral norm in both of torch's forms.
    InstanceNorm may compute in bf16. For itself it cannot be sharded: it returns a view.
    """
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return False
    buffers = [value for value in module.buffers(recurse=False) if value.is_floating_point()]
    kind = isinstance(module, NORMS) or parametrize.is_parametrized(module) or bool(buffers)
    own = module.parameters(recurse=parametrize.is_parametrized(module))
    return kind and bool([*own])


@torch.no_grad()
def join_forwards(model: nn.Module, loader: DataLoader, device: torch.device, amp: str) -> None:
    """Run the forward that other ranks have still to make, if they have a batch more.

    In each forward of a sharded network every rank sends its part of the parameters.
    """
    sampler = loader.batch_sampler
    for _ in range(getattr(sampler, "sampler", sampler).missing):
        inputs, _ = to_device(loader.dataset.__getitems__((0, [0])), device)
        with autocast(device, amp):
            model(inputs)
