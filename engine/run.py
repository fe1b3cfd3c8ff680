"""A run as its loop sees it: position, log, checkpoints, and the signal that stops it."""

import contextlib
import fcntl
import functools
import importlib.util
import json
import math
import os
import random
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.backends import cudnn
from torch.utils.data import DataLoader

import common
from common import State, broadcast_object, fail, gather_objects, get_rank, print0
from engine.modes import load_shards, save_shards
from engine.task_file import class_names
from sampling import GlobalBatchSampler

# Signals that stop a run, and its exit code after the save. SIGUSR1 is SLURM's warning.
SIGNALS = {signal.SIGUSR1: 0, signal.SIGHUP: 129, signal.SIGINT: 130, signal.SIGTERM: 143}


def restores_the_caller(main: Callable[..., int]) -> Callable[..., int]:
    """Decorate a script's main: a notebook that calls it keeps its own seeds, signals and flags."""

    @functools.wraps(main)
    def wrapper(argv: list[str] | None = None) -> int:
        environment, handlers = dict(os.environ), [(n, signal.getsignal(n)) for n in SIGNALS]
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        flags = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
        cudnn_flags = cudnn.benchmark, cudnn.allow_tf32
        try:
            return main(argv)
        finally:
            os.environ.clear()
            os.environ.update(environment)
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            np.random.set_state(states[2])
            torch.use_deterministic_algorithms(flags[0])
            torch.set_float32_matmul_precision(flags[1])
            cudnn.benchmark, cudnn.allow_tf32 = cudnn_flags
            with contextlib.suppress(ValueError):  # only the main thread has handlers
                for number, handler in handlers:
                    signal.signal(number, handler)

    return wrapper


class Run:
    """Position, log and checkpoints of a run. Only rank 0 writes files.

    Create it, and call its methods, on every rank: within them the ranks talk to each other.
    """

    file: Any = None  # metrics.jsonl; stays None on all ranks but 0
    tensorboard: Any = None
    bar: Any = None  # of an epoch, on a terminal
    received = stopping = 0  # the signal that this rank got; that on which all ranks stop

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
        self.devices = common.get_world_size() * getattr(args, "replicas", 1)
        self.directory = Path(broadcast_object(args.output_dir))  # each rank has drawn a new name
        self.in_shards = args.parallel_mode == "fsdp" and args.shards
        samples = [self.sampler.length, val_loader.batch_sampler.length]
        self.data = {"samples": samples, "classes": class_names(train_loader.dataset.dataset)}
        mine = args.config | self.data | {"resume": args.resume}
        for rank, theirs in enumerate(gather_objects(mine)):
            for name in mine:
                if theirs[name] != mine[name]:
                    fail(f"{name} is {theirs[name]} on rank {rank}, but {mine[name]} elsewhere")

    def open(self) -> None:
        """Open the directory of the run, and load the checkpoint of --resume into the state."""
        args, state = self.args, self.state
        if args.resume:
            path = Path(args.resume)
            if path.is_dir() and args.parallel_mode != "fsdp":
                convert = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
                fail(f"--resume {path}: in shards; use fsdp, or make a file: {convert} {path} FILE")
            read = load_shards if path.is_dir() else common.load_file
            checkpoint = read(path, state.parameters if path.is_dir() else "--resume")
            for name in ["classes"] if args.eval_only else ["samples", "classes"]:
                before, now = checkpoint["data"][name], self.data[name]
                if before != now:
                    fail(f"--resume {path}: {name} {before} there, but {now} here: other data")
            state.restore(checkpoint, self.sampler.steps_per_epoch)
            other_branch = path.parent != self.directory or path.name.startswith("epoch-")
            if other_branch or checkpoint["config"]["best"] != args.best:
                state.best = None  # the best.pt of this directory is not of this run
            where = f"resumed {path} at epoch {state.epoch + 1}, step {state.step}"
            if state.epoch >= args.epochs:
                where += "; it is finished, and a larger --epochs goes on"
            print0("\n".join([where, *args.changes]))
        if get_rank() == 0 and not args.eval_only:
            self.open_files()
        self.print_header()
        if not args.eval_only:
            with contextlib.suppress(ValueError):  # only the main thread has handlers
                for number in SIGNALS:
                    if signal.getsignal(number) != signal.SIG_IGN:  # nohup has set SIG_IGN
                        signal.signal(number, self.remember)

    def remember(self, number: int, frame: Any) -> None:
        self.received = max(self.received, number)

    def agree_on_stop(self) -> None:
        """Set `stopping` to the highest signal that a rank has received. Call it on every rank."""
        self.stopping = self.received
        if dist.is_initialized():
            number = torch.tensor(self.received)
            dist.all_reduce(number, dist.ReduceOp.MAX)  # on the CPU: the host waits for no device
            self.stopping = int(number)

    def open_files(self) -> None:
        """Open the log of a run, and keep of it the lines before the position of the state."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.file = open(self.directory / "metrics.jsonl", "ab+", buffering=0)  # noqa: SIM115
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"--output-dir {self.directory}: another run is writing there; choose another")
        kept, position = 0, (self.state.epoch, self.state.step)
        self.file.seek(0)
        with contextlib.suppress(ValueError):  # half a line, of a machine that went down
            for line in self.file:
                entry = json.loads(line)
                if (entry["epoch"], entry.get("step", math.inf)) > position:
                    break  # an evaluation belongs to the end of its epoch
                kept += len(line)
        self.file.truncate(kept)
        if self.args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(self.directory)

    def print_header(self) -> None:
        """Print what the run is, and a line for each reason why the number of devices matters."""
        net, args, sampler = self.state.net, self.args, self.sampler
        size = sum(parameter.numel() for parameter in self.state.parameters)
        each = math.ceil(args.batch_size / (args.accum_steps * self.devices))
        name = f"{type(net).__name__.removeprefix('FSDP')}, {size:,} parameters"
        print0(f"{Path(sys.argv[0]).name} on {self.devices} x {self.device.type}: {name}")
        step = f"{args.batch_size} samples, {args.accum_steps} x up to {each} on each device"
        steps = f"{sampler.steps_per_epoch} steps per epoch, each of {step}"
        print0(f"{sampler.length} samples: {steps}")
        print0(f"output directory: {self.directory}")
        layers = [*net.modules()] if args.parallel_mode != "single" else []
        norm, dropout = nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd
        if any(isinstance(layer, norm) for layer in layers) and not args.sync_bn:
            cause = f"BatchNorm: statistics of each device's {each} samples"
            print0(f"{cause}: the result depends on the number of devices")
        rates = [m.p if isinstance(m, dropout) else getattr(m, "dropout", 0) for m in layers]
        if any(isinstance(rate, float) and rate > 0 for rate in rates):  # of attention a number
            print0("dropout: the result depends on the number of devices")

    def batches(self, loader: DataLoader) -> Iterator[list]:
        """Yield the micro-batches of each step that is left of the epoch, on the device."""
        self.sampler.set_position(self.state.epoch, self.state.step)
        if get_rank() == 0 and sys.stderr.isatty() and importlib.util.find_spec("tqdm"):
            from tqdm import tqdm

            tqdm.set_lock(threading.RLock())  # its own is for several processes, and would stay
            steps, done = self.sampler.steps_per_epoch, self.state.step
            loader = self.bar = tqdm(loader, total=steps, initial=done, leave=False)
        self.waited, self.lr = 0.0, self.state.optimizer.param_groups[0]["lr"]
        asked = self.began = time.perf_counter()
        for micro_batches in loader:
            self.waited += time.perf_counter() - asked
            yield common.to_device(micro_batches, self.device)
            asked = time.perf_counter()

    def end_step(self, grad_norm: Tensor) -> None:
        """Count the step; log, save or stop if it is time. Call it after each optimizer step."""
        state, args = self.state, self.args
        state.step += 1
        state.global_step += 1
        self.agree_on_stop()
        ends = state.step == self.sampler.steps_per_epoch
        if ends or state.global_step % args.log_every == 0:
            self.train_line(grad_norm)
            if state.guard.skipped >= state.guard.limit:
                self.end(1, "diverged: gradients are NaN or inf; lower --lr, set --clip-grad-norm")
        self.lr = state.optimizer.param_groups[0]["lr"]  # for the next step
        # At the end of an epoch train_*.py itself saves; a run that was told to stop ends there.
        if not ends and (self.stopping or state.global_step % (args.save_every or math.inf) == 0):
            self.save("last.pt")

    def end_epoch(self, metrics: dict[str, float]) -> None:
        """Log the evaluation of an epoch that `state.epoch` counts as done; write the files."""
        state, args = self.state, self.args
        self.eval_line(metrics)
        known = [name for name in metrics if name not in ("loss", "count")] + ["loss"]
        name, _, lowest = (args.best or known[0]).partition(":")
        if name not in known:
            fail(f"--best {name}: no such metric; use one of {', '.join(known)}")
        sign = -1 if lowest or name == "loss" else 1
        score = sign * metrics[name]
        names = ["last.pt"]  # last of all: it counts the epoch as done
        # A smaller gain is rounding, on another number of devices; NaN is no gain.
        gain = score - state.best[0] if state.best else math.inf
        if math.isfinite(score) and gain > 1e-12 * abs(score):
            state.best = (score, state.epoch)
            names.insert(0, "best.pt")
        if args.keep_every and state.epoch % args.keep_every == 0:
            names.insert(0, f"epoch-{state.epoch:04}.pt")
        if state.epoch < args.epochs:  # after the last epoch nothing is left to stop
            self.agree_on_stop()
        self.save(*names)
        if state.epoch == args.epochs and state.best:
            where = f"in epoch {state.best[1]}: {self.directory / 'best.pt'}"
            print0(f"best {name} {sign * state.best[0]:.6f}, {where}")

    def save(self, *names: str) -> None:
        """Write the checkpoint under these names, and stop if a signal has asked for it.

        A parameter or statistic that is not finite ends the run; the last good files stay.
        """
        state, parameters = self.state, dict(self.state.net.named_parameters())
        tensors = state.net.state_dict().items()
        checked = {name: t for name, t in tensors if name in parameters or "running_" in name}
        if bad := [name for found in gather_objects(not_finite(checked)) for name in found]:
            self.end(1, f"step {state.global_step} is not saved: not finite: {', '.join({*bad})}")
        checkpoint = state.checkpoint((lambda tensors: tensors) if self.in_shards else common.whole)
        checkpoint |= {"config": self.args.config, "data": self.data}
        if self.file:
            os.fsync(self.file.fileno())  # a checkpoint must not be ahead of the log
        for name in names:
            if self.in_shards:
                save_shards(checkpoint, self.directory / name)
            elif self.file:
                common.save_checkpoint(checkpoint, self.directory / name)
        if self.stopping:
            print0(f"to go on: the same command with --output-dir {self.directory} --resume auto")
            name = signal.Signals(self.stopping).name
            reason = f"stopped by {name} after saving step {state.global_step}"
            self.end(SIGNALS[self.stopping], reason)

    def end(self, code: int, reason: str) -> None:
        """End the run on every rank at the same step."""
        print0(f"{Path(sys.argv[0]).name}: {reason}", file=sys.stderr)
        self.finish()
        raise SystemExit(code)

    def finish(self) -> None:
        """Close the files, and wait for all ranks."""
        for file in (self.file, self.tensorboard):
            if file:
                file.close()
        if dist.is_initialized():
            dist.barrier()  # rank 0 has written its files

    def train_line(self, grad_norm: Tensor) -> None:
        """Write the line of the steps since the last one."""
        state, means, now = self.state, self.state.meter.mean(), time.perf_counter()
        count, seconds, self.began = means.pop("count"), now - self.began, now
        line = {"event": "train", "epoch": state.epoch, "step": state.step}
        line |= {"global_step": state.global_step, "lr": self.lr, "samples_per_s": count / seconds}
        line |= {"data_wait": self.waited / seconds, "grad_norm": grad_norm.item()}
        line |= {"loss_scale": state.scaler.get_scale(), **means}
        self.waited, state.meter = 0.0, common.Meter()
        more = f"lr {self.lr:.5g}  {count / seconds:.0f} samples/s  data {line['data_wait']:.0%}"
        self.write(line, f"step {state.step}/{self.sampler.steps_per_epoch}", means, more)

    def eval_line(self, metrics: dict[str, float]) -> None:
        """Write the line of an evaluation; `metrics` as `evaluate` returns them."""
        state, means = self.state, {**metrics}
        count = means.pop("count")
        epoch = max(0, state.epoch - (state.step == 0))  # the state counts the epoch as done
        line = {"event": "eval", "epoch": epoch, "global_step": state.global_step, **metrics}
        self.write(line, "eval", means, f"({count} samples)")

    def write(self, line: dict[str, Any], title: str, means: dict[str, float], more: str) -> None:
        """Print a line of the log on rank 0; write it to metrics.jsonl, and for TensorBoard."""
        if get_rank():
            return
        values = "  ".join(f"{name} {value:.6f}" for name, value in means.items())
        show = print0 if self.bar is None else self.bar.write
        show(f"epoch {line['epoch'] + 1}/{self.args.epochs}  {title}  {values}  {more}")
        for name, value in line.items():
            if isinstance(value, float) and not math.isfinite(value):
                line[name] = None  # JSON has no NaN
            elif isinstance(value, float) and self.tensorboard:
                self.tensorboard.add_scalar(f"{line['event']}/{name}", value, line["global_step"])
        if self.file:
            self.file.write(f"{json.dumps(line)}\n".encode())


@torch.no_grad()
def not_finite(tensors: dict[str, Tensor]) -> list[str]:
    """Return the names of the tensors of which this rank's part has a NaN or an infinity."""
    parts = [t.to_local() if hasattr(t, "to_local") else t for t in tensors.values()]
    sums = [part.sum(dtype=torch.promote_types(part.dtype, torch.float64)) for part in parts]
    finite = torch.stack([total.isfinite() for total in sums]).tolist()
    return [name for name, good in zip(tensors, finite) if not good]
