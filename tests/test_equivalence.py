"""Every mode at every world size computes what one device computes: gradients, parameters, loss lines and evaluation lines, to rounding."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
import torch
from harness import TASKS, compare, deviation, prove_run, single_run, train, undisturbed
from patches import BASE, printed
from runs import CPU
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import common
import machinery.modes
import machinery.process
import machinery.run
import machinery.usertask
import train_ddp

# 203 samples in batches of 30: the last 23 are dropped, and neither 4 ranks nor 3 micro-batches divide a batch
DIGITS = (
    "--task",
    str(TASKS / "small.py"),
    *"--dtype float64 --epochs 5 --batch-size 30 --log-every 4".split(),
)


def full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("mode", "n", "accum_steps"),
    [
        ("dp", 2, 2),
        ("ddp", 2, 2),
        ("spawn", 2, 1),
        full("dp", 3, 3),
        full("ddp", 4, 3),
    ],
)
def test_mode_equals_one_device(mode, n, accum_steps, tmp_path):
    result = train(mode, n, *DIGITS, "--accum-steps", accum_steps, folder=tmp_path)
    prove_run(result, single_run(*DIGITS))


def test_accumulation_on_one_device(tmp_path):
    result = train("single", 1, *DIGITS, "--accum-steps", 30, folder=tmp_path)
    deviations = compare(result, single_run(*DIGITS))
    assert max(deviations.values()) <= 1e-10, deviations


FEATURES = {
    "ema": "--average ema --clip-grad-norm 0.5",
    "frozen layers": "--freeze conv1.* conv2.bias --workers 2 --channels-last",
    "adamw": "--optimizer adamw --lr 0.003 --weight-decay 0.05 --schedule step --step-epochs 3 4 --step-gamma 0.3",
    "batch of one a device": "--batch-size 3 --epochs 2 --lr 0.03",
}


@pytest.mark.parametrize(
    ("mode", "n", "feature"),
    [
        ("dp", 3, "ema"),
        ("ddp", 3, "ema"),
        *(full("ddp", 3, feature) for feature in FEATURES if feature != "ema"),
    ],
)
def test_feature_equals_one_device(mode, n, feature, tmp_path):
    argv = (*DIGITS, "--batch-size", "31", *FEATURES[feature].split())  # which 3 does not divide
    result = train(mode, n, *argv, folder=tmp_path)
    prove_run(result, single_run(*argv))
    if feature == "ema":  # what is evaluated is not what is trained
        saved = result.checkpoint()
        assert deviation(saved["weights"], saved["model"]) > 1e-4
        assert saved["average"]["n_averaged"] > 1


@pytest.mark.full
def test_nested_inputs_targets_and_outputs_equal_one_device(tmp_path):
    argv = ("--task", str(TASKS / "nested.py"), *DIGITS[2:], "--lr", "0.05")
    prove_run(train("dp", 3, *argv, folder=tmp_path), single_run(*argv))


def test_training_is_not_trivial():
    """What the equalities above rest on: every epoch has its own order and augmentation, and ranks see different samples."""
    argv = (*DIGITS, "--epochs", "1", "--warmup-epochs", "0")
    plain, other_seed = single_run(*argv), single_run(*argv, "--seed", "1")
    assert deviation(plain.gradients[0][0], other_seed.gradients[0][0]) > 1e-3
    clipped = single_run(*argv, "--clip-grad-norm", "0.5")
    assert deviation(clipped.checkpoint()["model"], plain.checkpoint()["model"]) > 1e-3
    frozen = single_run(*argv, "--freeze", "conv1.*", "conv2.bias").checkpoint()["model"]
    start = single_run(*argv, "--lr", "0", "--weight-decay", "0").checkpoint()["model"]
    kept = [name for name in start if frozen[name].equal(start[name])]
    assert kept == ["conv1.weight", "conv1.bias", "conv2.bias"]


# ------------------------------------------------------------ what ranks share and what they do not


def test_sync_bn_with_accumulation_equals_one_device(tmp_path):
    """Only if the ranks cut the same micro-batches as one device do they have its statistics."""
    argv = (*BASE, "--model", "batchnorm", "--epochs", "1", "--accum-steps", "2")
    reference, result = single_run(*argv), train("ddp", 2, *argv, "--sync-bn", folder=tmp_path)
    assert result.code == 0, result.err
    assert deviation(result.gradients[0][0], reference.gradients[0][0]) <= 1e-11
    models = [
        {k: v for k, v in run.checkpoint()["model"].items() if v.is_floating_point()}
        for run in (result, reference)
    ]
    assert "between.running_var" in models[0] and deviation(*models) <= 1e-9


def print_evaluated_buffers(rank):
    evaluate = train_ddp.evaluate

    def watched(args, task, model, *others):
        print("buffers", json.dumps([buffer.tolist() for buffer in model.buffers()]))
        return evaluate(args, task, model, *others)

    train_ddp.evaluate = watched


@pytest.mark.full
def test_batchnorm_buffers_are_evaluated_alike(tmp_path):
    argv = (*BASE, "--model", "batchnorm", "--epochs", "1")
    result = train("ddp", 2, *argv, folder=tmp_path, patch=print_evaluated_buffers)
    first, second = printed(result.out, "buffers")
    assert first == second and len(first) == 3


@pytest.mark.full
def test_data_parallel_is_ddp_with_batchnorm(tmp_path):
    """Replica 0 keeps the running statistics, and the others do not touch them, as rank 0 does."""
    # An even share: both cut it alike.
    argv = (*BASE, *"--model batchnorm --batch-size 24 --epochs 1".split())
    result, reference = train("dp", 2, *argv, folder=tmp_path), undisturbed("ddp", 2, *argv)
    assert deviation(result.checkpoint()["model"], reference.checkpoint()["model"]) <= 1e-10
    assert result.checkpoint()["model"]["between.running_mean"].abs().max() > 1e-3


@pytest.mark.parametrize(("mode", "n"), [("single", 1), full("dp", 2), full("fsdp", 2)])
def test_dropout_is_that_of_ddp(mode, n, tmp_path):
    """In training alone; each rank and each replica draws its own numbers, in every step others."""
    argv = (*BASE, "--model", "dropout")
    result, reference = train(mode, n, *argv, folder=tmp_path), undisturbed("ddp", n, *argv)
    assert max(compare(result, reference).values()) <= 1e-10


def test_replicas_on_accelerators_have_their_own_random_streams(monkeypatch):
    class Accelerator:
        def device(self, index):
            here.append(index)
            return contextlib.nullcontext()

        def manual_seed(self, seed):
            seeds[here[-1]] = seed

    here, seeds = [], {}
    parallel = machinery.modes.DataParallel.__new__(machinery.modes.DataParallel)
    nn.Module.__init__(parallel)
    parallel.device_ids, parallel.src_device_obj = [4, 7, 9], torch.device("cpu")
    monkeypatch.setattr("torch.get_device_module", lambda device: Accelerator())
    monkeypatch.setattr(nn.DataParallel, "parallel_apply", lambda self, *parts: parts)
    torch.manual_seed(100)
    assert parallel.parallel_apply([1], (2,), (3,)) == ([1], (2,), (3,))
    assert seeds == {4: 100, 7: 101, 9: 102}, "as the ranks of DDP have them"


@pytest.mark.full
@pytest.mark.parametrize(("mode", "n"), [("ddp", 2), ("dp", 2)])
def test_frozen_batchnorm_keeps_its_statistics(mode, n, tmp_path):
    argv = (*BASE, "--model", "batchnorm", "--epochs", "1")
    frozen = train(mode, n, *argv, "--freeze", "between.*", folder=tmp_path)
    kept = frozen.checkpoint()["model"]
    assert not kept["between.running_mean"].any() and (kept["between.running_var"] == 1).all()
    assert kept["between.num_batches_tracked"] == 0
    half = single_run(*argv, "--freeze", "between.weight").checkpoint()["model"]
    assert half["between.running_mean"].abs().sum() > 0, "its bias is trained"


def print_sent_numbers(rank):
    class Watched(nn.parallel.DistributedDataParallel):
        def __init__(self, module, **keywords):
            super().__init__(module, **keywords)
            self.register_comm_hook(None, self.watch)

        def watch(self, state, bucket):
            print("sent", bucket.buffer().numel())
            return default_hooks.allreduce_hook(None, bucket)

    nn.parallel.DistributedDataParallel = Watched


@pytest.mark.full
def test_no_gradient_of_frozen_parameters_is_sent(tmp_path):
    argv = ("--epochs", "1", "--batch-size", "700", "--freeze", "conv*")
    result = train("ddp", 2, *argv, folder=tmp_path, patch=print_sent_numbers)
    assert result.code == 0, result.err
    assert {*printed(result.out, "sent")} == {384 * 10 + 10}, "the head's alone"


# ------------------------------------------------------------------------ precision and compression


@pytest.mark.full
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_compressed_gradients_differ_by_their_rounding(name, tmp_path):
    argv = (*BASE, "--epochs", "1")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    plain = undisturbed("ddp", 2, *argv).gradients[0][0]
    sent = train("ddp", 2, *argv, "--grad-compress", name, folder=tmp_path).gradients[0][0]

    def is_rounded(gradient):
        return gradient.to(dtype).to(gradient.dtype).equal(gradient)

    assert all(map(is_rounded, sent.values())) and not any(map(is_rounded, plain.values()))
    assert 2**-20 < deviation(sent, plain) < 10 * 2**-9


@pytest.mark.parametrize(
    ("amp", "dtype"),
    [("off", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
    ids=["off", "bf16", "fp16"],
)
def test_amp_computes_in_its_type(amp, dtype):
    with common.autocast(CPU, amp):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype


# ------------------------------------------------------------------------------- the table of proofs

PROOFS = """
import pytest
from harness import prove
@pytest.mark.parametrize("deviation", [1e-14, 3e-13, 0.5, float("nan")])
def test(deviation):
    prove("weights", "one device", deviation, 1e-12)
    prove("bits", "one device", 0.0, 0)
"""


@pytest.mark.full
def test_tests_end_with_a_table_of_what_they_proved(tmp_path):
    (tmp_path / "test_made_up.py").write_text(PROOFS)
    command = [sys.executable, *"-m pytest -p conftest -n 2 --rootdir".split(), tmp_path, tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(TASKS.parent)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    rows = [line.split() for line in result.stdout.partition(" proof ")[2].splitlines()]
    assert ["bits", "one", "device", "2", "0", "0"] in rows, result.stdout
    assert ["weights", "one", "device", "4", "nan", "1e-12"] in rows
    assert "2 failed, 2 passed" in result.stdout, "0.5 and a NaN are above 1e-12"
