"""What the peers share: the options of a run, and the data and the network of this project.

So all of them train the same network on the same samples; all else in a script is its library's.
"""

import argparse
import importlib
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path += [str(ROOT), str(ROOT / "tasks")]


def given() -> tuple[argparse.Namespace, Dataset, nn.Module]:
    """Return the options, the training set and the network on the CPU.

    The options have the names of the project's own. A set in memory gives a batch that is ready,
    by `__getitems__`, so a DataLoader needs `collate`, which leaves that as it is.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--task", default="task.py")
    parser.add_argument("--device", default="auto")
    for name, default in (("--batch-size", 64), ("--workers", 0), ("--epochs", 30)):
        parser.add_argument(name, type=int, default=default)
    path = Path(parser.parse_known_args()[0].task)
    sys.path.append(str(path.parent))
    task = importlib.import_module(path.stem)
    if hasattr(task, "add_options"):
        task.add_options(parser.add_argument_group())
    # Options of the project's own that a task may read.
    parser.set_defaults(dtype="float32", seed=0, eval_only=False, compile=False)
    args = parser.parse_args()
    if args.device == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        args.device = accelerator.type if accelerator else "cpu"
    torch.manual_seed(0)
    return args, task.build_datasets(args)[0], task.build_model(args)


def collate(batch: object) -> object:
    return default_collate(batch) if isinstance(batch, list) else batch
