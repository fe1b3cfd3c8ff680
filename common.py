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
import itertools
import math
import os
import sys
import types
import warnings
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.backends import cudnn

MAX_SKIPPED_IN_A_ROW = 10
FORMAT = 3  # of a checkpoint; a new number when an earlier one would be resumed wrongly


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
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # CUDA refuses without it
        # Convolutions would round to 10 bits. A caller may have set it by torch's newer names.
        with contextlib.suppress(RuntimeError):
            cudnn.allow_tf32 = False
    if "OMP_NUM_THREADS" not in os.environ:  # N processes with all cores each would fight for them
        torch.set_num_threads(own_cores())
    if device_type == "cpu":
        return torch.device("cpu")
    torch.set_float32_matmul_precision("highest" if deterministic else "high")  # high allows TF32
    index = local_rank % torch.accelerator.device_count()  # SLURM may show each task one device
    torch.accelerator.set_device_index(index)
    return torch.device(device_type, index)


def own_cores() -> int:
    """Return this process's share of the machine's cores, at least 1."""
    # Under srun the affinity may be the share already; SLURM_CPUS_ON_NODE is of the whole node.
    cores, processes = len(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
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

    The result is a new tensor: the loop may still need `value` for its backward.
    """
    value = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)  # sum
        value = value / dist.get_world_size() if average else value
    return value


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
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = reduce_value(gradient.float() if gradient.itemsize < 4 else gradient, average=False)
        return total.split(context.sizes)[dist.get_rank()].to(gradient.dtype), None


def sync_buffers(net: nn.Module) -> None:
    """Broadcast rank 0's buffers to all ranks, and check that the parameters are equal.

    Call it on every rank. DDP itself broadcasts buffers in the next forward of its wrapper, too
    late for an evaluation. Raises RuntimeError if a checksum of a parameter differs between ranks;
    sharded parameters, as in train_fsdp.py, are not checked.
    """
    if not dist.is_initialized():
        return
    for buffer in net.buffers():
        # As bytes, in one piece: gloo would send what lies between the elements of a view.
        sent = buffer.contiguous().view(-1).view(torch.uint8)
        dist.broadcast(sent, src=0)
        buffer.copy_(sent.view(buffer.dtype).view(buffer.shape))
    if any(hasattr(parameter, "full_tensor") for parameter in net.parameters()):
        return  # sharded
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = [p.detach().view(integer[p.element_size()]) for p in net.parameters()]  # as integers
    sums = torch.stack([value.sum(dtype=torch.int64) for value in bits])
    # One MAX gives both ends: max(~x) is ~min(x). -x would overflow at the smallest integer.
    extremes = torch.cat([sums, ~sums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    largest, smallest = extremes[: len(sums)].tolist(), (~extremes[len(sums) :]).tolist()
    names = [name for name, _ in net.named_parameters()]
    if different := [name for name, a, b in zip(names, largest, smallest) if a != b]:
        raise RuntimeError(
            f"parameters differ between ranks: {', '.join(different[:5])}; does torch draw them, "
            "and does every forward go through the wrapper?"
        )


def settle_buckets(model: nn.Module) -> None:
    """Let DDP sort its gradient buckets now, so that a resumed run sorts them as a new run does.

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
        return {key: tree_map(function, value, is_leaf) for key, value in tree.items()}
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


def autocast(device: torch.device, amp: str) -> torch.autocast:
    """Return the context of a forward pass in mixed precision: amp is off, bf16 or fp16."""
    dtype = torch.float16 if amp == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=amp != "off")


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
        option = f"--freeze {' '.join(patterns)}" if patterns else "the model"
        raise UsageError(f"{option}: every parameter is frozen, nothing is left to train")
    if frozen:
        print0(f"frozen: {frozen} of {len(parameters)} parameter tensors")


def read_tensors(path: str | Path, option: str) -> Any:
    """Read a file of torch.save to the CPU; `weights_only` runs no code of the file.

    Raises UsageError, which begins with `option`, if the file is damaged or of another kind.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as file:
                if damaged := file.testzip():  # torch.load does not check the checksums
                    raise ValueError(f"checksum of {damaged} is wrong")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the format of old files
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a truncated, damaged or hostile file raises almost anything
        # torch's later sentences advise to run the code of the file.
        reason = str(error).partition(". ")[0].partition("\n")[0] or type(error).__name__
        problem = f"damaged, or no file of tensors ({reason}); name another file"
        raise UsageError(f"{option} {path}: {problem}") from error


def has_non_finite(value: Tensor) -> bool:
    """Return whether the tensor holds a NaN or an infinity."""
    # If the sum is finite, so is every term. A sum is ten times as fast as a test of each term.
    return value.is_floating_point() and not (value.sum().isfinite() or value.isfinite().all())


# Under these names files hold weights. The first one found is taken: of an average, which is what
# was evaluated, before the weights of the last step.
PARTS = ["average", "ema", "model_ema", "ema_model", "state_dict_ema", "ema_state_dict"]
PARTS += ["weights", "model_state_dict", "model", "state_dict"]


def find_weights(content: Any, source: str) -> dict[str, Any]:
    """Return the state dict in what a file holds, and print which part was taken and left."""
    content = content if isinstance(content, dict) else {}

    def is_state(value: Any) -> bool:
        values = value.values() if isinstance(value, dict) else ()
        return any(isinstance(item, (Tensor, dict)) for item in values)

    found = [part for part in PARTS if is_state(content.get(part))]
    if not found:
        return content
    left = f"; not used: {', '.join(found[1:])}" if found[1:] else ""
    print0(f"weights: {found[0]} of {source}{left}")
    return find_weights(content[found[0]], source)


def load_weights(net: nn.Module, weights: Any, source: str, complete: bool = False) -> None:
    """Load every tensor whose name and shape fit, and print the names of the rest.

    `weights` is a state dict, or a checkpoint that holds one. Raises UsageError if nothing fits, or
    if the model needs more and `complete` is set.
    """
    weights = {str(name): value for name, value in find_weights(weights, source).items()}
    own = {name: value for name, value in net.state_dict().items() if isinstance(value, Tensor)}

    def plain(name: str) -> str:  # DDP and compile add to names, also of a part of the model
        return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))

    own_names = {plain(name): name for name in own}
    given = {own_names.get(plain(n), n): value for n, value in weights.items() if n not in own}
    given |= {name: weights[name] for name in own if name in weights}  # the exact name wins
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
    fused = not hasattr(parameters[0], "full_tensor")
    options = {"weight_decay": weight_decay, "nesterov": nesterov}
    return torch.optim.SGD(parameters, lr, momentum, **options, fused=fused, foreach=not fused)


def scale_lr(optimizer: torch.optim.Optimizer, rule: str, devices: int | None = None) -> None:
    """Scale the learning rates for so many devices, by default one per rank."""
    devices = devices or get_world_size()
    factor = {"none": 1, "linear": devices, "sqrt": math.sqrt(devices)}[rule]
    for group in optimizer.param_groups:
        group["lr"] = float(group["lr"]) * factor  # a task may have set a tensor


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
SCHEDULES = {"constant": constant, "cosine": cosine, "step": multi_step, "cyclic": cyclic}
SCHEDULES |= {"sawtooth": sawtooth}


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


class StepGuard:
    """Skips and counts a step if its gradient has a NaN or an infinity, at every precision.

    Call it like torch's GradScaler, which is at work inside with --amp fp16 alone. The check comes
    after the all-reduce, so all ranks skip the same steps. A skipped step changes no BatchNorm
    statistics either, where one NaN would stay for ever.

    `skipped` counts skipped steps until the caller sets it to zero; `in_a_row` counts those since
    the last good step. With fp16 a skip counts there only once the scale has fallen to 1: until
    then GradScaler is still looking for a scale. Both counts stay on the device, so with a fused
    optimizer the host does not wait. Create the guard after `net.to(device)`.
    """

    def __init__(self, amp: str, device: torch.device, net: nn.Module) -> None:
        self.grad_scaler = torch.amp.GradScaler(device.type, enabled=amp == "fp16")
        self.one = torch.ones((), device=device)
        self.skipped, self.in_a_row = (torch.zeros_like(self.one) for _ in range(2))
        self.optimizer: torch.optim.Optimizer | None = None  # set in the first step
        # By name: a forward may put another tensor in the place of a buffer.
        places: dict[torch.dtype, list] = {}
        for module in net.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name.endswith(("running_mean", "running_var", "num_batches_tracked")):
                    places.setdefault(buffer.dtype, []).append((module._buffers, name))
        self.places = [*places.values()]
        self.now, self.kept = ([flat(found) for found in self.statistics()] for _ in range(2))

    def statistics(self) -> list[list[Tensor]]:
        """Return BatchNorm's buffers, those of one dtype together."""
        return [[buffers[name] for buffers, name in places] for places in self.places]

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale: small gradients would be zero in fp16."""
        return self.grad_scaler.scale(loss)

    def unscale_(self, optimizer: torch.optim.Optimizer, total: int | Tensor = 1) -> None:
        """Divide the gradient by the scale, and look for NaN and Inf in it.

        `total` is what the losses of this step were divided by. If it is infinite, the global batch
        had no weight: the step is skipped, and does not count as one of a row.
        """
        self.grad_scaler.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        # GradScaler's own kernel: it also divides, here by 1, and looks at the shards of all ranks.
        self.bad = torch.zeros_like(self.one)  # will be 1 if the step is to be skipped
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.bad, self.one)
        self.counted = self.bad  # 1 if in_a_row counts that
        if self.grad_scaler.is_enabled():  # it lowers the scale after such a step
            self.counted = self.bad * (self.scale(self.one) <= 1)
        if isinstance(total, Tensor):
            self.counted = self.counted * (total != math.inf)
            self.bad = torch.where(total == math.inf, self.one, self.bad)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.optimizer is not optimizer:
            make_momentum(optimizer)
            self.optimizer, self.on_device = optimizer, skips_on_device(optimizer)
        if self.on_device:
            optimizer.grad_scale, optimizer.found_inf = None, self.bad
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
        elif not self.bad:
            optimizer.step()

    @torch.no_grad()  # a forward may have put tensors with a gradient in the place of buffers
    def update(self) -> None:
        """Count the step; if it was skipped, put back the statistics from before it."""
        self.skipped += self.bad
        self.in_a_row = torch.addcmul(self.counted, self.in_a_row, self.bad)  # 0 after a good step
        skip = self.bad > 0
        # `kept` has the statistics after the last good step; `parts` and `old` are views.
        for buffers, (now, parts), (kept, old) in zip(self.statistics(), self.now, self.kept):
            torch._foreach_copy_(parts, buffers)
            torch.where(skip, kept, now, out=kept)
            torch._foreach_copy_(buffers, old)
        self.grad_scaler.update()

    def state_dict(self) -> dict[str, Any]:
        counts = {"skipped": self.skipped.item(), "in_a_row": self.in_a_row.item()}
        return {**self.grad_scaler.state_dict(), **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts; the network was restored before, and its statistics are kept."""
        self.grad_scaler.load_state_dict(state)
        self.skipped.fill_(state["skipped"])
        self.in_a_row.fill_(state["in_a_row"])
        self.kept = [flat(buffers) for buffers in self.statistics()]


def flat(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return a copy of the tensors as one, and its parts, in their shapes."""
    whole = torch.cat([tensor.flatten() for tensor in tensors])
    parts = whole.split([tensor.numel() for tensor in tensors])
    return whole, [part.view_as(tensor) for part, tensor in zip(parts, tensors)]


def make_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Let the momentum of torch's SGD begin with zero, in every mode. A subclass may keep another.

    Fused SGD would leave it uninitialised if the very first step is skipped.
    """
    for group in optimizer.param_groups if type(optimizer) is torch.optim.SGD else ():
        # A first step leaves dampening out: it would not begin with zero.
        for parameter in group["params"] if group["momentum"] and not group["dampening"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer looks at `found_inf`, for all parameters."""
    asks = getattr(optimizer, "_step_supports_amp_scaling", False)  # as GradScaler does
    asks &= type(optimizer).__module__.startswith("torch.")  # a task's own step may do more
    groups = optimizer.param_groups
    return asks and all(g.get("fused", True) and not g.get("dampening") for g in groups)


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


class WeightAverage(nn.Module):
    """An exponential average, over steps, of the parameters and of BatchNorm's statistics.

    The average is `module`, a network like `net`. All other buffers in it are copies: the mean of
    an infinite mask would be NaN, and the mean of a large integer would be rounded. If it is not
    `enabled`, it does nothing, and its state is empty.
    """

    def __init__(self, net: nn.Module, decay: float, enabled: bool = True) -> None:
        super().__init__()
        own, empty = {*net.parameters(), *net.buffers(), *net.modules()}, types.CellType()
        for module in net.modules() if enabled else ():
            hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            for function in [*hooks, *vars(module).values()]:
                cells = getattr(function, "__closure__", None) or ()
                held = [cell.cell_contents for cell in cells if cell != empty]
                if any(isinstance(value, (nn.Module, Tensor)) and value in own for value in held):
                    problem = f"a function in {type(module).__name__} is a closure over a module"
                    raise UsageError(f"--average: {problem}; its copy would share it: use a method")
        self.module = copy.deepcopy(net) if enabled else nn.Module()
        self.decay, self.enabled, self.n_averaged = decay, enabled, 0  # steps so far
        ids = {id(p) for p in self.module.parameters() if p.is_floating_point()}
        for norm in batch_norms(self.module):
            ids |= {id(norm.running_mean), id(norm.running_var)}
        tensors = [*self.module.parameters(), *self.module.buffers()]
        self.is_averaged = [id(value) in ids for value in tensors]  # the others are copied
        modules, default = self.module.named_modules(), nn.Module.get_extra_state
        self.extra = [name for name, m in modules if type(m).get_extra_state is not default]

    @torch.no_grad()
    def after_step(self, net: nn.Module) -> None:
        """Move the average towards the weights of `net`; the first step copies them."""
        if not self.enabled:
            return
        n = self.n_averaged
        # The weight of the new values: larger at first, so that the start is forgotten.
        share = 1 - min(self.decay, (1 + n) / (10 + n)) if n else 1.0
        averages, values = ([*m.parameters(), *m.buffers()] for m in (self.module, net))
        groups: dict[Any, list] = {}
        for averaged, mine, new in zip(self.is_averaged, averages, values, strict=True):
            groups.setdefault((averaged, type(mine)), []).append((mine, new))
        for (averaged, _), pairs in groups.items():  # sharded tensors by themselves
            mine, new = zip(*pairs)
            if averaged:
                torch._foreach_lerp_(mine, new, share)
            else:
                torch._foreach_copy_(mine, new)
        self.n_averaged += 1
        for name in self.extra:
            state = net.get_submodule(name).get_extra_state()
            self.module.get_submodule(name).set_extra_state(copy.deepcopy(state))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the averaged network, under its own names, and `n_averaged`."""
        state = self.module.state_dict()
        if self.enabled:
            state["n_averaged"] = self.n_averaged
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` has returned."""
        state = copy.copy(state)
        self.n_averaged = int(state.pop("n_averaged", 0))
        self.module.load_state_dict(state)


# ----------------------------------------------------------------------------------------- meters


WEIGHT = "\0weight"  # added to the name of a sum, it names what the sum is divided by


class Meter:
    """Exact means of per-sample values. The sums stay on the device until `mean` is called."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
        self.clear()

    def clear(self) -> None:
        self.names: list[str] = []
        self.sums: Tensor | None = None  # of these names
        self.lists: dict[str, list[list]] = {}
        self.count = 0

    @torch.no_grad()
    def add(self, **values: Tensor | tuple[Tensor, Tensor] | list) -> None:
        """Add one tensor [n] per name. Raises ValueError if the names or lengths differ.

        Of a pair of tensors, sums and weights, the mean is the total of the sums divided by the
        total of the weights. A list of n values is kept on the CPU, for the function that `mean` is
        given.
        """
        for name in [name for name, value in values.items() if isinstance(value, tuple)]:
            values[name], values[name + WEIGHT] = values[name]
        if self.names:
            self._check_names(values)
        first = next(iter(values.values()))
        rows = {}
        for name, value in values.items():
            if isinstance(value, list) and len(value) == len(first):
                # A view would be sent to rank 0 with all of its memory.
                plain = [v.detach().cpu().clone() if isinstance(v, Tensor) else v for v in value]
                self.lists.setdefault(name, []).append(plain)
                continue
            if not isinstance(value, Tensor) or value.dim() != 1 or value.shape != first.shape:
                kind = type(value).__name__
                found = f"shape {list(value.shape)}" if isinstance(value, Tensor) else kind
                found += f" of {len(value)}" if isinstance(value, list) else ""
                wanted = 'one number per sample, shape [n], as with reduction="none"'
                raise ValueError(f"{name} must be {wanted}; got {found}")
            exact = value.is_floating_point() and value.device == self.device
            rows[name] = value if exact else value.to(self.device, self.dtype)
        self.names = self.names or [*rows]
        # All at once: each call of torch takes the host some microseconds.
        sums = torch.stack([rows[name] for name in self.names]).sum(1, dtype=self.dtype)
        self.sums = sums if self.sums is None else self.sums + sums
        self.count += len(first)

    def mean(self, function: Callable[[dict[str, list]], dict[str, float]] | None = None) -> dict:
        """Return the mean of each name over all samples of all ranks, and their `count`.

        `function` gets the lists of all ranks on rank 0, by name, in the order of the samples. What
        it returns joins the means on all ranks. It needs an evaluation in ShardSampler's batches.
        """
        names, sums = self._sums()
        totals = dict(zip(names, reduce_value(sums, average=False).tolist()))
        count = totals.pop("count")
        means = {}
        for name in [name for name in totals if not name.endswith(WEIGHT)]:
            divisor = totals.get(name + WEIGHT, count)
            means[name] = totals[name] / divisor if divisor else math.nan
        if function:
            ranks: list[Any] = [self.lists]
            if dist.is_initialized():
                ranks *= dist.get_world_size()
                dist.gather_object(self.lists, ranks if get_rank() == 0 else None)
            first = get_rank() == 0
            found = function({n: in_order(ranks, n) for n in self.lists}) if first else None
            found = broadcast_object(found)
            if both := ", ".join(found.keys() & means.keys()):
                raise ValueError(f"dataset_metrics and per_sample_metrics both return {both}")
            means |= {name: float(value) for name, value in found.items()}
        return {**means, "count": int(count)}

    def sums_of_ranks(self) -> dict[str, list[float]]:
        """Return the sum of each name, and the `count`, for each rank.

        A resumed run goes on from them: from their total it would round differently.
        """
        names, sums = self._sums()
        ranks = [sums]
        if dist.is_initialized():
            ranks = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
            dist.all_gather(ranks, sums)
        return dict(zip(names, torch.stack(ranks, 1).tolist()))

    def restore(self, sums: dict[str, list[float]]) -> None:
        """Go on from what `sums_of_ranks` returned; at another world size rank 0 takes all."""
        ranks = get_world_size()
        if len(sums["count"]) != ranks:
            sums = {name: [sum(of)] + [0.0] * (ranks - 1) for name, of in sums.items()}
        share = {name: of[get_rank()] for name, of in sums.items()}
        self.count = int(share.pop("count"))
        self.names = [*share]
        sums = torch.tensor([*share.values()], device=self.device, dtype=self.dtype)
        self.sums = sums if self.names else None

    def _check_names(self, names: Iterable[str]) -> None:
        if only := ", ".join(sorted({*names} ^ {*self.names, *self.lists})):
            problem = "the metrics must have the same names for every batch"
            raise ValueError(f"{problem}; only some batches have {only}")

    def _sums(self) -> tuple[list[str], Tensor]:
        names, lists = broadcast_object((self.names, list(self.lists)))
        if self.names:  # a rank without a sample has seen no name
            self._check_names([*names, *lists])
            sums = self.sums[[self.names.index(name) for name in names]]
        else:
            sums = torch.zeros(len(names), device=self.device, dtype=self.dtype)
        return [*names, "count"], torch.cat([sums, sums.new_full((1,), self.count)])


def in_order(ranks: list[dict[str, list[list]]], name: str) -> list:
    """Return the values of all samples: rank r of N evaluated the batches r, r + N, r + 2 N, ..."""
    rounds = itertools.zip_longest(*(lists.get(name, []) for lists in ranks), fillvalue=[])
    return [value for batches in rounds for batch in batches for value in batch]


# ----------------------------------------------------------------------------- the state of a run


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

    def checkpoint(self) -> dict[str, Any]:
        """Return plain tensors and values, with the names of the bare model.

        Call it on every rank: they put the parts of sharded tensors together. Rank 0 gets them, and
        Run.save adds the rest of a checkpoint.
        """
        return {
            "format": FORMAT,
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
        self.net.load_state_dict(cut_like(checkpoint["model"], self.net.state_dict()))
        self._restore_optimizer(checkpoint["optimizer"])
        self.scheduler.load_state_dict(checkpoint["scheduler"])
        self.scaler.load_state_dict(checkpoint["scaler"])
        self.average.load_state_dict(cut_like(checkpoint["average"], self.average.state_dict()))
        for name in ("epoch", "step", "global_step", "best"):
            setattr(self, name, checkpoint[name])
        # Compute the rates anew, so that more --epochs take effect at once.
        schedule = zip(self.scheduler.base_lrs, self.scheduler.lr_lambdas)
        for group, (peak, factor) in zip(self.optimizer.param_groups, schedule):
            group["lr"] = peak * factor(self.global_step)

    def _restore_optimizer(self, state: dict[str, Any]) -> None:
        """Load what `whole` made of an optimizer's state, in which parameters have numbers."""
        for group, now in zip(state["param_groups"], self.optimizer.param_groups):
            for name in {"fused", "foreach"} & now.keys():  # they belong to the device and the mode
                group[name] = now[name]
        parameters = dict(enumerate(p for g in self.optimizer.param_groups for p in g["params"]))
        saved = dict(state["state"])  # some optimizers add keys that are no number
        numbers = parameters.keys() & saved.keys()
        for i in numbers:
            saved[i] = cut_like(saved[i], dict.fromkeys(saved[i], parameters[i]))
        self.optimizer.load_state_dict(state | {"state": saved})
        for i in numbers:
            restore_types(self.optimizer.state[parameters[i]], saved[i], parameters[i])


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
    """Return the value with whole tensors on rank 0's CPU, and None for each on the other ranks.

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
    if hasattr(value, "full_tensor"):
        value = value.full_tensor().clone()  # a file would hold the padding behind a view
    return value.to("cpu") if get_rank() == 0 else None


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


# ------------------------------------------------------------------------------- checkpoint files


def save_checkpoint(checkpoint: dict[str, Any], *paths: str | Path) -> None:
    """Write files that are always whole: after a crash, a kill or a full disk the old ones stay.

    All files have the same content. Each is on the disk before the next one is begun.
    """
    for path in map(Path, paths):
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with open(temporary, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())  # the data must be on the disk before a name points to it
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


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU. Raises UsageError if it is damaged, or another kind of file."""
    checkpoint = read_tensors(path, "--resume")
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
        raise UsageError(f"--resume {path}: not a checkpoint of this program (format {FORMAT})")
    position = [checkpoint.get(name) for name in ("epoch", "step", "global_step")]
    if not all(type(number) is int and number >= 0 for number in position):
        raise UsageError(f"--resume {path}: epoch, step and global step {position} are no position")
    return checkpoint
