"""The pitfalls of going from one device to many: gradients, losses and the step. Each test shows the wrong way failing, then this project's way."""

import copy
import json

import pytest
import torch
import torch.distributed as dist
from harness import check, deviation, in_group, single_run, train
from patches import BASE, printed, scale_as_fp16, wrap_in_task
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import common

TASK = "from task import *\n"


def gradients(model):
    return {
        name.removeprefix("module."): parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


# ----------------------------------------------------------------------------------------------- 02


def uneven_pieces():
    torch.manual_seed(0)
    net, inputs = nn.Linear(5, 1).double(), torch.randn(7, 5).double()
    (net(inputs) ** 2).mean().backward()
    model = DistributedDataParallel(copy.deepcopy(net))
    piece = inputs.tensor_split(2)[dist.get_rank()]
    model.zero_grad()
    (model(piece) ** 2).mean().backward()
    print(deviation(gradients(model), gradients(net)))


def test_pitfall_02_uneven_pieces_of_a_batch(tmp_path):
    """The gradient is wrong when ranks hold 4 and 3 samples: DDP averages over ranks, so each rank's mean counts alike."""
    assert all(float(out) > 1e-2 for out in in_group(2, uneven_pieces))

    argv = (*BASE, "--batch-size", "7", "--epochs", "1", "--lr", "0.02")
    reference, result = single_run(*argv), train("ddp", 2, *argv, folder=tmp_path)
    for rank in (0, 1):
        assert deviation(result.gradients[rank][0], reference.gradients[0][0]) <= 1e-12


# ----------------------------------------------------------------------------------------------- 05


def skip_on_one_rank():
    net = DistributedDataParallel(nn.Linear(3, 1))
    updates = 0
    try:
        for step in range(3):
            loss = net(torch.ones(2, 3)).sum()
            if step == 0 and dist.get_rank() == 1:
                continue  # no backward here, but the other rank is in its all-reduce
            loss.backward()
            updates += 1
    except RuntimeError:
        pass  # rank 0 waits for a third all-reduce, which never comes: its partner has finished
    print(updates)


def test_pitfall_05_nan_on_one_rank():
    """NaN on one rank: a rank that skips its own step leaves the others in a collective, or pairs their batches wrongly from then on."""
    # Of 3 steps: rank 0's first went with rank 1's second.
    assert [int(out) for out in in_group(2, skip_on_one_rank)] == [2, 2]


# ----------------------------------------------------------------------------------------------- 09


def sync_on_the_first():
    torch.manual_seed(0)
    net, inputs = nn.Linear(5, 1).double(), torch.randn(12, 5).double()
    (net(inputs) ** 2).mean().backward()
    model = DistributedDataParallel(copy.deepcopy(net))
    model.zero_grad()
    first, *others = inputs.tensor_split(2)[dist.get_rank()].split(2)
    ((model(first) ** 2).sum() / 6).backward()
    with model.no_sync():
        for piece in others:
            ((model(piece) ** 2).sum() / 6).backward()
    print(deviation(gradients(model), gradients(net)))


def count_all_reduces(rank):
    """Print how many times DDP sent its (one) bucket of gradients."""
    count = 0

    def hook(state, bucket):
        nonlocal count
        count += 1
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    compress, destroy = common.compress_gradients, dist.destroy_process_group

    def compress_and_count(model, *others):
        compress(model, *others)
        model.register_comm_hook(None, hook)

    def print_and_destroy():
        print("reduced", count)
        destroy()

    common.compress_gradients = compress_and_count
    dist.destroy_process_group = print_and_destroy


@pytest.mark.full
def test_pitfall_09_accumulation_synchronises_the_last_piece(tmp_path):
    """Ranks go on with different gradients after accumulation: the micro-batch that was synchronised was not the last one."""
    assert all(float(out) > 0.05 for out in in_group(2, sync_on_the_first))

    reference = single_run(*BASE)
    result = train("ddp", 2, *BASE, "--accum-steps", "4", folder=tmp_path, patch=count_all_reduces)
    assert result.code == 0, result.err
    for rank in (0, 1):
        assert deviation(result.gradients[rank][0], reference.gradients[0][0]) <= 1e-12
    # One of settle_buckets, and one for each update, not one for each micro-batch.
    assert printed(result.out, "reduced") == [1 + 18] * 2


# ----------------------------------------------------------------------------------------------- 21


def clip_scaled_gradients():
    """Return the norm of the gradient with which an optimizer steps."""
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(weight.sum()).backward()
    nn.utils.clip_grad_norm_([weight], 0.5)
    scaler.step(optimizer)  # it unscales first
    return weight.grad.norm().item()


@pytest.mark.full
def test_pitfall_21_clipping_sees_the_true_gradient(tmp_path):
    """Clipping makes training crawl under a loss scale: it was applied to scaled gradients, which `step` then divides by the scale."""
    assert clip_scaled_gradients() == pytest.approx(0.5 / 1024, rel=1e-5)

    argv = (*BASE, "--clip-grad-norm", "0.5")
    reference = single_run(*argv)
    assert all(line["grad_norm"] > 0.5 for line in reference.train_lines()[:3])
    for mode, n in (("single", 1), ("dp", 2), ("ddp", 2)):
        result = train(mode, n, *argv, folder=tmp_path / mode, patch=scale_as_fp16)
        assert result.code == 0, result.err
        assert result.checkpoint()["scaler"]["scale"] == 2**16
        assert deviation(result.gradients[0][0], reference.gradients[0][0]) <= 1e-12


# ----------------------------------------------------------------------------------------------- 22


def rates_with_one_skip():
    """Return the learning rates of a loop whose schedule stands still when a step is skipped."""
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 4)
    scaler, rates = torch.amp.GradScaler("cpu"), []
    for step in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        scale = scaler.get_scale()
        scaler.scale(net(torch.ones(1)).sum() * (float("inf") if step == 1 else 1)).backward()
        scaler.step(optimizer)  # returns None, stepped or not
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() == scale:
            scheduler.step()
    return rates


def test_pitfall_22_skipped_steps_are_counted():
    """Schedule and optimizer drift apart: GradScaler.step hides that it skipped, and the schedule stands still or nobody knows."""
    assert rates_with_one_skip() == [1, 0.75, 0.75, 0.5], "one step late from then on"


# ----------------------------------------------------------------------------------------------- 28


@pytest.mark.full
def test_pitfall_28_unused_parameters(tmp_path):
    """ "Expected to have finished reduction": DDP waits for the gradient of a parameter that the forward did not use."""
    argv = (*BASE, "--model", "unused")
    without = train("ddp", 2, *argv, folder=tmp_path / "without")
    assert without.code == 1 and "Expected to have finished reduction" in without.err
    assert "--find-unused-parameters" in without.err, "the error names this project's option"

    reference = single_run(*argv).checkpoint()["model"]
    result = train("ddp", 2, *argv, "--find-unused-parameters", folder=tmp_path / "with")
    assert result.code == 0, result.err
    assert "unused.weight" in reference
    assert deviation(result.checkpoint()["model"], reference) <= 1e-10


# ----------------------------------------------------------------------------------------------- 29


def print_replicas(rank):
    """Print of how many samples the task's loss is asked for, each time in training."""

    def per_sample_loss(original, outputs, targets):
        if outputs.requires_grad:
            print("replica", len(targets))
        return original(outputs, targets)

    wrap_in_task("per_sample_loss", per_sample_loss)


def test_pitfall_29_data_parallel_gathers_losses(tmp_path):
    """The first GPU runs out of memory and the mean is off: outputs are gathered there, and means of uneven replicas averaged."""
    losses = torch.arange(10.0) ** 2
    means = torch.stack([piece.mean() for piece in losses.chunk(4)])  # pieces of 3, 3, 3 and 1
    assert means.mean() > 1.2 * losses.mean()

    argv = (*BASE, "--batch-size", "10", "--epochs", "1", "--lr", "0.02")
    reference = single_run(*argv)
    result = train("dp", 4, *argv, folder=tmp_path, patch=print_replicas)
    assert result.code == 0, result.err
    # Each replica computes its losses where its outputs are.
    assert sorted(printed(result.out, "replica")) == 20 * [1] + 60 * [3]
    assert deviation(result.gradients[0][0], reference.gradients[0][0]) <= 1e-12


# ----------------------------------------------------------------------------------------------- 52


def test_pitfall_52_loss_that_broadcasts(tmp_path):
    """The loss is wrong without an error: [n, 1] minus [n] is [n, n]."""
    outputs, targets = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 2.0, 4.0])
    assert (outputs - targets).abs().mean() > 1

    loss = "def per_sample_loss(outputs, targets): return (outputs[:, :1] - targets).abs().mean(1)"
    (tmp_path / "broadcasts.py").write_text(TASK + loss)
    with pytest.raises(common.UsageError, match="in half of it: other samples must not change it"):
        check("ddp", 2, "--task", str(tmp_path / "broadcasts.py"))


# ----------------------------------------------------------------------------------------------- 53


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.words = nn.Embedding(4, 3, sparse=True)
        self.last = nn.Linear(3, 3)

    def forward(self, inputs, numbers):
        return self.last(torch.tanh(self.first(inputs)) + self.words(numbers)).square().sum()


def backward_of_words():
    torch.manual_seed(0)
    net, found = Words(), []
    inputs, numbers = torch.ones(2, 3), torch.tensor([0, 1])  # the same on both ranks
    for model in (net, DistributedDataParallel(net)):
        net.zero_grad()
        model(inputs, numbers).backward()
        found.append([p.grad.to_dense().norm().item() for p in net.parameters()])
    print(json.dumps(found))


def test_pitfall_53_sparse_gradients(tmp_path):
    """DDP divides the values of a sparse gradient in place, and with them what shares their memory."""
    for out in in_group(2, backward_of_words):
        alone, ranks = json.loads(out)
        ratios = [theirs / one for theirs, one in zip(ranks, alone)]  # on two equal ranks
        assert ratios == pytest.approx([0.5, 0.5, 1, 1, 1], rel=1e-5), "the layers before it"

    model = "build_model = lambda args: nn.Sequential(nn.Embedding(9, 9, sparse=True))\n"
    (tmp_path / "sparse.py").write_text(TASK + model)
    with pytest.raises(
        common.UsageError,
        match="0 has sparse gradients, which ranks cannot average; leave out sparse",
    ):
        check("ddp", 2, "--task", str(tmp_path / "sparse.py"))


# ----------------------------------------------------------------------------------------------- 56


def clamp_in_a_hook():
    torch.manual_seed(0)
    net, inputs = nn.Linear(5, 1).double(), torch.randn(8, 5).double()
    model = DistributedDataParallel(copy.deepcopy(net))
    for bare in (net, model.module):
        bare.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    (net(inputs) ** 2).mean().backward()
    (model(inputs.tensor_split(2)[dist.get_rank()]) ** 2).mean().backward()
    print(deviation(gradients(model), gradients(net)))


def test_pitfall_56_hook_of_a_parameter(tmp_path):
    """A parameter's hook clips, or looks for NaN, in the gradient of one rank: DDP averages afterwards."""
    assert all(float(out) > 1e-2 for out in in_group(2, clamp_in_a_hook))

    model = "build = build_model\ndef build_model(args):\n    net = build(args)\n"
    model += "    net.head.weight.register_hook(lambda g: g.clamp(-1, 1))\n    return net\n"
    (tmp_path / "hooked.py").write_text(TASK + model)
    with pytest.raises(common.UsageError, match=r"head.weight has a hook.*register_step_pre_hook"):
        check("ddp", 2, "--task", str(tmp_path / "hooked.py"))


# ----------------------------------------------------------------------------------------------- 58


class Precision(nn.Module):
    def __init__(self):
        super().__init__()
        self.logarithm = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, outputs):
        return (outputs.square() * self.logarithm.exp() - self.logarithm).mean()


def train_a_loss_beside_the_model():
    for inside in (False, True):
        torch.manual_seed(0)
        net, loss, inputs = nn.Linear(5, 1).double(), Precision(), torch.randn(8, 5).double()
        model = DistributedDataParallel(nn.Sequential(net, loss) if inside else net)
        outputs = model(inputs.tensor_split(2)[dist.get_rank()])
        (outputs if inside else loss(outputs)).backward()
        print(loss.logarithm.grad.item())


def test_pitfall_58_loss_beside_the_model():
    """Each rank trains a loss of its own: DDP averages the gradients of what it wraps, and the loss has parameters too."""
    first, second = (
        [float(line) for line in out.split()] for out in in_group(2, train_a_loss_beside_the_model)
    )
    assert abs(first[0] - second[0]) > 1e-3
    assert first[1] == second[1] == pytest.approx((first[0] + second[0]) / 2, rel=1e-12)


# ----------------------------------------------------------------------------------------------- 59


class ActNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(3))

    def forward(self, inputs):
        if not self.scale.any():
            self.scale.data.copy_(1 / inputs.std(0))
        return inputs * self.scale


def begin_with_own_batch():
    torch.manual_seed(dist.get_rank())
    net = ActNorm()
    DistributedDataParallel(net)(torch.randn(4, 3)).sum().backward()
    print(net.scale[0].item())
    with pytest.raises(RuntimeError, match="parameters differ between ranks: scale"):
        common.sync_buffers(net)


def test_pitfall_59_first_forward_initialises():
    """Ranks train different networks: the first forward sets weights by its batch, after DDP has made them equal."""
    first, second = map(float, in_group(2, begin_with_own_batch))
    assert abs(first - second) > 1e-3


# ----------------------------------------------------------------------------------------------- 61


class Twice(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.layer, self.reentrant = nn.Linear(3, 3).double(), reentrant

    def forward(self, value):
        for _ in range(2):
            value = checkpoint(self.layer, value, use_reentrant=self.reentrant)
        return value.square().sum()


def checkpoint_a_layer_twice():
    inputs = torch.full((2, 3), 1.0 + dist.get_rank()).double().requires_grad_()
    for reentrant in (True, False):
        model = DistributedDataParallel(Twice(reentrant))
        model(inputs).backward()
        own = gradients(model)
        print(deviation(own, {name: common.reduce_value(value) for name, value in own.items()}))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3).double(), Twice(True)))
    with pytest.raises(RuntimeError, match="mark a variable ready only once"):
        model(inputs).backward()


def test_pitfall_61_reentrant_checkpoints():
    """ "Expected to mark a variable ready only once", or no average at all: a re-entrant checkpoint has a backward of its own."""
    for out in in_group(2, checkpoint_a_layer_twice):
        wrong, right = map(float, out.split())
        assert wrong > 0.1 and right <= 1e-12
