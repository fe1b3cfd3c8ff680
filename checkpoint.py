"""What outlives a process: the state of a run, its checkpoints, its log, and the signals that end it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from common import (
    MAX_SKIPPED_IN_A_ROW,
    SIGNALS,
    GlobalBatchSampler,
    Meter,
    NoAverage,
    Scaler,
    ShardSampler,
    Stopped,
    UsageError,
    announce_end,
    autocast,
    became_non_finite,
    broadcast_object,
    earlier_failure,
    handle_signals,
    is_distributed,
    is_rank0,
    map_tensors,
    print0,
    read_tensors,
    swa_epochs,
    to_device,
    wait_for_all,
)
from options import build_parser, end_with_parent, restarted, undo_at_end

FORMAT = 1  # of a checkpoint; raised when its keys change
# Options that may differ when a run is resumed, because the run they describe is the same one.
HARMLESS = {"epochs", "output_dir", "data_dir", "download", "workers", "resume", "save_every", "keep_every", "eval_only", "log_every"}
HARMLESS |= {"tensorboard", "device", "timeout", "local_rank", "replicas", "nproc", "nnodes", "node_rank", "dist_url", "compile"}
HARMLESS |= {"channels_last", "deterministic", "find_unused_parameters", "skip_corrupt", "weights"}
# Options that may differ from node to node: where its files are, and what concerns it alone
OWN = {"data_dir", "download", "output_dir", "resume", "weights", "task", "workers", "device", "local_rank", "node_rank", "dist_url"}
KEYS = dict.fromkeys(("model", "optimizer", "scheduler", "scaler", "average", "log", "config"), dict)
KEYS |= {**dict.fromkeys(("epoch", "step", "global_step", "samples"), int), "best": (float, type(None))}
WHAT_IS_EVALUATED = {"dataset", "image_size", "model", "task", "dtype", "average", "optimizer", "freeze", "label_smoothing"}


@dataclasses.dataclass
class State:
    """All that a run is, and what a checkpoint holds: `epoch` and the `step` within it say what comes next."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    scaler: Scaler
    average: AveragedModel | NoAverage
    epoch: int = 0
    step: int = 0
    global_step: int = 0
    best: float | None = None

    def __post_init__(self) -> None:
        tensors = {name: tensor for name, tensor in self.net.state_dict().items() if isinstance(tensor, Tensor)}
        self.by_design = {name: tensor.cpu().clone() for name, tensor in tensors.items() if became_non_finite(tensor, None)}

    def averaged(self) -> nn.Module:
        """Return the network to evaluate: the average if one is kept."""
        return self.average.module if getattr(self.average, "n_averaged", 0) else self.net

    def checkpoint(self) -> dict[str, Any]:
        """Return plain tensors and plain Python values only, with names as in the bare model."""
        parts = {name: getattr(self, name).state_dict() for name in ("optimizer", "scheduler", "scaler")}
        parts["average"] = {name.removeprefix("module."): value for name, value in self.average.state_dict().items()}
        position = {name: getattr(self, name) for name in ("epoch", "step", "global_step", "best")}
        return {"format": FORMAT, "model": self.net.state_dict(), **parts, **position}

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Go on from a checkpoint. Raises if it does not fit the network or the optimizer."""
        for group, now in zip(checkpoint["optimizer"]["param_groups"], self.optimizer.param_groups):
            group["fused"] = now["fused"]  # belongs to the device, which may be another one
        self.net.load_state_dict(checkpoint["model"])
        for name in ("optimizer", "scheduler", "scaler"):
            getattr(self, name).load_state_dict(checkpoint[name])
        average = checkpoint["average"].items()
        self.average.load_state_dict({name if name == "n_averaged" else f"module.{name}": value for name, value in average})
        for name in ("epoch", "step", "global_step", "best"):
            setattr(self, name, checkpoint[name])
        schedule = zip(self.optimizer.param_groups, self.scheduler.base_lrs, self.scheduler.lr_lambdas)
        for group, peak, factor in schedule:  # as a function of the step, so that more --epochs take effect at once
            group["lr"] = peak * factor(self.global_step)


def save_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint so that a crash, a kill or a full disk at any instant leaves the old file or the new one, whole."""
    temporary = path.with_name(f".{path.name}.tmp")  # in the same folder: a rename is atomic only within a file system
    try:
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())  # the data must be on the disk before the name points to it
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch tells of a full disk in words of its own
        reason = str(error).splitlines()[0]
        raise OSError(f"{path} could not be written (is the disk full?); the last good file stays: {reason}") from error
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # and the name too
    os.close(folder)


@contextlib.contextmanager
def keep_previous(path: Path) -> Iterator[None]:
    """Let the file at `path` be previous.pt once its successor is there, to fall back to should that ever be damaged.

    Never before: a kill in between would leave both names to one file, which is then damaged as last.pt and as previous.pt.
    """
    temporary = path.with_name(".previous.pt.tmp")
    temporary.unlink(missing_ok=True)
    try:
        if path.exists():
            try:
                os.link(path, temporary)
            except OSError:  # a file system without hard links
                shutil.copyfile(path, temporary)
        yield
        if temporary.exists():
            os.replace(temporary, path.with_name("previous.pt"))
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU. Raises UsageError if it is none, or damaged."""
    try:
        checkpoint = read_tensors(path)
    except FileNotFoundError as error:
        raise UsageError(f"--resume {path}: no such file") from error
    except Exception as error:  # a truncated, damaged or hostile file raises almost anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UsageError(f"--resume {path}: damaged, or not a checkpoint ({reason})") from error
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
        raise UsageError(f"--resume {path}: not a checkpoint of this program (format {FORMAT})")
    wrong = [name for name, kind in KEYS.items() if not isinstance(checkpoint.get(name), kind)]
    if wrong := wrong or [name for name, kind in KEYS.items() if kind is int and checkpoint[name] < 0]:
        raise UsageError(f"--resume {path}: not a checkpoint of this program: {', '.join(wrong)} missing or wrong")
    return checkpoint


def output_folder(args: argparse.Namespace) -> Path:
    """`--output-dir`, or a name of its own for every run, which stays the same when torchrun restarts the processes."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    unique = run_id if run_id != "none" else f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return Path(args.output_dir or f"runs/{args.dataset}-{args.model}-{unique}")


def find_checkpoint(args: argparse.Namespace, samples: int) -> tuple[Path | None, dict[str, Any] | None]:
    """Return the checkpoint that `--resume` asks for and its path, if any; `auto` falls back to previous.pt, and says so.

    Raises UsageError if it is damaged, or of another run: other options, or a training set of another length than `samples`.
    """
    paths = [Path(args.resume)] if args.resume not in (None, "auto") else []
    if args.resume == "auto" or restarted():
        own = [path for name in ("last.pt", "previous.pt") if (path := output_folder(args) / name).exists()]
        if not own and (other := sorted(output_folder(args).glob("*.pt"))):  # a new run would overwrite it
            raise UsageError(f"--resume auto: no last.pt in {output_folder(args)}, but {other[0].name}; name that file, or another folder")
        if restarted() and not own and not args.output_dir and os.environ.get("TORCHELASTIC_RUN_ID", "none") == "none":
            raise Stopped(1, "a rank failed; to be started again by torchrun itself, a run needs --output-dir")
        if restarted() and not own:
            raise Stopped(1, f"a rank failed before the first checkpoint, and would again: {earlier_failure()}")
        paths = own or paths
    for i, path in enumerate(paths):
        try:
            checkpoint = load_checkpoint(path)
        except UsageError as error:
            if i + 1 == len(paths):
                raise UsageError(f"{error}; name another file with --resume, or start anew in another folder") from error
            print(f"{error}; falling back to {paths[i + 1]}", file=sys.stderr, flush=True)
            continue
        check_config(args, checkpoint["config"], path)
        check_average(args, checkpoint, path)
        if checkpoint["samples"] != samples and not args.eval_only:
            before = checkpoint["samples"]
            raise UsageError(f"--resume {path}: the training set had {before} samples, and has {samples} now; that would be another run")
        return path, checkpoint
    if args.eval_only:
        raise UsageError(f"--resume auto: there is no checkpoint in {args.output_dir} to evaluate")
    return None, None


def check_config(args: argparse.Namespace, config: dict[str, Any], path: Path) -> None:
    """Refuse to resume under options that would silently make it another run."""
    for name, now in vars(args).items():
        then = config.get(name, now)
        if name == "task":
            then, now = Path(then).name, Path(now).name
        if name in HARMLESS or (args.eval_only and name not in WHAT_IS_EVALUATED):
            continue
        if then != now:
            other = "" if args.eval_only else ", or start anew without --resume"
            raise UsageError(f"--{name.replace('_', '-')} {now}: {path} was made with {then}; use that{other}")


def check_average(args: argparse.Namespace, checkpoint: dict[str, Any], path: Path) -> None:
    """Refuse --epochs under which `--average swa` would average epochs whose weights are in no file."""
    if args.average != "swa" or args.eval_only:
        return
    ended = checkpoint["step"] in (0, checkpoint["samples"] // args.batch_size)  # the weights are those of the end of an epoch
    done = checkpoint["epoch"] + (ended and checkpoint["step"] > 0)
    wanted, found = swa_epochs(args.epochs, done), int(checkpoint["average"]["n_averaged"])
    comes = done < args.epochs or checkpoint["step"] > 0  # an evaluation, which such an average would need
    if wanted not in (found, 0) and not (wanted == 1 and ended and comes):
        before, enough = checkpoint["config"].get("epochs"), math.ceil(4 * done / 3)
        problem = f"--average swa would begin in epoch {done - wanted + 1}, but {path} holds the average of {found} of {done} epochs"
        raise UsageError(f"--epochs {args.epochs}: {problem}; use --epochs {before}, or at least {enough}")


def check_agreement(args: argparse.Namespace, train_length: int, val_length: int, device: torch.device) -> None:
    """Raise UsageError on every rank if the ranks do not mean the same run. Call it on every rank.

    With another `--batch-size` on one node they would hang, and with another `--seed`, code or data set go on, to a wrong result.
    """
    if not is_distributed():
        return
    here, task = os.path.dirname(os.path.realpath(__file__)), os.path.realpath(args.task)
    loaded = [str(getattr(module, "__dict__", {}).get("__file__")) for module in list(sys.modules.values())]
    beside = {os.path.realpath(name) for name in loaded if os.path.exists(os.path.join(here, os.path.basename(name)))}
    files = [*sorted(name for name in beside - {task} if os.path.dirname(name) == here), task]
    known = vars(build_parser("spawn").parse_args([]))  # what a task has added is its own business
    mine = {f"--{name.replace('_', '-')}": getattr(args, name, None) for name in known if name not in OWN}
    mine |= {"the number of training samples": train_length, "the number of evaluation samples": val_length}
    mine |= {"the code": hashlib.sha256(b"".join(Path(name).read_bytes() for name in files)).hexdigest()[:12], "torch": torch.__version__}
    mine["the device"] = device.type
    ranks = [mine] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    for name in dict.fromkeys(name for theirs in ranks for name in theirs):
        values: dict[str, list[str]] = {}
        for rank, theirs in enumerate(ranks):
            values.setdefault(str(theirs.get(name, "unknown")), []).append(str(rank))
        if len(values) > 1:
            found = (f"{value} on rank {', '.join(who[:8])}{' and more' * (len(who) > 8)}" for value, who in values.items())
            problem = UsageError(f"{name} is {', but '.join(found)}; all nodes need the same")
            problem.by_all = True
            raise problem


def non_finite(checkpoint: dict[str, Any], by_design: dict[str, Tensor]) -> list[str]:
    """Return the names of the model's and the average's tensors that hold a NaN or an infinity which is not in `by_design`."""
    tensors = [*checkpoint["model"].items(), *checkpoint["average"].items()]  # under the same names
    return [name for name, tensor in tensors if isinstance(tensor, Tensor) and became_non_finite(tensor, by_design.get(name))]


class StopSignal:
    """SIGTERM, SIGINT and SIGUSR1 (SLURM's warning) ask for a stop at a step boundary, the same one on every rank."""

    def __init__(self) -> None:
        self.received, self.pending = 0, None
        handle_signals(self._remember)
        if is_distributed():
            end_with_parent(signal.SIGTERM)  # without a launcher a rank still saves

    def _remember(self, number: int, frame: Any) -> None:
        self.received = max(self.received, list(SIGNALS).index(number) + 1)

    def agreed(self, wait: bool = False) -> signal.Signals | None:
        """Return the signal on which all ranks stop now. Call it on every rank, once a step, and with `wait` after an evaluation.

        Without `wait`, the agreement of one step is collected during the next, so that no rank waits for another.
        """
        flag = self.received
        if is_distributed():
            tensor = torch.tensor(self.received)
            earlier, self.pending = self.pending, (dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True), tensor)
            agreed = self.pending if wait else earlier
            if agreed:
                agreed[0].wait()
            flag = int(agreed[1]) if agreed else 0
        return list(SIGNALS)[flag - 1] if flag else None


class Run:
    """The files and the terminal of one run: metrics.jsonl, checkpoints, lines, progress bar. Only rank 0 writes; the rest is the same.

    Creating it compares what the ranks are about to do, and restores `state` from `--resume`.
    """

    def __init__(
        self, args: argparse.Namespace, state: State, sampler: GlobalBatchSampler, val_sampler: ShardSampler, device: torch.device
    ) -> None:
        check_agreement(args, sampler.length, val_sampler.length, device)
        self.args, self.state, self.sampler, self.device = args, state, sampler, device
        self.steps_per_epoch, self.meter, self.bar, self.writer = sampler.steps_per_epoch, Meter(device), None, None
        self.shown, self.refused = None, ""
        self.untimed = 0  # samples since the last log line that this process did not train on, but one before a resume
        checkpoint = error = None
        if is_rank0():
            try:
                checkpoint = self._open()
            except (UsageError, Stopped) as problem:
                error = problem
            except OSError as problem:
                error = UsageError(f"--output-dir {args.output_dir}: {problem}")
        checkpoint, error = broadcast_object((checkpoint, error))
        if error:
            error.by_all = True
            raise error
        if checkpoint:
            self._restore(checkpoint)
        if not args.eval_only:  # which has nothing to save
            self.stop = StopSignal()

    def _open(self) -> dict[str, Any] | None:
        """Make the folder, lock it, find the checkpoint, and cut the log back to it. Rank 0 only."""
        args = self.args
        self.folder = output_folder(args)
        last = self.folder / "last.pt"
        before = last.exists() and last.stat().st_mtime_ns
        path, checkpoint = find_checkpoint(args, self.sampler.length)  # before anything is written
        self.folder.mkdir(parents=True, exist_ok=True)
        if args.eval_only and any(self.folder.glob("*.pt")):  # of a run, whose log an evaluation must not change
            self.file = open(os.devnull, "w")  # noqa: SIM115
            return checkpoint
        self.file = open(self.folder / "metrics.jsonl", "a+", errors="replace")  # noqa: SIM115 (open, and locked, as long as the run)
        log = weakref.ref(self.file)  # an exception that a notebook keeps would keep the file open, and locked
        undo_at_end(lambda: log() and log().close())
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"--output-dir {self.folder}: another run is writing there; choose another folder") from error
        if before != (last.exists() and last.stat().st_mtime_ns):  # of a run that ended while this one was starting
            path, checkpoint = find_checkpoint(args, self.sampler.length)
        if not args.eval_only:  # leave nothing that is later than the checkpoint, which another start of the run would go on from
            if checkpoint and checkpoint["best"] is not None and not self._has_best(path, checkpoint["best"]):
                checkpoint["best"] = None  # the next evaluation writes best.pt
            if checkpoint and path.resolve() != last.resolve():  # which may also be damaged
                save_checkpoint(checkpoint, last)
            self.file.truncate(self._kept_bytes(checkpoint))
        if args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(self.folder, purge_step=checkpoint["global_step"] + 1 if checkpoint else None)
        print(f"output folder: {self.folder}", flush=True)
        return checkpoint

    def _has_best(self, path: Path, best: float) -> bool:
        """Return whether best.pt is that of the checkpoint at `path`; copy it from there if it is.

        It is not after an earlier checkpoint was chosen: then it is of a later epoch, and its score is not that of the checkpoint.
        """
        for name in (self.folder / "best.pt", path.with_name("best.pt")):
            with contextlib.suppress(Exception):  # no such file, or a damaged one, which raises almost anything
                if torch.load(name, map_location="cpu", weights_only=True, mmap=True)["best"] == best:  # reads no tensor
                    if name.parent != self.folder:
                        save_checkpoint(load_checkpoint(name), self.folder / "best.pt")
                    return True
        return False

    def _restore(self, checkpoint: dict[str, Any]) -> None:
        state, epochs = self.state, self.args.epochs
        try:
            state.restore(checkpoint)
            done = state.epoch + (state.step == self.steps_per_epoch)
            wanted = swa_epochs(epochs, done)
            if self.args.average == "swa" and state.average.n_averaged != wanted and not self.args.eval_only:  # other --epochs
                state.average.n_averaged.zero_()
                if wanted:  # one epoch, as check_average knows
                    state.average.update_parameters(state.net)
            self.meter.restore(checkpoint["log"])  # the sums since the last log line
            self.untimed = sum(checkpoint["log"]["count"])
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            problem = UsageError(f"--resume {self.args.resume}: does not fit the model or the optimizer: {' '.join(str(error).split())}")
            problem.by_all = True
            raise problem from error
        if restarted():
            print0(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']}, after {earlier_failure()}", file=sys.stderr)
        where = f"at epoch {state.epoch + 1}, step {state.step}" if state.epoch < epochs else f"after all {epochs} epochs; more would go on"
        print0(f"resumed {where}")

    def _kept_bytes(self, checkpoint: dict[str, Any] | None) -> int:
        """Length of the part of metrics.jsonl that was written before the checkpoint; the rest will be written again."""
        kept = 0
        self.file.seek(0)
        for line in self.file if checkpoint else ():
            try:
                entry = json.loads(line)
                evaluation, step = entry["event"] == "eval", entry["global_step"]
                done = entry["epoch"] < checkpoint["epoch"] if evaluation else step <= checkpoint["global_step"]
            except (ValueError, KeyError, TypeError):  # torn, or not ours
                break
            if not done or not line.endswith("\n"):
                break
            kept += len(line.encode())
        return kept

    def batches(self, loader: DataLoader) -> Iterator[Any]:
        """Yield the batches that are left of the epoch, on the device, behind a progress bar if someone is watching."""
        self.sampler.set_position(self.state.epoch, self.state.step)
        self.clock = time.perf_counter()
        if is_rank0() and sys.stderr.isatty():
            from tqdm import tqdm

            title = f"epoch {self.state.epoch + 1}/{self.args.epochs}"
            self.bar = tqdm(total=self.steps_per_epoch, initial=self.state.step, desc=title, leave=False, dynamic_ncols=True)
        for batch in loader:
            self.shown = batch if self.writer else None  # the epoch's last one, in the end
            yield to_device(batch, self.device)
        if self.bar is not None:
            self.bar = self.bar.close()

    def end_step(self, grad_norm: Tensor) -> None:
        """Count the step; log, save, or stop if it is time for it. Call it on every rank after each optimizer step."""
        state, args = self.state, self.args
        lr = state.optimizer.param_groups[0]["lr"]
        state.scheduler.step()
        state.step += 1
        state.global_step += 1
        swa = args.average == "swa" and state.step == self.steps_per_epoch and swa_epochs(args.epochs, state.epoch + 1) > 0
        if args.average == "ema" or swa:
            state.average.update_parameters(state.net)
        if self.bar is not None:
            self.bar.update()
        look = state.global_step % MAX_SKIPPED_IN_A_ROW == 0 or state.step == self.steps_per_epoch  # not always: to read it is to wait
        if look and state.scaler.in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise Stopped(3, f"diverged: {MAX_SKIPPED_IN_A_ROW} steps in a row had non-finite gradients, seen at step {state.global_step}")
        if state.global_step % args.log_every == 0 or state.step == self.steps_per_epoch:
            self._log_train(lr, grad_norm)
        stop = self.stop.agreed()
        if stop or (args.save_every and state.global_step % args.save_every == 0 and state.step < self.steps_per_epoch):
            self.save("last.pt")
        if stop:
            self._stop(stop)

    def _stop(self, number: signal.Signals) -> NoReturn:
        saved = not broadcast_object(self.refused)
        step = f"after saving step {self.state.global_step}" if saved else f"at step {self.state.global_step}, which was not saved"
        raise Stopped(SIGNALS[number] or int(not saved), f"stopped by {number.name} {step}")

    def _log_train(self, lr: float, grad_norm: Tensor) -> None:
        state, means, skipped = self.state, self.meter.mean(), int(self.state.scaler.skipped.item())
        now = time.perf_counter()
        line = {
            "event": "train",
            "epoch": state.epoch,
            "step": state.step,
            "global_step": state.global_step,
            "loss": means["loss"],
            "lr": lr,
        }
        line |= {"images_per_s": (means["count"] - self.untimed) / (now - self.clock), "grad_norm": grad_norm.item(), "skipped": skipped}
        self.clock, self.untimed = now, 0
        self.meter.clear()
        state.scaler.skipped.zero_()
        warning = f"  skipped {skipped} steps with non-finite gradients" if skipped else ""
        text = f"loss {line['loss']:.6f}  lr {lr:.5f}  {line['images_per_s']:.0f} images/s{warning}"
        position = f"epoch {state.epoch + 1}/{self.args.epochs}  step {state.step}/{self.steps_per_epoch}  "
        self._write(line, text if self.bar is not None else position + text)

    def log_eval(self, metrics: dict[str, float]) -> None:
        """Write the line of an evaluation; `metrics` as `evaluate` returns them."""
        values = "  ".join(f"{name} {value:.6f}" for name, value in metrics.items() if name != "count")
        after_epoch = self.args.eval_only and self.state.step == 0 < self.state.epoch  # a checkpoint counts the epoch as done
        epoch = self.state.epoch - after_epoch
        line = {"event": "eval", "epoch": epoch, "global_step": self.state.global_step, **metrics}
        self._write(line, f"epoch {epoch + 1}/{self.args.epochs}  eval  {values}  ({metrics['count']} samples)")

    @torch.no_grad()
    def _show(self) -> None:
        """Write some of the epoch's last images for TensorBoard, and what they are taken for, if this is what the task is about."""
        (inputs, targets), net = map_tensors(lambda tensor: tensor[:16].to(self.device), self.shown), self.state.averaged()
        if not isinstance(inputs, Tensor) or inputs.dim() != 4 or inputs.shape[1] not in (1, 3) or inputs.dtype != torch.uint8:
            return
        self.writer.add_images("images", inputs, self.state.global_step)
        net.eval()
        with autocast(self.args, self.device):
            outputs = net(inputs)
        if all(isinstance(value, Tensor) for value in (outputs, targets)) and outputs.dim() == 2 and targets.dim() == 1:
            guesses = [f"{guess} ({target})" for guess, target in zip(outputs.argmax(1).tolist(), targets.tolist())]
            self.writer.add_text("images taken for (are)", ", ".join(guesses), self.state.global_step)

    def _write(self, line: dict[str, Any], text: str) -> None:
        if not is_rank0():
            return
        print(text, flush=True) if self.bar is None else self.bar.set_postfix_str(text)
        plain = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()}
        self.file.write(json.dumps(plain) + "\n")
        self.file.flush()
        for name in plain.keys() - {"event", "epoch", "step", "global_step", "count"} if self.writer else ():
            self.writer.add_scalar(f"{line['event']}/{name}", line[name], line["global_step"])

    def end_epoch(self, metrics: dict[str, float]) -> None:
        """Log the evaluation, count the epoch, and write last.pt, and best.pt if this was the best. Call it on every rank."""
        state, score = self.state, next(value for name, value in metrics.items() if name != "loss")
        self.log_eval(metrics)
        state.epoch, state.step = state.epoch + 1, 0
        earlier, best = state.best, math.isfinite(score) and (state.best is None or score > state.best)
        state.best = score if best else state.best
        kept = [f"epoch-{state.epoch:04}.pt"] if self.args.keep_every and state.epoch % self.args.keep_every == 0 else []
        self.save(*(["best.pt"] if best else []), *kept, "last.pt")  # the last one counts the epoch as done
        state.best = earlier if self.refused else state.best  # the score of best.pt
        if self.writer and self.shown:
            self._show()
        stop = self.stop.agreed(wait=True)
        if stop and state.epoch < self.args.epochs:
            self._stop(stop)

    def finish(self) -> int:
        """Call it on every rank when all is done; return the exit code."""
        refused = broadcast_object(self.refused)
        wait_for_all()
        if self.writer:
            self.writer.close()
        if refused:
            raise Stopped(1, f"the run is done, but its last state was not saved: non-finite values in {refused}")
        return announce_end(0, "")

    def save(self, *names: str) -> None:
        """Write the checkpoint under these names. Call it on every rank: each has sums since the last log line."""
        sums = self.meter.sums_of_ranks()
        if is_rank0():
            self._write_checkpoint(sums, *names)

    def _write_checkpoint(self, sums: dict[str, list[float]], *names: str) -> None:
        config = {name: value for name, value in vars(self.args).items() if isinstance(value, (int, float, str, list, type(None)))}
        checkpoint = {**self.state.checkpoint(), "samples": self.sampler.length, "log": sums, "config": config}
        self.refused = ", ".join(non_finite(checkpoint, self.state.by_design)[:5])
        if self.refused:
            print(f"not saved, the last good checkpoint stays: non-finite values in {self.refused}", file=sys.stderr, flush=True)
            return
        os.fsync(self.file.fileno())  # a checkpoint must not be ahead of the log
        with keep_previous(self.folder / "last.pt"):
            for name in names:
                save_checkpoint(checkpoint, self.folder / name)
