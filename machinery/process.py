"""How a process of a run begins and ends, with which exit code, and what it prints last."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import resource
import shlex
import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from common import UsageError
from machinery.signals import SIGNALS, handle_signals, ignore_signals

RUN_SH = Path(__file__).resolve().parent.parent / "run.sh"
FAILED = 4  # exit code of a rank that failed, for machinery/launch.py, which makes it 1
GRACE = 10  # seconds until the other ranks are killed after a failure: one may hang
# Words in error messages of torch, and what to do.
ADVICE = {
    "find_unused_parameters=True": (
        "some parameters took no part in the last loss: add --find-unused-parameters"
    ),
    "unbound_buffer.cc": (  # gloo's
        "rank {rank} waited {run[0].timeout:g} s (--timeout) for another rank, which did not "
        "answer: see docs/hang.md"
    ),
    "marked as ready twice": "give each checkpoint() use_reentrant=False",
    "element 0 of tensors does not require grad": (
        "the loss of a micro-batch does not depend on the model: add 0 * outputs.sum() to it"
    ),
}
is_program = False  # run_main sets it; it stays False where a notebook calls main
# The options of the run of this process, its number of devices, and of those on this machine.
this_run: tuple[Namespace, int, int] | None = None


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


def set_up_process() -> None:
    """Prepare signals, streams and open files of a process that ends with run_main."""
    atexit.register(ignore_signals)
    # If stdin is closed, the next open file gets its number, 0: maybe a checkpoint.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout, sys.stderr = Output(sys.stdout), Output(sys.stderr)
    now, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = hard if 0 <= hard < 65536 else 65536  # workers pass batches by open files
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, now), hard))
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # kill -USR2 shows where a rank hangs
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it hides the exit codes of ranks
    if os.getpid() == 1:  # the first process of a container, which nothing ends by default
        handle_signals(lambda number, frame: leave(128 + number))
    elif signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends at once, without a traceback
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # they are blocked in a spawned process


def run_main(main: Callable[[], int], hard_exit: bool = False) -> int:
    """Run `main` and return the exit code of this process.

    0              done, or stopped by SIGUSR1 after saving
    1              failed; a rank tells its launcher FAILED, which the launcher makes 1
    2              bad input
    3              diverged
    129, 130, 143  stopped by SIGHUP, SIGINT or SIGTERM after saving

    A signal before training begins ends the process at once: nothing can be lost yet. `hard_exit`
    ends the process here, without Python's clean-up.

    The ranks raise Stopped together, and leave together. Any other error is of one rank: it ends
    without waiting for the others, which would wait for it.
    """
    global is_program
    is_program = True
    set_up_process()
    try:
        code = main()
        reason = ""
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
    if os.environ.get("LOCAL_RANK", "0") == "0":
        tell(f"{reason} (exit code {code})" if reason else "")
        if reason:
            tell_way_on(code)
    if hard_exit:
        atexit._run_exitfuncs()  # of the task and its libraries
        leave(code)
    return code


def fail(error: BaseException) -> NoReturn:
    """Print what a rank raised, and end the process at once: the other ranks wait for it."""
    if isinstance(error, SystemExit):
        meaning = f"the run was left before its end, by sys.exit({error.code!r})"
    else:
        meaning = next((advice for words, advice in ADVICE.items() if words in str(error)), "")
        meaning = meaning.format(rank=os.environ.get("RANK"), run=this_run)
    if first_to_fail():
        traceback.print_exception(error)
        tell(meaning)
        tell_way_on(1)
    leave(FAILED if has_launcher() else 1)


def has_launcher() -> bool:
    """Return whether this process is a rank that machinery/launch.py or train_spawn.py started."""
    return {"LAUNCH_PID", "RANK"} <= os.environ.keys()


def tell_way_on(code: int) -> None:
    """Print the command that goes on after this exit code, if something was saved.

    On stdout: the last line of stderr stays the reason. A rank leaves it to its launcher, but for
    code 0, after which a launcher says nothing.
    """
    if code == 2 or (code and has_launcher()):
        return
    if code == 3:
        print("begin anew with a lower --lr: last.pt is finite, but may be past saving", flush=True)
    elif this_run and not this_run[0].eval_only:
        directory = shlex.quote(this_run[0].output_dir)
        if Path(this_run[0].output_dir, "last.pt").exists():
            print(f"to go on: {command(f'--output-dir {directory} --resume auto')}", flush=True)


def command(options: str) -> str:
    """Return the command that resumes this run with these options; a checkpoint has all others."""
    args, devices, here = this_run
    if devices > here:
        return f"the same command with {options}"  # on each machine
    return f"bash {shlex.quote(os.path.relpath(RUN_SH))} {args.parallel_mode} {devices} {options}"


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
