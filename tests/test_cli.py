"""Bad input is refused before any process is started: exit code 2, one clear line that names the option, nothing written."""

import os
import subprocess
import sys

import pytest
from harness import ROOT

import options

FILES = {
    "three.py": "def build_datasets(args): ...\ndef build_model(args): ...\ndef per_sample_loss(outputs, targets): ...\n",
    "syntax.py": "def build_datasets(args:\n",
    "raises.py": "import no_such_module_at_all\n",
    "asks.py": "build_datasets = build_model = per_sample_metrics = print\ndef per_sample_loss(outputs, targets, *, colour): ...\n",
    "junk.pt": "this is no checkpoint",
    "empty.pt": "",
}

# (mode, N, options, what the one line must say); TMP stands for a folder with FILES in it and a finished run in TMP/run
CASES = [
    ("single", 1, "--batch-size 0", "--batch-size: must be at least 1, got 0"),
    ("single", 1, "--batch-size -8", "--batch-size: must be at least 1, got -8"),
    ("single", 1, "--batch-size many", "--batch-size: invalid int value: 'many'"),
    ("single", 1, "--batch-size 3.5", "--batch-size: invalid int value: '3.5'"),
    ("single", 1, "--batch-size 1438", "--batch-size 1438 is larger than the training set (1437 samples)"),
    ("single", 1, "--batch-size", "--batch-size: expected one argument"),
    ("single", 1, "--epochs -1", "--epochs: must be at least 1, got -1"),
    ("single", 1, "--epochs 0", "--epochs: must be at least 1, got 0"),
    ("single", 1, "--accum-steps 0", "--accum-steps: must be at least 1, got 0"),
    ("single", 1, "--accum-steps 65", "--batch-size 64 cannot be cut into 1 devices x 65 accumulation steps; it must be at least 65"),
    ("ddp", 65, "", "--batch-size 64 cannot be cut into 65 devices x 1 accumulation steps; it must be at least 65"),
    ("spawn", 65, "", "--batch-size 64 cannot be cut into 65 devices"),
    ("dp", 65, "", "--batch-size 64 cannot be cut into 65 devices"),
    ("ddp", 4, "--accum-steps 20", "it must be at least 80"),
    ("dp", 0, "", "--replicas: must be at least 1, got 0"),
    ("spawn", 0, "", "--nproc: must be at least 1, got 0"),
    ("single", 1, "--model resnet81", "--model resnet81: unknown; close names: resnet18"),
    ("single", 1, "--model DigitNet", "--model DigitNet: unknown; close names: digitnet"),
    ("single", 1, "--dataset imagenet", "--dataset: invalid choice: 'imagenet'"),
    ("single", 1, "--dataset cifar10", "--dataset cifar10 needs --data-dir"),
    ("single", 1, "--dataset cifar10 --data-dir TMP/nowhere", "--data-dir TMP/nowhere: no such folder"),
    ("single", 1, "--dataset cifar10 --data-dir TMP", "--data-dir TMP: no cifar10 here; --download fetches it"),
    ("single", 1, "--dataset imagefolder --data-dir TMP", "--data-dir TMP: needs train/ and val/ (or test/)"),
    ("single", 1, "--resume TMP/missing.pt", "--resume TMP/missing.pt: no such file"),
    ("single", 1, "--resume TMP", "--resume TMP: no such file"),
    ("single", 1, "--resume TMP/junk.pt", "--resume TMP/junk.pt: damaged, or not a checkpoint"),
    ("single", 1, "--resume TMP/empty.pt", "--resume TMP/empty.pt: damaged, or not a checkpoint"),
    ("single", 1, "--resume auto", "--resume auto needs --output-dir"),
    ("single", 1, "--eval-only", "--eval-only needs --resume FILE"),
    ("single", 1, "--amp fp16 --dtype float64", "--amp fp16 computes in half precision and --dtype float64 in double"),
    ("single", 1, "--amp bf16 --dtype float64", "--amp bf16 computes in half precision and --dtype float64 in double"),
    ("spawn", 2, "--nnodes 2 --dist-url tcp://no-such-host.invalid:29500", "no-such-host.invalid is no known host"),
    ("single", 1, "--amp fp8", "--amp: invalid choice: 'fp8'"),
    ("single", 1, "--lr nan", "--lr: must be at least 0, got nan"),
    ("single", 1, "--lr inf", "--lr: must be at least 0, got inf"),
    ("single", 1, "--lr -0.1", "--lr: must be at least 0, got -0.1"),
    ("single", 1, "--lr 0,1", "--lr: invalid float value: '0,1'"),
    ("single", 1, "--momentum 1.5", "--momentum: must be 0 to 1, got 1.5"),
    ("single", 1, "--label-smoothing 2", "--label-smoothing: must be 0 to 1, got 2"),
    ("single", 1, "--clip-grad-norm 0", "--clip-grad-norm: must be at least"),
    ("single", 1, "--warmup-epochs -1", "--warmup-epochs: must be at least 0, got -1"),
    ("single", 1, "--schedule step", "--schedule step needs --step-epochs"),
    ("single", 1, "--schedule linear", "--schedule: invalid choice: 'linear'"),
    ("single", 1, "--nesterov --momentum 0", "--nesterov needs --optimizer sgd and a momentum above 0"),
    ("single", 1, "--nesterov --optimizer adamw", "--nesterov needs --optimizer sgd"),
    ("single", 1, "--freeze conv9.*", "--freeze conv9.*: no parameter has such a name; there are conv1.weight"),
    ("single", 1, "--freeze *", "--freeze *: nothing is left to train"),
    ("single", 1, "--seed -1", "--seed: must be 0 to"),
    ("single", 1, "--seed 9223372036854775808", "--seed: must be 0 to"),
    ("single", 1, "--workers -2", "--workers: must be at least 0, got -2"),
    ("single", 1, "--device cuda:7", "--device cuda:7: not on this machine; available: auto, cpu"),
    ("single", 1, "--device gpu", "--device gpu: not on this machine"),
    ("single", 1, "--timeout 0", "--timeout: must be at least 1, got 0"),
    ("single", 1, "--save-every 0", "--save-every: must be at least 1, got 0"),
    ("single", 1, "--no-such-option", "unrecognized arguments: --no-such-option"),
    ("single", 1, "--batch 32", "unrecognized arguments: --batch 32"),
    ("single", 1, "stray", "unrecognized arguments: stray"),
    ("single", 1, "--replicas 2", "unrecognized arguments: --replicas 2"),
    ("single", 1, "--grad-compress bf16", "--grad-compress bf16: there is nothing to send in one process"),
    ("dp", 2, "--sync-bn", "--sync-bn: nn.DataParallel cannot synchronise BatchNorm"),
    ("spawn", 2, "--nnodes 2", "--nnodes 2 needs --dist-url tcp://HOST:PORT"),
    ("spawn", 2, "--nnodes 2 --dist-url tcp://localhost:2000 --node-rank 2", "--node-rank 2 must be below --nnodes 2"),
    ("spawn", 2, "--dist-url localhost", "--dist-url localhost: must be tcp://HOST:PORT"),
    ("single", 1, "--task TMP/none.py", "--task TMP/none.py: no such file"),
    ("single", 1, "--task TMP/three.py", "missing: per_sample_metrics"),
    ("single", 1, "--task TMP/syntax.py", "--task TMP/syntax.py, line 1: SyntaxError"),
    ("single", 1, "--task TMP/raises.py", "--task TMP/raises.py, line 1: ModuleNotFoundError: No module named 'no_such_module_at_all'"),
    ("single", 1, "--task TMP/asks.py", "per_sample_loss asks for colour, which is no option"),
    ("single", 1, "--output-dir TMP/junk.pt/run", "--output-dir TMP/junk.pt/run: TMP/junk.pt is not a folder"),
    ("single", 1, "--output-dir TMP/run", "--output-dir TMP/run already holds a run; continue it with --resume auto"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad input")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "run").mkdir()
    (folder / "run" / "last.pt").write_bytes(b"")
    return folder


@pytest.mark.parametrize(("mode", "n", "arguments", "message"), CASES, ids=[f"{mode}-{n} {text}" for mode, n, text, _ in CASES])
def test_bad_input_is_refused_by_name(mode, n, arguments, message, folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    argv = [part.replace("TMP", str(folder)) for part in arguments.split()]
    with pytest.raises(options.UsageError) as error:
        options.main(mode, n, argv)
    assert message.replace("TMP", str(folder)) in str(error.value)
    assert "\n" not in str(error.value), "one line"
    assert sorted(folder.rglob("*")) == before, "nothing written"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["bash", "run.sh"], "unknown mode ''; use: bash run.sh single|dp|ddp|spawn"),
        (["bash", "run.sh", "fsdp", "2"], "unknown mode 'fsdp'"),
        (["bash", "run.sh", "ddp", "0"], "N = 0: a run needs at least one device"),
        (["bash", "run.sh", "spawn", "-3"], "N = -3: a run needs at least one device"),
        (["bash", "run.sh", "single", "2"], "N = 2: single trains on one device"),
        (["bash", "run.sh", "ddp", "2", "--model", "nope"], "train_ddp.py: error: --model nope: unknown"),
        ([sys.executable, "train_ddp.py"], "no launcher ('RANK' is not set). Start it with torchrun"),
        ([sys.executable, "train_spawn.py", "--nproc", "2", "--batch-size", "5000"], "--batch-size 5000 is larger than the training set"),
        ([sys.executable, "train_single.py", "--lr", "fast"], "--lr: invalid float value: 'fast'"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)
def test_bad_command_line_ends_with_code_2_and_one_line(command, message, tmp_path):
    environment = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 2
    assert message in finished.stderr and finished.stderr.count("\n") == 1, finished.stderr
    assert finished.stdout == ""


def test_more_processes_than_accelerators_is_refused(monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: options.torch.device("cuda"))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    for mode, argv, world_size in [("ddp", [], 3), ("dp", ["--replicas", "3"], None), ("spawn", ["--nproc", "3"], None)]:
        with pytest.raises(options.UsageError, match="3 processes or replicas, but only 2 accelerators; use 2, or --device cpu"):
            options.parse_args(mode, argv, world_size)
        options.parse_args(mode, [*argv, "--device", "cpu"], world_size)
    assert options.parse_args("dp", []).replicas == options.parse_args("spawn", []).nproc == 2, "by default all accelerators"


@pytest.mark.parametrize("mode", ["single", "dp", "ddp", "spawn"])
def test_booleans_can_be_turned_off_and_help_is_readable(mode):
    parser = options.build_parser(mode)
    text = parser.format_help()
    for name, value in vars(options.parse_args(mode, [])).items():
        if isinstance(value, bool):
            option = name.replace("_", "-")
            assert getattr(parser.parse_args([f"--{option}"]), name) is True
            assert getattr(parser.parse_args([f"--{option}", f"--no-{option}"]), name) is False
    visible = [action for action in parser._actions if action.help != "==SUPPRESS=="]
    assert all(action.help for action in visible) and len(visible) > 40
    assert all(group in text for group in ("data:", "model:", "optimization:", "speed and precision:", "distribution:", "run:"))


def test_options_have_the_same_names_and_defaults_in_all_modes():
    own = {"dp": {"replicas"}, "spawn": {"nproc", "nnodes", "node_rank", "dist_url"}}
    plain = vars(options.parse_args("single", []))
    for mode in ("dp", "ddp", "spawn"):
        args = vars(options.parse_args(mode, []))
        assert {name: value for name, value in args.items() if name not in own.get(mode, ())} == plain
        assert args.keys() - plain.keys() == own.get(mode, set())


@pytest.mark.parametrize("spelling", ["--local-rank=3", "--local_rank=3"])
def test_local_rank_is_accepted_in_both_spellings(spelling):
    assert options.parse_args("ddp", [spelling]).local_rank == 3
