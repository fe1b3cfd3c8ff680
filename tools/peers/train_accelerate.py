"""Train with Accelerate: on one device or, under torchrun, on several."""

import torch
from accelerate import Accelerator
from given import collate, given
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

args, train_set, net = given()
accelerator = Accelerator(cpu=args.device == "cpu")
loader = DataLoader(
    train_set,
    args.batch_size // accelerator.num_processes,
    shuffle=True,
    num_workers=args.workers,
    persistent_workers=args.workers > 0,
    collate_fn=collate,
    drop_last=True,
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for _ in range(args.epochs):
    for images, labels in loader:
        loss = cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
