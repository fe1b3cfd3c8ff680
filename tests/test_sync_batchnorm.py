"""machinery.modes.SyncBatchNorm, the CPU's version, equals torch's BatchNorm on the whole batch.

Compared are values, gradients and running statistics.
"""

import torch
import torch.distributed as dist
from harness import in_group
from torch import nn

import machinery.modes
from machinery.modes import SyncBatchNorm, convert_sync_batchnorm

SIZES = [3, 5, 1]  # samples of each rank
SHAPES = {nn.BatchNorm1d: (4, 5), nn.BatchNorm2d: (4, 3, 2), nn.BatchNorm3d: (4, 2, 3, 2)}
SETTINGS = [
    {},
    {"momentum": None},  # the mean over all batches so far
    {"momentum": 0.3, "eps": 0.01},
    {"affine": False},
    {"track_running_stats": False},
]


def make_layers(kind, settings):
    """Return nn.BatchNorm and a converted copy of it, with weights that are not all one."""
    layers = []
    for _ in range(2):
        layer = kind(4, **settings)
        if layer.affine:
            nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
            nn.init.normal_(layer.bias, generator=torch.Generator().manual_seed(2))
        layers.append(layer)
    return layers[0], convert_sync_batchnorm(layers[1], torch.device("cpu"))


def assert_close(value, wanted, what, limit=1e-12):
    assert value.shape == wanted.shape, what
    difference = (value.double() - wanted.double()).abs().max()
    assert difference <= limit * max(1, wanted.abs().max()), what


def check_against_whole_batch(kind, settings, dtype=torch.float64, limit=1e-12):
    """On every rank: three training steps and an evaluation, beside nn.BatchNorm on all samples."""
    rank, sizes = dist.get_rank(), SIZES
    exact = torch.promote_types(dtype, torch.float32)  # of the layers
    whole, ours = (layer.to(exact) for layer in make_layers(kind, settings))
    assert type(ours) is SyncBatchNorm
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        shape = sum(sizes), *SHAPES[kind]
        # Far from normalised, and a loss that is no function of the mean.
        batch = (3 + 2 * torch.randn(shape, generator=generator)).to(dtype)
        weights = torch.randn(shape, generator=generator, dtype=torch.float64)
        everything = batch.to(exact).clone().requires_grad_()
        mine = batch.split(sizes)[rank].clone().requires_grad_()
        wanted, value = whole(everything), ours(mine)
        assert value.dtype == dtype
        assert_close(value, wanted.split(sizes)[rank], "output", limit)
        (wanted.sin() * weights).sum().backward()
        (value.sin() * weights.split(sizes)[rank]).sum().backward()
        assert everything.grad.abs().max() > 1e-3
        assert_close(mine.grad, everything.grad.split(sizes)[rank], "gradient", 4 * limit)
        for (name, parameter), reference in zip(ours.named_parameters(), whole.parameters()):
            dist.all_reduce(parameter.grad)  # what the DDP wrapper does
            assert_close(parameter.grad, reference.grad, f"gradient of {name}", 10 * limit)
        for layer in (ours, whole):
            layer.zero_grad()
    with torch.no_grad():  # a momentum encoder: its statistics are of all ranks too
        value, wanted = ours(batch.split(sizes)[rank]), whole(batch.to(exact))
    assert_close(value, wanted.split(sizes)[rank], "output without a gradient", limit)
    assert [name for name, _ in ours.named_buffers()] == [name for name, _ in whole.named_buffers()]
    for (name, buffer), reference in zip(ours.named_buffers(), whole.buffers()):
        assert buffer.dtype == reference.dtype
        assert_close(buffer, reference, name, max(1e-12, limit / 1000))
    if whole.track_running_stats:
        assert ours.num_batches_tracked == 4 and (whole.running_mean - 3).abs().max() < 2.5
    whole.load_state_dict(ours.state_dict())
    whole.eval(), ours.eval()
    assert ours(batch).equal(whole(batch)), "evaluation"


def check_all():
    for kind in SHAPES:
        for settings in SETTINGS:
            check_against_whole_batch(kind, settings)
    for dtype in (torch.bfloat16, torch.float16):  # statistics in float32: the output is rounded
        check_against_whole_batch(nn.BatchNorm2d, {}, dtype, torch.finfo(dtype).eps)


def test_equals_batchnorm_on_the_whole_batch():
    in_group(3, check_all)


class AddsInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = convert_sync_batchnorm(nn.BatchNorm1d(4), torch.device("cpu"))

    def forward(self, value):
        result = self.norm(value)
        result += value
        return result


def add_in_place():
    net = nn.Sequential(nn.Linear(4, 4), AddsInPlace())
    mesh = machinery.modes.mesh_of_ranks(torch.device("cpu"), None)
    machinery.modes.shard(net, lambda net: [net[1].norm], mesh)
    net(torch.randn(3, 4)).sum().backward()


def test_output_may_be_changed_in_place_in_shards():
    """FSDP refuses a change of a view."""
    in_group(2, add_in_place)


def test_conversion_keeps_names_and_values():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16, momentum=None)),
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(model.parameters())
    converted = convert_sync_batchnorm(model, torch.device("cpu"))
    assert [
        type(module) for module in converted.modules() if "BatchNorm" in type(module).__name__
    ] == [SyncBatchNorm] * 2
    assert converted[1].momentum == 0.1 and converted[3][1].momentum is None
    after = converted.state_dict()
    assert list(after) == list(before) and all(after[name].equal(before[name]) for name in before)
    assert all(a is b for a, b in zip(converted.parameters(), parameters)), (
        "an optimizer that was built before would train nothing"
    )
    same = nn.Linear(2, 2)
    assert type(convert_sync_batchnorm(same, torch.device("cpu"))) is nn.Linear


def test_accelerators_have_torchs_own():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm1d(2)))
    converted = convert_sync_batchnorm(model, torch.device("cuda"))
    assert [type(converted[0]), type(converted[1][0])] == [nn.SyncBatchNorm] * 2
