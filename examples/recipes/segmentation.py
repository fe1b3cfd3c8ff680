"""Segmentation, where some pixels have no label: the loss is a mean over the others."""

import torch
import torch.nn.functional as F
from torch import nn


def build_datasets(args):
    images = torch.rand(100, 3, 16, 16, dtype=getattr(torch, args.dtype))
    masks = (images.sum(1) > 1.5).long()
    for i, mask in enumerate(masks):
        mask[: i % 13] = 255  # unknown
    return torch.utils.data.random_split(torch.utils.data.TensorDataset(images, masks), [80, 20])


def build_model(args):
    return nn.Conv2d(3, 2, 3, padding=1)


def loss_weights(targets):
    return (targets != 255).sum((1, 2))


def per_sample_loss(outputs, targets):
    losses = F.cross_entropy(outputs, targets, ignore_index=255, reduction="none")
    return losses.sum((1, 2))


def per_sample_metrics(outputs, targets):
    return {"right": ((outputs.argmax(1) == targets).sum((1, 2)), loss_weights(targets))}
