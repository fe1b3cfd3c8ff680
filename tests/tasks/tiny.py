"""Tiny models on 203 training and 57 held-out digits, so that hundreds of runs take minutes. `--model` is a plus-separated set of parts:

conv (always there), batchnorm, dropout, unused (a layer that no image uses, and one that few images do), balanced (an order of the
samples in which each class comes equally often).
"""

import functools

import numpy as np
import small
import torch.nn.functional as F
from torch import nn

from sampling import splitmix64
from task import per_sample_loss, per_sample_metrics

__all__ = ["add_options", "build_datasets", "build_model", "per_sample_loss", "per_sample_metrics"]


def add_options(parser):
    parser.add_argument("--model", default="conv")


def build_datasets(args):
    train, held_out = small.build_datasets(args)
    if "balanced" in getattr(args, "model", ""):
        train.epoch_order = functools.partial(balanced, train.targets.tolist())
    return train, held_out


def balanced(classes, seed, epoch):
    """Return an order that draws each class equally often on average. A sample that comes again has the number index + length."""
    draw, length = np.random.RandomState(divmod(splitmix64(seed, epoch, -1), 2**32)), len(classes)
    members = [[i for i in range(length) if classes[i] == name] for name in dict.fromkeys(classes)]
    drawn, places = draw.randint(len(members), size=length), draw.random_sample(length)
    order, times = [], [0] * length
    for group, place in zip(drawn, places):
        index = members[group][int(place * len(members[group]))]
        order.append(index + length * times[index])
        times[index] += 1
    return np.array(order)


class Tiny(nn.Module):
    """Images [n, 1, 8, 8] -> [n, 10]. BatchNorm replaces normalisations over one sample, in 2-D and 1-D and with both kinds of momentum."""

    def __init__(self, parts):
        super().__init__()
        # Beside BatchNorm its gradient would be zero but for rounding: AdamW would make steps of that.
        bias = "batchnorm" not in parts
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1, bias=bias)
        self.norm1 = nn.BatchNorm2d(8) if "batchnorm" in parts else nn.GroupNorm(2, 8)
        self.conv2 = nn.Conv2d(8, 32, 3, padding=1, bias=bias)
        self.drop2 = nn.Dropout2d(0.1) if "dropout" in parts else nn.Identity()
        self.norm2 = (
            nn.BatchNorm1d(128, momentum=None) if "batchnorm" in parts else nn.LayerNorm(128)
        )
        self.drop3 = nn.Dropout(0.2) if "dropout" in parts else nn.Identity()
        if "unused" in parts:
            self.never, self.rarely = nn.Linear(128, 128), nn.Linear(128, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, images):
        images = (images.to(self.head.weight.dtype) - 73.3) / 90.2
        features = F.max_pool2d(F.relu(self.norm1(self.conv1(images))), 2)
        features = F.adaptive_max_pool2d(self.drop2(self.conv2(features)), 2).flatten(1)
        features = self.drop3(F.relu(self.norm2(features)))
        if hasattr(self, "rarely"):
            # For one image in twenty: in most steps some ranks do not use the layer, in some steps no rank does.
            chosen = (images.sum((1, 2, 3)) > 9).nonzero().flatten()
            if len(chosen):
                features = features.index_add(0, chosen, F.relu(self.rarely(features[chosen])))
        return self.head(features)


def build_model(args):
    parts = args.model.split("+")
    known = {"conv", "batchnorm", "dropout", "unused", "balanced"}
    assert parts[0] == "conv" and set(parts) <= known, args.model
    return Tiny(parts)
