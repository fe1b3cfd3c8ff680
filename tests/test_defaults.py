"""What a run does if nothing is said, what may differ, and the range of each number."""

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import TASKS, make_args
from runs import make_run

import checkpoint
import common
import launch
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
    assert found.keys() - DEFAULTS.keys() <= {"task", "local_rank", "eval_batch_size"}  # the last depends on others


# ------------------------------------------------------------ what may differ, and where

CHANGED = {  # another value of every option
    "dataset": "mnist",
    "data_dir": "/elsewhere",
    "download": True,
    "skip_corrupt": True,
    "balanced": True,
    "image_size": 32,
    "workers": 1,
    "model": "resnet9",
    "weights": "file.pt",
    "freeze": ["conv*"],
    "epochs": 31,
    "batch_size": 65,
    "accum_steps": 2,
    "optimizer": "adamw",
    "lr": 0.2,
    "momentum": 0.8,
    "nesterov": True,
    "weight_decay": 2e-3,
    "schedule": "step",
    "warmup_epochs": 1.0,
    "step_epochs": [3],
    "step_gamma": 0.2,
    "scale_lr": "linear",
    "clip_grad_norm": 1.0,
    "label_smoothing": 0.2,
    "average": "ema",
    "amp": "bf16",
    "compile": True,
    "channels_last": True,
    "dtype": "float64",
    "sync_bn": True,
    "grad_compress": "bf16",
    "find_unused_parameters": True,
    "timeout": 60,
    "seed": 1,
    "output_dir": "/elsewhere",
    "resume": "auto",
    "save_every": 5,
    "keep_every": 5,
    "eval_only": True,
    "log_every": 5,
    "tensorboard": True,
    "device": "cpu",
    "deterministic": True,
}
THE_SAME_RUN = {"data_dir", "download", "skip_corrupt", "workers", "weights", "epochs", "compile"}
THE_SAME_RUN |= {"channels_last", "find_unused_parameters", "timeout", "output_dir", "resume"}
THE_SAME_RUN |= {"save_every", "keep_every", "eval_only", "log_every", "tensorboard", "device"}
THE_SAME_RUN |= {"deterministic"}
ANOTHER_EVALUATION = {"dataset", "image_size", "model", "dtype", "average"}
ANOTHER_EVALUATION |= {"optimizer", "freeze", "label_smoothing"}
OF_A_NODE = {"data_dir", "download", "output_dir", "resume", "weights", "workers", "device"}


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_may_change_at_resume(name):
    """An evaluation forbids less: --optimizer and --freeze too, because the state must fit."""
    assert CHANGED.keys() == DEFAULTS.keys() and CHANGED[name] != DEFAULTS[name]
    path = Path("run/last.pt")

    def refused(**changes):
        args = make_args()
        config = {**vars(args), name: CHANGED[name]}
        vars(args).update(changes)
        try:
            checkpoint.check_config(args, config, path)
        except options.UsageError as error:
            option = name.replace("_", "-")
            told = f"--{option} {DEFAULTS[name]}: {path} was made with {CHANGED[name]}; use that"
            assert str(error).startswith(told)
            return True
        return False

    assert refused() == (name not in THE_SAME_RUN)
    if name != "eval_only":
        assert refused(eval_only=True) == (name in ANOTHER_EVALUATION)
    args, config = make_args(), vars(make_args())
    del config[name]
    checkpoint.check_config(args, config, path)  # of a version that did not have the option


def test_what_may_differ_between_nodes():
    known = vars(options.build_parser("spawn").parse_args([]))
    several = {"task", "local_rank", "node_rank", "dist_url"}
    assert OF_A_NODE | several == checkpoint.OWN and known.keys() >= checkpoint.OWN


def test_checkpoint_lacks_nothing(tmp_path, handlers):
    """A file without one of its parts, or with another kind of it, is refused by name."""
    run = make_run(tmp_path)
    run.save("last.pt")
    whole = torch.load(run.folder / "last.pt", weights_only=True)
    names = ["model", "optimizer", "scheduler", "scaler", "average", "log", "config"]
    names += ["epoch", "step", "global_step", "samples"]
    assert set(names) | {"format", "best"} == whole.keys()
    path = tmp_path / "changed.pt"
    for name in names:
        broken = {key: value for key, value in whole.items() if key != name}
        for changes in ({}, {name: "text"}, {name: None}, {name: -1}):
            torch.save({**broken, **changes}, path)
            with pytest.raises(
                options.UsageError,
                match=f"not a checkpoint of this program: {name} missing",
            ):
                checkpoint.load_checkpoint(path)
    torch.save({**whole, "best": "text"}, path)
    with pytest.raises(options.UsageError, match="best missing or wrong"):
        checkpoint.load_checkpoint(path)
    for best in (None, 0.5):
        torch.save({**whole, "best": best}, path)
        assert checkpoint.load_checkpoint(path)["best"] == best


def test_folder_of_a_run_without_a_name(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    args = make_args("single", "--model", "resnet9")
    folder = checkpoint.output_folder(args)
    assert folder.parent == Path("runs")
    assert re.fullmatch(rf"digits-resnet9-\d{{8}}-\d{{6}}-{os.getpid()}", folder.name)
    for run_id, unique in (("none", str(os.getpid())), ("job-7", "job-7")):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
        assert checkpoint.output_folder(args).name.endswith(f"-{unique}")
    args.output_dir = "here"
    assert checkpoint.output_folder(args) == Path("here")


# ------------------------------------------------------------ ranges

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


# ------------------------------------------------------------ constants that no option sets


def test_settings_of_powersgd():
    told = []
    model = SimpleNamespace(register_comm_hook=lambda state, hook: told.append(state))
    args, scaler = make_args("ddp", "--grad-compress", "powersgd"), SimpleNamespace(in_a_row=0)
    common.compress_gradients(args, model, scaler)
    (state,) = told
    assert (state.matrix_approximation_rank, state.start_powerSGD_iter) == (4, 10)


def test_port_of_several_nodes():
    argv = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "node0"]
    assert options.parse_nodes(argv)[0].master_port == 29500
    nodes, rest = options.parse_nodes([*argv, "--master-port", "7", "--lr", "1"])
    assert (nodes.master_port, rest) == (7, ["--lr", "1"])
    nodes, rest = options.parse_nodes(["--seed", "2"])
    assert (nodes.nnodes, nodes.node_rank, rest) == (1, None, ["--seed", "2"])


def test_build_says_how_many_tensors_are_frozen(capsys):
    args = make_args("single", "--freeze", "conv1.*", "head.bias")
    common.build_net(args, common.load_task(args), torch.device("cpu"))
    assert capsys.readouterr().out == "frozen: 3 of 8 parameter tensors\n"
    args = make_args()
    common.build_net(args, common.load_task(args), torch.device("cpu"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("several", [False, True])
def test_what_torchrun_is_told(several, monkeypatch, handlers):
    """--timeout in whole seconds, not fewer; restarts on one machine only."""
    from torch.distributed import run

    told = []
    for name in ("LAUNCH_END_FILE", "LAUNCH_PID", "LAUNCH_MEETING_FILE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(run, "main", told.append)
    monkeypatch.setattr(sys, "argv", ["train_ddp.py"])
    nodes = SimpleNamespace(nnodes=2 if several else 1, node_rank=1)
    nodes.master_addr, nodes.master_port = "node0", 7
    assert launch.torchrun(3, ["--lr", "1"], nodes, 30.5) == 0
    (argv,) = told
    assert argv[-5:] == ["--nproc-per-node", "3", "train_ddp.py", "--lr", "1"]
    pairs = dict(zip(argv[:-5:2], argv[1:-5:2]))
    del pairs["--log-dir"]
    if several:
        wanted = {"--nnodes": "2", "--node-rank": "1", "--master-addr": "node0"}
        wanted |= {"--master-port": "7", "--rdzv-conf": "timeout=31", "--max-restarts": "0"}
        assert pairs == wanted
    else:
        assert pairs.pop("--rdzv-id") and pairs.pop("--rdzv-endpoint")
        wanted = {"--rdzv-backend": "c10d", "--rdzv-conf": "store_type=file"}
        assert pairs == {**wanted, "--max-restarts": "3"}


@pytest.mark.parametrize("name", ["loss", "count", "event", "epoch", "global_step", 5])
def test_names_that_the_log_uses_itself_are_no_metrics(name):
    args = make_args()
    task = SimpleNamespace(**vars(common.load_task(args)))
    net = task.build_model(args).eval()
    dataset = task.build_datasets(args)[1]
    options.check_samples(args, task, net, dataset, "evaluation", "cpu")
    task.per_sample_metrics = lambda outputs, targets: {"top1": targets * 1.0, name: targets * 1.0}
    with pytest.raises(options.UsageError, match=f"the log does not use itself, got {name!r}"):
        options.check_samples(args, task, net, dataset, "evaluation", "cpu")


def test_neighbours_of_a_task_replace_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(TASKS)])
    (tmp_path / "task.py").write_text("from small import *\n")
    (tmp_path / "small.py").write_text((TASKS / "small.py").read_text())
    monkeypatch.delitem(sys.modules, "small", raising=False)
    common.load_task(make_args("single", "--task", str(tmp_path / "task.py")))
    assert sys.modules["small"].__file__ == str(tmp_path / "small.py")
    assert sys.path.index(str(tmp_path)) == len(sys.path) - 1
    monkeypatch.delitem(sys.modules, "small")


def test_optimizer_of_an_accelerator_goes_on_here(tmp_path, handlers):
    run = make_run(tmp_path)
    before = [group["fused"] for group in run.state.optimizer.param_groups]
    run.save("last.pt")
    run.file.close()
    saved = torch.load(run.folder / "last.pt", weights_only=True)
    for group in saved["optimizer"]["param_groups"]:
        group["fused"] = True
    torch.save(saved, run.folder / "last.pt")
    run = make_run(tmp_path, "--resume", "auto")
    assert [group["fused"] for group in run.state.optimizer.param_groups] == before == [False]


def test_five_names_are_enough(tmp_path, handlers, capsys):
    net = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(4)))
    run = make_run(tmp_path, net=net)
    for parameter in net.parameters():
        parameter.data.fill_(float("nan"))
    run.save("last.pt")
    five = "0.weight, 0.bias, 1.weight, 1.bias, 2.weight"
    assert capsys.readouterr().err.rstrip().endswith(f"non-finite values in {five}")


def test_options_of_a_loss_and_of_a_metric_are_filled_in(tmp_path):
    (tmp_path / "task.py").write_text(
        "def build_datasets(args): pass\ndef build_model(args): pass\n"
        "def per_sample_loss(o, t, *, label_smoothing, lr=5): return o, t, label_smoothing, lr\n"
        "def per_sample_metrics(o, t, *, seed, epochs): return o, t, seed, epochs\n"
    )
    path = str(tmp_path / "task.py")
    args = make_args("single", "--task", path, "--seed", "7", "--label-smoothing", "0.25")
    task = common.load_task(args)
    assert task.per_sample_loss("o", "t") == ("o", "t", 0.25, 0.1), "and no default counts"
    assert task.per_sample_metrics("o", "t") == ("o", "t", 7, 30)


def test_earliest_failure_is_the_cause(tmp_path, monkeypatch):
    """Files are in the order of their ranks; what failed first was written first."""
    for rank, (message, written) in enumerate([("late", 30), ("first", 10), ("later", 20)]):
        path = tmp_path / "attempt_0" / str(rank) / "error.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"message": {"message": message}}))
        os.utime(path, (written, written))
    error_file = tmp_path / "attempt_1" / "0" / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    assert launch.earlier_failure() == "first"
