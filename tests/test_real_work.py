"""Samples of different sizes, losses that are means over tokens, pixels or boxes, losses that compare samples: exact in every mode.

The tasks are those of examples/recipes/.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from harness import (
    ROOT,
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

RATES = {"sentences": 3, "segmentation": 0.3, "boxes": 0.1, "graphs": 0.1, "contrast": 0.5}
OPTIONS = "--dtype float64 --epochs 5 --log-every 2 --warmup-epochs 0 --workers 0 --device cpu"


def argv_of(name, *more):
    task = str(ROOT / "examples" / "recipes" / f"{name}.py")
    return ("--task", task, *OPTIONS.split(), "--lr", str(RATES[name]), *map(str, more))


def full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("name", "mode", "n", "accum_steps", "batch_size"),
    [
        ("boxes", "ddp", 3, 3, 13),
        ("contrast", "fsdp", 2, 1, 13),
        ("segmentation", "dp", 2, 3, 13),
        ("sentences", "fsdp", 2, 3, 13),
        full("boxes", "single", 1, 3, 13),
        full("contrast", "ddp", 3, 3, 13),
        full("graphs", "fsdp", 2, 3, 14),
        full("boxes", "spawn", 2, 3, 14),
    ],
)
def test_real_work_equals_one_device(name, mode, n, accum_steps, batch_size, tmp_path):
    argv = argv_of(name, "--batch-size", batch_size)
    accumulation = ("--accum-steps", accum_steps)
    result = train(mode, n, *argv, *accumulation, folder=tmp_path)
    # A loss that compares the samples of a micro-batch depends on how many of them there are.
    reference = single_run(*argv, *(accumulation if name == "contrast" else ()))
    prove_run(result, reference)


def loss_of_whole_batch(name, net, samples):
    """What a plain program computes: the mean over all that counts in the batch, at once."""
    if name == "sentences":
        words = pad_sequence(samples, batch_first=True)
        return F.cross_entropy(net(words[:, :-1]).mT, words[:, 1:], ignore_index=0)
    pictures, boxes = zip(*samples)
    found, wanted = net(torch.stack(pictures)), []
    for picture, own in zip(found, boxes):
        for box in own:
            x, y = (8 * box[:2]).long()
            wanted.append((picture[:, y, x] - box).abs().sum())
    return torch.stack(wanted).mean()


@pytest.mark.parametrize("name", ["sentences", "boxes"])
def test_first_step_is_that_of_a_plain_program(name):
    argv = argv_of(name, "--batch-size", 13, "--log-every", 1)
    task = Task(make_args("single", *argv))
    (data, held_out), net = task.build_datasets(), task.build_net()
    loss = loss_of_whole_batch(name, net, [data[i] for i in order_of(80, 0, 0)[:13]])
    gradients = torch.autograd.grad(loss, [*net.parameters()])
    wanted = {str(i): gradient for i, gradient in enumerate(gradients)}
    run = single_run(*argv)
    found = run.gradients[0][0]
    prove(f"first step of {name}", "a plain program", deviation(found, wanted), 1e-12)
    assert run.train_lines()[0]["loss"] == pytest.approx(loss.item(), rel=1e-12)
    net.load_state_dict(run.checkpoint()["model"])
    with torch.no_grad():
        evaluated = loss_of_whole_batch(name, net, [*held_out])
    assert run.eval_lines()[-1]["loss"] == pytest.approx(evaluated.item(), rel=1e-12)


def test_real_work_is_resumed_in_another_mode(tmp_path):
    argv = argv_of("sentences", "--batch-size", 13, "--log-every", 1)
    stopped = train("ddp", 2, *argv, folder=tmp_path, patch=functools.partial(stop_after, 7))
    assert stopped.code == 143 and stopped.checkpoint()["step"] > 0, stopped.err
    again = train("fsdp", 3, *argv, "--resume", "auto", folder=tmp_path)
    found = compare(again, single_run(*argv))
    del found["gradients"]  # of another step
    prove("sentences, resumed in another mode", "one device", max(found.values()), 1e-10)


def ignore_first_samples(count, rank):
    """The first ones of the first epoch have no token to learn, and the loss masks by a factor of 0."""

    def build_datasets(original):
        train_set, held_out = original()
        for i in order_of(80, 0, 0)[:count]:
            train_set[i] = torch.tensor([1, 0])
        return train_set, held_out

    def per_sample_loss(original, outputs, targets):
        return original(outputs, targets) + 0 * outputs.sum((1, 2))

    wrap_in_task("build_datasets", build_datasets)
    wrap_in_task("per_sample_loss", per_sample_loss)


@pytest.mark.parametrize(("mode", "n"), [("ddp", 2), full("fsdp", 2)])
def test_steps_without_any_weight_change_nothing(mode, n, tmp_path):
    options = "--batch-size 8 --epochs 1 --log-every 1 --momentum 0 --weight-decay 0"
    argv = argv_of("sentences", *options.split(), "--schedule", "constant")
    ignore = functools.partial(ignore_first_samples, 72)
    result = train(mode, n, *argv, folder=tmp_path, patch=ignore, steps=10)
    assert result.code == 0, result.err
    lines = result.train_lines()
    assert not any(line["skipped"] for line in lines) and lines[9]["loss"] > 0
    before = Task(make_args("single", *argv)).build_net().state_dict()
    after, last = result.checkpoint()["model"], result.gradients[0][-1]
    rate = RATES["sentences"]
    wanted = {name: before[name] - rate * last[str(i)] for i, name in enumerate(before)}
    assert deviation(after, before) > 1e-4
    prove("nine empty steps and another", "one step of SGD", deviation(after, wanted), 1e-12)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("boxes", "dp can only cut a batch of tensors"),
        ("contrast", "dp cannot gather_samples; use ddp or spawn"),
    ],
)
def test_dp_says_what_it_cannot_do(name, message):
    with pytest.raises(common.UsageError, match=message):
        check("dp", 2, *argv_of(name))
