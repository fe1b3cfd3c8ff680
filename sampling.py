"""Which samples a step has, which of them a rank gets, and how they are augmented.

A sampler names the samples of a batch. KeyedDataset fetches them; it first sets `key`, from
which their random numbers are made. The samples of a step and their augmentation are a function
of the seed alone: the world size only decides which rank gets which of them, and an interruption
changes nothing. This file imports common.py alone, so that you can copy the two.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import multiprocessing.queues
import multiprocessing.util
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from common import UsageError, get_rank, get_world_size, own_cores, tree_map

# ----------------------------------------------------------------------------------------- samplers


class GlobalBatchSampler(Sampler):
    """One permutation per epoch, cut into global batches; this rank takes its slice of each.

    All ranks have the same seed, so they compute the same permutation. Step k trains on
    order[k * B : (k + 1) * B] in every mode. The ragged tail is dropped, so an epoch has
    length // B steps at any world size. Yields (epoch, a list of indices for each micro-batch) to
    KeyedDataset, whose workers outlive an epoch: so each request carries its epoch.

    With accumulation each micro-batch is cut among the ranks: together they hold the samples that
    a single device has in it. `balanced` draws an epoch with replacement instead, each class of
    `dataset.targets` equally often on average. `window` is for data in files that are read in
    sequence: WindowedOrder. `set_position` names the epoch and the step to start at: what a resumed
    run skips is never loaded.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        seed: int,
        accum_steps: int = 1,
        balanced: bool = False,
        rank: int = 0,
        world_size: int = 1,
        window: int | None = None,
    ) -> None:
        self.length = length = len(dataset)
        if batch_size > length:
            problem = f"is larger than the training set ({length} samples): an epoch would be empty"
            raise UsageError(f"--batch-size {batch_size} {problem}; use at most {length}")
        self.batch_size, self.seed, self.accum_steps = batch_size, seed, accum_steps
        if batch_size < world_size * accum_steps:
            least = world_size * accum_steps
            problem = f"cannot be cut into {world_size} ranks x {accum_steps} micro-batches"
            raise UsageError(f"--batch-size {batch_size} {problem}; it must be at least {least}")
        # Where in a batch this rank's slices lie, one of each micro-batch.
        micro_batches = np.array_split(np.arange(batch_size), accum_steps)
        self.slices = [np.array_split(places, world_size)[rank] for places in micro_batches]
        self.steps_per_epoch = length // batch_size
        self.classes = class_numbers(dataset) if balanced else None
        self.windows = (shard_sizes(dataset, window, balanced), window) if window else None
        self.set_position(0, 0)

    def set_position(self, epoch: int, step: int) -> None:
        self.epoch, self.steps, self.is_new = epoch, range(step, self.steps_per_epoch), True

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[tuple[int, list[list[int]]]]:
        if not self.is_new:
            warnings.warn("set_position was not called: an epoch comes again", stacklevel=2)
        self.is_new = not self.steps  # start_workers asks for none
        if self.windows:
            order = WindowedOrder(*self.windows, self.seed, self.epoch)
        elif self.steps:
            order = epoch_order(self.length, self.seed, self.epoch, self.classes)
        for step in self.steps:
            batch = order[step * self.batch_size : (step + 1) * self.batch_size]
            yield self.epoch, [batch[places].tolist() for places in self.slices]  # to KeyedDataset


def epoch_order(length: int, seed: int, epoch: int, classes: np.ndarray | None) -> np.ndarray:
    """Return int64 [length]: the samples of an epoch in the order in which they are trained on.

    With `classes`, the class of each sample, each class is drawn equally often on average. A sample
    that comes again has the number index + length, then index + 2 length, ...: it is augmented
    anew. numpy has frozen the stream of RandomState: every version draws the same.
    """
    # -1: seed_rng never has this key.
    generator = np.random.RandomState(divmod(splitmix64(seed, epoch, -1), 2**32))
    if classes is None:
        return generator.permutation(length)
    by_class, sizes = classes.argsort(kind="stable"), np.bincount(classes)
    drawn = generator.randint(len(sizes), size=length)
    member = (generator.random_sample(length) * sizes[drawn]).astype(np.int64)
    order = by_class[(sizes.cumsum() - sizes)[drawn] + member]  # first of the class + member
    sorting = order.argsort(kind="stable")
    in_order = order[sorting]
    times = np.empty_like(order)  # how often it came before: its place among its copies, from 0
    times[sorting] = np.arange(length) - np.searchsorted(in_order, in_order)
    return order + length * times


class WindowedOrder:
    """The order of an epoch for data in shards, as tar files, of which few are open at a time.

    The shards come in a random order. `window` of them in a row are mixed, then the next ones. So
    who reads an epoch from its start loads each shard once, and keeps `window` of them.

    order[a:b] is int64 [b - a], as if this were an array of the whole epoch. It makes only the
    windows that it touches, each from a seed of its own: a resumed run may begin anywhere.
    """

    def __init__(self, sizes: np.ndarray, window: int, seed: int, epoch: int) -> None:
        self.window, self.key = window, (seed, epoch, -1)
        self.sizes, self.firsts = sizes, sizes.cumsum() - sizes  # firsts: a shard's first sample
        self.shards = self.generator().permutation(len(sizes))
        ends = sizes[self.shards].cumsum()
        self.starts = np.append(0, ends)[::window]  # where in the order each window begins
        self.mixed = functools.lru_cache(2)(self.mix)  # a batch may reach into the next window

    def generator(self, *more: int) -> np.random.RandomState:
        return np.random.RandomState(divmod(splitmix64(*self.key, *more), 2**32))

    def mix(self, i: int) -> np.ndarray:
        """Return int64: the samples of the i-th window, in random order."""
        shards = self.shards[i * self.window : (i + 1) * self.window]
        samples = [np.arange(self.sizes[s]) + self.firsts[s] for s in shards]
        return self.generator(i).permutation(np.concatenate(samples))

    def __getitem__(self, places: slice) -> np.ndarray:
        first, last = self.starts.searchsorted([places.start, places.stop - 1], "right") - 1
        parts = []
        for i in range(first, last + 1):
            start = self.starts[i]
            parts.append(self.mixed(i)[max(places.start - start, 0) : places.stop - start])
        return np.concatenate(parts)


def shard_sizes(dataset: Dataset, window: int, balanced: bool) -> np.ndarray:
    """Return int64: how many samples each shard of the data set has, from `shards`.

    Raises UsageError if the data set has no such list, or one of another sum.
    """
    option = f"--shuffle-window {window}"
    if balanced:
        raise UsageError(f"{option} and --balanced are two different orders; leave one of them out")
    try:
        sizes = np.asarray(dataset.shards, np.int64)
        if sizes.ndim != 1 or (sizes < 0).any() or sizes.sum() != len(dataset):
            raise ValueError(f"{sizes.sum()} samples in its shards, {len(dataset)} in the data set")
        return sizes
    except (AttributeError, TypeError, ValueError) as error:
        wanted = "a training set with `shards = [n0, n1, ...]`, how many samples each file has"
        raise UsageError(f"{option} needs {wanted} ({type(error).__name__}: {error})") from error


def class_numbers(dataset: Dataset) -> np.ndarray:
    """Return int64 [len(dataset)]: the class of each sample, from `targets`.

    Classes are numbered as they appear: an epoch depends on no names, which a set() may order.
    Raises UsageError if the data set has no list with one number or text per sample.
    """
    try:
        targets = np.asarray(dataset.targets)
        if targets.shape != (len(dataset),):
            raise ValueError(f"{list(targets.shape)} targets for {len(dataset)} samples")
        _, first, numbers = np.unique(targets, return_index=True, return_inverse=True)
        return first.argsort().argsort()[numbers]
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        wanted = "a training set with `targets`, one number or text per sample, its class"
        raise UsageError(f"--balanced needs {wanted} ({type(error).__name__}: {error})") from error


class ShardSampler(Sampler):
    """The evaluation set in batches, of which this rank takes every world_size-th.

    A batch has at most `batch_size` samples, and at most an eighth of the set, rounded up, so that
    several ranks have work. The batches are the same at every world size. All ranks together see
    every sample exactly once: nothing is padded. Yields (0, indices): as in epoch 0, so a sample
    draws the same in each evaluation.
    """

    def __init__(self, length: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        if length == 0:
            raise UsageError("the evaluation set is empty")
        self.length, self.batch_size = length, min(batch_size, math.ceil(length / 8))
        self.steps = range(0, length, self.batch_size)[rank::world_size]  # where each begins
        # 1 if this rank has a batch less than rank 0, else 0.
        self.missing = len(range(0, length, self.batch_size)[::world_size]) - len(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        for start in self.steps:
            yield 0, list(range(start, min(start + self.batch_size, self.length)))


# --------------------------------------------------------------------------------- fetching batches


class KeyedDataset(Dataset):
    """Fetches what the samplers name: a batch, or a list of micro-batches.

    Each is made by `collate` of a list of samples; by default it stacks tensors. The generators of
    torch, Python and numpy are seeded per sample by (seed, epoch, index). Without `collate` a class
    of data sets with `whole_batches = True` returns a ready batch from `__getitems__`. It must draw
    with keyed_uniform and sample_key, which also work behind a wrapper like Subset.

    Without --workers and --balanced an accelerator holds such a data set, and makes its batches, if
    it is `in_memory` too, and its class, not a base class, defines `to(device) -> copy there`.

    A sample that cannot be read ends the run; with `skip_corrupt` the next one takes the place of
    one that raises OSError.
    """

    # A hash of the seed, the epoch and what is being fetched. It is kept on the class, like a
    # global variable: a data set behind a wrapper, such as Subset, finds it too.
    key = 0

    def __init__(
        self,
        dataset: Dataset,
        seed: int,
        skip_corrupt: bool = False,
        collate: Callable[[list], Any] | None = None,
    ) -> None:
        self.dataset, self.seed, self.skip_corrupt = dataset, seed, skip_corrupt
        self.collate = collate
        # Ask the class: an instance may pass unknown names on to the data set that it wraps.
        self.whole_batches = not collate and getattr(type(dataset), "whole_batches", False)

    def __getitems__(self, request: tuple[int, list]) -> Any:
        epoch, indices = request  # of a sampler
        if isinstance(indices[0], list):
            return [self._batch(epoch, micro_batch) for micro_batch in indices]
        return self._batch(epoch, indices)

    def _batch(self, epoch: int, indices: list[int]) -> Any:
        if self.whole_batches and max(indices) < len(self.dataset):  # no sample is repeated
            KeyedDataset.key = splitmix64(self.seed, epoch, 0)
            with contextlib.suppress(OSError):  # read below one by one, which names the broken one
                # A copy: a data set may write its next batch into the same memory.
                return tree_map(torch.clone, self.dataset.__getitems__(indices))
        return self._one_by_one(epoch, indices)

    def _one_by_one(self, epoch: int, indices: list[int]) -> Any:
        samples = [self._first_readable(epoch, number) for number in indices]
        if not self.collate:
            return default_collate(samples)  # stacks tensors
        # Copies: a loss may change its targets, and a collate may pass on what the data set keeps.
        return tree_map(torch.clone, self.collate(samples))

    def _first_readable(self, epoch: int, first: int) -> Any:
        for number in range(first, first + len(self.dataset)):
            times, index = divmod(number, len(self.dataset))
            draw = times if self.whole_batches else number  # as in _batch: the key has 0 there
            KeyedDataset.key = splitmix64(self.seed, epoch, draw)
            seed_generators(sample_key(index))
            try:
                return self.dataset[index]
            except Exception as error:
                problem = f"sample {index} cannot be read: {type(error).__name__}: {error}"
                if not isinstance(error, OSError):
                    raise RuntimeError(problem) from error
                if not self.skip_corrupt:
                    advice = "--skip-corrupt takes the next one in its place"
                    raise RuntimeError(f"{problem}; {advice}") from None
            print(f"{problem}; the next one takes its place", file=sys.stderr, flush=True)
        raise RuntimeError("no sample can be read")


def build_loader(
    dataset: Dataset,
    sampler: Sampler,
    device: torch.device,
    seed: int,
    workers: int | None = None,
    skip_corrupt: bool = False,
    collate: Callable[[list], Any] | None = None,
) -> DataLoader:
    """Return a loader of the batches of one of the samplers above.

    Its workers live as long as it does. They start here, before this process connects to other
    ranks: a fork copies the locks that other threads hold, but not the threads.
    """
    keyed = KeyedDataset(dataset, seed, skip_corrupt, collate)
    in_memory = getattr(dataset, "in_memory", False)
    if workers is None:
        workers = min(8, own_cores())
        if in_memory and device.type == "cpu":
            workers = 0
        elif in_memory and keyed.whole_batches:
            workers = 1  # this process has kernels to launch; more workers would disturb it more
            # An inherited `to` may miss tensors. Samples that --balanced repeats come one by one.
            if "to" in vars(type(dataset)) and getattr(sampler, "classes", None) is None:
                with contextlib.suppress(torch.OutOfMemoryError):  # too large: it stays here
                    keyed.dataset = dataset.to(device)
                    workers = 0  # the batches are made on the device
    options: dict[str, Any] = {
        "collate_fn": lambda batch: batch,  # KeyedDataset has put it together
        "pin_memory": device.type != "cpu" and keyed.dataset is dataset,  # not yet on the device
    }
    if workers:
        options |= {"persistent_workers": True, "multiprocessing_context": "fork"}
        options |= {"worker_init_fn": be_worker}
    loader = DataLoader(keyed, batch_sampler=sampler, num_workers=workers, **options)
    if workers:
        start_workers(loader)
    return loader


def start_workers(loader: DataLoader) -> None:
    """Start the workers of a loader, and have them end when this process exits."""
    sampler = loader.batch_sampler
    steps, sampler.steps = sampler.steps, ()  # the iterator starts the workers, and fetches nothing
    iter(loader)  # the loader keeps it
    sampler.steps = steps
    multiprocessing.util.Finalize(None, kill_workers, exitpriority=100)


def be_worker(*_: int) -> None:
    """Ignore the signals that stop a run, and end with the process that started this one.

    Nothing else would end a loader worker whose rank was killed. A worker that cannot send a batch,
    as /dev/shm is full, ends too: by itself Python drops the batch, and the rank waits for ever.
    """
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(end_on_error)  # no other way
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # a program that it starts can be ended by it
    signal.siginterrupt(signal.SIGTERM, False)
    end_with_parent(signal.SIGKILL, multiprocessing.parent_process().pid)


def end_on_error(error: Exception, batch: Any) -> None:
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)


def end_with_parent(number: int, parent: int | None = None) -> None:
    """Have the system send this signal when the parent dies. Source: man 2 prctl.

    If `parent` is the number of the parent, and it is dead already, end at once.
    """
    ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
    if parent not in (None, os.getppid()):
        os._exit(1)


def kill_workers() -> None:
    """At exit Python would end loader workers by SIGTERM, which they ignore, and wait for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or the loader complains
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


# ----------------------------------------------------------------------------------- random numbers


def splitmix64(*parts: Any) -> Any:
    """Hash whole numbers (Python ints, or uint64 arrays) into 64 random bits.

    Source: G. Steele, D. Lea, C. Flood: Fast splittable pseudorandom number generators, 2014.
    """
    bits, mask = 0, 2**64 - 1
    for part in parts:
        bits = ((bits ^ part) + 0x9E3779B97F4A7C15) & mask
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
        bits = bits ^ (bits >> 31)
    return bits


def keyed_uniform(indices: Any, draws: int) -> np.ndarray:
    """Return float64 [n, draws] in [0, 1): row i is a function of the key and of indices[i]."""
    keys = np.asarray(indices).astype(np.uint64)[:, None]
    columns = np.arange(draws, dtype=np.uint64)[None, :]
    bits = splitmix64(KeyedDataset.key, keys, columns)
    return (bits >> np.uint64(11)) * 2.0**-53


def sample_key(index: int) -> int:
    """Return 64 random bits: a function of the key of what is being fetched, and of the index."""
    return splitmix64(KeyedDataset.key, index)


def seed_generators(bits: int) -> None:
    """Seed the generators that torch, Python and numpy have on the CPU, each with its own stream.

    All three are Mersenne twisters: with one seed they would draw the same numbers.
    """
    torch.default_generator.manual_seed(bits)
    random.seed(splitmix64(bits, 1))
    np.random.seed(splitmix64(bits, 2) % 2**32)


def seed_rng(seed: int, step: int, micro_batch: int, rank: int = 0) -> None:
    """Seed all generators for one forward: dropout masks differ between steps and ranks.

    They repeat after a resume. The steps -1, -2, -3 are evaluation, dataset_metrics, check_run.
    """
    bits = splitmix64(seed, step, micro_batch) % 2**63 + rank  # each rank has its own stream
    seed_generators(bits)  # torch.manual_seed would also record a stack trace in every step
    accelerator = _accelerator()
    # Not before its first use: torch would record a stack trace here too, even under --device cpu.
    if accelerator and getattr(accelerator, "is_initialized", lambda: True)():
        accelerator.manual_seed(bits)


def seed_evaluation(seed: int, i: int) -> None:
    """Seed all generators for this rank's i-th batch of an evaluation.

    The seed belongs to the number of the batch among those of all ranks. ShardSampler makes the
    same batches at every world size, so a task draws the same numbers in every mode.
    """
    world_size = get_world_size()
    rank = get_rank() if world_size > 1 else 0  # RANK may be set without a process group
    seed_rng(seed, -1, i * world_size + rank)  # no training step has the number -1


@functools.cache
def _accelerator() -> Any:
    return torch.get_device_module() if torch.accelerator.is_available() else None
