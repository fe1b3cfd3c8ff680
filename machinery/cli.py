"""The command line: one table of options for all scripts, and the checks that need nothing else."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import math
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common import (
    SCHEDULES,
    USE_MARKS,
    UsageError,
    check_loadable,
    load_checkpoint,
    resolve_device_type,
)
from machinery import process
from machinery.process import Stopped
from machinery.rendezvous import follow_launcher, forget_launcher, take_ranks_of_slurm
from machinery.usertask import as_task_error, load_module

# Not stored in a checkpoint, nor taken from one: what belongs to one start of a run, or to one
# machine. A checkpoint has weights of its own.
PER_RUN = {"output_dir", "resume", "device", "workers", "eval_only", "check", "weights"}
PER_RUN |= {"local_rank", "replicas", "nproc", "nnodes", "node_rank", "dist_url", "shard_size"}
# Another one would be another run; the second set, only within an epoch.
SAME_RUN = ("task", "seed", "dtype")
SAME_EPOCH = ("batch_size", "accum_steps", "balanced", "shuffle_window")


class Option(NamedTuple):
    group: str
    name: str
    modes: tuple[str, ...]
    settings: dict[str, Any]

    @property
    def key(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")


OPTIONS: list[Option] = []
headlines: list[str] = []  # of --help; an option is shown under the last one


def option(
    name: str,
    kind: Any,
    metavar: str | None,
    default: Any,
    text: str,
    *modes: str,
    **settings: Any,
) -> None:
    """Declare an option of all scripts, or of the named modes alone; `kind` is a type or a list."""
    if default not in (None, []):
        text += " (default: task.py)" if default == TASK else " (default: %(default)s)"
    settings |= {"choices": kind} if isinstance(kind, list) else {"type": kind, "metavar": metavar}
    settings |= {"default": default, "help": text}
    OPTIONS.append(Option(headlines[-1], name, modes, settings))


def flag(name: str, text: str, default: bool = False, *modes: str) -> None:
    """Declare a switch with a negative form: --compile and --no-compile."""
    settings = {"action": argparse.BooleanOptionalAction, "default": default, "help": text}
    OPTIONS.append(Option(headlines[-1], name, modes, settings))


def number(kind: type, low: float, high: float = math.inf) -> Callable[[str], Any]:
    """Return an argparse type: a finite number of `kind` in [low, high]."""
    limits = f"{low} to {high}" if high < math.inf else f"at least {low}"
    whole = "whole " if kind is int else ""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
            if not low <= value <= high or not math.isfinite(value):
                raise ValueError
        except (ValueError, OverflowError) as error:  # overflow: too large for any float
            problem = f"must be a {whole}number, {limits}, got {text}"
            raise argparse.ArgumentTypeError(problem) from error
        return value

    return parse


def like(pattern: str, wanted: str) -> Callable[[str], str]:
    """Return an argparse type: a text that matches the pattern."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"must {wanted}, got {text!r}")
        return text

    return parse


positive, whole = number(int, 1), number(int, 0)
amount, share = number(float, 0), number(float, 0, 1)
filled = like(r"(?s)\s*\S.*", "not be empty")  # as an unset variable of a shell is
host = r"([^][:/]+|\[[^][/]+\])"  # a name, or an IPv4 address; an IPv6 address in brackets
url = like(rf"tcp://{host}:[1-9][0-9]{{0,4}}", "be tcp://HOST:PORT, as tcp://10.0.0.1:29500")
LAUNCHED = ("ddp", "fsdp")  # modes whose ranks run.sh, torchrun or srun start
ROOT = Path(__file__).resolve().parent.parent
TASK = str(ROOT / "task.py")
TASKS = {path.stem: str(path) for path in sorted((ROOT / "tasks").glob("*.py"))}
TASKS["digits"] = TASK


def path(text: str) -> str:
    """Return the absolute path, but "auto": a task may change the current directory later."""
    return text if filled(text) == "auto" else os.path.abspath(text)


def task_file(name: str) -> str:
    """Return the path of a task: that of NAME in tasks/, or the Python file that is named."""
    if name.endswith(".py"):
        return os.path.abspath(name)
    if name not in TASKS:
        problem = f"must be a file with a name that ends in .py, or one of {', '.join(TASKS)}"
        raise argparse.ArgumentTypeError(f"{problem}; got {name!r}")
    return TASKS[name]


def task_name(file: str) -> str:
    """Return what --task calls this file: NAME of a task of the project, else the path."""
    return next((name for name, path in TASKS.items() if path == file), file)


# fmt: off

headlines.append("most used")
option("--task", task_file, "NAME|FILE.py", TASK,
       "the problem to train on: a name in tasks/, or your file")
option("--epochs", positive, "N", 30, "passes over the training set")
option("--batch-size", positive, "N", 64, "samples per optimizer step, over all devices")
option("--lr", amount, "X", 0.1, "peak learning rate")
option("--amp", ["off", "bf16", "fp16", "bf16-shards"], None, "off",
       "automatic mixed precision; bf16-shards: fsdp gathers the parameters in bf16")
option("--output-dir", filled, "DIR", None,
       "for checkpoints and metrics.jsonl (default: a new directory under runs/)")
option("--resume", path, "auto|FILE", None,
       "continue from a checkpoint; auto: from last.pt in --output-dir if it is there")

headlines.append("data")
flag("--skip-corrupt",
       "replace a sample that cannot be read by the next one; else the run ends")
flag("--balanced", "draw samples with replacement, from each class equally often")
option("--shuffle-window", positive, "N", None,
       "of data with `shards`, mix N shards at a time (default: all)")
option("--workers", whole, "N", None,
       "loader processes per device (default: its cores, at most 8; for data `in_memory` 0 on a "
       "CPU, and with `whole_batches` 1 on a GPU, or 0 if they have `to`: then the GPU holds them, "
       "which any N prevents)")

headlines.append("model")
option("--weights", path, "FILE", None, "start from the tensors in FILE that fit")
option("--freeze", filled, "PATTERN", [],
       "do not train the parameters with these names, as 'conv*'; '!conv1.*' leaves some out",
       nargs="*")

headlines.append("optimization")
option("--accum-steps", positive, "N", 1,
       "micro-batches per optimizer step; each is cut among the devices")
option("--eval-batch-size", positive, "N", None,
       "samples per forward in evaluation, at most an eighth of the set, rounded up "
       "(default: a micro-batch, at most 128)")
option("--optimizer", ["sgd", "adamw"], None, "sgd", "update rule")
option("--momentum", share, "X", 0.9, "of sgd; the first beta of adamw")
flag("--nesterov", "Nesterov momentum, sgd only")
option("--weight-decay", amount, "X", 1e-3, "on every parameter")
option("--schedule", list(SCHEDULES), None, "cosine", "learning rate over the run")
option("--warmup-epochs", amount, "X", 2.0, "linear rise of the learning rate at the start")
option("--step-epochs", positive, "N", [],
       "step: epochs of the drops; cyclic, sawtooth: length of a cycle",
       nargs="*")
option("--step-gamma", share, "X", 0.1,
       "step: factor of a drop; cyclic, sawtooth: lowest / highest rate")
option("--final-lr", share, "FRACTION", 0.0, "cosine: share of --lr that is left at the end")
option("--scale-lr", ["none", "linear", "sqrt"], None, "none",
       "multiply --lr by the world size, or its root")
option("--clip-grad-norm", number(float, 1e-12), "X", None,
       "largest norm of the whole gradient (default: no limit)")
option("--average", ["none", "ema"], None, "none",
       "evaluate an exponential average of the weights over the steps")
option("--ema-decay", number(float, 0, 1), "X", 0.99,
       "share of the old average in each step; smaller in the first steps")

headlines.append("speed and precision")
flag("--compile", "torch.compile the model")
flag("--channels-last", "store images and filters as NHWC")
option("--dtype", ["float32", "float64"], None, "float32",
       "of the parameters; in float64 all modes print the same digits")

headlines.append("distribution")
flag("--sync-bn",
     "BatchNorm statistics over a micro-batch of all devices (no effect on one)")
option("--grad-compress", ["none", "bf16", "fp16"], None, "none",
       "send smaller gradients (ddp, spawn)")
flag("--find-unused-parameters",
       "for a model that does not use all its parameters in every step")
option("--timeout", number(float, 1, 10**9), "SECONDS", 600,
       "stop the job if a rank does not respond for so many seconds")
# Old launchers pass it; LOCAL_RANK is read instead.
option("--local-rank", int, None, None, argparse.SUPPRESS)
option("--local_rank", int, None, None, argparse.SUPPRESS)
option("--replicas", positive, "N", None,
       "devices (default: all accelerators, or 2 on CPU)", "dp")
option("--nproc", positive, "N", None,
       "processes on this machine (default: all accelerators, or 2 on CPU)", "spawn")
option("--shard-size", positive, "N", None,
       "ranks that share one copy of the model (default: all)", "fsdp")
option("--reduce-every", ["step", "micro-batch"], None, "step",
       "when gradients are cut with --accum-steps; micro-batch: less memory, more traffic", "fsdp")
option("--nnodes", positive, "N", 1, "machines", "spawn")
option("--node-rank", whole, "N", None,
       "number of this machine, from 0; needed if there are several", "spawn")
option("--dist-url", url, "tcp://HOST:PORT", None,
       "where the machine with --node-rank 0 listens", "spawn")

headlines.append("run")
option("--best", filled, "NAME[:min]", None,
       "what decides best.pt: a metric (default: the first), whose highest value is best; with "
       ":min, as mae:min, or as loss, the lowest")
option("--seed", number(int, 0, 2**63 - 1), "N", 0,
       "of initial weights, order, augmentation, dropout")
option("--save-every", positive, "STEPS", None,
       "write last.pt this often, not only after each epoch")
option("--keep-every", positive, "EPOCHS", None,
       "also keep the checkpoint of every N-th epoch")
flag("--shards", "each rank writes its own part of each checkpoint", False, "fsdp")
flag("--eval-only", "evaluate what --resume or --weights names, and end")
option("--log-every", positive, "STEPS", 50, "steps between two lines of the log")
flag("--tensorboard", "also write the log for TensorBoard, into --output-dir")
option("--device", str, "auto|cpu|cuda|...", "auto",
       "auto takes the accelerator if there is one")
flag("--deterministic", "slower kernels that give the same bits in every run")
flag("--check", "try a batch of each set before the run", True)
# fmt: on


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        unknown = re.findall(r"--[\w-]+", message) if message.startswith("unrecognized") else []
        near = [difflib.get_close_matches(name, self._option_string_actions, 1) for name in unknown]
        meant = "".join(f"; did you mean {found[0]}?" for found in near if found)
        raise UsageError(f"{message.removeprefix('argument ')} (--help lists the options){meant}")

    def exit(self, status: int = 0, message: str | None = None) -> None:
        raise Stopped(status, "")  # after --help


def build_parser(mode: str) -> argparse.ArgumentParser:
    """Return the parser of a mode: single, dp, ddp, spawn or fsdp."""
    start = f"Start it with: bash run.sh {mode} {'' if mode == 'single' else '[N] '}[options]."
    usage = f"train_{mode}.py [options]"
    parser = Parser(prog=f"train_{mode}.py", usage=usage, description=start, allow_abbrev=False)
    groups: dict[str, Any] = {}
    for option in OPTIONS:
        if option.modes and mode not in option.modes:
            continue
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        groups[option.group].add_argument(option.name, **option.settings)
    return parser


def options_of_checkpoint(argv: list[str] | None) -> tuple[str, dict[str, Any], int]:
    """Return the file of the task, the options of a resumed run, and its step within the epoch.

    The file is that of --task, else that of the checkpoint, else task.py. A new run has no options.
    """
    first = Parser(allow_abbrev=False, add_help=False)
    first.add_argument("--task", type=task_file)
    first.add_argument("--resume", type=path)
    first.add_argument("--output-dir", type=filled)
    named, _ = first.parse_known_args(argv)
    last = Path(named.output_dir or "/", "last.pt")
    file = last if named.resume == "auto" else Path(named.resume or "/")
    if not file.is_file():
        return named.task or TASK, {}, 0
    saved = load_checkpoint(file, verify=False)
    config = saved["config"]
    return named.task or task_file(config.get("task", "digits")), config, saved.get("step", 0)


def changes_at_resume(args: argparse.Namespace, config: dict[str, Any], step: int) -> list[str]:
    """Return a line for each option that the command line names anew: `--lr 0.05 (0.1 before)`.

    Raises UsageError if with one of them the position in the checkpoint would mean nothing.
    """
    changes = []
    for name, before in config.items():
        now, option = getattr(args, name, before), f"--{name.replace('_', '-')}"
        if name == "task":
            before, now = Path(before).name, Path(task_name(now)).name  # a file may have moved
        if now == before:
            continue
        within = name in SAME_EPOCH and step and not args.eval_only
        if name in SAME_RUN or within:
            advice = "leave it out" + (", or start anew without --resume" if not within else "")
            where = " within an epoch" if within else ""
            raise UsageError(f"{option} {now}: the checkpoint has {before}{where}; {advice}")
        changes.append(f"{option} {now} ({before} before)")
    return changes


def add_options_of_task(parser: argparse.ArgumentParser, file: str, saved: Any) -> list[str]:
    """Let the file of a task add its options; return their names in the parsed arguments."""
    check_file("--task", file)
    before = len(parser._actions)
    with as_task_error(f"--task {file}: add_options"):
        if add_options := getattr(load_module(Path(file)), "add_options", None):
            add_options(parser.add_argument_group(f"task {Path(file).stem}"))
    added = parser._actions[before:]
    for action in added:
        action.required &= action.dest not in saved  # the checkpoint has it
    return [action.dest for action in added]


def declared(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that a checkpoint holds. A task may have put other things into `args`."""
    names = ({option.key for option in OPTIONS} | {*args.task_options}) - PER_RUN
    options = {name: value for name, value in vars(args).items() if name in names}
    return options | {"task": task_name(args.task)}


def schedule_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that common.lr_factor takes."""
    names = ("schedule", "epochs", "warmup_epochs", "step_epochs", "step_gamma", "final_lr")
    return {name: getattr(args, name) for name in names}


def parse_args(
    mode: str, argv: list[str] | None = None, devices: int | None = None
) -> argparse.Namespace:
    """Parse and check the command line of a mode.

    `devices` is how many processes run.sh ddp is going to start on this machine. Raises
    UsageError that names the option, what was given and what would work.
    """
    launched = mode in LAUNCHED and devices is None  # by torchrun or srun
    if not launched:
        forget_launcher()
    parser = build_parser(mode)
    task, config, step = options_of_checkpoint(argv)
    task_options = add_options_of_task(parser, task, config)
    # What the command line does not name stays as it is here.
    args = parser.parse_args(argv, argparse.Namespace(**config | {"task": task}))
    args.parallel_mode, args.task_options = mode, task_options
    args.changes = changes_at_resume(args, config, step)
    for name in task_options:
        option = f"--{name.replace('_', '-')}"
        with as_task_error(
            f"--task {args.task}: {option} must be a number, a text or a list of them"
        ):
            check_loadable(getattr(args, name))  # a checkpoint holds it
    if mode == "spawn":
        check_nodes(args)
    process.this_run = args, *check_devices(args, mode, devices, launched)
    check_values(args, mode)
    try:
        check_files(args)
    except OSError as error:  # a name too long, a directory that may not be read
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    return args


def check_nodes(args: argparse.Namespace) -> None:
    """Check what train_spawn.py on several machines needs to find the others."""
    if args.nnodes > 1 and (args.node_rank is None or not args.dist_url):
        needed = "--node-rank, which counts machines from 0, and --dist-url, where the first one is"
        raise UsageError(f"--nnodes {args.nnodes} needs {needed}")
    args.node_rank = args.node_rank or 0
    if args.node_rank >= args.nnodes:
        raise UsageError(f"--node-rank {args.node_rank} must be below --nnodes {args.nnodes}")


def check_devices(
    args: argparse.Namespace, mode: str, devices: int | None, launched: bool
) -> tuple[int, int]:
    """Return the number of devices, and of those on this machine; check that they get samples.

    It translates srun's variables.
    """
    by_srun = launched and take_ranks_of_slurm()
    device_type = resolve_device_type(args.device)
    available = 1 if device_type == "cpu" else torch.accelerator.device_count()
    if launched:
        follow_launcher()
        here, world_size = (int(os.environ.get(n) or 1) for n in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    else:
        if choice := {"dp": "replicas", "spawn": "nproc"}.get(mode):
            devices = getattr(args, choice) or (2 if device_type == "cpu" else available)
            setattr(args, choice, devices)
        here = devices or 1
        world_size = here * getattr(args, "nnodes", 1)
    # SLURM may show each of its tasks one device alone.
    if device_type != "cpu" and here > available and not by_srun:
        problem = f"{here} processes or replicas, but only {available} accelerators"
        raise UsageError(f"{problem}; use {available}, or --device cpu")
    least = world_size * args.accum_steps
    if args.batch_size < least:
        pieces = f"{world_size} devices x {args.accum_steps} accumulation steps"
        problem = f"--batch-size {args.batch_size} cannot be cut into {pieces}"
        raise UsageError(f"{problem}; it must be at least {least}")
    size = getattr(args, "shard_size", None) or world_size
    if world_size % size != 0:
        raise UsageError(f"--shard-size {size} must divide the number of devices, {world_size}")
    return world_size, here


def check_values(args: argparse.Namespace, mode: str) -> None:
    """Check options that contradict each other, and what a mode cannot do."""
    if args.eval_batch_size is None:
        args.eval_batch_size = min(128, args.batch_size // args.accum_steps)
    schedule, marks = args.schedule, args.step_epochs
    if args.tensorboard and not importlib.util.find_spec("tensorboard"):
        raise UsageError("--tensorboard needs the package tensorboard: pip install tensorboard")
    if args.amp != "off" and args.dtype == "float64":
        raise UsageError(f"--amp {args.amp} is half precision; use --amp off, or --dtype float32")
    if schedule == "step" and not marks:
        raise UsageError("--schedule step needs --step-epochs, when the rate drops, as 15 25")
    if marks and schedule not in USE_MARKS:
        advice = f"use {' or '.join(USE_MARKS)}, or give --step-epochs no number"
        raise UsageError(f"--step-epochs has no effect on --schedule {schedule}; {advice}")
    if schedule in ("cyclic", "sawtooth") and len(marks) > 1:
        raise UsageError(f"--schedule {schedule} takes one of --step-epochs, the length of a cycle")
    if args.grad_compress != "none" and mode not in ("ddp", "spawn"):
        advice = "use ddp or spawn, or --grad-compress none"
        raise UsageError(f"--grad-compress {args.grad_compress} belongs to DDP; {advice}")
    if mode == "dp" and args.compile:
        raise UsageError("--compile does not follow nn.DataParallel; use ddp, or --no-compile")
    if mode == "dp" and args.sync_bn:
        raise UsageError("--sync-bn does not work in nn.DataParallel; use ddp, or --no-sync-bn")
    if args.amp == ("fp16" if mode == "fsdp" else "bf16-shards"):
        problem = "is not tested with sharded gradients" if mode == "fsdp" else "is for fsdp alone"
        raise UsageError(f"--amp {args.amp} {problem}; use --amp bf16")
    if mode == "fsdp" and args.channels_last:
        raise UsageError("--channels-last: fsdp cannot shard it; use --no-channels-last")


def check_files(args: argparse.Namespace) -> None:
    """Check that the named files and directories are there, and hold no other run."""
    if args.weights:
        check_file("--weights", args.weights)
    if args.resume not in (None, "auto"):
        check_file("--resume", args.resume)
    if args.eval_only and not args.resume and not args.weights:
        raise UsageError("--eval-only needs --resume FILE or --weights FILE, what to evaluate")
    if args.resume == "auto" and not args.output_dir:
        needed = "--output-dir, the directory whose last.pt it looks for"
        raise UsageError(f"--resume auto needs {needed}")
    new = f"runs/{Path(args.task).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    args.output_dir = os.path.abspath(args.output_dir or new)
    check_directory(args)
    directory = Path(args.output_dir)
    if args.eval_only and any(directory.glob("*.pt")):
        return  # it writes nothing there
    folder = next(p for p in (directory, *directory.parents) if os.path.lexists(p))
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        problem = f"cannot write in {folder}; choose another one"
        raise UsageError(f"--output-dir {directory}: {problem}")


def check_directory(args: argparse.Namespace) -> None:
    """Raise UsageError if another run has filled the output directory."""
    directory, log = Path(args.output_dir), Path(args.output_dir, "metrics.jsonl")
    own = args.resume == "auto" or Path(args.resume or "/").parent.resolve() == directory.resolve()
    if own or args.eval_only:  # which writes nothing there
        return
    saved = any(directory.glob("*.pt"))
    if saved or (log.exists() and log.stat().st_size > 0):
        problem = f"--output-dir {directory} already holds a run"
        advice = "; continue it with" if saved else " without a checkpoint; start it anew with"
        raise UsageError(f"{problem}{advice} --resume auto, or choose another directory")


def check_file(option: str, name: str) -> None:
    path = Path(name)
    if not path.is_file():
        problem = "is a directory; name a file in it" if path.is_dir() else "no such file"
        raise UsageError(f"{option} {name}: {problem}")
