"""Launches on one machine: `bash run.sh MODE N` as a user starts it."""

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
import venv

import pytest
from launches import ROOT, TASKS


def run_sh(*arguments, cwd, root=ROOT, python=sys.executable, **more):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PATH": f"{os.path.dirname(python)}:{os.environ['PATH']}", **more}
    command = ["bash", str(root / "run.sh"), *map(str, arguments)]
    options = {"cwd": cwd, "env": environment, "capture_output": True, "text": True}
    return subprocess.run(command, timeout=300, **options)


def eval_lines(text):
    return [line for line in text.splitlines() if "  eval  " in line]


@pytest.mark.full
def test_ddp_with_default_options_reads_digits(tmp_path):
    finished = run_sh("ddp", cwd=tmp_path)
    assert finished.returncode == 0 and finished.stderr == ""
    lines = eval_lines(finished.stdout)
    assert len(lines) == 30, "one line an epoch, from rank 0 alone"
    top1 = float(re.search(r"top1 ([\d.]+)", lines[-1])[1])
    assert top1 >= 0.98 and lines[-1].endswith("(360 samples)")
    (folder,) = (tmp_path / "runs").iterdir()
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert logged[-1]["event"] == "eval" and round(logged[-1]["top1"], 6) == top1
    assert {path.name for path in folder.iterdir()} == {"last.pt", "best.pt", "metrics.jsonl"}


@pytest.mark.full
def test_all_modes_print_the_same_evaluation_lines_in_float64(tmp_path):
    """From another working directory, by a link to run.sh, with spaces, quotes and a leading dash in all names.

    The task has a neighbour with the name of a module in engine/, where the launcher of ddp lies.
    """
    copy, task = tmp_path / """-my "copy" of $HOME's""", tmp_path / "-tasks/it's $(touch owned).py"
    unwanted = ".git .venv tests tools runs __pycache__".split()
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*unwanted))
    task.parent.mkdir()
    task.write_text("from modes import *\n")
    shutil.copy(TASKS / "small.py", task.with_name("modes.py"))
    (link := tmp_path / "a link's").mkdir()
    (link / "run.sh").symlink_to(os.path.relpath(copy / "run.sh", link.resolve()))
    outputs = {}
    for mode, n in (("single", ""), ("dp", 3), ("ddp", 3), ("spawn", 2), ("fsdp", 2)):
        folder = tmp_path / f"""-a folder's "name", $(touch owned) {mode}"""
        options = [f"--task={task.relative_to(tmp_path)}", f"--output-dir={folder.name}"]
        options += "--dtype float64 --epochs 2 --device cpu".split()
        finished = run_sh(mode, *[n] * bool(n), *options, cwd=tmp_path, root=link)
        assert finished.returncode == 0, finished.stderr
        outputs[mode] = eval_lines(finished.stdout)
        assert len(outputs[mode]) == 2 and (folder / "last.pt").exists()
    assert all(lines == outputs["single"] for lines in outputs.values())
    assert len({*outputs["single"]}) == 2 and not [*tmp_path.rglob("owned")]
    assert [path.name for path in link.iterdir()] == ["run.sh"]


@pytest.mark.full
def test_set_up_is_done_once_when_the_active_python_lacks_something(tmp_path):
    """Without a package index pip fails, and downloads nothing."""
    (copy := tmp_path / "copy").mkdir()
    shutil.copy(ROOT / "run.sh", copy)
    (copy / "requirements.txt").write_text("no-such-package>=1.0\n")
    venv.create(tmp_path / "empty", symlinks=True)
    python = str(tmp_path / "empty" / "bin" / "python3")
    finished = run_sh("single", "--help", cwd=tmp_path, root=copy, python=python, PIP_NO_INDEX="1")
    assert finished.returncode != 0 and "no-such-package" in finished.stderr
    assert f"installing into {copy / '.venv'}, once" in finished.stderr
    assert (copy / ".venv").is_dir()


@pytest.mark.parametrize("arguments", [[], ["--help"], ["nonsense"], ["ddp", "two"], ["ddp", "0"]])
def test_words_of_run_sh_itself(arguments, tmp_path):
    finished = run_sh(*arguments, cwd=tmp_path)
    if arguments in ([], ["--help"]):
        assert finished.returncode == 0 and "bash run.sh MODE [N] [options]" in finished.stdout
    else:
        assert finished.returncode == 2 and finished.stderr.startswith("run.sh: error: ")
        assert finished.stderr.count("\n") == 1


NAMES = """it's "$HOME" $(touch owned) `touch owned` ; touch owned & * \\ -x"""
STARTED = {
    ("single", "--freeze", NAMES, "*", ""): ["train_single.py", "--freeze", NAMES, "*", ""],
    ("dp", "3", "--lr", "1"): ["train_dp.py", "--replicas", "3", "--lr", "1"],
    ("spawn", "3"): ["train_spawn.py", "--nproc", "3"],
    ("ddp", "3", "--lr", "1"): ["engine/launch.py", "ddp", "3", "--lr", "1"],
    ("fsdp", "--lr", "1"): ["engine/launch.py", "fsdp", "auto", "--lr", "1"],
}


@pytest.mark.parametrize("words", STARTED, ids=lambda words: words[0])
def test_what_run_sh_starts(words, tmp_path):
    """With a Python that prints what it is called with, one word a line."""
    (python := tmp_path / "python3").write_text('#!/bin/sh\n[ "$1" = -c ] || printf "%s\\n" "$@"\n')
    python.chmod(0o755)
    finished = run_sh(*words, cwd=tmp_path, python=str(python))
    assert finished.stdout.split("\n")[:-1] == [f"{ROOT}/{STARTED[words][0]}", *STARTED[words][1:]]
    assert [*tmp_path.iterdir()] == [python]


@pytest.mark.full
@pytest.mark.parametrize("tee", [False, True])
def test_someone_who_watches_gets_a_progress_bar_and_the_lines(tee, tmp_path):
    pytest.importorskip("tqdm")
    terminal, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))  # rows, columns
    command = [sys.executable, str(ROOT / "train_single.py"), *"--epochs 2 --log-every 5".split()]
    command += ["--output-dir", str(tmp_path / "run")]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, stdout=log if tee else theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal says that the other side has closed
        while chunk := os.read(terminal, 65536):
            shown += chunk
    os.close(terminal)
    assert process.wait(60) == 0 and re.search(rb"\d+/22 \[", shown), shown
    text = (tmp_path / "log").read_text() if tee else shown.decode()
    assert "step 5/22" in text and len(eval_lines(text)) == 2
