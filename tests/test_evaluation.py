"""Evaluations: when they are made, what they draw, and what --eval-only reads and leaves as it is."""

import fcntl
import functools
import importlib
import itertools
import json
import math
import os
import signal

import pytest
from harness import make_args, train, undisturbed
from patches import BASE, call_in_task, printed, without_speed
from runs import end, make_run
from short_runs import NOISE, ODD

import machinery.run
import sampling

pytestmark = pytest.mark.usefixtures("handlers")


def test_evaluation_repeats_what_it_draws(tmp_path):
    """At a learning rate of 0 the evaluations of two epochs differ by what they draw alone."""
    result = train("single", 1, *NOISE, "--lr", "0", "--epochs", "2", folder=tmp_path)
    first, second = result.eval_lines()
    assert first["loss"] == second["loss"], result.err


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


@pytest.mark.full
def test_metric_of_some_batches_alone_ends_the_run(tmp_path):
    result = train("ddp", 2, *ODD, "--model", "sometimes", folder=tmp_path)
    assert result.code == 1
    assert "the same names for every batch; only some batches have threes" in result.err


# -------------------------------------------------------------- between training and its evaluation


def print_files(mode, rank):
    """Print what appears, and when the evaluation is made."""
    script = importlib.import_module(f"train_{mode}")
    save, evaluate = machinery.run.save_checkpoint, script.evaluate

    def saved(state, *paths):
        save(state, *paths)
        for path in paths:
            place = [path.name, state["epoch"], state["step"]]
            print("event", json.dumps(place), flush=True)

    def evaluated(*arguments):
        if rank == 0:
            print("event", json.dumps("evaluation"))
        return evaluate(*arguments)

    machinery.run.save_checkpoint, script.evaluate = saved, evaluated


@pytest.mark.parametrize(
    ("mode", "n"),
    [
        ("ddp", 2),
        *(
            pytest.param(*run, marks=pytest.mark.full)
            for run in (("single", 1), ("dp", 2), ("fsdp", 2))
        ),
    ],
)
def test_training_is_saved_before_its_evaluation_and_the_epoch_after_it(mode, n, tmp_path):
    argv = (*BASE, "--epochs", "2", "--keep-every", "2", "--save-every", "3")
    patch = functools.partial(print_files, mode)
    events = printed(train(mode, n, *argv, folder=tmp_path, patch=patch).out, "event")
    within = [["last.pt", 0, 3], ["last.pt", 0, 6], "evaluation"]
    assert events[:5] == [*within, ["best.pt", 1, 0], ["last.pt", 1, 0]]
    assert events[5:8] == [["last.pt", 1, 3], ["last.pt", 1, 6], "evaluation"]
    names = [event[0] for event in events[8:]]
    assert names in (["best.pt", "epoch-0002.pt", "last.pt"], ["epoch-0002.pt", "last.pt"])
    assert all(event[1:] == [2, 0] for event in events[8:])


def interrupt(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("mode", "n", "number"),
    [
        pytest.param("ddp", 2, signal.SIGTERM, marks=pytest.mark.full),
        pytest.param("ddp", 2, signal.SIGKILL, marks=pytest.mark.full),
    ],
)
def test_interrupted_evaluation_is_made_again_and_the_same(mode, n, number, tmp_path):
    reference = undisturbed(mode, n, *NOISE)
    stop = functools.partial(interrupt, number)
    patch = functools.partial(call_in_task, "per_sample_metrics", 0, stop)
    first = train(mode, n, *NOISE, folder=tmp_path, patch=patch)
    saved = first.checkpoint()
    if number == signal.SIGTERM:  # which waits for the end of the evaluation
        assert first.code == 143 and (saved["epoch"], saved["step"]) == (1, 0), first.err
    else:
        assert first.code != 0 and (saved["epoch"], saved["step"]) == (0, 6), first.err
    resumed = train(mode, n, *NOISE, "--resume", "auto", folder=tmp_path)
    assert resumed.code == 0, resumed.err
    assert without_speed(resumed.lines) == without_speed(reference.lines)
    assert resumed.checkpoint("best.pt")["best"] == reference.checkpoint("best.pt")["best"]


# -------------------------------------------------------------------------------------- --eval-only


@pytest.mark.parametrize(
    ("epoch", "step", "shown"),
    [(0, 6, 1), (1, 0, 1), (1, 2, 2)],
)
def test_eval_only_names_the_epoch_whose_weights_it_sees(epoch, step, shown, tmp_path, capsys):
    """A checkpoint of an epoch's end counts the epoch as done; one from within it does not."""
    run = make_run(tmp_path, "--epochs", 3)
    run.state.epoch, run.state.step, run.state.global_step = epoch, step, 6 * epoch + step
    run.save("last.pt")
    end(run)
    path = run.files.directory / "last.pt"
    run = make_run(tmp_path / "elsewhere", "--epochs", 3, "--eval-only", "--resume", path)
    capsys.readouterr()
    run.log.eval_line({"loss": 1.5, "top1": 0.25, "count": 57})
    wanted = f"epoch {shown}/3  eval  loss 1.500000  top1 0.250000  (57 samples)\n"
    assert capsys.readouterr().out == wanted
    (line,) = map(json.loads, (run.files.directory / "metrics.jsonl").read_text().splitlines())
    assert without_speed([line])[0] == {
        "event": "eval",
        "epoch": shown - 1,
        "global_step": 6 * epoch + step,
        "loss": 1.5,
        "top1": 0.25,
        "count": 57,
    }


def test_eval_only_evaluates_what_was_trained_or_says_why_not(tmp_path):
    trained = train("single", 1, *BASE, "--epochs", "2", "--average", "ema", folder=tmp_path)
    argv = (*BASE, "--eval-only", "--resume", trained.folder / "last.pt")
    ema = (*argv, "--average", "ema", "--batch-size", "7")
    same = train("single", 1, *ema, folder=tmp_path / "same")
    wanted = pytest.approx(trained.eval_lines()[-1]["loss"], rel=1e-12)
    assert same.eval_lines()[0]["loss"] == wanted
    argv = (*BASE, "--eval-only", "--resume", "auto")
    nothing = train("single", 1, *argv, folder=tmp_path / "nothing")
    assert nothing.code == 2 and "no checkpoint" in nothing.err


@pytest.mark.full
def test_eval_only_does_not_touch_the_log_of_a_run(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    argv = (*ODD, "--model", "conv", "--keep-every", "1", "--tensorboard")
    result = train("single", 1, *argv, folder=tmp_path)
    before = (result.folder / "metrics.jsonl").read_bytes()
    older = result.folder / "epoch-0001.pt"
    with open(os.devnull, "w") as other:  # another evaluation at the same time
        fcntl.lockf(other, fcntl.LOCK_EX)
        again = train("single", 1, *argv, "--eval-only", "--resume", older, folder=tmp_path)
    assert again.code == 0, again.err
    assert (result.folder / "metrics.jsonl").read_bytes() == before
    loss = result.eval_lines()[0]["loss"]
    assert f"epoch 1/3  eval  loss {loss:.6f}" in again.out
    events = EventAccumulator(str(result.folder))
    events.Reload()
    assert [event.step for event in events.Scalars("eval/loss")] == [6, 12, 18]
    folder = tmp_path / "elsewhere"
    elsewhere = train("single", 1, *argv, "--eval-only", "--resume", older, folder=folder)
    assert [line["loss"] for line in elsewhere.eval_lines()] == [loss]
    last = result.folder / "last.pt"
    second = train("single", 1, *argv, "--eval-only", "--resume", last, folder=folder)
    assert [line["epoch"] for line in second.eval_lines()] == [0, 2], (
        "a folder of evaluations gets each of them"
    )
