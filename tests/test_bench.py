"""tools/bench.py: its formulas, how it sums up its turns, and a real run of it."""

import getpass
import itertools
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
from machinery.processes import FAILED, LOST


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
    net = machinery.tasks.build_net(args, machinery.tasks.load_task(args))
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
        "fsdp",
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
    single, ddp, fsdp = result["rows"]
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
    assert fsdp.keys() == names and fsdp["bytes_formula"] == 1.5 * ddp["bytes_formula"]
    assert 1.2 < fsdp["bytes_sent"] / fsdp["bytes_formula"] < 1.5, "gloo sums whole gradients"
    for row in (single, ddp, fsdp):
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
    assert len(table) == 4 and f"**{ddp['ratio']:.3f}**" in table[1]


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


TURNS = {"bare": [0.4, 0.1, 0.2], "script": [0.5, 0.4, 0.2]}


def found(**changes):
    """What a worker writes, of three turns."""
    return {
        "device": "cpu",
        "batch_size": 64,
        "syncs": None,
        "peak_mib": 300.0,
        "gradient_bytes": 4_000_000,
        "bytes_sent": 0.0,
        "seconds": TURNS,
        **changes,
    }


class Processes:
    """Stands for the workers of mp.spawn, which have written their files, or failed."""

    def __init__(self, error=None, codes=(0,)):
        each = [Namespace(kill=self.kill, join=self.join_one, exitcode=code) for code in codes]
        self.processes, self.error, self.joined, self.ended = each, error, 0, []

    def kill(self):
        self.ended.append("killed")

    def join_one(self):
        self.ended.append("joined")

    def join(self, grace_period):
        self.joined += 1
        if self.error:
            raise self.error
        return self.joined > 2


def measure(monkeypatch, tmp_path, mode, ranks, processes=None, **settings):
    args = Namespace(
        nproc=len(ranks) if mode in ("ddp", "fsdp") else 3,
        kind="cpu",
        bandwidth=10,
        latency=1000.0,
    )
    vars(args).update(settings)
    processes, started = processes or Processes(), []

    def spawn(function, arguments, n, join):
        started.append((function, arguments, n, join))
        for rank, written in enumerate(ranks):
            (arguments[-1] / f"rank{rank}").write_text(json.dumps(written))
        return processes

    monkeypatch.setattr(bench.mp, "spawn", spawn)
    monkeypatch.setattr(bench.os, "environ", {"PATH": ""})
    row = bench.measure(args, "digitnet", mode, ["--lr", "1"], tmp_path / mode)
    ((function, arguments, n, join),) = started
    assert function is bench.worker and n == len(ranks) and join is False
    assert arguments == (args, mode, ["--lr", "1"], tmp_path / mode)
    assert bench.os.environ["WORLD_SIZE"] == bench.os.environ["LOCAL_WORLD_SIZE"] == str(n)
    assert processes.ended == ["killed", "joined"]
    return row


def test_row_of_one_device(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "CORES", 6)
    monkeypatch.setattr(bench, "THREADS", None)
    row = measure(monkeypatch, tmp_path, "single", [found()])
    assert (row["workload"], row["mode"], row["devices"], row["threads"]) == (
        "digitnet",
        "single",
        1,
        6,
    )
    assert row["bare"] == pytest.approx(64 / 0.2)
    assert row["script"] == pytest.approx(64 / 0.4), "by the median turn"
    assert row["ratio"] == 0.8, "the median of the turns' ratios, not the ratio of the medians"
    assert (row["ratio_min"], row["ratio_max"]) == (0.25, 1.0)
    assert row["bytes_formula"] == row["bytes_sent"] == 0 and row["peak_mib"] == 300.0
    assert row["seconds"] == TURNS and row["gradient_bytes"] == 4_000_000
    assert "check" not in row
    assert len(row["efficiency"]) == 10
    for of, devices in zip(row["efficiency"], (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)):
        sent = 0.2 + 2 * (devices - 1) / devices * 4e6 / 10e9
        assert of["ring"] == pytest.approx(0.2 / (sent + 2 * (devices - 1) * 1e-3), rel=1e-12)
        depth = devices.bit_length() - 1
        assert of["tree"] == pytest.approx(0.2 / (sent + 2 * depth * 1e-3), rel=1e-12)


def test_row_of_replicas(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "CORES", 6)
    monkeypatch.setattr(bench, "THREADS", "2")
    row = measure(monkeypatch, tmp_path, "dp", [found()], nproc=3)
    assert (row["mode"], row["devices"], row["threads"]) == ("dp", 3, 2), "in one process"
    assert row["bare"] == pytest.approx(320) and row["bytes_formula"] == 0
    assert "efficiency" not in row and "check" not in row


def test_row_of_several_processes(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "CORES", 9)
    monkeypatch.setattr(bench, "THREADS", None)
    times = {
        **TURNS,
        "alone": [0.3, 0.1, 0.15],
        "few": [0.004, 0.002, 0.009],
        "many": [0.104, 0.05, 0.2],
    }
    ranks = [
        found(seconds=times, bytes_sent=5e6, peak_mib=250.0),
        found(seconds={name: [9.0] * 3 for name in times}, bytes_sent=6e6, peak_mib=350.0),
        found(seconds={name: [9.0] * 3 for name in times}, bytes_sent=10e6, peak_mib=200.0),
        found(seconds={name: [9.0] * 3 for name in times}, bytes_sent=7e6, peak_mib=200.0),
    ]
    row = measure(monkeypatch, tmp_path, "ddp", ranks)
    assert (row["devices"], row["threads"]) == (4, 2), "the cores are divided"
    assert row["script"] == pytest.approx(160), "rank 0 tells the time"
    assert row["peak_mib"] == 350.0 and row["bytes_sent"] == 7e6, "largest and mean"
    assert row["bytes_formula"] == pytest.approx(2 * 3 / 4 * 4e6)
    assert "efficiency" not in row
    check = row["check"]
    bandwidth = 2 * 3 / 4 * 4 * 2**20 / (0.104 - 0.004)
    assert check["latency"] == pytest.approx(0.004 / 6) and check["bandwidth"] == pytest.approx(
        bandwidth,
    )
    predicted = 0.15 + 2 * 3 / 4 * 4e6 / bandwidth + 2 * 3 * (0.004 / 6)
    assert check["predicted"] == pytest.approx(predicted, rel=1e-12) and check["measured"] == 0.2


def test_ranks_of_shards_send_half_an_all_reduce_more(monkeypatch, tmp_path):
    row = measure(monkeypatch, tmp_path, "fsdp", [found(seconds=TURNS)] * 4)
    assert row["devices"] == 4 and row["bytes_formula"] == pytest.approx(3 * 3 / 4 * 4e6)
    assert "check" not in row


def test_images_of_the_bench_are_augmented_in_training_alone(tmp_path):
    (tmp_path / "images.py").write_text(bench.IMAGES)
    module = machinery.tasks.load_module(tmp_path / "images.py")
    train, held_out = module.build_datasets(make_args("single"))
    assert len(train) == 10_000 and len(held_out) == 128 and train.flip and not held_out.flip


def test_accelerator_sends_what_nobody_counts(monkeypatch, tmp_path):
    ranks = [found(device="cuda", bytes_sent=None, syncs=1.5)]
    row = measure(monkeypatch, tmp_path, "single", ranks, kind="cuda")
    assert row["bytes_sent"] is None and row["syncs"] == 1.5


def test_link_faster_than_its_latency_is_no_division_by_zero(monkeypatch, tmp_path):
    times = {**TURNS, "alone": [0.1] * 3, "few": [0.01] * 3, "many": [0.01] * 3}
    check = measure(monkeypatch, tmp_path, "ddp", [found(seconds=times)] * 2)["check"]
    assert 0 < check["bandwidth"] < float("inf")
    assert check["predicted"] == pytest.approx(0.11)


@pytest.mark.parametrize(
    ("index", "codes", "code"),
    [(1, (-15, 3), 3), (0, (LOST, 3), 3), (1, (LOST, FAILED), 1)],
)
def test_failing_worker_is_told_by_the_last_line_of_its_log(
    index, codes, code, monkeypatch, tmp_path
):
    """Not by that of a worker which only lost it, or which was ended for it."""
    error = bench.mp.ProcessExitedException("gone", index, error_pid=7, exit_code=codes[index])
    processes = Processes(error, codes)
    folder = tmp_path / "single"
    monkeypatch.setattr(
        bench.Path,
        "mkdir",
        lambda path, mkdir=bench.Path.mkdir: write_log(path, mkdir),
    )

    def write_log(path, mkdir):
        mkdir(path)
        (path / "log0").write_text("output directory: here\n")
        (path / "log1").write_text("a line\ndiverged: at step 3\n")

    with pytest.raises(machinery.processes.Stopped) as stopped:
        measure(monkeypatch, tmp_path, "single", [found()], processes)
    assert stopped.value.code == code
    assert stopped.value.reason == "digitnet, single: diverged: at step 3"
    assert processes.ended == ["killed", "joined"] * 2 and folder.is_dir()


# --------------------------------------------------------------------------------------- one worker


def test_turns_time_only_the_steps_that_count(monkeypatch, tmp_path):
    """On a made-up clock: steps that do not count take much longer."""
    clock = Namespace(seconds=0.0)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock.seconds)
    net = torch.nn.Linear(3, 2)
    net.bias.requires_grad_(False)
    steps, calls, sent = 4, itertools.count(), itertools.count()

    def bare():
        clock.seconds += 1000 if next(calls) % (bench.SETTLE + steps) < bench.SETTLE else 1

    monkeypatch.setattr(bench, "bare_step", lambda *_: bare)
    monkeypatch.setattr(bench, "bytes_sent", lambda: 600 * next(sent))
    run = Namespace(args=make_args("single", "--batch-size", "32"), device=torch.device("cpu"))
    run.state = Namespace(net=net)
    turns = bench.take_turns(
        Namespace(steps=steps, repeats=3),
        "single",
        run,
        iter(lambda: ((), ()), None),
        tmp_path / "found",
    )
    yielded = 0
    with pytest.raises(machinery.processes.Stopped) as stopped:
        for _ in turns:
            window, step = divmod(yielded, bench.SETTLE + steps)
            clock.seconds += 1000 if step < bench.SETTLE else 3 + (window < 2) * 7 + window
            yielded += 1
    assert stopped.value.code == 0 and yielded == 5 * (bench.SETTLE + steps)
    written = json.loads((tmp_path / "found").read_text())
    assert written["seconds"] == {"bare": [1.0] * 3, "script": [5.0, 6.0, 7.0]}, "no warm-up"
    assert written["batch_size"] == 32 and written["device"] == "cpu" and written["syncs"] is None
    assert written["gradient_bytes"] == 4 * 6, "of what is trained"
    assert written["bytes_sent"] == 600 / (bench.SETTLE + steps), "a step"
    assert 50 < written["peak_mib"] < 50_000


@pytest.mark.parametrize("mode", ["single", "dp"])
def test_bare_loop_makes_the_step_of_the_script(mode):
    """A copy of the network, with the learning rate of the moment and the mean over the batch."""
    args = make_args(
        mode,
        "--batch-size",
        "6",
        "--momentum",
        "0",
        "--weight-decay",
        "0",
        "--dtype",
        "float64",
    )
    task = machinery.tasks.load_task(args)
    net = machinery.tasks.build_net(args, task)
    optimizer = optimizer_of(args, net)
    optimizer.param_groups[0]["lr"] = 0.03
    run = Namespace(
        args=args,
        device=torch.device("cpu"),
        state=Namespace(net=net, optimizer=optimizer),
    )
    inputs = torch.randint(
        0,
        256,
        (6, 1, 8, 8),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(0),
    )
    targets = torch.arange(6)
    copies = []
    build = bench.copy.deepcopy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            bench.copy,
            "deepcopy",
            lambda value: copies.append(build(value)) or copies[-1],
        )
        step = bench.bare_step(mode, run, inputs, targets)
    before = [parameter.clone() for parameter in net.parameters()]
    step()
    task.per_sample_loss(net(inputs), targets).mean().backward()
    for ours, parameter, old in zip(copies[0].parameters(), net.parameters(), before):
        assert parameter.equal(old), "the script's own network is not touched"
        assert torch.allclose(ours, old - 0.03 * parameter.grad, rtol=0, atol=1e-14)


# ------------------------------------------------------------------------------- table and start-up


def made_up_row(workload, mode, devices, script, **changes):
    row = {
        "workload": workload,
        "mode": mode,
        "devices": devices,
        "bare": 2000.4,
        "script": script,
        "ratio": 0.98765,
    }
    row |= {
        "ratio_min": 0.912345,
        "ratio_max": 1.04567,
        "peak_mib": 312.4,
        "bytes_formula": 1.5e6,
        "bytes_sent": 1.6e6,
    }
    return {**row, "syncs": None, **changes}


def table_of(monkeypatch, capsys, rows, *argv, kind="cpu"):
    """Run bench.main with made-up rows; return the cells of its table, and all that it printed."""
    made = iter(rows)
    monkeypatch.setattr(bench, "measure", lambda *_: next(made))
    monkeypatch.setattr(
        bench,
        "start_up",
        lambda kind, repeats, folder: {"bare": 1.234, "script": 5.678 + repeats},
    )
    monkeypatch.setattr(bench.signal, "signal", lambda *_: None)
    monkeypatch.setattr(bench, "stay_on_this_machine", lambda: None)
    monkeypatch.setattr(bench, "resolve_device_type", lambda name: kind)
    monkeypatch.setattr(bench, "parse_args", lambda *_: None)
    assert bench.main(["--workloads", "digitnet", *argv]) == 0
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if line.startswith("| digitnet")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines], text


def test_table_shows_each_row_and_its_share_of_one_device(monkeypatch, capsys, tmp_path):
    link = {"bandwidth": 2.345e9, "latency": 56e-6, "predicted": 0.0123, "measured": 0.0145}
    rows = [
        made_up_row(
            "digitnet",
            "single",
            1,
            1000.0,
            efficiency=[{"ring": 0.876, "tree": 0.987}] * 10,
            bytes_formula=0.0,
            bytes_sent=0.0,
        ),
        made_up_row("digitnet", "dp", 2, 900.0, peak_mib=98.765),
        made_up_row("digitnet", "ddp", 2, 1500.0, check=link, syncs=0.126),
    ]
    cells, text = table_of(
        monkeypatch,
        capsys,
        rows,
        "--modes",
        "single",
        "dp",
        "ddp",
        "--nproc",
        "2",
        "--json",
        str(tmp_path / "all.json"),
    )
    assert cells[0] == [
        "digitnet",
        "single 1",
        "2000",
        "1000",
        "**0.988** (0.912 to 1.046)",
        "1.00",
        "312",
        "0.00",
        "0.00",
        "–",
    ]
    assert cells[1][1:4] == ["dp 2", "2000", "900"] and cells[1][5:] == [
        "0.90",
        "98.77",
        "1.50",
        "1.60",
        "–",
    ]
    assert cells[2][1:4] == ["ddp 2", "2000", "1500"] and cells[2][5:] == [
        "1.50",
        "312",
        "1.50",
        "1.60",
        "0.13",
    ]
    assert cells[3] == ["digitnet", *["0.88 / 0.99"] * 10]
    assert "bare 1.23 s, run.sh single 8.68 s" in text, "three starts"
    assert "ddp 2: predicted 12.3 ms, measured 14.5 ms (all-reduce here: 2.35 GB/s, 56 us" in text
    devices = " | ".join(str(2**i) for i in range(3, 13))
    assert "of single |" in text and f"| devices | {devices} |" in text
    result = json.loads((tmp_path / "all.json").read_text())
    assert [row["scaling"] for row in result["rows"]] == [1.0, 0.9, 1.5]
    assert result["start_up"] == {"bare": 1.234, "script": 8.678} and result["device"] == "cpu"


def test_accelerators_share_nothing(monkeypatch, capsys):
    """N of them are compared with N times one of them."""
    rows = [
        made_up_row("digitnet", "single", 1, 1000.0),
        made_up_row("digitnet", "ddp", 4, 3600.0, bytes_sent=None),
    ]
    cells, text = table_of(
        monkeypatch,
        capsys,
        rows,
        "--nproc",
        "4",
        "--modes",
        "single",
        "ddp",
        "--repeats",
        "2",
        kind="cuda",
    )
    assert [row[5] for row in cells] == ["1.00", "0.90"] and cells[1][8] == "–"
    assert "of N × single |" in text and "run.sh single 7.68 s" in text


def test_without_a_single_run_there_is_nothing_to_scale(monkeypatch, capsys):
    cells, text = table_of(
        monkeypatch,
        capsys,
        [made_up_row("digitnet", "ddp", 2, 900.0)],
        "--modes",
        "ddp",
    )
    assert cells[0][5] == "–" and "Predicted efficiency" not in text


def test_start_up_is_the_median_of_turns(monkeypatch, tmp_path):
    """Each is timed from its start to the line of its first step."""
    clock, seconds, commands = Namespace(seconds=0.0), iter([5.0, 7.0, 1.0, 9.0, 3.0, 2.0]), []
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock.seconds)
    monkeypatch.setattr(bench, "THREADS", None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LAUNCH_PID", "1")

    class Process:
        def __init__(self, command, env, **settings):
            commands.append(command)
            assert not {"WORLD_SIZE", "LAUNCH_PID"} & env.keys() and env["OMP_NUM_THREADS"] == str(
                bench.CORES
            )
            self.stdout = self.lines(next(seconds))

        def lines(self, after):
            yield "output directory: somewhere\n"
            clock.seconds += after
            yield "epoch 1/1  step 1/22  loss 2.3\n"
            clock.seconds += 1000
            yield "epoch 1/1  step 2/22  loss 2.2\n"

        def __enter__(self):
            return self

        def __exit__(self, *_):
            clock.seconds += 50

    monkeypatch.setattr(bench.subprocess, "Popen", Process)
    assert bench.start_up("cpu", 3, tmp_path) == {"bare": 3.0, "script": 7.0}
    assert ["run.sh" in " ".join(command) for command in commands] == [False, True] * 3, "in turns"
    assert len({command[-1] for command in commands[1::2]}) == 3, "each in a folder of its own"
    assert "step 1/1" in commands[0][2]


def test_program_that_ends_before_its_first_step_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "BARE_START", "print('no step')  # {device}")
    with pytest.raises(machinery.processes.Stopped) as stopped:
        bench.start_up("cpu", 1, tmp_path)
    assert stopped.value.code == 1 and stopped.value.reason.endswith("ended before its first step")
