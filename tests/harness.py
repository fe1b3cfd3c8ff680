"""Runs the scripts' own `main` in real processes and returns what they left: exit code, output, log, checkpoint, gradients.

Importing torch takes seconds, so that every rank is a fork of one server that has imported it. What differs from a launch by hand: the
rendezvous is a file or a port that the system chose, and every rank has one thread. Real launches are in test_launch.py.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launches import MEASURED, ROOT, TASKS, without_gloo  # noqa: F401 (the tests take the first two from here)
from torch.optim.optimizer import register_optimizer_step_pre_hook

import common
import machinery.check
import machinery.cli
import machinery.launch
import machinery.process
import machinery.usertask
import sampling

TIMEOUT = 120  # seconds that any group of processes may take

# fork: of a process that has torch
context = multiprocessing.get_context("fork" if "TESTS_FORK" in os.environ else "forkserver")
# Starting a process reads the exit codes of all others, and an exit code can be read only once.
one_thread = threading.Lock()
SLOW = ["torch._dynamo"]  # which any optimizer imports
SLOW += ["torchvision.datasets", "torchvision.models", "torchvision.transforms.v2"]
multiprocessing.set_forkserver_preload([*SLOW, "train_ddp"])


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
        """The evaluation lines, without the times."""
        lines = [line for line in self.lines if line["event"] == "eval"]
        return [{k: v for k, v in line.items() if k not in MEASURED} for line in lines]

    def checkpoint(self, name: str = "last.pt") -> dict:
        return torch.load(self.folder / name, weights_only=True)


def run_processes(
    targets: list[Callable[[], int | None]], folder: Path, timeout: float = TIMEOUT
) -> list[tuple[int, str, str]]:
    """Run each picklable function in a process of its own; return (exit code, stdout, stderr) of each. Nothing outlives the call."""
    processes = []
    for i, target in enumerate(targets):
        processes.append(
            context.Process(target=_child, args=(target, folder / f"out{i}", folder / f"err{i}"))
        )
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
    outs = [without_gloo((folder / f"out{i}").read_text()) for i in range(len(processes))]
    return [
        (p.exitcode, out, (folder / f"err{i}").read_text())
        for i, (p, out) in enumerate(zip(processes, outs))
    ]


def _child(target: Callable[[], int | None], out: Path, err: Path) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115 (a fork has those of pytest)
    torch.set_num_threads(1)
    # PR_SET_PDEATHSIG: end with the test process, even if that is killed
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    code = 1
    try:
        code = target() or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def group_member(rank: int, world_size: int, meeting_point: str, function: Callable) -> int | None:
    """Run `function()` as one rank of a gloo group."""
    from datetime import timedelta

    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting_point}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=100),
    )
    dist.barrier()  # or a rank that is done at once would leave while another still connects to it
    code = function()
    dist.destroy_process_group()
    return code


def in_group(world_size: int, function: Callable[[], None]) -> list[str]:
    """Run a picklable function on every rank of a gloo group; return what each printed. A rank that raises fails the test."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        members = [
            functools.partial(group_member, rank, world_size, str(folder / "meet"), function)
            for rank in range(world_size)
        ]
        results = run_processes(members, folder)
    for code, out, err in results:
        assert code == 0, f"a rank ended with {code}:\n{out}\n{err}"
    return [out for _, out, _ in results]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, of all shards. Call it on every rank."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def _record_gradients(path: Path, steps: int) -> None:
    recorded: list[dict[str, torch.Tensor]] = []

    def record(optimizer: torch.optim.Optimizer, arguments: tuple, options: dict) -> None:
        if len(recorded) < steps:
            parameters = [
                parameter for group in optimizer.param_groups for parameter in group["params"]
            ]
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
    patch: Callable,
) -> int:
    """Be one process of a run: call the script's own `main`."""
    ranks = {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    ranks |= {name: str(world_size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    ranks |= {"LAUNCH_RENDEZVOUS_FILE": meeting_point, "LAUNCH_PID": str(os.getppid())}
    if mode not in ("single", "dp"):
        os.environ.update(ranks)
    _record_gradients(record, steps)
    script = importlib.import_module(f"train_{mode}")
    script.check_run = lambda *_: None  # tests/test_bad_input.py tests it
    if patch:
        patch(rank)
    main = functools.partial(script.main, argv)
    if mode == "spawn":
        args = machinery.cli.parse_args("spawn", ["--nproc", str(world_size), *argv])
        os.environ.update(ranks)  # as run_worker does
        main = functools.partial(script.worker, rank, args, f"file://{meeting_point}")
    return machinery.process.run_main(main)


def train(
    mode: str,
    n: int,
    *argv: str,
    folder: Path,
    steps: int = 1,
    patch: Callable | None = None,
    timeout: float = TIMEOUT,
) -> Result:
    """Train with a script in `mode` on `n` devices; record the gradients of the first `steps` optimizer steps.

    `patch(rank)`, picklable, is called in each process after the imports, to break or watch something.
    """
    argv = [str(argument) for argument in argv]
    if "--output-dir" not in argv:
        argv += ["--output-dir", str(folder / "run")]
    output = Path(argv[argv.index("--output-dir") + 1])
    if mode == "dp":
        argv += ["--replicas", str(n)]
    processes = n if mode in ("ddp", "spawn", "fsdp") else 1
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        meeting_point = str(scratch / "meet")
        records = [scratch / f"gradients{rank}" for rank in range(processes)]
        ranks = range(processes)
        targets = [
            functools.partial(
                rank_of_run, mode, r, processes, argv, meeting_point, records[r], steps, patch
            )
            for r in ranks
        ]
        results = run_processes(targets, scratch, timeout)
        gradients = [torch.load(path, map_location="cpu") for path in records if path.exists()]
    codes = [code for code, _, _ in results]
    failed = [code for code in codes if code]
    told = [code for code in failed if code != machinery.process.FAILED]
    code = told[0] if told else int(bool(failed))  # as machinery/launch.py
    return Result(
        code,
        "".join(out for _, out, _ in results),
        "".join(err for _, _, err in results),
        output,
        gradients,
    )


@functools.cache
def undisturbed(mode: str, n: int, *argv: str, steps: int = 1) -> Result:
    """The run of a command line, made once in a test process: what others are compared with."""
    result = train(mode, n, *argv, folder=Path(tempfile.mkdtemp(prefix="reference-")), steps=steps)
    assert result.code == 0, result.err
    return result


def single_run(*argv: str, steps: int = 1) -> Result:
    return undisturbed("single", 1, *argv, steps=steps)


def deviation(value: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Largest difference of any element over the largest element of the whole reference.

    Not tensor by tensor: a bias before a normalisation has zero gradient, and 1e-17 / 1e-17 says nothing.
    """
    assert value.keys() == reference.keys() and reference
    others = {name for name, kept in reference.items() if not isinstance(kept, torch.Tensor)}
    assert all(value[name] == reference[name] for name in others), "what is no tensor differs"
    reference = {name: tensor for name, tensor in reference.items() if name not in others}
    counters = [name for name, tensor in reference.items() if not tensor.is_floating_point()]
    assert all(value[name].equal(reference[name]) for name in counters), (
        f"one of {', '.join(counters)} differs"
    )
    names = [name for name in reference if name not in counters]
    scale = max(reference[name].abs().max().item() for name in names)
    assert scale > 1e-6, "the reference is trivially zero"
    worst = torch.stack(
        [(value[name].double() - reference[name].double()).abs().max() for name in names]
    ).max()  # a NaN stays one
    return worst.item() / scale


proved: list[tuple[str, str, float, float]] = []  # by the test under way; conftest.py makes a table


def prove(what: str, with_what: str, deviation: float, allowed: float) -> None:
    """Assert that `what`, compared with `with_what`, deviates by no more than `allowed`, and note it for the table of proofs."""
    proved.append((what, with_what, float(deviation), float(allowed)))
    assert deviation <= allowed, f"{what}, compared with {with_what}: {deviation} > {allowed}"


def prove_run(
    result: Result, reference: Result, gradients: float = 1e-12, rest: float = 1e-10
) -> None:
    """Prove that a run in any mode is the reference, on one device."""
    for name, found in compare(result, reference).items():
        allowed = gradients if name == "gradients" else rest
        prove(f"{name} {MOMENT[name]}, any mode", "one device", found, allowed)


MOMENT = {
    "gradients": "of the first step",
    "parameters": "after several epochs",
    "loss of steps": "in all lines",
    "grad_norm of steps": "in all lines",
    "evaluation": "of all epochs",
}


def compare(result: Result, reference: Result) -> dict[str, float]:
    """Return the deviations of gradients, parameters, losses, norms and evaluation, after checks that the comparison means something."""
    assert result.code == 0, result.err
    before, after = reference.train_lines()[0]["loss"], reference.train_lines()[-1]["loss"]
    assert after < 0.9 * before, f"the reference does not learn: {before} to {after}"
    names = [
        name for name in reference.eval_lines()[0] if name not in ("event", "epoch", "global_step")
    ]
    ours, theirs = (
        [{name: line[name] for name in names} for line in r.eval_lines()]
        for r in (result, reference)
    )
    traces = [
        [(line["global_step"], line["epoch"], line["step"], line["lr"]) for line in r.train_lines()]
        for r in (result, reference)
    ]
    assert traces[0] == traces[1], "steps or learning rates differ"
    assert len(ours) == len(theirs)

    lines = list(zip(result.train_lines(), reference.train_lines()))

    def worst(pairs: list[tuple[float, float]]) -> float:
        return max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)

    return {
        "gradients": max(
            [
                deviation(steps[i], reference.gradients[0][i])
                for steps in result.gradients
                for i in range(len(steps))
            ],
            default=0.0,
        ),
        "parameters": max(
            deviation(result.checkpoint()[part], reference.checkpoint()[part])
            for part in ("model", "weights")
        ),
        **{
            f"{name} of steps": worst([(a[name], b[name]) for a, b in lines])
            for name in ("loss", "grad_norm")
        },
        "evaluation": worst([(a[name], b[name]) for a, b in zip(ours, theirs) for name in names]),
    }


def make_sampler(
    length: int,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    accum_steps: int = 1,
    seed: int = 0,
):
    """A GlobalBatchSampler over so many samples, by default with seed 0."""
    return sampling.GlobalBatchSampler(
        range(length), batch_size, seed, accum_steps, rank=rank, world_size=world_size
    )


def order_of(length: int, seed: int, epoch: int) -> list[int]:
    """The order in which every mode trains on so many samples in this epoch."""
    sampler = make_sampler(length, length, seed=seed)
    sampler.set_position(epoch, 0)
    _, (order,) = next(iter(sampler))
    return order


# What the scripts do with their options, for tests that have options too.


def sampler_of(args: Namespace, dataset: Any, rank: int = 0, world_size: int = 1):
    options = args.batch_size, args.seed, args.accum_steps, args.balanced
    return sampling.GlobalBatchSampler(dataset, *options, rank, world_size, args.shuffle_window)


def keyed(dataset: Any, args: Namespace):
    return sampling.KeyedDataset(dataset, args.seed, args.skip_corrupt)


def loader_of(args: Namespace, dataset: Any, sampler: Any, device: torch.device):
    return sampling.build_loader(
        dataset, sampler, device, args.seed, args.workers, args.skip_corrupt
    )


def optimizer_of(args: Namespace, net: torch.nn.Module, world_size: int = 1):
    settings = args.lr, args.momentum, args.weight_decay, args.nesterov
    optimizer = common.build_optimizer(net, args.optimizer, *settings)
    common.scale_lr(optimizer, args.scale_lr, world_size)
    return optimizer


def factor_of(args: Namespace, step: int, steps_per_epoch: int) -> float:
    return common.lr_factor(step, steps_per_epoch, **machinery.cli.schedule_options(args))


def scheduler_of(args: Namespace, optimizer: torch.optim.Optimizer, steps_per_epoch: int):
    return common.build_scheduler(
        optimizer, steps_per_epoch, **machinery.cli.schedule_options(args)
    )


def guard_of(args: Namespace, device: torch.device, net: torch.nn.Module):
    return common.StepGuard(args.amp, device, net)


def average_of(args: Namespace, net: torch.nn.Module):
    return common.WeightAverage(net, args.ema_decay, enabled=args.average == "ema")


def check(mode: str, n: int, *argv: str) -> None:
    """Check a command line as `run.sh MODE N` would hand it on. Raises what the check raises."""
    for name in SLOW:
        importlib.import_module(name)  # once, and not in each fork that a check makes
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        pool.submit(build_and_check, mode, n, argv).result()


def build_and_check(mode: str, n: int, argv: tuple[str, ...]) -> None:
    """Do what `main` does before a run, in a process of its own."""
    option = {"dp": ["--replicas", str(n)], "spawn": ["--nproc", str(n)]}.get(mode, [])
    args = machinery.cli.parse_args(mode, [*option, *argv], n)
    if mode == "spawn":
        with machinery.launch.workers_meet_at(args):
            pass
        for name in ("LAUNCH_PID", "LOCAL_RANK"):
            os.environ.pop(name, None)
    check_built(args)


def check_built(args: Namespace) -> None:
    task = machinery.usertask.Task(args)
    train_set, val_set = task.build_datasets()
    train_sampler = sampler_of(args, train_set)
    val_sampler = sampling.ShardSampler(len(val_set), args.eval_batch_size)
    device = torch.device("cpu")
    loading = device, args.seed, args.workers, args.skip_corrupt, task.collate
    train_loader = sampling.build_loader(train_set, train_sampler, *loading)
    val_loader = sampling.build_loader(val_set, val_sampler, *loading)
    net = task.build_net()
    machinery.check.check_run(task, net, device, train_loader, val_loader)
    task.build_optimizer(net)


def make_args(mode: str = "single", *argv: str) -> Namespace:
    return machinery.cli.parse_args(mode, list(argv))


def walk(value):
    """The value and all that it holds."""
    yield value
    children = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple)):
        for child in children:
            yield from walk(child)


def fetched(dataset, epoch, indices, seed=0):
    """Samples of an epoch, as a loader worker fetches them."""
    args = Namespace(seed=seed, skip_corrupt=False)
    return keyed(dataset, args).__getitems__((epoch, indices))[0]


def samples_of_epoch(dataset, batch_size, epoch, workers=0, world_size=1, step=0):
    """Return {index: input}: what an epoch trains on, as so many workers of so many ranks load it."""
    samples, args = {}, make_args("single", "--workers", str(workers))
    for rank in range(world_size):
        sampler = make_sampler(len(dataset), batch_size, rank, world_size)
        sampler.set_position(epoch, step)
        loader = loader_of(args, dataset, sampler, torch.device("cpu"))
        for (_, (indices,)), ((inputs, _),) in zip(list(sampler), loader):
            samples |= dict(zip(indices, inputs))
    return samples
