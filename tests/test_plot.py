"""tools/plot.py shows what metrics.jsonl says."""

import json
import subprocess
import sys

import plot
import pytest
from harness import ROOT


def write_run(folder, slope):
    lines = [
        {
            "event": "train",
            "epoch": 0,
            "step": s,
            "global_step": s,
            "loss": slope / s,
            "lr": 0.1,
            "skipped": 0,
        }
        for s in (1, 2, 3)
    ]
    lines[1]["loss"] = None  # not finite
    lines.append(
        {"event": "eval", "epoch": 0, "global_step": 3, "loss": slope / 4, "top1": 0.5, "count": 7}
    )
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_every_value_of_every_run_is_drawn_over_the_global_step(tmp_path):
    runs = {
        name: plot.read_run(write_run(tmp_path / name, slope))
        for name, slope in (("one", 1.0), ("two", 2.0))
    }
    figure = plot.draw(runs)
    panels = {axis.get_title(): axis for axis in figure.axes}
    assert set(panels) == {
        "loss (train)",
        "lr (train)",
        "skipped (train)",
        "loss (eval)",
        "top1 (eval)",
    }
    lines = {line.get_label(): line for line in panels["loss (train)"].get_lines()}
    assert list(lines["two"].get_xdata()) == [1, 3] and list(lines["two"].get_ydata()) == [
        2.0,
        2 / 3,
    ]
    assert lines["two"].get_linewidth() < lines["one"].get_linewidth(), (
        "the upper line does not hide the lower one"
    )
    assert [text.get_text() for text in panels["loss (train)"].get_legend().get_texts()] == [
        "one",
        "two",
    ]


@pytest.mark.parametrize(
    ("losses", "scale"),
    [((2.0, 1.0), "log"), ((1.0, -1.0), "linear"), ((0.0, 1.0), "linear"), ((None, None), "log")],
)
def test_axis_is_logarithmic_only_where_all_values_of_all_runs_are_positive(losses, scale):
    """A logarithmic axis leaves the others out: the panel of a task with a negative loss, a log-likelihood say, would be empty."""
    runs = {
        f"run {i}": [{"event": "train", "global_step": 1, "loss": loss, "lr": 0.1}]
        for i, loss in enumerate(losses)
    }
    loss, rate = plot.draw(runs).axes
    assert (loss.get_yscale(), rate.get_yscale()) == (scale, "linear")


@pytest.mark.parametrize(
    "name", ["picture.svg", pytest.param("picture.png", marks=pytest.mark.long)]
)
def test_the_command_writes_one_picture(name, tmp_path, capsys):
    assert plot.main([str(write_run(tmp_path / "run", 1.0)), "--output", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_bytes()[:5] in (b"<?xml", b"\x89PNG\r")


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), ("{}\n", "holds no lines of a run"), ("text", "Expecting value")],
)
def test_a_folder_without_a_run_is_named(content, words, tmp_path):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    finished = subprocess.run(
        [sys.executable, ROOT / "tools" / "plot.py", tmp_path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert (
        finished.returncode == 2
        and f"{tmp_path / 'metrics.jsonl'}: {words}" in finished.stderr
        and "Traceback" not in finished.stderr
    )
    assert not (tmp_path / "runs.svg").exists()


def test_axes_panels_and_lines(tmp_path):
    """Losses and norms on a logarithmic axis; no empty panel; each line thinner than the last."""
    line = {"event": "train", "epoch": 0, "step": 1, "count": 3}
    line |= {"loss": 2.0, "lr": 0.1, "grad_norm": 3.0, "images_per_s": 100.0, "skipped": 0}
    lines = [{**line, "global_step": step} for step in (1, 2, 3)]
    evaluation = {"event": "eval", "epoch": 0, "loss": 1.0, "count": 7}
    evaluation |= {"train_s": 5.0, "eval_s": 1.0, "save_s": 0.1}
    lines += [{**evaluation, "global_step": step} for step in (2, 3)]
    figure = plot.draw({"a": lines, "b": lines, "c": lines})
    panels = {axis.get_title(): axis for axis in figure.axes}
    assert len(figure.axes) == len(panels) == 6, "counts are no curves"
    figure = plot.draw({name: [*lines, {**line, "global_step": 4, "new": 1.0}] for name in "abc"})
    panels = {axis.get_title(): axis for axis in figure.axes}
    assert len(figure.axes) == len(panels) == 7, "two places of three columns stay empty"
    assert {axis.get_gridspec().ncols for axis in figure.axes} == {3}
    scales = {title: axis.get_yscale() for title, axis in panels.items()}
    logarithmic = {title for title, scale in scales.items() if scale == "log"}
    assert logarithmic == {"loss (train)", "grad_norm (train)", "loss (eval)"}
    widths = [drawn.get_linewidth() for drawn in panels["lr (train)"].get_lines()]
    assert widths[0] > widths[1] > widths[2] == 1
    assert [drawn.get_marker() for drawn in panels["new (train)"].get_lines()] == ["."] * 3
    assert {drawn.get_marker() for drawn in panels["lr (train)"].get_lines()} <= {"", "None"}
    assert [list(drawn.get_xdata()) for drawn in panels["loss (eval)"].get_lines()] == [[2, 3]] * 3


@pytest.mark.parametrize("name", ["picture.txt", "picture", "no/such.svg"])
def test_picture_that_cannot_be_written_is_refused(name, tmp_path, capsys):
    run = write_run(tmp_path / "run", 1.0)
    with pytest.raises(SystemExit) as left:
        plot.main([str(run), "--output", str(tmp_path / name)])
    assert left.value.code == 2 and "must end in .svg, .png or .pdf" in capsys.readouterr().err
