"""Which samples a rank sees, in which order and how augmented: properties checked over every small case."""

import numpy as np
import pytest
import torch
from harness import loader_of, make_args, make_sampler
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
    return [indices for _, indices in keys]


@pytest.mark.parametrize("world_size", range(1, 9))
def test_pieces_of_all_ranks_partition_each_global_batch(world_size):
    for length in range(1, 41):
        for batch_size in range(1, length + 1):
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


@pytest.mark.parametrize("accum_steps", [2, 3, 5])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_micro_batches_of_all_ranks_are_those_of_one_device(world_size, accum_steps):
    """Or BatchNorm over the ranks would see other batches than one device does."""
    for batch_size in range(world_size * accum_steps, 41):
        samplers = [
            make_sampler(40, batch_size, rank, world_size, accum_steps)
            for rank in range(world_size)
        ]
        shares = [torch.tensor(next(iter(own))[1]) for own in samplers]
        whole = torch.tensor(batches(40, batch_size)[0])
        micro_batches = [
            torch.cat([common.split_batch(share, accum_steps)[i] for share in shares])
            for i in range(accum_steps)
        ]
        assert all(a.equal(b) for a, b in zip(micro_batches, whole.tensor_split(accum_steps)))
        assert all(
            len(piece) for share in shares for piece in common.split_batch(share, accum_steps)
        )


@pytest.mark.parametrize("world_size", range(1, 9))
def test_evaluation_shards_partition_the_data_unpadded(world_size):
    for length in range(1, 41):
        for batch_size in (1, 3, 7, 40):
            shards = [
                sampling.ShardSampler(length, batch_size, rank, world_size)
                for rank in range(world_size)
            ]
            indices = [index for shard in shards for _, batch in shard for index in batch]
            assert sorted(indices) == list(range(length))
            assert [len(shard) for shard in shards] == [len(list(shard)) for shard in shards]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_resuming_at_any_step_yields_exactly_the_rest(world_size):
    for length, batch_size in [(20, 3), (21, 7), (40, 40), (37, 5)]:
        for rank in range(world_size):
            whole = batches(length, batch_size, rank, world_size, epoch=4)
            for step in range(len(whole) + 1):
                assert (
                    batches(length, batch_size, rank, world_size, epoch=4, step=step)
                    == whole[step:]
                )


def test_order_is_a_function_of_seed_and_epoch():
    assert batches(40, 8) == batches(40, 8)
    orders = {
        str(batches(40, 8, epoch=epoch, seed=seed)) for epoch in range(5) for seed in range(5)
    }
    assert len(orders) == 25, "each epoch of each seed has an order of its own"


def test_empty_epoch_is_an_error_that_names_both_numbers():
    with pytest.raises(common.UsageError, match=r"--batch-size 41 .*40 samples"):
        make_sampler(40, 41)


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
    keyed = np.full(10, sampling.splitmix64(3, 5), dtype=np.uint64)
    assert [
        int(bits)
        for bits in sampling.splitmix64(
            np.array([3] * 10, np.uint64),
            np.array([5] * 10, np.uint64),
            np.arange(10, dtype=np.uint64),
        )
    ] == scalars
    assert keyed.dtype == np.uint64


def test_keyed_uniform_is_uniform_and_depends_on_everything():
    draws = sampling.keyed_uniform(0, 0, np.arange(20_000), 3)
    assert draws.shape == (20_000, 3) and draws.min() >= 0 and draws.max() < 1
    assert np.abs(draws.mean(0) - 0.5).max() < 0.01 and np.abs(draws.var(0) - 1 / 12).max() < 0.002
    assert np.abs(np.corrcoef(draws.T) - np.eye(3)).max() < 0.02, (
        "the draws of one sample are independent"
    )
    assert np.abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 0.02, (
        "neighbouring samples are independent"
    )
    for other in (
        sampling.keyed_uniform(1, 0, np.arange(20_000), 3),
        sampling.keyed_uniform(0, 1, np.arange(20_000), 3),
    ):
        assert np.abs(np.corrcoef(draws.ravel(), other.ravel())[0, 1]) < 0.01
    subset = np.array([17, 3, 19_999])
    assert (sampling.keyed_uniform(0, 0, subset, 3) == draws[subset]).all(), (
        "whatever batch a sample comes in"
    )


def collect(dataset, workers, epoch, step=0, world_size=1):
    """Return {sample index: input} of an epoch as all ranks load it."""
    samples = {}
    for rank in range(world_size):
        sampler = make_sampler(len(dataset), 7, rank, world_size)
        sampler.set_position(epoch, step)
        loader = loader_of(
            make_args("single", "--workers", str(workers)), dataset, sampler, torch.device("cpu")
        )
        for (_, indices), (inputs, _) in zip(list(sampler), loader):
            samples |= dict(zip(indices, inputs))
    return samples


class NoisyPerSample(Dataset):
    """A plain map-style data set whose augmentation draws from torch's global generator, as torchvision's transforms do."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return torch.tensor(float(index)) + torch.rand(()), torch.tensor(index)


@pytest.mark.parametrize("dataset", ["in memory", "per sample"])
@pytest.mark.parametrize(
    ("workers", "world_size", "step"), [(1, 1, 0), (3, 1, 0), (0, 3, 0), (2, 2, 2)]
)
def test_a_sample_is_augmented_alike_whoever_loads_it(dataset, workers, world_size, step):
    dataset = NoisyPerSample() if dataset == "per sample" else task.build_datasets(make_args())[0]
    plain = collect(dataset, 0, epoch=1)
    other = collect(dataset, workers, epoch=1, step=step, world_size=world_size)
    assert len(other) == len(plain) - 7 * step
    assert all(plain[index].equal(other[index]) for index in other)
    next_epoch = collect(dataset, workers, epoch=2)
    common_indices = plain.keys() & next_epoch.keys()
    changed = sum(not plain[index].equal(next_epoch[index]) for index in common_indices)
    assert changed > 0.7 * len(common_indices), "every epoch draws anew"


def test_shift_moves_the_image_by_at_most_one_pixel():
    images = torch.zeros(200, 1, 8, 8, dtype=torch.uint8)
    images[:, 0, 4, 4] = 255
    dataset = task.ImagesInMemory(images, torch.arange(200), shift=1)
    found = dataset.__getitems__(list(range(200)))[0].nonzero()[:, 2:]
    offsets = {tuple(position) for position in (found - 4).tolist()}
    assert offsets == {(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)}
    assert dataset[7][0].equal(dataset.__getitems__([7])[0][0])


def test_digits_are_split_as_the_licence_note_says():
    train, held_out = task.build_datasets(make_args())
    assert (len(train), len(held_out)) == (1437, 360)
    assert not train[0][0].equal(held_out[0][0])
    train_bytes = {
        image.numpy().tobytes() for image, _ in (held_out[index] for index in range(360))
    }
    assert len(train_bytes) > 350, "the held-out samples are real and differ"


@pytest.mark.parametrize("pieces", [1, 2, 3, 5])
def test_split_batch_cuts_nested_targets_along_the_first_dimension(pieces):
    batch = (
        torch.arange(11.0),
        {"boxes": torch.arange(22).view(11, 2), "scales": [torch.arange(11), torch.ones(11, 3, 3)]},
    )
    micro_batches = common.split_batch(batch, pieces)
    assert len(micro_batches) == pieces
    sizes = [len(inputs) for inputs, _ in micro_batches]
    assert max(sizes) - min(sizes) <= 1
    assert torch.cat([inputs for inputs, _ in micro_batches]).equal(batch[0])
    assert torch.cat([targets["scales"][1] for _, targets in micro_batches]).equal(
        batch[1]["scales"][1]
    )
    assert all(len(inputs) == len(targets["boxes"]) for inputs, targets in micro_batches)


@pytest.mark.parametrize(
    ("length", "batch_size", "largest"),
    [
        (1000, 500, 125),
        (10_000, 500, 500),
        (57, 30, 8),
        (64, 30, 8),
        (65, 30, 9),
        (100, 5, 5),
        (1, 9, 1),
    ],
)
def test_evaluation_batches_occupy_eight_ranks(length, batch_size, largest):
    batches = [indices for _, indices in sampling.ShardSampler(length, batch_size)]
    assert {len(batch) for batch in batches[:-1]} <= {largest} and len(batches[0]) == largest
    assert [index for batch in batches for index in batch] == list(range(length))


@pytest.mark.parametrize(
    ("threads", "device", "workers"),
    [(20, "cpu", 8), (3, "cpu", 3), (8, "cuda", 8)],
)
def test_loader_has_a_worker_for_each_core_and_pins(threads, device, workers, monkeypatch):
    told = []

    class Loader:
        def __init__(self, *_, **settings):
            told.append(settings)
            self._workers = []

        def __iter__(self):
            return self

        def __next__(self):
            raise StopIteration

    monkeypatch.setattr(sampling, "DataLoader", Loader)
    monkeypatch.setattr(sampling.torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(sampling.multiprocessing.util, "Finalize", lambda *_, **__: None)
    loader_of(make_args(), [0, 1], make_sampler(40, 4), torch.device(device))
    (settings,) = told
    assert settings["num_workers"] == workers and settings["persistent_workers"]
    assert settings["pin_memory"] == (device != "cpu")
    args = make_args("single", "--workers", "5")
    loader_of(args, [0, 1], make_sampler(40, 4), torch.device(device))
    assert told[1]["num_workers"] == 5
