"""Several files in one save: their order, what is on the disk by then, and which is the best."""

import functools
import importlib
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from harness import train
from pitfalls import BASE, printed
from runs import make_run, make_step, start_epoch

import machinery.files
import machinery.processes

pytestmark = pytest.mark.usefixtures("handlers")


class Journal:
    """Notes what is asked of the disk, as (what, name), and what stood in a file at that time."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.events = folder, []
        originals = {name: getattr(os, name) for name in ("fsync", "replace", "rename", "link")}
        save, copyfile = torch.save, shutil.copyfile

        def fsync(descriptor):
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            self.note("fsync", path)
            originals["fsync"](descriptor)

        def move(name):
            def moved(source, target):
                originals[name](source, target)
                self.note("appears", Path(target), Path(source))

            return moved

        def saved(value, file, *others):
            self.note("written", Path(getattr(file, "name", file)))
            save(value, file, *others)

        monkeypatch.setattr(os, "fsync", fsync)
        for name in ("replace", "rename", "link"):
            monkeypatch.setattr(os, name, move(name))
        monkeypatch.setattr(torch, "save", saved)
        monkeypatch.setattr(
            shutil,
            "copyfile",
            lambda a, b: (copyfile(a, b), self.note("appears", Path(b), Path(a))),
        )

    def note(self, what, path, source=None):
        content = None
        if what != "written" and ".pt" in path.name:
            content = step_in(path)
        elif path.name == "metrics.jsonl":
            content = path.read_text().count("\n")
        name = "directory" if path == self.folder else path.name
        self.events.append((what, name, content, source and source.name))

    def appearances(self):
        names = [name for what, name, *_ in self.events if what == "appears"]
        return [name for name in names if not name.startswith(".")]

    def index(self, what, name):
        return next(i for i, event in enumerate(self.events) if event[:2] == (what, name))


def load(path):
    return torch.load(path, weights_only=True)


def step_in(path):
    """Return the global step in a checkpoint; None if it is not whole."""
    try:
        return load(path)["global_step"]
    except Exception:
        return None


@pytest.fixture
def run(tmp_path):
    """A run that has ended an epoch, and made the steps of a second one."""
    run = make_run(tmp_path, "--keep-every", 2, "--log-every", 4)
    for epoch in range(2):
        start_epoch(run)
        for _ in range(6):
            make_step(run, [1.0])
        if epoch == 0:
            run.end_epoch({"loss": 1.0, "top1": 0.5, "count": 57})
    return run


def check_files(journal, names, step):
    """Each file is whole and on the disk before its name is, and the name before the next file."""
    for name in names:
        at = journal.index("appears", name)
        assert journal.events[at][2] == step, f"{name} appears whole"
        temporary = journal.events[at][3]
        assert temporary.startswith(".") and temporary != name
        before = [event for event in journal.events[:at] if event[1] == temporary]
        assert [event[0] for event in before][-2:] == ["written", "fsync"], f"{name} is on the disk"
        assert before[-1][2] == step, f"all of {name} goes to the disk"
        assert journal.events[at + 1][:2] == ("fsync", "directory"), (
            f"the name {name} is on the disk"
        )


def test_files_of_an_epoch_appear_whole_durable_and_in_this_order(run, monkeypatch):
    journal = Journal(run.files.directory, monkeypatch)
    run.end_epoch({"loss": 1.0, "top1": 0.75, "count": 57})
    monkeypatch.undo()
    assert journal.appearances() == [
        "best.pt",
        "epoch-0002.pt",
        "last.pt",
    ], "last.pt counts the epoch as done: after it nothing would make the others"
    check_files(journal, ["best.pt", "epoch-0002.pt", "last.pt"], 12)
    assert {
        step_in(run.files.directory / name) for name in ("best.pt", "epoch-0002.pt", "last.pt")
    } == {12}
    assert not list(run.files.directory.glob(".*")), "no temporary file stays"


def test_log_is_on_the_disk_before_a_checkpoint_is_begun(run, monkeypatch):
    """A power cut must not leave a checkpoint ahead of the log: its lines would be lost."""
    journal = Journal(run.files.directory, monkeypatch)
    run.end_epoch({"loss": 1.0, "top1": 0.75, "count": 57})
    monkeypatch.undo()
    logged = journal.index("fsync", "metrics.jsonl")
    lines = (run.files.directory / "metrics.jsonl").read_text().count("\n")
    assert journal.events[logged][2] == lines == 6, "with the evaluation"
    assert logged < min(i for i, event in enumerate(journal.events) if event[0] == "written")


def test_first_save_writes_last_alone(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    journal = Journal(run.files.directory, monkeypatch)
    run.save("last.pt")
    monkeypatch.undo()
    assert journal.appearances() == ["last.pt"]
    check_files(journal, ["last.pt"], 0)
    assert sorted(path.name for path in run.files.directory.iterdir()) == [
        "last.pt",
        "metrics.jsonl",
    ]


@pytest.mark.parametrize("failing", ["best.pt", "epoch-0002.pt", "last.pt"])
def test_failed_save_leaves_the_last_checkpoint(failing, run, monkeypatch):
    run.state.global_step = 7
    run.save("last.pt")
    run.state.global_step = 12
    replace = os.replace

    def full(source, target):
        if Path(target).name == failing:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        OSError,
        match=f"{failing} could not be written .is the disk full.*No space left",
    ):
        run.end_epoch({"loss": 1.0, "top1": 0.75, "count": 57})
    assert step_in(run.files.directory / "last.pt") == 7
    assert not list(run.files.directory.glob(".*")), "what was begun is gone"


def test_leftover_of_a_killed_save_does_no_harm(tmp_path):
    """There is no last.pt yet, but the temporary file of one that was longer."""
    run = make_run(tmp_path)
    (run.files.directory / ".last.pt.tmp").write_bytes(b"half a file" * 100_000)
    run.save("last.pt")
    assert sorted(path.name for path in run.files.directory.iterdir()) == [
        "last.pt",
        "metrics.jsonl",
    ]
    assert (run.files.directory / "last.pt").stat().st_size < 100_000 and step_in(
        run.files.directory / "last.pt"
    ) == 0


def test_step_that_ends_the_run_saves_last_alone(tmp_path):
    """--save-every writes last.pt and nothing else, with the sums since the last line."""
    run = make_run(tmp_path, "--save-every", 2, "--log-every", 5)
    start_epoch(run)
    for step in range(4):
        make_step(run, [float(step), 1.0])
        assert step_in(run.files.directory / "last.pt") == (None, 2, 2, 4)[step]
    assert [path.name for path in run.files.directory.glob("*.pt")] == ["last.pt"]
    saved = load(run.files.directory / "last.pt")
    assert saved["log"] == {"loss": [10.0], "count": [8.0]} and (saved["epoch"], saved["step"]) == (
        0,
        4,
    )


# --------------------------------------------------------------------------------------- the best


def best_after(folder, scores):
    """End epochs with these scores; return, after each, best.pt's epoch and the best score."""
    run, found = make_run(folder, "--epochs", 50), []
    for score in scores:
        run.state.step = run.steps_per_epoch
        run.end_epoch({"loss": 1.0, "top1": score, "top5": 1 - score, "count": 57})
        best = run.files.directory / "best.pt"
        loaded = load(best) if best.exists() else {}
        found.append(
            (loaded.get("epoch"), load(run.files.directory / "last.pt")["best"]),
        )
        assert loaded.get("best") == found[-1][1]
    return found


NAN, INF = math.nan, math.inf
SCORES = {
    "equal scores": ([0.5, 0.5, 0.25, 0.5], [(1, 0.5)] * 4),
    "a rise by one bit": (
        [0.5, 0.5 + 2**-53, 0.5 + 2**-53],
        [(1, 0.5), (2, 0.5 + 2**-53), (2, 0.5 + 2**-53)],
    ),
    "a first score of zero": ([0.0, -1.0, 0.0, 0.25], [(1, 0.0), (1, 0.0), (1, 0.0), (4, 0.25)]),
    "negative scores": ([-3.0, -5.0, -3.0, -2.0], [(1, -3.0), (1, -3.0), (1, -3.0), (4, -2.0)]),
    "nan first": ([NAN, NAN, -7.0, NAN], [(None, None), (None, None), (3, -7.0), (3, -7.0)]),
    "infinite": ([-INF, 0.5, INF, 0.75], [(None, None), (2, 0.5), (2, 0.5), (4, 0.75)]),
}


@pytest.mark.parametrize("name", SCORES)
def test_the_first_of_equal_scores_stays_the_best(name, tmp_path):
    scores, wanted = SCORES[name]
    assert best_after(tmp_path, scores) == wanted


def test_tie_is_kept_across_a_resume(tmp_path):
    best_after(tmp_path, [0.5, 0.25])
    run = make_run(tmp_path, "--epochs", 50, "--resume", "auto")
    run.state.step = run.steps_per_epoch
    run.end_epoch({"loss": 1.0, "top1": 0.5, "count": 57})
    assert load(run.files.directory / "best.pt")["epoch"] == 1
    assert load(run.files.directory / "last.pt")["epoch"] == 3


@pytest.mark.parametrize("names", [("loss", "top1", "top5"), ("top1", "loss", "top5")])
def test_first_metric_that_is_no_loss_decides(names, tmp_path):
    run = make_run(tmp_path, "--epochs", 50)
    values = [
        {"loss": 9.0, "top1": 0.5, "top5": 0.5},
        {"loss": 1.0, "top1": 0.75, "top5": 0.0},
        {"loss": 0.0, "top1": 0.6, "top5": 1.0},
    ]
    for value in values:
        run.state.step = run.steps_per_epoch
        run.end_epoch({**{name: value[name] for name in names}, "count": 57})
    assert load(run.files.directory / "best.pt")["epoch"] == 2


def test_kept_epochs_are_every_so_many(tmp_path):
    run = make_run(tmp_path, "--epochs", 50, "--keep-every", 3)
    for _ in range(7):
        run.state.step = run.steps_per_epoch
        run.end_epoch({"loss": 1.0, "top1": 0.5, "count": 57})
    kept = {path.name: load(path)["epoch"] for path in run.files.directory.glob("epoch-*.pt")}
    assert kept == {"epoch-0003.pt": 3, "epoch-0006.pt": 6}
    assert not list(make_run(tmp_path / "none", "--epochs", 5).files.directory.glob("*.pt"))


def test_score_that_was_not_saved_is_not_the_best(tmp_path):
    """best.pt is always the file of the score that later ones are compared with."""
    run = make_run(tmp_path, "--epochs", 50)
    for score, poison in ((0.5, False), (0.9, True), (0.75, False)):
        good = run.state.net.weight.data.clone()
        run.state.net.weight.data[0] = math.nan if poison else 1.0
        run.state.step = run.steps_per_epoch
        run.end_epoch({"loss": 1.0, "top1": score, "count": 57})
        run.state.net.weight.data.copy_(good)
    assert (
        load(run.files.directory / "best.pt")["best"]
        == load(run.files.directory / "last.pt")["best"]
        == 0.75
    )
    assert load(run.files.directory / "best.pt")["epoch"] == 3


def go_back(folder, name, **files):
    """Train two epochs, with scores 0.5 and 0.9, go back to a file of them, and score 0.4."""
    run = make_run(folder / "first", "--epochs", 50, "--keep-every", 1)
    for score in (0.5, 0.9):
        run.state.step = run.steps_per_epoch
        run.end_epoch({"loss": 1.0, "top1": score, "count": 57})
    run.files.log.close()
    return make_run(folder / name, "--epochs", 50, "--resume", run.files.directory / files["of"])


@pytest.mark.parametrize("name", ["first", "other"])
def test_going_back_makes_another_best(name, tmp_path):
    run = go_back(tmp_path, name, of="epoch-0001.pt")
    run.state.step = run.steps_per_epoch
    run.end_epoch({"loss": 1.0, "top1": 0.4, "count": 57})
    best = load(run.files.directory / "best.pt")
    assert (best["epoch"], best["best"]) == (2, 0.4), "that of a later epoch is of another run"


def test_best_comes_along_to_another_folder(tmp_path):
    run = go_back(tmp_path, "other", of="last.pt")
    assert load(run.files.directory / "best.pt")["epoch"] == 2
    run.state.step = run.steps_per_epoch
    run.end_epoch({"loss": 1.0, "top1": 0.4, "count": 57})
    assert load(run.files.directory / "best.pt")["epoch"] == 2
    assert load(run.files.directory / "last.pt")["best"] == 0.9


def test_run_whose_last_state_was_not_saved_is_no_success(tmp_path, capsys):
    run = make_run(tmp_path, "--epochs", 1)
    run.finish()
    run.state.net.bias.data[1] = math.inf
    run.save("last.pt")
    assert not (run.files.directory / "last.pt").exists()
    assert "non-finite values in bias" in capsys.readouterr().err
    with pytest.raises(machinery.processes.Stopped) as stopped:
        run.finish()
    assert stopped.value.code == 1 and stopped.value.reason.endswith("non-finite values in bias")
    run.state.net.bias.data[1] = 0
    run.save("last.pt")
    run.finish()
    assert step_in(run.files.directory / "last.pt") == 0


# ---------------------------------------------------------------------------- around an evaluation


def print_files(mode, rank):
    """Print what appears, and when the evaluation is made."""
    script = importlib.import_module(f"train_{mode}")
    save, evaluate = machinery.files.save_checkpoint, script.evaluate

    def saved(state, path):
        save(state, path)
        place = [path.name, state["epoch"], state["step"], len(state["log"])]
        print("event", json.dumps(place), flush=True)

    def evaluated(*arguments):
        if rank == 0:
            print("event", json.dumps("evaluation"))
        return evaluate(*arguments)

    machinery.files.save_checkpoint, script.evaluate = saved, evaluated


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("dp", 2), ("ddp", 2), ("spawn", 2)])
def test_training_is_saved_before_its_evaluation_and_the_epoch_after_it(mode, n, tmp_path):
    argv = (*BASE, "--epochs", "2", "--keep-every", "2", "--save-every", "3")
    patch = functools.partial(print_files, mode)
    events = printed(train(mode, n, *argv, folder=tmp_path, patch=patch).out, "event")
    assert events[:5] == [["last.pt", 0, 3, 1], ["last.pt", 0, 6, 1], "evaluation", *events[3:5]]
    assert events[3:5] == [["best.pt", 1, 0, 1], ["last.pt", 1, 0, 1]]
    assert events[5:8] == [["last.pt", 1, 3, 1], ["last.pt", 1, 6, 1], "evaluation"]
    names = [event[0] for event in events[8:]]
    assert names in (["best.pt", "epoch-0002.pt", "last.pt"], ["epoch-0002.pt", "last.pt"])
    assert all(event[1:] == [2, 0, 1] for event in events[8:])


@pytest.mark.parametrize("number", machinery.processes.SIGNALS)
@pytest.mark.parametrize("epochs", [1, 2])
def test_stop_within_an_evaluation_comes_after_it(number, epochs, tmp_path):
    """In the last epoch all is done then, and there is nothing to stop."""
    run = make_run(tmp_path, "--epochs", epochs)
    run.state.step, run.state.global_step = run.steps_per_epoch, 6
    os.kill(os.getpid(), number)
    if epochs == 1:
        run.end_epoch({"loss": 1.0, "top1": 0.5, "count": 57})
    else:
        with pytest.raises(machinery.processes.Stopped) as stopped:
            run.end_epoch({"loss": 1.0, "top1": 0.5, "count": 57})
        assert stopped.value.code == machinery.processes.SIGNALS[number]
        assert stopped.value.reason == f"stopped by {number.name} after saving step 6"
    saved = load(run.files.directory / "last.pt")
    assert (saved["epoch"], saved["step"]) == (1, 0) and (run.files.directory / "best.pt").exists()
    assert (run.files.directory / "metrics.jsonl").read_text().count("eval") == 1


# ----------------------------------------------------------------------- where an evaluation stands


@pytest.mark.parametrize(
    ("epoch", "step", "shown"),
    [(0, 0, 1), (0, 4, 1), (0, 6, 1), (1, 0, 1), (1, 2, 2), (1, 6, 2), (2, 0, 2), (3, 0, 3)],
)
def test_eval_only_names_the_epoch_whose_weights_it_sees(epoch, step, shown, tmp_path, capsys):
    """A checkpoint of an epoch's end counts the epoch as done; one from within it does not."""
    run = make_run(tmp_path, "--epochs", 3)
    run.state.epoch, run.state.step, run.state.global_step = epoch, step, 6 * epoch + step
    run.save("last.pt")
    run.files.log.close()
    path = run.files.directory / "last.pt"
    run = make_run(tmp_path / "elsewhere", "--epochs", 3, "--eval-only", "--resume", path)
    capsys.readouterr()
    run.log_eval({"loss": 1.5, "top1": 0.25, "count": 57})
    wanted = f"epoch {shown}/3  eval  loss 1.500000  top1 0.250000  (57 samples)\n"
    assert capsys.readouterr().out == wanted
    (line,) = map(json.loads, (run.files.directory / "metrics.jsonl").read_text().splitlines())
    assert line == {
        "event": "eval",
        "epoch": shown - 1,
        "global_step": 6 * epoch + step,
        "loss": 1.5,
        "top1": 0.25,
        "count": 57,
    }


def test_eval_only_leaves_the_folder_of_a_run_as_it_is(run, capsys):
    """It prints, and that is all."""
    run.save("last.pt")
    run.files.log.close()
    before = {path.name: path.read_bytes() for path in run.files.directory.iterdir()}
    path = run.files.directory / "last.pt"
    again = make_run(run.files.directory.parent, "--eval-only", "--resume", path)
    capsys.readouterr()
    again.log_eval({"loss": 1.5, "top1": 0.25, "count": 57})
    assert "epoch 2/30  eval  loss 1.500000" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in run.files.directory.iterdir()} == before


def test_evaluation_in_training_names_the_epoch_that_ends(tmp_path, capsys):
    run = make_run(tmp_path, "--epochs", 3)
    for epoch in range(2):
        run.state.step, run.state.global_step = run.steps_per_epoch, 6 * epoch + 6
        run.end_epoch({"loss": 1.0, "top1": 0.5, "count": 57})
    lines = [line for line in capsys.readouterr().out.splitlines() if "  eval  " in line]
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/3", "epoch 2/3"]
    logged = map(json.loads, (run.files.directory / "metrics.jsonl").read_text().splitlines())
    assert [(line["epoch"], line["global_step"]) for line in logged] == [(0, 6), (1, 12)]
    assert (run.state.epoch, run.state.step) == (2, 0)
