"""Which samples a step has, which of them a rank gets, and how they are augmented.

A sampler names the samples of a batch. KeyedDataset fetches them; it first sets `key`, from
which their random numbers are made. The samples of a step and their augmentation are a function
of the seed alone: the world size only decides which rank gets which of them, and an interruption
changes nothing. This file imports common.py alone, so that you can copy the two.
"""

import functools
import math
import multiprocessing.queues
import multiprocessing.util
import os
import random
import signal
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from common import end_with_parent, fail, get_rank, get_world_size

ACCELERATOR = torch.get_device_module()  # torch.cuda, ..., or torch.cpu

# ----------------------------------------------------------------------------------------- samplers


class GlobalBatchSampler(Sampler):
    """One order of the samples per epoch, cut into global batches; this rank takes its slices.

    All ranks have the same seed, so they compute the same order. Step k trains on
    order[k * B : (k + 1) * B] in every mode; the ragged tail is dropped. With accumulation each
    micro-batch is cut among the ranks. Yields (epoch, a list of indices for each micro-batch).
    `set_position` names the epoch and step to start at: what a resumed run skips is never loaded.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        seed: int,
        accum_steps: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.length, self.batch_size, self.seed = len(dataset), batch_size, seed
        self.accum_steps = accum_steps
        if not world_size * accum_steps <= batch_size <= self.length:
            low = f"{world_size * accum_steps} (ranks x micro-batches)"
            fail(f"--batch-size {batch_size} does not fit: use {low} to {self.length} (samples)")
        # Where in a batch this rank's slices lie, one of each micro-batch.
        micro_batches = np.array_split(np.arange(batch_size), accum_steps)
        self.slices = [np.array_split(places, world_size)[rank] for places in micro_batches]
        self.steps_per_epoch = self.length // batch_size
        by_default = functools.partial(epoch_order, self.length)
        self.epoch_order = getattr(dataset, "epoch_order", by_default)
        self.set_position(0, 0)

    def set_position(self, epoch: int, step: int) -> None:
        self.epoch, self.steps = epoch, range(step, self.steps_per_epoch)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[tuple[int, list[list[int]]]]:
        order = self.epoch_order(self.seed, self.epoch) if self.steps else None
        for step in self.steps:
            batch = order[step * self.batch_size : (step + 1) * self.batch_size]
            yield self.epoch, [batch[places].tolist() for places in self.slices]


def epoch_order(length: int, seed: int, epoch: int) -> np.ndarray:
    """Return int64 [length]: the samples of an epoch in the order in which they are trained on.

    A data set may have a method `epoch_order(seed, epoch)` for an order of its own. There a sample
    that comes again has the number index + length, then index + 2 length: it is augmented anew.
    """
    key = splitmix64(seed, epoch, -1)  # -1: seed_rng never has this key
    # numpy has frozen the stream of RandomState: every version draws the same.
    return np.random.RandomState(divmod(key, 2**32)).permutation(length)


class ShardSampler(Sampler):
    """The evaluation set in batches, of which this rank takes every world_size-th.

    A batch has at most `batch_size` samples, and an eighth of the set, so that several ranks have
    work. The batches are the same at every world size; each sample comes exactly once. Yields
    (0, indices): as in epoch 0, so a sample draws the same in each evaluation.
    """

    def __init__(self, length: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
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
    torch, Python and numpy are seeded per sample by (seed, epoch, index). A class of data sets with
    `whole_batches = True` returns a ready batch from `__getitems__`: it must draw with
    keyed_uniform, which also works behind a wrapper like Subset.
    """

    key = 0  # a hash of seed, epoch and what is fetched; on the class, where keyed_uniform finds it

    def __init__(self, dataset: Dataset, seed: int, collate: Callable | None = None) -> None:
        self.dataset, self.length, self.seed = dataset, len(dataset), seed
        self.collate = collate or default_collate
        # Ask the class: an instance may pass unknown names on to the data set that it wraps.
        self.whole_batches = not collate and getattr(type(dataset), "whole_batches", False)

    def __getitems__(self, request: tuple[int, list]) -> Any:
        epoch, indices = request  # of a sampler
        if isinstance(indices[0], list):
            return [self._batch(epoch, micro_batch) for micro_batch in indices]
        return self._batch(epoch, indices)

    def _batch(self, epoch: int, indices: list[int]) -> Any:
        if self.whole_batches and max(indices) < self.length:  # no sample is repeated
            KeyedDataset.key = splitmix64(self.seed, epoch, 0)
            return self.dataset.__getitems__(indices)
        return self.collate([self._sample(epoch, number) for number in indices])

    def _sample(self, epoch: int, number: int) -> Any:
        times, index = divmod(number, self.length)
        draw = times if self.whole_batches else number  # as in _batch: the key has 0 there
        KeyedDataset.key = splitmix64(self.seed, epoch, draw)
        seed_generators(splitmix64(KeyedDataset.key, index))
        return self.dataset[index]


def build_loader(
    dataset: Dataset,
    sampler: Sampler,
    device: torch.device,
    seed: int,
    workers: int | None = None,
    collate: Callable[[list], Any] | None = None,
) -> DataLoader:
    """Return a loader of the batches of one of the samplers above.

    Its workers live as long as it does. They start here, before this process connects to other
    ranks: a fork copies the locks that other threads hold, but not the threads.
    """
    if workers is None:
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        workers = min(8, max(1, cores))
        if getattr(dataset, "in_memory", False):
            workers = 0 if device.type == "cpu" else 1  # there this process has kernels to launch
    loader = DataLoader(
        KeyedDataset(dataset, seed, collate),
        batch_sampler=sampler,
        num_workers=workers,
        collate_fn=lambda batch: batch,  # KeyedDataset has put it together
        pin_memory=device.type != "cpu",
        persistent_workers=workers > 0,
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=be_worker,
    )
    if workers:
        steps, sampler.steps = sampler.steps, ()
        iter(loader)  # starts the workers, and fetches nothing; the loader keeps it
        sampler.steps = steps
        multiprocessing.util.Finalize(None, end_workers, exitpriority=100)
    return loader


def end_workers() -> None:
    """At its exit Python asks its daemons by SIGTERM to end, and waits: a worker ignores that."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def be_worker(*_: int) -> None:
    """Leave the signals that stop a run to the rank, and end with it.

    A worker that cannot send a batch ends too: by itself Python would drop the batch, and the rank
    would wait for ever.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)

    def end(error: Exception, batch: Any) -> None:
        traceback.print_exception(error)
        os._exit(1)

    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(end)  # no hook for it


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


def seed_generators(bits: int) -> None:
    """Seed the CPU's generators of torch, Python and numpy, each with its own stream."""
    torch.default_generator.manual_seed(bits)
    random.seed(splitmix64(bits, 1))
    np.random.seed(splitmix64(bits, 2) % 2**32)


def seed_rng(seed: int, step: int, micro_batch: int, rank: int = 0) -> None:
    """Seed all generators for one forward: dropout masks differ between steps and ranks.

    They repeat after a resume. The steps -1, -2, -3 are evaluation, dataset_metrics, check_run.
    """
    bits = splitmix64(seed, step, micro_batch) % 2**63 + rank  # each rank has its own stream
    seed_generators(bits)  # torch.manual_seed would also record a stack trace in every step
    if ACCELERATOR is not torch.cpu and ACCELERATOR.is_initialized():  # not under --device cpu
        ACCELERATOR.manual_seed(bits)


def seed_evaluation(seed: int, i: int) -> None:
    """Seed all generators for this rank's i-th batch of an evaluation.

    The seed belongs to the number of the batch among those of all ranks, the same in every mode.
    """
    seed_rng(seed, -1, i * get_world_size() + get_rank())  # no training step has the number -1
