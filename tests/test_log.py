"""Log lines and figures that are only printed or logged: each is computed here from what the run was given."""

import functools
import json
import re
import shutil

import pytest
import torch
import torch.distributed as dist
from harness import TASKS, in_group, make_args, make_sampler, train
from runs import Batches, Clock, end, end_epoch, make_run, make_step, start_epoch
from short_runs import SMALL

import machinery.run
import machinery.usertask

pytestmark = pytest.mark.usefixtures("handlers")


LOSSES = [[0.5, 1.5, 4.0], [2.0], [1.0, 0.25], [7.0, 1.0], [0.125], [3.0, 3.5, 1.0, 0.5]]
SECONDS = [0.5, 0.25, 2.0, 1.0, 0.125, 4.0]


def log_of(folder):
    text = (folder / "run" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def column(lines, name):
    return [line.get(name) for line in lines]


def test_speed_is_the_samples_since_the_last_line_over_the_seconds_since(clock, tmp_path):
    run = make_run(tmp_path, "--log-every", 4, "--epochs", 3)
    for _ in range(2):
        start_epoch(run)
        for losses, seconds in zip(LOSSES, SECONDS):
            clock.seconds += seconds
            make_step(run, losses)
        clock.seconds += 100  # an evaluation, which is no training
        end_epoch(run)
    lines = [line for line in log_of(tmp_path) if line["event"] == "train"]
    assert column(lines, "global_step") == [4, 6, 8, 12], "and the last of an epoch"
    assert [(line["epoch"], line["step"]) for line in lines] == [(0, 4), (0, 6), (1, 2), (1, 6)]
    assert column(lines, "samples_per_s") == [8 / 3.75, 5 / 4.125, 4 / 0.75, 9 / 7.125]
    parts = (0, 1, 2, 3), (4, 5), (0, 1), (2, 3, 4, 5)
    sums = [sum(sum(LOSSES[i]) for i in part) for part in parts]
    assert column(lines, "loss") == [total / n for total, n in zip(sums, (8, 5, 4, 9))]


def test_data_wait_is_the_share_of_the_time_before_the_batches(clock, tmp_path):
    waits = [1.0, 0.5, 0.0, 3.0, 0.25, 0.0]

    class Slow(Batches):
        def __iter__(self):
            for seconds in waits:
                clock.seconds += seconds
                yield torch.zeros(1), torch.zeros(1)

    run = make_run(tmp_path, "--log-every", 2)
    clock.seconds += 50  # nobody waits for a batch yet
    for step, _ in enumerate(run.batches(Slow())):
        clock.seconds += SECONDS[step]
        make_step(run, LOSSES[step])
    found = column(log_of(tmp_path), "data_wait")
    assert found == [1.5 / (1.5 + 0.75), 3.0 / (3.0 + 3.0), 0.25 / (0.25 + 4.125)]


def test_speed_after_a_resume_is_of_this_process_alone(clock, tmp_path):
    """Neither the steps before it nor the wait for the first batch count, nor does the mean have the loss of what was not logged."""
    first = make_run(tmp_path, "--log-every", 4)
    start_epoch(first)
    for losses in LOSSES[:3]:
        clock.seconds += 50
        make_step(first, losses)
    first.save("last.pt")
    end(first)
    run = make_run(tmp_path, "--resume", "auto")
    assert run.state.global_step == 3
    clock.seconds += 1000  # until the first batch comes
    start_epoch(run)
    for losses, seconds in zip(LOSSES[3:], SECONDS[3:]):
        clock.seconds += seconds
        make_step(run, losses)
    lines = log_of(tmp_path)
    assert column(lines, "samples_per_s") == [2 / 1.0, 5 / 4.125]
    assert column(lines, "loss") == [8.0 / 2, 8.125 / 5]


def log_two_ranks(folder):
    """On each rank: 3 and 2 samples a step."""
    clock = machinery.run.time = Clock()
    rank = dist.get_rank()
    run = make_run(folder, "--log-every", 2, rank=rank, world_size=2)
    start_epoch(run)
    for _ in range(4):
        clock.seconds += 0.5
        make_step(run, [1.0] * (3 - rank))


def test_speed_is_that_of_all_ranks(tmp_path):
    in_group(2, functools.partial(log_two_ranks, tmp_path))
    assert column(log_of(tmp_path), "samples_per_s") == [10.0, 10.0]


def figures(text):
    """Return the figures of a printed training line, by what stands beside them."""
    found = re.fullmatch(
        r"(?:epoch (?P<epoch>\d+)/(?P<epochs>\d+)  step (?P<step>\d+)/(?P<steps>\d+)  )?"
        r"loss (?P<loss>-?\d+\.\d{6}|nan)  (?:odd (?P<odd>\d\.\d{6})  )?lr (?P<lr>[\d.e-]+)  "
        r"(?P<speed>\d+) samples/s  data (?P<wait>\d+)%"
        r"(?:  skipped (?P<skipped>\d+) steps: a gradient was not finite)?",
        text,
    )
    assert found, text
    return {name: float(value) for name, value in found.groupdict().items() if value is not None}


def test_printed_line_is_what_was_logged(clock, tmp_path, capsys):
    run = make_run(
        tmp_path, "--log-every", 2, "--epochs", 7, *"--lr 8e-7 --schedule cosine".split()
    )
    assert capsys.readouterr().out == f"output directory: {tmp_path / 'run'}\n"
    for epoch in range(2):
        start_epoch(run)
        for step, (losses, seconds) in enumerate(zip(LOSSES, SECONDS)):
            clock.seconds += seconds / 100
            if (epoch, step) in ((0, 3), (1, 2), (1, 3)):
                run.state.scaler.skipped += 1
            make_step(run, losses)
        run.state.epoch, run.state.step = run.state.epoch + 1, 0
    _, _, _, *rest = capsys.readouterr().out.splitlines()  # three lines about the whole run
    printed, lines = [figures(line) for line in rest], log_of(tmp_path)
    assert len(printed) == len(lines) == 6
    for shown, line in zip(printed, lines):
        assert (shown["epoch"], shown["epochs"]) == (line["epoch"] + 1, 7), "counted from 1"
        assert (shown["step"], shown["steps"]) == (line["step"], 6)
        assert abs(shown["loss"] - line["loss"]) <= 0.5000001e-6
        assert shown["lr"] == pytest.approx(line["lr"], rel=1e-4)
        assert abs(shown["speed"] - line["samples_per_s"]) <= 0.5
        assert abs(shown["wait"] - 100 * line["data_wait"]) <= 0.5
    assert column(lines, "skipped") == [0, 1, 0, 0, 2, 0], "since the last line"
    assert column(printed, "skipped") == [None, 1, None, None, 2, None], "if any"
    assert min(line["samples_per_s"] for line in lines) > 100, "or rounding would hide a factor"


ODD_METRIC = """
import torch
from small import build_datasets, build_model, per_sample_loss
def per_sample_metrics(outputs, targets):
    assert not torch.is_grad_enabled()
    return {"odd": (targets % 2).double(), "kept": targets.tolist()}
def dataset_metrics(outputs):
    return {"labels": float(sum(outputs["kept"]))}
"""


@pytest.mark.parametrize(
    ("mode", "n"),
    [("ddp", 3), *(pytest.param(*run, marks=pytest.mark.full) for run in (("dp", 2), ("fsdp", 2)))],
)
def test_training_metrics_are_of_the_samples_since_the_last_line(mode, n, tmp_path, monkeypatch):
    """A metric of the label alone; the order of the samples says what it has to be."""
    monkeypatch.syspath_prepend(str(TASKS))
    (tmp_path / "odd_metric.py").write_text(ODD_METRIC + "train_metrics = per_sample_metrics\n")
    argv = ("--task", tmp_path / "odd_metric.py", "--dtype", "float64", "--batch-size", "30")
    argv = (*argv, "--epochs", "2", "--log-every", "2", "--accum-steps", "2")
    result = train(mode, n, *argv, folder=tmp_path)
    assert result.code == 0, result.err
    args = make_args("single", "--task", str(TASKS / "small.py"))
    labels = machinery.usertask.Task(args).build_datasets()[0].targets
    sampler = make_sampler(len(labels), 30, 0, 1)
    expected = []
    for epoch in range(2):
        sampler.set_position(epoch, 0)
        odd = [(labels[indices] % 2).double().sum().item() for _, (indices,) in sampler]
        expected += [
            sum(odd[i : i + 2]) / (30 * len(odd[i : i + 2])) for i in range(0, len(odd), 2)
        ]
    found = column(result.train_lines(), "odd")
    assert found == pytest.approx(expected, rel=1e-12) and len(set(expected)) > 3
    assert not any("kept" in line or "labels" in line for line in result.train_lines())
    shown = [figures(line)["odd"] for line in result.out.splitlines() if "samples/s" in line]
    assert shown == pytest.approx(expected, abs=0.51e-6)


def test_header_says_what_runs_where(tmp_path):
    argv = (*SMALL, "--batch-size", "62", "--accum-steps", "2", "--epochs", "1", "--workers", "1")
    result = train("ddp", 3, *argv, folder=tmp_path)
    assert result.code == 0, result.err
    first, second, third = result.out.splitlines()[1:4]
    size = sum(value.numel() for value in result.checkpoint()["model"].values())
    where = f" on 3 x cpu: DigitNet, {size:,} parameters; loader workers per process: 1"
    assert first.endswith(where)
    assert second == (
        "203 training samples: 3 steps per epoch; a step: 62 samples, "
        "2 x up to 11 samples on each device"
    )
    assert third == (
        "SGD: weight decay 0.001, peak lr 0.1; cosine after a warm-up of 2 of 1 epochs, so that "
        "it never reaches the peak"
    )


def test_evaluation_line_has_the_seconds_of_training_evaluation_and_saving(clock, tmp_path):
    run = make_run(tmp_path, "--save-every", 4)
    write = run.files.write_checkpoint

    def slow_write(*arguments):
        clock.seconds += 0.125
        return write(*arguments)

    run.files.write_checkpoint = slow_write
    for _ in range(2):
        clock.seconds += 1.0  # the loader starts
        start_epoch(run)
        for _ in range(6):  # the fourth or the second saves
            clock.seconds += 2.0
            make_step(run, [1.0])
        clock.seconds += 0.5
        run.save("last.pt")
        clock.seconds += 8.0
        end_epoch(run)
    lines = [line for line in log_of(tmp_path) if line["event"] == "eval"]
    times = [[line[name] for name in ("train_s", "eval_s", "save_s")] for line in lines]
    # The save of end_epoch comes after its line, and counts for the next one.
    assert times == [[13.5, 8.0, 0.25], [13.5, 8.0, 0.375]]


@pytest.mark.parametrize("damage", ["torn", "foreign"])
def test_log_stays_whole_lines_after_a_resume(damage, tmp_path):
    """Its last line may have lost its end, and a line may hold letters of more than one byte."""
    run = make_run(tmp_path, "--log-every", 1)
    start_epoch(run)
    for losses in LOSSES[:3]:
        make_step(run, losses)
    run.save("last.pt")
    end(run)
    path = run.files.directory / "metrics.jsonl"
    lines = path.read_text().splitlines()
    if damage == "torn":
        path.write_text("\n".join(lines))
        kept = lines[:-1]
    else:
        kept = [lines[0].replace('"loss"', '"préc": 1, "loss"'), *lines[1:]]
        path.write_text("\n".join(kept) + "\n", encoding="utf-8")
    run = make_run(tmp_path, "--log-every", 1, "--resume", "auto")
    start_epoch(run)
    make_step(run, LOSSES[3])
    *before, last = path.read_text(encoding="utf-8").splitlines()
    assert before == kept and json.loads(last)["global_step"] == 4


def print_closed(rank):
    from torch.utils import tensorboard

    close = tensorboard.SummaryWriter.close
    tensorboard.SummaryWriter.close = lambda writer: (close(writer), print("closed"))


@pytest.mark.full
def test_tensorboard_shows_what_the_log_says(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    argv = (*SMALL, "--epochs", "2", "--batch-size", "100", "--warmup-epochs", "0")
    result = train("ddp", 2, *argv, "--tensorboard", folder=tmp_path, patch=print_closed)
    assert result.code == 0, result.err
    assert result.out.count("closed") == 1, "or what waits in its queue may be lost"
    events = EventAccumulator(str(result.folder)).Reload()
    names = {f"train/{name}" for name in ("loss", "lr", "samples_per_s", "grad_norm")}
    assert names | {"eval/loss", "eval/top1"} <= set(events.Tags()["scalars"])
    shown = {event.step: event.value for event in events.Scalars("eval/loss")}
    assert shown == pytest.approx(
        {line["global_step"]: line["loss"] for line in result.eval_lines()}
    ) and list(shown) == [2, 4]
    plain = train("ddp", 2, *argv, folder=tmp_path / "plain")
    assert all(
        value.equal(plain.checkpoint()["model"][name])
        for name, value in result.checkpoint()["model"].items()
    ), "and only looks"


# ---------------------------------------------------------------- a log that was left in the middle


@pytest.mark.parametrize("line", [b'{"event": "eval", "global_step": 1}', b"\xff"])
def test_line_of_another_program_in_the_log_is_cut_off(line, finished, tmp_path):
    shutil.copytree(finished.folder, tmp_path / "run")
    with open(tmp_path / "run" / "metrics.jsonl", "ab") as log:
        log.write(line + b"\n")
    resumed = train("single", 1, *SMALL, "--resume", "auto", folder=tmp_path)
    assert resumed.code == 0 and resumed.lines == finished.lines, resumed.err
