"""A random small problem, built from the parts that a specification names; tests/campaigns/fuzz.py draws it.

A specification is a dict with some of the keys of `DEFAULTS`. The program writes one task file for
each trial, which hands its specification to `make_task`.
"""

from __future__ import annotations

import functools
import random
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
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
    "ragged": False,  # a sample has one to three labels, which collate pads
    "observer": False,  # the network notes in training how large its values are
    "buffers": False,  # of other types and shapes
    "module_hooks": False,  # and a forward that is wrapped
    "parameter_hook": False,  # which all modes with ranks refuse
    "loss_module": False,  # the loss has a parameter, in the network
    "optimizer": "",  # of the task: groups, lists, lookahead
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


class Ragged(Dataset):
    """A sample has one to three labels: that of its class, and the next ones."""

    def __init__(self, data: Dataset) -> None:
        self.data, self.targets = data, data.targets

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.data[index]
        return image, (label + torch.arange(1 + index % 3)) % CLASSES


def pad(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*samples)
    return torch.stack(images), pad_sequence(labels, batch_first=True, padding_value=-1)


def build_set(spec: dict[str, Any], count: int, seed: int, **augment: Any) -> Dataset:
    images, labels = make_images(count, seed)
    drawn = spec["data"] == "drawn"
    data = Drawn(images, labels) if drawn else ImagesInMemory(images, labels, **augment)
    data = Ragged(data) if spec["ragged"] else data
    data.shards = [count // 3, count // 2 - count // 3, count - count // 2]  # for --shuffle-window
    return data


# ---------------------------------------------------------------------------------------- model


def build_norm(name: str) -> nn.Module:
    if name == "batch":
        return nn.BatchNorm2d(4)
    if name == "batch_mean":
        return nn.BatchNorm2d(4, momentum=None)
    if name == "instance_tracked":
        return nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    return nn.LayerNorm([4, SIZE, SIZE]) if name else nn.Identity()


class Observer(nn.Module):
    """Notes in training how large values are, the first time as they are; cuts them in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.zeros(()))
        self.register_buffer("seen", torch.tensor(False))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, value: Tensor) -> Tensor:
        if not self.training:
            return value.clamp(-self.most, self.most) if self.seen else value
        most = value.detach().abs().max()
        self.most.copy_(torch.where(self.seen, 0.9 * self.most + 0.1 * most, most))
        self.seen.fill_(True)
        self.calls.add_(1)
        return value


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("clock", torch.tensor(1_769_000_000.25, dtype=torch.float64))
        self.register_buffer("order", torch.arange(WIDTH).flip(0))
        self.register_buffer("mask", torch.arange(WIDTH) != 3)
        self.register_buffer("nothing", torch.zeros(0, 2))
        self.register_buffer("scale", torch.full((1, WIDTH), 0.5), persistent=False)

    def forward(self, value: Tensor) -> Tensor:
        late = (self.clock - 1_769_000_000).to(value.dtype) + self.nothing.sum()
        return value[:, self.order] * self.mask * self.scale * late * 8


def add_hooks(net: nn.Module) -> None:
    """Change forward and backward of parts of the network by functions that have a memory."""
    calls = {"body": 0, "first": 0}

    def count(module: nn.Module, inputs: tuple) -> None:
        calls["body"] += 1

    def wrapped(forward: Callable, value: Tensor) -> Tensor:
        calls["first"] += 1
        return forward(value) * (0.9 if calls["first"] else 0)

    def halve(module: nn.Module, inputs: tuple, value: Tensor) -> Tensor:
        if value.requires_grad:  # a hook of the module would warn if its inputs need no gradient
            value.register_hook(lambda gradient: gradient / 2)
        return value * bool(calls["body"])

    net.body.register_forward_pre_hook(count)
    net.body.register_forward_hook(halve)
    net.heads[0].forward = functools.partial(wrapped, net.heads[0].forward)


class Scale(nn.Module):
    """A loss module: its parameter weighs the losses, and is trained with them."""

    def __init__(self) -> None:
        super().__init__()
        self.logarithm = nn.Parameter(torch.zeros(1))

    def forward(self, value: Tensor) -> Tensor:
        return self.logarithm + value.new_zeros(len(value))


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
        self.observer = Observer() if spec["observer"] else nn.Identity()
        self.constants = Buffers() if spec["buffers"] else nn.Identity()
        if spec["loss_module"]:
            self.loss = Scale()
        if spec["module_hooks"]:
            add_hooks(self)
        if spec["parameter_hook"]:
            self.heads[0].bias.register_hook(lambda gradient: gradient / 2)
        if spec["frozen"]:
            self.body.bias.requires_grad_(False)

    def forward(self, images: Tensor) -> Any:
        value = torch.tanh(self.norm(self.conv(images.to(self.dtype) / 100 - 1)))
        value = self.body(F.avg_pool2d(value, 2).flatten(1))
        value = self.constants(self.observer(self.drop(torch.tanh(value))))
        if self.spec["tied"]:
            value = value + torch.tanh(self.decoder(torch.tanh(self.encoder(value))))
        first, *others = (head(value) for head in self.heads)
        outputs = {"first": first, "others": tuple(others)}
        if self.spec["loss_module"]:
            outputs["scale"] = self.loss(value)
        return outputs if len(outputs) == 3 or others else first


# ----------------------------------------------------------------------------------- optimizers


class Lists(torch.optim.SGD):
    """Keeps the last two gradients of each parameter in a list, and steps by their mean."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in [p for group in self.param_groups for p in group["params"]]:
            if parameter.grad is not None:
                kept = self.state[parameter].get("kept", [parameter.grad])[-1:]
                self.state[parameter]["kept"] = kept = [*kept, parameter.grad.clone()]
                parameter.grad = (kept[0] + kept[1]) / 2
        super().step()


class Lookahead(torch.optim.Optimizer):
    """Goes half way back every third step (arXiv:1907.08610); the count is in its own state dict."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base, self.calls = base, 0
        self.param_groups, self.state = base.param_groups, base.state
        for parameter in [p for group in self.param_groups for p in group["params"]]:
            self.state[parameter]["slow"] = parameter.detach().clone()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.base.step()
        self.calls += 1
        for parameter in [p for group in self.param_groups for p in group["params"]]:
            if self.calls % 3 == 0:
                self.state[parameter]["slow"].lerp_(parameter, 0.5)
                parameter.copy_(self.state[parameter]["slow"])

    def state_dict(self) -> dict[str, Any]:
        return {**self.base.state_dict(), "calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]
        self.base.load_state_dict({name: state[name] for name in ("state", "param_groups")})
        self.param_groups, self.state = self.base.param_groups, self.base.state


def make_optimizer(kind: str, args: Namespace, net: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with groups in any order, another one in each process, as of a `set`."""
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    random.SystemRandom().shuffle(trained)
    matrices, others = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others}]
    groups = [group for group in groups if group["params"]]
    random.SystemRandom().shuffle(groups)
    optimizer = (Lists if kind == "lists" else torch.optim.SGD)(groups, args.lr, momentum=0.8)
    return Lookahead(optimizer) if kind == "lookahead" else optimizer


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

    def weights_of(labels: Tensor) -> Tensor:
        """Return the weight of each label [n, L]: 0 where it is padding."""
        weights = weight_of(labels) if spec["weights"] else torch.ones_like(labels)
        return weights * (labels >= 0)

    def loss_weights(targets: Tensor) -> Tensor:
        return weights_of(targets.reshape(len(targets), -1)).sum(1)

    def per_sample_loss(outputs: Any, targets: Tensor) -> Tensor:
        labels = targets.reshape(len(targets), -1)  # [n, L]
        losses = 0
        for logits in logits_of(outputs):
            logits = logits[:, :, None].expand(-1, -1, labels.shape[1])
            losses = losses + F.cross_entropy(logits, labels, reduction="none", ignore_index=-1)
        if spec["loss_module"]:
            scale = outputs["scale"][:, None]
            losses = losses * torch.exp(-scale) + scale
        return (losses * weights_of(labels)).sum(1)

    def per_sample_metrics(outputs: Any, targets: Tensor) -> dict[str, Any]:
        logits, labels = logits_of(outputs)[0].double(), targets.reshape(len(targets), -1)[:, 0]
        error = (logits.softmax(1) - F.one_hot(labels, CLASSES)).square().sum(1)
        hits = (logits.argmax(1) == labels).float()
        found = {"minus_error": -error, "top1": hits}
        return dict(reversed(found.items())) if spec["metric"] == "accuracy" else found

    def build_optimizer(args: Namespace, net: nn.Module) -> torch.optim.Optimizer:
        return make_optimizer(spec["optimizer"], args, net)

    functions = [build_datasets, build_model, per_sample_loss, per_sample_metrics]
    functions += [loss_weights] if spec["weights"] or spec["ragged"] else []
    functions += [build_optimizer] if spec["optimizer"] else []
    found = {function.__name__: function for function in functions}
    return {**found, "collate": pad} if spec["ragged"] else found
