"""The pitfalls of sharded training. Each test shows the wrong way failing, then this project's way."""

import json
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import in_group
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import common
import machinery.modes

LIMIT = 0.1  # of the norm of the gradient


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def sharded(net, mesh=None):
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    machinery.modes.shard(net, [net[0]], mesh)
    return net


def train_step(net, optimizer=None):
    """Run a backward over this rank's half of eight samples; make a step."""
    inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(1)).double()
    half = inputs.chunk(dist.get_world_size())[dist.get_rank()]
    (net(half).square().sum() * (dist.get_world_size() / len(inputs))).backward()
    if optimizer:
        optimizer.step()


def reference():
    """The same on one device."""
    net = small_net()
    inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(1)).double()
    (net(inputs).square().sum() / len(inputs)).backward()
    return net


def whole_gradients(net):
    found = [
        p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in net.parameters()
    ]
    return torch.cat([gradient.flatten() for gradient in found])


# ----------------------------------------------------------------------------------------------- 43


def clip_shards():
    one = reference()
    norm = nn.utils.clip_grad_norm_(one.parameters(), LIMIT)
    assert norm > 2 * LIMIT, "nothing would be clipped"
    found = []
    for local in (True, False):
        net = sharded(small_net())
        train_step(net)
        if local:
            norm = nn.utils.get_total_norm([p.grad.to_local() for p in net.parameters()])
            nn.utils.clip_grads_with_norm_(net.parameters(), LIMIT, norm)
        else:
            common.clip_grad_norm(net, LIMIT)
        found.append((whole_gradients(net) - whole_gradients(one)).abs().max().item())
    print(json.dumps(found))


def test_pitfall_43_norm_of_a_shard():
    for out in in_group(2, clip_shards):
        norm_of_the_part, norm_of_the_whole = json.loads(out)
        assert norm_of_the_part > 1e-3 and norm_of_the_whole < 1e-14


# ----------------------------------------------------------------------------------------------- 44


def save_shards():
    net, plain = sharded(small_net()), small_net()
    parts = {name: value.to_local() for name, value in net.state_dict().items()}
    with pytest.raises(RuntimeError, match="size mismatch"):
        plain.load_state_dict(parts)
    saved = common.whole(net.state_dict())
    if dist.get_rank() == 0:
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.zero_()
        plain.load_state_dict(saved)
        assert all(map(torch.equal, plain.parameters(), small_net().parameters()))
        assert {type(value) for value in saved.values()} == {torch.Tensor}
        sizes = {value.untyped_storage().nbytes() - value.nbytes for value in saved.values()}
        assert sizes == {0}, "a file holds what lies behind a tensor: no padding of the shards"
        print("whole")


def test_pitfall_44_a_shard_saved_as_the_whole():
    assert in_group(2, save_shards) == ["whole\n", ""]
    assert in_group(3, save_shards) == ["whole\n", "", ""], "which cannot be cut into equal parts"


# ----------------------------------------------------------------------------------------------- 45


def gather():
    values = common.whole(sharded(small_net()).state_dict()).values()
    print("whole" if all(isinstance(value, torch.Tensor) for value in values) else "took part")


def gather_alone():
    group = dist.new_group(timeout=timedelta(seconds=2))
    net = sharded(small_net(), DeviceMesh.from_group(group, "cpu"))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed ?out|timeout"):
            net[0].weight.full_tensor()
        print("waited in vain")
        store.set("done", "yes")
    else:
        store.wait(["done"], timedelta(seconds=25))


@pytest.mark.full
def test_pitfall_45_rank_0_gathers_alone():
    assert in_group(2, gather_alone) == ["waited in vain\n", ""]
    assert in_group(2, gather) == ["whole\n", "took part\n"]


# ----------------------------------------------------------------------------------------------- 46


def build_optimizers():
    before = torch.cat([p.detach().flatten() for p in small_net().parameters()])
    moved = []
    for first in (True, False):
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) if first else None
        sharded(net)
        optimizer = optimizer or torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        train_step(net, optimizer)
        after = torch.cat([p.detach().full_tensor().flatten() for p in net.parameters()])
        moved.append((after - before).abs().max().item())
    held = [state["momentum_buffer"].to_local().numel() for state in optimizer.state.values()]
    assert 0 < sum(held) < len(before), "the momentum is cut too"

    net = small_net()  # its blocks alone are cut: the rest is no rank's business but its own
    fully_shard(net[0], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    train_step(net)
    same = [(whole_gradients(n) - whole_gradients(reference())).abs().max().item()
            for n in (net, trained(sharded(small_net())))]  # fmt: skip
    print(json.dumps([*moved, *same]))


def trained(net):
    train_step(net)
    return net


def test_pitfall_46_optimizer_before_the_shards_and_a_root_without():
    for out in in_group(2, build_optimizers):
        dead, alive, root_left_out, root_too = json.loads(out)
        assert dead == 0.0 and alive > 1e-3
        assert root_left_out > 1e-3 and root_too < 1e-14
