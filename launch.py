"""How the processes of a run are started, find one another, and end.

python launch.py [torchrun's options] train_ddp.py [options] is torchrun as `bash run.sh ddp N` starts it: with restarts, and ending as the
ranks ended, where torchrun itself only knows 0 and 1.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from options import UsageError


class Stopped(Exception):
    """The run ends early, on every rank at the same step, after everything worth keeping was saved; `code` is the exit code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code, self.reason = code, reason


def exit_code(main: Callable[[], int | None]) -> int:
    """Run `main` and return the exit code: 0 done, 2 bad arguments, 3 diverged, 130/143 stopped by a signal after saving."""
    try:
        code = main() or 0
    except UsageError as error:
        return announce_end(2, f"error: {error}")
    except Stopped as stop:
        wait_for_all()
        code = announce_end(stop.code, f"{stop.reason} (exit code {stop.code})")
    except RuntimeError as error:
        if "find_unused_parameters=True" in str(error):
            raise RuntimeError("some parameters took no part in the loss of the last step: add --find-unused-parameters") from error
        raise
    if is_distributed():
        dist.destroy_process_group()
    return code


def announce_end(code: int, message: str) -> int:
    """Say on rank 0 why the run ends, and return the exit code of this process.

    torchrun would restart processes that ended with a code, and has only 0 and 1 itself. So under `run.sh ddp`, which names the file
    END_FILE, the code and the message go there, and the process ends with 0.
    """
    path = os.environ.get("END_FILE")
    if path and is_rank0():
        Path(path).write_text(f"{code} {message}\n")
    elif not path:
        print0(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    return 0 if path else code


def is_distributed() -> bool:
    return dist.is_initialized()


def is_rank0() -> bool:
    """Global rank 0, not local rank 0: of several machines only one may write."""
    return dist.get_rank() == 0 if is_distributed() else int(os.environ.get("RANK", 0)) == 0


def wait_for_all() -> None:
    """Call it on every rank before the run ends: no rank leaves before rank 0 has saved, or while others still talk to it."""
    if is_distributed():
        dist.barrier()


def print0(*values: Any, file: Any = None) -> None:
    """Print on rank 0 only."""
    if is_rank0():
        print(*values, file=file, flush=True)


def launcher_ranks() -> tuple[int, int, int]:
    """Return (rank, local rank, world size) as torchrun or SLURM's srun say, and end with the launcher if it is killed."""
    if "RANK" not in os.environ and "SLURM_PROCID" in os.environ:
        if os.environ.get("SLURM_NNODES", "1") != "1" and "MASTER_ADDR" not in os.environ:
            command = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
            raise UsageError(f"several nodes, and no MASTER_ADDR to meet at; say before srun: {command}")
        theirs = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_NTASKS"}
        os.environ.update({name: os.environ[variable] for name, variable in theirs.items()})
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(20_000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 10_000))
    try:
        rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    except KeyError as error:
        command = "torchrun --standalone --nproc-per-node 2 train_ddp.py [options], or: bash run.sh ddp 2 [options]"
        raise UsageError(f"no launcher ({error} is not set). Start it with {command}") from error
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: what a killed launcher leaves would train on unseen
    return rank, local_rank, world_size


def timeout(args: argparse.Namespace) -> timedelta:
    """How long a rank waits for the others before it gives up."""
    return timedelta(seconds=args.timeout)


def rendezvous_address(args: argparse.Namespace) -> tuple[str, int]:
    """Where spawned processes meet: `--dist-url`, or on one machine its loopback and port 0, which means any free one."""
    if args.dist_url is None:
        return "127.0.0.1", 0
    url = urlsplit(args.dist_url)
    try:
        socket.getaddrinfo(url.hostname, url.port)
    except OSError as error:
        raise UsageError(f"--dist-url {args.dist_url}: {url.hostname} is no known host ({error}); try its IP address") from error
    return url.hostname, url.port


def run_worker(local_rank: int, worker: Callable, *arguments: Any) -> None:
    """What a spawned process runs."""
    sys.exit(exit_code(functools.partial(worker, local_rank, *arguments)))


def join(context: mp.ProcessContext) -> int:
    """Wait for spawned processes, hand signals on to them, and return their exit code; a traceback of theirs is raised here."""

    def hand_on(number: int, frame: Any) -> None:
        for process in context.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, hand_on)
    try:
        while not context.join(grace_period=30):
            pass
    except mp.ProcessExitedException as error:
        if error.exit_code not in (2, 3, 130, 143):
            print(error, file=sys.stderr)
        return error.exit_code if error.exit_code > 0 else 1
    return 0


def backend(device: torch.device) -> str:
    """Gloo for what is on the CPU, and the accelerator's own library for the rest."""
    accelerator = f",{device.type}:{dist.get_default_backend_for_device(device)}" if device.type != "cpu" else ""
    return f"cpu:gloo{accelerator}"


def torchrun(argv: list[str]) -> int:
    """Run torchrun in this process and return the exit code of the ranks; say last on stderr why they ended early."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    def hand_on(number: int, frame: Any) -> None:
        raise SignalException(f"got signal {number}", signal.Signals(number))  # torchrun then sends it to the ranks and waits for them

    with tempfile.TemporaryDirectory() as folder:
        os.environ["END_FILE"] = str(Path(folder) / "end")  # rank 0 writes why it ended on purpose: see announce_end
        # A store of its own for every start: in the one that torchrun shares, restarted ranks find the addresses of dead ones and hang
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        signal.signal(signal.SIGUSR1, hand_on)  # SLURM's warning; torchrun itself does not know it and would die
        code, reason = 0, ""
        try:
            run.main(argv)
        except SignalException as stop:
            code, reason = 128 + stop.sigval.value, f"ended by {stop.sigval.name} before the first step"
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            died = f"killed by {failure.signal_name()}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
            message = failure.message if failure.exitcode > 0 and failure.error_file_data else died
            code, reason = 1, f"{error}\nrank {rank} failed first: {message}"
        if (end := Path(os.environ["END_FILE"])).exists():
            written, reason = end.read_text().strip().split(" ", 1)
            code = int(written)
    if reason:
        print(f"train_ddp.py: {reason}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(torchrun(sys.argv[1:]))
