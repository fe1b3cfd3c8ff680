"""`main([...])` in a program of one's own, and examples/notebook.ipynb."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from launches import ROOT

import train_dp
import train_single
import train_spawn


def surroundings():
    """What a caller has, and what the next draws of its generators would be."""
    found = {"handlers": [signal.getsignal(number) for number in (1, 2, 10, 15)]}
    found |= {"environment": dict(os.environ), "place": (os.getcwd(), sys.argv[:])}
    found |= {"torch": torch.get_rng_state().tolist(), "python": random.getstate()}
    found["numpy"] = [str(part) for part in np.random.get_state()]
    backends = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    flags = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    return {**found, "flags": (*backends, *flags), "threads": torch.get_num_threads()}


@pytest.mark.parametrize("end", ["well", "badly"])
@pytest.mark.parametrize(
    ("script", "argv"),
    [
        (train_single, ["--deterministic"]),
        (train_dp, ["--replicas", "2"]),
        pytest.param(train_spawn, ["--nproc", "2"], marks=pytest.mark.full),
    ],
)
def test_main_leaves_its_caller_as_it_was(script, argv, end, tmp_path):
    before = surroundings()
    argv = [*argv, *"--epochs 1 --batch-size 256 --device cpu --output-dir".split(), str(tmp_path)]
    if end == "well":
        assert script.main(argv) == 0
    elif script is train_spawn:
        assert script.main([*argv, "--freeze", "nothing"]) == 2, "by its ranks"
    else:
        with pytest.raises(SystemExit) as stopped:
            script.main([*argv, "--freeze", "nothing"])
        assert stopped.value.code == 2
    after = surroundings()
    assert [name for name in before if before[name] != after[name]] == []


@pytest.mark.slow
def test_notebook_trains_predicts_stops_and_goes_on(tmp_path):
    """Its cells, in order, in one process whose program is no file, as in a kernel."""
    pytest.importorskip("matplotlib")
    unwanted = ".* __pycache__ runs shared tests tools".split()
    project = shutil.copytree(ROOT, tmp_path / "project", ignore=shutil.ignore_patterns(*unwanted))
    cells = json.loads((project / "examples/notebook.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells), "no outputs are stored"
    lines = []
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        text = "".join(cell["source"])
        if text.startswith("%%writefile "):
            first, _, rest = text.partition("\n")
            text = f"Path({first.split()[1]!r}).write_text({rest!r})"
        lines.append(f"exec(compile({text!r}, 'a cell', 'exec'), globals())")
    options = {"capture_output": True, "text": True, "timeout": 500, "cwd": project / "examples"}
    options["env"] = {**os.environ, "MPLBACKEND": "agg"}
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], **options)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
    right, count = map(int, re.search(r"^(\d+) of (\d+) digits", ended.stdout, re.M).groups())
    assert 0.9 < right / count < 1 and count == 360
    epoch, step = map(
        int,
        re.search(r"^exit code 130 in epoch (\d+) after step (\d+)$", ended.stdout, re.M).groups(),
    )
    saved = (epoch - 1) * 22 + step
    assert f"stopped by SIGINT after saving step {saved}\n" in ended.stderr
    assert "to go on: " in ended.stdout
    first, last = map(
        float, re.search(r"mean error (\S+) after .*, (\S+) at", ended.stdout).groups()
    )
    assert 0 < last < 0.15 < 2 * last < first
    assert ended.stdout.endswith("8 of 8 tensors are equal in every bit\n")
