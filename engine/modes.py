"""What dp and fsdp need beside torch, and what torch lacks on a CPU, where the tests run."""

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from common import autocast, broadcast_tensors, gather_samples, get_rank, to_device
from engine.task_file import Task
from sampling import seed_generators


class WithLoss(nn.Module):
    """The network with its loss: else the first device would gather and compute it all."""

    def __init__(self, net: nn.Module, task: Task, device: torch.device, amp: str) -> None:
        super().__init__()
        self.net, self.task, self.device, self.amp = net, task, device, amp

    def forward(self, inputs: Any, targets: Any) -> dict[str, Tensor]:
        with autocast(self.device, self.amp):  # nn.DataParallel's threads forget the chosen dtype
            outputs = self.net(inputs)
            losses = self.task.per_sample_loss(outputs, targets)
        return {"loss": losses, **self.task.train_metrics(outputs, targets)}


class DataParallel(nn.DataParallel):
    """`nn.DataParallel` with the random stream of rank r of a DDP run for replica r."""

    def parallel_apply(self, replicas: list, inputs: tuple, kwargs: tuple) -> list:
        seed, accelerator = torch.initial_seed(), torch.get_device_module(self.src_device_obj)
        for r, index in enumerate(self.device_ids):  # alike, all would drop the same units
            with accelerator.device(index):
                accelerator.manual_seed(seed + r)
        return super().parallel_apply(replicas, inputs, kwargs)


class DataParallelOnCPU(nn.Module):
    """What DataParallel does, with N replicas on the CPU, where torch itself would run one."""

    def __init__(self, module: nn.Module, replicas: int) -> None:
        super().__init__()
        self.module, self.replicas = module, replicas

    def forward(self, *inputs: Any) -> dict[str, Tensor]:
        seed, outputs = torch.initial_seed(), []
        buffers = dict(self.module.named_buffers())
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        for r in range(len(tree_leaves(inputs)[0].chunk(self.replicas))):  # fewer of a small batch
            seed_generators(seed + r)
            piece = tree_map(lambda tensor, r=r: tensor.chunk(self.replicas)[r], inputs)
            # The replicas share the parameters: gradients add up. Replica 0 alone updates buffers.
            own = {name: b.clone() for name, b in before.items()} if r else buffers
            outputs.append(functional_call(self.module, own, piece))
        return tree_map(lambda *parts: torch.cat(parts), *outputs)


def data_parallel(module: nn.Module, replicas: int, device: torch.device) -> nn.Module:
    if device.type == "cpu":
        return DataParallelOnCPU(module, replicas)
    return DataParallel(module, [*range(replicas)])


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """`nn.SyncBatchNorm` for CPU tensors: statistics over a micro-batch of all ranks, [n, C, ...].

    n may differ between ranks. Each rank normalises the samples of all, and keeps its own.
    """

    def _check_input_dim(self, value: Tensor) -> None:
        pass

    def forward(self, value: Tensor) -> Tensor:
        if not self.training:
            return super().forward(value)
        with torch.enable_grad():  # under no_grad it has this rank's samples alone
            everything, first = gather_samples(value)
        return super().forward(everything)[first : first + len(value)].clone()  # FSDP takes no view


def convert_sync_batchnorm(net: nn.Module, device: torch.device) -> nn.Module:
    """Return the network with every BatchNorm synchronised over the ranks, under the same names."""
    if device.type != "cpu":
        return nn.SyncBatchNorm.convert_sync_batchnorm(net)
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.__class__ = SyncBatchNorm  # the same parameters and settings, another forward
    return net


def shard(
    net: nn.Module, device: torch.device, choose: Callable[[nn.Module], list[nn.Module]] | None
) -> None:
    """Cut the parameters of each module of `choose(net)`, and then all others, among the ranks.

    By default these are the blocks of each Sequential and ModuleList. Before the forward and the
    backward of a module the ranks collect its parameters, and forget them afterwards.
    """
    from torch.distributed.device_mesh import init_device_mesh  # slow to import
    from torch.distributed.fsdp import fully_shard

    parameters = [*net.parameters()]
    broadcast_tensors((*parameters, *net.buffers()))  # as DDP does
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in [*(choose or blocks)(net), net]:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for parameter in parameters:  # the whole ones; whoever still uses one fails
        parameter.data = parameter.data.new_empty(0)
    if device.type != "cpu":
        # torch 2.8 to 2.14 frees gathered parameters before their gathering ends: docs/fsdp.md. A
        # communicator works in order: this all-reduce before each forward ends after all gathers.
        one = torch.ones(1, device=device)
        net.register_forward_pre_hook(
            lambda module, inputs: dist.all_reduce(one, dist.ReduceOp.MAX), prepend=True
        )


def blocks(net: nn.Module) -> list[nn.Module]:
    """Return the parts of all lists of modules, inner ones first, that have a matrix."""
    lists = [m for m in net.modules() if isinstance(m, (nn.Sequential, nn.ModuleList))]
    parts = dict.fromkeys(part for module in reversed(lists) for part in module)
    found = [part for part in parts if type(part).forward is not nn.Module.forward]  # no list
    return [part for part in found if any(p.dim() > 1 for p in part.parameters())]


@torch.no_grad()
def join_forwards(model: nn.Module, loader: DataLoader, device: torch.device, amp: str) -> None:
    """Run the forward that other ranks have still to make: in each of them all send parameters."""
    for _ in range(loader.batch_sampler.missing):
        inputs, _ = to_device(loader.dataset.__getitems__((0, [0])), device)
        with autocast(device, amp):
            model(inputs)


def newest(path: Path) -> Path:
    """Return the path, or its folder `.before` if a kill in save_shards has left that alone."""
    before = path.with_name(f".{path.name}.before")
    return before if before.exists() and not path.exists() else path


def save_shards(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a folder, to which each rank adds its part; at each instant `newest` of it is whole."""
    import torch.distributed.checkpoint as dcp  # slow to import

    temporary, before = (path.with_name(f".{path.name}.{end}") for end in ("tmp", "before"))
    if get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
    dist.barrier()
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)  # rank 0's buffers
    dcp.save(checkpoint, checkpoint_id=temporary, planner=planner)  # waits for the disk
    if get_rank() == 0:
        if path.exists():
            shutil.rmtree(before, ignore_errors=True)
            os.rename(path, before)
        os.rename(temporary, path)
        before.unlink() if before.is_file() else shutil.rmtree(before, ignore_errors=True)
    dist.barrier()


def load_shards(folder: Path | str, parameters: list[Tensor] | None = None) -> dict[str, Any]:
    """Return what `save_shards` wrote; without `parameters` the plain values alone.

    A tensor of the shape of a parameter is read as the parameter is cut among the ranks. The
    folder's metadata is a pickle: trust it like code.
    """
    import torch.distributed.checkpoint as dcp  # slow to import
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict  # no public one

    metadata = dcp.FileSystemReader(folder).read_metadata()
    shapes = {parameter.shape: parameter for parameter in parameters or ()}
    wanted: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "size"):
            wanted[name] = None  # a plain value
        elif parameters is not None:
            like = shapes.get(entry.size, torch.empty(entry.size))
            wanted[name] = torch.zeros_like(like, dtype=entry.properties.dtype)
    warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)  # one process reads
    dcp.load(wanted, checkpoint_id=folder, no_dist=parameters is None)
    return unflatten_state_dict(wanted, metadata.planner_data)
