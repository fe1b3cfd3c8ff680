"""Ranks whose weights drift apart are told so, whichever parameter it is, on whichever rank."""

import functools
import json

import pytest
import torch
import torch.distributed as dist
from harness import in_group, train
from pitfalls import BASE, printed
from torch import nn

import common
import machinery.run

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias", "4"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def make_net(dtype):
    """Three layers, one of them frozen, and a parameter without dimensions."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)]
    net = nn.Sequential(*layers).to(dtype)
    net.register_parameter("4", nn.Parameter(torch.ones((), dtype=dtype)))
    net[0].requires_grad_(False)
    return net


def complaint(net):
    try:
        common.sync_buffers(net)
    except RuntimeError as error:
        return str(error)
    return ""


def next_number(value):
    """The neighbour of a number, one bit away."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    return (value.view(bits) + 1).view(value.dtype)


def check_drift():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for number, name in enumerate(NAMES):
        net = make_net(dtype := DTYPES[number % len(DTYPES)])
        assert complaint(net) == "", "all alike"
        values = dict(net.named_parameters())[name].data.view(-1)
        place = -1 - number % len(values)
        if rank == number % world_size:
            values[place] = next_number(values[place])
        said = complaint(net)
        assert said.startswith(f"parameters differ between ranks: {name}; "), (dtype, name, said)


def check_many_drifts():
    """Only some are named; each rank says the same."""
    net = make_net(torch.float64)
    if dist.get_rank() == 1:
        for parameter in net.parameters():
            parameter.data += 1e-9
    said = complaint(net)
    five = ", ".join(["4", *NAMES[:4]])
    assert said.startswith(f"parameters differ between ranks: {five}; "), said
    net = make_net(torch.float64)
    if dist.get_rank() == 2:
        net[1].bias.data[0] += 1e-9
        net[3].bias.data[1] -= 1e-9
    assert complaint(net).startswith("parameters differ between ranks: 1.bias, 3.bias; ")


def check_signs():
    """A difference may be of either sign, or a NaN."""
    for value in (
        -1e300,
        1e300,
        float("nan"),
        float("inf"),
        -0.0,
    ):  # the last has the smallest bits
        for drifting in range(dist.get_world_size()):
            net = make_net(torch.float64)
            net[3].bias.data.zero_()
            if dist.get_rank() == drifting:
                net[3].bias.data[1] = value
            assert "3.bias" in complaint(net), (value, drifting)
    net = make_net(torch.float64)
    net[3].bias.data.fill_(float("nan"))
    assert complaint(net) == "", "the same NaN everywhere is no drift"


def check_buffers():
    """Of every kind: each rank gets those of rank 0."""
    rank = dist.get_rank()
    net = make_net(torch.float32)
    net.register_buffer("mask", torch.tensor([rank == 0, rank == 1]), persistent=False)
    net[1].running_mean.fill_(rank + 1.5)
    net[1].running_var.fill_(rank + 2.5)
    net[1].num_batches_tracked.fill_(rank + 7)
    assert complaint(net) == ""
    assert net[1].running_mean.tolist() == [1.5] * 4 and net[1].running_var.tolist() == [2.5] * 4
    assert net[1].num_batches_tracked == 7 and net.mask.tolist() == [True, False]


def check_all():
    check_drift()
    check_many_drifts()
    check_signs()
    check_buffers()


def test_drift_of_any_parameter_on_any_rank_is_named():
    in_group(3, check_all)


def drift_in_epoch_2(name, rank):
    """One number of rank 1 changes by about a billionth after the eighth of six steps an epoch."""
    end_step = machinery.run.Run.end_step

    def drifting(run, grad_norm):
        end_step(run, grad_norm)
        if run.state.global_step == 8 and rank == 1:
            dict(run.state.net.named_parameters())[name].data.view(-1)[-1] += 1e-9
        if rank == 1:
            print("step", json.dumps(run.state.global_step))

    machinery.run.Run.end_step = drifting


@pytest.mark.parametrize("mode", ["ddp", "spawn"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("last.bias", ()),
        ("first.bias", ("--freeze", "first.*")),
        ("between.weight", ("--average", "ema")),
    ],
    ids=["last", "frozen", "average"],
)
def test_drift_ends_the_epoch_in_which_it_happened(mode, name, options, tmp_path):
    argv = (*BASE, "--model", "batchnorm", *options)
    result = train(mode, 2, *argv, folder=tmp_path, patch=functools.partial(drift_in_epoch_2, name))
    assert result.code == 1 and f"parameters differ between ranks: {name}" in result.err, result.err
    assert printed(result.out, "step")[-1] == 12
    assert result.checkpoint()["epoch"] == 1 or result.checkpoint()["step"] == 6
    assert len(result.eval_lines()) == 1, "what differs is not evaluated"
