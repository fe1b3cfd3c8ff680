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

import pytest
import torch
import torch.distributed as dist
from harness import (
    ROOT,
    TASKS,
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
from launches import Launch, free_port
from patches import BASE, in_process, printed, spawn_launcher
from runs import CPU
from torch.utils.data import DataLoader, Dataset

import common
import machinery.cli
import machinery.launch
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
    os._exit(0)


def bare_launcher():
    process = multiprocessing.get_context("fork").Process(target=fail, args=("raises",))
    process.start()
    process.join()
    return 0  # what the loop of processes and joins in many scripts ends with


LAST_WORDS = {
    "raises": "RuntimeError: rank 1 broke$",
    "exits 0": "RuntimeError: .*(Connection closed|Connection reset|Broken pipe)",
    "is killed": "process 1 was killed by SIGKILL, often because memory was short",
    "hangs": "process 1 did not end when another one had failed: see its stack above",
}


def die(how, losses):
    fail(how)


@pytest.mark.parametrize(
    "how", ["raises", "exits 0", "is killed", pytest.param("hangs", marks=pytest.mark.full)]
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
    last = [line for line in err.splitlines() if line.strip()][-1]
    assert re.search(LAST_WORDS[how], last), err
    assert err.count("Traceback") == 1, err  # of the first rank that could tell of it


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
def test_pitfall_06_error_with_loader_workers_ends_the_process(tmp_path):
    """A script prints its traceback and then hangs: at exit Python waits for loader workers, which ignore its SIGTERM."""
    (tmp_path / "failing.py").write_text(FAILING_TASK)
    command = ["bash", "run.sh", "ddp", "2", *BASE, "--workers", "2"]
    command += ["--task", str(tmp_path / "failing.py")]
    path = {"PYTHONPATH": str(TASKS)}
    with Launch(command, tmp_path, stdout=subprocess.DEVNULL, **path) as launch:
        assert launch.end(timeout=90) == 1
        last = launch.errors().splitlines()[-1]
        assert last == "RuntimeError: broken labels", "nor is anything left, of which Python tells"


# ----------------------------------------------------------------------------------------------- 15


def test_pitfall_15_two_jobs_on_one_machine(tmp_path):
    """The second job on a machine fails with "address already in use": both meet on the same fixed port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RuntimeError, match="EADDRINUSE"):
        dist.TCPStore("127.0.0.1", store.port, is_master=True, wait_for_workers=False)

    folders, targets = [tmp_path / "0", tmp_path / "1"], []
    for seed, folder in enumerate(folders):
        argv = [*BASE, "--nproc", "2", "--seed", str(seed), "--output-dir", str(folder)]
        targets.append(functools.partial(spawn_launcher, argv))
    for code, _, err in run_processes(targets, tmp_path):
        assert code == 0, err
    models = [torch.load(folder / "last.pt")["model"] for folder in folders]
    assert deviation(models[0], single_run(*BASE).checkpoint()["model"]) <= 1e-10
    assert deviation(models[1], models[0]) > 1e-2, "two jobs, not twice the same"


# ----------------------------------------------------------------------------------------------- 17


def second_rank_starts():
    """Let train_ddp.py believe in accelerators, up to where its network goes to one."""
    ranks = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update(ranks, LAUNCH_PID=str(os.getppid()))

    class Moved(Exception):
        pass

    def to(device):
        print("to", device)
        raise Moved

    common.resolve_device_type = lambda name: "cuda"
    torch.accelerator.device_count = lambda: 2
    torch.accelerator.set_device_index = lambda index: print("set_device_index", index)
    dist.init_process_group = lambda backend, *_: print("init_process_group", backend)
    machinery.usertask.Task.build_net = lambda task: argparse.Namespace(to=to)
    with contextlib.suppress(Moved):
        train_ddp.main([])


def test_pitfall_17_device_is_chosen_before_anything_else(tmp_path, monkeypatch):
    """Every rank takes memory on device 0: it was still the current device when the group, the model or a checkpoint first used one."""
    path = tmp_path / "from_device_0.pt"
    position = {"epoch": 0, "step": 0, "global_step": 0}
    with monkeypatch.context() as saving:
        saving.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save({"format": common.FORMAT, "weight": torch.ones(3), **position}, path)
    if torch.cuda.is_available():
        assert torch.load(path)["weight"].device.index == 0, "it goes to where it came from"
    else:
        with pytest.raises(RuntimeError, match="deserialize object on a CUDA device"):
            torch.load(path)

    order = "set_device_index 1 init_process_group cpu:gloo,cuda:nccl to cuda:1"
    assert in_process(second_rank_starts).split() == order.split()
    assert common.load_checkpoint(path)["weight"].device.type == "cpu"


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


@pytest.mark.parametrize(
    ("patch", "each_step"), [(log_every_step_by_item, [1, 1]), (print_waits, [0, 0])]
)
def test_pitfall_36_steps_do_not_wait(patch, each_step, tmp_path):
    """Steps are slow: every one of them reads the loss on the host and reduces it over the ranks, so that all wait for all."""
    argv = (*BASE, "--epochs", "1", "--log-every", "1000")
    result = train("ddp", 1, *argv, folder=tmp_path, patch=patch)
    assert result.code == 0, result.err
    _, *steps = printed(result.out, "waits")  # the first is the start of the run
    assert steps == [each_step] * 5


# ----------------------------------------------------------------------------------------------- 37


def test_pitfall_37_one_rank_prints_and_writes():
    """Every line appears N times: each rank prints and writes its own."""
    assert "".join(in_group(2, functools.partial(print, "epoch 1"))) == "epoch 1\n" * 2

    one, two = single_run(*BASE), undisturbed("ddp", 2, *BASE)
    assert len(two.out.splitlines()) == len(one.out.splitlines()) > 18 + 3
    assert len(two.lines) == len(one.lines) == 18 + 3
    assert two.err == one.err == ""
    assert {path.name for path in two.folder.iterdir()} == {*os.listdir(one.folder)}


# ----------------------------------------------------------------------------------------------- 38


class WorkerPids(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor(os.getpid())


def pids_of_epoch(loader):
    return {pid for batch in loader for pid in torch.stack([*batch]).flatten().tolist()}


def print_threads(cores, **environment):
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    os.sched_getaffinity = lambda process: set(range(cores))
    common.set_up_device("cpu")
    print(torch.get_num_threads())


def print_threads_as_worker(local_rank, args):
    print_threads(8, LOCAL_WORLD_SIZE=os.environ["LOCAL_WORLD_SIZE"])
    return 0


def print_threads_of_spawned():
    args = make_args("spawn", "--nproc", "4", "--device", "cpu")
    arguments = print_threads_as_worker, args
    torch.multiprocessing.spawn(machinery.launch.run_worker, arguments, nprocs=1)


@pytest.mark.full
def test_pitfall_38_workers_stay_and_cores_are_divided():
    """A pause at each epoch, and more threads than cores: loader workers are started anew, and every process takes all cores."""
    loader = DataLoader(WorkerPids(), batch_size=8, num_workers=2)
    first, second = pids_of_epoch(loader), pids_of_epoch(loader)
    assert len(first) == 2 and not first & second

    sampler = make_sampler(24, 8)
    loader = loader_of(make_args("single", "--workers", "2"), WorkerPids(), sampler, CPU)
    pids = []
    for epoch in range(3):
        sampler.set_position(epoch, 0)
        pids.append(pids_of_epoch(loader))
    assert len(pids[0]) == 2 and pids[0] == pids[1] == pids[2] and os.getpid() not in pids[0]

    for cores, environment, threads in (
        (8, {}, 8),
        (8, {"LOCAL_WORLD_SIZE": "4"}, 2),
        (2, {"LOCAL_WORLD_SIZE": "4"}, 1),
        (64, {"LOCAL_WORLD_SIZE": "4", "SLURM_CPUS_ON_NODE": "8"}, 2),  # the rest is of other jobs
    ):
        assert int(in_process(functools.partial(print_threads, cores, **environment))) == threads
    assert int(in_process(print_threads_of_spawned)) == 2


# ----------------------------------------------------------------------------------------------- 39


@pytest.mark.parametrize(
    "launcher",
    [pytest.param(name, marks=pytest.mark.full) for name in ("bash run.sh spawn 2", "torchrun")],
)
def test_pitfall_39_nothing_outlives_the_launcher(launcher, tmp_path):
    """Ranks and loader workers train on, unseen, when their launcher was killed: nothing tells them that it is gone."""
    torchrun = "torchrun --standalone --nproc-per-node 2 train_ddp.py"
    command = torchrun.split() if launcher == "torchrun" else launcher.split()
    options = [*BASE, "--workers", "2", "--epochs", "100000", "--log-every", "1000"]
    with Launch([*command, *options], tmp_path, stdout=subprocess.DEVNULL) as launch:
        launch.wait_until((tmp_path / "run" / "last.pt").exists)
        assert len(launch.processes()) >= 7, "two ranks with two workers each"
        launch.process.kill()
        assert launch.end(grace=90) == 137  # many seconds on a busy machine
        assert "after saving step" in launch.errors(), (
            "a dead launcher stops the ranks like SIGTERM"
        )
        assert launch.checkpoint()["global_step"] > 0


# ----------------------------------------------------------------------------------------------- 40


@pytest.mark.full
def test_pitfall_40_two_launchers_are_one_job(tmp_path):
    """A job on several machines hangs at its start, or trains twice: every launcher looks for the others on its own localhost."""
    place = f"tcp://127.0.0.1:{free_port()}"
    argv = [*BASE, *f"--nproc 1 --nnodes 2 --dist-url {place}".split()]
    argv += ["--output-dir", str(tmp_path / "run")]
    nodes = [
        functools.partial(spawn_launcher, [*argv, "--node-rank", str(rank)]) for rank in (0, 1)
    ]
    for rank, (code, out, err) in enumerate(run_processes(nodes, tmp_path)):
        assert code == 0, err
        assert f"node {rank} of 2 meets the others at {place}" in out, "who waits says so"
        assert ("eval" in out) == (rank == 0)
    reference = single_run(*BASE).checkpoint()["model"]
    assert deviation(torch.load(tmp_path / "run" / "last.pt")["model"], reference) <= 1e-10


# Of a job, and so of a batch script too; and of a step of it
SLURM_JOB = {"PROCID": "5", "LOCALID": "1", "NODEID": "1", "NTASKS": "8", "JOB_ID": "24711"}
SLURM_JOB |= {"JOB_NODELIST": "a[1-4]"}
SLURM_STEP = {"STEP_NUM_TASKS": "7", "STEP_NODELIST": "gpu[07-09,12],login"}
SLURM_STEP |= {"STEP_TASKS_PER_NODE": "4,3"}


def print_ranks_of_slurm(number):
    os.environ.update({f"SLURM_{name}": value for name, value in SLURM_JOB.items()})
    machinery.cli.parse_args("ddp", [])
    with pytest.raises(common.UsageError, match="no launcher"):
        common.ranks_from_env()
    step = {**SLURM_STEP, "STEP_ID": number}
    os.environ.update({f"SLURM_{name}": value for name, value in step.items()})
    with pytest.raises(common.UsageError, match=r"cannot be cut into 7 devices"):
        machinery.cli.parse_args("ddp", ["--batch-size", "6"])
    names = ("LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    print(*common.ranks_from_env(), *(os.environ[name] for name in names))


def test_pitfall_40_ranks_from_slurm():
    """Under `srun` every task believes to be rank 0 of 1: SLURM names ranks by other variables than torchrun."""
    first = in_process(functools.partial(print_ranks_of_slurm, "0"))
    assert first == "5 1 7 3 gpu07 24711\n"
    second = in_process(functools.partial(print_ranks_of_slurm, "2"))
    assert second.endswith(" 26705\n"), "beside another step of the same job"


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
    plain, task = tmp_path / "plain.py", tmp_path / "failing.py"
    plain.write_text("raise RuntimeError('the labels are broken')")
    task.write_text(BROKEN_LABELS)

    def cause(n, *command):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", n, *command]
        path = {"PYTHONPATH": str(TASKS)}
        with Launch(torchrun, tmp_path, stdout=subprocess.DEVNULL, **path) as launch:
            assert launch.end() == 1, launch.errors()
            return launch.errors().partition("Root Cause")[2]

    without = cause("1", str(plain))
    assert "To enable traceback" in without and "labels" not in without
    recorded = cause("2", str(ROOT / "train_ddp.py"), *BASE, "--task", str(task))
    assert "rank      : 1" in recorded and "the labels of rank 1 are broken" in recorded
