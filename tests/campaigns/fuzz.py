"""Train random small problems with random options: `bash run.sh fuzz [TRIALS] [--seed S]`.

A trial draws a command line, a task of tests/tasks/fuzzed.py, a mode and world size, an
interruption, and a mode and world size to resume in. These must hold:

| invariant | what is compared |
|---|---|
| mode | every mode computes what one device computes, in float64 to 1e-9 |
| resume | a resumed run is the undisturbed one: bitwise, or in another mode to 1e-8 |
| log | metrics.jsonl has every line once, in order; the means of the first line after a resume are of the steps since then |
| eval | `--eval-only` of a checkpoint gives the line that the run has logged |
| end | exit code 0, nothing unexpected on stderr, no file is left |
| state | last.pt and best.pt are what the log says |

The first run makes the check before a run, and the others do not. A mode with its own statistics
or dropout for each rank is compared with one device that computes the same slices one after the
other. The program prints the command that repeats a violation, and keeps its folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("", "tools", "tests", "tests/tasks")]

import equivalence
import fuzzed
import harness
import torch
from faults import differences, log_lines, position, without_means_at
from patches import after_step, call_in_task

import machinery.check
import machinery.cli

SIDE_BY_SIDE = 2
MODES = [("single", 1), ("dp", 2), ("dp", 3)]
MODES += [(mode, n) for mode in ("ddp", "spawn", "fsdp") for n in (1, 2, 3)]
SIGNALS = {"SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129, "SIGUSR1": 0}
RANKS = ("ddp", "spawn", "fsdp")
DDP = ("ddp", "spawn")  # modes that compute the same bits
CYCLES = ("cyclic", "sawtooth")
ONE_DEVICE, OTHER_MODE = 1e-9, 1e-8  # largest deviations that pass
STOPPED = r"\S+: stopped by SIG\w+ after saving step \d+( \(exit code \d+\))?"
NOTHING = {"kind": "nothing", "place": "step", "at": 0, "rank": 0}  # interrupts
Sabotage = Callable[[int], None] | None  # called with the rank in each process of a run


@dataclasses.dataclass
class Trial:
    """All that is drawn. `options` has the values of each option; a flag has none."""

    seed: int
    number: int
    mode: str = "single"
    n: int = 1
    options: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    task: dict[str, Any] = dataclasses.field(default_factory=dict)
    resume: tuple[str, int] = ("single", 1)
    evaluate: tuple[str, int] = ("single", 1)
    interruption: dict[str, Any] | None = None
    checks: tuple[str, ...] = ("mode", "resume", "eval")
    choice: float = 0.0  # which checkpoint is evaluated

    def __str__(self) -> str:
        """Tell in a few lines what it is, and how to repeat it."""
        how = "{kind} in {place} {at} of rank {rank}".format(**self.interruption or NOTHING)
        resume, evaluate = (" ".join(map(str, place)) for place in (self.resume, self.evaluate))
        return (
            f"  {self.mode} {self.n}, {how}, resumed in {resume}, evaluated in {evaluate}; "
            f"checks: {', '.join(self.checks)}\n  options: {' '.join(self.argv())}\n"
            f"  task: {self.task}\n"
            f"  again with: bash run.sh fuzz --seed {self.seed} --trial {self.number}"
        )

    def part(self, name: str) -> Any:
        return self.task.get(name, fuzzed.DEFAULTS[name])

    def value(self, option: str, default: str = "") -> str:
        return self.options[option][0] if self.options.get(option) else default

    @property
    def place(self) -> tuple[str, int]:
        return self.mode, self.n

    @property
    def epochs(self) -> int:
        return int(self.value("--epochs"))

    @property
    def steps(self) -> int:
        """Steps in an epoch."""
        return self.part("train") // int(self.value("--batch-size"))

    @property
    def cut_matters(self) -> bool:
        """Whether the numbers depend on how a batch is cut among ranks."""
        own = self.part("norm") == "instance_tracked" or self.part("observer")
        own |= self.part("norm").startswith("batch") and "--sync-bn" not in self.options
        return own or self.part("dropout") > 0

    def argv(self, **changes: list[str] | None) -> list[str]:
        """The command line; `changes` as lr=["0.1"] replace an option, and None removes it."""
        named = {f"--{name.replace('_', '-')}": values for name, values in changes.items()}
        merged = {**self.options, **named}
        given = [(name, values) for name, values in merged.items() if values is not None]
        return [text for name, values in given for text in (name, *values)]


# ------------------------------------------------------------------------------------ options
# Every option of --help: a function that draws its values (None: the option is not given), or the
# reason why it is not drawn. A new option must come here, or tests/test_fuzz.py fails.

Drawer = Callable[[random.Random, Trial], "list[str] | None"]


def sometimes(share: float, *choices: str) -> Drawer:
    """Draw the option in a share of the trials, with one of the choices; with none it is a flag."""

    def draw(rng: random.Random, trial: Trial) -> list[str] | None:
        chosen = [rng.choice(choices)] if choices else []
        return chosen if rng.random() < share else None

    return draw


def always(*choices: str) -> Drawer:
    return sometimes(1.1, *choices)


def draw_freeze(rng: random.Random, trial: Trial) -> list[str] | None:
    patterns = ["conv.*", "body.weight", "heads.0.*", "b*"]
    if trial.part("norm"):
        patterns.append("norm.*")
    chosen = rng.sample(patterns, rng.randint(1, 2)) if rng.random() < 0.12 else None
    return ["*", f"!{chosen[0]}"] if chosen and rng.random() < 0.3 else chosen


MADE_BY_TRIAL = "the trial sets it"
ONE_MACHINE = "tests/test_nodes.py tries several machines"
OPTIONS: dict[str, Drawer | str] = {
    "--skip-corrupt": "tests/test_sampling.py reads broken samples",
    "--balanced": sometimes(0.12),
    "--shuffle-window": sometimes(0.15, "1", "2"),
    "--workers": lambda rng, trial: [rng.choice("12") if rng.random() < 0.06 else "0"],
    "--weights": "tests/test_weights.py loads them",
    "--freeze": draw_freeze,
    "--task": MADE_BY_TRIAL,
    "--epochs": always("2", "3"),
    "--batch-size": lambda rng, trial: [str(rng.randint(6, 13))],
    "--accum-steps": sometimes(0.35, "2", "3"),
    "--eval-batch-size": sometimes(0.2, "1", "3", "100"),
    "--optimizer": sometimes(0.4, "adamw", "sgd"),
    "--lr": lambda rng, trial: [f"{10 ** rng.uniform(-2.5, -1.2):.4f}"],
    "--momentum": sometimes(0.3, "0", "0.5", "0.8"),
    "--nesterov": sometimes(0.2),
    "--weight-decay": sometimes(0.3, "0", "0.01", "0.1"),
    "--schedule": sometimes(0.75, "constant", "cosine", "step", "cyclic", "sawtooth"),
    "--warmup-epochs": sometimes(0.7, "0", "0.5", "1", "1.3"),
    "--step-epochs": always("1", "2", "3"),
    "--step-gamma": sometimes(0.2, "0", "0.3", "0.9"),
    "--final-lr": sometimes(0.3, "0", "0.1", "1"),
    "--scale-lr": sometimes(0.15, "linear", "sqrt", "none"),
    "--clip-grad-norm": sometimes(0.25, "0.1", "1", "100"),
    "--average": sometimes(0.45, "ema"),
    "--ema-decay": sometimes(0.2, "0", "0.5", "0.9"),
    "--amp": "it rounds; tools/equivalence.py measures how much",
    "--compile": "takes half a minute a run; tools/equivalence.py tries it",
    "--channels-last": sometimes(0.1),
    "--dtype": always("float64"),
    "--sync-bn": sometimes(0.25),
    "--grad-compress": "it rounds; tools/equivalence.py measures how much",
    "--find-unused-parameters": "tools/equivalence.py tries it",
    "--timeout": always("60"),
    "--local-rank": "old launchers give it, and nothing reads it",
    "--local_rank": "the same",
    "--shards": "tests/test_shards.py, and faults draws it",
    "--reduce-every": "tests/test_fsdp.py",
    "--shard-size": sometimes(0.3, "1", "2", "3"),
    "--replicas": MADE_BY_TRIAL,
    "--nproc": MADE_BY_TRIAL,
    "--nnodes": ONE_MACHINE,
    "--node-rank": ONE_MACHINE,
    "--dist-url": ONE_MACHINE,
    "--best": sometimes(0.15, "loss"),
    "--seed": sometimes(0.5, "1", "12345", str(2**62 + 3)),
    "--output-dir": MADE_BY_TRIAL,
    "--resume": MADE_BY_TRIAL,
    "--save-every": sometimes(0.5, "1", "2", "5"),
    "--keep-every": sometimes(0.2, "1", "2"),
    "--eval-only": MADE_BY_TRIAL,
    "--log-every": always("1", "2", "4", "50"),
    "--tensorboard": "tests/test_log.py reads it",
    "--device": always("cpu"),
    "--deterministic": sometimes(0.1),
    "--check": MADE_BY_TRIAL,
}


def draw(seed: int, number: int) -> Trial:
    """Draw a trial; the same two numbers give the same one."""
    rng = random.Random(f"{seed}-{number}")
    trial = Trial(seed, number, *rng.choice(MODES))
    trial.task = draw_task(rng)
    for name, drawer in OPTIONS.items():
        values = drawer(rng, trial) if callable(drawer) else None
        if values is not None:
            trial.options[name] = values
    steps = rng.randint(3, 5)
    batch_size = int(trial.value("--batch-size"))
    trial.task["train"] = steps * batch_size + rng.randrange(batch_size)
    trial.resume = rng.choice(MODES) if rng.random() < 0.75 else trial.place
    trial.evaluate = rng.choice(MODES) if rng.random() < 0.5 else trial.place
    trial.choice = rng.random()
    trial.interruption = draw_interruption(rng)
    shares = {"mode": 0.6, "resume": 0.7, "eval": 0.6}
    trial.checks = tuple(name for name, share in shares.items() if rng.random() < share)
    return constrain(trial)


def draw_task(rng: random.Random) -> dict[str, Any]:
    norms = ["batch", "batch", "batch_mean", "instance_tracked", "layer"]
    shares = {
        "data": (0.2, ["drawn"]),
        "augment": (0.6, [True]),
        "norm": (0.65, norms),
        "dropout": (0.2, [0.2]),
        "heads": (0.3, [2, 3]),
        "tied": (0.25, [True]),
        "frozen": (0.15, [True]),
        "metric": (0.4, ["accuracy"]),
        "weights": (0.25, [True]),
        "ragged": (0.2, [True]),
        "observer": (0.15, [True]),
        "buffers": (0.2, [True]),
        "module_hooks": (0.2, [True]),
        "parameter_hook": (0.06, [True]),
        "loss_module": (0.2, [True]),
        "optimizer": (0.35, ["groups", "lists", "lookahead"]),
    }
    task: dict[str, Any] = {"held_out": rng.choice([1, 2, 5, 11, 17])}
    for name, (share, choices) in shares.items():
        chosen = rng.choice(choices)
        if rng.random() < share:
            task[name] = chosen
    return task


def draw_interruption(rng: random.Random) -> dict[str, Any] | None:
    kind = rng.choice([*SIGNALS, "SIGKILL", "SIGKILL", None])
    if kind is None:
        return None
    place = "evaluation" if rng.random() < 0.25 else "step"
    at = rng.randint(1, 12) if place == "step" else rng.randint(1, 6)
    return {"kind": kind, "place": place, "at": at, "rank": rng.randrange(3)}


def constrain(trial: Trial) -> Trial:
    """Change what would make the command line or the comparison invalid."""
    given, task = trial.options, trial.task

    # The data set
    if trial.part("data") == "drawn":
        task.pop("augment", None)
    if trial.part("ragged"):
        task.pop("weights", None)
    if "--balanced" in given:
        given.pop("--shuffle-window", None)

    # The optimizer
    sgd = trial.value("--optimizer", "sgd") == "sgd"
    if "--nesterov" in given and (not sgd or trial.value("--momentum") == "0"):
        del given["--nesterov"]
    if not sgd:
        given["--lr"] = [f"{min(0.01, float(trial.value('--lr'))):.4f}"]
    # The schedule
    if trial.value("--schedule", "cosine") != "cosine":
        given.pop("--final-lr", None)
    if trial.value("--schedule") not in ("step", *CYCLES):
        given.pop("--step-epochs", None)
        given.pop("--step-gamma", None)
    if float(trial.value("--warmup-epochs", "0")) > trial.epochs:
        given["--warmup-epochs"] = ["0.5"]

    # Modes
    if trial.mode == "dp":
        given.pop("--sync-bn", None)
    shards = [n for mode, n in (trial.place, trial.resume, trial.evaluate) if mode == "fsdp"]
    if shards:
        given.pop("--channels-last", None)
    if not shards or any(n % int(trial.value("--shard-size", "1")) for n in shards):
        given.pop("--shard-size", None)
    if not may_resume(trial):
        trial.resume = trial.place
    if trial.part("parameter_hook") and {trial.resume[0], trial.evaluate[0]} & {*RANKS}:
        trial.resume = trial.evaluate = trial.place  # which is refused, or has no ranks
    if trial.evaluate[0] == "dp" and "--sync-bn" in given:
        trial.evaluate = ("single", 1)
    devices = max(n for _, n in [trial.place, trial.resume, trial.evaluate])
    least = devices * int(trial.value("--accum-steps", "1"))
    if int(trial.value("--batch-size")) < least:
        given["--batch-size"] = [str(least)]
    task["train"] = max(trial.part("train"), 3 * int(trial.value("--batch-size")))
    return trial


def may_resume(trial: Trial) -> bool:
    """Whether a resumed run in the other mode is comparable with the undisturbed one."""
    (mode, n), (other, m) = trial.place, trial.resume
    if mode == other and n == m:
        return True
    if "--sync-bn" in trial.options and other == "dp":
        return False
    if trial.value("--scale-lr", "none") != "none" and n != m:
        return False
    if trial.cut_matters:
        return n == m and (n == 1 or same_numbers(trial))
    return True


def same_numbers(trial: Trial) -> bool:
    """Whether the two modes compute the same bits."""
    (mode, n), (other, m) = trial.place, trial.resume
    return n == m and (mode == other or (mode in DDP and other in DDP))


@dataclasses.dataclass(frozen=True)
class Prepare:
    """What is done in each process of a run before the script starts."""

    scratch: Path  # the working directory and TMPDIR are in it
    script: str
    check: bool = False
    cut: tuple[str, int] | None = None  # one device computes the slices of so many ranks
    interruption: dict[str, Any] | None = None
    sabotage: Sabotage = None

    def __call__(self, rank: int) -> None:
        os.chdir(self.scratch / "cwd")
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.scratch / "tmp")
        script = importlib.import_module(self.script)
        if self.check:
            script.check_run = machinery.check.check_run  # which the harness leaves out
        if self.cut:
            script.train_one_epoch = functools.partial(equivalence.train_in_pieces, self.cut)
        if self.sabotage:
            self.sabotage(rank)
        if self.interruption and self.interruption["rank"] == rank:
            self.interrupt(self.interruption)

    def interrupt(self, interruption: dict[str, Any]) -> None:
        number = signal.Signals[interruption["kind"]]

        def act() -> None:
            os.kill(os.getpid(), number)

        if interruption["place"] == "step":
            after_step(interruption["at"], act)
        else:
            call_in_task("per_sample_metrics", interruption["at"] - 1, act)


class Violation(Exception):
    """An invariant does not hold; says which one, and how."""


def expect(condition: Any, invariant: str, message: str) -> None:
    if not condition:
        raise Violation(f"[{invariant}] {message}")


class Runs:
    """The runs of one trial, in its folder."""

    def __init__(self, trial: Trial, folder: Path, sabotage: Sabotage, verbose: bool) -> None:
        self.trial, self.folder, self.sabotage, self.verbose = trial, folder, sabotage, verbose
        self.task = folder / f"task_{trial.number}.py"
        self.count = 0

    def check(self) -> None:
        """Raise Violation if an invariant does not hold."""
        trial = self.trial
        self.write_files()
        undisturbed = self.run("undisturbed", trial.mode, trial.n, trial.argv(), check=True)
        if trial.part("parameter_hook") and trial.mode in RANKS:
            return self.expect_end(undisturbed, frozenset({2}), (r".* has a hook, .*",))
        self.expect_end(undisturbed)
        self.expect_log(undisturbed.folder)
        self.expect_state(undisturbed.folder)
        if "mode" in trial.checks:
            self.compare_with_one_device(undisturbed)
        final, mode, exact = undisturbed, trial.place, True
        if "resume" in trial.checks:
            final, mode = self.interrupt_and_resume(undisturbed), trial.resume
            exact = same_numbers(trial)
        if "eval" in trial.checks:
            self.evaluate_again(final, exact and trial.evaluate == mode)

    def write_files(self) -> None:
        trial = self.trial
        lines = [
            f'"""The task of trial {trial.number}, seed {trial.seed}."""',
            f"import sys\n\nsys.path.append({str(harness.TASKS)!r})",
            "from fuzzed import make_task",
            f"\nSPEC = {trial.task!r}",
            "globals().update(make_task(SPEC))",
            "train_metrics = None if SPEC.get('frozen') else per_sample_metrics",
        ]
        self.task.write_text("\n".join(lines) + "\n")

    def run(
        self, name: str, mode: str, n: int, argv: list[str], output: Path | None = None, **more: Any
    ) -> harness.Result:
        """Train; raise Violation if a file is left."""
        self.count += 1
        scratch = self.folder / f"{self.count}-{name}"
        for part in ("cwd", "tmp"):
            (scratch / part).mkdir(parents=True)
        output = output or scratch / "run"
        if argv[0] != "--resume":  # else the checkpoint has all other options
            argv = [*of_mode(mode, argv), "--task", str(self.task)]
        argv = [*argv, "--output-dir", str(output)]
        if self.verbose:
            how = "".join(f", {what} {value}" for what, value in more.items() if value)
            devices = [] if mode == "single" else [str(n)]
            print(
                f"  {name}{how}: {' '.join(['bash', 'run.sh', mode, *devices, *argv])}", flush=True
            )
        sabotage = self.sabotage if name != "one-device" else None
        prepare = Prepare(scratch, f"train_{mode}", sabotage=sabotage, **more)
        result = harness.train(mode, n, *argv, folder=scratch, steps=0, patch=prepare)
        for label, text in (("out", result.out), ("err", result.err)):
            (scratch / label).write_text(text)
        killed = (more.get("interruption") or NOTHING)["kind"] == "SIGKILL"
        for kept in () if killed else (scratch / "cwd", scratch / "tmp"):
            left = sorted(path.name for path in kept.iterdir())
            expect(not left, "end", f"{name}: left in {kept.name}: {', '.join(left[:3])}")
        return result

    # Each of the invariants

    def expect_end(
        self,
        result: harness.Result,
        codes: frozenset[int] = frozenset({0}),
        declared: tuple[str, ...] = (),
    ) -> None:
        expect(result.code in codes, "end", f"exit code {result.code}: {last_lines(result.err)}")
        pattern = "|".join(declared) or "nothing"
        strange = [line for line in result.err.splitlines() if not re.fullmatch(pattern, line)]
        expect(not strange, "end", f"unexpected on stderr: {' | '.join(strange[:3])}")

    def expect_log(self, folder: Path, complete: bool = True) -> None:
        """Every line once, in order, with what must stand in it."""
        trial, steps = self.trial, self.trial.steps
        every = int(trial.value("--log-every", "50"))
        wanted: list[tuple] = []
        for epoch in range(trial.epochs):
            for step in range(1, steps + 1):
                total = epoch * steps + step
                if total % every == 0 or step == steps:
                    wanted.append(("train", epoch, step, total))
            wanted.append(("eval", epoch, None, (epoch + 1) * steps))
        lines = log_lines(folder)
        places = ("event", "epoch", "step", "global_step")
        found = [tuple(line.get(place) for place in places) for line in lines]
        wanted = wanted if complete else wanted[: len(found)]
        expect(found == wanted, "log", f"lines {found} instead of {wanted}")
        weights = trial.part("weights")
        _, labels = fuzzed.make_images(trial.part("held_out"), seed=2)
        empty = weights and not fuzzed.weight_of(labels).any()
        for line in lines:
            where = f"{line['event']} line at step {line['global_step']}"
            lacks = line["loss"] is None
            if line["event"] == "train":
                expect(line["skipped"] == 0, "log", f"{where}: skipped {line['skipped']}")
                expect(weights or not lacks, "log", f"{where}: no loss")  # steps without a weight
            else:
                expect(line["count"] == len(labels), "log", f"{where}: count {line['count']}")
                expect(lacks == empty, "log", f"{where}: loss {line['loss']}")

    def expect_state(self, folder: Path) -> None:
        """The files are those of a whole run, and agree with its log."""
        trial = self.trial
        names = {path.name for path in folder.iterdir()}
        keep = int(trial.value("--keep-every", "0"))
        numbers = range(keep, trial.epochs + 1, keep) if keep else ()
        wanted = {"last.pt", "metrics.jsonl", *(f"epoch-{epoch:04}.pt" for epoch in numbers)}
        expect(names - {"best.pt"} == wanted, "state", f"the directory holds {sorted(names)}")
        last = load(folder / "last.pt")
        place = (last["epoch"], last["step"], last["global_step"])
        whole = (trial.epochs, 0, trial.epochs * trial.steps)
        expect(place == whole, "state", f"last.pt is of {place}, not of {whole}")
        metric = "top1" if trial.part("metric") == "accuracy" else "minus_error"
        metric, choose = ("loss", min) if "--best" in trial.options else (metric, max)
        scores = [line[metric] for line in log_lines(folder) if line["event"] == "eval"]
        finite = [score for score in scores if score is not None]
        expect(("best.pt" in names) == bool(finite), "state", f"best.pt and the scores {scores}")
        most = choose(finite, default=None)
        # Equal up to the rounding of another number of ranks: the first of them is the best.
        score = next((s for s in finite if abs(s - most) <= 1e-12 * abs(s)), None)
        best = (score, scores.index(score) + 1) if finite else None
        expect(last["best"] == best, "state", f"best is {last['best']}, not {best}")
        if finite:
            epoch = load(folder / "best.pt")["epoch"]
            expect(epoch == best[1], "state", f"best.pt is of epoch {epoch}: {scores}")

    def compare_with_one_device(self, undisturbed: harness.Result) -> None:
        trial = self.trial
        changes: dict[str, Any] = {"scale_lr": None}
        changes["workers"] = ["0"]
        factor = {"linear": trial.n, "sqrt": math.sqrt(trial.n)}.get(trial.value("--scale-lr"), 1)
        changes["lr"] = [repr(float(trial.value("--lr")) * factor)]
        cut = None
        if trial.cut_matters and "--sync-bn" in trial.options and trial.n > 1:
            return
        if trial.mode == "single":
            batch_norm = trial.part("norm").startswith("batch")  # sees each micro-batch alone
            if trial.cut_matters or batch_norm:
                return
            if "--accum-steps" not in trial.options:
                return
            changes["accum_steps"] = None
        elif trial.cut_matters and trial.n > 1:
            cut = ("ddp" if trial.mode in RANKS else trial.mode, trial.n)
        reference = self.run("one-device", "single", 1, trial.argv(**changes), cut=cut)
        self.expect_end(reference)
        self.expect_same(undisturbed.folder, reference.folder, ONE_DEVICE, "mode")

    def interrupt_and_resume(self, undisturbed: harness.Result) -> harness.Result:
        trial = self.trial
        output = self.folder / "resumed"
        kind = trial.interruption["kind"] if trial.interruption else None
        interruption = None
        if kind:
            ranks = trial.n if trial.mode in RANKS else 1
            interruption = {**trial.interruption, "rank": trial.interruption["rank"] % ranks}
        run = functools.partial(self.run, output=output)
        cut = run("interrupted", trial.mode, trial.n, trial.argv(), interruption=interruption)
        if kind != "SIGKILL":
            codes = frozenset({0, SIGNALS.get(kind, 0)})
            self.expect_end(cut, codes, (STOPPED,) if kind else ())
        else:
            text = f"exit code {cut.code} after SIGKILL: {last_lines(cut.err)}"
            expect(cut.code in (0, 1, -9), "end", text)
        self.expect_log(output, complete=cut.code == 0 and kind is None)
        resumed_at, argv = position(output / "last.pt"), ["--resume", "auto"]
        if not resumed_at:  # it ended before its first save: this is a new run
            argv = [*trial.argv(), *argv]
        resumed = run("resumed", *trial.resume, argv)
        self.expect_end(resumed)
        self.expect_log(output)
        self.expect_state(output)
        tolerance = 0 if same_numbers(trial) else OTHER_MODE
        self.expect_same(output, undisturbed.folder, tolerance, "resume", resumed_at)
        return resumed

    def expect_same(
        self, ours: Path, theirs: Path, tolerance: float, invariant: str, resumed_at: int = 0
    ) -> None:
        """Compare two output folders. With `resumed_at` the first one is of a resumed run."""
        logs = [log_lines(folder) for folder in (ours, theirs)]
        lines = [without_means_at(resumed_at, log) for log in logs]
        different = differences(*lines, "metrics.jsonl", tolerance)
        expect(not different, invariant, "; ".join(different[:3]))
        for name in ("last.pt", "best.pt"):
            if (theirs / name).exists() or (ours / name).exists():
                found, wanted = (load(folder / name) for folder in (ours, theirs))
                for option in ("shards", "reduce_every"):  # of fsdp alone, in which one may resume
                    found["config"].pop(option, None), wanted["config"].pop(option, None)
                unlike = {"config"} if invariant == "mode" else set()
                pair = [{key: one[key] for key in one.keys() - unlike} for one in (found, wanted)]
                different = differences(*pair, name, tolerance)
                expect(not different, invariant, "; ".join(different[:3]))

    def evaluate_again(self, result: harness.Result, exact: bool) -> None:
        trial = self.trial
        paths = sorted(result.folder.glob("*.pt"))
        chosen = paths[int(trial.choice * len(paths))]
        (mode, n), output = trial.evaluate, self.folder / "evaluated"
        argv = ["--resume", str(chosen), "--eval-only"]
        evaluated = self.run("evaluated", mode, n, argv, output=output)
        self.expect_end(evaluated)
        lines = log_lines(output)
        expect(len(lines) == 1, "eval", f"{len(lines)} lines of --eval-only {chosen.name}")
        logged = log_lines(result.folder)
        logged = [line for line in logged if line["event"] == "eval"]
        position = load(chosen)
        if position["step"] not in (0, trial.steps):
            return  # saved within an epoch: the run has not evaluated it
        same = [line for line in logged if line["global_step"] == lines[0]["global_step"]]
        expect(len(same) == 1, "eval", f"{chosen.name}: no line is logged as {lines[0]}")
        tolerance = 0 if exact else OTHER_MODE
        different = differences(lines[0], same[0], chosen.name, tolerance)
        expect(not different, "eval", "; ".join(different[:3]))


def of_mode(mode: str, argv: list[str]) -> list[str]:
    """Leave out the options that another mode of the same trial has."""
    foreign = set() if mode == "fsdp" else {"--shard-size"}
    starts = [i for i, text in enumerate(argv) if text.startswith("--")]
    parts = [argv[i:j] for i, j in zip(starts, [*starts[1:], len(argv)])]
    return [text for part in parts if part[0] not in foreign for text in part]


def load(path: Path) -> dict[str, Any]:
    """Return a checkpoint, with the groups of its optimizer in one order."""
    expect(path.exists(), "state", f"no {path.name}")
    checkpoint = torch.load(path, weights_only=True)
    groups = checkpoint["optimizer"]["param_groups"]
    for group in groups:
        group["params"].sort()
    groups.sort(key=lambda group: group["params"])
    return checkpoint


def last_lines(text: str) -> str:
    return " | ".join(text.strip().splitlines()[-3:])[-500:]


def run_one(trial: Trial, folder: Path, sabotage: Sabotage, verbose: bool) -> str:
    """Run a trial in a folder of its own; return the report of its violation, or nothing."""
    place = folder / f"trial-{trial.number}"
    place.mkdir()
    try:
        Runs(trial, place, sabotage, verbose).check()
    except Exception as error:  # also a file that cannot be read, for example
        return f"trial {trial.number}: {type(error).__name__}: {error}\n{trial}\n  kept: {place}"
    shutil.rmtree(place)
    return ""


def main(argv: list[str] | None = None, sabotage: Sabotage = None) -> int:
    """Run the trials and return the exit code; `sabotage(rank)` breaks the runs on purpose."""
    text = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="fuzz", description=text, allow_abbrev=False)
    option = parser.add_argument
    option("trials", type=int, nargs="?", default=100, help="how many (default: 100)")
    option("--seed", type=int, default=0, metavar="S", help="of everything that is drawn")
    option("--trial", type=int, metavar="K", help="only this trial, with its commands")
    args = parser.parse_args(argv)
    started, one = time.monotonic(), args.trial is not None
    folder, reports = Path(tempfile.mkdtemp(prefix="fuzz-")), []
    numbers = [args.trial] if one else range(args.trials)
    executor = ThreadPoolExecutor(SIDE_BY_SIDE)
    try:
        trials = [draw(args.seed, number) for number in numbers]
        jobs = [executor.submit(run_one, trial, folder, sabotage, one) for trial in trials]
        for job in as_completed(jobs):
            if job.result():
                reports.append(job.result())
                print(reports[-1], flush=True)
    finally:
        executor.shutdown(cancel_futures=True)  # waits for the runs under way
        if not reports:
            shutil.rmtree(folder)
    minutes = (time.monotonic() - started) / 60
    counts = f"{len(trials)} trials, {len(reports)} violations"
    print(f"{counts}, seed {args.seed}, {minutes:.1f} minutes")
    return int(bool(reports))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # runs side by side, each with all the cores, would wait
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
