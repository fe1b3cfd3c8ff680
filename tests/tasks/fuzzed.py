"""A random small problem, built from the parts that a specification names; tests/campaigns/fuzz.py draws it.

A specification is a dict with some of the keys of `DEFAULTS`. The program writes one task file for
each trial, which hands its specification to `make_task`.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from tasks.images import ImagesInMemory

CLASSES, SIZE, WIDTH = 4, 6, 12

# Every key of a specification, with the value of the simplest task. Shrinking goes back to these.
DEFAULTS: dict[str, Any] = {
    "train": 33,  # number of training samples
    "held_out": 11,
    "data": "images",  # the shipped data set in memory; or "drawn": own randomness in __getitem__
    "augment": False,
    "weights": False,  # the losses of a step are divided by weights, of which some are zero
    "norm": "",  # batch, batch_mean, instance_tracked, layer
    "dropout": 0.0,
    "heads": 1,
    "tied": False,
    "frozen": False,
    "metric": "negative",  # accuracy
}


# ----------------------------------------------------------------------------------------- data


class Drawn(Dataset):
    """Draws from the generators of torch, Python and numpy when a sample is fetched."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.targets = images, labels

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randint(0, 20, (1, SIZE, SIZE)) + random.randrange(10) + np.random.randint(10)
        return (self.images[index] // 2 + noise).to(torch.uint8), self.targets[index]


def make_images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return uint8 [count, 1, SIZE, SIZE], a noisy pattern for each class, and int64 [count]."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.rand(CLASSES, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    noise = torch.rand(count, 1, SIZE, SIZE, generator=generator)
    return ((0.6 * patterns[labels] + 0.4 * noise) * 255).to(torch.uint8), labels


def build_set(spec: dict[str, Any], count: int, seed: int, **augment: Any) -> Dataset:
    images, labels = make_images(count, seed)
    if spec["data"] == "drawn":
        return Drawn(images, labels)
    return ImagesInMemory(images, labels, **augment)


# ---------------------------------------------------------------------------------------- model


def build_norm(name: str) -> nn.Module:
    if name == "batch":
        return nn.BatchNorm2d(4)
    if name == "batch_mean":
        return nn.BatchNorm2d(4, momentum=None)
    if name == "instance_tracked":
        return nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    return nn.LayerNorm([4, SIZE, SIZE]) if name else nn.Identity()


class Net(nn.Module):
    """Images uint8 [n, 1, SIZE, SIZE] -> logits [n, CLASSES], one or several."""

    def __init__(self, spec: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.dtype = spec, dtype
        # The gradient of a bias before these norms is zero but for rounding; AdamW would follow it
        bias = not spec["norm"].startswith(("batch", "instance"))
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=bias)
        self.norm = build_norm(spec["norm"])
        self.body = nn.Linear(4 * (SIZE // 2) ** 2, WIDTH)
        self.drop = nn.Dropout(spec["dropout"])
        if spec["tied"]:
            self.encoder, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.decoder.weight = self.encoder.weight
        self.heads = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(spec["heads"]))
        if spec["frozen"]:
            self.body.bias.requires_grad_(False)

    def forward(self, images: Tensor) -> Any:
        value = torch.tanh(self.norm(self.conv(images.to(self.dtype) / 100 - 1)))
        value = self.body(F.avg_pool2d(value, 2).flatten(1))
        value = self.drop(torch.tanh(value))
        if self.spec["tied"]:
            value = value + torch.tanh(self.decoder(torch.tanh(self.encoder(value))))
        first, *others = (head(value) for head in self.heads)
        return {"first": first, "others": tuple(others)} if others else first


# ----------------------------------------------------------------------------------------- task


def weight_of(label: Any) -> Any:
    """Return the weight of a label: 0, 1, 2, 0 for the four classes."""
    return label % 3


def logits_of(outputs: Any) -> list[Tensor]:
    return [outputs["first"], *outputs["others"]] if isinstance(outputs, dict) else [outputs]


def make_task(changes: dict[str, Any]) -> dict[str, Callable]:
    """Return the functions of a task, by name; `changes` is what differs from `DEFAULTS`."""
    assert changes.keys() <= DEFAULTS.keys(), f"unknown parts: {changes.keys() - DEFAULTS.keys()}"
    spec = {**DEFAULTS, **changes}

    def build_datasets(args: Namespace) -> tuple[Dataset, Dataset]:
        augment = {"shift": 1, "flip": True} if spec["augment"] else {}
        return build_set(spec, spec["train"], 1, **augment), build_set(spec, spec["held_out"], 2)

    def build_model(args: Namespace) -> nn.Module:
        return Net(spec, getattr(torch, args.dtype))

    def loss_weights(targets: Any) -> Tensor:
        return weight_of(targets)

    def per_sample_loss(outputs: Any, targets: Any) -> Tensor:
        losses = 0
        for logits in logits_of(outputs):
            losses = losses + F.cross_entropy(logits, targets, reduction="none")
        return losses * weight_of(targets) if spec["weights"] else losses

    def per_sample_metrics(outputs: Any, targets: Any) -> dict[str, Any]:
        logits = logits_of(outputs)[0].double()
        error = (logits.softmax(1) - F.one_hot(targets, CLASSES)).square().sum(1)
        hits = (logits.argmax(1) == targets).float()
        found = {"minus_error": -error, "top1": hits}
        return dict(reversed(found.items())) if spec["metric"] == "accuracy" else found

    functions = [build_datasets, build_model, per_sample_loss, per_sample_metrics]
    functions += [loss_weights] if spec["weights"] else []
    return {function.__name__: function for function in functions}
