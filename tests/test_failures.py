"""Ranks that fail, diverge, lose each other or end early: which code a run ends with, what the last line says."""

import fcntl
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import faults
import pytest
import torch
import torch.distributed as dist
from harness import (
    ROOT,
    TASKS,
    guard_of,
    in_group,
    make_args,
    optimizer_of,
    run_processes,
    train,
    undisturbed,
)
from launches import Launch
from patches import BASE, call_in_task, change_training_loss, printed, without_speed
from short_runs import ODD
from torch import nn

import common
import machinery.cli
import machinery.launch
import machinery.modes
import machinery.process
import machinery.run
import machinery.usertask


def come_late(rank):
    """The last rank learns late what rank 0 has found; print when it does, and when each leaves."""
    told, destroy = machinery.run.broadcast_object, dist.destroy_process_group

    def late(*arguments):
        value = told(*arguments)
        if rank == 2:
            time.sleep(0.5)
            print("told", time.monotonic())
        return value

    machinery.run.broadcast_object = late
    dist.destroy_process_group = lambda: (print("left", time.monotonic()), destroy())


def test_early_end_of_all_ranks_has_its_exit_code(tmp_path):
    """They know of it after they met: the folder belongs to a run that is still there.

    Gloo could end a rank with SIGABRT, while it still talks to one that is gone.
    """
    folder = tmp_path / "run"
    folder.mkdir()
    with open(folder / "metrics.jsonl", "a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        argv = (*ODD, "--model", "conv")
        result = train("ddp", 3, *argv, folder=tmp_path, patch=come_late)
    left = printed(result.out, "left")
    assert len(left) == 3 and min(left) > max(printed(result.out, "told"))
    assert result.code == 2 and "another run is writing there" in result.err, result.err
    assert "terminate called" not in result.err


# ------------------------------------------------------------------------------------------- ending

THREADS = """
import os, pathlib, signal, sys
import common, machinery.process, train_ddp
what, made = sys.argv[1:]
if what == "stopped":
    common.sync_buffers = lambda net: os.kill(os.getpid(), signal.SIGTERM)
options = ["--epochs", "2", "--output-dir", made]
code = machinery.process.run_main(lambda: train_ddp.main(options))
assert code == {"stopped": 143, "done": 0}[what]
print([file.read_text().strip() for file in pathlib.Path("/proc/self/task").glob("*/comm")])
"""


@pytest.mark.full
@pytest.mark.parametrize("what", ["done", "stopped"])
def test_no_thread_of_gloo_outlives_the_process_group(what, tmp_path):
    """Such a thread ends Python's last clean-up with SIGABRT now and then, and a good run with code 134."""
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # any free one
    result = subprocess.run(
        [sys.executable, "-c", THREADS, what, str(tmp_path / "made")],
        cwd=ROOT, env={**os.environ, **names}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "made").exists() and "python" in result.stdout.splitlines()[-1]
    assert "gloo" not in result.stdout.splitlines()[-1]


def follow_this_launcher(pid):
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LAUNCH_PID=str(pid or os.getppid()))
    machinery.cli.parse_args("ddp", [])


def test_rank_whose_launcher_was_killed_before_it_looked_ends(tmp_path):
    targets = [functools.partial(follow_this_launcher, pid) for pid in (0, 1)]
    assert [code for code, _, _ in run_processes(targets, tmp_path)] == [0, 1]


# -------------------------------------------------------------------------------- a rank that fails


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("ddp", 2)])
def test_task_that_leaves_by_sys_exit_is_no_success(mode, n, tmp_path):
    """sys.exit(0) deep in a task would look like a run that is done, to the launcher and to whoever reads its code."""
    leave = functools.partial(sys.exit, 0)
    patch = functools.partial(call_in_task, "per_sample_loss", 3, leave, n - 1)
    result = train(mode, n, *BASE, folder=tmp_path, patch=patch)
    assert result.code == 1 and "the run was left before its end" in result.err.splitlines()[-1]


def lose_a_rank(rank):
    def agreed(stop):
        raise RuntimeError("another rank is gone")

    machinery.process.StopSignal.agreed = agreed


def test_lost_rank_is_met_before_the_device_is_read(tmp_path):
    """To read the device may be to wait for the lost rank, until --timeout."""
    result = train("single", 1, *BASE, "--log-every", "1", folder=tmp_path, patch=lose_a_rank)
    assert "another rank is gone" in result.err and not result.lines


FAILED = machinery.process.FAILED
HUNG = "maybe as it waited for process 0, which hung"
TERM, INT, ABORTED = signal.SIGTERM, signal.SIGINT, -signal.SIGABRT
ELSEWHERE = "a rank failed here, or a rank on another node was lost; start all nodes again with --resume auto"


@pytest.mark.parametrize(
    ("ended", "nnodes", "received", "expected"),
    [
        ([0, 0], 1, [TERM], (0, "")),
        ([143, 143], 1, [], (143, "")),
        ([None, 2], 1, [], (2, "")),
        ([3, FAILED], 1, [], (3, "")),
        ([FAILED, FAILED, None], 1, [], (1, "")),  # who failed has told why
        ([FAILED, -9, None], 1, [], (1, "process 1 was killed by SIGKILL")),
        ([143, -9, 143], 1, [TERM], (143, "")),
        ([-15, -15], 1, [TERM], (143, "stopped by SIGTERM with nothing new to save")),
        ([-2, FAILED], 1, [INT], (130, "stopped by SIGINT with nothing new to save")),
        ([FAILED, -15], 1, [], (1, "process 1 was killed by SIGTERM")),
        ([FAILED, 7], 1, [], (1, "process 1 left before the end, with exit code 7")),
        ([FAILED, 0], 1, [], (1, "process 1 left before the end, with exit code 0")),
        ([0, 7], 1, [], (1, "process 1 left before the end, with exit code 7")),
        ([FAILED, 0], 2, [], (1, ELSEWHERE)),
        ([2, FAILED], 2, [], (2, "")),
        ([ABORTED, FAILED], 1, [], (1, "")),  # NCCL aborts a rank that has lost another one
        ([ABORTED, -9], 1, [], (1, "process 1 was killed by SIGKILL")),
        ([0, ABORTED], 1, [], (1, "process 1 was killed by SIGABRT")),  # no other reason
        ([0, -37], 1, [], (1, "process 1 was killed by signal 37")),  # one without a name
        ([None, ABORTED], 1, [], (1, f"process 1 was killed by SIGABRT, {HUNG}")),
    ],
)
def test_end_of_a_run_is_told_by_the_rank_that_is_to_blame(ended, nnodes, received, expected):
    """The others end for its sake, or have to be ended."""
    assert machinery.launch.diagnose(ended, nnodes, received) == expected


class Rank:
    """A process as subprocess has it, which ends with `code`; None: only if it is killed."""

    def __init__(self, code):
        self.code, self.pid, self.killed = code, 0, False

    def poll(self):
        return self.code

    def kill(self):
        self.killed = True

    def wait(self):
        assert self.killed, "it would never end"


@pytest.mark.parametrize("code", [143, FAILED])
def test_rank_that_hangs_while_the_others_end_is_killed(code, monkeypatch):
    """A signal that the launcher gets is handed on to it before."""
    sent = []
    monkeypatch.setattr(machinery.launch, "handle_signals", lambda handler: handler(TERM, None))
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    monkeypatch.setattr(machinery.launch, "GRACE", 0.2)
    processes = [Rank(code), Rank(None)]
    assert machinery.launch.wait_for(processes) == (1 if code == FAILED else code)
    assert [process.killed for process in processes] == [False, True] and sent == [TERM]


def test_refused_input_ends_the_other_ranks_at_once(monkeypatch):
    """They wait for the rank that has refused, up to --timeout."""
    monkeypatch.setattr(machinery.launch, "handle_signals", lambda handler: None)
    clock = iter(range(1000))
    time_ = SimpleNamespace(monotonic=lambda: next(clock) / 1000, sleep=lambda seconds: None)
    monkeypatch.setattr(machinery.launch, "time", time_)
    processes = [Rank(2), Rank(None)]
    assert machinery.launch.wait_for(processes) == 2
    assert processes[1].killed and next(clock) < 10, "far from the end of GRACE"


GONE = [  # of torch 2.6 and 2.15
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection reset by peer [127.0.0.1]:4711. This is typically caused by",
    "sendBytes failed on SocketImpl(fd=4, addr=[localhost]:4711, remote=[localhost]:4712): Broken pipe",
    "NCCL error: remote process exited or there was a network error",
]


def test_lost_connection_is_one_to_another_rank():
    assert all(machinery.process.LOST_CONNECTION.search(message) for message in GONE)
    assert not machinery.process.LOST_CONNECTION.search("[Errno 104] Connection reset by peer"), (
        "of the task's own, to a file server say"
    )


def lose_the_other_rank(launcher):
    """Be a rank whose connection to another one breaks."""
    os.environ.update({"RANK": "0", **launcher})

    def main():
        raise RuntimeError(
            "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"
        )

    return machinery.process.run_main(main)


def test_rank_that_lost_another_leaves_in_silence_if_the_launcher_is_ours(tmp_path):
    """The cause is what the other one said, or what the launcher says of it. torchrun would say nothing."""
    ours, torchrun = [
        functools.partial(lose_the_other_rank, launcher) for launcher in ({"LAUNCH_PID": "1"}, {})
    ]
    (code, out, err), (code_of_torchrun, _, err_of_torchrun) = run_processes(
        [ours, torchrun], tmp_path
    )
    assert (code, out, err) == (FAILED, "", "")
    assert code_of_torchrun == 1 and "Connection closed by peer" in err_of_torchrun.splitlines()[-1]


FAULTY = (
    f"--task {TASKS / 'faulty.py'} --epochs 3 --batch-size 30 --save-every 4 --log-every 1".split()
)


def started(program):
    """Start a Python as a rank of a launch, which listens to signals."""
    listens = "import signal, time; signal.pthread_sigmask(signal.SIG_SETMASK, ()); "
    return [subprocess.Popen([sys.executable, "-c", listens + program])]


def fail_unseen():
    """Be a launcher that a service started, which ignores SIGCHLD so that it gets no zombies."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    return machinery.process.run_main(lambda: machinery.launch.wait_for(started("exit(3)")))


def test_exit_codes_of_ranks_are_seen_where_sigchld_is_ignored(tmp_path):
    assert run_processes([fail_unseen], tmp_path)[0][0] == 3


@pytest.mark.full
@pytest.mark.parametrize("fault", ["raises", "is killed"])
def test_run_that_goes_on_after_a_failure_is_the_same_to_the_bit(fault, tmp_path):
    """The last line tells the cause. The ranks of the second start meet elsewhere, and on this machine alone."""
    environment = {"FAULT": fault, "FAULT_AT": faults.sample_at(1, 50)}
    environment |= {"FAULT_ONCE": str(tmp_path / "once"), "PYTHONPATH": str(TASKS)}
    command = ["bash", "run.sh", "ddp", "2", *FAULTY]
    with Launch(command, tmp_path, stdout=subprocess.DEVNULL, **environment) as launch:
        assert launch.end() == 1, launch.errors()
        told = launch.errors()
    assert (tmp_path / "once").exists()
    if fault == "raises":
        assert told.endswith("RuntimeError: broken in the loss\n")
    else:
        assert told == "train_ddp.py: process 1 was killed by SIGKILL\n"
    again = [*command, "--resume", "auto"]
    with Launch(again, tmp_path, stdout=subprocess.DEVNULL, **environment) as launch:
        assert launch.end() == 0, launch.errors()
    reference = undisturbed("ddp", 2, *FAULTY)
    assert not faults.differences(launch.checkpoint()["model"], reference.checkpoint()["model"], "")
    assert faults.log_lines(tmp_path / "run" / "metrics.jsonl") == without_speed(reference.lines)


@pytest.mark.full
def test_torchrun_starts_a_failed_run_again_as_the_readme_says(tmp_path):
    readme = (ROOT / "README.md").read_text()
    ((variable, value),) = re.findall(r"`(\w+)=(\d) torchrun --max-restarts N \.\.\. --out", readme)
    environment = {"FAULT": "raises", "FAULT_AT": faults.sample_at(1, 50), variable: value}
    environment |= {"FAULT_ONCE": str(tmp_path / "once"), "PYTHONPATH": str(TASKS)}
    command = "torchrun --standalone --nproc-per-node 2 --max-restarts 1 train_ddp.py".split()
    command += [*FAULTY, "--resume", "auto"]
    with Launch(command, tmp_path, stdout=subprocess.DEVNULL, **environment) as launch:
        assert launch.end() == 0, launch.errors()
    assert (tmp_path / "once").exists() and launch.checkpoint()["epoch"] == 3


# -------------------------------------------------------------------------------- non-finite values


def nan_in_third(losses, k):
    return losses * float("nan") if k == 2 else losses


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("dp", 2), ("ddp", 2)])
def test_nan_is_skipped_in_every_mode(mode, n, tmp_path):
    patch = functools.partial(change_training_loss, nan_in_third)
    result = train(mode, n, *BASE, "--epochs", "2", folder=tmp_path, patch=patch)
    assert result.code == 0, result.err
    assert sum(line["skipped"] for line in result.train_lines()) == 1
    assert result.checkpoint()["global_step"] == 12
    assert all(tensor.isfinite().all() for tensor in result.checkpoint()["model"].values())


def always_nan(losses, k):
    return losses * float("nan")


def nan_from_ninth(losses, k):
    return losses * float("nan") if k >= 8 else losses


def nan_every_second(losses, k):
    return losses * float("nan") if k % 2 else losses


def test_ten_skipped_steps_in_a_row_end_the_run(tmp_path):
    for mode, n in (("single", 1), ("ddp", 2)):
        patch = functools.partial(change_training_loss, always_nan)
        result = train(mode, n, *BASE, folder=tmp_path / mode, patch=patch)
        assert result.code == 3 and "diverged: 10 steps in a row" in result.err
        assert len(result.train_lines()) == 10  # the tenth ended it, after its line
    patch = functools.partial(change_training_loss, nan_from_ninth)
    result = train("single", 1, *BASE, folder=tmp_path / "late", patch=patch)
    assert result.code == 3 and "seen at step 18" in result.err, "the last ten of 18 steps"
    patch = functools.partial(change_training_loss, nan_every_second)
    result = train(
        "single", 1, *BASE, "--epochs", "4", folder=tmp_path / "every second", patch=patch
    )
    assert result.code == 0, result.err  # 12 of them, but not in a row
    assert sum(line["skipped"] for line in result.train_lines()) == 12


def statistics(net):
    return {name: buffer.clone() for name, buffer in net.named_buffers()}


class Assigns(nn.BatchNorm1d):
    """Has other tensors as statistics after each forward, as a norm that somebody wrote may have."""

    def forward(self, value):
        value = super().forward(value)
        for name, buffer in self.named_buffers():
            setattr(self, name, buffer.clone())
        return value


class AssignsData(nn.BatchNorm1d):
    """Gives its statistics other memory, as older norms do."""

    def forward(self, value):
        value = super().forward(value)
        for buffer in self.buffers():
            buffer.data = buffer.data.clone()
        return value


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, Assigns, AssignsData])
@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_skipped_step_leaves_no_trace_in_batchnorm(amp, norm):
    net = nn.Sequential(nn.Linear(3, 4), norm(4), nn.Linear(4, 1))
    args = make_args("single", "--amp", amp)
    held = net[1].running_mean  # by somebody else, as by a loss that reads it
    scaler, optimizer = guard_of(args, torch.device("cpu"), net), optimizer_of(args, net)
    assert held is net[1].running_mean, "the guard itself puts no other tensor there"
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


# --------------------------------------------------------------------------- ranks that drift apart


NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias", "4"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def make_net(dtype):
    """Three layers, one of them frozen, and a parameter without dimensions."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)]
    net = nn.Sequential(*layers).to(dtype)
    net.register_parameter("4", nn.Parameter(torch.ones((), dtype=dtype)))
    net[0].requires_grad_(False)
    return net


def complaint(net):
    try:
        common.sync_buffers(net)
    except RuntimeError as error:
        return str(error)
    return ""


def next_number(value):
    """The neighbour of a number, one bit away."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    return (value.view(bits) + 1).view(value.dtype)


def check_drift():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for number, name in enumerate(NAMES):
        net = make_net(dtype := DTYPES[number % len(DTYPES)])
        assert complaint(net) == "", "all alike"
        values = dict(net.named_parameters())[name].data.view(-1)
        place = -1 - number % len(values)
        if rank == number % world_size:
            values[place] = next_number(values[place])
        said = complaint(net)
        assert said.startswith(f"parameters differ between ranks: {name}; "), (dtype, name, said)


def check_signs():
    """A difference may be of either sign, or a NaN."""
    for value in (
        -1e300,
        1e300,
        float("nan"),
        float("inf"),
        -0.0,
    ):  # the last has the smallest bits
        for drifting in range(dist.get_world_size()):
            net = make_net(torch.float64)
            net[3].bias.data.zero_()
            if dist.get_rank() == drifting:
                net[3].bias.data[1] = value
            assert "3.bias" in complaint(net), (value, drifting)
    net = make_net(torch.float64)
    net[3].bias.data.fill_(float("nan"))
    assert complaint(net) == "", "the same NaN everywhere is no drift"


def check_buffers():
    """Of every kind: each rank gets those of rank 0."""
    rank = dist.get_rank()
    net = make_net(torch.float32)
    net.register_buffer("mask", torch.tensor([rank == 0, rank == 1]), persistent=False)
    net[1].running_mean.fill_(rank + 1.5)
    net[1].running_var.fill_(rank + 2.5)
    net[1].num_batches_tracked.fill_(rank + 7)
    assert complaint(net) == ""
    assert net[1].running_mean.tolist() == [1.5] * 4 and net[1].running_var.tolist() == [2.5] * 4
    assert net[1].num_batches_tracked == 7 and net.mask.tolist() == [True, False]


def check_all():
    check_drift()
    check_signs()
    check_buffers()


def test_drift_of_any_parameter_on_any_rank_is_named():
    in_group(3, check_all)


def drift_in_epoch_2(name, rank):
    """One number of rank 1 changes by about a billionth after the eighth of six steps an epoch."""
    end_step = machinery.run.Run.end_step

    def drifting(run, grad_norm):
        end_step(run, grad_norm)
        if run.state.global_step == 8 and rank == 1:
            dict(run.state.net.named_parameters())[name].data.view(-1)[-1] += 1e-9
        if rank == 1:
            print("step", json.dumps(run.state.global_step))

    machinery.run.Run.end_step = drifting


@pytest.mark.parametrize(
    ("mode", "name", "options"),
    [("ddp", "last.bias", ()), ("spawn", "between.weight", ("--average", "ema"))],
)
def test_drift_ends_the_epoch_in_which_it_happened(mode, name, options, tmp_path):
    argv = (*BASE, "--model", "batchnorm", *options)
    result = train(mode, 2, *argv, folder=tmp_path, patch=functools.partial(drift_in_epoch_2, name))
    assert result.code == 1 and f"parameters differ between ranks: {name}" in result.err, result.err
    assert printed(result.out, "step")[-1] == 12
    assert result.checkpoint()["epoch"] == 1 or result.checkpoint()["step"] == 6
    assert len(result.eval_lines()) == 1, "what differs is not evaluated"
