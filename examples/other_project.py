"""Another project that uses two files of this one, common.py and sampling.py.

torchrun --standalone --nproc-per-node 2 examples/other_project.py --epochs 3

It has its own command line, data and model. It takes the sampler, the step guard, the schedule
and the checkpoint files, and nothing of the folder machinery/.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

# In your project, copy the two files beside your script instead.
sys.path.append(str(Path(__file__).resolve().parent.parent))

import common
from sampling import GlobalBatchSampler, ShardSampler, build_loader


def make_data(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.square().sum(1, keepdim=True).sqrt())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--file", type=Path, default=Path("other_project.pt"))
    args = parser.parse_args()
    device = torch.device("cpu")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    train_set, val_set = make_data(500, seed=1), make_data(101, seed=2)
    sampler = GlobalBatchSampler(train_set, args.batch, seed=0, rank=rank, world_size=world_size)
    val_sampler = ShardSampler(len(val_set), 16, rank, world_size)
    train_loader = build_loader(train_set, sampler, device, seed=0, workers=0)
    val_loader = build_loader(val_set, val_sampler, device, seed=0, workers=0)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    optimizer = common.build_optimizer(net, "adamw", 0.01, 0.9, 0.0, nesterov=False)
    schedule = "cosine", args.epochs, 0.5, [], 0.1  # name, epochs, warm-up, marks, gamma
    scheduler = common.build_scheduler(optimizer, sampler.steps_per_epoch, *schedule)
    guard = common.StepGuard("off", device, net)
    model = DistributedDataParallel(net)

    for epoch in range(args.epochs):
        sampler.set_position(epoch, step=0)
        model.train()
        for inputs, targets in train_loader:
            losses = (model(inputs) - targets).square().squeeze(1)
            # DDP averages over ranks; this factor makes it the mean over the global batch.
            guard.scale(losses.sum() * (world_size / args.batch)).backward()
            guard.unscale_(optimizer)
            common.clip_grad_norm(net, 5.0, guard.norm)
            guard.step(optimizer)
            guard.update()
            optimizer.zero_grad()
            scheduler.step()

        model.eval()
        meter = common.Meter(device)
        with torch.no_grad():
            for inputs, targets in val_loader:
                meter.add(error=(net(inputs) - targets).abs().squeeze(1))
        mean = meter.mean()
        common.print0(f"epoch {epoch + 1}: error {mean['error']:.12f} ({mean['count']} samples)")
        if rank == 0:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            common.save_checkpoint(state, args.file)
    dist.barrier()
    del model  # DDP uses the group, so it goes first
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
