"""Object detection in the style of YOLO on made-up pictures: up to four boxes of two classes, found on grids of three scales.

A target is a dict of padded boxes; the three heads return a list. The loss of a picture is divided by the picture's own boxes, never by
those of the batch: a number per sample is what makes it exact in every mode.
"""

import torch
import torch.nn.functional as F
from torch import nn

SIZE, CLASSES, MOST = 16, 2, 4
SIDES = (
    3.0,
    6.0,
    12.0,
)  # of the box that each scale predicts by default, in pixels; strides 2, 4 and 8


class Boxes(torch.utils.data.Dataset):
    """A box is centre y, centre x, height, width in pixels; class c is bright in channel c."""

    def __init__(self, length, seed):
        generator = torch.Generator().manual_seed(seed)
        self.samples = [self.draw(generator) for _ in range(length)]

    @staticmethod
    def draw(generator):
        count = int(torch.randint(0, MOST + 1, (), generator=generator))  # sometimes none
        boxes, labels = (
            torch.zeros(MOST, 4),
            torch.randint(0, CLASSES, (MOST,), generator=generator),
        )
        image = 0.2 * torch.randn(CLASSES, SIZE, SIZE, generator=generator)
        for box, label in zip(boxes[:count], labels):
            box[2:] = 2 + 10 * torch.rand(2, generator=generator)
            box[:2] = box[2:] / 2 + (SIZE - box[2:]) * torch.rand(2, generator=generator)
            top, left = (box[:2] - box[2:] / 2).round().int().tolist()
            bottom, right = (box[:2] + box[2:] / 2).round().int().tolist()
            image[label, top:bottom, left:right] += 1
        return image, {"boxes": boxes, "labels": labels, "present": torch.arange(MOST) < count}

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def build_datasets(args):
    return Boxes(161, seed=0), Boxes(41, seed=1)


class Detector(nn.Module):
    """Images [n, 2, 16, 16] -> a list of three [n, g, g, 1 + 4 + classes] for g = 8, 4, 2: objectness, box, classes."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Conv2d(i, o, 3, stride=2, padding=1) for i, o in ((CLASSES, 12), (12, 16), (16, 24))
        )
        self.heads = nn.ModuleList(nn.Conv2d(i, 5 + CLASSES, 1) for i in (12, 16, 24))

    def forward(self, images):
        outputs, features = [], images.to(self.heads[0].weight.dtype)
        for stage, head in zip(self.stages, self.heads):
            features = F.silu(stage(features))
            outputs.append(head(features).permute(0, 2, 3, 1))
        return outputs


def build_model(args):
    return Detector()


def assign(outputs, targets):
    """Each box belongs to the scale of its size and the cell of its centre. Yields the maps and boxes of each scale."""
    boxes = targets["boxes"].to(outputs[0].dtype)
    scale = (boxes[..., 2:].amax(2) > 4).long() + (boxes[..., 2:].amax(2) > 8)
    picture = torch.arange(len(boxes), device=boxes.device)[:, None]
    for s, output in enumerate(outputs):
        stride = SIZE // output.shape[1]
        cell = (boxes[..., :2] / stride).long().clamp(max=output.shape[1] - 1)
        chosen = output[picture, cell[..., 0], cell[..., 1]]  # [n, M, 5 + classes]
        centre = (cell + chosen[..., 1:3].sigmoid()) * stride
        sides = SIDES[s] * chosen[..., 3:5].clamp(-3, 3).exp()
        weight = (targets["present"] & (scale == s)).to(output.dtype)
        occupied = torch.zeros_like(output[..., 0]).index_put(
            (picture.expand_as(weight), cell[..., 0], cell[..., 1]), weight, accumulate=True
        )
        yield output, occupied.clamp(max=1), weight, chosen, torch.cat([centre, sides], 2)


def iou(a, b):
    """Intersection over union of boxes [..., 4]."""
    low = torch.maximum(a[..., :2] - a[..., 2:] / 2, b[..., :2] - b[..., 2:] / 2)
    high = torch.minimum(a[..., :2] + a[..., 2:] / 2, b[..., :2] + b[..., 2:] / 2)
    inner = (high - low).clamp(min=0).prod(-1)
    return inner / (a[..., 2:].prod(-1) + b[..., 2:].prod(-1) - inner + 1e-9)


def per_sample_loss(outputs, targets):
    """Objectness of every cell, and 1 - IoU and class of the cells that hold a box, summed over the scales."""
    count = targets["present"].sum(1).clamp(min=1)
    losses = 0
    for output, occupied, weight, chosen, boxes in assign(outputs, targets):
        objectness = (
            F.binary_cross_entropy_with_logits(output[..., 0], occupied, reduction="none")
            .flatten(1)
            .mean(1)
        )
        classes = F.cross_entropy(
            chosen[..., 5:].movedim(2, 1),
            targets["labels"],
            reduction="none",
        )
        found = (weight * (1 - iou(boxes, targets["boxes"].to(boxes.dtype)) + classes)).sum(
            1
        ) / count
        losses = losses + objectness + found
    return losses


def per_sample_metrics(outputs, targets):
    """Recall: the fraction of boxes whose cell gives the right class and an IoU above one half."""
    hits = 0
    for _, _, weight, chosen, boxes in assign(outputs, targets):
        right = (iou(boxes, targets["boxes"].to(boxes.dtype)) > 0.5) & (
            chosen[..., 5:].argmax(2) == targets["labels"]
        )
        hits = hits + (weight * right).sum(1)
    count = targets["present"].sum(1)
    return {"recall": torch.where(count > 0, hits / count.clamp(min=1), 1.0)}
