"""Train on N devices, one process for all: `bash run.sh dp N [options]`, or `python train_dp.py --replicas N [options]`."""

import signal
import sys
from argparse import Namespace

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch is imported: an end without a traceback

import torch
from torch import nn
from torch.utils.data import DataLoader

import common
from checkpoint import Run, State
from replicas import DataParallel, WithLoss


def train_one_epoch(args: Namespace, task: Namespace, model: nn.Module, loader: DataLoader, state: State, run: Run) -> None:
    """Train from `state.step` to the end of the epoch; one batch of the loader is one optimizer step."""
    common.train_mode(model)
    for batch in run.batches(loader):
        for i, (inputs, targets) in enumerate(common.split_batch(batch, args.accum_steps)):
            common.seed_rng(args.seed, state.global_step, i)
            with common.autocast(args, run.device):
                losses = model(inputs, targets)  # computed in the replicas, gathered in the order of the batch
            loss = losses.sum() / args.batch_size
            state.scaler.scale(loss).backward()
            run.meter.add(loss=losses)
        grad_norm = state.scaler.unscale_(state.optimizer)  # clipping and the check for NaN need the true gradient
        common.clip_grad_norm(state.net, args.clip_grad_norm, grad_norm)
        state.scaler.step(state.optimizer)  # does nothing if a gradient is not finite
        state.scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
        run.end_step(grad_norm)


@torch.no_grad()
def evaluate(args: Namespace, task: Namespace, model: nn.Module, loader: DataLoader, device: torch.device) -> dict[str, float]:
    """Return the mean loss, the mean of each metric and the `count` over the whole data set."""
    model.eval()
    meter = common.Meter(device)
    for i, batch in enumerate(loader):
        common.seed_evaluation(args.seed, i)  # what the task draws is the same in every mode
        inputs, targets = common.to_device(batch, device)
        with common.autocast(args, device):
            outputs = model(inputs)
            meter.add(loss=task.per_sample_loss(outputs, targets), **task.per_sample_metrics(outputs, targets))
    return meter.mean()


@common.leaves_no_trace  # in a notebook, or whatever else calls it and goes on
def main(argv: list[str] | None = None) -> int:
    args = common.parse_args("dp", argv)
    common.check_run(args)
    device = common.set_up_device(args)
    task = common.load_task(args)

    train_set, val_set = task.build_datasets(args)
    train_sampler = common.GlobalBatchSampler(args, train_set)
    val_sampler = common.ShardSampler(len(val_set), args.eval_batch_size)
    train_loader = common.build_loader(args, train_set, train_sampler, device)
    val_loader = common.build_loader(args, val_set, val_sampler, device)

    net = common.build_net(args, task, device)
    optimizer = common.build_optimizer(args, net, args.replicas)
    scheduler = common.build_scheduler(args, optimizer, train_sampler.steps_per_epoch)
    state = State(net, optimizer, scheduler, common.Scaler(args, device, net), common.build_average(args, net))
    run = Run(args, state, train_sampler, val_sampler, device)  # resumes

    model = DataParallel(WithLoss(args, net, task, device), args.replicas, device)
    if args.compile:
        model.compile()

    if args.eval_only:
        common.update_bn(run, DataParallel(WithLoss(args, state.averaged(), task, device), args.replicas, device), train_loader)
        run.log_eval(evaluate(args, task, state.averaged(), val_loader, device))
        return run.finish()
    while state.epoch < args.epochs:
        train_one_epoch(args, task, model, train_loader, state, run)
        run.save("last.pt")  # an interruption of the evaluation then loses nothing
        common.update_bn(run, DataParallel(WithLoss(args, state.averaged(), task, device), args.replicas, device), train_loader)
        run.end_epoch(evaluate(args, task, state.averaged(), val_loader, device))
    return run.finish()


if __name__ == "__main__":
    sys.exit(common.exit_code(main))
