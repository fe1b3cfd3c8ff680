"""The signals that stop a run: all ranks stop at the same step, after a save."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sampling import end_with_parent

# Signals that stop a run at its next step, and its exit code then, after saving. Of two signals
# the later one in this list wins.
SIGNALS = {signal.SIGUSR1: 0, signal.SIGHUP: 129, signal.SIGINT: 130, signal.SIGTERM: 143}
PRIORITY = [*SIGNALS]


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def handle_signals(handler: Callable[[int, Any], None]) -> None:
    """Let `handler` answer the signals that stop a run."""
    for number in SIGNALS if in_main_thread() else ():  # no other thread may set a handler
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup has set SIG_IGN
            signal.signal(number, handler)


class StopSignal:
    """SIGTERM, SIGINT, SIGHUP and SIGUSR1 (SLURM's warning): all ranks stop at the same step."""

    def __init__(self) -> None:
        self.received: list[int] = []  # places in PRIORITY, from 1
        received = self.received

        def remember(number: int, frame: Any, owner: int = os.getpid()) -> None:
            # A Pool of the task, a fork of this process, ends its processes so.
            if os.getpid() != owner and number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            received.append(PRIORITY.index(number) + 1)

        # If the handler held `self`, it would keep `previous`, and with it gloo's threads, alive
        # after the run.
        handle_signals(remember)
        if dist.is_initialized():
            if {"LAUNCH_PID", "TORCHELASTIC_RUN_ID"} & os.environ.keys():
                end_with_parent(signal.SIGTERM)  # if the launcher dies, a rank still saves
            self.previous = self._start_reduction()

    def _start_reduction(self) -> tuple[dist.Work, torch.Tensor]:
        """Start to reduce the ranks' numbers to the highest; 0 is no signal."""
        number = torch.tensor(max(self.received, default=0))
        return dist.all_reduce(number, dist.ReduceOp.MAX, async_op=True), number

    def agreed(self, wait: bool = False) -> signal.Signals | None:
        """Return the signal on which all ranks stop now. Call it on every rank.

        A reduction that starts in one step is read in the next, so that no rank waits for another.
        `wait` reads it at once. No signal is lost: `received` has it from then on.
        """
        number = max(self.received, default=0)
        if dist.is_initialized():
            current = self._start_reduction()
            # That of the last step has most often arrived: nobody waits.
            work, reduced = current if wait else self.previous
            self.previous = current
            work.wait()
            number = int(reduced)
        return PRIORITY[number - 1] if number else None


def ignore_signals() -> None:
    """Python's last clean-up takes away the handlers: a late signal would kill."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
