"""The scripts as a user starts them: `bash run.sh MODE N`, real torchrun, real spawned processes, the default problem."""

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from harness import ROOT, TASKS


def run_sh(*arguments, cwd, root=ROOT, timeout=200):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["PATH"] = f"{os.path.dirname(sys.executable)}:{environment['PATH']}"
    command = ["bash", str(root / "run.sh"), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)


def eval_lines(text):
    return [line for line in text.splitlines() if "  eval  " in line]


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
    assert {path.name for path in folder.iterdir()} == {"last.pt", "previous.pt", "best.pt", "metrics.jsonl"}
    assert logged[0]["loss"] > 1.5 and logged[-2]["loss"] < 0.6


def test_all_modes_print_the_same_evaluation_lines_in_float64(tmp_path):
    """From another working directory, and with spaces, quotes, a dollar sign and a leading dash in the names of all folders."""
    copy, task = tmp_path / """-my "copy" of $HOME's""", Path("-tasks", "it's $(touch owned).py")
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "tests", "runs", "__pycache__"))
    (tmp_path / task).parent.mkdir()
    (tmp_path / task).write_text("from neighbour import *\n")
    shutil.copy(TASKS / "small.py", (tmp_path / task).with_name("neighbour.py"))
    outputs = {}
    for mode, n in (("single", 1), ("dp", 3), ("ddp", 3), ("spawn", 2)):
        folder = tmp_path / f"""-a folder's "name", $HOME $(touch owned) {mode}"""
        options = [f"--task={task}", "--dtype", "float64", "--epochs", 2, f"--output-dir={folder.name}"]
        finished = run_sh(mode, n, *options, cwd=tmp_path, root=copy)
        assert finished.returncode == 0, finished.stderr
        outputs[mode] = eval_lines(finished.stdout)
        assert len(outputs[mode]) == 2 and (folder / "last.pt").exists()
    assert outputs["single"] == outputs["dp"] == outputs["ddp"] == outputs["spawn"]
    assert len(set(outputs["single"])) == 2 and not list(tmp_path.rglob("owned"))


def test_set_up_is_done_once_when_the_active_python_lacks_something(tmp_path, monkeypatch):
    """Without a package index, so that nothing is downloaded: what run.sh decides and says, not what pip does."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("run.sh", "requirements.txt"):
        shutil.copy(ROOT / name, copy)
    (copy / "requirements.txt").write_text("no-such-package>=1.0\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    finished = run_sh("single", "--help", cwd=tmp_path, root=copy)
    assert finished.returncode != 0
    assert "the active Python lacks something that is needed; setting up" in finished.stderr and (copy / ".venv").is_dir()


@pytest.mark.parametrize("option", ["--help"])
def test_help_is_shown_and_nothing_is_started(option, tmp_path):
    finished = run_sh("ddp", 2, option, cwd=tmp_path)
    assert finished.returncode == 0 and finished.stdout.count("usage: train_ddp.py") == 1
    assert "samples in one optimizer step, over all devices" in finished.stdout
    assert list(tmp_path.iterdir()) == []


def test_progress_bar_on_a_terminal_with_loss_rate_and_speed(tmp_path):
    """Plain lines go to a file; someone who watches gets a bar, and the evaluation lines."""
    terminal, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))  # rows, columns
    command = [sys.executable, str(ROOT / "train_single.py"), "--epochs", "2", "--log-every", "5", "--output-dir", str(tmp_path / "run")]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=theirs, stderr=theirs, close_fds=True)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal says that the other side has closed
        while chunk := os.read(terminal, 65536):
            shown += chunk
    os.close(terminal)
    assert process.wait(60) == 0
    text = shown.decode()
    bars = [part for part in re.split(r"[\r\n]", text) if part.startswith("epoch 2/2:")]
    assert any(re.search(r"\d+/22 .*loss \d\.\d+  lr 0\.\d+  \d+ images/s", bar) for bar in bars), text
    assert "step 5/22" not in text and len(eval_lines(text)) == 2
