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
    parser = argparse.ArgumentParser()
    for name in ("--dataset", "--data-dir", "--model", "--task", "--device"):
        parser.add_argument(name)
    for name in ("--batch-size", "--image-size", "--workers", "--epochs"):
        parser.add_argument(name, type=int)
    parser.add_argument("--label-smoothing", type=float, default=0.0)
    parser.set_defaults(dataset="imagefolder", model="resnet9", task="task.py", device="auto")
    parser.set_defaults(batch_size=64, workers=0, epochs=30)
    parser.set_defaults(dtype="float32", pretrained=False, download=False, compile=False)
    args = parser.parse_args()
    if args.device == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        args.device = accelerator.type if accelerator else "cpu"
    path = Path(args.task)
    sys.path.append(str(path.parent))
    task = importlib.import_module(path.stem)
    torch.manual_seed(0)
    return args, task.build_datasets(args)[0], task.build_model(args)


def collate(batch: object) -> object:
    return default_collate(batch) if isinstance(batch, list) else batch
