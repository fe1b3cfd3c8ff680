"""A run as its loop sees it: position, stop, saving. Every rank has one."""

from __future__ import annotations

import math
import shlex
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import common
from common import MAX_SKIPPED_IN_A_ROW, UsageError, broadcast_object, get_rank, print0
from machinery.check import check_agreement
from machinery.files import RunFiles
from machinery.log import Log
from machinery.options import declared
from machinery.processes import SIGNALS, Stopped, error_on_all, handle_signals
from machinery.state import State
from sampling import GlobalBatchSampler, end_with_parent


class StopSignal:
    """SIGTERM, SIGINT and SIGUSR1 (SLURM's warning): all ranks stop at the same step."""

    def __init__(self) -> None:
        self.received: list[int] = []  # the places in SIGNALS, from 1: the highest wins
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
            before, self.pending = self.pending, (work, tensor)  # before: of the last step
            read = self.pending if wait else before  # None in the first step
            if read:
                read[0].wait()
            flag = int(read[1]) if read else 0
        return list(SIGNALS)[flag - 1] if flag else None


class Run:
    """Position, checkpoints and end of a run. Create it on every rank; only rank 0 writes files.

    Call each of its methods on every rank: within them the ranks talk to each other.
    """

    def __init__(
        self,
        args: Namespace,
        state: State,
        sampler: GlobalBatchSampler,
        val_set: Dataset,
        device: torch.device,
    ) -> None:
        self.args, self.state, self.sampler, self.device = args, state, sampler, device
        self.log = Log(args, state, sampler, device)
        self.meter = self.log.meter  # the loop adds to it
        names = getattr(val_set, "classes", None)  # as torchvision's data sets have them
        self.classes = [str(name) for name in names] if isinstance(names, (list, tuple)) else None
        self.files: RunFiles | None = None  # stays None on all ranks but 0
        self.stop: StopSignal | None = None  # stays None with --eval-only
        self.stopping: signal.Signals | None = None  # the signal on which the run ends
        self.refused = ""  # why the last save was refused
        check_agreement(args, sampler.length, val_set, device)

    def resume(self) -> None:
        """Open the directory of the run, and load the checkpoint of --resume into the state."""
        checkpoint = self._on_rank0(self._open)
        if checkpoint:
            self._restore(checkpoint)
            print0(f"resumed {self._position()}")
        if not self.args.eval_only:  # which has nothing to save
            self._on_rank0(lambda: self.files.rewind())  # not before the checkpoint fits
            self.stop = StopSignal()
        self.log.start_times()

    def _restore(self, checkpoint: dict[str, Any]) -> None:
        state = self.state
        try:
            state.restore(checkpoint)
            self.meter.restore(checkpoint["log"])  # the sums since the last log line
            self.log.samples_before = sum(checkpoint["log"]["count"])
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"does not fit the model or the optimizer: {' '.join(str(error).split())}"
            raise error_on_all(f"--resume {self.args.resume}: {problem}") from error

    def _position(self) -> str:
        state, epochs = self.state, self.args.epochs
        if self.args.eval_only and state.step == 0:
            return f"after epoch {state.epoch}"
        if state.epoch >= epochs:
            return f"after all {epochs} epochs: nothing is left to do; a larger --epochs goes on"
        return f"at epoch {state.epoch + 1}, step {state.step}"

    def _open(self) -> dict[str, Any] | None:
        self.files = self.log.files = RunFiles(self.args, self.sampler.length)
        self.files.parameters = [name for name, _ in self.state.net.named_parameters()]
        return self.files.checkpoint

    def _on_rank0(self, function: Callable[[], Any]) -> Any:
        """Call the function on rank 0; return its result, or raise its error, on every rank.

        If rank 0 raised alone, the others would wait for it.
        """
        result = error = None
        if get_rank() == 0:
            try:
                result = function()
            except OSError as problem:
                error = error_on_all(f"--output-dir {self.args.output_dir}: {problem}")
            except UsageError as problem:
                error = error_on_all(str(problem))
        result, error = broadcast_object((result, error))
        if error:
            raise error
        return result

    def batches(self, loader: DataLoader) -> Iterator[Any]:
        """Yield the batches that are left of the epoch, on the device."""
        self.sampler.set_position(self.state.epoch, self.state.step)
        for batch in self.log.watch(loader):
            yield common.to_device(batch, self.device)

    def end_step(self, grad_norm: Tensor) -> None:
        """Count the step; log, save or stop if it is time. Call it after each optimizer step."""
        state, args = self.state, self.args
        state.step += 1
        state.global_step += 1
        self.log.bar.update()
        ends = state.step == self.sampler.steps_per_epoch
        logs = ends or state.global_step % args.log_every == 0
        if logs:
            self.log.train_line(grad_norm)
        self.log.lr = state.optimizer.param_groups[0]["lr"]  # for the next step
        self.stopping = self.stop.agreed()
        due = args.save_every and state.global_step % args.save_every == 0
        saves = not ends and (due or self.stopping)  # train_*.py itself saves after an epoch
        if logs or saves:
            self._end_if_diverged()
        if saves:
            self.save("last.pt")

    def _end_if_diverged(self) -> None:
        # To read the number is to wait for the device: so only at log lines and saves, which wait
        # anyway. `stop.agreed` comes first: it raises if a rank is lost, where CUDA would hang.
        if self.state.scaler.in_a_row >= MAX_SKIPPED_IN_A_ROW:
            problem = f"{MAX_SKIPPED_IN_A_ROW} steps in a row had non-finite gradients"
            raise Stopped(3, f"diverged: {problem}, seen at step {self.state.global_step}")

    def eval_model(self) -> nn.Module:
        """Return the network to evaluate: the average of the weights if there is one."""
        self.log.spend("train_s")
        if not self.state.average.n_averaged:
            return self.state.net
        common.sync_buffers(self.state.average.module)
        return self.state.average.module

    def end_epoch(self, metrics: dict[str, float]) -> None:
        """Log the evaluation, count the epoch, and write last.pt, and best.pt if it is the best."""
        state, args = self.state, self.args
        known = [name for name in metrics if name not in ("loss", "count")] + ["loss"]
        name = args.best or known[0]
        if name not in known:
            raise error_on_all(f"--best {name}: no such metric; use one of {', '.join(known)}")
        self.log.eval_line(metrics)
        state.epoch, state.step = state.epoch + 1, 0
        names, best_before = [], state.best
        if self._improves(metrics[name], lower_is_better=name == "loss"):
            state.best, names = metrics[name], ["best.pt"]
        if args.keep_every and state.epoch % args.keep_every == 0:
            names.append(f"epoch-{state.epoch:04}.pt")
        # Waits: the save below must know of a stop. After the last epoch nothing is left to stop.
        self.stopping = self.stop.agreed(wait=True) if state.epoch < args.epochs else None
        self.save(*names, "last.pt")  # last.pt last: it counts the epoch as done
        if self.refused:
            # best.pt still has the score before. Only rank 0 knows, and only rank 0 saves `best`.
            state.best = best_before
        if self.files and state.epoch == args.epochs and state.best is not None:
            self._print_best(name)

    def _improves(self, score: float, lower_is_better: bool) -> bool:
        """Return whether the score is better than the best one; NaN and infinity never are."""
        best = self.state.best
        if best is None or not math.isfinite(score):
            return math.isfinite(score)
        gain = best - score if lower_is_better else score - best
        return gain > 1e-12 * abs(best)  # less is rounding, on another number of ranks

    def _print_best(self, name: str) -> None:
        path = self.files.directory / "best.pt"
        print(f"best {name} {self.state.best:.6f}, in epoch {self.files.best_epoch}: {path}")
        again = f"--eval-only --resume {shlex.quote(str(path))}"
        print(f"to evaluate it: the same command with {again}", flush=True)

    def save(self, *names: str) -> None:
        """Write the checkpoint under these names, and stop if a signal has asked for it.

        Call it on every rank: all take part in collecting what rank 0 writes.
        """
        self.log.spend("train_s")
        sums = self.meter.sums_of_ranks()
        checkpoint = self.state.checkpoint()
        if self.files:
            checkpoint |= {"samples": self.sampler.length, "log": sums, "classes": self.classes}
            checkpoint["config"] = declared(self.args)
            self.refused = self.files.write_checkpoint(checkpoint, names)
        self.log.spend("save_s")
        if self.stopping:
            self._stop()

    def _stop(self) -> NoReturn:
        """End the run on a signal, after a save."""
        name, step = self.stopping.name, self.state.global_step
        if broadcast_object(self.refused):
            raise Stopped(3, f"stopped by {name} at step {step}, which was not saved")
        if self.log.bar:
            self.log.bar.close()  # else its line would go on with the next one
        if self.files:
            directory = shlex.quote(str(self.files.directory))
            again = f"--output-dir {directory} --resume auto"
            print(f"to go on: the same command with {again}", flush=True)
        raise Stopped(SIGNALS[self.stopping], f"stopped by {name} after saving step {step}")

    def finish(self) -> None:
        """Wait for all ranks, and close the files. Raises Stopped if the last save was refused."""
        refused = broadcast_object(self.refused)
        if self.files:
            self.files.close()
        if dist.is_initialized():
            dist.barrier()  # rank 0 has written its files
        if refused:
            raise Stopped(3, f"the run is done, but its last state was not saved: {refused}")
