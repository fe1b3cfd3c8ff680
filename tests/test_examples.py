"""The scripts in examples/ run, and compute the same at every world size."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from launches import ROOT, free_port


def run_ranks(n, folder):
    """Start n ranks as a launcher does; return what rank 0 printed and saved."""
    file = folder / f"{n}.pt"
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
    for name, value in nets[1].items():
        assert torch.allclose(nets[3][name], value, rtol=1e-10, atol=1e-12), name
