"""The log of a run: its header, the progress bar, printed lines, and the lines of metrics.jsonl."""

from __future__ import annotations

import math
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

import common
from common import get_rank, print0
from machinery.files import RunFiles
from machinery.state import State
from sampling import GlobalBatchSampler

# tqdm's default lock is one for several processes, and would be left behind.
tqdm.set_lock(threading.RLock())


class Log:
    """The sums, speeds and times of a run, and the lines that show them.

    Create it on every rank. Only rank 0 prints, and writes to its `files`. `meter` has the sums
    since the last training line.
    """

    def __init__(
        self, args: Namespace, state: State, sampler: GlobalBatchSampler, device: torch.device
    ) -> None:
        self.args, self.state, self.sampler, self.device = args, state, sampler, device
        self.meter = common.Meter(device)
        self.bar: tqdm | None = None
        self.files: RunFiles | None = None  # stays None on all ranks but 0
        # For the next training line: when it began, and the seconds that the loop waited for data.
        self.began = self.waited = 0.0
        self.samples_before = 0  # of that line's samples, how many an earlier process trained on
        self.lr = 0.0  # the learning rate of the step that is being made
        self.start_times()

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
            disable=None if get_rank() == 0 else True,  # None: on a terminal alone
        )
        self.waited, self.lr = 0.0, self.state.optimizer.param_groups[0]["lr"]
        asked = self.began = time.perf_counter()
        for batch in loader:
            self.waited += time.perf_counter() - asked
            yield batch
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
            f"{self.sampler.length} training samples: {self.sampler.steps_per_epoch} "
            f"steps per epoch; a step: {args.batch_size} samples, "
            f"{args.accum_steps} x up to {share} samples on each device"
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
            "images_per_s": (means["count"] - self.samples_before) / (now - self.began),
            "grad_norm": grad_norm.item(),
            "skipped": skipped,
            **{name: mean for name, mean in means.items() if name not in ("loss", "count")},
            "data_wait": self.waited / (now - self.began),
        }
        self.began, self.waited, self.samples_before = now, 0.0, 0
        self.meter.clear()
        state.scaler.skipped.zero_()
        warning = f"  skipped {skipped} steps with non-finite gradients" if skipped else ""
        values = "  ".join(f"{name} {mean:.6f}" for name, mean in means.items() if name != "count")
        speed = f"{line['images_per_s']:.0f} images/s  data {line['data_wait']:.0%}"
        text = f"{values}  lr {line['lr']:.5f}  {speed}{warning}"
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
        epoch = self.state.epoch
        if self.args.eval_only and self.state.step == 0 and epoch > 0:
            epoch -= 1  # the checkpoint counts the epoch as done
        line = {"event": "eval", "epoch": epoch, "global_step": self.state.global_step, **metrics}
        line |= self.spent
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
