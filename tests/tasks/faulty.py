"""The task of everything.py, which does what FAULT says when the sample of FAULT_AT is trained on, or loaded.

FAULT_AT is EPOCH:INDEX, so that which rank meets it, and in which step, follows from the order of the samples. Where FAULT_ONCE names a
file, that file is made first, and the fault happens only once however often the run is started.
"""

import os
import signal
import sys
import time

import everything
import torch
from everything import build_model, per_sample_metrics
from torch.utils.data import Dataset, get_worker_info

from sampling import KeyedDataset, splitmix64

__all__ = ["build_datasets", "build_model", "per_sample_loss", "per_sample_metrics"]
__all__ += ["train_metrics"]

FAULT, PACE = os.environ.get("FAULT", ""), float(os.environ.get("FAULT_PACE", "0"))
EPOCH, INDEX = map(int, os.environ.get("FAULT_AT", "-1:-1").split(":"))
MARKED = 1000  # added to the label of the sample, by which the loss knows it


def fail_in_loss():
    raise RuntimeError("broken in the loss")


IN_LOSS = {
    "raises": fail_in_loss,
    "leaves with 0": lambda: sys.exit(0),
    "dies with 1": lambda: os._exit(1),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def once():
    """Whether it has not happened yet."""
    try:
        os.close(os.open(os.environ["FAULT_ONCE"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Marked(Dataset):
    """The data set, with a mark on one sample of one epoch."""

    whole_batches = True

    def __init__(self, dataset, seed):
        self.key = splitmix64(seed, EPOCH, 0)
        self.dataset, self.targets = dataset, dataset.targets

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index]

    def __getitems__(self, indices):
        images, labels = self.dataset.__getitems__(indices)
        if KeyedDataset.key == self.key and INDEX in indices:
            if FAULT == "worker raises" and get_worker_info() and once():
                raise RuntimeError("broken in a loader worker")
            place = torch.tensor(indices) == INDEX
            labels = labels + place * MARKED
            if FAULT == "NaN input":
                images = images.float().masked_fill(place.view(-1, 1, 1, 1), float("nan"))
        return images, labels


def build_datasets(args):
    train, held_out = everything.build_datasets(args)
    return Marked(train, args.seed), held_out


def per_sample_loss(outputs, targets):
    marked = targets >= MARKED
    losses = everything.per_sample_loss(outputs, targets - marked * MARKED)
    if losses.requires_grad:
        time.sleep(PACE)  # makes steps long without work, so that a fault finds training to disturb
    if marked.any() and FAULT in IN_LOSS and once():
        IN_LOSS[FAULT]()
    return losses


def train_metrics(outputs, targets):
    return per_sample_metrics(outputs, targets % MARKED)
