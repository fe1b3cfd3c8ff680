"""The files of a run, all written by global rank 0: metrics.jsonl and the checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import sys
import time
import weakref
from argparse import Namespace
from pathlib import Path
from typing import Any

from common import UsageError, has_non_finite, load_checkpoint, save_checkpoint
from machinery.options import EVALUATED, MAY_CHANGE, TASK, declared, keys, refuse
from machinery.processes import at_end, attempt

# ------------------------------------------------------------------------- finding the checkpoint


def output_directory(args: Namespace) -> Path:
    """Return --output-dir, or a new name; a launcher's run id keeps it the same in a restart."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run_id == "none":
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    name = f"{args.dataset}-{args.model}" if args.task == TASK else Path(args.task).stem
    return Path(args.output_dir or f"runs/{name}-{run_id}")


def find_checkpoint(args: Namespace, samples: int) -> tuple[Path | None, dict[str, Any] | None]:
    """Return the path of the checkpoint of --resume, and the checkpoint; both None in a new run.

    It is the file that --resume names. With --resume auto, and after a restart, it is last.pt of
    the directory, if there is one. `samples` is the length of the training set. Raises UsageError
    if the file is damaged, or belongs to another run.
    """
    directory = output_directory(args)
    restarted = attempt() > 0 and not args.eval_only  # a launcher has started the ranks again
    if restarted and not args.output_dir and os.environ.get("TORCHELASTIC_RUN_ID") == "none":
        raise UsageError("--output-dir is needed for torchrun to start a run again")
    path = Path(args.resume) if args.resume not in (None, "auto") else None
    if args.resume == "auto" or restarted:
        last, others = directory / "last.pt", sorted(directory.glob("*.pt"))
        if last.exists():
            path = last
        elif others:  # a new run would replace it
            problem = f"no last.pt in {directory}, but {others[0].name}"
            raise UsageError(f"--resume auto: {problem}; name that file, or another directory")
    if not path:
        nothing = args.eval_only and args.resume
        refuse(nothing, f"--resume auto: no checkpoint in {directory} to evaluate")
        return None, None
    checkpoint = load_checkpoint(path)
    config = checkpoint["config"]
    if checkpoint["best"] is None and isinstance(config, dict):
        config = config | {"best": args.best}  # no evaluation yet: --best may still change
    check_config(args, config, path)
    if not args.eval_only:
        before = checkpoint["samples"]
        if before != samples:
            problem = f"the training set had {before} samples, and has {samples} now"
            raise UsageError(f"--resume {path}: {problem}; that would be another run")
    return path, checkpoint


def check_config(args: Namespace, config: dict[str, Any], path: Path) -> None:
    """Raise UsageError if an option would silently make it another run."""
    given = declared(args)
    fixed = given.keys() - keys(MAY_CHANGE)
    if args.eval_only:
        fixed = keys(EVALUATED) | {*args.task_options}  # what changes the numbers
    for name, now in given.items():
        then = config.get(name, now)
        if name == "task":
            then, now = Path(then).name, Path(now).name
        if name in fixed and then != now:
            other = "" if args.eval_only else ", or start anew without --resume"
            option = f"--{name.replace('_', '-')} {now}"
            raise UsageError(f"{option}: {path} was made with {then}; use that{other}")


# ---------------------------------------------------------------------------------- writing files


class RunFiles:
    """The directory of a run: its lock, its log and its checkpoints. Create it on rank 0 only.

    `checkpoint` is the one of --resume, or None. Raises UsageError if the run cannot go on.
    """

    def __init__(self, args: Namespace, samples: int) -> None:
        self.directory = directory = output_directory(args)
        self.best_epoch: int | None = None  # of best.pt, counted from 1
        self.tensorboard = None
        directory.mkdir(parents=True, exist_ok=True)
        # --eval-only in the directory of a run leaves its log as it is.
        only_reads = args.eval_only and any(directory.glob("*.pt"))
        name = os.devnull if only_reads else directory / "metrics.jsonl"
        self.log = open(name, "a+", errors="replace")  # noqa: SIM115
        # A notebook may keep an exception, and with it this object: the file must be closed anyway.
        log = weakref.ref(self.log)
        at_end.callback(lambda: log() and log().close())
        try:
            if not only_reads:
                fcntl.flock(self.log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            problem = "another run is writing there; choose another directory"
            raise UsageError(f"--output-dir {directory}: {problem}") from error
        path, self.checkpoint = find_checkpoint(args, samples)
        self.path = path
        best = self.checkpoint["best"] if self.checkpoint else None
        if best is not None and not args.eval_only and not self._find_best(path, best):
            self.checkpoint["best"] = None  # the next evaluation writes best.pt
        if args.tensorboard and not only_reads:
            from torch.utils.tensorboard import SummaryWriter

            purge = self.checkpoint["global_step"] + 1 if self.checkpoint else None
            self.tensorboard = SummaryWriter(self.directory, purge_step=purge)
        print(f"output directory: {self.directory}", flush=True)

    def rewind(self) -> None:
        """Go back to the checkpoint: last.pt becomes it, and the log loses its later lines."""
        last, checkpoint = self.directory / "last.pt", self.checkpoint
        if checkpoint and self.path.resolve() != last.resolve():  # last.pt may also be damaged
            save_checkpoint(checkpoint, last)
        self.log.truncate(self._bytes_before(checkpoint))

    def _find_best(self, path: Path, best: float) -> bool:
        """Return whether best.pt has the score `best`, or the file beside `path`, which is copied.

        If --resume names an earlier checkpoint, best.pt may belong to a later epoch.
        """
        for name in (self.directory / "best.pt", path.with_name("best.pt")):
            with contextlib.suppress(UsageError):  # no such file, or damaged
                found = load_checkpoint(name)
                if found["best"] == best:
                    self.best_epoch = found["epoch"]
                    if name.parent != self.directory:
                        save_checkpoint(found, self.directory / "best.pt")
                    return True
        return False

    def _bytes_before(self, checkpoint: dict[str, Any] | None) -> int:
        """Return how much of metrics.jsonl is older than the checkpoint."""
        kept = 0
        self.log.seek(0)
        for line in self.log if checkpoint else ():
            try:
                entry = json.loads(line)
                done = entry["global_step"] <= checkpoint["global_step"]
                if entry["event"] == "eval":
                    done = entry["epoch"] < checkpoint["epoch"]
            except (ValueError, KeyError, TypeError):  # torn, or not ours
                break
            if not done or not line.endswith("\n"):
                break
            kept += len(line.encode())
        return kept

    def write_line(self, line: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl; NaN and Inf become null."""
        bad = [n for n, v in line.items() if isinstance(v, float) and not math.isfinite(v)]
        plain = line | dict.fromkeys(bad)
        self.log.write(json.dumps(plain) + "\n")
        self.log.flush()
        position = {"event", "epoch", "step", "global_step", "count"}
        for name in line.keys() - position if self.tensorboard else ():
            self.tensorboard.add_scalar(f"{line['event']}/{name}", line[name], line["global_step"])

    def write_checkpoint(self, checkpoint: dict[str, Any], names: tuple[str, ...]) -> str:
        """Write the checkpoint under these names. Raises OSError if it cannot be written.

        Return the parameters that are not finite, if any: then the last good files stay.
        """
        bad = []
        for part in ("model", "average"):  # the average is {} if there is none
            values = checkpoint[part]
            bad += [n for n in self.parameters if n in values and has_non_finite(values[n])]
        if bad:
            problem = f"non-finite values in {', '.join(bad[:5])}"
            kept = "not saved, the last good checkpoint stays"
            print(f"{kept}: {problem}", file=sys.stderr, flush=True)
            return problem
        if "best.pt" in names:
            self.best_epoch = checkpoint["epoch"]
        os.fsync(self.log.fileno())  # a checkpoint must not be ahead of the log
        save_checkpoint(checkpoint, *(self.directory / name for name in names))
        return ""

    def close(self) -> None:
        if self.tensorboard:
            self.tensorboard.close()
