"""Where the ranks of a run find each other, and how torchrun, run.sh and SLURM number them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path

from sampling import end_with_parent

# The variables by which a launcher tells a rank who it is.
OF_LAUNCHER = ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LAUNCH_PID", "LAUNCH_RENDEZVOUS_FILE"]
OF_LAUNCHER += ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"]


def forget_launcher() -> None:
    """Drop the variables of a launcher around this run, which has other ranks, or none."""
    for name in OF_LAUNCHER:
        os.environ.pop(name, None)


def follow_launcher() -> None:
    """End with the launcher of this rank: without it a rank would train on unseen.

    A rank that was started by hand has none: under nohup it outlives its shell.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun, maybe within a rank of run.sh
        os.environ.pop("LAUNCH_PID", None)
        os.environ.pop("LAUNCH_RENDEZVOUS_FILE", None)
        end_with_parent(signal.SIGKILL, os.getppid())
    elif "LAUNCH_PID" in os.environ:
        end_with_parent(signal.SIGKILL, int(os.environ["LAUNCH_PID"]))


def init_method() -> str:
    """Return where the ranks of train_ddp.py and train_fsdp.py meet, for init_process_group.

    Under run.sh it is a file: nothing listens to the network, and no port can be taken. Otherwise
    it is MASTER_ADDR and MASTER_PORT, and gloo takes the interface that leads there.
    """
    if file := os.environ.get("LAUNCH_RENDEZVOUS_FILE"):
        ranks = f"rank={os.environ['RANK']}&world_size={os.environ['WORLD_SIZE']}"
        return f"file://{file}?{ranks}"
    use_interface_to(os.environ.get("MASTER_ADDR", ""))
    return "env://"


def timeout(seconds: float) -> timedelta:
    """Return how long a rank waits for the others; NCCL is told to end soon after that."""
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "500")  # else a minute more
    return timedelta(seconds=seconds)


def take_ranks_of_slurm() -> bool:
    """Translate SLURM's variables into torchrun's (RANK, LOCAL_RANK, ...); return True under srun.

    A batch script has most of these variables too, but no step: what it starts without srun is
    not a rank.
    """
    if "RANK" in os.environ or "SLURM_STEP_NODELIST" not in os.environ:
        return False
    get = os.environ.__getitem__
    per_node = re.findall(r"(\d+)(?:\(x(\d+)\))?", get("SLURM_STEP_TASKS_PER_NODE"))  # as 8(x2),4
    tasks = [int(count) for count, times in per_node for _ in range(int(times or 1))]  # [8, 8, 4]
    # gpu[07-09],x1 begins with gpu07
    first = re.sub(r"\[(\w+)[^]]*\]", r"\1", get("SLURM_STEP_NODELIST")).split(",")[0]
    os.environ.update(
        RANK=get("SLURM_PROCID"),
        LOCAL_RANK=get("SLURM_LOCALID"),
        WORLD_SIZE=get("SLURM_STEP_NUM_TASKS"),
        LOCAL_WORLD_SIZE=str(tasks[int(get("SLURM_NODEID"))]),
    )
    os.environ.setdefault("MASTER_ADDR", first if len(tasks) > 1 else "127.0.0.1")
    # Another job, or another step of this job, may run on the same node.
    job, step = int(get("SLURM_JOB_ID")), int(os.environ.get("SLURM_STEP_ID") or 0)
    os.environ.setdefault("MASTER_PORT", str(20_000 + (job + 997 * step) % 10_000))
    return True


def stay_on_this_machine() -> None:
    """Let ranks that are all here talk over the loopback, which nobody else can reach."""
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")


def use_interface_to(host: str) -> None:
    """Let gloo talk over the interface that leads to `host`, by the system's table of IPv4 routes.

    By itself gloo takes the address of the machine's own name, which is often a loopback.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with contextlib.suppress(OSError, UnicodeError):  # the ranks will say that there is no way
        packed = socket.inet_aton(socket.gethostbyname(host))
        address, narrowest = int.from_bytes(packed, sys.byteorder), -1
        if packed[0] == 127:
            return  # this machine
        for line in Path("/proc/net/route").read_text().splitlines()[1:]:
            name, network, *_, mask = line.split()[:8]
            bits = int(mask, 16)
            if address & bits == int(network, 16) and bits.bit_count() > narrowest:
                narrowest, os.environ["GLOO_SOCKET_IFNAME"] = bits.bit_count(), name
