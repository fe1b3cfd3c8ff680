"""Networks that keep more than weights, or change them in a forward; what cannot work is refused by name."""

import functools

import pytest
from harness import (
    TASKS,
    check,
    compare,
    single_run,
    train,
    undisturbed,
)
from patches import BASE, stop_after, without_speed

import common

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
        pytest.param("single", "teacher", marks=pytest.mark.full),
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
        ("single", "unreadable", "get_extra_state of the model: UnpicklingError"),
        ("ddp", "norm --sync-bn", "--sync-bn would drop the code of OwnNorm; leave it out"),
        ("single", "kept", "the forward of the model makes between.table; no checkpoint"),
        ("single", "volume --channels-last", "--channels-last: RuntimeError: required rank 4"),
    ],
)
def test_network_that_cannot_work_is_refused(mode, options, message):
    with pytest.raises(common.UsageError, match=message):
        check(mode, 2, *OWN, "--model", *options.split())


def test_network_that_keeps_more_than_tensors_is_accepted():
    for kind in ("counts", "cached"):
        check("ddp", 2, *OWN, "--model", kind)
