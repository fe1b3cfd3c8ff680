"""What only a GPU can show: `bash run.sh test -m gpu`. By default each test runs with the CPU in its place, so that none rots."""

import functools

import pytest
import torch
from harness import deviation, train
from patches import Operations, change_training_loss, stop_after
from single import SMALL
from torch import nn

import common
import engine.modes
import engine.run

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
devices = pytest.mark.parametrize("device", ["cpu", GPU])
ONE = [word for word in SMALL if word not in ("--device", "cpu")]
ONE += "--epochs 1 --warmup-epochs 0 --log-every 4 --batch-size 15 --lr 0.02".split()
EXACT = [*ONE, "--dtype", "float64"]


@pytest.fixture(autouse=True)
def accelerator(request):
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.fail("tests marked gpu need a GPU, and torch finds none", pytrace=False)


# ------------------------------------------------------------------------- the host waits nowhere


def forbid_waiting(change, rank):
    """Let torch raise where the host waits for the GPU in a step that neither logs nor ends an epoch."""
    end_step, allow = engine.run.Run.end_step, torch.cuda.set_sync_debug_mode
    if not torch.cuda.is_available():
        allow = lambda mode: None  # noqa: E731

    def watched(run, norm):
        step = run.state.step + 1
        if step == run.sampler.steps_per_epoch or step % run.args.log_every == 0:
            allow("default")
        end_step(run, norm)
        if 2 <= step < run.sampler.steps_per_epoch:  # kernels are chosen in the first steps
            allow("error")

    engine.run.Run.end_step = watched
    if change:
        change_training_loss(change, rank)


def read_a_number(losses, k):
    losses.sum().item()
    return losses


@devices
@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
@pytest.mark.parametrize(
    "options",
    [
        "--optimizer sgd",
        "--optimizer adamw --lr 0.001",
        "--accum-steps 2 --clip-grad-norm 1 --channels-last --average ema",
    ],
)
def test_host_waits_only_where_the_run_logs(amp, options, device, tmp_path):
    argv = (*ONE, "--device", device, "--amp", amp, *options.split())
    patch = functools.partial(forbid_waiting, None)
    result = train("single", 1, *argv, folder=tmp_path, patch=patch)
    assert result.code == 0 and len(result.train_lines()) == 4, result.err


@devices
def test_waiting_would_be_seen(device, tmp_path):
    patch = functools.partial(forbid_waiting, read_a_number)
    result = train("single", 1, *ONE, "--device", device, folder=tmp_path, patch=patch)
    assert device == "cpu" or (result.code == 1 and "called a synchronizing" in result.err)


@devices
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_skipped_step_reads_nothing_and_changes_no_bit(name, device):
    """A small network on a fast device waits for the host, which starts each operation."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 2)).to(device)
    optimizer = common.build_optimizer(net, name, 0.1, 0.9, 0.01)
    scaler = torch.amp.GradScaler(device, enabled=False)
    guard, parameters = common.StepGuard(optimizer, scaler), [*net.parameters()]

    def step(factor):
        images = torch.rand(4, 3, 8, 8, device=device)
        (net(images).square().sum() * factor).backward()
        with Operations() as operations:
            guard.step(common.clip_grad_norm(parameters, 1.0))
        optimizer.zero_grad(set_to_none=True)
        assert f"_fused_{name}_" in operations.names
        assert "_local_scalar_dense" not in operations.names, "so the host reads a number"
        moments = [value for values in optimizer.state.values() for value in values.values()]
        return [value.clone() for value in (*parameters, *moments)]

    before = step(1.0)
    assert all(map(torch.equal, step(float("nan")), before)) and guard.skipped == 1
    assert not all(map(torch.equal, step(1.0), before)) and guard.skipped == 0


# --------------------------------------------------------------------------------- the same numbers


@devices
@pytest.mark.parametrize("there", [False, True], ids=["from the CPU", "to the CPU"])
@pytest.mark.parametrize("flip", [False, True])
def test_resume_on_another_device_and_in_another_memory_format(there, flip, device, tmp_path):
    argv = (*EXACT, "--epochs", 2)
    whole = train("single", 1, *argv, "--device", "cpu", folder=tmp_path / "whole")
    first, second = (device, "cpu") if there else ("cpu", device)
    stop = functools.partial(stop_after, 15)
    stopped = train("single", 1, *argv, "--device", first, folder=tmp_path, patch=stop)
    assert stopped.code == 143, stopped.err
    argv = ("--resume", "auto", "--device", second, *["--channels-last"] * flip)
    resumed = train("single", 1, *argv, folder=tmp_path)
    assert resumed.code == 0, resumed.err
    assert deviation(resumed.checkpoint()["model"], whole.checkpoint()["model"]) < 1e-8


@devices
@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_deterministic_run_that_was_stopped_has_the_same_bits(amp, device, tmp_path):
    argv = (*ONE, "--epochs", "2", "--amp", amp, "--device", device, "--deterministic")
    whole = train("single", 1, *argv, folder=tmp_path / "whole")
    assert whole.code == 0, whole.err
    stop = functools.partial(stop_after, 14)
    assert train("single", 1, *argv, folder=tmp_path, patch=stop).code == 143
    resumed = train("single", 1, "--resume", "auto", "--device", device, "--deterministic", folder=tmp_path)  # fmt: skip
    assert resumed.code == 0, resumed.err
    ours, theirs = resumed.checkpoint()["model"], whole.checkpoint()["model"]
    assert all(ours[name].equal(value) for name, value in theirs.items())


@devices
@pytest.mark.parametrize("options", ["", "--amp bf16", "--amp fp16", "--compile", "--channels-last --amp bf16"])  # fmt: skip
def test_single_trains(options, device, request, tmp_path):
    if options == "--compile" and device == "cpu":
        pytest.skip("test_runs.py compiles on a CPU")
    argv = [*ONE, "--epochs", "6", "--device", device, *options.split()]
    result = train("single", 1, *argv, folder=tmp_path)
    assert result.code == 0 and f"on 1 x {device}" in result.out, result.err
    assert result.eval_lines()[-1]["loss"] < 0.8 * result.eval_lines()[0]["loss"]


def share(device, rank):
    """Let all ranks, or replicas, use device 0: NCCL refuses that, gloo does not."""
    common.backend = lambda used: f"cpu:gloo,{device}:gloo" if device != "cpu" else "gloo"
    torch.accelerator.device_count = lambda: 2
    common.set_up_device = functools.partial(on_device_0, common.set_up_device)
    for mode in ("ddp", "dp"):
        __import__(f"train_{mode}").set_up_device = common.set_up_device
    if device != "cpu":
        original = engine.modes.DataParallel
        engine.modes.DataParallel = lambda module, ids: original(module, [0 for _ in ids])


def on_device_0(original, name, deterministic=False, local_rank=0):
    return original(name, deterministic, 0)


@devices
@pytest.mark.parametrize(
    ("mode", "n", "options"),
    [("dp", 2, ""), ("ddp", 2, "--average ema"), ("ddp", 3, "--accum-steps 2")],
)
def test_ranks_and_replicas_on_one_device_compute_what_one_computes(mode, n, options, device, tmp_path):  # fmt: skip
    """And one what a CPU computes."""
    argv = (*EXACT, *options.split())
    one = train("single", 1, *argv, "--device", "cpu", folder=tmp_path / "one")
    patch = functools.partial(share, device)
    many = train(mode, n, *argv, "--device", device, folder=tmp_path / "many", patch=patch)
    assert one.code == many.code == 0, many.err
    assert deviation(many.gradients[0][0], one.gradients[0][0]) < 1e-10
    for part in ("model", "weights"):
        assert deviation(many.checkpoint()[part], one.checkpoint()[part]) < 1e-8


# ------------------------------------------------------------------------------- two GPUs or more


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("mode", "options"),
    [("dp", ""), ("ddp", ""), ("spawn", ""), ("fsdp", ""), ("fsdp", "--freeze conv*")],
)
def test_two_gpus_compute_what_one_of_them_computes(mode, options, tmp_path):
    """Over an evaluation, after which a backward of fsdp gathers one module too many."""
    argv = (*EXACT, *"--epochs 2 --accum-steps 3 --device cuda --average ema".split(), *options.split())  # fmt: skip
    one = train("single", 1, *argv, folder=tmp_path / "one")
    two = train(mode, 2, *argv, folder=tmp_path / "two")
    assert one.code == two.code == 0, two.err
    for part in ("model", "weights"):
        assert deviation(two.checkpoint()[part], one.checkpoint()[part]) < 1e-10
