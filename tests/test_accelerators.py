"""What an accelerator would meet, by its mechanism, on the CPU. Nothing here needs an accelerator; test_gpu.py does."""

import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import ROOT, in_group
from patches import Operations, in_process
from runs import make_run, make_step, start_epoch
from torch import nn

import common
import machinery.process
import machinery.run
import sampling
from tasks import images

CPU = torch.device("cpu")
# ----------------------------------------------------------------------------------------- run.sh


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (["test", "-m", "full"], ""),
        (["fuzz"], ""),
        (["test", "-x", "-m", "gpu and not full"], "0"),
        (["single"], "0"),
    ],
)
def test_what_proves_the_code_sees_no_accelerator(arguments, seen, tmp_path):
    python = tmp_path / "python3"
    python.write_text(
        "#!/bin/sh\n"
        'case $1 in -I) echo "$0" ;; -) cat > /dev/null ;;'  # where it is; whether all is installed
        ' *) echo "accelerators: $CUDA_VISIBLE_DEVICES" ;; esac\n'
    )
    python.chmod(0o755)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    command = ["bash", str(ROOT / "run.sh"), *arguments]
    out = subprocess.check_output(command, env=environment, text=True, timeout=60)
    assert out == f"accelerators: {seen}\n"


# ----------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("sides", [(8, 8), (31, 9)])
def test_pool_of_resnet9_is_adaptive_max_pool2d(sides, monkeypatch):
    """On CUDA its backward adds in any order: --deterministic refuses it."""
    torch.manual_seed(0)
    net, pictures = images.ResNet9(3, 10).double(), torch.rand(3, 3, *sides).double()
    with Operations() as operations:
        output = net(pictures)
        output.square().sum().backward()
    assert "max_pool2d_with_indices_backward" in operations.names
    assert not [name for name in operations.names if "adaptive" in name]
    pooled = []

    def pool(features, kernel, *stride):
        if kernel == 2 and not stride:
            return F.max_pool2d(features, 2)
        pooled.append(kernel)
        return F.adaptive_max_pool2d(features, 1)

    monkeypatch.setattr(images, "F", SimpleNamespace(max_pool2d=pool, relu=F.relu))
    assert output.equal(net(pictures)) and len(pooled) == 1


# ----------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_restored_optimizer_has_the_strides_of_the_parameters(optimizer, tmp_path, handlers):
    """The fused kernels of an accelerator compare them, and --channels-last may change on resume."""
    runs = []
    for form in (torch.contiguous_format, torch.channels_last):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)).double()
        net = net.to(memory_format=form)
        runs.append(make_run(tmp_path / str(form), "--optimizer", optimizer, net=net))
    (first, second) = (run.state for run in runs)
    assert first.net[0].weight.stride() != second.net[0].weight.stride()
    for parameter in first.net.parameters():
        parameter.grad = torch.rand_like(parameter)
    first.optimizer.step()
    own = second.optimizer.param_groups[0]["foreach"]
    first.optimizer.param_groups[0]["foreach"] = not own  # as on another device
    second.restore(first.checkpoint())
    assert second.optimizer.param_groups[0]["foreach"] == own
    for saved, parameter in zip(first.net.parameters(), second.net.parameters()):
        wanted, found = first.optimizer.state[saved], second.optimizer.state[parameter]
        assert found.keys() == wanted.keys() and found
        for name, value in found.items():
            assert value.equal(wanted[name]) and value.dtype == wanted[name].dtype
            assert value.dim() == 0 or value.stride() == parameter.stride(), name


# ------------------------------------------------------------------------------- steps and signals


@pytest.mark.parametrize("bad", [None, math.nan, -math.inf])
def test_guard_of_a_fused_step_reads_nothing_and_computes_little(bad):
    """A small network on a fast device waits for the host, which starts each operation."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    # A task may fuse its optimizer on the CPU too.
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9, fused=True)
    guard = common.StepGuard("off", CPU, net)
    loss = net(torch.arange(12.0).view(3, 4)).square().sum()
    guard.scale(loss).backward()
    if bad is not None:
        net[0].weight.grad[1, 2] = bad
    before = [tensor.clone() for tensor in net.state_dict().values()]
    with Operations() as operations:
        guard.unscale_(optimizer)
        guard.step(optimizer)
        guard.update()
    assert "_fused_sgd_" in operations.names
    assert "_local_scalar_dense" not in operations.names, "so the host reads a number"
    # The first step makes the momentum and the scale. The others neither compute nor copy.
    free = {"zeros_like", "detach", "view", "split_with_sizes"}
    kernels = [name for name in operations.names if name not in free and "record" not in name]
    assert len(kernels) <= 31, kernels
    assert guard.skipped == guard.in_a_row == (bad is not None)
    after = [*net.state_dict().values()]
    changed = [not a.equal(b) for a, b in zip(after, before)]
    assert changed[:4] == [bad is None] * 4, "the parameters"
    assert not any(value.isnan().any() for value in after)
    statistics = 0 if bad is not None else 1
    assert net[1].num_batches_tracked == statistics, "a skipped step is none"


class Count:
    """Stands where the guard has the number of steps skipped in a row; notes who reads it."""

    def __init__(self):
        self.value, self.read = 0, []

    def __ge__(self, other):
        self.read.append(self.step())
        return self.value >= other


def test_steps_between_log_lines_do_not_wait_for_the_device(tmp_path, handlers):
    run = make_run(tmp_path, "--log-every", 4, "--save-every", 7, length=390)  # 13 steps
    count, saves = Count(), []
    run.state.scaler.in_a_row, count.step = count, lambda: run.state.global_step
    run.save = lambda *names: saves.append(run.state.global_step)
    start_epoch(run)
    for _ in range(13):
        make_step(run, [1.0])
    assert count.read == [4, 7, 8, 12, 13] and saves == [7]
    count.value, run.state.step = 10, 0
    agreed = run.stop_signal.agreed
    run.stop_signal.agreed = lambda: count.read.append("agreed") or agreed()
    with pytest.raises(machinery.process.Stopped) as stopped:
        make_step(run, [1.0])  # a save is due
    assert stopped.value.code == 3 and "seen at step 14" in stopped.value.reason
    assert count.read[5:] == ["agreed", 14], "a lost rank is found before the host waits"
    assert saves == [7], "the state of a run that diverged is not saved"


LAST_CLEAN_UP = """
import sys
from machinery.process import Stopped, run_main
class Mesh:  # stands for one whose threads abort a process that is about to end
    def __del__(self):
        print("cleaned up", flush=True)
def main():
    print("trained")  # stdout is a pipe, which keeps it for later
    if code:
        raise Stopped(code, "")
    return code
kept, code = Mesh(), int(sys.argv[1])
sys.exit(run_main(main, hard_exit=sys.argv[2] == "fsdp"))
"""


@pytest.mark.full
@pytest.mark.parametrize(("mode", "code"), [("ddp", 0), ("fsdp", 143)])
def test_rank_of_shards_ends_before_the_last_clean_up_of_python(mode, code):
    """A device mesh stays alive in caches of DTensor: the threads of its groups run on to the end."""
    command = [sys.executable, "-c", LAST_CLEAN_UP, str(code), mode]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    expected = "trained\n" + ("cleaned up\n" if mode == "ddp" else "")
    assert finished.returncode == code and finished.stdout == expected, finished.stderr


# ----------------------------------------------------------------------------------------- device


def print_convolutions():
    for deterministic in (True, False):
        common.set_up_device("cpu", deterministic)
        print(torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark)
        assert torch.are_deterministic_algorithms_enabled() == deterministic


@pytest.mark.full
def test_deterministic_convolutions_do_not_use_tf32():
    seen = in_process(print_convolutions).splitlines()
    assert seen[0] == "False False" and seen[1].endswith(" True")


@pytest.mark.parametrize("used", [False, True])
def test_accelerator_that_is_not_used_is_not_seeded(used, monkeypatch):
    seeds = []
    module = SimpleNamespace(is_initialized=lambda: used, manual_seed=seeds.append)
    monkeypatch.setattr(sampling, "_accelerator", lambda: module)
    sampling.seed_rng(0, 3, 1)
    drawn = torch.rand(1)
    sampling.seed_rng(0, 3, 1)
    assert drawn.equal(torch.rand(1)) and len(seeds) == 2 * used and len({*seeds}) <= 1
    del module.is_initialized  # as that of Apple's
    sampling.seed_rng(0, 3, 1)
    assert len(seeds) == 2 * used + 1


def compressed():
    """bf16 where torch has no CUDA, as in a wheel for CPUs."""
    torch.version.cuda = torch.version.hip = None
    torch.manual_seed(0)
    net = nn.Linear(64, 1, bias=False)
    model = nn.parallel.DistributedDataParallel(net)
    common.compress_gradients(model, "bf16")
    torch.manual_seed(dist.get_rank())
    inputs = torch.rand(5, 64)
    model(inputs).sum().backward()
    mean = inputs.sum(0, keepdim=True)
    dist.all_reduce(mean)
    error = (net.weight.grad - mean / 2).abs().max() / mean.max()
    assert 1e-6 < error < 1e-2, "as rough as bf16"


@pytest.mark.full
def test_bf16_gradients_need_no_cuda():
    in_group(2, compressed)
