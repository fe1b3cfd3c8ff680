"""Break training runs on purpose and compare what they end with: `bash run.sh faults [--trials N] [--seed S] [--only FAULT] [--trial K]`.

A trial starts `bash run.sh MODE N ...`, inflicts one fault at a random instant, looks at how the run ends, and starts the same command line
again. It must leave what an undisturbed run leaves: last.pt and best.pt bitwise, and every line of metrics.jsonl once; the means of the
first line after the resume are of the steps since then. If a trial is lost, the program ends with exit
code 1 and keeps its folder.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]

import torch
from launches import MEASURED, Launch, marked, send
from whole import load_whole

import sampling
from machinery.shards import folder_of

EPOCHS, BATCH, SAMPLES = 6, 15, 203
SEED = 1  # not 0: the hash of the data in a checkpoint has it, and would meet the marked sample
STEPS = SAMPLES // BATCH
BASE = f"--epochs {EPOCHS} --batch-size {BATCH} --save-every 5 --log-every 3".split()
BASE += f"--seed {SEED} --warmup-epochs 1 --lr 0.05 --dtype float64 --average ema --clip-grad-norm 1 --resume auto".split()
# BatchNorm, dropout and augmentation: all that makes exact resumption hard
DIGITS = ["--task", "tests/tasks/faulty.py"]
IMPATIENT = [*DIGITS, "--timeout", "10"]
VARIATIONS = [[], ["--optimizer", "adamw", "--lr", "0.003"], ["--balanced"]]
LIMIT = 240  # seconds that any launch may take
SIDE_BY_SIDE = 3  # trials: much of each is waiting
# In a training line: what is no mean over the steps since the last one
OF_ONE_STEP = {"event", "epoch", "step", "global_step", "lr", "grad_norm", "skipped"}
LAST_LINES = 15  # of stderr, in which the cause of a failure must stand
SMALL_DISK = "size=1m"  # holds all files of a run

ONE = [("single", 1), ("dp", 2)]
SEVERAL = [("ddp", 2), ("ddp", 3), ("spawn", 2), ("spawn", 3), ("fsdp", 2), ("fsdp", 3)]
EVERY = [*ONE, ("ddp", 1), *SEVERAL]
FAILURE = set(range(1, 256))
OUTCOMES = ("survived", "after the end", "lost")  # the second: the fault came too late to matter


# -------------------------------------------------------------------------------------- the faults
# An `inflict` gets the trial and its launch, which has just started, and returns whether there was anything left to disturb.


def somewhere(trial: Trial, launch: Launch, find: Callable[[], list[int]]) -> list[int]:
    """Wait for the trial's instant; return one of the processes that `find` finds then, or as soon as there is one."""
    if not trial.comes(launch):
        return []
    while not (found := find()):
        if not launch.alive_at(time.monotonic() - launch.start + 0.05):
            return []
    trial.logged = trial.steps_logged()
    return [trial.rng.choice(found)]


def signal_launcher(number: int, trial: Trial, launch: Launch) -> bool:
    hit = trial.comes(launch)
    if hit:
        launch.process.send_signal(number)
    return hit


def signal_rank(number: int, trial: Trial, launch: Launch) -> bool:
    found = somewhere(trial, launch, launch.ranks)
    send(found, number)
    return bool(found)


def signal_all(number: int, trial: Trial, launch: Launch) -> bool:
    hit = trial.comes(launch)
    send(launch.processes() if hit else [], number)
    return hit


def kill_worker(trial: Trial, launch: Launch) -> bool:
    found = somewhere(trial, launch, launch.workers)
    send(found, signal.SIGKILL)
    return bool(found)


def kill_in_save(trial: Trial, launch: Launch) -> bool:
    """Hit the next save after the trial's instant, which takes a few milliseconds."""
    hit = trial.comes(launch)
    while hit and not any(trial.output.glob(".*.tmp")):
        hit = launch.process.poll() is None
    time.sleep(trial.rng.choice([0, 0.001, 0.004]))
    send(launch.processes() if hit else [], signal.SIGKILL)
    return hit


def kill_in_save_of_shards(trial: Trial, launch: Launch) -> bool:
    """Hit the next save after the trial's instant: all processes, or one rank, which the others wait for."""
    hit = trial.comes(launch)
    before = {*trial.output.glob("shards-*")}
    while hit and before >= {*trial.output.glob("shards-*")}:
        hit = launch.process.poll() is None
    time.sleep(trial.rng.uniform(0, 0.02))
    ranks = launch.ranks() if trial.rng.random() < 0.5 else []
    send(
        trial.rng.sample(ranks, min(1, len(ranks))) or launch.processes() if hit else [],
        signal.SIGKILL,
    )
    return hit


def in_the_task(trial: Trial, launch: Launch) -> bool:
    """tests/tasks/faulty.py does it."""
    launch.process.wait(LIMIT)
    return (trial.folder / "once").exists()


def kill_or_stop(trial: Trial, launch: Launch) -> bool:
    """What tests/tasks/faulty.py does is no reason to end; this is."""
    return signal_all(trial.rng.choice([signal.SIGKILL, signal.SIGTERM]), trial, launch)


def fill_disk(trial: Trial, launch: Launch) -> bool:
    hit = trial.comes(launch)
    ballast = trial.output / "ballast"
    trial.repairs.callback(ballast.unlink)
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))
    return hit


def mount(trial: Trial) -> None:
    """Make the output folder a file system of its own, and a small one."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", SMALL_DISK, "faults", trial.output], check=True)
    trial.cleanup.callback(subprocess.run, ["umount", "--lazy", trial.output], check=True)


class Fault(NamedTuple):
    """What is done to a run, and how it must end."""

    name: str
    inflict: Callable[[Trial, Launch], bool]
    codes: set[int]  # of the launch, as a shell shows them
    cause: str = ""  # what stands in the last lines of stderr if the launch fails, a pattern
    places: list[tuple[str, int]] = EVERY
    task: str = ""  # what tests/tasks/faulty.py does
    always: bool = False  # ... in every launch, the undisturbed one included, not only once
    prepare: Callable[[Trial], None] = lambda trial: None
    workers: int | None = None  # None: drawn
    options: list[str] = DIGITS


def sent(name: str, target: str, inflict: Callable, codes: set[int], *more: Any) -> Fault:
    return Fault(
        f"{name} to {target}", functools.partial(inflict, signal.Signals[name]), codes, *more
    )


def in_task(name: str, task: str, cause: str, **more: Any) -> Fault:
    return Fault(name, in_the_task, FAILURE, cause, task=task, **more)


KILLED = "SIGKILL|[Ss]ignal 9|exit ?code: -9"
DEAD_WORKER = "DataLoader worker .* (killed|exited)"
FAULTS = [
    sent("SIGKILL", "all processes", signal_all, {137}),
    sent("SIGKILL", "one rank", signal_rank, FAILURE, KILLED, SEVERAL),
    sent("SIGKILL", "the launcher", signal_launcher, {137}),
    Fault("SIGKILL within a save", kill_in_save, {137}),
    Fault(
        "SIGKILL within a save in shards",
        kill_in_save_of_shards,
        FAILURE,
        places=[("fsdp", 2), ("fsdp", 3)],
        options=[*DIGITS, "--shards"],
    ),
    sent("SIGTERM", "the launcher", signal_launcher, {143}),
    sent("SIGHUP", "the launcher", signal_launcher, {129}),
    sent("SIGTERM", "one rank", signal_rank, {143}),
    sent("SIGTERM", "all processes", signal_all, {143}),
    sent("SIGINT", "all processes", signal_all, {130}),
    sent("SIGUSR1", "the launcher", signal_launcher, {0, 138}),  # 138: nothing to be saved yet
    in_task("exception in a rank", "raises", "RuntimeError: broken in the loss"),
    in_task("sys.exit(0) in a rank", "leaves with 0", "left before its end"),
    in_task("os._exit(1) in a rank", "dies with 1", "exit ?code:? 1", places=SEVERAL),
    in_task("a rank hangs", "stops", "[Tt]imed? ?out", places=SEVERAL, options=IMPATIENT),
    in_task(
        "exception in a loader worker", "worker raises", "broken in a loader worker", workers=2
    ),
    Fault("SIGKILL to a loader worker", kill_worker, FAILURE, DEAD_WORKER, workers=2),
    Fault("NaN input, then an end", kill_or_stop, {137, 143}, task="NaN input", always=True),
    Fault("full disk", fill_disk, FAILURE, "No space left", prepare=mount),
]


# ----------------------------------------------------------------------------------------- a trial


class Lost(Exception):
    """The promise was not kept; says how."""


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise Lost(message)


class Trial:
    """One launch, one fault, one resume. Everything random about it follows from the seed, its number and its fault."""

    def __init__(self, campaign: Campaign, number: int, fault: Fault) -> None:
        self.campaign, self.number, self.fault = campaign, number, fault
        self.rng = random.Random(f"{campaign.seed}-{number}")
        self.mode, self.n = self.rng.choice(fault.places)
        self.workers = self.rng.choice([0, 2]) if fault.workers is None else fault.workers
        self.fraction = self.rng.random()  # of an undisturbed run's duration
        # any step, any rank
        self.place = sample_at(self.rng.randrange(EPOCHS), self.rng.randrange(STEPS * BATCH))
        other = {"ddp": "spawn", "spawn": "ddp"}.get(self.mode, self.mode)  # numerically the same
        self.resume_mode = other if self.rng.random() < 0.3 else self.mode
        variations = VARIATIONS[:2] if fault.task else VARIATIONS  # the marked sample must be drawn
        self.options = [*fault.options, *self.rng.choice(variations)]
        if self.mode == "fsdp" and "--shards" not in self.options and self.rng.random() < 0.5:
            self.options.append("--shards")
        self.folder = campaign.folder / f"trial-{number}"
        self.output = self.folder / "run"
        self.logged = 0  # the last step in its log when the fault came
        self.resumed_at = 0  # the step of the checkpoint from which the run went on
        self.repairs, self.cleanup = contextlib.ExitStack(), contextlib.ExitStack()

    def __str__(self) -> str:
        resumed = f" resumed by {self.resume_mode}" if self.resume_mode != self.mode else ""
        varied = " ".join(self.options[len(self.fault.options) :])
        return f"{self.fault.name}: {self.mode} {self.n}{resumed}, {self.workers} workers {varied}"

    def environment(self) -> dict[str, str]:
        if not self.fault.task:
            return {}
        once = {} if self.fault.always else {"FAULT_ONCE": str(self.folder / "once")}
        return {"FAULT": self.fault.task, "FAULT_AT": self.place, **once}

    def start(self, name: str, mode: str = "") -> Launch:
        own = ["--workers", str(self.workers), "--output-dir", str(self.output)]
        place = self.folder / name, mode or self.mode, self.n
        return self.campaign.launch(*place, [*self.options, *own], self.environment())

    def run(self) -> str:
        """Return what became of it: survived, or after the end."""
        with self.cleanup:
            self.output.mkdir(parents=True)
            self.reference = self.campaign.reference(self)
            self.instant = self.fraction * self.reference.seconds
            self.fault.prepare(self)
            with self.repairs:
                late = self.disturb()
            self.resumed_at = position(self.output / "last.pt")
            with self.start("resume", self.resume_mode) as launch:
                code = launch.end(LIMIT)
                expect(code == 0, f"exit code {code} of the resumed run")
            self.compare()
        return "after the end" if late else "survived"

    def comes(self, launch: Launch) -> bool:
        """Wait for the trial's instant; return whether the launch still runs then."""
        alive = launch.alive_at(self.instant)
        self.logged = self.steps_logged()
        return alive

    def steps_logged(self) -> int:
        path = self.output / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return max(map(int, re.findall(r'"global_step": (\d+)', text)), default=0)

    def disturb(self) -> bool:
        """Launch, inflict, and check how it ends; return whether the run was done before the fault could matter."""
        with self.start("first") as launch:
            hit = self.fault.inflict(self, launch)
            code, errors = launch.end(LIMIT), launch.errors()
        checkpoint = load(self.output / "last.pt")
        done = code == 0 and checkpoint is not None and checkpoint["epoch"] == EPOCHS
        expect(done or hit, f"exit code {code} though nothing happened to it")
        begun = self.steps_logged() > 0
        at_rank = getattr(self.fault.inflict, "func", None) is signal_rank
        killed = code == 1 and at_rank and not begun  # a rank that does not listen to signals yet
        expect(done or killed or code in self.fault.codes, f"exit code {code}")
        if self.fault.codes <= {0, 129, 130, 138, 143}:
            # torch takes seconds to import
            importing = 130 in self.fault.codes and not begun and "KeyboardInterrupt" in errors
            quiet = killed or importing or "Traceback" not in errors
            expect(quiet, "a traceback, though it was only asked to stop")
        if code and self.fault.codes == FAILURE:
            found = re.search(self.fault.cause, "\n".join(errors.splitlines()[-LAST_LINES:]))
            expect(bool(found), f"the last lines of stderr do not name {self.fault.cause}")
        if done and self.fault.codes == {0}:  # it was not to end
            return not hit
        came = not done or self.logged >= self.reference.last_epoch
        expect(came, f"nothing came of the fault, at step {self.logged}")
        return done

    def compare(self) -> None:
        left = [path.name for path in self.output.rglob("*") if "tmp" in path.name]
        files = self.output.glob("*.pt")
        named = {folder_of(torch.load(path, weights_only=True), path) for path in files}
        left += [path.name for path in self.output.glob("shards-*") if path not in named]
        expect(not left, f"left in the folder: {', '.join(left)}")
        for name in ("last.pt", "best.pt"):
            ours, theirs = load(self.output / name), load(self.reference.output / name)
            expect(ours is not None, f"no {name}")
            parts = theirs.keys() - {"config"}
            places = [w for part in parts for w in differences(ours.get(part), theirs[part], part)]
            named = ", ".join(places[:5])
            expect(not places, f"{name} differs from the undisturbed run's: {named}")
        folders = self.output, self.reference.output
        ours, theirs = (without_means_at(self.resumed_at, log_lines(folder)) for folder in folders)
        counts = f"{len(ours)} lines and {len(theirs)}"
        expect(ours == theirs, f"metrics.jsonl differs from the undisturbed run's: {counts}")


def sample_at(epoch: int, place: int) -> str:
    """EPOCH:INDEX of the sample that stands at this place in the epoch's order."""
    sampler = sampling.GlobalBatchSampler(range(SAMPLES), SAMPLES, SEED)
    sampler.set_position(epoch, 0)
    _, (order,) = next(iter(sampler))
    return f"{epoch}:{order[place]}"


def load(path: Path) -> dict[str, Any] | None:
    return load_whole(path) if path.exists() else None


def position(path: Path) -> int:
    """Return the step of a checkpoint; 0 if there is none."""
    return (load(path) or {"global_step": 0})["global_step"]


def differences(ours: Any, theirs: Any, where: str, tolerance: float = 0.0) -> list[str]:
    """Return the places at which two nested values differ: by default, in any bit."""
    keys: Any = ()
    if type(ours) is not type(theirs):
        same = False
    elif isinstance(theirs, dict):
        same = ours.keys() == theirs.keys()
        keys = theirs.keys() - {"fused", "foreach"} if same else ()  # they belong to the mode
    elif isinstance(theirs, (list, tuple)):
        same = len(ours) == len(theirs)
        keys = range(len(theirs)) if same else ()
    elif isinstance(theirs, torch.Tensor):
        limit = tolerance if theirs.is_floating_point() else 0.0
        same = ours.shape == theirs.shape and ours.dtype == theirs.dtype
        same = same and torch.allclose(ours, theirs, rtol=limit, atol=limit, equal_nan=True)
    elif isinstance(theirs, float):
        same = math.isclose(ours, theirs, rel_tol=tolerance, abs_tol=tolerance)
        same = same or (math.isnan(ours) and math.isnan(theirs))
    else:
        same = ours == theirs
    found = [] if same else [f"{where}: {ours!s:.99} instead of {theirs!s:.99}"]
    for key in keys:
        found += differences(ours[key], theirs[key], f"{where}.{key}", tolerance)
    return found


def log_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, if there are any, without what differs from run to run."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{key: value for key, value in line.items() if key not in MEASURED} for line in lines]


def without_means_at(step: int, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines without the means of the training line that has this step and others.

    A run that goes on from there has only the steps since then in them.
    """
    kept, before = [], 0
    for line in lines:
        if line["event"] == "train":
            if before < step < line["global_step"]:
                line = {name: value for name, value in line.items() if name in OF_ONE_STEP}
            before = line["global_step"]
        kept.append(line)
    return kept


# ------------------------------------------------------------------------------------ the campaign


class Reference(NamedTuple):
    """An undisturbed run."""

    output: Path
    seconds: float
    last_epoch: int  # the step at which it starts


class Campaign:
    """A folder, the undisturbed runs that all trials share, and what is running."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.folder, self.stopping = seed, folder, False
        self.results: list[str] = []  # of OUTCOMES
        self.project = folder / "project"
        self.references: dict[tuple, Reference] = {}
        self.locks: dict[tuple, threading.Lock] = {}

    def launch(
        self, folder: Path, mode: str, n: int, options: list[str], environment: dict[str, str]
    ) -> Launch:
        if self.stopping:
            raise KeyboardInterrupt
        folder.mkdir(parents=True)
        path = f"{self.project / 'tests' / 'tasks'}:{os.environ.get('PYTHONPATH', '')}"
        command = ["bash", "run.sh", mode, str(n), *BASE]
        environment = {"PYTHONPATH": path, "FAULT_PACE": "0.05", **environment}
        with open(folder / "out", "w") as out:
            return Launch(command, folder, *options, root=self.project, stdout=out, **environment)

    def reference(self, trial: Trial) -> Reference:
        """The undisturbed run of the trial's mode, made once."""
        environment = trial.environment() if trial.fault.always else {}
        key = (trial.mode, trial.n, *trial.options, *environment.values())
        with self.locks.setdefault(key, threading.Lock()):
            if key not in self.references:
                folder = self.folder / f"reference-{len(self.locks)}-{trial.mode}-{trial.n}"
                output = folder / "run"
                options = [*trial.options, "--workers", "0", "--output-dir", str(output)]
                with self.launch(folder, trial.mode, trial.n, options, environment) as launch:
                    code = launch.end(LIMIT)
                    seconds, errors = time.monotonic() - launch.start, launch.errors()[-2000:]
                expect(code == 0, f"exit code {code} of the undisturbed run: {errors}")
                lines = log_lines(output)
                skipped = sum(line.get("skipped", 0) for line in lines)
                expect(skipped == bool(environment), f"{skipped} steps skipped in it")
                saved = load(output / "last.pt") or {"epoch": 0}
                expect(saved["epoch"] == EPOCHS, f"it has saved {saved['epoch']} epochs: {errors}")
                ends = [line["global_step"] for line in lines if line["event"] == "eval"]
                self.references[key] = Reference(output, seconds, ends[-2])
        return self.references[key]

    def run(self, trials: list[Trial]) -> None:
        """Run the trials, some side by side; print a line for each; put what became of it into `results`."""
        unwanted = ".git .*_cache __pycache__ .venv runs shared".split()
        # so that all trials try the same code, whoever edits it meanwhile
        shutil.copytree(ROOT, self.project, ignore=shutil.ignore_patterns(*unwanted))
        executor = ThreadPoolExecutor(SIDE_BY_SIDE)
        futures = {executor.submit(self.try_out, trial): trial for trial in trials}
        try:
            for future in as_completed(futures):
                trial, (outcome, seconds, message) = futures[future], future.result()
                self.results.append(outcome)
                done = (
                    f"{len(self.results):4}  trial {trial.number:<4} {outcome:14} {seconds:5.0f} s"
                )
                print(f"{done}  {trial}{message}", flush=True)
        finally:
            self.stopping = True
            executor.shutdown(wait=False, cancel_futures=True)
            while running := [future for future in futures if not future.done()]:
                send(marked(f"{self.folder}/"), signal.SIGKILL)
                wait(running, timeout=0.5)

    def try_out(self, trial: Trial) -> tuple[str, float, str]:
        """Run a trial; return what became of it, its seconds, and if it was lost, how."""
        start = time.monotonic()
        try:
            outcome, message = trial.run(), ""
            shutil.rmtree(trial.folder)
        except Exception as error:
            outcome, message = "lost", f"\n{type(error).__name__}: {error}"
            again = f'--seed {self.seed} --only "{trial.fault.name}" --trial {trial.number}'
            message += f"\n  kept in {trial.folder}; again with: bash run.sh faults {again}"
            for path in sorted(trial.folder.glob("*/err")):
                lines = path.read_text().splitlines()[-LAST_LINES:]
                message += "\n    ".join([f"\n  {path.parent.name}:", *lines])
        return outcome, time.monotonic() - start, message


def choose(seed: int, trials: int, only: str | None) -> list[Fault]:
    """Return the faults of trials 0, 1, ...: all of them in random order, then all of them again."""
    chosen = []
    while len(chosen) < trials:
        possible = [f for f in FAULTS if f.prepare is not mount or os.geteuid() == 0]
        faults = [f for f in FAULTS if f.name == only] if only else possible
        chosen += random.Random(f"{seed}-{len(chosen)}").sample(faults, len(faults))
    return chosen[:trials]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="faults.py", description=__doc__.split("\n\n")[0])
    add, names = parser.add_argument, [fault.name for fault in FAULTS]
    add("--trials", type=int, default=100, metavar="N", help="how many (default 100)")
    add("--seed", type=int, default=0, metavar="S", help="of everything that is drawn")
    add("--only", choices=names, metavar="FAULT", help="one fault, by its name")
    add("--trial", type=int, metavar="K", help="only the trial with this number, from 0")
    args = parser.parse_args(argv)
    # Clean up then too; in the background SIGINT would be ignored, by all that is launched too.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # by nohup: the runs would inherit that
        signal.signal(signal.SIGHUP, lambda number, frame: None)  # and they have the default
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    campaign = Campaign(args.seed, folder)
    numbers = range(args.trials) if args.trial is None else [args.trial]
    try:
        faults = choose(args.seed, max(numbers) + 1, args.only)
        campaign.run([Trial(campaign, number, faults[number]) for number in numbers])
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        send(marked(f"{folder}/"), signal.SIGKILL)
        lost = campaign.results.count("lost")
        if not lost:
            shutil.rmtree(folder)
    minutes = (time.monotonic() - start) / 60
    done = len(campaign.results)
    kinds = ", ".join(f"{campaign.results.count(word)} {word}" for word in OUTCOMES)
    print(f"{done} of {len(numbers)} trials: {kinds}; seed {args.seed}, {minutes:.1f} minutes")
    return 1 if lost or done < len(numbers) else 0


if __name__ == "__main__":
    sys.exit(main())
