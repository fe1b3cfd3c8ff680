"""The other programs of examples/: they run, learn, and compute the same at every world size."""

import functools
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from harness import ROOT, TASKS, deviation, record_gradients, run_processes, train
from launches import free_port
from patches import after_step

import sampling

# ------------------------------------- minimal_single.py, minimal_ddp.py, minimal_loader*.py

SCRIPT = ["--task", str(TASKS / "minimal.py"), *"--dtype float64 --epochs 2 --lr 0.1".split()]
SCRIPT += "--batch-size 64 --warmup-epochs 0 --weight-decay 0 --device cpu --workers 0".split()


def rank_of_minimal(script, rank, n, port, epochs, file, patch):
    """Run a script of examples/ as one rank of torchrun, in float64."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_default_dtype(torch.float64)
    sys.path.append(str(ROOT / "examples"))
    record_gradients(file.with_name(f"gradients{rank}"), 1)
    if patch:
        patch()
    importlib.import_module(script).main(epochs, file)


def run_minimal(script, n, folder, epochs=2, patch=None):
    """Run a script on n ranks; return (exit codes, lines, content of the file)."""
    folder.mkdir(exist_ok=True)
    file, port, ranks = folder / "minimal.pt", free_port(), range(n)
    arguments = {"port": port, "epochs": epochs, "file": file, "patch": patch}
    targets = [functools.partial(rank_of_minimal, script, rank, n, **arguments) for rank in ranks]
    results = run_processes(targets, folder)
    codes = [code for code, _, _ in results]
    assert patch or codes == [0] * len(ranks), results
    return codes, results[0][1].splitlines(), torch.load(file, weights_only=True)


def order_of_minimal(length, seed, epoch):
    return torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).numpy()


def use_order_of_minimal(rank):
    sampling.epoch_order = order_of_minimal


@pytest.mark.parametrize(
    ("mode", "n"), [("single", 1), pytest.param("ddp", 3, marks=pytest.mark.full)]
)
def test_minimal_script_computes_what_the_script_computes(mode, n, tmp_path):
    """22 steps an epoch; no world size above 2 divides the batch of 64, nor the six of evaluation."""
    expected = train(mode, n, *SCRIPT, folder=tmp_path / "whole", patch=use_order_of_minimal)
    assert expected.code == 0, expected.err
    _, lines, saved = run_minimal(f"minimal_{mode}", n, tmp_path / "minimal")
    for rank in range(n):
        (first,) = torch.load(tmp_path / "minimal" / f"gradients{rank}")
        assert deviation(first, expected.gradients[0][0]) <= 1e-10
    assert deviation(saved["net"], expected.checkpoint()["model"]) <= 1e-10
    for line, entry in zip(lines, expected.eval_lines(), strict=True):
        loss, accuracy = map(float, re.findall(r"\d\.\d+", line))
        assert loss == pytest.approx(entry["loss"], rel=1e-10, abs=1e-12)
        assert accuracy == pytest.approx(entry["top1"], abs=1e-6) and accuracy > 0.7


def kill_after(step):
    after_step(step, lambda: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.full
@pytest.mark.parametrize(("script", "step"), [("minimal_ddp", 22), ("minimal_loader_ddp", 20)])
def test_minimal_script_that_was_killed_goes_on_with_the_same_bits(script, step, tmp_path):
    """minimal_loader_ddp.py was saved within its first epoch."""
    _, whole, expected = run_minimal(script, 3, tmp_path / "whole", 3)
    killed = tmp_path / "killed"
    codes, before, saved = run_minimal(
        script, 3, killed, 3, functools.partial(kill_after, step + 1)
    )
    assert {*codes} == {-signal.SIGKILL} and saved["scheduler"]["last_epoch"] == step
    _, after, found = run_minimal(script, 3, killed, 3)
    assert before + after == whole and len(whole) == 3
    for name, value in expected["net"].items():
        assert found["net"][name].equal(value), name


@pytest.mark.full
def test_minimal_loader_is_the_same_on_one_and_on_two_devices(tmp_path):
    (_, *one), (_, *two) = (
        run_minimal(f"minimal_loader{end}", n, tmp_path / str(n))
        for end, n in (("", 1), ("_ddp", 2))
    )
    assert one[0] == two[0] and float(one[0][-1].split()[-1]) > 0.7, "it learns"
    assert deviation(two[1]["net"], one[1]["net"]) <= 1e-10


# ------------------------------------------------------------- own_loop*.py and other_project.py


def run_ranks(n, folder, name=""):
    """Start n ranks as a launcher does; return what rank 0 printed and saved."""
    file = folder / f"{name or n}.pt"
    command = [sys.executable, "other_project.py", "--file", str(file)]
    shared = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    options = {"cwd": folder, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ranks = []
    try:
        for rank in range(n):
            environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, env=environment, **options))
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * n, outputs
    return outputs[0], torch.load(file, weights_only=True)["net"]


@pytest.mark.full
def test_another_project_uses_two_files_and_gets_the_same_at_every_world_size(tmp_path):
    """As a reader would copy it: three files in a directory, nothing else of the project."""
    for name in ("common.py", "sampling.py", "examples/other_project.py"):
        shutil.copy(ROOT / name, tmp_path)
    errors, nets = {}, {}
    for n in (1, 3):
        output, nets[n] = run_ranks(n, tmp_path)
        errors[n] = [float(e) for e in re.findall(r"error ([\d.]+) \(101 samples\)", output)]
        assert len(errors[n]) == 3 and errors[n][-1] < 0.7 * errors[n][0], "it does not learn"
    assert errors[3] == pytest.approx(errors[1], rel=1e-10)
    assert deviation(nets[3], nets[1]) <= 1e-10


def epochs_of(folder, *command):
    """Run a script; return (loss, accuracy) of each epoch, and the weights that it saved."""
    folder.mkdir()
    options = {"cwd": folder, "text": True, "capture_output": True, "timeout": 120}
    ended = subprocess.run([sys.executable, *command], **options)
    assert ended.returncode == 0, ended.stderr
    lines = re.findall(r"^epoch \d+: loss ([\d.]+) accuracy ([\d.]+)$", ended.stdout, re.MULTILINE)
    return [(float(a), float(b)) for a, b in lines], torch.load(folder / "own_loop.pt")


@pytest.mark.full
def test_own_loop_before_and_after(tmp_path):
    before, _ = epochs_of(tmp_path / "before", str(ROOT / "examples" / "own_loop.py"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    script = str(ROOT / "examples" / "own_loop_ddp.py")
    one, net = epochs_of(tmp_path / "one", *launcher, "1", script)
    two, other = epochs_of(tmp_path / "two", *launcher, "2", script)
    assert len(before) == len(one) == 10
    assert before[-1] == pytest.approx(one[-1], rel=0.05), "the same but for the order"
    assert one[-1][0] < 0.2 * one[0][0], "it does not learn"
    assert [loss for loss, _ in two] == pytest.approx([loss for loss, _ in one], rel=1e-4)
    for name, value in net.items():
        torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------- README.md, docs/recipes.md


PAGES = {"README.md": pytest.mark.full, "docs/recipes.md": pytest.mark.slow}


@pytest.mark.parametrize("name", [pytest.param(name, marks=PAGES[name]) for name in PAGES])
def test_commands_of_a_page_print_what_it_shows(name, tmp_path):
    """Two digits after the point: another CPU rounds in another way. `...` stands for anything."""
    page, project = (ROOT / name).read_text(), tmp_path / "training"
    shutil.copytree(ROOT, project, ignore=shutil.ignore_patterns(".*", "runs"))
    blocks = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    if name == "README.md":
        (project / "mine.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
        blocks += ["$ bash run.sh ddp 2 --task mine.py --epochs 3\nbest minus_error ...\n"]
    for part in "".join(blocks).split("$ ")[1:]:
        command, *lines = part.splitlines()
        if command.startswith("git clone") or "hf.py" in command:  # needs transformers
            continue
        options = {"cwd": project, "capture_output": True, "text": True, "timeout": 300}
        ended = subprocess.run(["bash", "-c", command], **options)
        assert ended.returncode == 0, ended.stderr
        for line in lines:
            wanted = re.escape(line.replace("/home/you", str(tmp_path))).replace(r"\.\.\.", ".*")
            wanted = re.sub(r"(\d\\\.\d\d)\d*", r"\1\\d*", wanted)
            assert re.search(f"^{wanted}$", ended.stdout, re.MULTILINE), (line, ended.stdout)
