"""The fuzzer: some of its trials, and that it can fail.

`bash run.sh fuzz --trials 500` tries many more.
"""

import re

import fuzz
import pytest
import torch

import machinery.options

SEED, TRIALS, PARTS = 0, 25, 5


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.release) for part in range(1, PARTS))]
)
def test_random_runs_keep_every_invariant(part, capsys):
    each = TRIALS // PARTS
    argv = ["--seed", str(SEED), "--first", str(part * each), "--trials", str(each), "--no-shrink"]
    code = fuzz.main(argv)
    assert code == 0, capsys.readouterr().out


def test_every_option_is_declared():
    parsers = [
        machinery.options.build_parser(mode) for mode in ("single", "dp", "ddp", "spawn", "fsdp")
    ]
    names = {action.option_strings[0] for parser in parsers for action in parser._actions}
    names = {name for name in names if not name.startswith("--no-")}
    assert names - {"-h"} == fuzz.OPTIONS.keys()
    reasons = [reason for reason in fuzz.OPTIONS.values() if isinstance(reason, str)]
    assert all(reasons)


def test_a_trial_can_be_repeated():
    first, again, other = (fuzz.draw(3, number) for number in (5, 5, 6))
    assert first == again != other


def test_what_must_be_found_is_drawn_often_enough():
    """Each of these is what some fault of the past needs to show itself."""
    trials = [fuzz.draw(1, number) for number in range(400)]

    def share(condition):
        return sum(bool(condition(trial)) for trial in trials) / len(trials)

    def has(trial, name):
        return name in trial.part("buffers")

    def averaged(trial, kind):
        return trial.value("--average") == kind

    assert share(lambda t: has(t, "infinite")) > 0.1
    assert share(lambda t: averaged(t, "ema") and has(t, "int64")) > 0.05
    assert share(lambda t: averaged(t, "ema") and has(t, "infinite")) > 0.05
    assert share(lambda t: averaged(t, "swa") and t.earlier_epochs and "resume" in t.checks) > 0.05
    assert share(lambda t: t.part("wrap") and t.part("augment")) > 0.05
    assert share(lambda t: t.part("eval_noise") and {"mode", "eval"} & {*t.checks}) > 0.05
    compressed = [t for t in trials if t.value("--grad-compress") == "powersgd"]
    assert sum(t.part("nan_index") is not None for t in compressed) > 0.05 * len(trials)
    drawn = {name for trial in trials for name in trial.options}
    assert drawn == {name for name, how in fuzz.OPTIONS.items() if callable(how)}


def break_averages(rank):
    """Rank 1 forgets its share of the gradient from now on."""
    scale = torch.amp.GradScaler.scale

    def scale_less(self, outputs):
        return scale(self, outputs) * (0.5 if rank == 1 else 1.0)

    torch.amp.GradScaler.scale = scale_less


def test_a_violation_is_found_and_shrunk(monkeypatch, tmp_path, capsys):
    simple = fuzz.draw(7, 3)
    simple.mode, simple.n = "ddp", 2
    simple.task = {"train": 24, "held_out": 5, "tied": True}
    simple.options = {
        "--epochs": ["2"],
        "--batch-size": ["8"],
        "--lr": ["0.05"],
        "--dtype": ["float64"],
        "--label-smoothing": ["0.3"],
    }
    simple.checks, simple.interruption, simple.earlier_epochs = ("mode",), None, None
    simple.resume = simple.evaluate = ("ddp", 2)
    monkeypatch.setattr(fuzz, "draw", lambda seed, number: fuzz.constrain(simple))
    monkeypatch.setattr(fuzz, "new_folder", lambda: tmp_path)
    assert fuzz.main(["--seed", "7", "--trial", "3"], sabotage=break_averages) == 1
    out = capsys.readouterr().out
    found = re.search(r"again with: bash run.sh fuzz --seed 7 --trial 3 --drop (.*)", out)
    assert found and {"task.tied", "label-smoothing"} <= set(found[1].split())
    assert "[mode]" in out and "1 trials, 1 violations, seed 7" in out
    assert "bash run.sh ddp 2" in out, "the command lines are shown"
    assert (tmp_path / "trial-3" / "task_3.py").exists()


def test_a_trial_without_violation_leaves_nothing(monkeypatch, tmp_path):
    folder = tmp_path / "fuzz"
    folder.mkdir()
    monkeypatch.setattr(fuzz, "new_folder", lambda: folder)
    monkeypatch.setattr(fuzz.Runs, "check", lambda self: None)
    assert fuzz.main(["--trials", "2"]) == 0
    assert not folder.exists()
