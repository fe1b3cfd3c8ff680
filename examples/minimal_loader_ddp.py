"""Train on N devices with a DataLoader, workers and augmentation; with torch and numpy alone.

torchrun --standalone --nproc-per-node 2 examples/minimal_loader_ddp.py 10 loader.pt
diff examples/minimal_loader.py examples/minimal_loader_ddp.py  # what several devices need
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # now, not after init_process_group: or the exit may crash
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

DATA = np.load(Path(__file__).resolve().parent.parent / "data" / "digits.npz")
BATCH = 64  # samples per step, over all ranks
SAVE_EVERY = 10  # steps


class Digits(Dataset):
    """Digits that are shifted at random by up to `shift` pixels.

    A sample is asked for by (epoch, index). Its random numbers depend on these two alone: so each
    epoch shifts anew, and neither the number of workers nor a resume changes what is drawn.
    """

    def __init__(self, rows, shift):
        images = torch.from_numpy(DATA["images"][rows]) / 16  # [n, 8, 8], from 0 to 1
        self.images = nn.functional.pad(images.unsqueeze(1), (shift,) * 4)
        self.labels = torch.from_numpy(DATA["labels"][rows]).long()
        self.shift = shift

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, key):
        epoch, index = key
        generator = torch.Generator().manual_seed(epoch * len(self) + index)
        top, left = torch.randint(2 * self.shift + 1, (2,), generator=generator).tolist()
        return self.images[index, :, top : top + 8, left : left + 8], self.labels[index]


class BatchSampler(Sampler):
    """Names this rank's samples of each step; all ranks compute the same order of an epoch."""

    def __init__(self, length, rank, world_size):
        self.length, self.epoch, self.step = length, 0, 0
        self.rank, self.world_size = rank, world_size
        self.steps_per_epoch = length // BATCH

    def __len__(self):
        return self.steps_per_epoch - self.step

    def __iter__(self):
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch))
        # A resumed run begins at self.step: what it skips is never read.
        for rows in order.split(BATCH)[self.step : self.steps_per_epoch]:
            rows = rows.tensor_split(self.world_size)[self.rank]  # this rank's slice
            yield [(self.epoch, index) for index in rows.tolist()]


def build_loader(dataset, batch_sampler, device):
    loader = DataLoader(
        dataset,
        batch_sampler=batch_sampler,
        num_workers=1,
        persistent_workers=True,  # they live as long as the loader, not one epoch
        multiprocessing_context="fork",
        pin_memory=device.type != "cpu",  # the copy to the device is faster then
    )
    iter(loader)  # starts the workers now: later this process may have threads, and a fork may hang
    return loader


def train_one_epoch(model, loader, optimizer, scheduler, device, save):
    model.train()
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        torch.manual_seed(scheduler.last_epoch * dist.get_world_size() + dist.get_rank())  # dropout
        losses = nn.functional.cross_entropy(model(images), labels, reduction="none")
        # Averaged over the ranks, this gives the gradient of the global batch's mean loss.
        (losses.sum() * (dist.get_world_size() / BATCH)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()  # it also counts the steps
        if scheduler.last_epoch % SAVE_EVERY == 0:
            save()


@torch.no_grad()
def evaluate(net, loader, device):
    net.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        outputs, labels = net(images.to(device)), labels.to(device)
        sums[0] += nn.functional.cross_entropy(outputs, labels, reduction="sum")
        sums[1] += (outputs.argmax(1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)  # the ranks had different batches
    return (sums[:2] / sums[2]).tolist()


def main(epochs, file):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # of torchrun
    if kind := torch.accelerator.current_accelerator(check_available=True):  # None on a CPU
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))  # one device per rank
    device = torch.device(torch.accelerator.current_device_index() if kind else "cpu")
    train_set, val_set = Digits(slice(0, 1437), shift=1), Digits(slice(1437, 1797), shift=0)
    train_sampler = BatchSampler(len(train_set), rank, world_size)
    val_batches = [[(0, i) for i in rows.tolist()] for rows in torch.arange(360).split(BATCH)]
    val_batches = val_batches[rank::world_size]  # each batch on one rank
    train_loader = build_loader(train_set, train_sampler, device)
    val_loader = build_loader(val_set, val_batches, device)

    # The workers have started, so this process may have threads now.
    backend = dist.get_default_backend_for_device(device)  # gloo on a CPU
    dist.init_process_group(backend, device_id=device if kind else None)
    torch.manual_seed(0)
    body = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()
    net = nn.Sequential(*body, nn.Flatten(), nn.Linear(32 * 4 * 4, 10)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    steps = train_sampler.steps_per_epoch
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
    parts = {"net": net, "optimizer": optimizer, "scheduler": scheduler}
    saved = torch.load(file, map_location="cpu", weights_only=True) if file.exists() else {}
    for name in saved:  # on every rank
        parts[name].load_state_dict(saved[name])

    def save():
        if rank != 0:
            return  # all ranks have the same: one file is enough
        with open(f"{file}.part", "wb") as whole:
            torch.save({name: part.state_dict() for name, part in parts.items()}, whole)
            os.fsync(whole.fileno())
        os.replace(f"{file}.part", file)  # at once: a crash leaves the old file

    model = nn.parallel.DistributedDataParallel(net)  # averages gradients during the backward
    # DDP orders its sums after its first backward: here after this one, also in a resumed run.
    model.eval()(train_set.images[:1, :, :8, :8].to(device)).sum().backward()
    model.zero_grad()
    while scheduler.last_epoch < epochs * steps:
        train_sampler.epoch, train_sampler.step = divmod(scheduler.last_epoch, steps)
        train_one_epoch(model, train_loader, optimizer, scheduler, device, save)
        for buffer in net.buffers():
            dist.broadcast(buffer, src=0)  # rank 0's BatchNorm statistics, for all
        loss, accuracy = evaluate(net, val_loader, device)
        save()
        epoch = scheduler.last_epoch // steps
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.12f}  accuracy {accuracy:.6f}", flush=True)
    dist.barrier()  # rank 0 has written its file
    del model  # DDP holds the group: torch 2.11 may hang if DDP ends it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
