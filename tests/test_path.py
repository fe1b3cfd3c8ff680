"""How much a reader has to read to trust a step, and a run."""

import json
import subprocess
import sys

from launches import ROOT


def test_path_of_a_step_and_of_a_default_run_stays_in_its_budget(tmp_path):
    command = [sys.executable, ROOT / "tests" / "traced_run.py", tmp_path / "run", "--epochs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"part"')]
    step, run = found
    assert 100 < step["lines"] <= 220, "it is traced, and it is in its budget"
    assert 20 < step["functions"] <= 50
    assert 400 < run["lines"] <= 850
