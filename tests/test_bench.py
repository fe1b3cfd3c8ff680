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
import peers
import pytest
import torch
from harness import ROOT, make_args, optimizer_of
from launches import marked, read, wait_for_end

import common
import machinery.options
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
        "device_mib",
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
    assert all(value > 0 for value in ddp["check"].values())
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
        (["--peer", "palin"], "--peer palin: use plain, accelerate, fabric, lightning or a script"),
        (["--peer", "none.py"], "--peer none.py: no such file"),
        (["--peer", "plain", "--modes", "ddp", "fsdp"], "--peer compares --modes single and ddp"),
        (["--peer", "plain", "--svg", "all.svg"], "and draws no --svg"),
        (["--peer", "plain", "--amp", "bf16"], "--peer compares float32 in torch's own"),
        (["--peer", "plain", "--channels-last"], "--peer compares float32 in torch's own"),
        (["--batch-size", "64", "0"], "--batch-size: must be a whole number, at least 1, got 0"),
        (["--startup"], "--startup and --files need --peer"),
        (["--files", "1000"], "--startup and --files need --peer"),
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


def test_each_batch_size_has_a_row_in_the_given_precision(monkeypatch, capsys):
    started = []

    def measure(args, workload, mode, argv, folder):
        started.append((folder.name, argv))
        return made_up_row(workload, mode, 1, 1000.0)

    monkeypatch.setattr(bench.signal, "signal", lambda *_: None)
    monkeypatch.setattr(bench, "stay_on_this_machine", lambda: None)
    monkeypatch.setattr(bench, "measure", measure)
    options = ["--amp", "bf16", "--channels-last", "--batch-size", "32", "256"]
    bench.main(["--workloads", "digitnet", "--modes", "single", "dp", "--nproc", "2", *options])
    rows = [line.split("|")[1:3] for line in capsys.readouterr().out.splitlines()]
    names = [(f"digitnet, batch {size}", mode) for size in (32, 256) for mode in ("single", "dp")]
    shown = [(row[0].strip(), row[1].strip()) for row in rows if "batch" in "".join(row)]
    assert shown[:4] == [(name, f"{mode} 1") for name, mode in names]
    assert [folder for folder, _ in started] == [f"{name}-{mode}" for name, mode in names]
    for size, (_, argv) in zip((32, 32, 256, 256), started):
        args = machinery.options.parse_args("dp" if "--replicas" in argv else "single", argv)
        assert (args.batch_size, args.amp, args.channels_last) == (size, "bf16", True)


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_bare_loop_has_the_precision_of_the_script(amp):
    args = make_args("single", "--batch-size", "4", "--amp", amp)
    net = machinery.tasks.build_net(args, machinery.tasks.load_task(args))
    run = Namespace(args=args, device=torch.device("cpu"))
    run.state = Namespace(net=net, optimizer=optimizer_of(args, net))
    seen = []
    net.head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    bench.bare_step("single", run, *task.build_datasets(args)[0].__getitems__(range(4)))()
    assert seen == [torch.float32 if amp == "off" else torch.bfloat16]


@pytest.mark.release
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
        "device_mib": None,
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
        found(seconds=times, bytes_sent=5e6, peak_mib=250.0, device_mib=10.0),
        found(
            seconds={name: [9.0] * 3 for name in times},
            bytes_sent=6e6,
            peak_mib=350.0,
            device_mib=20.0,
        ),
        found(seconds={name: [9.0] * 3 for name in times}, bytes_sent=10e6, peak_mib=200.0),
        found(seconds={name: [9.0] * 3 for name in times}, bytes_sent=7e6, peak_mib=200.0),
    ]
    row = measure(monkeypatch, tmp_path, "ddp", ranks)
    assert (row["devices"], row["threads"]) == (4, 2), "the cores are divided"
    assert row["script"] == pytest.approx(160), "rank 0 tells the time"
    assert row["peak_mib"] == 350.0 and row["bytes_sent"] == 7e6, "largest and mean"
    assert row["device_mib"] == 20.0
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
    assert len(train) == 50_000 and len(held_out) == 128 and train.flip and not held_out.flip


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


# -------------------------------------------------------------------------------------------- table


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
        "device_mib": None,
        "bytes_formula": 1.5e6,
        "bytes_sent": 1.6e6,
    }
    return {**row, "syncs": None, **changes}


def table_of(monkeypatch, capsys, rows, *argv, kind="cpu"):
    """Run bench.main with made-up rows; return the cells of its table, and all that it printed."""
    made = iter(rows)
    monkeypatch.setattr(bench, "measure", lambda *_: next(made))
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
        made_up_row("digitnet", "ddp", 2, 1500.0, check=link, syncs=0.126, device_mib=2345.4),
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
        "–",
        "0.00",
        "0.00",
        "–",
    ]
    assert cells[1][1:4] == ["dp 2", "2000", "900"] and cells[1][5:] == [
        "0.90",
        "98.77",
        "–",
        "1.50",
        "1.60",
        "–",
    ]
    assert cells[2][1:4] == ["ddp 2", "2000", "1500"] and cells[2][5:] == [
        "1.50",
        "312",
        "2345",
        "1.50",
        "1.60",
        "0.13",
    ]
    assert cells[3] == ["digitnet", *["0.88 / 0.99"] * 10]
    assert "ddp 2: predicted 12.3 ms, measured 14.5 ms (all-reduce here: 2.35 GB/s, 56 us" in text
    devices = " | ".join(str(2**i) for i in range(3, 13))
    assert "of single |" in text and f"| devices | {devices} |" in text
    result = json.loads((tmp_path / "all.json").read_text())
    assert [row["scaling"] for row in result["rows"]] == [1.0, 0.9, 1.5]
    assert result["device"] == "cpu"


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
        kind="cuda",
    )
    assert [row[5] for row in cells] == ["1.00", "0.90"] and cells[1][9] == "–"
    assert "of N × single |" in text


def test_without_a_single_run_there_is_nothing_to_scale(monkeypatch, capsys):
    cells, text = table_of(
        monkeypatch,
        capsys,
        [made_up_row("digitnet", "ddp", 2, 900.0)],
        "--modes",
        "ddp",
    )
    assert cells[0][5] == "–" and "Predicted efficiency" not in text


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


def test_steps_of_any_program_are_timed_from_its_command_and_it_is_ended(tmp_path, monkeypatch):
    script = tmp_path / "made.py"
    script.write_text(MADE)
    monkeypatch.setenv("RANK", "1")  # of a launcher around all
    before = time.monotonic()
    ends = peers.time_steps([sys.executable, str(script)], "1", 4, tmp_path / "turn")
    passed = time.monotonic() - before
    assert len(ends) == 4
    pauses = [later - earlier for earlier, later in itertools.pairwise(ends)]
    assert all(found >= asked for found, asked in zip(pauses, (0.2, 0.1, 0.3)))
    assert ends[0] > 0.5 and ends[-1] < passed, "to import torch takes longer"
    worker = int((tmp_path / "turn" / "worker").read_text())
    wait_for_end([worker], 10)
    assert not read(worker, "cmdline"), "it would sleep on"


def test_program_that_ends_too_soon_is_told_by_its_last_line(tmp_path):
    command = [sys.executable, "-c", "print('loading'); raise SystemExit('no data here')"]
    with pytest.raises(machinery.processes.Stopped) as stopped:
        peers.time_steps(command, "1", 4, tmp_path / "turn")
    assert stopped.value.code == 1
    assert stopped.value.reason.endswith(" ended before step 4: no data here")


def test_program_that_hangs_is_ended_with_what_it_has_started(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "LIMIT", 3)
    monkeypatch.setattr(peers, "GRACE", 0.2)
    command = ["bash", "-c", "trap : TERM; sleep 60 & echo $$ $! > pids; wait; sleep 60"]
    with pytest.raises(machinery.processes.Stopped, match="is not done with 4 steps"):
        peers.time_steps(command, "1", 4, tmp_path / "turn")
    left = [int(pid) for pid in (tmp_path / "turn" / "pids").read_text().split()]
    wait_for_end(left, 10)
    assert [read(pid, "cmdline") for pid in left] == ["", ""]


@pytest.fixture
def hook(tmp_path, monkeypatch):
    """The hook of peers/sitecustomize.py in this process, which would end after the first step."""

    def end(code):
        raise AssertionError(f"ended with {code}")

    module = machinery.tasks.load_module(peers.TOOLS / "peers" / "sitecustomize.py")
    monkeypatch.setattr(module.os, "_exit", end)
    for name, value in {"STEPS_WANTED": "1", "STEPS_FILE": f"{tmp_path}/times"}.items():
        monkeypatch.setenv(name, value)
    hook = module.Watch()
    hook.process, hook.ends = os.getpid(), []
    hook.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return hook


def test_ranks_that_have_never_met_are_an_error(hook, tmp_path, monkeypatch):
    """A script that minds no launcher: each rank trains for itself, at full speed."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="process group"):
        hook.after_step(hook.optimizer, (), {})
    assert len(hook.ends) == 1 and not [*tmp_path.iterdir()]


def test_step_that_a_fork_tries_is_none_of_the_program(hook, tmp_path):
    hook.process = 0
    hook.after_step(hook.optimizer, (), {})
    assert not hook.ends
    hook.process = os.getpid()
    with pytest.raises(AssertionError, match="ended with 0"):
        hook.after_step(hook.optimizer, (), {})
    assert [float(line) for line in (tmp_path / "times").read_text().split()] == hook.ends


def test_rows_of_programs_by_hand():
    """Three turns of two steps that settle and three that count."""

    def run(start, *steps):
        return [*itertools.accumulate([start, 9.0, 9.0, *steps])]

    turns = {
        "plain": [run(2.0, 0.1, 0.2, 0.6), run(4.0, 0.4, 0.4, 0.4), run(1.0, 0.1, 0.1, 0.1)],
        "script": [run(3.0, 0.3, 0.3, 0.3), run(8.0, 0.6, 0.6, 0.6), run(3.0, 0.2, 0.2, 0.2)],
        "run.sh": [run(1.0, 0.1, 0.1, 0.1), run(2.0, 0.2, 0.2, 0.2), run(4.0, 0.4, 0.4, 0.4)],
    }
    plain, script, run_sh = peers.sum_up(turns)
    assert plain["program"] == "plain" and plain["start"] == [2.0, 4.0, 1.0]
    assert plain["step"] == pytest.approx([0.2, 0.4, 0.1]), "the median step of each turn"
    assert plain["start_script"] == 2.0, "of 1.5, 2 and 3; that of the medians is 1.5"
    assert plain["start_run.sh"] == 0.5 and plain["step_run.sh"] == pytest.approx(0.5)
    assert plain["step_script"] == pytest.approx(1.5)
    assert script["start_run.sh"] == pytest.approx(1 / 3) and run_sh[
        "step_script"
    ] == pytest.approx(3.0)
    assert script["start_script"] == 1.0
    (first,) = peers.sum_up({"script": [[2.0], [3.0]]})
    assert first["start"] == [2.0, 3.0] and first["step"] == [] and first["step_script"] is None


def compare(monkeypatch, tmp_path, commands, **settings):
    """Return what peers.compare started, in this order, and its rows."""
    started, clock = [], itertools.count(1)

    def time_steps(command, threads, steps, folder):
        started.append((command, threads, steps, folder))
        start = next(clock)
        return [float(start + i) for i in range(steps)]

    monkeypatch.setattr(peers, "time_steps", time_steps)
    monkeypatch.setattr(peers.os, "sched_getaffinity", lambda _: range(6))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    settings = {
        "peer": ["plain"],
        "nproc": 2,
        "repeats": 2,
        "steps": 5,
        "startup": False,
    } | settings
    return started, peers.compare(Namespace(**settings), commands, tmp_path)


def test_programs_take_turns_with_the_same_options(monkeypatch, tmp_path):
    options = ["--dataset", "imagefolder"]
    started, rows = compare(monkeypatch, tmp_path, {("files", "ddp"): options})
    commands = [command for command, *_ in started]
    assert len(started) == 3 * 3 and len({folder for *_, folder in started}) == 9
    scripts = ["train_plain.py", "train_ddp.py", "run.sh"] * 3
    assert all(script in " ".join(words) for script, words in zip(scripts, commands)), "in turns"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2"]
    given = [*options, "--workers", "3"]
    assert commands[0] == [*torchrun, peers.script_of("plain"), *given]
    output = ["--output-dir", str(started[1][-1] / "run")]
    assert commands[1] == [*torchrun, str(ROOT / "train_ddp.py"), *given, *output]
    output = ["--output-dir", str(started[2][-1] / "run")]
    assert commands[2] == ["bash", str(ROOT / "run.sh"), "ddp", "2", *given, *output]
    assert {threads for _, threads, *_ in started} == {"3"}, "the cores are divided"
    assert {steps for *_, steps, _ in started} == {1 + peers.SETTLE + 5}
    assert [(row["workload"], row["mode"], row["devices"]) for row in rows] == [
        ("files", "ddp", 2)
    ] * 3
    assert [row["start"] for row in rows] == [[4, 7], [5, 8], [6, 9]], "the first turn warms up"


def test_start_up_is_one_step_and_data_in_memory_need_no_workers(monkeypatch, tmp_path):
    commands = {("digitnet", "single"): ["--dataset", "digits"]}
    started, rows = compare(monkeypatch, tmp_path, commands, startup=True, repeats=1)
    assert {steps for *_, steps, _ in started} == {1} and rows[0]["step"] == []
    assert started[0][0] == [
        sys.executable, peers.script_of("plain"), "--dataset", "digits", "--workers", "0",
    ]  # fmt: skip
    assert {threads for _, threads, *_ in started} == {"6"} and rows[0]["devices"] == 1


def test_table_of_peers():
    row = {"workload": "digitnet", "mode": "ddp", "devices": 2, "program": "plain"}
    row |= {"start": [1.0, 9.0, 2.345], "step": [0.001, 0.0123, 0.5]}
    row |= {"start_script": 1.234, "start_run.sh": 0.5, "step_script": 0.99, "step_run.sh": 2.0}
    empty = {**row, "program": "script", "step": [], "step_script": None, "step_run.sh": None}
    first, second = peers.report([row, empty]).splitlines()[2:]
    assert first == "| digitnet | ddp 2 | plain | 2.35 | 1.23 | 0.50 | 12.3 | 0.99 | 2.00 |"
    assert second == "| digitnet | ddp 2 | script | 2.35 | – | 0.50 | – | – | – |"


def test_directory_of_many_files_is_made_of_links_to_a_few(tmp_path):
    peers.make_folder(tmp_path, 1000)
    args = make_args("single", "--dataset", "imagefolder", "--data-dir", str(tmp_path))
    train, held_out = task.build_datasets(args)
    assert (len(train), len(held_out)) == (1000, 360)
    assert len({os.stat(path).st_ino for path in train.paths}) == 360
    assert train.targets.unique().tolist() == [*range(10)]
    assert train.targets[:5].tolist() == held_out.targets[:5].tolist()
    assert task.read_images([train.paths[0]])[0].shape == (3, 32, 32)


def test_peer_that_is_not_installed_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(peers, "compare", lambda *_: pytest.fail("it begins all the same"))
    with pytest.raises(common.UsageError) as error:
        bench.main(["--peer", "plain", "fabric"])
    assert str(error.value) == "--peer fabric: lightning is not installed; pip install lightning"


@pytest.mark.parametrize("peer", peers.PEERS)
def test_scripts_of_peers_are_short(peer):
    lines = (peers.TOOLS / "peers" / f"train_{peer}.py").read_text().splitlines()
    assert 20 < len(lines) <= 40


WATCHED = """
import os
import task
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


@pytest.mark.release
@pytest.mark.parametrize("mode", ["single", "ddp"])
@pytest.mark.parametrize("peer", peers.PEERS)
def test_ranks_of_a_peer_share_each_batch_and_have_equal_weights(peer, mode, tmp_path):
    """Accelerate without cpu=True trains each rank on all of the batch, and nothing says so."""
    (tmp_path / "watched.py").write_text(WATCHED)
    options = ["--device", "cpu", "--task", str(tmp_path / "watched.py")]
    try:
        command = peers.programs(Namespace(peer=[peer], nproc=2), mode, options)[peer]
    except common.UsageError as error:
        pytest.skip(str(error))
    assert len(peers.time_steps(command, "1", 3, tmp_path / "turn")) == 3
    files = sorted((tmp_path / "turn").glob("rank*"))
    ranks = [[line.split() for line in path.read_text().splitlines()] for path in files]
    assert len(ranks) == (1 if mode == "single" else 2)
    sizes = {size for rank in ranks for size, _, _ in rank}
    assert sizes == {str(64 // len(ranks))}, "of the global batch"
    pixels = {pixels for rank in ranks for _, pixels, _ in rank}
    assert len(pixels) == 3 * len(ranks), "each batch of each rank is another one"
    weights = [[weight for _, _, weight in rank] for rank in ranks]
    assert weights[0] == weights[-1] and len({*weights[0]}) == 3, "by an all-reduce"


@pytest.mark.long
@pytest.mark.release
def test_a_run_with_a_peer_reports_both_and_leaves_nothing_behind(tmp_path):
    scratch, script = tmp_path / "tmp", tmp_path / "made.py"
    scratch.mkdir()
    script.write_text(MADE)
    argv = ["--peer", script, "--startup", "--files", 128, "--workloads", "digitnet"]
    argv += [
        "--modes",
        "single",
        "--repeats",
        1,
        "--device",
        "cpu",
        "--json",
        tmp_path / "all.json",
    ]
    finished = run_bench(*argv, cwd=tmp_path, TMPDIR=str(scratch), LAUNCH_MARK=f"{tmp_path}")
    assert finished.returncode == 0, finished.stderr
    wait_for_end(marked(f"{tmp_path}\0"), 10)
    assert not marked(f"{tmp_path}\0")
    rows = json.loads((tmp_path / "all.json").read_text())["rows"]
    found = [(row["workload"], row["program"]) for row in rows]
    names = ["made.py", "script", "run.sh"]
    assert found == [(w, name) for w in ("digitnet", "128-files") for name in names]
    assert all(len(row["start"]) == 1 and row["start"][0] > 0.5 for row in rows)
    assert rows[0]["start_script"] == pytest.approx(rows[1]["start"][0] / rows[0]["start"][0])
    assert len([line for line in finished.stdout.splitlines() if "| made.py |" in line]) == 2
