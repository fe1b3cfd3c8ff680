"""Train on N devices, one process each: `bash run.sh ddp N [options]`, or `torchrun --nproc-per-node N train_ddp.py [options]`."""

import signal
import sys
from argparse import Namespace

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch is imported: an end without a traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import common
from checkpoint import Run, State
from replicas import convert_sync_batchnorm


def sync_on_last(model: nn.Module, micro_batches: list):  # the gradients of all micro-batches travel once, with the last
    with model.no_sync():  # forward and backward of the others run in here
        yield from micro_batches[:-1]
    yield micro_batches[-1]


def train_one_epoch(args: Namespace, task: Namespace, model: nn.Module, loader: DataLoader, state: State, run: Run) -> None:
    """Train from `state.step` to the end of the epoch; one batch of the loader is one optimizer step."""
    common.train_mode(model)
    for batch in run.batches(loader):
        for i, (inputs, targets) in enumerate(sync_on_last(model, common.split_batch(batch, args.accum_steps))):
            common.seed_rng(args.seed, state.global_step, i, dist.get_rank())  # every rank drops other units
            with common.autocast(args, run.device):
                losses = task.per_sample_loss(model(inputs), targets)
            loss = losses.sum() * (dist.get_world_size() / args.batch_size)  # DDP's average divides by the world size
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


@record  # torchrun then shows the traceback of the rank that failed first
@common.leaves_no_trace  # in a notebook, or whatever else calls it and goes on
def main(argv: list[str] | None = None) -> int:
    args = common.parse_args("ddp", argv)
    common.check_run(args)
    rank, local_rank, world_size = common.launcher_ranks()  # from torchrun's environment
    device = common.set_up_device(args, local_rank)  # a device of its own, before anything is allocated
    task = common.load_task(args)

    train_set, val_set = task.build_datasets(args)
    train_sampler = common.GlobalBatchSampler(args, train_set, rank, world_size)  # a piece
    val_sampler = common.ShardSampler(len(val_set), args.eval_batch_size, rank, world_size)  # unpadded
    train_loader = common.build_loader(args, train_set, train_sampler, device)
    val_loader = common.build_loader(args, val_set, val_sampler, device)

    dist.init_process_group(common.backend(device), common.meeting_point(), common.timeout(args), world_size, rank)  # finds the others
    net = common.build_net(args, task, device)
    net = convert_sync_batchnorm(net, device) if args.sync_bn else net  # statistics over the global batch
    optimizer = common.build_optimizer(args, net)
    scheduler = common.build_scheduler(args, optimizer, train_sampler.steps_per_epoch)
    state = State(net, optimizer, scheduler, common.Scaler(args, device, net), common.build_average(args, net))
    run = Run(args, state, train_sampler, val_sampler, device)  # resumes

    model = DistributedDataParallel(net, find_unused_parameters=args.find_unused_parameters, gradient_as_bucket_view=True)
    common.compress_gradients(args, model, state.scaler)  # on slow links
    common.repeat_first_backward(args, task, model, train_set, state)  # so that a resumed run is bitwise the same
    if args.compile:
        model.compile()

    if args.eval_only:
        common.update_bn(run, state.averaged(), train_loader)  # if it was saved before that was done
        run.log_eval(evaluate(args, task, state.averaged(), val_loader, device))
        return run.finish()
    while state.epoch < args.epochs:
        train_one_epoch(args, task, model, train_loader, state, run)
        common.sync_buffers(state.averaged())  # BatchNorm statistics of rank 0 for all; raises if the weights differ
        run.save("last.pt")  # an interruption of the evaluation then loses nothing
        common.update_bn(run, state.averaged(), train_loader)  # of an SWA average
        run.end_epoch(evaluate(args, task, state.averaged(), val_loader, device))
    return run.finish()


if __name__ == "__main__":
    sys.exit(common.exit_code(main))
