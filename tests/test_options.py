"""The command line: help, defaults, the range of each number, and the check before a run."""

import os
import re
from pathlib import Path

import pytest
import torch
from harness import ROOT, make_args, train, walk
from patches import checked, without_speed
from short_runs import EVERYTHING

import common
import machinery.cli
import machinery.run
import machinery.usertask

# A checkpoint of a run at its beginning, as far as the command line is concerned
EMPTY = {"format": common.FORMAT, "epoch": 0, "step": 0, "global_step": 0, "config": {}}


@pytest.mark.parametrize("mode", ["single", "spawn"])
def test_booleans_can_be_turned_off_and_help_is_readable(mode):
    parser = machinery.cli.build_parser(mode)
    text = parser.format_help()
    for name, value in vars(machinery.cli.parse_args(mode, [])).items():
        if isinstance(value, bool):
            option = name.replace("_", "-")
            assert getattr(parser.parse_args([f"--{option}"]), name) is True
            assert getattr(parser.parse_args([f"--{option}", f"--no-{option}"]), name) is False
    assert len(re.findall(r"^  --", text, re.MULTILINE)) > 40
    assert all(entry.count("(default: ") <= 1 for entry in text.split("\n  --")), "said once"
    assert "default: None" not in text and "default: []" not in text
    assert "  --compile, --no-compile\n" in text
    assert text.index("--task") < text.index("--resume") < text.index("--workers"), "most used"
    groups = ["data", "model", "optimization", "speed and precision", "distribution", "run"]
    assert all(f"{group}:" in text for group in groups)


def test_options_have_the_same_names_and_defaults_in_all_modes():
    own = {"dp": {"replicas"}, "spawn": {"nproc", "nnodes", "node_rank", "dist_url"}}
    own |= {"fsdp": {"shard_size", "reduce_every", "shards"}}
    plain = vars(machinery.cli.parse_args("single", []))
    for mode in ("dp", "ddp", "spawn", "fsdp"):
        args = vars(machinery.cli.parse_args(mode, []))
        shared = {name: value for name, value in args.items() if name not in own.get(mode, ())}
        shared["output_dir"] = plain["output_dir"]  # it has the time in its name
        assert shared == plain | {"parallel_mode": mode}
        assert args.keys() - plain.keys() == own.get(mode, set())


def test_of_an_option_that_is_given_again_the_last_one_counts():
    args = make_args("single", *"--lr 1 --freeze conv* --lr 2 --freeze !conv3.* head.bias".split())
    assert args.freeze == ["!conv3.*", "head.bias"] and make_args().freeze == []
    assert args.lr == 2


RANGES = {  # the first and the last that are accepted; what is just outside
    "batch-size": (["1"], ["0"]),
    "lr": (["0", "1e9"], ["-1e-9"]),
    "momentum": (["0", "1"], ["-1e-9", "1.0000001"]),
    "clip-grad-norm": (["1e-12"], ["0", "1e-13"]),
    "timeout": (["1", "1000000000"], ["0.99", "1000000001"]),
    "seed": (["0", str(2**63 - 1)], ["-1", str(2**63)]),
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


def test_folder_of_a_run_without_a_name(tmp_path, monkeypatch):
    """It is new also if torchrun's run id is that of another run, or left over."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    folder = Path(make_args("ddp", "--task", "images").output_dir)
    assert folder.parent == tmp_path / "runs"
    assert re.fullmatch(r"images-\d{8}-\d{6}-[0-9a-f]{6}", folder.name)


def test_evaluation_may_read_the_directory_of_a_run_that_it_cannot_write_to(tmp_path, monkeypatch):
    torch.save(EMPTY, tmp_path / "best.pt")
    monkeypatch.setattr(os, "access", lambda *_: False)
    directory = ["--output-dir", str(tmp_path), "--resume", str(tmp_path / "best.pt")]
    make_args("single", "--eval-only", *directory)
    with pytest.raises(common.UsageError, match="cannot write"):
        make_args("single", *directory)


def test_paths_are_those_of_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").touch()
    torch.save(EMPTY, "a.pt")
    args = make_args(
        "single", *"--task mine.py --resume a.pt --weights a.pt --output-dir d".split()
    )
    found = [args.task, args.resume, args.weights, args.output_dir]
    assert found == [str(tmp_path / name) for name in ("mine.py", "a.pt", "a.pt", "d")]


def test_ranks_of_torchrun_forget_the_launcher_around_it(monkeypatch):
    """A sweep that runs within a rank of run.sh: its ranks would meet those of the outer run."""
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none", "LAUNCH_PID": "1"}
    environment["LAUNCH_RENDEZVOUS_FILE"] = "/tmp/outer"
    monkeypatch.setattr(os, "environ", environment)
    make_args("ddp")
    assert machinery.rendezvous.init_method() == "env://"


# --------------------------------------------------------------------------- the check before a run


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("ddp", 2)])
def test_check_changes_no_bit_of_the_run(mode, n, tmp_path):
    """Not the weights, the statistics of BatchNorm, the momentum, or what is drawn."""
    argv = (*EVERYTHING, "--epochs", "1", "--average", "ema")
    plain = train(mode, n, *argv, "--no-check", folder=tmp_path / "plain", patch=checked)
    result = train(mode, n, *argv, folder=tmp_path / "checked", patch=checked)
    assert result.code == plain.code == 0, result.err + plain.err
    assert without_speed(result.lines) == without_speed(plain.lines)
    kept, wanted = (list(walk(run.checkpoint())) for run in (result, plain))
    pairs = [(a, b) for a, b in zip(kept, wanted, strict=True) if isinstance(b, torch.Tensor)]
    assert len(pairs) > 15 and all(a.equal(b) for a, b in pairs)


LAZY = """import functools, torch
from torch.nn import functional as F
class Records(torch.utils.data.Dataset):
    file = None
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, index):
        if self.file is None:  # each loader worker opens its own
            self.file = open(PATH, "rb", buffering=0)
        self.file.seek(8 * index)
        number = self.file.read(4) + self.file.read(4)
        return torch.tensor([float(index)]), torch.tensor(int(int.from_bytes(number, "little") == index))
def build_datasets(args): return Records(400), Records(100)
def build_model(args): return torch.nn.Linear(1, 2)
per_sample_loss = functools.partial(F.cross_entropy, reduction="none")
def per_sample_metrics(outputs, targets): return {"right": targets.float()}
train_metrics = per_sample_metrics
"""


def test_loader_workers_share_no_file_with_the_check(tmp_path):
    """Workers are forked before the check reads a sample: a fork would share the place in a file that is open."""
    (tmp_path / "numbers").write_bytes(b"".join(i.to_bytes(8, "little") for i in range(400)))
    (tmp_path / "lazy.py").write_text(LAZY.replace("PATH", repr(str(tmp_path / "numbers"))))
    argv = "--batch-size 8 --eval-batch-size 2 --epochs 3 --workers 4 --log-every 1000".split()
    argv += ["--task", str(tmp_path / "lazy.py")]
    result = train("single", 1, *argv, folder=tmp_path, patch=checked)
    assert result.code == 0, result.err
    assert [line["right"] for line in result.lines] == [1.0] * 6


MEAN = """from task import build_datasets, build_model, per_sample_metrics
def per_sample_loss(outputs, targets): return outputs.mean()
"""


@pytest.mark.parametrize("mode", ["single", "dp", "ddp", "spawn", "fsdp"])
def test_script_alone_checks_too(mode, tmp_path):
    """Not only `run.sh`: a task whose loss cannot be right is found before the first step."""
    (tmp_path / "mean.py").write_text(MEAN)
    result = train(mode, 1, "--task", tmp_path / "mean.py", folder=tmp_path, patch=checked)
    last = result.err.splitlines()[-1]
    assert result.code == 2 and "of the training set: ValueError: loss must be one number" in last
    assert f"error: --task {tmp_path / 'mean.py'}: per_sample_loss or loss_weights" in last


def test_check_can_be_left_out(tmp_path):
    (tmp_path / "mean.py").write_text(MEAN)
    argv = ("--task", tmp_path / "mean.py", "--no-check")
    result = train("single", 1, *argv, folder=tmp_path, patch=checked)
    assert result.code == 1 and "train_one_epoch" in result.err, "found in the first step"


def test_directory_with_only_the_best_checkpoint_is_taken(tmp_path):
    torch.save(EMPTY, tmp_path / "best.pt")
    with pytest.raises(common.UsageError, match="already holds a run"):
        make_args("single", "--output-dir", str(tmp_path))
    make_args("single", "--output-dir", str(tmp_path), "--resume", str(tmp_path / "best.pt"))


def test_directory_that_another_run_fills_meanwhile_is_refused(tmp_path):
    text = (
        "from task import *\nfrom task import build_datasets as both\ndef build_datasets(args):\n"
    )
    text += "    folder = Path(args.output_dir)\n    folder.mkdir()\n"
    text += "    (folder / 'last.pt').write_text('of a finished run')\n    return both(args)\n"
    (tmp_path / "late.py").write_text(text)
    result = train("single", 1, "--task", tmp_path / "late.py", folder=tmp_path)
    assert result.code == 2 and "already holds a run" in result.err
    assert (result.folder / "last.pt").read_text() == "of a finished run"


def test_name_of_a_task_is_a_file_in_tasks():
    for name in ("images", str(ROOT / "tasks" / "images.py")):
        args = make_args("single", "--task", name)
        assert args.task == str(ROOT / "tasks" / "images.py") and args.model == "resnet9"
    with pytest.raises(
        common.UsageError, match=r"or one of detect, gpt, images, pose, digits; got 'image'"
    ):
        make_args("single", "--task", "image")


@pytest.mark.parametrize("spelling", ["--local-rank=3", "--local_rank=3"])
def test_local_rank_is_accepted_in_both_spellings(spelling):
    assert machinery.cli.parse_args("ddp", [spelling]).local_rank == 3
