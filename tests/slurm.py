"""A whole SLURM on one machine: munged, slurmctld and two slurmd, in one folder, on ports that are free.

Needs root and the packages slurm-wlm and munge of Debian or Ubuntu.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from launches import free_port

SYSTEM = "/usr/sbin:/sbin"  # where the daemons are
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "setpriv")
# names that can be resolved without a line in /etc/hosts; the system answers to all of 127.0.0.0/8
NODES = ("127.0.0.2", "127.0.0.3")
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
# cred_expire is also how long a job that was requeued waits, by default 120 s; 5 is the least
# a rank takes the port of its job's number: that of another SLURM on this machine must differ
FirstJobId={ports[0]}
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
SlurmdParameters=config_overrides
# a machine may be busy
SlurmdTimeout=0
MessageTimeout=60
TCPTimeout=30
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 State=UNKNOWN
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES
"""


def missing() -> str:
    """Say why no SLURM can be started here; nothing if one can."""
    path = f"{os.environ['PATH']}:{SYSTEM}"
    if absent := [program for program in PROGRAMS if not shutil.which(program, path=path)]:
        wanted = "apt-get install --no-install-recommends slurm-wlm munge"
        return f"no {', '.join(absent)} here: {wanted}"
    return "" if os.geteuid() == 0 else "SLURM's daemons must be started by root"


def wait_until(
    condition: Callable[[], Any], what: str | Callable[[], str], timeout: float = 60
) -> Any:
    """Look again and again until `condition()` holds; return its value."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, (
            f"waited {timeout} s for {what if isinstance(what, str) else what()}"
        )
        time.sleep(0.05)
    return value


class Cluster:
    """A SLURM that runs; its commands, which must be called with its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        others = ("SLURM", "SBATCH")
        kept = {name: v for name, v in os.environ.items() if not name.startswith(others)}
        path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}:{SYSTEM}"  # of the jobs too
        self.environment = {**kept, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}

    def popen(self, *command: Any, **options: Any) -> subprocess.Popen:
        """Start a command, srun for example, that ends with the process that started it."""
        words = ["setpriv", "--pdeathsig", "KILL", *map(str, command)]
        options |= {"stdin": subprocess.DEVNULL, "text": True, "env": self.environment}
        return subprocess.Popen(words, **options)

    def run(self, *command: Any, timeout: float = 120, **options: Any) -> tuple[int, str, str]:
        """Run a command to its end; return (exit code, stdout, stderr)."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.popen(*command, **pipes, **options) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return process.returncode, out, err

    def ask(self, *command: Any, **options: Any) -> str:
        """Run a command that must succeed; return what it printed."""
        code, out, err = self.run(*command, **options)
        assert code == 0, f"{' '.join(map(str, command))}: {code}\n{out}\n{err}"
        return out.strip()

    def state(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says about it."""
        words = self.ask("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def logs(self) -> str:
        return "\n".join(
            f"{path.name}:\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Start a SLURM, and end it with all its jobs."""
    # munge wants its socket where all users can go, in 107 letters
    slurm = Cluster(Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp")))
    try:
        start_daemons(slurm)
        nodes = [f"{name} idle" for name in NODES]
        question = "sinfo --noheader --Node".split()

        def ready() -> bool:
            return sorted(slurm.run(*question, "--format=%N %T")[1].splitlines()) == nodes

        wait_until(ready, lambda: f"nodes that are idle\n{slurm.logs()}")
        yield slurm
    finally:
        while pids := processes(slurm.folder):  # a daemon that is killed leaves its jobs behind
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        shutil.rmtree(slurm.folder)


def processes(folder: Path) -> list[int]:
    """Process ids of the daemons, of the commands that ask them, and of all jobs: whatever has this SLURM in its environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it is gone
            # nothing, of one that waits to be buried
            if f"SLURM_CONF={folder}/slurm.conf\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def start_daemons(slurm: Cluster) -> None:
    folder = slurm.folder
    (folder / "state").mkdir()
    folder.chmod(0o711)  # munged insists that its socket can be reached by all
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    host = socket.gethostname().split(".")[0]
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            folder=folder, host=host, ports=[free_port() for _ in range(3)], nodes=NODES
        )
    )

    def start(name: str, *command: Any) -> None:
        with open(folder / f"{name}.log", "w") as log:
            slurm.popen(*command, stdout=log, stderr=log)

    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed")]
    files += [f"--socket={folder}/munge.socket", f"--log-file={folder}/munge.log"]
    start("munged", "munged", "--foreground", *files)
    wait_until((folder / "munge.socket").exists, slurm.logs, 20)
    start("slurmctld", "slurmctld", "-D", "-i", "-f", folder / "slurm.conf")
    for name in NODES:
        start(name, "slurmd", "-D", "-N", name, "-f", folder / "slurm.conf")
