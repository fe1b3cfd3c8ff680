"""Command lines and files that cannot be right: one line that names the option, exit code 2, nothing written.

Also those that are unusual but right, and files that mean harm.
"""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import ROOT, build_and_check
from single import HEAD, SMALL, single

from engine.options import parse_args

DATA = "def build_datasets(args):\n    return "
LOSS = "def per_sample_loss(outputs, targets):\n    return "
FILES = {
    "three.py": "def build_datasets(args): ...\ndef build_model(args): ...\ndef per_sample_loss(o, t): ...\n",
    "told.py": f"{HEAD}class Told(list):\n    def set_epoch(self, epoch): pass\n{DATA}Told([(torch.zeros(1), 0)] * 99), [(torch.zeros(1), 0)]\n",
    "sparse.py": f"{HEAD}build_model = lambda args: nn.Sequential(nn.Embedding(9, 9, sparse=True))\n",
    "hook.py": f"{HEAD}def build_model(args):\n    net = nn.Linear(64, 10)\n    net.bias.register_hook(lambda gradient: gradient / 2)\n    return net\n",
    "divided.py": f"{HEAD}{LOSS}nn.functional.cross_entropy(outputs, targets, reduction='none') / len(targets)\n",
    "padding.py": f"{HEAD}{LOSS}outputs[:, 0].square() / targets.clamp(max=8).amax()  # a longest one is in each half\n",
    "metric.py": f"{HEAD}def per_sample_metrics(outputs, targets):\n    return {{'r2': (outputs[:, 0] - outputs.mean()).square()}}\n",
    "weight.py": f"{HEAD}def loss_weights(targets):\n    return (targets + 1) / (targets + 1).sum()\n",
    "packed.py": f"{HEAD}class Net(nn.Linear):\n    def forward(self, images): return super().forward(torch.stack(images).flatten(1).float())\n"
    "def build_model(args): return Net(64, 10)\n"
    "def collate(samples): return [x for x, _ in samples], torch.stack([t for _, t in samples])\n",
    "junk.pt": "this is no checkpoint",
}  # fmt: skip
# mode and N | options | what the line must say. TMP is a folder with FILES in it; TMP/run and TMP/logged hold runs
CASES = r"""
single 1 | --batch-size 0 | --batch-size: must be ... at least 1, got 0
single 1 | --lr fast | --lr: ... fast
single 1 | --lr nan | --lr: must be a number
single 1 | --momentum 1.01 | --momentum: must be a number, 0 to 1, got 1.01
single 1 | --amp bf8 | --amp
single 1 | --batch-size 1438 | --batch-size 1438 ... 1437
single 1 | --accum-steps 65 | --batch-size 64 ... 65 micro-batches
ddp 9 | --batch-size 8 | --batch-size 8 ... 9 devices
dp 9 | --batch-size 8 | --batch-size 8 ... 9 devices
spawn 9 | --batch-size 8 | --batch-size 8 ... 9 devices
single 1 | --resume TMP/missing.pt | --resume TMP/missing.pt: no such
single 1 | --resume TMP/junk.pt | --resume TMP/junk.pt: damaged
single 1 | --resume TMP/other.pt | --resume TMP/other.pt: not a checkpoint of this program, format 5
single 1 | --resume auto | --resume auto needs --output-dir
single 1 | --eval-only | --eval-only needs --resume FILE or --weights FILE
single 1 | --eval-only --resume auto --output-dir TMP/new | --eval-only needs
single 1 | --weights TMP/missing.pt | --weights TMP/missing.pt: no such file
single 1 | --weights TMP/junk.pt | --weights TMP/junk.pt: damaged
single 1 | --weights TMP/foreign.pt | --weights TMP/foreign.pt: it has no tensor of the right name and shape for conv1.weight
single 1 | --amp fp16 --dtype float64 | --amp fp16 is half precision
single 1 | --schedule step | --schedule step needs --step-epochs
single 1 | --freeze conv9.* | --freeze conv9.*: no parameter has such a name; use conv1.weight
single 1 | --device tpu | --device
single 1 | --batch_size 32 | --batch_size 32
single 1 | --batch 32 | --batch 32
dp 2 | --compile | --compile ... nn.DataParallel; use ddp
dp 2 | --task TMP/packed.py | dp cuts tensors [n, ...] alone
spawn 2 | --nnodes 2 --node-rank 2 | --nnodes 2 needs --node-rank below it
spawn 2 | --nnodes 2 | --nnodes 2 needs ... --dist-url
fsdp 2 | --amp fp16 | --amp fp16 ... use --amp bf16
fsdp 2 | --channels-last | --channels-last
single 1 | --task imges | --task imges: no such file ... digits, detect, gpt, images, pose
single 1 | --task TMP/three.py | --task TMP/three.py: the file must define per_sample_metrics
single 1 | --task TMP/told.py | --task TMP/told.py: set_epoch is not called; draw in __getitem__
ddp 2 | --task TMP/sparse.py | --task TMP/sparse.py: 0 has sparse gradients
fsdp 2 | --task TMP/hook.py | --task TMP/hook.py: bias has a hook
single 1 | --task TMP/divided.py | in a part of it: other samples must not change it; do not divide by the number of samples
ddp 2 | --task TMP/padding.py | --task TMP/padding.py: loss of ... in a part of it ... keep padding out of the model
single 1 | --task TMP/metric.py | --task TMP/metric.py: r2 of ... in a part of it ... dataset_metrics may compare samples
ddp 2 | --task TMP/weight.py | weight of loss of
single 1 | --task images | --dataset imagefolder needs --data-dir
single 1 | --output-dir TMP/junk.pt/run | --output-dir TMP/junk.pt/run: cannot write in TMP/junk.pt
single 1 | --output-dir TMP/closed/run | --output-dir TMP/closed/run: cannot write in TMP/closed
single 1 | --output-dir TMP/run | --output-dir TMP/run already holds a run; go on with it by --resume auto
single 1 | --output-dir TMP/logged | --output-dir TMP/logged already holds a run
"""
CASES = [line.split(" | ") for line in CASES.strip().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name in ("closed", "run", "logged"):
        (folder / name).mkdir()
    (folder / "run" / "best.pt").write_bytes(b"")
    (folder / "logged" / "metrics.jsonl").write_text("{}")
    torch.save({"layer.weight": torch.zeros(3)}, folder / "foreign.pt")
    torch.save({"format": 4, "config": {}}, folder / "other.pt")
    return folder


def contents(folder):
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*")}


@pytest.fixture
def quiet(folder, monkeypatch):
    """Be in the folder, with the same words on every machine."""
    access = os.access  # to root no folder is read-only
    monkeypatch.setattr(
        os, "access", lambda path, how: Path(path).name != "closed" and access(path, how)
    )
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 0)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "argv", ["mine.py"])
    monkeypatch.chdir(folder)


@pytest.mark.parametrize(("device", "options", "message"), CASES, ids=[f"{mode} {text}" for mode, text, _ in CASES])  # fmt: skip
def test_bad_input_is_refused_by_name(device, options, message, folder, quiet, capfd):
    mode, n = device.split()
    before = contents(folder)
    with pytest.raises(SystemExit) as end:
        build_and_check(
            mode, int(n), [word.replace("TMP", str(folder)) for word in options.split()]
        )
    assert end.value.code == 2 and contents(folder) == before, "nothing written"
    out, err = capfd.readouterr()
    parts = message.replace("TMP", str(folder)).split(" ... ")
    assert re.search(".*".join(map(re.escape, parts)), err), err
    assert err.count("\n") == 1 and re.match(r"train_\w+\.py: error: ", err) and not out


@pytest.mark.parametrize(
    "options",
    [
        "--epochs 1",  # shorter than the default warm-up
        "--epochs 10 --schedule step --step-epochs 5 15",  # a part of a longer run
        "--seed 9223372036854775807 --lr 0 --weight-decay 0 --momentum 1 --timeout 1e9",
        "--output-dir TMP/new/folder/of/many",
        "--resume auto --output-dir TMP/new",
        "--resume auto --output-dir TMP/logged",  # stopped before it saved
        "--task TMP/divided.py --no-check",
        "--local-rank=3",  # of old launchers
    ],
)
def test_unusual_but_good_input_is_accepted(options, folder, quiet):
    before = contents(folder)
    build_and_check("single", 1, [word.replace("TMP", str(folder)) for word in options.split()])
    assert contents(folder) == before, "a check writes nothing"


def run_sh(folder, *words):
    environment = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "run.sh"), *words]
    options = {"capture_output": True, "text": True, "timeout": 120, "cwd": folder}
    return subprocess.run(command, env=environment, **options)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("fdsp 2", "unknown mode 'fdsp'; use single, dp, ddp, spawn, fsdp"),
        ("ddp a[$(touch owned)]", "N = a[$(touch owned)]: must be a whole number"),
        ("ddp 2 --batch-size 1 --device cpu", "train_ddp.py: error: --batch-size 1"),
        pytest.param("fsdp 2 --amp fp16 --device cpu", "train_fsdp.py: error: --amp fp16", marks=pytest.mark.full),
        pytest.param("spawn 2 --lr fast", "train_spawn.py: error: ", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_no_rank_is_started_for_a_bad_command_line(words, message, tmp_path):
    (tmp_path / "difflib.py").write_text("open('owned', 'w')")  # anybody's, and never run
    done = run_sh(tmp_path, *words.split(maxsplit=1 if "$" in words else -1))
    (tmp_path / "difflib.py").unlink()
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == "" and not [*tmp_path.iterdir()]


# ------------------------------------------------------------------------------- the option table


def test_options_have_the_same_names_and_defaults_in_all_modes_and_can_be_turned_off():
    own = {"dp": {"replicas"}, "spawn": {"nproc", "nnodes", "node_rank", "dist_url"}, "fsdp": {"shards"}}  # fmt: skip
    plain = vars(parse_args("single", []))
    for mode in ("dp", "ddp", "spawn", "fsdp"):
        args = vars(parse_args(mode, []))
        assert args.keys() - plain.keys() == own.get(mode, set())
        for name in plain.keys() - {"parallel_mode", "output_dir", "config"}:
            assert args[name] == plain[name], (mode, name)
    assert len(plain) <= 41 + len({"local_rank", "config", "changes", "parallel_mode"})
    for name, value in plain.items():
        if isinstance(value, bool):
            option = name.replace("_", "-")
            on, off = (
                vars(parse_args("single", [f"--{o}", "--weights", __file__]))
                for o in (option, f"no-{option}")
            )
            assert (on[name], off[name]) == (True, False)


def test_of_an_option_that_is_given_again_the_last_one_counts_and_paths_are_those_of_the_start(
    tmp_path, monkeypatch
):
    args = parse_args("single", "--lr 1 --freeze conv* --lr 2 --freeze !conv3.* head.bias".split())
    assert args.lr == 2 and args.freeze == ["!conv3.*", "head.bias"]
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(f"{HEAD}# whole\n")
    torch.save({}, "a.pt")
    args = parse_args("single", "--task mine.py --weights a.pt --output-dir d".split())
    found = [args.task, args.weights, args.output_dir]
    assert found == [str(tmp_path / name) for name in ("mine.py", "a.pt", "d")]
    folder = Path(parse_args("ddp", ["--task", "mine.py"]).output_dir)
    assert folder.parent == tmp_path / "runs" and folder.name.startswith("mine-")


def test_evaluation_batch_is_a_micro_batch_of_at_most_128_unless_it_is_said():
    for words, size in (("60", 60), ("60 --accum-steps 4", 15), ("512", 128), ("60 --eval-batch-size 300", 300)):  # fmt: skip
        assert parse_args("single", f"--batch-size {words}".split()).eval_batch_size == size


OWN = f"""{HEAD}
def add_options(parser):
    parser.add_argument("--anchor-sizes", type=float, nargs="+", default=[1.0], help="of boxes")
    parser.add_argument("--tag", action="append", default=[])
    parser.add_argument("--deep", action="count", default=0)
def build_model(args):
    from task import DigitNet
    net = DigitNet()
    net.conv1.bias.data.fill_(args.anchor_sizes[-1])
    args.lr, args.more = 7.0, str(args)  # what a task does to them is no business of a checkpoint
    return net
"""


def test_options_of_a_task_are_parsed_stored_and_shown_in_its_help(tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    argv = ["--task", tmp_path / "own.py", *SMALL[2:], "--epochs", "1", "--freeze", "conv1.bias"]
    argv += ["--lr", "0.01"]
    first = single(tmp_path, *argv, "--anchor-sizes", "2", "3.5", *"--tag a --tag b --deep --deep".split())  # fmt: skip
    checkpoint = first.checkpoint()
    config = checkpoint["config"]
    assert config["anchor_sizes"] == [2.0, 3.5] and (checkpoint["model"]["conv1.bias"] == 3.5).all()
    assert config["lr"] == 0.01 and "more" not in config, "the options as they were parsed"
    # A resumed run: those that are named, never both; all others as they were
    again = single(tmp_path, "--resume", "auto", "--epochs", "2", *"--tag c --deep".split())
    assert again.code == 0 and "--tag ['c'] (['a', 'b'] before)" in again.out, again.err
    config = again.checkpoint()["config"]
    assert (config["tag"], config["deep"], config["lr"]) == (["c"], 1, 0.01)
    assert config["anchor_sizes"] == [2.0, 3.5]
    for words, there in ((argv, True), ([], False)):
        with pytest.raises(SystemExit) as end:
            parse_args("ddp", [*map(str, words), "--help"])
        shown = capsys.readouterr().out
        assert end.value.code == 0 and "--batch-size" in shown
        assert bool(re.search(r"\ntask own:\n +--anchor-sizes [^-]* of boxes", shown)) == there


# -------------------------------------------------------------------------------- hostile files


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("option", ["--resume", "--weights"])
@pytest.mark.parametrize("kind", ["torch's file", "an old file", "a pickle"])
def test_file_that_means_harm_is_refused_and_does_not_run(kind, option, tmp_path):
    path, owned = tmp_path / "last.pt", tmp_path / "owned"
    content = {"format": 5, "config": {"lr": Hostile(owned)}, "model": {}}
    if kind == "a pickle":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "torch's file")
    refused = single(tmp_path, *SMALL, option, path)
    assert refused.code == 2 and f"{option} {path}: damaged, or no file of tensors" in refused.err
    assert refused.err.count("\n") == 1 and not owned.exists() and not refused.folder.exists()
    run = (
        pickle.loads if kind == "a pickle" else lambda content: torch.load(path, weights_only=False)
    )
    run(path.read_bytes())
    assert owned.exists(), "the file was hostile indeed"
