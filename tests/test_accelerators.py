"""What an accelerator would meet, by its mechanism, on the CPU. Nothing here needs an accelerator; test_gpu.py does."""

import functools
import json
import math
import os
import subprocess
import sys
import warnings
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import ROOT, average_of, in_group, make_args, run_processes
from patches import Operations, in_process
from runs import make_run, make_step, start_epoch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import common
import machinery.process
import machinery.run
import sampling

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
    from tasks import images

    torch.manual_seed(0)
    net, pictures = images.ResNet9(3, 10).double(), torch.rand(3, 3, *sides).double()
    with Operations() as operations:
        output = net(pictures)
        output.square().sum().backward()
    assert "max_pool2d_with_indices_backward" in operations.names
    assert not [name for name in operations.names if "adaptive" in name]
    gradients = [parameter.grad for parameter in net.parameters()]

    def pool(features, kernel, *stride):
        if kernel == 2 and not stride:
            return F.max_pool2d(features, 2)
        replaced.append(kernel)
        return F.adaptive_max_pool2d(features, 1)

    replaced = []
    monkeypatch.setattr(images, "F", SimpleNamespace(max_pool2d=pool, relu=F.relu))
    net.zero_grad()
    expected = net(pictures)
    expected.square().sum().backward()
    assert output.equal(expected) and len(replaced) == 1
    for gradient, parameter in zip(gradients, net.parameters()):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-14)


# ----------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("flipped", [False, True])
def test_restored_optimizer_has_the_strides_of_the_parameters(
    optimizer, flipped, tmp_path, handlers
):
    """The fused kernels of an accelerator compare them, and --channels-last may change on resume."""
    formats = [torch.contiguous_format, torch.channels_last]
    runs = []
    for i, form in enumerate(formats[::-1] if flipped else formats):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)).double()
        net = net.to(memory_format=form)
        runs.append(make_run(tmp_path / str(i), "--optimizer", optimizer, net=net))
    (first, second) = (run.state for run in runs)
    for parameter in first.net.parameters():
        parameter.grad = torch.rand_like(parameter)
    first.optimizer.step()
    checkpoint = first.checkpoint()
    for group in checkpoint["optimizer"]["param_groups"]:
        group["foreach"] = "of another device"
    second.restore(checkpoint)
    assert first.optimizer.param_groups[0]["foreach"] == second.optimizer.param_groups[0]["foreach"]
    saved = checkpoint["optimizer"]["state"]
    assert first.net[0].weight.stride() != second.net[0].weight.stride()
    for i, parameter in enumerate(second.net.parameters()):
        values = second.optimizer.state[parameter]
        assert values.keys() == saved[i].keys() and values
        for name, value in values.items():
            assert value.equal(saved[i][name]) and value.dtype == saved[i][name].dtype
            assert value.dim() == 0 or value.stride() == parameter.stride(), name
    for parameter in second.net.parameters():
        parameter.grad = torch.rand_like(parameter)
    second.optimizer.step()


# ---------------------------------------------------------------------------------------- average


def network():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False))
    net.append(nn.BatchNorm1d(4, track_running_stats=False))
    net.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
    net.register_buffer("large", torch.tensor([2**53 + 1]))
    net.register_parameter("whole", nn.Parameter(torch.tensor([7]), requires_grad=False))
    return net


def test_average_is_torchs_own():
    """In every bit."""
    net = network()
    average = average_of(make_args("single", *"--average ema --ema-decay 0.125".split()), net)
    theirs = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.125))  # no warm-up so low
    statistics = [0.0, 0.0]
    for step in range(6):
        torch.manual_seed(step)
        with torch.no_grad():
            for value in (net[0].weight, net[0].bias, net[1].weight):
                value.copy_(torch.randn_like(value))
            for value in (net[1].running_mean, net[2].running_var):
                value.copy_(torch.rand_like(value))
            net.whole += 5
            net.large += 1
        average.after_step(net)
        theirs.update_parameters(net)
        now = [net[1].running_mean.clone(), net[2].running_var.clone()]
        statistics = [torch.lerp(a, b, 1 - 0.125) if step else b for a, b in zip(statistics, now)]
    for (name, value), wanted in zip(average.module.named_parameters(), theirs.module.parameters()):
        assert name == "whole" or value.equal(wanted), name
    assert average.module.whole.equal(net.whole), "is a copy"
    assert average.module.mask.equal(net.mask) and average.module.large.equal(net.large)
    found = average.module[1].running_mean, average.module[2].running_var
    assert all(value.equal(wanted) for value, wanted in zip(found, statistics))
    assert average.n_averaged == 6 == theirs.n_averaged


def test_average_copies_nothing_from_the_host():
    """torch's class copies `n_averaged` to the device for each dtype, and the host waits for it."""
    net = network().to("meta")  # a device that is not the CPU
    average = average_of(make_args("single", "--average", "ema"), net)
    average.after_step(net)
    with Operations() as operations:
        average.after_step(net)
    assert "_foreach_lerp_" in operations.names and "_foreach_copy_" in operations.names
    assert "_to_copy" not in operations.names and "copy_" not in operations.names
    theirs = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    theirs.update_parameters(net)
    with Operations() as operations:
        theirs.update_parameters(net)
    assert "_to_copy" in operations.names, "or the test would see nothing"


# ------------------------------------------------------------------------------- steps and signals


@pytest.mark.parametrize("bad", [None, math.nan, -math.inf])
def test_guard_of_a_fused_step_reads_nothing_and_computes_little(bad):
    """A small network on a fast device waits for the host, which starts each operation."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    # A task may fuse its optimizer on the CPU too.
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9, fused=True)
    guard = common.StepGuard("off", CPU, net)
    loss = net(torch.arange(12.0).view(3, 4)).square().sum()
    assert guard.scale(loss) is loss, "without fp16 there is no scale"
    loss.backward()
    if bad is not None:
        net[0].weight.grad[1, 2] = bad
    before = [tensor.clone() for tensor in net.state_dict().values()]
    with Operations() as operations:
        guard.unscale_(optimizer)
        guard.step(optimizer)
        guard.update()
    assert "_fused_sgd_" in operations.names
    assert "_local_scalar_dense" not in operations.names, "so the host reads a number"
    # The first step makes two tensors of momentum.
    kernels = [name for name in operations.names if name != "zeros_like" and "record" not in name]
    assert len(kernels) <= 14, kernels
    assert guard.skipped == guard.in_a_row == (bad is not None)
    after = [*net.state_dict().values()]
    changed = [not a.equal(b) for a, b in zip(after, before)]
    assert changed[:4] == [bad is None] * 4, "the parameters"
    assert not any(value.isnan().any() for value in after)
    statistics = 0 if bad is not None else 1
    assert net[1].num_batches_tracked == statistics, "a skipped step is none"


def calls_of_torch(profiled):
    """Return the names of what Python has called of torch; what calls torch inside counts once."""
    names = []
    for event in profiled.events():
        caller = event.cpu_parent
        while caller and not caller.name.startswith("aten::"):
            caller = caller.cpu_parent
        if event.name.startswith("aten::") and not caller:
            names.append(event.name.removeprefix("aten::"))
    return names


def print_calls_of_a_step(folder):
    """Print what a step of train_single.py calls, and what the bare step of the benchmark calls."""
    import bench

    import train_single

    runs = []
    init, watch = machinery.run.Run.__init__, machinery.run.Log.watch

    def noted(run, *arguments, **options):
        init(run, *arguments, **options)
        runs.append(run)

    def profiled(log, loader):  # the loader aside
        for i, micro_batches in enumerate(watch(log, loader)):
            if i < 2:
                yield micro_batches
                continue
            with torch.profiler.profile() as step:
                yield micro_batches
            bare = bench.bare_step("single", runs[0], *micro_batches[0])
            bare()  # makes the momentum
            with torch.profiler.profile() as shortest:
                bare()
            print(json.dumps([calls_of_torch(profile) for profile in (step, shortest)]))
            raise machinery.process.Stopped(0, "")

    machinery.run.Run.__init__, machinery.run.Log.watch = noted, profiled
    (folder / "in_memory.py").write_text(bench.IMAGES)
    command = (
        bench.IN_MEMORY.format(folder=folder) + " --model resnet18 --batch-size 2 --device cpu"
    )
    argv = [*command.split(), "--workers", "0", "--output-dir", str(folder / "run")]
    return machinery.process.run_main(lambda: train_single.main(argv))


def test_step_calls_torch_little_more_often_than_a_bare_one(tmp_path):
    """On a GPU each call takes 5 to 10 microseconds of the host, and a ResNet-18 about 300 calls."""
    out = in_process(functools.partial(print_calls_of_a_step, tmp_path))
    script, bare = json.loads(out.splitlines()[-1])
    added = Counter(script) - Counter(bare)
    assert len(bare) > 200, "or the profiler has seen nothing"
    assert len(script) - len(bare) <= 25, (len(script) - len(bare), added)


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
    agreed = run.stop.agreed
    run.stop.agreed = lambda: count.read.append("agreed") or agreed()
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
@pytest.mark.parametrize(("mode", "code"), [("ddp", 0), ("fsdp", 0), ("fsdp", 143)])
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


def compile_and_look():
    from tasks import images

    made = []

    def look(graph, inputs):
        made.extend(str(node.target) for node in graph.graph.nodes if node.op != "placeholder")
        return graph.forward

    argv = "--task images --dataset cifar10 --data-dir . --compile".split()
    net = images.build_model(make_args("single", *argv)).eval()
    batch = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    wanted = net(batch)
    net.compile(backend=look, fullgraph=True)
    with warnings.catch_warnings(record=True) as seen:
        assert net(batch).equal(wanted)
    assert any("conv2d" in name for name in made), "or the test would see nothing"
    assert not any("tensor" in name for name in made), made
    assert not [w for w in seen if "lru_cache" in str(w.message)]


@pytest.mark.full
def test_compiled_model_has_its_constants_already(tmp_path):
    """Else the first step would compile how they are made, or copy them from the host in each step.

    After a compilation a fork of this process could make no backward.
    """
    ((code, _, err),) = run_processes([compile_and_look], tmp_path)
    assert code == 0, err


@pytest.mark.full
def test_bf16_gradients_need_no_cuda():
    in_group(2, compressed)
