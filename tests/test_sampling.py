"""Which samples a rank sees, in which order, how augmented and by whom loaded: properties checked over every small case."""

import functools
import itertools
import random
import re
import tracemalloc
from argparse import Namespace

import numpy as np
import pytest
import torch
from harness import (
    fetched,
    keyed,
    make_args,
    make_sampler,
    order_of,
    sampler_of,
    samples_of_epoch,
)
from torch.utils.data import Dataset

import common
import sampling
import task


def batches(length, batch_size, rank=0, world_size=1, epoch=0, step=0, seed=0):
    own = make_sampler(length, batch_size, rank, world_size, seed=seed)
    own.set_position(epoch, step)
    keys = list(own)
    assert len(keys) == len(own)
    assert all(key[0] == epoch for key in keys)
    return [[i for micro in micros for i in micro] for _, micros in keys]


@pytest.mark.parametrize("world_size", [2, 5])
def test_pieces_of_all_ranks_partition_each_global_batch(world_size):
    for length in range(1, 41):
        for batch_size in range(world_size, length + 1):
            whole = batches(length, batch_size)
            pieces = [batches(length, batch_size, rank, world_size) for rank in range(world_size)]
            assert {len(piece) for piece in pieces} == {length // batch_size}, (
                "every rank has the same number of steps"
            )
            joined = [
                [index for piece in pieces for index in piece[step]] for step in range(len(whole))
            ]
            assert joined == whole, "pieces in the order of the ranks are the global batch"
            seen = [index for batch in whole for index in batch]
            assert len(seen) == len(set(seen)) == length // batch_size * batch_size
            sizes = {len(piece[0]) for piece in pieces}
            assert max(sizes) - min(sizes) <= 1, "no rank carries more than its share"


@pytest.mark.parametrize("accum_steps", [2, 5])
@pytest.mark.parametrize("world_size", [2, 3])
def test_micro_batches_of_all_ranks_are_those_of_one_device(world_size, accum_steps):
    """Or BatchNorm over the ranks would see other batches than one device does."""
    for batch_size in range(world_size * accum_steps, 41):
        samplers = [
            make_sampler(40, batch_size, rank, world_size, accum_steps)
            for rank in range(world_size)
        ]
        shares = [next(iter(own))[1] for own in samplers]
        whole = torch.tensor(batches(40, batch_size)[0])
        micro_batches = [[i for own in slices for i in own] for slices in zip(*shares)]
        assert micro_batches == [part.tolist() for part in whole.tensor_split(accum_steps)]
        assert all(piece for share in shares for piece in share)


def test_slices_are_those_of_numpy():
    """At any number of ranks; a sampler cuts no batch, it knows the places of its slices."""
    draw = random.Random(0)
    for _ in range(300):
        accum_steps, world_size = draw.randint(1, 6), draw.choice([1, 2, 3, 7, 200])
        batch_size = accum_steps * world_size + draw.randint(0, 99)
        rank, length = draw.randrange(world_size), 2 * batch_size + draw.randint(0, 9)
        own = make_sampler(length, batch_size, rank, world_size, accum_steps)
        for (_, slices), step in zip(own, range(2), strict=True):
            batch = order_of(length, 0, 0)[step * batch_size : (step + 1) * batch_size]
            micro_batches = np.array_split(batch, accum_steps)
            wanted = [np.array_split(micro, world_size)[rank] for micro in micro_batches]
            assert slices == [indices.tolist() for indices in wanted]


@pytest.mark.parametrize("world_size", [1, 3])
def test_resuming_at_any_step_yields_exactly_the_rest(world_size):
    for length, batch_size in [(20, 6), (21, 7), (40, 40), (37, 5)]:
        for rank in range(world_size):
            whole = batches(length, batch_size, rank, world_size, epoch=4)
            for step in range(len(whole) + 1):
                assert (
                    batches(length, batch_size, rank, world_size, epoch=4, step=step)
                    == whole[step:]
                )


# ------------------------------------------------------------------------------------ shuffled order


def test_order_has_every_sample_once_and_neighbouring_keys_have_others():
    for n in (1, 2, 50, 20_000):
        orders = [order_of(n, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
        assert all(sorted(order) == list(range(n)) for order in orders)
        assert orders[0] == order_of(n, 0, 0)
        if n > 1000:  # no two of them agree in more places than chance would have it
            same = [sum(a == b for a, b in zip(x, y)) for x, y in itertools.combinations(orders, 2)]
            assert max(same) < 12


def test_order_is_that_of_earlier_versions():
    """Or a run that one of them began would go on with other samples."""
    plain = sampling.epoch_order(10, 3, 4, None)
    assert plain.tolist() == [8, 3, 1, 2, 9, 4, 5, 0, 7, 6]
    balanced = sampling.epoch_order(10, 3, 4, np.array([0, 0, 0, 0, 0, 0, 0, 1, 1, 2]))
    assert balanced.tolist() == [9, 0, 3, 7, 6, 2, 19, 17, 27, 37]
    windowed = sampling.WindowedOrder(np.array([3, 4, 5, 2]), 2, 3, 4)[0:14]
    assert windowed.tolist() == [12, 6, 3, 4, 5, 13, 7, 2, 9, 10, 8, 0, 11, 1]


def test_order_is_made_once_an_epoch(monkeypatch):
    """At 10^8 samples that takes eight seconds."""
    made, epoch_order = [], sampling.epoch_order

    def watched(*arguments):
        made.append(arguments[2])
        return epoch_order(*arguments)

    monkeypatch.setattr(sampling, "epoch_order", watched)
    sampler = make_sampler(30, 7)
    loader = sampling.build_loader(NoisyPerSample(), sampler, torch.device("cpu"), 0, workers=2)
    for epoch in (0, 1):
        sampler.set_position(epoch, 0)
        assert len(list(loader)) == 4
    assert made == [0, 1]


def test_splitmix64_is_the_published_one_and_has_no_collisions_nearby():
    assert sampling.splitmix64(0) == 0xE220A8397B1DCDAF, (
        "the first output of splitmix64 from state 0, as published"
    )
    keys = {
        sampling.splitmix64(seed, epoch, index)
        for seed in range(20)
        for epoch in range(20)
        for index in range(100)
    }
    assert len(keys) == 40_000
    scalars = [sampling.splitmix64(3, 5, index) for index in range(10)]
    indices = np.arange(10, dtype=np.uint64)
    columns = np.full(10, 3, np.uint64), np.full(10, 5, np.uint64), indices
    assert [int(bits) for bits in sampling.splitmix64(*columns)] == scalars


def uniform(seed, epoch, indices):
    sampling.KeyedDataset.key = sampling.splitmix64(seed, epoch)
    return sampling.keyed_uniform(indices, 3)


def test_keyed_uniform_is_uniform_and_depends_on_everything():
    draws = uniform(0, 0, np.arange(20_000))
    assert draws.shape == (20_000, 3) and draws.min() >= 0 and draws.max() < 1
    assert np.abs(draws.mean(0) - 0.5).max() < 0.01 and np.abs(draws.var(0) - 1 / 12).max() < 0.002
    assert np.abs(np.corrcoef(draws.T) - np.eye(3)).max() < 0.02, (
        "the draws of one sample are independent"
    )
    assert np.abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 0.02, (
        "neighbouring samples are independent"
    )
    for other in (uniform(1, 0, np.arange(20_000)), uniform(0, 1, np.arange(20_000))):
        assert np.abs(np.corrcoef(draws.ravel(), other.ravel())[0, 1]) < 0.01
    subset = np.array([17, 3, 19_999])
    assert (uniform(0, 0, subset) == draws[subset]).all(), "whatever batch a sample comes in"


def test_what_a_forward_draws_depends_on_its_place_in_the_run():
    """On the seed, the step, the micro-batch and the rank."""
    drawn = set()
    for place in itertools.product(range(3), repeat=4):
        sampling.seed_rng(*place)
        drawn.add(torch.rand(()).item())
    assert len(drawn) == 81


class NoisyPerSample(Dataset):
    """A plain map-style data set whose augmentation draws from the global generators, as torchvision's transforms do."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()), random.random(), np.random.rand()]), index


@pytest.mark.parametrize(
    ("workers", "world_size", "step", "dataset"),
    [
        (3, 1, 0, "per sample"),
        (0, 3, 0, "per sample"),
        (0, 3, 0, "in memory"),
    ],
)
def test_a_sample_is_augmented_alike_whoever_loads_it(dataset, workers, world_size, step):
    dataset = NoisyPerSample() if dataset == "per sample" else task.build_datasets(make_args())[0]
    plain = samples_of_epoch(dataset, 7, 1)
    other = samples_of_epoch(dataset, 7, 1, workers, world_size, step)
    assert len(other) == len(plain) - 7 * step
    assert all(plain[index].equal(other[index]) for index in other)
    next_epoch = samples_of_epoch(dataset, 7, 2, workers)
    common_indices = plain.keys() & next_epoch.keys()
    changed = sum(not plain[index].equal(next_epoch[index]) for index in common_indices)
    assert changed > 0.7 * len(common_indices), "every epoch draws anew"


# ----------------------------------------------------------------------------------------- balanced


class Labelled:
    """Ninety samples of class 7, nine of class 3 and one of class 5."""

    targets = [7] * 90 + [3] * 9 + [5]

    def __len__(self):
        return 100


def balanced(rank=0, world_size=1, epoch=0, dataset=Labelled):
    args = Namespace(batch_size=10, accum_steps=1, seed=0, balanced=True, shuffle_window=None)
    sampler = sampler_of(args, dataset(), rank, world_size)
    sampler.set_position(epoch, 0)
    return [indices for _, (indices,) in sampler]


def test_balanced_draws_every_class_equally_often_and_every_sample_of_it():
    drawn = torch.tensor(
        [number % 100 for epoch in range(30) for batch in balanced(epoch=epoch) for number in batch]
    )
    assert len(drawn) == 3000 and drawn.unique().tolist() == list(range(100))
    classes = torch.tensor(Labelled.targets)[drawn]
    for label in (7, 3, 5):
        assert 0.30 < (classes == label).double().mean() < 0.37
    counts = drawn.bincount(minlength=100)
    assert counts[:90].max() < 30 and counts[90:99].min() > 70, "alike within a class"
    assert balanced() != balanced(epoch=1) and balanced() == balanced()


def test_sample_that_comes_again_is_augmented_anew():
    """With --balanced, or because a Subset names it twice; whatever slice of a batch it is in."""
    numbers = [number for batch in balanced() for number in batch]
    assert len(set(numbers)) == 100 > len({number % 100 for number in numbers})
    train_set, _ = task.build_datasets(make_args())
    again = [7 + times * len(train_set) for times in range(20)]
    draws = fetched(train_set, 0, again)
    assert len({tuple(image.flatten().tolist()) for image in draws}) > 5, "of nine shifts"
    assert draws[[0]].equal(fetched(train_set, 0, [7])), "among others as alone"
    assert draws[3:5].equal(fetched(train_set, 0, again[3:5]))
    twice = fetched(torch.utils.data.Subset(train_set, [7] * 20), 0, list(range(20)))
    assert len({tuple(image.flatten().tolist()) for image in twice}) > 5


def test_balanced_order_depends_on_no_world_size_and_no_name_of_a_class():
    """A rank may have numbered them by a `set`."""

    whole, targets = balanced(), [-target for target in Labelled.targets]
    assert balanced(dataset=type("Renamed", (Labelled,), {"targets": targets})) == whole
    for world_size in (2, 3, 4):
        pieces = [balanced(rank, world_size) for rank in range(world_size)]
        assert [[index for piece in step for index in piece] for step in zip(*pieces)] == whole


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (None, "needs a training set with `targets`, one number or text per sample, its class"),
        ([0] * 99, r".*\(ValueError: \[99\] targets for 100 samples\)"),
        (torch.zeros(100, 2), r".*\(ValueError: \[100, 2\] targets for 100 samples\)"),
        ([{"class": 1}] * 100, "its class \\(TypeError"),
    ],
)
def test_balanced_needs_the_class_of_each_sample(targets, message):
    dataset = type(
        "Other",
        (),
        {"__len__": Labelled.__len__} | ({} if targets is None else {"targets": targets}),
    )
    with pytest.raises(common.UsageError, match=f"--balanced .*{message}"):
        balanced(dataset=dataset)


# ---------------------------------------------------------------------------------------- in shards


class Sharded:
    """142 samples in shards of unequal sizes; one is empty."""

    shards = (7, 20, 3, 11, 0, 30, 5, 9, 15, 1, 12, 8, 21)

    def __len__(self):
        return sum(self.shards)


def windowed(window, rank=0, world_size=1, epoch=4, step=0, accum_steps=1, seed=0):
    """The indices of each micro-batch of each step."""
    options = seed, accum_steps, False, rank, world_size, window
    sampler = sampling.GlobalBatchSampler(Sharded(), 10, *options)
    sampler.set_position(epoch, step)
    steps = list(sampler)
    assert {epoch} == {number for number, _ in steps} and len(steps) == len(sampler)
    return [micro_batches for _, micro_batches in steps]


def shards_of(indices):
    return np.searchsorted(np.cumsum(Sharded.shards), indices, "right").tolist()


WINDOWS = pytest.mark.parametrize("window", [1, 2, 3, 5, 13, 40])


@WINDOWS
def test_window_mixes_so_many_shards_at_a_time_and_has_every_sample_once(window):
    sampler = sampling.GlobalBatchSampler(Sharded(), 142, 0, window=window)
    ((_, (order,)),) = sampler
    assert sorted(order) == list(range(142)) and order != sorted(order)
    still_open = [len({*shards_of(order[:k])} & {*shards_of(order[k:])}) for k in range(142)]
    assert max(still_open) <= window, "an earlier window is done before the next one begins"
    if window == 1:
        opened = [*dict.fromkeys(shards_of(order))]
        assert opened != sorted(opened), "the shards come in random order"
        assert order != sorted(order, key=lambda index: (opened.index(*shards_of([index])), index))
    else:
        assert max(still_open) > 1, "they are mixed"
    ((_, (other,)),) = sampling.GlobalBatchSampler(Sharded(), 142, 1, window=window)
    assert order != other != sorted(other)


@WINDOWS
def test_window_is_the_same_on_all_ranks_with_accumulation_and_after_a_resume(window):
    """A batch that begins within a window, or touches several, is a slice of the epoch's order."""
    whole = [batch for (batch,) in windowed(window)]
    sampler = sampling.GlobalBatchSampler(Sharded(), 142, 0, window=window)
    sampler.set_position(4, 0)
    ((_, (order,)),) = sampler
    assert [i for batch in whole for i in batch] == order[:140], "the last two are dropped"
    ranks = [windowed(window, rank, 3, accum_steps=2) for rank in range(3)]
    for batch, *shares in zip(whole, *ranks, strict=True):
        micro_batches = [[i for own in slices for i in own] for slices in zip(*shares)]
        assert micro_batches == [part.tolist() for part in np.array_split(batch, 2)]
    for step in range(14):
        assert windowed(window, 1, 3, step=step) == windowed(window, 1, 3)[step:]
    assert windowed(window, epoch=5) != windowed(window) != windowed(window, seed=1)


def test_each_shard_is_loaded_once_an_epoch():
    """By one process that keeps as many of them as the window has."""
    for window in (1, 4):
        loaded = []
        load = functools.lru_cache(window)(loaded.append)
        for batch in windowed(window):
            for shard in shards_of(batch[0]):
                load(shard)
        assert len(loaded) == len({*loaded}) == 12


def test_window_of_a_large_epoch_takes_little_memory():
    """An array of its order would have 8 GB."""

    class Large:
        shards = (10_000,) * 100_000

        def __len__(self):
            return 10**9

    tracemalloc.start()
    sampler = sampling.GlobalBatchSampler(Large(), 8192, 0, window=4)
    for step in (0, 60_000):
        sampler.set_position(3, step)
        _, (batch,) = next(iter(sampler))
        assert len({*batch}) == 8192 and 0 <= min(batch) < max(batch) < 10**9
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50 * 2**20


@pytest.mark.parametrize(
    ("shards", "problem"),
    [
        (None, "AttributeError: 'Other' object has no attribute 'shards'"),
        ([50, 49], "ValueError: 99 samples in its shards, 100 in the data set"),
        ([150, -50], "ValueError: 100 samples in its shards, 100 in the data set"),
        (["0.tar", "1.tar"], "ValueError: invalid literal for int"),
        ([{"url": "0.tar"}], "TypeError: int"),
    ],
)
def test_window_needs_the_sizes_of_the_shards(shards, problem):
    dataset = type("Other", (Labelled,), {} if shards is None else {"shards": shards})
    wanted = "a training set with `shards = [n0, n1, ...]`, how many samples each file has"
    message = re.escape(f"--shuffle-window 4 needs {wanted} ({problem}")
    with pytest.raises(common.UsageError, match=f"^{message}"):
        sampling.GlobalBatchSampler(dataset(), 10, 0, window=4)
    if shards is None:
        dataset.shards = [100]
        with pytest.raises(common.UsageError, match="4 and --balanced are two different orders"):
            sampling.GlobalBatchSampler(dataset(), 10, 0, balanced=True, window=4)


# ---------------------------------------------------------------------- samples that cannot be read


class Broken:
    """Ten samples: two cannot be read, and a mistake of the program hides two others."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index in (3, 9):
            raise OSError(f"/data/{index}.jpg: image file is truncated")
        return torch.arange(7.0)[index], torch.rand(2)


def test_broken_sample_is_named_or_replaced_alike_everywhere(capfd):
    named = r"sample 3 cannot be read: OSError: /data/3.jpg: .*; --skip-corrupt takes the next one"
    with pytest.raises(RuntimeError, match=named):
        keyed(Broken(), make_args()).__getitems__((0, [2, 3]))
    dataset = keyed(Broken(), make_args("single", "--skip-corrupt"))
    values, draws = dataset.__getitems__((5, [9, 3, 4]))
    assert values.tolist() == [0, 4, 4] and draws[1].equal(draws[2])
    assert dataset.__getitems__((5, [3]))[1][0].equal(draws[1]), "whatever else is in the batch"
    assert capfd.readouterr().err.count("the next one takes its place") == 3
    with pytest.raises(RuntimeError, match="sample 7 cannot be read: IndexError"):
        dataset.__getitems__((0, [1, 7]))


def test_collate_is_called_for_data_that_make_whole_batches_too():
    digits, _ = task.build_datasets(make_args())
    whole = sampling.KeyedDataset(digits, seed=3)
    one_by_one = sampling.KeyedDataset(digits, seed=3, collate=lambda samples: [*zip(*samples)])
    _, labels = whole.__getitems__((1, [5, 8]))
    images, own_labels = one_by_one.__getitems__((1, [5, 8]))
    assert [*labels] == [*own_labels] and labels.unique().numel() == 2
    assert type(images) is tuple and images[0].shape == (1, 8, 8), "the result of collate"


class InMemory(NoisyPerSample):
    """Inputs are nested, and in memory that the next batch uses too; a batch says which samples it has."""

    whole_batches = in_memory = True
    memory = torch.zeros(3, 2, dtype=torch.float64)
    device = None  # of a copy

    def to(self, device):
        if device.type == "mps":  # as if this one had no room
            raise torch.OutOfMemoryError
        moved = type(self)()
        moved.device = device.type
        return moved

    def __getitems__(self, indices):
        draws = self.memory[: len(indices)]
        draws.copy_(torch.from_numpy(sampling.keyed_uniform(indices, 2)))
        return {"draws": [draws], "all": indices}, torch.tensor(indices)


class Inherits(InMemory):
    pass


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_in_memory_that_is_used_again_stay_apart(workers):
    sampler = make_sampler(30, 3, accum_steps=2)  # micro-batches of two samples and one
    loader = sampling.build_loader(InMemory(), sampler, torch.device("cpu"), 3, workers)
    batches = [inputs for micro_batches in loader for inputs, _ in micro_batches]
    alone = sampling.KeyedDataset(InMemory(), 3)
    for inputs, indices in zip(batches, [batch for _, step in sampler for batch in step]):
        draws = alone.__getitems__((0, indices))[0]["draws"][0]
        assert inputs["all"] == indices and inputs["draws"][0].equal(draws)
    assert len(batches) == 20 and not batches[0]["draws"][0].equal(batches[2]["draws"][0])


def test_default_number_of_workers(monkeypatch):
    """A CPU needs none for data in memory; an accelerator's host has kernels to launch."""
    monkeypatch.setattr(sampling, "own_cores", lambda: 3)
    digits, _ = task.build_datasets(make_args())

    def made(device, collate=None, dataset=digits, given=None, balanced=False):
        sampler = sampling.GlobalBatchSampler(digits, 8, 0, 1, balanced)
        loading = torch.device(device), 0, given, False, collate
        loader = sampling.build_loader(dataset, sampler, *loading)
        return loader.num_workers, getattr(loader.dataset.dataset, "device", None)

    assert (made("cpu")[0], made("cuda")[0]) == (0, 1)
    assert (made("cpu", list)[0], made("cuda", list)[0]) == (0, 3), "one sample after the other"
    data = InMemory()
    assert made("cuda", None, data) == (0, "cuda"), "it makes the batches itself"
    assert made("cpu", None, data) == (0, None) and made("cuda", list, data) == (3, None)
    assert made("cuda", None, data, given=2) == (2, None)
    assert made("cuda", None, data, balanced=True) == (1, None), "its repeats come one by one"
    assert made("mps", None, data) == (1, None), "too large"
    assert made("cuda", None, Inherits()) == (1, None), "it may have other tensors"


def test_generators_have_streams_of_their_own():
    """torch's and numpy's are both Mersenne twisters."""
    drawn = []
    for seed in range(100):
        sampling.seed_generators(seed)
        drawn.append((int(torch.randint(0, 8, ())), np.random.randint(0, 8), random.randrange(8)))
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert 2 <= sum(numbers[i] == numbers[j] for numbers in drawn) <= 30


def test_loader_that_is_read_again_without_set_position_warns(recwarn):
    """Its second epoch would have the order of the first."""
    sampler = make_sampler(12, 4)
    loader = sampling.build_loader(
        torch.utils.data.TensorDataset(torch.arange(12)), sampler, torch.device("cpu"), 0
    )
    first = [batch for ((batch,),) in loader]
    sampler.set_position(1, 0)
    second = [batch for ((batch,),) in loader]
    assert not recwarn.list and not torch.cat(first).equal(torch.cat(second))
    with pytest.warns(UserWarning, match="set_position was not called"):
        again = [batch for ((batch,),) in loader]
    assert torch.cat(again).equal(torch.cat(second))
