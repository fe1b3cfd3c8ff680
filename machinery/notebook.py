"""What a script's main needs where a notebook, or another program, calls it."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from common import UsageError
from machinery import process
from machinery.process import Stopped
from machinery.signals import SIGNALS, in_main_thread


def leaves_no_trace(main: Callable[..., int]) -> Callable[..., int]:
    """Decorate a script's main: after the run a notebook has its own signals and environment."""

    @functools.wraps(main)
    def wrapper(*arguments: Any, **options: Any) -> int:
        if process.is_program:  # which ends then
            return main(*arguments, **options)
        environment, mask = dict(os.environ), signal.pthread_sigmask(signal.SIG_BLOCK, ())
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        if in_main_thread() and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            handlers[signal.SIGCHLD] = signal.SIG_IGN
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it hides exit codes of ranks
        try:
            with (
                contextlib.redirect_stdout(process.Output(sys.stdout)),
                contextlib.redirect_stderr(process.Output(sys.stderr)),
            ):
                return main(*arguments, **options)
        except Stopped as stop:
            if (stop.code, stop.reason) != (0, ""):  # after --help
                raise
            return 0
        except UsageError as error:
            if type(error) is not UsageError:  # a task's, whose traceback is needed
                raise
            raise error.with_traceback(None) from None
        finally:
            os.environ.clear()
            os.environ.update(environment)
            if in_main_thread():
                for number, handler in handlers.items():
                    signal.signal(number, handler or signal.SIG_DFL)  # None: a library's, in C
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # the notebook answers what waits

    return wrapper
