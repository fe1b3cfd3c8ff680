"""tools/bench.py: its formulas, what it counts, and a real run of it."""

import getpass
import json
import multiprocessing
import os
import subprocess
import sys
import time
from argparse import Namespace

import bench
import pytest
import torch
from harness import ROOT, make_args, optimizer_of
from launches import marked, wait_for_end

import common
import machinery.processes
import machinery.tasks
import task


def run_bench(*arguments, cwd, **environment):
    command = [sys.executable, str(ROOT / "tools" / "bench.py"), *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_each_of_n_devices_sends_twice_all_but_one_nth_of_the_gradient():
    assert bench.ring_bytes(1000, 1) == 0
    assert bench.ring_bytes(1000, 2) == 1000
    assert bench.ring_bytes(1000, 4) == 1500


def test_predicted_step_by_hand():
    """8 devices, 400 MB at 10 GB/s: 70 ms of sending; 14 or 6 messages of 1 ms."""
    predicted = bench.predict(0.1, 400e6, 8, 10e9, 1e-3)
    assert predicted == pytest.approx({"ring": 0.1 + 0.07 + 0.014, "tree": 0.1 + 0.07 + 0.006})
    assert bench.predict(0.1, 400e6, 1, 10e9, 1e-3) == {"ring": 0.1, "tree": 0.1}
    assert bench.predict(0, 0, 9, 1, 1) == {"ring": 16, "tree": 8}, (
        "a tree of nine is as deep as one of sixteen"
    )


def test_what_the_loader_and_the_loop_lose_shows_and_the_bare_loop_loses_nothing(tmp_path):
    args = make_args("single", "--batch-size", "4")
    net = machinery.tasks.build_net(args, machinery.tasks.load_task(args), torch.device("cpu"))
    state = Namespace(net=net, optimizer=optimizer_of(args, net))
    images, labels = task.build_datasets(args)[0].__getitems__(range(4))
    before, steps = [parameter.clone() for parameter in net.parameters()], 0

    def batches():
        while True:
            time.sleep(0.02)
            yield images, labels

    run = Namespace(args=args, device=torch.device("cpu"), state=state)
    with pytest.raises(machinery.processes.Stopped):
        for _ in bench.take_turns(
            Namespace(steps=3, repeats=2), "single", run, batches(), tmp_path / "found"
        ):
            time.sleep(0.03)
            steps += 1
    seconds = json.loads((tmp_path / "found").read_text())["seconds"]
    assert steps == (3 + bench.SETTLE) * (1 + 1 + 2), (
        "a window alone, a turn that warms up, and two"
    )
    assert len(seconds["script"]) == len(seconds["bare"]) == 2
    assert min(seconds["script"]) >= 0.05, (
        "what the loader and the loop slept; the bare loop asked neither for a step"
    )
    assert all(map(torch.equal, before, net.parameters())), "the bare loop has a network of its own"


def count_up(counter):
    while True:
        counter.value += 1


def test_loader_workers_stand_still_while_the_bare_loop_is_timed_and_go_on_for_the_script(
    tmp_path, monkeypatch
):
    fork, moved = multiprocessing.get_context("fork"), []
    counter = fork.RawValue("Q", 0)
    worker = fork.Process(target=count_up, args=(counter,), daemon=True)
    worker.start()

    def bare():
        before = counter.value
        time.sleep(0.01)
        moved.append(counter.value != before)

    monkeypatch.setattr(bench, "bare_step", lambda *_: bare)
    net = torch.nn.Linear(1, 1)
    run = Namespace(args=make_args(), device=torch.device("cpu"), state=Namespace(net=net))
    try:
        with pytest.raises(machinery.processes.Stopped):
            for _ in bench.take_turns(
                Namespace(steps=2, repeats=1),
                "single",
                run,
                iter(lambda: ((), ()), None),
                tmp_path / "found",
            ):
                before, deadline = counter.value, time.monotonic() + 10
                while counter.value == before:
                    assert time.monotonic() < deadline, "it was stopped, and never went on"
                    time.sleep(0.001)
    finally:
        worker.kill()
        worker.join()
    settle, steps = bench.SETTLE, 2 + bench.SETTLE
    assert len(moved) == 3 * steps and not any(
        moved[steps + settle : 2 * steps] + moved[2 * steps + settle :]
    )


@pytest.mark.long
def test_a_run_reports_all_it_measured_and_leaves_nothing_behind(tmp_path):
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    argv = [
        "--workloads",
        "digitnet",
        "--modes",
        "single",
        "ddp",
        "--nproc",
        2,
        "--device",
        "cpu",
        "--steps",
        3,
        "--repeats",
        1,
    ]
    argv += ["--json", tmp_path / "all.json", "--svg", tmp_path / "ratios.svg"]
    finished = run_bench(*argv, cwd=tmp_path, TMPDIR=str(scratch), LAUNCH_MARK=f"{tmp_path}")
    assert finished.returncode == 0, finished.stderr
    wait_for_end(marked(f"{tmp_path}\0"), 10)  # Python's resource tracker takes a moment
    assert not marked(f"{tmp_path}\0")
    assert {path.name for path in scratch.iterdir()} <= {f"torchinductor_{getpass.getuser()}"}, (
        "torch's own cache"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"tmp", "all.json", "ratios.svg"}
    assert (tmp_path / "ratios.svg").read_bytes().startswith(b"<?xml")

    result = json.loads((tmp_path / "all.json").read_text())
    single, ddp = result["rows"]
    names = {
        "workload",
        "mode",
        "devices",
        "threads",
        "device",
        "batch_size",
        "seconds",
        "gradient_bytes",
    }
    names |= {
        "bare",
        "script",
        "ratio",
        "ratio_min",
        "ratio_max",
        "scaling",
        "peak_mib",
        "bytes_formula",
        "bytes_sent",
        "syncs",
    }
    assert single.keys() == names | {"efficiency"} and ddp.keys() == names | {"check"}
    for row in (single, ddp):
        assert (
            0.02 < row["ratio_min"] <= row["ratio"] <= row["ratio_max"] < 50
            and 100 < row["peak_mib"] < 10_000
        )
    parameters = 4 * sum(p.numel() for p in task.DigitNet(1, 10).parameters())
    assert (
        single["bytes_formula"] == single["bytes_sent"] == 0
        and ddp["bytes_formula"] == ddp["gradient_bytes"] == parameters
    )
    assert 0.99 < ddp["bytes_sent"] / ddp["bytes_formula"] < 1.05, (
        "what gloo sent, without TCP's own headers"
    )
    assert (
        ddp["scaling"] == pytest.approx(ddp["script"] / single["script"]) and single["scaling"] == 1
    )
    assert all(value > 0 for value in (*ddp["check"].values(), *result["start_up"].values()))
    assert [of["tree"] >= of["ring"] > 0 for of in single["efficiency"]] == [True] * 10
    table = [line for line in finished.stdout.splitlines() if line.startswith("| digitnet | ")]
    assert len(table) == 3 and f"**{ddp['ratio']:.3f}**" in table[1]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--modes", "spawn"], "--modes: invalid choice: 'spawn'"),
        (
            ["--workloads", "digitnet", "imagefolder"],
            "--workloads imagefolder needs --data-dir, a directory with train/ and val/ (or test/)",
        ),
        (["--nproc", "65"], "--nproc: must be a whole number, 1 to 64, got 65"),
        (
            ["--json", "no/such.json"],
            "--json no/such.json: must end in .json, in a directory that exists",
        ),
    ],
)
def test_bad_options_are_named_before_anything_is_measured(argv, words):
    with pytest.raises(common.UsageError) as error:
        bench.main(argv)
    assert words in str(error.value)


def test_a_bad_option_ends_with_code_2_and_one_line(tmp_path):
    finished = run_bench("--steps", 0, cwd=tmp_path, TMPDIR=str(tmp_path))
    assert finished.returncode == 2 and finished.stdout == "" and not list(tmp_path.iterdir())
    assert (
        finished.stderr
        == "bench.py: error: --steps: must be a whole number, at least 1, got 0 (--help lists the options)\n"
    )
