"""Tasks that are unusual but right give the right result, and those that cannot be right are refused by name (tests/tasks/odd.py)."""

import functools
import itertools
import math
import os
import random
import re
import signal
import sys
import textwrap
import threading
import warnings
from argparse import Namespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import (
    ROOT,
    TASKS,
    average_of,
    check,
    factor_of,
    in_group,
    keyed,
    make_args,
    run_processes,
    train,
    undisturbed,
)
from pitfalls import without_speed
from torch import nn

import common
import machinery.files
import machinery.processes
import machinery.run
import machinery.stand_ins
import machinery.tasks
import sampling
import task

ODD = ("--task", str(TASKS / "odd.py"), "--dtype", "float64", "--batch-size", "30", "--epochs", "3")
ODD += ("--lr", "0.05", "--log-every", "1", "--warmup-epochs", "0.5")
MODES = [("single", 1), ("dp", 2), ("ddp", 2), ("spawn", 3)]
MASKS = {"mask", "unseen", "passing", "steps", "flags"}


def same(one, other):
    """Bitwise, and a NaN is a NaN."""
    return torch.equal(one.nan_to_num(nan=7.5), other.nan_to_num(nan=7.5)) and torch.equal(
        one.isnan(), other.isnan()
    )


# ------------------------------------------------------------------------- what is infinite, large or a flag by design


@pytest.mark.parametrize(("mode", "n"), MODES)
@pytest.mark.parametrize("average", ["none", "ema", "swa"])
def test_buffers_by_design_survive_training_averages_and_saves(mode, n, average, tmp_path):
    argv = (*ODD, "--model", "masks", "--epochs", "4", "--average", average)
    result = train(mode, n, *argv, folder=tmp_path)
    assert result.code == 0 and "not saved" not in result.err, result.err
    saved = result.checkpoint()
    for part in ("model", *(["average"] if average != "none" else [])):
        found = saved[part]
        assert same(found["mask"], torch.full((3, 3), -torch.inf).double().triu(1))
        assert same(found["unseen"], torch.tensor([torch.nan, torch.inf, 1.0]).double())
        assert found["steps"].item() == 2**24 + 1 + 2 * 24, (
            "a sum of float32 would have been rounded"
        )
        assert found["flags"].tolist() == [True, False, True]
        assert "passing" not in found
    assert all(math.isfinite(line["loss"]) for line in result.lines)
    assert (result.folder / "best.pt").exists()


def test_weights_with_values_by_design_are_loaded(tmp_path):
    argv = (*ODD, "--model", "masks", "--epochs", "1")
    trained = train("single", 1, *argv, folder=tmp_path / "first")
    again = train(
        "single", 1, *argv, "--weights", trained.folder / "best.pt", folder=tmp_path / "second"
    )
    assert again.code == 0 and "weights: 14 of the model's 14 tensors" in again.out, (
        again.out + again.err
    )
    bad = trained.checkpoint()["model"]
    bad["unseen"][2] = torch.nan  # 1.0 by design
    torch.save(bad, tmp_path / "bad.pt")
    refused = train("single", 1, *argv, "--weights", tmp_path / "bad.pt", folder=tmp_path / "third")
    assert refused.code == 2 and "unseen is not finite" in refused.err


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("ddp", 2)])
def test_what_became_non_finite_is_never_saved_and_the_run_does_not_end_well(mode, n, tmp_path):
    """A buffer with an infinity by design, in which another value becomes NaN."""
    result = train(mode, n, *ODD, "--model", "ruined", folder=tmp_path)
    assert result.code == 1 and "non-finite values in ruined" in result.err
    assert "the run is done, but its last state was not saved" in result.err
    assert not list(result.folder.glob("*.pt"))


def test_ranks_of_a_run_that_could_not_be_saved_end_alike(tmp_path):
    from functools import partial

    from harness import rank_of_run

    argv = [*ODD, "--model", "ruined", "--epochs", "1", "--output-dir", str(tmp_path / "run")]
    meet, record = str(tmp_path / "meet"), tmp_path / "gradients"
    targets = [partial(rank_of_run, "ddp", rank, 2, argv, meet, record, 0, None) for rank in (0, 1)]
    assert [code for code, _, _ in run_processes(targets, tmp_path)] == [1, 1]


def stop_with_usr1(rank):
    from pitfalls import after_step

    after_step(4, lambda: os.kill(os.getpid(), signal.SIGUSR1))


def test_warning_of_slurm_ends_with_1_if_the_run_could_not_be_saved(tmp_path):
    result = train("single", 1, *ODD, "--model", "ruined", folder=tmp_path, patch=stop_with_usr1)
    assert result.code == 1 and "stopped by SIGUSR1 at step 4, which was not saved" in result.err


def test_became_non_finite_compares_place_by_place():
    nan, inf = torch.nan, torch.inf
    before = torch.tensor([nan, inf, -inf, 1.0])
    for value, became in [
        ([nan, inf, -inf, 1.0], False),
        ([0.0, 0.0, 0.0, 0.0], False),
        ([nan, inf, -inf, 2.0], False),
        ([inf, inf, -inf, 1.0], True),
        ([nan, -inf, -inf, 1.0], True),
        ([nan, nan, -inf, 1.0], True),
        ([nan, inf, -inf, inf], True),
    ]:
        assert common.became_non_finite(torch.tensor(value), before) == became, value
        assert common.became_non_finite(torch.tensor(value), None) == (
            not torch.tensor(value).isfinite().all()
        )
    assert not common.became_non_finite(torch.tensor([2**60, -1]), None)


def test_ema_averages_parameters_and_statistics_and_copies_the_rest():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
    net.register_buffer("large", torch.tensor([2**53 + 1, 5]))
    net.register_buffer("plain", torch.tensor([1.0, -torch.inf]).double())
    average = average_of(make_args("single", "--average", "ema"), net)
    expected = None
    for step in range(5):
        for tensor in (*net.parameters(), net[1].running_mean, net[1].running_var):
            tensor.data = torch.rand_like(tensor)
        net.large += step
        net.plain[0] = step
        average.update_parameters(net)
        now = [
            tensor.detach().clone()
            for tensor in (*net.parameters(), net[1].running_mean, net[1].running_var)
        ]
        expected = (
            now
            if expected is None
            else [old + 0.01 * (new - old) for old, new in zip(expected, now)]
        )
    module = average.module
    for found, wanted in zip(
        (*module.parameters(), module[1].running_mean, module[1].running_var), expected
    ):
        assert torch.allclose(found, wanted, rtol=1e-14, atol=0)
        assert not torch.allclose(found, wanted * 1.001, rtol=1e-14, atol=0)
    assert module.large.equal(net.large) and module.plain.equal(net.plain)
    assert module[1].num_batches_tracked.equal(net[1].num_batches_tracked)


@pytest.mark.parametrize("average", ["ema", "swa"])
def test_average_of_parameters_that_are_infinite_by_design(average):
    net = nn.Linear(2, 2).double()
    net.mask = nn.Parameter(torch.full((2, 2), -torch.inf).double().triu(1), requires_grad=False)
    average, seen = average_of(make_args("single", "--average", average), net), []
    for step in range(4):
        net.weight.data.fill_(step)
        net.mask.data[0, 0] = step
        average.update_parameters(net)
        seen.append(average.module.weight[0, 0].item())
        assert average.module.mask[0, 1] == -torch.inf and average.module.mask[0, 0] == seen[-1]
    assert 0 < seen[-1] < 3


# ------------------------------------------------------------------------------------------- SWA and another number of epochs


@pytest.mark.parametrize(("first", "then"), [(4, 12), (4, 6), (4, 5), (8, 9)])
def test_swa_with_more_epochs_averages_what_a_run_of_that_length_averages(first, then, tmp_path):
    """At a constant rate, for which the epochs themselves are the same."""
    argv = (*ODD, "--model", "conv", "--average", "swa", "--schedule", "constant")
    whole = undisturbed("single", 1, *argv, "--epochs", str(then))
    assert train("single", 1, *argv, "--epochs", str(first), folder=tmp_path).code == 0
    resumed = train("single", 1, *argv, "--epochs", str(then), "--resume", "auto", folder=tmp_path)
    wanted = then - then * 3 // 4
    assert resumed.code == 0, resumed.err
    ours, theirs = resumed.checkpoint()["average"], whole.checkpoint()["average"]
    assert int(ours["n_averaged"]) == int(theirs["n_averaged"]) == wanted
    assert all(
        torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(value))
        for name, value in theirs.items()
    )
    later = [line for line in whole.eval_lines() if line["epoch"] >= first]
    assert [line for line in resumed.eval_lines() if line["epoch"] >= first] == later
    assert len({line["loss"] for line in later}) == len(later), "no evaluation repeats another"


def test_swa_refuses_epochs_whose_average_is_lost(tmp_path):
    argv = (*ODD, "--model", "conv", "--average", "swa", "--epochs", "12")
    result = train("single", 1, *argv, folder=tmp_path)
    assert int(result.checkpoint()["average"]["n_averaged"]) == 3
    refused = train("single", 1, *argv, "--epochs", "14", "--resume", "auto", folder=tmp_path)
    assert refused.code == 2
    assert "--epochs 14: --average swa would begin in epoch 11, but" in refused.err
    assert "holds the average of 3 of 12 epochs; use --epochs 12, or at least 16" in refused.err
    ended = train("single", 1, *argv, "--epochs", "4", folder=tmp_path / "four").checkpoint()
    args = make_args("single", *argv, "--epochs", "4")
    machinery.files.check_average(args, ended, tmp_path / "last.pt")
    with pytest.raises(
        common.UsageError, match="use --epochs 4, or at least 6"
    ):  # no evaluation of such an average would come
        machinery.files.check_average(
            args, {**ended, "average": {"n_averaged": 0}}, tmp_path / "last.pt"
        )
    for first, then, enough in (
        (5, 6, 7),
        (8, 10, 11),
    ):  # the average of two epochs is there, and not that of the last alone
        found = {
            "epoch": first,
            "step": 0,
            "samples": 203,
            "average": {"n_averaged": 2},
            "config": {"epochs": first},
        }
        with pytest.raises(common.UsageError, match=f"use --epochs {first}, or at least {enough}"):
            machinery.files.check_average(
                make_args("single", *argv, "--epochs", str(then)), found, tmp_path / "last.pt"
            )
        machinery.files.check_average(
            make_args("single", *argv, "--epochs", str(enough)), found, tmp_path / "last.pt"
        )
    for enough in ("13", "16"):
        args = make_args("single", *argv, "--epochs", enough)
        machinery.files.check_average(args, result.checkpoint(), result.folder / "last.pt")
    with pytest.raises(common.UsageError, match="at least 16"):
        machinery.files.check_average(
            make_args("single", *argv, "--epochs", "15", "--batch-size", "30"),
            {**result.checkpoint(), "step": 3},
            result.folder / "last.pt",
        )


# ------------------------------------------------------------------------------------------------------- wrapped data sets


def fetched(dataset, epoch, indices, seed=0):
    args = Namespace(seed=seed, skip_corrupt=False)
    return keyed(dataset, args).__getitems__((epoch, indices))[0]


@pytest.mark.parametrize("kind", ["subset", "random_split", "concat", "own"])
@pytest.mark.parametrize("files", [False, True])
def test_pitfall_48_wrapped_data_set_is_augmented_anew_in_every_epoch(kind, files, tmp_path):
    import odd

    if files:
        from torchvision.io import write_jpeg

        images = torch.randint(
            0, 256, (40, 3, 80, 80), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        )
        for i, image in enumerate(images):
            write_jpeg(image, str(tmp_path / f"{i}.jpg"))
        plain = task.ImageFiles(
            [(str(tmp_path / f"{i}.jpg"), 0) for i in range(40)], 64, training=True, seed=0
        )
    else:
        images = torch.randint(
            0, 256, (40, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        )
        plain = task.ImagesInMemory(images, torch.arange(40), shift=1, flip=True)
    wrapped = odd.wrap(odd.wrap(plain, kind), kind)
    indices = list(range(40))
    first, second, again = (fetched(wrapped, epoch, indices) for epoch in (0, 1, 0))
    assert again.equal(first)
    assert (first != second).flatten(1).any(1).double().mean() > 0.7
    if kind != "random_split":  # which has its own order
        assert first.equal(fetched(plain, 0, indices)) and second.equal(fetched(plain, 1, indices))


@pytest.mark.parametrize("kind", ["subset", "own"])
def test_wrapped_data_set_trains_like_the_plain_one(kind, tmp_path):
    plain = undisturbed("single", 1, *ODD, "--model", "conv")
    wrapped = train(
        "ddp", 2, *ODD, "--model", f"conv+wrapped:{kind}", "--workers", "1", folder=tmp_path
    )
    assert wrapped.code == 0, wrapped.err
    losses = [line["loss"] for line in plain.train_lines()]
    assert [line["loss"] for line in wrapped.train_lines()] == pytest.approx(losses, rel=1e-10)


class Shuffled(torch.utils.data.Dataset):
    """Draws an order of its own for each epoch."""

    def __init__(self):
        self.told = []

    def __len__(self):
        return 12

    def set_epoch(self, epoch):
        self.order = np.random.permutation(12)
        self.told.append(epoch)

    def __getitem__(self, index):
        return torch.tensor(int(self.order[index])), torch.tensor(0)


def test_set_epoch_is_called_once_an_epoch_and_seeded():
    drawn = []
    for seed in (0, 0, 1):
        inner = Shuffled()
        outer = torch.utils.data.Subset(inner, range(12))
        for epoch in (0, 1):
            batches = [
                fetched(outer, epoch, list(range(start, start + 4)), seed).tolist()
                for start in (0, 4, 8)
            ]
            drawn.append([index for batch in batches for index in batch])
            assert sorted(drawn[-1]) == list(range(12))
        assert inner.told == [0, 1]
    assert drawn[:2] == drawn[2:4] and len({tuple(order) for order in drawn}) == 4


def test_wrapper_that_passes_names_on_is_asked_itself():
    class Passing(torch.utils.data.Dataset):
        def __init__(self, inner):
            self.inner = inner

        def __len__(self):
            return 3

        def __getitem__(self, index):
            return self.inner[index + 10]

        def __getattr__(self, name):
            return getattr(self.__dict__["inner"], name)

    images = torch.randint(0, 256, (20, 1, 8, 8), dtype=torch.uint8)
    plain = task.ImagesInMemory(images, torch.arange(20))
    assert keyed(Passing(plain), Namespace(seed=0, skip_corrupt=False)).__getitems__((0, [0, 1]))[
        1
    ].tolist() == [10, 11]


class Circle(torch.utils.data.Dataset):
    """Holds itself. A walk that goes round and round in it is ended here."""

    asked = itertools.count()

    def __init__(self):
        self.me, self.empty, self.text, self.rows = self, [], "abc", [[1, 2], [3]]

    def __getattribute__(self, name):
        if name == "__dict__" and next(Circle.asked) > 20:
            raise AssertionError("the walk does not end")
        return super().__getattribute__(name)


def test_data_sets_with_epochs_finds_each_once_and_ends():
    inner = task.ImagesInMemory(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.arange(2))
    outer = Circle()
    outer.both = [None, ("named", inner), inner]
    outer.kind, outer.many = type(inner), [inner] * 1000
    vars(outer).update({f"setting{i}": i for i in range(200)})
    Circle.asked = itertools.count()
    assert sampling.datasets_with_epochs(outer) == [inner]
    assert next(Circle.asked) > 1, "the walk was in the circle"
    assert sampling.datasets_with_epochs(inner) == [inner]
    assert sampling.datasets_with_epochs([1, 2, 3]) == []


# ------------------------------------------------------------------------------------------------------------- evaluation

NOISE = (*ODD, "--model", "conv+noise")


@pytest.mark.parametrize(
    ("mode", "n"), [("dp", 2), ("dp", 3), ("ddp", 1), ("ddp", 2), ("ddp", 4), ("spawn", 3)]
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("ddp", 2)])
def test_interrupted_evaluation_is_made_again_and_the_same(mode, n, number, tmp_path, monkeypatch):
    reference = undisturbed(mode, n, *NOISE)
    monkeypatch.setenv("STOP_IN_EVALUATION", f"{int(number)}:{tmp_path / 'seen'}")
    first = train(mode, n, *NOISE, folder=tmp_path, patch=set_environment_of(monkeypatch))
    assert first.code == 143 if number == signal.SIGTERM else first.code, first.err
    saved = first.checkpoint()
    expected = (
        (1, 0) if number == signal.SIGTERM else (0, 6)
    )  # a signal waits for the end of the evaluation
    assert (saved["epoch"], saved["step"]) == expected
    resumed = train(
        mode, n, *NOISE, "--resume", "auto", folder=tmp_path, patch=set_environment_of(monkeypatch)
    )
    assert resumed.code == 0, resumed.err
    assert without_speed(resumed.lines) == without_speed(reference.lines)
    assert resumed.checkpoint("best.pt")["best"] == reference.checkpoint("best.pt")["best"]


def look_before_the_evaluation(rank):
    """Print the position of last.pt whenever an evaluation begins."""
    seed_evaluation = sampling.seed_evaluation

    def watched(seed, i):
        if i == rank == 0:
            saved = torch.load(f"{os.environ['OUTPUT']}/last.pt")
            print("saved:", saved["epoch"], saved["step"], saved["global_step"], flush=True)
        seed_evaluation(seed, i)

    for module in list(sys.modules.values()):  # the scripts have a name of their own for it
        if vars(module).get("seed_evaluation") is seed_evaluation:
            module.seed_evaluation = watched


@pytest.mark.parametrize(("mode", "n"), MODES)
def test_run_is_saved_before_each_evaluation(mode, n, tmp_path):
    from pitfalls import Patches, set_environment

    output = functools.partial(set_environment, {"OUTPUT": str(tmp_path / "run")})
    result = train(
        mode,
        n,
        *ODD,
        "--model",
        "conv",
        folder=tmp_path,
        patch=Patches(output, look_before_the_evaluation),
    )
    assert re.findall("saved: .*", result.out) == [
        "saved: 0 6 6",
        "saved: 1 6 12",
        "saved: 2 6 18",
    ], result.err


@pytest.mark.parametrize(("mode", "n"), MODES)
def test_evaluation_repeats_what_it_draws(mode, n, tmp_path):
    """At a learning rate of 0 the evaluations of two epochs differ by what they draw alone."""
    result = train(mode, n, *NOISE, "--lr", "0", "--epochs", "2", folder=tmp_path)
    first, second = result.eval_lines()
    assert first["loss"] == second["loss"], result.err


def set_environment_of(monkeypatch):
    from pitfalls import set_environment

    return functools.partial(
        set_environment, {"STOP_IN_EVALUATION": os.environ["STOP_IN_EVALUATION"]}
    )


def test_signal_in_the_last_evaluation_lets_the_run_end_well(tmp_path, monkeypatch):
    monkeypatch.setenv("STOP_IN_EVALUATION", f"15:{tmp_path / 'seen'}")
    result = train(
        "single", 1, *NOISE, "--epochs", "1", folder=tmp_path, patch=set_environment_of(monkeypatch)
    )
    assert result.code == 0 and result.checkpoint()["epoch"] == 1 and (tmp_path / "seen").exists()


def test_evaluation_batches_are_the_same_at_every_world_size():
    for length, batch_size in itertools.product((1, 7, 8, 9, 57, 1000, 5000), (1, 3, 64, 500)):
        whole = [indices for _, indices in sampling.ShardSampler(length, batch_size)]
        assert max(map(len, whole)) <= min(batch_size, math.ceil(length / 8))
        for world_size in range(1, 6):
            shards = [
                [i for _, i in sampling.ShardSampler(length, batch_size, r, world_size)]
                for r in range(world_size)
            ]
            joined = [shards[b % world_size][b // world_size] for b in range(len(whole))]
            assert joined == whole and sum(map(len, shards)) == len(whole)


def test_evaluation_batch_is_a_micro_batch_of_at_most_128_unless_it_is_said():
    for argv, size in (
        (["--batch-size", "60"], 60),
        (["--batch-size", "60", "--accum-steps", "4"], 15),
        (["--batch-size", "512"], 128),
        (["--batch-size", "60", "--eval-batch-size", "300"], 300),
    ):
        assert make_args("single", *argv).eval_batch_size == size


def test_seeds_of_an_evaluation_are_no_seeds_of_training():
    def drawn():
        return torch.rand(()).item(), random.random(), np.random.rand()

    seeds = []
    for begin in (
        *(functools.partial(sampling.seed_evaluation, 3, i) for i in (0, 1, 2)),
        *(functools.partial(sampling.seed_rng, 3, step, i) for step in (0, 1) for i in (0, 1)),
        functools.partial(sampling.seed_evaluation, 4, 0),
    ):
        begin()
        seeds.append(drawn())
        begin()
        assert drawn() == seeds[-1]
    for values in zip(*seeds):
        assert len(set(values)) == len(seeds)


# ------------------------------------------------------------------------------- what an evaluation and a resume leave behind


def test_eval_only_does_not_touch_the_log_of_a_run(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    argv = (*ODD, "--model", "conv", "--keep-every", "1", "--tensorboard")
    result = train("single", 1, *argv, folder=tmp_path)
    before = (result.folder / "metrics.jsonl").read_bytes()
    older = result.folder / "epoch-0001.pt"
    again = train("single", 1, *argv, "--eval-only", "--resume", older, folder=tmp_path)
    assert again.code == 0, again.err
    assert (result.folder / "metrics.jsonl").read_bytes() == before
    loss = result.eval_lines()[0]["loss"]
    assert f"epoch 1/3  eval  loss {loss:.6f}" in again.out
    events = EventAccumulator(str(result.folder))
    events.Reload()
    assert [event.step for event in events.Scalars("eval/loss")] == [6, 12, 18]
    elsewhere = train(
        "single", 1, *argv, "--eval-only", "--resume", older, folder=tmp_path / "elsewhere"
    )
    assert [line["loss"] for line in elsewhere.eval_lines()] == [loss]
    last = result.folder / "last.pt"
    second = train(
        "single", 1, *argv, "--eval-only", "--resume", last, folder=tmp_path / "elsewhere"
    )
    assert [line["epoch"] for line in second.eval_lines()] == [0, 2], (
        "a folder of evaluations gets each of them"
    )


def test_eval_only_leaves_an_empty_log_of_a_run_empty(tmp_path):
    argv = (*ODD, "--model", "conv", "--log-every", "100")
    from pitfalls import stop_after

    stopped = train("single", 1, *argv, folder=tmp_path, patch=functools.partial(stop_after, 4))
    assert stopped.code == 143 and not stopped.lines
    looked = train(
        "single", 1, *argv, "--eval-only", "--resume", stopped.folder / "last.pt", folder=tmp_path
    )
    assert looked.code == 0 and not looked.lines and "eval  loss" in looked.out


def test_resume_in_another_folder_takes_best_along(tmp_path):
    argv = (*ODD, "--model", "constant", "--epochs", "2")  # the first evaluation stays the best
    first = train("single", 1, *argv, folder=tmp_path / "a")
    assert first.checkpoint("best.pt")["epoch"] == 1
    again = train(
        "single",
        1,
        *argv,
        "--epochs",
        "4",
        "--resume",
        first.folder / "last.pt",
        folder=tmp_path / "b",
    )
    assert again.code == 0 and again.checkpoint()["best"] == 1.0
    assert again.checkpoint("best.pt")["epoch"] == 1 and again.checkpoint("best.pt")["best"] == 1.0


def test_best_pt_that_was_deleted_is_written_anew(tmp_path):
    argv = (*ODD, "--model", "constant", "--epochs", "2")
    first = train("single", 1, *argv, folder=tmp_path)
    (first.folder / "best.pt").unlink()
    again = train("single", 1, *argv, "--epochs", "3", "--resume", "auto", folder=tmp_path)
    assert again.code == 0 and again.checkpoint("best.pt")["epoch"] == 3, again.err


def test_resume_of_an_earlier_checkpoint_does_not_take_a_later_best(tmp_path):
    argv = (*ODD, "--model", "conv", "--keep-every", "1", "--epochs", "4")
    straight = train("single", 1, *argv, folder=tmp_path / "a")
    assert straight.checkpoint("best.pt")["epoch"] > 1
    early = straight.folder / "epoch-0001.pt"
    again = train("single", 1, *argv, "--epochs", "1", "--resume", early, folder=tmp_path / "b")
    assert again.code == 0 and not (again.folder / "best.pt").exists(), "nothing was evaluated"
    went_on = train("single", 1, *argv, "--resume", early, folder=tmp_path / "c")
    assert went_on.checkpoint("best.pt")["epoch"] == straight.checkpoint("best.pt")["epoch"]
    assert went_on.checkpoint()["best"] == straight.checkpoint()["best"]


def fail_at_last(rank):
    """The disk is full when last.pt is written to the new folder."""
    save = machinery.files.save_checkpoint

    def failing(saved, path):
        if path.name == "last.pt":
            raise OSError(f"{path} could not be written")
        save(saved, path)

    machinery.files.save_checkpoint = failing


def test_best_is_in_the_new_folder_before_last(tmp_path):
    """Or a kill in between would let the run go on without it."""
    argv = (*ODD, "--model", "constant", "--epochs", "1")
    first = train("single", 1, *argv, folder=tmp_path / "a")
    second = train(
        "single",
        1,
        *argv,
        "--epochs",
        "2",
        "--resume",
        first.folder / "last.pt",
        folder=tmp_path / "b",
        patch=fail_at_last,
    )
    assert second.code != 0 and [path.name for path in second.folder.glob("*.pt")] == ["best.pt"]


def ruin_one_save(rank):
    """Let the weights look ruined while the second evaluation is saved."""
    end_epoch = machinery.run.Run.end_epoch

    def ruined(run, metrics):
        if run.state.epoch != 1:
            return end_epoch(run, metrics)
        original = machinery.files.became_non_finite
        machinery.files.became_non_finite = lambda *_: True
        end_epoch(run, {"loss": 0.0, "top1": 2.0, "count": 57})
        machinery.files.became_non_finite = original

    machinery.run.Run.end_epoch = ruined


def test_refused_save_does_not_raise_the_best_score(tmp_path):
    result = train("single", 1, *ODD, "--model", "conv", folder=tmp_path, patch=ruin_one_save)
    assert result.code == 0, result.err
    best = result.checkpoint("best.pt")
    assert best["best"] == result.checkpoint()["best"] <= 1.0
    assert best["epoch"] == 3, "and the next good one is the best"


@pytest.mark.parametrize(
    ("average", "averaged"), [("none", False), ("ema", True), ("swa", True), ("swa early", False)]
)
def test_readme_loads_the_weights_that_were_evaluated(average, averaged, tmp_path):
    """With a stop before SWA begins its average holds what the run began with."""
    from pitfalls import stop_after

    kind, _, early = average.partition(" ")
    argv = (
        *ODD,
        "--model",
        "conv+masks",
        "--average",
        kind,
        "--epochs",
        "2" if average == "swa" else "3",
    )
    result = train(
        "single",
        1,
        *argv,
        folder=tmp_path,
        patch=functools.partial(stop_after, 8) if early else None,
    )
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    task_of_run = machinery.tasks.load_task(make_args("single", *argv))
    model = task_of_run.build_model(make_args("single", *argv)).double()
    names = {"torch": torch, "model": model}
    exec(textwrap.dedent(code).replace("runs/mine", str(result.folder)), names)
    assert names["averaged"] == averaged
    images, labels = task_of_run.build_datasets(make_args("single", *argv))[1].__getitems__(
        list(range(57))
    )
    hits = task_of_run.per_sample_metrics(model.eval()(images), labels)["top1"]
    assert hits.double().mean().item() == pytest.approx(
        result.checkpoint("best.pt")["best"], rel=1e-12
    )


# ------------------------------------------------------------------------------------------------------ refused by name


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("lazy", "build_model: lazy.weight, lazy.bias has no shape yet"),
        ("complex", "build_model: turn is complex"),
        ("complex_buffer", "build_model: turn is complex"),
        (
            "last_lacks",
            "per_sample_metrics must return the same names for every batch; only some batches have extra",
        ),
    ],
    ids=["lazy", "complex", "complex_buffer", "last_lacks"],
)
def test_task_that_cannot_be_right_is_refused_before_the_run(model, message):
    with pytest.raises(common.UsageError, match=re.escape(message)):
        check("single", 1, *ODD, "--model", model)


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("ddp", 2)])
def test_metric_of_some_batches_alone_ends_the_run(mode, n, tmp_path):
    result = train(mode, n, *ODD, "--model", "sometimes", folder=tmp_path)
    assert result.code == 1
    assert "the same names for every batch; only some batches have threes" in result.err


def check_names_of_ranks():
    meter = common.Meter(torch.device("cpu"))
    names = {0: ["a"], 1: ["a", "b"], 2: []}[dist.get_rank()]
    if names:
        meter.add(**dict.fromkeys(names, torch.ones(2)))
    try:
        meter.mean()
        assert dist.get_rank() != 1
    except ValueError as error:
        print(error)
        dist.all_reduce(torch.zeros(2, dtype=torch.float64))  # what the others wait for


def test_names_that_one_rank_alone_has_are_an_error_and_an_empty_rank_is_none():
    out = in_group(3, check_names_of_ranks)
    assert [("only some batches have b" in text) for text in out] == [False, True, False]


@pytest.mark.parametrize(
    ("dataset", "folder"), [("digits", []), ("cifar10", ["--data-dir", "data"])]
)
def test_image_size_without_effect_is_refused(dataset, folder):
    with pytest.raises(
        common.UsageError, match=f"--image-size 224 has no effect on --dataset {dataset}"
    ):
        task.build_datasets(
            make_args("single", "--image-size", "224", "--dataset", dataset, *folder)
        )
    assert task.build_datasets(make_args("single", "--image-size", "16", "--dataset", "synthetic"))[
        0
    ][0][0].shape == (3, 16, 16)


def test_power_sgd_with_a_changing_scale_is_refused():
    with pytest.raises(common.UsageError, match="which --amp fp16 changes"):
        make_args("spawn", "--grad-compress", "powersgd", "--amp", "fp16")
    for fine in (["--amp", "bf16"], []):
        assert make_args("spawn", "--grad-compress", "powersgd", *fine).grad_compress == "powersgd"


# ------------------------------------------------------------------------------------------------------------- gradients


def nan_in_step(step, rank):
    from pitfalls import wrap_in_task

    calls = itertools.count(-1)  # the first one is that of settle_buckets

    def per_sample_loss(original, outputs, targets):
        losses = original(outputs, targets)
        return (
            losses * float("nan")
            if losses.requires_grad and next(calls) == step and rank == 1
            else losses
        )

    wrap_in_task("per_sample_loss", per_sample_loss)


def test_power_sgd_forgets_a_nan(tmp_path):
    argv = (*ODD, "--model", "conv", "--epochs", "6", "--grad-compress", "powersgd")
    result = train("spawn", 2, *argv, folder=tmp_path, patch=functools.partial(nan_in_step, 14))
    assert result.code == 0, result.err
    assert [line["global_step"] for line in result.train_lines() if line["skipped"]] == [15]
    assert result.train_lines()[-1]["loss"] < 0.7 * result.train_lines()[13]["loss"], (
        "it goes on learning"
    )
    assert result.checkpoint()["global_step"] == 36


def test_replicas_take_empty_parts_of_a_sample():
    values = ({"x": torch.arange(7), "nothing": {}}, [(), torch.arange(7) * 2])

    def scatter(values, n):
        pieces, options = machinery.stand_ins.DataParallel(
            nn.Linear(1, 1), n, torch.device("cpu")
        ).scatter(values, {}, list(range(n)))
        assert len(options) == len(pieces) and not any(options)
        return pieces

    cut = scatter(values, 3)
    assert [piece[0]["x"].tolist() for piece in cut] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [piece[1][1].tolist() for piece in cut] == [[0, 2, 4], [6, 8, 10], [12]]
    assert all(piece[0]["nothing"] == {} and piece[1][0] == () for piece in cut)
    assert len(scatter(values, 4)) == 4 and len(scatter((torch.arange(5),), 4)) == 3


def test_cyclic_schedule_has_no_cliff():
    """The warm-up rises to where the triangle begins; neighbours in the curve differ by no more than a step of the steepest line."""
    args = make_args(
        "single",
        "--schedule",
        "cyclic",
        "--epochs",
        "8",
        "--step-epochs",
        "3",
        "--warmup-epochs",
        "2",
    )
    curve = [factor_of(args, step, 10) for step in range(80)]
    assert curve[19] == pytest.approx(0.1) and curve[20] == pytest.approx(0.1)
    assert (
        curve[35] == pytest.approx(1.0)
        and curve[50] == pytest.approx(0.1)
        and curve[65] == pytest.approx(1.0)
    )
    assert max(abs(a - b) for a, b in itertools.pairwise(curve)) <= 0.9 / 15 + 1e-12
    one = make_args("single", "--schedule", "cyclic", "--epochs", "8", "--warmup-epochs", "2")
    curve = [factor_of(one, step, 10) for step in range(80)]
    assert max(curve) == curve[50] == pytest.approx(1.0) and curve[79] == pytest.approx(
        0.1 + 0.9 / 30
    )


# ------------------------------------------------------------------------------------------------ called by another program


def surroundings():
    handlers = [
        signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    ]
    return {
        "handlers": handlers,
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "benchmark": torch.backends.cudnn.benchmark,
        "precision": torch.get_float32_matmul_precision(),
        "warnings": list(warnings.filters),
    }


def seed_generators(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draw():
    """Numbers of the three generators, in an order that also shows what each keeps for the next draw."""
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(()).item(),
        torch.randn(3).tolist(),
    ]


def call_main_again_and_again(folder):
    import train_single
    import train_spawn

    torch.set_num_threads(3)
    os.environ["RANK"] = "7"
    os.environ.pop("OMP_NUM_THREADS", None)
    os.environ["SLURM_CPUS_ON_NODE"] = "1"  # so a run takes another number of threads than 3
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("medium")
    argv = [*ODD, "--model", "conv", "--epochs", "1", "--deterministic"]
    ends, seen, seeds = [], [], itertools.count()
    original = machinery.run.Run.end_epoch

    def end_epoch(run, metrics):
        torch.set_float32_matmul_precision("highest")  # as on an accelerator
        seen.append(surroundings())
        original(run, metrics)

    machinery.run.Run.end_epoch = end_epoch

    def call(main, name, *more):
        """Call `main` between two draws; all is as it would be without the call."""
        seed_generators(seed := next(seeds))
        wanted = draw(), draw()
        seed_generators(seed)
        assert draw() == wanted[0]
        before = surroundings()
        try:
            ends.append(main([*argv, *more, "--output-dir", f"{folder}/{name}"]))
        except common.UsageError:
            ends.append(2)
        after = surroundings()
        assert after == before, {
            part: (after[part], before[part]) for part in before if after[part] != before[part]
        }
        assert draw() == wanted[1], f"the generators do not go on after {name}"

    def call_all(name):
        call(train_single.main, f"single{name}")
        call(train_spawn.main, f"spawn{name}", "--nproc", "2")
        call(train_single.main, f"wrong{name}", "--batch-size", "0")

    call_all("1")
    thread = threading.Thread(target=call_all, args=("2",))
    thread.start()
    thread.join()
    assert ends == [0, 0, 2] * 2, ends
    assert (
        len(
            {
                (folder / f"{mode}{i}" / "metrics.jsonl").read_text().count("\n")
                for mode in ("single", "spawn")
                for i in "12"
            }
        )
        == 1
    )
    during, now = seen[0], surroundings()  # if they were alike, this would prove nothing
    assert not [part for part in now if part != "mask" and during[part] == now[part]]


@pytest.mark.long
def test_main_can_be_called_from_a_notebook_or_a_thread_and_leaves_no_trace(tmp_path):
    ((code, _, err),) = run_processes(
        [functools.partial(call_main_again_and_again, tmp_path)], tmp_path
    )
    assert code == 0, err


def call_main_after_a_stop(folder):
    """A notebook keeps the last exception, and with it all that its frames hold."""
    import train_single

    argv = [*ODD, "--model", "conv", "--output-dir", f"{folder}/run"]
    from pitfalls import after_step

    after_step(3, lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        train_single.main(argv)
    except machinery.processes.Stopped as stop:
        kept = stop
    assert kept.code == 130
    assert train_single.main([*argv, "--resume", "auto"]) == 0


def test_main_can_go_on_where_a_stop_ended_it(tmp_path):
    ((code, _, err),) = run_processes(
        [functools.partial(call_main_after_a_stop, tmp_path)], tmp_path
    )
    assert code == 0, err


def call_every_main(folder):
    """A bad command line is enough: what parsing has changed must be as before."""
    import importlib

    for mode in ("single", "dp", "ddp", "spawn"):
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", GLOO_SOCKET_IFNAME="lo")
        script = importlib.import_module(f"train_{mode}")
        before = dict(os.environ)
        script.check_run = lambda args: os.environ.update(MADE_BY_THE_RUN="1")
        script.set_up_device = script.workers_meet_at = lambda *_: (
            print(os.environ["MADE_BY_THE_RUN"]) or 1 / 0
        )
        try:
            script.main([])
        except ZeroDivisionError:
            assert dict(os.environ) == before, mode
        else:
            raise AssertionError(mode)


def test_every_main_leaves_no_trace(tmp_path):
    ((code, out, err),) = run_processes([functools.partial(call_every_main, tmp_path)], tmp_path)
    assert code == 0 and out.split() == ["1"] * 4, err


def test_importing_a_script_changes_no_signal_handler():
    import subprocess
    import sys

    code = "import signal, train_spawn, train_ddp, train_single, train_dp; "
    code += "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler; assert signal.getsignal(15) == signal.SIG_DFL"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


# --------------------------------------------------------------------------------------------------------------- early ends


@pytest.mark.parametrize(("mode", "n"), [("ddp", 3), ("spawn", 4)])
def test_early_end_of_all_ranks_has_its_exit_code(mode, n, tmp_path):
    """They know of it after they met: the folder belongs to a run that is still there."""
    import fcntl

    folder = tmp_path / "run"
    folder.mkdir()
    with open(folder / "metrics.jsonl", "a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        result = train(mode, n, *ODD, "--model", "conv", folder=tmp_path)
    assert result.code == 2 and "another run is writing there" in result.err, result.err
    assert "terminate called" not in result.err
