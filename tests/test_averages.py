"""The moving average of the weights and of BatchNorm's statistics, and the network that an evaluation has it in."""

import math

import pytest
import torch
from harness import average_of, make_args, prove_run, single_run, train
from patches import BASE
from short_runs import ODD
from torch import nn


def test_ema_averages_parameters_and_statistics_and_leaves_the_rest():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
    net.register_buffer("large", torch.tensor([2**53 + 1, 5]))
    net.register_buffer("plain", torch.tensor([1.0, -torch.inf]).double())
    average = average_of(make_args("single", *"--average ema --ema-decay 0.4".split()), net)
    expected, start = None, net[0].weight.detach().clone()
    with average.swapped_in():
        assert net[0].weight.equal(start), "before the first step there is no average"
    for step in range(9):
        for tensor in (*net.parameters(), net[1].running_mean, net[1].running_var):
            tensor.data = torch.rand_like(tensor)
        net.large += step
        net.plain[0] = step
        average.after_step()
        tensors = (*net.parameters(), net[1].running_mean, net[1].running_var)
        now = [tensor.detach().clone() for tensor in tensors]
        before = expected or now
        share = 1 - min(0.4, (1 + step) / (10 + step))
        expected = [old + share * (new - old) for old, new in zip(before, now)]
    others = [tensor.clone() for tensor in (net.large, net.plain, net[1].num_batches_tracked)]
    with average.swapped_in():
        for value, wanted in zip(tensors, expected):
            assert torch.allclose(value, wanted, rtol=1e-14, atol=0)
            assert not torch.allclose(value, wanted * 1.001, rtol=1e-14, atol=0)
        assert all(map(torch.equal, (net.large, net.plain, net[1].num_batches_tracked), others))
    assert all(map(torch.equal, tensors, now))


def averaged(net):
    """Return the average after two steps, between which every weight grows by one."""
    average = average_of(make_args("single", "--average", "ema"), net)
    average.after_step()
    for parameter in net.parameters():
        parameter.data += 1
    average.after_step()
    return average


def test_hook_that_holds_a_module_evaluates_its_average():
    """A copy of the network would call the weights that are trained: a closure is not copied."""
    net = nn.Linear(2, 2)
    net.extra = nn.Linear(2, 2, bias=False)
    extra = net.extra
    net.register_forward_hook(lambda module, inputs, output: extra(inputs[0]))
    start, inputs = extra.weight.detach().clone(), torch.ones(1, 2)
    average = averaged(net)
    with average.swapped_in():
        assert torch.allclose(net(inputs), inputs @ (start + 1 - 2 / 11).T)
    assert torch.allclose(net(inputs), inputs @ (start + 1).T)


def test_error_in_an_evaluation_leaves_the_trained_weights():
    net = nn.Linear(2, 2)
    average = averaged(net)
    trained = [parameter.detach().clone() for parameter in net.parameters()]
    with pytest.raises(ZeroDivisionError), average.swapped_in():
        assert not net.weight.equal(trained[0])
        raise ZeroDivisionError
    assert all(map(torch.equal, net.parameters(), trained))


def test_shards_evaluate_the_average_of_a_network_with_batchnorm(tmp_path):
    """Parameters that were gathered before the swap, or in the evaluation, are not the average, or not trained on."""
    argv = (*BASE, "--model", "batchnorm", "--average", "ema", "--epochs", "2")
    prove_run(train("fsdp", 2, *argv, "--sync-bn", folder=tmp_path), single_run(*argv))


def same(one, other):
    """Bitwise, and a NaN is a NaN."""
    return torch.equal(one.nan_to_num(nan=7.5), other.nan_to_num(nan=7.5)) and torch.equal(
        one.isnan(), other.isnan()
    )


def test_infinite_buffers_survive_training_averages_and_saves(tmp_path):
    argv = (*ODD, "--model", "masks", "--epochs", "4", "--average", "ema")
    result = train("ddp", 2, *argv, folder=tmp_path)
    assert result.code == 0 and "not saved" not in result.err, result.err
    saved = result.checkpoint()
    for found in (saved["model"], saved["weights"]):
        assert same(found["mask"], torch.full((3, 3), -torch.inf).double().triu(1))
        assert same(found["unseen"], torch.tensor([torch.nan, torch.inf, 1.0]).double())
        assert found["steps"].item() == 2**24 + 1 + 2 * 24, "a sum in float32 would be rounded"
        assert found["flags"].tolist() == [True, False, True]
        assert "passing" not in found
    assert all(math.isfinite(line["loss"]) for line in result.lines)
    assert (result.folder / "best.pt").exists()
