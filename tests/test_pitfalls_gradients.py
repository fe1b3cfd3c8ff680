"""The pitfalls of going from one device to many: gradients, the step, BatchNorm. Each test shows the wrong way failing, then this project's way."""

import argparse
import copy
import functools
import json

import pytest
import torch
import torch.distributed as dist
from harness import deviation, in_group, make_args, single_run, train, undisturbed
from patches import BASE, change_what_replicas_gather, on_rank_1, printed, scale_by_1024, stop_after
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import common
import machinery.cli
import machinery.launch
import machinery.modes
import machinery.process
import machinery.run
import train_ddp

# ----------------------------------------------------------------------------------------------- 02


def gradients(model):
    return {
        name.removeprefix("module."): parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def uneven_pieces():
    torch.manual_seed(0)
    net, inputs = nn.Linear(5, 1).double(), torch.randn(7, 5).double()
    (net(inputs) ** 2).mean().backward()
    piece, deviations = inputs.tensor_split(2)[dist.get_rank()], []
    for scale in (1 / len(piece), dist.get_world_size() / len(inputs)):
        model = DistributedDataParallel(copy.deepcopy(net))
        model.zero_grad()
        ((model(piece) ** 2).sum() * scale).backward()
        deviations.append(deviation(gradients(model), gradients(net)))
    print(json.dumps(deviations))


def test_pitfall_02_uneven_pieces_of_a_batch(tmp_path):
    """The gradient is wrong when ranks hold 4 and 3 samples: DDP averages over ranks, so each rank's mean counts alike."""
    for out in in_group(2, uneven_pieces):
        mean_of_means, scaled_sum = json.loads(out)
        assert mean_of_means > 1e-2
        assert scaled_sum < 1e-14

    argv = (*BASE, "--batch-size", "7", "--epochs", "1", "--lr", "0.02")
    reference, result = single_run(*argv), train("ddp", 2, *argv, folder=tmp_path)
    for rank in (0, 1):
        assert deviation(result.gradients[rank][0], reference.gradients[0][0]) <= 1e-12
    assert deviation(result.checkpoint()["model"], reference.checkpoint()["model"]) <= 1e-10


# ----------------------------------------------------------------------------------------------- 05


def skip_on_one_rank():
    net = DistributedDataParallel(nn.Linear(3, 1))
    updates = 0
    try:
        for step in range(3):
            loss = net(torch.ones(2, 3)).sum() * (
                float("nan") if step == 0 and dist.get_rank() == 1 else 1
            )
            if not loss.isfinite():
                continue  # no backward here, but the other rank is in its all-reduce
            loss.backward()
            updates += 1
    except RuntimeError:
        pass  # rank 0 waits for a third all-reduce, which never comes: its partner has finished
    print(updates)


def make_nan(losses):
    return losses * float("nan")


@pytest.mark.full
def test_pitfall_05_nan_on_one_rank(tmp_path):
    """NaN on one rank: a rank that skips its own step leaves the others in a collective, or pairs their batches wrongly from then on."""
    assert [int(out) for out in in_group(2, skip_on_one_rank)] == [
        2,
        2,
    ]  # of 3 steps; rank 0's first went with rank 1's second

    clean = undisturbed("ddp", 2, *BASE)
    result = train(
        "ddp", 2, *BASE, folder=tmp_path, patch=functools.partial(on_rank_1, make_nan, 2)
    )
    assert result.code == 0, (
        result.err
    )  # equal weights on all ranks are checked at the end of each epoch
    assert [line["skipped"] for line in result.train_lines()] == [0, 0, 1] + 15 * [0]
    assert [line["grad_norm"] is None for line in result.train_lines()] == [
        False,
        False,
        True,
    ] + 15 * [False]  # of rank 0: it got the NaN
    assert [line["global_step"] for line in result.train_lines()] == [
        line["global_step"] for line in clean.train_lines()
    ]
    model = result.checkpoint()["model"]
    assert all(tensor.isfinite().all() for tensor in model.values())
    assert deviation(model, clean.checkpoint()["model"]) > 1e-4  # one update is missing


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
    print(
        json.dumps([deviation(gradients(model), gradients(net)), model.module.weight.grad.tolist()])
    )


def forward_outside_no_sync():
    torch.manual_seed(0)
    model, inputs = DistributedDataParallel(nn.Linear(5, 1)), torch.randn(2, 5)
    loss = model(inputs[dist.get_rank()]).sum()
    with model.no_sync():
        loss.backward()  # too late: whether to synchronise was decided in the forward
    print(json.dumps(model.module.weight.grad.tolist()))


def count_all_reduces(rank):
    """Print how many times DDP sent its (one) bucket of gradients."""
    count = 0

    def hook(state, bucket):
        nonlocal count
        count += 1
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    compress, destroy = common.compress_gradients, dist.destroy_process_group
    common.compress_gradients = lambda model, *others: (
        compress(model, *others),
        model.register_comm_hook(None, hook),
    )
    dist.destroy_process_group = lambda: (print("reduced", count), destroy())


@pytest.mark.full
def test_pitfall_09_accumulation_synchronises_the_last_piece(tmp_path):
    """Ranks go on with different gradients after accumulation: the micro-batch that was synchronised was not the last one."""
    (wrong, first), (_, second) = map(json.loads, in_group(2, sync_on_the_first))
    assert wrong > 0.05 and first != second  # what came after the all-reduce stays on its rank
    first, second = in_group(2, forward_outside_no_sync)
    assert first == second  # sent although it should not be: slow

    reference = single_run(*BASE)
    result = train("ddp", 2, *BASE, "--accum-steps", "4", folder=tmp_path, patch=count_all_reduces)
    assert result.code == 0, result.err
    for rank in (0, 1):
        assert deviation(result.gradients[rank][0], reference.gradients[0][0]) <= 1e-12
    assert (
        printed(result.out, "reduced") == [1 + 18] * 2
    )  # settle_buckets, and one for each update, not one for each micro-batch


# ----------------------------------------------------------------------------------------------- 18


def print_evaluated_buffers(rank):
    evaluate = train_ddp.evaluate

    def watched(args, task, model, *others):
        print("buffers", json.dumps([buffer.tolist() for buffer in model.buffers()]))
        return evaluate(args, task, model, *others)

    train_ddp.evaluate = watched


def without_sync(rank):
    print_evaluated_buffers(rank)
    common.sync_buffers = lambda net: None


@pytest.mark.full
def test_pitfall_18_batchnorm_buffers_are_equal_in_evaluation(tmp_path):
    """Ranks evaluate a BatchNorm model differently: DDP makes buffers equal in the next training forward, and after the last comes none."""
    argv = (*BASE, "--model", "batchnorm", "--epochs", "1")
    wrong = train("ddp", 2, *argv, folder=tmp_path / "wrong", patch=without_sync)
    first, second = printed(wrong.out, "buffers")
    assert max(abs(a - b) for a, b in zip(first[0], second[0])) > 1e-2

    right = train("ddp", 2, *argv, folder=tmp_path / "right", patch=print_evaluated_buffers)
    first, second = printed(right.out, "buffers")
    assert first == second and len(first) == 3
    assert right.checkpoint()["model"]["between.running_mean"].tolist() == first[0]


# ----------------------------------------------------------------------------------------------- 20


def torch_sync_batchnorm():
    try:
        DistributedDataParallel(
            nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
        )
    except ValueError as error:
        print(error)


@pytest.mark.full
def test_pitfall_20_sync_bn_on_cpu_and_its_switch(tmp_path):
    """SyncBatchNorm refuses CPU tensors, so that nobody tests it; and `type=bool` makes `--sync-bn False` turn it on."""
    assert all("only work with GPU modules" in out for out in in_group(2, torch_sync_batchnorm))
    parser = argparse.ArgumentParser()
    parser.add_argument("--sync-bn", type=bool)
    assert parser.parse_args(["--sync-bn", "False"]).sync_bn is True
    assert make_args("ddp", "--sync-bn", "--no-sync-bn").sync_bn is False
    assert make_args("ddp", "--no-sync-bn", "--sync-bn").sync_bn is True
    assert make_args("ddp").sync_bn is False

    argv = (*BASE, "--model", "batchnorm")
    reference = single_run(*argv)
    local = undisturbed("ddp", 2, *argv, "--epochs", "1")
    assert deviation(local.gradients[0][0], reference.gradients[0][0]) > 1e-3
    result = train("ddp", 4, *argv, "--sync-bn", folder=tmp_path)
    assert result.code == 0, result.err
    assert deviation(result.gradients[0][0], reference.gradients[0][0]) <= 1e-11
    floating = [
        {k: v for k, v in run.checkpoint()["model"].items() if v.is_floating_point()}
        for run in (result, reference)
    ]
    assert "between.running_var" in floating[0] and deviation(*floating) <= 1e-9


# ----------------------------------------------------------------------------------------------- 21


def forget_unscale_on_purpose(rank):
    """Where the loop unscales, before the clipping, this does nothing. The step unscales, as torch's own does."""
    scale_by_1024(rank)
    unscale, step = common.StepGuard.unscale_, common.StepGuard.step

    def unscale_and_step(self, optimizer):
        unscale(self, optimizer)
        step(self, optimizer)

    common.StepGuard.unscale_ = lambda self, optimizer, total: None
    common.StepGuard.step = unscale_and_step


@pytest.mark.full
def test_pitfall_21_clipping_sees_the_true_gradient(tmp_path):
    """Clipping makes training crawl under a loss scale: it was applied to scaled gradients, which `step` then divides by the scale."""
    argv = (*BASE, "--clip-grad-norm", "0.5")
    reference = single_run(*argv)
    assert all(line["grad_norm"] > 0.5 for line in reference.train_lines()[:3])
    assert torch.cat(
        [g.flatten() for g in reference.gradients[0][0].values()]
    ).norm().item() == pytest.approx(0.5, rel=1e-5)

    wrong = train("single", 1, *argv, folder=tmp_path / "wrong", patch=forget_unscale_on_purpose)
    assert deviation(wrong.gradients[0][0], reference.gradients[0][0]) > 0.9  # 0.5 / 1024 is left

    for mode, n in (("single", 1), ("dp", 2), ("ddp", 2)):
        result = train(mode, n, *argv, folder=tmp_path / mode, patch=scale_by_1024)
        assert result.code == 0, result.err
        assert result.checkpoint()["scaler"]["scale"] == 1024
        assert deviation(result.gradients[0][0], reference.gradients[0][0]) <= 1e-12
        assert deviation(result.checkpoint()["model"], reference.checkpoint()["model"]) <= 1e-10


# ----------------------------------------------------------------------------------------------- 22


def schedule_with_one_skip(count_every_step):
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 4)
    scaler, trace = torch.amp.GradScaler("cpu"), []
    for step in range(4):
        trace.append(optimizer.param_groups[0]["lr"])
        scale = scaler.get_scale()
        scaler.scale(net(torch.ones(1)).sum() * (float("inf") if step == 1 else 1)).backward()
        scaler.step(optimizer)  # returns None, stepped or not
        scaler.update()
        optimizer.zero_grad()
        if count_every_step or scaler.get_scale() == scale:
            scheduler.step()
    return trace


def make_infinite(losses):
    return losses * float("inf")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_pitfall_22_skipped_steps_are_counted(tmp_path):
    """Schedule and optimizer drift apart: GradScaler.step hides that it skipped, and the schedule stands still or nobody knows."""
    assert schedule_with_one_skip(False) == [1, 0.75, 0.75, 0.5]  # one step late from then on
    assert schedule_with_one_skip(True) == [1, 0.75, 0.5, 0.25]

    for precision in (("--dtype", "float64"), ("--dtype", "float32", "--amp", "fp16")):
        argv = (*BASE, *precision)
        patch = functools.partial(on_rank_1, make_infinite, 4)
        result = train("ddp", 2, *argv, folder=tmp_path / precision[-1], patch=patch)
        assert result.code == 0, (
            result.err
        )  # equal weights on all ranks are checked at the end of each epoch
        assert [line["lr"] for line in result.train_lines()] == [
            line["lr"] for line in single_run(*BASE).train_lines()
        ]
        assert [line["skipped"] for line in result.train_lines()][4] == 1
        if (
            "fp16" not in precision
        ):  # there the scaler looks for its scale first, skipping some steps
            assert sum(line["skipped"] for line in result.train_lines()) == 1


# ----------------------------------------------------------------------------------------------- 27


def forward_past_ddp():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.module(torch.full((2, 3), 1.0 + dist.get_rank())).sum().backward()
    optimizer.step()  # no error here
    print(json.dumps(model.module.weight.tolist()))
    try:
        common.sync_buffers(model.module)
    except RuntimeError as error:
        print(error)


def bypass_ddp(rank):
    DistributedDataParallel.forward = lambda self, *inputs: self.module(*inputs)


def test_pitfall_27_forward_past_the_wrapper_is_noticed(tmp_path):
    """Ranks drift apart without an error: a forward that goes to the bare module leaves DDP's all-reduce out."""
    (first, caught), (second, _) = (out.splitlines() for out in in_group(2, forward_past_ddp))
    assert first != second
    assert "parameters differ between ranks: weight" in caught

    undisturbed("ddp", 2, *BASE)
    result = train("ddp", 2, *BASE, folder=tmp_path, patch=bypass_ddp)
    assert result.code == 1 and "parameters differ between ranks" in result.err
    assert not (
        result.folder / "last.pt"
    ).exists()  # at the end of the first epoch, before it is saved


# ----------------------------------------------------------------------------------------------- 28


@pytest.mark.full
def test_pitfall_28_unused_parameters(tmp_path):
    """ "Expected to have finished reduction": DDP waits for the gradient of a parameter that the forward did not use."""
    argv = (*BASE, "--model", "unused")
    reference = single_run(*argv)
    assert (
        make_args("ddp").find_unused_parameters is False
    )  # it costs a walk over the graph in every step
    without = train("ddp", 2, *argv, folder=tmp_path / "without")
    assert without.code == 1 and "Expected to have finished reduction" in without.err

    result = train("ddp", 2, *argv, "--find-unused-parameters", folder=tmp_path / "with")
    assert result.code == 0, result.err
    names = reference.checkpoint()["model"].keys()
    assert "unused.weight" in names
    assert deviation(result.checkpoint()["model"], reference.checkpoint()["model"]) <= 1e-10
    assert "--find-unused-parameters" in without.err  # the error names this project's option


# ----------------------------------------------------------------------------------------------- 29


def print_gathered(rank):
    def shown(outputs):
        print("gathered", json.dumps([list(output.shape) for output in outputs]))
        return outputs

    change_what_replicas_gather(shown)


def test_pitfall_29_data_parallel_gathers_losses(tmp_path):
    """The first GPU runs out of memory and the mean is off: outputs are gathered there, and means of uneven replicas averaged."""
    losses = torch.arange(10.0) ** 2
    means = torch.stack([piece.mean() for piece in losses.chunk(4)])  # pieces of 3, 3, 3 and 1
    assert means.mean() > 1.2 * losses.mean()

    argv = (*BASE, "--batch-size", "10", "--epochs", "1", "--lr", "0.02")
    reference, result = (
        single_run(*argv),
        train("dp", 4, *argv, folder=tmp_path, patch=print_gathered),
    )
    assert result.code == 0, result.err
    assert printed(result.out, "gathered")[:20] == 20 * [
        [[3], [3], [3], [1]]
    ]  # one number a sample, and none of the outputs
    assert deviation(result.gradients[0][0], reference.gradients[0][0]) <= 1e-12
    assert deviation(result.checkpoint()["model"], reference.checkpoint()["model"]) <= 1e-10


# ----------------------------------------------------------------------------------------------- 30


def drop_with_one_seed():
    torch.manual_seed(0)
    print(nn.functional.dropout(torch.ones(30)).tolist())


def print_masks(rank):
    """Print `mask [rank, dropped units]` for every forward of a dropout layer in training."""
    forward = nn.Dropout.forward

    def watched(self, value):
        output = forward(self, value)
        if self.training:
            print("mask", json.dumps([rank, (output == 0).int().flatten().tolist()]))
        return output

    nn.Dropout.forward = watched


def print_masks_and_stop(rank):
    print_masks(rank)
    stop_after(3, rank)


@pytest.mark.full
def test_pitfall_30_dropout_differs_between_ranks(tmp_path):
    """All ranks drop the same units, which makes the noise of a global batch larger: one seed was given to every rank."""
    first, second = in_group(2, drop_with_one_seed)
    assert first == second

    argv = (*BASE, "--model", "dropout", "--epochs", "1")
    straight = train("ddp", 2, *argv, folder=tmp_path / "straight", patch=print_masks)
    masks = [tuple(mask) for _, mask in printed(straight.out, "mask")]
    assert len(masks) == len(set(masks)) == 12  # 6 steps of 2 ranks

    stopped = train("ddp", 2, *argv, folder=tmp_path, patch=print_masks_and_stop)
    assert stopped.code == 143 and stopped.checkpoint()["step"] == 4
    resumed = train("ddp", 2, *argv, "--resume", "auto", folder=tmp_path, patch=print_masks)
    for rank in (0, 1):
        before, again = (
            [mask for r, mask in printed(run.out, "mask") if r == rank]
            for run in (straight, resumed)
        )
        assert again[-2:] == before[-2:]  # steps 5 and 6
    assert all(
        tensor.equal(straight.checkpoint()["model"][name])
        for name, tensor in resumed.checkpoint()["model"].items()
    )


# ----------------------------------------------------------------------------------------------- 33


def wrap_on_gpus_only():
    torch.manual_seed(0)
    for wrap in (False, True):
        net = nn.Linear(3, 1)
        model = DistributedDataParallel(net) if wrap else net
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        model(torch.full((2, 3), 1.0 + dist.get_rank())).sum().backward()
        optimizer.step()
        print(json.dumps(net.weight.tolist()))


def print_weights(rank):
    """Print the sum of the weights that each rank leaves training with."""
    end_epoch = machinery.run.Run.end_epoch

    def watched(self, metrics):
        print(
            "weights",
            json.dumps([[p.sum().item(), p.norm().item()] for p in self.state.net.parameters()]),
        )
        end_epoch(self, metrics)

    machinery.run.Run.end_epoch = watched


@pytest.mark.full
def test_pitfall_33_cpu_ranks_train_one_model(tmp_path):
    """A distributed run on the CPU trains as many models as it has ranks: the wrapper was left out where there is no GPU."""
    first, second = (out.splitlines() for out in in_group(2, wrap_on_gpus_only))
    assert first[0] != second[0]
    assert first[1] == second[1]

    result = train("ddp", 2, *BASE, "--epochs", "1", folder=tmp_path, patch=print_weights)
    first, second = printed(result.out, "weights")
    assert first == second
    assert deviation(result.gradients[0][0], result.gradients[1][0]) == 0.0
    start = train(
        "single",
        1,
        *BASE,
        *"--epochs 1 --lr 0".split(),
        folder=tmp_path / "start",
        patch=print_weights,
    )
    assert printed(start.out, "weights")[0] != first  # they trained


# ----------------------------------------------------------------------------------------------- 35


def reduce_a_loss():
    weight = torch.tensor(
        1.0 + 3 * dist.get_rank(), dtype=torch.float64, requires_grad=True
    )  # 1 and 4
    loss = weight.sqrt()  # backward needs the result: d/dw = 1 / (2 sqrt(w))
    logged = common.reduce_value(loss)
    total = common.reduce_value(loss, average=False)
    loss.backward()
    right = [logged.item(), total.item(), loss.item(), weight.grad.item(), logged.requires_grad]

    loss = torch.sqrt(weight)
    dist.all_reduce(loss.data)  # in place, hidden from autograd
    weight.grad = None
    loss.backward()
    print(json.dumps([right, weight.grad.item()]))


def test_pitfall_35_reduced_loss_is_a_new_tensor():
    """Backward fails or is wrong, or the log shows a sum: the loss itself was all-reduced, in place."""
    for rank, out in enumerate(in_group(2, reduce_a_loss)):
        right, wrong_gradient = json.loads(out)
        gradient = 1 / (2 * (1 + rank))
        assert wrong_gradient == pytest.approx(1 / 6) and abs(wrong_gradient - gradient) > 0.05
        assert right == [1.5, 3.0, 1.0 + rank, pytest.approx(gradient, rel=1e-12), False]
    value = torch.tensor([2.0], requires_grad=True)
    alone = common.reduce_value(value)  # without a group
    assert alone.equal(value) and alone is not value and alone.data_ptr() != value.data_ptr()
