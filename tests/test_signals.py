"""Real signals to real launches: what is saved, the exit code, the last words, and that no process is left."""

import os
import re
import signal
import time

import pytest
import torch
from harness import deviation, single_run
from launches import ROOT, Launch, send

import train_single

# 1,437 digits: 5 steps an epoch. Each step takes its time, so that a signal comes in the middle of the run.
TASK = """import os, time
import task
from task import *
def per_sample_loss(outputs, targets):
    if outputs.requires_grad:
        time.sleep(float(os.environ.get("PAUSE", 0)))
    return task.per_sample_loss(outputs, targets)
"""
OPTIONS = (
    "--dtype float64 --device cpu --epochs 3 --batch-size 256 --log-every 1 --workers 1".split()
)
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129, signal.SIGUSR1: 0}
MODES = {"single": ["single"], "ddp": ["ddp", "2"], "spawn": ["spawn", "2"]}


def start(mode, folder, *options, pause="0.2", text=TASK, before=()):
    """Launch `bash run.sh MODE` with a slow task, two ranks and a loader worker for each set on each rank."""
    (folder / "slow.py").write_text(text)
    command = [*before, "bash", str(ROOT / "run.sh"), *MODES[mode], *OPTIONS]
    return Launch(command, folder, "--task", str(folder / "slow.py"), *options, PAUSE=pause)


@pytest.fixture
def reference():
    """The weights of the undisturbed run on one device."""
    return single_run(*OPTIONS).checkpoint()["model"]


def goes_on(folder, reference):
    """Resume a run on one device, to its end: the weights are those of an undisturbed run, each step is in the log once."""
    run = folder / "run"
    assert train_single.main([*OPTIONS, "--output-dir", str(run), "--resume", "auto"]) == 0
    steps = re.findall(r'"train".*?"global_step": (\d+)', (run / "metrics.jsonl").read_text())
    assert [*map(int, steps)] == [*range(1, 16)]
    saved = torch.load(run / "last.pt", weights_only=True)
    assert deviation(saved["model"], reference) <= 1e-10


ALL = [(mode, number) for mode in MODES for number in CODES]
DEFAULT = [("ddp", signal.SIGTERM), ("spawn", signal.SIGUSR1)]


@pytest.mark.parametrize(
    ("mode", "number"),
    [pytest.param(*one, marks=[] if one in DEFAULT else pytest.mark.full) for one in ALL],
)
def test_signal_to_run_sh_saves_at_one_step(mode, number, tmp_path, reference):
    with start(mode, tmp_path) as run:
        run.wait_for("epoch 2/3  step 2/5")
        if number == signal.SIGINT:
            os.killpg(run.process.pid, number)  # as a terminal does
        elif number == signal.SIGTERM:
            send(run.processes(), number)  # as batch systems do: the loader workers get it too
        else:
            run.process.send_signal(number)
        assert run.end() == CODES[number], run.errors()
        saved = run.checkpoint()
        step = saved["epoch"] * 5 + saved["step"]
        assert 7 <= step < 15 and not list((tmp_path / "run").glob(".*"))
        stopped = f"stopped by {number.name} after saving step {step}"
        assert run.errors() == f"train_{mode}.py: {stopped}\n", "one line, no traceback"
    goes_on(tmp_path, reference)


@pytest.mark.parametrize("mode", ["ddp", pytest.param("spawn", marks=pytest.mark.full)])
def test_killed_rank_ends_the_run(mode, tmp_path, reference):
    with start(mode, tmp_path) as run:
        run.wait_for("epoch 2/3  step 2/5")
        began = time.monotonic()
        os.kill(run.ranks()[1], signal.SIGKILL)
        out = run.process.stdout.read()
        assert run.end() == 1 and time.monotonic() - began < 30
        assert "rank 1 was killed by SIGKILL" in run.errors()
        assert re.search(rf"to go on: .*--output-dir {tmp_path / 'run'} --resume auto", out)
    goes_on(tmp_path, reference)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["ddp", "spawn"])
def test_ranks_of_a_killed_launcher_save_and_end(mode, tmp_path, reference):
    with start(mode, tmp_path) as run:
        run.wait_for("epoch 2/3  step 2/5")
        run.process.kill()
        assert run.end(grace=60) == 137
        assert "after saving step" in run.errors() and "Traceback" not in run.errors()
    goes_on(tmp_path, reference)


BROKEN = """import os, time
import torch.distributed as dist
import task
from task import *
def broken():
    raise RuntimeError("broken labels")
def per_sample_loss(outputs, targets):
    if outputs.requires_grad and (not dist.is_initialized() or dist.get_rank() == 1):
        broken()
    return task.per_sample_loss(outputs, targets)
"""


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_rank_that_raises_ends_the_run_with_its_traceback(mode, tmp_path):
    """Its loader workers ignore SIGTERM, by which Python ends its children, and waits for them."""
    with start(mode, tmp_path, text=BROKEN) as run:
        assert run.end(timeout=100) == 1
        assert "RuntimeError: broken labels" in run.errors()
        assert run.errors().count("in broken\n") == 1, "of the rank that failed first"


@pytest.mark.full
@pytest.mark.parametrize("mode", ["ddp", "spawn"])
def test_what_ranks_refuse_is_one_line(mode, tmp_path):
    with start(mode, tmp_path, "--freeze", "nothing") as run:
        assert run.end() == 2
        (line,) = {*run.errors().splitlines()}  # in spawn each rank prints it
        assert line.startswith(f"train_{mode}.py: error: --freeze nothing: no parameter has")
        assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.parametrize("mode", ["ddp", "spawn"])
def test_signal_while_ranks_start_is_answered(mode, tmp_path):
    with start(mode, tmp_path) as run:
        run.wait_until(run.ranks)
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.end() == 130, run.errors()
        assert not (tmp_path / "run" / "last.pt").exists()


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_run_of_nohup_goes_on_when_its_terminal_is_closed(mode, tmp_path):
    with start(mode, tmp_path, before=["nohup"]) as run:
        run.wait_for("epoch 2/3  step 2/5")
        send(run.processes(), signal.SIGHUP)
        assert run.end() == 0, run.errors()
        assert run.checkpoint()["epoch"] == 3
