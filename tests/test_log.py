"""Lines and figures of the log: each is computed here from what the run was given."""

import json
import re
import sys

import pytest
from harness import log_lines, train
from single import SMALL, single, task_file

# A loss that is one number per digit, whatever the network says; the clock moves by it.
TIMED = """
def per_sample_loss(outputs, targets):
    if outputs.requires_grad:
        TIME[0] += 0.5 * float(targets.sum())
    return outputs.sum(1) * 0 + targets.double()
TIME = [0.0]
"""


def of_event(lines, event):
    return [line for line in lines if line["event"] == event]


def test_lines_are_means_and_speeds_since_the_last_one(tmp_path, monkeypatch):
    argv = [*task_file(tmp_path, TIMED), *"--epochs 3 --log-every 4 --no-check --lr 0".split()]
    argv += ["--dtype", "float64", "--output-dir", str(tmp_path / "run")]
    clock = staticmethod(lambda: sys.modules["task_mine"].TIME[0])
    stand_in = type("Clock", (), {"perf_counter": clock})
    monkeypatch.setattr("engine.run.time", stand_in)
    result = single(tmp_path, *argv)
    assert result.code == 0, result.err
    lines = of_event(result.lines, "train")
    places = [(line["epoch"], line["step"], line["global_step"]) for line in lines]
    assert places == [(0, 4, 4), (0, 6, 6), (1, 2, 8), (1, 6, 12), (2, 4, 16), (2, 6, 18)]
    # The clock moves by half a second per unit of the loss: the speed is 2 / the mean loss.
    speeds = [2 / line["loss"] for line in lines]
    assert [line["samples_per_s"] for line in lines] == pytest.approx(speeds)
    assert {line["data_wait"] for line in lines} == {0}
    for line, n in zip(lines, [120, 60, 60, 120, 120, 60]):  # samples of a line
        total = line["loss"] * n
        assert abs(total - round(total)) < 1e-9 and n < total < 8 * n, "a sum of digits"
    names = "event epoch step global_step loss lr samples_per_s data_wait grad_norm loss_scale"
    assert all({*names.split()} <= line.keys() for line in lines)
    evaluation = of_event(result.lines, "eval")
    assert [(line["epoch"], line["global_step"], line["count"]) for line in evaluation] == [(0, 6, 57), (1, 12, 57), (2, 18, 57)]  # fmt: skip
    shown = re.findall(r"step (\d+)/6 .*loss (\S+)", result.out)
    assert shown == [(str(line["step"]), f"{line['loss']:.6f}") for line in lines]


def test_rate_of_the_log_is_that_of_the_step_and_nan_becomes_null(tmp_path):
    text = "def per_sample_loss(outputs, targets):\n    return nn.functional.cross_entropy(outputs, targets, reduction='none') * torch.where(targets == 3, torch.nan, 1.0)\n"
    argv = [
        *task_file(tmp_path, text),
        *"--log-every 1 --no-check --batch-size 2 --epochs 1".split(),
    ]
    argv += "--schedule constant --warmup-epochs 0.5 --lr 0.001".split()
    result = single(tmp_path, *argv)
    assert result.code == 0 and "NaN" not in (result.folder / "metrics.jsonl").read_text(), (
        result.err
    )
    lines = of_event(result.lines, "train")
    rates = [0.001 * min(1, (k + 1) / 50) for k in range(101)]  # skipped steps count too
    assert [line["lr"] for line in lines] == pytest.approx(rates, rel=1e-9)
    bad = [line for line in lines if line["loss"] is None]
    assert bad and all(line["grad_norm"] is None for line in bad) and len(bad) < len(lines)
    assert all(json.loads(json.dumps(line)) == line for line in lines)


@pytest.mark.parametrize("damage", ["torn", "ahead"])
def test_log_stays_whole_lines_after_a_resume(damage, tmp_path):
    """Its last line may have lost its end, or be of steps that are made again."""
    argv = [*SMALL, "--log-every", "1", "--dtype", "float64"]
    whole = single(tmp_path / "whole", *argv, "--epochs", "3")
    single(tmp_path, *argv, "--epochs", "2")
    path = tmp_path / "run" / "metrics.jsonl"
    kept = path.read_bytes()
    lines = (whole.folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    path.write_bytes(kept + (lines[-1][:20] if damage == "torn" else b"".join(lines[-3:])))
    assert single(tmp_path, "--resume", "auto", "--epochs", "3").code == 0
    assert path.read_bytes().startswith(kept) and len(log_lines(path.parent)) == len(lines)
    assert len({(line["event"], line["global_step"]) for line in log_lines(path.parent)}) == len(
        lines
    )


HEADERS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.part = nn.Linear(64, 10), PART
    def forward(self, images):
        return self.part(self.body(images.flatten(1).float() / 90))
def build_model(args):
    return Net()
"""
PARTS = {
    "nn.BatchNorm1d(10)": ["BatchNorm: statistics of each device's 8 samples"],
    "nn.Dropout(0.1)": ["dropout"],
    "nn.Sequential(nn.BatchNorm1d(10), nn.Dropout(0.1))": ["BatchNorm", "dropout"],
    "nn.Sequential(nn.LayerNorm(10), nn.Dropout(0.0))": [],
}


@pytest.mark.parametrize("part", PARTS)
def test_header_says_when_the_number_of_devices_matters(part, tmp_path):
    argv = [
        *task_file(tmp_path, HEADERS.replace("PART", part)),
        *"--epochs 1 --accum-steps 2".split(),
    ]
    runs = {"single": (1, []), "dp": (2, [])} | (
        {"ddp": (2, ["--sync-bn"])} if "Batch" in part else {}
    )
    for mode, (n, more) in runs.items():
        result = train(mode, n, *argv, *more, folder=tmp_path / mode)
        assert result.code == 0, result.err
        found = [line for line in result.out.splitlines() if "the result depends on the number of devices" in line]  # fmt: skip
        wanted = [word for word in PARTS[part] if mode == "dp" or (more and word == "dropout")]
        assert len(found) == len(wanted) and all(map(str.startswith, found, wanted)), found
        size = sum(
            value.numel()
            for value in result.checkpoint()["model"].values()
            if value.is_floating_point()
        )
        size -= 20 * ("Batch" in part)  # the statistics
        assert f" on {n} x cpu: Net, {size:,} parameters" in result.out
        assert re.search(r"\b203 .*samples: 6 steps per epoch.* 30 samples", result.out)


def test_tensorboard_shows_what_the_log_says_also_of_earlier_epochs(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    argv = [*SMALL, "--tensorboard", "--log-every", "3"]
    single(tmp_path, *argv)
    result = single(tmp_path, "--resume", "auto", "--epochs", "4")
    assert result.code == 0, result.err
    events = accumulator.EventAccumulator(str(result.folder)).Reload()
    names = {f"train/{name}" for name in ("loss", "lr", "samples_per_s", "grad_norm")}
    assert names | {"eval/loss", "eval/top1"} <= set(events.Tags()["scalars"])
    for event, steps in (("eval", [6, 12, 18, 24]), ("train", [*range(3, 25, 3)])):
        shown = {entry.step: entry.value for entry in events.Scalars(f"{event}/loss")}
        wanted = {line["global_step"]: line["loss"] for line in of_event(result.lines, event)}
        assert shown == pytest.approx(wanted) and [*shown] == steps
