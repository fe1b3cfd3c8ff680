"""Train on N devices, with torch and numpy alone. The same command resumes from the file.

torchrun --standalone --nproc-per-node 2 examples/minimal_ddp.py 10 minimal.pt  # epochs, file"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # now, not after init_process_group: or the exit may crash
from torch import nn

DATA = np.load(Path(__file__).resolve().parent.parent / "data" / "digits.npz")
BATCH = 64  # samples per step, over all ranks


def train_one_epoch(model, images, labels, epoch, optimizer, scheduler):
    model.train()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(BATCH)[: len(order) // BATCH]:  # whole ones, the same on all ranks
        rows = batch.tensor_split(dist.get_world_size())[dist.get_rank()]  # this rank's slice
        torch.manual_seed(scheduler.last_epoch * dist.get_world_size() + dist.get_rank())  # dropout
        losses = nn.functional.cross_entropy(model(images[rows]), labels[rows], reduction="none")
        # Averaged over the ranks, this gives the gradient of the global batch's mean loss.
        (losses.sum() * (dist.get_world_size() / BATCH)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


@torch.no_grad()
def evaluate(net, images, labels):
    net.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=images.device)
    for rows in torch.arange(len(labels)).split(BATCH)[dist.get_rank() :: dist.get_world_size()]:
        outputs = net(images[rows])
        sums[0] += nn.functional.cross_entropy(outputs, labels[rows], reduction="sum")
        sums[1] += (outputs.argmax(1) == labels[rows]).sum()
    dist.all_reduce(sums)  # the ranks had different batches
    return (sums / len(labels)).tolist()


def main(epochs, file):
    if kind := torch.accelerator.current_accelerator(check_available=True):  # None on a CPU
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))  # one device per rank
    device = torch.device(torch.accelerator.current_device_index() if kind else "cpu")
    images = torch.from_numpy(DATA["images"]).to(device) / 16  # [1797, 8, 8], from 0 to 1
    labels = torch.from_numpy(DATA["labels"]).long().to(device)
    backend = dist.get_default_backend_for_device(device)  # gloo on a CPU
    dist.init_process_group(backend, device_id=device if kind else None)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * (1437 // BATCH))
    parts = {"net": net, "optimizer": optimizer, "scheduler": scheduler}
    saved = torch.load(file, map_location="cpu", weights_only=True) if file.exists() else {}
    for name in saved:  # on every rank
        parts[name].load_state_dict(saved[name])
    model = nn.parallel.DistributedDataParallel(net)
    # DDP orders its sums after its first backward: here after this one, also in a resumed run.
    model.eval()(images[:1]).sum().backward()
    model.zero_grad()
    for epoch in range(scheduler.last_epoch // (1437 // BATCH), epochs):
        train_one_epoch(model, images[:1437], labels[:1437], epoch, optimizer, scheduler)
        for buffer in net.buffers():
            dist.broadcast(buffer, src=0)  # rank 0's BatchNorm statistics, for all
        loss, accuracy = evaluate(net, images[1437:], labels[1437:])
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.12f}  accuracy {accuracy:.6f}", flush=True)
            with open(f"{file}.part", "wb") as whole:
                torch.save({name: part.state_dict() for name, part in parts.items()}, whole)
                os.fsync(whole.fileno())
            os.replace(f"{file}.part", file)  # at once: a crash leaves the old file
    dist.barrier()  # rank 0 has written its file
    del model  # DDP holds the group: torch 2.11 may hang if DDP ends it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
