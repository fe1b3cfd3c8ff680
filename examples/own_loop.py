"""A training loop on one device, as many have one: python examples/own_loop.py

diff examples/own_loop.py examples/own_loop_ddp.py    # what it needs for several devices
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DIGITS = np.load(Path(__file__).resolve().parent.parent / "data" / "digits.npz")
BATCH = 64


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    images = torch.from_numpy(DIGITS["images"]).flatten(1) / 16  # [1797, 64], from 0 to 1
    labels = torch.from_numpy(DIGITS["labels"]).long()
    train_set = TensorDataset(images[:1437], labels[:1437])
    val_set = TensorDataset(images[1437:], labels[1437:])
    train_loader = DataLoader(train_set, BATCH, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, BATCH)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(10):
        net.train()
        total = 0.0
        for inputs, targets in train_loader:
            inputs, targets = inputs.to(device), targets.to(device)
            loss = criterion(net(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()

        net.eval()
        hits = 0
        with torch.no_grad():
            for inputs, targets in val_loader:
                inputs, targets = inputs.to(device), targets.to(device)
                hits += (net(inputs).argmax(1) == targets).sum().item()
        loss, accuracy = total / len(train_loader), hits / len(val_set)
        print(f"epoch {epoch + 1}: loss {loss:.6f} accuracy {accuracy:.6f}")
        torch.save(net.state_dict(), "own_loop.pt")


if __name__ == "__main__":
    main()
