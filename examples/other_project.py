"""Another project that uses two files of this one, common.py and sampling.py.

torchrun --standalone --nproc-per-node 2 examples/other_project.py --epochs 3

It has its own command line, data and model, and resumes by itself from --file. It takes ranks and
devices, the samplers, the step guard, the schedule, the meter and the checkpoint file.
"""

import argparse
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
from sampling import GlobalBatchSampler, ShardSampler, build_loader, seed_rng


def make_data(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.square().sum(1, keepdim=True).sqrt())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=50, help="per step, over all ranks")
    parser.add_argument("--accum-steps", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--file", type=Path, default=Path("other_project.pt"))
    args = parser.parse_args()
    rank, local_rank, world_size = common.ranks_from_env()  # of torchrun
    device = common.set_up_device(local_rank=local_rank)

    train_set, val_set = make_data(500, seed=1), make_data(101, seed=2)
    sampler = GlobalBatchSampler(
        train_set, args.batch_size, 0, args.accum_steps, rank=rank, world_size=world_size
    )
    val_sampler = ShardSampler(len(val_set), batch_size=16, rank=rank, world_size=world_size)
    train_loader = build_loader(train_set, sampler, device, seed=0, workers=0)
    val_loader = build_loader(val_set, val_sampler, device, seed=0, workers=0)

    dist.init_process_group(common.backend(device))  # after the loaders, which may fork workers
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double().to(device)
    optimizer = common.build_optimizer(net, "adamw", 0.01, 0.9, 0.0)
    schedule = {"schedule": "cosine", "epochs": args.epochs, "warmup_epochs": 0.5, "final_lr": 0.0}
    scheduler = common.build_scheduler(optimizer, sampler.steps_per_epoch, **schedule)
    guard = common.StepGuard(optimizer, torch.amp.GradScaler(enabled=False))  # no fp16
    parts = {"net": net, "optimizer": optimizer, "scheduler": scheduler}
    first_epoch = 0
    if args.file.exists():
        checkpoint = torch.load(args.file, map_location="cpu", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        first_epoch = checkpoint["epoch"]
    model = DistributedDataParallel(net)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_position(epoch, step=0)
        model.train()
        for step, micro_batches in enumerate(train_loader):
            for i, (inputs, targets) in enumerate(common.to_device(micro_batches, device)):
                model.require_backward_grad_sync = i == args.accum_steps - 1  # all-reduce once
                seed_rng(0, epoch * sampler.steps_per_epoch + step, i, rank)  # for dropout
                losses = (model(inputs) - targets).square().squeeze(1)  # [n], not their mean
                # Averaged over the ranks, this gives the gradient of the global batch's mean loss.
                (losses.sum() * (world_size / args.batch_size)).backward()
            guard.step(common.clip_grad_norm([*net.parameters()], 5.0))
            optimizer.zero_grad()
            scheduler.step()

        if guard.skipped >= guard.limit:
            raise RuntimeError("diverged: ten steps in a row had non-finite gradients")
        common.broadcast_tensors(net.buffers())  # of BatchNorm, if there is one
        net.eval()
        meter = common.Meter()
        with torch.no_grad():
            for batch in val_loader:  # by the bare network: ranks have unequal numbers of batches
                inputs, targets = common.to_device(batch, device)
                meter.add(error=(net(inputs) - targets).abs().squeeze(1))
        mean = meter.mean()
        common.print0(f"epoch {epoch + 1}: error {mean['error']:.12f} ({mean['count']} samples)")
        if rank == 0:
            checkpoint = {name: part.state_dict() for name, part in parts.items()}
            common.save_checkpoint(checkpoint | {"epoch": epoch + 1}, args.file)
    dist.barrier()
    del model  # DDP uses the group, so it goes first
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
