"""Measure how near each script's own loop comes to a bare loop on this machine.

bash run.sh bench [--workloads NAME...] [--modes NAME...] [--json FILE.json]

Processes run the scripts' own `main`: loader, checks, log and all. Every few steps they pause it
and run a bare loop instead: the same network, optimizer and wrapper, on one batch that lies on
the device already. The two take turns within seconds, so that what else the machine does meets
both alike: the ratio can be trusted further than the speeds. The workload `tiny` has as many
tensors as a ResNet-18 and next to no arithmetic: its difference is the overhead of a step.
"""

import argparse
import copy
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[:1] = [str(ROOT), str(ROOT / "tools")]

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from common import autocast, build_optimizer
from engine.launch import share_cores
from engine.modes import WithLoss, data_parallel, shard
from engine.run import Run
from engine.task_file import Task

SETTLE = 2  # steps at the start of each window that are not timed
MODES = ["single", "dp", "ddp", "fsdp"]
IN_MEMORY = "--task {folder}/in_memory.py --dataset cifar10 --label-smoothing 0 --batch-size 128"
WORKLOADS = {
    "digitnet": "--batch-size 64",
    "tiny": "--task {folder}/tiny.py --batch-size 8",
    "resnet9": f"{IN_MEMORY} --model resnet9",
    "resnet18": f"{IN_MEMORY} --model resnet18",
}
# Tasks. Noise, held in memory and augmented as CIFAR-10 is; and a network that takes the host alone.
TASKS = {
    "in_memory.py": """from tasks.images import *
def build_datasets(args):
    images = torch.randint(0, 256, (1_000, 3, 32, 32), dtype=torch.uint8).repeat(50, 1, 1, 1)
    labels = torch.arange(50_000) % 10
    train_set = ImagesInMemory(images, labels, shift=4, flip=True)
    return train_set, ImagesInMemory(images[:128], labels[:128])
""",
    "tiny.py": """import torch
from torch import nn
from task import per_sample_loss
def build_datasets(args):
    x = torch.randn(8192, 16)
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    data.in_memory = True
    return data, torch.utils.data.Subset(data, range(64))
def build_model(args):
    layers = [(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(20)]
    return nn.Sequential(*sum(layers, ()), nn.Linear(16, 2))
def per_sample_metrics(outputs, targets):
    return {"top1": (outputs.argmax(1) == targets).float()}
""",
}

# --------------------------------------------------------------------------------- in each process


def worker(rank: int, args: Namespace, mode: str, argv: list[str], folder: Path) -> None:
    """Be one process of a run: call the script's `main`, with `take_turns` for `Run.batches`."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    sys.path.insert(0, str(ROOT))
    script, batches = importlib.import_module(f"train_{mode}"), Run.batches

    def endless(run: Run, loader: Any) -> Iterator[Any]:  # evaluation and saving are not measured
        while True:
            yield from batches(run, loader)
            run.state.epoch, run.state.step = run.state.epoch + 1, 0

    Run.batches = lambda run, loader: take_turns(
        args, mode, run, endless(run, loader), folder / f"rank{rank}"
    )
    with open(folder / f"log{rank}", "w") as sys.stdout:
        sys.exit(script.main([*argv, "--output-dir", str(folder / "run")]))


def take_turns(
    args: Namespace, mode: str, run: Run, batches: Iterator[Any], result: Path
) -> Iterator[Any]:
    """Yield batches to the script; time its steps and those of the bare loop in turns.

    Write what was found, and end the process.
    """
    synchronize = torch.accelerator.synchronize if run.device.type != "cpu" else lambda: None

    def window(step: Callable[[], Any] | None = None) -> Generator[Any, None, float]:
        """Return the seconds of a step; of the script's if there is no `step`."""
        for i in range(SETTLE + args.steps):
            if i == SETTLE:
                synchronize()
                start = time.perf_counter()
            if step:
                step()
            else:
                yield next(batches)  # comes back when the script wants the next one
        synchronize()
        return (time.perf_counter() - start) / args.steps

    yield from window()
    seconds: dict[str, list[float]] = {"bare": [], "script": []}
    batch = [torch.cat(parts) for parts in zip(*next(batches))]
    bare = bare_step(mode, run, *batch)
    for turn in range(1 + args.repeats):  # the first one warms up
        for name, step, order in (("bare", bare, signal.SIGSTOP), ("script", None, signal.SIGCONT)):
            # A loader that loads ahead would slow the bare loop, and give the script a start.
            for loader in mp.active_children():
                os.kill(loader.pid, order)
            found = yield from window(step)
            seconds[name] += [found] * (turn > 0)
    result.write_text(json.dumps({"batch_size": run.args.batch_size, "seconds": seconds}))
    os._exit(0)


def bare_step(mode: str, run: Run, inputs: Any, targets: Any) -> Callable[[], None]:
    """Return one step of a loop that cannot be shorter, on a copy of the network."""
    args, task = run.args, Task(run.args)
    if mode == "fsdp":  # a sharded network cannot be copied
        net = task.build_net()
        shard(net, run.device, task.shard_modules)
    else:
        net = copy.deepcopy(run.state.net)
    optimizer = build_optimizer(net, args.optimizer, args.lr, args.momentum, args.weight_decay)
    factor = (dist.get_world_size() if dist.is_initialized() else 1) / args.batch_size
    model = net
    if mode == "ddp":
        model = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    if mode == "dp":
        model = data_parallel(WithLoss(net, task, run.device, args.amp), run.devices, run.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast(run.device, args.amp):
            if mode == "dp":
                losses = model(inputs, targets)["loss"]
            else:
                losses = task.per_sample_loss(model(inputs), targets)
        (losses.sum() * factor).backward()
        optimizer.step()

    return step


# ---------------------------------------------------------------------------------------- measuring


def measure(args: Namespace, workload: str, mode: str, folder: Path) -> dict[str, Any]:
    """Return one row of the table: milliseconds of a step, and samples/s of all devices together."""
    devices = 1 if mode == "single" else args.nproc
    processes = devices if mode in ("ddp", "fsdp") else 1
    options = f"{WORKLOADS[workload]} --epochs 1000000 --device {args.device} --amp {args.amp}"
    options = options.format(folder=folder).split() + ["--channels-last"] * args.channels_last
    options += ["--batch-size", str(args.batch_size)] if args.batch_size else []
    options += ["--replicas", str(devices)] if mode == "dp" else []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
    if not args.threads:
        os.environ.pop("OMP_NUM_THREADS", None)
    share_cores(processes)
    folder = folder / f"{workload}-{mode}"
    folder.mkdir()
    mp.spawn(worker, (args, mode, options, folder), processes)  # raises if a process fails
    found = json.loads((folder / "rank0").read_text())
    bare, script = (found["seconds"][name] for name in ("bare", "script"))
    ratios = [one / other for one, other in zip(bare, script)]
    row = {"workload": workload, "mode": mode, "devices": devices, "seconds": found["seconds"]}
    row |= {"bare_ms": 1e3 * median(bare), "script_ms": 1e3 * median(script)}
    row |= {"ratio": median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
    return row | {"samples_per_s": found["batch_size"] / median(script)}


def report(rows: list[dict[str, Any]]) -> str:
    """Return the measurements as markdown."""
    head = "workload | mode | bare, ms a step | script, ms a step | bare / script | samples/s"
    lines = [f"| {head} |", "|---" * 6 + "|"]
    for row in rows:
        texts = [row["workload"], f"{row['mode']} {row['devices']}"]
        texts += [f"{row['bare_ms']:.3g}", f"{row['script_ms']:.3g}"]
        texts += ["**{ratio:.3f}** ({ratio_min:.3f} to {ratio_max:.3f})".format(**row)]
        lines.append(f"| {' | '.join([*texts, str(round(row['samples_per_s']))])} |")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(prog="bench.py", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--workloads", nargs="+", choices=WORKLOADS, default=[*WORKLOADS], help="networks")
    add("--modes", nargs="+", choices=MODES, default=MODES, help="scripts to measure")
    add("--nproc", type=int, help="devices of dp, ddp and fsdp (all accelerators, or 2 on a CPU)")
    found = torch.accelerator.current_accelerator(check_available=True)
    add(
        "--device",
        default=found.type if found else "cpu",
        help="cpu, or the accelerator (%(default)s)",
    )
    add("--batch-size", type=int, help="instead of the workload's own")
    add("--amp", choices=["off", "bf16"], default="off", help="of the script and the bare loop")
    add("--channels-last", action="store_true", help="of the script and the bare loop")
    add("--steps", type=int, default=20, help="timed steps in a turn (%(default)s)")
    add("--repeats", type=int, default=5, help="turns, after one that warms up (%(default)s)")
    add("--json", type=Path, metavar="FILE.json", help="write all figures")
    args = parser.parse_args(argv)
    cpu = args.device == "cpu"
    args.nproc = args.nproc or (2 if cpu else torch.accelerator.device_count())
    args.threads = os.environ.get("OMP_NUM_THREADS")
    return args


def main(argv: list[str] | None = None) -> int:
    args, rows = parse(argv), []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        for file, text in TASKS.items():
            Path(name, file).write_text(text)
        for workload in args.workloads:
            for mode in args.modes:
                print(f"{workload}, {mode} ...", file=sys.stderr, flush=True)
                rows.append(measure(args, workload, mode, Path(name)))
    print(report(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
