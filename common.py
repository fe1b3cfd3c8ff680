"""What makes a training loop right, on one device and on many.

This file imports nothing else of the project, so that you can copy it. A loop needs no branch on
the mode: without a process group these helpers change nothing.
"""

import contextlib
import dataclasses
import fnmatch
import inspect
import math
import os
import re
import signal
import sys
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.backends import cudnn
from torch.multiprocessing import _prctl_pr_set_pdeathsig as end_with_parent
from torch.utils._pytree import tree_map, tree_map_only

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
FORMAT = 5  # of a checkpoint; a new number when an earlier one would be resumed wrongly


def fail(message: str) -> NoReturn:
    """End this process for bad input: one line on stderr, exit code 2."""
    if os.environ.get("LOCAL_RANK", "0") == "0":  # the other ranks of this machine found the same
        line = " ".join(str(message).split())
        print(f"{Path(sys.argv[0]).name}: error: {line}", file=sys.stderr, flush=True)
    raise SystemExit(2)


# ------------------------------------------------------------------------------ ranks and devices


def ranks_from_env() -> tuple[int, int, int]:
    """Return (rank, local rank, world size) from the variables of torchrun, or of srun."""
    env, srun = os.environ, ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
    if "RANK" not in env and "SLURM_STEP_NODELIST" in env:
        env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"] = (env[name] for name in srun)
        # gpu[07-09],x1 begins with gpu07
        first = re.sub(r"\[(\w+)[^]]*\]", r"\1", env["SLURM_STEP_NODELIST"]).split(",")[0]
        env.setdefault("MASTER_ADDR", first)
        env.setdefault("MASTER_PORT", str(20_000 + int(env["SLURM_JOB_ID"]) % 10_000))
    if "RANK" not in env:
        start = "torchrun --standalone --nproc-per-node 2 SCRIPT.py [options]"
        fail(f"no launcher has set RANK; use {start}; in a notebook: train_spawn.main([...])")
    if "TORCHELASTIC_RUN_ID" in env:
        end_with_parent(signal.SIGTERM)  # if torchrun is killed, this rank saves and ends
    return int(env["RANK"]), int(env["LOCAL_RANK"]), int(env["WORLD_SIZE"])


def set_up_device(
    name: str = "auto", deterministic: bool = False, local_rank: int = 0
) -> torch.device:
    """Select this process's device, before anything is allocated on device 0.

    `deterministic` takes kernels that give the same bits in every run.
    """
    torch.use_deterministic_algorithms(deterministic)
    cudnn.benchmark = not deterministic
    if name == "cpu" or not torch.accelerator.is_available():
        return torch.device("cpu")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # CUDA refuses without it
    cudnn.allow_tf32 = not deterministic  # it rounds to 10 bits in convolutions
    torch.set_float32_matmul_precision("highest" if deterministic else "high")  # high allows TF32
    index = local_rank % torch.accelerator.device_count()  # SLURM may show each task one device
    torch.accelerator.set_device_index(index)
    return torch.device(torch.accelerator.current_accelerator().type, index)


def backend(device: torch.device) -> str:
    """Return gloo for CPU tensors, and for an accelerator its own library too."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def get_rank() -> int:
    """Return the global rank, also before the process group exists."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def get_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def print0(*values: Any, file: Any = None) -> None:
    """Print on global rank 0 only."""
    if get_rank() == 0:
        print(*values, file=file, flush=True)


def reduce_value(value: Tensor, average: bool = True) -> Tensor:
    """Return the mean (or the sum) of `value` over all ranks, as a new tensor."""
    value = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)  # sum
        value = value / dist.get_world_size() if average else value
    return value


def broadcast_object(value: Any) -> Any:
    """Return rank 0's `value` on every rank."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_objects(value: Any) -> list:
    """Return the values of all ranks, on every rank."""
    values = [value] * get_world_size()
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


def gather_samples(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the samples of all ranks, in order, and the place of this rank's first one.

    For a loss that compares samples: `tensor`, [n, ...], is about this rank's slice of a
    micro-batch; n may differ between ranks. Gradients go back to the rank that owns a sample.
    Without a process group, or without gradients, as in evaluation, the result is (tensor, 0).
    """
    gather_samples.used = True  # for the check before a run
    if not dist.is_initialized() or not torch.is_grad_enabled():
        return tensor, 0
    sizes = gather_objects(len(tensor))
    padding = tensor.new_zeros(max(sizes) - len(tensor), *tensor.shape[1:])
    parts = differentiable.all_gather(torch.cat([tensor, padding]))  # of equal shapes
    everything = torch.cat([part[:size] for part, size in zip(parts, sizes)])
    return everything, sum(sizes[: dist.get_rank()])


gather_samples.used = False


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor]) -> None:
    """Copy rank 0's values into these tensors on every rank."""
    for tensor in tensors if dist.is_initialized() else ():
        sent = tensor.contiguous().view(-1).view(torch.uint8)  # gloo does not know every type
        dist.broadcast(sent, src=0)
        tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))


def settle_buckets(model: nn.Module) -> None:
    """Fix the order of DDP's gradient buckets now, the same in a new and in a resumed run.

    DDP sorts them once, in the order in which the first backward finishes. The last bit of a sum
    over three or more ranks depends on the place of a gradient in its bucket. This backward gives
    every parameter a gradient of zero, the last parameter first. It does not run the network.
    """
    net, stand_in = model.module, nn.Module()
    stand_in.net = net  # in a forward DDP broadcasts the buffers that it finds here
    # The backward goes from the last addition to the first.
    stand_in.forward = lambda: sum(p.sum() * 0 for p in net.parameters() if p.requires_grad)
    model.module = stand_in
    model().abs().backward()  # abs: a complex sum has no backward
    model.module = net
    model.zero_grad(set_to_none=True)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move what has `.to`, in nested tuples, lists and dicts, without waiting for the copy."""

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if hasattr(leaf, "to") else leaf

    return tree_map(move, batch, is_leaf=lambda value: hasattr(value, "to"))


def train_mode(model: nn.Module) -> None:
    """Put the model into training mode, but for each BatchNorm whose weights are frozen."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            module.train(module.weight.requires_grad)  # else it keeps its statistics


def autocast(device: torch.device, amp: str) -> torch.autocast:
    """Return the context of a forward pass in mixed precision, if amp is bf16 or fp16."""
    return torch.autocast(device.type, HALF.get(amp), enabled=amp in HALF)


def freeze(net: nn.Module, patterns: list[str]) -> None:
    """Stop the training of the parameters that match a pattern; "!head.*" leaves some out again."""
    parameters = dict(net.named_parameters())
    for pattern in patterns:
        names = fnmatch.filter(parameters, pattern.removeprefix("!"))
        if not names:
            fail(f"--freeze {pattern}: no parameter has such a name; use {', '.join(parameters)}")
        for name in names:
            parameters[name].requires_grad_(pattern.startswith("!"))


def load_weights(net: nn.Module, content: Any, source: str, complete: bool = False) -> None:
    """Load every tensor whose name and shape fit, and print the names of the rest.

    `content` is a state dict, or holds one. With `complete` a tensor that it lacks is an error.
    """
    parts = [content.get(name) for name in ("weights", "model", "state_dict")]
    content = next((part for part in parts if isinstance(part, dict)), content)
    given = {name.removeprefix("module."): value for name, value in content.items()}
    own = net.state_dict()
    shapes = {name: getattr(value, "shape", None) for name, value in given.items()}
    fits = {name: given[name] for name in own if shapes.get(name) == own[name].shape}
    missing = ", ".join(name for name in own if name not in fits) or "none"
    if not fits or (complete and len(fits) < len(own)):
        fail(f"{source}: it has no tensor of the right name and shape for {missing}")
    print0(f"weights: {len(fits)} of {len(own)} tensors are from {source}; missing: {missing}")
    net.load_state_dict(own | fits)


# ----------------------------------------------------------------------------------- optimization


def build_optimizer(
    net: nn.Module, name: str, lr: float, momentum: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Return sgd or adamw over the parameters that train, fused where torch has that."""
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    fused = all(parameter.is_floating_point() for parameter in parameters)  # none is complex
    if name == "adamw":
        betas = (momentum, 0.999)
        return torch.optim.AdamW(parameters, lr, betas, weight_decay=weight_decay, fused=fused)
    # torch has none for shards, and in 2.11 a wrong one for half types on a CPU.
    fused = fused and not any(hasattr(p, "full_tensor") or p.itemsize < 4 for p in parameters)
    kind = {"fused": True} if fused else {"foreach": True}
    optimizer = torch.optim.SGD(parameters, lr, momentum, weight_decay=weight_decay, **kind)
    for parameter in parameters if momentum else ():
        # A fused SGD leaves it uninitialised if the very first step is skipped.
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def build_scheduler(
    optimizer: torch.optim.Optimizer,
    steps_per_epoch: int,
    schedule: str,
    epochs: int,
    warmup_epochs: float,
    step_epochs: Sequence[int] = (),
    step_gamma: float = 0.1,
    final_lr: float = 0.0,
    scale_lr: str = "none",
    replicas: int = 1,
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the learning rate / peak as a pure function of the global step.

    So nothing drifts, or is restored wrongly. The step counts skipped steps too. A cycle of cyclic
    (Smith, arXiv:1506.01186), up from `step_gamma` to 1 and down, or of sawtooth (Izmailov et al.,
    arXiv:1803.05407), down from 1, has the length of `step_epochs`.
    """
    start, end = round(warmup_epochs * steps_per_epoch), epochs * steps_per_epoch
    cycle = step_epochs[0] * steps_per_epoch if step_epochs else max(1, end - start)
    devices = get_world_size() * replicas  # of nn.DataParallel in one process
    scale = {"none": 1, "linear": devices, "sqrt": math.sqrt(devices)}[scale_lr]

    def factor(step: int) -> float:
        if step < start:  # the warm-up rises to the value with which the schedule begins
            return factor(start) * (step + 1) / start
        place = (step - start) % cycle / cycle  # of cyclic and sawtooth
        if schedule == "cosine":
            done = min(1.0, (step - start) / max(1, end - start))
            return scale * (final_lr + (1 - final_lr) * (1 + math.cos(math.pi * done)) / 2)
        if schedule == "step":
            drops = sum(step >= epoch * steps_per_epoch for epoch in step_epochs)
            return scale * step_gamma**drops
        if schedule == "cyclic":
            return scale * (step_gamma + (1 - step_gamma) * (1 - abs(2 * place - 1)))
        if schedule == "sawtooth":
            return scale * (1 - (1 - step_gamma) * (place + 1 / cycle))
        return scale

    # torch warns where no step was made before: at a resume, or where the first was skipped.
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class StepGuard:
    """Steps the optimizer, unless the norm of the whole gradient is NaN or infinite.

    It is looked at after the all-reduce, so all ranks skip the same steps. In fp16 torch's
    GradScaler decides. With torch's fused optimizers the host waits for nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        self.optimizer, self.scaler = optimizer, scaler
        self.fused = all(group.get("fused") for group in optimizer.param_groups)
        # fp16 first halves its scale, 2**16, until it fits: up to 16 steps are skipped for that.
        self.limit = 26 if scaler.is_enabled() else 10
        self.skipped: Tensor | int = 0  # in a row; from the limit on it only grows

    def step(self, norm: Tensor) -> None:
        bad = ~norm.isfinite()
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.fused:
            self.optimizer.found_inf = bad.float()  # torch's fused kernels skip the step if it is 1
            self.optimizer.step()
        elif not bad:  # this waits for the device
            self.optimizer.step()
        self.skipped = (self.skipped + 1) * (bad | (self.skipped >= self.limit))


@torch.no_grad()
def clip_grad_norm(parameters: list[nn.Parameter], limit: float | None) -> Tensor:
    """Return the norm of the whole gradient; scale the gradient down to `limit` if it is above."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of all shards
    if limit is not None:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


class WeightAverage:
    """An exponential average of the parameters over the steps, which an evaluation swaps in.

    `tensors` has it by name, in float32, or float64 where the parameter is. Create it after the
    network is on its device, and sharded.
    """

    def __init__(self, net: nn.Module, decay: float, enabled: bool = True) -> None:
        self.decay, self.n_averaged = decay, 0  # steps so far
        self.parameters = dict(net.named_parameters()) if enabled else {}
        self.tensors = {
            name: value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
            for name, value in self.parameters.items()
        }

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the average towards the weights of the network; the first step copies them."""
        n = self.n_averaged
        # The weight of the new values: larger at first, so that the start is forgotten.
        share = 1 - min(self.decay, (1 + n) / (10 + n)) if n else 1.0
        for average, value in zip(self.tensors.values(), self.parameters.values()):
            average.lerp_(value.to(average.dtype), share)
        if self.tensors:
            self.n_averaged += 1

    @contextlib.contextmanager
    @torch.no_grad()
    def swapped_in(self) -> Iterator[None]:
        """Have the average in the network within this context; without an average do nothing."""
        trained = {name: value.clone() for name, value in self.parameters.items()}
        for name, value in self.parameters.items():
            value.copy_(self.tensors[name])
        yield
        for name, value in self.parameters.items():
            value.copy_(trained[name])


class Meter:
    """Exact means of per-sample values. The sums stay on the device until `mean` is called."""

    def __init__(self) -> None:
        self.sums: Counter = Counter()  # by name; "count" is the number of samples
        self.weights: Counter = Counter()  # by name: what a sum is divided by
        self.lists: dict[str, list[list]] = {}  # by name: a list of values for each batch

    @torch.no_grad()
    def add(self, **values: Tensor | tuple[Tensor, Tensor] | list) -> None:
        """Add a tensor [n] per name, or a pair [n] of sums and weights, or a list of n values.

        A list is not averaged: it is kept for the function that `mean` is given.
        """
        n = None  # of the first tensor
        for name, value in values.items():
            if isinstance(value, list):
                own = tree_map_only(Tensor, lambda tensor: tensor.cpu().clone(), value)
                self.lists.setdefault(name, []).append(own)
                continue
            value, weights = value if isinstance(value, tuple) else (value, None)
            n = value.numel() if n is None else n
            if value.shape != (n,) or getattr(weights, "shape", (n,)) != (n,):
                wanted = "one number per sample, [n]: reduction='none', or .flatten(1).mean(1)"
                raise ValueError(f"{name} must be {wanted}; got the shape {[*value.shape]}")
            self.sums[name] += value.sum(dtype=torch.float64)
            self.weights[name] += n if weights is None else weights.sum(dtype=torch.float64)
        self.sums["count"] += n

    def totals(self) -> tuple[dict[str, float], ...]:
        """Return this rank's sums and weights; a checkpoint has them for a log line half done."""
        parts = self.sums, self.weights
        return tuple({name: float(value) for name, value in part.items()} for part in parts)

    def add_totals(self, ranks: list[tuple[dict[str, float], ...]]) -> None:
        for sums, weights in ranks:
            self.sums.update(sums)  # of a Counter: it adds
            self.weights.update(weights)

    def load(self, ranks: list[tuple[dict[str, float], ...]]) -> None:
        """Load the totals of all ranks; for another number of ranks they all go to rank 0."""
        if len(ranks) == get_world_size():
            self.add_totals([ranks[get_rank()]])
        elif get_rank() == 0:
            self.add_totals(ranks)

    def mean(self, function: Callable[[dict[str, list]], dict[str, float]] | None = None) -> dict:
        """Return the mean of each name over all samples of all ranks, and their `count`.

        `function` gets the lists of all ranks, on rank 0; what it returns joins the means.
        """
        total, means = Meter(), {}
        total.add_totals(gather_objects(self.totals()))
        for name, weight in total.weights.items():
            means[name] = total.sums[name] / weight if weight else math.nan
        if function:
            ranks, lists = gather_objects(self.lists), {}
            for name in ranks[0]:  # rank r of N evaluated the batches r, r + N, r + 2 N, ...
                rounds = zip_longest(*(lists_of.get(name, []) for lists_of in ranks), fillvalue=[])
                lists[name] = [value for batches in rounds for batch in batches for value in batch]
            means |= broadcast_object(function(lists) if get_rank() == 0 else None)
        return means | {"count": int(total.sums["count"])}


# ------------------------------------------------------------------ the state of a run, its files


def whole(state: Any) -> Any:
    """Return the state with whole tensors on rank 0's CPU, and None for each on the other ranks."""

    def on_rank0(tensor: Tensor) -> Tensor | None:
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor().clone()  # a file would hold the padding behind a view
        return tensor.detach().cpu() if get_rank() == 0 else None

    return tree_map_only(Tensor, on_rank0, state)


def place_like(value: Any, like: Tensor | None) -> Any:
    """Return a tensor of `like`'s shape with its strides, cut among the ranks as it is.

    The result is a copy: the tensors of a checkpoint lie in its file.
    """
    if hasattr(value, "full_tensor"):
        return value.clone() if hasattr(like, "full_tensor") else value.full_tensor()
    if not isinstance(value, Tensor):
        return value
    if like is None or value.shape != like.shape:  # as the step of AdamW
        return value.clone()
    if not hasattr(like, "full_tensor"):
        return torch.empty_like(like, dtype=value.dtype).copy_(value)
    from torch.distributed.tensor import distribute_tensor  # slow to import

    value = value.to(like.device)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


@dataclasses.dataclass
class State:
    """What training changes. `epoch` and the `step` within it tell what comes next."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    scaler: torch.amp.GradScaler
    average: WeightAverage
    epoch: int = 0
    step: int = 0
    global_step: int = 0
    best: tuple[float, int] | None = None  # score and epoch, which counts from 1

    def __post_init__(self) -> None:
        self.guard = StepGuard(self.optimizer, self.scaler)
        self.meter = Meter()  # the sums of a log line
        self.parameters = [*self.net.parameters()]  # asked once: a walk through the modules is slow
        names = {parameter: name for name, parameter in self.net.named_parameters()}
        in_groups = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.names = [names[parameter] for parameter in in_groups]  # in the optimizer's order

    def checkpoint(self, collect: Callable[[Any], Any] = whole) -> dict[str, Any]:
        """Return plain tensors and values, with the names of the bare model, on rank 0.

        Call it on every rank. `weights` is what is evaluated: with an average, the average.
        """
        model, average = collect(dict(self.net.state_dict())), collect(self.average.tensors)
        weights, averaged = dict(model), {p: name for name, p in self.average.parameters.items()}
        for name, parameter in self.net.named_parameters(remove_duplicate=False):
            if parameter in averaged:
                weights[name] = average[averaged[parameter]]
        return {
            "format": FORMAT,
            "weights": weights,
            "model": model,
            "optimizer": collect(self.optimizer.state_dict()) | {"names": self.names},
            "scaler": self.scaler.state_dict(),
            "average": {"n_averaged": self.average.n_averaged, "tensors": average},
            "meter": gather_objects(self.meter.totals()),
            "epoch": self.epoch,
            "step": self.step,
            "best": self.best,
        }

    def restore(self, checkpoint: dict[str, Any], steps_per_epoch: int) -> None:
        """Load a checkpoint of any mode and world size. Call it on every rank."""
        own, saved = self.net.state_dict(), checkpoint["model"]
        self.net.load_state_dict({n: place_like(value, own.get(n)) for n, value in saved.items()})
        self.load_optimizer(checkpoint["optimizer"])
        if self.scaler.is_enabled() and checkpoint.get("scaler"):
            self.scaler.load_state_dict(checkpoint["scaler"])
        averages = checkpoint["average"].get("tensors", {})  # none if --average is new
        for name, tensor in self.average.tensors.items():
            value = averages.get(name, self.average.parameters[name])
            tensor.copy_(place_like(value, tensor))
        self.average.n_averaged = checkpoint["average"]["n_averaged"] if averages else 0
        self.meter.load(checkpoint["meter"])
        self.epoch, self.step, self.best = (checkpoint[name] for name in ("epoch", "step", "best"))
        self.global_step = self.epoch * steps_per_epoch + self.step  # --batch-size may be another
        self.scheduler.last_epoch = self.global_step - 1
        self.scheduler.step()  # the rate is a function of the step, and of this run's options

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        """Load an optimizer's state; its settings, as `weight_decay`, are those of this run.

        What trained before finds its state by its name, so --freeze may be another.
        """
        names, before = self.names, saved["names"]
        orders = [name for name in names if name in before], [n for n in before if n in names]
        if orders[0] != orders[1]:  # torch finds the groups by their place
            fail(f"the optimizer had the parameters in another order: {', '.join(before)}")
        now, parameters = self.optimizer.state_dict(), dict(self.net.named_parameters())
        for number, values in saved.get("state", {}).items():
            name = before[int(number)]  # torch makes texts of numbers in a folder of shards
            if name in names:
                like = parameters[name]
                own = {key: place_like(value, like) for key, value in values.items()}
                now["state"][names.index(name)] = own
        settings = {*inspect.signature(type(self.optimizer)).parameters, "params", "initial_lr"}
        for group, old in zip(now["param_groups"], saved["param_groups"]):
            group |= {key: value for key, value in old.items() if key not in settings}
        self.optimizer.load_state_dict(saved | {key: now[key] for key in ("state", "param_groups")})


def save_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a file that is always whole: after a crash, a kill or a full disk the old one stays."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())  # the data must be on the disk before a name points to it
        torch.load(temporary, weights_only=True, mmap=True)  # raises if no run could load it
        os.replace(temporary, path)  # atomic within one file system
    finally:
        temporary.unlink(missing_ok=True)


def load_file(path: str | Path, option: str, verify: bool = True) -> dict[str, Any]:
    """Read a file of torch.save to the CPU; `weights_only` runs no code of the file.

    The tensors stay in the file until they are used. `option` begins the error message.
    """
    try:
        zipped, verify = zipfile.is_zipfile(path), verify and get_rank() == 0
        if zipped and verify and (damaged := zipfile.ZipFile(path).testzip()):
            raise ValueError(f"the checksum of {damaged} is wrong")  # torch.load looks at none
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
        return dict(content)
    except Exception as error:  # a damaged file raises almost anything
        reason = f"{type(error).__name__}: {str(error).partition('. ')[0]}"
        fail(f"{option} {path}: damaged, or no file of tensors ({reason}); name another file")
