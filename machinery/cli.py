"""The command line: one table of options for all scripts, and the checks that need nothing else."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common import SCHEDULES, USE_MARKS, UsageError, resolve_device_type
from machinery.process import Stopped, follow_launcher, forget_launcher, take_ranks_of_slurm
from machinery.usertask import blame, load_module, read_back

# Traits of an option, as bits.
FIXED = 0  # the same on all nodes, and when a run is resumed
MAY_CHANGE = 1  # when a run is resumed
PER_NODE = 2  # may differ between the nodes of a run
EVALUATED = 4  # the same also when the checkpoint is evaluated
FREE = MAY_CHANGE | PER_NODE


class Option(NamedTuple):
    group: str
    name: str
    traits: int
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
    traits: int,
    text: str,
    *modes: str,
    **settings: Any,
) -> None:
    """Declare an option of all scripts, or of the named modes alone; `kind` is a type or a list."""
    if default not in (None, []):
        text += " (default: task.py)" if default == TASK else " (default: %(default)s)"
    settings |= {"choices": kind} if isinstance(kind, list) else {"type": kind, "metavar": metavar}
    settings |= {"default": default, "help": text}
    OPTIONS.append(Option(headlines[-1], name, traits, modes, settings))


def flag(name: str, traits: int, text: str, default: bool = False) -> None:
    """Declare a switch with a negative form: --compile and --no-compile."""
    settings = {"action": argparse.BooleanOptionalAction, "default": default, "help": text}
    OPTIONS.append(Option(headlines[-1], name, traits, (), settings))


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
TASKS = {path.stem: path for path in sorted((ROOT / "tasks").glob("*.py"))}


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
    return str(TASKS[name])


# fmt: off

headlines.append("most used")
option("--task", task_file, "NAME|FILE.py", TASK, EVALUATED | PER_NODE,
       "the problem to train on: a name in tasks/, or your file")
option("--epochs", positive, "N", 30, MAY_CHANGE, "passes over the training set")
option("--batch-size", positive, "N", 64, FIXED, "samples per optimizer step, over all devices")
option("--lr", amount, "X", 0.1, FIXED, "peak learning rate")
option("--amp", ["off", "bf16", "fp16"], None, "off", FIXED, "automatic mixed precision")
option("--output-dir", filled, "DIR", None, FREE,
       "for checkpoints and metrics.jsonl (default: a new directory under runs/)")
option("--resume", path, "auto|FILE", None, FREE,
       "continue from a checkpoint; auto: from last.pt in --output-dir if it is there")

headlines.append("data")
flag("--skip-corrupt", MAY_CHANGE,
       "replace a sample that cannot be read by the next one; else the run ends")
flag("--balanced", FIXED, "draw samples with replacement, from each class equally often")
option("--workers", whole, "N", None, FREE,
       "loader processes per device (default: its cores, at most 8; for data `in_memory` 0 on a "
       "CPU, and with `whole_batches` 1 on a GPU, or 0 if they have `to`: then the GPU holds them, "
       "which any N prevents)")

headlines.append("model")
option("--weights", path, "FILE", None, FREE, "start from the tensors in FILE that fit")
option("--freeze", filled, "PATTERN", [], EVALUATED,
       "do not train the parameters with these names, as 'conv*'; '!conv1.*' leaves some out",
       nargs="+", action="extend")

headlines.append("optimization")
option("--accum-steps", positive, "N", 1, FIXED,
       "micro-batches per optimizer step; each is cut among the devices")
option("--eval-batch-size", positive, "N", None, FIXED,
       "samples per forward in evaluation, at most an eighth of the set, rounded up "
       "(default: a micro-batch, at most 128)")
option("--optimizer", ["sgd", "adamw"], None, "sgd", EVALUATED, "update rule")
option("--momentum", share, "X", 0.9, FIXED, "of sgd; the first beta of adamw")
flag("--nesterov", FIXED, "Nesterov momentum, sgd only")
option("--weight-decay", amount, "X", 1e-3, FIXED, "on every parameter")
option("--schedule", list(SCHEDULES), None, "cosine", FIXED, "learning rate over the run")
option("--warmup-epochs", amount, "X", 2.0, FIXED, "linear rise of the learning rate at the start")
option("--step-epochs", positive, "N", [], FIXED,
       "step: epochs of the drops; cyclic, sawtooth: length of a cycle",
       nargs="+", action="extend")
option("--step-gamma", share, "X", 0.1, FIXED,
       "step: factor of a drop; cyclic, sawtooth: lowest / highest rate")
option("--final-lr", share, "FRACTION", 0.0, FIXED, "cosine: share of --lr that is left at the end")
option("--scale-lr", ["none", "linear", "sqrt"], None, "none", FIXED,
       "multiply --lr by the world size, or its root")
option("--clip-grad-norm", number(float, 1e-12), "X", None, FIXED,
       "largest norm of the whole gradient (default: no limit)")
option("--average", ["none", "ema"], None, "none", EVALUATED,
       "evaluate an exponential average of the weights over the steps")
option("--ema-decay", number(float, 0, 1), "X", 0.99, FIXED,
       "share of the old average in each step; smaller in the first steps")

headlines.append("speed and precision")
flag("--compile", MAY_CHANGE, "torch.compile the model")
flag("--channels-last", MAY_CHANGE, "store images and filters as NHWC")
option("--dtype", ["float32", "float64"], None, "float32", EVALUATED,
       "of the parameters; in float64 all modes print the same digits")

headlines.append("distribution")
flag("--sync-bn", FIXED,
     "BatchNorm statistics over a micro-batch of all devices (no effect on one)")
option("--grad-compress", ["none", "bf16", "fp16"], None, "none", FIXED,
       "send smaller gradients (ddp, spawn)")
flag("--find-unused-parameters", MAY_CHANGE,
       "for a model that does not use all its parameters in every step")
option("--timeout", number(float, 1, 10**9), "SECONDS", 600, MAY_CHANGE,
       "stop the job if a rank does not respond for so many seconds")
# Old launchers pass it; LOCAL_RANK is read instead.
option("--local-rank", int, None, None, FREE, argparse.SUPPRESS)
option("--replicas", positive, "N", None, MAY_CHANGE,
       "devices (default: all accelerators, or 2 on CPU)", "dp", action="append")
option("--nproc", positive, "N", None, MAY_CHANGE,
       "processes on this machine (default: all accelerators, or 2 on CPU)", "spawn",
       action="append")
option("--shard-size", positive, "N", None, MAY_CHANGE,
       "ranks that share one copy of the model (default: all)", "fsdp")
option("--nnodes", positive, "N", 1, MAY_CHANGE, "machines", "spawn")
option("--node-rank", whole, "N", None, FREE,
       "number of this machine, from 0; needed if there are several", "spawn")
option("--dist-url", url, "tcp://HOST:PORT", None, FREE,
       "where the machine with --node-rank 0 listens", "spawn")

headlines.append("run")
option("--best", filled, "NAME[:min]", None, FIXED,
       "what decides best.pt: a metric (default: the first), whose highest value is best; with "
       ":min, as mae:min, or as loss, the lowest")
option("--seed", number(int, 0, 2**63 - 1), "N", 0, FIXED,
       "of initial weights, order, augmentation, dropout")
option("--save-every", positive, "STEPS", None, MAY_CHANGE,
       "write last.pt this often, not only after each epoch")
option("--keep-every", positive, "EPOCHS", None, MAY_CHANGE,
       "also keep the checkpoint of every N-th epoch")
flag("--eval-only", MAY_CHANGE, "evaluate what --resume or --weights names, and end")
option("--log-every", positive, "STEPS", 50, MAY_CHANGE, "steps between two lines of the log")
flag("--tensorboard", MAY_CHANGE, "also write the log for TensorBoard, into --output-dir")
option("--device", str, "auto|cpu|cuda|...", "auto", FREE,
       "auto takes the accelerator if there is one")
flag("--deterministic", MAY_CHANGE, "slower kernels that give the same bits in every run")
flag("--check", FREE, "try a first batch of each set before the run", True)
# fmt: on


def keys(trait: int) -> set[str]:
    """Return the names, as in the parsed arguments, of the options that have a trait."""
    return {option.key for option in OPTIONS if trait & option.traits}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        if unknown := re.search(r"unrecognized arguments: (--[^\s=]+)", message):
            added = f'"{unknown[1]}"'  # as add_options of a task writes it
            if tasks := " or ".join(n for n, path in TASKS.items() if added in path.read_text()):
                raise UsageError(f"{unknown[1]} belongs to --task {tasks}")
        raise UsageError(f"{message.removeprefix('argument ')} (--help lists the options)")

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
        names = [option.name, "--local_rank"] if option.name == "--local-rank" else [option.name]
        groups[option.group].add_argument(*names, **option.settings)
    return parser


def add_options_of_task(
    parser: argparse.ArgumentParser, argv: list[str] | None
) -> tuple[list[str], set[str]]:
    """Let the file of --task add its options, and return their names in the parsed arguments.

    The second result has those with `may_change`, see task.py: they are FREE. The others are FIXED
    and EVALUATED.
    """
    first = Parser(allow_abbrev=False, add_help=False)
    first.add_argument("--task", type=task_file, default=TASK)
    path = Path(first.parse_known_args(argv)[0].task)
    check_file("--task", str(path))
    before = len(parser._actions)
    with blame(f"--task {path}: add_options", str(path)):
        if add_options := getattr(load_module(path), "add_options", None):
            add_options(parser.add_argument_group(f"task {path.stem}"))
    added = parser._actions[before:]
    free = {action.dest for action in added if getattr(action, "may_change", False)}
    return [action.dest for action in added], free


def declared(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the command line. A task may have put other things into `args`."""
    names = {option.key for option in OPTIONS} | {*args.task_options}
    return {name: value for name, value in vars(args).items() if name in names}


def schedule_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that common.lr_factor takes."""
    names = ("schedule", "epochs", "warmup_epochs", "step_epochs", "step_gamma", "final_lr")
    return {name: getattr(args, name) for name in names}


def run_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that Run takes."""
    names = ("epochs", "output_dir", "resume", "eval_only", "best", "save_every", "keep_every")
    names += ("log_every", "tensorboard")
    config = declared(args)
    fixed = config.keys() - keys(MAY_CHANGE)
    if args.eval_only:
        fixed = keys(EVALUATED) | {*args.task_options}  # what changes the numbers
    per_node = keys(PER_NODE) | args.free_task_options
    return {name: getattr(args, name) for name in names} | {
        "replicas": getattr(args, "replicas", 1),
        "config": config,
        # In the order of --help: the refusal names the option that was given, as --batch-size, and
        # not one whose default follows from it, as --eval-batch-size.
        "fixed": [name for name in config if name in fixed - args.free_task_options],
        "data_options": args.task_options,
        "same_on_all_ranks": [name for name in config if name not in per_node],
    }


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
    parser, start = build_parser(mode), os.getcwd()
    task_options, free = add_options_of_task(parser, argv)
    moved = os.getcwd()  # by the task's file
    os.chdir(start)  # to which the paths of the command line belong
    args = parser.parse_args(argv)
    args.parallel_mode, args.task_options, args.free_task_options = mode, task_options, free
    for name in task_options:
        option = f"--{name.replace('_', '-')}"
        with blame(f"--task {args.task}: {option} must be a number, a text or a list of them"):
            read_back(getattr(args, name))  # a checkpoint holds it
    if mode == "spawn":
        check_nodes(args)
    with blame("the variables of the launcher"):  # numbers, and all of them
        check_devices(args, mode, devices, launched)
    check_values(args, mode)
    try:
        check_files(args)
    except OSError as error:  # a name too long, a directory that may not be read
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    os.chdir(moved)
    return args


def check_nodes(args: argparse.Namespace) -> None:
    """Check what train_spawn.py on several machines needs to find the others."""
    if args.nnodes > 1 and (args.node_rank is None or not args.dist_url):
        needed = "--node-rank, which counts machines from 0, and --dist-url, where the first one is"
        raise UsageError(f"--nnodes {args.nnodes} needs {needed}")
    args.node_rank = args.node_rank or 0
    if args.node_rank >= args.nnodes:
        raise UsageError(f"--node-rank {args.node_rank} must be below --nnodes {args.nnodes}")


def check_devices(args: argparse.Namespace, mode: str, devices: int | None, launched: bool) -> None:
    """Translate srun's variables; count the devices, and check that they exist and get samples."""
    by_srun = launched and take_ranks_of_slurm()
    device_type = resolve_device_type(args.device)
    available = 1 if device_type == "cpu" else torch.accelerator.device_count()
    if launched:
        follow_launcher()
        here, world_size = (int(os.environ.get(n) or 1) for n in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    else:
        if choice := {"dp": "replicas", "spawn": "nproc"}.get(mode):
            first, *others = getattr(args, choice) or [2 if device_type == "cpu" else available]
            if other := next((n for n in others if n != first), None):
                raise UsageError(f"--{choice} {other}: N, or another --{choice}, is {first}")
            setattr(args, choice, first)
            devices = first
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


def check_values(args: argparse.Namespace, mode: str) -> None:
    """Check options that contradict each other, and what a mode cannot do."""
    if args.eval_batch_size is None:
        args.eval_batch_size = min(128, args.batch_size // args.accum_steps)
    if args.tensorboard and not importlib.util.find_spec("tensorboard"):
        raise UsageError("--tensorboard needs the package tensorboard: pip install tensorboard")
    schedule, steps = args.schedule, args.step_epochs
    if args.amp != "off" and args.dtype == "float64":
        problem = f"--amp {args.amp} is half precision and --dtype float64 double"
        raise UsageError(f"{problem}; leave one out")
    if schedule == "step" and not steps:
        raise UsageError("--schedule step needs --step-epochs, when the rate drops, as 15 25")
    if steps and schedule not in USE_MARKS:
        use = " or ".join(USE_MARKS)
        raise UsageError(f"--step-epochs has no effect on --schedule {schedule}; use {use}")
    if schedule in ("cyclic", "sawtooth") and len(steps) > 1:
        raise UsageError(f"--schedule {schedule} takes one of --step-epochs, the length of a cycle")
    if args.grad_compress != "none" and mode not in ("ddp", "spawn"):
        problem = f"--grad-compress {args.grad_compress} belongs to DDP"
        raise UsageError(f"{problem}; use ddp or spawn, or leave it out")
    if mode == "dp" and args.compile:
        raise UsageError("--compile cannot follow the copies of nn.DataParallel; use ddp or spawn")
    if mode == "dp" and args.sync_bn:
        problem = "--sync-bn: nn.DataParallel cannot synchronise BatchNorm"
        raise UsageError(f"{problem}; use ddp or spawn")
    if mode == "fsdp" and args.amp == "fp16":
        raise UsageError("--amp fp16 cannot scale sharded gradients; use --amp bf16")
    if mode == "fsdp" and args.channels_last:
        raise UsageError("--channels-last: torch shards contiguous parameters alone")


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
    new = f"runs/{Path(args.task).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    args.output_dir = os.path.abspath(args.output_dir or new)
    directory, log = Path(args.output_dir), Path(args.output_dir, "metrics.jsonl")
    saved = any(directory.glob("*.pt"))
    if args.eval_only and saved:
        return  # it writes nothing there
    own = args.resume == "auto" or Path(args.resume or "/").resolve().parent == directory.resolve()
    logged = not args.eval_only and log.exists() and log.stat().st_size > 0
    if not own and (saved or logged):
        problem = f"--output-dir {directory} already holds a run"
        advice = "; continue it with" if saved else " without a checkpoint; start it anew with"
        raise UsageError(f"{problem}{advice} --resume auto, or choose another directory")
    folder = next(p for p in (directory, *directory.parents) if os.path.lexists(p))
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        problem = f"cannot write in {folder}; choose another one"
        raise UsageError(f"--output-dir {directory}: {problem}")


def check_file(option: str, name: str) -> None:
    path = Path(name)
    if not path.is_file():
        problem = "is a directory; name a file in it" if path.is_dir() else "no such file"
        raise UsageError(f"{option} {name}: {problem}")
