"""Pose estimation on made-up pictures: three joints a figure, each a bright blob in a channel of its own, heat maps at two scales.

Inputs and targets are nested: ({"image", "box"}, {"heatmaps": (fine, coarse), "visible", "joints"}).
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

JOINTS, SIZE = 3, 8


def gaussians(joints, size, width):
    """Joints [..., 2] in pixels of the picture -> heat maps [..., size, size]."""
    grid = (torch.arange(size) + 0.5) * (SIZE / size)
    return torch.exp(
        -(
            (grid[:, None] - joints[..., 0, None, None]) ** 2
            + (grid - joints[..., 1, None, None]) ** 2
        )
        / (2 * width**2)
    )


class Figures(Dataset):
    """A sample is drawn when it is fetched, with a random mirroring, and collated by torch: no method for whole batches."""

    def __init__(self, length, seed):
        generator = torch.Generator().manual_seed(seed)
        self.joints = 1 + 6 * torch.rand(length, JOINTS, 2, generator=generator)
        self.visible = torch.rand(length, JOINTS, generator=generator) < 0.8
        self.noise = 0.2 * torch.randn(length, JOINTS, SIZE, SIZE, generator=generator)
        self.training = seed == 0

    def __len__(self):
        return len(self.joints)

    def __getitem__(self, index):
        joints, visible = self.joints[index].clone(), self.visible[index].float()
        image = gaussians(joints, SIZE, 1.0) * visible[:, None, None] + self.noise[index]
        if self.training and torch.rand(()) < 0.5:
            image, joints[:, 1] = image.flip(-1), SIZE - joints[:, 1]
        heatmaps = (gaussians(joints, SIZE, 1.0), gaussians(joints, SIZE // 2, 2.0))
        box = torch.stack([joints.amin(0), joints.amax(0)]).flatten() / SIZE
        return {"image": image, "box": box}, {
            "heatmaps": heatmaps,
            "visible": visible,
            "joints": joints,
        }


def build_datasets(args):
    return Figures(157, seed=0), Figures(43, seed=1)


class Hourglass(nn.Module):
    """One step down and one up, with a head at each scale."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(JOINTS, 12, 3, padding=1)
        self.box = nn.Linear(4, 12)
        self.down = nn.Conv2d(12, 16, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(16, 12, 2, stride=2)
        self.heads = nn.ModuleDict(
            {"fine": nn.Conv2d(12, JOINTS, 1), "coarse": nn.Conv2d(16, JOINTS, 1)}
        )

    def forward(self, inputs):
        dtype = self.stem.weight.dtype
        fine = F.relu(
            self.stem(inputs["image"].to(dtype))
            + self.box(inputs["box"].to(dtype))[:, :, None, None]
        )
        coarse = F.relu(self.down(fine))
        return {
            "heatmaps": (self.heads["fine"](fine + self.up(coarse)), self.heads["coarse"](coarse))
        }


def build_model(args):
    return Hourglass()


def per_sample_loss(outputs, targets):
    """Squared error at both scales, of the visible joints only."""
    losses = 0
    for heatmap, wanted in zip(outputs["heatmaps"], targets["heatmaps"]):
        losses = losses + ((heatmap - wanted).square().flatten(2).sum(2) * targets["visible"]).sum(
            1
        )
    return losses


def per_sample_metrics(outputs, targets):
    """PCK: the fraction of joints, among the visible ones, whose highest point is within 1.5 pixels."""
    best = outputs["heatmaps"][0].flatten(2).argmax(2)
    found = torch.stack([best // SIZE, best % SIZE], 2) + 0.5
    hits = ((found - targets["joints"]).norm(dim=2) < 1.5) * targets["visible"]
    return {"pck": hits.sum(1) / targets["visible"].sum(1).clamp(min=1)}
