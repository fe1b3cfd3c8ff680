"""The pitfalls of going from one device to many: samples and their order, batches, evaluation. Each test shows the wrong way failing, then this project's way."""

import itertools
import json
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import fetched, in_group, make_sampler, train, undisturbed
from patches import BASE, printed
from runs import CPU
from short_runs import NOISE, ODD
from torch.utils.data import DistributedSampler, Subset, random_split

import common
import sampling
from tasks.images import ImagesInMemory

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
    for out in in_group(4, evaluate_both_ways):
        wrong, right = json.loads(out)
        assert abs(wrong - 6 / 21) > 5e-3
        assert right == {"top1": pytest.approx(6 / 21, rel=1e-12), "count": 21}


# ----------------------------------------------------------------------------------------------- 07


def test_pitfall_07_every_epoch_has_its_own_order():
    """Every epoch has the same order: DistributedSampler shuffles by its epoch, which stays 0 unless set_epoch is called."""
    sampler = DistributedSampler(range(203), 2, 0, shuffle=True)
    assert list(sampler) == list(sampler)


# ----------------------------------------------------------------------------------------------- 19


def evaluate_on_rank_0_only():
    if dist.get_rank() == 0:
        time.sleep(2)  # an evaluation that takes longer than the others' patience
        return
    with pytest.raises(RuntimeError, match="imed out"):
        next_step = dist.all_reduce(torch.zeros(1), async_op=True)
        next_step.wait(timedelta(milliseconds=100))
    print("timed out")


def print_evaluation(rank):
    iterate = sampling.ShardSampler.__iter__

    def watched(self):
        for epoch, indices in iterate(self):
            print("evaluated", json.dumps([rank, indices]))
            yield epoch, indices

    sampling.ShardSampler.__iter__ = watched


@pytest.mark.full
def test_pitfall_19_all_ranks_evaluate(tmp_path):
    """Training stalls or times out in evaluation: rank 0 evaluates alone while the others wait in the next collective."""
    assert in_group(2, evaluate_on_rank_0_only) == ["", "timed out\n"]

    result = train("ddp", 3, *BASE, "--epochs", "1", folder=tmp_path, patch=print_evaluation)
    shards = [[], [], []]
    for rank, indices in printed(result.out, "evaluated"):
        shards[rank] += indices
    # Seven batches of 8 and one of 1: every third for each rank.
    assert [len(shard) for shard in shards] == [24, 17, 16]
    assert sorted(itertools.chain(*shards)) == list(range(57))


# ----------------------------------------------------------------------------------------------- 26


def test_pitfall_26_ranks_have_equally_many_batches():
    """The job hangs at the end of an epoch: one rank has a batch more than the others, and waits in its all-reduce."""
    shards = [range(rank, 23, 2) for rank in (0, 1)]  # unpadded, cut into batches on each rank
    assert [len(shard) // 2 for shard in shards] == [6, 5]

    with pytest.raises(common.UsageError, match=r"--batch-size 5 .*4"):
        make_sampler(4, 5)  # an epoch without a step


# ----------------------------------------------------------------------------------------------- 48


def test_pitfall_48_wrapped_data_set_is_augmented_anew_in_every_epoch():
    """Every epoch is augmented alike: `set_epoch` does not reach a data set behind a wrapper."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 1, 8, 8), dtype=torch.uint8, generator=generator)
    plain = ImagesInMemory(images, torch.arange(40), shift=1, flip=True)
    wrapped = Subset(random_split(plain, [40], generator)[0], range(40))
    first, second, again = (fetched(wrapped, epoch, list(range(40))) for epoch in (0, 1, 0))
    assert again.equal(first)
    assert (first != second).flatten(1).any(1).double().mean() > 0.7


# ----------------------------------------------------------------------------------------------- 49


@pytest.mark.parametrize(("mode", "n"), [("ddp", 2), pytest.param("dp", 3, marks=pytest.mark.full)])
def test_pitfall_49_what_is_drawn_in_an_evaluation_is_the_same_in_every_mode(mode, n, tmp_path):
    """The score differs from run to run, and with the number of devices: the evaluation draws numbers."""
    result, reference = train(mode, n, *NOISE, folder=tmp_path), undisturbed("single", 1, *NOISE)
    quiet = undisturbed("single", 1, *ODD, "--model", "conv")
    assert result.code == 0, result.err
    for ours, theirs, plain in zip(
        result.eval_lines(), reference.eval_lines(), quiet.eval_lines(), strict=True
    ):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-10)
        assert abs(ours["loss"] - plain["loss"]) > 1e-3, "the noise is there"
