"""The command line: one table of options for all scripts, and the checks that need nothing else."""

import argparse
import copy
import importlib.util
import inspect
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common import FORMAT, build_scheduler, fail, load_file
from engine.modes import load_shards, newest
from engine.task_file import load_module

ROOT = Path(__file__).resolve().parent.parent
TASKS = {"digits": ROOT / "task.py"} | {p.stem: p for p in sorted((ROOT / "tasks").glob("*.py"))}

# What belongs to one start of a run, or to one machine: a checkpoint does not hold it.
PER_RUN = {"output_dir", "resume", "device", "workers", "eval_only", "check", "weights"}
PER_RUN |= {"local_rank", "replicas", "nproc", "nnodes", "node_rank", "dist_url"}


def number(kind: type, low: float, high: float = math.inf) -> Callable[[str], Any]:
    """Return an argparse type: a finite number of `kind` in [low, high]."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high or math.isinf(value):
            limits = f"{low} to {high}" if high < math.inf else f"at least {low}"
            raise argparse.ArgumentTypeError(f"must be a number, {limits}, got {text}")
        return value

    parse.__name__ = kind.__name__  # for argparse's message
    return parse


positive, count = number(int, 1), number(int, 0)
at_least_0, fraction = number(float, 0), number(float, 0, 1)
SCHEDULES = ["constant", "cosine", "step", "cyclic", "sawtooth"]
accelerator = torch.accelerator.current_accelerator(check_available=True)
DEVICES = ["auto", "cpu", *([accelerator.type] if accelerator else [])]

# Name, type (or the values to choose from), default, help. bool: --name and --no-name.
OPTIONS: list[tuple[str, Any, Any, str]] = [
    ("--task", str, "digits", "a name in tasks/, or your FILE.py"),
    ("--epochs", positive, 30, "passes over the training set"),
    ("--batch-size", positive, 64, "samples per optimizer step, over all devices"),
    ("--accum-steps", positive, 1, "micro-batches of a step; each is cut among the devices"),
    ("--eval-batch-size", positive, None, "samples per forward in evaluation, at most 1/8 of all"),
    ("--workers", count, None, "loader processes per device (default: its cores, at most 8)"),
    ("--weights", str, None, "start from the tensors in this file that fit"),
    ("--freeze", str, [], "do not train parameters, as 'conv*'; '!conv1.*' leaves some out"),
    ("--optimizer", ["sgd", "adamw"], "sgd", "update rule"),
    ("--lr", at_least_0, 0.1, "peak learning rate"),
    ("--momentum", fraction, 0.9, "of sgd; the first beta of adamw"),
    ("--weight-decay", at_least_0, 1e-3, "on every parameter"),
    ("--schedule", SCHEDULES, "cosine", "learning rate over the run"),
    ("--warmup-epochs", at_least_0, 2.0, "linear rise of the learning rate at the start"),
    ("--step-epochs", positive, [], "step: epochs of the drops; cyclic, sawtooth: of a cycle"),
    ("--step-gamma", fraction, 0.1, "step: factor of a drop; cyclic, sawtooth: lowest / highest"),
    ("--final-lr", fraction, 0.0, "cosine: share of --lr that is left at the end"),
    ("--scale-lr", ["none", "linear", "sqrt"], "none", "multiply --lr by the number of devices"),
    ("--clip-grad-norm", number(float, 1e-12), None, "largest norm of the whole gradient"),
    ("--average", ["none", "ema"], "none", "evaluate an average of the weights over the steps"),
    ("--ema-decay", fraction, 0.99, "share of the old average in a step; smaller at the start"),
    ("--amp", ["off", "bf16", "fp16"], "off", "automatic mixed precision"),
    ("--dtype", ["float32", "float64"], "float32", "of the parameters"),
    ("--compile", bool, False, "torch.compile the model"),
    ("--channels-last", bool, False, "store images and filters as NHWC"),
    ("--sync-bn", bool, False, "BatchNorm statistics over a micro-batch of all devices"),
    ("--find-unused-parameters", bool, False, "for a model that does not use all in every step"),
    ("--timeout", number(float, 1, 1e9), 600.0, "seconds that a rank waits for another one"),
    ("--seed", number(int, 0, 2**63 - 1), 0, "of weights, order, augmentation, dropout"),
    ("--output-dir", str, None, "of checkpoints and metrics.jsonl (default: new, in runs/)"),
    ("--resume", str, None, "a checkpoint, or auto: last.pt in --output-dir, if it is there"),
    ("--save-every", positive, None, "steps between two saves, beside that of each epoch"),
    ("--keep-every", positive, None, "also keep the checkpoint of every X-th epoch"),
    ("--best", str, None, "what decides best.pt: a metric, NAME or NAME:min, or loss"),
    ("--log-every", positive, 50, "steps between two lines of the log"),
    ("--tensorboard", bool, False, "also write the log for TensorBoard, into --output-dir"),
    ("--eval-only", bool, False, "evaluate what --resume or --weights names, and end"),
    ("--device", DEVICES, "auto", "auto takes the accelerator if there is one"),
    ("--deterministic", bool, False, "slower kernels that give the same bits in every run"),
    ("--check", bool, True, "try a batch of each set before the run"),
]
OF_A_MODE: dict[str, list[tuple[str, Any, Any, str]]] = {
    "dp": [("--replicas", positive, None, "devices (default: all accelerators, or 2 on a CPU)")],
    "spawn": [
        ("--nproc", positive, None, "processes here (default: all accelerators, or 2 on a CPU)"),
        ("--nnodes", positive, 1, "machines"),
        ("--node-rank", count, 0, "number of this machine, from 0"),
        ("--dist-url", str, None, "tcp://HOST:PORT of machine 0, if there are several"),
    ],
    "fsdp": [("--shards", bool, False, "each rank writes its own part of a checkpoint")],
}


def build_parser(mode: str, **settings: Any) -> argparse.ArgumentParser:
    """Return the parser of a mode: single, dp, ddp, spawn or fsdp."""
    start = f"Start it with: bash run.sh {mode} {'' if mode == 'single' else '[N] '}[options]"
    names = {"prog": f"train_{mode}.py", "usage": f"train_{mode}.py [options]"}
    parser = argparse.ArgumentParser(description=start, allow_abbrev=False, **names, **settings)
    parser.error = fail  # one line, without the usage
    for name, kind, default, text in (*OPTIONS, *OF_A_MODE.get(mode, ())):
        more: dict[str, Any] = {"type": kind, "metavar": "X"}
        if kind is bool:
            more = {"action": argparse.BooleanOptionalAction}
        elif isinstance(kind, list):
            more = {"choices": kind}
        elif default == []:
            more["nargs"] = "*"
        shown = "" if default in (None, []) or kind is bool else " (default: %(default)s)"
        parser.add_argument(name, default=default, help=text + shown, **more)
    parser.add_argument("--local-rank", help=argparse.SUPPRESS)  # of old launchers
    return parser


def parse_args(
    mode: str, argv: list[str] | None = None, devices: int | None = None
) -> argparse.Namespace:
    """Parse and check a command line; what it does not name is as in the checkpoint of --resume.

    `devices` is how many ranks run.sh is going to start. `config` are the options that a
    checkpoint holds, `changes` those that the command line names anew, `parallel_mode` is `mode`.
    """
    first = build_parser(mode, add_help=False)
    first.set_defaults(task=None)
    named = first.parse_known_args(argv)[0]
    resume, checkpoint = find_checkpoint(named)
    saved = checkpoint.get("config", {})
    name = named.task or saved.get("task", "digits")
    task = name if name in TASKS else os.path.abspath(name)
    file = str(TASKS.get(name, task))
    if not os.path.isfile(file):
        fail(f"--task {name}: no such file; name a file, or one of {', '.join(TASKS)}")
    load_module.cache_clear()  # a notebook may have edited the file
    parser = build_parser(mode)
    if add_options := getattr(load_module(file), "add_options", None):
        add_options(parser.add_argument_group(f"task {Path(name).stem}"))

    # Parse twice: over the defaults, and over the saved options. What the second parse changes was
    # typed. So an option that collects has the words of the command line, never those of both.
    args, both = parser.parse_args(argv), argparse.Namespace(**copy.deepcopy(saved))
    parser.parse_args(argv, both)
    args.task, both.task, args.changes = task, task, []
    for key, before in saved.items():
        now = getattr(args, key, before) if getattr(both, key) != before else before
        setattr(args, key, now)
        if now != before:
            option = f"--{key.replace('_', '-')} {now}"
            within = checkpoint["step"] and key in ("seed", "batch_size")  # an epoch
            if within or key in ("dtype", "shards"):
                fail(f"{option}: the checkpoint has {before}; leave it out, or start a new run")
            args.changes.append(f"{option} ({before} before)")
    options = vars(args).keys() - PER_RUN - {"changes"}
    args.config = copy.deepcopy({key: vars(args)[key] for key in sorted(options)})
    args.task, args.parallel_mode = file, mode
    check_values(args, mode, devices)
    check_files(args, resume)
    args.resume = resume
    return args


def schedule_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that build_scheduler takes."""
    names = inspect.signature(build_scheduler).parameters.keys() & vars(args).keys()
    return {name: getattr(args, name) for name in names - {"optimizer"}}


def find_checkpoint(args: argparse.Namespace) -> tuple[str | None, dict[str, Any]]:
    """Return path and content of the checkpoint that --resume names, None if there is none."""
    if args.resume == "auto" and not args.output_dir:
        fail("--resume auto needs --output-dir, the directory whose last.pt it looks for")
    if args.resume is None:
        return None, {}
    named = Path(args.output_dir, "last.pt") if args.resume == "auto" else Path(args.resume)
    path = newest(named)
    if not path.is_file() and not (path / ".metadata").is_file():  # of a folder of shards
        if args.resume != "auto":
            fail(f"--resume {path}: no such checkpoint")
        return None, {}
    checkpoint = load_file(path, "--resume", verify=False) if path.is_file() else load_shards(path)
    if checkpoint.get("format") != FORMAT:
        fail(f"--resume {path}: not a checkpoint of this program, format {FORMAT}")
    return os.path.abspath(path), checkpoint


def check_values(args: argparse.Namespace, mode: str, devices: int | None) -> None:
    """Refuse options that contradict each other, and what a mode or this machine cannot do."""
    if args.eval_batch_size is None:
        args.eval_batch_size = min(128, args.batch_size // args.accum_steps)
    here = 0 if args.device == "cpu" else torch.accelerator.device_count()
    for name in {"replicas", "nproc"} & vars(args).keys():
        devices = getattr(args, name) or here or 2
        setattr(args, name, devices)
    if here and (devices or 1) > here:
        fail(f"{devices} devices, but only {here} accelerators; use {here}, or --device cpu")
    nodes, steps = getattr(args, "nnodes", 1), args.accum_steps
    devices = (devices or 1) * nodes
    if args.batch_size < devices * steps:
        pieces = f"{devices} devices x {steps} micro-batches"
        fail(f"--batch-size {args.batch_size}: {pieces} need at least {devices * steps}")
    if mode == "spawn" and (args.node_rank >= nodes or (nodes > 1 and not args.dist_url)):
        fail(f"--nnodes {nodes} needs --node-rank below it, and --dist-url tcp://HOST:PORT")
    if args.tensorboard and not importlib.util.find_spec("tensorboard"):
        fail("--tensorboard needs the package tensorboard: pip install tensorboard")
    if args.amp != "off" and args.dtype == "float64":
        fail(f"--amp {args.amp} is half precision; use --amp off, or --dtype float32")
    if args.schedule == "step" and not args.step_epochs:
        fail("--schedule step needs --step-epochs, when the rate drops, as 15 25")
    if mode == "dp" and (args.compile or args.sync_bn):
        fail("--compile and --sync-bn do not work in nn.DataParallel; use ddp")
    if mode == "fsdp" and (args.amp == "fp16" or args.channels_last):
        fail("--amp fp16 and --channels-last do not work with shards; use --amp bf16, or ddp")


def check_files(args: argparse.Namespace, resume: str | None) -> None:
    """Check that the named files are there, and that the directory holds no other run."""
    if args.eval_only and not (resume or args.weights):
        fail("--eval-only needs --resume FILE or --weights FILE, what to evaluate")
    if args.weights is not None:
        args.weights = os.path.abspath(args.weights)  # a task may change the current directory
        if not os.path.isfile(args.weights):
            fail(f"--weights {args.weights}: no such file")
    new = f"runs/{Path(args.task).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    args.output_dir = os.path.abspath(new if args.output_dir is None else args.output_dir)
    directory, log = Path(args.output_dir), Path(args.output_dir, "metrics.jsonl")
    logged = args.resume != "auto" and log.exists() and log.stat().st_size > 0
    own = resume and Path(resume).parent == directory
    if (logged or any(directory.glob("*.pt"))) and not own and not args.eval_only:
        fail(f"--output-dir {directory} already holds a run; go on with it by --resume auto")
    folder = next(parent for parent in (directory, *directory.parents) if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        fail(f"--output-dir {args.output_dir}: cannot write in {folder}; choose another one")
