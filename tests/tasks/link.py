"""ResNet-18 on noise. LINK names a file for when rank 0 made its steps and what its host had sent by then; beside it goes a gradient."""

import json
import os
import time
from pathlib import Path

import torch
import torchvision
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

FILE = (
    Path(os.environ["LINK"])
    if os.environ.get("RANK", "0") == "0" and "LINK" in os.environ
    else None
)
SENT = Path("/sys/class/net/link0/statistics/tx_bytes")
LAST = 20  # the step, from 1, whose gradient is kept
steps: list[tuple[float, int]] = []


def build_datasets(args):
    generator = torch.Generator().manual_seed(0)
    images, labels = (
        torch.randn(LAST * args.batch_size, 3, 32, 32, generator=generator),
        torch.arange(LAST * args.batch_size) % 10,
    )
    return TensorDataset(images, labels), TensorDataset(images[:2], labels[:2])


def build_model(args):
    return torchvision.models.resnet18(num_classes=10)


def per_sample_loss(outputs, targets):
    return cross_entropy(outputs, targets, reduction="none")


def per_sample_metrics(outputs, targets):
    return {"top1": (outputs.argmax(1) == targets).double()}


def note(optimizer, *_):
    steps.append((time.perf_counter(), int(SENT.read_text()) if SENT.exists() else 0))
    if len(steps) == LAST:
        FILE.write_text(json.dumps(steps))
        torch.save(
            [p.grad for group in optimizer.param_groups for p in group["params"]],
            FILE.with_suffix(".pt"),
        )


if FILE:
    register_optimizer_step_pre_hook(note)
