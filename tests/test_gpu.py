"""What only a GPU can show: `bash run.sh test -m gpu`. test_accelerators.py has the mechanisms on the CPU."""

import functools
import json
import os
import subprocess

import pytest
import torch
from harness import ROOT, deviation, guard_of, make_args, optimizer_of, train
from patches import change_training_loss, stop_after
from torch import nn

import common
import machinery.modes
import machinery.run
import task
from sampling import GlobalBatchSampler, build_loader
from tasks.images import ImagesInMemory

pytestmark = pytest.mark.gpu
GPU = "cuda"
CONV = ("--epochs", "1", "--warmup-epochs", "0", "--log-every", "10")
EXACT = (*CONV, "--dtype", "float64")
EMA = ["--average", "ema"]
SYNTHETIC = ("--task", "images", "--dataset", "synthetic")


@pytest.fixture(autouse=True)
def _accelerator():
    if not torch.cuda.is_available():
        pytest.fail("tests marked gpu need a GPU, and torch finds none", pytrace=False)


def forbid_waiting(change, rank):
    """Let torch raise where the host waits for the GPU in a step that neither logs nor ends an epoch."""
    end_step = machinery.run.Run.end_step

    def watched(run, norm):
        step = run.state.step + 1
        if step == run.sampler.steps_per_epoch or step % run.log_every == 0:
            torch.cuda.set_sync_debug_mode("default")
        end_step(run, norm)
        if 2 <= step < run.sampler.steps_per_epoch:  # kernels are chosen in the first steps
            torch.cuda.set_sync_debug_mode("error")

    machinery.run.Run.end_step = watched
    if change:
        change_training_loss(change, rank)


def read_a_number(losses, k):
    losses.sum().item()
    return losses


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
@pytest.mark.parametrize(
    "options",
    [
        ["--optimizer", "sgd"],
        ["--optimizer", "adamw", "--lr", "0.001"],
        ["--accum-steps", "2", "--clip-grad-norm", "1", "--channels-last"],
        ["--average", "ema"],
        [*SYNTHETIC, "--image-size", "8", "--batch-size", "1000"],  # data that lie on the GPU
    ],
    ids=" ".join,
)
def test_host_waits_only_where_the_run_logs(amp, options, tmp_path):
    argv = (*CONV, "--device", GPU, "--amp", amp, *options)
    patch = functools.partial(forbid_waiting, None)
    result = train("single", 1, *argv, folder=tmp_path, patch=patch)
    assert result.code == 0, result.err


def test_waiting_would_be_seen(tmp_path):
    patch = functools.partial(forbid_waiting, read_a_number)
    result = train("single", 1, *CONV, "--device", GPU, folder=tmp_path, patch=patch)
    assert result.code == 1 and "called a synchronizing" in result.err


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_skipped_step_changes_no_bit(optimizer):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 2))
    net = net.to(GPU)
    args = make_args("single", "--optimizer", optimizer)
    guard, optimizer = guard_of(args, torch.device(GPU), net), optimizer_of(args, net)

    def step(factor):
        images = torch.rand(4, 3, 8, 8, device=GPU)
        guard.scale(net(images).square().sum() * factor).backward()
        guard.unscale_(optimizer)
        guard.step(optimizer)
        guard.update()
        optimizer.zero_grad(set_to_none=True)
        moments = [value for values in optimizer.state.values() for value in values.values()]
        return [value.clone() for value in (*net.parameters(), *net.buffers(), *moments)]

    before = step(1.0)
    assert all(map(torch.equal, step(float("nan")), before)) and guard.skipped == 1
    assert not all(map(torch.equal, step(1.0), before))


@pytest.mark.parametrize("first", ["cpu", GPU])
@pytest.mark.parametrize("flip", [False, True])
def test_resume_on_another_device_and_in_another_memory_format(first, flip, tmp_path):
    whole = train("single", 1, *EXACT, "--epochs", 2, "--device", "cpu", folder=tmp_path / "whole")
    stop = functools.partial(stop_after, 15)
    argv = (*EXACT, "--epochs", 2, "--output-dir", tmp_path / "run")
    stopped = train("single", 1, *argv, "--device", first, folder=tmp_path, patch=stop)
    assert stopped.code == 143, stopped.err
    argv += ("--resume", "auto", "--device", GPU if first == "cpu" else "cpu")
    resumed = train("single", 1, *argv, *["--channels-last"] * flip, folder=tmp_path)
    assert resumed.code == 0, resumed.err
    assert deviation(resumed.checkpoint()["model"], whole.checkpoint()["model"]) < 1e-8


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_deterministic_run_that_was_stopped_has_the_same_bits(amp, tmp_path):
    argv = (*CONV, "--epochs", "2", "--amp", amp, "--device", GPU, "--deterministic")
    whole = train("single", 1, *argv, folder=tmp_path / "whole")
    assert whole.code == 0, whole.err
    argv += ("--output-dir", tmp_path / "run")
    stop = functools.partial(stop_after, 13)
    assert train("single", 1, *argv, folder=tmp_path, patch=stop).code == 143
    resumed = train("single", 1, *argv, "--resume", "auto", folder=tmp_path)
    assert resumed.code == 0, resumed.err
    ours, theirs = resumed.checkpoint()["model"], whole.checkpoint()["model"]
    assert all(ours[name].equal(value) for name, value in theirs.items())


def test_first_gradients_and_averages_are_those_of_the_cpu(tmp_path):
    argv = (*EXACT, *EMA)
    runs = [train("single", 1, *argv, "--device", d, folder=tmp_path / d) for d in ("cpu", GPU)]
    assert [run.code for run in runs] == [0, 0], runs[1].err
    cpu, gpu = ({n: g.cpu() for n, g in run.gradients[0][0].items()} for run in runs)
    assert len(cpu) == len([*task.DigitNet().parameters()])
    assert deviation(gpu, cpu) < 1e-10
    cpu, gpu = (run.checkpoint()["weights"] for run in runs)
    assert deviation(gpu, cpu) < 1e-9


def run_sh(folder, *argv):
    """Run a command that must succeed in silence; return what it printed."""
    command = ["bash", str(ROOT / "run.sh"), *argv, "--output-dir", str(folder / "run")]
    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert (finished.returncode, finished.stderr) == (0, "")
    return finished.stdout


@pytest.mark.parametrize("options", [[], ["--grad-compress", "bf16"], ["--accum-steps", "2"]])
def test_nccl_with_one_rank(options, tmp_path):
    run_sh(tmp_path, "ddp", "1", *CONV, "--device", GPU, *options)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--amp", "bf16"],
        ["--amp", "fp16"],
        ["--compile"],
        ["--channels-last", "--amp", "bf16"],
        ["--optimizer", "adamw", "--lr", "0.001"],
    ],
    ids=" ".join,
)
def test_run_sh_trains_on_the_gpu_by_itself(options, tmp_path):
    assert f"on 1 x {GPU}" in run_sh(tmp_path, "single", "--epochs", "3", *options)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["top1"] > 0.8


def share_the_gpu(rank):
    """Let each rank be the only one of its node, as the launcher says; NCCL refuses two ranks on one device."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    common.backend = lambda device: f"cpu:gloo,{GPU}:gloo"


@pytest.mark.parametrize("options", [[], EMA], ids=" ".join)
@pytest.mark.parametrize("n", [2, 3])
def test_ranks_on_one_gpu_compute_what_one_of_them_computes(n, options, tmp_path):
    argv = (*EXACT, "--accum-steps", "2", "--device", GPU, *options)
    one = train("single", 1, *argv, folder=tmp_path / "one")
    many = train("ddp", n, *argv, folder=tmp_path / "many", patch=share_the_gpu)
    assert one.code == many.code == 0, many.err
    assert deviation(many.gradients[0][0], one.gradients[0][0]) < 1e-10
    assert deviation(many.checkpoint()["model"], one.checkpoint()["model"]) < 1e-8


def test_batches_made_on_the_gpu_are_those_of_the_cpu():
    images, loaders = torch.randint(0, 256, (60, 3, 12, 9), dtype=torch.uint8), []
    for device in (torch.device("cpu"), torch.device(GPU, 0)):
        dataset = ImagesInMemory(images, torch.arange(60), shift=2, flip=True)
        sampler = GlobalBatchSampler(dataset, 8, seed=1, accum_steps=2)
        loaders.append(build_loader(dataset, sampler, device, seed=1))
    for ours, theirs in zip(*loaders, strict=True):
        for (images, labels), (moved, its_labels) in zip(ours, theirs, strict=True):
            assert moved.device.type == its_labels.device.type == GPU
            assert moved.cpu().equal(images) and its_labels.cpu().equal(labels)
    cpu, gpu = (machinery.run.identity(loader.dataset, loader.dataset) for loader in loaders)
    assert cpu == gpu, "a checkpoint of one is resumed on the other"


def two_replicas_on_one_gpu(rank):
    torch.accelerator.device_count = lambda: 2
    original = machinery.modes.DataParallel
    machinery.modes.DataParallel = lambda module, ids: original(module, [0 for _ in ids])


def test_replicas_on_one_gpu_compute_what_one_of_them_computes(tmp_path):
    argv = (*EXACT, "--device", GPU)
    one = train("single", 1, *argv, folder=tmp_path / "one")
    two = train("dp", 2, *argv, folder=tmp_path / "two", patch=two_replicas_on_one_gpu)
    assert one.code == two.code == 0, two.err
    assert deviation(two.gradients[0][0], one.gradients[0][0]) < 1e-10


# ------------------------------------------------------------------------------- two GPUs or more

several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@several
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("dp", EMA),
        ("spawn", EMA),
        ("fsdp", EMA),
        ("fsdp", ["--freeze", "conv*"]),  # modules that a backward gathers and does not use
    ],
)
def test_two_gpus_compute_what_one_of_them_computes(mode, options, tmp_path):
    """Over an evaluation, after which a backward of fsdp gathers one module too many."""
    argv = (*EXACT, "--epochs", "2", "--accum-steps", "3", "--device", GPU, *options)
    one = train("single", 1, *argv, folder=tmp_path / "one")
    two = train(mode, 2, *argv, folder=tmp_path / "two")
    assert (one.code, two.code, two.err) == (0, 0, "")
    for part in ("model", "weights"):
        assert deviation(two.checkpoint()[part], one.checkpoint()[part]) < 1e-10
