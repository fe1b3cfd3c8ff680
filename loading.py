"""Which samples a rank gets, when, and how augmented: pure functions of the seed, so that no mode, world size or interruption matters."""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import multiprocessing.util
import random
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from options import UsageError, leave_signals_to_parent

BY_VALUE = 2**19  # bytes, up to which copying a tensor through a pipe is cheaper than sharing its memory
FITS_THE_PIPE = 2**14  # bytes; the thread that pins would wait for ever for the rest of a batch whose worker was killed


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
    bits = mix(mix(seed, epoch), keys, np.arange(draws, dtype=np.uint64)[None, :])
    return (bits >> np.uint64(11)) * 2.0**-53


def seed_rng(seed: int, step: int, micro_batch: int, rank: int = 0) -> None:
    """Seed all generators for one forward: dropout masks differ between steps and ranks, and repeat after a resume.

    As `torch.manual_seed` does, which on a machine without accelerator takes a stack trace each time for one that may still come.
    """
    bits = mix(seed, step, micro_batch) % 2**63 + rank
    seed_generators(bits)
    if accelerator := _accelerator():
        accelerator.manual_seed(bits)


def seed_generators(bits: int) -> None:
    """Seed the generators that torch, Python and numpy have on the CPU."""
    torch.default_generator.manual_seed(bits)
    random.seed(bits)
    np.random.seed(bits % 2**32)


def seed_evaluation(seed: int, i: int) -> None:
    """Seed all generators for this rank's i-th batch of an evaluation, by the batch's number among those of all ranks.

    ShardSampler makes the same batches at every world size. So what a task draws in an evaluation is the same in every mode, each time.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    seed_rng(seed, -1, i * world_size + rank)  # no training step has this number


@functools.cache
def _accelerator() -> Any:
    return torch.get_device_module() if torch.accelerator.is_available() else None


class GlobalBatchSampler(Sampler):
    """One permutation per epoch, cut into global batches, of which this rank takes its contiguous piece.

    Yields (epoch, indices). Step k trains on order[k * B : (k + 1) * B] in every mode; the ragged tail is dropped, so that an epoch has
    length // B steps at any world size. `--balanced` draws with replacement instead, each class of `dataset.targets` equally often on
    average; a sample that is drawn again in an epoch is augmented alike. With accumulation every micro-batch is cut among the ranks, so
    that together they hold the one that a single device would, and `--sync-bn` sees the same statistics. `set_position` names the epoch
    and the step to start at: what a resumed run skips is never loaded.
    """

    def __init__(self, args: argparse.Namespace, dataset: Dataset, rank: int = 0, world_size: int = 1) -> None:
        self.length, self.batch_size = length, batch_size = len(dataset), args.batch_size
        if batch_size > length:
            raise UsageError(f"--batch-size {batch_size} is larger than the training set ({length} samples): an epoch would be empty")
        self.seed, self.accum_steps, self.rank, self.world_size = args.seed, args.accum_steps, rank, world_size
        self.steps_per_epoch = length // batch_size
        self.epoch = self.step = 0
        self.classes = None
        if args.balanced:
            try:
                targets = dataset.targets
                if not isinstance(targets, (Tensor, np.ndarray)):
                    targets = [target.item() if isinstance(target, Tensor) else target for target in targets]
                targets = np.asarray(targets)
                _, classes, sizes = np.unique(targets, return_inverse=True, return_counts=True)
            except (AttributeError, TypeError, ValueError, RuntimeError) as error:
                wanted = "one number or text for each sample, its class"
                raise UsageError(f"--balanced needs a training set with `targets`, {wanted} ({type(error).__name__}: {error})") from error
            if len(targets) != length or targets.ndim != 1:
                raise UsageError(f"--balanced needs one target for each of {length} samples, got {list(targets.shape)}")
            self.classes = torch.from_numpy(classes.argsort(kind="stable")), torch.from_numpy(sizes)

    def set_position(self, epoch: int, step: int) -> None:
        self.epoch, self.step = epoch, step

    def __len__(self) -> int:
        return self.steps_per_epoch - self.step

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        order = self._order(torch.Generator().manual_seed(mix(self.seed, self.epoch)))
        for step in range(self.step, self.steps_per_epoch):
            global_batch = order[step * self.batch_size : (step + 1) * self.batch_size]
            pieces = [piece.tensor_split(self.world_size)[self.rank] for piece in global_batch.tensor_split(self.accum_steps)]
            yield self.epoch, torch.cat(pieces).tolist()

    def _order(self, generator: torch.Generator) -> Tensor:
        if not self.classes:
            return torch.randperm(self.length, generator=generator)
        by_class, sizes = self.classes
        drawn = torch.randint(len(sizes), (self.length,), generator=generator)
        member = torch.rand(self.length, generator=generator, dtype=torch.float64) * sizes[drawn]
        return by_class[(sizes.cumsum(0) - sizes)[drawn] + member.long()]


class ShardSampler(Sampler):
    """The evaluation set in batches, of which this rank takes every world_size-th: all ranks together see every sample exactly once.

    Yields (0, indices). The batches are the same at every world size, and nothing is padded. One rank holds all of a batch, which has at
    most `batch_size` samples and at most an eighth of the set, to occupy eight ranks.
    """

    def __init__(self, length: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        if length == 0:
            raise UsageError("the evaluation set is empty")
        self.length, self.batch_size = length, min(batch_size, math.ceil(length / 8))
        self.starts = range(0, length, self.batch_size)[rank::world_size]

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        for start in self.starts:
            yield 0, list(range(start, min(start + self.batch_size, self.length)))


def datasets_with_epochs(dataset: Any) -> list[Any]:
    """Return `dataset` and the data sets inside it that have `set_epoch`: a wrapper, such as torch's Subset, would hide the method."""
    found, waiting, seen = [], [dataset], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if hasattr(one, "set_epoch"):
            found.append(one)
        waiting += [inner for value in getattr(one, "__dict__", {}).values() for inner in _like_datasets(value)]
    return found


def _like_datasets(values: Any, most: int = 100) -> list[Any]:
    """Return what may be a data set among `values`, and in lists, tuples and dictionaries there; a longer one holds samples."""
    if isinstance(values, (list, tuple, dict)):
        inner = values.values() if isinstance(values, dict) else values
        return [one for value in inner for one in _like_datasets(value)] if len(values) <= most else []
    like = hasattr(values, "__getitem__") and hasattr(values, "__dict__") and not isinstance(values, (Tensor, type))
    return [values] if like else []


class KeyedDataset(Dataset):
    """Fetches the batches that the samplers name, and makes all their randomness a pure function of (seed, epoch, index).

    A data set with `set_epoch` and `__getitems__` returns a ready batch itself; for any other, the generators of torch, Python and numpy
    are seeded per sample, and data sets inside it are told the epoch. A sample that cannot be read is named; under `--skip-corrupt` the
    next one that can takes its place.
    """

    def __init__(self, dataset: Dataset, args: argparse.Namespace) -> None:
        self.dataset, self.seed, self.skip_corrupt = dataset, args.seed, args.skip_corrupt
        # Asked of the class: an instance may pass unknown names on to the data set that it wraps
        self.whole_batches = hasattr(type(dataset), "__getitems__") and hasattr(dataset, "set_epoch")
        self.with_epochs = datasets_with_epochs(dataset)

    def __getitems__(self, key: tuple[int, list[int]]) -> Any:
        epoch, indices = key
        for dataset in self.with_epochs:
            if getattr(dataset, "_epoch_told", None) != epoch:
                seed_generators(mix(self.seed, epoch))
                dataset.set_epoch(epoch)
                with contextlib.suppress(AttributeError):  # of a class with __slots__
                    dataset._epoch_told = epoch
        if not self.whole_batches:
            return default_collate([self._first_readable(functools.partial(self._sample, epoch), index)[1] for index in indices])
        try:
            return self.dataset.__getitems__(indices)
        except OSError:
            readable = [self._first_readable(lambda index: self.dataset.__getitems__([index]), index)[0] for index in indices]
            return self.dataset.__getitems__(readable)

    def _sample(self, epoch: int, index: int) -> Any:
        seed_generators(mix(self.seed, epoch, index))
        return self.dataset[index]

    def _first_readable(self, read: Callable[[int], Any], first: int) -> tuple[int, Any]:
        for index in (*range(first, len(self.dataset)), *range(first)):
            try:
                return index, read(index)
            except OSError as error:
                message = f"sample {index} cannot be read: {error}"
                if not self.skip_corrupt:
                    raise RuntimeError(f"{message}; --skip-corrupt takes the next one in its place") from None
            print(f"{message}; the next one takes its place", file=sys.stderr, flush=True)
        raise RuntimeError("no sample can be read")


def build_loader(args: argparse.Namespace, dataset: Dataset, sampler: Sampler, device: torch.device) -> DataLoader:
    """A loader of the sampler's batches; its workers live as long as it does and leave signals to the main process.

    They start here, before this process talks to other ranks or computes: a fork copies the locks that other threads hold, not the threads.
    """
    keyed = KeyedDataset(dataset, args)
    workers = args.workers
    if workers is None:
        workers = 0 if getattr(dataset, "in_memory", False) else min(8, torch.get_num_threads())
    pin, options = device.type != "cpu", {}
    if workers:
        begin = functools.partial(_begin_worker, FITS_THE_PIPE if pin else BY_VALUE)
        options = {"persistent_workers": True, "worker_init_fn": begin, "multiprocessing_context": "fork"}
        sampler = _Late(sampler)
    loader = DataLoader(keyed, batch_sampler=sampler, num_workers=workers, collate_fn=_identity, pin_memory=pin, **options)
    if workers:
        processes = iter(loader)._workers
        multiprocessing.util.Finalize(None, _end_workers, (processes,), exitpriority=100)  # before Python's own attempt
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


def _begin_worker(by_value: int, worker: int) -> None:
    leave_signals_to_parent()
    ForkingPickler.register(Tensor, functools.partial(_reduce, by_value))


def _reduce(by_value: int, tensor: Tensor) -> tuple[Any, ...]:
    """Send a small tensor by value: one in shared memory costs whoever takes it a connection to the worker, about a millisecond."""
    with contextlib.suppress(TypeError, RuntimeError):  # of bfloat16, sparse tensors and some others numpy knows nothing
        if tensor.nbytes <= by_value and tensor.is_contiguous():  # numpy's copy of others has another order in memory
            return torch.tensor, (tensor.numpy(),)
    return reduce_tensor(tensor)


def _end_workers(processes: list[multiprocessing.Process]) -> None:
    """Python ends what is left of the workers by SIGTERM, which they ignore, and would wait for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or the loader complains
    for process in processes:
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
