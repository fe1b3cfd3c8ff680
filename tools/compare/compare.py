"""Are two training commands the same training run? If not: where do they part, in what, and why?

bash run.sh compare "python train.py --bs 64" "torchrun --standalone --nproc-per-node 2 ddp.py --bs 32"

Both run for some steps, unchanged, under observer/compare_observer.py. What makes them differ is made
even in both, one cause after the other, and they run again: so causes behind causes are found.
A third run is A with another last bit in its first weights: B may be 30 times as far from A.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from tools.compare import causes
from tools.compare.records import Limits, Run, furthest, pair, read

OBSERVER = Path(__file__).resolve().parent / "observer"
NAMES = ("seed", "weights", "order", "augment", "dropout", "batchnorm")  # see compare_even.py
ROUNDS = 8  # of runs with more and more made even


class CannotRun(Exception):
    """A command that made no step that can be seen; with the last lines of its output."""


@dataclass
class Result:
    same: bool
    causes: list
    notes: list
    deviations: list  # of the weights, by step
    noise: list  # deviations of A with another last bit
    lines: list = field(default_factory=list)


def compare(
    command_a: str,
    command_b: str,
    *,
    steps: int = 0,
    even_names: Iterable[str] = (),
    float64: bool = False,
    timeout: float = 600,
    say: Callable[[str], None] = print,
) -> Result:
    """Run both commands until nothing else differs, or nothing more can be seen; return a Result."""
    even = dict.fromkeys([*even_names, *["float64"] * float64], True)
    found, notes = {}, {}
    made, weights = {}, {}  # runs by letter, shake and plan; and the directory that has A's weights

    def run(letter: str, shake: bool = False) -> Run:
        """Return what a command did with these things made even; A runs again for a new plan."""
        own = ("weights", "settings", "gradient")  # which are A's, so that A has them
        plan = {k: v for k, v in even.items() if letter == "B" or k not in own}
        key = json.dumps([letter, shake, plan], default=float)
        if key not in made:
            words = f", with {', '.join(even)} made even" if even else ""
            say(f"{letter}{' again, with another last bit' * shake}{words}")
            path = Path(folder) / str(len(made))
            if letter == "A" and not shake:
                weights["weights"] = str(path)
            elif "weights" in even:
                plan |= weights
            plan = {"steps": steps, "shake": shake, "even": plan}
            made[key] = launch(
                letter, {"A": command_a, "B": command_b}[letter], path, plan, timeout
            )
        return made[key]

    with tempfile.TemporaryDirectory(prefix="compare-", ignore_cleanup_errors=True) as folder:
        for _ in range(ROUNDS):
            a, b, again = run("A"), run("B"), run("A", shake=True)
            limits = Limits(a, again)
            a.steps, b.steps = limits.seen(a.steps), limits.seen(b.steps)
            new = causes.diagnose(a, b, again, limits, even)
            notes |= {c.name: c for c in new if c.note}
            new = [c for c in new if c.name not in notes]
            found |= {c.name: c for c in new if c.name not in found}
            remedies = {k: v for c in new for k, v in c.even.items() if k not in even}
            if not remedies:
                break
            even |= remedies
    seen = range(min(a.steps, b.steps))
    far = [furthest(*pair("weights", a, b, k)) for k in seen]
    noise = [max(limits.noise[k, "weights"].values(), default=0.0) for k in seen]
    result = Result(not found, list(found.values()), list(notes.values()), far, noise)
    result.lines = report(result, a, b, even, new)
    return result


# ---- running -------------------------------------------------------------------------------------


def launch(letter: str, command: str, folder: Path, plan: dict, timeout: float) -> Run:
    """Run a command under the observer; return what its processes saw."""
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan, default=float))
    code = start(command, folder, timeout)
    ended = not any(folder.glob("*.done"))
    run = read(letter, folder, ended)
    if run.steps and (not ended or code == 0):
        return run
    why = f"{letter} ended with exit code {code}, after {run.made} steps"
    if code is None:
        why = f"{letter} did not end within {timeout:g} seconds, after {run.made} steps"
    elif run.nan == 0:
        why = f"{letter}: the gradients of the first step are NaN or infinite"
    elif code == 0:
        why = f"{letter} made no step of a torch.optim optimizer that can be seen"
        if not any(folder.glob("*.pkl")):
            why += ". Does it start Python with -I or -E, or without PYTHONPATH?"
    with (folder / "log").open(errors="replace") as log:
        lines = list(deque(log, maxlen=200))
    own = next((i for i, line in enumerate(lines) if "elastic/multiprocessing" in line), len(lines))
    lines = lines[:own][-8:]  # what torchrun adds says nothing of the error
    words = "Its last lines:" if lines else "It printed nothing."
    raise CannotRun("\n".join([f"{why}. {words}", *(f"  {line[:200].rstrip()}" for line in lines)]))


def start(command: str, folder: Path, timeout: float) -> int | None:
    """Run a command; return its exit code, or None if it took too long. Nothing is left of it."""
    paths = [str(OBSERVER), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = dict(os.environ, COMPARE_DIR=str(folder), PYTHONPATH=os.pathsep.join(paths))
    environment["TORCHDYNAMO_DISABLE"] = "1"  # a compiled network cannot be watched
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"  # by which torch loads the observer
    with (folder / "log").open("wb") as log:
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        try:
            words = shlex.split(command.replace("{dir}", str(folder)))
            process = subprocess.Popen(words, env=environment, start_new_session=True, **streams)
        except (OSError, IndexError, ValueError) as error:
            raise CannotRun(f"{command!r} does not start: {error}") from None
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_all(folder)
        process.wait()


def end_all(folder: Path) -> None:
    """Kill what a command has left, and see it end: processes whose environment names its folder."""
    mark = f"COMPARE_DIR={folder}\0".encode()
    for _ in range(100):
        left = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                left += [int(path.parent.name)] if mark in path.read_bytes() else []
        for number in left:
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.02)


# ---- the report ----------------------------------------------------------------------------------


def count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def report(result: Result, a: Run, b: Run, even: dict, last: list[causes.Cause]) -> list[str]:
    """Return the lines for a person. last: by what the last runs still differ."""
    found, steps, names = result.causes, len(result.deviations), ", ".join(even)
    lines = ["THE SAME TRAINING RUN"]
    if found:
        lines = [f"NOT THE SAME TRAINING RUN: {count(len(found), 'cause')}"]
    for i, c in enumerate(found[:6], 1):
        where = "" if c.step is None else f", at step {c.step + 1}"
        lines += [f"{i}. {c.name}{where}: {c.text}", f"   why: {c.why}"]
    lines += [f"   and {len(found) - 6} more"] if len(found) > 6 else []
    lines += [f"note: {c.text} ({c.why})" for c in result.notes[:3]]
    if last:
        blocking = [i for i, c in enumerate(found, 1) if c.hides or not c.even] or [len(found)]
        lines.append(f"What lies behind cause {blocking[0]} cannot be seen before it is mended.")
        lines += [f"Made even: {names}."] if even else []
    before = min([steps, *(b.made if c.step is None else c.step for c in last)])
    if before:
        apart = "Nothing" + " else" * bool(found)
        apart = f"With {names} made even nothing else" if even else apart
        far, noise = result.deviations[before - 1], result.noise[before - 1]
        agree = f"the weights agree to {far:.0e}, roundings alone make {noise:.0e}"
        lines.append(
            f"{apart} differs in {count(before, 'step')}{' before' * bool(last)}; {agree}."
        )
    unseen = {"an evaluation": not any(a.evaluated) or not any(b.evaluated)}
    unseen["a second epoch"] = not steps or not a.first(steps - 1)["second_epoch"]
    unseen["what compiled code does"] = any("compile" in r.first(-1)["events"] for r in (a, b))
    words = ", ".join(what for what, missing in unseen.items() if missing)
    lines += [f"Not seen in {count(steps, 'step')}: {words}."] if words else []
    for run in (a, b):
        network = f"{run.network['name']} of {run.network['numbers']:,} parameters"
        text = f"{run.per_rank(0)} samples, {network}, {run.first(0)['optimizer']}"
        lines.append(f"{run.letter}: processes {run.world}, {text}")
    return lines


def draw(result: Result, path: str) -> None:
    """Save how far the weights of B are from those of A, step by step, as SVG."""
    values = [d for d in (*result.deviations, *result.noise) if 0 < d < np.inf] or [1e-16]
    low, high = np.floor(np.log10(min(values))), np.floor(np.log10(max(values))) + 1
    steps = len(result.deviations)
    body = f'<text x="5" y="24">1e{high:.0f}</text><text x="5" y="274">1e{low:.0f}</text>'
    body += f'<text x="60" y="300">steps 1 to {steps}; blue: B from A, grey: roundings alone</text>'
    for line, colour in ((result.noise, "#999"), (result.deviations, "#06c")):
        points = [
            f"{60 + 520 * k / steps:.0f},{20 + 250 * (high - np.log10(d)) / (high - low):.0f}"
            for k, d in enumerate(line)
            if 0 < d < np.inf
        ]
        body += f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}"/>'
    size = 'width="600" height="310" font-family="sans-serif" font-size="12"'
    Path(path).write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{body}</svg>\n')


def main(argv: list[str] | None = None) -> int:
    """Compare the commands of a command line; return the exit code."""
    about = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser("run.sh compare", **about)
    option = parser.add_argument
    option("a", help="a command, in quotes; {dir} in it is a new directory for each run")
    option("b", help="the command that should be the same training run")
    option("--steps", type=int, default=0, help="of each run; default: into the second epoch")
    option("--even", default="", help=f"made even from the start: {','.join(NAMES)}")
    option("--float64", action="store_true", help="set this default dtype in both")
    option("--timeout", type=float, default=600, help="seconds that a run may take")
    option("--json", metavar="FILE", help="write the result as JSON")
    option("--plot", metavar="FILE", help="draw how far B is from A, step by step, as SVG")
    args = parser.parse_args(argv)
    names = [n for n in args.even.split(",") if n]
    if wrong := [n for n in names if n not in NAMES]:
        parser.error(f"--even {wrong[0]}: use {', '.join(NAMES)}")
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - start:4.0f} s  {text}", file=sys.stderr, flush=True)

    options = {"steps": args.steps, "float64": args.float64, "timeout": args.timeout}
    try:
        result = compare(args.a, args.b, even_names=names, say=say, **options)
    except CannotRun as error:
        print(f"CANNOT SAY: {error}")
        return 2
    colour = f"\033[1;{32 if result.same else 31}m" if sys.stdout.isatty() else ""
    print(colour + result.lines[0] + "\033[0m" * bool(colour), *result.lines[1:], sep="\n")
    if args.json:
        Path(args.json).write_text(json.dumps(asdict(result), indent=1, default=str))
    if args.plot:
        draw(result, args.plot)
    return 0 if result.same else 1
