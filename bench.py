"""Measure how near each script's own loop comes to a bare loop on this machine: `bash run.sh bench [--json FILE.json] [--svg FILE.svg]`.

Workers run the scripts' own `main`: loader, checks, log and all. Every few steps they pause it and run a bare loop instead: the same
network, optimizer and wrapper, on one batch that lies on the device already. The two take turns within seconds and in the same processes,
so that what else the machine does meets both alike: the ratio can be trusted further than the speeds.
"""

import contextlib
import copy
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import checkpoint
import common
import launch
import options
from replicas import DataParallel, WithLoss

SETTLE = 2  # steps at the start of each window that are not timed
LARGE = 2**20  # numbers in the all-reduce that shows the bandwidth: 4 MiB
DEVICES = [2**i for i in range(3, 13)]  # of the prediction
CORES, THREADS = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS")
MODES = ["single", "dp", "ddp"]
IN_MEMORY = "--dataset cifar10 --data-dir {folder} --task {folder}/images.py --batch-size 128 --model"
WORKLOADS = {"digitnet": "--dataset digits --batch-size 64", "resnet9": f"{IN_MEMORY} resnet9", "resnet18": f"{IN_MEMORY} resnet18"}
WORKLOADS["imagefolder"] = "--dataset imagefolder --image-size 32 --batch-size 128 --model resnet18"
IMAGES = """from task import *
def build_datasets(args):
    images, labels = torch.randint(0, 256, (10_000, 3, 32, 32), dtype=torch.uint8), torch.arange(10_000) % 10
    return ImagesInMemory(images, labels, shift=4, flip=True, seed=args.seed), ImagesInMemory(images[:128], labels[:128])
"""  # a task: noise, held in memory and augmented as CIFAR-10 is
BARE_START = """import torch
from torch import nn
torch.set_default_device("{device}")
net = nn.Sequential(nn.Conv2d(1, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(48, 96, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(384, 10))
optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9, weight_decay=1e-3)
loss = nn.functional.cross_entropy(net(torch.randn(64, 1, 8, 8)), torch.randint(10, (64,)))
loss.backward()
optimizer.step()
print("step 1/1", loss.item(), flush=True)
"""  # what `run.sh single` does up to its first line, as one would write it by hand


def worker(rank: int, args: Namespace, mode: str, argv: list[str], folder: Path) -> None:
    """Be one process of a run: call the script's `main`, with `take_turns` in the place of `Run.batches`."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    sys.stdout = sys.stderr = open(folder / f"log{rank}", "w")  # noqa: SIM115 (as long as the process)
    script, batches = importlib.import_module(f"train_{mode}"), checkpoint.Run.batches

    def endless(run: checkpoint.Run, loader: Any) -> Iterator[Any]:  # epoch after epoch; evaluation and saving are not measured
        while True:
            yield from batches(run, loader)
            run.state.epoch, run.state.step = run.state.epoch + 1, 0

    checkpoint.Run.batches = lambda run, loader: take_turns(args, mode, run, endless(run, loader), folder / f"rank{rank}")
    sys.exit(common.exit_code(lambda: script.main([*argv, "--output-dir", str(folder / "run")])))


def take_turns(args: Namespace, mode: str, run: checkpoint.Run, batches: Iterator[Any], result: Path) -> Iterator[Any]:
    """Yield batches to the script, time its steps and those of the bare loop in turns; write what was found, and end the run."""
    device, steps = run.device, args.steps
    synchronize = torch.accelerator.synchronize if device.type != "cpu" else lambda: None

    def window(step: Callable[[], Any] | None = None) -> Generator[Any, None, float]:  # seconds a step; of the script if there is no `step`
        for i in range(SETTLE + steps):
            if i == SETTLE:
                synchronize()
                start = time.perf_counter()
            step() if step else (yield next(batches))  # which comes back when the script wants the next one
        synchronize()
        return (time.perf_counter() - start) / steps

    yield from window()
    found = {"device": device.type, "batch_size": run.args.batch_size, "syncs": None}
    found["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # before there is a second network
    found["gradient_bytes"] = sum(p.numel() * p.element_size() for p in run.state.net.parameters() if p.requires_grad)
    batch, few, many = next(batches), torch.zeros(1, device=device), torch.zeros(LARGE, device=device)
    loops = {"bare": bare_step(mode, run, *batch)}
    if mode == "ddp":
        loops |= {"alone": bare_step("single", run, *batch), "few": lambda: dist.all_reduce(few), "many": lambda: dist.all_reduce(many)}
    before = bytes_sent()
    yield from window(loops["bare"])
    found["bytes_sent"] = (bytes_sent() - before) / (SETTLE + steps) if device.type == "cpu" else None
    found["seconds"] = {name: [] for name in (*loops, "script")}
    for turn in range(1 + args.repeats):  # the first one warms up
        for number, timed in ((signal.SIGSTOP, loops), (signal.SIGCONT, {"script": None})):
            for loader in mp.active_children():  # or it would slow the bare loop down by loading ahead, and then give the script a start
                os.kill(loader.pid, number)
            for name, step in timed.items():
                found["seconds"][name] += [(yield from window(step))] * (turn > 0)
    if device.type == "cuda":  # the only device that tells of synchronisations
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            yield from window()
            torch.cuda.set_sync_debug_mode("default")
        found["syncs"] = sum("synchroniz" in str(warning.message) for warning in seen) / (SETTLE + steps)
    result.write_text(json.dumps(found))
    raise common.Stopped(0, "")


def bare_step(mode: str, run: checkpoint.Run, inputs: Any, targets: Any) -> Callable[[], None]:
    """Return one step of a loop that cannot be shorter, on a copy of the network; ready to be timed in this process."""
    args, task, net = run.args, common.load_task(run.args), copy.deepcopy(run.state.net)
    optimizer = common.build_optimizer(args, net)
    optimizer.param_groups[0]["lr"] = run.state.optimizer.param_groups[0]["lr"]
    factor = (dist.get_world_size() if dist.is_initialized() else 1) / args.batch_size
    model = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True) if mode == "ddp" else net
    if mode == "dp":
        model = DataParallel(WithLoss(args, net, task, run.device), args.replicas, run.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        losses = model(inputs, targets) if mode == "dp" else task.per_sample_loss(model(inputs), targets)
        (losses.sum() * factor).backward()
        optimizer.step()

    return step


def bytes_sent() -> int:
    """Return the bytes that this process has sent over TCP, without headers. Source: `tcpi_bytes_sent` in Linux's tcp.h."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.fromfd(int(name), socket.AF_INET, socket.SOCK_STREAM) as connection:
            total += int.from_bytes(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)[200:], sys.byteorder)
    return total


def ring_bytes(gradient_bytes: float, devices: int) -> float:
    """Bytes that each device sends in an all-reduce; none can do with fewer. Source: Patarasuk and Yuan, JPDC 2009."""
    return 2 * (devices - 1) / devices * gradient_bytes


def predict(step_seconds: float, gradient_bytes: float, devices: int, bandwidth: float, latency: float) -> dict[str, float]:
    """Seconds of a step after which the all-reduce follows, by algorithm; bandwidth in bytes/s, latency in s a message.

    Sources: the same; for the tree (halving and doubling) Thakur, Rabenseifner and Gropp, IJHPCA 2005, without the additions.
    """
    sent = step_seconds + ring_bytes(gradient_bytes, devices) / bandwidth
    return {"ring": sent + 2 * (devices - 1) * latency, "tree": sent + 2 * (devices - 1).bit_length() * latency}


def measure(args: Namespace, workload: str, mode: str, argv: list[str], folder: Path) -> dict[str, Any]:
    """Return one row of the table: speeds in images/s of all devices together, times in seconds a step, sizes in bytes or MiB."""
    devices, n = 1 if mode == "single" else args.nproc, args.nproc if mode == "ddp" else 1  # replicas, processes
    threads = THREADS or str(max(1, CORES // n))  # as run.sh does
    os.environ.update(OMP_NUM_THREADS=threads, WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n), LAUNCH_MEETING_FILE=str(folder / "meeting"))
    folder.mkdir()
    processes = mp.spawn(worker, (args, mode, argv, folder), n, join=False)
    try:
        while not processes.join(grace_period=1):
            pass
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:  # what a script says itself is in the log
        words = str(error) if isinstance(error, mp.ProcessRaisedException) else (folder / f"log{error.error_index}").read_text()
        raise common.Stopped(getattr(error, "exit_code", 1), f"{workload}, {mode}: " + words.strip().split("\n")[-1]) from error
    finally:
        for process in processes.processes:
            process.kill()
            process.join()
    ranks = [json.loads((folder / f"rank{rank}").read_text()) for rank in range(n)]
    row = {"workload": workload, "mode": mode, "devices": devices, "threads": int(threads), **ranks[0]}
    middle = {name: median(times) for name, times in row["seconds"].items()}
    ratios = [bare / script for bare, script in zip(row["seconds"]["bare"], row["seconds"]["script"])]
    row |= {"bare": row["batch_size"] / middle["bare"], "script": row["batch_size"] / middle["script"]}
    row |= {"ratio": median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios), "peak_mib": max(r["peak_mib"] for r in ranks)}
    row["bytes_formula"] = ring_bytes(row["gradient_bytes"], n)
    row["bytes_sent"] = mean(rank["bytes_sent"] for rank in ranks) if args.kind == "cpu" else None
    if mode == "single":
        times = [predict(middle["bare"], row["gradient_bytes"], many, args.bandwidth * 1e9, args.latency * 1e-6) for many in DEVICES]
        row["efficiency"] = [{name: middle["bare"] / time for name, time in of.items()} for of in times]
    if n > 1:
        link = {"bandwidth": ring_bytes(4 * LARGE, n) / max(middle["many"] - middle["few"], 1e-9), "latency": middle["few"] / (2 * n - 2)}
        predicted = predict(middle["alone"], row["gradient_bytes"], n, **link)["ring"]
        row["check"] = {**link, "predicted": predicted, "measured": middle["bare"]}
    return row


def start_up(kind: str, repeats: int, folder: Path) -> dict[str, float]:
    """Median seconds from the command to the end of the first step: `run.sh single` and a bare program, taking turns."""
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # run.sh shall find this Python
    own = {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "LAUNCH_MEETING_FILE"}  # of the workers of `measure`
    environment = {**{name: value for name, value in os.environ.items() if name not in own}, "PATH": path}
    environment["OMP_NUM_THREADS"] = THREADS or str(CORES)
    bare = [sys.executable, "-c", BARE_START.format(device=kind)]
    script = ["bash", str(Path(__file__).with_name("run.sh")), "single", "--epochs", "1", "--log-every", "1", "--device", kind]
    seconds: dict[str, list[float]] = {"bare": [], "script": []}
    for i in range(repeats):
        for name, command in (("bare", bare), ("script", [*script, "--output-dir", str(folder / f"start{i}")])):
            start = time.perf_counter()
            with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
                if not any("step 1/" in line for line in process.stdout):
                    raise common.Stopped(1, f"{' '.join(command)} ended before its first step")
                seconds[name].append(time.perf_counter() - start)  # it ends when it finds that nobody reads on
    return {name: median(times) for name, times in seconds.items()}


def report(result: dict[str, Any]) -> str:
    """Return the measurements as markdown."""
    start, of = result["start_up"], "single" if result["device"] == "cpu" else "N × single"  # replicas share cores, but not accelerators
    head = f"workload | mode | bare, images/s | script, images/s | script / bare | script, of {of} | peak, MiB a process"
    lines = [f"| {head} | MB sent a step and rank, formula | measured | host syncs a step |", "|---" * 10 + "|"]
    below = ["", f"Start-up of digitnet, to its first step: bare {start['bare']:.2f} s, run.sh single {start['script']:.2f} s."]
    table = ["", "Predicted efficiency, ring / tree, if each device has this one's batch and speed, and nothing overlaps:", ""]
    table += [f"| devices | {' | '.join(map(str, DEVICES))} |", "|---" * (len(DEVICES) + 1) + "|"]
    for row in result["rows"]:
        texts = [row["workload"], f"{row['mode']} {row['devices']}", f"{row['bare']:.0f}", f"{row['script']:.0f}"]
        texts += [f"**{row['ratio']:.3f}** ({row['ratio_min']:.3f} to {row['ratio_max']:.3f})"]
        numbers = [row["scaling"], row["peak_mib"], row["bytes_formula"] / 1e6, row["bytes_sent"] and row["bytes_sent"] / 1e6, row["syncs"]]
        lines.append(f"| {' | '.join(texts + ['–' if n is None else f'{n:.{0 if n >= 100 else 2}f}' for n in numbers])} |")
        if check := row.get("check"):
            link = f"all-reduce here: {check['bandwidth'] / 1e9:.2f} GB/s, {check['latency'] * 1e6:.0f} us a message"
            times = f"predicted {check['predicted'] * 1e3:.1f} ms, measured {check['measured'] * 1e3:.1f} ms"
            below.append(f"- bare step of {row['workload']}, ddp {row['devices']}: {times} ({link})")
        if cells := [f"{of['ring']:.2f} / {of['tree']:.2f}" for of in row.get("efficiency", [])]:
            table.append(f"| {row['workload']} | {' | '.join(cells)} |")
    return "\n".join(lines + below + table * (len(table) > 5))  # the rest is its head


def main(argv: list[str] | None = None) -> int:
    parser = options.Parser(prog="bench.py", description=__doc__.split("\n\n")[0], formatter_class=options.HelpFormatter)
    add, positive = parser.add_argument, options.number(int, 1)
    add("--workloads", nargs="+", choices=WORKLOADS, help="networks and data (default: all; imagefolder only with --data-dir)")
    add("--modes", nargs="+", choices=MODES, default=MODES, help="scripts to measure")
    add("--nproc", type=options.number(int, 1, 64), metavar="N", help="devices of dp and ddp (default: all accelerators, or 2 on CPU)")
    add("--device", default="auto", metavar="auto|cpu|cuda|...", help="auto takes the accelerator if there is one")
    add("--data-dir", type=options.filled, metavar="DIR", help="images for imagefolder, under train/ and val/")
    add("--steps", type=positive, default=20, metavar="N", help="timed steps in a turn")
    add("--repeats", type=positive, default=5, metavar="N", help="turns of the script and of the bare loop, after one that warms up")
    add("--bandwidth", type=options.number(float, 1e-3), default=25, metavar="X", help="of the prediction, in GB/s a device")
    add("--latency", type=options.number(float, 0), default=5, metavar="X", help="of the prediction, in us a message")
    add("--json", type=Path, metavar="FILE.json", help="write all figures")
    add("--svg", type=Path, metavar="FILE.svg", help="write a picture of the ratios")
    args = parser.parse_args(argv)
    for option, path in (("json", args.json), ("svg", args.svg)):  # now, not when all is measured
        if path and (path.suffix != f".{option}" or not path.absolute().parent.is_dir()):
            raise common.UsageError(f"--{option} {path}: must end in .{option}, in a folder that exists")
    args.workloads = args.workloads or [name for name in WORKLOADS if args.data_dir or name != "imagefolder"]
    if "imagefolder" in args.workloads and not args.data_dir:
        raise common.UsageError("--workloads imagefolder needs --data-dir, a folder with train/ and val/ (or test/)")
    args.kind = options.resolve_device_type(args.device)
    args.nproc = args.nproc or (2 if args.kind == "cpu" else torch.accelerator.device_count())

    def stop(number: int, frame: Any) -> None:
        raise common.Stopped(128 + number, f"stopped by {signal.Signals(number).name}")  # on its way it ends what was started

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    launch.stay_on_this_machine()
    result = {"device": args.kind, "cores": CORES, "torch": torch.__version__, "load": os.getloadavg()[0], "rows": []}
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        Path(name, "images.py").write_text(IMAGES)
        commands, single = {}, {}
        for workload, mode in ((workload, mode) for workload in args.workloads for mode in MODES if mode in args.modes):
            words = WORKLOADS[workload] + " --epochs 1000000 --device {device}"  # it ends when all is measured
            words += " --replicas {nproc}" * (mode == "dp") + " --data-dir {data_dir}" * (workload == "imagefolder")
            command = [word.format(folder=name, **vars(args)) for word in words.split()]
            options.parse_args(mode, command, args.nproc if mode == "ddp" else 1)  # all of them before the first is started
            commands[workload, mode] = command
        for (workload, mode), command in commands.items():
            print(f"{workload}, {mode} ...", file=sys.stderr, flush=True)
            row = measure(args, workload, mode, command, Path(name, f"{workload}-{mode}"))
            reference = single.setdefault(workload, row["script"] if mode == "single" else None)
            row["scaling"] = reference and row["script"] / reference / (1 if args.kind == "cpu" else row["devices"])
            result["rows"].append(row)
        result["start_up"] = start_up(args.kind, min(3, args.repeats), Path(name))
    print(report(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.svg:
        from matplotlib.figure import Figure

        rows, ratios = result["rows"], [row["ratio"] for row in result["rows"]]
        axis = Figure(figsize=(1.5 + 0.8 * len(rows), 3.5), layout="constrained").subplots()
        ranges = [row["ratio"] - row["ratio_min"] for row in rows], [row["ratio_max"] - row["ratio"] for row in rows]
        axis.bar([f"{row['workload']}\n{row['mode']} {row['devices']}" for row in rows], ratios, yerr=ranges)
        axis.axhline(1.0, color="black", linewidth=1)
        axis.set_ylabel("script / bare loop, images/s")
        axis.figure.savefig(args.svg)
    return 0


if __name__ == "__main__":
    sys.exit(common.exit_code(main))
