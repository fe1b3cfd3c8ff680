"""Are two training commands the same training run? If not: where do they part, in what, and why?

bash run.sh compare "python train.py --bs 64" "torchrun --standalone --nproc-per-node 2 ddp.py --bs 32"

Both run for some steps, unchanged, under observer/sitecustomize.py. What makes them differ is made
even in both (even.py), one cause after the other, and they run again: so causes behind causes are
found. A third run is A with another last bit in its first weights: B may be 30 times as far from A.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.compare import causes, even
from tools.compare.records import Limits, gaps, read, rename

OBSERVER = Path(__file__).resolve().parent / "observer"
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


def compare(command_a, command_b, *, steps=0, even_names=(), float64=False, timeout=600, say=print):
    """Run both commands until nothing else differs, or nothing more can be seen; return a Result."""
    folder = Path(tempfile.mkdtemp(prefix="compare-"))
    given = dict.fromkeys(even_names, True) | ({"float64": True} if float64 else {})
    try:
        return _peel(folder, (command_a, command_b), given, steps, timeout, say)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _peel(folder, commands, even, steps, timeout, say):
    found, notes, made, behind = {}, {}, {}, False
    for turn in range(ROUNDS):
        made_even = f", with {_names(even)} made even" if even else ""
        for letter, command in zip("AB", commands):
            if letter == "A" and made.get("plan") == (plan := _of_a(even)):
                continue
            say(f"round {turn + 1}: {letter}{made_even}")
            where = folder / f"{letter}{turn}"
            if letter == "A":
                a, made = launch("A", command, where, plan, steps, timeout), {"plan": plan}
                made["folder"], again = str(where), None
            else:
                weights = {"weights": made["folder"]} if "weights" in even else {}
                b = launch("B", command, where, even | weights, steps, timeout)
        limits, new = Limits(a), {}
        gross = [c for c in causes.parting(a, b, limits) if c.even and c.step == 0]
        if not gross:
            if again is None:
                say(f"round {turn + 1}: A again, with another last bit")
                weights = {"weights": made["folder"]} if "weights" in even else {}
                again = launch(
                    "A", commands[0], folder / f"C{turn}", plan | weights, steps, timeout, True
                )
            limits = Limits(a, again)
            if other_run(a, again):
                text = "A, started twice, is not the same run"
                new["no seed"] = causes.Cause(
                    "no seed",
                    0,
                    text,
                    "no seed is set; or it resumes from a file of its own: write {dir}/FILE, a directory for each run",
                    {"seed": True},
                )
                limits = Limits(a)
        a.steps, b.steps = (limits.seen(run.steps) for run in (a, b))
        own = [{c.what: c for c in causes.own(run, limits)} for run in (a, b)]
        new |= {w: c for w, c in own[1].items() if w not in own[0]}
        notes |= own[0]
        parted = causes.parting(a, b, limits)
        new |= {c.what: c for c in parted if c.what not in new}
        new |= {c.what: c for c in causes.evaluation(a, b)}
        if turn == 0:
            first = [describe(run, command) for run, command in zip((a, b), commands)]
        if "order of the second epoch" in new:
            new.pop("order of samples", None)
        for what, cause in new.items():
            (notes if cause.note else found).setdefault(what, cause)
        remedies = {k: v for c in new.values() for k, v in c.even.items() if k not in even}
        behind = bool(parted) or bool(
            {c.step is not None for c in new.values() if not c.note} - {False}
        )
        if not remedies:
            break
        even = even | remedies
    return report(a, b, even, list(found.values()), list(notes.values()), behind, limits, first)


def _of_a(even):
    """Return what is made even in A, whose weights and settings B gets."""
    return {k: v for k, v in even.items() if k not in ("weights", "settings", "gradient")}


def other_run(a, again):
    """Say whether A began differently when it was started again."""
    if not min(a.steps, again.steps):
        return False
    rename(a, again)
    samples = [[s[:1] + s[2:3] for rank in run.samples(0) for s in rank] for run in (a, again)]
    far = max(gaps(a.whole(0, "weights"), again.whole(0, "weights")).values(), default=0.0)
    return samples[0] != samples[1] or far > 1e-5


# ---- running -------------------------------------------------------------------------------------


def launch(letter, command, folder, even, steps, timeout, shake=False):
    """Run a command under the observer; return what its processes saw."""
    folder.mkdir()
    plan = {"steps": steps, "shake": shake, "even": even}
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
        why = f"{letter} made no step of a torch.optim optimizer that could be seen"
        if not any(folder.glob("*.pkl")):
            why += "; does it start Python with -I or -E, or without PYTHONPATH?"
    elif run.nan == 0:
        why = f"{letter}: the gradients of the first step are NaN or infinite"
    lines = (folder / "log").read_text(errors="replace").strip().splitlines()[-8:]
    raise CannotRun("\n".join([f"{why}. Its last lines:", *(f"  {line[:200]}" for line in lines)]))


def start(command, folder, timeout):
    """Run a command; return its exit code, or None if it took too long. Nothing is left of it."""
    paths = [str(OBSERVER), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = dict(os.environ, COMPARE_DIR=str(folder), PYTHONPATH=os.pathsep.join(paths))
    environment["TORCHDYNAMO_DISABLE"] = "1"  # a compiled network cannot be watched
    words = shlex.split(command.replace("{dir}", str(folder)))
    with (folder / "log").open("wb") as log:
        try:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            process = subprocess.Popen(words, env=environment, start_new_session=True, **streams)
        except (OSError, IndexError) as error:
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


def describe(run, command):
    per = " + ".join(str(len(rank)) for rank in run.samples(0))
    optimizer = run.at(0)[0]["optimizer"]
    processes = f"{run.world} process{'es' * (run.world > 1)}"
    network = f"{run.network['name']} of {run.network['numbers']:,} parameters"
    return f"{run.letter}  {command[:120]}\n   {processes}, {per} samples a step, {network}, {optimizer}"


def report(a, b, even, found, notes, behind, limits, first):
    steps = min(a.steps, b.steps)
    same = not found
    verdict = "THE SAME TRAINING RUN"
    if found:
        verdict = f"NOT {verdict}: {len(found)} cause{'s' * (len(found) > 1)}"
    lines = [verdict]
    for i, c in enumerate(found[:6], 1):
        lines.append(
            f"{i}. {c.what}"
            + (f", at step {c.step + 1}" if c.step is not None else "")
            + f": {c.text}"
        )
        lines += [f"   why: {c.why}"] if c.why else []
    lines += [f"   and {len(found) - 6} more"] if len(found) > 6 else []
    lines += [f"note: {c.text}" + (f" ({c.why})" if c.why else "") for c in notes[:3]]
    far = [
        max(gaps(a.whole(k, "weights"), b.whole(k, "weights")).values(), default=0.0)
        for k in range(steps)
    ]
    noise = [limits.at(k, "weights") / 30 if limits.measured else None for k in range(steps)]
    if behind:
        lines.append(f"What lies behind cause {len(found)} cannot be seen before that is mended.")
    elif steps:
        apart = (
            f"With {_names(even)} made even nothing else differs"
            if even and found
            else "Nothing differs"
        )
        lines.append(
            f"{apart} in {steps} steps; the weights agree to {far[-1]:.0e}, roundings alone make {noise[-1] or 0:.0e}."
        )
        if even and not found:
            lines.append(f"Made even from the start: {_names(even)}.")
    unseen = []
    if not (any(a.evaluated()) and any(b.evaluated())):
        unseen.append("an evaluation")
    if not (steps and a.at(steps - 1)[0]["second_epoch"]):
        unseen.append("a second epoch")
    lines += [f"Not seen in {steps} steps: {', '.join(unseen)}."] if unseen else []
    return Result(same, found, notes, lines + first, far, noise)


def _names(even):
    return ", ".join(sorted(even))


def draw(result, path):
    """Save a picture of the deviation of the weights, step by step, as SVG."""
    import math

    points = [(k, d) for k, d in enumerate(result.deviations) if d] or [(0, 1e-17)]
    low, high = (math.floor(math.log10(f(d for _, d in points))) for f in (min, max))
    high += 1
    width = max(1, len(result.deviations) - 1)

    def line(values, colour):
        at = [f"{50 + 530 * k / width:.1f},{20 + 250 * (high - math.log10(d)) / (high - low):.1f}"
              for k, d in enumerate(values) if d]  # fmt: skip
        return f'<polyline points="{" ".join(at)}" fill="none" stroke="{colour}" stroke-width="2"/>'

    marks = [
        f'<text x="5" y="{24 + 250 * (high - e) / (high - low):.0f}">1e{e}</text>'
        for e in range(low, high + 1)
    ]
    noise = [min(max(n or 0, 10.0**low), 10.0**high) for n in result.noise]
    Path(path).write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" width="600" height="310" font-family="sans-serif" font-size="12">'
        + "".join(marks) + line(noise, "#aaa") + line(result.deviations, "#06c")
        + f'<text x="50" y="300">steps 1 to {width + 1}: blue B from A, relative to the weights; grey roundings alone</text></svg>'
    )  # fmt: skip


def main(argv=None):
    parser = ArgumentParser(
        "compare", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("a", help="a command, in quotes")
    parser.add_argument("b", help="the command that should be the same training run")
    parser.add_argument(
        "--steps",
        type=int,
        default=0,
        help="steps of each run; default: into the second epoch, at most 60",
    )
    parser.add_argument(
        "--even", default="", help=f"make these even from the start: {','.join(even.NAMES)}"
    )
    parser.add_argument("--float64", action="store_true", help="both run with this default dtype")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that a run may take")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw the deviation by step, as SVG")
    args = parser.parse_args(argv)
    names = [n for n in args.even.split(",") if n]
    if wrong := [n for n in names if n not in even.NAMES]:
        parser.error(f"--even {wrong[0]}: use {', '.join(even.NAMES)}")
    start, terminal = time.monotonic(), sys.stderr.isatty()

    def say(text):
        print(f"{time.monotonic() - start:4.0f} s  {text}", file=sys.stderr, flush=True)

    try:
        result = compare(args.a, args.b, steps=args.steps, even_names=names, float64=args.float64,
                         timeout=args.timeout, say=say)  # fmt: skip
    except CannotRun as error:
        print(f"CANNOT SAY: {error}")
        return 2
    colour = "\033[1;32m" if result.same else "\033[1;31m"
    verdict, *lines = result.lines
    print(
        f"{colour}{verdict}\033[0m" if terminal and sys.stdout.isatty() else verdict,
        *lines,
        sep="\n",
    )
    if args.json:
        Path(args.json).write_text(json.dumps(asdict(result), indent=1, default=str))
    if args.plot:
        draw(result, args.plot)
    return 0 if result.same else 1
