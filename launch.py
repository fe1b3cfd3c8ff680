"""How the processes of a run are started, find one another, and end.

python launch.py N [options] is what `bash run.sh ddp N` starts: it checks the options and is torchrun then, on one machine with restarts,
and ending as the ranks ended, where torchrun itself only knows 0 and 1.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import functools
import json
import math
import multiprocessing.resource_tracker
import os
import random
import re
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch is imported: an end without a traceback

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from options import SIGNALS, Stopped, UsageError, check_run, end_with_parent, parse_args, parse_nodes, set_variable, undo_all, undo_at_end

AGAIN = "start all of them again with --resume auto"
ADVICE = "is every node started, each with its own --node-rank, all with the address and port of the first, and no firewall between them?"
ADVICE += " What do their terminals say?"
FAILED, LOST = 4, 5  # exit codes of spawned processes: one that failed and said why, and one that lost its connection to such a one
_ends_with_the_run = False  # whether this process was started for the run alone, so that there is nothing to put back
ENDING = threading.Lock()  # held, for good, by the thread that answers the signal which ends this process
# What a rank raises when another one is gone; a connection of the task itself, to a file server say, is something else
LOST_CONNECTION = re.compile(
    r"(gloo|NCCL|SocketImpl|Store).*(by peer|onnection refused|[Bb]roken pipe|remote process exited|got 0 bytes)", re.DOTALL
)
NOT_MET = re.compile("DistStoreError|DistNetworkError|Wait timeout|connectFullMesh")  # what a rank raises that waits for others to come


def leaves_no_trace(main: Callable[..., int]) -> Callable[..., int]:
    """Decorate a script's `main`: a notebook, a service or a thread can call it, and finds its own process afterwards as it was before."""

    @functools.wraps(main)
    def wrapper(*arguments: Any, **named_arguments: Any) -> int:
        if _ends_with_the_run:
            return main(*arguments, **named_arguments)
        mask, draws, numpy_draws = signal.pthread_sigmask(signal.SIG_BLOCK, ()), random.getstate(), np.random.get_state()
        try:
            with warnings.catch_warnings(), torch.random.fork_rng():
                return main(*arguments, **named_arguments)
        finally:
            undo_all()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            random.setstate(draws)
            np.random.set_state(numpy_draws)

    return wrapper


def handle_signals(handler: Callable[[int, Any], None]) -> None:
    """Let `handler` answer the signals that stop a run, if this is the thread that may decide it: the main one."""
    for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():
        before = signal.signal(number, handler)
        undo_at_end(signal.signal, number, signal.SIG_DFL if before is None else before)  # None: set by a library in C


def exit_code(main: Callable[[], int | None]) -> int:
    """Run `main` and return the exit code: 0 done, 2 bad arguments, 3 diverged, 130/143 stopped by a signal after saving."""
    global _ends_with_the_run
    _ends_with_the_run = True
    if (end := os.environ.get("LAUNCH_END_FILE")) and Path(end).exists():
        return 0  # torchrun started this process again, but the run ended on purpose
    for number in SIGNALS:
        signal.signal(number, _end_at_once)
    _answer_from_a_thread()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # in a spawned process: see meeting_place
    try:
        return _run(main)
    except Exception as error:
        lost = LOST_CONNECTION.search(str(error))
        if lost and end and Path(end).exists():
            _leave(1)  # in silence: the lost rank has said why
        by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        if mp.parent_process() or (lost if by_torchrun else not is_distributed()):
            raise  # under torchrun, a rank that lost another one takes its time: torchrun blames the first to end
        traceback.print_exc()
        _leave(1)  # before the ranks that it leaves alone: torchrun blames the first to end


def _run(main: Callable[[], int | None]) -> int:
    try:
        code = main()
        if code is None:
            raise _recorded("the run was left before its end, without an error: does the task call sys.exit?")
    except SystemExit as error:
        raise _recorded(f"the run was left before its end, by sys.exit({error.code!r})") from error
    except UsageError as error:
        if error.by_all:
            wait_for_all()
        code = announce_end(2, f"error: {error}", by_all=error.by_all)
        if is_distributed() and not error.by_all:
            _leave(code)
    except Stopped as stop:
        wait_for_all()
        code = announce_end(stop.code, f"{stop.reason} (exit code {stop.code})" if stop.reason else "")
    except RuntimeError as error:
        meeting = "RANK" in os.environ and not os.environ.get("LAUNCH_MEETING_FILE") and not is_distributed()
        if meeting and NOT_MET.search(f"{type(error).__name__} {error}"):
            return announce_end(1, str(_recorded(f"the ranks have not met within --timeout; {ADVICE} ({_line(error)})")), by_all=False)
        if "find_unused_parameters=True" in str(error):
            raise _recorded("some parameters took no part in the loss of the last step: add --find-unused-parameters") from error
        raise
    if is_distributed():
        dist.destroy_process_group()
    return code


def _leave(code: int) -> NoReturn:
    """End a rank that failed without Python's cleaning up, which may hang or crash while threads of it still talk to other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _recorded(message: str) -> RuntimeError:
    """An error for torchrun's record too, which @record on main has not seen or has seen in other words."""
    error = RuntimeError(message)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    return error


def _answer_from_a_thread() -> None:
    """Answer signals in the place of the main thread too: while C++ waits there for another rank, Python calls no handler."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # gets the number of every signal at once
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # or one to a forked process would end this one

    def answer() -> None:
        while number := os.read(reader, 1):
            launcher = os.environ.get("LAUNCH_PID") == str(os.getpid())
            if _end_at_once in (signal.getsignal(number[0]), launcher and signal.getsignal(signal.SIGTERM)):  # which has no ranks yet
                _end_at_once(number[0], None)

    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # as the thread inherits it, signals still go to the main thread
    threading.Thread(target=answer, daemon=True).start()


def _end_at_once(number: int, frame: Any) -> None:
    """Until training begins nothing can be lost, and what the run waits for may never come."""
    if not ENDING.acquire(blocking=False):
        return  # the other thread does it, or this one already
    try:
        if os.environ.get("LAUNCH_PID") == str(os.getpid()):  # a launcher, which still waits for those of other nodes
            shutil.rmtree(Path(os.environ.pop("LAUNCH_END_FILE")).parent, ignore_errors=True)
        if "LAUNCH_END_FILE" not in os.environ or number != signal.SIGTERM:  # by which torchrun ends ranks because another has failed
            announce_end(128 + number, f"stopped by {signal.Signals(number).name} with nothing to save", by_all=False)
    finally:
        os._exit(128 + number)  # also if nobody reads what it says


def announce_end(code: int, message: str, by_all: bool = True) -> int:
    """Say why the run ends, and return the exit code of this process. If all ranks come here the first of each node speaks for it.

    torchrun would restart processes that ended with a code, and has only 0 and 1 itself. So under `run.sh ddp`, which names the file
    LAUNCH_END_FILE, the code and the message go there, and what all ranks do together ends with 0. On several machines, where it restarts
    nothing, a stop ends with 1: after 0 it would wait, for minutes, for the launchers which the signal has ended.
    """
    path = os.environ.get("LAUNCH_END_FILE")
    if path:
        with contextlib.suppress(FileExistsError), open(path, "x") as file:  # the first word counts
            file.write(f"{code} {message}\n")
    elif message and (not by_all or int(os.environ.get("LOCAL_RANK", 0)) == 0):
        print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    if path and by_all:
        return 0 if os.environ.get("LAUNCH_MEETING_FILE") else int(bool(message))
    return code


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
    """Return (rank, local rank, world size) as torchrun says, or `take_ranks_of_slurm`; end with the launcher if it is killed."""
    try:
        rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    except KeyError as error:
        command = "torchrun --standalone --nproc-per-node 2 train_ddp.py [options], or: bash run.sh ddp 2 [options]"
        raise UsageError(f"no launcher ({error} is not set). Start it with {command}") from error
    end_with_parent(signal.SIGKILL)  # what a killed launcher leaves would train on unseen, or wait
    if os.getppid() != int(os.environ.get("LAUNCH_PID", os.getppid())):
        os._exit(1)  # it was killed before
    use_interface_to(os.environ.get("MASTER_ADDR", ""))
    return rank, local_rank, world_size


def timeout(args: argparse.Namespace) -> timedelta:
    """How long a rank waits for the others before it gives up."""
    return timedelta(seconds=args.timeout)


def check_address(option: str, host: str, port: int, node_rank: int, nnodes: int) -> None:
    """Raise UsageError if the host is unknown, or if this is the first node and cannot listen there: the ranks would find out too late."""
    try:
        found = socket.getaddrinfo(host, None)[0][4][0]
        if nnodes > 1 and found.startswith("127.") and host not in (found, "localhost"):
            raise UsageError(f"{option}: {host} is {found} here, which other nodes cannot reach (see /etc/hosts); give its IP address")
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{option}: {host} is no known host ({error}); try its IP address") from error
    try:
        if node_rank == 0:
            socket.create_server((host, port)).close()
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"{option}: {host} is not this node, but this is the one with --node-rank 0, where all meet") from error
        raise UsageError(f"{option}: cannot listen on port {port} ({error.strerror}); choose another one, on all nodes") from error


def say_where_nodes_meet(node_rank: int, nnodes: int, place: str) -> None:
    """The only line of all nodes but the first, if all goes well."""
    if nnodes > 1:
        print(f"node {node_rank} of {nnodes} meets the others at {place}", flush=True)


@contextlib.contextmanager
def meeting_place(args: argparse.Namespace) -> Iterator[str]:
    """Where spawned processes meet: at `--dist-url`, or on one machine in a new file, so that nothing listens to the network.

    From here on signals wait until `join` and `exit_code` listen: a Python that is starting would answer Ctrl-C with a traceback.
    """
    multiprocessing.resource_tracker.ensure_running()  # which would let them through again
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    if args.dist_url:
        use_interface_to(urlsplit(args.dist_url).hostname)
        say_where_nodes_meet(args.node_rank, args.nnodes, args.dist_url)
        yield args.dist_url
        return
    stay_on_this_machine()
    with tempfile.TemporaryDirectory() as folder:
        yield f"file://{folder}/ranks"


def meeting_point() -> str:
    """Where the ranks of train_ddp.py meet: what torchrun says, or under `run.sh ddp` on one machine a file, new for every restart."""
    file = os.environ.get("LAUNCH_MEETING_FILE")
    return f"file://{file}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}" if file else "env://"


def stay_on_this_machine() -> None:
    """Let ranks that are all here talk over the loopback, which nobody else can reach."""
    for library in ("GLOO", "NCCL"):
        name = f"{library}_SOCKET_IFNAME"
        set_variable(name, os.environ.get(name, "lo"))


def use_interface_to(host: str) -> None:
    """Let gloo talk over the interface that leads to `host`: by itself it takes the address of the host's own name, often a loopback."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with contextlib.suppress(OSError, UnicodeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # no way: ranks will say so
        probe.connect((host, 9))  # sends nothing
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex() if not own.startswith("127.") else ():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR in man 7 netdevice
                if socket.inet_ntoa(answer[20:24]) == own:
                    set_variable("GLOO_SOCKET_IFNAME", name)


def run_worker(local_rank: int, worker: Callable, args: argparse.Namespace, *arguments: Any) -> None:
    """What a spawned process runs; it knows its rank from the start, as under torchrun."""
    end_with_parent(signal.SIGKILL)
    if not mp.parent_process().is_alive():
        os._exit(1)  # it was killed before
    os.environ.update(RANK=str(args.node_rank * args.nproc + local_rank), LOCAL_RANK=str(local_rank))
    try:
        code = exit_code(functools.partial(worker, local_rank, args, *arguments))
    except Exception as error:
        if LOST_CONNECTION.search(str(error)):
            _leave(LOST)  # in silence, so that the cause is the last thing to be read
        traceback.print_exc()
        _leave(FAILED)
    sys.exit(FAILED if code == 1 else code)


def join(context: mp.ProcessContext) -> int:
    """Wait for spawned processes, hand signals on to them, and return their exit code."""

    def hand_on(number: int, frame: Any) -> None:
        for process in context.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    handle_signals(hand_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    first = 0
    try:
        while not context.join(grace_period=10):  # after a failure: a rank that hangs does not hold the others up for longer
            pass
    except mp.ProcessExitedException as error:
        first = error.error_index
    code, words = outcome([process.exitcode for process in context.processes], first)
    if words:
        print(f"{Path(sys.argv[0]).name}: {words}", file=sys.stderr, flush=True)
    return code


def outcome(codes: list[int], first: int) -> tuple[int, str]:
    """Return the exit code of a run whose spawned processes ended with `codes`, and what they have not said about it themselves.

    `first` is the process whose failure was noticed first. The rest may have been ended for its sake.
    """
    if codes[first] < 0 and -codes[first] not in SIGNALS:  # the others ended for its sake, however they put it
        return 1, f"process {first} was killed by {signal.Signals(-codes[first]).name}"
    for code in (codes[first], *codes):
        if code in (2, 3, FAILED, *(128 + number for number in SIGNALS)):
            ended = code == FAILED and any(code > FAILED and code != LOST for code in codes)  # they said so, after the one that failed
            return (1 if code == FAILED else code), f"process {first} failed first, as it says above" if ended else ""
    if killed := [rank for rank, code in enumerate(codes) if code < 0]:
        rank = first if first in killed else killed[0]
        return (128 - codes[rank] if -codes[rank] in SIGNALS else 1), f"process {rank} was killed by {signal.Signals(-codes[rank]).name}"
    if silent := [(rank, code) for rank, code in enumerate(codes) if code not in (0, LOST)]:
        return 1, "process {} left with exit code {}".format(*silent[0])
    if LOST in codes:
        return 1, f"process {codes.index(0)} left before the end" if 0 in codes else f"a rank on another machine was lost; {AGAIN}"
    return 0, ""


def backend(device: torch.device) -> str:
    """Gloo for what is on the CPU, and the accelerator's own library for the rest."""
    if device.type == "cpu":
        return "gloo"  # with "cpu:gloo" torch 2.8 may find no default backend, and warns as the last thing of a run
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def torchrun(devices: int, argv: list[str], nodes: argparse.Namespace, timeout: float) -> int:
    """Run train_ddp.py by torchrun in this process; return the exit code of the ranks, and say last on stderr why they ended early."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    def hand_on(number: int, frame: Any) -> None:
        raise SignalException(f"got signal {number}", signal.Signals(number))  # torchrun then sends it to the ranks and waits for them

    with tempfile.TemporaryDirectory() as folder:
        end = Path(folder, "end")
        os.environ["LAUNCH_END_FILE"] = str(end)  # where the ranks say that they ended on purpose: see announce_end
        os.environ["LAUNCH_PID"] = str(os.getpid())
        several = nodes.nnodes > 1
        if several:
            os.environ["LAUNCH_MEETING_FILE"] = ""  # none: the ranks meet at --master-addr
            # No restarts: launchers would have to agree on them, and without a network, or with a store that knows dead ranks, they hang
            meet = ["--nnodes", str(nodes.nnodes), "--node-rank", str(nodes.node_rank), "--master-addr", nodes.master_addr]
            meet += ["--master-port", str(nodes.master_port), "--rdzv-conf", f"timeout={math.ceil(timeout)}", "--max-restarts", "0"]
        else:
            # One machine: launcher and ranks meet in files, and nothing listens to the network. A file of their own for every start: in
            # the store that torchrun would share, restarted ranks find the addresses of dead ones and hang.
            os.environ.update(LAUNCH_MEETING_FILE=str(Path(folder, "ranks")), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
            stay_on_this_machine()
            meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", str(Path(folder, "launchers")), "--rdzv-conf", "store_type=file"]
            meet += ["--rdzv-id", f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", "--max-restarts", "3"]
        start = ["--log-dir", str(Path(folder, "log")), "--nproc-per-node", str(devices), sys.argv[0]]
        signal.signal(signal.SIGUSR1, hand_on)  # SLURM's warning; torchrun itself does not know it and would die
        code, reason = 0, ""
        try:
            try:
                run.main([*meet, *start, *argv])
            finally:
                for number in SIGNALS:  # torchrun's own answer would be an error, but the ranks have ended: what is left is to clear up
                    signal.signal(number, signal.SIG_IGN)
        except SignalException as stop:
            code, reason = 128 + stop.sigval.value, f"stopped by {stop.sigval.name}; go on from the last checkpoint with --resume auto"
        except ChildFailedError as error:
            code, reason = 1, _root_cause(error, several)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            code, reason = 1, f"the nodes have not met within --timeout {timeout:g}, or lost touch; {ADVICE} ({_line(error)})"
        if end.exists():
            written, reason = end.read_text().strip("\n").split(" ", 1)
            code = int(written)
    if reason:
        print(f"{Path(sys.argv[0]).name}: {reason}", file=sys.stderr, flush=True)
    return code


def _root_cause(error: Any, several: bool) -> str:
    """Say which rank of torchrun's ChildFailedError failed first: one that died without a word made the others lose their connection."""

    def victim(item: tuple[int, Any]) -> tuple[bool, float]:
        failure = item[1]
        return failure.exitcode == -signal.SIGTERM or bool(LOST_CONNECTION.search(str(failure.message))), failure.timestamp

    rank, failure = min(error.failures.items(), key=victim)
    if failure.exitcode < 0:
        return f"rank {rank} was killed by {failure.signal_name()}"
    if several and (LOST_CONNECTION.search(str(failure.message)) or "Timed out waiting" in str(failure.message)):
        return f"a rank on another node was lost; {AGAIN} ({_line(failure.message)})"
    if not failure.error_file_data:
        return f"rank {rank} left with exit code {failure.exitcode}"
    return f"rank {rank} failed first: {_line(failure.message)}"


def _line(message: Any) -> str:
    """The line of an error that says most; torchrun's record may have it in a dictionary, and a loader worker's after its traceback."""
    lines = (message["message"] if isinstance(message, dict) else str(message)).strip().splitlines() or [""]
    return lines[-1 if "DataLoader worker" in lines[0] else 0]


def earlier_failure() -> str:
    """Return the error that made torchrun start this process again, as far as the failed ranks could write it down."""
    attempt = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "attempt_1/0/error.json")).parent.parent
    earlier = attempt.with_name(f"attempt_{int(attempt.name.removeprefix('attempt_')) - 1}").glob("*/error.json")
    messages = [json.loads(path.read_text())["message"]["message"] for path in sorted(earlier, key=lambda path: path.stat().st_mtime)]
    causes = [message for message in messages if not LOST_CONNECTION.search(message)]
    return _line(causes[0]) if causes else "a process was killed, or left without a word; torchrun's lines above say which"


def main() -> int:
    devices = int(sys.argv[1])
    sys.argv[0] = str(Path(__file__).with_name("train_ddp.py"))
    nodes, argv = parse_nodes(sys.argv[2:])
    if nodes.nnodes > 1:
        check_address(f"--master-addr {nodes.master_addr}", nodes.master_addr, nodes.master_port, nodes.node_rank, nodes.nnodes)
    args = parse_args("ddp", argv, devices * nodes.nnodes, devices)
    check_run(args)  # here, before any process is started
    say_where_nodes_meet(nodes.node_rank, nodes.nnodes, f"{nodes.master_addr}:{nodes.master_port}")
    return torchrun(devices, argv, nodes, args.timeout)


if __name__ == "__main__":
    sys.exit(exit_code(main))
