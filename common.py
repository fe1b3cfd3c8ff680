"""What makes a training loop right, on one device and on many.

In this order: ranks and devices, communication, batches, the model, optimization, averages, meters,
the state of a run, checkpoint files. This file imports nothing else of the project, so that you can
copy it. A loop needs no branch on the mode: without a process group its helpers change nothing.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import dataclasses
import fnmatch
import functools
import inspect
import io
import itertools
import math
import os
import shutil
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.backends import cudnn

MAX_SKIPPED_IN_A_ROW = 10
FORMAT = 4  # of a checkpoint; a new number when an earlier one would be resumed wrongly


class UsageError(ValueError):
    """Input that cannot work. The message names the option, the given value and what would work."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(str(message).splitlines()))  # one line, even if it quotes more


# ------------------------------------------------------------------------------ ranks and devices


def ranks_from_env() -> tuple[int, int, int]:
    """Return (rank, local rank, world size) from the variables that torchrun sets.

    Raises UsageError if they are not set.
    """
    try:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        rank, local_rank, world_size = (int(os.environ[name]) for name in names)
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"no launcher has set RANK, LOCAL_RANK, WORLD_SIZE ({error}). Start it with "
            f"torchrun --standalone --nproc-per-node 2 {Path(sys.argv[0]).name} [options]"
        ) from error
    return rank, local_rank, world_size


def resolve_device_type(name: str) -> str:
    """Return "cpu" or the accelerator's type; raises UsageError if the device is not here."""
    found = "cpu"
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator().type
    if name not in ("auto", "cpu", found):
        available = "auto, cpu" if found == "cpu" else f"auto, cpu, {found}"
        raise UsageError(f"--device {name}: not on this machine; available: {available}")
    return found if name == "auto" else name


def set_up_device(
    name: str = "auto", deterministic: bool = False, local_rank: int = 0
) -> torch.device:
    """Select this process's device, before anything is allocated on device 0; set threads.

    `name` is auto, cpu or the accelerator's type. `deterministic` takes kernels that give the same
    bits in every run.
    """
    device_type = resolve_device_type(name)
    torch.use_deterministic_algorithms(deterministic)
    cudnn.benchmark = not deterministic
    with contextlib.suppress(RuntimeError):  # a caller may have set it by torch's newer names
        cudnn.allow_tf32 = not deterministic  # it rounds to 10 bits in convolutions
    if "OMP_NUM_THREADS" not in os.environ:  # N processes with all cores each would fight for them
        torch.set_num_threads(own_cores())
    if device_type == "cpu":
        return torch.device("cpu")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # CUDA refuses without it
    torch.set_float32_matmul_precision("highest" if deterministic else "high")  # high allows TF32
    index = local_rank % torch.accelerator.device_count()  # SLURM may show each task one device
    torch.accelerator.set_device_index(index)
    return torch.device(device_type, index)


def own_cores() -> int:
    """Return this process's share of the machine's cores, at least 1."""
    cores = len(os.sched_getaffinity(0))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    # Under srun the affinity may be the share already; SLURM_CPUS_ON_NODE is of the whole node.
    on_node = int(os.environ.get("SLURM_CPUS_ON_NODE") or cores)
    return max(1, min(cores, on_node // max(1, processes)))


def backend(device: torch.device) -> str:
    """Return gloo for CPU tensors, and for an accelerator its own library too."""
    # torch imports this module later by itself. If a process group exists then, one of the
    # module's default arguments keeps that group for ever.
    import torch.distributed.nn.functional  # noqa: F401

    if device.type == "cpu":
        return "gloo"  # with "cpu:gloo" torch 2.8 may find no default backend
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


# --------------------------------------------------------------------------------- communication


def get_rank() -> int:
    """Return the global rank, also before the process group exists."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def get_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def print0(*values: Any, file: Any = None) -> None:
    """Print on global rank 0 only."""
    if get_rank() == 0:
        print(*values, file=file, flush=True)


def reduce_value(value: Tensor, average: bool = True) -> Tensor:
    """Return the mean (or the sum) of `value` over all ranks.

    The result is a new tensor: `value` itself stays as it is, for the backward.
    """
    value = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)  # sum
        value = value / dist.get_world_size() if average else value
    return value


def patient_group() -> dist.ProcessGroup | None:
    """Return a group of all ranks that waits a week: rank 0 may write to a slow disk.

    Call it on every rank. Without a process group it returns None.
    """
    if not dist.is_initialized():
        return None
    return dist.new_group(timeout=timedelta(days=7), backend="gloo")


def broadcast_object(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return rank 0's `value` on every rank."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def gather_samples(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the samples of all ranks, in order, and the place of this rank's first one.

    For a loss that compares samples: `tensor`, [n, ...], is about this rank's slice of a
    micro-batch; n may differ between ranks. Gradients go back to the rank that owns a sample. With
    accumulation a sample is compared with those of its micro-batch alone. Without a process group,
    or without gradients, as in evaluation, the result is (tensor, 0): so call it outside of
    `torch.no_grad`, also for keys that were made within such a block.
    """
    gather_samples.used = True  # for the check before a run
    if not dist.is_initialized() or not torch.is_grad_enabled():
        return tensor, 0
    own = torch.tensor([len(tensor)])  # not on the device, as the host needs the numbers
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    sizes = [int(size) for size in gathered]
    return Gather.apply(tensor, sizes), sum(sizes[: dist.get_rank()])


gather_samples.used = False


class Gather(torch.autograd.Function):
    """Concatenate the tensors of all ranks; each rank's loss depends on all of them."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, sizes: list[int]) -> Tensor:
        context.sizes = sizes
        padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes)])

    @staticmethod
    @torch.autograd.function.once_differentiable  # a second derivative would be wrong
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = reduce_value(gradient.float() if gradient.itemsize < 4 else gradient, average=False)
        return total.split(context.sizes)[dist.get_rank()].to(gradient.dtype), None


def sync_buffers(net: nn.Module) -> None:
    """Broadcast rank 0's buffers to all ranks, and check that the parameters are equal.

    Call it on every rank. DDP itself broadcasts buffers in the next forward of its wrapper, too
    late for an evaluation.
    """
    if not dist.is_initialized():
        return
    for buffer in net.buffers():
        # As bytes, in one piece: gloo would send what lies between the elements of a view.
        sent = buffer.contiguous().view(-1).view(torch.uint8)
        dist.broadcast(sent, src=0)
        buffer.copy_(sent.view(buffer.dtype).view(buffer.shape))
    check_parameters(net)


def check_parameters(net: nn.Module) -> None:
    """Raise RuntimeError if a checksum of a parameter differs between ranks.

    Sharded parameters, as in train_fsdp.py, are not checked.
    """
    if any(hasattr(parameter, "full_tensor") for parameter in net.parameters()):
        return  # sharded
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = [p.detach().view(integer[p.element_size()]) for p in net.parameters()]  # as integers
    sums = torch.stack([value.sum(dtype=torch.int64) for value in bits])
    least, most = sums.clone(), sums.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    same = least.eq(most).tolist()
    if different := [name for (name, _), ok in zip(net.named_parameters(), same) if not ok]:
        raise RuntimeError(
            f"parameters differ between ranks: {', '.join(different[:5])}; does torch draw them, "
            "does every forward go through the wrapper, has each checkpoint() use_reentrant=False?"
        )


def settle_buckets(model: nn.Module) -> None:
    """Fix the order of DDP's gradient buckets now, the same in a new and in a resumed run.

    DDP sorts them once, in the order in which the first backward finishes. The last bit of a sum
    over three or more ranks depends on the place of a gradient in its bucket. This backward gives
    every parameter a gradient of zero, the last parameter first. It does not run the network.
    """
    net, stand_in = model.module, nn.Module()
    stand_in.net = net  # in a forward DDP broadcasts the buffers that it finds here
    # The backward goes from the last addition to the first.
    stand_in.forward = lambda: sum(p.sum() * 0 for p in net.parameters() if p.requires_grad)
    model.module = stand_in
    model().backward()
    model.module = net
    model.zero_grad(set_to_none=True)


def compress_gradients(model: nn.Module, method: str) -> None:
    """Register torch's communication hook for bf16 or fp16; "none" does nothing."""
    if method == "none":
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    compress = getattr(default_hooks, f"{method}_compress_hook")
    # Under its own name torch refuses bf16 where torch has no CUDA; gloo can do it.
    model.register_comm_hook(None, lambda state, bucket: compress(state, bucket))


# ---------------------------------------------------------------------------------------- batches


def tree_map(
    function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] = torch.is_tensor
) -> Any:
    """Apply `function` to the tensors of nested tuples, lists and dicts; the rest stays."""
    if is_leaf(tree):
        return function(tree)
    if isinstance(tree, dict):
        found = copy.copy(tree)  # of its own type; a state dict also has the modules' versions
        found.update({key: tree_map(function, value, is_leaf) for key, value in tree.items()})
        return found
    if isinstance(tree, (list, tuple)):
        values = [tree_map(function, value, is_leaf) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


def to_device(batch: Any, device: torch.device) -> Any:
    """Move a batch to the device: its tensors without waiting for the copy, and what has `.to`."""

    def move(value: Any) -> Any:
        return value.to(device, non_blocking=True) if torch.is_tensor(value) else value.to(device)

    return tree_map(move, batch, lambda value: hasattr(value, "to"))


# ------------------------------------------------------------------------------------------ model


def train_mode(model: nn.Module) -> None:
    """Put the model into training mode, except each BatchNorm in a frozen part of it."""
    model.train()
    for part in model.modules():
        parameters = list(part.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            for norm in batch_norms(part):  # of affine=False too, which has no parameter itself
                norm.eval()  # it keeps its statistics


def batch_norms(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def reshard(net: nn.Module) -> None:
    """Let fsdp forget the parameters that it has gathered: they are about to change."""
    for module in net.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def autocast(device: torch.device, amp: str) -> torch.autocast:
    """Return the context of a forward pass in mixed precision, if amp is bf16 or fp16."""
    dtype = torch.float16 if amp == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=amp in ("bf16", "fp16"))


def freeze(net: nn.Module, patterns: list[str]) -> None:
    """Stop the training of the parameters whose names match a pattern; "!head.*" leaves some out.

    Of several patterns that match a name the last one decides. Raises UsageError if a pattern
    matches nothing (after "!": nothing that was frozen), or if nothing is left to train.
    """
    parameters = dict(net.named_parameters())
    chosen: set[str] = set()
    for pattern in patterns:
        matched = {*fnmatch.filter(parameters, pattern.removeprefix("!"))}
        if not matched or (pattern.startswith("!") and not matched & chosen):
            names = ", ".join(parameters)
            what = "frozen parameter" if pattern.startswith("!") else "parameter"
            raise UsageError(f"--freeze {pattern}: no {what} has such a name; there are {names}")
        chosen = chosen - matched if pattern.startswith("!") else chosen | matched
    for name in chosen:
        parameters[name].requires_grad_(False)
    frozen = sum(not parameter.requires_grad for parameter in parameters.values())
    if frozen == len(parameters):
        raise UsageError(f"--freeze {' '.join(patterns)}: it freezes all, and nothing trains")
    print0(f"frozen: {frozen} of {len(parameters)} parameter tensors")


def has_non_finite(value: Tensor) -> bool:
    """Return whether the tensor holds a NaN or an infinity."""
    # If the sum is finite, so is every term. A sum is ten times as fast as a test of each term.
    return value.is_floating_point() and not (value.sum().isfinite() or value.isfinite().all())


def find_weights(content: Any) -> dict[str, Any]:
    """Return the state dict of a file: a checkpoint has it in `weights`, `model` or `state_dict`.

    "weights" is what was evaluated: with --average ema the average.
    """
    content = content if isinstance(content, dict) else {}
    parts = [content.get(name) for name in ("weights", "model", "state_dict")]
    return next((part for part in parts if isinstance(part, dict)), content)


def load_weights(net: nn.Module, content: Any, source: str, complete: bool = False) -> None:
    """Load every tensor whose name and shape fit, and print the names of the rest.

    `content` is a state dict, or a checkpoint that holds one. The prefixes of DDP and torch.compile
    are left out. Raises UsageError if nothing fits, or if the model needs more and `complete` is
    set.
    """
    if isinstance(content, dict) and isinstance(content.get("shards"), dict):
        raise UsageError(f"{source}: in shards; python tools/whole.py FILE OUT.pt makes one file")
    own = {name: value for name, value in net.state_dict().items() if isinstance(value, Tensor)}
    given = {}
    for name, value in find_weights(content).items():
        plain = str(name).replace("_orig_mod.", "").removeprefix("module.")
        given[name if name in own else plain] = value
    shapes = {name: getattr(value, "shape", None) for name, value in given.items()}
    fits = {name: given[name] for name in own if shapes.get(name) == own[name].shape}
    if not fits:
        examples = ", ".join(list(own)[:5])
        raise UsageError(f"{source}: no tensor fits the model, whose tensors are {examples}, ...")
    parameters = {name for name, _ in net.named_parameters()}  # a buffer may be an infinite mask
    bad = [n for n, v in fits.items() if n in parameters and has_non_finite(v.to(own[n].dtype))]
    if bad:
        raise UsageError(f"{source}: {', '.join(bad[:5])} is not finite")
    loaded = net.state_dict()  # it has the version of each module, and some modules ask for that
    loaded.update(fits)
    net.load_state_dict(loaded)
    print0(f"weights: {len(fits)} of the model's {len(own)} tensors are from {source}")
    for name in [name for name in own if name not in fits]:
        absent = shapes.get(name) is None
        found = "not in the file" if absent else f"{list(shapes[name])} in the file"
        problem = f"not loaded: {name} {list(own[name].shape)}, {found}"
        if complete:
            raise UsageError(f"{source}: {problem}: its numbers would be random")
        print0(f"weights: {problem}")
    if extra := [name for name in given if name not in own and shapes[name] is not None]:
        print0(f"weights: not in the model: {', '.join(extra)}")


# ----------------------------------------------------------------------------------- optimization


def build_optimizer(
    net: nn.Module, name: str, lr: float, momentum: float, weight_decay: float, nesterov: bool
) -> torch.optim.Optimizer:
    """Return sgd or adamw, by name, over the parameters that train.

    It is fused: one pass over the memory, and a skipped step costs no wait of the host. torch has
    no fused SGD for sharded parameters: there SGD takes a few operations over all of them.
    """
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    if name == "adamw":
        betas = momentum, 0.999
        return torch.optim.AdamW(parameters, lr, betas, weight_decay=weight_decay, fused=True)
    fused = not any(hasattr(parameter, "full_tensor") for parameter in parameters)
    options = {"weight_decay": weight_decay, "nesterov": nesterov}
    optimizer = torch.optim.SGD(parameters, lr, momentum, **options, fused=fused, foreach=not fused)
    make_momentum(optimizer)
    return optimizer


def make_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Let the momentum of torch's SGD begin with zero, as a first step does without dampening.

    A fused one would leave it uninitialised if the very first step is skipped.
    """
    for group in optimizer.param_groups if type(optimizer) is torch.optim.SGD else ():
        for parameter in group["params"] if group["momentum"] and not group["dampening"] else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def scale_lr(optimizer: torch.optim.Optimizer, rule: str, devices: int | None = None) -> None:
    """Scale the learning rates for so many devices, by default one per rank."""
    devices = devices or get_world_size()
    factor = {"none": 1, "linear": devices, "sqrt": math.sqrt(devices)}[rule]
    for group in optimizer.param_groups:  # timm's layer decay has an `lr_scale` for each group
        group["lr"] = float(group["lr"]) * factor * group.get("lr_scale", 1)


# A schedule returns the learning rate divided by its peak, for a global step from `start`, the end
# of the warm-up, to `end`, the end of the run. To add one, write a function, name it in SCHEDULES:
#     def halving(step, start, end, marks, low):
#         return 0.5 ** ((step - start) / 1000)
# `low` is the lowest value, --final-lr. A schedule in USE_MARKS has two other options: `marks` is
# --step-epochs in steps, and `low` is --step-gamma.


def constant(step: int, start: int, end: int, marks: list[int], low: float) -> float:
    return 1.0


def cosine(step: int, start: int, end: int, marks: list[int], low: float) -> float:
    done = min(1.0, (step - start) / max(1, end - start))
    return low + (1 - low) * (1 + math.cos(math.pi * done)) / 2


def multi_step(step: int, start: int, end: int, marks: list[int], low: float) -> float:
    return low ** bisect.bisect_right(marks, step)


def share_of_cycle(step: int, start: int, end: int, marks: list[int], ended: int = 0) -> float:
    cycle = marks[0] if marks else max(1, end - start)
    return ((step - start) % cycle + ended) / cycle


def cyclic(step: int, start: int, end: int, marks: list[int], low: float) -> float:
    """Rise from `low` to 1 and fall back, again and again (Smith, arXiv:1506.01186)."""
    return low + (1 - low) * (1 - abs(2 * share_of_cycle(step, start, end, marks) - 1))


def sawtooth(step: int, start: int, end: int, marks: list[int], low: float) -> float:
    """Fall to `low` in each cycle, whose last step has it (Izmailov et al., arXiv:1803.05407)."""
    return 1 - (1 - low) * share_of_cycle(step, start, end, marks, ended=1)


USE_MARKS = ["step", "cyclic", "sawtooth"]  # the others refuse --step-epochs
SCHEDULES = {
    "constant": constant,
    "cosine": cosine,
    "step": multi_step,
    "cyclic": cyclic,
    "sawtooth": sawtooth,
}


def lr_factor(
    step: int,
    steps_per_epoch: int,
    schedule: str,
    epochs: int,
    warmup_epochs: float,
    step_epochs: Iterable[int] = (),
    step_gamma: float = 0.1,
    final_lr: float = 0.0,
) -> float:
    """Return learning rate / peak for a global step.

    It is a pure function of the step: nothing drifts, and nothing can be restored wrongly. The
    warm-up rises to the value with which the schedule begins.
    """
    start, end = round(warmup_epochs * steps_per_epoch), epochs * steps_per_epoch
    marks = sorted(epoch * steps_per_epoch for epoch in step_epochs)
    low = step_gamma if schedule in USE_MARKS else final_lr
    factor = SCHEDULES[schedule](max(step, start), start, end, marks, low)
    return factor * (step + 1) / start if step < start else factor


def build_scheduler(
    optimizer: torch.optim.Optimizer, steps_per_epoch: int, **schedule: Any
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the learning rate as a function of the global step; `schedule` as in lr_factor.

    The global step counts consumed batches, skipped or not.
    """
    # A skipped first step counts too: torch would warn that the optimizer has made no step.
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, steps_per_epoch, **schedule)
    )


class StepGuard(torch.amp.GradScaler):
    """torch's GradScaler at every precision: it skips a step whose gradient has a NaN or an Inf.

    Without --amp fp16 its scale stays 1. The gradients are looked at after the all-reduce, so all
    ranks skip the same steps. A skipped step changes no BatchNorm statistics either, where one NaN
    would stay for ever.

    `skipped` counts skipped steps until the caller sets it to zero; `in_a_row` counts those since
    the last good step, and keeps MAX_SKIPPED_IN_A_ROW once it has reached it. With fp16 a skip
    counts there only at a scale of 1 or less: at a larger one it means that the scale was too
    high. Both stay on the device, so with a fused optimizer the host does not wait. Create the
    guard after `net.to(device)`.
    """

    def __init__(self, amp: str, device: torch.device, net: nn.Module) -> None:
        self.fp16 = amp == "fp16"
        super().__init__(device.type, init_scale=2.0**16 if self.fp16 else 1.0)
        self.one = torch.ones((), device=device)
        self.skipped, self.in_a_row = (torch.zeros_like(self.one) for _ in range(2))
        # Modules and names, not buffers: a forward may put another tensor in a buffer's place.
        self.owners: dict[torch.dtype, list[tuple[nn.Module, str]]] = {}
        for module in net.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name in ("running_mean", "running_var", "num_batches_tracked"):
                    self.owners.setdefault(buffer.dtype, []).append((module, name))
        self.keep_statistics()

    def keep_statistics(self) -> None:
        """Keep BatchNorm's statistics as they are now, as one tensor per type: few operations."""
        self.kept = {dtype: self.statistics(dtype)[0] for dtype in self.owners}

    def statistics(self, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Return the statistics of a type as one new tensor, and the buffers that hold them."""
        buffers = [getattr(module, name) for module, name in self.owners[dtype]]
        return torch.cat([buffer.detach().flatten() for buffer in buffers]), buffers

    @torch.no_grad()
    def update(self) -> None:
        """Count the step; if it was skipped, put back the statistics from before it."""
        scale = self.scale(self.one)  # a tensor on the device: get_scale() would wait for it
        super().update()  # halves the scale after a skipped step
        skip = self.scale(self.one) <= scale / 2
        if not self.fp16:
            super().update(1.0)
        self.skipped += skip
        in_a_row = (self.in_a_row + (scale <= 1)) * skip  # 0 after a good step
        self.in_a_row = torch.where(self.in_a_row < MAX_SKIPPED_IN_A_ROW, in_a_row, self.in_a_row)
        for dtype, kept in self.kept.items():
            now, buffers = self.statistics(dtype)
            torch.where(skip, kept, now, out=kept)
            parts = kept.split([buffer.numel() for buffer in buffers])
            torch._foreach_copy_(buffers, [p.view_as(b) for p, b in zip(parts, buffers)])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "in_a_row": self.in_a_row.item(), "fp16": self.fp16}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore scale and `in_a_row`. Load the network first: its statistics are kept."""
        if self.fp16 == state["fp16"]:  # else --amp is another one now
            super().load_state_dict(state)
        self.in_a_row.fill_(state["in_a_row"])
        self.keep_statistics()


def clip_grad_norm(net: nn.Module, limit: float | None, wanted: bool = True) -> Tensor | None:
    """Return the norm of the whole gradient, and scale the gradient down to `limit` if it is above.

    Without a limit the norm costs time for the log alone: if it is not `wanted`, return None.
    """
    if limit is None and not wanted:
        return None
    norm = nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
    # With sharded gradients each rank has only the norm of its own part here.
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    if limit is not None:
        nn.utils.clip_grads_with_norm_(net.parameters(), limit, norm)
    return norm


# ------------------------------------------------------------------------- average of the weights


class WeightAverage:
    """An exponential average, over steps, of the parameters and of BatchNorm's statistics.

    `tensors` has the averages, under the names that the weights have in the network. An evaluation
    swaps the two. All other buffers, as masks and counters, are those of the network. Without
    `enabled` it does nothing. Create it after `net.to(device)`, and after sharding.
    """

    def __init__(self, net: nn.Module, decay: float, enabled: bool = True) -> None:
        self.net, self.decay, self.enabled, self.n_averaged = net, decay, enabled, 0  # steps so far
        own = self.averaged().items() if enabled else ()
        self.tensors = {name: value.detach().clone() for name, value in own}

    def averaged(self, **options: bool) -> dict[str, Tensor]:
        """Return the network's tensors that are averaged, by name; `options` of named_parameters.

        A forward may put another tensor in the place of a buffer: so they are asked for anew.
        """
        found = dict(self.net.named_parameters(**options))
        statistics = ("running_mean", "running_var")
        found |= {n: b for n, b in self.net.named_buffers(**options) if n.endswith(statistics)}
        return {name: value for name, value in found.items() if value.is_floating_point()}

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the average towards the weights of the network; the first step copies them."""
        if not self.enabled:
            return
        n = self.n_averaged
        # The weight of the new values: larger at first, so that the start is forgotten.
        share = 1 - min(self.decay, (1 + n) / (10 + n)) if n else 1.0
        groups: dict[type, list] = {}
        for name, new in self.averaged().items():
            groups.setdefault(type(self.tensors[name]), []).append((self.tensors[name], new))
        for pairs in groups.values():  # sharded tensors by themselves
            averages, values = zip(*pairs)
            torch._foreach_lerp_(averages, values, share)
        self.n_averaged += 1

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Have the average in the network within this context; without an average do nothing."""
        self.swap()
        try:
            if self.n_averaged:
                sync_buffers(self.net)  # each rank has averaged its own statistics
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        if not self.n_averaged:
            return
        reshard(self.net)
        for name, value in self.averaged().items():
            trained = value.clone()
            value.copy_(self.tensors[name])
            self.tensors[name].copy_(trained)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load `n_averaged` and the tensors."""
        if self.enabled:
            for name, value in state["tensors"].items():
                self.tensors[name].copy_(cut_like(value, self.tensors[name]))
            self.n_averaged = state["n_averaged"]


# ----------------------------------------------------------------------------------------- meters


class Meter:
    """Exact means of per-sample values. The sums stay on the device until `mean` is called."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
        self.clear()

    def clear(self) -> None:
        self.sums: dict[str, list] = {}  # name: [sum of the values, what it is divided by]
        self.lists: dict[str, list[list]] = {}  # name: a list of values for each batch
        self.count = 0

    @torch.no_grad()
    def add(self, **values: Tensor | tuple[Tensor, Tensor] | list) -> None:
        """Add one tensor [n] per name. Raises ValueError if the names or lengths differ.

        Of a pair of tensors, sums and weights, the mean is the total of the sums divided by the
        total of the weights. A list of n values is kept on the CPU, for the function that `mean` is
        given.
        """
        if self.count:
            self.check_names(values)
        first = next(iter(values.values()))
        first = first[0] if isinstance(first, tuple) else first
        n = len(first) if getattr(first, "shape", None) != () else 0  # a mean has no length
        for name, value in values.items():
            if isinstance(value, list) and len(value) == n:
                # A view would be sent to rank 0 with all of its memory.
                plain = [v.detach().cpu().clone() if isinstance(v, Tensor) else v for v in value]
                self.lists.setdefault(name, []).append(plain)
                continue
            pair = value if isinstance(value, tuple) else (value,)
            for part in pair:
                if not isinstance(part, Tensor) or part.shape != (n,):
                    kind = type(part).__name__
                    found = f"shape {list(part.shape)}" if isinstance(part, Tensor) else kind
                    found += f" of {len(part)}" if isinstance(part, list) else ""
                    if isinstance(part, Tensor) and part.dim() > 1:
                        found += "; take its mean over the other dimensions, .flatten(1).mean(1)"
                    wanted = 'one number per sample, shape [n], as with reduction="none"'
                    raise ValueError(f"{name} must be {wanted}; got {found}")
            total = self.sums.setdefault(name, [0, 0])
            total[0] += pair[0].sum(dtype=self.dtype)
            total[1] += pair[1].sum(dtype=self.dtype) if len(pair) == 2 else n
        self.count += n

    def check_names(self, names: Iterable[str]) -> None:
        if only := ", ".join(sorted({*names} ^ {*self.sums, *self.lists})):
            problem = "the metrics must have the same names for every batch"
            raise ValueError(f"{problem}; only some batches have {only}")

    def mean(self, function: Callable[[dict[str, list]], dict[str, float]] | None = None) -> dict:
        """Return the mean of each name over all samples of all ranks, and their `count`.

        `function` gets the lists of all ranks on rank 0, by name, in the order of the samples. What
        it returns joins the means on all ranks. It needs an evaluation in ShardSampler's batches,
        and may take as long as it likes.
        """
        names, lists = broadcast_object(([*self.sums], [*self.lists]))
        if self.count:  # a rank without a sample has seen no name
            self.check_names([*names, *lists])
        sums = [value for name in names for value in self.sums.get(name, [0, 0])]
        sums = [torch.as_tensor(n).to(self.device, self.dtype) for n in (*sums, self.count)]
        *totals, count = reduce_value(torch.stack(sums), average=False).tolist()
        pairs = zip(names, totals[::2], totals[1::2])
        means = {name: total / weight if weight else math.nan for name, total, weight in pairs}
        if function:
            found = self.apply_to_lists(function)
            if both := ", ".join(found.keys() & means.keys()):
                raise ValueError(f"dataset_metrics and per_sample_metrics both return {both}")
            means |= {name: float(value) for name, value in found.items()}
        return {**means, "count": int(count)}

    def apply_to_lists(
        self, function: Callable[[dict[str, list]], dict[str, float]]
    ) -> dict[str, float]:
        """Return on every rank what the function makes on rank 0 of the lists of all ranks."""
        ranks: list[Any] = [self.lists]
        group = patient_group()
        if dist.is_initialized():
            ranks *= dist.get_world_size()
            dist.gather_object(self.lists, ranks if get_rank() == 0 else None)
        found = None
        if get_rank() == 0:
            found = function({name: in_order(ranks, name) for name in self.lists})
        found = broadcast_object(found, group)
        if group:
            dist.destroy_process_group(group)
        return found


def in_order(ranks: list[dict[str, list[list]]], name: str) -> list:
    """Return the values of all samples: rank r of N evaluated the batches r, r + N, r + 2 N, ..."""
    rounds = itertools.zip_longest(*(lists.get(name, []) for lists in ranks), fillvalue=[])
    return [value for batches in rounds for batch in batches for value in batch]


# ----------------------------------------------------------------------------- the state of a run


def whole(state: Any) -> Any:
    """Return the state with whole tensors on rank 0's CPU, and None for each on the other ranks.

    Call it on every rank.
    """

    def on_rank0(tensor: Tensor) -> Tensor | None:
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor().clone()  # a file would hold the padding behind a view
        return tensor.to("cpu") if get_rank() == 0 else None

    return tree_map(on_rank0, state)


@dataclasses.dataclass
class State:
    """What training changes. `epoch` and the `step` within it tell what comes next."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    scaler: StepGuard
    average: WeightAverage
    epoch: int = 0
    step: int = 0
    global_step: int = 0
    best: tuple[float, int] | None = None  # score and epoch, which counts from 1

    def __post_init__(self) -> None:
        self.at_first = self.shapes()

    def shapes(self) -> dict[str, Any]:
        """Return shape and type of each tensor of the network, by name."""
        state = self.net.state_dict().items()
        return {n: (v.shape, v.dtype) for n, v in state if isinstance(v, Tensor)}

    def checkpoint(self, collect: Callable[[Any], Any] = whole) -> dict[str, Any]:
        """Return plain tensors and values, with the names of the bare model.

        Call it on every rank: they put the parts of sharded tensors together. Rank 0 gets them, and
        Run.save adds the rest of a checkpoint. Raises RuntimeError if a buffer has another shape or
        type than at first; an empty one may grow, as that of an observer.
        """
        new = [name for name, now in self.shapes().items() if self.at_first.get(name) != now]
        if changed := [name for name in new if 0 not in self.at_first.get(name, [[1]])[0]]:
            problem = f"the forward has made, or changed in shape or type, {', '.join(changed)}"
            advice = "register it in __init__ in its largest shape, and use copy_"
            raise RuntimeError(f"{problem}: no new run could load it; {advice}")
        model, average = collect(self.net.state_dict()), collect(self.average.tensors)
        evaluated = copy.copy(model)  # the tensors are in the file once
        if self.average.n_averaged:
            names = {value: name for name, value in self.average.averaged().items()}
            every_name = self.average.averaged(remove_duplicate=False).items()
            evaluated.update({name: average[names[value]] for name, value in every_name})
        return {
            "format": FORMAT,
            "weights": evaluated,
            "model": model,
            "optimizer": collect(self.optimizer_by_name()),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "average": {"n_averaged": self.average.n_averaged, "tensors": average},
            "epoch": self.epoch,
            "step": self.step,
            "global_step": self.global_step,
            "best": self.best,
        }

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Load a checkpoint. Raises if it does not fit the network or the optimizer."""
        own = self.net.state_dict()
        model = copy.copy(checkpoint["model"])  # with the versions of its modules
        model.update({name: cut_like(value, own.get(name)) for name, value in model.items()})
        self.net.load_state_dict(model)
        self.load_optimizer(checkpoint["optimizer"])
        self.scaler.load_state_dict(checkpoint["scaler"])
        self.average.load_state_dict(checkpoint["average"])
        for name in ("epoch", "step", "global_step", "best"):
            setattr(self, name, checkpoint[name])
        peaks = {"base_lrs": self.scheduler.base_lrs}  # of this run's --lr
        self.scheduler.load_state_dict(checkpoint["scheduler"] | peaks)
        self.set_position(self.global_step)

    def load_itself(self) -> None:
        """Load the state into itself. Raises if no checkpoint of it could be loaded again."""
        states = self.net.state_dict(), self.optimizer_by_name()
        check_loadable(tree_map(lambda tensor: None, states))  # tensors can always be loaded
        self.net.load_state_dict(states[0])
        self.load_optimizer(states[1])

    def set_position(self, global_step: int) -> None:
        """Count from this step on, with the learning rates that this run's schedule has there."""
        self.global_step = self.scheduler.last_epoch = global_step
        schedule = zip(self.scheduler.base_lrs, self.scheduler.lr_lambdas)
        for group, (peak, factor) in zip(self.optimizer.param_groups, schedule):
            group["lr"] = peak * factor(self.global_step)

    def parameter_names(self) -> list[str]:
        """Return the names of the optimizer's parameters, in its order."""
        names = {parameter: name for name, parameter in self.net.named_parameters()}
        return [names[p] for group in self.optimizer.param_groups for p in group["params"]]

    def optimizer_by_name(self) -> dict[str, Any]:
        """Return the optimizer's state dict with names in place of the numbers of parameters.

        So another order of parameters or groups loads too. The form is that of torch's
        get_optimizer_state_dict, whose import would take half a second.
        """
        state, names = self.optimizer.state_dict(), self.parameter_names()
        numbers = dict(enumerate(names))
        groups = [g | {"params": [names[i] for i in g["params"]]} for g in state["param_groups"]]
        pairs = [(numbers.get(key, key), value) for key, value in state["state"].items()]
        # Sorted: all ranks put sharded tensors together in one order, whatever that of the groups.
        by_name = dict(sorted(pairs, key=lambda pair: str(pair[0])))
        kind = type(self.optimizer).__name__
        return state | {"kind": kind, "state": by_name, "param_groups": groups}

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        """Load what `optimizer_by_name` returned.

        The settings of the groups, as `weight_decay`, are those of this run. From the file comes
        what the optimizer keeps there beside its arguments, as a count of its steps.
        """
        if saved["kind"] != type(self.optimizer).__name__:
            print0(f"the optimizer starts anew: it cannot use the state of {saved['kind']}")
            return
        now, names = self.optimizer.state_dict(), self.parameter_names()
        before = {name: group for group in saved["param_groups"] for name in group["params"]}
        settings = {*inspect.signature(type(self.optimizer)).parameters, "params", "initial_lr"}
        for group in now["param_groups"]:
            old = before.get(names[group["params"][0]], {}) if group["params"] else {}
            group |= {name: value for name, value in old.items() if name not in settings}
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        state = now["state"]  # it stays that of parameters that did not train before
        state |= {key: value for key, value in saved["state"].items() if key not in before}
        for i, (name, parameter) in enumerate(zip(names, parameters)):
            if name in saved["state"]:
                state[i] = tree_map(
                    functools.partial(cut_like, like=parameter),
                    saved["state"][name],
                    lambda value: hasattr(value, "shape") and not hasattr(value, "full_tensor"),
                )
        # Beside state and groups an optimizer may save numbers of its own, as Lookahead does.
        extra = {key: saved[key] for key in saved.keys() - {"kind", "state", "param_groups"}}
        self.optimizer.load_state_dict(now | extra | {"state": state})
        for i, parameter in enumerate(parameters):
            if i in state:
                restore_types(self.optimizer.state[parameter], state[i], parameter)


def restore_types(now: dict[str, Any], saved: dict[str, Any], parameter: Tensor) -> None:
    """Give an optimizer's tensors their saved types: load_state_dict casts to the parameter's.

    They get the parameter's strides, which fused kernels need: --channels-last may have changed.
    """
    for name, value in saved.items():
        if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
            now[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        elif isinstance(value, Tensor):
            now[name] = value.to(now[name].device, copy=True)  # it lies in a file
        elif isinstance(value, (list, tuple, dict)):
            now[name] = tree_map(lambda tensor: tensor.to(parameter.device, copy=True), value)


def cut_like(value: Any, like: Any) -> Any:
    """Return a whole tensor, cut among the ranks as `like` is; return anything else as it is."""
    if not hasattr(like, "full_tensor") or getattr(value, "shape", None) != like.shape:
        return value if isinstance(value, Tensor) or not hasattr(value, "shape") else value[:]
    from torch.distributed.tensor import DTensor  # slow to import

    mesh, place = like.device_mesh, like.placements
    each = rows_per_shard(like.shape[0], mesh.size(mesh.ndim - 1))
    first = each * mesh.get_coordinate()[-1]
    own = value[first : first + each].to(like.device)  # of a file it reads no more
    form = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(own, mesh, place, run_check=False, **form)


def rows_per_shard(rows: int, shards: int) -> int:
    """Return how many rows of a tensor each shard has, as torch cuts; the last may have fewer."""
    return max(1, -(-rows // shards))


# ------------------------------------------------------------------------------- checkpoint files


def read_tensors(path: str | Path, option: str, verify: bool = True) -> Any:
    """Read a file of torch.save to the CPU; `weights_only` runs no code of the file.

    The tensors stay in the file until they are used: what nobody uses takes no memory. `verify`
    reads it all, for its checksums. Raises UsageError, which begins with `option`, if the file is
    damaged or of another kind.
    """
    try:
        zipped = zipfile.is_zipfile(path)  # old files are not
        if zipped and verify:
            with zipfile.ZipFile(path) as file:
                if damaged := file.testzip():  # torch.load does not check the checksums
                    raise ValueError(f"checksum of {damaged} is wrong")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the format of old files
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # a truncated, damaged or hostile file raises almost anything
        # torch's later sentences advise to run the code of the file.
        reason = str(error).partition(". ")[0].partition("\n")[0] or type(error).__name__
        problem = f"damaged, or no file of tensors ({reason}); name another file"
        raise UsageError(f"{option} {path}: {problem}") from error


def check_loadable(value: Any) -> None:
    """Raise if a checkpoint could hold the value, but no run could load it."""
    torch.save(value, file := io.BytesIO())
    file.seek(0)
    torch.load(file, weights_only=True)


def save_checkpoint(checkpoint: dict[str, Any], *paths: str | Path) -> None:
    """Write files that are always whole: after a crash, a kill or a full disk the old ones stay.

    All files have the same content, which is written once.
    """
    first, *others = map(Path, paths)
    with replacing(first) as temporary, open(temporary, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())  # the data must be on the disk before a name points to it
        torch.load(temporary, weights_only=True, mmap=True)  # raises if no run could load it
    for path in others:
        copy_checkpoint(first, path)


def copy_checkpoint(source: Path, path: Path) -> None:
    """Give the content of a file a second name, or copy it where the file system has no links."""
    with replacing(path) as temporary:
        try:
            os.link(source, temporary)  # no file is changed once it has its name
        except OSError:  # the file system has no links
            shutil.copyfile(source, temporary)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the name of a temporary file, which becomes `path` when the block has ended well.

    Raises OSError if it cannot be written; the old file stays.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # of a run that was killed; it may be a link to another
        yield temporary
        os.replace(temporary, path)  # atomic within one file system
        directory = os.open(path.parent, os.O_RDONLY)
        with contextlib.suppress(OSError):  # not every file system can do it
            os.fsync(directory)  # and the name too
        os.close(directory)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        problem = f"{path} could not be written (is the disk full?); the last good file stays"
        raise OSError(f"{problem}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path, verify: bool = True) -> dict[str, Any]:
    """Read a checkpoint to the CPU. Raises UsageError if it is damaged, or another kind of file."""
    checkpoint = read_tensors(path, "--resume", verify)
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
        raise UsageError(f"--resume {path}: not a checkpoint of this program (format {FORMAT})")
    return checkpoint
