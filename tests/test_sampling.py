"""Which samples a rank sees, in which order, how augmented and by whom loaded: properties of every small case."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

import sampling
import task


def steps_of(dataset, batch_size, rank=0, world_size=1, accum_steps=1, epoch=0, step=0, seed=0):
    """Return the indices of each micro-batch of each step."""
    parts = {"accum_steps": accum_steps, "rank": rank, "world_size": world_size}
    dataset = range(dataset) if isinstance(dataset, int) else dataset
    sampler = sampling.GlobalBatchSampler(dataset, batch_size, seed, **parts)
    sampler.set_position(epoch, step)
    steps = list(sampler)
    assert len(steps) == len(sampler) and {number for number, _ in steps} <= {epoch}
    return [micro_batches for _, micro_batches in steps]


def cases():
    draw = random.Random(0)
    for _ in range(400):
        world_size, accum_steps = draw.choice([1, 2, 3, 7, 50]), draw.randint(1, 5)
        batch_size = world_size * accum_steps + draw.choice([0, 0, 1, draw.randint(0, 60)])
        yield batch_size + draw.choice([0, 1, batch_size, 99]), batch_size, world_size, accum_steps


def test_slices_of_all_ranks_partition_each_micro_batch_of_one_device():
    """In the order of the ranks they are numpy's pieces; sizes differ by one at most, and none is empty."""
    for length, batch_size, world_size, accum_steps in cases():
        order = sampling.epoch_order(length, 3, 4)
        parts = {"accum_steps": accum_steps, "world_size": world_size, "epoch": 4, "seed": 3}
        ranks = [steps_of(length, batch_size, rank, **parts) for rank in range(world_size)]
        assert {len(steps) for steps in ranks} == {length // batch_size}
        for k, slices in enumerate(zip(*ranks)):
            batch = order[k * batch_size : (k + 1) * batch_size]
            for i, micro_batch in enumerate(np.array_split(batch, accum_steps)):
                pieces = [own[i] for own in slices]
                trained = [n for piece in pieces for n in piece]
                assert trained == micro_batch.tolist(), "ranks repeat, lose or reorder samples"
                assert max(map(len, pieces)) - min(map(len, pieces)) <= 1 <= min(map(len, pieces))
        rank, step = world_size - 1, length // batch_size // 2
        rest = steps_of(length, batch_size, rank, step=step, **parts)
        assert rest == ranks[rank][step:], "a resumed run trains on other samples"


def test_evaluation_batches_are_the_same_at_every_world_size_and_have_each_sample_once():
    for length, batch_size in itertools.product((1, 7, 8, 9, 57, 1000), (1, 3, 64, 500)):
        whole = [indices for _, indices in sampling.ShardSampler(length, batch_size)]
        assert [i for batch in whole for i in batch] == [*range(length)]
        assert max(map(len, whole)) <= min(batch_size, math.ceil(length / 8))
        for world_size in range(1, 6):
            samplers = [sampling.ShardSampler(length, batch_size, r, world_size) for r in range(world_size)]  # fmt: skip
            shards = [[i for _, i in sampler] for sampler in samplers]
            assert sum(map(len, shards)) == len(whole), "ranks repeat or lose batches"
            assert [shards[b % world_size][b // world_size] for b in range(len(whole))] == whole
            assert {len(s) + sampler.missing for s, sampler in zip(shards, samplers)} == {len(shards[0])}  # fmt: skip


@pytest.mark.parametrize(("batch_size", "world_size", "accum_steps"), [(31, 1, 1), (5, 6, 1), (5, 2, 3), (0, 1, 1)])  # fmt: skip
def test_batch_that_does_not_fit_is_refused(batch_size, world_size, accum_steps, capsys):
    with pytest.raises(SystemExit) as end:
        steps_of(30, batch_size, 0, world_size, accum_steps)
    assert end.value.code == 2 and f"--batch-size {batch_size} " in capsys.readouterr().err


# --------------------------------------------------------------------------------------- orders


def test_order_has_every_sample_once_and_neighbouring_keys_have_others():
    for n in (1, 2, 50, 20_000):
        orders = [sampling.epoch_order(n, s, e).tolist() for s in (0, 1) for e in (0, 1)]
        assert all(sorted(order) == list(range(n)) for order in orders)
        if n > 1000:  # no two of them agree in more places than chance would have it
            same = [sum(a == b for a, b in zip(x, y)) for x, y in itertools.combinations(orders, 2)]
            assert max(same) < 12
    known = sampling.epoch_order(10, 3, 4).tolist()
    assert known == [8, 3, 1, 2, 9, 4, 5, 0, 7, 6], "or an interrupted run would go on with others"


class Balanced(Dataset):
    """Ten samples, of which the last comes as often as all others together; augmented by a draw."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item()])

    def epoch_order(self, seed, epoch):
        draw = np.random.RandomState([seed, epoch])
        return draw.permutation([*range(8), *(9 + 10 * times for times in range(8))])[:10]


def test_order_of_a_data_set_is_cut_among_ranks_and_a_sample_that_comes_again_is_drawn_anew():
    data = Balanced()
    order = data.epoch_order(0, 3).tolist()
    assert [i for (batch,) in steps_of(data, 5, epoch=3) for i in batch] == order
    ranks = [steps_of(data, 5, rank, 2, accum_steps=2, epoch=3) for rank in range(2)]
    joined = [i for step in zip(*ranks) for micro in zip(*step) for piece in micro for i in piece]
    assert joined == order
    samples = fetched(data, 3, order)
    assert samples[:, 0].long().tolist() == [number % 10 for number in order]
    assert len(samples[:, 1].unique()) == 10, "each is augmented by itself"


# -------------------------------------------------------------------------------- random numbers


def test_splitmix64_is_the_published_one_and_has_no_collisions_nearby():
    assert sampling.splitmix64(0) == 0xE220A8397B1DCDAF, "the first output from state 0"
    keys = {
        sampling.splitmix64(*key) for key in itertools.product(range(20), range(20), range(100))
    }
    assert len(keys) == 40_000
    indices = np.arange(10, dtype=np.uint64)
    columns = np.full(10, 3, np.uint64), np.full(10, 5, np.uint64), indices
    scalars = [sampling.splitmix64(3, 5, index) for index in range(10)]
    assert [int(bits) for bits in sampling.splitmix64(*columns)] == scalars


def uniform(seed, epoch, indices):
    sampling.KeyedDataset.key = sampling.splitmix64(seed, epoch)
    return sampling.keyed_uniform(indices, 3)


def test_keyed_uniform_is_uniform_and_depends_on_everything():
    draws = uniform(0, 0, np.arange(20_000))
    assert draws.shape == (20_000, 3) and draws.min() >= 0 and draws.max() < 1
    assert np.abs(draws.mean(0) - 0.5).max() < 0.01 and np.abs(draws.var(0) - 1 / 12).max() < 0.002
    assert np.abs(np.corrcoef(draws.T) - np.eye(3)).max() < 0.02, "the draws of one sample"
    assert np.abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 0.02, "neighbouring samples"
    for other in (uniform(1, 0, np.arange(20_000)), uniform(0, 1, np.arange(20_000))):
        assert np.abs(np.corrcoef(draws.ravel(), other.ravel())[0, 1]) < 0.01
    subset = np.array([17, 3, 19_999])
    assert (uniform(0, 0, subset) == draws[subset]).all(), "whatever batch a sample comes in"


def test_what_a_forward_draws_depends_on_its_place_and_each_generator_has_its_own_stream():
    drawn, streams = set(), []
    for place in itertools.product(range(3), repeat=4):  # seed, step, micro-batch, rank
        sampling.seed_rng(*place)
        streams.append(
            (torch.randint(0, 8, ()).item(), np.random.randint(0, 8), random.randrange(8))
        )
        drawn.add((torch.rand(()).item(), np.random.rand(), random.random()))
    assert all(len({*numbers}) == 81 for numbers in zip(*drawn))
    for i, j in ((0, 1), (0, 2), (1, 2)):  # torch's and numpy's are both Mersenne twisters
        assert 2 <= sum(numbers[i] == numbers[j] for numbers in streams) <= 30


# -------------------------------------------------------------------------------------- fetching


class Noisy(Dataset):
    """Draws from the global generators, as torchvision's transforms do."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()), random.random(), np.random.rand()]), index


def digits():
    return task.build_datasets(None)[0]


def fetched(dataset, epoch, indices, seed=0, collate=None):
    """Return what a loader fetches, without the targets."""
    batch = sampling.KeyedDataset(dataset, seed, collate).__getitems__((epoch, indices))
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def loaded(dataset, epoch, workers=0, world_size=1, step=0):
    """Return {index: input}: what an epoch trains on, as so many workers of so many ranks load it."""
    samples = {}
    for rank in range(world_size):
        sampler = sampling.GlobalBatchSampler(dataset, 7, 3, 2, rank, world_size)
        loader = sampling.build_loader(dataset, sampler, torch.device("cpu"), 3, workers)
        sampler.set_position(epoch, step)
        for (_, keys), batches in zip(list(sampler), loader, strict=True):
            for indices, (inputs, _) in zip(keys, batches, strict=True):
                samples |= dict(zip(indices, inputs, strict=True))
    return samples


@pytest.mark.parametrize(("make", "workers", "world_size"), [(Noisy, 2, 1), (Noisy, 0, 3), (digits, 0, 3)])  # fmt: skip
def test_a_sample_is_augmented_alike_whoever_loads_it(make, workers, world_size):
    dataset = make()
    plain = loaded(dataset, 1)
    for step in (0, 2):
        other = loaded(dataset, 1, workers, world_size, step)
        assert len(other) == len(plain) - 7 * step > 0
        assert all(plain[index].equal(other[index]) for index in other)
    following = loaded(dataset, 2)
    both = plain.keys() & following.keys()
    changed = sum(not plain[index].equal(following[index]) for index in both)
    assert changed > 0.7 * len(both) > 10, "every epoch draws anew"


def test_whole_batches_are_drawn_by_sample_and_a_repeat_anew():
    """A repeat is in an order of its own, or a Subset names a sample twice."""
    train_set = digits()
    again = [7 + times * len(train_set) for times in range(20)]
    draws = fetched(train_set, 0, again)
    assert len({tuple(image.flatten().tolist()) for image in draws}) > 5, "of nine shifts"
    assert draws[[0]].equal(fetched(train_set, 0, [7])), "among others as alone"
    assert draws[3:5].equal(fetched(train_set, 0, again[3:5]))
    twice = fetched(Subset(train_set, [7] * 20), 0, list(range(20)))
    assert len({tuple(image.flatten().tolist()) for image in twice}) > 5
    images = fetched(train_set, 1, [5, 8], collate=lambda samples: [*zip(*samples)])
    assert type(images) is tuple and images[0].shape == (1, 8, 8), "the result of collate"


def test_loader_may_be_read_again_and_ends_with_its_epoch():
    data = TensorDataset(torch.arange(12))
    sampler = sampling.GlobalBatchSampler(data, 4, 0)
    loader = sampling.build_loader(data, sampler, torch.device("cpu"), 0, workers=1)
    epochs = []
    for epoch in (0, 1):
        sampler.set_position(epoch, 0)
        epochs.append(torch.cat([batch for ((batch,),) in loader]))
    assert [sorted(found.tolist()) for found in epochs] == [[*range(12)]] * 2
    assert epochs[0].tolist() == sampling.epoch_order(12, 0, 0).tolist() != epochs[1].tolist()


class Torn(Noisy):
    def __getitem__(self, index):
        if index == 3:
            raise OSError("/data/3.jpg: image file is truncated")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_sample_that_cannot_be_read_ends_the_run_with_its_error(workers):
    with pytest.raises(OSError, match=r"3\.jpg: image file is truncated"):
        loaded(Torn(), 0, workers)
