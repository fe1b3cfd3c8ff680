"""Averages of the weights, EMA and SWA, with the statistics and buffers that belong to them."""

import functools
import math
import re

import pytest
import torch
from harness import (
    average_of,
    compare,
    loader_of,
    make_args,
    sampler_of,
    single_run,
    train,
    undisturbed,
)
from patches import BASE, stop_after
from runs import make_run
from short_runs import ODD, ODD_MODES, SWA
from torch import nn
from torch.optim.swa_utils import update_bn

import common
import machinery.files
import machinery.processes
import machinery.run
import machinery.stand_ins
import machinery.tasks


def test_ema_and_swa_are_what_they_say(tmp_path, handlers):
    net = nn.BatchNorm1d(3)
    run = make_run(tmp_path / "ema", "--average", "ema", net=net)
    ema, swa = run.state.average, average_of(make_args("single", "--average", "swa"), net)
    assert run.eval_model(None) is net, "before the first update there is no average"
    values = torch.arange(3.0)
    for step in range(3):
        net.weight.data.copy_(values + step)
        net.running_mean.copy_(values + step)
        ema.update_parameters(net)
        swa.update_parameters(net)
    assert run.eval_model(None) is ema.module
    expected = values + 0.99 * 0.01 * 1 + 0.01 * 2  # the first is taken whole
    assert torch.allclose(ema.module.weight, expected) and torch.allclose(
        ema.module.running_mean, expected
    )
    assert torch.allclose(swa.module.weight, values + 1)
    result = train("single", 1, *BASE, "--epochs", "5", "--average", "swa", folder=tmp_path)
    assert result.checkpoint()["average"]["n_averaged"] == 2, "the last quarter: epochs 4 and 5"


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


def same(one, other):
    """Bitwise, and a NaN is a NaN."""
    return torch.equal(one.nan_to_num(nan=7.5), other.nan_to_num(nan=7.5)) and torch.equal(
        one.isnan(), other.isnan()
    )


@pytest.mark.parametrize(("mode", "n"), ODD_MODES)
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


# --------------------------------------------------------------------------------- SWA's statistics


def test_swa_statistics_are_those_that_torch_estimates(tmp_path):
    result = single_run(*SWA)
    average = {
        name: value
        for name, value in result.checkpoint()["average"].items()
        if name != "n_averaged"
    }
    args = make_args("single", *SWA)
    own = machinery.tasks.load_task(args)
    net = machinery.tasks.build_net(args, own)
    net.load_state_dict(average)
    train_set, _ = own.build_datasets(args)
    sampler = sampler_of(args, train_set)
    sampler.set_position(3, 0)
    update_bn(loader_of(args, train_set, sampler, torch.device("cpu")), net)
    for name, value in net.state_dict().items():
        assert torch.allclose(value, average[name], rtol=1e-12, atol=1e-14), name
    trained = result.checkpoint()["model"]
    means = [name for name in trained if name.endswith("running_mean")]
    assert means and not any(
        torch.allclose(average[name], trained[name], rtol=1e-3) for name in means
    )
    (norm,) = [module for module in net.modules() if isinstance(module, nn.BatchNorm1d)]
    assert norm.momentum == 0.1


@pytest.mark.parametrize(
    ("mode", "n", "others"), [("dp", 2, ("ddp", 2)), ("ddp", 3, None), ("spawn", 2, None)]
)
def test_swa_statistics_are_the_same_in_every_mode(mode, n, others, tmp_path):
    argv = SWA if others else (*SWA, "--sync-bn")
    reference = train(*others, *argv, folder=tmp_path / "other") if others else single_run(*argv)
    result = train(mode, n, *argv, folder=tmp_path)
    assert result.code == reference.code == 0, result.err + reference.err
    average = reference.checkpoint()["average"]
    for name, value in result.checkpoint()["average"].items():
        assert torch.allclose(value, average[name], rtol=1e-10, atol=1e-12), name
    assert max(compare(result, reference).values()) < 1e-10


POISONED = """import itertools
import torch
from torch import nn
from small import build_datasets, per_sample_loss, per_sample_metrics

calls = itertools.count()

class Pixels(nn.Module):
    def forward(self, images):
        estimating = self.training and not torch.is_grad_enabled()
        return images.flatten(1).double() / (0 if estimating and next(calls) == 3 else 90)

def build_model(args):
    return nn.Sequential(Pixels(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
"""


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("ddp", 2)])
def test_batch_that_is_not_finite_is_left_out_of_swa_statistics(mode, n, tmp_path):
    (tmp_path / "poisoned.py").write_text(POISONED)
    argv = (*SWA, "--task", str(tmp_path / "poisoned.py"))
    result = train(mode, n, *argv, folder=tmp_path / "run")
    assert result.code == 0 and "not saved" not in result.err, result.err
    average, steps = result.checkpoint()["average"], result.checkpoint()["global_step"] // 4
    assert average["2.num_batches_tracked"] == steps - 1
    assert all(value.isfinite().all() for value in average.values())


DROPOUT_FIRST = """import torch
from torch import nn
from small import build_datasets, per_sample_loss, per_sample_metrics

class Pixels(nn.Module):
    def forward(self, images):
        return images.flatten(1).double() / 90

def build_model(args):
    return nn.Sequential(Pixels(), nn.Dropout(0.5), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
"""


@pytest.mark.parametrize(
    ("mode", "n", "workers"), [("single", 1, 1), ("dp", 2, 0), ("spawn", 2, 1)]
)
def test_swa_statistics_behind_dropout_do_not_depend_on_who_loads(mode, n, workers, tmp_path):
    """Loading a sample draws from the same generator as dropout does, unless a worker loads it."""
    (tmp_path / "dropout.py").write_text(DROPOUT_FIRST)
    argv = (*SWA, "--task", tmp_path / "dropout.py", "--epochs", "1")
    result = train(mode, n, *argv, "--workers", str(workers), folder=tmp_path / "one")
    others = train(
        "ddp" if n > 1 else "single", n, *argv, "--workers", "0", folder=tmp_path / "other"
    )
    assert result.code == others.code == 0, result.err + others.err
    average = others.checkpoint()["average"]
    for name, value in result.checkpoint()["average"].items():
        assert torch.allclose(
            torch.as_tensor(value), torch.as_tensor(average[name]), rtol=1e-10, atol=1e-12
        ), name


def test_swa_leaves_frozen_batchnorm_alone(tmp_path):
    result = train("single", 1, *SWA, "--freeze", "between.*", folder=tmp_path)
    assert result.checkpoint()["average"]["between.running_mean"].abs().sum() == 0


# ------------------------------------------------------------------------ which epochs SWA averages


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        ("--epochs 8", [7, 8]),
        ("--epochs 9", [7, 8, 9]),
        ("--epochs 8 --swa-start 0", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("--epochs 100 --swa-start 0.29", [*range(30, 101)]),
        # Warm-up 2, then cycles of 3 epochs: the rate is lowest after the epochs 5, 8, 11 and 14.
        ("--epochs 15 --swa-start 0.4 --schedule cyclic --step-epochs 3", [8, 11, 14]),
        ("--epochs 14 --swa-start 0 --schedule sawtooth --step-epochs 3", [5, 8, 11, 14]),
        ("--epochs 15 --swa-start 0 --schedule cyclic", [15]),
        ("--epochs 9 --swa-start 0 --schedule step --step-epochs 3 6", [*range(1, 10)]),
    ],
)  # fmt: skip
def test_epochs_that_swa_averages(argv, wanted):
    args = make_args("single", "--average", "swa", *argv.split())
    average = average_of(args, nn.Linear(1, 1))
    assert average.epochs == wanted
    for epoch in range(args.epochs):
        for _ in range(2):  # a resumed run may come by a second time
            average.after_epoch(nn.Linear(1, 1), epoch)
        assert average.n_averaged == sum(done <= epoch + 1 for done in wanted), epoch


def test_swa_averages_at_the_low_ends_of_cycles(tmp_path):
    argv = (*ODD, "--model", "conv", "--schedule", "cyclic", "--step-epochs", "2", "--epochs", "5")
    argv = (*argv, "--warmup-epochs", "1", "--keep-every", "1")
    argv = (*argv, "--average", "swa", "--swa-start", "0.2")
    result = train("single", 1, *argv, folder=tmp_path)
    assert result.code == 0, result.err
    third, fifth = (result.checkpoint(f"epoch-000{epoch}.pt")["model"] for epoch in (3, 5))
    average = result.checkpoint()["average"]
    assert average["n_averaged"] == 2
    for name, value in fifth.items():
        assert torch.allclose(average[name], (third[name] + value) / 2, rtol=1e-12, atol=1e-14)
        assert not torch.allclose(average[name], value, rtol=1e-6)
    # At another world size, after a stop within the third epoch, and with more epochs at the end
    steps = result.train_lines()[-1]["global_step"] // 5
    short = tmp_path / "short"
    stopped = train(
        "ddp", 3, *argv, folder=short, patch=functools.partial(stop_after, 2 * steps + 2)
    )
    assert stopped.code == 143, stopped.err
    resumed = train("spawn", 2, *argv, "--resume", "auto", folder=short)
    assert resumed.code == 0, resumed.err
    found = resumed.checkpoint()["average"]
    assert found["n_averaged"] == 2
    for name in fifth:
        assert torch.allclose(found[name], average[name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--swa-start 0.5", "--swa-start 0.5 has no effect on --average none; use swa"),
        ("--average swa --swa-start 1", "--swa-start 1: --average swa would average none of 30"),
        ("--average swa --schedule cyclic --step-epochs 20", "use a lower --swa-start, or cycles"),
        (
            "--average swa --epochs 9 --swa-start 0 --schedule cyclic --step-epochs 1 --warmup-epochs 3.5",
            "would average none of 9 epochs; use a lower --swa-start, or cycles of the rate that end",
        ),
    ],
)
def test_swa_that_would_average_nothing_is_refused(argv, message):
    with pytest.raises(common.UsageError, match=re.escape(message)):
        make_args("single", *argv.split())


# ----------------------------------------------------------------- SWA and another number of epochs


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


def test_network_that_grows_a_buffer_is_not_averaged():
    """Its tensors would be taken for one another."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = common.WeightAverage("ema", net, [])
    average.after_step(net)
    net[0].register_buffer("late", torch.full((2,), 7.0))
    with pytest.raises(ValueError, match="zip"):
        average.after_step(net)
