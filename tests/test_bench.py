"""tools/bench.py measures every mode, and tools/plot.py draws what metrics.jsonl says."""

import json
import os
import subprocess
import sys

import plot
import pytest
from launches import ROOT, marked


@pytest.mark.slow
def test_bench_measures_each_mode_and_leaves_nothing_behind(tmp_path):
    words = (
        "--workloads tiny --modes single dp ddp fsdp --nproc 2 --device cpu --steps 3 --repeats 2"
    )
    command = [sys.executable, str(ROOT / "tools/bench.py"), *words.split(), "--json", "all.json"]
    environment = {**os.environ, "LAUNCH_MARK": str(tmp_path), "TMPDIR": str(tmp_path)}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    finished = subprocess.run(command, timeout=300, **options)
    assert finished.returncode == 0, finished.stderr
    rows = json.loads((tmp_path / "all.json").read_text())
    assert [row["mode"] for row in rows] == ["single", "dp", "ddp", "fsdp"]
    for row in rows:
        assert 0.02 < row["ratio_min"] <= row["ratio"] <= row["ratio_max"] < 50
        assert len(row["seconds"]["bare"]) == len(row["seconds"]["script"]) == 2
    assert finished.stdout.count("| tiny | ") == 4 and not marked(f"{tmp_path}\0")
    assert not [*tmp_path.glob("bench-*")]


def write_run(folder, slope):
    lines = [{"event": "train", "epoch": 0, "step": s, "global_step": s} for s in (1, 2, 3)]
    for line in lines:
        line |= {"loss": slope / line["step"], "lr": 0.1}
    lines[1]["loss"] = None  # it was not finite
    evaluation = {"event": "eval", "epoch": 0, "global_step": 3, "top1": 0.5, "count": 7}
    folder.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in [*lines, evaluation])
    (folder / "metrics.jsonl").write_text(text)
    return folder


def test_every_value_of_every_run_is_drawn_over_the_global_step(tmp_path):
    pytest.importorskip("matplotlib")
    runs = {name: write_run(tmp_path / name, slope) for name, slope in (("one", 1.0), ("two", 2.0))}
    axes = plot.draw({name: plot.read_run(folder) for name, folder in runs.items()}).axes
    panels = {axis.get_title(): axis for axis in axes}
    assert {*panels} == {"loss (train)", "lr (train)", "top1 (eval)"}, "counts are no curves"
    lines = {line.get_label(): line for line in panels["loss (train)"].get_lines()}
    assert [*lines["two"].get_xdata()] == [1, 3] and [*lines["two"].get_ydata()] == [2.0, 2 / 3]
    assert plot.main([str(runs["one"])]) == 0
    assert (tmp_path / "runs.svg").read_bytes()[:5] == b"<?xml"


@pytest.mark.parametrize("content", [None, "{}\n", "text"])
def test_what_is_no_run_is_refused_in_one_line(content, tmp_path, capsys):
    if content:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(SystemExit) as stopped:
        plot.main([str(tmp_path)])
    assert stopped.value.code == 2
    assert f"{tmp_path / 'metrics.jsonl'}: " in capsys.readouterr().err.splitlines()[-1]
