"""The command line of the four scripts: one list of options, and every check that can be made before a run begins."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import importlib.util
import inspect
import io
import math
import os
import re
import signal
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

SIGNALS = {signal.SIGUSR1: 0, signal.SIGINT: 130, signal.SIGTERM: 143}  # they stop a run, which after saving ends with this code
RESERVED = {"loss", "count", "event", "epoch", "global_step"}  # what else stands in a line of metrics.jsonl


class UsageError(Exception):
    """The user asked for something that cannot work; the message names the option, what was given and what would work. Exit code 2."""

    by_all = False  # whether every rank raises it: then the first rank of each node speaks for all of them

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(str(message).splitlines()))  # one line, however many an error has that it quotes


class Stopped(Exception):
    """The run ends early, on every rank at the same step, after everything worth keeping was saved; `code` is the exit code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code, self.reason = code, reason


_undo: list[Callable[[], Any]] = []  # how to put back what a run has changed in its process


def undo_at_end(function: Callable, *arguments: Any) -> None:
    """Have `function(*arguments)` put back, after the run, what the caller is about to change; only if the process outlives the run."""
    _undo.append(functools.partial(function, *arguments))


def undo_all() -> None:
    """Put everything back, the last change first."""
    while _undo:
        _undo.pop()()


def set_variable(name: str, value: str | None) -> None:
    """Set an environment variable, or remove it."""
    undo_at_end(_put_variable, name, os.environ.get(name))
    _put_variable(name, value)


def _put_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def number(kind: type, low: float, high: float = math.inf) -> Callable[[str], Any]:
    """An argparse type: a finite number of `kind` in [low, high]."""
    limits = f"{low} to {high}" if high < math.inf else f"at least {low}"

    def parse(text: str) -> Any:
        try:
            value = kind(text)
            if not low <= value <= high or not math.isfinite(value):
                raise ValueError
        except (ValueError, OverflowError) as error:  # overflow: a whole number that no float can hold
            raise argparse.ArgumentTypeError(f"must be a {'whole ' if kind is int else ''}number, {limits}, got {text}") from error
        return value

    return parse


def filled(text: str) -> str:
    """An argparse type: a text that is not empty, as an unset variable of the shell would make it."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"must not be empty, got {text!r}")
    return text


class Once(argparse.Action):
    """Stores a value that may be said twice, but not in two ways, as in `run.sh spawn 2 --nproc 3`."""

    def __call__(self, parser: argparse.ArgumentParser, args: argparse.Namespace, value: Any, option: str | None = None) -> None:
        if getattr(args, self.dest) not in (None, value):
            raise UsageError(f"{option} {value} contradicts {getattr(args, self.dest)}, which N of run.sh, or {option} before, has said")
        setattr(args, self.dest, value)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default only where there is one, and once."""

    def _get_help_string(self, action: argparse.Action) -> str:
        plain = "(default: " in action.help or action.default in (None, [])
        return action.help if plain else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise UsageError(f"{message.removeprefix('argument ')} (--help lists the options)")

    def exit(self, status: int = 0, message: str | None = None) -> None:
        raise Stopped(status, "")  # after --help; SystemExit would look like that of a task


def build_parser(mode: str) -> argparse.ArgumentParser:
    """The options of all four scripts, the same names and defaults in each; only how many devices to use belongs to the mode."""
    positive, whole, fraction = number(int, 1), number(int, 0), number(float, 0, 1)
    boolean = {"action": argparse.BooleanOptionalAction, "default": False}
    several = "run.sh ddp also takes --nnodes N, --node-rank N, --master-addr HOST and --master-port PORT, for several machines"
    epilog = several if mode == "ddp" else None
    parser = Parser(prog=f"train_{mode}.py", allow_abbrev=False, formatter_class=HelpFormatter, epilog=epilog)

    group = parser.add_argument_group("data")
    datasets = ["digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "imagefolder", "synthetic"]
    group.add_argument("--dataset", choices=datasets, default="digits", help="what the default task trains on")
    group.add_argument("--data-dir", type=filled, metavar="DIR", help="where the data set's files are; digits and synthetic need none")
    group.add_argument("--download", **boolean, help="fetch the data set into --data-dir where it is missing")
    group.add_argument("--skip-corrupt", **boolean, help="take the next sample in place of one that cannot be read; else the run ends")
    group.add_argument("--balanced", **boolean, help="draw the samples of an epoch with replacement, from each class equally often")
    group.add_argument("--image-size", type=number(int, 8), metavar="N", help="side of the square images of imagefolder and synthetic")
    group.add_argument(
        "--workers", type=whole, metavar="N", help="loader processes per device (default: 0 for data in memory, else its cores)"
    )

    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", type=filled, default="digitnet", metavar="NAME", help="digitnet, resnet9, or any torchvision classification model"
    )
    group.add_argument(
        "--weights", type=filled, metavar="FILE|default", help="start from these, as far as they fit; default: torchvision's for --model"
    )
    group.add_argument(
        "--freeze", type=filled, nargs="+", default=[], metavar="PATTERN", help="do not train parameters with these names, as 'conv*'"
    )
    group.add_argument(
        "--task", type=filled, default=str(Path(__file__).with_name("task.py")), metavar="FILE.py", help="the problem to train on"
    )

    group = parser.add_argument_group("optimization")
    group.add_argument("--epochs", type=positive, default=30, metavar="N", help="passes over the training set")
    group.add_argument("--batch-size", type=positive, default=64, metavar="N", help="samples in one optimizer step, over all devices")
    group.add_argument(
        "--accum-steps", type=positive, default=1, metavar="N", help="micro-batches of a step; each is cut among the devices"
    )
    group.add_argument(
        "--eval-batch-size", type=positive, metavar="N", help="samples in an evaluation forward (default: a micro-batch, at most 128)"
    )
    group.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd", help="update rule")
    group.add_argument("--lr", type=number(float, 0), default=0.1, metavar="X", help="peak learning rate")
    group.add_argument("--momentum", type=fraction, default=0.9, metavar="X", help="of sgd; the first beta of adamw")
    group.add_argument("--nesterov", **boolean, help="Nesterov momentum, sgd only")
    group.add_argument("--weight-decay", type=number(float, 0), default=1e-3, metavar="X", help="on every parameter")
    group.add_argument("--schedule", choices=["constant", "cosine", "step", "cyclic"], default="cosine", help="learning rate over the run")
    group.add_argument(
        "--warmup-epochs", type=number(float, 0), default=2.0, metavar="X", help="linear rise of the learning rate at the start"
    )
    group.add_argument(
        "--step-epochs", type=positive, nargs="+", default=[], metavar="N", help="step: epochs of the drops; cyclic: cycle length"
    )
    group.add_argument(
        "--step-gamma", type=fraction, default=0.1, metavar="X", help="step: factor of a drop; cyclic: lowest / highest rate"
    )
    group.add_argument(
        "--scale-lr", choices=["none", "linear", "sqrt"], default="none", help="multiply --lr by the world size, or its root"
    )
    group.add_argument(
        "--clip-grad-norm", type=number(float, 1e-12), metavar="X", help="largest norm of the whole gradient (default: no limit)"
    )
    group.add_argument("--label-smoothing", type=fraction, default=0.1, metavar="X", help="probability spread over all classes")
    text = "evaluate an average of the weights: of all steps, fading (ema), or of the ends of the last quarter's epochs (swa)"
    group.add_argument("--average", choices=["none", "ema", "swa"], default="none", help=text)

    group = parser.add_argument_group("speed and precision")
    group.add_argument("--amp", choices=["off", "bf16", "fp16"], default="off", help="automatic mixed precision")
    group.add_argument("--compile", **boolean, help="torch.compile the model")
    group.add_argument("--channels-last", **boolean, help="store images and filters as NHWC")
    group.add_argument("--dtype", choices=["float32", "float64"], default="float32", help="of the parameters; float64 is for proofs")

    group = parser.add_argument_group("distribution")
    group.add_argument("--sync-bn", **boolean, help="BatchNorm statistics over the global batch (no effect on one device)")
    group.add_argument(
        "--grad-compress", choices=["none", "bf16", "fp16", "powersgd"], default="none", help="send smaller gradients (ddp, spawn)"
    )
    group.add_argument("--find-unused-parameters", **boolean, help="for a model that does not use all its parameters in every step")
    group.add_argument(
        "--timeout", type=number(float, 1, 10**9), default=600, metavar="SECONDS", help="a rank that is silent for so long ends the job"
    )
    group.add_argument(
        "--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS
    )  # old launchers pass it; LOCAL_RANK is read instead
    if mode == "dp":
        group.add_argument("--replicas", type=positive, action=Once, metavar="N", help="devices (default: all accelerators, or 2 on CPU)")
    if mode == "spawn":
        text = "processes on this machine (default: all accelerators, or 2 on CPU)"
        group.add_argument("--nproc", type=positive, action=Once, metavar="N", help=text)
        group.add_argument("--nnodes", type=positive, default=1, metavar="N", help="machines")
        group.add_argument("--node-rank", type=whole, metavar="N", help="number of this machine, from 0; needed if there are several")
        group.add_argument("--dist-url", type=filled, metavar="tcp://HOST:PORT", help="where the machine with --node-rank 0 listens")

    group = parser.add_argument_group("run")
    group.add_argument(
        "--seed", type=number(int, 0, 2**63 - 1), default=0, metavar="N", help="of initial weights, order, augmentation, dropout"
    )
    group.add_argument(
        "--output-dir", type=filled, metavar="DIR", help="for checkpoints and metrics.jsonl (default: a new folder under runs/)"
    )
    group.add_argument(
        "--resume", type=filled, metavar="auto|FILE", help="go on from a checkpoint; auto: from last.pt in --output-dir if it is there"
    )
    group.add_argument("--save-every", type=positive, metavar="STEPS", help="write last.pt this often, not only after each epoch")
    group.add_argument("--keep-every", type=positive, metavar="EPOCHS", help="also keep the checkpoint of every so many epochs")
    group.add_argument("--eval-only", **boolean, help="evaluate the checkpoint of --resume and leave")
    group.add_argument("--log-every", type=positive, default=50, metavar="STEPS", help="steps between two lines in the log")
    group.add_argument("--tensorboard", **boolean, help="also write the log for TensorBoard, into --output-dir")
    group.add_argument("--device", default="auto", metavar="auto|cpu|cuda|...", help="auto takes the accelerator if there is one")
    group.add_argument("--deterministic", **boolean, help="slower kernels that give the same bits in every run")
    return parser


def parse_args(mode: str, argv: list[str] | None = None, world_size: int | None = None, local: int | None = None) -> argparse.Namespace:
    """Parse and check the command line of a mode; for ddp, `world_size` is what a launcher is going to make, `local` of them here."""
    parser = build_parser(mode)
    args = parser.parse_args(argv)
    launched = mode == "ddp" and world_size is None  # the environment is of this run's launcher, not of one around run.sh
    by_srun = launched and take_ranks_of_slurm()
    world_size = int(os.environ.get("WORLD_SIZE", 1)) if launched else world_size or 1
    if not launched:
        for name in ("RANK", "LOCAL_RANK"):
            set_variable(name, None)  # of some other launcher: here it would silence what is the only, or first, rank
    device_type = resolve_device_type(args.device)
    available = 1 if device_type == "cpu" else torch.accelerator.device_count()
    if option := {"dp": "replicas", "spawn": "nproc"}.get(mode):
        if getattr(args, option) is None:
            setattr(args, option, available if device_type != "cpu" else 2)
        world_size = getattr(args, option) * getattr(args, "nnodes", 1)
    local = local or world_size // getattr(args, "nnodes", 1)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", local)) if launched else local

    if device_type != "cpu" and local_world_size > available and not by_srun:  # SLURM may show each of its tasks one device alone
        raise UsageError(f"{local_world_size} processes or replicas, but only {available} accelerators; use {available}, or --device cpu")
    if args.batch_size < world_size * args.accum_steps:
        pieces = f"{world_size} devices x {args.accum_steps} accumulation steps"
        raise UsageError(f"--batch-size {args.batch_size} cannot be cut into {pieces}; it must be at least {world_size * args.accum_steps}")
    if args.eval_batch_size is None:
        args.eval_batch_size = min(128, args.batch_size // args.accum_steps)
    if args.amp != "off" and args.dtype == "float64":
        raise UsageError(f"--amp {args.amp} computes in half precision and --dtype float64 in double; use --amp off or --dtype float32")
    if args.schedule == "step" and not args.step_epochs:
        raise UsageError("--schedule step needs --step-epochs, the epochs at which the learning rate drops, as --step-epochs 15 25")
    if args.step_epochs and args.schedule not in ("step", "cyclic"):
        given = " ".join(map(str, args.step_epochs))
        raise UsageError(
            f"--step-epochs {given} has no effect on --schedule {args.schedule}; use --schedule step or cyclic, or leave it out"
        )
    if args.schedule == "cyclic" and len(args.step_epochs) > 1:
        raise UsageError(f"--step-epochs {' '.join(map(str, args.step_epochs))}: --schedule cyclic takes one number, the length of a cycle")
    if args.epochs < args.warmup_epochs != parser.get_default("warmup_epochs"):  # the default may be cut short by a run of one epoch
        raise UsageError(
            f"--warmup-epochs {args.warmup_epochs:g} is longer than the run, --epochs {args.epochs}: it would never reach --lr"
        )
    if args.optimizer == "adamw" and args.momentum == 1:
        raise UsageError("--momentum 1: as the first beta of --optimizer adamw it must be below 1, as 0.9")
    if args.nesterov and (args.optimizer != "sgd" or args.momentum == 0):
        raise UsageError(f"--nesterov needs --optimizer sgd and a momentum above 0, got {args.optimizer} and {args.momentum}")
    if mode == "dp" and args.sync_bn:
        raise UsageError("--sync-bn: nn.DataParallel cannot synchronise BatchNorm; use ddp or spawn, or leave it out")
    if args.grad_compress == "powersgd" and args.amp == "fp16":
        raise UsageError("--grad-compress powersgd keeps an error in units of the loss scale, which --amp fp16 changes; use --amp bf16")
    if mode in ("single", "dp") and args.grad_compress != "none":
        raise UsageError(
            f"--grad-compress {args.grad_compress}: there is nothing to send in one process; use ddp or spawn, or leave it out"
        )
    if mode == "spawn" and args.nnodes > 1 and not args.dist_url:
        raise UsageError(f"--nnodes {args.nnodes} needs --dist-url tcp://HOST:PORT, the address of the machine with --node-rank 0")
    if mode == "spawn" and args.nnodes > 1 and args.node_rank is None:
        raise UsageError(f"--nnodes {args.nnodes} needs --node-rank, which counts the machines from 0")
    if mode == "spawn":
        args.node_rank = args.node_rank or 0
    if mode == "spawn" and args.dist_url:
        address = re.fullmatch(r"tcp://[^:/]+:([0-9]{1,5})", args.dist_url)
        if not address or not 1 <= int(address[1]) <= 65535:
            raise UsageError(f"--dist-url {args.dist_url}: must be tcp://HOST:PORT with a port of 1 to 65535, as tcp://10.0.0.1:29500")
    if mode == "spawn" and args.node_rank >= args.nnodes:
        raise UsageError(f"--node-rank {args.node_rank} must be below --nnodes {args.nnodes}")
    for option in ("data_dir", "task", "weights", "resume", "output_dir"):
        try:
            Path(getattr(args, option) or "").exists()
        except OSError as error:  # a name too long, a folder that may not be read
            raise UsageError(f"--{option.replace('_', '-')} {getattr(args, option)}: {error.strerror}") from error
    if args.dataset not in ("digits", "synthetic"):
        if args.data_dir is None:
            raise UsageError(f"--dataset {args.dataset} needs --data-dir, the folder with its files")
        if not args.download and not Path(args.data_dir).is_dir():
            raise UsageError(f"--data-dir {args.data_dir}: no such folder")
    elif args.data_dir and args.task == parser.get_default("task"):
        raise UsageError(
            f"--data-dir {args.data_dir} has no effect on --dataset {args.dataset}; add --dataset imagefolder, or leave it out"
        )
    if args.weights not in (None, "default") and not Path(args.weights).is_file():
        raise UsageError(f"--weights {args.weights}: {'is a folder; name a file in it' if Path(args.weights).is_dir() else 'no such file'}")
    if args.eval_only and not args.resume:
        raise UsageError("--eval-only needs --resume FILE, the checkpoint to evaluate")
    if args.resume == "auto" and not args.output_dir:
        raise UsageError("--resume auto needs --output-dir, the folder whose last.pt it looks for")
    if args.resume not in (None, "auto") and not Path(args.resume).is_file():
        folder = "is a folder; name a file in it, as last.pt" if Path(args.resume).is_dir() else "no such file"
        raise UsageError(f"--resume {args.resume}: {folder}")
    own = args.resume == "auto" or (args.resume and Path(args.resume).resolve().parent == Path(args.output_dir or "").resolve())
    if args.output_dir and not own and not args.eval_only and not restarted() and (Path(args.output_dir) / "last.pt").exists():
        raise UsageError(f"--output-dir {args.output_dir} already holds a run; continue it with --resume auto, or choose another folder")
    return args


def parse_nodes(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Take what several nodes need out of the command line of `run.sh ddp`; return it, and the rest, which is the script's."""
    parser = Parser(prog="run.sh ddp", add_help=False, allow_abbrev=False)
    parser.add_argument("--nnodes", type=number(int, 1))
    parser.add_argument("--node-rank", type=number(int, 0))
    parser.add_argument("--master-addr", type=filled)
    parser.add_argument("--master-port", type=number(int, 1, 65535))
    nodes, rest = parser.parse_known_args(argv)
    for name in ("node_rank", "master_addr", "master_port") if nodes.nnodes is None else ():
        if getattr(nodes, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(nodes, name)} has no effect without --nnodes, the number of machines")
    nodes.nnodes, nodes.master_port = nodes.nnodes or 1, nodes.master_port or 29500
    if nodes.nnodes > 1 and None in (nodes.node_rank, nodes.master_addr):
        needs = "--node-rank, which counts the nodes from 0, and --master-addr, the address of the first"
        raise UsageError(f"--nnodes {nodes.nnodes} needs {needs}, as in: --nnodes 2 --node-rank 0 --master-addr 10.0.0.1")
    if (nodes.node_rank or 0) >= nodes.nnodes:
        raise UsageError(f"--node-rank {nodes.node_rank} must be below --nnodes {nodes.nnodes}")
    if nodes.master_addr and not re.fullmatch(r"[\w.-]+", nodes.master_addr):
        raise UsageError(f"--master-addr {nodes.master_addr}: must be a host name or an IPv4 address; a port goes to --master-port")
    return nodes, rest


def take_ranks_of_slurm() -> bool:
    """Under `srun python train_ddp.py`, say in torchrun's words what SLURM says in its own; return whether it is so.

    A batch script has most of SLURM's variables too, but no step: what it starts without srun is not a rank.
    """
    if "RANK" in os.environ or "SLURM_STEP_NODELIST" not in os.environ:
        return False
    slurm = {name.removeprefix("SLURM_"): value for name, value in os.environ.items() if name.startswith("SLURM_")}
    tasks = [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", slurm["STEP_TASKS_PER_NODE"]) for _ in range(int(times or 1))]
    local_world_size = str(tasks[int(slurm["NODEID"])])
    os.environ.update(
        RANK=slurm["PROCID"], LOCAL_RANK=slurm["LOCALID"], WORLD_SIZE=slurm["STEP_NUM_TASKS"], LOCAL_WORLD_SIZE=local_world_size
    )
    first = re.sub(r"\[(\w+)[^]]*\]", r"\1", slurm["STEP_NODELIST"]).split(",")[0]  # gpu[07-09,12],login is gpu07 and others
    os.environ.setdefault("MASTER_ADDR", first if len(tasks) > 1 else "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(20_000 + int(slurm["JOB_ID"]) % 10_000))
    return True


def restarted() -> bool:
    """Whether torchrun started this process again after a failure (`--max-restarts`): then the run goes on from its last.pt."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


@contextlib.contextmanager
def named(where: str, path: str | None = None) -> Iterator[None]:
    """Turn whatever the user's code raises in this block into one line that says where; `path` is the file whose line number counts."""
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # a script without `if __name__ == "__main__"` leaves by the latter
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, SyntaxError):
            frames.append((error.filename, error.lineno))
        lines = [line for name, line in frames if path and name and line and os.path.realpath(name) == os.path.realpath(path)]
        raise UsageError(f"{where}{f', line {lines[-1]}' if lines else ''}: {type(error).__name__}: {error}") from error


def load_task(args: argparse.Namespace) -> types.SimpleNamespace:
    """Load the four functions of `--task`, with options filled into the keyword-only parameters of the loss and the metrics."""
    path = Path(args.task)
    if not path.is_file():
        raise UsageError(f"--task {path}: {'is a folder; name a file in it' if path.is_dir() else 'no such file'}")
    if path.suffix != ".py":
        raise UsageError(f"--task {path}: must be a Python file with a name that ends in .py")
    with named(f"--task {path}", str(path)):
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.append(folder)  # so that it can import its neighbours; last, so that they replace nothing
        name = path.stem if folder == str(Path(__file__).resolve().parent) else f"task_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    names = ["build_datasets", "build_model", "per_sample_loss", "per_sample_metrics"]
    if missing := [name for name in names if not callable(getattr(module, name, None))]:
        raise UsageError(f"--task {path} must define {', '.join(names)}; missing: {', '.join(missing)}")
    task = types.SimpleNamespace(**{name: getattr(module, name) for name in names})
    for name in names[2:]:
        function = getattr(module, name)
        options = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        if unknown := [option for option in options if not hasattr(args, option)]:
            raise UsageError(f"--task {path}: {name} asks for {', '.join(unknown)}, which is no option")
        setattr(task, name, _bind(function, {option: getattr(args, option) for option in options}))
    return task


def _bind(function: Callable, options: dict[str, Any]) -> Callable:
    return lambda outputs, targets: function(outputs, targets, **options)


def resolve_device_type(name: str) -> str:
    """`auto` is the accelerator if there is one, else cpu; a named device must be here."""
    found = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    if name not in ("auto", "cpu", found):
        raise UsageError(f"--device {name}: not on this machine; available: auto, cpu{f', {found}' if found != 'cpu' else ''}")
    return found if name == "auto" else name


def end_with_parent(number: int) -> None:
    """Have the system send this signal when the process that started this one dies. Source: PR_SET_PDEATHSIG in man 2 prctl."""
    ctypes.CDLL(None).prctl(1, number)


def leave_signals_to_parent() -> None:
    """Let the signals that stop a run be answered by the process that started this one, and end with it: in loader workers, for example.

    A worker that outlives its rank would hold the lock on the run's folder.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)


def check_run(args: argparse.Namespace) -> None:
    """Raise UsageError for what else would only be found when the run has begun: a bad task, data set, model or checkpoint.

    A process of its own looks, so that nothing of it is left to the run: no random number drawn, no state of the task, no thread.
    """
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # it ends the other ranks if one is wrong; srun would let them wait
    if "LAUNCH_MEETING_FILE" in os.environ or (torchrun and os.environ.get("LOCAL_RANK", "0") != "0"):
        return  # launch.py did it before it started this rank, or the first rank of this machine does it
    sys.stdout.flush()
    sys.stderr.flush()
    device_type = resolve_device_type(args.device)  # here: a forked process cannot ask
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        _tell_what_is_wrong(args, device_type, writer)
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        wrong = pipe.read()
    _, status = os.waitpid(child, 0)
    if wrong:
        raise UsageError(wrong)
    if status:
        raise RuntimeError(f"the check before the run ended with {os.waitstatus_to_exitcode(status)}")


def _tell_what_is_wrong(args: argparse.Namespace, device_type: str, writer: int) -> NoReturn:
    code = 1
    try:
        leave_signals_to_parent()
        torch.set_num_threads(1)  # those of the parent are not here
        with open(writer, "w", encoding="utf-8", errors="replace") as pipe:
            try:
                _check_run(args, device_type)
            except UsageError as error:
                if "forked subprocess" not in str(error):  # a task that uses the accelerator by itself shows in the run what it can do
                    pipe.write(str(error))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _check_run(args: argparse.Namespace, device_type: str) -> None:
    from checkpoint import find_checkpoint  # they need this module
    from common import GlobalBatchSampler, ShardSampler, freeze, load_weights, read_tensors, train_mode
    from launch import check_address

    if args.output_dir:
        check_folder(args.output_dir)
    if getattr(args, "dist_url", None):
        address = urlsplit(args.dist_url)
        check_address(f"--dist-url {args.dist_url}", address.hostname, address.port, args.node_rank, args.nnodes)
    if args.tensorboard:
        with named("--tensorboard needs the package tensorboard"):
            importlib.import_module("torch.utils.tensorboard")
    task = load_task(args)
    with named(f"--task {args.task}: build_datasets", args.task):
        train, held_out = task.build_datasets(args)
        lengths = len(train), len(held_out)
    GlobalBatchSampler(args, train)  # the samplers know what they need
    ShardSampler(lengths[1], args.eval_batch_size)
    quiet = contextlib.redirect_stdout(io.StringIO())  # what is right is said by the run
    asked = " with --weights default" * (args.weights == "default")
    with quiet, named(where := f"--task {args.task}: build_model{asked}", args.task):
        torch.manual_seed(args.seed)
        net = task.build_model(args)
        if not isinstance(net, nn.Module) or not list(net.parameters()):
            raise UsageError(f"{where} must return an nn.Module with parameters, got {type(net).__name__}")
        tensors = dict([*net.named_parameters(), *net.named_buffers()])
        if lazy := [name for name, tensor in tensors.items() if nn.parameter.is_lazy(tensor)]:
            raise UsageError(f"{where}: {', '.join(lazy[:5])} has no shape yet; send a batch through lazy modules in build_model")
        if imaginary := [name for name, tensor in tensors.items() if tensor.is_complex()]:
            raise UsageError(f"{where}: {', '.join(imaginary[:5])} is complex, which --dtype would cut; keep torch.view_as_real of it")
        freeze(args, net.to(getattr(torch, args.dtype)))
    if args.weights not in (None, "default"):
        try:
            with quiet:
                load_weights(args, net, read_tensors(args.weights, old=True))
        except UsageError:
            raise
        except Exception as error:  # torch's own words would advise to let the file run its code
            what = f"{type(error).__name__}: {str(error).partition('. ')[0]}"
            raise UsageError(f"--weights {args.weights}: damaged, or not a file of weights: {what}") from error
    with named(f"--resume {args.resume}: not a checkpoint of this program"):
        _, checkpoint = find_checkpoint(args, lengths[0])
    if checkpoint:
        with named(f"--resume {args.resume}: its weights do not fit the model"):
            net.load_state_dict(checkpoint["model"])
    train_mode(net)
    check_samples(args, task, net, train, "training", device_type)
    check_samples(args, task, net.eval(), held_out, "evaluation", device_type)


@torch.no_grad()
def check_samples(
    args: argparse.Namespace, task: types.SimpleNamespace, net: nn.Module, dataset: Dataset, name: str, device_type: str
) -> None:
    """Send the first two samples, and the last ones, through all of the task, on the CPU; they are fetched as a run fetches them."""
    from common import ShardSampler

    n = min(2, len(dataset))
    metrics = check_batch(args, task, net, dataset, list(range(n)), f"the first {n} samples of the {name} set", device_type)
    if net.training:  # BatchNorm cannot train on one sample
        return
    length, batch_size = len(dataset), ShardSampler(len(dataset), args.eval_batch_size).batch_size
    last = min(n, length % batch_size or batch_size)  # as many as the last batch has, at most two
    others = check_batch(args, task, net, dataset, list(range(length - last, length)), f"the end of the {name} set", device_type)
    if only := ", ".join(sorted(set(metrics) ^ set(others))):
        where = f"--task {args.task}: per_sample_metrics"
        raise UsageError(f"{where} must return the same names for every batch; only some batches have {only}")


def check_batch(
    args: argparse.Namespace,
    task: types.SimpleNamespace,
    net: nn.Module,
    dataset: Dataset,
    indices: list[int],
    what: str,
    device_type: str,
) -> dict[str, Tensor]:
    """Send these samples through all of the task and return the metrics, none in training. Raises UsageError that says what is wrong."""
    from common import KeyedDataset, map_tensors

    n = len(indices)
    with named(where := f"--task {args.task}: {what}", args.task):
        batch = KeyedDataset(dataset, args).__getitems__((0, indices))
        map_tensors(lambda tensor: tensor, batch)  # raises if there is something else in it
        pair = isinstance(batch, (tuple, list))
        if not pair or len(batch) != 2:
            got = f"{len(batch)} parts" if pair else type(batch).__name__
            raise UsageError(f"{where}: a sample must be (input, target), got {got}")
    inputs, targets = batch
    with named(f"--task {args.task}: the model of build_model", args.task):
        try:
            outputs = net(inputs)
        except Exception:
            if device_type == "cpu":
                raise
            return {}  # perhaps only the accelerator can do it
    with named(where := f"--task {args.task}: per_sample_loss", args.task):
        check_values(where, task.per_sample_loss(outputs, targets), n)
    if net.training:
        return {}
    with named(where := f"--task {args.task}: per_sample_metrics", args.task):
        metrics = task.per_sample_metrics(outputs, targets)
        if not isinstance(metrics, dict) or not metrics:
            raise UsageError(f"{where} must return at least one metric, as {{'accuracy': tensor of [n]}}, got {metrics!r}")
        if taken := [key for key in metrics if key in RESERVED or not isinstance(key, str)]:
            raise UsageError(f"{where}: a metric must be named by a text that the log does not use itself, got {taken[0]!r}")
        for key, value in metrics.items():
            check_values(f"{where}: {key}", value, n)
    return metrics


def check_values(where: str, value: Any, n: int) -> None:
    """Raise UsageError if `value` is not one number for each of n samples."""
    if not isinstance(value, Tensor) or value.shape != (n,):
        got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(f"{where} must be one number a sample, shape [{n}] for {n} samples, got {got}")


def check_folder(name: str) -> None:
    """Raise UsageError if `--output-dir` is not, and cannot become, a folder that may be written to."""
    folder = Path(name).absolute()
    while not os.path.lexists(folder):  # a link to nowhere is in the way too
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--output-dir {name}: {folder} is {'read-only' if folder.is_dir() else 'not a folder'}; choose another one")
