"""Advice in circulation that is wrong: each test sees it fail, then what this project does.

The rows are in docs/porting.md.
"""

import functools
import os
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist
from harness import ROOT, in_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import common
import machinery.process
import machinery.rendezvous
import sampling


def regression(samples=16):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True) + 1


def linear(*more):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), *more, nn.Linear(4, 1)).double()


def evaluate_on_rank_0(checked):
    """As in many scripts: DDP's model and a sharded sampler, but only rank 0 evaluates."""
    data = TensorDataset(torch.arange(57.0))
    model = DistributedDataParallel(linear(nn.BatchNorm1d(4))).eval()
    inputs = torch.zeros(2, 3, dtype=torch.float64)
    forward = threading.Thread(target=model, args=(inputs,))
    if dist.get_rank() == 0:
        print(
            "seen", sum(len(x) for (x,) in DataLoader(data, 10, sampler=DistributedSampler(data)))
        )
        forward.start()
        forward.join(1)
        print("waits", forward.is_alive())
        checked.touch()
    else:  # else rank 0 would wait for ever
        while not checked.exists():
            time.sleep(0.01)
        forward.start()
    forward.join()
    ours = sampling.ShardSampler(57, 10, dist.get_rank(), dist.get_world_size())
    print("ours", sum(len(indices) for _, indices in ours))


def test_advice_evaluate_on_rank_0_through_the_wrapper(tmp_path):
    outs = in_group(2, functools.partial(evaluate_on_rank_0, tmp_path / "checked"))
    assert "seen 29\n" in outs[0], "of 57 samples, and one rank's repeat among them"
    assert "waits True\n" in outs[0], "it broadcasts buffers, and nobody receives them"
    assert sum(int(re.search(r"ours (\d+)", out)[1]) for out in outs) == 57


def test_advice_drop_last_in_validation():
    data = TensorDataset(torch.arange(57.0))
    assert sum(len(x) for (x,) in DataLoader(data, 10, drop_last=True)) == 50
    assert sum(len(indices) for _, indices in sampling.ShardSampler(57, 10)) == 57


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
        common.ranks_from_env()


def test_page_names_these_tests():
    page = (ROOT / "docs" / "porting.md").read_text()
    (table,) = re.findall(r"\| advice \|.*", page, re.DOTALL)
    named = re.findall(r"\| `(test_advice_\w+)` \|$", table, re.MULTILINE)
    here = [name for name in globals() if name.startswith("test_advice_")]
    assert sorted(named) == sorted(here) and len(here) >= 6
