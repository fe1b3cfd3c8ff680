"""Samples of different sizes, losses that are means over tokens, pixels or boxes, losses that compare samples: exact in every mode."""

import functools

import pytest
import torch
import torch.nn.functional as F
from harness import (
    TASKS,
    check,
    compare,
    deviation,
    make_args,
    order_of,
    prove,
    prove_run,
    single_run,
    train,
)
from patches import stop_after, wrap_in_task
from torch.nn.utils.rnn import pad_sequence

import common
from machinery.usertask import Task

KINDS = {"tokens": 0.3, "pixels": 0.3, "boxes": 0.02, "graphs": 0.01, "cloud": 0.02, "clip": 0.02}
REAL = ("--task", str(TASKS / "real.py"), *"--dtype float64 --epochs 3 --log-every 2".split())
REAL += tuple("--warmup-epochs 0 --workers 0 --device cpu".split())


def argv_of(kind, *more):
    return (*REAL, "--model", kind, "--lr", str(KINDS[kind]), *map(str, more))


def full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("kind", "mode", "n", "accum_steps", "batch_size"),
    [
        *((kind, "ddp", 2, 1 + i % 2 * 2, 13) for i, kind in enumerate(KINDS)),
        *(full(kind, "ddp", 3, 3, 13) for kind in KINDS),
        *(full(kind, "fsdp", 2, 3, 14) for kind in KINDS),
        full("boxes", "spawn", 2, 3, 14),
        ("tokens", "fsdp", 2, 3, 13),
        ("clip", "fsdp", 2, 1, 13),
        full("boxes", "single", 1, 3, 13),
        ("pixels", "dp", 2, 3, 13),
    ],
)
def test_real_work_equals_one_device(kind, mode, n, accum_steps, batch_size, tmp_path):
    argv = argv_of(kind, "--batch-size", batch_size)
    accumulation = ("--accum-steps", accum_steps)
    result = train(mode, n, *argv, *accumulation, folder=tmp_path)
    # A loss that compares the samples of a micro-batch depends on how many of them there are.
    reference = single_run(*argv, *(accumulation if kind == "clip" else ()))
    prove_run(result, reference)


def loss_of_whole_batch(kind, net, inputs, targets):
    """What a plain program computes: the mean over all that counts in the batch, at once."""
    if kind == "tokens":
        outputs = net(pad_sequence(inputs, True)).flatten(0, 1)
        return F.cross_entropy(outputs, pad_sequence(targets, True, -100).flatten())
    if kind == "pixels":
        return F.cross_entropy(net(torch.stack(inputs)), torch.stack(targets))
    if kind == "boxes":
        outputs = net(torch.stack(inputs)).repeat_interleave(torch.tensor([*map(len, targets)]), 0)
        return F.mse_loss(outputs, torch.cat(targets)) * 4  # the mean over boxes of 4 numbers
    if kind == "graphs":
        return F.mse_loss(torch.cat([net({**graph, "graph": torch.zeros(len(graph["nodes"])).long()})
                                     for graph in inputs]), torch.stack(targets))  # fmt: skip
    if kind == "cloud":
        return F.mse_loss(torch.cat([net([points]) for points in inputs]), torch.stack(targets))
    pictures, texts = net(torch.stack(inputs)).unbind(1)
    own, logits = torch.arange(len(inputs)), pictures @ texts.T
    return F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)


@pytest.mark.parametrize("kind", KINDS)
def test_first_step_is_that_of_a_plain_program(kind):
    argv = argv_of(kind, "--batch-size", 13, *(["--accum-steps", 1] if kind == "clip" else []))
    args = make_args("single", *argv)
    task = Task(args)
    data, net = task.build_datasets()[0], task.build_net()
    inputs, targets = zip(*(data[i] for i in order_of(67, 0, 0)[:13]))
    loss = loss_of_whole_batch(kind, net, inputs, targets)
    gradients = torch.autograd.grad(loss, [*net.parameters()])
    wanted = {str(i): gradient for i, gradient in enumerate(gradients)}
    run = single_run(*argv, "--log-every", "1")
    found = run.gradients[0][0]
    prove(f"first step of {kind}", "a plain program", deviation(found, wanted), 1e-12)
    assert run.train_lines()[0]["loss"] == pytest.approx(loss.item(), rel=1e-12)
    if kind == "clip":  # an evaluation compares the samples of a batch
        return
    net.load_state_dict(run.checkpoint()["model"])
    with torch.no_grad():
        evaluated = loss_of_whole_batch(kind, net, *zip(*task.build_datasets()[1]))
    assert run.eval_lines()[-1]["loss"] == pytest.approx(evaluated.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("tokens", ("ddp", 2), ("fsdp", 3)),
        full("boxes", ("fsdp", 2), ("single", 1)),
        full("clip", ("spawn", 2), ("ddp", 3)),
        full("pixels", ("dp", 2), ("spawn", 2)),
    ],
)
def test_real_work_is_resumed_in_another_mode(kind, first, second, tmp_path):
    argv = argv_of(kind, "--batch-size", 13, "--log-every", 1)
    stopped = train(*first, *argv, folder=tmp_path, patch=functools.partial(stop_after, 6))
    assert stopped.code == 143 and stopped.checkpoint()["step"] > 0, stopped.err
    again = train(*second, *argv, "--resume", "auto", folder=tmp_path)
    found = compare(again, single_run(*argv))
    del found["gradients"]  # of another step
    prove(f"{kind}, resumed in another mode", "one device", max(found.values()), 1e-10)


def ignore_first_samples(count, rank):
    """The first ones of the first epoch have no label to learn."""

    def build_datasets(original):
        train_set, val_set = original()
        for i in order_of(67, 0, 0)[:count]:
            words, labels = train_set[i]
            train_set[i] = words, torch.full_like(labels, -100)
        return train_set, val_set

    wrap_in_task("build_datasets", build_datasets)


@pytest.mark.parametrize(("mode", "n"), [("ddp", 2), full("single", 1), full("fsdp", 2)])
def test_steps_without_any_weight_change_nothing(mode, n, tmp_path):
    options = "--batch-size 7 --epochs 1 --log-every 1 --momentum 0 --weight-decay 0"
    argv = argv_of("tokens", *options.split(), "--schedule", "constant")
    ignore = functools.partial(ignore_first_samples, 56)
    result = train(mode, n, *argv, folder=tmp_path, patch=ignore, steps=9)
    assert result.code == 0, result.err
    lines = result.train_lines()
    assert not any(line["skipped"] for line in lines) and lines[8]["loss"] > 0
    before = Task(make_args("single", *argv)).build_net().state_dict()
    after, last = result.checkpoint()["model"], result.gradients[0][-1]
    wanted = {name: before[name] - 0.3 * last[str(i)] for i, name in enumerate(before)}
    assert deviation(after, before) > 1e-4
    prove("eight empty steps and another", "one step of SGD", deviation(after, wanted), 1e-12)


@pytest.mark.parametrize(
    ("kind", "mode", "message"),
    [
        ("boxes", "dp", "dp can only cut a batch of tensors"),
        ("clip", "dp", "dp cannot gather_samples; use ddp or spawn"),
    ],
)
def test_dp_says_what_it_cannot_do(kind, mode, message):
    with pytest.raises(common.UsageError, match=message):
        check(mode, 2, *argv_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_check_takes_real_work(kind):
    check("ddp", 2, *argv_of(kind))
