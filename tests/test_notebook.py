"""examples/notebook.ipynb in a kernel, and the stop button of a notebook."""

import ast
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import nbformat
import pytest
import torch
from jupyter_client.manager import start_new_kernel
from launches import RANK, ROOT, marked, read, wait_for_end
from nbclient import NotebookClient

pytestmark = pytest.mark.full


@pytest.fixture
def project(tmp_path):
    """A copy of the project, so that nothing is written into this one."""
    unwanted = ".* __pycache__ runs shared tests tools".split()
    return shutil.copytree(ROOT, tmp_path / "project", ignore=shutil.ignore_patterns(*unwanted))


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """The environment of a kernel of this Python, whose files and processes can be found."""
    short = tempfile.TemporaryDirectory()  # a socket's path has at most 107 letters
    for name in ("TMPDIR", "IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        (folder := Path(short.name, name)).mkdir()
        monkeypatch.setenv(name, str(folder))
    environment = {**os.environ, "LAUNCH_MARK": str(tmp_path)}
    del environment["PYTEST_CURRENT_TEST"]  # with it a kernel does not show what ranks print
    yield environment
    wait_for_end(marked(str(tmp_path)), 15)
    assert not marked(str(tmp_path)), "processes are left running"
    short.cleanup()


def ranks(tmp_path):
    return [pid for pid in marked(str(tmp_path)) if RANK.search(read(pid, "cmdline"))]


def printed(cell):
    """What a cell has printed, on stdout and on stderr."""
    streams = [part for part in cell.outputs if part.output_type == "stream"]
    return ["".join(part.text for part in streams if part.name == n) for n in ("stdout", "stderr")]


def test_notebook_trains_predicts_stops_and_goes_on(project, environment, tmp_path):
    book = nbformat.read(project / "examples" / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells), "no outputs are stored"
    metadata = {"metadata": {"path": str(project / "examples")}}
    client = NotebookClient(book, timeout=300, kernel_name="python3", resources=metadata)
    with client.setup_kernel(env=environment):
        for i, cell in enumerate(book.cells):
            client.execute_cell(cell, i)
            assert ranks(tmp_path) == [], f"cell {i} has left ranks behind"
    _, train, curves, predict, _, own, stop, resume, compare = (
        cell for cell in book.cells if cell.cell_type == "code"
    )

    runs = project / "runs" / "notebook"
    logs = {
        path.parent.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in runs.glob("*/metrics.jsonl")
    }
    assert {*logs} == {"first", "wave", "stopped"}
    out, err = printed(train)
    assert "2 x cpu" in out and out.endswith("exit code 0\n") and not err
    assert out.count("  eval  loss ") == 6, "the notebook shows what ranks print"

    best = max(line["top1"] for line in logs["first"] if line["event"] == "eval")
    right, count = map(
        int, re.fullmatch(r"(\d+) of (\d+) digits are right\n", printed(predict)[0]).groups()
    )
    assert best == pytest.approx(right / count, rel=1e-12) and 0.9 < best < 1 and count == 360
    for cell in (curves, predict):
        assert any("image/png" in part.get("data", {}) for part in cell.outputs)

    end = re.search(
        r"exit code 0, mean error ([\d.]+) after one epoch, ([\d.]+) at last\n$", printed(own)[0]
    )
    first, last = map(float, end.groups())
    assert 0 < last < 0.15 < 2 * last < first

    steps = logs["first"][-1]["global_step"]
    out, err = printed(stop)
    step = int(re.search(r"exit code 130 after step (\d+)\n$", out)[1])
    assert 10 <= step < steps, "it was stopped in training"
    assert f"stopped by SIGINT after saving step {step} (exit code 130)\n" in err
    assert re.search(r"to go on: bash \S*run.sh spawn 2 --output-dir \S+ --resume auto\n", out)
    assert "Traceback" not in err
    assert f"resumed at epoch {step // 22 + 1}, step {step % 22}\n" in printed(resume)[0]
    assert printed(resume)[0].endswith("exit code 0\n")
    assert printed(compare)[0] == "8 of 8 tensors are equal in every bit\n"
    saved = [
        torch.load(runs / name / "last.pt", weights_only=True) for name in ("first", "stopped")
    ]
    assert [one["global_step"] for one in saved] == [steps, steps]
    for name, value in saved[0]["model"].items():
        assert value.equal(saved[1]["model"][name]), name


# ---------------------------------------------------------------------------------- the stop button

SURROUNDINGS = """
import multiprocessing, os, signal, sys, tempfile, threading, train_spawn
def surroundings():
    return {
        "handlers": [signal.getsignal(number) for number in (1, 2, 10, 15, 17)],
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "environment": dict(os.environ),
        "streams": (sys.stdout, sys.stderr),
        "place": (os.getcwd(), sys.argv[:]),
        "files": [n for n in os.listdir(tempfile.gettempdir()) if "inductor" not in n],  # torch's cache
        "processes": multiprocessing.active_children(),
    }
def call(folder, *more):
    before = surroundings()
    code = train_spawn.main(["--nproc", "2", "--device", "cpu", "--output-dir", folder, *more])
    after = surroundings()
    changed = {n: str((before[n], after[n])) for n in before if before[n] != after[n]}
    return code, changed, len(os.listdir("/proc/self/fd")), threading.active_count()
"""


def run_cell(client, code, stop_at=None, press=None):
    """Return what a cell printed, and its value; call `press()` when it has printed `stop_at`."""
    text, values, pressed = "", [], []

    def hook(message):
        nonlocal text
        content = message["content"]
        assert message["msg_type"] != "error", "\n".join(content["traceback"])
        if message["msg_type"] == "stream":
            text += content["text"]
        if message["msg_type"] == "execute_result":
            values.append(ast.literal_eval(content["data"]["text/plain"]))
        if stop_at and not pressed and stop_at in text:
            pressed.append(True)
            press()

    client.execute_interactive(code, output_hook=hook, timeout=300)
    assert bool(pressed) == bool(stop_at)
    return text, *values


@pytest.mark.slow
def test_stop_button_saves_and_no_run_leaves_anything_in_the_kernel(project, environment, tmp_path):
    manager, client = start_new_kernel(cwd=str(project), env=environment)

    def press():
        assert len(ranks(tmp_path)) == 2
        manager.interrupt_kernel()  # as the button does

    try:
        run_cell(client, SURROUNDINGS)
        cell = 'call("stopped", "--epochs", "40", "--log-every", "5")'
        out, (code, changed, *left) = run_cell(client, cell, "step 5/22", press)
        assert (code, changed) == (130, {}), out
        assert "stopped by SIGINT after saving step " in out and "Traceback" not in out
        assert 5 <= torch.load(project / "stopped/last.pt", weights_only=True)["global_step"] < 880
        assert ranks(tmp_path) == []
        cell = 'call("another", "--epochs", "1")'
        out, (code, changed, *left_again) = run_cell(client, cell)
        assert (code, changed) == (0, {}), out
        assert left == left_again, "open files, threads"
        assert ranks(tmp_path) == []
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


EARLY = """
listen, started = train_spawn.wait_for, []
def press():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # as in a kernel's own threads
    signal.raise_signal(signal.SIGINT)
def wait_for(processes):
    started.extend(processes)
    thread = threading.Thread(target=press)
    thread.start()
    thread.join()
    return listen(processes)
train_spawn.wait_for = wait_for
"""


@pytest.mark.slow
def test_stop_while_ranks_start_ends_them(project, environment, tmp_path):
    """A thread of the kernel gets the signal: the thread that starts the ranks blocks it."""
    manager, client = start_new_kernel(cwd=str(project), env=environment)
    try:
        run_cell(client, SURROUNDINGS + EARLY)
        out, (code, changed, *_) = run_cell(client, 'call("early")')
        assert (code, changed) == (130, {}), out
        assert out.endswith(": stopped by SIGINT with nothing new to save\n")
        _, ended = run_cell(client, "[process.exitcode for process in started]")
        assert ended == [-2, -2] and ranks(tmp_path) == []
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
