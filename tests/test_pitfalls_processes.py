"""The pitfalls of going from one device to many: starting ranks, waiting, ending. Each test shows the wrong way failing, then this project's way."""

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import (
    ROOT,
    TASKS,
    context,
    deviation,
    in_group,
    loader_of,
    make_args,
    make_sampler,
    run_processes,
    single_run,
    train,
    undisturbed,
)
from launches import free_port
from patches import BASE, in_process, launch, printed, spawn_launcher
from runs import CPU
from torch.utils.data import DataLoader, Dataset

import common
import machinery.cli
import machinery.launch
import machinery.modes
import machinery.process
import machinery.run
import machinery.usertask
import train_ddp

# ----------------------------------------------------------------------------------------------- 06


def fail(how):
    if how == "raises":
        raise RuntimeError("rank 1 broke")
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hangs":
        time.sleep(1000)
    os._exit(int(how[-1]))


def bare_launcher():
    process = multiprocessing.get_context("fork").Process(target=fail, args=("raises",))
    process.start()
    process.join()
    return 0  # what the loop of processes and joins in many scripts ends with


LAST_WORDS = {
    "raises": "RuntimeError: rank 1 broke$",
    "exits 0": "process 1 left before the end, with exit code 0$",
    "exits 1": "process 1 left before the end, with exit code 1$",
    "is killed": "process 1 was killed by SIGKILL$",
    "hangs": "RuntimeError: .*Timed out waiting 3000ms",
}


def die(how, losses):
    fail(how)


@pytest.mark.parametrize(
    "how", [*list(LAST_WORDS)[:-1], pytest.param("hangs", marks=pytest.mark.full)]
)
def test_pitfall_06_dead_rank_ends_the_job(how, tmp_path):
    """A rank dies: the others wait in a collective for ever, or the launcher, which ignores exit codes, reports success."""
    ((code, _, err),) = run_processes([bare_launcher], tmp_path)
    assert code == 0 and "rank 1 broke" in err

    argv = [*BASE, "--nproc", "2", "--epochs", "1000", "--output-dir", str(tmp_path / "run")]
    argv += ["--timeout", "3" if how == "hangs" else "300"]
    start = time.monotonic()
    target = functools.partial(spawn_launcher, argv, functools.partial(die, how))
    ((code, _, err),) = run_processes([target], tmp_path, timeout=250)
    assert code == 1, err
    # Less than --timeout: the others are told, they do not time out.
    assert time.monotonic() - start < 200
    assert re.search(LAST_WORDS[how], err.splitlines()[-1]), err  # not what it led to in the others
    assert ("Traceback" in err) == (how in ("raises", "hangs")), err


FAILING_TASK = """
import itertools
import small
from small import *

calls = itertools.count()

def per_sample_loss(outputs, targets):
    if outputs.requires_grad and next(calls) == 3:  # not in the check
        raise RuntimeError("broken labels")
    return small.per_sample_loss(outputs, targets)
"""


@pytest.mark.full
@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("ddp", 2), ("spawn", 2)])
def test_pitfall_06_error_with_loader_workers_ends_the_process(mode, n, tmp_path):
    """A script prints its traceback and then hangs: at exit Python waits for loader workers, which ignore its SIGTERM."""
    (tmp_path / "failing.py").write_text(FAILING_TASK)
    command = ["bash", str(ROOT / "run.sh"), mode, str(n), *BASE, "--workers", "2"]
    command += ["--task", str(tmp_path / "failing.py"), "--output-dir", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(TASKS)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last == "RuntimeError: broken labels", "nor is anything left, of which Python would tell"


# ----------------------------------------------------------------------------------------------- 15


def test_pitfall_15_two_jobs_on_one_machine(tmp_path):
    """The second job on a machine fails with "address already in use": both meet on the same fixed port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RuntimeError, match="EADDRINUSE"):
        dist.TCPStore("127.0.0.1", store.port, is_master=True, wait_for_workers=False)

    jobs = [
        [*BASE, "--nproc", "2", "--seed", str(seed), "--output-dir", str(tmp_path / f"run{seed}")]
        for seed in (0, 1)
    ]
    for code, _, err in run_processes(
        [functools.partial(spawn_launcher, argv) for argv in jobs], tmp_path
    ):
        assert code == 0, err
    models = [torch.load(tmp_path / f"run{seed}" / "last.pt")["model"] for seed in (0, 1)]
    assert deviation(models[0], single_run(*BASE).checkpoint()["model"]) <= 1e-10
    assert deviation(models[1], models[0]) > 1e-2  # two jobs, not twice the same


# ----------------------------------------------------------------------------------------------- 16


def test_pitfall_16_local_rank_option_of_old_launchers():
    """ "unrecognized arguments: --local-rank": the old launcher passes the option, in a spelling that changed; new ones set LOCAL_RANK."""
    old = argparse.ArgumentParser()
    old.add_argument("--local_rank", type=int)
    with pytest.raises(SystemExit):
        old.parse_args(["--local-rank=1"])

    for mode in ("single", "dp", "ddp", "spawn"):  # from a real old launcher: pitfall 40
        for spelling in ("--local-rank", "--local_rank"):
            assert machinery.cli.parse_args(mode, [f"{spelling}=1"]).local_rank == 1


# ----------------------------------------------------------------------------------------------- 17


def second_rank_starts():
    """Let train_ddp.py believe in accelerators, up to where it joins the group."""
    os.environ.update(
        RANK="3", LOCAL_RANK="1", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2", LAUNCH_PID=str(os.getppid())
    )

    class Joined(Exception):
        pass

    def init_process_group(backend, *_):
        print("init_process_group", backend)
        raise Joined

    common.resolve_device_type = lambda name: "cuda"
    torch.accelerator.device_count = lambda: 2
    torch.accelerator.set_device_index = lambda index: print("set_device_index", index)
    dist.init_process_group = init_process_group
    net = argparse.Namespace(to=lambda device: print("to", device))
    machinery.usertask.Task.build_net, train_ddp.check_run = lambda *_: net, lambda *_: None
    try:
        train_ddp.main([])
    except Joined:
        return


def loaded_device(path):
    """The device on which the project's own load puts a tensor."""
    devices, load = [], torch.load

    def watched(*arguments, **keywords):
        value = load(*arguments, **keywords)
        devices.append(value["weight"].device.type)
        return value

    torch.load = watched
    with contextlib.suppress(common.UsageError):  # it holds no run
        common.load_checkpoint(path)
    print(*devices)


def test_pitfall_17_device_is_chosen_before_anything_else(tmp_path, monkeypatch):
    """Every rank takes memory on device 0: it was still the current device when the group, the model or a checkpoint first used one."""
    monkeypatch.setattr(
        torch.serialization, "location_tag", lambda storage: "cuda:0"
    )  # as a file saved on an accelerator
    torch.save({"format": common.FORMAT, "weight": torch.ones(3)}, tmp_path / "from_device_0.pt")
    monkeypatch.undo()
    if torch.cuda.is_available():
        assert torch.load(tmp_path / "from_device_0.pt")["weight"].device.index == 0
    else:
        with pytest.raises(RuntimeError, match="deserialize object on a CUDA device"):
            torch.load(tmp_path / "from_device_0.pt")  # goes to where it came from

    order = "set_device_index 1 to cuda:1 init_process_group cpu:gloo,cuda:nccl"
    assert in_process(second_rank_starts).split() == order.split()
    assert (
        torch.load(tmp_path / "from_device_0.pt", map_location="cpu")["weight"].device.type == "cpu"
    )
    assert (
        in_process(functools.partial(loaded_device, tmp_path / "from_device_0.pt")).strip() == "cpu"
    )


# ----------------------------------------------------------------------------------------------- 36


def print_waits(rank):
    """Print `waits [collectives that are waited for at once, reads of a tensor by the host]` for each step."""
    waits = [0, 0]

    def count(owner, name, which):
        function = getattr(owner, name)

        def watched(*arguments, **keywords):
            waits[which] += not keywords.get("async_op")
            return function(*arguments, **keywords)

        setattr(owner, name, watched)

    for name in ("all_reduce", "broadcast", "barrier", "all_gather", "broadcast_object_list"):
        count(dist, name, 0)
    for name in ("item", "tolist", "__float__", "__bool__"):
        count(torch.Tensor, name, 1)

    batches = machinery.run.Run.batches

    def watched_batches(self, loader):
        for batch in batches(self, loader):  # what is between two batches is one step
            print("waits", json.dumps(waits))
            waits[:] = 0, 0
            yield batch

    machinery.run.Run.batches = watched_batches


def log_every_step_by_item(rank):
    """What many loops do: reduce the loss over the ranks and read it, in every step."""
    print_waits(rank)
    add = common.Meter.add

    def eager_add(self, **values):
        add(self, **values)
        common.reduce_value(values["loss"].mean()).item()

    common.Meter.add = eager_add


def test_pitfall_36_steps_do_not_wait(tmp_path):
    """Steps are slow: every one of them reads the loss on the host and reduces it over the ranks, so that all wait for all."""
    argv = (*BASE, "--epochs", "1", "--log-every", "1000")
    wrong = train("ddp", 1, *argv, folder=tmp_path / "wrong", patch=log_every_step_by_item)
    right = train("ddp", 1, *argv, folder=tmp_path / "right", patch=print_waits)
    assert wrong.code == right.code == 0, right.err
    wrong, right = (
        printed(run.out, "waits")[1:] for run in (wrong, right)
    )  # the first is the start of the run
    assert len(wrong) == len(right) == 5
    assert all(step[0] == 1 for step in wrong)
    assert all(step[0] == 0 for step in right)
    assert all(step[1] == 0 for step in right)
    assert all(step[1] == 1 for step in wrong)


# ----------------------------------------------------------------------------------------------- 37


def test_pitfall_37_one_rank_prints_and_writes(tmp_path):
    """Every line appears N times: each rank prints and writes its own."""
    assert len("".join(in_group(2, functools.partial(print, "epoch 1"))).splitlines()) == 2

    one, two = single_run(*BASE), undisturbed("ddp", 2, *BASE)
    starts = [
        [line[:20] for line in run.out.splitlines() if line.startswith("epoch")]
        for run in (one, two)
    ]
    assert starts[0] == starts[1] and len(starts[0]) == 18 + 3
    assert two.out.count("output directory") == two.out.count("training samples") == 1
    assert two.err == one.err == ""
    assert len(two.lines) == len(one.lines) == 21
    assert sorted(path.name for path in two.folder.iterdir()) == sorted(
        path.name for path in one.folder.iterdir()
    )


# ----------------------------------------------------------------------------------------------- 38


class WorkerPids(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor(os.getpid())


def print_threads_beside_accelerators(cores, processes):
    common.resolve_device_type = lambda name: "cuda"
    torch.accelerator.device_count = lambda: 4
    torch.accelerator.set_device_index = lambda index: None
    print_threads(cores, processes)


def print_threads(cores, processes, **environment):
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    os.sched_getaffinity = lambda process: set(range(cores))
    if processes:
        os.environ["LOCAL_WORLD_SIZE"] = str(processes)
    common.set_up_device("cpu")
    print(torch.get_num_threads())


def print_threads_of_spawned():
    os.environ.pop("OMP_NUM_THREADS", None)
    os.sched_getaffinity = lambda process: set(range(8))

    def worker(local_rank, args):
        common.set_up_device("cpu")
        print(torch.get_num_threads())
        return 0

    with contextlib.suppress(SystemExit):
        machinery.launch.run_worker(
            0, worker, make_args("spawn", "--nproc", "4", "--device", "cpu")
        )


def test_pitfall_38_workers_stay_and_cores_are_divided():
    """A pause at each epoch, and more threads than cores: loader workers are started anew, and every process takes all cores."""
    loader = DataLoader(WorkerPids(), batch_size=8, num_workers=2)
    first, second = ({pid for batch in loader for pid in batch.tolist()} for _ in range(2))
    assert len(first) == 2 and not first & second

    sampler = make_sampler(24, 8)
    loader = loader_of(make_args("single", "--workers", "2"), WorkerPids(), sampler, CPU)
    pids = []
    for epoch in range(3):
        sampler.set_position(epoch, 0)
        pids.append({pid for (batch,) in loader for pid in batch.tolist()})
    assert len(pids[0]) == 2 and pids[0] == pids[1] == pids[2] and os.getpid() not in pids[0]

    assert int(in_process(functools.partial(print_threads, 8, 0))) == 8
    assert int(in_process(functools.partial(print_threads, 8, 4))) == 2
    assert int(in_process(functools.partial(print_threads, 2, 4))) == 1
    assert int(in_process(functools.partial(print_threads, 64, 4, SLURM_CPUS_ON_NODE="8"))) == 2, (
        "the rest is of other jobs"
    )
    assert int(in_process(functools.partial(print_threads, 2, 4, SLURM_CPUS_ON_NODE="8"))) == 2, (
        "SLURM has divided them"
    )
    assert int(in_process(functools.partial(print_threads_beside_accelerators, 8, 4))) == 2
    assert int(in_process(print_threads_of_spawned)) == 2


# ----------------------------------------------------------------------------------------------- 39


def descendants(pid):
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:  # grows while it is read
        found += [child for child in parents if parents[child] == parent]
    return found[1:]


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def signal_in_training(launcher, number, folder):
    """Signal a launcher whose two ranks train, with two loader workers each; fail if any of them is still there some seconds later."""
    pids = [launcher]
    try:
        wait_until(lambda: (folder / "last.pt").exists() or not running(launcher), 150)
        pids += descendants(launcher)
        assert len([pid for pid in pids if running(pid)]) >= 7
        os.kill(launcher, number)
        # A few seconds, or many on a busy machine.
        wait_until(lambda: not any(running(pid) for pid in pids), 90)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


ENDLESS = ("--workers", "2", "--epochs", "100000", "--log-every", "1000")


def exit_with(function, log):
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    sys.exit(function())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_pitfall_39_nothing_outlives_the_launcher(number, tmp_path):
    """Processes stay on the machine after Ctrl-C, or when the launcher was killed: ranks and loader workers outlived it."""
    argv = [*BASE, *ENDLESS, "--nproc", "2", "--output-dir", str(tmp_path / "run")]
    log = tmp_path / "log"
    launcher = context.Process(
        target=functools.partial(exit_with, functools.partial(spawn_launcher, argv), log)
    )
    launcher.start()
    signal_in_training(launcher.pid, number, tmp_path / "run")
    launcher.join()
    assert launcher.exitcode == (130 if number == signal.SIGINT else -number)
    assert torch.load(tmp_path / "run" / "last.pt")["global_step"] > 0
    assert "after saving step" in log.read_text(), (
        "the signal of a dead launcher stops the ranks too"
    )


@pytest.mark.full
def test_pitfall_39_nothing_outlives_torchrun(tmp_path):
    """The ranks of a torchrun that was killed train on, unseen: nothing tells them that their launcher is gone."""
    command = [
        sys.executable,
        *"-m torch.distributed.run --standalone --nproc-per-node=2".split(),
        str(ROOT / "train_ddp.py"),
    ]
    command += [*BASE, *ENDLESS, "--output-dir", str(tmp_path / "run")]
    with (
        open(tmp_path / "log", "w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as launcher,
    ):
        signal_in_training(launcher.pid, signal.SIGKILL, tmp_path / "run")
    assert torch.load(tmp_path / "run" / "last.pt")["global_step"] > 0
    assert "stopped by SIGTERM after saving step" in (tmp_path / "log").read_text()


# ----------------------------------------------------------------------------------------------- 40


@pytest.mark.full
def test_pitfall_40_two_launchers_are_one_job(tmp_path):
    """A job on several machines hangs at its start, or trains twice: every launcher looks for the others on its own localhost."""
    port = free_port()

    def node(rank):
        launcher = ("run", "launch")[rank]  # torchrun, and the old one
        place = f"--nnodes=2 --node-rank={rank} --master-addr=127.0.0.1 --master-port={port}"
        command = f"-m torch.distributed.{launcher} {place} --nproc-per-node=1".split()
        argv = [str(ROOT / "train_ddp.py"), *BASE, "--output-dir", str(tmp_path / "torchrun")]
        return launch(sys.executable, *command, *argv)

    with ThreadPoolExecutor() as pool:
        (code0, out0, err0), (code1, out1, err1) = pool.map(node, (0, 1))
    assert code0 == code1 == 0, err0 + err1
    assert "eval" in out0 and "eval" not in out1
    reference = single_run(*BASE).checkpoint()["model"]
    assert deviation(torch.load(tmp_path / "torchrun" / "last.pt")["model"], reference) <= 1e-10

    argv = [*BASE, *f"--nproc 1 --nnodes 2 --dist-url tcp://127.0.0.1:{port}".split()]
    argv += ["--output-dir", str(tmp_path / "spawn")]
    nodes = [
        functools.partial(spawn_launcher, [*argv, "--node-rank", str(rank)]) for rank in (0, 1)
    ]
    for rank, (code, out, err) in enumerate(run_processes(nodes, tmp_path)):
        assert code == 0, err
        assert f"node {rank} of 2 meets the others at tcp://127.0.0.1:{port}" in out, (
            "who waits says so"
        )
    assert deviation(torch.load(tmp_path / "spawn" / "last.pt")["model"], reference) <= 1e-10


def print_ranks_of_slurm(number="0"):
    job = {
        "PROCID": "5",
        "LOCALID": "1",
        "NODEID": "1",
        "NTASKS": "8",
        "JOB_ID": "24711",
        "JOB_NODELIST": "a[1-4]",
    }  # of a batch script too
    step = {
        "STEP_NUM_TASKS": "7",
        "STEP_NODELIST": "gpu[07-09,12],login",
        "STEP_TASKS_PER_NODE": "4,3",
        "STEP_ID": number,
    }
    os.environ.update({f"SLURM_{name}": value for name, value in job.items()})
    machinery.cli.parse_args("ddp", [])
    with pytest.raises(common.UsageError, match="no launcher"):
        common.ranks_from_env()
    os.environ.update({f"SLURM_{name}": value for name, value in step.items()})
    with pytest.raises(common.UsageError, match=r"cannot be cut into 7 devices"):
        machinery.cli.parse_args("ddp", ["--batch-size", "6"])
    print(
        *common.ranks_from_env(),
        *(os.environ[name] for name in ("LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
    )


def test_pitfall_40_ranks_from_slurm():
    """Under `srun` every task believes to be rank 0 of 1: SLURM names ranks by other variables than torchrun."""
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & os.environ.keys()
    assert in_process(print_ranks_of_slurm).split() == ["5", "1", "7", "3", "gpu07", "24711"]
    second = in_process(functools.partial(print_ranks_of_slurm, "2")).split()
    assert second[-1] == "26705", "beside another step of the same job"


# ----------------------------------------------------------------------------------------------- 41


BROKEN_LABELS = """
from small import *
import torch.distributed as dist

def per_sample_loss(outputs, targets):
    if dist.is_initialized() and dist.get_rank() == 1:  # a check before the run has no ranks
        raise RuntimeError("the labels of rank 1 are broken")
    return outputs.sum(1)
"""


@pytest.mark.full
def test_pitfall_41_torchrun_shows_the_cause(tmp_path):
    """torchrun ends with an exit code and no reason: without @record it does not learn the error of the rank that failed first."""
    plain = tmp_path / "plain.py"
    plain.write_text("raise RuntimeError('the labels are broken')")
    task = tmp_path / "failing.py"
    task.write_text(BROKEN_LABELS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    recorded = [*torchrun, "--nproc-per-node=2", str(ROOT / "train_ddp.py"), *BASE]
    recorded += ["--task", str(task), "--output-dir", str(tmp_path / "run")]

    def run(command):
        code, _, err = launch(*command, PYTHONPATH=str(ROOT / "tests" / "tasks"))
        return code, err, err.partition("Root Cause")[2]

    with ThreadPoolExecutor() as pool:
        (code, err, cause), (recorded_code, recorded_err, recorded_cause) = pool.map(
            run, ([*torchrun, str(plain)], recorded)
        )
    assert code == 1 and "To enable traceback" in cause and "labels" not in cause, err
    assert recorded_code == 1, recorded_err
    assert (
        "rank      : 1" in recorded_cause and "the labels of rank 1 are broken" in recorded_cause
    ), recorded_err
