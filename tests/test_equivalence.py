"""Every mode at every world size computes what one device computes: gradients, parameters, loss lines and evaluation lines, to rounding."""

import pytest
from harness import TASKS, compare, deviation, single_run, train

# 203 samples in batches of 30: the last 23 are dropped, and neither 4 ranks nor 3 micro-batches divide a batch
BASE = (
    "--task",
    str(TASKS / "small.py"),
    "--dtype",
    "float64",
    "--epochs",
    "5",
    "--batch-size",
    "30",
    "--log-every",
    "4",
)
MODES = [
    ("dp", 1),
    ("dp", 2),
    ("dp", 3),
    ("dp", 4),
    ("ddp", 1),
    ("ddp", 2),
    ("ddp", 3),
    ("ddp", 4),
    ("spawn", 2),
    ("spawn", 3),
]


@pytest.mark.parametrize(
    ("mode", "n", "accum_steps"),
    [
        *((*mode, steps) for mode in MODES for steps in (1, 2)),
        ("dp", 3, 3),
        ("ddp", 4, 3),
        ("spawn", 3, 3),
    ],
)
def test_mode_equals_one_device(mode, n, accum_steps, tmp_path):
    reference = single_run(*BASE)
    deviations = compare(
        train(mode, n, *BASE, "--accum-steps", accum_steps, folder=tmp_path), reference
    )
    assert deviations.pop("gradients") <= 1e-12, "the first step's gradients"
    assert max(deviations.values()) <= 1e-10, deviations


@pytest.mark.parametrize("accum_steps", [2, 3, 30])
def test_accumulation_on_one_device(accum_steps, tmp_path):
    deviations = compare(
        train("single", 1, *BASE, "--accum-steps", accum_steps, folder=tmp_path), single_run(*BASE)
    )
    assert max(deviations.values()) <= 1e-10, deviations


FEATURES = {
    "adamw": "--optimizer adamw --lr 0.003 --weight-decay 0.05",
    "clipping": "--clip-grad-norm 0.5",
    "no label smoothing": "--label-smoothing 0",
    "frozen layers": "--freeze conv1.* conv2.bias",
    "step": "--schedule step --step-epochs 3 4 --step-gamma 0.3 --warmup-epochs 1",
    "loader workers": "--workers 2",
    "batch of one a device": "--batch-size 3 --epochs 2 --lr 0.02",
    "ema": "--average ema",
    "swa": "--average swa",
    "channels last": "--channels-last",
    "unused option of ddp": "--find-unused-parameters",
}


OF_ITS_OWN = [
    "clipping",
    "frozen layers",
    "loader workers",
    "batch of one a device",
    "ema",
    "swa",
]  # where dp has other code at work


@pytest.mark.parametrize(
    ("mode", "n", "feature"),
    [
        *(("dp", 3, feature) for feature in OF_ITS_OWN),
        *(("ddp", 3, feature) for feature in FEATURES),
    ],
)
def test_feature_equals_one_device(mode, n, feature, tmp_path):
    argv = (*BASE, "--batch-size", "31", *FEATURES[feature].split())  # which 3 does not divide
    result = train(mode, n, *argv, folder=tmp_path)
    deviations = compare(result, single_run(*argv))
    assert max(deviations.values()) <= 1e-10, deviations
    if feature in ("ema", "swa"):  # what is evaluated is not what is trained
        average = result.checkpoint()["average"]
        assert average.pop("n_averaged") > 1
        assert deviation(average, result.checkpoint()["model"]) > 1e-4


def test_training_is_not_trivial(tmp_path):
    """What the equalities above rest on: every epoch has its own order and augmentation, and ranks see different samples."""
    plain, other_seed = single_run(*BASE), single_run(*BASE, "--seed", "1")
    assert deviation(plain.gradients[0][0], other_seed.gradients[0][0]) > 1e-3
    clipped = single_run(*BASE, "--clip-grad-norm", "0.5")
    assert all(line["grad_norm"] > 0.5 for line in plain.train_lines()[:2]), (
        "or clipping would not clip"
    )
    assert deviation(clipped.checkpoint()["model"], plain.checkpoint()["model"]) > 1e-3
    frozen = single_run(*BASE, "--freeze", "conv1.*", "conv2.bias").checkpoint()["model"]
    start = single_run(*BASE, "--lr", "0", "--weight-decay", "0", "--epochs", "1").checkpoint()[
        "model"
    ]
    assert [name for name in start if frozen[name].equal(start[name])] == [
        "conv1.weight",
        "conv1.bias",
        "conv2.bias",
    ]
