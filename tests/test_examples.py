"""The scripts in examples/ run, and compute the same at every world size."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from launches import ROOT, free_port


def test_another_project_uses_two_files_and_gets_the_same_at_every_world_size(tmp_path):
    """As a reader would copy it: three files in a directory, nothing else of the project."""
    for name in ("common.py", "sampling.py", "examples/other_project.py"):
        shutil.copy(ROOT / name, tmp_path)
    launches = {
        1: [sys.executable],
        3: [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"],
    }
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    errors, nets = {}, {}
    for n, command in launches.items():
        file = str(tmp_path / f"{n}.pt")
        own = {**alone, "MASTER_PORT": str(free_port())} if n == 1 else {}
        command = [*command, "other_project.py", "--file", file]
        options = {"capture_output": True, "text": True, "timeout": 120, "cwd": tmp_path}
        done = subprocess.run(command, env={**os.environ, **own}, **options)
        assert done.returncode == 0, done.stderr
        errors[n] = [float(e) for e in re.findall(r"error ([\d.]+) \(101 samples\)", done.stdout)]
        nets[n] = torch.load(file, weights_only=True)["net"]
        assert len(errors[n]) == 3 and errors[n][-1] < 0.7 * errors[n][0], "it does not learn"
    assert errors[3] == pytest.approx(errors[1], rel=1e-10)
    for name, value in nets[1].items():
        assert torch.allclose(nets[3][name], value, rtol=1e-10, atol=1e-12), name
