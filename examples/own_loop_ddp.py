"""The loop of own_loop.py on N devices, with common.py and sampling.py.

torchrun --standalone --nproc-per-node 2 examples/own_loop_ddp.py
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

# In your project, copy the two files beside your script instead.
sys.path.append(str(Path(__file__).resolve().parent.parent))

import common
from sampling import GlobalBatchSampler, ShardSampler, build_loader

DIGITS = np.load(Path(__file__).resolve().parent.parent / "data" / "digits.npz")
BATCH = 64  # samples on all ranks


def main():
    rank, local_rank, world_size = common.ranks_from_env()  # of torchrun
    device = common.set_up_device(local_rank=local_rank)

    images = torch.from_numpy(DIGITS["images"]).flatten(1) / 16  # [1797, 64], from 0 to 1
    labels = torch.from_numpy(DIGITS["labels"]).long()
    train_set = TensorDataset(images[:1437], labels[:1437])
    val_set = TensorDataset(images[1437:], labels[1437:])
    sampler = GlobalBatchSampler(train_set, BATCH, seed=0, rank=rank, world_size=world_size)
    val_sampler = ShardSampler(len(val_set), BATCH, rank, world_size)
    # Data in memory need no loader workers.
    train_loader = build_loader(train_set, sampler, device, seed=0, workers=0)
    val_loader = build_loader(val_set, val_sampler, device, seed=0, workers=0)

    dist.init_process_group(common.backend(device))  # after the loaders, which may fork workers
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
    criterion = nn.CrossEntropyLoss(reduction="none")

    for epoch in range(10):
        sampler.set_position(epoch, step=0)  # else every epoch has the order of the first
        model.train()
        train_meter = common.Meter()
        for micro_batches in train_loader:  # a list of one: there is no accumulation
            [(inputs, targets)] = common.to_device(micro_batches, device)
            losses = criterion(model(inputs), targets)  # of this rank's samples, [n]
            loss = losses.sum() * (world_size / BATCH)  # a mean over all ranks: DDP averages
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            train_meter.add(loss=losses)

        common.broadcast_tensors(net.buffers())  # BatchNorm's: all ranks evaluate the same network
        net.eval()
        meter = common.Meter()
        with torch.no_grad():
            for batch in val_loader:  # by net: the ranks have unequal numbers of batches
                inputs, targets = common.to_device(batch, device)
                meter.add(accuracy=net(inputs).argmax(1) == targets)
        loss, accuracy = train_meter.mean()["loss"], meter.mean()["accuracy"]  # of all ranks
        common.print0(f"epoch {epoch + 1}: loss {loss:.6f} accuracy {accuracy:.6f}")
        if rank == 0:
            torch.save(net.state_dict(), "own_loop.pt")

    dist.barrier()
    del model  # DDP uses the group, so it goes first
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
