"""The pitfalls of going from one device to many, by number: 15 to 28. Each test shows the wrong way failing, then this project's way."""

import argparse
import contextlib
import copy
import functools
import itertools
import json
import os
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import (
    deviation,
    factor_of,
    in_group,
    make_args,
    make_sampler,
    run_processes,
    single_run,
    train,
    undisturbed,
)
from pitfalls import BASE, in_process, on_rank_1, printed, stop_after
from test_pitfalls_01_14 import spawn_launcher
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import common
import machinery.options
import machinery.processes
import sampling
import train_ddp

# ------------------------------------------------------------------------------------------------------------------------- 15


def test_pitfall_15_two_jobs_on_one_machine(tmp_path):
    """The second job on a machine fails with "address already in use": both meet on the same fixed port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RuntimeError, match="EADDRINUSE"):
        dist.TCPStore("127.0.0.1", store.port, is_master=True, wait_for_workers=False)

    jobs = [
        [*BASE, "--nproc", "2", "--seed", str(seed), "--output-dir", str(tmp_path / f"run{seed}")]
        for seed in (0, 1)
    ]
    for code, _, err in run_processes(
        [functools.partial(spawn_launcher, argv) for argv in jobs], tmp_path
    ):
        assert code == 0, err
    models = [torch.load(tmp_path / f"run{seed}" / "last.pt")["model"] for seed in (0, 1)]
    assert deviation(models[0], single_run(*BASE).checkpoint()["model"]) <= 1e-10
    assert deviation(models[1], models[0]) > 1e-2  # two jobs, not twice the same


# ------------------------------------------------------------------------------------------------------------------------- 16


def test_pitfall_16_local_rank_option_of_old_launchers():
    """ "unrecognized arguments: --local-rank": the old launcher passes the option, in a spelling that changed; new ones set LOCAL_RANK."""
    old = argparse.ArgumentParser()
    old.add_argument("--local_rank", type=int)
    with pytest.raises(SystemExit):
        old.parse_args(["--local-rank=1"])

    for mode in ("single", "dp", "ddp", "spawn"):
        for spelling in ("--local-rank", "--local_rank"):
            assert (
                machinery.options.parse_args(mode, [f"{spelling}=1"]).local_rank == 1
            )  # from a real old launcher: pitfall 40


# ------------------------------------------------------------------------------------------------------------------------- 17


def test_pitfall_17_device_is_chosen_before_anything_else(tmp_path, monkeypatch):
    """Every rank takes memory on device 0: it was still the current device when the group, the model or a checkpoint first used one."""
    monkeypatch.setattr(
        torch.serialization, "location_tag", lambda storage: "cuda:0"
    )  # as a file saved on an accelerator
    torch.save({"format": common.FORMAT, "weight": torch.ones(3)}, tmp_path / "from_device_0.pt")
    monkeypatch.undo()
    if torch.cuda.is_available():
        assert torch.load(tmp_path / "from_device_0.pt")["weight"].device.index == 0
    else:
        with pytest.raises(RuntimeError, match="deserialize object on a CUDA device"):
            torch.load(tmp_path / "from_device_0.pt")  # goes to where it came from

    assert in_process(second_rank_starts).split() == [
        "set_device_index",
        "1",
        "init_process_group",
        "cpu:gloo,cuda:nccl",
    ]
    assert (
        torch.load(tmp_path / "from_device_0.pt", map_location="cpu")["weight"].device.type == "cpu"
    )
    assert (
        in_process(functools.partial(loaded_device, tmp_path / "from_device_0.pt")).strip() == "cpu"
    )


def second_rank_starts():
    """Let train_ddp.py believe in accelerators, up to where it joins the group."""
    os.environ.update(
        RANK="3", LOCAL_RANK="1", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2", LAUNCH_PID=str(os.getppid())
    )

    class Joined(Exception):
        pass

    def init_process_group(backend, *_):
        print("init_process_group", backend)
        raise Joined

    machinery.processes.resolve_device_type = lambda name: "cuda"
    torch.accelerator.device_count = lambda: 2
    torch.accelerator.set_device_index = lambda index: print("set_device_index", index)
    dist.init_process_group = init_process_group
    train_ddp.build_net = None  # no model comes before it
    try:
        train_ddp.main([])
    except Joined:
        return


def loaded_device(path):
    """The device on which the project's own load puts a tensor."""
    devices, load = [], torch.load

    def watched(*arguments, **keywords):
        value = load(*arguments, **keywords)
        devices.append(value["weight"].device.type)
        return value

    torch.load = watched
    with contextlib.suppress(common.UsageError):  # it holds no run
        common.load_checkpoint(path)
    print(*devices)


# ------------------------------------------------------------------------------------------------------------------------- 18


def print_evaluated_buffers(rank):
    evaluate = train_ddp.evaluate

    def watched(args, task, model, *others):
        print("buffers", json.dumps([buffer.tolist() for buffer in model.buffers()]))
        return evaluate(args, task, model, *others)

    train_ddp.evaluate = watched


def without_sync(rank):
    print_evaluated_buffers(rank)
    common.sync_buffers = lambda net: None


def test_pitfall_18_batchnorm_buffers_are_equal_in_evaluation(tmp_path):
    """Ranks evaluate a BatchNorm model differently: DDP makes buffers equal in the next training forward, and after the last comes none."""
    argv = (*BASE, "--model", "batchnorm", "--epochs", "1")
    wrong = train("ddp", 2, *argv, folder=tmp_path / "wrong", patch=without_sync)
    first, second = printed(wrong.out, "buffers")
    assert max(abs(a - b) for a, b in zip(first[0], second[0])) > 1e-2

    right = train("ddp", 2, *argv, folder=tmp_path / "right", patch=print_evaluated_buffers)
    first, second = printed(right.out, "buffers")
    assert first == second and len(first) == 3
    assert right.checkpoint()["model"]["between.running_mean"].tolist() == first[0]


# ------------------------------------------------------------------------------------------------------------------------- 19


def evaluate_on_rank_0_only():
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.wait(
            ["gave up"], timedelta(seconds=20)
        )  # an evaluation that takes longer than the others' patience
        print("evaluated")
        return
    try:
        dist.all_reduce(torch.zeros(1), async_op=True).wait(
            timedelta(milliseconds=100)
        )  # the next training step
        print("trained on")
    except RuntimeError as error:
        print("timed out" if "imed out" in str(error) else error)
    store.set("gave up", "yes")


def print_evaluation(rank):
    iterate = sampling.ShardSampler.__iter__

    def watched(self):
        for epoch, indices in iterate(self):
            print("evaluated", json.dumps([rank, indices]))
            yield epoch, indices

    sampling.ShardSampler.__iter__ = watched


def test_pitfall_19_all_ranks_evaluate(tmp_path):
    """Training stalls or times out in evaluation: rank 0 evaluates alone while the others wait in the next collective."""
    assert [out.strip() for out in in_group(2, evaluate_on_rank_0_only)] == [
        "evaluated",
        "timed out",
    ]

    result = train("ddp", 3, *BASE, "--epochs", "1", folder=tmp_path, patch=print_evaluation)
    shards = [
        sorted(i for r, indices in printed(result.out, "evaluated") if r == rank for i in indices)
        for rank in range(3)
    ]
    assert [len(shard) for shard in shards] == [24, 17, 16], (
        "eight batches of 8 or, at last, 1: every third for each rank"
    )
    assert sorted(itertools.chain(*shards)) == list(range(57))


# ------------------------------------------------------------------------------------------------------------------------- 20


def torch_sync_batchnorm():
    try:
        DistributedDataParallel(
            nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
        )
    except ValueError as error:
        print(error)


def test_pitfall_20_sync_bn_on_cpu_and_its_switch(tmp_path):
    """SyncBatchNorm refuses CPU tensors, so that nobody tests it; and `type=bool` makes `--sync-bn False` turn it on."""
    assert all("only work with GPU modules" in out for out in in_group(2, torch_sync_batchnorm))
    parser = argparse.ArgumentParser()
    parser.add_argument("--sync-bn", type=bool)
    assert parser.parse_args(["--sync-bn", "False"]).sync_bn is True
    assert make_args("ddp", "--sync-bn", "--no-sync-bn").sync_bn is False
    assert make_args("ddp", "--no-sync-bn", "--sync-bn").sync_bn is True
    assert make_args("ddp").sync_bn is False

    argv = (*BASE, "--model", "batchnorm")
    reference = single_run(*argv)
    local = undisturbed("ddp", 2, *argv)
    assert deviation(local.gradients[0][0], reference.gradients[0][0]) > 1e-3
    for world_size in (2, 4):
        result = train("ddp", world_size, *argv, "--sync-bn", folder=tmp_path / str(world_size))
        assert result.code == 0, result.err
        assert deviation(result.gradients[0][0], reference.gradients[0][0]) <= 1e-11
        floating = [
            {k: v for k, v in run.checkpoint()["model"].items() if v.is_floating_point()}
            for run in (result, reference)
        ]
        assert "between.running_var" in floating[0] and deviation(*floating) <= 1e-9


# ------------------------------------------------------------------------------------------------------------------------- 21


def scale_by_1024(rank):
    """A loss scale in float64, where it must not change a bit: that shows the order of what is done with the gradient."""
    init = common.StepGuard.__init__

    def scaled(self, *arguments):
        init(self, *arguments)
        self.fixed_scale = self._init_scale = 1024.0

    common.StepGuard.__init__ = scaled


def test_pitfall_21_clipping_sees_the_true_gradient(tmp_path):
    """Clipping makes training crawl under a loss scale: it was applied to scaled gradients, which `step` then divides by the scale."""
    argv = (*BASE, "--clip-grad-norm", "0.5")
    reference = single_run(*argv)
    assert all(line["grad_norm"] > 0.5 for line in reference.train_lines()[:3])
    assert torch.cat(
        [g.flatten() for g in reference.gradients[0][0].values()]
    ).norm().item() == pytest.approx(0.5, rel=1e-5)

    wrong = train("single", 1, *argv, folder=tmp_path / "wrong", patch=forget_unscale_on_purpose)
    assert deviation(wrong.gradients[0][0], reference.gradients[0][0]) > 0.9  # 0.5 / 1024 is left

    for mode, n in (("single", 1), ("ddp", 2)):
        result = train(mode, n, *argv, folder=tmp_path / mode, patch=scale_by_1024)
        assert result.code == 0, result.err
        assert result.checkpoint()["scaler"]["scale"] == 1024
        assert deviation(result.gradients[0][0], reference.gradients[0][0]) <= 1e-12
        assert deviation(result.checkpoint()["model"], reference.checkpoint()["model"]) <= 1e-10


def forget_unscale_on_purpose(rank):
    scale_by_1024(rank)
    common.StepGuard.unscale_ = unscale_when_stepping


def unscale_when_stepping(self, optimizer):
    """torch's `step` unscales what was not unscaled before; called from the loop, before the clipping, this only takes the norm."""
    if sys._getframe(1).f_code.co_name == "step":
        torch.amp.GradScaler.unscale_(self, optimizer)
    self.norm = nn.utils.get_total_norm(
        parameter.grad for parameter in optimizer.param_groups[0]["params"]
    )


# ------------------------------------------------------------------------------------------------------------------------- 22


def schedule_with_one_skip(count_every_step):
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 4)
    scaler, trace = torch.amp.GradScaler("cpu"), []
    for step in range(4):
        trace.append(optimizer.param_groups[0]["lr"])
        scale = scaler.get_scale()
        scaler.scale(net(torch.ones(1)).sum() * (float("inf") if step == 1 else 1)).backward()
        scaler.step(optimizer)  # returns None, stepped or not
        scaler.update()
        optimizer.zero_grad()
        if count_every_step or scaler.get_scale() == scale:
            scheduler.step()
    return trace


def make_infinite(losses):
    return losses * float("inf")


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_pitfall_22_skipped_steps_are_counted(tmp_path):
    """Schedule and optimizer drift apart: GradScaler.step hides that it skipped, and the schedule stands still or nobody knows."""
    assert schedule_with_one_skip(False) == [1, 0.75, 0.75, 0.5]  # one step late from then on
    assert schedule_with_one_skip(True) == [1, 0.75, 0.5, 0.25]

    for precision in (("--dtype", "float64"), ("--dtype", "float32", "--amp", "fp16")):
        argv = (*BASE, *precision)
        patch = functools.partial(on_rank_1, make_infinite, 4)
        result = train("ddp", 2, *argv, folder=tmp_path / precision[-1], patch=patch)
        assert result.code == 0, (
            result.err
        )  # equal weights on all ranks are checked at the end of each epoch
        assert [line["lr"] for line in result.train_lines()] == [
            line["lr"] for line in single_run(*BASE).train_lines()
        ]
        assert [line["skipped"] for line in result.train_lines()][4] == 1
        if (
            "fp16" not in precision
        ):  # there the scaler looks for its scale first, skipping some steps
            assert sum(line["skipped"] for line in result.train_lines()) == 1


# ------------------------------------------------------------------------------------------------------------------------- 23


def test_pitfall_23_learning_rate_goes_on_at_resume(tmp_path):
    """The learning rate jumps at resume: a scheduler that is built after the optimizer's state was loaded resets it to its start."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    scheduler.step()
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = torch.optim.SGD(nn.Linear(1, 1).parameters(), 1.0)
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["lr"] == 0.5
    torch.optim.lr_scheduler.LambdaLR(resumed, lambda step: 0.5**step)
    assert resumed.param_groups[0]["lr"] == 1.0  # jumped

    straight = [line["lr"] for line in single_run(*BASE).train_lines()]
    assert (
        len(set(straight[6:])) == 12
    )  # no plateau that would hide a jump after the stop at step 8
    stopped = train("single", 1, *BASE, folder=tmp_path, patch=functools.partial(stop_after, 8))
    assert stopped.code == 143 and len(stopped.train_lines()) == 8
    resumed = train("single", 1, *BASE, "--resume", "auto", folder=tmp_path)
    assert [line["lr"] for line in resumed.train_lines()] == straight


# ------------------------------------------------------------------------------------------------------------------------- 24


def test_pitfall_24_schedule_counts_global_batches(tmp_path):
    """The schedule ends N times too early or late: it was stepped once a process or once a micro-batch, not once a global batch."""
    args = make_args("single", *BASE)
    micro_batches = [factor_of(args, 2 * step, 6) for step in range(18)]  # stepped for each of two
    assert micro_batches[9:] == 9 * [0.0]

    reference = single_run(*BASE).train_lines()
    assert [line["lr"] for line in reference] == pytest.approx(
        [args.lr * factor_of(args, step, 6) for step in range(18)], rel=1e-12
    )
    assert 0 < reference[-1]["lr"] < reference[9]["lr"]
    for world_size, accum_steps in ((1, 1), (2, 2), (4, 3)):
        argv = (*BASE, "--accum-steps", str(accum_steps))
        lines = train("ddp", world_size, *argv, folder=tmp_path / str(world_size)).train_lines()
        assert [(line["global_step"], line["lr"]) for line in lines] == [
            (line["global_step"], line["lr"]) for line in reference
        ]


# ------------------------------------------------------------------------------------------------------------------------- 26


def test_pitfall_26_ranks_have_equally_many_batches():
    """The job hangs at the end of an epoch: one rank has a batch more than the others, and waits in its all-reduce."""

    def batches_per_rank(length, batch_size, world_size):  # unpadded shards, cut on each rank
        return {
            len(range(rank, length, world_size)) // (batch_size // world_size)
            for rank in range(world_size)
        }

    assert batches_per_rank(21, 4, 2) == {5} and batches_per_rank(23, 4, 2) == {5, 6}

    for length in range(1, 12):
        for batch_size in range(1, length + 1):
            for world_size in range(1, batch_size + 1):
                samplers = [
                    make_sampler(length, batch_size, rank, world_size) for rank in range(world_size)
                ]
                steps = [list(sampler) for sampler in samplers]
                assert {len(step) for step in steps} | {len(sampler) for sampler in samplers} == {
                    length // batch_size
                }
                assert all(
                    indices for step in steps for _, indices in step
                )  # an empty piece would break the loss
                trained = [i for step in steps for _, indices in step for i in indices]
                assert len(set(trained)) == len(trained) == length // batch_size * batch_size
    with pytest.raises(common.UsageError, match=r"--batch-size 5 .*4"):
        make_sampler(4, 5)  # an epoch without a step


# ------------------------------------------------------------------------------------------------------------------------- 27


def forward_past_ddp():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.module(torch.full((2, 3), 1.0 + dist.get_rank())).sum().backward()
    optimizer.step()  # no error here
    print(json.dumps(model.module.weight.tolist()))
    try:
        common.sync_buffers(model.module)
    except RuntimeError as error:
        print(error)


def bypass_ddp(rank):
    DistributedDataParallel.forward = lambda self, *inputs: self.module(*inputs)


def test_pitfall_27_forward_past_the_wrapper_is_noticed(tmp_path):
    """Ranks drift apart without an error: a forward that goes to the bare module leaves DDP's all-reduce out."""
    (first, caught), (second, _) = (out.splitlines() for out in in_group(2, forward_past_ddp))
    assert first != second
    assert "parameters differ between ranks: weight" in caught

    undisturbed("ddp", 2, *BASE)
    result = train("ddp", 2, *BASE, folder=tmp_path, patch=bypass_ddp)
    assert result.code == 1 and "parameters differ between ranks" in result.err
    assert not (
        result.folder / "last.pt"
    ).exists()  # at the end of the first epoch, before it is saved


# ------------------------------------------------------------------------------------------------------------------------- 28


def test_pitfall_28_unused_parameters(tmp_path):
    """ "Expected to have finished reduction": DDP waits for the gradient of a parameter that the forward did not use."""
    argv = (*BASE, "--model", "unused")
    reference = single_run(*argv)
    assert (
        make_args("ddp").find_unused_parameters is False
    )  # it costs a walk over the graph in every step
    without = train("ddp", 2, *argv, folder=tmp_path / "without")
    assert without.code == 1 and "Expected to have finished reduction" in without.err

    result = train("ddp", 2, *argv, "--find-unused-parameters", folder=tmp_path / "with")
    assert result.code == 0, result.err
    names = reference.checkpoint()["model"].keys()
    assert "unused.weight" in names
    assert deviation(result.checkpoint()["model"], reference.checkpoint()["model"]) <= 1e-10
    assert "--find-unused-parameters" in without.err  # the error names this project's option
