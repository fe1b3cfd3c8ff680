"""Train on one device, with torch and numpy alone. The same command resumes from the file.

python examples/minimal_single.py 10 minimal.pt  # epochs, file"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

DATA = np.load(Path(__file__).resolve().parent.parent / "data" / "digits.npz")
BATCH = 64  # samples per step


def train_one_epoch(model, images, labels, epoch, optimizer, scheduler):
    model.train()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
    for rows in order.split(BATCH)[: len(order) // BATCH]:  # whole ones
        torch.manual_seed(scheduler.last_epoch)  # for dropout
        losses = nn.functional.cross_entropy(model(images[rows]), labels[rows], reduction="none")
        (losses.sum() / BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


@torch.no_grad()
def evaluate(net, images, labels):
    net.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=images.device)
    for rows in torch.arange(len(labels)).split(BATCH):
        outputs = net(images[rows])
        sums[0] += nn.functional.cross_entropy(outputs, labels[rows], reduction="sum")
        sums[1] += (outputs.argmax(1) == labels[rows]).sum()
    return (sums / len(labels)).tolist()


def main(epochs, file):
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    images = torch.from_numpy(DATA["images"]).to(device) / 16  # [1797, 8, 8], from 0 to 1
    labels = torch.from_numpy(DATA["labels"]).long().to(device)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * (1437 // BATCH))
    parts = {"net": net, "optimizer": optimizer, "scheduler": scheduler}
    saved = torch.load(file, map_location="cpu", weights_only=True) if file.exists() else {}
    for name in saved:
        parts[name].load_state_dict(saved[name])
    model = net
    for epoch in range(scheduler.last_epoch // (1437 // BATCH), epochs):
        train_one_epoch(model, images[:1437], labels[:1437], epoch, optimizer, scheduler)
        loss, accuracy = evaluate(net, images[1437:], labels[1437:])
        print(f"epoch {epoch + 1}: loss {loss:.12f}  accuracy {accuracy:.6f}", flush=True)
        with open(f"{file}.part", "wb") as whole:
            torch.save({name: part.state_dict() for name, part in parts.items()}, whole)
            os.fsync(whole.fileno())
        os.replace(f"{file}.part", file)  # at once: a crash leaves the old file


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
