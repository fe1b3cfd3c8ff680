"""Real launches of `run.sh`, whose processes can be found, hit with signals, and never outlive the `with` block that started them."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

ROOT = Path(__file__).resolve().parent.parent
TASKS = ROOT / "tests" / "tasks"
# In a line of the log: differs from run to run
MEASURED = ("samples_per_s", "data_wait")
# Command lines: of a rank under a launcher, but not of Python's resource tracker beside it; and of a run that is one process
RANK = re.compile(r"train_(ddp|fsdp)\.py|multiprocessing-fork")
WHOLE = re.compile(r"train_(single|dp)\.py")


def parent(pid: int) -> int:
    """Return the parent's process id, or 0 if the process is gone or waits to be buried."""
    try:
        state, ppid = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:2]
    except OSError:
        return 0
    return 0 if state == "Z" else int(ppid)


def read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def marked(mark: str) -> list[int]:
    """Process ids of all that is alive and was started with a LAUNCH_MARK in its environment that begins with `mark`."""
    pids, mark = sorted(map(int, filter(str.isdigit, os.listdir("/proc")))), f"\0LAUNCH_MARK={mark}"
    return [pid for pid in pids if mark in "\0" + read(pid, "environ") and parent(pid)]


def treats(pid: int, number: int, how: str) -> bool:
    """Return whether the process catches (SigCgt) or ignores (SigIgn) a signal; see man 5 proc."""
    mask = re.search(rf"{how}:\s*(\w+)", read(pid, "status"))
    return bool(mask) and bool(int(mask[1], 16) & 1 << number - 1)


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def wait_for_end(pids: list[int], timeout: float) -> None:
    """Wait until none of the processes, which need not be children, is alive."""
    deadline = time.monotonic() + timeout
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        os.close(descriptor)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Launch:
    """A launch in a process group of its own; `processes` finds all that belongs to it by the mark in its environment."""

    def __init__(
        self,
        command: list[str],
        folder: Path,
        *options: str,
        root: Path = ROOT,
        stdout: IO | int = subprocess.PIPE,
        **environment: str,
    ) -> None:
        self.folder, self.mark = folder, f"{folder}\0"
        own = {"LAUNCH_MARK": str(folder), "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **own, **environment}
        environment["PATH"] = f"{os.path.dirname(sys.executable)}:{environment['PATH']}"
        self.lines: list[str] = []  # of stdout, that wait_for has read
        self.err = open(folder / "err", "w+")  # noqa: SIM115
        if "--output-dir" not in options:
            options = (*options, "--output-dir", str(folder / "run"))
        self.start = time.monotonic()
        files = {"stdout": stdout, "stderr": self.err, "text": True, "cwd": root}
        self.process = subprocess.Popen(
            [*command, *options], env=environment, start_new_session=True, **files
        )

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: Any) -> None:
        send(self.processes(), signal.SIGKILL)
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()
        self.err.close()

    def wait_for(self, pattern: str) -> None:
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return
        raise AssertionError(f"the run ended before it printed {pattern}: {self.errors()}")

    def wait_until(self, condition: Callable[[], Any]) -> None:
        """Look again and again, with pauses that leave the cores to the run, until `condition()` holds."""
        while not condition():
            alive = self.alive_at(time.monotonic() - self.start + 0.02)
            assert alive, f"the run ended before it: {self.errors()}"

    def alive_at(self, seconds: float) -> bool:
        """Wait until so many seconds after the start; return whether the launch still runs then."""
        try:
            self.process.wait(max(0.0, self.start + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            return True
        return False

    def processes(self) -> list[int]:
        """Process ids of all that the launch started and that are still alive."""
        return marked(self.mark)

    def ranks(self) -> list[int]:
        """Process ids of the ranks, in the order in which they were started; the one process of single and dp."""
        launcher = self.process.pid
        if WHOLE.search(read(launcher, "cmdline")):
            return [launcher]
        own = [pid for pid in self.processes() if parent(pid) == launcher]
        return [pid for pid in own if RANK.search(read(pid, "cmdline"))]

    def workers(self) -> list[int]:
        """Process ids of the loader workers: forks of the ranks, so that their command lines are the same.

        They ignore SIGUSR1; another fork, as of a program that is about to start, does not.
        """
        ranks = {pid: read(pid, "cmdline") for pid in self.ranks()}
        forks = [p for p in self.processes() if read(p, "cmdline") == ranks.get(parent(p), "none")]
        return [p for p in forks if treats(p, signal.SIGUSR1, "SigIgn")]

    def errors(self) -> str:
        return Path(self.err.name).read_text(errors="replace")

    def end(self, timeout: float = 240, grace: float = 15) -> int:
        """Wait for the launch to end and for all its processes to be gone; return the exit code as a shell shows it."""
        if self.process.stdout:
            self.process.stdout.read()
        code = self.process.wait(timeout)
        deadline = time.monotonic() + grace  # a rank whose launcher was killed still saves
        while (left := self.processes()) and time.monotonic() < deadline:
            wait_for_end(left, deadline - time.monotonic())
        names = ", ".join(read(pid, "cmdline") for pid in left).replace("\0", " ")
        assert not left, f"processes are left running: {names}"
        return code if code >= 0 else 128 - code

    def checkpoint(self, name: str = "last.pt") -> dict[str, Any]:
        return torch.load(self.folder / "run" / name, weights_only=True)
