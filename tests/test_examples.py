"""The scripts in examples/ run, and compute the same at every world size."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from launches import ROOT, free_port


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


def epochs_of(folder, *command, **environment):
    """Run a script; return (loss, accuracy) of each epoch, and the weights that it saved."""
    folder.mkdir()
    options = {"cwd": folder, "text": True, "capture_output": True, "timeout": 120}
    options["env"] = os.environ | environment
    ended = subprocess.run([sys.executable, *command], **options)
    assert ended.returncode == 0, ended.stderr
    lines = re.findall(r"^epoch \d+: loss ([\d.]+) accuracy ([\d.]+)$", ended.stdout, re.MULTILINE)
    return [(float(a), float(b)) for a, b in lines], torch.load(folder / "own_loop.pt")


@pytest.mark.full
def test_own_loop_before_and_after(tmp_path):
    before, _ = epochs_of(tmp_path / "before", str(ROOT / "examples" / "own_loop.py"))
    script = str(ROOT / "examples" / "own_loop_ddp.py")
    rank = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    one, net = epochs_of(tmp_path / "one", script, **rank, MASTER_PORT=str(free_port()))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    two, other = epochs_of(tmp_path / "two", *launcher, script)
    assert len(before) == len(one) == 10
    assert before[-1] == pytest.approx(one[-1], rel=0.05), "the same but for the order"
    assert one[-1][0] < 0.2 * one[0][0], "it does not learn"
    assert [loss for loss, _ in two] == pytest.approx([loss for loss, _ in one], rel=1e-4)
    assert two[-1][1] == pytest.approx(one[-1][1], abs=0.004), "a sample of 360"
    for name, value in net.items():
        torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-4)


# The run of one rank, but it ends when the file of two epochs is written: a resumed run must meet
# the schedule of all three.
CUT = """import other_project, common; s = common.save_checkpoint
common.save_checkpoint = lambda c, p: (s(c, p), c['epoch'] == 2 and exit(7))
other_project.main()"""


@pytest.mark.slow
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
    file = tmp_path / "cut.pt"
    shared = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    environment = {**os.environ, **shared, "MASTER_PORT": str(free_port())}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "timeout": 120}
    cut = subprocess.run([sys.executable, "-c", CUT, "--file", str(file)], **options)
    assert cut.returncode == 7 and torch.load(file, weights_only=True)["epoch"] == 2, cut.stderr
    resumed, nets["resumed"] = run_ranks(3, tmp_path, "cut")
    assert resumed.count("samples)") == 1
    for name, value in nets[1].items():
        for other in (3, "resumed"):
            assert torch.allclose(nets[other][name], value, rtol=1e-10, atol=1e-12), name
