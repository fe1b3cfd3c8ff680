"""machinery.modes.SyncBatchNorm, the CPU's version, equals torch's BatchNorm on the concatenated batch: values, gradients, running statistics."""

import pytest
import torch
import torch.distributed as dist
from harness import in_group
from torch import nn

from machinery.modes import SyncBatchNorm, convert_sync_batchnorm

PIECES = {2: [1, 5], 3: [3, 4, 2]}  # samples of each rank: never alike
SHAPES = {"1d": (4,), "1d with length": (4, 5), "2d": (4, 3, 2), "3d": (4, 2, 3, 2)}
LAYERS = {
    "1d": nn.BatchNorm1d,
    "1d with length": nn.BatchNorm1d,
    "2d": nn.BatchNorm2d,
    "3d": nn.BatchNorm3d,
}
SETTINGS = {
    "default": {},
    "momentum None": {"momentum": None},  # the mean over all batches so far
    "momentum 0.3, eps 0.01": {"momentum": 0.3, "eps": 0.01},
    "not affine": {"affine": False},
    "no running statistics": {"track_running_stats": False},
}


def make_layers(kind, settings):
    """Return nn.BatchNorm and a converted copy of it, in float64, with weights that are not all one."""
    layers = []
    for _ in range(2):
        layer = LAYERS[kind](4, **settings).double()
        if layer.affine:
            nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
            nn.init.normal_(layer.bias, generator=torch.Generator().manual_seed(2))
        layers.append(layer)
    return layers[0], convert_sync_batchnorm(layers[1], torch.device("cpu"))


def assert_equal(value, wanted, what):
    assert value.shape == wanted.shape and value.dtype == wanted.dtype, what
    assert (value - wanted).abs().max() <= 1e-12 * max(1, wanted.abs().max()), what


def check_against_whole_batch(kind, settings):
    """On every rank: three training steps and an evaluation, beside nn.BatchNorm on everybody's samples."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = PIECES[world_size]
    whole, ours = make_layers(kind, settings)
    assert type(ours) is SyncBatchNorm
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        batch = 3 + 2 * torch.randn(
            sum(sizes), *SHAPES[kind], generator=generator, dtype=torch.float64
        )  # far from normalised
        weights = torch.randn(
            batch.shape, generator=generator, dtype=torch.float64
        )  # of a loss that is no function of the mean
        everything, mine = (
            batch.clone().requires_grad_(),
            batch.split(sizes)[rank].clone().requires_grad_(),
        )
        wanted, value = whole(everything), ours(mine)
        assert_equal(value, wanted.split(sizes)[rank], f"output, {kind}, {settings}")
        (wanted.sin() * weights).sum().backward()
        (value.sin() * weights.split(sizes)[rank]).sum().backward()
        assert everything.grad.abs().max() > 1e-3
        assert_equal(mine.grad, everything.grad.split(sizes)[rank], "gradient of the input")
        for (name, parameter), reference in zip(ours.named_parameters(), whole.parameters()):
            dist.all_reduce(parameter.grad)  # what the DDP wrapper does
            assert_equal(parameter.grad, reference.grad, f"gradient of the {name}")
        for layer in (ours, whole):
            layer.zero_grad()
    for (name, buffer), reference in zip(ours.named_buffers(), whole.buffers()):
        assert_equal(buffer, reference, name)
    assert [name for name, _ in ours.named_buffers()] == [name for name, _ in whole.named_buffers()]
    if whole.track_running_stats:
        assert ours.num_batches_tracked == 3 and (whole.running_mean - 3).abs().max() < 2.5
    whole.load_state_dict(ours.state_dict())
    whole.eval(), ours.eval()
    with torch.no_grad():
        assert ours(batch).equal(whole(batch)), (
            "evaluation"
        )  # a rank evaluates what it likes: there is nothing to wait for


def check_all():
    for kind in LAYERS:
        for settings in SETTINGS.values():
            check_against_whole_batch(kind, settings)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_equals_batchnorm_on_the_whole_batch(world_size):
    in_group(world_size, check_all)


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


# ------------------------------------------------------------------------------ half precision

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
VALUES = {  # mean and spread: what a sum, a square, or a mean in half precision would spoil
    "usual": (3.0, 2.0),
    "far from zero": (1000.0, 8.0),
    "near the largest fp16": (0.0, 12_000.0),
    "tiny": (0.0, 1e-3),
}


def check_half(dtype):
    """On every rank: beside nn.BatchNorm in float32 on everybody's samples, of the same rounded inputs."""
    rank, sizes = dist.get_rank(), PIECES[dist.get_world_size()]
    rounding = torch.finfo(dtype).eps
    for name, (mean, spread) in VALUES.items():
        whole, ours = (layer.float() for layer in make_layers("2d", {"eps": 1e-12}))
        generator = torch.Generator().manual_seed(0)
        shape = sum(sizes), 4, 15, 15  # 2025 values a channel, which bf16 does not know
        batch = (
            (mean + spread * torch.randn(shape, generator=generator))
            .clamp(-65_000, 65_000)
            .to(dtype)
        )
        weights = torch.randn(shape, generator=generator)
        everything, mine = (
            batch.float().requires_grad_(),
            batch.split(sizes)[rank].clone().requires_grad_(),
        )
        wanted, value = whole(everything).split(sizes)[rank], ours(mine)
        assert value.dtype == dtype and value.isfinite().all(), name
        limit = rounding * wanted.abs().max()
        assert (value.float() - wanted).abs().max() <= limit, (name, "output")
        rounded_twice = (value != wanted.to(dtype)).double().mean()
        assert rounded_twice < 0.01 or name != "usual", "only the output is rounded"

        (wanted * weights.split(sizes)[rank]).sum().backward()
        dist.all_reduce(everything.grad)  # of the other ranks' samples too
        (value.float() * weights.split(sizes)[rank]).sum().backward()
        gradient = everything.grad.split(sizes)[rank]
        assert mine.grad.dtype == dtype, name
        assert (mine.grad.float() - gradient).abs().max() <= 4 * rounding * gradient.abs().max(), (
            name
        )
        for (which, buffer), reference in zip(ours.named_buffers(), whole.buffers()):
            assert buffer.dtype == reference.dtype and buffer.isfinite().all(), (name, which)
            difference = (buffer.double() - reference.double()).abs().max()
            assert difference <= 1e-5 * reference.double().abs().max().clamp(min=1e-3 * spread), (
                name,
                which,
            )
        for parameter in ours.parameters():
            assert parameter.dtype == parameter.grad.dtype == torch.float32


def check_halves():
    for dtype in HALF.values():
        check_half(dtype)


@pytest.mark.full
def test_half_precision_is_normalised_by_statistics_in_float32():
    in_group(3, check_halves)


def test_accelerators_have_torchs_own():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm1d(2)))
    converted = convert_sync_batchnorm(model, torch.device("cuda"))
    assert [type(converted[0]), type(converted[1][0])] == [nn.SyncBatchNorm] * 2
