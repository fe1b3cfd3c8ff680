"""The small pieces that training rests on: ranks, schedule, optimizer, guard, average, meter, state, files."""

import itertools
import math
import random

import pytest
import torch
import torch.distributed as dist
from harness import in_group
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import common

CPU = torch.device("cpu")

# ------------------------------------------------------------------------------ the learning rate

CURVES = {  # epochs, warm-up, options, the rate of each step times a number; an epoch has ten
    "warm-up": (2, 1.5, {"schedule": "constant"}, [*range(1, 16), *[15] * 5], 15),
    "steps": (
        *(3, 0, {"schedule": "step", "step_epochs": [1, 2], "step_gamma": 0.2}),
        *([25] * 10 + [5] * 10 + [1] * 10, 25),
    ),
    "saw-tooth": (  # Izmailov et al.: 1 - (1 - low) (mod(i - 1, c) + 1) / c for i = 1, 2, ...
        *(2, 0, {"schedule": "sawtooth", "step_epochs": [1], "step_gamma": 0.1}),
        *([100 - 9 * i for i in range(1, 11)] * 2, 100),
    ),
    "triangle": (
        *(4, 0, {"schedule": "cyclic", "step_epochs": [2], "step_gamma": 0}),
        *([*range(10), *range(10, 0, -1)] * 2, 10),
    ),
}


def curve(epochs, warmup_epochs, **options):
    """Return the learning rates of all steps over the optimizer's own."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    options |= {"epochs": epochs, "warmup_epochs": warmup_epochs}
    scheduler, rates = common.build_scheduler(optimizer, 10, **options), []
    for _ in range(10 * epochs):
        rates.append(optimizer.param_groups[0]["lr"] / 0.5)
        scheduler.step()
    return rates


@pytest.mark.parametrize("name", CURVES)
def test_learning_rate_is_a_function_of_the_step(name):
    epochs, warmup, options, wanted, over = CURVES[name]
    found = curve(epochs, warmup, **options)
    assert found == pytest.approx([value / over for value in wanted])
    for rule, factor in (("none", 1), ("linear", 4), ("sqrt", 2)):
        scaled = curve(epochs, warmup, scale_lr=rule, replicas=4, **options)
        assert scaled == pytest.approx([factor * rate for rate in found])


def test_cosine_falls_from_one_to_the_final_rate_and_a_warm_up_ends_where_the_schedule_begins():
    for final in (0.0, 0.2):
        found = curve(5, 1, schedule="cosine", final_lr=final)
        places = [math.cos(math.pi * k / 40) for k in range(40)]
        assert found[10:] == pytest.approx([final + (1 - final) * (1 + p) / 2 for p in places])
        assert found[9] == found[10] == 1
    found = curve(8, 2, schedule="cyclic", step_epochs=[3])
    assert found[19] == pytest.approx(0.1) and found[35] == pytest.approx(1)
    assert max(abs(a - b) for a, b in itertools.pairwise(found)) <= 0.9 / 15 + 1e-12, "no cliff"


# ------------------------------------------------------------------------------------ many ranks


def on_each_rank():
    rank = dist.get_rank()
    value = torch.tensor([1.0 + rank, 10.0 * rank], dtype=torch.float64, requires_grad=True)
    assert common.reduce_value(value, average=False).tolist() == [6, 30]
    assert common.reduce_value(value).tolist() == [2, 10]
    assert value.tolist() == [1 + rank, 10 * rank], "out of place"

    sizes = [3, 1, 2]
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

    table = torch.arange(12.0).view(4, 3) + 100 * rank
    sent = [table[:, 1], torch.tensor([rank, 7], dtype=torch.int16), torch.tensor(rank == 0)]
    sent += [torch.tensor([rank + 1j]), torch.full((2,), rank).bfloat16()]
    common.broadcast_tensors(sent)
    assert [one.tolist() for one in sent] == [[1, 4, 7, 10], [0, 7], True, [1j], [0, 0]]
    assert table[:, 0].tolist() == [3 * k + 100 * rank for k in range(4)], "and nothing else"


def test_ranks_reduce_gather_and_broadcast():
    in_group(3, on_each_rank)


def meters():
    """Batches of an evaluation set go to the ranks in turn: two, one and one."""
    rank, values = dist.get_rank(), torch.arange(7, dtype=torch.float64)
    meter = common.Meter()
    for piece in values.split(2)[rank::3]:
        meter.add(loss=piece.square(), words=(piece, piece + 1), all=[*piece.tolist()])
    means = meter.mean(lambda lists: {f"{i}th": value for i, value in enumerate(lists["all"])})
    in_order = {f"{i}th": i for i in range(7)}
    assert means == {"loss": 91 / 7, "words": 21 / 28, "count": 7, **in_order}, (
        "a mean of the ranks' means would be another number"
    )
    saved = common.gather_objects(meter.totals())
    losses = [0 + 1 + 36, 4 + 9, 16 + 25]
    for ranks, counts in (([0, 1, 2], [3, 2, 2]), ([0, 1], [3, 2]), ([2, 0, 1, 0], [2, 3, 2, 3])):
        again = common.Meter()
        again.load([saved[r] for r in ranks])  # of as many ranks, of fewer, of more
        mean = sum(losses[r] for r in ranks) / sum(counts)
        assert again.mean() == {"count": sum(counts), "loss": mean, "words": again.mean()["words"]}
    alone = common.Meter()
    if rank != 2:  # which got no batch
        alone.add(loss=values[: rank + 1])
    assert alone.mean() == {"loss": 1 / 3, "count": 3}


def test_meter_is_the_exact_mean_over_uneven_and_empty_shards():
    in_group(3, meters)


# ------------------------------------------------------------------------------------ the model


def test_what_has_to_is_moved():
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    batch = {"words": packed, "others": [torch.ones(2), "a text", (torch.ones(1), 3)]}
    moved = common.to_device(batch, torch.device("meta"))
    tensor, text, (last, three) = moved["others"]
    assert moved["words"].data.is_meta and tensor.is_meta and last.is_meta
    assert (text, three) == ("a text", 3)


def test_batchnorm_of_frozen_weights_keeps_its_statistics():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    common.freeze(net, ["0.*"])
    net.eval()
    common.train_mode(net)
    net(torch.arange(12.0).view(4, 3))
    assert net[0].running_mean.tolist() == [0, 0, 0] and net[2].running_mean.abs().min() > 0


@pytest.mark.parametrize(
    ("patterns", "trained"),
    [
        (["*", "!1.*"], {"1.weight", "1.bias"}),
        (["0.*", "!0.*", "*", "!*.bias"], {"0.bias", "1.bias"}),  # the last that matches decides
        (["0.*", "!0.bias", "1.bias"], {"0.bias", "1.weight"}),
    ],
)
def test_freeze_all_but(patterns, trained):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    common.freeze(net, patterns)
    assert {name for name, p in net.named_parameters() if p.requires_grad} == trained
    (group,) = common.build_optimizer(net, "sgd", 0.1, 0.9, 0).param_groups
    assert len(group["params"]) == len(trained)


# ---------------------------------------------------------------------------- gradients and steps


@pytest.mark.parametrize("limit", [None, 0.1, 1e9])
def test_clipping_looks_at_the_whole_gradient(limit):
    net = nn.Linear(3, 2).double()
    net(torch.ones(4, 3, dtype=torch.float64)).square().sum().backward()
    before = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
    norm = common.clip_grad_norm([*net.parameters()], limit)
    assert norm.item() == pytest.approx(before.norm().item(), rel=1e-12)
    after = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
    assert after.norm().item() == pytest.approx(min(limit or 1e9, norm.item()), rel=1e-4)
    assert torch.cosine_similarity(after, before, 0).item() == pytest.approx(1, rel=1e-12)


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, 0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, 0.1, fused=True)


def ours(name):
    return lambda parameters: common.build_optimizer(
        nn.ParameterList(parameters), name, 0.1, 0.9, 0
    )


OPTIMIZERS = {
    **{f"{n} {t}": (ours(n), t) for n in ("sgd", "adamw") for t in ("float32", "float64", "bfloat16", "float16", "complex64")},
    "a task's, not fused": (sgd, "float32"),
    "a task's, fused": (adamw, "float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipped_steps_leave_no_trace_and_others_are_those_of_torch(name):
    """Also the very first: torch makes the momentum of a fused SGD uninitialised in it."""
    make, dtype = OPTIMIZERS[name]
    torch.use_deterministic_algorithms(True)  # uninitialised memory is NaN
    try:
        start = [torch.linspace(0.5, 1, 6).view(2, 3), torch.ones(2)]
        sides = [[nn.Parameter(t.to(getattr(torch, dtype))) for t in start] for _ in range(2)]
        guarded, plain = (make(parameters) for parameters in sides)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        guard, skipped = common.StepGuard(guarded, scaler), []
        for gradient in (math.nan, 1.0, 2.0, math.inf, math.nan, 3.0):
            before = [p.detach().clone() for p in sides[0]]
            for parameter in itertools.chain(*sides):
                parameter.grad = torch.full_like(parameter, 0.125)
                parameter.grad[-1] = gradient
            norm = common.clip_grad_norm(sides[0], 1.0)
            common.clip_grad_norm(sides[1], 1.0)
            guard.step(norm)
            if math.isfinite(gradient):
                plain.step()
                assert not any(map(torch.equal, sides[0], before))
            assert all(map(torch.equal, *sides)), gradient
            skipped.append(int(guard.skipped))
        assert skipped == [1, 0, 0, 1, 2, 0] and guard.limit == 10
    finally:
        torch.use_deterministic_algorithms(False)


def test_scaler_of_fp16_halves_its_scale_and_may_skip_sixteen_steps_more():
    weight = nn.Parameter(torch.ones(1))
    optimizer = ours("sgd")([weight])
    scaler = torch.amp.GradScaler("cpu")
    guard = common.StepGuard(optimizer, scaler)
    for gradient in (math.inf, 1.0):
        scaler.scale(weight.sum()).backward()
        weight.grad.fill_(gradient)
        scaler.unscale_(optimizer)
        guard.step(common.clip_grad_norm([weight], None))
    assert weight.item() < 1 and scaler.get_scale() == 2**15
    assert guard.skipped == 0 and guard.limit == 26


# ---------------------------------------------------------------------------------- the average


def test_average_is_that_of_the_steps_in_float32_and_goes_in_and_out():
    """A bf16 average would not move: a twentieth of a change is below its rounding."""
    for dtype, exact in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).to(dtype)
        average, wanted = common.WeightAverage(net, 0.95), torch.zeros(())
        for step in range(300):
            net[0].weight.data.fill_(1 + step / 2**7)
            average.after_step()
            value = torch.tensor(1 + step / 2**7, dtype=dtype).double()
            share = 1 - min(0.95, (1 + step) / (10 + step)) if step else 1
            wanted = wanted + share * (value - wanted)
        found = average.tensors["0.weight"]
        assert found.dtype is exact and found.double().sub(wanted).abs().max() < 1e-5 * wanted
        assert [*average.tensors] == ["0.weight", "0.bias", "1.weight", "1.bias"], "no buffer"
        trained = {name: value.clone() for name, value in net.state_dict().items()}
        with average.swapped_in():
            assert net[0].weight.equal(found.to(dtype)) and not net[0].weight.equal(
                trained["0.weight"]
            )
        assert all(value.equal(trained[name]) for name, value in net.state_dict().items())
    off = common.WeightAverage(net, 0.99, enabled=False)
    off.after_step()
    with off.swapped_in():
        assert net[0].weight.equal(trained["0.weight"]) and not off.tensors


# ------------------------------------------------------------------------------------- the state


def state_of(net, optimizer):
    scheduler = common.build_scheduler(optimizer, 5, schedule="constant", epochs=9, warmup_epochs=0)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    average = common.WeightAverage(net, 0.9, enabled=False)
    return common.State(net, optimizer, scheduler, scaler, average)


def train_plainly(net, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        net(torch.arange(6.0).view(2, 3) + step).square().sum().backward()
        optimizer.step()


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def adam_of(net, backwards=False, **settings):
    """Two groups: the weights, and the biases, which have a rate of their own."""
    weights, biases = [net[0].weight, net[2].weight], [net[0].bias, net[2].bias]
    groups = [{"params": weights}, {"params": biases, "lr": 0.03}]
    return torch.optim.AdamW(groups[::-1] if backwards else groups, lr=0.01, **settings)


def test_restored_optimizer_goes_on_to_the_bit_with_the_settings_of_this_run(capsys):
    whole, first, second = small_net(), small_net(), small_net()
    train_plainly(whole, adam_of(whole), range(6))
    stopped, resumed = adam_of(first, weight_decay=0.5), adam_of(second)
    stopped.param_groups[0]["weight_decay"] = stopped.param_groups[1]["weight_decay"] = 0.01
    train_plainly(first, stopped, range(3))
    stopped.param_groups[0]["weight_decay"] = 0.5
    state_of(second, resumed).restore(state_of(first, stopped).checkpoint(), 5)
    train_plainly(second, resumed, range(3, 6))
    assert all(map(torch.equal, second.parameters(), whole.parameters()))
    assert not any(map(torch.equal, first.parameters(), whole.parameters()))
    other = small_net()
    with pytest.raises(SystemExit):  # torch would give the weights what belongs to the biases
        state_of(other, adam_of(other, backwards=True)).restore(
            state_of(first, stopped).checkpoint(), 5
        )
    assert "the optimizer had the parameters in another order: 0.weight" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_what_trained_before_keeps_its_state_if_other_layers_are_frozen(name):
    nets = [small_net(), small_net()]
    common.freeze(nets[0], ["0.*"])
    common.freeze(nets[1], ["*", "!*.bias"])
    optimizers = [common.build_optimizer(net, name, 0.1, 0.9, 0) for net in nets]
    train_plainly(nets[0], optimizers[0], range(3))
    state_of(nets[1], optimizers[1]).restore(state_of(nets[0], optimizers[0]).checkpoint(), 5)
    key = {"sgd": "momentum_buffer", "adamw": "exp_avg"}[name]
    kept, new = (optimizers[1].state[nets[1][i].bias] for i in (2, 0))
    assert kept[key].equal(optimizers[0].state[nets[0][2].bias][key]) and kept[key].abs().min() > 0
    assert not new or new[key].abs().max() == 0


# -------------------------------------------------------------------------------------- its files


def test_damage_anywhere_in_a_file_is_seen_or_does_no_harm(tmp_path, capsys):
    """The end is cut off, or one bit is flipped, in a tensor or elsewhere."""
    path, wanted = tmp_path / "last.pt", {"model": torch.arange(500.0), "step": 7}
    common.save_checkpoint(wanted, path)
    content, draw, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(200):
        place = draw.randrange(len(content))
        flipped = bytearray(content)
        flipped[place] ^= 1 << draw.randrange(8)
        path.write_bytes(draw.choice([content[:place], flipped]))
        try:
            found = common.load_file(path, "--resume")
        except SystemExit as error:
            refused += error.code == 2
            line = capsys.readouterr().err
            assert f"--resume {path}: damaged, or no file of tensors" in line
            assert line.count("\n") == 1 and "weights_only" not in line
        else:
            assert found["model"].equal(wanted["model"]) and found["step"] == 7
    assert 150 < refused < 200


@pytest.mark.parametrize("call", ["os.replace", "os.fsync", "torch.save"])
def test_failed_save_leaves_the_last_file_and_nothing_beside_it(call, tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    common.save_checkpoint({"step": 1}, path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(call, full)
    with pytest.raises(OSError, match="No space left"):
        common.save_checkpoint({"step": 2}, path)
    assert common.load_file(path, "") == {"step": 1} and [*tmp_path.iterdir()] == [path]
