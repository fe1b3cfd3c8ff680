"""A small part of the digits, so that a run takes a second: 203 training and 57 held-out samples, no round numbers."""

import task
from task import build_model, per_sample_loss, per_sample_metrics

__all__ = ["build_datasets", "build_model", "per_sample_loss", "per_sample_metrics"]


def build_datasets(args):
    train, held_out = task.build_datasets(args)
    for dataset, length in ((train, 203), (held_out, 57)):
        dataset.targets = dataset.targets[:length]
    return train, held_out
