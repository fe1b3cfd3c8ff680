"""Running a command under the observer: as it is, or its ranks as forks of a runner (runner.py)."""

import atexit
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import deque
from pathlib import Path

from samerun.records import Run, read

HERE = Path(__file__).resolve().parent
RUNNERS: dict[str, subprocess.Popen] = {}  # by their Python


class CannotSay(Exception):
    """Nothing can be said of two commands: one cannot run, or too little of it can be seen."""


def launch(
    letter: str, command: str, folder: Path, plan: dict, timeout: float, fresh: bool = False
) -> Run:
    """Run a command under the observer; return what its processes saw."""
    (folder / "plan.json").write_text(json.dumps(plan, default=float))
    code = start(command, folder, timeout, fresh)
    ended = not any(folder.glob("*.done"))
    run = read(letter, folder, ended)
    if run.steps and (not ended or code == 0):
        held = [{n: len(w) for n, w in rank[0]["weights"].items()} for rank in run.ranks]
        if any(held[0].get(name, size) != size for rank in held for name, size in rank.items()):
            raise CannotSay(f"{letter}: its processes train different networks, as in a pipeline")
        return run
    why = f"{letter} ended with exit code {code}, after {run.made} steps"
    if code is None:
        why = f"{letter} did not end within {timeout:g} seconds, after {run.made} steps"
    elif run.nan == 0:
        why = f"{letter}: the gradients of the first step are NaN or infinite"
    elif code == 0:
        why = f"{letter} made no step of a torch.optim optimizer that can be seen"
        if not any(folder.glob("*.pkl")):
            why += ": it does not import torch, or starts Python with -I, -E or no PYTHONPATH"
    with (folder / "log").open(errors="replace") as log:
        lines = list(deque(log, maxlen=200))
    own = next((i for i, line in enumerate(lines) if "elastic/multiprocessing" in line), len(lines))
    lines = lines[:own][-8:]  # what torchrun adds says nothing of the error
    words = "Its last lines:" if lines else "It printed nothing."
    raise CannotSay("\n".join([f"{why}. {words}", *(f"  {line[:200].rstrip()}" for line in lines)]))


def start(command: str, folder: Path, timeout: float, fresh: bool) -> int | None:
    """Run a command; return its exit code, or None if it took too long. Nothing is left of it."""
    paths = [str(HERE / "observer"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "WANDB_MODE": "disabled"}
    environment["TORCHDYNAMO_DISABLE"] = "1"  # a compiled network cannot be watched
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"  # by which torch loads the observer
    try:
        words = shlex.split(command.replace("{dir}", str(folder)))
    except ValueError as error:
        raise CannotSay(f"{command!r} does not start: {error}") from None
    if not words or not shutil.which(words[0]):
        hint = " Shell syntax is for sh -c '...'." if re.search(r"^\w+=|&&|^cd ", command) else ""
        raise CannotSay(f"{command!r} does not start: no such program.{hint}")
    python, ranks, script = (sys.executable, 0, []) if fresh else known(words)
    request = {"words": words, "script": script, "ranks": ranks, "timeout": timeout}
    request |= {"cwd": os.getcwd(), "log": str(folder / "log")}
    request |= {"environment": environment | {"SAMERUN_DIR": str(folder)}}
    try:
        runner = RUNNERS.get(python)
        if runner is None or runner.poll() is not None:
            streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            own = {"env": environment | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}}
            own["start_new_session"] = True  # Ctrl-C is for the tool
            runner = subprocess.Popen([python, str(HERE / "runner.py")], **streams, **own)
            RUNNERS[python] = runner
        print(json.dumps(request), file=runner.stdin, flush=True)
        return json.loads(runner.stdout.readline())
    except BaseException:
        end_runners()
        raise


@atexit.register
def end_runners() -> None:
    """End the runners, and with them all that runs."""
    while RUNNERS:
        runner = RUNNERS.popitem()[1]
        with contextlib.suppress(OSError):
            runner.stdin.close()
        runner.wait()
        runner.stdout.close()


def known(words: list[str]) -> tuple[str, int, list[str]]:
    """Return Python, number of ranks and script with arguments of `python FILE` or `torchrun FILE`.

    The script is empty where the command is another one, or has an option not known here.
    """
    program, name, rest, ranks = shutil.which(words[0]), words[0].split("/")[-1], words[1:], 0
    if name == "torchrun":
        program, ranks = os.path.join(os.path.dirname(program), "python"), 1
    elif not re.fullmatch(r"python[\d.]*", name):
        return sys.executable, 0, []
    elif rest[:2] == ["-m", "torch.distributed.run"]:
        rest, ranks = rest[2:], 1
    while ranks and rest and rest[0].startswith("--"):
        option, _, value = rest.pop(0).partition("=")
        value = value or "".join(rest[:1])
        if re.fullmatch("--nproc[-_]per[-_]node", option) and value.isdecimal():
            rest = rest[value == rest[0] :]
            ranks = int(value)
        elif option != "--standalone":
            return sys.executable, 0, []
    if not all(map(os.path.isfile, [program, *rest[:1]])):
        return sys.executable, 0, []
    return program, ranks, rest
