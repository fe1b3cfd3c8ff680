"""The first step and the evaluation are those of a plain program of torch, written anew here, for losses that are means over words or boxes."""

import functools

import pytest
import torch
import torch.nn.functional as F
from harness import check, deviation, make_args, order_of, prove, single_run, train
from patches import wrap_in_task
from test_runs import argv_of
from torch.nn.utils.rnn import pad_sequence

from engine.task_file import Task


def loss_of_whole_batch(name, net, samples):
    """The mean over all that counts in the batch, at once."""
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
def test_first_step_and_evaluation_are_those_of_a_plain_program(name):
    argv = argv_of(name)
    task = Task(make_args("single", *argv))
    (data, held_out), net = task.build_datasets(), task.build_net()
    loss = loss_of_whole_batch(name, net, [data[i] for i in order_of(80, 0, 0)[:13]])
    gradients = torch.autograd.grad(loss, [*net.parameters()])
    wanted = {str(i): gradient for i, gradient in enumerate(gradients)}
    run = single_run(*argv)
    prove("first gradients", deviation(run.gradients[0][0], wanted), 1e-12)
    assert run.train_lines()[0]["loss"] == pytest.approx(loss.item(), rel=1e-12)
    net.load_state_dict(run.checkpoint()["model"])
    with torch.no_grad():
        evaluated = loss_of_whole_batch(name, net, [*held_out])
    assert run.eval_lines()[-1]["loss"] == pytest.approx(evaluated.item(), rel=1e-12)


def ignore_first_samples(count, rank):
    """The first ones of the first epoch have no word to learn, and the loss masks by a factor of 0."""

    def build_datasets(original):
        train_set, held_out = original()
        for i in order_of(80, 0, 0)[:count]:
            train_set[i] = torch.tensor([1, 0])
        return train_set, held_out

    def per_sample_loss(original, outputs, targets):
        return original(outputs, targets) + 0 * outputs.sum((1, 2))

    wrap_in_task("build_datasets", build_datasets)
    wrap_in_task("per_sample_loss", per_sample_loss)


def test_steps_without_any_weight_change_nothing(tmp_path):
    options = "--batch-size 8 --epochs 1 --momentum 0 --weight-decay 0 --schedule constant"
    argv, ignore = argv_of(f"sentences {options}"), functools.partial(ignore_first_samples, 72)
    result = train("ddp", 2, *argv, folder=tmp_path, patch=ignore, steps=10)
    assert result.code == 0, result.err
    assert result.train_lines()[9]["loss"] > 0
    before = Task(make_args("single", *argv)).build_net().state_dict()
    after, last = result.checkpoint()["model"], result.gradients[0][-1]
    wanted = {name: before[name] - 3 * last[str(i)] for i, name in enumerate(before)}
    assert deviation(after, before) > 1e-4
    prove("nine empty steps and another", deviation(after, wanted), 1e-12)


@pytest.mark.parametrize("name", ["boxes", "contrast"])
def test_dp_says_what_it_cannot_do(name):
    code, err = check("dp", 2, *argv_of(name))
    assert code == 2 and "dp cuts tensors [n, ...] alone, no gather_samples; use ddp" in err, err
