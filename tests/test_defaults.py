"""What a run does if nothing is said, and where the range of each number ends."""

import pytest
from harness import make_args

import options

DEFAULTS = {
    "dataset": "digits",
    "data_dir": None,
    "download": False,
    "skip_corrupt": False,
    "balanced": False,
    "image_size": None,
    "workers": None,
    "model": "digitnet",
    "weights": None,
    "freeze": [],
    "epochs": 30,
    "batch_size": 64,
    "accum_steps": 1,
    "optimizer": "sgd",
    "lr": 0.1,
    "momentum": 0.9,
    "nesterov": False,
    "weight_decay": 1e-3,
    "schedule": "cosine",
    "warmup_epochs": 2.0,
    "step_epochs": [],
    "step_gamma": 0.1,
    "scale_lr": "none",
    "clip_grad_norm": None,
    "label_smoothing": 0.1,
    "average": "none",
    "amp": "off",
    "compile": False,
    "channels_last": False,
    "dtype": "float32",
    "sync_bn": False,
    "grad_compress": "none",
    "find_unused_parameters": False,
    "timeout": 600,
    "seed": 0,
    "output_dir": None,
    "resume": None,
    "save_every": None,
    "keep_every": None,
    "eval_only": False,
    "log_every": 50,
    "tensorboard": False,
    "device": "auto",
    "deterministic": False,
}


def test_defaults():
    found = vars(make_args())
    assert {name: found[name] for name in DEFAULTS} == DEFAULTS
    assert found.keys() - DEFAULTS.keys() <= {"task", "local_rank"}


RANGES = {  # the first and the last that are accepted; what is just outside
    "image-size": (["8", "100000"], ["7"]),
    "workers": (["0"], ["-1"]),
    "epochs": (["2"], ["0"]),
    "batch-size": (["1"], ["0"]),
    "accum-steps": (["1", "64"], ["0"]),
    "lr": (["0", "1e9"], ["-1e-9"]),
    "momentum": (["0", "1"], ["-1e-9", "1.0000001"]),
    "weight-decay": (["0"], ["-1e-9"]),
    "step-gamma": (["0", "1"], ["-1e-9", "1.0000001"]),
    "warmup-epochs": (["0", "30"], ["-1e-9", "30.01"]),
    "clip-grad-norm": (["1e-12"], ["0", "1e-13"]),
    "label-smoothing": (["0", "1"], ["-1e-9", "1.0000001"]),
    "timeout": (["1", "1000000000"], ["0.99", "1000000001"]),
    "seed": (["0", str(2**63 - 1)], ["-1", str(2**63)]),
    "save-every": (["1"], ["0"]),
    "keep-every": (["1"], ["0"]),
    "log-every": (["1"], ["0"]),
}


@pytest.mark.parametrize("name", RANGES)
def test_ranges(name):
    inside, outside = RANGES[name]
    for text in inside:
        value = vars(make_args("single", f"--{name}={text}"))[name.replace("-", "_")]
        assert value == float(text) if abs(value) < 2**53 else value == int(text)
    for text in outside:
        with pytest.raises(options.UsageError, match=f"--{name} ?.*{text}"):
            make_args("single", f"--{name}={text}")


@pytest.mark.parametrize(("mode", "option"), [("dp", "replicas"), ("spawn", "nproc")])
def test_devices_of_a_cpu_are_two(mode, option):
    argv = ["--device", "cpu"]
    assert vars(make_args(mode, *argv))[option] == 2
    assert vars(make_args(mode, *argv, f"--{option}", "64"))[option] == 64
    for wrong in ("0", "65"):  # 65 devices cannot share a batch of 64
        with pytest.raises(options.UsageError):
            make_args(mode, *argv, f"--{option}", wrong)
