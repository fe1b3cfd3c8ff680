"""How one process of a run begins, meets the others, and ends.

In this order: a main that a notebook calls; where the ranks meet, and how SLURM numbers them; how a
process ends, and with which exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import os
import re
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from common import UsageError
from machinery.signals import SIGNALS, handle_signals, ignore_signals, in_main_thread
from sampling import end_with_parent

FAILED = 4  # exit code of a rank that failed, for machinery/launch.py, which makes it 1
GRACE = 10  # seconds until the other ranks are killed after a failure: one may hang
_is_program = False  # run_main sets it; it stays False where a notebook calls main


class Stopped(Exception):
    """Every rank ends at the same step, with this exit code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code, self.reason = code, reason


class TaskError(UsageError):
    """What a file of the user raised before the run. Its cause has the traceback."""


def bad_input(message: str) -> Exception:
    """Return the error for bad input that every rank raises together."""
    return Stopped(2, f"error: {message}") if dist.is_initialized() else UsageError(message)


# ------------------------------------------------------------------------- main called by a program


class Output:
    """Stand in for stdout or stderr: what cannot be printed never ends a run.

    A pipe may be closed, a disk full, a terminal gone. Letters that the encoding lacks are escaped.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream or open(os.devnull, "w")  # noqa: SIM115

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it was closed
            encoding = getattr(self.stream, "encoding", None) or "utf-8"
            self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()


def leaves_no_trace(main: Callable[..., int]) -> Callable[..., int]:
    """Decorate a script's main: after the run a notebook has its own signals and environment."""

    @functools.wraps(main)
    def wrapper(*arguments: Any, **options: Any) -> int:
        if _is_program:  # which ends then
            return main(*arguments, **options)
        environment, mask = dict(os.environ), signal.pthread_sigmask(signal.SIG_BLOCK, ())
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        if in_main_thread() and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            handlers[signal.SIGCHLD] = signal.SIG_IGN
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it hides exit codes of ranks
        try:
            with (
                contextlib.redirect_stdout(Output(sys.stdout)),
                contextlib.redirect_stderr(Output(sys.stderr)),
            ):
                return main(*arguments, **options)
        finally:
            os.environ.clear()
            os.environ.update(environment)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if in_main_thread():
                for number, handler in handlers.items():
                    signal.signal(number, handler or signal.SIG_DFL)  # None: a library's, in C

    return wrapper


# -------------------------------------------------------------------------- where ranks find others


# The variables by which a launcher tells a rank who it is.
OF_LAUNCHER = ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LAUNCH_PID", "LAUNCH_RENDEZVOUS_FILE"]
OF_LAUNCHER += ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"]


def forget_launcher() -> None:
    """Drop the variables of a launcher around this run, which has other ranks, or none."""
    for name in OF_LAUNCHER:
        os.environ.pop(name, None)


def follow_launcher() -> None:
    """End with the launcher of this rank: without it a rank would train on unseen."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun, maybe within a rank of run.sh
        os.environ.pop("LAUNCH_PID", None)
        os.environ.pop("LAUNCH_RENDEZVOUS_FILE", None)
    end_with_parent(signal.SIGKILL, int(os.environ.get("LAUNCH_PID", os.getppid())))


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


# --------------------------------------------------------------------------------------- exit codes


def run_main(main: Callable[[], int], hard_exit: bool = False) -> int:
    """Run `main` and return the exit code of this process.

    0 done, 1 failed, 2 bad arguments, 3 diverged, 129, 130 or 143 stopped by a signal after saving;
    a failed rank tells its launcher FAILED. A signal before training begins ends the process at
    once: nothing can be lost yet. `hard_exit` ends the process here, without Python's clean-up.

    The ranks raise Stopped together, and leave together. Any other error is of one rank: it ends
    without waiting for the others, which would wait for it.
    """
    global _is_program
    _is_program = True
    atexit.register(ignore_signals)
    # If stdin is closed, the next open file gets its number, 0: maybe a checkpoint.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout, sys.stderr = Output(sys.stdout), Output(sys.stderr)
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # kill -USR2 shows where a rank hangs
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it hides the exit codes of ranks
    if os.getpid() == 1:  # the first process of a container, which nothing ends by default
        handle_signals(lambda number, frame: leave(128 + number))
    elif signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends at once, without a traceback
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # they are blocked in a spawned process
    try:
        code, reason = main(), ""
        if code is None:  # torch's @record returns it after a task's sys.exit(0)
            raise RuntimeError("the run was left before its end, without an error")
    except UsageError as error:
        if first_to_fail():
            if isinstance(error, TaskError):
                traceback.print_exception(error.__cause__)
            tell(f"error: {error}")
        if dist.is_initialized():
            leave(2)  # without a barrier: the other ranks do not know of the error
        return 2
    except Stopped as stop:
        code, reason = stop.code, stop.reason
    except (Exception, SystemExit) as error:
        return fail(error)
    if dist.is_initialized():  # not in the except block: the exception held main's DDP
        dist.barrier()  # rank 0 has saved, and nobody waits any more
        dist.destroy_process_group()
    if reason and os.environ.get("LOCAL_RANK", "0") == "0":
        tell(f"{reason} (exit code {code})")
    if hard_exit:
        atexit._run_exitfuncs()  # of the task and its libraries
        leave(code)
    return code


def fail(error: BaseException) -> NoReturn:
    """Print what a rank raised, and end the process at once: the other ranks wait for it."""
    meaning = ""
    if isinstance(error, SystemExit):
        meaning = f"the run was left before its end, by sys.exit({error.code!r})"
    elif "find_unused_parameters=True" in str(error):
        meaning = "some parameters took no part in the last loss: add --find-unused-parameters"
    if first_to_fail():
        traceback.print_exception(error)
        tell(meaning)
    leave(FAILED if {"LAUNCH_PID", "RANK"} <= os.environ.keys() else 1)


def first_to_fail() -> bool:
    """Return whether no other rank of this machine has failed before: only the first one prints.

    The others have lost their connection to it, or have the same error.
    """
    if file := os.environ.get("LAUNCH_RENDEZVOUS_FILE"):
        mark = Path(f"{file}.failed")
    elif file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        mark = Path(file).parents[1] / "failed"  # in the folder of all ranks
    else:
        return True
    try:
        mark.touch(exist_ok=False)
    except OSError:
        return not mark.exists()
    return True


def leave(code: int) -> NoReturn:
    """End a rank at once. Python's clean-up may hang while threads still talk to other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def tell(message: str) -> None:
    """Print the message, as the last line on stderr."""
    if message:
        print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
