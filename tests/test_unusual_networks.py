"""Networks that keep more than weights, or change them in a forward; what cannot work is refused by name."""

import copy
import functools
import random
import sys

import numpy as np
import pytest
import torch
from harness import (
    TASKS,
    check,
    compare,
    loader_of,
    make_args,
    sampler_of,
    single_run,
    train,
    undisturbed,
)
from patches import BASE, stop_after, without_speed
from runs import CPU

import common
import machinery.check
import machinery.usertask
import sampling

OWN = tuple(str(TASKS / "state.py") if part == BASE[1] else part for part in BASE)


@pytest.mark.full
def test_run_with_ranks_begins_as_one_without(tmp_path):
    """DDP's order of buckets needs a backward before the first step: it must leave no trace."""
    argv = (*OWN, "--model", "counts")
    deviations = compare(train("ddp", 1, *argv, folder=tmp_path), single_run(*argv))
    assert max(deviations.values()) <= 1e-12, deviations


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("single", "counts"),
        pytest.param("ddp", "replaced", marks=pytest.mark.full),
    ],
)
def test_resumed_run_is_the_uninterrupted_one(mode, kind, tmp_path):
    """Also what an optimizer keeps under a text, and what a module keeps beside tensors, come back."""
    argv = (*OWN, "--model", kind, "--average", "ema")
    whole = undisturbed(mode, 1, *argv)
    stop = functools.partial(stop_after, 9)
    assert train(mode, 1, *argv, folder=tmp_path, patch=stop).code == 143
    resumed = train(mode, 1, *argv, "--resume", "auto", folder=tmp_path)
    assert resumed.code == 0, resumed.err
    assert without_speed(resumed.lines) == without_speed(whole.lines)
    assert resumed.checkpoint()["optimizer"]["state"]["calls"] == 18


def test_tensor_that_a_replica_would_take_with_it_is_refused(tmp_path):
    """dp: what the forward puts in the place of a buffer is the replica's alone. What changes in place is the network's."""
    passing, cache, replaced = ((*OWN, "--model", k) for k in ("passing", "renewed", "replaced"))
    for right in (passing, cache):
        result = train("dp", 2, *right, folder=tmp_path / right[-1])
        assert result.code == 0, result.err
    refused = train("dp", 2, *replaced, folder=tmp_path / "refused")
    assert refused.code == 2 and "in the place of between.gain, and loses it" in refused.err, (
        refused.err
    )


@pytest.mark.full
def test_shards_of_parts_that_are_read_without_a_call(tmp_path):
    argv = (*OWN, "--model", "parameters")
    deviations = compare(train("fsdp", 3, *argv, folder=tmp_path), single_run(*argv))
    assert max(deviations.values()) <= 1e-10, deviations


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("ddp", "norm --sync-bn", "--sync-bn would drop the code of OwnNorm; leave it out"),
        ("single", "kept", "the forward of the model makes between.table; no new run"),
        ("single", "volume --channels-last", "--channels-last: RuntimeError: required rank 4"),
    ],
)
def test_network_that_cannot_work_is_refused(mode, options, message):
    with pytest.raises(common.UsageError, match=message):
        check(mode, 2, *OWN, "--model", *options.split())


CHANGES = """
import random
import numpy, torch
from torch import nn
from small import build_datasets, per_sample_loss, per_sample_metrics

forwards = []

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.sizes, self.by_size = 0, [], {}
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("started", torch.tensor(False))
        self.register_buffer("mean", torch.zeros(64))  # of all pixels so far: changes in place
        self.register_buffer("latest", torch.zeros(()))  # becomes another tensor
        self.norm, self.head = nn.BatchNorm1d(64, track_running_stats=True), nn.Linear(64, 10)

    def forward(self, images):
        pixels = images.flatten(1).to(self.scale.dtype)
        if not self.started:
            self.scale.data.fill_(1 / pixels.std())
            self.started.fill_(True)
            self.first = len(images)
        self.calls += 1
        self.sizes.append(len(images))
        self.by_size[len(images)] = self.calls
        self.mean.lerp_(pixels.mean(0), 0.1)
        self.latest = pixels.mean()
        self.norm.train()
        self.norm(pixels)
        random.random(), numpy.random.rand(), torch.rand(())
        forwards.append(self.calls)
        return self.head(pixels / 255)

def build_model(args):
    return Net()
"""


def all_of(net):
    """What a network keeps: tensors with their values, attributes, and the same objects."""
    tensors = {name: value.clone() for name, value in net.state_dict().items()}
    plain = [
        {name: value for name, value in vars(module).items() if not name.startswith("_")}
        for module in net.modules()
    ]
    return tensors, copy.deepcopy(plain), [id(value) for value in (net.sizes, *net.buffers())]


def test_check_leaves_network_and_generators_as_they_were(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TASKS))
    (tmp_path / "changes.py").write_text(CHANGES)
    argv = ("--task", str(tmp_path / "changes.py"), "--device", "cpu", "--workers", "0")
    args = make_args("single", *argv)
    task = machinery.usertask.Task(args)
    train_set, val_set = task.build_datasets()
    net = task.build_net()
    val_sampler = sampling.ShardSampler(len(val_set), args.eval_batch_size)
    samplers = ((train_set, sampler_of(args, train_set)), (val_set, val_sampler))
    loaders = [loader_of(args, *pair, CPU) for pair in samplers]
    net.train()
    before = all_of(net), torch.get_rng_state(), random.getstate(), np.random.get_state()
    machinery.check.check_run(task, net, CPU, *loaders)
    after = all_of(net), torch.get_rng_state(), random.getstate(), np.random.get_state()
    assert len(sys.modules["task_changes"].forwards) >= 3, "or this would prove nothing"
    (tensors, attributes, objects), *generators = after
    (tensors_before, *others_before), *generators_before = before
    assert tensors.keys() == tensors_before.keys()
    changed = [name for name, value in tensors.items() if not value.equal(tensors_before[name])]
    assert not changed and [attributes, objects] == others_before
    assert generators[0].equal(generators_before[0]) and generators[1] == generators_before[1]
    assert all(map(np.array_equal, generators[2], generators_before[2]))


def test_network_that_keeps_more_than_tensors_is_accepted():
    for kind in ("counts", "cached"):
        check("ddp", 2, *OWN, "--model", kind)
