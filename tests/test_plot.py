"""tools/plot.py shows what metrics.jsonl says."""

import json

import plot
import pytest


def write_run(folder, slope):
    common = {"event": "train", "epoch": 0, "lr": 0.1, "skipped": 0}
    lines = [{**common, "step": s, "global_step": s, "loss": slope / s} for s in (1, 2, 3)]
    lines[1]["loss"] = None  # not finite
    evaluation = {"event": "eval", "epoch": 0, "global_step": 3, "top1": 0.5, "count": 7}
    lines.append({**evaluation, "loss": slope / 4})
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_every_value_of_every_run_is_drawn_over_the_global_step(tmp_path):
    runs = {
        name: plot.read_run(write_run(tmp_path / name, slope))
        for name, slope in (("one", 1.0), ("two", 2.0))
    }
    panels = {axis.get_title(): axis for axis in plot.draw(runs).axes}
    names = ["loss (train)", "lr (train)", "skipped (train)", "loss (eval)", "top1 (eval)"]
    assert set(panels) == set(names), "counts are no curves"
    lines = {line.get_label(): line for line in panels["loss (train)"].get_lines()}
    assert list(lines["two"].get_xdata()) == [1, 3]
    assert list(lines["two"].get_ydata()) == [2.0, 2 / 3]
    assert lines["two"].get_linewidth() < lines["one"].get_linewidth(), (
        "the upper line does not hide the lower one"
    )


@pytest.mark.parametrize(("last", "scale"), [(1.0, "log"), (-1.0, "linear")])
def test_axis_is_logarithmic_only_where_all_values_of_all_runs_are_positive(last, scale):
    """A logarithmic axis would leave out the others, as those of a log-likelihood."""
    line = {"event": "train", "global_step": 1}
    runs = {f"run {i}": [{**line, "loss": loss, "lr": 0.1}] for i, loss in enumerate((2.0, last))}
    loss, rate = plot.draw(runs).axes
    assert (loss.get_yscale(), rate.get_yscale()) == (scale, "linear")


@pytest.mark.full
def test_the_command_writes_one_picture_and_refuses_what_is_none(tmp_path, capsys):
    folder = str(write_run(tmp_path / "run", 1.0))
    assert plot.main([folder, "--output", str(tmp_path / "picture.svg")]) == 0
    assert (tmp_path / "picture.svg").read_bytes()[:5] == b"<?xml"
    for name, content in (("empty", "{}\n"), ("text", "text")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(content)
    no_runs = (("none", "No such file"), ("empty", "holds no lines of a run"))
    for name, words in (*no_runs, ("text", "Expecting value")):
        with pytest.raises(SystemExit) as stopped:
            plot.main([str(tmp_path / name)])
        assert stopped.value.code == 2
        assert f"{tmp_path / name / 'metrics.jsonl'}: {words}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        plot.main([folder, "--output", "picture.txt"])
    assert "--output picture.txt: must end in .svg" in capsys.readouterr().err
