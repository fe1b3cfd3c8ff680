"""Launches on one machine: `bash run.sh MODE N` as a user starts it, and what the launcher tells its ranks."""

import contextlib
import fcntl
import functools
import json
import multiprocessing
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import ROOT, TASKS, train
from patches import BASE, after_step, printed


def run_sh(*arguments, cwd, root=ROOT, timeout=200, first_on_path=""):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["PATH"] = (
        f"{first_on_path or os.path.dirname(sys.executable)}:{environment['PATH']}"
    )
    command = ["bash", str(root / "run.sh"), *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )


def eval_lines(text):
    return [line for line in text.splitlines() if "  eval  " in line]


@pytest.mark.full
def test_ddp_with_default_options_reads_digits(tmp_path):
    finished = run_sh("ddp", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    lines = eval_lines(finished.stdout)
    assert len(lines) == 30, "one line an epoch, from rank 0 alone"
    top1 = float(re.search(r"top1 ([\d.]+)", lines[-1])[1])
    assert top1 >= 0.98 and lines[-1].endswith("(360 samples)")
    (folder,) = (tmp_path / "runs").iterdir()
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert logged[-1]["event"] == "eval" and round(logged[-1]["top1"], 6) == top1
    assert {path.name for path in folder.iterdir()} == {"last.pt", "best.pt", "metrics.jsonl"}
    assert logged[0]["loss"] > 1.5 and logged[-2]["loss"] < 0.6


@pytest.mark.full
def test_all_modes_print_the_same_evaluation_lines_in_float64(tmp_path):
    """From another working directory, by a link to run.sh, and with spaces, quotes, a dollar sign and a leading dash in the names of all folders.

    The task has a neighbour with the name of a module in machinery/, where the launcher of ddp lies.
    """
    copy, task = tmp_path / """-my "copy" of $HOME's""", Path("-tasks", "it's $(touch owned).py")
    shutil.copytree(
        ROOT,
        copy,
        ignore=shutil.ignore_patterns(".git", ".venv", "tests", "tools", "runs", "__pycache__"),
    )
    (tmp_path / task).parent.mkdir()
    (tmp_path / task).write_text("from modes import *\n")
    shutil.copy(TASKS / "small.py", (tmp_path / task).with_name("modes.py"))
    link = tmp_path / "a link's"
    link.mkdir()
    (link / "run.sh").symlink_to(os.path.relpath(copy / "run.sh", link.resolve()))
    outputs = {}
    for mode, n in (("single", 1), ("dp", 3), ("ddp", 3), ("spawn", 2), ("fsdp", 2)):
        folder = tmp_path / f"""-a folder's "name", $HOME $(touch owned) {mode}"""
        options = [f"--task={task}", *"--dtype float64 --epochs 2".split()]
        options.append(f"--output-dir={folder.name}")
        finished = run_sh(mode, n, *options, cwd=tmp_path, root=link)
        assert finished.returncode == 0, finished.stderr
        outputs[mode] = eval_lines(finished.stdout)
        assert len(outputs[mode]) == 2 and (folder / "last.pt").exists()
    assert all(lines == outputs["single"] for lines in outputs.values())
    assert len(set(outputs["single"])) == 2 and not list(tmp_path.rglob("owned"))
    assert [path.name for path in link.iterdir()] == ["run.sh"]


@pytest.fixture
def lacking(tmp_path, monkeypatch):
    """Return a copy of run.sh whose requirements no Python has; without a package index, so that pip fails and downloads nothing."""
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(ROOT / "run.sh", copy)
    (copy / "requirements.txt").write_text("no-such-package>=1.0\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return copy


@pytest.mark.full
def test_set_up_is_done_once_when_the_active_python_lacks_something(lacking, tmp_path):
    finished = run_sh("single", "--help", cwd=tmp_path, root=lacking)
    assert finished.returncode != 0
    assert (
        "the active Python lacks no-such-package>=1.0; setting up" in finished.stderr
        and (lacking / ".venv").is_dir()
    )


def test_tests_marked_gpu_ask_for_few_packages(lacking, tmp_path):
    """A machine with a GPU may reach no registry."""
    (lacking / "tests").mkdir()
    (lacking / "requirements.txt").rename(lacking / "tests" / "requirements.txt")
    shutil.copy(ROOT / "requirements.txt", lacking)
    shutil.copy(ROOT / "tests" / "requirements-gpu.txt", lacking / "tests")
    finished = run_sh("test", "-m", "gpu", cwd=tmp_path, root=lacking)
    assert "no tests ran" in finished.stdout and "lacks" not in finished.stderr


def test_python_without_ensurepip_is_told_what_to_install(lacking, tmp_path, monkeypatch):
    """As on Debian and Ubuntu without the package python3-venv. What is there already, half-made, does not hide it."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "ensurepip.py").write_text(
        "raise ModuleNotFoundError('No module named ensurepip')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    for _ in range(2):
        finished = run_sh("single", "--help", cwd=tmp_path, root=lacking)
        assert finished.returncode == 2
        last = finished.stderr.splitlines()[-1]
        assert (
            last.startswith("run.sh: error: ")
            and "cannot make a virtual environment; install python3-venv" in last
        ), finished.stderr
        assert finished.stderr.count("\n") == 2 and "Traceback" not in finished.stderr
        assert "the active Python lacks no-such-package>=1.0; setting up" in finished.stderr
    assert not (lacking / ".venv").exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "arguments"),
    [("dp", [3]), ("spawn", [3, "--nproc", 3])],
)
def test_number_of_devices_is_n_or_the_option(mode, arguments, tmp_path):
    finished = run_sh(mode, *arguments, "--batch-size", 1, "--device", "cpu", cwd=tmp_path)
    assert finished.returncode == 2 and "cannot be cut into 3 devices" in finished.stderr
    assert finished.stderr.count("\n") == 1, finished.stderr


@pytest.mark.full
@pytest.mark.parametrize("tee", [False, True])
def test_progress_bar_on_a_terminal_with_loss_rate_and_speed(tee, tmp_path):
    """Plain lines go to a file; someone who watches gets a bar, and the evaluation lines."""
    terminal, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))  # rows, columns
    command = [
        sys.executable,
        str(ROOT / "train_single.py"),
        *"--epochs 2 --log-every 5 --output-dir".split(),
        str(tmp_path / "run"),
    ]
    with open(tmp_path / "log", "w") as log:
        stdout = log if tee else theirs
        process = subprocess.Popen(command, cwd=tmp_path, stdout=stdout, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal says that the other side has closed
        while chunk := os.read(terminal, 65536):
            shown += chunk
    os.close(terminal)
    assert process.wait(60) == 0
    text = shown.decode()
    if tee:
        assert "step 5/22" in (tmp_path / "log").read_text(), "the lines go where no bar is"
        return
    bars = [part for part in re.split(r"[\r\n]", text) if part.startswith("epoch 2/2:")]
    assert any(
        re.search(r"\d+/22 .*loss \d\.\d+ .* lr 0\.\d+  \d+ samples/s", bar) for bar in bars
    ), text
    assert "step 5/22" not in text and len(eval_lines(text)) == 2


# ------------------------------------------------------------------- what becomes of what is printed


def break_output(kind, rank):
    """Let stdout and stderr be of no use, and let Ctrl-C come in the eighth step."""
    if kind == "closed at the start":
        for number in (1, 2):
            os.close(number)
        sys.stdout = sys.stderr = None
    elif kind == "closed later":
        after_step(3, lambda: (sys.stdout.close(), sys.stderr.close()))
    elif kind == "ascii":
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(encoding="ascii")
    else:
        reader, pipe = os.pipe()
        os.close(reader)
        for number in (1, 2):
            os.dup2(pipe, number)
    after_step(8, lambda: os.kill(os.getpid(), signal.SIGINT))


@pytest.mark.parametrize("kind", ["gone", "closed at the start", "closed later", "ascii"])
def test_what_cannot_be_printed_ends_no_run(kind, tmp_path):
    """`| tee log` and Ctrl-C, `| head`, `>&- 2>&-`, a metric named in Chinese."""
    argv = (*BASE, "--task", str(TASKS / "chinese.py"), "--log-every", "1")
    patch = functools.partial(break_output, kind)
    result = train("ddp", 2, *argv, folder=tmp_path / "été", patch=patch)
    assert result.code == 130, result.err
    assert result.checkpoint()["global_step"] >= 8 == result.train_lines()[7]["global_step"]
    assert "准确率" in result.eval_lines()[0], "in the files nothing changes"
    assert kind != "ascii" or "\\u51c6\\u786e\\u7387 0." in result.out


@pytest.mark.full
def test_exit_code_does_not_depend_on_the_last_words(tmp_path):
    """Python itself ends with 120 if it cannot write at its end what is left."""
    argv = ["--task", str(TASKS / "small.py"), *"--epochs 2 --batch-size 30 --output-dir".split()]
    command = [sys.executable, str(ROOT / "train_single.py"), *argv, str(tmp_path / "run")]
    with open("/dev/full", "w") as full:
        finished = subprocess.run(command, stdout=full, stderr=full, timeout=120)
    assert finished.returncode == 0 and (tmp_path / "run" / "last.pt").exists()


# -------------------------------------------------------------------------- what the launcher tells


def print_patience(rank):
    init = dist.init_process_group

    def watched(*arguments, **keywords):
        print("patience", (keywords.get("timeout") or arguments[2]).total_seconds())
        return init(*arguments, **keywords)

    dist.init_process_group = watched


@pytest.mark.parametrize("mode", ["ddp", "spawn"])
def test_timeout_reaches_the_process_group(mode, tmp_path):
    argv = [*BASE, *"--epochs 1 --timeout 77".split()]
    result = train(mode, 2, *argv, folder=tmp_path, patch=print_patience)
    assert printed(result.out, "patience") == [77.0, 77.0]


def count_workers_before_the_group(rank):
    init = dist.init_process_group

    def counted(*arguments, **keywords):
        print("workers:", len(multiprocessing.active_children()))
        init(*arguments, **keywords)

    dist.init_process_group = counted


@pytest.mark.parametrize("mode", ["ddp", "spawn"])
def test_workers_start_before_there_are_threads_whose_locks_a_fork_would_copy(mode, tmp_path):
    argv = [*BASE, *"--epochs 1 --workers 1".split()]
    result = train(mode, 2, *argv, folder=tmp_path, patch=count_workers_before_the_group)
    # one of each loader, on both ranks
    assert result.code == 0 and result.out.count("workers: 2") == 2, result.out
