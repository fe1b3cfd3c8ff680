"""tools/compare: equal runs are called the same, and a planted fault is named by its cause."""

import functools
import importlib.util
import os
import runpy
import shlex
import sys

import pytest
import torch
from harness import ROOT, TASKS, run_processes
from launches import free_port

from tools.compare import compare as program


def watched_rank(rank, world, port, folder, script, arguments):
    """Be a process of a command: under the observer, as a fork of a process that has torch."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), COMPARE_DIR=str(folder))
    path = ROOT / "tools" / "compare" / "observer" / "sitecustomize.py"
    spec = importlib.util.spec_from_file_location("observer", path)
    observer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(observer)
    observer.install()
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def forked(command, folder, timeout):
    """Stand in for `start`: run "N SCRIPT ARGUMENTS" on N ranks."""
    world, script, *arguments = shlex.split(command)
    shared = {"world": int(world), "port": free_port(), "folder": folder}
    shared |= {"script": str(TASKS / script), "arguments": arguments}
    ranks = [functools.partial(watched_rank, rank, **shared) for rank in range(int(world))]
    (folder / "out").mkdir()
    results = run_processes(ranks, folder / "out", timeout)
    (folder / "log").write_text("".join(out + err for _, out, err in results))
    return max(code for code, *_ in results)
