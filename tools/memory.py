"""Measure what each rank holds with DDP and with shards: `python tools/memory.py [N ...] [--host]`.

A network of 25 linear layers (105 MB), SGD with momentum, two steps. "held" is what parameters,
gradients and momentum take on a rank after a step. "built" and "peak" are the most that a rank had
until the network was ready, and in the steps: of its device, or on a CPU how far its process grew
over what it had before the network was built. "sent" is what the loopback carried in a step, over
all ranks; devices may have other ways.

With `--host` it measures what train_fsdp.py takes of a CPU's memory, by phase and rank, divided by
the model: 252 MB, AdamW. It counts what is no part of a file, and nothing from before the network.
"""

import argparse
import contextlib
import functools
import importlib
import os
import re
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_fsdp
from common import backend, set_up_device
from machinery.modes import mesh_of_ranks, shard
from machinery.rendezvous import stay_on_this_machine
from machinery.run import Run
from machinery.usertask import Task

LAYERS, WIDTH, STEPS = 25, 1024, 3
MIB = 2**20


def sent() -> int:
    """Return the bytes that this machine's loopback has carried so far."""
    (line,) = [line for line in open("/proc/net/dev") if line.strip().startswith("lo:")]  # noqa: SIM115
    return int(line.split()[9])


def enough_devices(n: int) -> bool:
    return torch.accelerator.is_available() and torch.accelerator.device_count() >= n


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes that the device, or on a CPU this process, has held so far."""
    if device.type != "cpu":
        return torch.get_device_module(device).max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rank(index: int, mode: str, n: int, folder: str) -> None:
    torch.set_num_threads(1)
    device = set_up_device("auto" if enough_devices(n) else "cpu", local_rank=index)
    place, patience = f"file://{folder}/{mode}{n}", timedelta(seconds=120)
    dist.init_process_group(backend(device), place, patience, n, index)
    dist.barrier()
    before = peak_bytes(device)
    torch.manual_seed(0)
    model = net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    if mode == "ddp":
        model = nn.parallel.DistributedDataParallel(net.to(device), gradient_as_bucket_view=True)
    else:
        shard(net, None, mesh_of_ranks(device, None))
    built = peak_bytes(device) - before
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    inputs = torch.randn(4, WIDTH, device=device)
    for step in range(STEPS):
        model(inputs).square().mean().backward()
        optimizer.step()
        tensors = [*net.parameters(), *(parameter.grad for parameter in net.parameters())]
        tensors += [state["momentum_buffer"] for state in optimizer.state.values()]
        parts = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        held = sum(part.numel() * part.element_size() for part in parts)
        optimizer.zero_grad(set_to_none=True)
        dist.barrier()
        if step == 0:
            start = sent()
    dist.barrier()
    travelled = (sent() - start) / (STEPS - 1)
    peak = peak_bytes(device) - before
    if index == 0:
        figures = " | ".join(f"{figure / MIB:.0f}" for figure in (held, built, peak, travelled))
        print(f"| {mode} | {n} x {device.type} | {figures} |", flush=True)
    del model
    dist.barrier()
    dist.destroy_process_group()


# -------------------------------------------------------------------------- host memory, by phase

PHASES = ["before", "build", "steps", "first save", "later", "resume", "after it"]
TASK = """import torch
from torch import nn
WIDTH, BLOCKS = 2048, WIDE
class Net(nn.Sequential):
    def forward(self, x):
        for block in self:
            x = x + 0.1 * torch.relu(block(x))
        return x
def build_datasets(args):
    data = torch.utils.data.TensorDataset(torch.ones(16, WIDTH), torch.zeros(16))
    return data, data
def build_model(args):
    return Net(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
def per_sample_loss(outputs, targets):
    return outputs.square().mean(1)
def per_sample_metrics(outputs, targets):
    return {"small": -per_sample_loss(outputs, targets)}
"""


def run_rank(index: int, n: int, argv: list[str], meeting: str, phases: Any) -> None:
    """Be a rank of train_fsdp.py that notes in `phases[index]` what it is doing."""
    names = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ |= {"LAUNCH_RENDEZVOUS_FILE": meeting, "OMP_NUM_THREADS": "1"}
    for slow in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"):
        importlib.import_module(slow)  # it is no part of a phase

    def mark(owner: type, name: str, during: str, then: str) -> None:
        function: Callable = getattr(owner, name)

        @functools.wraps(function)
        def marked(*arguments: Any) -> Any:
            phases[index] = max(phases[index], PHASES.index(during))  # there is no way back
            result = function(*arguments)
            phases[index] = max(phases[index], PHASES.index(then))
            return result

        setattr(owner, name, marked)

    mark(Task, "build_net", "build", "build")
    mark(Run, "batches", "steps", "steps")
    mark(Run, "save", "first save", "later")
    if "--resume" in argv:
        mark(Run, "resume", "resume", "after it")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        train_fsdp.main(argv)


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process that is no part of a file; 0 if it has ended."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return 1024 * sum(map(int, re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", status)))
    return 0


def most_by_phase(n: int, argv: list[str], folder: Path) -> list[dict[str, int]]:
    """Train on n ranks; return for each the most bytes in each phase, above those before it."""
    # glibc gives memory back at once, so that it does not count in the next phase.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    os.environ["MALLOC_MMAP_MAX_"] = "65536"  # run.sh sets 0
    context = mp.get_context("spawn")
    phases = context.Array("i", n, lock=False)
    meeting = str(folder / f"meet-{time.monotonic_ns()}")
    ranks = mp.spawn(run_rank, (n, argv, meeting, phases), n, join=False)
    most: list[dict[int, int]] = [defaultdict(int) for _ in range(n)]
    start = [0] * n
    while not ranks.join(timeout=0.002):
        for i, pid in enumerate(ranks.pids()):
            phase, now = phases[i], anonymous_bytes(pid)
            if phase == 0:
                start[i] = now
            most[i][phase] = max(most[i][phase], now - start[i])
    return [{PHASES[phase]: value for phase, value in found.items()} for found in most]


def host_memory(n: int, blocks: int, folder: Path, option: str) -> list[dict[str, float]]:
    """Return what each rank had in each phase, in models; `option` is --shards or --no-shards."""
    (folder / "wide.py").write_text(TASK.replace("WIDE", str(blocks)))
    model = blocks * (2048 * 2048 + 2048) * 4
    argv = ["--task", str(folder / "wide.py"), *"--device cpu --epochs 1 --workers 0".split()]
    argv += ["--batch-size", "8", "--optimizer", "adamw", "--lr", "0.001", "--no-check", option]
    argv += ["--output-dir", str(folder / f"{option}-{n}")]
    ranks = most_by_phase(n, argv, folder)
    resumed = most_by_phase(n, [*argv, "--resume", "auto"], folder)
    for rank, again in zip(ranks, resumed):
        rank["resume"] = again["resume"]
    return [{name: value / model for name, value in rank.items()} for rank in ranks]


def show_host_memory(sizes: list[int], folder: Path) -> None:
    shown = ["build", "steps", "first save", "resume"]
    print(f"| ranks | checkpoints | rank | {' | '.join(shown)} |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for n in sizes:
        for way, option in (("whole", "--no-shards"), ("shards", "--shards")):
            for i, rank in enumerate(host_memory(n, 15, folder, option)):
                figures = " | ".join(f"{rank[name]:.2f}" for name in shown)
                print(f"| {n} | {way} | {i} | {figures} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="memory", description=__doc__.splitlines()[0])
    parser.add_argument("n", type=int, nargs="*", metavar="N", help="ranks (1, 2 and 4; --host: 2)")
    parser.add_argument("--host", action="store_true", help="host memory of fsdp, by phase")
    args = parser.parse_args()
    stay_on_this_machine()
    with tempfile.TemporaryDirectory() as folder:
        if args.host:
            return show_host_memory(args.n or [2], Path(folder))
        print("| mode | ranks | held, MiB per rank | built, MiB | peak, MiB | sent per step, MiB |")
        print("|---|---|---|---|---|---|", flush=True)
        for n in args.n or [1, 2, 4]:
            for mode in ("ddp", "fsdp"):
                mp.spawn(rank, (mode, n, folder), n)


if __name__ == "__main__":
    main()
