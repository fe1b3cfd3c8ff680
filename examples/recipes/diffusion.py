"""Diffusion: a network learns the noise that was added to a digit, and then draws digits.

Time and noise are drawn in `__getitem__`, so they belong to (seed, epoch, sample), in every mode.
`PYTHONPATH=. python examples/recipes/diffusion.py runs/mine/best.pt` prints four digits. Source: J.
Ho, A. Jain, P. Abbeel: Denoising diffusion probabilistic models, 2020.
"""

import argparse
import sys

import torch
from torch import nn

import task

STEPS = 100
BETAS = torch.linspace(1e-3, 0.1, STEPS, dtype=torch.float64)  # the noise that each step adds
KEPT = (1 - BETAS).cumprod(0)  # the share of the picture after t steps


class Noisy(torch.utils.data.Dataset):
    """((noisy picture, time), noise). An evaluation draws as in epoch 0: each time the same."""

    def __init__(self, digits, args):
        self.digits, self.dtype = digits, getattr(torch, args.dtype)

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        picture = self.digits[index][0].to(self.dtype) / 120 - 1  # -1 to 1
        time, noise = torch.randint(STEPS, ()), torch.randn_like(picture)
        noisy = KEPT[time].sqrt() * picture + (1 - KEPT[time]).sqrt() * noise
        return (noisy.to(self.dtype), time), noise


def build_datasets(args):
    return [Noisy(digits, args) for digits in task.build_datasets(args)]


class Denoiser(nn.Module):
    """Guess the noise in pictures [n, 1, 8, 8] at times [n]."""

    def __init__(self, width=32):
        super().__init__()
        self.enter, self.leave = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 1)
        self.times = nn.ModuleList([nn.Embedding(STEPS, width) for _ in range(3)])
        self.blocks = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(3)])

    def forward(self, inputs):
        pictures, times = inputs
        x = self.enter(pictures)
        for time, block in zip(self.times, self.blocks):
            x = x + block(nn.functional.silu(x + time(times)[:, :, None, None]))
        return self.leave(x)


def build_model(args):
    return Denoiser()


def per_sample_loss(outputs, noise):
    return (outputs - noise).square().flatten(1).mean(1)


def per_sample_metrics(outputs, noise):
    return {"minus_error": -per_sample_loss(outputs, noise)}


@torch.no_grad()
def draw(model, n):
    """Return n pictures: begin with noise, and take away a part of it in each step."""
    dtype = next(model.parameters()).dtype
    x = torch.randn(n, 1, 8, 8, dtype=dtype)
    for time in reversed(range(STEPS)):
        beta, kept = BETAS[time].item(), KEPT[time].item()
        x = (x - beta / (1 - kept) ** 0.5 * model((x, torch.full((n,), time)))) / (1 - beta) ** 0.5
        if time:
            x += beta**0.5 * torch.randn_like(x)
    return x


if __name__ == "__main__":
    checkpoint = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
    model = build_model(argparse.Namespace(**checkpoint["config"])).eval()
    model.load_state_dict(checkpoint["weights"], assign=True)  # with --average ema, the average
    torch.manual_seed(0)  # the same checkpoint prints the same digits
    digits = torch.cat([*draw(model, 4).squeeze(1)], 1).clamp(-1, 0.99)  # side by side, [8, 32]
    for row in digits.tolist():
        print("".join(" .+#@"[int(2.5 * value + 2.5)] * 2 for value in row))
