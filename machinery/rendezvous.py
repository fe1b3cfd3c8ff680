"""Where the ranks of a run find each other, and over which network interface they talk."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import struct
from datetime import timedelta

import torch
import torch.distributed as dist

from common import UsageError
from machinery.processes import attempt
from sampling import end_with_parent


def ranks_from_env() -> tuple[int, int, int]:
    """Return (rank, local rank, world size) from the launcher's variables.

    Under srun parse_args has translated SLURM's. From here on the process ends with its launcher,
    and gloo uses the interface to MASTER_ADDR. Raises UsageError if there is no launcher.
    """
    try:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        rank, local_rank, world_size = (int(os.environ[name]) for name in names)
    except KeyError as error:
        raise UsageError(
            f"no launcher ({error} is not set). Start it with torchrun --standalone "
            "--nproc-per-node 2 train_ddp.py [options], or: bash run.sh ddp 2 [options]"
        ) from error
    end_with_parent(signal.SIGKILL)  # without its launcher it would train on unseen
    if os.getppid() != int(os.environ.get("LAUNCH_PID", os.getppid())):
        os._exit(1)  # the launcher was killed before
    use_interface_to(os.environ.get("MASTER_ADDR", ""))
    return rank, local_rank, world_size


def init_method() -> str:
    """Return where the ranks of train_ddp.py and train_fsdp.py meet.

    In general that is MASTER_ADDR and MASTER_PORT. Under run.sh on one machine it is a file,
    a new one for each attempt: nothing listens to the network, and no port can be taken.
    """
    file = os.environ.get("LAUNCH_RENDEZVOUS_FILE")
    return f"file://{file}-{attempt()}" if file else "env://"


def backend(device: torch.device) -> str:
    """Return gloo for CPU tensors, and for an accelerator its own library too."""
    if device.type == "cpu":
        return "gloo"  # with "cpu:gloo" torch 2.8 may find no default backend
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def timeout(seconds: float) -> timedelta:
    """Return how long a rank waits for the others before it gives up."""
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
    tasks = [int(count) for count, times in per_node for _ in range(int(times or 1))]
    first = re.sub(r"\[(\w+)[^]]*\]", r"\1", get("SLURM_STEP_NODELIST")).split(",")[0]  # gpu[07-09]
    os.environ.update(
        RANK=get("SLURM_PROCID"),
        LOCAL_RANK=get("SLURM_LOCALID"),
        WORLD_SIZE=get("SLURM_STEP_NUM_TASKS"),
        LOCAL_WORLD_SIZE=str(tasks[int(get("SLURM_NODEID"))]),
    )
    os.environ.setdefault("MASTER_ADDR", first if len(tasks) > 1 else "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(20_000 + int(get("SLURM_JOB_ID")) % 10_000))
    return True


def check_address(option: str, host: str, port: int, node_rank: int, nnodes: int) -> None:
    """Raise UsageError if the host is unknown, or if the first node cannot listen there."""
    try:
        found = socket.getaddrinfo(host, None)[0][4][0]
        if node_rank == 0:
            socket.create_server((host, port)).close()
    except (OSError, UnicodeError, OverflowError) as error:
        wanted = "it must lead to the node with --node-rank 0, to a port that is free there"
        raise UsageError(f"{option}: {error}; {wanted}") from error
    if nnodes > 1 and found.startswith("127.") and host not in (found, "localhost"):
        problem = f"{host} is {found} here, which other nodes cannot reach (see /etc/hosts)"
        raise UsageError(f"{option}: {problem}; give its IP address")


def stay_on_this_machine() -> None:
    """Let ranks that are all here talk over the loopback, which nobody else can reach."""
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")


def use_interface_to(host: str) -> None:
    """Let gloo talk over the interface that leads to `host`.

    By itself gloo takes the address of the machine's own name, which is often a loopback.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    no_way = contextlib.suppress(OSError, UnicodeError)  # the ranks will say so
    with no_way, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex() if not own.startswith("127.") else ():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR, netdevice(7)
                if socket.inet_ntoa(answer[20:24]) == own:
                    os.environ["GLOO_SOCKET_IFNAME"] = name
