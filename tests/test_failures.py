"""Ranks that fail, diverge, lose each other or end early: which code a run ends with, what the last line says."""

import fcntl
import functools
import os
import re
import shlex
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
    single_run,
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
import machinery.process
import machinery.run
import machinery.signals


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
        fcntl.lockf(log, fcntl.LOCK_EX)
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
common.sync_buffers = lambda net: os.kill(os.getpid(), signal.SIGTERM)
options = ["--epochs", "2", "--output-dir", sys.argv[1]]
assert machinery.process.run_main(lambda: train_ddp.main(options)) == 143
print([file.read_text().strip() for file in pathlib.Path("/proc/self/task").glob("*/comm")])
"""


@pytest.mark.full
def test_no_thread_of_gloo_outlives_the_process_group(tmp_path):
    """Such a thread ends Python's last clean-up with SIGABRT now and then, and a good run with code 134."""
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # any free one
    result = subprocess.run(
        [sys.executable, "-c", THREADS, str(tmp_path / "made")],
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


@pytest.mark.parametrize(("step", "said"), [(0, False), (3, True)])
def test_run_that_failed_says_how_to_go_on_if_it_has_saved(step, said, tmp_path, monkeypatch):
    """From the folder where it was started, which need not be the project's."""
    monkeypatch.chdir(ROOT / "tests")
    patch = functools.partial(call_in_task, "per_sample_loss", step, fail_with_words, 0)
    result = train("single", 1, *BASE, "--save-every", "1", folder=tmp_path, patch=patch)
    assert result.code == 1 and result.err.endswith("RuntimeError: broken on purpose\n")
    command = f"to go on: bash ../run.sh single 1 --output-dir {tmp_path}/run --resume auto\n"
    assert result.out.endswith(command) == said, result.out


def fail_with_words():
    raise RuntimeError("broken on purpose")


FAILED = machinery.process.FAILED
TERM, ABORTED = signal.SIGTERM, -signal.SIGABRT
KILLED = "process 1 was killed by SIGKILL, often because memory was short: see dmesg"


@pytest.mark.parametrize(
    ("ended", "received", "expected"),
    [
        ([0, 0], [TERM], (0, "")),
        ([143, 143], [], (143, "")),
        ([None, 2], [], (2, "")),
        ([3, FAILED], [], (3, "")),
        ([FAILED, FAILED, None], [], (1, "")),  # who failed has told why
        ([FAILED, -9, None], [], (1, KILLED)),
        ([143, -9, 143], [TERM], (143, "")),
        ([-15, -15], [TERM], (143, "stopped by SIGTERM with nothing new to save")),
        ([FAILED, -15], [], (1, "process 1 was killed by SIGTERM")),
        ([0, 7], [], (1, "process 1 left before the end, with exit code 7")),
        ([ABORTED, FAILED], [], (1, "")),  # NCCL aborts a rank that has lost another one
        ([0, -37], [], (1, "process 1 was killed by signal 37")),  # one without a name
    ],
)
def test_end_of_a_run_is_told_by_the_rank_that_is_to_blame(ended, received, expected):
    """The others end for its sake, or have to be ended."""
    assert machinery.launch.diagnose(ended, received) == expected


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
    assert [process.killed for process in processes] == [False, True]
    assert sent == [TERM, signal.SIGUSR2], "by which it prints where it hangs"


def test_refused_input_ends_the_other_ranks_at_once(monkeypatch):
    """They wait for the rank that has refused, up to --timeout."""
    monkeypatch.setattr(machinery.launch, "handle_signals", lambda handler: None)
    clock = iter(range(1000))
    time_ = SimpleNamespace(monotonic=lambda: next(clock) / 1000, sleep=lambda seconds: None)
    monkeypatch.setattr(machinery.launch, "time", time_)
    processes = [Rank(2), Rank(None)]
    assert machinery.launch.wait_for(processes) == 2
    assert processes[1].killed and next(clock) < 10, "far from the end of GRACE"


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
def test_run_that_goes_on_after_a_failure_is_the_same_to_the_bit(tmp_path):
    """The last line tells the cause. The ranks of the second start meet elsewhere, and on this machine alone."""
    environment = {"FAULT": "is killed", "FAULT_AT": faults.sample_at(1, 50)}
    environment |= {"FAULT_ONCE": str(tmp_path / "once"), "PYTHONPATH": str(TASKS)}
    command = ["bash", "run.sh", "ddp", "2", *FAULTY]
    with Launch(command, tmp_path, **environment) as launch:
        launch.wait_for("^to go on: ")
        *_, line = launch.lines
        assert launch.end() == 1, launch.errors()
        assert launch.errors().endswith(f"\ntrain_ddp.py: {KILLED}\n")
    assert (tmp_path / "once").exists()
    again = shlex.split(line.removeprefix("to go on: "))
    assert again[:4] == command[:4] and again[-2:] == ["--resume", "auto"]
    with Launch(again, tmp_path, stdout=subprocess.DEVNULL, **environment) as launch:
        assert launch.end() == 0, launch.errors()
    reference = undisturbed("ddp", 2, *FAULTY)
    assert not faults.differences(launch.checkpoint()["model"], reference.checkpoint()["model"], "")
    assert faults.log_lines(tmp_path / "run") == without_speed(reference.lines)


@pytest.mark.slow
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


def make_nan(steps, losses, k):
    return losses * float("nan") if k in steps and os.environ.get("RANK", "1") == "1" else losses


def nan_in(*steps):
    """A patch: the losses of these steps are NaN, counted from 0; if there are ranks, on rank 1 alone."""
    return functools.partial(change_training_loss, functools.partial(make_nan, steps))


@pytest.mark.parametrize(
    ("mode", "n"),
    [("single", 1), ("dp", 2), ("ddp", 2), pytest.param("fsdp", 3, marks=pytest.mark.full)],
)
def test_nan_is_skipped_in_every_mode(mode, n, tmp_path):
    forward = 2 * n if mode == "dp" else 2  # each replica makes one in a step
    result = train(mode, n, *BASE, "--epochs", "2", folder=tmp_path, patch=nan_in(forward))
    assert result.code == 0, result.err
    lines, clean = result.train_lines(), single_run(*BASE, "--epochs", "2").train_lines()
    assert [line["skipped"] for line in lines] == [0, 0, 1] + 9 * [0]
    assert lines[2]["grad_norm"] is None, "of rank 0: it got the NaN of rank 1"
    assert [line["lr"] for line in lines] == [line["lr"] for line in clean], "the schedule goes on"
    assert result.checkpoint()["global_step"] == 12
    assert all(tensor.isfinite().all() for tensor in result.checkpoint()["model"].values())


@pytest.mark.parametrize(("mode", "n", "first"), [("single", 1, 8), ("ddp", 2, 0)])
def test_ten_skipped_steps_in_a_row_end_the_run(mode, n, first, tmp_path):
    """Of one device the last ten of 18 steps, after which nothing would look at them."""
    result = train(mode, n, *BASE, folder=tmp_path, patch=nan_in(*range(first, 18)))
    assert result.code == 3 and "diverged: 10 steps in a row" in result.err
    assert f"seen at step {first + 10}" in result.err
    assert len(result.train_lines()) == first + 10, "the tenth ended it, after its line"


def statistics(net):
    return {name: buffer.clone() for name, buffer in net.named_buffers()}


class Assigns(nn.BatchNorm1d):
    """Has other tensors as statistics after each forward, as a norm that somebody wrote may have."""

    def forward(self, value):
        value = super().forward(value)
        for name, buffer in self.named_buffers():
            setattr(self, name, buffer.clone())
        return value


@pytest.mark.parametrize(
    ("amp", "norm"), [("off", nn.BatchNorm1d), ("off", Assigns), ("fp16", nn.BatchNorm1d)]
)
def test_skipped_step_leaves_no_trace_in_batchnorm(amp, norm):
    net = nn.Sequential(nn.Linear(3, 4), norm(4), nn.Linear(4, 1))
    args = make_args("single", "--amp", amp)
    held = net[1].running_mean  # by somebody else, as by a loss that reads it
    scaler, optimizer = guard_of(args, torch.device("cpu"), net), optimizer_of(args, net)
    assert held is net[1].running_mean, "the guard itself puts no other tensor there"
    seen = []

    def make_step(inputs):
        scaler.scale(net(inputs).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return statistics(net)

    for poison in (0.0, 0.0, float("nan"), 0.0):
        before = statistics(net)
        assert before["1.num_batches_tracked"] == sum(seen), (
            "or a mean over all batches would count it"
        )
        after = make_step(torch.randn(8, 3) + poison)
        assert all(buffer.isfinite().all() for buffer in after.values())
        seen.append(not after["1.running_mean"].equal(before["1.running_mean"]))
    assert seen == [True, True, False, True]

    resumed = {name: buffer + 1 for name, buffer in statistics(net).items()}
    net.load_state_dict(resumed, strict=False)
    scaler.load_state_dict(scaler.state_dict())
    after = make_step(torch.full((8, 3), float("nan")))
    assert after["1.running_mean"].equal(resumed["1.running_mean"]), (
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
    for value in (-1e300, 1e300, float("nan"), -0.0):  # the last has the smallest bits
        net = make_net(torch.float64)
        net[3].bias.data.zero_()
        if dist.get_rank() == 1:
            net[3].bias.data[1] = value
        assert "3.bias" in complaint(net), value
    net = make_net(torch.float64)
    net[3].bias.data.fill_(float("nan"))
    assert complaint(net) == "", "the same NaN everywhere is no drift"


def check_all():
    check_drift()
    check_signs()


def test_drift_of_any_parameter_on_any_rank_is_named():
    in_group(3, check_all)


def drift_in_epoch_2(rank):
    """One number of rank 1 changes by about a billionth after the eighth of six steps an epoch."""
    end_step = machinery.run.Run.end_step

    def drifting(run, grad_norm):
        end_step(run, grad_norm)
        if run.state.global_step == 8 and rank == 1:
            run.state.net.last.bias.data[-1] += 1e-9

    machinery.run.Run.end_step = drifting


def test_drift_ends_the_epoch_in_which_it_happened(tmp_path):
    result = train("ddp", 2, *BASE, folder=tmp_path, patch=drift_in_epoch_2)
    assert result.code == 1 and "parameters differ between ranks: last.bias" in result.err
    assert len(result.train_lines()) == 12 and len(result.eval_lines()) == 1, "nor evaluated"
    saved = result.checkpoint()
    assert (saved["epoch"], saved["step"]) == (1, 0), "nor saved"
