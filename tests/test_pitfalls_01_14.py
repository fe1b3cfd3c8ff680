"""The pitfalls of going from one device to many, by number: 01 to 14. Each test shows the wrong way failing, then this project's way."""

import argparse
import copy
import functools
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import (
    ROOT,
    TASKS,
    deviation,
    in_group,
    loader_of,
    make_args,
    make_sampler,
    run_processes,
    single_run,
    train,
    undisturbed,
)
from pitfalls import (
    BASE,
    after_step,
    in_process,
    on_rank_1,
    print_batches,
    printed,
    stop_after,
    without_speed,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import common
import machinery.processes
import sampling
import task
import train_spawn

CPU = torch.device("cpu")


def gradients(model):
    return {
        name.removeprefix("module."): parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


# ------------------------------------------------------------------------------------------------------------------------- 01


def evaluate_both_ways():
    hits = (torch.arange(21) % 4 == 0).double()
    padded = list(DistributedSampler(hits, shuffle=False))
    wrong = common.reduce_value(hits[padded].mean()).item()
    meter = common.Meter(CPU)
    for _, indices in sampling.ShardSampler(len(hits), 4, dist.get_rank(), dist.get_world_size()):
        meter.add(top1=hits[indices])
    print(json.dumps([wrong, meter.mean()]))


def test_pitfall_01_evaluation_counts_every_sample_once():
    """Accuracy depends on the number of devices: DistributedSampler repeats samples to make the shards equal, and means are averaged."""
    for length, world_size, repeated in ((21, 2, 1), (3, 4, 1), (50001, 8, 7)):
        padded = [
            i
            for rank in range(world_size)
            for i in DistributedSampler(range(length), world_size, rank, shuffle=False)
        ]
        assert len(padded) - length == repeated
    for length in (21, 3, 50001):
        for world_size in (1, 2, 3, 4):
            shards = [
                sampling.ShardSampler(length, 16, rank, world_size) for rank in range(world_size)
            ]
            assert sorted(i for shard in shards for _, indices in shard for i in indices) == list(
                range(length)
            )

    for out in in_group(4, evaluate_both_ways):
        wrong, right = json.loads(out)
        assert abs(wrong - 6 / 21) > 5e-3
        assert right == {"top1": pytest.approx(6 / 21, rel=1e-12), "count": 21}

    one, four = single_run(*BASE).eval_lines(), undisturbed("ddp", 4, *BASE).eval_lines()
    assert len(four) == 3 and four[-1]["count"] == 57 and 0.2 < four[-1]["top1"] < 1
    assert [line["top1"] for line in four] == pytest.approx(
        [line["top1"] for line in one], rel=1e-10
    )
    assert [line["loss"] for line in four] == pytest.approx(
        [line["loss"] for line in one], rel=1e-10
    )


# ------------------------------------------------------------------------------------------------------------------------- 02


def uneven_pieces():
    torch.manual_seed(0)
    net, inputs = nn.Linear(5, 1).double(), torch.randn(7, 5).double()
    (net(inputs) ** 2).mean().backward()
    piece, deviations = inputs.tensor_split(2)[dist.get_rank()], []
    for scale in (1 / len(piece), dist.get_world_size() / len(inputs)):
        model = DistributedDataParallel(copy.deepcopy(net))
        model.zero_grad()
        ((model(piece) ** 2).sum() * scale).backward()
        deviations.append(deviation(gradients(model), gradients(net)))
    print(json.dumps(deviations))


def test_pitfall_02_uneven_pieces_of_a_batch(tmp_path):
    """The gradient is wrong when ranks hold 4 and 3 samples: DDP averages over ranks, so each rank's mean counts alike."""
    for out in in_group(2, uneven_pieces):
        mean_of_means, scaled_sum = json.loads(out)
        assert mean_of_means > 1e-2
        assert scaled_sum < 1e-14

    argv = (*BASE, "--batch-size", "7", "--epochs", "1", "--lr", "0.02")
    reference, result = single_run(*argv), train("ddp", 2, *argv, folder=tmp_path)
    for rank in (0, 1):
        assert deviation(result.gradients[rank][0], reference.gradients[0][0]) <= 1e-12
    assert deviation(result.checkpoint()["model"], reference.checkpoint()["model"]) <= 1e-10


# ------------------------------------------------------------------------------------------------------------------------- 03


def test_pitfall_03_batch_size_is_global(tmp_path):
    """More devices, lower accuracy: a batch size per device makes the global batch, the steps of an epoch and the gradient other ones."""
    reference = single_run(*BASE)
    per_device = single_run(*BASE, "--batch-size", "60")  # what 30 on each of two devices would be
    assert len(per_device.train_lines()) == 9 and len(reference.train_lines()) == 18
    assert deviation(per_device.gradients[0][0], reference.gradients[0][0]) > 1e-2

    for world_size in (2, 4):
        result = undisturbed("ddp", world_size, *BASE)
        assert [line["lr"] for line in result.train_lines()] == [
            line["lr"] for line in reference.train_lines()
        ]
        assert deviation(result.gradients[0][0], reference.gradients[0][0]) <= 1e-12

    scaled = train("ddp", 2, *BASE, "--epochs", "1", "--scale-lr", "linear", folder=tmp_path)
    assert (
        scaled.train_lines()[-1]["lr"] == 2 * reference.train_lines()[5]["lr"] > 0
    )  # only when asked for


# ------------------------------------------------------------------------------------------------------------------------- 04


def test_pitfall_04_resume_is_exact(tmp_path):
    """The loss jumps at resume: only the weights were saved, and momentum, schedule, or place in the epoch begin anew."""
    argv = (*BASE, "--model", "dropout", "--average", "ema")
    straight = single_run(*argv)
    stopped = train("single", 1, *argv, folder=tmp_path, patch=functools.partial(stop_after, 8))
    saved = stopped.checkpoint()
    assert stopped.code == 143 and (saved["epoch"], saved["step"], saved["global_step"]) == (
        1,
        2,
        8,
    )

    momenta = [state["momentum_buffer"] for state in saved["optimizer"]["state"].values()]
    assert max(momentum.abs().max() for momentum in momenta) > 1e-3
    for momentum in momenta:
        momentum.zero_()
    torch.save(saved, tmp_path / "weights.pt")
    forgetful = train(
        "single",
        1,
        *argv,
        "--resume",
        tmp_path / "weights.pt",
        "--output-dir",
        tmp_path / "wrong",
        folder=tmp_path,
    )
    assert (
        forgetful.code == 0
        and deviation(forgetful.checkpoint()["model"], straight.checkpoint()["model"]) > 1e-3
    )

    resumed = train("single", 1, *argv, "--resume", "auto", folder=tmp_path)
    assert resumed.code == 0 and without_speed(resumed.lines) == without_speed(straight.lines)
    for part in ("model", "average"):
        a, b = resumed.checkpoint()[part], straight.checkpoint()[part]
        assert a.keys() == b.keys() and all(a[name].equal(b[name]) for name in b)  # bitwise
    states = [run.checkpoint()["optimizer"]["state"] for run in (resumed, straight)]
    assert all(
        states[0][i]["momentum_buffer"].equal(states[1][i]["momentum_buffer"]) for i in states[1]
    )


# ------------------------------------------------------------------------------------------------------------------------- 05


def skip_on_one_rank():
    net = DistributedDataParallel(nn.Linear(3, 1))
    updates = 0
    try:
        for step in range(3):
            loss = net(torch.ones(2, 3)).sum() * (
                float("nan") if step == 0 and dist.get_rank() == 1 else 1
            )
            if not loss.isfinite():
                continue  # no backward here, but the other rank is in its all-reduce
            loss.backward()
            updates += 1
    except RuntimeError:
        pass  # rank 0 waits for a third all-reduce, which never comes: its partner has finished
    print(updates)


def make_nan(losses):
    return losses * float("nan")


def test_pitfall_05_nan_on_one_rank(tmp_path):
    """NaN on one rank: a rank that skips its own step leaves the others in a collective, or pairs their batches wrongly from then on."""
    assert [int(out) for out in in_group(2, skip_on_one_rank)] == [
        2,
        2,
    ]  # of 3 steps; rank 0's first went with rank 1's second

    clean = undisturbed("ddp", 2, *BASE)
    result = train(
        "ddp", 2, *BASE, folder=tmp_path, patch=functools.partial(on_rank_1, make_nan, 2)
    )
    assert result.code == 0, (
        result.err
    )  # equal weights on all ranks are checked at the end of each epoch
    assert [line["skipped"] for line in result.train_lines()] == [0, 0, 1] + 15 * [0]
    assert [line["grad_norm"] is None for line in result.train_lines()] == [
        False,
        False,
        True,
    ] + 15 * [False]  # of rank 0: it got the NaN
    assert [line["global_step"] for line in result.train_lines()] == [
        line["global_step"] for line in clean.train_lines()
    ]
    model = result.checkpoint()["model"]
    assert all(tensor.isfinite().all() for tensor in model.values())
    assert deviation(model, clean.checkpoint()["model"]) > 1e-4  # one update is missing


# ------------------------------------------------------------------------------------------------------------------------- 06


def fail(how):
    if how == "raises":
        raise RuntimeError("rank 1 broke")
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(int(how[-1]))


def bare_launcher():
    process = multiprocessing.get_context("fork").Process(target=fail, args=("raises",))
    process.start()
    process.join()
    return 0  # what the loop of processes and joins in many scripts ends with


def spawn_launcher(argv, change=None, call=2):
    """train_spawn.py as launched by hand, but for the start of its ranks by fork, which saves importing torch in each."""
    mp.spawn = functools.partial(mp.start_processes, start_method="fork")
    if change:
        on_rank_1(change, call)
    return machinery.processes.run_main(functools.partial(train_spawn.main, argv))


LAST_WORDS = {
    "raises": "RuntimeError: rank 1 broke$",
    "exits 0": "a rank left before the end$",
    "exits 1": "process 1 left with exit code 1$",
    "is killed": "process 1 was killed by SIGKILL$",
}


@pytest.mark.parametrize("how", LAST_WORDS)
def test_pitfall_06_dead_rank_ends_the_job(how, tmp_path):
    """A rank dies: the others wait in a collective for ever, or the launcher, which ignores exit codes, reports success."""
    ((code, _, err),) = run_processes([bare_launcher], tmp_path)
    assert code == 0 and "rank 1 broke" in err

    argv = [*BASE, "--nproc", "2", "--epochs", "1000", "--output-dir", str(tmp_path / "run")]
    start = time.monotonic()
    target = functools.partial(spawn_launcher, argv, functools.partial(die, how))
    ((code, _, err),) = run_processes([target], tmp_path, timeout=40)
    assert code == 1, err
    assert (
        time.monotonic() - start < 20
    )  # less than --timeout 30: the others are told, they do not time out
    assert re.search(LAST_WORDS[how], err.splitlines()[-1]), err  # not what it led to in the others
    assert ("Traceback" in err) == (how == "raises"), err


def die(how, losses):
    fail(how)


FAILING_TASK = """
import itertools
import small
from small import *

calls = itertools.count()

def per_sample_loss(outputs, targets):
    if outputs.requires_grad and next(calls) == 3:  # not in the check
        raise RuntimeError("broken labels")
    return small.per_sample_loss(outputs, targets, label_smoothing=0.1)
"""


@pytest.mark.parametrize(("mode", "options"), [("single", []), ("spawn", ["--nproc", "2"])])
def test_pitfall_06_error_with_loader_workers_ends_the_process(mode, options, tmp_path):
    """A script prints its traceback and then hangs: at exit Python waits for loader workers, which ignore its SIGTERM."""
    (tmp_path / "failing.py").write_text(FAILING_TASK)
    command = [
        sys.executable,
        str(ROOT / f"train_{mode}.py"),
        *BASE,
        *options,
        "--task",
        str(tmp_path / "failing.py"),
        "--workers",
        "2",
    ]
    command += ["--output-dir", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(TASKS)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last == "RuntimeError: broken labels", "nor is anything left, of which Python would tell"


# ------------------------------------------------------------------------------------------------------------------------- 07


def test_pitfall_07_every_epoch_has_its_own_order(tmp_path):
    """Every epoch has the same order: DistributedSampler shuffles by its epoch, which stays 0 unless set_epoch is called."""
    sampler = DistributedSampler(range(203), 2, 0, shuffle=True)
    assert list(sampler) == list(sampler)

    result = train("ddp", 2, *BASE, folder=tmp_path, patch=print_batches)
    batches = printed(result.out, "batch")
    orders = [
        [i for e, rank, indices in batches if e == epoch and rank == 0 for i in indices]
        for epoch in range(3)
    ]
    assert [len(order) for order in orders] == [90, 90, 90]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert orders[a] != orders[b] and set(orders[a]) != set(orders[b])


# ------------------------------------------------------------------------------------------------------------------------- 08


class OwnGenerator(Dataset):
    """Augments from a generator that it holds, of which every forked worker gets a copy."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.generator.random()


class TorchNoise(OwnGenerator):
    """Augments from torch's generator, as torchvision's transforms do."""

    def __getitem__(self, index):
        return torch.rand(3), index


def batches_of(dataset, workers):
    args = make_args("single", "--workers", str(workers))
    sampler = make_sampler(24, 8)
    loader, epochs = loader_of(args, dataset, sampler, CPU), []
    for epoch in (0, 1):
        sampler.set_position(epoch, 0)
        by_index = {}
        for values, indices in loader:
            by_index.update(zip(indices.tolist(), values))
        epochs.append(torch.stack([by_index[index] for index in range(24)]))
    return epochs


class Images(Dataset):
    """The default task's training images; a sample is (image, index)."""

    def __init__(self):
        self.images = task.build_datasets(make_args())[0]
        self.images.targets = torch.arange(24)
        self.set_epoch = self.images.set_epoch

    def __len__(self):
        return 24

    def __getitems__(self, indices):
        return self.images.__getitems__(indices)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
def test_pitfall_08_augmentation_differs_between_workers_and_epochs():
    """All loader workers, or all epochs, augment alike: a generator was copied by fork, or worker_init_fn seeds with a constant."""
    first, second = DataLoader(
        OwnGenerator(), batch_size=12, num_workers=2
    )  # one batch of each worker
    assert first.equal(second)
    loader = DataLoader(TorchNoise(), batch_size=24, num_workers=1, worker_init_fn=seed_by_worker)
    epochs = [next(iter(loader))[0] for _ in range(2)]
    assert epochs[0].equal(epochs[1])

    for dataset in (TorchNoise(), Images()):
        epochs = batches_of(dataset, 0)
        assert not epochs[0].equal(epochs[1])
        assert len({tuple(sample.flatten().tolist()) for sample in epochs[0]}) == 24
        for workers in (1, 3):
            assert all(a.equal(b) for a, b in zip(batches_of(dataset, workers), epochs))


def seed_by_worker(worker):
    torch.manual_seed(worker)


# ------------------------------------------------------------------------------------------------------------------------- 09


def sync_on_the_first():
    torch.manual_seed(0)
    net, inputs = nn.Linear(5, 1).double(), torch.randn(12, 5).double()
    (net(inputs) ** 2).mean().backward()
    model = DistributedDataParallel(copy.deepcopy(net))
    model.zero_grad()
    first, *others = inputs.tensor_split(2)[dist.get_rank()].split(2)
    ((model(first) ** 2).sum() / 6).backward()
    with model.no_sync():
        for piece in others:
            ((model(piece) ** 2).sum() / 6).backward()
    print(
        json.dumps([deviation(gradients(model), gradients(net)), model.module.weight.grad.tolist()])
    )


def forward_outside_no_sync():
    torch.manual_seed(0)
    model, inputs = DistributedDataParallel(nn.Linear(5, 1)), torch.randn(2, 5)
    loss = model(inputs[dist.get_rank()]).sum()
    with model.no_sync():
        loss.backward()  # too late: whether to synchronise was decided in the forward
    print(json.dumps(model.module.weight.grad.tolist()))


def test_pitfall_09_accumulation_synchronises_the_last_piece(tmp_path):
    """Ranks go on with different gradients after accumulation: the micro-batch that was synchronised was not the last one."""
    (wrong, first), (_, second) = map(json.loads, in_group(2, sync_on_the_first))
    assert wrong > 0.05 and first != second  # what came after the all-reduce stays on its rank
    first, second = in_group(2, forward_outside_no_sync)
    assert first == second  # sent although it should not be: slow

    reference = single_run(*BASE)
    result = train("ddp", 2, *BASE, "--accum-steps", "4", folder=tmp_path, patch=count_all_reduces)
    assert result.code == 0, result.err
    for rank in (0, 1):
        assert deviation(result.gradients[rank][0], reference.gradients[0][0]) <= 1e-12
    assert (
        printed(result.out, "reduced") == [1 + 18] * 2
    )  # settle_buckets, and one for each update, not one for each micro-batch


def count_all_reduces(rank):
    """Print how many times DDP sent its (one) bucket of gradients."""
    count = 0

    def hook(state, bucket):
        nonlocal count
        count += 1
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    compress, destroy = common.compress_gradients, dist.destroy_process_group
    common.compress_gradients = lambda model, *others: (
        compress(model, *others),
        model.register_comm_hook(None, hook),
    )
    dist.destroy_process_group = lambda: (print("reduced", count), destroy())


# ------------------------------------------------------------------------------------------------------------------------- 10


def save_on_a_full_disk():
    signal.signal(
        signal.SIGXFSZ, signal.SIG_IGN
    )  # so that a write beyond the limit is an error and not the end
    old, new = {"weight": torch.zeros(100)}, {"weight": torch.ones(100_000)}
    with tempfile.TemporaryDirectory() as name:
        for path, save in (
            (Path(name) / "direct.pt", torch.save),
            (Path(name) / "last.pt", common.save_checkpoint),
        ):
            save(old, path)
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
            try:
                save(new, path)
                outcome = "saved"
            except (OSError, RuntimeError):
                outcome = "failed"
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
            try:
                content = torch.load(path)["weight"].sum().item()
            except Exception:
                content = "unreadable"
            print(json.dumps([path.name, outcome, content]))
        print(json.dumps(sorted(os.listdir(name))))


def test_pitfall_10_full_disk_leaves_the_old_checkpoint():
    """A crash or a full disk during a save destroys the only checkpoint: it was written over the old file."""
    direct, atomic, files = map(json.loads, in_process(save_on_a_full_disk).splitlines())
    assert direct == ["direct.pt", "failed", "unreadable"]
    assert atomic == ["last.pt", "failed", 0.0]
    assert files == ["direct.pt", "last.pt"]  # no half-written file stays behind


# ------------------------------------------------------------------------------------------------------------------------- 11


def terminate_group(rank):
    """SIGTERM, as batch systems send it: to the process and its loader workers at once. Only one rank gets it."""
    multiprocessing.set_start_method(
        "fork", force=True
    )  # loader workers are then in the process group of their rank
    if rank == 1:
        os.setsid()
        after_step(3, kill_own_group)


def kill_own_group():
    subprocess.run(
        ["kill", "-TERM", "--", f"-{os.getpgrp()}"], start_new_session=True
    )  # from outside: its parent may end a worker


def terminate_group_with_plain_workers(rank):
    multiprocessing.set_start_method("fork", force=True)
    sampling.leave_signals_to_parent = lambda worker: None  # as DataLoader's workers are by default
    os.setsid()

    def stop():
        kill_own_group()
        for worker in multiprocessing.active_children():
            os.waitid(
                os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT
            )  # dead, and left for the loader to find

    after_step(3, stop)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_pitfall_11_sigterm_saves(workers, tmp_path):
    """SIGTERM ends the job without a checkpoint: it reaches the loader workers too, and the run dies of their death before it can save."""
    if workers == "2":
        wrong = train(
            "single",
            1,
            *BASE,
            "--workers",
            "2",
            folder=tmp_path / "wrong",
            patch=terminate_group_with_plain_workers,
        )
        assert "DataLoader worker" in wrong.err and not (wrong.folder / "last.pt").exists()

    argv = (*BASE, "--workers", workers)
    stopped = train("ddp", 2, *argv, folder=tmp_path, patch=terminate_group)
    assert stopped.code == 143 and "stopped by SIGTERM" in stopped.err
    assert stopped.checkpoint()["global_step"] == 4  # both ranks: one step was needed to agree
    resumed = train("ddp", 2, *argv, "--resume", "auto", folder=tmp_path)
    assert resumed.code == 0, resumed.err
    straight = undisturbed("ddp", 2, *BASE)
    assert without_speed(resumed.lines) == without_speed(straight.lines)
    assert all(
        tensor.equal(straight.checkpoint()["model"][name])
        for name, tensor in resumed.checkpoint()["model"].items()
    )


# ------------------------------------------------------------------------------------------------------------------------- 12


def print_batches_and_stop(rank):
    print_batches(rank)
    stop_after(8, rank)


def test_pitfall_12_resume_within_an_epoch_repeats_nothing(tmp_path):
    """A run resumed in the middle of an epoch repeats some samples and skips others: it draws a new order and skips in that."""
    first, again = torch.randperm(203).tolist(), torch.randperm(203).tolist()
    assert len(set(first[:90] + again[90:])) < 203

    stopped = train("ddp", 2, *BASE, folder=tmp_path, patch=print_batches_and_stop)
    assert stopped.code == 143 and stopped.checkpoint()["step"] == 3
    resumed = train("ddp", 2, *BASE, "--resume", "auto", folder=tmp_path, patch=print_batches)
    before, after = (
        [b for b in printed(run.out, "batch") if b[0] == 1] for run in (stopped, resumed)
    )
    assert (
        len(before) == len(after) == 2 * 3
    )  # three steps of each rank; nothing is loaded only to be skipped
    seen = [index for _, _, indices in before + after for index in indices]
    assert len(seen) == len(set(seen)) == 180
    order = torch.randperm(
        203, generator=torch.Generator().manual_seed(sampling.splitmix64(0, 1))
    ).tolist()
    assert set(seen) == set(order[:180])


# ------------------------------------------------------------------------------------------------------------------------- 13


def test_pitfall_13_resume_at_another_world_size(tmp_path):
    """Resuming on another number of devices skips or repeats data: the position was counted in batches of one rank."""
    order = list(range(180))
    trained = {
        i for rank in range(2) for i in order[rank::2][: 3 * 15]
    }  # three steps on two ranks, 15 samples each
    left = {
        i for rank in range(4) for i in order[rank::4][3 * 15 :]
    }  # the same position on four ranks
    assert len(trained) == 90 and not left

    stopped = train("ddp", 2, *BASE, folder=tmp_path, patch=functools.partial(stop_after, 8))
    assert stopped.code == 143 and stopped.checkpoint()["global_step"] == 9
    straight = single_run(*BASE)
    assert deviation(stopped.checkpoint()["model"], straight.checkpoint()["model"]) > 1e-3
    for mode, n in (("single", 1), ("dp", 2), ("ddp", 3), ("spawn", 4)):
        folder = shutil.copytree(stopped.folder, tmp_path / f"{mode}{n}")
        resumed = train(mode, n, *BASE, "--resume", "auto", "--output-dir", folder, folder=tmp_path)
        assert resumed.code == 0, resumed.err
        assert deviation(resumed.checkpoint()["model"], straight.checkpoint()["model"]) <= 1e-10
        steps = [line["global_step"] for line in resumed.train_lines()]
        assert steps == list(range(1, 19))


# ------------------------------------------------------------------------------------------------------------------------- 14


class Hostile:
    """Runs code where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def plain(value):
    """Whether there is nothing in a nested value but what `weights_only=True` accepts without being told."""
    if isinstance(value, dict):
        return all(plain(item) for pair in value.items() for item in pair)
    if isinstance(value, (list, tuple)):
        return all(plain(item) for item in value)
    return value is None or type(value) in (torch.Tensor, int, float, str, bool)


def test_pitfall_14_checkpoints_hold_plain_values(tmp_path):
    """UnpicklingError at load, or code from the file runs: objects were pickled into the checkpoint, and weights_only was switched off."""
    for value in (np.float64(0.5), Path("runs"), argparse.Namespace(lr=0.1)):
        assert not plain({"config": [value]})
        torch.save({"config": value}, tmp_path / "objects.pt")
        with pytest.raises(Exception, match="Weights only load failed"):
            torch.load(tmp_path / "objects.pt", weights_only=True)

    result = train("single", 1, *BASE, "--average", "ema", "--epochs", "1", folder=tmp_path)
    saved = torch.load(result.folder / "last.pt", weights_only=True)
    assert saved.keys() >= {
        "format",
        "model",
        "optimizer",
        "scheduler",
        "scaler",
        "average",
        "epoch",
        "step",
        "global_step",
        "best",
    }
    assert plain({**saved, "model": dict(saved["model"])}) and saved["config"]["batch_size"] == 30

    torch.save({**saved, "best": Hostile(tmp_path / "intruder")}, tmp_path / "hostile.pt")
    with pytest.raises(common.UsageError, match="Weights only load failed"):
        common.load_checkpoint(tmp_path / "hostile.pt")
    assert not (tmp_path / "intruder").exists()
    torch.load(tmp_path / "hostile.pt", weights_only=False)
    assert (tmp_path / "intruder").exists()  # the file was hostile
    product = [*ROOT.glob("*.py"), *ROOT.glob("machinery/*.py")]
    assert len(product) > 10 and not any(
        "weights_only=False" in path.read_text() for path in product
    )
