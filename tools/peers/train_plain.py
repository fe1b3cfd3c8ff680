"""Train with torch alone, as one writes it by hand: on one device or, under torchrun, on several."""

import os

import torch
import torch.distributed as dist
from given import collate, given
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

args, train_set, net = given()
rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device(args.device)
if device.type != "cpu":
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
model = net.to(device)
if ranks > 1:
    dist.init_process_group()
    model = DistributedDataParallel(model)
sampler = DistributedSampler(train_set, ranks, rank, drop_last=True)
loader = DataLoader(
    train_set,
    args.batch_size // ranks,
    sampler=sampler,
    num_workers=args.workers,
    persistent_workers=args.workers > 0,
    collate_fn=collate,
    drop_last=True,
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        logits = model(images.to(device))
        cross_entropy(logits, labels.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
