"""Train a model in shards on N devices: `bash run.sh fsdp N`, or torchrun with train_fsdp.py."""

import sys
from argparse import Namespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader

import common
from common import State, set_up_device
from machinery.check import check_run
from machinery.cli import parse_args, schedule_options
from machinery.modes import build_once, convert_sync_batchnorm, join_forwards, mesh_of_ranks, shard
from machinery.process import run_main
from machinery.rendezvous import init_method, timeout
from machinery.run import Run
from machinery.usertask import Task
from sampling import GlobalBatchSampler, ShardSampler, build_loader, seed_evaluation, seed_rng


def train_one_epoch(
    args: Namespace, task: Task, model: nn.Module, loader: DataLoader, state: State, run: Run
) -> None:
    """Train from `state.step` to the end of the epoch."""
    common.train_mode(model)
    for micro_batches in run.batches(loader):  # of one step, on the device already
        total = task.total_weight(micro_batches)  # the global batch size, or its sum of weights
        for i, (inputs, targets) in enumerate(micro_batches):
            reduces = i == args.accum_steps - 1 or args.reduce_every == "micro-batch"
            model.set_requires_gradient_sync(reduces)  # a reduce-scatter, which also cuts them
            seed_rng(args.seed, state.global_step, i, dist.get_rank())  # dropout differs per rank
            with common.autocast(run.device, args.amp):
                outputs = model(inputs)
                losses = task.per_sample_loss(outputs, targets)
            # Averaged over the ranks, this gives the gradient of the global batch's mean loss.
            loss = losses.sum() * (dist.get_world_size() / total)
            state.scaler.scale(loss).backward()
            run.meter.add(loss=task.weigh(losses, targets), **task.train_metrics(outputs, targets))
        state.scaler.unscale_(state.optimizer)  # looks for NaN and Inf in the gradients
        norm = common.clip_grad_norm(state.net, args.clip_grad_norm, run.logs_next)  # for the log
        state.scaler.step(state.optimizer)  # does nothing if it has found one
        state.scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
        state.scheduler.step()  # after a skipped step too
        state.average.after_step()  # for --average ema
        run.end_step(norm)  # counts and logs; saves if due; raises after a signal


@torch.no_grad()
def evaluate(
    args: Namespace, task: Task, model: nn.Module, loader: DataLoader, device: torch.device
) -> dict[str, float]:
    """Return the mean loss, the mean of each metric and the `count` over the whole data set."""
    model.eval()
    meter = common.Meter(device)
    for i, batch in enumerate(loader):
        seed_evaluation(args.seed, i)  # a task that draws numbers draws the same in every mode
        inputs, targets = common.to_device(batch, device)
        with common.autocast(device, args.amp):
            outputs = model(inputs)
            losses = task.per_sample_loss(outputs, targets)
            metrics = task.per_sample_metrics(outputs, targets)
            meter.add(loss=task.weigh(losses, targets), **metrics)
    join_forwards(model, loader, device, args.amp)  # forwards need all ranks; one may lack a batch
    return meter.mean(task.dataset_metrics)


@record  # torchrun shows the traceback of the rank that failed first
def main(argv: list[str] | None = None) -> int:
    args = parse_args("fsdp", argv)
    rank, local_rank, world_size = common.ranks_from_env()  # of torchrun, run.sh or srun
    device = set_up_device(args.device, args.deterministic, local_rank)  # one device per rank
    task = Task(args)  # the functions of task.py, or of --task
    train_set, val_set = task.build_datasets()

    # The loaders fork workers. A worker would keep a copy of the network: so that comes later.
    order = args.batch_size, args.seed, args.accum_steps, args.balanced
    train_sampler = GlobalBatchSampler(train_set, *order, rank, world_size, args.shuffle_window)
    val_sampler = ShardSampler(len(val_set), args.eval_batch_size, rank, world_size)  # no repeats
    loader_options = args.seed, args.workers, args.skip_corrupt, task.collate
    train_loader = build_loader(train_set, train_sampler, device, *loader_options)
    val_loader = build_loader(val_set, val_sampler, device, *loader_options)

    # The process group starts threads. A fork beside threads may hang, so the loaders come first.
    dist.init_process_group(common.backend(device), init_method(), timeout(args.timeout))
    net = build_once(task.build_net)  # rank 0 alone has the weights; the group compares the rest
    schedule = schedule_options(args)  # {"schedule": "cosine", "epochs": 30, ...}
    net = convert_sync_batchnorm(net, device) if args.sync_bn else net  # BatchNorm over all ranks
    mesh = mesh_of_ranks(device, args.shard_size)  # --shard-size ranks share one copy
    shard(net, task.shard_modules, mesh, args.amp)  # the optimizer must hold the shards
    optimizer = task.build_optimizer(net)
    common.scale_lr(optimizer, args.scale_lr)
    scheduler = common.build_scheduler(optimizer, train_sampler.steps_per_epoch, **schedule)
    scaler = common.StepGuard(args.amp, device, net)  # torch's GradScaler; skips NaN at any --amp
    average = common.WeightAverage(net, args.ema_decay, enabled=args.average == "ema")
    state = State(net, optimizer, scheduler, scaler, average)
    check_run(task, net, device, train_loader, val_loader)  # tries a batch of each
    run = Run(state, train_loader, val_loader, device, args)  # position, log, files
    run.resume()  # opens the output directory, and loads the checkpoint of --resume

    model = net  # the loop calls model, which may become a wrapper; checkpoints save net
    if args.compile:
        model.compile()

    while state.epoch < args.epochs and not args.eval_only:
        train_one_epoch(args, task, model, train_loader, state, run)
        common.sync_buffers(net)  # all ranks evaluate with rank 0's BatchNorm statistics
        run.save("last.pt")  # the evaluation may crash. If a signal was seen, the run ends here
        with average.swapped_in():  # for --average ema: the average is in net meanwhile
            metrics = evaluate(args, task, net, val_loader, device)
        state.epoch, state.step = state.epoch + 1, 0
        run.end_epoch(metrics)  # logs them; writes last.pt, and best.pt if it is the best
    if args.eval_only:
        with average.swapped_in():
            run.log.eval_line(evaluate(args, task, net, val_loader, device))
    run.finish()
    del model  # before the group, which it uses
    dist.destroy_process_group()  # all ranks are done
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main, hard_exit=True))  # at Python's own end a mesh's threads may abort
