"""Start training commands, and end all that they leave. This is a process of its own.

The tool writes a request a line to its standard input, as JSON, and reads an exit code a line, null
if the time was over. Where it can, a command's ranks are forks of this process, which has imported
torch. All that runs is a descendant of it, and is killed at the end of a run, or when the tool
ends, by which its input ends.
"""

import atexit
import builtins
import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import types
from pathlib import Path

SLOW = ["numpy", "torch._dynamo"]  # torch.optim imports the second one late
SUBREAPER = 36  # of prctl: what a descendant leaves becomes a child of this process


def main() -> None:
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    sys.path[0] = os.devnull  # in place of this directory, until a script has its own
    while line := sys.stdin.readline():
        request = json.loads(line)
        if request["script"]:
            with contextlib.suppress(ImportError):  # then the script says so
                for name in SLOW:
                    importlib.import_module(name)
        child = os.fork()
        if not child:
            return start(request)
        code = wait(child, request["timeout"])
        end_all()
        print(json.dumps(code), file=answers, flush=True)


def wait(child: int, timeout: float) -> int | None:
    """Return the exit code of a child, or None after this time. Exit if the tool has ended."""
    descriptor = os.pidfd_open(child)
    ready = select.select([descriptor, 0], [], [], timeout)[0]
    if 0 in ready:
        end_all()
        sys.exit()
    os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if ready else None


def end_all() -> None:
    """Kill all descendants, until there are none."""
    while left := descendants():
        for number in left:
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


def descendants() -> list[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [os.getpid()]
    for number in found:
        found += [child for child, parent in parents.items() if parent == number]
    return found[1:]


# ---- in a child ----------------------------------------------------------------------------------


def start(request: dict) -> None:
    """Become the command of a request, with its environment and its log."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for number in (1, 2):
        os.dup2(log, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if not request["script"]:
        os.execvp(request["words"][0], request["words"])
    script, *arguments = request["script"]
    if request["ranks"]:
        lead(request["ranks"])  # returns in each rank
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).update(__file__=script, __builtins__=builtins, __cached__=None)
    if "torch" in sys.modules:
        sys.modules["numpy"].random.seed()  # as a process that starts anew
        importlib.import_module("samerun_observer").install()
    code = 1
    try:
        exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), vars(main))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)  # taking torch apart would cost a second


def lead(ranks: int) -> None:
    """Fork the ranks as torchrun does, and exit as soon as one fails. It returns in each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
    same = {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "ROLE_NAME": "default"}
    same |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "ROLE_WORLD_SIZE": ranks}
    elastic = {"RUN_ID": "samerun", "RESTART_COUNT": 0, "MAX_RESTARTS": 0}
    same |= address | {f"TORCHELASTIC_{name}": value for name, value in elastic.items()}
    for rank in range(ranks):
        if not os.fork():
            own = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), rank)
            os.environ.update({name: str(value) for name, value in (same | own).items()})
            if ranks > 1 and "OMP_NUM_THREADS" not in os.environ:  # as torchrun sets it
                os.environ["OMP_NUM_THREADS"] = "1"
                sys.modules["torch"].set_num_threads(1)
            return
    for _ in range(ranks):
        code = os.waitstatus_to_exitcode(os.wait()[1])
        if code:
            os._exit(abs(code))
    os._exit(0)


if __name__ == "__main__":
    main()
