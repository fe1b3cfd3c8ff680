"""What only tools/mutants.py showed to be untested: each of these tests is the one that notices some small fault."""

import copy
import functools
import itertools
import json
import os
import random
import re
import shutil
import signal
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import (
    ROOT,
    TASKS,
    average_of,
    deviation,
    factor_of,
    guard_of,
    keyed,
    make_args,
    optimizer_of,
    single_run,
    train,
    undisturbed,
)
from pitfalls import BASE, after_step, in_process, printed, stop_after, without_speed, wrap_in_task
from runs import make_run
from test_pitfalls_15_28 import scale_by_1024
from torch import nn

import common
import machinery.files
import machinery.processes
import machinery.run
import machinery.tasks
import task
import train_spawn

CPU = torch.device("cpu")
MODES = [("single", 1), ("dp", 2), ("ddp", 2), ("spawn", 2)]


def change_training_loss(change, rank):
    """Let `change(losses, k)` replace the losses of the k-th forward in training, from 0, of this process."""
    calls = itertools.count()

    def per_sample_loss(original, outputs, targets):
        losses = original(outputs, targets)
        if not losses.requires_grad:
            return losses
        k = next(calls) - dist.is_initialized()  # the first one there is that of settle_buckets
        return change(losses, k) if k >= 0 else losses

    wrap_in_task("per_sample_loss", per_sample_loss)


def nan_in_third(losses, k):
    return losses * float("nan") if k == 2 else losses


def always_nan(losses, k):
    return losses * float("nan")


def nan_from_ninth(losses, k):
    return losses * float("nan") if k >= 8 else losses


def nan_every_second(losses, k):
    return losses * float("nan") if k % 2 else losses


def number_of_the_call(losses, k):
    return losses * 0 + k


# ------------------------------------------------------------------------------------------------------------------- the loops


@pytest.mark.parametrize(("mode", "n"), MODES)
def test_nan_is_skipped_in_every_mode(mode, n, tmp_path):
    result = train(
        mode,
        n,
        *BASE,
        "--epochs",
        "2",
        folder=tmp_path,
        patch=functools.partial(change_training_loss, nan_in_third),
    )
    assert result.code == 0, result.err
    assert sum(line["skipped"] for line in result.train_lines()) == 1
    assert result.checkpoint()["global_step"] == 12
    assert all(tensor.isfinite().all() for tensor in result.checkpoint()["model"].values())


def test_ten_skipped_steps_in_a_row_end_the_run(tmp_path):
    for mode, n in (("single", 1), ("ddp", 2)):
        result = train(
            mode,
            n,
            *BASE,
            folder=tmp_path / mode,
            patch=functools.partial(change_training_loss, always_nan),
        )
        assert result.code == 3 and "diverged: 10 steps in a row" in result.err
        assert len(result.train_lines()) == 9  # the tenth ended it
    result = train(
        "single",
        1,
        *BASE,
        folder=tmp_path / "late",
        patch=functools.partial(change_training_loss, nan_from_ninth),
    )
    assert result.code == 3 and "seen at step 18" in result.err, "the last ten of 18 steps"
    patch = functools.partial(change_training_loss, nan_every_second)
    result = train(
        "single", 1, *BASE, "--epochs", "4", folder=tmp_path / "every second", patch=patch
    )
    assert result.code == 0, result.err  # 12 of them, but not in a row
    assert sum(line["skipped"] for line in result.train_lines()) == 12


def print_masks(rank):
    forward = nn.Dropout.forward

    def watched(self, value):
        output = forward(self, value)
        if self.training:
            print("mask", json.dumps((output == 0).int().flatten().tolist()))
        return output

    nn.Dropout.forward = watched


@pytest.mark.parametrize(("mode", "n"), MODES)
def test_dropout_never_repeats(mode, n, tmp_path):
    """Every rank or replica drops other units in every micro-batch of every step of every epoch, and none in evaluation."""
    argv = (*BASE, "--model", "dropout", "--epochs", "2", "--accum-steps", "2")
    result = train(mode, n, *argv, folder=tmp_path, patch=print_masks)
    assert result.code == 0, result.err
    masks = printed(result.out, "mask")
    masks = [
        mask for mask in masks if len(mask) > max(map(len, masks)) / 2
    ]  # not the two samples of settle_buckets
    masks = [
        tuple(mask[:200]) for mask in masks
    ]  # pieces are not equally long, and their masks begin alike
    assert len(masks) == 2 * 6 * 2 * n
    assert len(set(masks)) == len(masks)


@pytest.mark.parametrize(("mode", "n"), MODES)
def test_loss_scale_leaves_no_trace(mode, n, tmp_path):
    argv = (*BASE, "--epochs", "1", "--clip-grad-norm", "0.5")
    reference, result = (
        single_run(*argv),
        train(mode, n, *argv, folder=tmp_path, patch=scale_by_1024),
    )
    assert result.code == 0, result.err
    assert (
        result.checkpoint()["scaler"]["scale"] == 1024
        and reference.train_lines()[0]["grad_norm"] > 0.5
    )
    assert deviation(result.gradients[0][0], reference.gradients[0][0]) <= 1e-12
    assert deviation(result.checkpoint()["model"], reference.checkpoint()["model"]) <= 1e-10


@pytest.mark.parametrize(("mode", "n"), [("ddp", 2), ("spawn", 2)])
def test_sync_bn_with_accumulation_equals_one_device(mode, n, tmp_path):
    """Only if the ranks cut the same micro-batches as one device do they have its statistics."""
    argv = (*BASE, "--model", "batchnorm", "--epochs", "1", "--accum-steps", "2")
    reference, result = single_run(*argv), train(mode, n, *argv, "--sync-bn", folder=tmp_path)
    assert result.code == 0, result.err
    assert deviation(result.gradients[0][0], reference.gradients[0][0]) <= 1e-11
    models = [
        {k: v for k, v in run.checkpoint()["model"].items() if v.is_floating_point()}
        for run in (result, reference)
    ]
    assert "between.running_var" in models[0] and deviation(*models) <= 1e-9


def print_evaluated_buffers(mode, rank):
    script = __import__(f"train_{mode}")
    evaluate = script.evaluate

    def watched(args, task, model, *others):
        print("buffers", json.dumps([buffer.tolist() for buffer in model.buffers()]))
        return evaluate(args, task, model, *others)

    script.evaluate = watched


@pytest.mark.parametrize("mode", ["ddp", "spawn"])
def test_batchnorm_buffers_are_evaluated_alike(mode, tmp_path):
    argv = (*BASE, "--model", "batchnorm", "--epochs", "1")
    first, second = printed(
        train(
            mode, 2, *argv, folder=tmp_path, patch=functools.partial(print_evaluated_buffers, mode)
        ).out,
        "buffers",
    )
    assert first == second and len(first) == 3


@pytest.mark.parametrize("mode", ["ddp", "spawn"])
def test_buffers_of_an_average_are_evaluated_alike_by_eval_only(mode, tmp_path):
    """A checkpoint that a signal within an evaluation left: its average has no statistics yet."""
    argv = (*BASE, "--model", "batchnorm", "--epochs", "1", "--average", "swa")
    result = train(mode, 2, *argv, folder=tmp_path / "trained")
    saved = {**result.checkpoint(), "epoch": 0, "step": result.checkpoint()["global_step"]}
    torch.save(saved, tmp_path / "within.pt")
    patch = functools.partial(print_evaluated_buffers, mode)
    again = train(
        mode,
        2,
        *argv,
        "--eval-only",
        "--resume",
        tmp_path / "within.pt",
        folder=tmp_path / "again",
        patch=patch,
    )
    assert again.code == 0, again.err
    first, second = printed(again.out, "buffers")
    trained = [
        value.tolist()
        for name, value in result.checkpoint()["average"].items()
        if re.search("running|tracked", name)
    ]
    assert first == second == trained


def test_data_parallel_is_ddp_with_batchnorm(tmp_path):
    """Replica 0 keeps the running statistics, and the others do not touch them, as rank 0 does."""
    argv = (
        *BASE,
        "--model",
        "batchnorm",
        "--batch-size",
        "24",
        "--epochs",
        "1",
    )  # an even share: both cut it alike
    result, reference = train("dp", 2, *argv, folder=tmp_path), undisturbed("ddp", 2, *argv)
    assert deviation(result.checkpoint()["model"], reference.checkpoint()["model"]) <= 1e-10
    assert result.checkpoint()["model"]["between.running_mean"].abs().max() > 1e-3


def print_patience(rank):
    init = dist.init_process_group

    def watched(*arguments, **keywords):
        print("patience", (keywords.get("timeout") or arguments[2]).total_seconds())
        return init(*arguments, **keywords)

    dist.init_process_group = watched


@pytest.mark.parametrize(("mode", "n"), [("ddp", 2), ("spawn", 2)])
def test_timeout_reaches_the_process_group(mode, n, tmp_path):
    result = train(
        mode, n, *BASE, "--epochs", "1", "--timeout", "77", folder=tmp_path, patch=print_patience
    )
    assert printed(result.out, "patience") == [77.0, 77.0]


def test_spawn_checks_before_it_starts_a_process(monkeypatch):
    monkeypatch.setattr(torch.multiprocessing, "spawn", None)
    with pytest.raises(
        common.UsageError, match="--batch-size 5000 is larger than the training set"
    ):
        train_spawn.main(["--nproc", "2", "--batch-size", "5000"])


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_compressed_gradients_differ_by_their_rounding(name, tmp_path):
    argv = (*BASE, "--epochs", "1")
    dtype, plain = (
        {"bf16": torch.bfloat16, "fp16": torch.float16}[name],
        undisturbed("ddp", 2, *argv).gradients[0][0],
    )
    sent = train("ddp", 2, *argv, "--grad-compress", name, folder=tmp_path).gradients[0][0]
    assert all(gradient.to(dtype).to(gradient.dtype).equal(gradient) for gradient in sent.values())
    assert not any(
        gradient.to(dtype).to(gradient.dtype).equal(gradient) for gradient in plain.values()
    )
    assert 2**-20 < deviation(sent, plain) < 10 * 2**-9


# ------------------------------------------------------------------------------------------------------------------ the pieces


def test_seed_decides_the_initial_weights():
    def weights(seed):
        args = make_args("single", "--seed", seed)
        return machinery.tasks.build_net(args, machinery.tasks.load_task(args), CPU).state_dict()

    first, other, again = (weights(seed) for seed in "010")
    assert deviation(again, first) == 0 and deviation(other, first) > 0.1


@pytest.mark.parametrize(
    ("amp", "dtype"),
    [("off", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
    ids=["off", "bf16", "fp16"],
)
def test_amp_computes_in_its_type(amp, dtype):
    with common.autocast(CPU, amp):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype


def test_optimizer_has_what_the_options_say():
    net = nn.Linear(2, 2)
    sgd = optimizer_of(
        make_args(
            "single", "--lr", "0.3", "--momentum", "0.8", "--weight-decay", "0.07", "--nesterov"
        ),
        net,
    )
    (group,) = sgd.param_groups
    assert isinstance(sgd, torch.optim.SGD)
    assert (group["lr"], group["momentum"], group["weight_decay"], group["nesterov"]) == (
        0.3,
        0.8,
        0.07,
        True,
    )
    adamw = optimizer_of(
        make_args("single", "--optimizer", "adamw", "--momentum", "0.8", "--weight-decay", "0.07"),
        net,
    )
    (group,) = adamw.param_groups
    assert isinstance(adamw, torch.optim.AdamW)
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.1, (0.8, 0.999), 0.07)


def test_step_epochs_in_any_order():
    def factors(*epochs):
        args = make_args(
            "single",
            "--epochs",
            "5",
            "--schedule",
            "step",
            "--step-epochs",
            *epochs,
            "--warmup-epochs",
            "0",
        )
        return [factor_of(args, step, 10) for step in range(50)]

    assert factors("4", "2") == factors("2", "4") and len(set(factors("2", "4"))) == 3


def test_ema_and_swa_are_what_they_say(tmp_path, handlers):
    net = nn.BatchNorm1d(3)
    run = make_run(tmp_path / "ema", "--average", "ema", net=net)
    ema, swa = run.state.average, average_of(make_args("single", "--average", "swa"), net)
    assert run.eval_model(None) is net, "before the first update there is no average"
    values = torch.arange(3.0)
    for step in range(3):
        net.weight.data.copy_(values + step)
        net.running_mean.copy_(values + step)
        ema.update_parameters(net)
        swa.update_parameters(net)
    assert run.eval_model(None) is ema.module
    expected = values + 0.99 * 0.01 * 1 + 0.01 * 2  # the first is taken whole
    assert torch.allclose(ema.module.weight, expected) and torch.allclose(
        ema.module.running_mean, expected
    )
    assert torch.allclose(swa.module.weight, values + 1)
    result = train("single", 1, *BASE, "--epochs", "5", "--average", "swa", folder=tmp_path)
    assert result.checkpoint()["average"]["n_averaged"] == 2, "the last quarter: epochs 4 and 5"


def print_determinism():
    for argv in ([], ["--deterministic"]):
        args = make_args("single", "--device", "cpu", *argv)
        machinery.processes.set_up_device(args.device, args.deterministic)
        print(torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark)


def test_deterministic_is_handed_to_torch():
    assert in_process(print_determinism).split() == ["False", "True", "True", "False"]


# -------------------------------------------------------------------------------------------------------- checkpoints, resume


def test_resume_on_three_ranks_is_bitwise(tmp_path):
    """With three ranks or more the last bit of a sum depends on where in DDP's bucket a gradient stands."""
    argv = (
        "--task",
        TASKS / "everything.py",
        "--epochs",
        "2",
        "--batch-size",
        "30",
        "--timeout",
        "30",
    )
    straight = train("ddp", 3, *argv, folder=tmp_path / "straight")
    stopped = train("ddp", 3, *argv, folder=tmp_path, patch=functools.partial(stop_after, 2))
    assert stopped.code == 143
    resumed = train("ddp", 3, *argv, "--resume", "auto", folder=tmp_path)
    assert resumed.code == 0, resumed.err
    assert all(
        tensor.equal(straight.checkpoint()["model"][name])
        for name, tensor in resumed.checkpoint()["model"].items()
    )


def test_scaler_goes_on_where_it_was_saved():
    first, second = (guard_of(make_args(), CPU, torch.nn.Linear(1, 1)) for _ in range(2))
    first.skipped.fill_(3)
    first.in_a_row.fill_(2)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert (second.skipped, second.in_a_row) == (3, 2)


def test_loss_scale_of_fp16_goes_on_at_resume(tmp_path):
    argv = (*BASE, "--dtype", "float32", "--amp", "fp16", "--epochs", "2")
    straight = single_run(*argv)
    stopped = train("single", 1, *argv, folder=tmp_path, patch=functools.partial(stop_after, 5))
    assert stopped.code == 143
    resumed = train("single", 1, *argv, "--resume", "auto", folder=tmp_path)
    assert resumed.checkpoint()["scaler"] == straight.checkpoint()["scaler"]
    assert resumed.checkpoint()["scaler"]["_growth_tracker"] > 0
    assert all(
        tensor.equal(straight.checkpoint()["model"][name])
        for name, tensor in resumed.checkpoint()["model"].items()
    )


def test_restarted_process_goes_on_or_begins_anew(tmp_path, monkeypatch):
    """What a launcher starts again goes on without --resume, in the directory of the first attempt."""
    result = train("single", 1, *BASE, "--epochs", "1", folder=tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    find = machinery.files.find_checkpoint
    path, found = find(
        make_args("ddp", *BASE, "--epochs", "1", "--output-dir", str(result.folder)), 203
    )
    assert found["global_step"] == 6 and path == result.folder / "last.pt"
    assert find(make_args("ddp", *BASE, "--output-dir", str(tmp_path / "empty")), 203) == (
        None,
        None,
    )
    shutil.copytree(
        result.folder, tmp_path / "best alone", ignore=shutil.ignore_patterns("last.pt")
    )
    with pytest.raises(
        common.UsageError, match=r"no last\.pt in .*best alone, but best\.pt"
    ):  # which a new run would overwrite
        find(make_args("ddp", *BASE, "--output-dir", str(tmp_path / "best alone")), 203)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    shutil.copytree(result.folder, machinery.files.output_directory(make_args("ddp", *BASE)))
    path, found = find(make_args("ddp", *BASE), 203)
    assert found["global_step"] == 6 and path.parts[-3:] == (
        "runs",
        "digits-digitnet-one",
        "last.pt",
    )


def poison_in_epoch_2(part, rank):
    end_epoch = machinery.run.Run.end_epoch

    def poison(run, metrics):
        if run.state.epoch == 1:
            {"average": run.state.average.module, "net": run.state.net}[part].first.weight.data[
                0
            ] = float("nan")
        end_epoch(run, metrics)

    machinery.run.Run.end_epoch = poison


@pytest.mark.parametrize("part", ["average", "net"])
def test_non_finite_average_never_reaches_a_file(part, tmp_path):
    """Nor do weights whose average is finite: both stand under the same names."""
    patch = functools.partial(poison_in_epoch_2, part)
    result = train(
        "single", 1, *BASE, "--epochs", "2", "--average", "ema", folder=tmp_path, patch=patch
    )
    assert (
        "not saved, the last good checkpoint stays: non-finite values in first.weight" in result.err
    )
    assert result.checkpoint()["epoch"] == 1


def print_saves(rank):
    save = machinery.files.save_checkpoint
    machinery.files.save_checkpoint = lambda saved, path: (
        print("saved", json.dumps([path.name, saved["global_step"]])),
        save(saved, path),
    )


def test_save_every_saves_within_the_epoch(tmp_path):
    result = train(
        "single", 1, *BASE, "--epochs", "1", "--save-every", "2", folder=tmp_path, patch=print_saves
    )
    assert printed(result.out, "saved") == [
        ["last.pt", 2],
        ["last.pt", 4],
        ["last.pt", 6],
        ["best.pt", 6],
        ["last.pt", 6],
    ]


def decide_scores(rank):
    end_epoch = machinery.run.Run.end_epoch
    machinery.run.Run.end_epoch = lambda run, metrics: end_epoch(
        run, {**metrics, "top1": (0.5, 0.9, 0.4)[run.state.epoch]}
    )


def test_best_is_not_the_last(tmp_path):
    result = train("single", 1, *BASE, folder=tmp_path, patch=decide_scores)
    best, last = result.checkpoint("best.pt"), result.checkpoint()
    assert (best["epoch"], best["best"]) == (2, 0.9) and (last["epoch"], last["best"]) == (3, 0.9)


def test_checkpoint_of_another_format_is_refused(tmp_path):
    torch.save({"format": common.FORMAT + 1}, tmp_path / "later.pt")
    with pytest.raises(
        common.UsageError, match=f"not a checkpoint of this program .format {common.FORMAT}"
    ):
        common.load_checkpoint(tmp_path / "later.pt")


def test_task_may_move_to_another_folder(tmp_path):
    moved = shutil.copy(TASKS / "small.py", tmp_path / "small.py")
    argv = ("--batch-size", "30", "--output-dir", tmp_path / "run")
    first = train(
        "single", 1, *argv, "--task", TASKS / "small.py", "--epochs", "1", folder=tmp_path
    )
    result = train(
        "single", 1, *argv, "--task", moved, "--epochs", "2", "--resume", "auto", folder=tmp_path
    )
    assert first.code == result.code == 0, result.err
    assert result.checkpoint()["epoch"] == 2


def keep_last_before_the_evaluation(rank):
    eval_model = machinery.run.Run.eval_model

    def watched(run, loader):
        shutil.copy(run.files.directory / "last.pt", run.files.directory / "before.pt")
        return eval_model(run, loader)

    machinery.run.Run.eval_model = watched


def test_evaluation_after_the_checkpoint_is_logged_once(tmp_path):
    """A crash between the evaluation and the save: the checkpoint is that of the epoch's last step, and the log is ahead of it."""
    argv = (*BASE, "--epochs", "1", "--save-every", "6")
    first = train("single", 1, *argv, folder=tmp_path, patch=keep_last_before_the_evaluation)
    lines = without_speed(first.lines)
    os.replace(first.folder / "before.pt", first.folder / "last.pt")
    assert (first.checkpoint()["epoch"], first.checkpoint()["step"]) == (0, 6)
    resumed = train("single", 1, *argv, "--resume", "auto", folder=tmp_path)
    assert resumed.code == 0 and without_speed(resumed.lines) == lines


def test_eval_only_leaves_the_log(tmp_path):
    first = train("single", 1, *BASE, "--epochs", "2", "--keep-every", "1", folder=tmp_path)
    lines = first.lines
    older = first.folder / "epoch-0001.pt"
    evaluated = train(
        "single", 1, *BASE, "--epochs", "2", "--eval-only", "--resume", older, folder=tmp_path
    )
    assert evaluated.code == 0, evaluated.err
    assert (
        evaluated.lines == lines
        and f"eval  loss {first.eval_lines()[0]['loss']:.6f}" in evaluated.out
    )


def test_logged_loss_is_that_since_the_last_line(tmp_path):
    patch = functools.partial(change_training_loss, number_of_the_call)
    result = train(
        "single", 1, *BASE, "--epochs", "1", "--log-every", "2", folder=tmp_path, patch=patch
    )
    assert [line["loss"] for line in result.train_lines()] == [0.5, 2.5, 4.5]


def signal_this_rank(rank):
    after_step(3, lambda: os.kill(os.getpid(), signal.SIGUSR1))


def test_signal_to_all_ranks_is_one_signal(tmp_path):
    """As from a batch system, which signals every process: one stop, one message, and for SLURM's warning exit code 0."""
    result = train("ddp", 2, *BASE, folder=tmp_path, patch=signal_this_rank)
    assert (
        result.code == 0
        and result.err.count("stopped by SIGUSR1 after saving step 4 (exit code 0)") == 1
    )
    assert result.checkpoint()["global_step"] == 4


# ------------------------------------------------------------------------------------------------------------ the default task


def test_default_task_augments_by_the_seed_and_only_in_training():
    indices = list(range(100))
    (train_set, held_out), (other, _) = (
        task.build_datasets(make_args("single", "--seed", seed)) for seed in "01"
    )
    assert not train_set.__getitems__(indices)[0].equal(other.__getitems__(indices)[0])
    with np.load(ROOT / "data" / "digits.npz") as file:
        stored = torch.from_numpy(file["images"][1437:1537]).unsqueeze(1) * 15
    assert held_out.__getitems__(indices)[0].equal(stored)


def test_label_smoothing_reaches_the_loss():
    outputs, targets = (
        torch.randn(5, 10, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0, 3, 3, 9, 1]),
    )
    logs = outputs.log_softmax(1)
    for smoothing in (0.0, 0.3):
        losses = machinery.tasks.load_task(
            make_args("single", "--label-smoothing", str(smoothing))
        ).per_sample_loss(outputs, targets)
        expected = -(1 - smoothing) * logs[torch.arange(5), targets] - smoothing * logs.mean(1)
        assert torch.allclose(losses, expected, atol=1e-6)


def test_metrics_of_the_default_task():
    outputs = torch.arange(10.0).expand(4, 10)  # class 9 is the best guess, 5 the fifth
    metrics = task.per_sample_metrics(outputs, torch.tensor([9, 8, 5, 4]))
    assert list(metrics) == ["top1", "top5"]
    assert metrics["top1"].tolist() == [1, 0, 0, 0] and metrics["top5"].tolist() == [1, 1, 1, 0]


def first_score_is_nan(rank):
    end_epoch = machinery.run.Run.end_epoch
    machinery.run.Run.end_epoch = lambda run, metrics: end_epoch(
        run, metrics | {"top1": [float("nan"), 0.2, 0.1][run.state.epoch]}
    )


def test_nan_score_is_not_the_best_for_ever(tmp_path):
    result = train("single", 1, *BASE, "--epochs", "3", folder=tmp_path, patch=first_score_is_nan)
    assert result.checkpoint("best.pt")["epoch"] == 2 and result.checkpoint()["best"] == 0.2


def test_resume_from_elsewhere_does_not_overwrite_another_run(tmp_path):
    first, second = (
        train("single", 1, *BASE, "--epochs", "1", folder=tmp_path / name)
        for name in ("first", "second")
    )
    before = second.lines
    refused = train(
        "single",
        1,
        *BASE,
        "--epochs",
        "2",
        "--resume",
        first.folder / "last.pt",
        folder=tmp_path / "second",
    )
    assert refused.code == 2 and "already holds a run" in refused.err and refused.lines == before


def test_eval_only_evaluates_what_was_trained_or_says_why_not(tmp_path):
    trained = train("single", 1, *BASE, "--epochs", "2", "--average", "ema", folder=tmp_path)
    options = ["--eval-only", "--resume", trained.folder / "last.pt"]
    same = train(
        "single",
        1,
        *BASE,
        "--average",
        "ema",
        "--batch-size",
        "7",
        *options,
        folder=tmp_path / "same",
    )
    assert same.eval_lines()[0]["loss"] == pytest.approx(
        trained.eval_lines()[-1]["loss"], rel=1e-12
    )
    other = train("single", 1, *BASE, *options, folder=tmp_path / "other")
    assert other.code == 2 and "--average none" in other.err and "was made with ema" in other.err
    nothing = train(
        "single", 1, *BASE, "--eval-only", "--resume", "auto", folder=tmp_path / "nothing"
    )
    assert nothing.code == 2 and "there is no checkpoint" in nothing.err


def test_rank_left_in_the_environment_does_not_silence_a_single_run(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    make_args("single", *BASE)
    assert common.get_rank() == 0


@pytest.mark.parametrize("loss", [torch.tensor(1.0), torch.ones(4, 1), torch.ones(1)])
def test_a_loss_that_is_not_one_number_a_sample_is_refused(loss):
    """A mean in its place would be summed as if it were one sample."""
    with pytest.raises(ValueError, match=r"must be \[n\], one number per sample"):
        common.Meter(torch.device("cpu")).add(top1=torch.ones(4), loss=loss)


class DrawsFromEverywhere(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(
            [torch.rand(()).item(), random.random(), np.random.rand()]
        ), torch.tensor(index)


def test_augmentation_by_python_or_numpy_is_keyed_by_the_sample_too():
    dataset = keyed(DrawsFromEverywhere(), make_args())
    one, other = dataset.__getitems__((1, [3, 5]))[0], dataset.__getitems__((1, [5, 2]))[0]
    assert one[1].equal(other[0])
    assert (one[0] != one[1]).all() and (dataset.__getitems__((2, [5]))[0][0] != one[1]).all()


class Pair(NamedTuple):
    box: torch.Tensor
    label: torch.Tensor


def test_namedtuples_stay_namedtuples():
    first, second = common.split_batch(Pair(torch.arange(4), torch.arange(4)), 2)
    assert (
        isinstance(first, Pair) and first.box.tolist() == [0, 1] and second.label.tolist() == [2, 3]
    )
