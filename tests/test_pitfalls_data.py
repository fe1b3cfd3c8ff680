"""The pitfalls of going from one device to many: batches, samples, schedules, evaluation. Each test shows the wrong way failing, then this project's way."""

import itertools
import json
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import (
    deviation,
    factor_of,
    fetched,
    in_group,
    loader_of,
    make_args,
    make_sampler,
    single_run,
    train,
    undisturbed,
)
from patches import BASE, print_batches, printed
from runs import CPU
from short_runs import NOISE, ODD
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import common
import sampling
import task

# ----------------------------------------------------------------------------------------------- 01


def evaluate_both_ways():
    hits = (torch.arange(21) % 4 == 0).double()
    padded = list(DistributedSampler(hits, shuffle=False))
    wrong = common.reduce_value(hits[padded].mean()).item()
    meter = common.Meter(CPU)
    for _, indices in sampling.ShardSampler(len(hits), 4, dist.get_rank(), dist.get_world_size()):
        meter.add(top1=hits[indices])
    print(json.dumps([wrong, meter.mean()]))


def test_pitfall_01_evaluation_counts_every_sample_once():
    """Accuracy depends on the number of devices: DistributedSampler repeats samples to make the shards equal, and means are averaged."""
    for length, world_size, repeated in ((21, 2, 1), (3, 4, 1), (50001, 8, 7)):
        padded = [
            i
            for rank in range(world_size)
            for i in DistributedSampler(range(length), world_size, rank, shuffle=False)
        ]
        assert len(padded) - length == repeated
    for length in (21, 3, 50001):
        for world_size in (1, 2, 4):
            shards = [
                sampling.ShardSampler(length, 16, rank, world_size) for rank in range(world_size)
            ]
            assert sorted(i for shard in shards for _, indices in shard for i in indices) == list(
                range(length)
            )

    for out in in_group(4, evaluate_both_ways):
        wrong, right = json.loads(out)
        assert abs(wrong - 6 / 21) > 5e-3
        assert right == {"top1": pytest.approx(6 / 21, rel=1e-12), "count": 21}

    one, four = single_run(*BASE).eval_lines(), undisturbed("ddp", 4, *BASE).eval_lines()
    assert len(four) == 3 and four[-1]["count"] == 57 and 0.2 < four[-1]["top1"] < 1
    assert [line["top1"] for line in four] == pytest.approx(
        [line["top1"] for line in one], rel=1e-10
    )
    assert [line["loss"] for line in four] == pytest.approx(
        [line["loss"] for line in one], rel=1e-10
    )


# ----------------------------------------------------------------------------------------------- 03


@pytest.mark.full
def test_pitfall_03_batch_size_is_global(tmp_path):
    """More devices, lower accuracy: a batch size per device makes the global batch, the steps of an epoch and the gradient other ones."""
    reference = single_run(*BASE)
    per_device = single_run(*BASE, "--batch-size", "60")  # what 30 on each of two devices would be
    assert len(per_device.train_lines()) == 9 and len(reference.train_lines()) == 18
    assert deviation(per_device.gradients[0][0], reference.gradients[0][0]) > 1e-2

    for world_size in (2, 4):
        result = undisturbed("ddp", world_size, *BASE)
        assert [line["lr"] for line in result.train_lines()] == [
            line["lr"] for line in reference.train_lines()
        ]
        assert deviation(result.gradients[0][0], reference.gradients[0][0]) <= 1e-12

    scaled = train("ddp", 2, *BASE, "--epochs", "1", "--scale-lr", "linear", folder=tmp_path)
    assert (
        scaled.train_lines()[-1]["lr"] == 2 * reference.train_lines()[5]["lr"] > 0
    )  # only when asked for


# ----------------------------------------------------------------------------------------------- 07


def test_pitfall_07_every_epoch_has_its_own_order(tmp_path):
    """Every epoch has the same order: DistributedSampler shuffles by its epoch, which stays 0 unless set_epoch is called."""
    sampler = DistributedSampler(range(203), 2, 0, shuffle=True)
    assert list(sampler) == list(sampler)

    result = train("ddp", 2, *BASE, folder=tmp_path, patch=print_batches)
    batches = printed(result.out, "batch")
    orders = [
        [i for e, rank, indices in batches if e == epoch and rank == 0 for i in indices]
        for epoch in range(3)
    ]
    assert [len(order) for order in orders] == [90, 90, 90]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert orders[a] != orders[b] and set(orders[a]) != set(orders[b])


# ----------------------------------------------------------------------------------------------- 08


class OwnGenerator(Dataset):
    """Augments from a generator that it holds, of which every forked worker gets a copy."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.generator.random()


class TorchNoise(OwnGenerator):
    """Augments from torch's generator, as torchvision's transforms do."""

    def __getitem__(self, index):
        return torch.rand(3), index


def batches_of(dataset, workers):
    args = make_args("single", "--workers", str(workers))
    sampler = make_sampler(24, 8)
    loader, epochs = loader_of(args, dataset, sampler, CPU), []
    for epoch in (0, 1):
        sampler.set_position(epoch, 0)
        by_index = {}
        for ((values, indices),) in loader:
            by_index.update(zip(indices.tolist(), values))
        epochs.append(torch.stack([by_index[index] for index in range(24)]))
    return epochs


class Images(Dataset):
    """The default task's training images; a sample is (image, index)."""

    whole_batches = True

    def __init__(self):
        self.images = task.build_datasets(make_args())[0]
        self.images.targets = torch.arange(24)

    def __len__(self):
        return 24

    def __getitems__(self, indices):
        return self.images.__getitems__(indices)


def seed_by_worker(worker):
    torch.manual_seed(worker)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
def test_pitfall_08_augmentation_differs_between_workers_and_epochs():
    """All loader workers, or all epochs, augment alike: a generator was copied by fork, or worker_init_fn seeds with a constant."""
    first, second = DataLoader(
        OwnGenerator(), batch_size=12, num_workers=2
    )  # one batch of each worker
    assert first.equal(second)
    loader = DataLoader(TorchNoise(), batch_size=24, num_workers=1, worker_init_fn=seed_by_worker)
    epochs = [next(iter(loader))[0] for _ in range(2)]
    assert epochs[0].equal(epochs[1])

    for dataset in (TorchNoise(), Images()):
        epochs = batches_of(dataset, 0)
        assert not epochs[0].equal(epochs[1])
        assert len({tuple(sample.flatten().tolist()) for sample in epochs[0]}) == 24
        for workers in (1, 3):
            assert all(a.equal(b) for a, b in zip(batches_of(dataset, workers), epochs))


# ----------------------------------------------------------------------------------------------- 19


def evaluate_on_rank_0_only():
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.wait(
            ["gave up"], timedelta(seconds=20)
        )  # an evaluation that takes longer than the others' patience
        print("evaluated")
        return
    try:
        dist.all_reduce(torch.zeros(1), async_op=True).wait(
            timedelta(milliseconds=100)
        )  # the next training step
        print("trained on")
    except RuntimeError as error:
        print("timed out" if "imed out" in str(error) else error)
    store.set("gave up", "yes")


def print_evaluation(rank):
    iterate = sampling.ShardSampler.__iter__

    def watched(self):
        for epoch, indices in iterate(self):
            print("evaluated", json.dumps([rank, indices]))
            yield epoch, indices

    sampling.ShardSampler.__iter__ = watched


def test_pitfall_19_all_ranks_evaluate(tmp_path):
    """Training stalls or times out in evaluation: rank 0 evaluates alone while the others wait in the next collective."""
    assert [out.strip() for out in in_group(2, evaluate_on_rank_0_only)] == [
        "evaluated",
        "timed out",
    ]

    result = train("ddp", 3, *BASE, "--epochs", "1", folder=tmp_path, patch=print_evaluation)
    shards = [
        sorted(i for r, indices in printed(result.out, "evaluated") if r == rank for i in indices)
        for rank in range(3)
    ]
    assert [len(shard) for shard in shards] == [24, 17, 16], (
        "eight batches of 8 or, at last, 1: every third for each rank"
    )
    assert sorted(itertools.chain(*shards)) == list(range(57))


# ----------------------------------------------------------------------------------------------- 24


@pytest.mark.full
def test_pitfall_24_schedule_counts_global_batches(tmp_path):
    """The schedule ends N times too early or late: it was stepped once a process or once a micro-batch, not once a global batch."""
    args = make_args("single", *BASE)
    micro_batches = [factor_of(args, 2 * step, 6) for step in range(18)]  # stepped for each of two
    assert micro_batches[9:] == 9 * [0.0]

    reference = single_run(*BASE).train_lines()
    assert [line["lr"] for line in reference] == pytest.approx(
        [args.lr * factor_of(args, step, 6) for step in range(18)], rel=1e-12
    )
    assert 0 < reference[-1]["lr"] < reference[9]["lr"]
    for world_size, accum_steps in ((2, 2), (4, 3)):
        argv = (*BASE, "--accum-steps", str(accum_steps))
        lines = train("ddp", world_size, *argv, folder=tmp_path / str(world_size)).train_lines()
        assert [(line["global_step"], line["lr"]) for line in lines] == [
            (line["global_step"], line["lr"]) for line in reference
        ]


# ----------------------------------------------------------------------------------------------- 26


def test_pitfall_26_ranks_have_equally_many_batches():
    """The job hangs at the end of an epoch: one rank has a batch more than the others, and waits in its all-reduce."""

    def batches_per_rank(length, batch_size, world_size):  # unpadded shards, cut on each rank
        return {
            len(range(rank, length, world_size)) // (batch_size // world_size)
            for rank in range(world_size)
        }

    assert batches_per_rank(21, 4, 2) == {5} and batches_per_rank(23, 4, 2) == {5, 6}

    for length in range(1, 12):
        for batch_size in range(1, length + 1):
            for world_size in range(1, batch_size + 1):
                samplers = [
                    make_sampler(length, batch_size, rank, world_size) for rank in range(world_size)
                ]
                steps = [list(sampler) for sampler in samplers]
                assert {len(step) for step in steps} | {len(sampler) for sampler in samplers} == {
                    length // batch_size
                }
                assert all(
                    indices for step in steps for _, (indices,) in step
                )  # an empty piece would break the loss
                trained = [i for step in steps for _, (indices,) in step for i in indices]
                assert len(set(trained)) == len(trained) == length // batch_size * batch_size
    with pytest.raises(common.UsageError, match=r"--batch-size 5 .*4"):
        make_sampler(4, 5)  # an epoch without a step


# ----------------------------------------------------------------------------------------------- 48


@pytest.mark.parametrize("kind", ["random_split", "own"])
@pytest.mark.parametrize("files", [False, pytest.param(True, marks=pytest.mark.full)])
def test_pitfall_48_wrapped_data_set_is_augmented_anew_in_every_epoch(kind, files, tmp_path):
    import odd

    from tasks.images import ImagesInMemory, pipeline, read_image

    generator = torch.Generator().manual_seed(0)
    shape = (40, 3, 80, 80) if files else (40, 1, 8, 8)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    if files:
        from torchvision.datasets import ImageFolder
        from torchvision.io import write_jpeg

        (tmp_path / "class").mkdir()
        for i, image in enumerate(images):
            write_jpeg(image, str(tmp_path / "class" / f"{i:02}.jpg"))
        plain = ImageFolder(tmp_path, pipeline(64, training=True), loader=read_image)
    else:
        plain = ImagesInMemory(images, torch.arange(40), shift=1, flip=True)
    wrapped = odd.wrap(odd.wrap(plain, kind), kind)
    indices = list(range(40))
    first, second, again = (fetched(wrapped, epoch, indices) for epoch in (0, 1, 0))
    assert again.equal(first)
    assert (first != second).flatten(1).any(1).double().mean() > 0.7


# ----------------------------------------------------------------------------------------------- 49


@pytest.mark.parametrize(
    ("mode", "n"),
    [("ddp", 2), *(pytest.param(*run, marks=pytest.mark.full) for run in (("dp", 3), ("fsdp", 2)))],
)
def test_pitfall_49_what_is_drawn_in_an_evaluation_is_the_same_in_every_mode(mode, n, tmp_path):
    result, reference = train(mode, n, *NOISE, folder=tmp_path), undisturbed("single", 1, *NOISE)
    quiet = undisturbed("single", 1, *ODD, "--model", "conv")
    assert result.code == 0, result.err
    for ours, theirs, plain in zip(
        result.eval_lines(), reference.eval_lines(), quiet.eval_lines(), strict=True
    ):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-10)
        assert abs(ours["loss"] - plain["loss"]) > 1e-3, "the noise is there"
