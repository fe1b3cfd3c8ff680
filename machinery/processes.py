"""How one process of a run begins and ends: device, threads, signals, exit code."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import logging
import multiprocessing.util
import os
import re
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.backends import cudnn

from common import UsageError, print0
from sampling import own_cores

DRIVERS = ("/dev/nvidiactl", "/dev/kfd")  # of NVIDIA and of AMD
# They stop a run at the next step; after saving it ends with this exit code. Of two the later in
# this list wins.
SIGNALS = {signal.SIGUSR1: 0, signal.SIGINT: 130, signal.SIGTERM: 143}
# A rank raises this when another is gone. A lost connection of the task itself has other words.
LOST_CONNECTION = re.compile(
    r"(gloo|NCCL|SocketImpl|Store).*"
    r"(by peer|onnection refused|[Bb]roken pipe|remote process exited|got 0 bytes)",
    re.DOTALL,
)
FAILED = 4  # exit code of a rank that failed, for machinery/launch.py, which makes it 1
GRACE = 10  # seconds that the ranks have after a failure: one may hang, or its disk
REPEATED = 30  # seconds that the other ranks wait before they print the first rank's error too
NOT_MET = re.compile("DistStoreError|DistNetworkError|Wait timeout|connectFullMesh")
RENDEZVOUS_HINT = (
    "Check that every node was started, with its own --node-rank and the address and port of the "
    "first node, and that no firewall blocks the ports. See the terminals of the other nodes."
)
_is_program = False  # run_main sets it; it stays False where a notebook calls main
at_end = contextlib.ExitStack()  # puts back, at the end of a run, what was registered here


class Stopped(Exception):
    """Every rank ends at the same step, with this exit code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code, self.reason = code, reason


def error_on_all(message: str) -> Exception:
    """Return the error for bad input that every rank raises together."""
    return Stopped(2, f"error: {message}") if dist.is_initialized() else UsageError(message)


def leaves_no_trace(main: Callable[..., int]) -> Callable[..., int]:
    """Decorate a script's main: a notebook or a service that calls it is as before afterwards."""

    @functools.wraps(main)
    def wrapper(*arguments: Any, **options: Any) -> int:
        if _is_program:
            return main(*arguments, **options)
        environment = dict(os.environ)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            return main(*arguments, **options)
        finally:
            at_end.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.environ.clear()
            os.environ.update(environment)

    return wrapper


def handle_signals(handler: Callable[[int, Any], None]) -> None:
    """Let `handler` answer the signals that stop a run, until the run ends."""
    if threading.current_thread() is not threading.main_thread():
        return  # Python lets only the main thread decide it
    for number in SIGNALS:
        before = signal.signal(number, handler)
        # None: a library in C had set it
        at_end.callback(signal.signal, number, signal.SIG_DFL if before is None else before)


# --------------------------------------------------------------------------------------- device


def resolve_device_type(name: str) -> str:
    """Return "cpu" or the accelerator's type; raises UsageError if the device is not here."""
    found = "cpu"
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator().type
    if name not in ("auto", "cpu", found):
        available = "auto, cpu" if found == "cpu" else f"auto, cpu, {found}"
        raise UsageError(f"--device {name}: not on this machine; available: {available}")
    return found if name == "auto" else name


def warn_of_cpu(name: str) -> None:
    """Say so if --device auto has taken the CPU of a machine that has an accelerator's driver."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    driver = next((path for path in DRIVERS if os.path.exists(path)), None)
    if name == "auto" and driver and not hidden:
        found = f"torch {torch.__version__} finds no accelerator, but {driver} is there"
        advice = "install the torch that fits it, or say --device cpu"
        print0(f"warning: this run is on the CPU: {found}; {advice}", file=sys.stderr)


def set_up_device(name: str, deterministic: bool = False, local_rank: int = 0) -> torch.device:
    """Select this process's device, before anything is allocated on device 0; set threads.

    `deterministic` takes kernels that give the same bits in every run.
    """
    device_type = resolve_device_type(name)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # CUDA refuses without it
    torch.use_deterministic_algorithms(deterministic)
    cudnn.benchmark = not deterministic
    if deterministic:
        # Convolutions would round to 10 bits. A caller may have set it by torch's newer names.
        with contextlib.suppress(RuntimeError):
            cudnn.allow_tf32 = False
    if "OMP_NUM_THREADS" not in os.environ:  # N processes with all cores each would fight for them
        torch.set_num_threads(own_cores())
    if device_type == "cpu":
        warn_of_cpu(name)
        return torch.device("cpu")
    torch.set_float32_matmul_precision("highest" if deterministic else "high")  # high allows TF32
    index = local_rank % torch.accelerator.device_count()  # SLURM may show each task one device
    torch.accelerator.set_device_index(index)
    return torch.device(device_type, index)


# ------------------------------------------------------------------------------------- exit codes


def run_main(main: Callable[[], int]) -> int:
    """Run `main` and return the exit code of this process.

    0 done, 1 failed, 2 bad arguments, 3 diverged, 130 or 143 stopped by a signal after saving; a
    failed rank may tell its launcher more, see FAILED. A signal before training begins ends the
    process at once: nothing can be lost yet.
    """
    global _is_program
    _is_program = True
    codes: list[int] = []
    atexit.register(before_exit, codes)
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # kill -USR2 shows where a rank hangs
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends at once, without a traceback
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # they are blocked in a spawned process
    try:
        code = main()
        if code is None:  # torch's @record returns it after a task's sys.exit(0)
            raise RuntimeError("the run was left before its end, without an error")
        codes.append(code)
        return code
    except UsageError as error:
        if not dist.is_initialized() and os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(REPEATED)  # the first rank here says the same, and its launcher ends this
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
    if os.environ.get("LOCAL_RANK", "0") == "0":
        tell(f"{reason} (exit code {code})" if reason else "")
    codes.append(code)
    return code


def fail(error: BaseException) -> int:
    """Report what a rank raised, and end the process so that its launcher blames the right rank.

    Under run.sh and spawn a rank that has lost another one ends in silence: the other one prints
    the cause. Torchrun blames the rank that ends first. There a rank that has lost another one
    returns, which takes longer than `leave`.
    """
    words, meaning = f"{type(error).__name__}: {error}", ""
    calls = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SystemExit):
        meaning = f"the run was left before its end, by sys.exit({error.code!r})"
    elif "find_unused_parameters=True" in words:
        meaning = "some parameters took no part in the last loss: add --find-unused-parameters"
    elif "rebuild_storage_fd" in calls:
        # torch could not open the memory of a batch, as the worker that sent it was killed.
        meaning = "a DataLoader worker of this process exited unexpectedly: was it out of memory?"
    elif not dist.is_initialized() and "RANK" in os.environ and NOT_MET.search(words):
        meaning = f"the ranks have not met within --timeout. {RENDEZVOUS_HINT}"
    lost = not meaning and LOST_CONNECTION.search(words)
    launched = {"LAUNCH_PID", "RANK"} <= os.environ.keys()
    if lost and launched:
        leave(FAILED)  # the cause should be the last thing to read
    traceback.print_exception(error)
    tell(meaning)
    if lost:
        return 1
    leave(FAILED if launched else 1)


def before_exit(codes: list[int]) -> None:
    """Prepare Python's last clean-up, or leave before it; `codes` holds the exit code of a run."""
    for number in SIGNALS:  # that clean-up takes away the handlers: a late signal would kill
        signal.signal(number, signal.SIG_IGN)
    # A device mesh keeps gloo's threads alive, and they may abort the clean-up.
    if codes and "machinery.sharding" in sys.modules:
        # os._exit leaves out Python's own exit functions, so they are called here.
        weakref.finalize._exitfunc()
        multiprocessing.util._exit_function()
        logging.shutdown()
        leave(codes[0])


def leave(code: int) -> NoReturn:
    """End a rank at once. Python's clean-up may hang while threads still talk to other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def tell(message: str) -> None:
    """Print the message, as the last line on stderr."""
    if message:
        print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)


def attempt() -> int:
    """Return how often a launcher has started the ranks again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
