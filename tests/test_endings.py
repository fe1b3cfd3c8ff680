"""How a run ends when something is not as it should be: what is saved, which code it ends with, and what the last line says."""

import fcntl
import functools
import itertools
import multiprocessing
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import (
    TASKS,
    guard_of,
    keyed,
    loader_of,
    make_args,
    make_sampler,
    optimizer_of,
    run_processes,
    train,
)
from pitfalls import BASE, Patches, set_environment, without_speed, wrap_in_task
from torch import nn

import common
import machinery.files
import machinery.launch
import machinery.options
import machinery.processes
import machinery.rendezvous
import machinery.run
import task

EVERYTHING = [
    "--task",
    str(TASKS / "everything.py"),
    "--dtype",
    "float64",
    "--epochs",
    "3",
    "--batch-size",
    "30",
    "--log-every",
    "4",
]
MODES = [("single", 1), ("dp", 2), ("ddp", 2), ("spawn", 2)]


def call_in_task(name, at, function, rank_to_call=0, rank=0):
    """Let rank `rank_to_call` call `function()` in the `at`-th call, from 0, of a function of the task. Bind all but the rank."""
    if rank != rank_to_call:
        return
    calls = itertools.count()

    def watched(original, *arguments):
        if next(calls) == at:
            function()
        return original(*arguments)

    wrap_in_task(name, watched)


def interrupt(number):
    os.kill(os.getpid(), number)


# -------------------------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("number", machinery.processes.SIGNALS)
def test_signal_before_training_ends_the_run_at_once(number, tmp_path):
    """By what the system does, without words: nothing can be lost yet."""
    patch = functools.partial(
        call_in_task, "build_datasets", 0, functools.partial(interrupt, number)
    )
    result = train("single", 1, *BASE, folder=tmp_path, patch=patch)
    assert (result.code, result.err) == (-number, "")
    assert not result.folder.exists()


def leave_late(rank):
    """Rank 1 is slow to hear why the run ends. It prints whether rank 0 was still there then."""
    broadcast = machinery.run.broadcast_object
    pid = Path(f"{os.environ['OUTPUT']}-pid")

    def slow(value):
        value = broadcast(value)
        if rank == 0:
            pid.write_text(str(os.getpid()))
        elif isinstance(value, tuple) and value[1] is not None:
            while not pid.exists() or not pid.read_text():
                time.sleep(0.01)
            descriptor = os.pidfd_open(int(pid.read_text()))
            print("rank 0 left:", bool(select.select([descriptor], [], [], 1)[0]))
        return value

    machinery.run.broadcast_object = slow


def test_early_end_of_all_ranks_waits_for_all(tmp_path):
    """Or gloo could end a rank with SIGABRT, while it still talks to one that is gone."""
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / "metrics.jsonl", "a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        output = functools.partial(set_environment, {"OUTPUT": str(tmp_path / "run")})
        result = train("ddp", 2, *BASE, folder=tmp_path, patch=Patches(output, leave_late))
    assert result.code == 2 and "rank 0 left: False" in result.out, result.out + result.err


def ranks_of(environment):
    os.environ.update(environment)
    return machinery.rendezvous.ranks_from_env()[0]


def test_rank_whose_launcher_was_killed_before_it_looked_ends(tmp_path):
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    targets = [
        functools.partial(ranks_of, {**ranks, **launcher}) for launcher in ({}, {"LAUNCH_PID": "1"})
    ]
    assert [code for code, _, _ in run_processes(targets, tmp_path)] == [0, 1]


def look(path):
    print("saved:", path.exists() and torch.load(path)["step"])


def test_signal_in_the_last_step_of_an_epoch_saves_before_the_evaluation(tmp_path):
    """The ranks would agree on it in the next step, which comes after the evaluation."""
    last = 6  # the first call is for the order of DDP's buckets
    stop = functools.partial(
        call_in_task, "per_sample_loss", last, functools.partial(interrupt, signal.SIGTERM)
    )
    watch = functools.partial(
        call_in_task, "per_sample_metrics", 0, functools.partial(look, tmp_path / "run" / "last.pt")
    )
    result = train("ddp", 1, *EVERYTHING, folder=tmp_path, patch=Patches(stop, watch))
    assert result.code == 143 and "saved: 6" in result.out, result.out + result.err


def interrupt_and_look(path, size):
    os.kill(os.getpid(), signal.SIGTERM)
    print("saved before:", torch.load(path)["step"] == size)


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("ddp", 2)])
def test_signal_during_an_evaluation_finds_the_run_saved_and_stops_it_after_the_evaluation(
    mode, n, tmp_path
):
    """An evaluation may take longer than the seconds that a scheduler, or torchrun, gives a run to end."""
    straight = train(mode, n, *EVERYTHING, folder=tmp_path / "straight")
    last = tmp_path / "run" / "last.pt"
    patch = functools.partial(
        call_in_task, "per_sample_metrics", 1, functools.partial(interrupt_and_look, last, 6)
    )
    stopped = train(mode, n, *EVERYTHING, folder=tmp_path, patch=patch)
    assert stopped.code == 143 and "saved before: True" in stopped.out, stopped.err
    saved = stopped.checkpoint()
    assert (saved["epoch"], saved["step"], saved["global_step"]) == (1, 0, 6)
    resumed = train(mode, n, *EVERYTHING, "--resume", "auto", folder=tmp_path)
    assert resumed.out.count("resumed at epoch") == 1, "rank 0 says it, and no other"
    assert without_speed(resumed.lines) == without_speed(straight.lines)
    assert all(
        tensor.equal(straight.checkpoint()["model"][name])
        for name, tensor in resumed.checkpoint()["model"].items()
    )


def leave_at_once():
    os._exit(9)


def test_run_killed_in_its_evaluation_goes_on_with_it(tmp_path):
    straight = train("single", 1, *EVERYTHING, folder=tmp_path / "straight")
    patch = functools.partial(
        call_in_task, "per_sample_metrics", 11, leave_at_once
    )  # eight batches each
    assert train("single", 1, *EVERYTHING, folder=tmp_path, patch=patch).code == 9
    resumed = train("single", 1, *EVERYTHING, "--resume", "auto", folder=tmp_path)
    assert without_speed(resumed.lines) == without_speed(straight.lines)
    assert "resumed at epoch 2, step 6" in resumed.out


def interrupt_within_a_save(rank):
    """SIGTERM in the second save, when its file is written but not in its place."""
    replace, calls = os.replace, itertools.count()

    def interrupted(*arguments):
        if next(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        replace(*arguments)

    os.replace = interrupted


def test_signal_within_a_save_lets_it_end(tmp_path):
    straight = train("single", 1, *EVERYTHING, "--save-every", "2", folder=tmp_path / "straight")
    stopped = train(
        "single",
        1,
        *EVERYTHING,
        "--save-every",
        "2",
        folder=tmp_path,
        patch=interrupt_within_a_save,
    )
    assert stopped.code == 143 and not list(stopped.folder.glob(".*")), stopped.err
    resumed = train(
        "single", 1, *EVERYTHING, "--save-every", "2", "--resume", "auto", folder=tmp_path
    )
    assert without_speed(resumed.lines) == without_speed(straight.lines)
    assert all(
        tensor.equal(straight.checkpoint()["model"][name])
        for name, tensor in resumed.checkpoint()["model"].items()
    )


def test_signal_in_the_last_evaluation_lets_the_run_end(tmp_path):
    patch = functools.partial(
        call_in_task, "per_sample_metrics", 2 * 8 + 3, functools.partial(interrupt, signal.SIGTERM)
    )
    result = train("single", 1, *EVERYTHING, folder=tmp_path, patch=patch)
    assert result.code == 0 and result.checkpoint()["epoch"] == 3, result.err


# ------------------------------------------------------------------------------------------------------------- a rank that fails


@pytest.mark.parametrize(("mode", "n"), MODES)
def test_task_that_leaves_by_sys_exit_is_no_success(mode, n, tmp_path):
    """sys.exit(0) deep in a task would look like a run that is done, to the launcher and to whoever reads its code."""
    patch = functools.partial(
        call_in_task,
        "per_sample_loss",
        3,
        functools.partial(sys.exit, 0),
        n - 1 if mode != "dp" else 0,
    )
    result = train(mode, n, *BASE, folder=tmp_path, patch=patch)
    assert result.code == 1 and "the run was left before its end" in result.err.splitlines()[-1]


FAILED, LOST = machinery.processes.FAILED, machinery.processes.LOST


class Rank:
    """A process as subprocess and multiprocessing have it, which ends with `code`; None: only if it is killed."""

    def __init__(self, code, waits=0):
        self.code, self.waits, self.pid, self.killed = code, waits, 0, False

    def poll(self):
        self.waits -= 1
        return self.code if self.waits < 0 else None

    def kill(self):
        self.killed = True

    def wait(self):
        assert self.killed, "it would never end"


class Spawned(Rank):
    exitcode = property(Rank.poll)
    join, wait = Rank.wait, property()


@pytest.mark.parametrize(
    ("codes", "received", "code", "cause"),
    [
        ([0, 0], [], 0, ""),
        ([0, 0], [signal.SIGTERM], 0, ""),
        ([143, 143], [signal.SIGTERM], 143, ""),
        ([143, 143], [], 143, ""),
        ([2, 2], [], 2, ""),
        ([LOST, 2], [], 2, ""),
        ([3, 3], [], 3, ""),
        ([1, 1], [], 1, ""),
        ([FAILED, LOST], [], FAILED, ""),
        ([LOST, FAILED, None], [], FAILED, ""),
        ([LOST, -9, None], [], FAILED, "process 1 was killed by SIGKILL"),
        ([143, -9, 143], [signal.SIGTERM], 143, ""),
        ([-15, -15], [signal.SIGTERM], 143, "stopped by SIGTERM with nothing to save"),
        ([-2, LOST], [signal.SIGINT], 130, "stopped by SIGINT with nothing to save"),
        ([LOST, -10], [signal.SIGUSR1], 138, "stopped by SIGUSR1 with nothing to save"),
        ([LOST, -15], [], FAILED, "process 1 was killed by SIGTERM"),
        ([LOST, 7], [], FAILED, "process 1 left with exit code 7"),
        ([LOST, 1, None], [], FAILED, "process 1 left with exit code 1"),
        ([LOST, 0], [], FAILED, "a rank left before the end"),
    ],
)
@pytest.mark.parametrize("kind", [Rank, Spawned])
def test_end_of_a_run_is_told_by_the_rank_that_is_to_blame(
    kind, codes, received, code, cause, monkeypatch
):
    """The others end for its sake, or have to be ended."""
    monkeypatch.setattr(machinery.launch, "handle_signals", lambda handler: None)
    monkeypatch.setattr(machinery.launch, "GRACE", 0.5)
    processes = [kind(code, waits=i) for i, code in enumerate(codes)]
    assert machinery.launch.wait_for(processes, 1, received) == (code, cause)
    assert [process.killed for process in processes] == [code is None for code in codes]


def test_launcher_starts_nothing_again_that_a_signal_asked_to_stop(tmp_path, monkeypatch):
    """A rank may hang then, or fail for another reason; test_defaults.py says when it does."""

    def wait_for(processes, nnodes, received):
        (tmp_path / "last.pt").touch()
        received.append(signal.SIGTERM)
        return FAILED, "killed"

    started = []
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(machinery.launch, "start", lambda *arguments: started.append(arguments))
    monkeypatch.setattr(machinery.launch, "wait_for", wait_for)
    monkeypatch.setattr(machinery.launch, "check_run", lambda args: None)
    monkeypatch.setattr(sys, "argv", ["launch.py", "2", "--output-dir", str(tmp_path)])
    assert machinery.launch.main() == 1 and len(started) == 1


GONE = [  # of torch 2.6 and 2.15
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection reset by peer [127.0.0.1]:4711. This is typically caused by",
    "sendBytes failed on SocketImpl(fd=4, addr=[localhost]:4711, remote=[localhost]:4712): Broken pipe",
    "NCCL error: remote process exited or there was a network error",
]


def test_lost_connection_is_one_to_another_rank():
    assert all(machinery.processes.LOST_CONNECTION.search(message) for message in GONE)
    assert not machinery.processes.LOST_CONNECTION.search("[Errno 104] Connection reset by peer"), (
        "of the task's own, to a file server say"
    )


def lose_the_other_rank(launcher):
    """Be a rank whose connection to another one breaks."""
    os.environ.update({"RANK": "0", **launcher})

    def main():
        raise RuntimeError(
            "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"
        )

    return machinery.processes.run_main(main)


def test_rank_that_lost_another_leaves_in_silence_if_the_launcher_is_ours(tmp_path):
    """The cause is what the other one said, or what the launcher says of it. torchrun would say nothing."""
    ours, torchrun = [
        functools.partial(lose_the_other_rank, launcher) for launcher in ({"LAUNCH_PID": "1"}, {})
    ]
    (code, out, err), (code_of_torchrun, _, err_of_torchrun) = run_processes(
        [ours, torchrun], tmp_path
    )
    assert (code, out, err) == (LOST, "", "")
    assert code_of_torchrun == 1 and "Connection closed by peer" in err_of_torchrun.splitlines()[-1]


# ---------------------------------------------------------------------------------------------------------- what a checkpoint is


def change_task(name, change, rank):
    """Let `change(what the task's function returned)` take its place. Bind all but the rank."""
    wrap_in_task(name, lambda original, args: change(original(args), args))


def fewer_samples(datasets, args):
    datasets[0].targets = datasets[0].targets[:-1]
    return datasets


def another_model(model, args):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def put_a_module_into_args(model, args):
    args.made_by_the_task = multiprocessing
    return model


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "build_datasets",
            fewer_samples,
            "the training set had 1437 samples, and has 1436 now; that would be another run",
        ),
        ("build_model", another_model, "does not fit the model or the optimizer"),
    ],
)
def test_checkpoint_of_other_data_or_another_model_is_refused(name, change, message, tmp_path):
    argv = ["--batch-size", "500", "--epochs", "1"]
    assert train("single", 1, *argv, folder=tmp_path).code == 0
    for mode, n in (("single", 1), ("ddp", 2)):
        resumed = train(
            mode,
            n,
            *argv,
            "--resume",
            "auto",
            folder=tmp_path,
            patch=functools.partial(change_task, name, change),
        )
        assert resumed.code == 2 and message in resumed.err and "Traceback" not in resumed.err
        assert len(resumed.err.splitlines()) == 1, "rank 0 speaks for all"


def test_what_a_task_puts_into_its_arguments_does_not_spoil_the_checkpoint(tmp_path):
    argv = ["--batch-size", "500", "--epochs", "1"]
    result = train(
        "ddp",
        2,
        *argv,
        folder=tmp_path,
        patch=functools.partial(change_task, "build_model", put_a_module_into_args),
    )
    assert result.code == 0, result.err
    assert "made_by_the_task" not in common.load_checkpoint(result.folder / "last.pt")["config"]


def test_going_back_to_an_older_checkpoint_is_going_back(tmp_path):
    """Killed before its first save, the run must not go on from the later last.pt of before, up to which the log is gone."""
    straight = train("single", 1, *EVERYTHING, "--keep-every", "1", folder=tmp_path)
    kept = tmp_path / "run" / "epoch-0001.pt"
    patch = functools.partial(call_in_task, "per_sample_loss", 2, functools.partial(os._exit, 9))
    before = without_speed(straight.lines)
    assert (
        train(
            "single",
            1,
            *EVERYTHING,
            "--keep-every",
            "1",
            "--resume",
            kept,
            folder=tmp_path,
            patch=patch,
        ).code
        == 9
    )
    resumed = train(
        "single", 1, *EVERYTHING, "--keep-every", "1", "--resume", "auto", folder=tmp_path
    )
    assert "resumed at epoch 2, step 0" in resumed.out and without_speed(resumed.lines) == before


def test_auto_does_not_start_over_a_run_of_which_only_the_best_is_left(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "best.pt").touch()
    result = train("single", 1, *BASE, "--resume", "auto", folder=tmp_path)
    assert (
        result.code == 2
        and f"no last.pt in {tmp_path / 'run'}, but best.pt; name that file" in result.err
    )


def let_another_run_end(theirs, ours, rank):
    """Another run in the folder ends just before this one takes the lock."""
    flock = machinery.files.fcntl.flock

    def locked(*arguments):
        shutil.copytree(theirs, ours, dirs_exist_ok=True)
        flock(*arguments)

    machinery.files.fcntl.flock = locked


def test_run_that_ended_while_this_one_was_starting_is_not_overwritten(tmp_path):
    argv = ["--batch-size", "500", "--epochs", "1"]
    train("single", 1, *argv, folder=tmp_path / "theirs")
    patch = functools.partial(let_another_run_end, tmp_path / "theirs" / "run", tmp_path / "run")
    result = train("single", 1, *argv, "--resume", "auto", folder=tmp_path, patch=patch)
    assert result.code == 0 and "resumed after all 1 epochs" in result.out, result.out + result.err


def test_finished_run_says_how_it_would_go_on(tmp_path):
    argv = ["--batch-size", "500", "--epochs", "1"]
    train("single", 1, *argv, folder=tmp_path)
    again = train("single", 1, *argv, "--resume", "auto", folder=tmp_path)
    assert again.code == 0 and "resumed after all 1 epochs; more would go on" in again.out


# ------------------------------------------------------------------------------------------------------------ non-finite values


def statistics(net):
    return {name: buffer.clone() for name, buffer in net.named_buffers()}


@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_skipped_step_leaves_no_trace_in_batchnorm(amp):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    args = make_args("single", "--amp", amp)
    scaler, optimizer = guard_of(args, torch.device("cpu"), net), optimizer_of(args, net)
    seen = []
    for poison in (0.0, 0.0, float("nan"), 0.0):
        before = statistics(net)
        assert before["1.num_batches_tracked"] == sum(seen), (
            "or a mean over all batches would count it"
        )
        scaler.scale(net(torch.randn(8, 3) + poison).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = statistics(net)
        assert all(buffer.isfinite().all() for buffer in after.values())
        seen.append(not after["1.running_mean"].equal(before["1.running_mean"]))
    assert seen == [True, True, False, True]

    resumed = {name: buffer + 1 for name, buffer in statistics(net).items()}
    net.load_state_dict(resumed, strict=False)
    scaler.load_state_dict(scaler.state_dict())
    scaler.scale(net(torch.full((8, 3), float("nan"))).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert statistics(net)["1.running_mean"].equal(resumed["1.running_mean"]), (
        "as restored, not as before that"
    )


def poison_the_input(k, rank_to_poison, rank):
    """NaN in one image of the k-th batch of one rank, before the first layer."""
    if rank != rank_to_poison:
        return
    forward, calls = nn.Conv2d.forward, itertools.count()

    def poisoned(self, images):
        if self.training and next(calls) == k:
            images = images.clone()
            images[0] = float("nan")
        return forward(self, images)

    nn.Conv2d.forward = poisoned


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("ddp", 2)])
def test_run_outlives_a_poisoned_image(mode, n, tmp_path):
    """One NaN in BatchNorm's statistics would stay there, and every later evaluation and checkpoint with it."""
    result = train(
        mode, n, *EVERYTHING, folder=tmp_path, patch=functools.partial(poison_the_input, 7, n - 1)
    )
    assert result.code == 0 and "not saved" not in result.err, result.err
    assert sum(line["skipped"] for line in result.train_lines()) == 1
    saved = result.checkpoint()
    assert saved["epoch"] == 3 and all(
        tensor.isfinite().all() for part in ("model", "average") for tensor in saved[part].values()
    )


def test_ten_skipped_steps_in_a_row_are_remembered():
    net = nn.Linear(1, 1)
    args = make_args()
    scaler, optimizer = guard_of(args, torch.device("cpu"), net), optimizer_of(args, net)
    for bad in [False] * 3 + [True] * 9 + [False] + [True] * 10 + [False] * 2:
        net.weight.grad = torch.full((1, 1), float("nan") if bad else 1.0)
        net.bias.grad = torch.ones(1)
        scaler.scale(torch.zeros(1))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.in_a_row == 10, "until the next look at it"


# ----------------------------------------------------------------------------------------------------------- data, workers, start


class Broken:
    """Ten samples, two of which cannot be read."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index in (3, 9):
            raise OSError(f"/data/{index}.jpg: image file is truncated")
        return torch.tensor(float(index)), torch.rand(2)


def test_broken_sample_is_named_or_replaced_alike_everywhere():
    with pytest.raises(
        RuntimeError,
        match=r"sample 3 cannot be read: /data/3.jpg: .*; --skip-corrupt takes the next one",
    ):
        keyed(Broken(), make_args()).__getitems__((0, [2, 3]))
    dataset = keyed(Broken(), make_args("single", "--skip-corrupt"))
    values, draws = dataset.__getitems__((5, [9, 3, 4]))
    assert values.tolist() == [0, 4, 4] and draws[1].equal(draws[2])
    assert dataset.__getitems__((5, [3]))[1][0].equal(draws[1]), "whatever else is in the batch"


def test_broken_image_file_is_named(tmp_path):
    (tmp_path / "cut.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(OSError, match=r"cut\.jpg: "):
        task.read_images([str(tmp_path / "cut.jpg")])


def count_workers_before_the_group(rank):
    init = dist.init_process_group

    def counted(*arguments, **keywords):
        print("workers:", len(multiprocessing.active_children()))
        init(*arguments, **keywords)

    dist.init_process_group = counted


@pytest.mark.parametrize("mode", ["ddp", "spawn"])
def test_workers_start_before_there_are_threads_whose_locks_a_fork_would_copy(mode, tmp_path):
    result = train(
        mode,
        2,
        *BASE,
        "--epochs",
        "1",
        "--workers",
        "1",
        folder=tmp_path,
        patch=count_workers_before_the_group,
    )
    assert result.code == 0 and result.out.count("workers: 2") == 2, (
        result.out
    )  # one of each loader, on both ranks


class Noted:
    """Samples that note in a file that they were loaded."""

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 40

    def __getitem__(self, index):
        with open(self.path, "a") as file:
            file.write(f"{index}\n")
        return torch.tensor(index), torch.tensor(0)


def test_workers_load_nothing_that_a_resumed_run_skips(tmp_path):
    sampler = make_sampler(40, 4)
    loader = loader_of(
        make_args("single", "--workers", "1"),
        Noted(tmp_path / "loaded"),
        sampler,
        torch.device("cpu"),
    )
    sampler.set_position(0, 7)
    for _ in range(2):
        batches = [index for inputs, _ in loader for index in inputs.tolist()]
        assert len(batches) == 12 and len(set(batches)) == 12
    assert [int(line) for line in (tmp_path / "loaded").read_text().split()] == 2 * batches
    loader._iterator._shutdown_workers()


def test_ranks_meet_in_a_file_of_their_own_after_a_restart(monkeypatch):
    monkeypatch.delenv("LAUNCH_RENDEZVOUS_FILE", raising=False)
    assert machinery.rendezvous.init_method() == "env://"
    monkeypatch.setenv("LAUNCH_RENDEZVOUS_FILE", "/tmp/x/ranks")
    places = set()
    for restarts in range(3):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        places.add(machinery.rendezvous.init_method())
    assert len(places) == 3 and all(place.startswith("file:///tmp/x/ranks") for place in places)


def test_help_is_no_run_that_was_left():
    assert (
        machinery.processes.run_main(
            functools.partial(machinery.options.parse_args, "single", ["--help"])
        )
        == 0
    )


def test_group_on_the_cpu_has_a_default_backend_in_every_version():
    """Torch 2.7 and 2.8, beside any registered backend, find none in "cpu:gloo" and warn when the group is destroyed."""
    assert machinery.rendezvous.backend(torch.device("cpu")) == "gloo"
