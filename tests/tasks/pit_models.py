"""The small digits under networks with what goes wrong in parallel: `--model` plain, dropout, batchnorm or unused; any other is plain."""

import sys
from pathlib import Path

import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from small import build_datasets, per_sample_loss, per_sample_metrics

__all__ = ["add_options", "build_datasets", "build_model", "per_sample_loss", "per_sample_metrics"]


class Net(nn.Module):
    """uint8 [n, 1, 8, 8] -> [n, 10]"""

    def __init__(self, name):
        super().__init__()
        self.first, self.last = nn.Linear(64, 32), nn.Linear(32, 10)
        self.between = {"dropout": nn.Dropout(0.5), "batchnorm": nn.BatchNorm1d(32)}.get(
            name, nn.Identity()
        )
        if name == "unused":
            self.unused = nn.Linear(3, 3)

    def forward(self, images):
        pixels = images.flatten(1).to(self.first.weight.dtype) / 90 - 0.8
        return self.last(F.relu(self.between(self.first(pixels))))


def add_options(parser):
    parser.add_argument("--model", default="plain")


def build_model(args):
    return Net(args.model)
