"""Boxes as lists: nothing is padded. A picture without boxes has the weight 0."""

import torch
import torch.nn.functional as F
from torch import nn


def build_datasets(args):
    options = {"dtype": getattr(torch, args.dtype)}
    data = [(torch.rand(3, 32, 32, **options), torch.rand(i % 4, 4, **options)) for i in range(100)]
    return data[:80], data[80:]


def collate(samples):
    images, boxes = zip(*samples)
    return torch.stack(images), list(boxes)


def build_model(args):
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.Conv2d(8, 4, 1))


def loss_weights(boxes):
    return torch.tensor([len(own) for own in boxes], device=boxes[0].device)


def per_sample_loss(outputs, boxes):
    losses = []
    for output, own in zip(outputs, boxes):
        x, y = (own[:, :2] * 8).long().T  # the cell of the centre predicts the box
        losses.append(F.l1_loss(output[:, y, x].T, own, reduction="sum"))
    return torch.stack(losses)


def per_sample_metrics(outputs, boxes):
    return {"minus_error": (-per_sample_loss(outputs, boxes), loss_weights(boxes))}
