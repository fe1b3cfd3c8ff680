"""A run as its loop sees it: position, stop, saving; its log; the files in its directory."""

from __future__ import annotations

import fcntl
import functools
import json
import math
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

import common
from common import (
    MAX_SKIPPED_IN_A_ROW,
    State,
    UsageError,
    broadcast_object,
    copy_checkpoint,
    get_rank,
    has_non_finite,
    load_checkpoint,
    print0,
    save_checkpoint,
)
from machinery import shards
from machinery.cli import check_directory, declared
from machinery.identity import check_agreement, fingerprint, identity
from machinery.process import Stopped, bad_input, command
from machinery.signals import SIGNALS, StopSignal
from machinery.usertask import as_task_error
from sampling import GlobalBatchSampler

# Entries of a line of metrics.jsonl that TensorBoard does not draw.
NOT_DRAWN = {"event", "epoch", "step", "global_step", "count"}

# tqdm's default lock is one for several processes, and would be left behind.
tqdm.set_lock(threading.RLock())


class Run:
    """Position, checkpoints and end of a run. Create it on every rank; only rank 0 writes files.

    Call each of its methods on every rank: within them the ranks talk to each other. `resume` opens
    the files, `end_step` counts, logs and saves, `end_epoch` logs and saves, `finish` closes.

    `args` has the options: all ranks must have the same, and a checkpoint holds them for a resume.
    """

    files: RunFiles | None = None  # stays None on all ranks but 0
    stop_signal: StopSignal | None = None  # stays None with --eval-only
    stopping: signal.Signals | None = None  # the signal after which the next save is the last one

    def __init__(
        self,
        state: State,
        train_loader: DataLoader,
        val_loader: DataLoader,
        device: torch.device,
        args: Namespace,
    ) -> None:
        self.state, self.device, self.args = state, device, args
        self.sampler: GlobalBatchSampler = train_loader.batch_sampler
        self.directory, self.config = Path(args.output_dir), declared(args)
        self.in_shards = args.parallel_mode == "fsdp" and args.shards
        devices = common.get_world_size() * getattr(args, "replicas", 1)
        self.log = Log(state, self.sampler, device, args, devices)
        self.meter = self.log.meter  # the loop adds to it
        self.data, self.hashes = identity(train_loader.dataset, val_loader.dataset)
        self.patient = common.patient_group()  # a slow disk may keep rank 0 for long
        check_agreement(self.config, state.net, self.data, self.hashes, device)

    def resume(self) -> None:
        """Open the directory of the run, and load the checkpoint of --resume into the state."""
        found = self._on_rank0(self._open)
        if found:
            self._load(*found)
            print0("\n".join([f"resumed {self._position()}", *self.args.changes]))
        else:
            with as_task_error("a checkpoint of this model or optimizer could not be loaded"):
                self.state.load_itself()
        if self.in_shards and not self.args.eval_only:
            self._write_shard([])  # do all ranks see the directory?
        self._on_rank0(lambda: self.files.begin(self.state if found else None, self.args))
        if not self.args.eval_only:  # which has nothing to save
            self.stop_signal = StopSignal()
        self.log.start_times()

    def _open(self) -> tuple[Path, str, bool] | None:
        """Return the path of the checkpoint, its fingerprint, and whether its best score counts."""
        path = find_checkpoint(self.directory, self.args.resume, self.args.eval_only)
        checkpoint = load_checkpoint(path) if path else None  # reads it all: is it damaged?
        self.files = self.log.files = RunFiles(self.directory, self.args.eval_only, path)
        check_directory(self.args)  # another run may have filled it since the start
        print(f"output directory: {self.directory}", flush=True)
        if not path:
            return None
        best, same = checkpoint["best"], checkpoint["config"].get("best") == self.args.best
        goes_on = not best or self.args.eval_only or (same and self.files.best() == best)
        if not goes_on:
            reason = "is not in that directory" if same else "was chosen by another --best"
            print(f"best.pt of epoch {best[1]} {reason}: the best score starts anew")
        return path, fingerprint(path), goes_on

    def _load(self, path: Path, expected: str, best_goes_on: bool) -> None:
        """Load the checkpoint. Each rank reads the file itself, and only what it uses."""
        problem = ""
        try:
            checkpoint = load_checkpoint(path, verify=False)  # rank 0 has read it all
            if fingerprint(path) != expected:
                raise UsageError(f"--resume {path}: another file than that of rank 0")
            self._check_data(checkpoint, path)
            self.state.restore(shards.assemble(checkpoint, path))
        except UsageError as error:
            problem = str(error)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            words = " ".join(str(error).split())
            problem = f"--resume {path}: does not fit the model or the optimizer: {words}"
        if problem := self._first_problem(problem):
            raise bad_input(problem)
        state = self.state
        state.best = state.best if best_goes_on else None
        if not self.args.eval_only:  # --batch-size may be another, and so the steps of an epoch
            state.set_position(state.epoch * self.sampler.steps_per_epoch + state.step)

    def _check_data(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Raise UsageError if the data are not those of the checkpoint; warn if pixels differ."""
        # An evaluation may be of other data, but of the same classes.
        for name in ["classes"] if self.args.eval_only else self.data:
            then, now = checkpoint["data"].get(name), self.data[name]
            if then != now:
                problem = f"{name}: {then} in the run of this file, and {now} now"
                raise UsageError(f"--resume {path}: {problem}; that is other data")
        for name, now in self.hashes.items():
            if self.args.eval_only and "training" in name:
                continue  # it is not used, and may be another set
            if checkpoint["data"].get(name) != now:
                print0(f"warning: other {name} than in {path}: are the files the same?")

    def _position(self) -> str:
        state, epochs = self.state, self.args.epochs
        if self.args.eval_only and state.step == 0:
            return f"after epoch {state.epoch}"
        if state.epoch >= epochs:
            return f"after all {epochs} epochs: nothing is left to do; a larger --epochs goes on"
        return f"at epoch {state.epoch + 1}, step {state.step}"

    def _on_rank0(self, function: Callable[[], Any]) -> Any:
        """Call the function on rank 0; return its result, or raise its error, on every rank.

        If rank 0 raised alone, the others would wait for it.
        """
        result = error = None
        if get_rank() == 0:
            try:
                result = function()
            except OSError as problem:
                error = bad_input(f"--output-dir {self.directory}: {problem}")
            except UsageError as problem:
                error = bad_input(str(problem))
        result, error = broadcast_object((result, error), self.patient)
        if error:
            raise error
        return result

    def _first_problem(self, problem: str) -> str:
        """Return on every rank the first rank's problem, "" if none has one."""
        problems = [problem]
        if dist.is_initialized():
            problems *= dist.get_world_size()
            dist.all_gather_object(problems, problem, group=self.patient)
        return next((f"{p} (rank {r})" if r else p for r, p in enumerate(problems) if p), "")

    def batches(self, loader: DataLoader) -> Iterator[list]:
        """Yield the micro-batches of each step that is left of the epoch, on the device."""
        self.sampler.set_position(self.state.epoch, self.state.step)
        for micro_batches in self.log.watch(loader):
            yield common.to_device(micro_batches, self.device)

    @property
    def logs_next(self) -> bool:
        """Whether a line of the log follows the step that is being made."""
        ends = self.state.step + 1 == self.sampler.steps_per_epoch
        return ends or (self.state.global_step + 1) % self.args.log_every == 0

    def end_step(self, grad_norm: Tensor | None) -> None:
        """Count the step; log, save or stop if it is time. Call it after each optimizer step.

        `grad_norm` is the norm of its gradient, which `logs_next` asks for.
        """
        state = self.state
        logs = self.logs_next  # before the counters move on
        state.step += 1
        state.global_step += 1
        self.log.bar.update()
        # First, because reading the device hangs if another rank has died.
        self.stopping = self.stop_signal.agreed()
        ends = state.step == self.sampler.steps_per_epoch
        if logs:
            self.log.train_line(grad_norm)
        self.log.lr = state.optimizer.param_groups[0]["lr"]  # for the next step
        due = self.args.save_every and state.global_step % self.args.save_every == 0
        # At the end of an epoch train_*.py itself saves; a run that was told to stop ends there.
        saves = not ends and (due or self.stopping)
        # To read the count is to wait for the device, as log lines and saves do anyway.
        if (logs or saves) and state.scaler.in_a_row >= MAX_SKIPPED_IN_A_ROW:
            problem = f"{MAX_SKIPPED_IN_A_ROW} steps in a row had non-finite gradients"
            raise Stopped(3, f"diverged: {problem}, seen at step {state.global_step}")
        if saves:
            self.save("last.pt")

    def end_epoch(self, metrics: dict[str, float]) -> None:
        """Log the evaluation, and write last.pt, and best.pt if it is the best.

        Call it when `state.epoch` counts the epoch as done.
        """
        state = self.state
        known = [name for name in metrics if name not in ("loss", "count")] + ["loss"]
        best = self.args.best or known[0]
        name = best.removesuffix(":min")
        lower_is_better = best == "loss" or best.endswith(":min")
        if name not in known:
            raise bad_input(f"--best {best}: no such metric; use one of {', '.join(known)}")
        self.log.eval_line(metrics)
        names = []
        if self._improves(metrics[name], lower_is_better):
            state.best = (metrics[name], state.epoch)
            names.append("best.pt")
        if self.args.keep_every and state.epoch % self.args.keep_every == 0:
            names.append(f"epoch-{state.epoch:04}.pt")
        # Waits: the save below must know of a stop. After the last epoch nothing is left to stop.
        self.stopping = (
            self.stop_signal.agreed(wait=True) if state.epoch < self.args.epochs else None
        )
        self.save(*names, "last.pt")  # last.pt last: it counts the epoch as done
        if state.epoch == self.args.epochs and state.best:
            path, (score, epoch) = self.directory / "best.pt", state.best
            print0(f"best {name} {score:.6f}, in epoch {epoch}: {path}")
            options = f"--eval-only --resume {shlex.quote(str(path))}"
            print0(f"to evaluate it: {command(options)}")
        elif state.epoch == self.args.epochs:
            print0(f"no best.pt: in no epoch {name} and the weights were finite")

    def _improves(self, score: float, lower_is_better: bool) -> bool:
        """Return whether the score is better than the best one; NaN and infinity never are."""
        if not self.state.best or not math.isfinite(score):
            return math.isfinite(score)
        best, _ = self.state.best
        gain = best - score if lower_is_better else score - best
        return gain > 1e-12 * abs(best)  # less is rounding, on another number of ranks

    def save(self, *names: str) -> None:
        """Write the checkpoint under these names, and stop if a signal has asked for it.

        Call it on every rank: all take part in collecting what rank 0 writes. If a parameter is not
        finite, the run ends, and the last good files stay.
        """
        self.log.spend("train_s")
        checkpoint, problem = self._save_rows() if self.in_shards else (self.state.checkpoint(), "")
        if self.files and not problem:
            problem = self.files.write_checkpoint(
                checkpoint | {"data": self.data | self.hashes, "config": self.config},
                [name for name, _ in self.state.net.named_parameters() if not self.in_shards],
                names,
            )
        if problem := broadcast_object(problem, self.patient):
            step = self.state.global_step
            kept = f"step {step} is not saved, the last good checkpoint stays"
            raise Stopped(3, f"diverged: {kept}: {problem}")
        self.log.spend("save_s")
        if self.stopping:
            self._end_on_signal()

    def _save_rows(self) -> tuple[dict[str, Any], str]:
        """Write this rank's rows, for --shards; return the rest, and what is not finite."""
        rows: list[Tensor] = []
        checkpoint = self.state.checkpoint(functools.partial(shards.split, rows=rows))
        values = (*checkpoint["model"].items(), *checkpoint["average"]["tensors"].items())
        cut = [(name, rows[v["place in shards"]]) for name, v in values if shards.is_place(v)]
        bad = ", ".join([name for name, own in cut if has_non_finite(own)][:5])
        problem = self._first_problem(f"non-finite values in {bad}" if bad else "")
        if not problem:
            checkpoint["shards"] = self._write_shard(rows)
        return checkpoint, problem

    def _write_shard(self, rows: list[Tensor]) -> dict[str, Any]:
        """Write this rank's rows into a new folder; when it returns, all ranks have done so."""
        mesh = next(p.device_mesh for p in self.state.net.parameters() if hasattr(p, "full_tensor"))
        *copy, index = mesh.get_coordinate()  # --shard-size: several ranks may hold the same rows
        name = f"shards-{self.state.global_step:08}-{os.urandom(4).hex()}"
        if self.files:
            (self.directory / name).mkdir()
        folder, problem = self.directory / broadcast_object(name, self.patient), ""
        try:
            os.stat(folder)  # raises if this rank does not see it
            if not any(copy):
                save_checkpoint(rows, folder / f"{index:05}.pt")
        except OSError as error:
            problem = str(error)
        if problem := self._first_problem(problem):
            shutil.rmtree(folder, ignore_errors=True)
            refused = f"--shards needs a directory that all ranks see: {problem}"
            raise OSError(problem) if rows else bad_input(refused)
        return {"folder": folder.name, "files": mesh.size(mesh.ndim - 1)}

    def _end_on_signal(self) -> NoReturn:
        """End the run on a signal, after a save."""
        name, step = self.stopping.name, self.state.global_step
        if self.log.bar:
            self.log.bar.close()  # else its line would go on with the next one
        raise Stopped(SIGNALS[self.stopping], f"stopped by {name} after saving step {step}")

    def finish(self) -> None:
        """Wait for all ranks, and close the files."""
        if self.files:
            self.files.close()
        if dist.is_initialized():
            dist.barrier()  # rank 0 has written its files


# --------------------------------------------------------------------------------- the log of a run


class Log:
    """The sums, speeds and times of a run, and the lines that show them.

    Create it on every rank. Only rank 0 prints, and writes to its `files`. `meter` has the sums
    since the last training line.
    """

    files: RunFiles | None = None  # stays None on all ranks but 0
    bar: tqdm | None = None  # of an epoch
    # For the next training line: when it began, the seconds that the loop waited for data, and the
    # learning rate of the step that is being made.
    began = waited = lr = 0.0

    def __init__(
        self,
        state: State,
        sampler: GlobalBatchSampler,
        device: torch.device,
        args: Namespace,
        devices: int,
    ) -> None:
        self.state, self.sampler, self.device = state, sampler, device
        self.args, self.devices = args, devices
        self.meter = common.Meter(device)
        # On a terminal alone; there the bar shows the training lines.
        self.shows_bar = get_rank() == 0 and sys.stdout.isatty() and sys.stderr.isatty()

    def watch(self, loader: DataLoader) -> Iterator[Any]:
        """Yield the loader's batches; measure the time that the loop waits for them."""
        if not self.bar:
            self._print_header(loader)
        self.bar = tqdm(
            total=self.sampler.steps_per_epoch,
            initial=self.state.step,
            desc=f"epoch {self.state.epoch + 1}/{self.args.epochs}",
            leave=False,
            dynamic_ncols=True,
            disable=not self.shows_bar,
        )
        self.waited, self.lr = 0.0, self.state.optimizer.param_groups[0]["lr"]
        asked = self.began = time.perf_counter()
        for batch in loader:
            self.waited += time.perf_counter() - asked
            yield batch
            asked = time.perf_counter()
        self.bar.close()

    def _print_header(self, loader: DataLoader) -> None:
        sampler, state, args = self.sampler, self.state, self.args
        size = sum(parameter.numel() for parameter in state.net.parameters())
        share = math.ceil(sampler.batch_size / (sampler.accum_steps * self.devices))
        group, never = state.optimizer.param_groups[0], args.warmup_epochs >= args.epochs
        print0(
            f"{Path(sys.argv[0]).name} on {self.devices} x {self.device.type}: "
            f"{type(state.net).__name__.removeprefix('FSDP')}, {size:,} parameters; "
            f"loader workers per process: {loader.num_workers}\n"
            f"{sampler.length} training samples: {sampler.steps_per_epoch} "
            f"steps per epoch; a step: {sampler.batch_size} samples, "
            f"{sampler.accum_steps} x up to {share} samples on each device\n"
            f"{type(state.optimizer).__name__}: weight decay {group.get('weight_decay', 0):g}, "
            f"peak lr {group['initial_lr']:g}; {args.schedule} after a warm-up of "
            f"{args.warmup_epochs:g} of {args.epochs} epochs"
            f"{', so that it never reaches the peak' if never else ''}"
        )

    def train_line(self, grad_norm: Tensor) -> None:
        """Write the line of the steps since the last one. Call it on every rank."""
        state, means, now = self.state, self.meter.mean(), time.perf_counter()
        skipped = int(state.scaler.skipped.item())
        line = {
            "event": "train",
            "epoch": state.epoch,
            "step": state.step,
            "global_step": state.global_step,
            "loss": means["loss"],
            "lr": self.lr,
            "samples_per_s": means["count"] / (now - self.began),
            "grad_norm": grad_norm.item(),
            "skipped": skipped,
            **{name: mean for name, mean in means.items() if name not in ("loss", "count")},
            "data_wait": self.waited / (now - self.began),
        }
        self.began, self.waited = now, 0.0
        self.meter.clear()
        state.scaler.skipped.zero_()
        warning = f"  skipped {skipped} steps: a gradient was not finite" if skipped else ""
        values = "  ".join(f"{name} {mean:.6f}" for name, mean in means.items() if name != "count")
        speed = f"{line['samples_per_s']:.0f} samples/s  data {line['data_wait']:.0%}"
        text = f"{values}  lr {line['lr']:.5g}  {speed}{warning}"
        self._write(line, f"step {state.step}/{self.sampler.steps_per_epoch}  {text}")

    def start_times(self) -> None:
        """Count the seconds for the next evaluation line; `mark` is the last reading."""
        self.spent, self.mark = {"train_s": 0.0, "eval_s": 0.0, "save_s": 0.0}, time.perf_counter()

    def spend(self, name: str) -> None:
        """Count the seconds since the last call as those of training, evaluation or saving."""
        now = time.perf_counter()
        self.spent[name] += now - self.mark
        self.mark = now

    def eval_line(self, metrics: dict[str, float]) -> None:
        """Write the line of an evaluation; `metrics` as `evaluate` returns them."""
        self.spend("eval_s")
        values = [f"{name} {value:.6f}" for name, value in metrics.items() if name != "count"]
        counted = self.state.step == 0  # the state counts the epoch as done
        line = {
            "event": "eval",
            "epoch": max(0, self.state.epoch - counted),
            "global_step": self.state.global_step,
            **metrics,
            **self.spent,
        }
        self.start_times()
        self._write(line, f"eval  {'  '.join(values)}  ({metrics['count']} samples)")

    def _write(self, line: dict[str, Any], text: str) -> None:
        if not self.files:
            return
        self.files.write_line(line)
        if line["event"] == "train" and not self.bar.disable:
            self.bar.set_postfix_str(text.partition("  ")[2])  # without the step, which it shows
        else:
            print(f"epoch {line['epoch'] + 1}/{self.args.epochs}  {text}", flush=True)


# ------------------------------------------------------------------------------- the files of a run


def find_checkpoint(directory: Path, resume: str | None, eval_only: bool = False) -> Path | None:
    """Return the path of the checkpoint of --resume; None in a new run.

    It is the file that --resume names. With --resume auto it is last.pt of the directory, if there
    is one. Raises UsageError if there is another checkpoint, or none to evaluate.
    """
    if resume != "auto":
        return Path(resume) if resume else None
    last, others = directory / "last.pt", sorted(directory.glob("*.pt"))
    if last.exists():
        return last
    if others:  # a new run would replace it
        problem = f"no last.pt in {directory}, but {others[0].name}"
        raise UsageError(f"--resume auto: {problem}; name that file, or another directory")
    if eval_only:
        raise UsageError(f"--resume auto: no checkpoint in {directory} to evaluate")
    print("nothing to resume: a new run")
    return None


class RunFiles:
    """The directory of a run: its lock, its log and its checkpoints. Create it on rank 0 only.

    Raises UsageError if another run is writing there.
    """

    tensorboard: Any = None  # a SummaryWriter

    def __init__(self, directory: Path, eval_only: bool, resume_path: Path | None) -> None:
        self.directory, self.eval_only, self.resume_path = directory, eval_only, resume_path
        directory.mkdir(parents=True, exist_ok=True)
        # --eval-only in the directory of a run leaves its log as it is.
        self.only_reads = eval_only and any(directory.glob("*.pt"))
        name = os.devnull if self.only_reads else directory / "metrics.jsonl"
        self.metrics_file = open(name, "ab+")  # noqa: SIM115
        try:
            if not self.only_reads:  # held by the process: a notebook may start another run here
                fcntl.lockf(self.metrics_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            problem = "another run is writing there; choose another directory"
            raise UsageError(f"--output-dir {directory}: {problem}") from error
        except OSError as error:  # network file systems often have no locks
            problem = f"{directory} cannot be locked: {error.strerror}"
            print(f"warning: {problem}; let no other run write there", file=sys.stderr)

    def best(self) -> tuple[float, int] | None:
        """Return score and epoch of best.pt in the directory."""
        try:
            return load_checkpoint(self.directory / "best.pt", verify=False)["best"]
        except UsageError:  # there is none, or it is damaged
            return None

    def begin(self, state: State | None, args: Namespace) -> None:
        """Write the first files, after the checkpoint of --resume was found to fit.

        last.pt becomes that checkpoint; log lines of later steps are removed. `state` is None in a
        new run.
        """
        if not self.eval_only:
            if state and self.resume_path.resolve() != (self.directory / "last.pt").resolve():
                shards.copy_folder(self.resume_path, self.directory)
                copy_checkpoint(self.resume_path, self.directory / "last.pt")
            shards.remove_unnamed(self.directory)  # what a kill has left
            self.metrics_file.truncate(self._bytes_before(state) if state else 0)
        if args.tensorboard and not self.only_reads:
            from torch.utils.tensorboard import SummaryWriter

            purge = state.global_step + 1 if state else 0
            self.tensorboard = SummaryWriter(self.directory, purge_step=purge)

    def _bytes_before(self, state: State) -> int:
        """Return how many bytes of metrics.jsonl are of steps before this state."""
        kept = 0
        self.metrics_file.seek(0)
        for line in self.metrics_file:
            try:
                entry = json.loads(line)
                # The evaluation of an epoch belongs to its end.
                step = entry["step"] if entry["event"] == "train" else math.inf
                done = (entry["epoch"], step) <= (state.epoch, state.step)
            except (ValueError, KeyError, TypeError):  # half a line, or not of a run
                break
            if not done or not line.endswith(b"\n"):
                break
            kept += len(line)
        return kept

    def write_line(self, line: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl; NaN and Inf become null."""
        bad = [n for n, v in line.items() if isinstance(v, float) and not math.isfinite(v)]
        self.metrics_file.write(f"{json.dumps(line | dict.fromkeys(bad))}\n".encode())
        self.metrics_file.flush()
        if self.tensorboard:
            for name in line.keys() - NOT_DRAWN:
                value, step = line[name], line["global_step"]
                self.tensorboard.add_scalar(f"{line['event']}/{name}", value, step)

    def write_checkpoint(
        self, checkpoint: dict[str, Any], parameters: list[str], names: tuple[str, ...]
    ) -> str:
        """Write the checkpoint under these names. Raises OSError if it cannot be written.

        If parameters are not finite, write nothing and return a text that names them, else "".
        """
        parts = checkpoint["model"], checkpoint["average"]["tensors"]
        bad = [n for part in parts for n in parameters if n in part and has_non_finite(part[n])]
        if bad:
            advice = "a mask, infinite on purpose, must be a buffer"
            return f"non-finite values in {', '.join(bad[:5])}; {advice}"
        os.fsync(self.metrics_file.fileno())  # a checkpoint must not be ahead of the log
        save_checkpoint(checkpoint, *(self.directory / name for name in names))
        shards.remove_unnamed(self.directory)
        return ""

    def close(self) -> None:
        if self.tensorboard:
            self.tensorboard.close()
        self.metrics_file.close()
