"""A run as its loop sees it: position, log, stop. machinery/files.py writes the files."""

from __future__ import annotations

import argparse
import math
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import common
from common import MAX_SKIPPED_IN_A_ROW, UsageError, broadcast_object, get_rank, print0
from machinery.check import check_agreement
from machinery.files import RunFiles
from machinery.options import declared
from machinery.processes import SIGNALS, Stopped, error_on_all, handle_signals
from machinery.state import State, whole
from sampling import GlobalBatchSampler, end_with_parent, seed_rng

# tqdm's default lock is one for several processes, and would be left behind.
tqdm.set_lock(threading.RLock())


class StopSignal:
    """SIGTERM, SIGINT and SIGUSR1 (SLURM's warning): all ranks stop at the same step."""

    def __init__(self) -> None:
        self.received: list[int] = []  # of each signal its place in SIGNALS, from 1
        self.pending = None
        received = self.received

        def remember(number: int, frame: Any) -> None:
            received.append(list(SIGNALS).index(number) + 1)

        # The handlers outlive the run. They hold the list and not `self`: `pending` would keep
        # gloo's threads alive.
        handle_signals(remember)
        if dist.is_initialized():
            end_with_parent(signal.SIGTERM)  # if the launcher dies, a rank still saves

    def agreed(self, wait: bool = False) -> signal.Signals | None:
        """Return the signal on which all ranks stop now. Call it on every rank.

        The ranks' flags are reduced asynchronously and read one step later, so that no rank
        waits for another. `wait` reads them at once.
        """
        flag = max(self.received, default=0)
        if dist.is_initialized():
            tensor = torch.tensor(flag)
            work = dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True)
            earlier, self.pending = self.pending, (work, tensor)
            due = self.pending if wait else earlier
            if due:
                due[0].wait()
            flag = int(due[1]) if due else 0
        return list(SIGNALS)[flag - 1] if flag else None


class Run:
    """Position, log and end of a run. Create it on every rank; only rank 0 writes files."""

    def __init__(
        self,
        args: argparse.Namespace,
        state: State,
        sampler: GlobalBatchSampler,
        val_set: Dataset,
        device: torch.device,
    ) -> None:
        self.args, self.state, self.sampler, self.device = args, state, sampler, device
        self.steps_per_epoch, self.meter = sampler.steps_per_epoch, common.Meter(device)
        names = getattr(val_set, "classes", None)  # as torchvision's data sets have them
        self.classes = [str(name) for name in names] if isinstance(names, (list, tuple)) else None
        self.bar: tqdm | None = None
        # The time of the last log line, the seconds since that were spent on waiting for batches,
        # and the learning rate of the next step.
        self.clock = self.waited = self.lr = 0.0
        self.resumed = 0  # samples of the next log line, on which an earlier process trained
        self.files: RunFiles | None = None  # stays None on all ranks but 0
        self.stopping: signal.Signals | None = None
        self.refused = ""
        check_agreement(args, sampler.length, val_set, device)

    def resume(self) -> None:
        """Open the directory of the run, and load the checkpoint of --resume into the state."""
        built = whole(self.state.net.state_dict())
        checkpoint = self._on_rank0(lambda: self._open(built))
        state, epochs = self.state, self.args.epochs
        if checkpoint:
            try:
                state.restore(checkpoint)
                self.meter.restore(checkpoint["log"])  # the sums since the last log line
                self.resumed = sum(checkpoint["log"]["count"])
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                problem = f"does not fit the model or the optimizer: {' '.join(str(error).split())}"
                raise error_on_all(f"--resume {self.args.resume}: {problem}") from error
            if self.args.average == "swa" and not self.args.eval_only:
                done = state.epoch + (state.step == self.steps_per_epoch)
                if state.average.n_averaged > sum(e <= done for e in state.average.epochs):
                    # With more --epochs SWA begins later: drop what was averaged too soon.
                    state.average.n_averaged.zero_()
            where = f"at epoch {state.epoch + 1}, step {state.step}"
            if self.args.eval_only and state.step == 0:
                where = f"after epoch {state.epoch}"
            elif state.epoch >= epochs:
                nothing = "nothing is left to do; a larger --epochs goes on"
                where = f"after all {epochs} epochs: {nothing}"
            print0(f"resumed {where}")
        if not self.args.eval_only:  # which has nothing to save
            self._on_rank0(lambda: self.files.go_on())  # not before the checkpoint fits
            self.stop = StopSignal()
        self._reset_times()

    def _open(self, built: dict[str, Any]) -> dict[str, Any] | None:
        self.files = RunFiles(self.args, self.sampler.length, built)
        return self.files.checkpoint

    def _on_rank0(self, function: Callable[[], Any]) -> Any:
        """Return on every rank what the function returns, or raise what it raises, on rank 0."""
        result = error = None
        if get_rank() == 0:
            try:
                result = function()
            except OSError as problem:
                error = error_on_all(f"--output-dir {self.args.output_dir}: {problem}")
            except UsageError as problem:
                error = error_on_all(str(problem))
            except Stopped as problem:
                error = problem
        result, error = broadcast_object((result, error))
        if error:
            raise error
        return result

    def batches(self, loader: DataLoader) -> Iterator[Any]:
        """Yield the batches that are left of the epoch, on the device."""
        self.sampler.set_position(self.state.epoch, self.state.step)
        if not self.bar:
            self._print_header(loader)
        self.waited, self.lr = 0.0, self.state.optimizer.param_groups[0]["lr"]
        self.bar = tqdm(
            total=self.steps_per_epoch,
            initial=self.state.step,
            desc=f"epoch {self.state.epoch + 1}/{self.args.epochs}",
            leave=False,
            dynamic_ncols=True,
            disable=None if get_rank() == 0 else True,  # None: only where somebody watches
        )
        asked = self.clock = time.perf_counter()
        for batch in loader:
            self.waited += time.perf_counter() - asked
            yield common.to_device(batch, self.device)
            asked = time.perf_counter()
        self.bar.close()

    def _print_header(self, loader: DataLoader) -> None:
        args, net = self.args, self.state.net
        size = sum(parameter.numel() for parameter in net.parameters())
        devices = common.get_world_size() * getattr(args, "replicas", 1)
        share = math.ceil(math.ceil(args.batch_size / args.accum_steps) / devices)
        model = f"{type(net).__name__}, {size:,} parameters"
        print0(
            f"{Path(sys.argv[0]).name} on {devices} x {self.device.type}: {model}; "
            f"loader workers per process: {loader.num_workers}\n"
            f"{self.sampler.length} training samples: {self.steps_per_epoch} steps per epoch; "
            f"a step: {args.batch_size} samples, "
            f"{args.accum_steps} x up to {share} samples on each device"
        )

    def end_step(self, grad_norm: Tensor) -> None:
        """Count the step; log, save or stop if it is time. Call it after each optimizer step."""
        state, args = self.state, self.args
        state.step += 1
        state.global_step += 1
        self.bar.update()
        ends = state.step == self.steps_per_epoch
        logs = ends or state.global_step % args.log_every == 0
        if logs:
            self._log_train(grad_norm)
        self.lr = state.optimizer.param_groups[0]["lr"]  # with which the next step is made
        self.stopping = self.stop.agreed()
        due = args.save_every and state.global_step % args.save_every == 0
        saves = not ends and (due or self.stopping)  # at the end of an epoch the script saves
        if logs or saves:
            self._end_if_diverged()
        if saves:
            self.save("last.pt")

    def _end_if_diverged(self) -> None:
        # To read the number is to wait for the device: do it only where the host waits anyway. And
        # only after `stop.agreed`, which raises if a rank is lost: CUDA would then wait for ever.
        if self.state.scaler.in_a_row >= MAX_SKIPPED_IN_A_ROW:
            if self.files:
                self.files.wait()
            problem = f"{MAX_SKIPPED_IN_A_ROW} steps in a row had non-finite gradients"
            raise Stopped(3, f"diverged: {problem}, seen at step {self.state.global_step}")

    def _log_train(self, grad_norm: Tensor) -> None:
        state, means, now = self.state, self.meter.mean(), time.perf_counter()
        skipped = int(state.scaler.skipped.item())
        line = {
            "event": "train",
            "epoch": state.epoch,
            "step": state.step,
            "global_step": state.global_step,
            "loss": means["loss"],
            "lr": self.lr,
            "images_per_s": (means["count"] - self.resumed) / (now - self.clock),
            "grad_norm": grad_norm.item(),
            "skipped": skipped,
            **{name: mean for name, mean in means.items() if name not in ("loss", "count")},
            "data_wait": self.waited / (now - self.clock),
        }
        self.clock, self.waited, self.resumed = now, 0.0, 0
        self.meter.clear()
        state.scaler.skipped.zero_()
        warning = f"  skipped {skipped} steps with non-finite gradients" if skipped else ""
        values = "  ".join(f"{name} {mean:.6f}" for name, mean in means.items() if name != "count")
        speed = f"{line['images_per_s']:.0f} images/s  data {line['data_wait']:.0%}"
        text = f"{values}  lr {line['lr']:.5f}  {speed}{warning}"
        self._log(line, f"step {state.step}/{self.steps_per_epoch}  {text}")

    def _reset_times(self) -> None:
        # Seconds for the next evaluation line; `mark` is the last reading of the clock.
        self.spent, self.mark = {"train_s": 0.0, "eval_s": 0.0, "save_s": 0.0}, time.perf_counter()

    def _spend(self, name: str) -> None:
        now = time.perf_counter()
        self.spent[name] += now - self.mark
        self.mark = now

    def log_eval(self, metrics: dict[str, float]) -> None:
        """Write the line of an evaluation; `metrics` as `evaluate` returns them."""
        self._spend("eval_s")
        values = [f"{name} {value:.6f}" for name, value in metrics.items() if name != "count"]
        epoch = self.state.epoch
        if self.args.eval_only and self.state.step == 0 < epoch:
            epoch -= 1  # the checkpoint counts the epoch as done
        line = {"event": "eval", "epoch": epoch, "global_step": self.state.global_step, **metrics}
        line |= self.spent
        self._reset_times()
        self._log(line, f"eval  {'  '.join(values)}  ({metrics['count']} samples)")

    def _log(self, line: dict[str, Any], text: str) -> None:
        if not self.files:
            return
        self.files.write_line(line)
        if line["event"] == "train" and not self.bar.disable:
            self.bar.set_postfix_str(text.partition("  ")[2])  # without the step, which it shows
        else:
            print(f"epoch {line['epoch'] + 1}/{self.args.epochs}  {text}", flush=True)

    def eval_model(self, loader: DataLoader) -> nn.Module:
        """Return the network to evaluate: the average of the weights if there is one.

        An SWA average gets BatchNorm statistics of its own, from the epoch's batches, cut as in
        training. Without --sync-bn rank 0's slices count, as they do in training.
        """
        self._spend("train_s")
        state = self.state
        if not state.average.n_averaged:
            return state.net
        if self.args.average == "swa" and state.step == self.steps_per_epoch:
            context = common.autocast(self.device, self.args.amp)
            common.update_bn(state.average.module, self._bn_inputs(loader), context)
        common.sync_buffers(state.average.module)
        return state.average.module

    def _bn_inputs(self, loader: DataLoader) -> Iterator[Any]:
        self.sampler.set_position(self.state.epoch, 0)
        replicas = getattr(self.args, "replicas", 1)
        for step, batch in enumerate(loader):
            batch = common.to_device(batch, self.device)
            for i, (inputs, _) in enumerate(common.split_batch(batch, self.args.accum_steps)):
                # Dropout is at work, with other masks than in the steps of this epoch.
                seed_rng(self.args.seed, self.state.global_step + step, i, get_rank())
                yield common.tree_map(lambda tensor: tensor.chunk(replicas)[0], inputs)

    def end_epoch(self, metrics: dict[str, float]) -> None:
        """Log the evaluation, count the epoch, and write last.pt, and best.pt if it is the best."""
        state, args = self.state, self.args
        known = [name for name in metrics if name not in ("loss", "count")] + ["loss"]
        name = args.best or known[0]
        if name not in known:
            raise error_on_all(f"--best {name}: no such metric; use one of {', '.join(known)}")
        score, sign = metrics[name], -1 if name == "loss" else 1
        self.log_eval(metrics)
        state.epoch, state.step = state.epoch + 1, 0
        earlier, files = state.best, []
        rounding = 1e-12 * abs(state.best or 0)  # of the same weights on another number of ranks
        higher = state.best is None or sign * (score - state.best) > rounding
        if math.isfinite(score) and higher:
            state.best, files = score, ["best.pt"]
        if args.keep_every and state.epoch % args.keep_every == 0:
            files.append(f"epoch-{state.epoch:04}.pt")
        # After the last epoch nothing is left to stop.
        self.stopping = self.stop.agreed(wait=True) if state.epoch < args.epochs else None
        self.save(*files, "last.pt")  # last.pt last: it counts the epoch as done
        if self.refused:
            state.best = earlier  # of best.pt. Only rank 0 knows of it, and only rank 0 saves it
        if self.files and state.epoch == args.epochs and state.best is not None:
            self.files.wait()
            path = self.files.directory / "best.pt"
            print(f"best {name} {state.best:.6f}, in epoch {self.files.best_epoch}: {path}")
            again = f"--eval-only --resume {shlex.quote(str(path))}"
            print(f"to evaluate it: the same command with {again}", flush=True)

    def save(self, *names: str) -> None:
        """Write the checkpoint under these names, and stop if a signal has asked for it.

        Call it on every rank: all take part in collecting what a thread of rank 0 writes.
        """
        self._spend("train_s")
        if self.files:
            self.files.wait()  # for the save before: the memory holds one copy at a time
        sums = self.meter.sums_of_ranks()
        checkpoint = self.state.checkpoint()
        if self.files:
            checkpoint |= {"samples": self.sampler.length, "log": sums, "classes": self.classes}
            checkpoint["config"] = declared(self.args)
            self.refused = self.files.write_checkpoint(checkpoint, names)
        self._spend("save_s")
        if self.stopping:
            step = self.state.global_step
            if broadcast_object(self.refused):
                how = f"stopped by {self.stopping.name} at step {step}, which was not saved"
                raise Stopped(3, how)
            if self.bar:
                self.bar.close()  # else its line would go on with the next one
            if self.files:
                self.files.wait()
                directory = shlex.quote(str(self.files.directory))
                again = f"--output-dir {directory} --resume auto"
                print(f"to go on: the same command with {again}", flush=True)
            code = SIGNALS[self.stopping]
            raise Stopped(code, f"stopped by {self.stopping.name} after saving step {step}")

    def finish(self) -> None:
        """Wait for all ranks, and close the files. Raises Stopped if the last save was refused."""
        refused = broadcast_object(self.refused)
        if self.files:
            self.files.close()
        if dist.is_initialized():
            dist.barrier()  # rank 0 has written its files
        if refused:
            raise Stopped(3, f"the run is done, but its last state was not saved: {refused}")
