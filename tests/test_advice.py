"""Advice in circulation that is wrong: each test runs the advice, sees it fail, and then what this project does.

The rows are in docs/porting.md.
"""

import contextlib
import os
import re

import pytest
import torch
import torch.distributed as dist
from harness import TASKS, in_group, make_args, make_sampler, train
from patches import BASE
from short_runs import SMALL
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import common
import machinery.files
import machinery.rendezvous
import sampling

pytestmark = pytest.mark.usefixtures("handlers")


def regression(samples=16):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True) + 1


def linear(*more):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), *more, nn.Linear(4, 1)).double()


# ------------------------------------------------------------------------------------- evaluation


def evaluate_on_rank_0():
    """As in many scripts: DDP's model and a sharded sampler, but only rank 0 evaluates."""
    data = TensorDataset(torch.arange(57.0))
    model = DistributedDataParallel(linear(nn.BatchNorm1d(4)))
    collectives = []
    forward = model._sync_buffers
    model._sync_buffers = lambda: collectives.append("broadcast") or forward()
    if dist.get_rank() == 0:
        seen = sum(len(x) for (x,) in DataLoader(data, 10, sampler=DistributedSampler(data)))
        print("seen", seen)
        model._sync_buffers = lambda: collectives.append("broadcast")  # else it would wait for ever
        model.eval()(torch.zeros(2, 3, dtype=torch.float64))
    print("collectives", len(collectives))
    ours = sampling.ShardSampler(57, 10, dist.get_rank(), dist.get_world_size())
    print("ours", sum(len(indices) for _, indices in ours))
    del model


def test_advice_evaluate_on_rank_0_through_the_wrapper():
    outs = in_group(2, evaluate_on_rank_0)
    seen = int(re.search(r"seen (\d+)", outs[0])[1])
    assert seen == 29, "of 57 samples, and one rank's repeat among them"
    broadcasts = [int(re.search(r"collectives (\d+)", out)[1]) for out in outs]
    assert broadcasts == [1, 0], "rank 0 broadcasts buffers, and nobody receives them"
    assert sum(int(re.search(r"ours (\d+)", out)[1]) for out in outs) == 57


def test_advice_drop_last_in_validation():
    data = TensorDataset(torch.arange(57.0))
    assert sum(len(x) for (x,) in DataLoader(data, 10, drop_last=True)) == 50
    assert sum(len(indices) for _, indices in sampling.ShardSampler(57, 10)) == 57


# --------------------------------------------------------------------------------------- training


def test_advice_skip_a_step_whose_loss_is_too_large():
    inputs, targets = regression()
    inputs[0, 0] = torch.nan
    net = linear()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loss = (net(inputs) - targets).square().mean()
    if not loss.item() > 2e5:  # a NaN is not greater
        loss.backward()
        optimizer.step()
    assert not all(value.isfinite().all() for value in net.parameters())

    net = linear()
    before = [value.clone() for value in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    guard = common.StepGuard("off", torch.device("cpu"), net)
    guard.scale((net(inputs) - targets).square().mean()).backward()
    guard.unscale_(optimizer)
    guard.step(optimizer)
    guard.update()
    assert all(map(torch.equal, net.parameters(), before)) and guard.skipped == 1


def step_by_each(rate):
    """Return the weights after a step on all 16 samples: four ranks average their gradients."""
    inputs, targets = regression()
    net = linear()
    losses = (net(inputs) - targets).square()
    means = [piece.mean() for piece in losses.chunk(4)]  # of each rank
    (sum(means) / len(means)).backward()  # as DDP averages them
    torch.optim.SGD(net.parameters(), rate).step()
    return torch.cat([value.detach().flatten() for value in net.parameters()])


def test_advice_rate_times_batch_per_gpu_over_global_batch():
    inputs, targets = regression()
    net = linear()
    (net(inputs) - targets).square().mean().backward()
    start = torch.cat([value.detach().flatten() for value in net.parameters()])
    torch.optim.SGD(net.parameters(), 0.01).step()
    single = torch.cat([value.detach().flatten() for value in net.parameters()])
    assert not torch.allclose(step_by_each(0.01 * 4 / 16), single, rtol=1e-6)
    moved = (step_by_each(0.01 * 4 / 16) - start).norm() / (single - start).norm()
    assert moved == pytest.approx(1 / 4)
    assert torch.allclose(step_by_each(0.01), single, rtol=1e-12)


def gradient_with_batchnorm(pieces):
    inputs, targets = regression()
    net = linear(nn.BatchNorm1d(4))
    for x, y in zip(inputs.chunk(pieces), targets.chunk(pieces)):
        ((net(x) - y).square().sum() / len(inputs)).backward()
    return net[0].weight.grad, net[1].running_var


def sync_batchnorm_of_two_ranks():
    import machinery.stand_ins

    inputs, targets = (part.chunk(2)[dist.get_rank()] for part in regression())
    net = linear(nn.BatchNorm1d(4))
    net = machinery.stand_ins.convert_sync_batchnorm(net, torch.device("cpu"))
    ((net(inputs) - targets).square().sum() / 16).backward()
    gradient = common.reduce_value(net[0].weight.grad, average=False)
    expected, variance = gradient_with_batchnorm(1)
    assert torch.allclose(gradient, expected, rtol=1e-10)
    assert torch.allclose(net[1].running_var, variance, rtol=1e-10)


def test_advice_accumulate_instead_of_synchronised_batchnorm():
    whole, accumulated = gradient_with_batchnorm(1), gradient_with_batchnorm(2)
    for a, b in zip(whole, accumulated):
        assert ((a - b).norm() / a.norm()) > 0.01
    in_group(2, sync_batchnorm_of_two_ranks)


# -------------------------------------------------------------------------------- weights and files


def test_advice_strict_false_loads_what_fits(capsys):
    trained, net = linear(), linear()
    for value in trained.parameters():
        value.data += 1
    file = {f"module.{name}": value for name, value in trained.state_dict().items()}
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net.load_state_dict(file, strict=False)  # says nothing unless somebody reads what it returns
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    wider = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).double()
    with pytest.raises(RuntimeError, match="size mismatch"):
        wider.load_state_dict(trained.state_dict(), strict=False)

    common.load_weights(net, file, "--weights old.pt")
    assert all(map(torch.equal, net.parameters(), trained.parameters()))
    assert "4 of the model's 4 tensors are from --weights old.pt" in capsys.readouterr().out
    common.load_weights(wider, trained.state_dict(), "--weights old.pt")
    assert torch.equal(wider[1].bias, trained[1].bias)


def test_advice_resume_if_the_file_is_there(tmp_path):
    def old_script(path):
        return "resumed" if os.path.isfile(path) else "=> no checkpoint found"  # and goes on

    assert old_script(tmp_path / "lastt.pt") == "=> no checkpoint found"
    with pytest.raises(common.UsageError, match=r"--resume .*lastt\.pt: no such file"):
        make_args("single", "--resume", str(tmp_path / "lastt.pt"))


def test_advice_one_chain_for_best_periodic_and_last(tmp_path):
    def old_script(best, epoch):
        if best:
            return "best.pt"
        elif epoch % 2 == 1:
            return f"epoch-{epoch + 1:04}.pt"
        return "last.pt"

    assert old_script(True, 1) == "best.pt", "neither last.pt nor that of the second epoch"
    argv = (*SMALL, "--epochs", "2", "--keep-every", "2", "--schedule", "constant")
    result = train("single", 1, *argv, folder=tmp_path)
    assert result.code == 0, result.err
    first, second = (line["top1"] for line in result.eval_lines())
    assert second > first, "the second epoch is the best one"
    files = [result.checkpoint(name)["epoch"] for name in ("best.pt", "last.pt", "epoch-0002.pt")]
    assert files == [2, 2, 2]


# ------------------------------------------------------------------------------ settings and launchers


def test_advice_flags_with_a_typing_error(monkeypatch):
    before = torch.backends.cudnn.benchmark
    with contextlib.suppress(AttributeError):
        torch.backends.cudnn.benckmark = not before  # taken without a word
        assert torch.backends.cudnn.benchmark == before
        del torch.backends.cudnn.benckmark
    monkeypatch.setenv("CUDA_VISIBLE_DIVECES", "7")
    with pytest.raises(common.UsageError, match="unrecognized arguments: --compille"):
        make_args("single", "--compille")


def test_advice_deterministic_beside_benchmark(monkeypatch):
    import machinery.processes

    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "deterministic", True)
    monkeypatch.setattr(cudnn, "benchmark", True)
    assert cudnn.deterministic and cudnn.benchmark, "torch takes both"
    try:
        machinery.processes.set_up_device("cpu", deterministic=True)
        assert not cudnn.benchmark and torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_advice_slurm_procid_is_the_rank(monkeypatch):
    """In a batch script, outside of srun, it is 0 on the first node, and there are no ranks."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "12", "SLURM_LOCALID": "0"}
    for name, value in batch.items():
        monkeypatch.setenv(name, value)
    old_script = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    assert old_script == (0, 8), "one process, which would wait for seven others"
    assert not machinery.rendezvous.take_ranks_of_slurm()
    with pytest.raises(common.UsageError, match="torchrun"):
        machinery.rendezvous.ranks_from_env()


def tell_rank(rank):
    print(f"RANK {os.environ['RANK']} of {os.environ['LOCAL_WORLD_SIZE']} on this host", flush=True)


def test_advice_rank_is_the_number_of_the_host(tmp_path):
    result = train("ddp", 3, *BASE, "--epochs", "1", folder=tmp_path, patch=tell_rank)
    assert result.code == 0, result.err
    assert "RANK 0 of 3 on this host" in result.out
    sizes = [len(next(iter(make_sampler(203, 30, rank, 3)))[1]) for rank in range(3)]
    assert sizes == [10, 10, 10], "each process of the host has its own slice"


def test_every_row_of_the_page_names_a_test_or_says_that_it_has_none():
    page = (TASKS.parent.parent / "docs" / "porting.md").read_text()
    (table,) = re.findall(r"\| advice \|.*", page, re.DOTALL)
    named = re.findall(r"\| `(test_advice_\w+)` \|$", table, re.MULTILINE)
    here = [name for name in globals() if name.startswith("test_advice_")]
    assert sorted(named) == sorted(here) and len(here) >= 9
    assert len(re.findall(r"\| – \|$", table, re.MULTILINE)) <= 5
