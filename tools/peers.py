"""Time this project's scripts and those of other libraries: `bash run.sh bench --peer NAME...`.

Each program is started as a whole, by its command, and ended after a few steps; they take turns.
A hook on the optimizer, the same for all, tells when a step ended: see peers/sitecustomize.py.
"""

import contextlib
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

from common import UsageError
from machinery.process import Stopped

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
SETTLE = 2  # steps after the first one that are not timed
LIMIT = 600  # seconds after which a program counts as hung
GRACE = 10  # seconds that a program has to end after SIGTERM
OF_RANKS = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LAUNCH_PID"]
PEERS = ["plain", "accelerate", "lightning"]


def script_of(peer: str) -> str:
    """Return the script of --peer, a name or a file; raise UsageError if it cannot be started."""
    if peer not in PEERS and not peer.endswith(".py"):
        raise UsageError(f"--peer {peer}: use {', '.join(PEERS)} or a script, FILE.py")
    path = TOOLS / "peers" / f"train_{peer}.py" if peer in PEERS else Path(peer).absolute()
    if not path.is_file():
        raise UsageError(f"--peer {peer}: no such file")
    if peer in PEERS[1:] and not importlib.util.find_spec(peer):
        raise UsageError(f"--peer {peer}: it is not installed; pip install {peer}")
    return str(path)


def programs(args: Namespace, mode: str, argv: list[str]) -> dict[str, list[str]]:
    """Return the command of each program; the last two are this project's own.

    Its scripts start as the peers do, by Python or by torchrun, and also by run.sh.
    """
    ranks = [str(args.nproc)] if mode == "ddp" else []
    start = [sys.executable]
    if ranks:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", *ranks]
    commands = {Path(peer).name: [*start, script_of(peer), *argv] for peer in args.peer}
    commands["script"] = [*start, str(ROOT / f"train_{mode}.py"), *argv]
    commands["run.sh"] = ["bash", str(ROOT / "run.sh"), mode, *ranks, *argv]
    return commands


def time_steps(command: list[str], threads: str, steps: int, folder: Path) -> list[float]:
    """Run a program; return the seconds from its command to the end of each of its first steps.

    Raises Stopped if it makes fewer.
    """
    folder.mkdir()
    times, log, hook = folder / "times", folder / "log", TOOLS / "peers"
    environment = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
    path = filter(None, [str(hook), os.environ.get("PYTHONPATH")])
    environment |= {"PYTHONPATH": ":".join(path), "OMP_NUM_THREADS": threads}
    environment["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # for run.sh
    environment |= {"STEPS_FILE": str(times), "STEPS_WANTED": str(steps)}
    with log.open("w") as output:
        settings = {"cwd": folder, "env": environment, "start_new_session": True}
        start = time.monotonic()  # the same clock in all processes
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, **settings)
    try:
        process.wait(LIMIT)
    except subprocess.TimeoutExpired as error:
        problem = f"is not done with {steps} steps after {LIMIT} s"
        raise Stopped(1, f"{' '.join(command)} {problem}") from error
    finally:
        end(process)
    if not times.exists():
        last = (log.read_text(errors="replace").strip() or "no output").split("\n")[-1]
        raise Stopped(1, f"{' '.join(command)} ended before step {steps}: {last}")
    return [float(line) - start for line in times.read_text().split()]


def end(process: subprocess.Popen) -> None:
    """End a program that still runs, and what it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):  # torchrun and run.sh hand on the first
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)


def sum_up(turns: dict[str, list[list[float]]]) -> list[dict[str, Any]]:
    """Return a row for each program from its turns, each the seconds to the end of each step.

    `start` has the seconds to the end of the first step, `step` those of a later step, by the
    median; a ratio is the median of the ratios within a turn, of this project to the program.
    """
    rows = []
    for name, runs in turns.items():
        row: dict[str, Any] = {"program": name, "start": [run[0] for run in runs]}
        later = [[b - a for a, b in itertools.pairwise(run[SETTLE:])] for run in runs]
        row["step"] = [median(seconds) for seconds in later if seconds]
        rows.append(row)
    own = {row["program"]: row for row in rows if row["program"] in ("script", "run.sh")}
    for row in rows:
        for kind, (name, ours) in itertools.product(("start", "step"), own.items()):
            ratios = [a / b for a, b in zip(ours[kind], row[kind])]
            row[f"{kind}_{name}"] = median(ratios) if ratios else None
    return rows


def compare(
    args: Namespace, commands: dict[tuple[str, str], list[str]], folder: Path
) -> list[dict[str, Any]]:
    """Return a row for each program, workload and mode; `commands` has the options of the runs."""
    steps = 1 if args.startup else 1 + SETTLE + args.steps
    number, rows = itertools.count(), []
    for (workload, mode), argv in commands.items():
        print(f"{workload}, {mode} ...", file=sys.stderr, flush=True)
        share = max(1, len(os.sched_getaffinity(0)) // (args.nproc if mode == "ddp" else 1))
        threads = os.environ.get("OMP_NUM_THREADS", str(share))
        # As the scripts by themselves.
        workers = min(8, share) if "images" in argv else int(args.kind != "cpu")
        turns: dict[str, list[list[float]]] = {}
        for turn in range(1 + args.repeats):  # the first one warms up
            for name, command in programs(args, mode, [*argv, "--workers", str(workers)]).items():
                own = folder / str(next(number))
                output = ["--output-dir", str(own / "run")] * (name in ("script", "run.sh"))
                found = time_steps([*command, *output], threads, steps, own)
                turns.setdefault(name, []).extend([found] * (turn > 0))
        of = {"workload": workload, "mode": mode, "devices": args.nproc if mode == "ddp" else 1}
        rows += [of | row for row in sum_up(turns)]
    return rows


def report(rows: list[dict[str, Any]]) -> str:
    """Return the rows as markdown."""
    head = "workload | mode | program | to the end of step 1, s | script / it | run.sh / it"
    lines = [f"| {head} | ms a step | script / it | run.sh / it |", "|---" * 9 + "|"]
    for row in rows:
        texts = [row["workload"], f"{row['mode']} {row['devices']}", row["program"]]
        for kind, unit in (("start", "{:.2f}"), ("step", "{:.1f}")):
            seconds = row[kind] and median(row[kind]) * (1000 if kind == "step" else 1)
            texts.append(unit.format(seconds) if seconds else "–")
            for name in ("script", "run.sh"):
                ratio = row[f"{kind}_{name}"]
                texts.append("–" if ratio is None or row["program"] == name else f"{ratio:.2f}")
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)
