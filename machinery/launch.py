"""Start the ranks of a run on this machine, hand signals on to them, and return one exit code.

`bash run.sh ddp|fsdp N [options]` runs this file: it checks the options and then starts the script
N times, with the variables that torchrun sets. train_spawn.py uses the section of that name.

Why not torchrun: its rendezvous listens on all network interfaces, and it ends with code 1 whatever
a rank said on purpose (2 for bad input, 3 for divergence, 130 after Ctrl-C).
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # it was machinery/: a task's `import cli` would find ours

import torch.multiprocessing as mp

from machinery import process as this_process
from machinery.cli import parse_args
from machinery.process import FAILED, GRACE, leave, run_main, tell, tell_way_on
from machinery.rendezvous import stay_on_this_machine, use_interface_to
from machinery.signals import SIGNALS, handle_signals
from sampling import end_with_parent

ON_PURPOSE = {2, 3, *SIGNALS.values()}  # exit codes of a rank that has told why it ends


def wait_for(processes: list) -> int:
    """Wait for the ranks of this machine, and hand signals on to them; return the exit code.

    `processes` are of subprocess or multiprocessing.
    """
    received: list[int] = []  # signals

    def codes() -> list[int | None]:
        return [p.exitcode if hasattr(p, "exitcode") else p.poll() for p in processes]

    def send(number: int, frame: Any) -> None:
        received.append(number)
        for process, code in zip(processes, codes()):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                if code is None:
                    os.kill(process.pid, number)

    handle_signals(send)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    ended, deadline = codes(), math.inf
    while None in ended:
        time.sleep(0.05)
        ended = codes()
        if any(ended):  # a code that is neither None (it runs) nor 0: a rank has failed
            deadline = min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline or 2 in ended:  # 2: bad input; the others may wait
            break
    left = {rank: process for rank, process in enumerate(processes) if ended[rank] is None}
    if left and 2 not in ended:
        for process in left.values():
            os.kill(process.pid, signal.SIGUSR2)  # it prints where it hangs
        time.sleep(1)
        problem = f"process {', '.join(map(str, left))} did not end when another one had failed"
        tell(f"{problem}: see its stack above, and before that the error of the other one")
    for process in left.values():
        process.kill()
        process.wait() if hasattr(process, "wait") else process.join()
    code, cause = diagnose(ended, received)
    tell(cause)
    if code:
        tell_way_on(code)
    return code


def diagnose(ended: list[int | None], received: list[int]) -> tuple[int, str]:
    """Return the exit code of the run, and the cause of a failure if no rank has printed it.

    `ended` has the exit code of each rank; a negative one is the number of the signal that killed
    it, None a rank that this launcher had to kill. The first of these decides: a code that a rank
    chose on purpose; a kill by a signal; any other code.
    """
    # NCCL aborts a rank that has lost another one: it is the cause only if no rank ended otherwise.
    if {*ended} - {None, 0, -signal.SIGABRT}:
        ended = [FAILED if code == -signal.SIGABRT else code for code in ended]
    codes = {rank: code for rank, code in enumerate(ended) if code}
    for code in codes.values():
        if code in ON_PURPOSE:  # the rank has printed the reason
            return code, ""
    for rank, code in codes.items():
        if code < 0:
            name = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
            if -code in received:
                return 128 - code, f"stopped by {name} with nothing new to save"
            often = ", often because memory was short: see dmesg" if name == "SIGKILL" else ""
            return 1, f"process {rank} was killed by {name}{often}"
    for rank, code in codes.items():
        if code != FAILED:  # as by os._exit in a task
            return 1, f"process {rank} left before the end, with exit code {code}"
    return (1 if codes else 0), ""


# ----------------------------------------------------------------------------------- train_spawn.py


@contextlib.contextmanager
def workers_meet_at(args: Namespace) -> Iterator[str]:
    """Yield where spawned processes meet: --dist-url, or on one machine a new file.

    Signals wait from here until `wait_for` listens: a Python that is starting would answer Ctrl-C
    with a traceback.
    """
    # A spawned process imports the file that has called main, which would call it again.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        tell("error: put what calls main under: if __name__ == '__main__':")
        leave(2)
    multiprocessing.resource_tracker.ensure_running()  # it would unblock the signals again
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    # A notebook has threads that block no signal. What they get waits for this thread too.
    thread = threading.get_ident()
    handle_signals(lambda number, frame: signal.pthread_kill(thread, number))
    os.environ["LAUNCH_PID"] = str(os.getpid())
    with tempfile.TemporaryDirectory() as directory:
        os.environ["LAUNCH_RENDEZVOUS_FILE"] = f"{directory}/ranks"
        if args.dist_url:
            use_interface_to(urlsplit(args.dist_url).hostname)
            if args.nnodes > 1:
                node = f"node {args.node_rank} of {args.nnodes}"
                print(f"{node} meets the others at {args.dist_url}", flush=True)
            yield args.dist_url
        else:
            stay_on_this_machine()
            yield f"file://{os.environ['LAUNCH_RENDEZVOUS_FILE']}"


def run_worker(
    local_rank: int, worker: Callable[..., int], args: Namespace, *arguments: Any
) -> NoReturn:
    """Be one spawned process."""
    end_with_parent(signal.SIGKILL, mp.parent_process().pid)
    rank = args.node_rank * args.nproc + local_rank
    ranks = {"RANK": rank, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": args.nproc}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    this_process.this_run = args, args.nnodes * args.nproc, args.nproc
    sys.exit(run_main(functools.partial(worker, local_rank, args, *arguments)))


# ------------------------------------------------------------------------- bash run.sh ddp|fsdp N


def start(script: str, argv: list[str], devices: int) -> list:
    """Start one process per device, with the environment that torchrun would give it.

    Signals wait until `run_main` and `wait_for` listen: a Python that is starting would answer
    Ctrl-C with a traceback.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    processes = []
    for local_rank in range(devices):
        ranks = {"RANK": local_rank, "LOCAL_RANK": local_rank}
        ranks |= {"WORLD_SIZE": devices, "LOCAL_WORLD_SIZE": devices}
        environment = os.environ | {name: str(value) for name, value in ranks.items()}
        command = [sys.executable, str(ROOT / script), *argv]
        # In a session of its own: Ctrl-C reaches this process alone, which hands it on.
        processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
    return processes


def main() -> int:
    mode, devices, argv = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    sys.argv[0] = script = f"train_{mode}.py"
    args = parse_args(mode, argv, devices)
    argv += ["--output-dir", args.output_dir]  # its default is another one in each process
    os.environ["LAUNCH_PID"] = str(os.getpid())
    with tempfile.TemporaryDirectory() as directory:
        stay_on_this_machine()
        # The ranks meet in a new file: nothing listens to the network.
        os.environ["LAUNCH_RENDEZVOUS_FILE"] = f"{directory}/ranks"
        return wait_for(start(script, argv, devices))


if __name__ == "__main__":
    sys.exit(run_main(main))
