"""Runs the scripts' own `main` in real processes and returns what they left: exit code, output, log, checkpoint, gradients.

Importing torch takes seconds, so every rank is a fork of one server that has imported it. What differs from a launch by hand: the
ranks meet at a file, not at a port, and every rank has one thread. Real launches are in test_launch.py and test_signals.py.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launches import MEASURED, ROOT, TASKS  # noqa: F401 (the tests take TASKS from here)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim.optimizer import register_optimizer_step_pre_hook

import common
import sampling
from engine.check import check_run
from engine.options import parse_args, schedule_options
from engine.task_file import Task

TIMEOUT = 120  # seconds that any group of processes may take
MODES = ("single", "dp", "ddp", "spawn", "fsdp")
CPU = torch.device("cpu")

# fork: of a process that has torch
context = multiprocessing.get_context("fork" if "TESTS_FORK" in os.environ else "forkserver")
# Starting a process reads the exit codes of all others, and an exit code can be read only once.
one_thread = threading.Lock()
SLOW = ["torch._dynamo"]  # which any optimizer imports
SLOW += ["torch.distributed.fsdp", "torch.distributed.checkpoint"]
multiprocessing.set_forkserver_preload([*SLOW, *(f"train_{mode}" for mode in MODES)])


# ---------------------------------------------------------------------------------------- processes


def run_processes(
    targets: list[Callable[[], int | None]], folder: Path, timeout: float = TIMEOUT
) -> list[tuple[int, str, str]]:
    """Run each picklable function in a process of its own; return (exit code, stdout, stderr) of each. Nothing outlives the call."""
    files = [(folder / f"out{i}", folder / f"err{i}") for i in range(len(targets))]
    processes = [
        context.Process(target=_child, args=(target, *pair)) for target, pair in zip(targets, files)
    ]
    try:
        with one_thread:
            for process in processes:
                process.start()
        deadline = time.monotonic() + timeout
        for process in processes:
            wait([process.sentinel], max(0, deadline - time.monotonic()))
            with one_thread:
                code = process.exitcode
            if code not in (0, None):
                # The others may wait for this one: they get a moment, not the whole time-out.
                deadline = min(deadline, time.monotonic() + 20)
    finally:
        for process in processes:
            with one_thread:
                if process.is_alive():
                    process.kill()
                process.join()
    return [
        (p.exitcode, out.read_text(), err.read_text()) for p, (out, err) in zip(processes, files)
    ]


def _child(target: Callable[[], int | None], out: Path, err: Path) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115 (a fork has those of pytest)
    torch.set_num_threads(1)
    # PR_SET_PDEATHSIG: end with the test process, even if that is killed
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    code: Any = 1
    try:
        code = target() or 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def group_member(rank: int, world_size: int, meeting_point: str, function: Callable) -> int | None:
    """Run `function()` as one rank of a gloo group."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    ranks = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=100)}
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", **ranks)
    dist.barrier()  # or a rank that is done at once would leave while another still connects to it
    code = function()
    dist.destroy_process_group()
    return code


def in_group(world_size: int, function: Callable[[], None]) -> list[str]:
    """Run a picklable function on every rank of a gloo group; return what each printed. A rank that raises fails the test."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        meeting_point = str(folder / "meet")
        members = [
            functools.partial(group_member, rank, world_size, meeting_point, function)
            for rank in range(world_size)
        ]
        results = run_processes(members, folder)
    for code, out, err in results:
        assert code == 0, f"a rank ended with {code}:\n{out}\n{err}"
    return [out for _, out, _ in results]


# --------------------------------------------------------------------------------------------- runs


@dataclass
class Result:
    """What a run left behind. `gradients` holds, per rank, the gradients of each optimizer step that was recorded."""

    code: int
    out: str
    err: str
    folder: Path
    gradients: list[list[dict[str, torch.Tensor]]] = field(default_factory=list)

    @property
    def lines(self) -> list[dict]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def train_lines(self) -> list[dict]:
        return [line for line in self.lines if line["event"] == "train"]

    def eval_lines(self) -> list[dict]:
        return [line for line in self.lines if line["event"] == "eval"]

    def checkpoint(self, name: str = "last.pt") -> dict:
        return load_whole(self.folder / name)


def load_whole(path: Path) -> dict[str, Any]:
    """Return what is in a checkpoint: a file, or a folder of shards."""
    if path.is_file():
        return torch.load(path, weights_only=True)
    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(path, Path(folder, "whole.pt"))
        found = torch.load(Path(folder, "whole.pt"), weights_only=True)
    state = found["optimizer"].get("state", {})  # torch has made texts of its numbers
    found["optimizer"]["state"] = {int(number): value for number, value in state.items()}
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, of all shards. Call it on every rank."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def record_gradients(path: Path, steps: int) -> None:
    recorded: list[dict[str, torch.Tensor]] = []

    def record(optimizer: torch.optim.Optimizer, arguments: tuple, options: dict) -> None:
        if len(recorded) < steps:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            recorded.append(
                {str(i): whole(p.grad) for i, p in enumerate(parameters) if p.grad is not None}
            )
            torch.save(recorded, path)

    register_optimizer_step_pre_hook(record)


def rank_of_run(
    mode: str,
    rank: int,
    world_size: int,
    argv: list[str],
    meeting_point: str,
    record: Path,
    steps: int,
    patch: Callable | None,
) -> int | None:
    """Be one process of a run: call the script's own `main`."""
    sys.argv[0] = f"train_{mode}.py"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    record_gradients(record, steps)
    script = importlib.import_module(f"train_{mode}")
    script.check_run = lambda *_: None  # patches.checked has it
    if mode not in ("single", "dp"):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
        ranks |= {"LOCAL_WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in ranks.items()})
    if patch:
        patch(rank)
    if mode == "spawn":
        machines = 2 if world_size == 4 else 1
        here = world_size // machines
        place = f"--nproc {here} --nnodes {machines} --node-rank {rank // here} --dist-url none"
        args = parse_args("spawn", [*place.split(), *argv])
        return script.worker(rank % here, args, f"file://{meeting_point}")
    options = {"init_method": f"file://{meeting_point}", "rank": rank, "world_size": world_size}
    dist.init_process_group = functools.partial(dist.init_process_group, **options)
    return script.main(argv)


def train(
    mode: str,
    n: int,
    *argv: Any,
    folder: Path,
    steps: int = 1,
    patch: Callable | None = None,
    timeout: float = TIMEOUT,
) -> Result:
    """Train with a script in `mode` on `n` devices; record the gradients of the first `steps` optimizer steps.

    `patch(rank)`, picklable, is called in each process after the imports, to break or watch something.
    """
    words = [str(argument) for argument in argv]
    if "--output-dir" not in words:
        words += ["--output-dir", str(folder / "run")]
    output = Path(words[words.index("--output-dir") + 1])
    if mode == "dp":
        words += ["--replicas", str(n)]
    ranks = range(n if mode in ("ddp", "spawn", "fsdp") else 1)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        records = [scratch / f"gradients{rank}" for rank in ranks]
        group = len(ranks), words, str(scratch / "meet")
        targets = [
            functools.partial(rank_of_run, mode, r, *group, records[r], steps, patch) for r in ranks
        ]
        results = run_processes(targets, scratch, timeout)
        gradients = [torch.load(path, map_location="cpu") for path in records if path.exists()]
    failed = [code for code, _, _ in results if code]
    told = [code for code in failed if code != 1]  # a rank that says 1 may have lost another one
    code = told[0] if told else int(bool(failed))
    out, err = ("".join(result[i] for result in results) for i in (1, 2))
    return Result(code, out, err, output, gradients)


def once(key: str, make: Callable[[Path], Any]) -> Path:
    """Return a folder that `make(folder)` has filled, once for all test processes."""
    folder = Path(tempfile.gettempdir(), "once", hashlib.sha256(key.encode()).hexdigest()[:16])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".made").exists():
            make(folder)
            (folder / ".made").touch()
    return folder


def undisturbed(
    mode: str, n: int, *argv: Any, steps: int = 1, patch: Callable | None = None
) -> Result:
    """The run of a command line, made once for all tests: what others are compared with."""

    def make(folder: Path) -> None:
        result = train(mode, n, *argv, folder=folder, steps=steps, patch=patch)
        assert result.code == 0, result.err
        (folder / "result.pickle").write_bytes(pickle.dumps(result))

    folder = once(repr((mode, n, *argv, steps, patch)), make)
    return pickle.loads((folder / "result.pickle").read_bytes())


def single_run(*argv: Any, steps: int = 1) -> Result:
    return undisturbed("single", 1, *argv, steps=steps)


# -------------------------------------------------------------------------------------- comparisons


def deviation(value: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Largest difference of any element over the largest element of the whole reference.

    Not tensor by tensor: a bias before a normalisation has zero gradient, and 1e-17 / 1e-17 says nothing.
    """
    assert value.keys() == reference.keys() and reference
    exact = {
        name
        for name, kept in reference.items()
        if not isinstance(kept, torch.Tensor) or not kept.is_floating_point()
    }
    found = differences(*({n: part[n] for n in exact} for part in (value, reference)), "exact")
    assert not found, found
    names = [name for name in reference if name not in exact]
    scale = max(reference[name].abs().max().item() for name in names)
    assert scale > 1e-6, "the reference is trivially zero"
    worst = [(value[name].double() - reference[name].double()).abs().max() for name in names]
    return torch.stack(worst).max().item() / scale  # a NaN stays one


def prove(what: str, found: float, allowed: float) -> None:
    assert found <= allowed, f"{what}: {found} > {allowed}"  # a NaN is above


def compare(result: Result, reference: Result) -> dict[str, float]:
    """Return the deviations of gradients, parameters, losses, norms and evaluation, after checks that the comparison means something."""
    assert result.code == 0, result.err
    before, after = reference.train_lines()[0]["loss"], reference.train_lines()[-1]["loss"]
    assert after < 0.9 * before, f"the reference does not learn: {before} to {after}"
    traces = [
        [(line["global_step"], line["epoch"], line["step"]) for line in r.train_lines()]
        for r in (result, reference)
    ]
    assert traces[0] == traces[1], "steps differ"
    evaluations = list(zip(result.eval_lines(), reference.eval_lines()))
    assert len(result.eval_lines()) == len(reference.eval_lines())
    names = [n for n in reference.eval_lines()[0] if n not in ("event", "epoch", "global_step")]
    steps = list(zip(result.train_lines(), reference.train_lines()))

    def worst(pairs: list[tuple[float, float]]) -> float:
        return max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)

    assert result.gradients and all(result.gradients), "no gradient was recorded"
    return {
        "gradients": max(
            deviation(rank[i], reference.gradients[0][i])
            for rank in result.gradients
            for i in range(len(rank))
        ),
        "parameters": max(
            deviation(result.checkpoint()[part], reference.checkpoint()[part])
            for part in ("model", "weights")
        ),
        "loss of steps": worst([(a["loss"], b["loss"]) for a, b in steps]),
        "learning rates": worst([(a["lr"], b["lr"]) for a, b in steps]),
        "grad_norm of steps": worst([(a["grad_norm"], b["grad_norm"]) for a, b in steps]),
        "evaluation": worst([(a[name], b[name]) for a, b in evaluations for name in names]),
    }


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


def walk(value):
    """The value and all that it holds."""
    yield value
    children = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple)):
        for child in children:
            yield from walk(child)


# ---------------------------------------- what the scripts do with their options, in the test's process


def make_args(mode: str = "single", *argv: str) -> Namespace:
    return parse_args(mode, list(argv))


def make_sampler(
    length: int,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    accum_steps: int = 1,
    seed: int = 0,
):
    """A GlobalBatchSampler over so many samples, by default with seed 0."""
    options = batch_size, seed, accum_steps, rank, world_size
    return sampling.GlobalBatchSampler(range(length), *options)


def order_of(length: int, seed: int, epoch: int) -> list[int]:
    """The order in which every mode trains on so many samples in this epoch."""
    return sampling.epoch_order(length, seed, epoch).tolist()


def fetched(dataset, epoch, indices, seed=0):
    """Samples of an epoch, as a loader worker fetches them."""
    return sampling.KeyedDataset(dataset, seed).__getitems__((epoch, indices))[0]


def samples_of_epoch(dataset, batch_size, epoch, workers=0, world_size=1, step=0):
    """Return {index: input}: what an epoch trains on, as so many workers of so many ranks load it."""
    samples = {}
    for rank in range(world_size):
        sampler = sampling.GlobalBatchSampler(dataset, batch_size, 0, 1, rank, world_size)
        sampler.set_position(epoch, step)
        loader = sampling.build_loader(dataset, sampler, CPU, 0, workers)
        for (_, (indices,)), ((inputs, _),) in zip(list(sampler), loader):
            samples |= dict(zip(indices, inputs))
    return samples


def loaders_of(args: Namespace, train_set: Any, val_set: Any, collate: Callable | None = None):
    """The loaders of one device."""
    order = {"batch_size": args.batch_size, "seed": args.seed, "accum_steps": args.accum_steps}
    samplers = (
        sampling.GlobalBatchSampler(train_set, **order),
        sampling.ShardSampler(len(val_set), args.eval_batch_size),
    )
    return [
        sampling.build_loader(dataset, sampler, CPU, args.seed, args.workers, collate)
        for dataset, sampler in zip((train_set, val_set), samplers)
    ]


def optimizer_of(args: Namespace, net: torch.nn.Module):
    settings = args.lr, args.momentum, args.weight_decay
    return common.build_optimizer(net, args.optimizer, *settings)


def state_of(args: Namespace, net: torch.nn.Module, steps_per_epoch: int = 6) -> common.State:
    """The state of a run of one device that begins."""
    optimizer = optimizer_of(args, net)
    scheduler = common.build_scheduler(optimizer, steps_per_epoch, **schedule_options(args))
    scaler = torch.amp.GradScaler("cpu", enabled=args.amp == "fp16")
    average = common.WeightAverage(net, args.ema_decay, enabled=args.average == "ema")
    return common.State(net, optimizer, scheduler, scaler, average)


def check(mode: str, n: int, *argv: Any) -> tuple[int, str]:
    """Do what a script does before its run, on `n` devices; return the exit code and stderr."""
    words = [str(word) for word in argv]
    with tempfile.TemporaryDirectory() as folder:
        target = functools.partial(build_and_check, mode, n, words)
        ((code, _, err),) = run_processes([target], Path(folder))
    return code, err


def build_and_check(mode: str, n: int, argv: list[str]) -> None:
    sys.argv[0] = f"train_{mode}.py"
    option = {"dp": ["--replicas", str(n)], "spawn": ["--nproc", str(n)]}.get(mode, [])
    args = parse_args(mode, [*option, *argv], n)
    task = Task(args)
    loaders = loaders_of(args, *task.build_datasets(), task.collate)
    net = task.build_net()
    check_run(task, net, CPU, *loaders)
    task.build_optimizer(net)
