"""Real signals to real launches: saved at a step boundary, the exit code says which signal it was, nothing is left running."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from harness import ROOT, TASKS

OPTIONS = ["--task", str(TASKS / "small.py"), "--batch-size", "30", "--epochs", "10000", "--log-every", "6"]
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 0}
LAUNCHES = {
    "single": ["bash", "run.sh", "single"],
    "spawn": ["bash", "run.sh", "spawn", "2"],
    "ddp": ["bash", "run.sh", "ddp", "2"],
}


class Launch:
    """A launch in a process group of its own; `processes` finds all that belongs to it by the output folder in its environment."""

    def __init__(self, command, folder, *options, **environment):
        self.mark = str(folder)
        environment = {**os.environ, "LAUNCH_MARK": self.mark, "OMP_NUM_THREADS": "1", **environment}
        environment["PATH"] = f"{os.path.dirname(sys.executable)}:{environment['PATH']}"
        self.err = open(folder / "err", "w+")  # noqa: SIM115
        command = [*command, *OPTIONS, "--output-dir", str(folder / "run"), *options]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=self.err, text=True, start_new_session=True
        )
        self.folder = folder

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        self.err.close()

    def wait_for(self, pattern):
        for line in self.process.stdout:
            if re.search(pattern, line):
                return
        raise AssertionError(f"the run ended before it printed {pattern}: {self.errors()}")

    def processes(self):
        """Process ids of all that the launch started and that are still alive."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/environ", "rb") as environ, open(f"/proc/{pid}/stat") as stat:
                    if f"LAUNCH_MARK={self.mark}\0".encode() in environ.read() and stat.read().rsplit(")", 1)[1].split()[0] != "Z":
                        found.append(int(pid))
            except OSError:
                continue
        return found

    def ranks(self):
        """Process ids of the ranks, rank 0 first."""
        found = {}
        for pid in self.processes():
            with open(f"/proc/{pid}/environ") as environ, open(f"/proc/{pid}/cmdline") as command:
                rank = re.search(r"\0RANK=(\d+)", environ.read())
                if rank and "train_ddp" in command.read():
                    found.setdefault(int(rank[1]), pid)
        return [found[rank] for rank in sorted(found)]

    def errors(self):
        self.err.seek(0)
        return self.err.read()

    def end(self, timeout=60):
        """Wait for the launch to end and for all its processes to be gone; return the exit code."""
        self.process.stdout.read()
        code = self.process.wait(timeout)
        deadline = time.monotonic() + 15  # a rank whose launcher was killed still saves
        while self.processes() and time.monotonic() < deadline:
            os.sched_yield()
        assert self.processes() == [], "processes are left running"
        return code

    def checkpoint(self):
        return torch.load(self.folder / "run" / "last.pt", weights_only=True)


@pytest.mark.parametrize(
    ("mode", "workers", "number"),
    [
        ("single", 2, signal.SIGTERM),
        ("single", 0, signal.SIGUSR1),
        ("spawn", 2, signal.SIGINT),
        ("ddp", 0, signal.SIGTERM),
        ("ddp", 2, signal.SIGUSR1),
    ],
)
def test_signal_to_the_launcher_saves_and_ends_with_its_code(mode, workers, number, tmp_path):
    with Launch(LAUNCHES[mode], tmp_path, "--workers", str(workers)) as launch:
        launch.wait_for("epoch 3/.* step 6/6")
        launch.process.send_signal(number)
        assert launch.end() == CODES[number], launch.errors()
        saved = launch.checkpoint()
        assert saved["global_step"] > 12 and not list((tmp_path / "run").glob(".*tmp*"))
        message = f"stopped by {number.name} after saving step {saved['global_step']} (exit code {CODES[number]})"
        assert launch.errors().rstrip().endswith(message), "the last line says what happened"


@pytest.mark.parametrize("mode", ["spawn", "ddp"])
def test_ctrl_c_reaches_the_whole_process_group(mode, tmp_path):
    with Launch(LAUNCHES[mode], tmp_path) as launch:
        launch.wait_for("epoch 3/.* step 6/6")
        os.killpg(launch.process.pid, signal.SIGINT)
        assert launch.end() == 130, launch.errors()
        assert launch.checkpoint()["global_step"] > 12


def test_signal_to_one_rank_stops_all_ranks_at_the_same_step(tmp_path):
    with Launch(LAUNCHES["ddp"], tmp_path) as launch:
        launch.wait_for("epoch 3/.* step 6/6")
        os.kill(launch.ranks()[1], signal.SIGTERM)
        assert launch.end() == 143, launch.errors()
        assert "restart" not in launch.errors().lower(), "a stop that was asked for is no failure"


@pytest.mark.parametrize("mode", ["spawn", "ddp"])
def test_killed_launcher_leaves_no_process_behind(mode, tmp_path):
    with Launch(LAUNCHES[mode], tmp_path, "--workers", "1") as launch:
        launch.wait_for("epoch 3/.* step 6/6")
        if mode == "ddp":  # the launcher proper is torchrun, the parent of the ranks
            with open(f"/proc/{launch.ranks()[0]}/stat") as stat:
                os.kill(int(stat.read().rsplit(")", 1)[1].split()[1]), signal.SIGKILL)
        else:
            launch.process.kill()
        assert launch.end() != 0
