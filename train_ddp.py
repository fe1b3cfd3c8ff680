"""Train on N devices, one process each: `bash run.sh ddp N`, or torchrun with train_ddp.py."""

import sys
from argparse import Namespace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader

import common
from engine.check import check_run
from engine.modes import convert_sync_batchnorm
from engine.options import parse_args, schedule_options
from engine.run import Run
from engine.task_file import Task
from sampling import GlobalBatchSampler, ShardSampler, build_loader, seed_evaluation, seed_rng


def train_one_epoch(
    args: Namespace, task: Task, model: nn.Module, loader: DataLoader, state: common.State, run: Run
) -> None:
    """Train from `state.step` to the end of the epoch."""
    common.train_mode(model)
    for micro_batches in run.batches(loader):  # of one step, on the device already
        total = task.total_weight(micro_batches)  # the global batch size, or its sum of weights
        for i, (inputs, targets) in enumerate(micro_batches):
            model.require_backward_grad_sync = i == args.accum_steps - 1  # all-reduce once a step
            seed_rng(args.seed, state.global_step, i, dist.get_rank())  # dropout differs per rank
            with common.autocast(run.device, args.amp):
                outputs = model(inputs)
                losses = task.per_sample_loss(outputs, targets)
            # DDP averages over the ranks. This gives the gradient of the global batch's mean loss.
            loss = losses.sum() * (dist.get_world_size() / total)
            state.scaler.scale(loss).backward()
            metrics = task.train_metrics(outputs, targets)
            state.meter.add(loss=task.weigh(losses, targets), **metrics)
        state.scaler.unscale_(state.optimizer)
        norm = common.clip_grad_norm(state.parameters, args.clip_grad_norm)  # of the whole gradient
        state.guard.step(norm)  # optimizer.step(), unless the norm is NaN or infinite
        for parameter in state.parameters:  # also those that the optimizer does not have
            parameter.grad = None
        state.scheduler.step()  # after a skipped step too
        state.average.after_step()  # for --average ema
        run.end_step(norm)  # counts the step; writes the log; saves; exits after a signal


@torch.no_grad()
def evaluate(
    args: Namespace, task: Task, model: nn.Module, loader: DataLoader, device: torch.device
) -> dict[str, float]:
    """Return the mean loss, the mean of each metric and the `count` over the whole data set."""
    model.eval()
    meter = common.Meter()
    for i, batch in enumerate(loader):
        seed_evaluation(args.seed, i)  # a task that draws numbers draws the same in every mode
        inputs, targets = common.to_device(batch, device)
        with common.autocast(device, args.amp):
            outputs = model(inputs)
            losses = task.per_sample_loss(outputs, targets)
            meter.add(loss=task.weigh(losses, targets), **task.per_sample_metrics(outputs, targets))
    common.train_mode(model)  # what is saved next is the network as it trains
    return meter.mean(task.dataset_metrics)


@record  # torchrun learns which rank failed first, and why
def main(argv: list[str] | None = None) -> int:
    args = parse_args("ddp", argv)
    rank, local_rank, world_size = common.ranks_from_env()  # of torchrun, run.sh or srun
    device = common.set_up_device(args.device, args.deterministic, local_rank)  # one per rank
    task = Task(args)  # the functions of task.py, or of --task
    train_set, val_set = task.build_datasets()

    # The loaders fork workers, which would keep a copy of the network: so it is built later.
    order = {"batch_size": args.batch_size, "seed": args.seed, "accum_steps": args.accum_steps}
    train_sampler = GlobalBatchSampler(train_set, **order, rank=rank, world_size=world_size)
    val_sampler = ShardSampler(len(val_set), args.eval_batch_size, rank, world_size)
    fetch = {"seed": args.seed, "workers": args.workers, "collate": task.collate}
    train_loader = build_loader(train_set, train_sampler, device, **fetch)
    val_loader = build_loader(val_set, val_sampler, device, **fetch)

    # The process group starts threads. A fork beside threads may hang, so the loaders come first.
    dist.init_process_group(common.backend(device), timeout=timedelta(seconds=args.timeout))
    net = task.build_net().to(device)  # from --seed or --weights
    net = convert_sync_batchnorm(net, device) if args.sync_bn else net  # BatchNorm over all ranks
    schedule = schedule_options(args)  # {"schedule": "cosine", "epochs": 30, ...}
    optimizer = task.build_optimizer(net)
    scheduler = common.build_scheduler(optimizer, train_sampler.steps_per_epoch, **schedule)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")  # else it does nothing
    average = common.WeightAverage(net, args.ema_decay, enabled=args.average == "ema")
    state = common.State(net, optimizer, scheduler, scaler, average)
    check_run(task, net, device, train_loader, val_loader)  # tries a batch of each
    run = Run(state, train_loader, val_loader, device, args)  # position, log, files
    run.open()  # the output directory, and the checkpoint of --resume if there is one

    model = net  # the loop calls model: net, or in ddp its wrapper; checkpoints save net
    if args.compile:
        model.compile()
    model = nn.parallel.DistributedDataParallel(
        model, find_unused_parameters=args.find_unused_parameters, gradient_as_bucket_view=True
    )  # averages the gradients of all ranks during the backward
    common.settle_buckets(model)  # a backward of zeros: new and resumed runs sum in one order

    while state.epoch < args.epochs and not args.eval_only:
        train_one_epoch(args, task, model, train_loader, state, run)
        common.broadcast_tensors(net.buffers())  # all ranks evaluate with rank 0's statistics
        run.save("last.pt")  # the evaluation may crash. If a signal was seen, the run ends here
        with average.swapped_in():  # for --average ema: the average is in net meanwhile
            metrics = evaluate(args, task, net, val_loader, device)
        state.epoch, state.step = state.epoch + 1, 0
        run.end_epoch(metrics)  # logs them; writes last.pt, and best.pt if it is the best
    if args.eval_only:
        with average.swapped_in():
            run.eval_line(evaluate(args, task, net, val_loader, device))
    run.finish()
    del model  # DDP holds the group: torch 2.11 may hang if DDP ends it
    dist.destroy_process_group()  # all ranks are done
    return 0


if __name__ == "__main__":
    sys.exit(main())
