"""The tiny digits with one oddity, named by `--model`: a model or a metric that is unusual, or that cannot be right."""

import random

import numpy as np
import tiny
import torch
from tiny import add_options, per_sample_loss
from torch import nn

__all__ = ["add_options", "build_datasets", "build_model", "per_sample_loss", "per_sample_metrics"]

MODEL = ""  # what --model says


def build_datasets(args):
    global MODEL
    MODEL = args.model
    return tiny.build_datasets(args)


class Odd(nn.Module):
    """The tiny network with buffers of every kind, or one part that is wrong."""

    def __init__(self, net, parts):
        super().__init__()
        self.net = net
        if "masks" in parts:
            self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
            self.register_buffer("unseen", torch.tensor([torch.nan, torch.inf, 1.0]))
            self.register_buffer("passing", torch.full((2,), torch.inf), persistent=False)
            self.register_buffer("steps", torch.tensor(2**24 + 1))
            self.register_buffer("flags", torch.tensor([True, False, True]))
        if "ruined" in parts:
            self.ruined = nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, images):
        outputs = self.net(images)
        if hasattr(self, "mask"):
            outputs = (
                outputs + (outputs[:, :3] @ torch.softmax(self.mask, 1)).sum(1, keepdim=True) * 0.01
            )
            if self.training:
                self.steps += 2
                self.flags.logical_not_()
        if hasattr(self, "ruined") and self.training:
            self.ruined.data[0] = torch.nan
        if "noise" in MODEL and not self.training:
            outputs = outputs + torch.randn_like(outputs) + random.random() + np.random.rand()
        return outputs


def build_model(args):
    args = type(args)(**vars(args))
    parts, args.model = args.model.split("+"), "conv"
    return Odd(tiny.build_model(args), parts)


def per_sample_metrics(outputs, targets):
    evaluation = not outputs.requires_grad  # else the metrics are of a training batch
    metrics = tiny.per_sample_metrics(outputs, targets)
    if "sometimes" in MODEL and evaluation and (targets == 3).any():
        metrics["threes"] = (targets == 3).float()
    if "last_lacks" in MODEL and evaluation and len(targets) > 1:
        metrics["extra"] = metrics["top1"]
    return metrics
