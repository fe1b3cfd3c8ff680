"""The small pieces that training rests on: schedule, reductions, meters, clipping, scaler, optimizer."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from harness import TASKS, factor_of, guard_of, in_group, make_args, optimizer_of, single_run, train
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import common


def factors(*argv, steps_per_epoch=10):
    args = make_args("single", *argv)
    return [factor_of(args, step, steps_per_epoch) for step in range(args.epochs * steps_per_epoch)]


def test_warmup_rises_linearly_to_the_peak():
    values = factors("--epochs", "4", "--schedule", "constant", "--warmup-epochs", "1.5")
    assert values[:15] == pytest.approx([(step + 1) / 15 for step in range(15)])
    assert set(values[15:]) == {1.0}


def test_cosine_falls_from_one_to_zero_after_the_warmup():
    values = factors("--epochs", "5", "--warmup-epochs", "1")
    assert values[10] == 1.0
    assert values[30] == pytest.approx(0.5), "half-way between the warm-up and the end"
    assert values[-1] == pytest.approx((1 + math.cos(math.pi * 39 / 40)) / 2)
    assert sorted(values[10:], reverse=True) == values[10:]


def test_cosine_falls_to_the_final_rate():
    values = factors("--epochs", "5", "--warmup-epochs", "1", "--final-lr", "0.2")
    floor = factors("--epochs", "5", "--warmup-epochs", "1")
    assert values == pytest.approx(
        [v if i < 10 else 0.2 + 0.8 * v for i, v in enumerate(floor)], rel=1e-12
    )
    assert values[10] == 1.0 and 0.2 < values[-1] < 0.21


def test_step_drops_at_the_given_epochs():
    values = factors(
        *"--epochs 5 --schedule step --step-epochs 2 4 --step-gamma 0.2 --warmup-epochs 0".split()
    )
    assert values[:20] == [1.0] * 20
    assert values[20:40] == pytest.approx([0.2] * 20)
    assert values[40:] == pytest.approx([0.04] * 10)


SMALL = (
    "--task",
    str(TASKS / "small.py"),
    *"--dtype float64 --batch-size 30 --log-every 1".split(),
)


def test_learning_rate_in_the_log_is_the_function_of_the_step(tmp_path):
    argv = (*SMALL, *"--epochs 3 --schedule cosine --warmup-epochs 0.5 --lr 0.02".split())
    args = make_args("single", *argv)  # one step is one global batch, however it is cut
    result = train("single", 1, *argv, "--accum-steps", "3", folder=tmp_path)
    assert [line["lr"] for line in result.train_lines()] == pytest.approx(
        [0.02 * factor_of(args, s, 6) for s in range(18)], rel=1e-12
    )


@pytest.mark.parametrize(("mode", "rule", "factor"), [("dp", "linear", 2), ("ddp", "sqrt", 2**0.5)])
def test_scale_lr_multiplies_by_the_world_size_only_when_asked(mode, rule, factor, tmp_path):
    argv = (*SMALL, "--epochs", "1")
    scaled = train(mode, 2, *argv, "--scale-lr", rule, folder=tmp_path).train_lines()
    plain = single_run(*argv).train_lines()
    found = [line["lr"] for line in scaled]
    assert found == pytest.approx([factor * line["lr"] for line in plain], rel=1e-12)


def check_reduce_value():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    value = torch.tensor([1.0 + rank, 10.0 * rank], dtype=torch.float64, requires_grad=True)
    before = value.detach().clone()
    total, mean = common.reduce_value(value, average=False), common.reduce_value(value)
    assert total.tolist() == [
        sum(1.0 + r for r in range(world_size)),
        sum(10.0 * r for r in range(world_size)),
    ]
    assert mean.tolist() == pytest.approx([t / world_size for t in total.tolist()])
    assert value.detach().equal(before) and mean.data_ptr() != value.data_ptr(), "out of place"


def test_reduce_value_sums_or_averages_over_the_ranks_out_of_place():
    in_group(3, check_reduce_value)


def gather_on_each_rank():
    rank, sizes = dist.get_rank(), [3, 1, 2]
    for dtype in (torch.float64, torch.bfloat16):
        everything = torch.arange(12, dtype=dtype).view(6, 2)
        mine = everything.split(sizes)[rank].clone().requires_grad_()
        every, first = common.gather_samples(mine)
        assert every.equal(everything) and first == [0, 3, 4][rank] and every.dtype is dtype
        # Rank r's loss weighs what it gathered with r + 1: each sample's gradient comes from all.
        (every * (rank + 1)).sum().backward()
        assert mine.grad.equal(torch.full_like(mine, 1 + 2 + 3)), mine.grad
    with torch.no_grad():
        assert common.gather_samples(mine) == (mine, 0), "an evaluation has unequal batches"


def test_gathered_samples_are_those_of_all_ranks_and_gradients_go_back():
    in_group(3, gather_on_each_rank)


def test_what_has_to_is_moved():
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    batch = {"words": packed, "others": [torch.ones(2), "a text", (torch.ones(1), 3)]}
    moved = common.to_device(batch, torch.device("meta"))
    tensor, text, (last, three) = moved["others"]
    assert moved["words"].data.is_meta and tensor.is_meta and last.is_meta
    assert (text, three) == ("a text", 3)


def check_meter_with_empty_and_uneven_shards():
    rank = dist.get_rank()
    values = torch.arange(7, dtype=torch.float64)  # 4 on rank 0, 3 on rank 1, none on rank 2
    mine = {0: values[:4], 1: values[4:], 2: None}[rank]
    meter = common.Meter(torch.device("cpu"))
    if mine is not None:
        for piece in mine.split(2):
            meter.add(loss=piece.square(), top1=piece, words=(piece, piece + 1))
    assert meter.mean() == {"loss": 91 / 7, "top1": 3.0, "words": 21 / 28, "count": 7}, (
        "a mean of the ranks' means would be another number"
    )


def test_meter_is_the_exact_mean_over_uneven_and_empty_shards():
    in_group(3, check_meter_with_empty_and_uneven_shards)


def send_views():
    net, rank = nn.Linear(1, 1), dist.get_rank()
    table = torch.arange(12.0).view(4, 3) + 100 * rank
    net.register_buffer("column", table[:, 1])
    net.register_buffer("short", torch.tensor([rank, 7], dtype=torch.int16))
    net.register_buffer("flag", torch.tensor(rank == 0))
    for parameter in net.parameters():
        parameter.data.fill_(1.0)
    common.sync_buffers(net)
    assert net.column.tolist() == [1, 4, 7, 10] and net.short.tolist() == [0, 7] and net.flag
    assert table[:, 0].tolist() == [0 + 100 * rank, 3 + 100 * rank, 6 + 100 * rank, 9 + 100 * rank]


def test_buffers_of_any_type_and_stride_are_sent():
    in_group(2, send_views)


@pytest.mark.parametrize("limit", [None, 0.1, 1e9])
def test_clip_grad_norm_looks_at_the_whole_gradient(limit):
    net = nn.Linear(3, 2).double()
    net(torch.ones(4, 3, dtype=torch.float64)).square().sum().backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
    assert common.clip_grad_norm(net, None, wanted=False) is None
    norm = common.clip_grad_norm(net, limit)
    assert norm.item() == pytest.approx(gradients.norm().item(), rel=1e-12)
    clipped = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
    assert clipped.norm().item() == pytest.approx(
        min(limit or math.inf, gradients.norm().item()), rel=1e-4
    )
    assert torch.cosine_similarity(clipped, gradients, 0).item() == pytest.approx(1, rel=1e-12)


def test_gradient_whose_norm_overflows_is_a_step():
    """Each of its numbers is finite; its norm is not, in float32."""
    stepped, scaler = one_step("off", 3e38, weights=4)
    assert stepped and scaler.skipped == 0


def one_step(amp, gradient, weights=1):
    net = nn.Linear(weights, 1, bias=False)
    args = make_args("single", "--amp", amp)
    scaler, optimizer = guard_of(args, torch.device("cpu"), net), optimizer_of(args, net)
    before = net.weight.detach().clone()
    scaler.scale(net.weight.sum()).backward()
    net.weight.grad.fill_(gradient)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return not net.weight.equal(before), scaler


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_scaler_skips_and_counts_non_finite_gradients_at_every_precision(amp, bad):
    stepped, scaler = one_step(amp, 1.0)
    assert stepped and scaler.skipped == 0 and scaler.in_a_row == 0
    stepped, scaler = one_step(amp, bad)
    counted = 0 if amp == "fp16" else 1  # there the scale falls
    assert not stepped and scaler.skipped == 1 and scaler.in_a_row == counted
    assert scaler.get_scale() == (2.0**15 if amp == "fp16" else 1.0)
    _, resumed = one_step(amp, 1.0)
    resumed.load_state_dict(scaler.state_dict())
    assert resumed.in_a_row == counted, "a resumed run counts on"


@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_steps_in_a_row_count_at_the_lowest_scale_and_since_the_last_good_step(amp):
    """With fp16 a healthy run may begin with many: each halves the scale of 65536."""
    net = nn.Linear(1, 1, bias=False)
    args = make_args("single", "--amp", amp)
    guard, optimizer = guard_of(args, torch.device("cpu"), net), optimizer_of(args, net)

    def in_a_row(gradient):
        guard.scale(net.weight.sum()).backward()
        net.weight.grad.fill_(gradient)
        guard.unscale_(optimizer)
        guard.step(optimizer)
        guard.update()
        return guard.in_a_row.item()

    for _ in range(16 if amp == "fp16" else 0):
        assert in_a_row(math.nan) == 0
    assert [in_a_row(math.nan) for _ in range(9)] == [*range(1, 10)]
    before = net.weight.item()
    assert in_a_row(1.0) == 0 and net.weight.item() != before
    assert [in_a_row(math.nan) for _ in range(12)] == [*range(1, 11), 10, 10]
    assert in_a_row(1.0) == 10, "the run ends at the next log line"


def test_no_name_of_a_metric_is_that_of_a_weight():
    meter = common.Meter(torch.device("cpu"))
    meter.add(body=torch.ones(2), **{"body weight": torch.full((2,), 4.0)})
    assert meter.mean() == {"body": 1, "body weight": 4, "count": 2}


OF_A_TASK = {
    "fused": lambda weight, bias: torch.optim.SGD([weight, bias], 0.1, 0.9, fused=True),
    "adamw": lambda weight, bias: torch.optim.AdamW([weight, bias], 0.1, fused=True),
    "not fused": lambda weight, bias: torch.optim.SGD([weight, bias], 0.1, 0.9),
}


@pytest.mark.parametrize("name", OF_A_TASK)
def test_skipped_first_step_of_any_optimizer_leaves_no_trace(name):
    """Torch makes the momentum of fused SGD uninitialised in the first step, and a skipped step leaves it so."""
    torch.use_deterministic_algorithms(True)  # uninitialised memory is NaN
    try:
        nets = [nn.Linear(3, 2), nn.Linear(3, 2)]
        nets[1].load_state_dict(nets[0].state_dict())
        ours, theirs = (OF_A_TASK[name](*net.parameters()) for net in nets)
        common.make_momentum(ours)
        guard = common.StepGuard("off", torch.device("cpu"), nets[0])
        for gradient in (math.nan, 1.0, 2.0, math.inf, 3.0):
            guard.scale(nets[0].weight.sum())  # there is a scale from now on
            for parameter in (*nets[0].parameters(), *nets[1].parameters()):
                parameter.grad = torch.full_like(parameter, gradient)
            guard.unscale_(ours)
            guard.step(ours)
            guard.update()
            theirs.step() if math.isfinite(gradient) else None
            assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters())), gradient
    finally:
        torch.use_deterministic_algorithms(False)


def test_batchnorm_in_a_frozen_part_keeps_its_statistics():
    """Also one without parameters, of affine=False, that stands beside frozen ones."""
    frozen = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False))
    net = nn.Sequential(frozen, nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False))
    common.freeze(net, ["0.*"])
    net.eval()
    common.train_mode(net)
    net(torch.arange(12.0).view(4, 3))
    kept, moved = frozen[1].running_mean, net[2].running_mean
    assert kept.tolist() == [0, 0, 0] and moved.abs().min() > 0


def test_options_reach_the_optimizer():
    argv = "single --lr 0.5 --momentum 0.75 --weight-decay 0.25 --nesterov --optimizer".split()
    net, wanted = nn.Linear(1, 1), {"lr": 0.5, "weight_decay": 0.25}
    own = {"sgd": {"momentum": 0.75, "nesterov": True}, "adamw": {"betas": (0.75, 0.999)}}
    for name, more in own.items():
        (group,) = optimizer_of(make_args(*argv, name), net).param_groups
        assert group | wanted | more == group, name


def adamw_of(net, backwards=False):
    """AdamW with a group of the weights and one of the biases, which have a rate and a decay of their own."""
    weights, biases = [net[0].weight, net[2].weight], [net[0].bias, net[2].bias]
    groups = [{"params": weights}, {"params": biases, "lr": 0.03, "weight_decay": 0.0}]
    if backwards:
        groups = [group | {"params": group["params"][::-1]} for group in groups[::-1]]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def state_of(net, optimizer):
    scheduler = common.build_scheduler(optimizer, 5, schedule="constant", epochs=9, warmup_epochs=0)
    guard = common.StepGuard("off", torch.device("cpu"), net)
    return common.State(net, optimizer, scheduler, guard, common.WeightAverage(net, 0.9, False))


def train_plainly(net, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        net(torch.arange(6.0).view(2, 3) + step).square().sum().backward()
        optimizer.step()


def test_state_of_an_optimizer_goes_by_name_and_not_by_order():
    """A resumed run, whose groups come in another order, is the uninterrupted one to the bit."""
    nets = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(3)]
    for net in nets[1:]:
        net.load_state_dict(nets[0].state_dict())
    whole, first, second = nets
    train_plainly(whole, adamw_of(whole), range(6))
    stopped, resumed = adamw_of(first), adamw_of(second, backwards=True)
    train_plainly(first, stopped, range(3))
    state_of(second, resumed).restore(state_of(first, stopped).checkpoint())
    train_plainly(second, resumed, range(3, 6))
    assert all(map(torch.equal, second.parameters(), whole.parameters()))
    assert not any(map(torch.equal, first.parameters(), whole.parameters()))


def test_sawtooth_is_that_of_its_source():
    """Izmailov et al.: 1 - (1 - low) (mod(i - 1, c) + 1) / c for the step i = 1, 2, ..."""
    options = "--schedule sawtooth --step-epochs 1 --step-gamma 0.1 --warmup-epochs 0 --epochs 2"
    found = factors(*options.split(), steps_per_epoch=4)
    assert found == pytest.approx([0.775, 0.55, 0.325, 0.1] * 2)


def test_cyclic_schedule_has_no_cliff():
    """The warm-up rises to where the triangle begins; neighbours in the curve differ by no more than a step of the steepest line."""
    args = make_args(
        *"single --schedule cyclic --epochs 8 --step-epochs 3 --warmup-epochs 2".split()
    )
    curve = [factor_of(args, step, 10) for step in range(80)]
    assert curve[19] == pytest.approx(0.1) and curve[20] == pytest.approx(0.1)
    assert (
        curve[35] == pytest.approx(1.0)
        and curve[50] == pytest.approx(0.1)
        and curve[65] == pytest.approx(1.0)
    )
    assert max(abs(a - b) for a, b in itertools.pairwise(curve)) <= 0.9 / 15 + 1e-12
    one = make_args("single", "--schedule", "cyclic", "--epochs", "8", "--warmup-epochs", "2")
    curve = [factor_of(one, step, 10) for step in range(80)]
    assert max(curve) == curve[50] == pytest.approx(1.0) and curve[79] == pytest.approx(
        0.1 + 0.9 / 30
    )
