"""Load the file of --task, call its functions, and try them on a first batch before the run.

What a function of the file raises becomes a UsageError that names the file, the line and the
function.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import io
import os
import random
import sys
import threading
import time
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, Dataset, IterableDataset
from tqdm import TMonitor

import common
from common import UsageError, freeze, load_weights, print0, read_tensors
from machinery.process import LOST_CONNECTION
from sampling import KeyedDataset, seed_generators, seed_rng, splitmix64

# Names in a line of metrics.jsonl that are no metric.
RESERVED = {"loss", "count", "event", "epoch", "step", "global_step", "lr", "images_per_s"}
RESERVED |= {"grad_norm", "skipped", "data_wait", "train_s", "eval_s", "save_s"}
NEEDED = ["build_datasets", "build_model", "per_sample_loss", "per_sample_metrics"]
OPTIONAL = ["collate", "loss_weights", "train_metrics", "dataset_metrics", "build_optimizer"]
OPTIONAL += ["shard_modules"]
UNSIGNED = torch.uint16, torch.uint32, torch.uint64
BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
loaded: dict[Path, ModuleType] = {}  # by parse_args; the file is not run twice
left_open: dict[Path, set] = {}  # files and threads that a task has left, in all its runs


@contextlib.contextmanager
def blame(where: str, path: str | None = None) -> Iterator[str]:
    """Yield `where`, and turn whatever the block raises into a UsageError that begins with it.

    `path` is the file whose line number helps.
    """
    try:
        yield where
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # a script without a main guard may call sys.exit
        if LOST_CONNECTION.search(f"{type(error).__name__}: {error}"):
            raise  # in the check of fsdp: the rank that left has the cause
        places = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, SyntaxError):
            places.append((error.filename, error.lineno))
        advice = "; a module's parameter is used outside of it: leave it out of shard_modules"
        advice = advice if "mixed torch.Tensor and DTensor" in str(error) else ""
        same = os.path.realpath(path or "")
        lines = [line for name, line in places if path and name and os.path.realpath(name) == same]
        line = f", line {lines[-1]}" if lines else ""
        raise UsageError(f"{where}{line}: {type(error).__name__}: {error}{advice}") from error


def load_module(path: Path) -> ModuleType:
    """Run the file of a task, and return it as a module."""
    with blame(f"--task {path}", str(path)):
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.append(folder)  # it may import its neighbours; last, so they replace nothing
        beside = folder == str(Path(__file__).resolve().parent.parent)
        name = path.stem if beside else f"task_{path.stem}"  # not the name of another module
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        seed_generators(splitmix64(-1))  # what the file draws at its top is the same on every rank
        before = not_for_a_fork()
        spec.loader.exec_module(module)
        loaded[path] = module
        left_open.setdefault(path, set()).update(not_for_a_fork() - before)
    return module


class Task:
    """The functions of a task, as the scripts call them; task.py says what each returns."""

    def __init__(self, args: Namespace) -> None:
        self.args, self.path = args, Path(args.task)
        module = loaded.get(self.path) or load_module(self.path)
        found = {name: getattr(module, name, None) for name in (*NEEDED, *OPTIONAL)}
        self.functions = {name: value for name, value in found.items() if callable(value)}
        if missing := [name for name in NEEDED if name not in self.functions]:
            problem = f"must define {', '.join(NEEDED)}; missing: {', '.join(missing)}"
            raise UsageError(f"--task {self.path} {problem}")
        self.functions = {n: self._with_options(n, f) for n, f in self.functions.items()}
        self.per_sample_loss = self.functions["per_sample_loss"]
        self.per_sample_metrics = self.functions["per_sample_metrics"]
        self.shard_modules = self.functions.get("shard_modules", large_modules)
        # Both are None if the task has no such function.
        self.collate = self.functions.get("collate")
        self.dataset_metrics = self._set_metrics if "dataset_metrics" in self.functions else None

    def _with_options(self, name: str, function: Callable) -> Callable:
        """Bind the options that a function names as keyword-only parameters."""
        bound = getattr(function, "keywords", {})  # of a functools.partial
        found = inspect.signature(function).parameters.values()
        asked = [p for p in found if p.kind is p.KEYWORD_ONLY and p.name not in bound]
        known = {p.name: getattr(self.args, p.name) for p in asked if hasattr(self.args, p.name)}
        if unknown := [p.name for p in asked if p.name not in known and p.default is p.empty]:
            problem = f"{name} asks for {', '.join(unknown)}, which is no option"
            raise UsageError(f"--task {self.path}: {problem}")
        return functools.partial(function, **known)

    def blame(self, name: str) -> contextlib.AbstractContextManager[str]:
        """Return the context that names the file and this function in what its block raises."""
        return blame(f"--task {self.path}: {name}", str(self.path))

    def build_datasets(self) -> tuple[Dataset, Dataset]:
        """Return the training and the evaluation set; what they draw is the same on all ranks."""
        seed_generators(splitmix64(self.args.seed, -4))  # other numbers than those of the model
        before = not_for_a_fork()
        with self.blame("build_datasets"):
            train_set, val_set = self.functions["build_datasets"](self.args)
            if self.args.balanced:  # the sampler reads them: they may open a file
                getattr(train_set, "targets", None)
            if any(isinstance(data, IterableDataset) for data in (train_set, val_set)):
                advice = "it needs __len__ and __getitem__, which finds a record by its number"
                raise UsageError(f"--task {self.path}: an IterableDataset has no order; {advice}")
            len(train_set), len(val_set)  # raises if a set has no length
        if hasattr(train_set, "set_epoch"):
            advice = "draw in __getitem__, where each sample has its own seed in each epoch"
            raise UsageError(f"--task {self.path}: set_epoch of a data set is not called; {advice}")
        known = left_open[self.path]  # by the file's top, or an earlier run
        known |= not_for_a_fork() - before
        if known:
            time.sleep(0.1)  # a thread may just be ending
        left = ", ".join(sorted({name for _, name in known & not_for_a_fork()}))
        if left and self.args.workers != 0:
            advice = "forked loader workers cannot use it; make it in __getitem__"
            if self.args.workers is None:
                self.args.workers, advice = 0, f"{advice}. So this run has none; see --workers"
            print0(f"warning: the task has left open or running: {left}; {advice}", file=sys.stderr)
        return train_set, val_set

    def build_net(self) -> nn.Module:
        """Return the model on the CPU, from --seed or --weights, with --freeze applied."""
        args = self.args
        torch.manual_seed(args.seed)
        with self.blame("build_model") as where:
            net = self.functions["build_model"](args)
            if not isinstance(net, nn.Module) or not list(net.parameters()):
                found = type(net).__name__
                raise UsageError(f"{where} must return an nn.Module with parameters, got {found}")
            check_tensors(net, where, args.parallel_mode)
        with self.blame("get_extra_state of the model"):
            read_back({n: v for n, v in net.state_dict().items() if not isinstance(v, Tensor)})
        own = {type(norm) for norm in common.batch_norms(net)} - set(BATCH_NORMS)
        if args.sync_bn and own:
            names = ", ".join(sorted(kind.__name__ for kind in own))
            raise UsageError(f"--sync-bn would drop the code of {names}; leave it out")
        net.to(getattr(torch, args.dtype))
        if args.weights:
            option = f"--weights {args.weights}"
            with blame(option):
                content = read_tensors(args.weights, "--weights")
                load_weights(net, content, option, complete=args.eval_only)
        freeze(net, args.freeze)
        layout = torch.channels_last if args.channels_last else torch.contiguous_format
        with blame("--channels-last"):
            return net.to(memory_format=layout)

    def build_optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        """Return the task's optimizer, or that of --optimizer."""
        args = self.args
        if "build_optimizer" not in self.functions:
            with blame(f"--optimizer {args.optimizer}"):
                settings = args.lr, args.momentum, args.weight_decay, args.nesterov
                return common.build_optimizer(net, args.optimizer, *settings)
        with self.blame("build_optimizer") as where:
            optimizer = self.functions["build_optimizer"](args, net)
            if not isinstance(optimizer, torch.optim.Optimizer):
                found = type(optimizer).__name__
                raise UsageError(f"{where} must return one optimizer with groups, got {found}")
            inspect.signature(optimizer.step).bind()  # raises if it needs a closure: there is none
            parts = {id(p) for group in optimizer.param_groups for p in group["params"]}
            trained = {id(p) for p in net.parameters() if p.requires_grad}
            if not trained <= parts <= {id(p) for p in net.parameters()}:
                wanted = "every parameter of the model that trains, and no other; see also --freeze"
                raise UsageError(f"{where}: the groups must hold {wanted}")
            if any(hasattr(p, "full_tensor") and p._backward_hooks for p in net.parameters()):
                raise UsageError(f"{where}: fsdp calls no hook of a parameter; use ddp")
        return optimizer

    def total_weight(self, micro_batches: list) -> int | Tensor:
        """Return what the losses of a step are divided by: the global batch size, or its weights.

        The weights are summed over all micro-batches of all ranks. If none is above zero, the
        result is infinite: the gradient is zero, and StepGuard skips the step.
        """
        if "loss_weights" not in self.functions:
            return self.args.batch_size
        sums = [self._weights(targets).sum() for _, targets in micro_batches]
        total = common.reduce_value(torch.stack(sums).sum(), average=False)
        return torch.where(total == 0, torch.inf, total)

    def weigh(self, losses: Tensor, targets: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Return the losses for a Meter, with their weights if the task has weights."""
        return (losses, self._weights(targets)) if "loss_weights" in self.functions else losses

    def _weights(self, targets: Any) -> Tensor:
        return self.functions["loss_weights"](targets).to(getattr(torch, self.args.dtype))

    @torch.no_grad()
    def train_metrics(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """Return the metrics of the training log, without the lists, which an evaluation needs."""
        if "train_metrics" not in self.functions:
            return {}
        found = self.functions["train_metrics"](outputs, targets) or {}
        return {name: value for name, value in found.items() if not isinstance(value, list)}

    def _set_metrics(self, lists: dict[str, list]) -> dict[str, float]:
        """Return metrics of the whole set, seeded: they draw the same numbers in every mode."""
        seed_rng(self.args.seed, -2, 0)  # no training step and no batch has this number
        with self.blame("dataset_metrics") as where:
            found = {str(n): float(v) for n, v in self.functions["dataset_metrics"](lists).items()}
            if taken := ", ".join(sorted(RESERVED & found.keys())):
                raise UsageError(f"{where}: the log itself uses the name {taken}")
            return found


def not_for_a_fork() -> set[tuple[Any, str]]:
    """Return (descriptor, path) of open files, pipes, sockets, and (thread, name) of threads.

    Without memory-mapped files, which have no position. A path may be open twice.
    """
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    mapped = Path("/proc/self/maps").read_text()  # as np.memmap
    paths = {(link, os.path.realpath(link)) for link in links}
    found = {(n, p) for n, p in paths if os.path.isfile(n) or "/pipe:" in p or "/socket:" in p}
    # A fork has no thread but its own. That of tqdm, TMonitor, serves no sample.
    threads = {(t, t.name) for t in threading.enumerate() if not isinstance(t, TMonitor)}
    opened = Counter(path for _, path in found)  # a mapped file stays open too, once for each map
    return threads | {f for f in found if opened[f[1]] > mapped.count(f" {f[1]}\n")}


def check_tensors(net: nn.Module, where: str, mode: str) -> None:
    """Raise UsageError if the model has a tensor that a run cannot train, cut or load."""
    for name, module in net.named_modules():
        if getattr(module, "sparse", False) is True:  # DDP would spoil other gradients
            problem = f"{name} has sparse gradients, which ranks cannot average"
            raise UsageError(f"{where}: {problem}; leave out sparse=True")
        if mode != "single" and getattr(module, "max_norm", None):  # of nn.Embedding
            problem = f"{name} changes its weights in each forward, on each rank others"
            raise UsageError(f"{where}: {problem}; leave out max_norm")
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        if mode == "fsdp" and isinstance(tensor, nn.Parameter) and not tensor.dim():
            raise UsageError(f"{where}: fsdp cannot cut {name}; give it the shape [1]")
        if mode in ("ddp", "spawn") and tensor.dtype in (torch.int16, *UNSIGNED):
            raise UsageError(f"{where}: DDP cannot send {name}, {tensor.dtype}; keep it as int32")
        if tensor.is_complex():
            raise UsageError(f"{where}: {name} is complex; keep torch.view_as_real of it")
        if 0 in tensor.stride() and not tensor.is_contiguous():  # as torch.ones(1).expand(8) is
            raise UsageError(f"{where}: {name} is expanded and cannot be loaded; clone it")


LISTS = nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict  # they have no forward


def large_modules(net: nn.Module) -> list[nn.Module]:
    """Return the parts of the network that fsdp shards each for itself.

    From the top down, a module with a list of blocks (Sequential, ModuleList, ...) and more than an
    eighth of all parameters is replaced by its children. Left out are weights with two names, and
    modules of vectors alone: torch warns that a norm returns a view, which must not be changed.
    """
    eighth = sum(parameter.numel() for parameter in net.parameters()) / 8
    uses = Counter(id(p) for _, p in net.named_parameters(remove_duplicate=False))
    found, parts = [], [*net.children()]
    while parts:
        part = parts.pop(0)
        own = [*part.parameters()]
        blocks = any(isinstance(module, (*LISTS, nn.Sequential)) for module in part.modules())
        too_large = blocks and sum(p.numel() for p in own) > eighth
        if too_large or isinstance(part, LISTS) or any(uses[id(p)] > 1 for p in own):
            parts = [*part.children(), *parts]
        elif any(p.dim() > 1 for p in own):
            found.append(part)
    return found


# --------------------------------------------------------------------------- the check before a run


def check_run(
    task: Task, net: nn.Module, device: torch.device, train: DataLoader, val: DataLoader
) -> None:
    """Send a first batch of each set through the network, loss and metrics, in evaluation mode.

    `net` is on the device. Nothing of a run is disturbed: each of its epochs sets the training
    mode, each of its steps seeds the generators. Raises UsageError if something is wrong.
    """
    args = task.args
    if not args.check:
        return
    tensors = names_of_tensors(net, args.average)
    common.gather_samples.used = False  # by another run in this process
    net.eval()
    _, (micro_batch, *_) = next(iter(train.batch_sampler))
    meter = common.Meter(device)  # raises if the metrics' names differ
    check_samples(task, net, device, train.dataset, micro_batch, meter, "training")
    n, size = val.batch_sampler.length, val.batch_sampler.batch_size
    first, last = [*range(size)], [*range(range(0, n, size)[-1], n)]  # the last may be smaller
    for batch in first, last:
        check_samples(task, net, device, val.dataset, batch, meter, "evaluation")
    check_neighbours(task, net, device, val)
    check_smallest_slice(task, net, device, train)

    if made := ", ".join(sorted(names_of_tensors(net, args.average) - tensors)):
        advice = "no checkpoint or average would have it; register it in __init__"
        raise UsageError(f"--task {args.task}: the forward of the model makes {made}; {advice}")
    if args.best and args.best.removesuffix(":min") not in meter.names and not task.dataset_metrics:
        known = ", ".join(meter.names)
        raise UsageError(f"--best {args.best}: no such metric; use one of {known}")


@torch.no_grad()
def check_samples(
    task: Task,
    net: nn.Module,
    device: torch.device,
    keyed: KeyedDataset,
    indices: list[int],
    meter: common.Meter,
    kind: str,
) -> None:
    """Fetch samples as a run does, and compute their losses, and in evaluation their metrics."""
    args = task.args
    with task.blame(f"samples {indices[:2]} of the {kind} set") as where:
        if digest(keyed, indices[:2]) != digest(keyed, indices[:2]):
            wanted = "draw from the global generator of torch, Python or numpy, which is seeded"
            raise UsageError(f"{where}: they differ when they are fetched again; {wanted}")
        batch = keyed.__getitems__((0, indices))
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            found = f"{type(batch).__name__} of {len(batch)}"
            raise UsageError(f"{where}: a sample must be (input, target), got a {found}")
        inputs, targets = common.to_device(batch, device)
        if args.parallel_mode == "dp":
            check_leaves(where, (inputs, targets), len(indices))
    seed_rng(args.seed, -3, 0)
    with common.autocast(device, args.amp):
        with task.blame("the model of build_model"):
            outputs = net(inputs)
        with task.blame("per_sample_loss") as where:
            losses = task.per_sample_loss(outputs, targets)
            common.Meter(device).add(loss=losses)
            if args.parallel_mode == "dp" and common.gather_samples.used:
                raise UsageError(f"{where}: dp cannot gather_samples; use ddp or spawn")
            if len(losses) != len(indices):
                raise UsageError(f"{where}: {len(losses)} numbers for {len(indices)} samples")
        with task.blame("loss_weights"):
            common.Meter(device).add(loss=task.weigh(losses, targets))
        if kind == "training":
            return  # train_metrics is made for outputs of the training mode, which may be others
        with task.blame("per_sample_metrics") as where:
            metrics = task.per_sample_metrics(outputs, targets)
            if not metrics or RESERVED & metrics.keys():
                wanted = f"at least one metric, and none named {', '.join(sorted(RESERVED))}"
                raise UsageError(f"{where} must return {wanted}; got {metrics}")
            meter.add(loss=losses, **metrics)


def check_leaves(where: str, batch: Any, n: int) -> None:
    """Raise UsageError if dp cannot cut the batch: if it holds more than tensors [n, ...]."""

    def check(leaf: Any) -> Any:
        if not torch.is_tensor(leaf) or leaf.shape[:1] != (n,):
            problem = "dp can only cut a batch of tensors [n, ...]"
            raise UsageError(f"{where}: {problem}; use ddp or spawn, or pad in collate")
        return leaf

    common.tree_map(check, batch, lambda leaf: not isinstance(leaf, (tuple, list, dict)))


@torch.no_grad()
def check_neighbours(task: Task, net: nn.Module, device: torch.device, val: DataLoader) -> None:
    """Raise UsageError if a loss, weight or metric of a sample depends on the rest of its batch.

    Another number of ranks would cut the batch elsewhere, and train another network.
    """
    args, every = task.args, range(val.batch_sampler.length)

    def values_of(samples: list[int], draw: int = 0) -> dict[str, Tensor]:
        inputs, targets = common.to_device(val.dataset.__getitems__((0, samples)), device)
        seed_rng(args.seed, -3, draw)
        with common.autocast(device, args.amp):
            outputs = net(inputs)
            found = {"loss": task.weigh(task.per_sample_loss(outputs, targets), targets)}
            found |= task.per_sample_metrics(outputs, targets)
        for name in [name for name, value in found.items() if isinstance(value, tuple)]:
            found[name], found[f"weight of {name}"] = found[name]
        return {n: v.double().cpu().view(-1) for n, v in found.items() if isinstance(v, Tensor)}

    try:  # mixed, as a set may be sorted
        indices = random.Random(0).sample(every, min(len(every), args.eval_batch_size))
        in_batch = values_of(indices)
    except Exception:  # as images of many sizes, which come one by one
        indices = [*range(val.batch_sampler.batch_size)]
        in_batch = values_of(indices)
    other_seed = values_of(indices, 1)
    # The last too: an LSTM that takes the batch for time changes it. And those of the lowest and
    # the highest loss: some losses leave out one part of a batch.
    losses, n = in_batch["loss"], len(indices)
    singles = [range(i, i + 1) for i in {0, n - 1, int(losses.argmin()), int(losses.argmax())}]
    apart: list[tuple[range, dict[str, Tensor]]] = []
    for parts in singles, [range((n + 1) // 2)]:  # before any return: fsdp needs all ranks
        with contextlib.suppress(Exception):  # a batch of one may never come
            apart = apart or [(p, values_of([indices[i] for i in p])) for p in parts]
    precise = args.dtype == "float64" or (args.amp == "off" and device.type == "cpu")
    rough = 2**-8 if args.amp == "bf16" else 2**-11  # of fp16, and of TF32
    eps = torch.finfo(getattr(torch, args.dtype)).eps if precise else rough
    draws = {name for name, values in in_batch.items() if not values.equal(other_seed[name])}
    mixes = any(norm.running_mean is None for norm in common.batch_norms(net))  # as in training
    if common.gather_samples.used or "loss" in draws or mixes:  # on purpose, or the model draws
        return
    for name, values in in_batch.items():
        # A metric like top1 may jump by rounding. One that draws may be equal by chance.
        if "loss" not in name and (draws or not precise):
            continue
        # Weights are often sums in float32. A loss near zero is a small difference.
        rounding = max(eps, 2**-23 if "weight" in name else 0) ** 0.5 * values.abs().max()
        for place, one in [pair for p, found in apart for pair in zip(p, found[name].tolist())]:
            other = values[place].item()
            if one != other and not abs(one - other) <= rounding:  # `not <=` is true of NaN
                advice = "keep padding out of the model and the loss; draw and mix in __getitem__, "
                advice += "not in collate; for a mean over tokens return sums, undivided, and "
                advice += "define loss_weights; a loss that compares samples needs gather_samples"
                advice = advice if "loss" in name else "use dataset_metrics for the whole set"
                what = f"{name} of sample {indices[place]} is {other:.6g} beside others, and"
                less = "alone" if len(apart) > 1 else "in half of the batch"
                raise UsageError(f"--task {task.path}: {what} {one:.6g} {less}; {advice}")


@torch.no_grad()
def check_smallest_slice(
    task: Task, net: nn.Module, device: torch.device, train: DataLoader
) -> None:
    """Raise UsageError if some rank gets one sample of a micro-batch, and BatchNorm needs two."""
    args, sampler = task.args, train.batch_sampler
    accum, ranks, replicas = sampler.accum_steps, sampler.world_size, getattr(args, "replicas", 1)
    micro_batches = {sampler.batch_size // accum, -(-sampler.batch_size // accum)}  # both sizes
    pieces = [p for n in micro_batches for p in torch.arange(n // ranks).chunk(replicas)]
    if min(map(len, pieces)) > 1 or (args.sync_bn and ranks > 1):
        return
    common.train_mode(net)
    training = [norm for norm in common.batch_norms(net) if norm.training]
    net.eval()  # nothing else changes what it holds
    for norm in training:
        norm.train()
    copies = {name: buffer.clone() for name, buffer in net.named_buffers()}  # of the statistics
    _, (indices, *_) = next(iter(sampler))
    inputs, _ = common.to_device(train.dataset.__getitems__((0, indices[:1])), device)
    where = f"--batch-size {args.batch_size} leaves a device one sample of a micro-batch"
    with blame(where), common.autocast(device, args.amp):
        functional_call(net, copies, (inputs,))
    net.eval()


def names_of_tensors(net: nn.Module, average: str) -> set[str]:
    """Return the names of what the run keeps: the state, and for an average every buffer."""
    buffers = [name for name, _ in net.named_buffers()] if average != "none" else []
    return {*net.state_dict(), *buffers}


def read_back(value: Any) -> None:
    """Raise if a checkpoint could hold the value, but no run could load it."""
    torch.save(value, file := io.BytesIO())
    file.seek(0)
    torch.load(file, weights_only=True)


def digest(keyed: KeyedDataset, indices: list[int]) -> str:
    """Return a hash of these samples as the first epoch has them."""
    batch = keyed.__getitems__((0, indices))
    # Clones, as a view would be hashed with all the memory behind it.
    batch = common.tree_map(lambda value: value.cpu().clone(), batch)
    torch.save(batch, file := io.BytesIO())
    return hashlib.sha256(file.getvalue()).hexdigest()[:12]
