"""tools/equivalence.py notices: a run that is broken on purpose is a red cell and exit code 1, and the table has what it promises."""

import json

import equivalence
import pytest
import torch.distributed as dist
from patches import change_what_replicas_gather
from torch import nn

import common
import train_ddp
import train_spawn

MODES = [("dp", 2), ("ddp", 2), ("spawn", 2)]
NAMES = ["AdamW", "clipping, accumulation 3", "dropout"]


class Unwrapped(nn.Module):
    """In the place of DistributedDataParallel: every rank trains a model of its own."""

    def __init__(self, module, **options):
        super().__init__()
        self.module = module

    def forward(self, inputs):
        return self.module(inputs)


class OneRank:
    """In the place of torch.distributed, in a script alone: a world size of 1 in the scale of the loss, the rest as it is."""

    def __getattr__(self, name):
        return (lambda: 1) if name == "get_world_size" else getattr(dist, name)


def without_wrap(rank):
    train_ddp.DistributedDataParallel = train_spawn.DistributedDataParallel = Unwrapped
    common.sync_buffers = lambda net: (
        None
    )  # which would raise: here the deviations themselves must tell


def without_scale(rank):
    train_ddp.dist = train_spawn.dist = OneRank()


def without_gradients_of_others(rank):
    change_what_replicas_gather(
        lambda outputs: [outputs[0], *(output.detach() for output in outputs[1:])]
    )


def run(monkeypatch, tmp_path, patch, *options):
    features = [
        feature._replace(modes=MODES) for feature in equivalence.FEATURES if feature.name in NAMES
    ]
    monkeypatch.setattr(equivalence, "FEATURES", features)
    code = equivalence.main(["--json", str(tmp_path / "cells.json"), *options], patch)
    return code, {
        (cell["feature"], cell["mode"]): cell
        for cell in json.loads((tmp_path / "cells.json").read_text())
    }


@pytest.mark.long
def test_whole_runs_pass(monkeypatch, tmp_path, capsys):
    code, cells = run(monkeypatch, tmp_path, None, "--markdown")
    out, err = capsys.readouterr()
    assert code == 0 and len(cells) == 9 and all(cell["ok"] for cell in cells.values())
    assert all(cell["value"] <= 1e-10 for cell in cells.values())
    assert sum(cell["value"] > 0 for cell in cells.values()) >= 6, (
        "sums in another order are hardly ever all the same bits"
    )
    assert (
        out.startswith("| feature ")
        and "\n\n9 cells, 0 of them above their bound." in out
        and "FAILED" not in err
    )
    assert [line.split("|")[1].strip() for line in out.splitlines()[2:5]] == NAMES


@pytest.mark.long
@pytest.mark.parametrize(
    ("patch", "broken"),
    [
        (without_wrap, ("ddp", "spawn")),
        pytest.param(without_scale, ("ddp", "spawn"), marks=pytest.mark.release),
        pytest.param(without_gradients_of_others, ("dp",), marks=pytest.mark.release),
    ],
)
def test_a_broken_run_is_red(patch, broken, monkeypatch, tmp_path, capsys):
    code, cells = run(monkeypatch, tmp_path, patch)
    out, err = capsys.readouterr()
    assert code == 1
    assert {mode for (_, mode), cell in cells.items() if not cell["ok"]} == set(broken)
    red = [cell for (_, mode), cell in cells.items() if mode in broken]
    assert not any(cell["ok"] for cell in red)
    assert all(cell["value"] > 1e-2 and not cell["error"] for cell in red), (
        "the deviations tell, not a crash"
    )
    assert out.count("**") == 2 * len(red) and err.count("FAILED") == len(red)


def test_a_crash_is_red(monkeypatch, tmp_path, capsys):
    code, cells = run(monkeypatch, tmp_path, crash, "--only", "adamw, ddp")
    assert code == 1 and list(cells) == [("AdamW", "ddp")]
    assert (
        "broken on purpose" in cells["AdamW", "ddp"]["error"]
        and "**failed**" in capsys.readouterr().out
    )


def crash(rank):
    raise RuntimeError("broken on purpose")


def test_unknown_cell_is_an_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        equivalence.main(["--only", "no such feature"])
    assert stopped.value.code == 2 and "AdamW" in capsys.readouterr().err


def test_the_table_is_as_large_as_promised():
    cells = [(feature.name, mode) for feature in equivalence.FEATURES for mode in feature.modes]
    assert len(cells) == len(set(cells)) >= 150
    assert {mode for _, mode in cells} == set(equivalence.MODES)
    exact = [feature for feature in equivalence.FEATURES if feature.bound == equivalence.EXACT]
    assert (
        len(exact) >= len(equivalence.FEATURES) - 3
        and equivalence.EXACT.gradients == 1e-12
        and equivalence.EXACT.rest == 1e-10
    )
