"""What a run does if nothing is said, what may differ, and the range of each number."""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import ROOT, TASKS, make_args
from runs import make_run

import common
import machinery.check
import machinery.files
import machinery.launch
import machinery.options
import machinery.processes
import machinery.tasks

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
    assert found.keys() - DEFAULTS.keys() <= {
        "task",
        "local_rank",
        "eval_batch_size",
    }  # the last depends on others


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
            machinery.files.check_config(args, config, path)
        except common.UsageError as error:
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
    machinery.files.check_config(args, config, path)  # of a version that did not have the option


def test_what_may_differ_between_nodes():
    modes = ("single", "dp", "ddp", "spawn")
    known = set().union(*(vars(make_args(mode, "--device", "cpu")) for mode in modes))
    several = {"task", "local_rank", "node_rank", "master_addr", "master_port", "dist_url"}
    found = machinery.options.keys(machinery.options.PER_NODE)
    assert OF_A_NODE | several == found and known >= found


def test_checkpoint_lacks_nothing(tmp_path, handlers):
    """A file without one of its parts, or with another kind of it, is refused by name."""
    run = make_run(tmp_path)
    run.save("last.pt")
    whole = torch.load(run.files.directory / "last.pt", weights_only=True)
    names = ["model", "optimizer", "scheduler", "scaler", "average", "log", "config"]
    names += ["epoch", "step", "global_step", "samples"]
    assert set(names) | {"format", "best"} == whole.keys()
    path = tmp_path / "changed.pt"
    for name in names:
        broken = {key: value for key, value in whole.items() if key != name}
        for changes in ({}, {name: "text"}, {name: None}, {name: -1}):
            torch.save({**broken, **changes}, path)
            with pytest.raises(
                common.UsageError,
                match=f"not a checkpoint of this program: {name} missing",
            ):
                common.load_checkpoint(path)
    torch.save({**whole, "best": "text"}, path)
    with pytest.raises(common.UsageError, match="best missing or wrong"):
        common.load_checkpoint(path)
    for best in (None, 0.5):
        torch.save({**whole, "best": best}, path)
        assert common.load_checkpoint(path)["best"] == best


def test_folder_of_a_run_without_a_name(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    args = make_args("single", "--model", "resnet9")
    folder = machinery.files.output_directory(args)
    assert folder.parent == Path("runs")
    assert re.fullmatch(rf"digits-resnet9-\d{{8}}-\d{{6}}-{os.getpid()}", folder.name)
    for run_id, unique in (("none", str(os.getpid())), ("job-7", "job-7")):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
        assert machinery.files.output_directory(args).name.endswith(f"-{unique}")
    args.output_dir = "here"
    assert machinery.files.output_directory(args) == Path("here")


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
        with pytest.raises(common.UsageError, match=f"--{name} ?.*{text}"):
            make_args("single", f"--{name}={text}")


@pytest.mark.parametrize(("mode", "option"), [("dp", "replicas"), ("spawn", "nproc")])
def test_devices_of_a_cpu_are_two(mode, option):
    argv = ["--device", "cpu"]
    assert vars(make_args(mode, *argv))[option] == 2
    assert vars(make_args(mode, *argv, f"--{option}", "64"))[option] == 64
    for wrong in ("0", "65"):  # 65 devices cannot share a batch of 64
        with pytest.raises(common.UsageError):
            make_args(mode, *argv, f"--{option}", wrong)


# ------------------------------------------------------------ constants that no option sets


def test_settings_of_powersgd():
    told = []
    model = SimpleNamespace(register_comm_hook=lambda state, hook: told.append(state))
    args, scaler = make_args("ddp", "--grad-compress", "powersgd"), SimpleNamespace(in_a_row=0)
    common.compress_gradients(model, args.grad_compress, scaler)
    (state,) = told
    assert (state.matrix_approximation_rank, state.start_powerSGD_iter) == (4, 10)


def test_port_of_several_nodes():
    argv = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "node0"]
    assert make_args("ddp", *argv).master_port == 29500
    args = make_args("ddp", *argv, "--master-port", "7", "--lr", "1")
    assert (args.master_port, args.lr) == (7, 1)
    args = make_args("ddp", "--seed", "2")
    assert (args.nnodes, args.node_rank, args.master_addr) == (1, 0, None)


def test_build_says_how_many_tensors_are_frozen(capsys):
    args = make_args("single", "--freeze", "conv1.*", "head.bias")
    machinery.tasks.build_net(args, machinery.tasks.load_task(args), torch.device("cpu"))
    assert capsys.readouterr().out == "frozen: 3 of 8 parameter tensors\n"
    args = make_args()
    machinery.tasks.build_net(args, machinery.tasks.load_task(args), torch.device("cpu"))
    assert capsys.readouterr().out == ""


FAILED, LOST = machinery.processes.FAILED, machinery.processes.LOST
ELSEWHERE = "a rank failed here, or a rank on another node was lost; start all nodes again with --resume auto"
SEVERAL = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", "7"]


@pytest.mark.parametrize("several", [False, True])
def test_what_the_ranks_are_told(several, monkeypatch):
    """The variables of torchrun, and the options as they were given."""
    monkeypatch.setattr(os, "environ", {"HOME": "/root", "RANK": "7", "MASTER_PORT": "1"})
    told = []
    monkeypatch.setattr("signal.pthread_sigmask", lambda *_: None)  # of the tests' own process
    monkeypatch.setattr("subprocess.Popen", lambda command, env: told.append((command, env)))
    argv = ["--lr", "1", *(SEVERAL if several else [])]
    machinery.launch.start(argv, 3, make_args("ddp", *argv), attempt=2)
    first = 3 if several else 0  # this is the second of two machines
    for local_rank, (command, environment) in enumerate(told):
        assert command == [sys.executable, str(ROOT / "train_ddp.py"), *argv]
        assert environment == {
            "HOME": "/root",
            "RANK": str(first + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": "6" if several else "3",
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "7" if several else "29500",
            "TORCHELASTIC_RESTART_COUNT": "2",
        }
    assert len(told) == 3


@pytest.fixture
def launches(monkeypatch, tmp_path):
    """Launch 2 ranks that do not start; return what each attempt found in its environment."""

    def launch(endings, *argv, saves=True):
        attempts = []

        def start(given, devices, args, attempt):
            assert devices == 2 and given == [*argv, "--output-dir", str(tmp_path)]
            attempts.append({"attempt": attempt, **os.environ})
            if saves:
                (tmp_path / "last.pt").touch()

        kept = {name: value for name, value in os.environ.items() if name == "PATH"}
        monkeypatch.setattr(os, "environ", kept)
        monkeypatch.setattr(machinery.launch, "start", start)
        monkeypatch.setattr(machinery.launch, "check_run", lambda args: None)
        monkeypatch.setattr(machinery.launch, "wait_for", lambda *_: endings[len(attempts) - 1])
        monkeypatch.setattr(sys, "argv", ["launch.py", "2", *argv, "--output-dir", str(tmp_path)])
        return machinery.launch.main(), attempts

    return launch


def test_launcher_restarts_three_times_on_one_machine(launches, capsys):
    code, attempts = launches([(FAILED, why) for why in ("lost", "", "first", "last")])
    assert code == 1 and [each["attempt"] for each in attempts] == [0, 1, 2, 3]
    causes = [each.get("LAUNCH_FAILURE") for each in attempts]
    assert causes == [None, "lost", "a rank failed, as it says above", "first"]
    for name in ("LAUNCH_PID", "TORCHELASTIC_RUN_ID", "LAUNCH_RENDEZVOUS_FILE"):
        assert len({each[name] for each in attempts}) == 1, "one run of one launcher"
    assert attempts[0]["LAUNCH_PID"] == str(os.getpid())
    for library in ("GLOO", "NCCL"):
        assert attempts[0][f"{library}_SOCKET_IFNAME"] == "lo", "nobody else can reach it"
    assert capsys.readouterr().err == "train_ddp.py: last\n"


@pytest.mark.parametrize(
    ("endings", "options", "saves", "code"),
    [
        ([(FAILED, "lost"), (0, "")], [], True, 0),
        ([(FAILED, "lost")], [], False, 1),  # the same would happen again
        ([(FAILED, "lost")], SEVERAL, True, 1),  # the other machine would have to know
        ([(1, "")], [], True, 1),  # the ranks ended together, for a reason that stays
        ([(2, "")], [], True, 2),
        ([(3, "")], [], True, 3),
        ([(130, "")], [], True, 130),
        ([(143, "")], [], True, 143),
    ],
    ids=[
        "well",
        "nothing saved",
        "several machines",
        "together",
        "argument",
        "diverged",
        "INT",
        "TERM",
    ],
)
def test_when_the_launcher_restarts(endings, options, saves, code, launches):
    found, attempts = launches(endings, *options, saves=saves)
    assert found == code and len(attempts) == len(endings)
    meets_in_a_file = "LAUNCH_RENDEZVOUS_FILE" in attempts[0]
    assert meets_in_a_file == (not options), "several machines meet at --master-addr"


@pytest.mark.parametrize("name", ["loss", "count", "event", "epoch", "global_step", 5])
def test_names_that_the_log_uses_itself_are_no_metrics(name):
    args = make_args()
    task = machinery.tasks.load_task(args)
    net = task.build_model(args).eval()
    dataset = task.build_datasets(args)[1]
    machinery.check.Samples(args, task, net, "cpu").check(dataset, [0, 1], "evaluation")
    task = task._replace(per_sample_metrics=lambda o, t: {"top1": t * 1.0, name: t * 1.0})
    with pytest.raises(common.UsageError, match=f"the log does not use itself, got {name!r}"):
        machinery.check.Samples(args, task, net, "cpu").check(dataset, [0, 1], "evaluation")


def test_neighbours_of_a_task_replace_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(TASKS)])
    (tmp_path / "task.py").write_text("from small import *\n")
    (tmp_path / "small.py").write_text((TASKS / "small.py").read_text())
    monkeypatch.delitem(sys.modules, "small", raising=False)
    machinery.tasks.load_task(make_args("single", "--task", str(tmp_path / "task.py")))
    assert sys.modules["small"].__file__ == str(tmp_path / "small.py")
    assert sys.path.index(str(tmp_path)) == len(sys.path) - 1
    monkeypatch.delitem(sys.modules, "small")


def test_optimizer_of_an_accelerator_goes_on_here(tmp_path, handlers):
    run = make_run(tmp_path)
    before = [group["fused"] for group in run.state.optimizer.param_groups]
    run.save("last.pt")
    run.files.log.close()
    path = run.files.directory / "last.pt"
    saved = torch.load(path, weights_only=True)
    for group in saved["optimizer"]["param_groups"]:
        group["fused"] = True
    torch.save(saved, path)
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
    task = machinery.tasks.load_task(args)
    assert task.per_sample_loss("o", "t") == ("o", "t", 0.25, 0.1), "and no default counts"
    assert task.per_sample_metrics("o", "t") == ("o", "t", 7, 30)


@pytest.mark.parametrize(
    ("codes", "nnodes", "expected"),
    [
        ([0, 0], 1, (0, "")),
        ([LOST, FAILED, LOST], 1, (FAILED, "")),  # who failed has told why; who lost it has not
        ([LOST, 2], 1, (2, "")),
        ([FAILED, 3], 1, (3, "")),
        ([FAILED, 143], 1, (143, "")),
        ([1, 1], 1, (1, "")),
        ([LOST, -9], 1, (FAILED, "process 1 was killed by SIGKILL")),
        ([LOST, 7], 1, (FAILED, "process 1 left with exit code 7")),
        ([0, LOST], 1, (FAILED, "a rank left before the end")),
        ([LOST, LOST], 2, (FAILED, ELSEWHERE)),
        ([LOST, FAILED], 2, (FAILED, ELSEWHERE)),
        ([2, LOST], 2, (2, "")),
    ],
)
def test_cause_of_a_failure_is_not_what_followed_from_it(codes, nnodes, expected, handlers):
    ended = [SimpleNamespace(exitcode=code) for code in codes]
    assert machinery.launch.wait_for(ended, nnodes, []) == expected
