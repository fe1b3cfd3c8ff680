"""A small part of the digits, so that a run takes a second: 203 training and 57 held-out samples, no round numbers."""

import torch
from torch import nn

import task
from task import per_sample_loss, per_sample_metrics

__all__ = ["build_datasets", "build_model", "per_sample_loss", "per_sample_metrics"]


def build_datasets(args):
    train, held_out = task.build_datasets(args)
    for dataset, length in ((train, 203), (held_out, 57)):
        dataset.targets = dataset.targets[:length]
    return train, held_out


def build_model(args):
    """The network of task.py with fewer channels, as convolutions in float64 are slow."""
    model = task.build_model(args)
    model.conv1 = nn.Conv2d(1, 12, 3, padding=1)
    model.conv2 = nn.Conv2d(12, 12, 3, padding=1)
    model.conv3 = nn.Conv2d(12, 32, 3, padding=1)
    model.head = nn.Linear(32 * 2 * 2, 10)
    for layer in model.children():  # so that it learns within thirty steps
        nn.init.kaiming_normal_(layer.weight)
    return model.to(getattr(torch, args.dtype))
