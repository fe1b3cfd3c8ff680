"""The data, the network and the loss of examples/minimal_ddp.py, for the scripts; in --dtype."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from task import per_sample_metrics

__all__ = ["build_datasets", "build_model", "per_sample_loss", "per_sample_metrics"]


def build_datasets(args):
    data = np.load("data/digits.npz")
    images = torch.from_numpy(data["images"]).to(getattr(torch, args.dtype)) / 16
    labels = torch.from_numpy(data["labels"]).long()
    return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])


def build_model(args):
    torch.set_default_dtype(getattr(torch, args.dtype))  # the initial weights are drawn in it
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    torch.set_default_dtype(torch.float32)
    return net


def per_sample_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")
