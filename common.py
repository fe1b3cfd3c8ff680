"""Helpers that the four scripts share. Nothing here knows the problem (`task.py` does) or the parallel mode (the scripts do).

Every distributed helper is an identity without a process group and returns new tensors, so that the loops need no branch on the mode.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import ctypes
import fcntl
import fnmatch
import functools
import math
import os
import types
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

from launch import (
    SIGNALS,
    announce_end,
    backend,
    earlier_failure,
    exit_code,
    handle_signals,
    is_distributed,
    is_rank0,
    join,
    launcher_ranks,
    leaves_no_trace,
    meeting_place,
    meeting_point,
    print0,
    run_worker,
    timeout,
    wait_for_all,
)
from loading import (
    GlobalBatchSampler,
    KeyedDataset,
    ShardSampler,
    build_loader,
    keyed_uniform,
    map_tensors,
    mix,
    seed_evaluation,
    seed_generators,
    seed_rng,
    split_batch,
    to_device,
)
from options import Stopped, UsageError, check_run, load_task, parse_args, resolve_device_type, set_variable, undo_at_end

__all__ = ["SIGNALS", "GlobalBatchSampler", "ShardSampler", "Stopped", "announce_end", "backend", "build_loader", "check_run"]
__all__ += ["earlier_failure", "exit_code", "handle_signals", "is_rank0", "join", "keyed_uniform", "launcher_ranks"]
__all__ += ["leaves_no_trace", "load_task", "map_tensors", "meeting_place", "meeting_point", "mix", "parse_args", "run_worker"]
__all__ += ["seed_evaluation", "seed_generators", "split_batch", "timeout", "wait_for_all"]

MAX_SKIPPED_IN_A_ROW = 10

# ------------------------------------------------------------------------------------------------------- devices and processes


def set_up_device(args: argparse.Namespace, local_rank: int = 0) -> torch.device:
    """Choose this process's device and make it the current one, before anything allocates on device 0; set numerics and threads."""
    device_type = resolve_device_type(args.device)
    if args.deterministic and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        set_variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, products on an NVIDIA device are refused
    strict, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    undo_at_end(functools.partial(torch.use_deterministic_algorithms, strict, warn_only=warn))
    undo_at_end(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    torch.use_deterministic_algorithms(args.deterministic)
    torch.backends.cudnn.benchmark = not args.deterministic
    if "OMP_NUM_THREADS" not in os.environ:  # N processes with all the cores each would fight for them
        cores, processes = len(os.sched_getaffinity(0)), getattr(args, "nproc", None) or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        undo_at_end(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(max(1, min(cores, int(os.environ.get("SLURM_CPUS_ON_NODE", cores)) // processes)))
    if device_type == "cpu":
        keep_freed_memory()
        return torch.device("cpu")
    undo_at_end(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision("highest" if args.deterministic else "high")  # high allows TF32 in float32 products
    index = local_rank % torch.accelerator.device_count()  # SLURM may show each of its tasks one device alone
    torch.accelerator.set_device_index(index)
    return torch.device(device_type, index)


def keep_freed_memory() -> None:
    """Let glibc keep what is freed: the memory of the gradients would go back to the system in every step, to come again page by page."""
    with contextlib.suppress(AttributeError):  # of another C library
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(-3, 2**25):  # M_MMAP_THRESHOLD, in bytes, the largest that it takes; without it the other one would harm
            mallopt(-1, 2**30)  # M_TRIM_THRESHOLD


def reduce_value(value: Tensor, average: bool = True) -> Tensor:
    """Return the mean (or the sum) of `value` over all ranks, as a new tensor: an in-place all-reduce would break backward."""
    value = value.detach().clone()
    if is_distributed():
        dist.all_reduce(value)  # sum
        value = value / dist.get_world_size() if average else value
    return value


@contextlib.contextmanager
def one_at_a_time(folder: str | Path) -> Iterator[None]:
    """Let the processes of this machine into the block one after the other: the first one downloads, the others find the files there."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def broadcast_object(value: Any) -> Any:
    """Return rank 0's `value` on every rank."""
    box = [value]
    if is_distributed():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def sync_buffers(net: nn.Module) -> None:
    """Give every rank rank 0's buffers (BatchNorm statistics), which DDP does only at the next training forward.

    Raises if the parameters are not bitwise the same on all ranks, as when a forward bypassed DDP and gradients were never shared.
    """
    for buffer in net.buffers():
        dist.broadcast(buffer, src=0)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = torch.stack([p.detach().view(bits[p.element_size()]).sum(dtype=torch.int64) for p in net.parameters()])
    extremes = torch.cat([sums, ~sums])  # ~ and not -, which would overflow at the smallest number
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)  # the largest, and in reverse order the smallest
    largest, smallest = extremes[: len(sums)].tolist(), (~extremes[len(sums) :]).tolist()
    if different := [name for (name, _), a, b in zip(net.named_parameters(), largest, smallest) if a != b]:
        raise RuntimeError(f"parameters differ between ranks: {', '.join(different[:5])}; does every forward go through the DDP wrapper?")


def repeat_first_backward(args: argparse.Namespace, task: types.SimpleNamespace, model: nn.Module, dataset: Dataset, state: Any) -> None:
    """In a resumed run, let DDP arrange its buckets as the interrupted run had them, so that the next step is bitwise the same.

    DDP sorts its buckets by the order in which the first backward finished, and the last bit of a sum over three or more ranks depends on
    where in a bucket a gradient stands. So one backward is run for its order alone; neither weights nor buffers keep a trace of it.
    """
    if state.global_step == 0:
        return
    device = next(model.parameters()).device
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    inputs, targets = to_device(KeyedDataset(dataset, args).__getitems__((state.epoch, [0, 0])), device)
    train_mode(model)
    with autocast(args, device):
        losses = task.per_sample_loss(model(inputs), targets)
    losses.sum().backward()
    model.zero_grad(set_to_none=True)
    for buffer, before in buffers:
        buffer.copy_(before)


def compress_gradients(args: argparse.Namespace, model: nn.parallel.DistributedDataParallel, scaler: Scaler) -> None:
    """Register torch's own communication hook for `--grad-compress`."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if args.grad_compress in ("bf16", "fp16"):
        model.register_comm_hook(None, getattr(default_hooks, f"{args.grad_compress}_compress_hook"))
    if args.grad_compress == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)

        def hook(state, bucket):  # one bucket after the other: each needs three all-reduces, which gloo starts in any order
            if bucket.index() == 0 and scaler.in_a_row > 0:
                # The last step was skipped. Its NaN would stay in what PowerSGD keeps, and reach every later gradient.
                state.error_dict.clear()
                state.p_memory_dict.clear()
                state.q_memory_dict.clear()
            (future := powerSGD_hook.powerSGD_hook(state, bucket)).wait()
            return future

        model.register_comm_hook(state, hook)


# ------------------------------------------------------------------------------------------------------ model and optimization


def build_net(args: argparse.Namespace, task: types.SimpleNamespace, device: torch.device) -> nn.Module:
    """Build the task's model on the device, from `--seed` or `--weights`, with `--freeze` applied."""
    torch.manual_seed(args.seed)
    net = task.build_model(args).to(getattr(torch, args.dtype))
    if args.weights not in (None, "default"):  # default: which ones, only the task knows
        load_weights(args, net, read_tensors(args.weights, old=True))
    if frozen := freeze(args, net):
        print0(f"frozen: {frozen} of {len(list(net.parameters()))} parameter tensors")
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    return net.to(device, memory_format=memory_format)


def read_tensors(path: str | Path, old: bool = False) -> Any:
    """Read a file of torch.save to the CPU, of before torch 1.6 only if `old`. `weights_only` lets no code in the file run.

    Raises almost anything if it is damaged, or holds more than tensors and plain values.
    """
    with open(path, "rb") as file:
        zipped = file.read(4) == b"PK\3\4"  # as torch.load tells it: zipfile has other rules, and could take a file for none
    if zipped or not old:
        with zipfile.ZipFile(path) as file:
            if any(member.compress_type != zipfile.ZIP_STORED for member in file.infolist()):
                raise ValueError("compressed, which torch.save never does")  # a small file could fill the memory
            if damaged := file.testzip():  # torch.load does not look at the checksums that torch.save wrote
                raise ValueError(f"checksum of {damaged} is wrong")
    return torch.load(path, map_location="cpu", weights_only=True)


def became_non_finite(value: Tensor, before: Tensor | None) -> bool:
    """Return whether `value` holds a NaN or an infinity that `before`, of the same shape, does not hold in the same place.

    What a model holds by design, such as an infinite mask, is no fault. Without `before`, every NaN and every infinity is one.
    """
    if not value.is_floating_point() or value.isfinite().all():
        return False
    if before is None:
        return True
    before = before.to(value.device)
    return not (value.isfinite() | (value == before) | (value.isnan() & before.isnan())).all()


def load_weights(args: argparse.Namespace, net: nn.Module, weights: Any) -> None:
    """Load what fits of a state dict, or of a checkpoint with one, and name what does not. Raises UsageError if nothing does.

    Of a checkpoint with an average of the weights it takes that: it is what was evaluated.
    """
    own, given = net.state_dict(), {}
    weights = weights if isinstance(weights, dict) else {}
    average = weights.get("average")
    if isinstance(average, dict) and average.get("n_averaged", 0) > 0:  # before that it is what the run began with
        weights = {name: value for name, value in average.items() if name != "n_averaged"}
    for part in ("state_dict", "model"):
        weights = weights[part] if isinstance(weights.get(part), dict) else weights
    for name, value in weights.items():
        name = str(name)
        while name not in own and name.startswith(("module.", "_orig_mod.")):  # of DistributedDataParallel and torch.compile
            name = name.partition(".")[2]
        given[name] = value
    fitting = {name: value for name, value in given.items() if name in own and getattr(value, "shape", None) == own[name].shape}
    if not fitting:
        raise UsageError(f"--weights {args.weights}: nothing in it fits the model, whose tensors are {', '.join(list(own)[:5])}, ...")
    if bad := [name for name, value in fitting.items() if became_non_finite(value.to(own[name].dtype), own[name])]:
        raise UsageError(f"--weights {args.weights}: {', '.join(bad[:5])} is not finite")
    net.load_state_dict(fitting, strict=False)
    print0(f"weights: {len(fitting)} of the model's {len(own)} tensors are from {args.weights}")
    for name in [name for name in own if name not in fitting]:
        other = f"{list(given[name].shape)} in the file" if isinstance(given.get(name), Tensor) else "not in the file"
        print0(f"weights: not loaded: {name} {list(own[name].shape)}, {other}")
    if extra := [name for name in given if name not in own]:
        print0(f"weights: not in the model: {', '.join(extra)}")


def freeze(args: argparse.Namespace, net: nn.Module) -> int:
    """Stop the training of the parameters whose names match `--freeze`; return how many tensors are frozen."""
    parameters = dict(net.named_parameters())
    for pattern in args.freeze:
        matched = fnmatch.filter(parameters, pattern)
        if not matched:
            raise UsageError(f"--freeze {pattern}: no parameter has such a name; there are {', '.join(parameters)}")
        for name in matched:
            parameters[name].requires_grad_(False)
    frozen = sum(not parameter.requires_grad for parameter in parameters.values())
    if frozen == len(parameters):
        raise UsageError(f"--freeze {' '.join(args.freeze)}: nothing is left to train")
    return frozen


def train_mode(model: nn.Module) -> None:
    """Put the model into training mode, all but BatchNorm whose parameters are frozen: it keeps its statistics."""
    model.train()
    for module in model.modules():
        parameters = list(module.parameters()) if isinstance(module, nn.modules.batchnorm._BatchNorm) else []
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            module.eval()


def autocast(args: argparse.Namespace, device: torch.device) -> torch.autocast:
    """The context of a forward pass under `--amp`; does nothing when that is off."""
    return torch.autocast(device.type, torch.float16 if args.amp == "fp16" else torch.bfloat16, enabled=args.amp != "off")


def build_optimizer(args: argparse.Namespace, net: nn.Module, world_size: int | None = None) -> torch.optim.Optimizer:
    """SGD or AdamW over the parameters that train; fused on accelerators, where that lets a skipped step cost no host synchronisation."""
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    world_size = world_size or (dist.get_world_size() if is_distributed() else 1)
    lr = args.lr * {"none": 1, "linear": world_size, "sqrt": math.sqrt(world_size)}[args.scale_lr]
    fused = parameters[0].device.type != "cpu"
    if args.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr, betas=(args.momentum, 0.999), weight_decay=args.weight_decay, fused=fused)
    optimizer = torch.optim.SGD(parameters, lr, args.momentum, weight_decay=args.weight_decay, nesterov=args.nesterov, fused=fused)
    for parameter in parameters if args.momentum else ():  # fused SGD would leave them uninitialised if the very first step is skipped
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def lr_factor(args: argparse.Namespace, step: int, steps_per_epoch: int) -> float:
    """Return learning rate / peak for a global step, a pure function: nothing to drift, nothing to restore wrongly.

    The warm-up rises to where the schedule begins. cosine and cyclic run over the steps after it; the drops of step are at epochs of the
    run. cyclic is Smith's triangle (arXiv:1506.01186), from --step-gamma to 1 and back.
    """
    warmup, last = round(args.warmup_epochs * steps_per_epoch), args.epochs * steps_per_epoch
    if step < warmup:
        return (step + 1) / warmup * (args.step_gamma if args.schedule == "cyclic" else 1)
    if args.schedule == "cosine":
        return (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, last - warmup)))) / 2
    if args.schedule == "step":
        return args.step_gamma ** bisect.bisect_right(sorted(args.step_epochs), step / steps_per_epoch)
    if args.schedule == "cyclic":
        cycle = args.step_epochs[0] * steps_per_epoch if args.step_epochs else max(1, last - warmup)
        return args.step_gamma + (1 - args.step_gamma) * (1 - abs(2 * ((step - warmup) % cycle) / cycle - 1))
    return 1.0


def build_scheduler(args: argparse.Namespace, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate as a function of the global step, which counts consumed batches, skipped or not."""
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)  # meant: a skipped first step counts too
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(args, step, steps_per_epoch))


class Scaler(torch.amp.GradScaler):
    """A GradScaler for every precision: in float32 and bf16 its scale stays 1 and only its check for non-finite gradients is used.

    The check comes after the all-reduce, so that every rank skips the same steps; a norm that overflows is not finite either. With a fused
    optimizer it happens on the device: no host synchronisation per step. `skipped` counts since the last log line, `in_a_row` up to now and
    not beyond ten, both on the device.
    A step that is skipped leaves no trace in BatchNorm's statistics either, where one NaN would stay for ever.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device, net: nn.Module) -> None:
        self.fixed_scale = None if args.amp == "fp16" else 1.0
        super().__init__(device.type, init_scale=self.fixed_scale or 2.0**16)
        self.skipped = torch.zeros((), device=device)
        self.in_a_row = torch.zeros((), device=device)
        kinds = [("running_mean", "running_var"), ("num_batches_tracked",)]  # of two types
        found = [[buffer.view(-1) for name, buffer in net.named_buffers() if name.endswith(kind)] for kind in kinds]
        self.statistics = [buffers for buffers in found if buffers]
        self.kept = [torch.cat(buffers) for buffers in self.statistics]

    def unscale_(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Divide the gradient by the scale and return its norm, a 0-d tensor on the device."""
        super().unscale_(optimizer)
        return self.norm

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *others: Any) -> dict[torch.device, Tensor]:
        found = None if self.fixed_scale == 1 else super()._unscale_grads_(optimizer, *others)
        self.norm = nn.utils.get_total_norm(p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        return found or {self.norm.device: 1 - self.norm.isfinite().float()}  # the norm tells too, without another pass over memory

    def update(self) -> None:
        found = [flag for state in self._per_optimizer_states.values() for flag in state["found_inf_per_device"].values()]
        bad = (torch.stack(found).sum() > 0).float()
        self.skipped += bad
        self.in_a_row = torch.where(self.in_a_row < MAX_SKIPPED_IN_A_ROW, (self.in_a_row + bad) * bad, self.in_a_row)
        for buffers, kept in zip(self.statistics, self.kept):
            torch.where(bad > 0, kept, torch.cat(buffers), out=kept)
            torch._foreach_copy_(buffers, kept.split([len(buffer) for buffer in buffers]))
        super().update(self.fixed_scale)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "skipped": self.skipped.item(), "in_a_row": self.in_a_row.item()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.skipped.fill_(state["skipped"])
        self.in_a_row.fill_(state["in_a_row"])
        for buffers, kept in zip(self.statistics, self.kept):
            torch.cat(buffers, out=kept)  # of the network, which was restored before


def clip_grad_norm(net: nn.Module, limit: float | None, norm: Tensor) -> None:
    """Scale the whole gradient, whose norm is `norm`, down to `limit` if it is longer."""
    if limit is not None:
        nn.utils.clip_grads_with_norm_(net.parameters(), limit, norm)


class NoAverage:
    """Stands where no average of the weights is wanted."""

    def update_parameters(self, net: nn.Module) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def different_names(some: Iterable[str], others: Iterable[str]) -> str:
    """Say which metrics one batch has and another has not."""
    only = ", ".join(sorted(set(some) ^ set(others)))
    return f"per_sample_metrics must return the same names for every batch; only some batches have {only}"


class Meter:
    """Exact means of per-sample values: sums stay on the device, and nothing is synchronised before `mean`."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.dtype = device, torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
        self.sums: dict[str, Tensor] = {}
        self.count = 0

    def add(self, **values: Tensor) -> None:
        """Add one tensor [n] a name. Raises ValueError if a name is new, or missing: its mean would be over other samples."""
        if self.sums and self.sums.keys() != values.keys():
            raise ValueError(different_names(values, self.sums))
        for name, value in values.items():
            if value.dim() != 1 or len(value) != len(next(iter(values.values()))):
                raise ValueError(f"{name} must be [n], one number a sample, as all of them; got {tuple(value.shape)}")
            self.sums[name] = self.sums.get(name, 0) + value.detach().sum(dtype=self.dtype)
        self.count += len(value)

    def clear(self) -> None:
        self.sums, self.count = {}, 0

    def restore(self, sums: dict[str, list[float]]) -> None:
        """Go on from what `sums_of_ranks` returned: each rank from its own, or at another world size one rank from all of them."""
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)
        mine = {name: of[rank] if len(of) == world_size else sum(of) * (rank == 0) for name, of in sums.items()}
        self.count = int(mine.pop("count"))
        self.sums = {name: torch.tensor(value, device=self.device, dtype=self.dtype) for name, value in mine.items()}

    def _sums(self) -> tuple[list[str], Tensor]:
        names = broadcast_object(list(self.sums))  # a rank whose shard is empty has seen no name
        if self.sums and self.sums.keys() != set(names):
            raise ValueError(different_names(self.sums, names))
        zero = torch.zeros((), device=self.device, dtype=self.dtype)
        return [*names, "count"], torch.stack([*(self.sums.get(name, zero) for name in names), zero + self.count])

    def sums_of_ranks(self) -> dict[str, list[float]]:
        """Return the sum of each name and the `count`, for each rank: from their total a resumed run would go on with other roundings."""
        names, sums = self._sums()
        ranks = [sums]
        if is_distributed():
            ranks = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
            dist.all_gather(ranks, sums)
        return dict(zip(names, torch.stack(ranks, 1).tolist()))

    def mean(self) -> dict[str, float]:
        """Return the mean of each name over all samples of all ranks, and their `count`."""
        names, sums = self._sums()
        *totals, count = reduce_value(sums, average=False).tolist()
        return {**{name: total / count for name, total in zip(names, totals)}, "count": int(count)}


@torch.no_grad()
def update_bn(run: Any, model: nn.Module, loader: DataLoader) -> None:
    """Estimate BatchNorm's statistics for an SWA average, whose activations are those of no network in training, as training would.

    Over the epoch's batches, cut as in training: without `--sync-bn` those of rank 0 count, as they do there. Call it before the evaluation
    at the end of an epoch; elsewhere, and without SWA, it does nothing. `model` is the averaged network, or replicas of it with the loss.
    """
    if run.args.average != "swa" or not run.state.average.n_averaged or run.state.step < run.steps_per_epoch:
        return
    train_mode(model)
    learning = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training]
    norms = [(norm, norm.momentum) for norm in learning if norm.track_running_stats]
    for norm, _ in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a mean over all batches
    buffers = [buffer for norm, _ in norms for buffer in norm.buffers()]
    run.sampler.set_position(run.state.epoch, 0)
    rank = dist.get_rank() if is_distributed() else 0
    for step, batch in enumerate(loader if norms else ()):
        for i, (inputs, targets) in enumerate(split_batch(to_device(batch, run.device), run.args.accum_steps)):
            seed_rng(run.args.seed, run.state.global_step + step, i, rank)  # dropout is at work
            before = [buffer.clone() for buffer in buffers]
            with autocast(run.args, run.device):
                model(inputs, targets) if isinstance(model, nn.DataParallel) else model(inputs)
            finite = torch.stack([buffer.isfinite().all() for buffer in buffers]).all()
            for buffer, old in zip(buffers, before):  # a batch that has no statistics is left out, as in training
                buffer.copy_(torch.where(finite, buffer, old))
    for norm, momentum in norms:
        norm.momentum = momentum
    if is_distributed():
        sync_buffers(model)


class WeightAverage(AveragedModel):
    """The average of the parameters, and with a decay of BatchNorm's statistics. Every other buffer is a copy of the network's.

    `use_buffers` of torch's class would average all buffers: an infinite mask would become NaN, and a large integer be rounded. Without a
    decay it is the mean, and BatchNorm's statistics are estimated anew: see update_bn.
    """

    def __init__(self, net: nn.Module, decay: float | None) -> None:
        super().__init__(net, multi_avg_fn=None if decay is None else get_ema_multi_avg_fn(decay))
        self.decay = decay
        norms = [module for module in self.module.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm) and decay is not None]
        self.statistics = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var) if buffer is not None]
        self.infinite = [i for i, parameter in enumerate(self.module.parameters()) if became_non_finite(parameter, None)]

    @torch.no_grad()
    def update_parameters(self, net: nn.Module) -> None:
        started, before = int(self.n_averaged) > 0, [buffer.clone() for buffer in self.statistics]
        super().update_parameters(net)  # copies every buffer
        if started and before:
            torch._foreach_lerp_(before, self.statistics, 1 - self.decay)
            torch._foreach_copy_(self.statistics, before)
        averages, parameters = list(self.module.parameters()), list(net.parameters())
        for i in self.infinite:  # by design: the mean of two infinities would be NaN
            averages[i].copy_(torch.where(parameters[i].isfinite(), averages[i], parameters[i]))


def swa_epochs(epochs: int, done: int) -> int:
    """Return how many of the first `done` epochs `--average swa` averages in a run of `epochs`: those of the last quarter."""
    return max(0, done - epochs * 3 // 4)


def build_average(args: argparse.Namespace, net: nn.Module) -> AveragedModel | NoAverage:
    """The average of the weights that `--average` names, updated after every step (ema) or every epoch of the last quarter (swa)."""
    if args.average == "none":
        return NoAverage()
    return WeightAverage(net, 0.99 if args.average == "ema" else None)
