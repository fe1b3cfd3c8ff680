"""Measure what each rank holds with DDP and with shards: `python tools/memory.py [N ...]`.

A network of 25 linear layers (105 MB), SGD with momentum, two steps. "held" is what parameters,
gradients and momentum take on a rank after a step. "built" and "peak" are the most that a rank had
until the network was ready, and in the steps: of its device, or on a CPU how far its process grew
over what it had before the network was built. "sent" is what the loopback carried in a step, over
all ranks; devices may have other ways.
"""

import argparse
import resource
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import backend, set_up_device
from machinery.modes import mesh_of_ranks, shard
from machinery.rendezvous import stay_on_this_machine

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


def main() -> None:
    parser = argparse.ArgumentParser(prog="memory", description=__doc__.splitlines()[0])
    parser.add_argument("n", type=int, nargs="*", default=[1, 2, 4], metavar="N")
    sizes = parser.parse_args().n
    stay_on_this_machine()
    print("| mode | ranks | held, MiB per rank | built, MiB | peak, MiB | sent per step, MiB |")
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for n in sizes:
            for mode in ("ddp", "fsdp"):
                mp.spawn(rank, (mode, n, folder), n)


if __name__ == "__main__":
    main()
