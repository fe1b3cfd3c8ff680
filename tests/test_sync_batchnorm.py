"""--sync-bn on a CPU: values, gradients and statistics are those of torch's BatchNorm on the whole batch."""

import pytest
import torch
import torch.distributed as dist
from harness import in_group
from torch import nn

from engine.modes import convert_sync_batchnorm

CPU = torch.device("cpu")
SIZES = [3, 5, 1]  # samples of each rank
SHAPES = {nn.BatchNorm1d: (4, 5), nn.BatchNorm2d: (4, 3, 2), nn.BatchNorm3d: (4, 2, 3, 2)}
SETTINGS = [
    {},
    {"momentum": None},  # the mean over all batches so far
    {"momentum": 0.3, "eps": 0.01},
    {"affine": False},
    {"track_running_stats": False},
]


def make_layer(kind, settings):
    torch.manual_seed(1)
    layer = kind(4, **settings)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)  # not all one, not all zero
    return layer


def assert_close(value, wanted, what, limit):
    assert value.shape == wanted.shape, what
    difference = (value.double() - wanted.double()).abs().max()
    assert difference <= limit * max(1, wanted.abs().max()), what


def check_against_whole_batch(kind, settings, dtype=torch.float64, limit=1e-12):
    """Three training steps and an evaluation, beside nn.BatchNorm on the samples of all ranks."""
    rank = dist.get_rank()
    exact = torch.promote_types(dtype, torch.float32)  # of the layers
    whole = make_layer(kind, settings).to(exact)
    ours = convert_sync_batchnorm(make_layer(kind, settings), CPU).to(exact)
    for step in range(3):
        torch.manual_seed(step)
        # Far from normalised, and a loss that is no function of the mean.
        batch = (3 + 2 * torch.randn(sum(SIZES), *SHAPES[kind])).to(dtype)
        weights = torch.randn(batch.shape, dtype=torch.float64)
        everything = batch.to(exact).clone().requires_grad_()
        mine = batch.split(SIZES)[rank].clone().requires_grad_()
        wanted, value = whole(everything), ours(mine)
        assert value.dtype == dtype
        assert_close(value, wanted.split(SIZES)[rank], "output", limit)
        (wanted.sin() * weights).sum().backward()
        (value.sin() * weights.split(SIZES)[rank]).sum().backward()
        assert everything.grad.abs().max() > 1e-3
        assert_close(mine.grad, everything.grad.split(SIZES)[rank], "gradient", 4 * limit)
        for (name, parameter), reference in zip(ours.named_parameters(), whole.parameters()):
            dist.all_reduce(parameter.grad)  # what the DDP wrapper does
            assert_close(parameter.grad, reference.grad, f"gradient of {name}", 10 * limit)
        ours.zero_grad(), whole.zero_grad()
    with torch.no_grad():  # a momentum encoder: its statistics are of all ranks too
        value, wanted = ours(batch.split(SIZES)[rank]), whole(batch.to(exact))
    assert_close(value, wanted.split(SIZES)[rank], "output without a gradient", limit)
    for (name, buffer), (same, reference) in zip(ours.named_buffers(), whole.named_buffers()):
        assert name == same and buffer.dtype == reference.dtype
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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_conversion_keeps_names_and_values(device):
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm1d(16, momentum=None)))
    model.append(nn.Linear(2, 2))
    before, parameters = dict(model.state_dict()), [*model.parameters()]
    converted = convert_sync_batchnorm(model, torch.device(device))
    kinds = [type(m).__name__ for m in (converted[0], converted[1][0], converted[2])]
    assert kinds == ["SyncBatchNorm", "SyncBatchNorm", "Linear"]
    assert isinstance(converted[0], nn.SyncBatchNorm) == (device == "cuda"), "torch's own"
    assert converted[0].momentum == 0.1 and converted[1][0].momentum is None
    after = converted.state_dict()
    assert list(after) == list(before) and all(after[name].equal(before[name]) for name in before)
    assert all(a is b for a, b in zip(converted.parameters(), parameters)), (
        "an optimizer that was built before would train nothing"
    )
