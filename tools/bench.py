"""Measure how near each script's own loop comes to a bare loop on this machine.

bash run.sh bench [--json FILE.json]
bash run.sh bench --peer NAME... compares whole programs instead, see peers.py.

Workers run the scripts' own `main`: loader, checks, log and all. Every few steps they pause it
and run a bare loop instead: the same network, optimizer and wrapper, on one batch that lies on
the device already. The two take turns within seconds and in the same processes, so that what
else the machine does meets both alike: the ratio can be trusted further than the speeds.
"""

import copy
import importlib
import itertools
import json
import os
import resource
import signal
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

import peers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from common import UsageError, autocast, build_optimizer, resolve_device_type
from machinery.cli import Parser, build_parser, filled, number, parse_args, task_file
from machinery.modes import WithLoss, data_parallel, mesh_of_ranks, shard
from machinery.process import Stopped, run_main
from machinery.rendezvous import stay_on_this_machine
from machinery.run import Run
from machinery.usertask import Task

SETTLE = 2  # steps at the start of each window that are not timed
CORES, THREADS = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS")
OF_WORKERS = ["WORLD_SIZE", "LOCAL_WORLD_SIZE", "LAUNCH_PID", "LAUNCH_RENDEZVOUS_FILE"]
MODES = ["single", "dp", "ddp", "fsdp"]
RANKS = ["ddp", "fsdp"]  # a process for each device
IN_MEMORY = "--task {folder}/in_memory.py --dataset cifar10 --label-smoothing 0 --batch-size 128"
FOLDERS = "--task images --image-size 32 --label-smoothing 0 --batch-size 128"
WORKLOADS = {
    "digitnet": "--batch-size 64",
    "resnet9": f"{IN_MEMORY} --model resnet9",
    "resnet18": f"{IN_MEMORY} --model resnet18",
    "imagefolder": f"{FOLDERS} --model resnet18",
    "deep": f"{IN_MEMORY} --model deep --batch-size 32",
}
IMAGES = """from tasks import images
from tasks.images import *
def build_datasets(args):
    images = torch.randint(0, 256, (1_000, 3, 32, 32), dtype=torch.uint8).repeat(50, 1, 1, 1)
    labels = torch.arange(50_000) % 10
    train_set = ImagesInMemory(images, labels, shift=4, flip=True)
    return train_set, ImagesInMemory(images[:128], labels[:128])
def build_model(args):
    if args.model != "deep":
        return images.build_model(args)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(50)]
    net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), *layers, nn.Linear(8, 10))
    net.register_forward_pre_hook(lambda net, inputs: (inputs[0] / 255,))
    return net
"""  # a task: noise, held in memory and augmented as CIFAR-10 is; deep takes the host alone

# --------------------------------------------------------------------------------- in each process


def worker(rank: int, args: Namespace, mode: str, argv: list[str], folder: Path) -> None:
    """Be one process of a run: call the script's `main`, with `take_turns` for `Run.batches`."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    sys.stdout = sys.stderr = open(folder / f"log{rank}", "w")  # noqa: SIM115 (until it ends)
    script, batches = importlib.import_module(f"train_{mode}"), Run.batches

    def endless(run: Run, loader: Any) -> Iterator[Any]:  # evaluation and saving are not measured
        while True:
            yield from batches(run, loader)
            run.state.epoch, run.state.step = run.state.epoch + 1, 0

    Run.batches = lambda run, loader: take_turns(
        args, mode, run, endless(run, loader), folder / f"rank{rank}"
    )
    sys.exit(run_main(lambda: script.main([*argv, "--output-dir", str(folder / "run")])))


def take_turns(
    args: Namespace, mode: str, run: Run, batches: Iterator[Any], result: Path
) -> Iterator[Any]:
    """Yield batches to the script; time its steps and those of the bare loop in turns.

    Write what was found, and end the run.
    """
    device, steps = run.device, args.steps
    synchronize = torch.accelerator.synchronize if device.type != "cpu" else lambda: None

    def window(step: Callable[[], Any] | None = None) -> Generator[Any, None, float]:
        """Return the seconds of a step; of the script's if there is no `step`."""
        for i in range(SETTLE + steps):
            if i == SETTLE:
                synchronize()
                start = time.perf_counter()
            if step:
                step()
            else:
                yield next(batches)  # comes back when the script wants the next one
        synchronize()
        return (time.perf_counter() - start) / steps

    yield from window()
    found = {"batch_size": run.config["batch_size"], "seconds": {"bare": [], "script": []}}
    # Before there is a second network:
    found["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    memory = device.type == "cuda" and torch.cuda.max_memory_allocated(device)
    found["device_mib"] = memory / 2**20 if memory else None
    micro_batches = next(batches)
    batch = [torch.cat(parts) for parts in zip(*micro_batches)]
    bare = bare_step(mode, run, *batch)
    yield from window(bare)
    for turn in range(1 + args.repeats):  # the first one warms up
        for name, step, order in (("bare", bare, signal.SIGSTOP), ("script", None, signal.SIGCONT)):
            # A loader that loads ahead would slow the bare loop, and give the script a start.
            for loader in mp.active_children():
                os.kill(loader.pid, order)
            found["seconds"][name] += [(yield from window(step))] * (turn > 0)
    result.write_text(json.dumps(found))
    raise Stopped(0, "")


def bare_step(mode: str, run: Run, inputs: Any, targets: Any) -> Callable[[], None]:
    """Return one step of a loop that cannot be shorter, on a copy of the network."""
    defaults = vars(build_parser(mode).parse_args([]))  # of what a checkpoint does not hold
    task_path = task_file(run.config["task"])  # a checkpoint holds the name
    args = Namespace(**defaults | run.config | {"parallel_mode": mode, "task": task_path})
    task = Task(args)
    if mode == "fsdp":  # a sharded network cannot be copied
        net = task.build_net().to(run.device)
        shard(net, task.shard_modules, mesh_of_ranks(run.device, args.shard_size))
    else:
        net = copy.deepcopy(run.state.net)
    lr = run.state.optimizer.param_groups[0]["lr"]
    optimizer = build_optimizer(
        net, args.optimizer, lr, args.momentum, args.weight_decay, args.nesterov
    )
    factor = (dist.get_world_size() if dist.is_initialized() else 1) / args.batch_size
    model = net
    if mode == "ddp":
        model = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    if mode == "dp":
        model = WithLoss(net, task, run.device, args.amp)
        model = data_parallel(model, run.log.devices, run.device)

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


def measure(
    args: Namespace, workload: str, mode: str, argv: list[str], folder: Path
) -> dict[str, Any]:
    """Return one row of the table.

    Speeds in images/s of all devices together, times in seconds a step, sizes in MiB.
    """
    devices = 1 if mode == "single" else args.nproc
    n = args.nproc if mode in RANKS else 1  # processes
    threads = THREADS or str(max(1, CORES // n))  # as run.sh does
    values = [str(n), str(n), str(os.getpid()), str(folder / "meeting")]
    os.environ.update(zip(OF_WORKERS, values), OMP_NUM_THREADS=threads)
    folder.mkdir()
    workers = mp.spawn(worker, (args, mode, argv, folder), n, join=False)
    try:
        while not workers.join(grace_period=1):
            pass
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        words = [str(error)]
        if isinstance(error, mp.ProcessExitedException):  # what a script says itself is in its log
            codes = enumerate(process.exitcode for process in workers.processes)
            failed = [rank for rank, code in codes if 0 < (code or 0) < 128]
            logs = [folder / f"log{rank}" for rank in failed or [error.error_index]]
            words = [log.read_text() for log in logs]
        last = "; ".join(dict.fromkeys(text.strip().split("\n")[-1] for text in words))
        code = getattr(error, "exit_code", 1)
        raise Stopped(code if code in (2, 3) else 1, f"{workload}, {mode}: {last}") from error
    finally:
        for process in workers.processes:
            process.kill()
            process.join()
    ranks = [json.loads((folder / f"rank{rank}").read_text()) for rank in range(n)]
    row = {"workload": workload, "mode": mode, "devices": devices, "threads": int(threads)}
    row |= ranks[0]
    seconds = row["seconds"]
    middle = {name: median(times) for name, times in seconds.items()}
    ratios = [bare / script for bare, script in zip(seconds["bare"], seconds["script"])]
    row |= {name: row["batch_size"] / middle[name] for name in ("bare", "script")}
    row |= {"ratio": median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
    row["peak_mib"] = max(rank["peak_mib"] for rank in ranks)
    row["device_mib"] = max((rank["device_mib"] for rank in ranks), key=lambda size: size or 0)
    return row


# ------------------------------------------------------------------------------------------ results


def report(result: dict[str, Any]) -> str:
    """Return the measurements as markdown."""
    # Replicas on the CPU share its cores; accelerators share nothing.
    of = "single" if result["device"] == "cpu" else "N × single"
    head = f"workload | mode | bare, images/s | script, images/s | script / bare | script, of {of}"
    lines = [f"| {head} | peak, MiB a process | on the device |", "|---" * 8 + "|"]
    for row in result["rows"]:
        texts = [row["workload"], f"{row['mode']} {row['devices']}"]
        texts += [f"{row['bare']:.0f}", f"{row['script']:.0f}"]
        texts += ["**{ratio:.3f}** ({ratio_min:.3f} to {ratio_max:.3f})".format(**row)]
        for n in (row["scaling"], row["peak_mib"], row["device_mib"]):
            texts.append("–" if n is None else f"{n:.{0 if n >= 100 else 2}f}")
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> Namespace:
    parser = Parser(prog="bench.py", description=__doc__.split("\n\n")[0])
    add, positive, device = parser.add_argument, number(int, 1), number(int, 1, 64)
    default = "default: all but deep; imagefolder only with --data-dir"
    add("--workloads", nargs="+", choices=WORKLOADS, help=f"networks and data ({default})")
    default = "default: all; with --peer: single and ddp"
    add("--modes", nargs="+", choices=MODES, help=f"scripts to measure ({default})")
    default = "default: all accelerators, or 2 on CPU"
    add("--nproc", type=device, metavar="N", help=f"devices of dp, ddp and fsdp ({default})")
    default = "auto takes the accelerator if there is one"
    add("--device", default="auto", metavar="auto|cpu|cuda|...", help=default)
    where = "images for imagefolder, under train/ and val/"
    add("--data-dir", type=filled, metavar="DIR", help=where)
    sizes = "a row for each, instead of the workload's own"
    add("--batch-size", nargs="+", type=positive, default=[None], metavar="N", help=sizes)
    both = "of the script and of the bare loop"
    add("--amp", choices=["off", "bf16", "fp16"], default="off", help=f"precision {both}")
    add("--channels-last", action="store_true", help=f"memory format {both}")
    add("--steps", type=positive, default=20, metavar="N", help="timed steps in a turn")
    turns = "turns of the script and of the bare loop, after one that warms up"
    add("--repeats", type=positive, default=5, metavar="N", help=turns)
    peer = f"compare with {', '.join(peers.PEERS)}, or any script: as whole programs"
    add("--peer", nargs="+", default=[], metavar="NAME|FILE.py", help=peer)
    add("--startup", action="store_true", help="with --peer: to the end of the first step alone")
    add("--json", type=Path, metavar="FILE.json", help="write all figures")
    args = parser.parse_args(argv)
    args.data_dir = args.data_dir and os.path.abspath(args.data_dir)
    path = args.json  # looked at now, not when all is measured
    if path and (path.suffix != ".json" or not path.absolute().parent.is_dir()):
        raise UsageError(f"--json {path}: must end in .json, in a directory that exists")
    if args.startup and not args.peer:
        raise UsageError("--startup needs --peer, what to compare with")
    for peer in args.peer:
        peers.script_of(peer)  # raises if it is not here
    choices = ["single", "ddp"] if args.peer else MODES
    args.modes = [mode for mode in MODES if mode in (args.modes or choices)]
    if args.peer and not {*args.modes} <= {*choices}:
        raise UsageError("--peer compares --modes single and ddp")
    if args.peer and (args.amp != "off" or args.channels_last):
        raise UsageError("--peer compares float32 in torch's own memory format")
    left_out = ("deep",) if args.data_dir else ("deep", "imagefolder")
    every = [name for name in WORKLOADS if name not in left_out]
    args.workloads = args.workloads or every
    if "imagefolder" in args.workloads and not args.data_dir:
        wanted = "--data-dir, a directory with train/ and val/ (or test/)"
        raise UsageError(f"--workloads imagefolder needs {wanted}")
    args.kind = resolve_device_type(args.device)
    args.nproc = args.nproc or (2 if args.kind == "cpu" else torch.accelerator.device_count())
    return args


def command_of(
    args: Namespace, workload: str, size: int | None, mode: str, folder: str
) -> list[str]:
    """Return the options of a run; raise UsageError if one of them is wrong."""
    words = WORKLOADS[workload] + " --epochs 1000000"  # it ends when measured
    words += " --device {device}" + " --replicas {nproc}" * (mode == "dp")
    words += " --data-dir {data_dir}" * (workload == "imagefolder")
    words += f" --batch-size {size}" * bool(size)
    if not args.peer:
        words += " --amp {amp}" + " --channels-last" * args.channels_last
    argv = [word.format(folder=folder, **vars(args)) for word in words.split()]
    parse_args(mode, argv, args.nproc if mode in RANKS else 1)
    return argv


def measure_all(
    args: Namespace, commands: dict[tuple[str, str], list[str]], folder: Path
) -> list[dict[str, Any]]:
    """Return a row for each workload and mode; `commands` has the options of the runs."""
    single: dict[str, float | None] = {}
    rows = []
    for (workload, mode), command in commands.items():
        print(f"{workload}, {mode} ...", file=sys.stderr, flush=True)
        row = measure(args, workload, mode, command, folder / f"{workload}-{mode}")
        one = single.setdefault(workload, row["script"] if mode == "single" else None)
        share = 1 if args.kind == "cpu" else row["devices"]
        row["scaling"] = one and row["script"] / one / share
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)

    def stop(number: int, frame: Any) -> None:  # on its way it ends what was started
        raise Stopped(128 + number, f"stopped by {signal.Signals(number).name}")

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    stay_on_this_machine()
    result = {"device": args.kind, "cores": CORES, "torch": torch.__version__}
    result["load"] = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        (folder / "in_memory.py").write_text(IMAGES)
        commands = {}  # all of them are checked before one is started
        for workload, size in itertools.product(args.workloads, args.batch_size):
            shown = f"{workload}, batch {size}" if size else workload
            for mode in args.modes:
                commands[shown, mode] = command_of(args, workload, size, mode, name)
        measure_each = peers.compare if args.peer else measure_all
        result["rows"] = measure_each(args, commands, folder)
    print(peers.report(result["rows"]) if args.peer else report(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
