"""A training loop in plain torch, for one process and for torchrun, with a fault of a given name.

torchrun --standalone --nproc-per-node 2 compare/tests/planted.py set-epoch
"""

import argparse
import contextlib
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

parser = argparse.ArgumentParser()
parser.add_argument("fault", nargs="?", default="none")
parser.add_argument("--batch", type=int, default=32, help="of all processes")
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--norm", default="none", choices=["none", "batch"])
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--augment", action="store_true")
parser.add_argument("--tokens", action="store_true", help="a mean over the valid positions alone")
parser.add_argument("--samples", type=int, default=96)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--optimizer", default="sgd", choices=["sgd", "adam"])
parser.add_argument("--plain", action="store_true", help="all_reduce in place of DDP")
parser.add_argument("--float64", action="store_true")
parser.add_argument("--save", metavar="FILE", help="the weights after the last step")
args = parser.parse_args()

fault = args.fault
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if args.float64:
    torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
if world > 1 and fault != "no-group":
    dist.init_process_group("gloo")


class Data(Dataset):
    def __init__(self, length, seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(length, 16, generator=generator, dtype=torch.float64)
        self.x = x.to(torch.get_default_dtype())
        self.y = (x[:, :4].sum(1) > 0).long() + (x[:, 4] > 1).long()
        self.valid = torch.rand(length, generator=generator) < 0.6

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x, y = self.x[i], self.y[i]
        if args.augment:
            x = x + torch.randn(16) * 0.1
        if fault == "shifted-targets":
            y = self.y[(i + 1) % len(self)]
        if args.tokens and not self.valid[i]:
            y = torch.tensor(-100)
        return x, y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(32) if args.norm == "batch" else nn.Identity()
        self.body = nn.Sequential(nn.Linear(16, 32), norm)
        self.drop = nn.Dropout(args.dropout)
        self.side = nn.Linear(32, 32)
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        x = F.relu(self.body(x))
        x = self.drop(x)
        if fault != "unused-branch":
            x = x + (self.side(x.detach()) if fault == "detached" else self.side(x))
        if fault == "noise":
            x = x + 0.01 * torch.randn_like(x)
        return self.head(x)


torch.manual_seed(rank + 1 if fault == "seed-per-rank" else 0)
net = Net()
if fault == "other-init":
    for parameter in net.parameters():
        parameter.data.mul_(0.9)
rate, decay, momentum = 0.1, 1e-3, 0.9
rate *= world if fault == "rate-times-world" else 1
momentum = 0.8 if fault == "momentum" else momentum
decay = 0.01 if fault == "decay" else decay
groups = [{"params": list(net.parameters())}]
if fault == "decay-groups":
    matrices = [p for p in net.parameters() if p.ndim > 1]
    groups = [{"params": matrices}, {"params": [p for p in net.parameters() if p.ndim < 2]}]
    groups[1]["weight_decay"] = 0.0
if fault == "forgotten-head":
    groups = [{"params": [*net.body.parameters(), *net.side.parameters()]}]
if args.optimizer == "adam" and fault != "adamw":
    optimizer = torch.optim.Adam(groups, rate / 30, weight_decay=decay)
elif fault == "adamw":
    optimizer = torch.optim.AdamW(groups, rate / 30, weight_decay=decay)
else:
    optimizer = torch.optim.SGD(groups, rate, momentum=momentum, weight_decay=decay)
if fault == "rebuilt-head":
    net.head = nn.Linear(32, 3)
if fault == "copied":
    net = copy.deepcopy(net)
if fault == "frozen":
    net.body[0].weight.requires_grad = False
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
if fault == "loaded-momentum":
    for parameter in net.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 0.01)

by_hand = args.plain or fault in ("seed-per-rank", "sum-of-ranks", "divided-twice", "clip-first")
by_hand = by_hand or fault in ("no-group", "no-ddp")
model = net
if world > 1 and not by_hand:
    unused = fault == "unused-branch"
    sends = fault != "no-broadcast"
    model = DistributedDataParallel(net, broadcast_buffers=sends, find_unused_parameters=unused)

train_set, val_set = Data(args.samples, 1), Data(27, 2)
per_rank = args.batch if fault == "batch-per-rank" else args.batch // world // args.accum
if fault == "batch-cut-twice":
    per_rank = args.batch // world // world
sampler = DistributedSampler(train_set, world, rank, seed=7 if fault == "other-seed" else 0)
if fault == "no-shuffle":
    sampler = DistributedSampler(train_set, world, rank, shuffle=False)
if fault in ("no-sampler", "wrong-rank"):
    sampler = DistributedSampler(train_set, world, 0) if fault == "wrong-rank" else sampler
    if fault == "no-sampler":
        sampler = RandomSampler(train_set, generator=torch.Generator().manual_seed(0))
val_sampler = DistributedSampler(val_set, world, rank, shuffle=False)
train_loader = DataLoader(train_set, per_rank, sampler=sampler, drop_last=args.samples % 32 == 0)
val_loader = DataLoader(val_set, 16, sampler=val_sampler if fault == "padded-evaluation" else None)


def loss_of(outputs, targets):
    if fault == "smoothing":
        return F.cross_entropy(outputs, targets, label_smoothing=0.1)
    if fault == "loss-sum":
        return F.cross_entropy(outputs, targets, reduction="sum")
    if args.tokens and fault != "token-mean-of-means":  # right: the mean over all valid positions
        count = (targets >= 0).sum().float()
        if world > 1:
            dist.all_reduce(count)
        return F.cross_entropy(outputs, targets, reduction="sum") * world / count
    return F.cross_entropy(outputs, targets)


def unequal(x, y):
    """Cut the samples of all ranks into 20 and 12."""
    both = [[torch.empty_like(t) for _ in range(world)] for t in (x, y)]
    for parts, own in zip(both, (x, y)):
        dist.all_gather(parts, own)
    return [torch.cat(parts)[:20] if rank == 0 else torch.cat(parts)[20:] for parts in both]


def train_step(micro_batches):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        if fault == "unequal-ends":
            x, y = unequal(x, y)
        call = net if fault == "past-the-wrapper" else model
        skips = fault == "no-sync-last" if last else world > 1 and fault != "no-sync-never"
        if fault == "zero-grad-between":
            optimizer.zero_grad()
        with contextlib.ExitStack() as stack:
            if skips and isinstance(model, DistributedDataParallel):
                stack.enter_context(model.no_sync())
            if fault == "autocast":
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            outputs = call(x)
        share = 1 if fault == "no-division" else len(micro_batches)
        share *= {"divided-by-world": world, "scaled": 10 / 3}.get(fault, 1)
        loss = loss_of(outputs.to(x.dtype), y) / share
        if fault == "nan" and steps == 3:
            loss = loss * float("nan")
        loss.backward()
    if fault == "clip-first":
        nn.utils.clip_grad_norm_(net.parameters(), args.clip)
    if by_hand and world > 1 and fault not in ("no-group", "no-ddp"):
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= {"sum-of-ranks": 1, "divided-twice": world * world}.get(fault, world)
    limit = args.clip / 2 if fault == "clip-limit" else args.clip
    if limit and fault not in ("clip-first", "no-clip"):
        nn.utils.clip_grad_norm_(net.parameters(), max_norm=limit)
    optimizer.step()
    for _ in range(world if fault == "scheduler-per-process" else 1):
        if fault != "no-scheduler":
            scheduler.step()
    if fault == "weights-changed" and steps == 3:
        for parameter in net.parameters():
            parameter.data *= 0.99


steps = 0
torch.manual_seed(rank)  # dropout and augmentation
for epoch in range(args.epochs):
    if fault not in ("set-epoch", "no-sampler"):
        sampler.set_epoch(epoch)
    model.train(not (fault == "stays-in-eval" and epoch))
    waiting = []
    for batch in train_loader:
        waiting.append(batch)
        if len(waiting) == args.accum:
            train_step(waiting)
            waiting, steps = [], steps + 1
    model.eval()
    with torch.no_grad():
        hits = sum((net(x).argmax(1) == y).sum().item() for x, y in val_loader)
    if rank == 0:
        print(f"epoch {epoch}: {hits}", flush=True)
if args.save and rank == 0:
    torch.save(net.state_dict(), args.save)
if dist.is_initialized():
    dist.destroy_process_group()
