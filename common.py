"""Helpers that the four scripts share. Nothing here knows the problem (`task.py` does) or the parallel mode (the scripts do).

Every distributed helper is an identity without a process group and returns new tensors, so that the loops need no branch on the mode.
"""

from __future__ import annotations

import argparse
import bisect
import ctypes
import fnmatch
import math
import multiprocessing.util
import os
import random
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from launch import (
    SIGNALS,
    announce_end,
    backend,
    earlier_failure,
    exit_code,
    is_distributed,
    is_rank0,
    join,
    launcher_ranks,
    meeting_place,
    meeting_point,
    print0,
    run_worker,
    timeout,
    wait_for_all,
)
from options import Stopped, UsageError, check_run, load_task, parse_args, resolve_device_type

__all__ = ["SIGNALS", "Stopped", "UsageError", "announce_end", "backend", "check_run", "earlier_failure", "exit_code", "is_rank0", "join"]
__all__ += [
    "launcher_ranks",
    "load_task",
    "meeting_place",
    "meeting_point",
    "parse_args",
    "print0",
    "run_worker",
    "timeout",
    "wait_for_all",
]


MAX_SKIPPED_IN_A_ROW = 10

# ------------------------------------------------------------------------------------------------------- devices and processes


def set_up_device(args: argparse.Namespace, local_rank: int = 0) -> torch.device:
    """Choose this process's device and make it the current one, before anything allocates on device 0; set numerics and threads."""
    device_type = resolve_device_type(args.device)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, products on an NVIDIA device are refused
    torch.use_deterministic_algorithms(args.deterministic)
    torch.backends.cudnn.benchmark = not args.deterministic
    if device_type == "cpu":
        if "OMP_NUM_THREADS" not in os.environ:  # N processes with all the cores each would fight for them
            processes = getattr(args, "nproc", None) or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))
        return torch.device("cpu")
    torch.set_float32_matmul_precision("highest" if args.deterministic else "high")  # high allows TF32 in float32 products
    index = local_rank % torch.accelerator.device_count()  # SLURM may show each of its tasks one device alone
    torch.accelerator.set_device_index(index)
    return torch.device(device_type, index)


def reduce_value(value: Tensor, average: bool = True) -> Tensor:
    """Return the mean (or the sum) of `value` over all ranks, as a new tensor: an in-place all-reduce would break backward."""
    value = value.detach().clone()
    if is_distributed():
        dist.all_reduce(value)  # sum
        value = value / dist.get_world_size() if average else value
    return value


def broadcast_object(value: Any) -> Any:
    """Return rank 0's `value` on every rank."""
    if not is_distributed():
        return value
    box = [value]
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
    extremes = torch.cat([sums, -sums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)  # the largest, and minus the smallest
    largest, smallest = extremes[: len(sums)].tolist(), (-extremes[len(sums) :]).tolist()
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
    model.train()
    with autocast(args, device):
        losses = task.per_sample_loss(model(inputs), targets)
    losses.sum().backward()
    model.zero_grad(set_to_none=True)
    for buffer, before in buffers:
        buffer.copy_(before)


def compress_gradients(args: argparse.Namespace, model: nn.parallel.DistributedDataParallel) -> None:
    """Register torch's own communication hook for `--grad-compress`."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if args.grad_compress in ("bf16", "fp16"):
        model.register_comm_hook(None, getattr(default_hooks, f"{args.grad_compress}_compress_hook"))
    if args.grad_compress == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


# ------------------------------------------------------------------------------------------------------------ randomness, data


def mix(*parts: Any) -> Any:
    """Hash whole numbers (Python ints, or uint64 arrays) into 64 random bits. Source: splitmix64, G. Steele et al., OOPSLA 2014."""
    bits, mask = 0, 2**64 - 1
    for part in parts:
        bits = ((bits ^ part) + 0x9E3779B97F4A7C15) & mask
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
        bits = bits ^ (bits >> 31)
    return bits


def keyed_uniform(seed: int, epoch: int, indices: np.ndarray, draws: int) -> np.ndarray:
    """Return float64 [len(indices), draws] in [0, 1), each row a pure function of (seed, epoch, index)."""
    keys = np.asarray(indices).astype(np.uint64)[:, None]
    bits = mix(np.full_like(keys, mix(seed, epoch)), keys, np.arange(draws, dtype=np.uint64)[None, :])
    return (bits >> np.uint64(11)) * 2.0**-53


def seed_rng(seed: int, step: int, micro_batch: int, rank: int = 0) -> None:
    """Seed torch's generators for one forward: dropout masks differ between steps and ranks, and repeat after a resume."""
    torch.manual_seed(mix(seed, step, micro_batch) % 2**63 + rank)


class GlobalBatchSampler(Sampler):
    """One permutation per epoch, cut into global batches, of which this rank takes its contiguous piece.

    Yields (epoch, indices). Step k trains on order[k * B : (k + 1) * B] in every mode; the ragged tail is dropped, so that an epoch has
    length // B steps at any world size. With accumulation every micro-batch is cut among the ranks, so that together they hold the one
    that a single device would, and `--sync-bn` sees the same statistics. `set_position` names the epoch and the step to start at: what a
    resumed run skips is never loaded.
    """

    def __init__(self, length: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1, accum_steps: int = 1) -> None:
        if batch_size > length:
            raise UsageError(f"--batch-size {batch_size} is larger than the training set ({length} samples): an epoch would be empty")
        self.length, self.batch_size, self.seed, self.rank, self.world_size = length, batch_size, seed, rank, world_size
        self.accum_steps, self.steps_per_epoch = accum_steps, length // batch_size
        self.epoch = self.step = 0

    def set_position(self, epoch: int, step: int) -> None:
        self.epoch, self.step = epoch, step

    def __len__(self) -> int:
        return self.steps_per_epoch - self.step

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(mix(self.seed, self.epoch)))
        for step in range(self.step, self.steps_per_epoch):
            global_batch = order[step * self.batch_size : (step + 1) * self.batch_size]
            pieces = [piece.tensor_split(self.world_size)[self.rank] for piece in global_batch.tensor_split(self.accum_steps)]
            yield self.epoch, torch.cat(pieces).tolist()


class ShardSampler(Sampler):
    """This rank's unpadded shard range(rank, length, world_size), so that all ranks together see every sample exactly once."""

    def __init__(self, length: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        if length == 0:
            raise UsageError("the evaluation set is empty")
        self.shard, self.batch_size = range(rank, length, world_size), math.ceil(batch_size / world_size)

    def __len__(self) -> int:
        return math.ceil(len(self.shard) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        for start in range(0, len(self.shard), self.batch_size):
            yield 0, list(self.shard[start : start + self.batch_size])


class KeyedDataset(Dataset):
    """Fetches the batches that the samplers name, and makes all their randomness a pure function of (seed, epoch, index).

    A data set with `set_epoch` and `__getitems__` returns a ready batch itself; for any other, the generators of torch, Python and numpy
    are seeded per sample. A sample that cannot be read is named; under `--skip-corrupt` the next one that can takes its place.
    """

    def __init__(self, dataset: Dataset, args: argparse.Namespace) -> None:
        self.dataset, self.seed, self.skip_corrupt = dataset, args.seed, args.skip_corrupt
        self.whole_batches = hasattr(dataset, "set_epoch") and hasattr(dataset, "__getitems__")

    def __getitems__(self, key: tuple[int, list[int]]) -> Any:
        epoch, indices = key
        if self.whole_batches:
            self.dataset.set_epoch(epoch)
            return self.dataset.__getitems__(indices)
        return default_collate([self._sample(epoch, index) for index in indices])

    def _sample(self, epoch: int, first: int) -> Any:
        for index in (*range(first, len(self.dataset)), *range(first)):
            torch.manual_seed(mix(self.seed, epoch, index))
            random.seed(torch.initial_seed())
            np.random.seed(torch.initial_seed() % 2**32)
            try:
                return self.dataset[index]
            except OSError as error:
                message = f"sample {index} cannot be read: {error}"
                if not self.skip_corrupt:
                    raise RuntimeError(f"{message}; --skip-corrupt takes the next one in its place") from error
            print(f"{message}; the next one takes its place", file=sys.stderr, flush=True)
        raise RuntimeError("no sample can be read")


def build_loader(args: argparse.Namespace, dataset: Dataset, sampler: Sampler, device: torch.device) -> DataLoader:
    """A loader of the sampler's batches; its workers live as long as it does and leave signals to the main process.

    They start here, before this process talks to other ranks or computes: a fork copies the locks that other threads hold, not the threads.
    """
    keyed = KeyedDataset(dataset, args)
    workers = args.workers
    if workers is None:
        workers = 0 if keyed.whole_batches else min(8, torch.get_num_threads())
    options = {"persistent_workers": True, "worker_init_fn": _ignore_signals, "multiprocessing_context": "fork"} if workers else {}
    if workers:
        multiprocessing.util.Finalize(None, _end_workers, exitpriority=100)  # before Python's own attempt, in spawned ranks too
        sampler = _Late(sampler)
    pin = device.type != "cpu"
    loader = DataLoader(keyed, batch_sampler=sampler, num_workers=workers, collate_fn=_identity, pin_memory=pin, **options)
    if workers:
        iter(loader)
        sampler.begun = True
    return loader


class _Late(Sampler):
    """Yields nothing until `begun`, and then what `sampler` yields: so that workers can start before it is known what to load."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.begun = sampler, False

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sampler) if self.begun else iter(())


def _identity(batch: Any) -> Any:
    return batch


def _ignore_signals(worker: int) -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a worker that outlives its rank would hold the lock on the run's folder


def _end_workers() -> None:
    """Python ends what is left of the workers by SIGTERM, which they ignore, and would wait for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or the loader complains
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply `function` to every tensor of a nested tuple, list or dict."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        values = [map_tensors(function, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)  # a namedtuple, or not
    raise TypeError(f"a sample holds tensors and nested tuples, lists and dicts of them, not {type(tree).__name__}")


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy a batch to the device without waiting for the copy."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def split_batch(batch: Any, pieces: int) -> list[Any]:
    """Cut a rank's batch into micro-batches along the first dimension, larger ones first, as the sampler put them together."""
    if pieces == 1:
        return [batch]
    return [map_tensors(lambda tensor, i=i: tensor.tensor_split(pieces)[i], batch) for i in range(pieces)]


# ------------------------------------------------------------------------------------------------------ model and optimization


def build_net(args: argparse.Namespace, task: types.SimpleNamespace, device: torch.device) -> nn.Module:
    """Build the task's model on the device, from `--seed`, with `--freeze` applied."""
    torch.manual_seed(args.seed)
    net = task.build_model(args)
    if frozen := freeze(args, net):
        print0(f"frozen: {frozen} of {len(list(net.parameters()))} parameter tensors")
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    return net.to(device, getattr(torch, args.dtype), memory_format=memory_format)


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

    The schedule runs over the steps after the warm-up. cyclic is Smith's triangle (arXiv:1506.01186), from --step-gamma to 1 and back.
    """
    warmup, epoch = round(args.warmup_epochs * steps_per_epoch), step / steps_per_epoch
    if step < warmup:
        return (step + 1) / warmup
    if args.schedule == "cosine":
        return (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, args.epochs * steps_per_epoch - warmup)))) / 2
    if args.schedule == "step":
        return args.step_gamma ** bisect.bisect_right(sorted(args.step_epochs), epoch)
    if args.schedule == "cyclic":
        cycle = (args.step_epochs or [args.epochs])[0]
        return args.step_gamma + (1 - args.step_gamma) * (1 - abs(2 * (epoch % cycle) / cycle - 1))
    return 1.0


def build_scheduler(args: argparse.Namespace, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate as a function of the global step, which counts consumed batches, skipped or not."""
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)  # meant: a skipped first step counts too
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(args, step, steps_per_epoch))


class Scaler(torch.amp.GradScaler):
    """A GradScaler for every precision: in float32 and bf16 its scale stays 1 and only its check for non-finite gradients is used.

    The check comes after the all-reduce, so that every rank skips the same steps. With a fused optimizer it happens on the device: no
    host synchronisation per step. `skipped` counts since the last log line, `in_a_row` up to now and not beyond ten, both on the device.
    A step that is skipped leaves no trace in BatchNorm's statistics either, where one NaN would stay for ever.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device, net: nn.Module) -> None:
        self.fixed_scale = None if args.amp == "fp16" else 1.0
        super().__init__(device.type, init_scale=self.fixed_scale or 2.0**16)
        self.skipped = torch.zeros((), device=device)
        self.in_a_row = torch.zeros((), device=device)
        self.statistics = [buffer for name, buffer in net.named_buffers() if name.endswith(("running_mean", "running_var"))]
        self._keep_statistics()

    def _keep_statistics(self) -> None:
        self.kept = torch.cat([buffer.flatten() for buffer in self.statistics]) if self.statistics else None

    def update(self) -> None:
        found = [flag for state in self._per_optimizer_states.values() for flag in state["found_inf_per_device"].values()]
        bad = (torch.stack(found).sum() > 0).float()
        self.skipped += bad
        self.in_a_row = torch.where(self.in_a_row < MAX_SKIPPED_IN_A_ROW, (self.in_a_row + bad) * bad, self.in_a_row)
        if self.statistics:
            self.kept = torch.where(bad > 0, self.kept, torch.cat([buffer.flatten() for buffer in self.statistics]))
            pieces = self.kept.split([buffer.numel() for buffer in self.statistics])
            torch._foreach_copy_(self.statistics, [piece.view_as(buffer) for piece, buffer in zip(pieces, self.statistics)])
        super().update(self.fixed_scale)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "skipped": self.skipped.item(), "in_a_row": self.in_a_row.item()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.skipped.fill_(state["skipped"])
        self.in_a_row.fill_(state["in_a_row"])
        self._keep_statistics()  # of the network, which was restored before


def clip_grad_norm(net: nn.Module, limit: float | None) -> Tensor:
    """Scale the whole gradient down to the norm `limit` if it is longer; return its norm before, a 0-d tensor on the device."""
    parameters = [parameter for parameter in net.parameters() if parameter.grad is not None]
    norm = nn.utils.get_total_norm(parameter.grad for parameter in parameters)
    if limit is not None:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


class NoAverage:
    """Stands where no average of the weights is wanted."""

    def update_parameters(self, net: nn.Module) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Meter:
    """Exact means of per-sample values: sums stay on the device, and nothing is synchronised before `mean`."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.dtype = device, torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
        self.sums: dict[str, Tensor] = {}
        self.count = 0

    def add(self, **values: Tensor) -> None:
        """Add one tensor [n] a name."""
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


def build_average(args: argparse.Namespace, net: nn.Module) -> AveragedModel | NoAverage:
    """The average of the weights that `--average` names, updated after every step (ema) or every epoch of the last quarter (swa)."""
    if args.average == "none":
        return NoAverage()
    return AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.99) if args.average == "ema" else None, use_buffers=args.average == "ema")
