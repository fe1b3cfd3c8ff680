"""tools/equivalence.py notices a run that is broken on purpose: a red cell and exit code 1."""

import json

import equivalence
import pytest
from torch import nn

import common


class Unwrapped(nn.Module):
    """In the place of DistributedDataParallel: every rank trains a model of its own."""

    def __init__(self, module, **options):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return self.module(*inputs)


def without_wrap(rank):
    nn.parallel.DistributedDataParallel = Unwrapped
    common.sync_buffers = lambda net: None  # would raise; here the deviations themselves must tell


def crash(rank):
    raise RuntimeError("broken on purpose")


def run(tmp_path, patch, only):
    options = ["--json", str(tmp_path / "cells.json"), "--only", only]
    code = equivalence.main(options, patch)
    found = json.loads((tmp_path / "cells.json").read_text())
    return code, {(cell["feature"], cell["mode"]): cell for cell in found}


@pytest.mark.full
def test_whole_run_is_green_and_one_without_the_wrapper_is_red(tmp_path, capsys):
    for patch, mode, broken in ((None, "dp", False), (without_wrap, "ddp", True)):
        code, cells = run(tmp_path, patch, f"AdamW, {mode} 2")
        out, err = capsys.readouterr()
        cell = cells["AdamW", mode]
        assert code == broken and cell["ok"] != broken and not cell["error"]
        assert (cell["value"] > 1e-2) == broken, "the deviations tell, not a crash"
        assert broken or cell["value"] <= 1e-10
        assert out.count("**") == 2 * broken and err.count("FAILED") == broken


@pytest.mark.full
def test_a_crash_is_red(tmp_path, capsys):
    code, cells = run(tmp_path, crash, "adamw, ddp 2")
    assert code == 1 and list(cells) == [("AdamW", "ddp")]
    assert "broken on purpose" in cells["AdamW", "ddp"]["error"]
    assert "**failed**" in capsys.readouterr().out


def test_unknown_cell_is_an_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        equivalence.main(["--only", "no such feature"])
    assert stopped.value.code == 2 and "AdamW" in capsys.readouterr().err


def test_the_table_is_as_large_and_as_strict_as_promised():
    cells = [(feature.name, mode) for feature in equivalence.FEATURES for mode in feature.modes]
    assert len(cells) == len(set(cells)) >= 150
    assert {mode for _, mode in cells} == set(equivalence.MODES)
    exact = [feature for feature in equivalence.FEATURES if feature.bound == equivalence.EXACT]
    assert len(exact) >= len(equivalence.FEATURES) - 4
    assert equivalence.EXACT.gradients == 1e-12 and equivalence.EXACT.rest == 1e-10
