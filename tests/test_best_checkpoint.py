"""Which evaluation is the best, which epochs are kept, and what becomes of both in another folder."""

import functools
import math
import shlex

import pytest
from harness import check, train
from patches import BASE
from runs import end, end_epoch, load, make_run
from short_runs import SMALL

import common
import machinery.run

pytestmark = pytest.mark.usefixtures("handlers")


def decide_scores(scores, rank):
    end_epoch = machinery.run.Run.end_epoch
    machinery.run.Run.end_epoch = lambda run, metrics: end_epoch(
        run, metrics | {"top1": scores[run.state.epoch - 1]}
    )


@pytest.mark.full
def test_end_says_what_is_best_and_how_to_go_on(tmp_path, capsys):
    patch = functools.partial(decide_scores, (0.5, 0.9, 0.4))
    result = train("ddp", 2, *BASE, folder=tmp_path / "new run", patch=patch)
    best = result.folder / "best.pt"
    lines = [f"best top1 0.900000, in epoch 2: {best}"]
    again = f"bash run.sh ddp 2 --eval-only --resume {shlex.quote(str(best))}"
    lines.append(f"to evaluate it: {again}")
    assert result.out.splitlines()[-2:] == lines and result.out.count("best top1") == 1
    run = make_run(tmp_path, "--epochs", 2)
    end_epoch(run, top1=0.5)
    end(run)
    assert "best top1" not in capsys.readouterr().out, "not yet"
    end_epoch(make_run(tmp_path, "--epochs", 2, "--resume", "auto"), top1=0.1)
    assert capsys.readouterr().out.count("best top1 0.500000, in epoch 1: ") == 1
    end_epoch(make_run(tmp_path / "none", "--epochs", 1), top1=math.nan)
    assert "no best.pt: in no epoch top1 and the weights were finite" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------- the best


def best_after(folder, scores):
    """End epochs with these scores; return, after each, best.pt's epoch and the best score."""
    run, found = make_run(folder, "--epochs", 50), []
    for score in scores:
        end_epoch(run, top1=score, top5=1 - score)
        best = run.files.directory / "best.pt"
        loaded = load(best) if best.exists() else {}
        kept = load(run.files.directory / "last.pt")["best"]
        assert loaded.get("best") == kept and loaded.get("epoch") == (kept and kept[1])
        found.append((loaded.get("epoch"), kept and kept[0]))
    return found


NAN, INF = math.nan, math.inf
SCORES = {
    "equal scores": ([0.5, 0.5, 0.25, 0.5], [(1, 0.5)] * 4),
    "a rise by rounding": (
        [-0.5, -0.5 + 2**-52, -0.5 + 1e-10, -0.5 + 1e-10 + 2**-52],
        [(1, -0.5), (1, -0.5), (3, -0.5 + 1e-10), (3, -0.5 + 1e-10)],
    ),
    "a first score of zero": ([0.0, -1.0, 0.0, 0.25], [(1, 0.0), (1, 0.0), (1, 0.0), (4, 0.25)]),
    "negative scores": ([-3.0, -5.0, -3.0, -2.0], [(1, -3.0), (1, -3.0), (1, -3.0), (4, -2.0)]),
    "nan first": ([NAN, NAN, -7.0, NAN], [(None, None), (None, None), (3, -7.0), (3, -7.0)]),
    "infinite": ([-INF, 0.5, INF, 0.75], [(None, None), (2, 0.5), (2, 0.5), (4, 0.75)]),
}


def test_the_first_of_equal_scores_stays_the_best(tmp_path):
    for name, (scores, wanted) in SCORES.items():
        assert best_after(tmp_path / name, scores) == wanted, name
        log = (tmp_path / name / "run" / "metrics.jsonl").read_text()
        assert "NaN" not in log and "Infinity" not in log, "which is no JSON"


def test_tie_is_kept_across_a_resume(tmp_path):
    best_after(tmp_path, [0.5, 0.25])
    run = make_run(tmp_path, "--epochs", 50, "--resume", "auto")
    end_epoch(run, top1=0.5)
    assert load(run.files.directory / "best.pt")["epoch"] == 1
    assert load(run.files.directory / "last.pt")["epoch"] == 3


def test_kept_epochs_are_every_so_many(tmp_path):
    run = make_run(tmp_path, "--epochs", 50, "--keep-every", 3)
    for _ in range(7):
        end_epoch(run, top1=0.5)
    kept = {path.name: load(path)["epoch"] for path in run.files.directory.glob("epoch-*.pt")}
    assert kept == {"epoch-0003.pt": 3, "epoch-0006.pt": 6}
    assert not list(make_run(tmp_path / "none", "--epochs", 5).files.directory.glob("*.pt"))


# ------------------------------------------------------------------------------------ a resumed run


def test_after_a_step_back_the_next_epoch_is_the_best(tmp_path, capsys):
    """The best.pt of the directory is of an epoch that is made again."""
    run = make_run(tmp_path, "--epochs", 50, "--keep-every", 1)
    for score in (0.5, 0.9):
        end_epoch(run, top1=score)
    end(run)
    early = run.files.directory / "epoch-0001.pt"
    run = make_run(tmp_path, "--epochs", 50, "--resume", early)
    end_epoch(run, top1=0.4)
    best = load(run.files.directory / "best.pt")
    assert (best["epoch"], best["best"]) == (2, (0.4, 2))
    assert capsys.readouterr().out.count("best.pt of epoch 1 is not in that directory: ") == 1


def test_best_pt_that_was_deleted_is_written_anew(tmp_path, capsys):
    """By the first epoch of those that are left."""
    run = make_run(tmp_path, "--epochs", 50)
    for score in (0.5, 0.3):
        end_epoch(run, top1=score)
    (run.files.directory / "best.pt").unlink()
    end(run)
    run = make_run(tmp_path, "--resume", "auto")
    end_epoch(run, top1=0.4)
    assert load(run.files.directory / "best.pt")["epoch"] == 3
    assert capsys.readouterr().out.count("best.pt of epoch 1 is not in that directory: ") == 1


def test_lowest_loss_or_a_named_metric_decides(tmp_path):
    """top1 rises with the loss, and top5 falls."""
    losses = [0.5, 0.3, 0.3, float("nan"), 0.4, 0.2]
    cases = {"loss": [1, 2, 2, 2, 2, 6], "top5": [1, 1, 1, 4, 4, 4], "top5:min": [1, 2, 3, 3, 5, 6]}
    for name, epochs in cases.items():
        run, found = make_run(tmp_path / name, "--epochs", 50, "--best", name), []
        for epoch, loss in enumerate(losses):
            top5 = (9, 5, 3, 10, 2, 1)[epoch]
            end_epoch(run, loss=loss, top1=epoch, top5=top5)
            found.append(load(run.files.directory / "best.pt")["epoch"])
        assert found == epochs
        assert run.state.best == {"loss": (0.2, 6), "top5": (10, 4), "top5:min": (1, 6)}[name]


def test_metric_that_the_task_does_not_have_is_refused():
    with pytest.raises(
        common.UsageError, match="--best f1:min: no such metric; use one of loss, top1, top5"
    ):
        check("single", 1, *SMALL, "--best", "f1:min")
    check("single", 1, *SMALL, "--best", "top5:min")
