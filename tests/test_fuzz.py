"""The fuzzer: some of its trials, and that it can fail.

`bash run.sh fuzz 500` tries many more.
"""

import re
from pathlib import Path

import fuzz
import pytest
import torch

import machinery.cli


@pytest.mark.parametrize(("seed", "trials"), [(0, 3), pytest.param(1, 4, marks=pytest.mark.full)])
def test_random_runs_keep_every_invariant(seed, trials, capsys):
    argv = [str(trials), "--seed", str(seed)]
    assert fuzz.main(argv) == 0, capsys.readouterr().out


def test_every_option_is_declared():
    modes = ("single", "dp", "ddp", "spawn", "fsdp")
    parsers = [machinery.cli.build_parser(mode) for mode in modes]
    names = {action.option_strings[0] for parser in parsers for action in parser._actions}
    names = {name for name in names if not name.startswith("--no-")}
    assert names - {"-h"} == fuzz.OPTIONS.keys()
    reasons = [reason for reason in fuzz.OPTIONS.values() if isinstance(reason, str)]
    assert all(reasons)


def test_a_trial_can_be_repeated():
    first, again, other = (fuzz.draw(3, number) for number in (5, 5, 6))
    assert first == again != other


def break_averages(rank):
    """Rank 1 forgets its share of the gradient from now on."""
    scale = torch.amp.GradScaler.scale

    def scale_less(self, outputs):
        return scale(self, outputs) * (0.5 if rank == 1 else 1.0)

    torch.amp.GradScaler.scale = scale_less


@pytest.mark.full
def test_a_violation_is_found(monkeypatch, capsys):
    simple = fuzz.draw(7, 3)
    simple.mode, simple.n = "ddp", 2
    simple.task = {"train": 24, "held_out": 5, "tied": True}
    words = "--epochs 2 --batch-size 8 --lr 0.05 --dtype float64 --weight-decay 0.01".split()
    simple.options = {name: [value] for name, value in zip(words[::2], words[1::2])}
    simple.checks, simple.interruption = ("mode",), None
    simple.resume = simple.evaluate = ("ddp", 2)
    monkeypatch.setattr(fuzz, "draw", lambda seed, number: fuzz.constrain(simple))
    assert fuzz.main(["--seed", "7", "--trial", "3"], sabotage=break_averages) == 1
    out = capsys.readouterr().out
    assert "[mode]" in out and "1 trials, 1 violations, seed 7" in out
    assert "again with: bash run.sh fuzz --seed 7 --trial 3" in out
    assert "bash run.sh ddp 2" in out, "the command lines are shown"
    assert Path(re.search(r"kept: (\S+)", out)[1], "task_3.py").exists()
