"""Train with Lightning Fabric: on one device or, under torchrun, on several."""

import os

import torch
from given import collate, given
from lightning.fabric import Fabric
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

args, train_set, net = given()
fabric = Fabric(accelerator=args.device, devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
fabric.launch()
loader = DataLoader(
    train_set,
    args.batch_size // fabric.world_size,
    shuffle=True,
    num_workers=args.workers,
    persistent_workers=args.workers > 0,
    collate_fn=collate,
    drop_last=True,
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
model, optimizer = fabric.setup(net, optimizer)
loader = fabric.setup_dataloaders(loader)
for epoch in range(args.epochs):
    if fabric.world_size > 1:
        loader.sampler.set_epoch(epoch)
    for images, labels in loader:
        loss = cross_entropy(model(images), labels)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
