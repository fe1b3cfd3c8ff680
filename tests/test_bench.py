"""tools/bench.py and peers.py: what they measure is right, and what they start is ended."""

import getpass
import itertools
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from statistics import median

import bench
import peers
import pytest
import torch
from harness import ROOT, make_args, optimizer_of
from launches import marked, read, wait_for_end

import common
import machinery.process
import task
from machinery.usertask import Task


def run_bench(*arguments, cwd):
    """Run the command with a mark; return how it ended, when nothing that it started is left."""
    scratch = cwd / "tmp"
    scratch.mkdir()
    command = [sys.executable, str(ROOT / "tools" / "bench.py"), *map(str, arguments)]
    environment = {**os.environ, "TMPDIR": str(scratch), "LAUNCH_MARK": f"{cwd}"}
    options = {"cwd": cwd, "env": environment, "capture_output": True, "text": True}
    finished = subprocess.run(command, timeout=200, **options)
    wait_for_end(marked(f"{cwd}\0"), 10)  # Python's resource tracker takes a moment
    assert not marked(f"{cwd}\0")
    cache = f"torchinductor_{getpass.getuser()}"  # torch's own
    assert {path.name for path in scratch.iterdir()} <= {cache}
    return finished


@pytest.mark.slow
def test_a_run_reports_all_it_measured_and_leaves_nothing_behind(tmp_path):
    words = "--workloads digitnet --modes single ddp fsdp --nproc 2 --device cpu --steps 3"
    argv = words.split()
    argv += ["--repeats", 3, "--json", tmp_path / "all.json"]
    finished = run_bench(*argv, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"tmp", "all.json"}
    single, ddp, fsdp = json.loads((tmp_path / "all.json").read_text())["rows"]
    for row in (single, ddp, fsdp):
        bare, script = row["seconds"]["bare"], row["seconds"]["script"]
        ratios = [a / b for a, b in zip(bare, script, strict=True)]
        assert len(ratios) == 3 and row["ratio"] == median(ratios), "of the turns"
        assert (row["ratio_min"], row["ratio_max"]) == (min(ratios), max(ratios))
        assert row["script"] == pytest.approx(row["batch_size"] / median(script))
        assert 0.02 < row["ratio_min"] <= row["ratio"] <= row["ratio_max"] < 50
        assert 100 < row["peak_mib"] < 10_000
    assert ddp["scaling"] == pytest.approx(ddp["script"] / single["script"])
    table = [line for line in finished.stdout.splitlines() if line.startswith("| digitnet | ")]
    assert len(table) == 3 and f"**{ddp['ratio']:.3f}**" in table[1]


@pytest.mark.slow
def test_what_a_script_refuses_is_told_with_its_exit_code(tmp_path):
    argv = ["--workloads", "imagefolder", "--data-dir", tmp_path, "--device", "cpu"]
    finished = run_bench(*argv, "--modes", "ddp", "--nproc", "2", cwd=tmp_path)
    assert finished.returncode == 2 and finished.stdout == ""
    *_, last = finished.stderr.splitlines()
    assert last.startswith("bench.py: ") and "imagefolder, ddp: " in last and "train" in last


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--workloads imagefolder", "--workloads imagefolder needs --data-dir, a directory with"),
        ("--nproc 65", "--nproc: must be a whole number, 1 to 64, got 65"),
        ("--json no/such.json", "--json no/such.json: must end in .json, in a directory that"),
        ("--startup", "--startup needs --peer"),
        ("--peer palin", "--peer palin: use plain, accelerate, lightning or a script"),
        ("--peer plain --modes ddp fsdp", "--peer compares --modes single and ddp"),
        ("--peer plain --amp bf16", "--peer compares float32 in torch's own"),
    ],
)
def test_bad_options_are_named_before_anything_is_measured(argv, words):
    with pytest.raises(common.UsageError) as error:
        bench.main(argv.split())
    assert words in str(error.value)


def made_run(*argv):
    """Return what the bench sees of a run, and the images and labels of a batch."""
    args = make_args("single", "--batch-size", "4", *argv)
    net = Task(args).build_net()
    state = Namespace(net=net, optimizer=optimizer_of(args, net))
    run = Namespace(config=vars(args), device=torch.device("cpu"), state=state)
    return run, task.build_datasets(args)[0].__getitems__(range(4))


def test_what_the_loader_and_the_loop_lose_shows_and_the_bare_loop_loses_nothing(tmp_path):
    run, batch = made_run()
    before, steps = [parameter.clone() for parameter in run.state.net.parameters()], 0

    def batches():
        while True:
            time.sleep(0.02)
            yield [batch]

    settings = Namespace(steps=3, repeats=2)
    with pytest.raises(machinery.process.Stopped):
        for _ in bench.take_turns(settings, "single", run, batches(), tmp_path / "found"):
            time.sleep(0.03)
            steps += 1
    seconds = json.loads((tmp_path / "found").read_text())["seconds"]
    assert steps == (3 + bench.SETTLE) * 4, "a window alone, a turn that warms up, and two"
    assert len(seconds["script"]) == len(seconds["bare"]) == 2
    assert min(seconds["script"]) >= 0.05, "what the loader and the loop slept"
    assert all(map(torch.equal, before, run.state.net.parameters())), "the bare loop has its own"


def test_bare_loop_has_the_precision_of_the_script():
    run, batch = made_run("--amp", "bf16")
    seen = []
    run.state.net.head.register_forward_hook(lambda *call: seen.append(call[-1].dtype))
    bench.bare_step("single", run, *batch)()
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize(("kind", "share"), [("cpu", "single"), ("cuda", "N × single")])
def test_table(kind, share):
    """Replicas on the CPU share its cores; accelerators share nothing."""
    row = {"workload": "digitnet", "mode": "ddp", "devices": 2, "bare": 2000.4, "script": 1500.0}
    row |= {"ratio": 0.98765, "ratio_min": 0.912345, "ratio_max": 1.04567, "scaling": 1.5}
    row |= {"peak_mib": 312.4, "device_mib": None}
    head, _, line = bench.report({"device": kind, "rows": [row]}).splitlines()
    expected = "| digitnet | ddp 2 | 2000 | 1500 | **0.988** (0.912 to 1.046) | 1.50 | 312 | – |"
    assert line == expected and f"script, of {share} |" in head


# -------------------------------------------------------------------------------------------- peers

MADE = """
import multiprocessing, pathlib, time
worker = multiprocessing.Process(target=time.sleep, args=(60,))  # as one of a loader
worker.start()
pathlib.Path("worker").write_text(str(worker.pid))
import torch
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=1.0)
def step():
    weight.grad = torch.ones(1)
    optimizer.step()
for pause in (0, 0.2, 0.1, 0.3):
    time.sleep(pause)
    step()
while True:
    step()
"""  # a program that knows nothing of the hook: it would train for ever


@pytest.mark.full
def test_steps_of_any_program_are_timed_from_its_command_and_it_is_ended(tmp_path, monkeypatch):
    script = tmp_path / "made.py"
    script.write_text(MADE)
    monkeypatch.setenv("RANK", "1")  # of a launcher around all
    ends = peers.time_steps([sys.executable, str(script)], "1", 4, tmp_path / "turn")
    assert len(ends) == 4
    pauses = zip(itertools.pairwise(ends), (0.2, 0.1, 0.3))
    assert all(later - earlier >= asked for (earlier, later), asked in pauses)
    assert ends[0] > 0.5, "to import torch takes longer"
    worker = int((tmp_path / "turn" / "worker").read_text())
    wait_for_end([worker], 10)
    assert not read(worker, "cmdline"), "it would sleep on"


def test_program_that_ends_too_soon_is_told_by_its_last_line(tmp_path):
    command = [
        sys.executable,
        "-c",
        "print('loading', flush=True); raise SystemExit('no data here')",
    ]
    with pytest.raises(machinery.process.Stopped) as stopped:
        peers.time_steps(command, "1", 4, tmp_path / "turn")
    assert stopped.value.code == 1
    assert stopped.value.reason.endswith(" ended before step 4: no data here")


def test_rows_of_programs_by_hand():
    """Three turns of two steps that settle and three that count."""

    def run(start, *steps):
        return [*itertools.accumulate([start, 9.0, 9.0, *steps])]

    turns = {
        "plain": [run(2.0, 0.1, 0.2, 0.6), run(4.0, 0.4, 0.4, 0.4), run(1.0, 0.1, 0.1, 0.1)],
        "script": [run(3.0, 0.3, 0.3, 0.3), run(8.0, 0.6, 0.6, 0.6), run(3.0, 0.2, 0.2, 0.2)],
        "run.sh": [run(1.0, 0.1, 0.1, 0.1), run(2.0, 0.2, 0.2, 0.2), run(4.0, 0.4, 0.4, 0.4)],
    }
    plain, *_ = peers.sum_up(turns)
    assert plain["program"] == "plain" and plain["start"] == [2.0, 4.0, 1.0]
    assert plain["step"] == pytest.approx([0.2, 0.4, 0.1]), "the median step of each turn"
    assert plain["start_script"] == 2.0, "of 1.5, 2 and 3; that of the medians is 1.5"
    assert plain["start_run.sh"] == 0.5 and plain["step_run.sh"] == pytest.approx(0.5)
    of = {"workload": "digitnet", "mode": "ddp", "devices": 2}
    *_, line = peers.report([of | plain]).splitlines()
    assert line == "| digitnet | ddp 2 | plain | 2.00 | 2.00 | 0.50 | 200.0 | 1.50 | 0.50 |"


def test_peer_that_is_not_installed_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(peers, "compare", lambda *_: pytest.fail("it begins all the same"))
    with pytest.raises(common.UsageError) as error:
        bench.main(["--peer", "plain", "lightning"])
    assert str(error.value) == "--peer lightning: it is not installed; pip install lightning"


WATCHED = """
import os
import task
from machinery.usertask import Task
from task import *
def build_model(args):
    net = task.build_model(args)
    file = open(f"rank{os.environ.get('RANK', 0)}", "w")
    def watch(module, inputs):
        weight = module.conv1.weight.double().sum().item()
        print(len(inputs[0]), inputs[0].double().sum().item(), weight, file=file, flush=True)
    net.register_forward_pre_hook(watch)
    return net
"""  # writes the size of each batch, the sum of its pixels, and that of some weights


@pytest.mark.full
@pytest.mark.parametrize("peer", peers.PEERS)
def test_ranks_of_a_peer_share_each_batch_and_have_equal_weights(peer, tmp_path):
    """Accelerate without cpu=True trains each rank on all of the batch, and nothing says so."""
    (tmp_path / "watched.py").write_text(WATCHED)
    options = ["--device", "cpu", "--task", str(tmp_path / "watched.py")]
    try:
        command = peers.programs(Namespace(peer=[peer], nproc=2), "ddp", options)[peer]
    except common.UsageError as error:
        pytest.skip(str(error))
    assert len(peers.time_steps(command, "1", 3, tmp_path / "turn")) == 3
    files = sorted((tmp_path / "turn").glob("rank*"))
    ranks = [[line.split() for line in path.read_text().splitlines()] for path in files]
    assert len(ranks) == 2
    assert {size for rank in ranks for size, _, _ in rank} == {"32"}, "of the global batch"
    pixels = {pixels for rank in ranks for _, pixels, _ in rank}
    assert len(pixels) == 3 * len(ranks), "each batch of each rank is another one"
    weights = [[weight for _, _, weight in rank] for rank in ranks]
    assert weights[0] == weights[-1] and len({*weights[0]}) == 3, "by an all-reduce"


@pytest.mark.slow
def test_a_run_with_a_peer_reports_both_and_leaves_nothing_behind(tmp_path):
    script = tmp_path / "made.py"
    script.write_text(MADE)
    argv = ["--peer", script, "--startup", "--workloads", "digitnet", "--modes", "single"]
    argv += ["--repeats", 1, "--device", "cpu", "--json", tmp_path / "all.json"]
    finished = run_bench(*argv, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    rows = json.loads((tmp_path / "all.json").read_text())["rows"]
    assert [row["program"] for row in rows] == ["made.py", "script", "run.sh"]
    assert all(len(row["start"]) == 1 and row["start"][0] > 0.5 for row in rows)
    assert rows[0]["start_script"] == pytest.approx(rows[1]["start"][0] / rows[0]["start"][0])
