"""What dp and fsdp need beside torch, and SyncBatchNorm for the CPU, where torch has none.

With the CPU versions the tests prove all modes on any machine.
"""

from __future__ import annotations

import gc
import numbers
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.func import functional_call
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.data import DataLoader

import common
from common import UsageError, autocast, batch_norms, gather_samples, to_device, tree_map
from machinery.identity import digest
from machinery.usertask import Task
from sampling import seed_generators

# ---------------------------------------------------------------------------------------------- dp


class WithLoss(nn.Module):
    """The network with its loss and metrics per sample: each replica computes its own.

    Otherwise all outputs are gathered on the first device: it would need more memory than the
    others, and compute every loss.
    """

    def __init__(self, net: nn.Module, task: Task, device: torch.device, amp: str) -> None:
        super().__init__()
        self.net, self.task, self.device, self.amp = net, task, device, amp

    def forward(self, inputs: Any, targets: Any) -> dict[str, Tensor]:
        before = dict(self.net.named_buffers())
        with autocast(self.device, self.amp):  # nn.DataParallel's threads forget the chosen dtype
            outputs = self.net(inputs)
            losses = self.task.per_sample_loss(outputs, targets)
        new = {name for name, buffer in self.net.named_buffers() if buffer is not before.get(name)}
        if new and (lost := new & self.net.state_dict().keys()):  # the others are caches
            problem = f"the forward puts a new tensor in the place of {', '.join(sorted(lost))}"
            raise UsageError(f"dp: {problem}, and loses it; change it in place, or use ddp")
        return {"loss": losses, **self.task.train_metrics(outputs, targets)}


class DataParallel(nn.DataParallel):
    """`nn.DataParallel` with the random stream of rank r of a DDP run for replica r.

    Seeded alike, all replicas would drop the same units.
    """

    def parallel_apply(self, replicas: list, inputs: tuple, kwargs: tuple) -> list:
        seed, accelerator = torch.initial_seed(), torch.get_device_module(self.src_device_obj)
        for r, index in enumerate(self.device_ids):
            with accelerator.device(index):
                accelerator.manual_seed(seed + r)
        return super().parallel_apply(replicas, inputs, kwargs)


class DataParallelOnCPU(nn.Module):
    """What DataParallel does, with N replicas on the CPU, where torch itself would run one."""

    def __init__(self, module: nn.Module, replicas: int) -> None:
        super().__init__()
        self.module, self.replicas = module, replicas

    def forward(self, *inputs: Any) -> dict[str, Tensor]:
        tensors: list[Tensor] = []
        tree_map(tensors.append, inputs)
        pieces = len(tensors[0].chunk(self.replicas))  # a small batch has fewer than replicas
        # The replicas share the parameters: gradients add up. Replica 0 updates the buffers, the
        # others have copies.
        buffers = dict(self.module.named_buffers())
        copies = [{name: b.clone() for name, b in buffers.items()} for _ in range(1, pieces)]
        seed, outputs = torch.initial_seed(), []
        for r, own in enumerate([buffers, *copies]):
            seed_generators(seed + r)
            piece = tree_map(lambda tensor, r=r: tensor.chunk(self.replicas)[r], inputs)
            outputs.append(functional_call(self.module, own, piece))
        return {name: concatenated([output[name] for output in outputs]) for name in outputs[0]}


def concatenated(parts: list) -> Any:
    """Return the values of all replicas: tensors [n], or pairs of them."""
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return tuple(torch.cat(of) for of in zip(*parts))


def data_parallel(module: nn.Module, replicas: int, device: torch.device) -> nn.Module:
    if device.type == "cpu":
        return DataParallelOnCPU(module, replicas)
    return DataParallel(module, range(replicas))


# ------------------------------------------------------------------------------- BatchNorm on a CPU


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """`nn.SyncBatchNorm` for CPU tensors: statistics over a micro-batch of all ranks, [n, C, ...].

    n may differ between ranks. Each rank normalises the samples of all, and keeps its own.
    """

    def _check_input_dim(self, value: Tensor) -> None:
        if value.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {value.dim()}")

    def forward(self, value: Tensor) -> Tensor:
        if not self.training:
            return super().forward(value)
        # A momentum encoder runs under no_grad, where gather_samples has this rank's samples alone.
        with torch.enable_grad():
            everything, first = gather_samples(value)
        return super().forward(everything)[first : first + len(value)].clone()  # FSDP takes no view


def convert_sync_batchnorm(net: nn.Module, device: torch.device) -> nn.Module:
    """Return the network with every BatchNorm synchronised over the ranks, under the same names."""
    for norm in batch_norms(net):
        # The same parameters, settings and hooks, another forward. torch's converter loses hooks.
        norm.__class__ = SyncBatchNorm if device.type == "cpu" else nn.SyncBatchNorm
        vars(norm).setdefault("process_group", None)  # all ranks
    return net


# ------------------------------------------------------------------------------------------- fsdp

Choose = Callable[[nn.Module], list[nn.Module]] | None  # a task's shard_modules
TABLES = {"_parameters", "_modules", "_flat_weights"}  # the last: an RNN renews it


def build_once(build: Callable[[], nn.Module]) -> nn.Module:
    """Return build(). On ranks above 0 all parameters share one memory, until `shard` deals them.

    There the same code runs, but each parameter overwrites the last one. Raises UsageError if
    anything but parameters and buffers then differs from rank 0, as a number made of weights.
    """
    memory, known = torch.UntypedStorage(0), tensors_in_use()

    def take(module: nn.Module, name: str, parameter: Tensor | None) -> None:
        plain = type(parameter) is nn.Parameter and parameter.is_contiguous()
        if common.get_rank() and plain and parameter.device.type == "cpu":
            memory.resize_(max(memory.nbytes(), parameter.nbytes))
            parameter.data = torch.empty(0, dtype=parameter.dtype).set_(memory, 0, parameter.shape)

    with register_module_parameter_registration_hook(take):
        net = build()
    refuse_differences(net, tensors_in_use() - known)
    return net


def tensors_in_use() -> set[Tensor]:
    gc.collect()
    return {found for found in gc.get_objects() if issubclass(type(found), Tensor)}


def refuse_differences(net: nn.Module, tensors: set[Tensor]) -> None:
    """Raise UsageError if the network, but for its values, or another tensor is not as on rank 0.

    `tensors` are those that its code has made: one may lie in a list, or in a closure.
    """
    sent, others = {memory_of(buffer) for buffer in net.buffers()}, []
    for tensor in tensors - {*net.parameters()}:
        # What autograd has made of weights is made anew in each forward, as weight_norm does.
        if tensor.grad_fn is None and not tensor.is_meta and memory_of(tensor) not in sent:
            others.append(f"a tensor {[*tensor.shape]} with the hash {digest(tensor)}")
    for name, module in net.named_modules():
        for key in vars(module).keys() - TABLES:
            values: list[Any] = []
            tree_map(lambda v, to=values: to.append(v) or v, vars(module)[key], is_number)
            others += [f"{name}.{key} {value}" for value in values]
    own = [*net.named_parameters(), *net.named_buffers()]
    mine = [f"{name} {[*value.shape]} {value.dtype}" for name, value in own] + sorted(others)
    if (first := common.broadcast_object(mine)) != mine:
        there = next((line for line in first if line not in mine), "another order")
        here = next((line for line in mine if line not in first), "another order")
        found = f"{there} on rank 0, but {here} on rank {dist.get_rank()}"
        advice = "what is made of weights must be a parameter or a buffer: rank 0 sends these"
        raise UsageError(f"the model has {found}; all ranks need the same, and {advice}")


def is_number(value: Any) -> bool:
    return isinstance(value, (numbers.Number, np.ndarray))


def memory_of(value: Tensor) -> int:
    """Return where the memory of a tensor begins, 0 for a sparse one."""
    return value.untyped_storage().data_ptr() if value.layout == torch.strided else 0


def mesh_of_ranks(device: torch.device, shard_size: int | None) -> DeviceMesh:
    """Return all ranks in one row, or in rows of `shard_size`: each row holds the whole network.

    8 ranks with --shard-size 4 are two rows, each with a whole copy.
    """
    world_size = dist.get_world_size()
    if shard_size in (None, world_size):
        return init_device_mesh(device.type, (world_size,))
    shape = (world_size // shard_size, shard_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def shard(net: nn.Module, choose: Choose, mesh: DeviceMesh, amp: str = "off") -> None:
    """Cut the parameters of each chosen module, and then all others, among the ranks.

    `choose(net)` names the modules; by default it is `large_modules`.

    Before the forward and the backward of a module the ranks collect its parameters, and forget
    them afterwards. They travel in their own type: with --amp bf16 autocast rounds them, as in DDP.
    With `bf16-shards` they travel in bf16, and the gradients in float32.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # slow

    marks = {name: dict(vars(parameter)) for name, parameter in net.named_parameters()}
    refuse_lists(net)
    for module in [*(choose or large_modules)(net), net]:
        values = {n: p.data for n, p in module.named_parameters() if not hasattr(p, "full_tensor")}
        # The types of parameters, of summed gradients, and of what the network gives to the loss.
        half = torch.bfloat16, torch.float32, torch.float32 if module is net else None
        policy = MixedPrecisionPolicy(*half if amp == "bf16-shards" else ())
        # What is left for the last one is small, and the backward begins with it: it is kept.
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=module is not net)
        for name in [*values]:
            deal(values.pop(name), module.get_parameter(name))
    common.sync_buffers(net)  # DDP does it by itself
    for name, parameter in net.named_parameters():  # new ones: fully_shard replaces them
        vars(parameter).update(marks[name])  # as `_no_weight_decay`, for the optimizer
    for module in net.modules():  # in torch 2.8 gloo's mean is a sum: FSDP itself has to divide
        if isinstance(module, FSDPModule) and mesh.device_type == "cpu":
            module.set_force_sum_reduction_for_comms(True)
    if mesh.device_type != "cpu":
        wait_for_gathers(net, mesh)


def deal(value: Tensor, shards: Tensor) -> None:
    """Cut rank 0's value among the ranks; the memory of `value` on the others takes it whole."""
    whole = value.to(shards.device)
    dist.broadcast(whole.view(-1).view(torch.uint8), src=0)  # bytes: gloo knows not every type
    shards.detach().to_local().copy_(common.cut_like(whole, shards).to_local())


LISTS = nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict  # they have no forward


def large_modules(net: nn.Module) -> list[nn.Module]:
    """Return the parts of the network that fsdp shards each for itself.

    From the top down, a module with a list of blocks (Sequential, ModuleList, ...) and more than an
    eighth of all parameters is replaced by its children. Left out are weights with two names, and
    modules of vectors alone: torch warns that a norm returns a view, which must not be changed.
    """
    eighth = sum(parameter.numel() for parameter in net.parameters()) / 8
    uses = Counter(id(p) for _, p in net.named_parameters(remove_duplicate=False))
    found, parts = [], [*net.children()]
    while parts:
        part = parts.pop(0)
        own = [*part.parameters()]
        blocks = any(isinstance(module, (*LISTS, nn.Sequential)) for module in part.modules())
        too_large = blocks and sum(p.numel() for p in own) > eighth
        if too_large or isinstance(part, LISTS) or any(uses[id(p)] > 1 for p in own):
            parts = [*part.children(), *parts]
        elif any(p.dim() > 1 for p in own):
            found.append(part)
    return found


def refuse_lists(net: nn.Module) -> None:
    """Raise UsageError if a list or a buffer of the network shares the memory of a parameter."""
    names = {memory_of(parameter): name for name, parameter in net.named_parameters()}

    def check(value: Tensor) -> Tensor:
        if value.numel() and (memory := memory_of(value)) in names:
            problem = f"a list, dict or buffer of the model holds {names[memory]}, which fsdp cuts"
            raise UsageError(f"the model: {problem}; clone it, or read its module in the forward")
        return value

    for module in net.modules():
        tree_map(check, {name: vars(module)[name] for name in vars(module).keys() - TABLES})


def wait_for_gathers(net: nn.Module, mesh: DeviceMesh) -> None:
    """Let each forward wait for the gathers of the backward before it, as torch should itself.

    A backward also gathers a module that has no part in it: a frozen one, or the last one of an
    evaluation. torch 2.8 to 2.14 frees that memory too early, and the next forward writes into it:
    with --accum-steps the run would be another one. A communicator works in order: this small
    all-reduce before each forward ends after all gathers.
    """
    one, group = torch.ones(1, device=mesh.device_type), mesh.get_group(-1)

    @torch.compiler.disable
    def hook(module: nn.Module, inputs: Any) -> None:
        dist.all_reduce(one, dist.ReduceOp.MAX, group)

    net.register_forward_pre_hook(hook, prepend=True)  # before FSDP's own


@torch.no_grad()
def join_forwards(model: nn.Module, loader: DataLoader, device: torch.device, amp: str) -> None:
    """Run the forward that other ranks have still to make, if they have a batch more.

    In each forward of a sharded network every rank sends its part of the parameters.
    """
    for _ in range(loader.batch_sampler.missing):
        inputs, _ = to_device(loader.dataset.__getitems__((0, [0])), device)
        with autocast(device, amp):
            model(inputs)
