"""Are two training commands the same training run? If not: where do they part, in what, and why?

bash run.sh compare "python train.py --bs 64" "torchrun --standalone --nproc-per-node 2 ddp.py --bs 32"

Both run for some steps, unchanged, under observer/sitecustomize.py. What makes them differ is made
even in both (even.py), one cause after the other, and they run again: so causes behind causes are
found. A third run is A with another last bit in its first weights: B may be 30 times as far from A.
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
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from tools.compare import causes
from tools.compare.records import Limits, Run, gaps, read

OBSERVER = Path(__file__).resolve().parent / "observer"
NAMES = ("seed", "weights", "order", "augment", "dropout", "batchnorm")  # of --even, see even.py
ROUNDS = 8  # of runs with more and more made even


class CannotRun(Exception):
    """A command that made no step that can be seen; with the last lines of its output."""


@dataclass
class Result:
    same: bool
    causes: list = field(default_factory=list)
    notes: list = field(default_factory=list)
    lines: list = field(default_factory=list)
    deviations: list = field(default_factory=list)  # of the weights, by step
    noise: list = field(default_factory=list)


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
    even = dict.fromkeys(even_names, True) | ({"float64": True} if float64 else {})
    found, notes, first = {}, {}, []
    with tempfile.TemporaryDirectory(prefix="compare-", ignore_cleanup_errors=True) as folder:
        runs = Runs(Path(folder), {"A": command_a, "B": command_b}, steps, timeout, say)
        for _ in range(ROUNDS):
            a, b = runs.get("A", even), runs.get("B", even)
            again = runs.get("A", even, shake=True)
            first = first or [describe(a, command_a), describe(b, command_b)]
            limits = Limits(a, again)
            a.steps, b.steps = limits.seen(a.steps), limits.seen(b.steps)
            new = causes.diagnose(a, b, again, limits, even)
            notes |= {c.name: c for c in new if c.note}
            new = [c for c in new if not c.note and c.name not in notes]
            for cause in new:
                found.setdefault(cause.name, cause)
            remedies = {k: v for c in new for k, v in c.even.items() if k not in even}
            if not remedies:
                break
            even |= remedies
    hidden = [b.made if c.step is None else c.step for c in new]  # steps before which all was seen
    return report(a, b, even, list(found.values()), list(notes.values()), hidden, limits, first)


@dataclass
class Runs:
    """Starts the commands, each in a directory of its own; A only if its plan has changed."""

    folder: Path
    commands: dict[str, str]
    steps: int
    timeout: float
    say: Callable[[str], None]
    made: dict = field(default_factory=dict)  # {(letter, shake, plan): run}
    weights: str = ""  # the directory that has A's

    def get(self, letter: str, even: dict, shake: bool = False) -> Run:
        """Return what a command did with these things made even."""
        own = ("weights", "settings", "gradient")  # which are A's, so that A has them
        plan = {k: v for k, v in even.items() if letter == "B" or k not in own}
        name = json.dumps([letter, shake, plan])
        if name in self.made:
            return self.made[name]
        folder = self.folder / str(len(self.made))
        if letter == "A" and not shake:
            self.weights = str(folder)
        elif "weights" in even:
            plan["weights"] = self.weights
        words = f", with {', '.join(even)} made even" if even else ""
        self.say(f"{letter}{' again, with another last bit' * shake}{words}")
        plan = {"steps": self.steps, "shake": shake, "even": plan}
        self.made[name] = launch(letter, self.commands[letter], folder, plan, self.timeout)
        return self.made[name]


# ---- running -------------------------------------------------------------------------------------


def launch(letter, command, folder, plan, timeout):
    """Run a command under the observer; return what its processes saw."""
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan))
    code = start(command, folder, timeout)
    ended = not any(folder.glob("*.done"))
    run = read(letter, folder, ended)
    if run.steps and (not ended or code == 0):
        return run
    why = f"{letter} ended with exit code {code}, after {run.made} steps"
    if code is None:
        why = f"{letter} did not end within {timeout:g} seconds, after {run.made} steps"
    elif code == 0 and not run.made:
        why = f"{letter} made no step of a torch.optim optimizer that can be seen"
        if not any(folder.glob("*.pkl")):
            why += ". Does it start Python with -I or -E, or without PYTHONPATH?"
    elif run.nan == 0:
        why = f"{letter}: the gradients of the first step are NaN or infinite"
    with (folder / "log").open("rb") as log:  # which may be large
        log.seek(max(0, log.seek(0, os.SEEK_END) - 20_000))
        text = log.read().decode(errors="replace").strip()
    lines = text.splitlines()
    own = next((i for i, line in enumerate(lines) if "elastic/multiprocessing" in line), len(lines))
    lines = lines[:own][-8:]  # what torchrun adds says nothing of the error
    words = "Its last lines:" if lines else "It printed nothing."
    raise CannotRun("\n".join([f"{why}. {words}", *(f"  {line[:200]}" for line in lines)]))


def start(command, folder, timeout):
    """Run a command; return its exit code, or None if it took too long. Nothing is left of it."""
    paths = [str(OBSERVER), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = dict(os.environ, COMPARE_DIR=str(folder), PYTHONPATH=os.pathsep.join(paths))
    environment["TORCHDYNAMO_DISABLE"] = "1"  # a compiled network cannot be watched
    with (folder / "log").open("wb") as log:
        try:
            words = shlex.split(command.replace("{dir}", str(folder)))
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
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


def end_all(folder):
    """Kill what a command has left: the processes whose environment names its folder."""
    mark = f"COMPARE_DIR={folder}\0".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)


# ---- the report ----------------------------------------------------------------------------------


def describe(run: Run, command: str) -> str:
    per, network = " + ".join(str(len(rank)) for rank in run.samples(0)), run.network
    text = f"{network['name']} of {network['numbers']:,} parameters, {run.first(0)['optimizer']}"
    plural = "es" * (run.world > 1)
    return f"{run.letter}  {command[:120]}\n   {run.world} process{plural}, {per} samples, {text}"


def report(a, b, even, found, notes, hidden, limits, first) -> Result:
    """Return the Result with its lines; hidden: steps at which the last runs still differ."""
    verdict = "THE SAME TRAINING RUN"
    if found:
        verdict = f"NOT {verdict}: {len(found)} cause{'s' * (len(found) > 1)}"
    lines, steps, names = [verdict], min(a.steps, b.steps), ", ".join(even)
    for i, c in enumerate(found[:6], 1):
        where = "" if c.step is None else f", at step {c.step + 1}"
        lines += [f"{i}. {c.name}{where}: {c.text}", f"   why: {c.why}"]
    lines += [f"   and {len(found) - 6} more"] if len(found) > 6 else []
    lines += [f"note: {c.text} ({c.why})" for c in notes[:3]]
    both = [(a.whole(k, "weights"), b.whole(k, "weights")) for k in range(steps)]
    far = [max(gaps(x, y).values(), default=0.0) for x, y in both]
    noise = [max(limits.noise[k, "weights"].values(), default=0.0) for k in range(steps)]
    if hidden:
        blocking = [i for i, c in enumerate(found, 1) if c.hides or not c.even] or [len(found)]
        lines.append(f"What lies behind cause {blocking[0]} cannot be seen before it is mended.")
        lines += [f"Made even: {names}."] if even else []
    before = min([steps, *hidden])
    if before:
        apart = "Nothing" + " else" * bool(found)
        apart = f"With {names} made even nothing else" if even else apart
        agree = f"the weights agree to {far[before - 1]:.0e}, roundings alone make {noise[before - 1]:.0e}"
        where = f"{before} step{'s' * (before > 1)}" + " before" * bool(hidden)
        lines.append(f"{apart} differs in {where}; {agree}.")
    unseen = [] if any(a.evaluated()) and any(b.evaluated()) else ["an evaluation"]
    unseen += [] if steps and a.first(steps - 1)["second_epoch"] else ["a second epoch"]
    compiled = any("compile" in run.first(run.made - 1)["wrappers"] for run in (a, b))
    unseen += ["what compiled code does"] if compiled else []
    lines += [f"Not seen in {steps} steps: {', '.join(unseen)}."] if unseen else []
    return Result(not found, found, notes, lines + first, far, noise)


def draw(result, path):
    """Save how far the weights of B are from those of A, step by step, as SVG."""
    values = [d for d in (*result.deviations, *result.noise) if 0 < d < np.inf] or [1e-16]
    low, high = np.floor(np.log10(min(values))), np.floor(np.log10(max(values))) + 1
    shapes = []
    for e in range(int(low), int(high) + 1):
        shapes.append(f'<text x="5" y="{24 + 250 * (high - e) / (high - low):.0f}">1e{e}</text>')
    for line, colour in ((result.noise, "#999"), (result.deviations, "#06c")):
        points = [(k, np.log10(d)) for k, d in enumerate(line) if 0 < d < np.inf]
        width = 520 / max(1, len(line) - 1)
        at = [f"{60 + width * k:.0f},{20 + 250 * (high - e) / (high - low):.0f}" for k, e in points]
        shapes.append(f'<polyline points="{" ".join(at)}" fill="none" stroke="{colour}"/>')
    words = f"steps 1 to {len(result.deviations)}; blue: B from A, grey: roundings alone"
    size = 'width="600" height="310" font-family="sans-serif" font-size="12"'
    body = "".join(shapes) + f'<text x="60" y="300">{words}</text>'
    Path(path).write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{body}</svg>\n')


def main(argv=None):
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

    def say(text):
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
