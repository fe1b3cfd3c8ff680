"""Sharded training: the same run as on one device, resumed in any mode; what is cut."""

import contextlib
import copy
import functools
import importlib
import random

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
from harness import (
    TASKS,
    compare,
    deviation,
    in_group,
    make_args,
    prove_run,
    single_run,
    train,
    undisturbed,
    walk,
)
from patches import BASE, printed
from torch import nn

import common
import machinery.check
import machinery.modes
import machinery.process
import machinery.usertask
from tasks import gpt

NET = (*BASE, "--model", "batchnorm", "--log-every", "2")


# ------------------------------------------------------------ how it is built: rank 0's weights


def language_model():
    """With a matrix that two layers share."""
    sizes = {"context": 8, "vocabulary": 99, "width": 16, "heads": 2, "layers": 2, "dropout": 0.0}
    return gpt.GPT(type("Args", (), sizes))


def filled_in_place():
    net = nn.Sequential(nn.Linear(40, 40), nn.Conv1d(8, 8, 3), nn.LSTM(8, 8), nn.BatchNorm1d(8))
    nn.init.trunc_normal_(net[0].weight, std=0.02)
    nn.init.trunc_normal_(net[1].weight, a=-9, b=1)
    for part in net[2].weight_hh_l0.data.chunk(4):
        nn.init.orthogonal_(part)
    with torch.no_grad():
        net[0].bias[3:].fill_(7)
    net.scale = nn.Parameter(torch.randn(5, requires_grad=True) * 2)
    net.register_buffer("drawn", torch.randn(3))
    return net


def table():
    """Its plain tensor and its numbers are made of none of its weights."""
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 2).half()
    net.table, net.drawn = torch.arange(7.0).cos(), [random.random(), np.random.rand()]
    net.shape, net.first = torch.zeros(2, 3).shape, torch.empty(3, device="meta")
    return net


def made_of_weights():
    """Buffers and parameters are sent by rank 0, whatever they are made of."""
    net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    net[1].weight.data /= net[1].weight.data.norm()
    net.register_buffer("twice", net[1].weight * 2)
    net.register_buffer("first", net[1].weight.detach().clone())
    net.teacher = copy.deepcopy(net[1])
    net.append(torch.nn.utils.prune.l1_unstructured(nn.Linear(4, 4), "weight", 5))
    net.register_buffer("column", torch.randn(4, 2).abs()[:, 0])
    return net


def built(build, options, shared):
    """Compare what the ranks hold with what one device builds, bit by bit."""
    rank = torch.distributed.get_rank()
    task = machinery.usertask.Task(make_args("fsdp", *BASE[:2], *options))
    task.functions["build_model"] = lambda args: build()
    nets = []
    for call in (lambda build: build(), machinery.modes.build_once):
        random.seed(3)
        np.random.seed(3)
        nets.append(call(task.build_net))
    wanted, net = nets
    places = {p.untyped_storage().data_ptr() for p in net.parameters()}
    assert (len(places) == 1) == (shared and rank > 0)
    machinery.modes.shard(net, None, machinery.modes.mesh_of_ranks(torch.device("cpu"), None))
    expected, found = (dict(n.named_parameters(remove_duplicate=False)) for n in nets)
    assert found.keys() == expected.keys() and max(p.std() for p in expected.values()) > 0.01
    for name, value in expected.items():
        whole = found[name].full_tensor()
        assert whole.dtype == value.dtype and whole.equal(value), name
        assert found[name].requires_grad == value.requires_grad
        same = [other for other in expected if expected[other] is value]
        assert [other for other in found if found[other] is found[name]] == same
    buffers = dict(wanted.named_buffers())
    assert all(value.equal(buffers[name]) for name, value in net.named_buffers())


def all_built(builds):
    for build, options, shared in builds:
        built(build, options, shared)


def test_ranks_get_the_weights_of_rank_0(tmp_path):
    file = tmp_path / "some.pt"
    torch.save({name: p + 1 for name, p in language_model().state_dict().items()}, file)
    builds = [
        (language_model, [], True),
        (language_model, ["--dtype", "float64", "--freeze", "blocks.0.*"], False),
        (language_model, ["--weights", str(file)], True),
        (filled_in_place, ["--seed", "5"], True),
        (table, [], False),
        (made_of_weights, [], False),
    ]
    in_group(2, functools.partial(all_built, builds))


def number():
    net = nn.Linear(4, 4)
    net.limits = {"sum": net.weight.sum().item()}
    return net


def by_numpy():
    net = nn.Linear(4, 4)
    net.first = float(net.weight.detach().numpy()[0, 0])
    return net


def by_numpy_in_its_own_type():
    net = nn.Linear(4, 4)
    net.std = net.weight.detach().numpy().std()
    return net


def length_of_a_buffer():
    net = nn.Linear(4, 4)
    net.register_buffer("places", torch.arange(16)[net.weight.flatten() < 0.1])
    return net


def plain_tensor():
    net = nn.Linear(4, 4)
    net.first = net.weight.data
    return net


def teacher_in_a_list():
    net = nn.Linear(4, 4)
    net.teacher = [nn.Linear(4, 4)]  # no part of the network
    return net


def copy_in_a_closure():
    net = nn.Linear(4, 4)
    teacher = copy.deepcopy(net)
    net.register_forward_hook(lambda module, inputs, outputs: outputs + teacher(*inputs))
    return net


def other_shape():
    """Its shape depends on a weight, which another one has overwritten."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.ones_(net[0].weight)
    nn.init.zeros_(net[1].weight)
    return net.append(nn.Linear(4, 1 + int(net[0].weight.sum())))


def all_refused(builds):
    torch.manual_seed(3)
    for build in builds:
        caught = None
        try:
            machinery.modes.build_once(build)
        except common.UsageError as error:
            caught = str(error)
        rank0 = torch.distributed.get_rank() == 0
        assert rank0 or "made of weights must be a parameter or a buffer" in caught, build.__name__


def test_what_is_made_of_weights_beside_the_network_is_refused():
    """On ranks above 0 it would be made of other numbers, and nobody would deal it."""
    builds = [number, by_numpy, by_numpy_in_its_own_type, length_of_a_buffer, plain_tensor]
    builds += [teacher_in_a_list, copy_in_a_closure, other_shape]
    in_group(2, functools.partial(all_refused, builds))


# ------------------------------------------------------------------------------ the run


@pytest.mark.parametrize(
    ("options", "n"),
    [
        ("--accum-steps 3 --clip-grad-norm 0.05 --lr 2", 3),
        ("--accum-steps 3 --clip-grad-norm 0.05 --lr 2 --reduce-every micro-batch", 2),
        pytest.param(
            "--optimizer adamw --lr 0.01 --average ema --freeze first.bias",
            2,
            marks=pytest.mark.full,
        ),
    ],
)
def test_shards_equal_one_device(options, n, tmp_path):
    argv, every = (*BASE, *options.split()), ("--reduce-every", "micro-batch")
    alone = [part for part in argv if part not in every]  # an option of fsdp
    prove_run(train("fsdp", n, *argv, folder=tmp_path), single_run(*alone))


def count_whole_gradients(rank):
    """Print how many gradients are whole on this rank when the second micro-batch begins."""
    script = importlib.import_module("train_fsdp")
    seed_rng = script.seed_rng

    def watched(seed, step, i, rank):
        seed_rng(seed, step, i, rank)
        if step == 0 and i == 1:
            import gc

            from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

            held = [part for part in gc.get_objects() if type(part) is FSDPParam]
            whole = [
                part for part in held
                if part.unsharded_accumulated_grad is not None
                or (hasattr(part, "_unsharded_param") and part._unsharded_param.grad is not None)
            ]  # fmt: skip
            print("whole", len(whole), flush=True)

    script.seed_rng = watched


@pytest.mark.parametrize(("every", "whole"), [("step", 4), ("micro-batch", 0)])
def test_gradients_are_whole_between_micro_batches_unless_each_is_reduced(every, whole, tmp_path):
    argv = (*BASE, "--epochs", "1", "--accum-steps", "2", "--reduce-every", every)
    result = train("fsdp", 2, *argv, folder=tmp_path, patch=count_whole_gradients)
    assert printed(result.out, "whole") == [whole] * 2, result.err


@pytest.mark.full
def test_file_of_shards_holds_whole_plain_tensors(tmp_path):
    result = train("fsdp", 3, *NET, "--average", "ema", folder=tmp_path)
    assert result.code == 0, result.err
    saved, wanted = result.checkpoint(), single_run(*NET, "--average", "ema").checkpoint()
    for part in ("model", "weights"):
        assert saved[part].keys() == wanted[part].keys()
        for name, value in wanted[part].items():
            found = saved[part][name]
            assert type(found) is torch.Tensor and found.shape == value.shape
            assert found.untyped_storage().nbytes() == found.nbytes, "no padding of the shards"
    again = train("single", 1, *NET, "--average", "ema", "--eval-only", "--resume",
                  str(result.folder / "last.pt"), folder=tmp_path / "again")  # fmt: skip
    (line,) = again.eval_lines()
    assert line["loss"] == pytest.approx(result.eval_lines()[-1]["loss"], rel=1e-12)


@pytest.mark.full
def test_ranks_of_one_row_share_a_copy(tmp_path):
    result = train("fsdp", 4, *BASE, "--shard-size", "2", folder=tmp_path)
    assert max(compare(result, single_run(*BASE)).values()) <= 1e-10


HARD_NET = """
import torch
from torch import nn
from pit_models import build_datasets, per_sample_loss, per_sample_metrics
class Net(nn.Sequential):
    def forward(self, images):
        return super().forward(images.flatten(1).float() / 90 - 0.8)
class Shift(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("matrix", torch.eye(size))
        self.weight = nn.Parameter(torch.zeros(size))
        self.inner = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, size))
    def forward(self, value):
        with torch.autocast("cpu", enabled=False):
            shift = self.matrix @ self.weight
        return self.inner(value) + shift
def build_model(args):
    middle = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 32))
    parts = middle, Shift(32), nn.BatchNorm1d(32, momentum=None), nn.ReLU(), nn.Linear(32, 10)
    net = Net(nn.LayerNorm(64), *parts)
    net.register_buffer("mean", torch.zeros(3))
    net.scale = nn.Parameter(torch.ones(3))
    net.register_forward_hook(lambda module, inputs, out: out + module.mean @ module.scale)
    return net
"""


@pytest.mark.full
def test_shards_in_bf16_compute_what_ddp_computes(tmp_path, monkeypatch):
    """Whatever the network holds: the weights stay float32, and autocast rounds them."""
    monkeypatch.syspath_prepend(str(TASKS))
    (tmp_path / "hard.py").write_text(HARD_NET)
    argv = [str(tmp_path / "hard.py") if part == BASE[1] else part for part in BASE]
    argv[argv.index("float64")] = "float32"
    argv += ["--average", "ema", "--accum-steps", "2"]
    half = [*argv, "--amp", "bf16"]
    shards = train("fsdp", 2, *half, folder=tmp_path / "fsdp")
    ranks = train("ddp", 2, *half, folder=tmp_path / "ddp")
    assert shards.code == ranks.code == 0 and not shards.err, shards.err + ranks.err
    exact = train("ddp", 2, *argv, folder=tmp_path / "exact")
    assert deviation(ranks.gradients[0][0], exact.gradients[0][0]) > 1e-4, "bf16 rounds"
    assert deviation(shards.gradients[0][0], ranks.gradients[0][0]) < 1e-6
    for line, wanted in zip(shards.eval_lines(), ranks.eval_lines(), strict=True):
        assert line["loss"] == pytest.approx(wanted["loss"], rel=0.02)


@pytest.mark.full
def test_shards_in_bf16_travel_in_bf16_and_resume_as_others_do(tmp_path):
    """The first layer reads floats that the network makes itself; the checkpoint is in float32."""
    argv = [part if part != "float64" else "float32" for part in BASE]
    argv += ["--average", "ema", "--accum-steps", "2"]
    half, shards, exact = (
        train("fsdp", 2, *argv, "--amp", amp, folder=tmp_path / amp)
        for amp in ("bf16", "bf16-shards", "off")
    )
    assert shards.code == 0 and not shards.err, shards.err
    for line, wanted in zip(shards.eval_lines(), half.eval_lines(), strict=True):
        assert line["loss"] == pytest.approx(wanted["loss"], rel=0.02)
    losses, others = ([line["loss"] for line in run.train_lines()] for run in (shards, exact))
    assert losses[-1] < 0.9 * losses[0] and losses[0] != others[0]
    tensors = [value for value in walk(shards.checkpoint()) if torch.is_tensor(value)]
    assert {value.dtype for value in tensors if value.dim()} == {torch.float32}
    file = str(shards.folder / "last.pt")
    for mode, amp in (("fsdp", "bf16"), ("ddp", "bf16")):
        more = ["--resume", file, "--amp", amp, "--epochs", "4"]
        resumed = train(mode, 2, *more, folder=tmp_path / mode)
        assert f"--amp {amp} (bf16-shards before)" in resumed.out, resumed.err
        assert resumed.code == 0 and resumed.train_lines()[-1]["loss"] < 0.95 * losses[0]
    refused = train("ddp", 2, "--resume", file, "--epochs", "4", folder=tmp_path / "refused")
    assert refused.code == 2 and "--amp bf16-shards is for fsdp alone" in refused.err


def print_kept_copies(amp):
    """Print in which type weights travel and outputs come, and the MB of bf16 copies that stay."""
    net, kept, types = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]), {}, set()
    for layer in net:
        layer.register_forward_hook(lambda layer, *_: types.add(layer.weight.dtype))
    device = torch.device("cpu")
    machinery.modes.shard(net, None, machinery.modes.mesh_of_ranks(device, None), amp)

    def keep(tensor):
        if tensor.numel() == 512 * 512:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, common.autocast(device, amp):
        outputs = net(torch.ones(4, 512))
    alive = [value for value in kept.values() if value.dtype == torch.bfloat16]
    print(*types, outputs.dtype, sum(value.untyped_storage().nbytes() for value in alive) / 2**20)
    outputs.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in net.parameters())


def test_no_copy_of_the_weights_is_kept_between_forward_and_backward():
    """Autocast keeps one of each but the first layer, 7 x 0.5 MB; bf16-shards are gathered again."""
    assert (
        in_group(2, functools.partial(print_kept_copies, "bf16"))
        == ["torch.float32 torch.bfloat16 3.5\n"] * 2
    )
    shards = in_group(2, functools.partial(print_kept_copies, "bf16-shards"))
    assert shards == ["torch.bfloat16 torch.float32 0.0\n"] * 2


# ------------------------------------------------------------------------------------ what is cut


def six_layers():
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])


def shares_of(size):
    """Print this rank's share of the parameters' numbers after the network was sharded."""
    net = six_layers()
    total = sum(parameter.numel() for parameter in net.parameters())
    mesh = machinery.modes.mesh_of_ranks(torch.device("cpu"), size)
    machinery.modes.shard(net, None, mesh)
    own = sum(parameter.to_local().numel() for parameter in net.parameters())
    print(own / total)


def refuse_to_move(rank):
    """Let no network move to a device as a whole, and the check see shards."""
    build = machinery.usertask.Task.build_net
    script = importlib.import_module("train_fsdp")

    def build_net(task):
        net = build(task)
        net.to = None  # not callable
        return net

    def check(task, net, *rest):
        assert all(hasattr(parameter, "full_tensor") for parameter in net.parameters())
        machinery.check.check_run(task, net, *rest)

    machinery.usertask.Task.build_net, script.check_run = build_net, check


def test_network_and_average_are_cut_before_they_reach_a_device(tmp_path):
    """fully_shard moves them part by part; the check before the run comes later."""
    argv = (*NET, "--average", "ema", "--epochs", "1")
    result = train("fsdp", 2, *argv, folder=tmp_path, patch=refuse_to_move)
    assert result.code == 0, result.err
    found, wanted = result.checkpoint()["weights"], undisturbed("fsdp", 2, *argv).checkpoint()
    assert deviation(found, wanted["weights"]) == 0, "the check leaves no trace"


def test_each_rank_holds_its_share():
    for n, size, copies in ((4, None, 1), (4, 1, 4)):
        shares = [float(out) for out in in_group(n, functools.partial(shares_of, size))]
        assert max(shares) <= 1.04 * copies / n and sum(shares) == pytest.approx(copies)


def no_module(net):
    return []


def shard_marked():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].weight.no_decay = net[1].bias.no_decay = True
    mesh = machinery.modes.mesh_of_ranks(torch.device("cpu"), None)
    machinery.modes.shard(net, lambda net: [net[0]], mesh)
    marked = [name for name, value in net.named_parameters() if hasattr(value, "no_decay")]
    assert marked == ["0.weight", "1.bias"] and hasattr(net[0].weight, "full_tensor")


def shard_listed():
    mesh = machinery.modes.mesh_of_ranks(torch.device("cpu"), None)
    net, values = nn.LSTM(4, 4).double(), torch.randn(3, 2, 4, dtype=torch.float64)
    wanted = net(values)[0]  # it has a list of its weights, and keeps it up to date
    machinery.modes.shard(net, no_module, mesh)
    assert wanted.std() > 0 and torch.allclose(net(values)[0], wanted, rtol=1e-12)
    net = nn.LSTM(4, 4)
    net.own = {"first": [net.weight_hh_l0]}  # nothing would train them
    aliased = nn.BatchNorm1d(4)
    aliased.running_mean = aliased.bias.data  # it would no longer be the bias
    for refused, name in ((net, "weight_hh_l0"), (aliased, "bias")):
        with pytest.raises(common.UsageError, match=f"or buffer of the model holds {name}, which"):
            machinery.modes.shard(refused, no_module, mesh)


def shard_unlike():
    """What is drawn without a seed is another number on each rank."""
    mesh = machinery.modes.mesh_of_ranks(torch.device("cpu"), None)
    net = nn.BatchNorm1d(4)
    net.running_mean.fill_(torch.distributed.get_rank() + 1)
    machinery.modes.shard(net, no_module, mesh)
    assert net.running_mean.tolist() == [1] * 4, "of rank 0, as DDP does"
    net = nn.Linear(4, 4)
    net.bias.data.fill_(torch.distributed.get_rank() + 1)
    machinery.modes.shard(net, no_module, mesh)
    assert net.bias.full_tensor().tolist() == [1] * 4
    refusal = contextlib.nullcontext()
    if torch.distributed.get_rank() == 1:  # the launcher ends the others
        words = (
            r"weight \[4, 4\] torch.float32 on rank 0, but weight \[5, 4\] torch.float32 on rank 1"
        )
        refusal = pytest.raises(common.UsageError, match=words)
    with refusal:
        machinery.modes.build_once(lambda: nn.Linear(4, 4 + torch.distributed.get_rank()))


def test_ranks_shard_the_same_network():
    in_group(2, shard_unlike)


def test_list_of_parameters_is_refused_unless_it_is_kept_up_to_date():
    in_group(2, shard_listed)


def test_marks_on_parameters_stay_and_hooks_are_refused():
    """fully_shard makes new parameters."""
    in_group(2, shard_marked)


def test_parts_that_are_sharded_each_for_itself():
    blocks = [nn.Sequential(nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 30)) for _ in range(8)]
    tied, other = nn.Linear(30, 30), nn.Linear(30, 30)
    other.weight = tied.weight
    large, small, norm = nn.Linear(100, 60), nn.Linear(2, 2), nn.LayerNorm(300)
    few = [nn.Linear(20, 20), nn.Linear(20, 20)]
    net = nn.Sequential(nn.ModuleList(blocks), nn.ModuleList(few), tied, other, large, small, norm)
    assert machinery.modes.large_modules(net) == [*blocks, *few, large, small], (
        "no list, which has no forward; not what shares a weight; no norm"
    )
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    wrapper = nn.Module()
    wrapper.encoder = nn.TransformerEncoder(layer, 2)
    assert machinery.modes.large_modules(wrapper) == [*wrapper.encoder.layers], (
        "a layer reads the weights of its parts without calling them"
    )
    assert machinery.modes.large_modules(nn.Linear(3, 3)) == [], "the rest is the root's"
    wrapper.first = wrapper.encoder.layers[0]
    assert machinery.modes.large_modules(wrapper) == [wrapper.encoder.layers[1]], (
        "what has two names would be sharded twice"
    )


@pytest.mark.full
def test_task_chooses_what_is_sharded(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TASKS))
    (tmp_path / "own.py").write_text(
        "from pit_models import *\nfrom pit_models import build_datasets, build_model\n"
        "def shard_modules(net):\n    print('asked', flush=True)\n    return []\n"
    )
    argv = [str(tmp_path / "own.py") if part == BASE[1] else part for part in BASE]
    result = train("fsdp", 2, *argv, folder=tmp_path)
    assert result.code == 0 and result.out.count("asked") == 2, result.err
    assert max(compare(result, single_run(*BASE)).values()) <= 1e-10


def print_calls():
    """Print how many collective calls each phase of a step makes."""
    from torch.distributed.tensor.debug import CommDebugMode

    net = six_layers()
    mesh = machinery.modes.mesh_of_ranks(torch.device("cpu"), None)
    machinery.modes.shard(net, None, mesh)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    guard = common.StepGuard("off", torch.device("cpu"), net)

    def watch(function):
        with CommDebugMode() as watched:
            result = function()
        names = ("gather", "scatter", "all_reduce")
        counts = {str(op): n for op, n in watched.get_comm_counts().items()}
        print(*(sum(n for op, n in counts.items() if name in op) for name in names))
        return result

    for last in (False, True):  # as --reduce-every step does
        net.set_requires_gradient_sync(last)
        loss = watch(lambda: net(torch.ones(2, 64)).sum())
        watch(lambda: guard.scale(loss).backward())  # noqa: B023 (called at once)
    watch(lambda: guard.unscale_(optimizer))
    with torch.no_grad():
        watch(lambda: net(torch.ones(2, 64)))


@pytest.mark.full
def test_collective_calls_are_those_of_the_page():
    """docs/hang.md; between micro-batches no gradient is reduced, as docs/fsdp.md says."""
    first = ["6 0 0", "6 0 0"]  # forward and backward
    last = ["6 0 0", "6 6 0"]
    rest = ["0 0 1", "6 0 0"]  # the norm, an evaluation
    assert [out.splitlines() for out in in_group(2, print_calls)] == [[*first, *last, *rest]] * 2
