"""The moving average of the weights, with the statistics and buffers that belong to it."""

import math

import pytest
import torch
from harness import average_of, make_args, train
from runs import make_run
from short_runs import ODD
from torch import nn


def test_ema_is_what_it_says(tmp_path, handlers):
    net = nn.BatchNorm1d(3)
    run = make_run(tmp_path, "--average", "ema", net=net)
    ema = run.state.average
    assert run.eval_model() is net, "before the first update there is no average"
    values = torch.arange(3.0)
    for step in range(3):
        net.weight.data.copy_(values + step)
        net.running_mean.copy_(values + step)
        ema.after_step(net)
    assert run.eval_model() is ema.module
    # The first is taken whole. The decay begins at 2 / 11 and 3 / 12, and ends at --ema-decay.
    expected = values + 3 / 12 * (1 - 2 / 11) * 1 + (1 - 3 / 12) * 2
    assert torch.allclose(ema.module.weight, expected)
    assert torch.allclose(ema.module.running_mean, expected)


def test_ema_averages_parameters_and_statistics_and_copies_the_rest():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
    net.register_buffer("large", torch.tensor([2**53 + 1, 5]))
    net.register_buffer("plain", torch.tensor([1.0, -torch.inf]).double())
    average = average_of(make_args("single", *"--average ema --ema-decay 0.4".split()), net)
    expected = None
    for step in range(9):
        for tensor in (*net.parameters(), net[1].running_mean, net[1].running_var):
            tensor.data = torch.rand_like(tensor)
        net.large += step
        net.plain[0] = step
        average.after_step(net)
        tensors = (*net.parameters(), net[1].running_mean, net[1].running_var)
        now = [tensor.detach().clone() for tensor in tensors]
        before = expected or now
        share = 1 - min(0.4, (1 + step) / (10 + step))
        expected = [old + share * (new - old) for old, new in zip(before, now)]
    module = average.module
    found = (*module.parameters(), module[1].running_mean, module[1].running_var)
    for value, wanted in zip(found, expected):
        assert torch.allclose(value, wanted, rtol=1e-14, atol=0)
        assert not torch.allclose(value, wanted * 1.001, rtol=1e-14, atol=0)
    assert module.large.equal(net.large) and module.plain.equal(net.plain)
    assert module[1].num_batches_tracked.equal(net[1].num_batches_tracked)


def same(one, other):
    """Bitwise, and a NaN is a NaN."""
    return torch.equal(one.nan_to_num(nan=7.5), other.nan_to_num(nan=7.5)) and torch.equal(
        one.isnan(), other.isnan()
    )


@pytest.mark.parametrize(
    ("mode", "n", "average"),
    [
        ("ddp", 2, "ema"),
        pytest.param("single", 1, "none", marks=pytest.mark.full),
    ],
)
def test_infinite_buffers_survive_training_averages_and_saves(mode, n, average, tmp_path):
    argv = (*ODD, "--model", "masks", "--epochs", "4", "--average", average)
    result = train(mode, n, *argv, folder=tmp_path)
    assert result.code == 0 and "not saved" not in result.err, result.err
    saved = result.checkpoint()
    for part in ("model", *(["average"] if average != "none" else [])):
        found = saved[part]
        assert same(found["mask"], torch.full((3, 3), -torch.inf).double().triu(1))
        assert same(found["unseen"], torch.tensor([torch.nan, torch.inf, 1.0]).double())
        assert found["steps"].item() == 2**24 + 1 + 2 * 24, "a sum in float32 would be rounded"
        assert found["flags"].tolist() == [True, False, True]
        assert "passing" not in found
    assert all(math.isfinite(line["loss"]) for line in result.lines)
    assert (result.folder / "best.pt").exists()
