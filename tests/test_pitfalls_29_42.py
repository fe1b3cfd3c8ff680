"""The pitfalls of going from one device to many, by number: 29 to 42. Each test shows the wrong way failing, then this project's way."""

import contextlib
import copy
import fcntl
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import (
    ROOT,
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
from pitfalls import BASE, in_process, launch, printed, stop_after, without_speed
from test_pitfalls_01_14 import spawn_launcher
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import common
import machinery.files
import machinery.launch
import machinery.options
import machinery.processes
import machinery.rendezvous
import machinery.run
import machinery.stand_ins

CPU = torch.device("cpu")

# ------------------------------------------------------------------------------------------------------------------------- 29


def print_gathered(rank):
    gather = machinery.stand_ins.DataParallel.gather

    def watched(self, outputs, output_device):
        print("gathered", json.dumps([list(output.shape) for output in outputs]))
        return gather(self, outputs, output_device)

    machinery.stand_ins.DataParallel.gather = watched


def test_pitfall_29_data_parallel_gathers_losses(tmp_path):
    """The first GPU runs out of memory and the mean is off: outputs are gathered there, and means of uneven replicas averaged."""
    losses = torch.arange(10.0) ** 2
    means = torch.stack([piece.mean() for piece in losses.chunk(4)])  # pieces of 3, 3, 3 and 1
    assert means.mean() > 1.2 * losses.mean()

    argv = (*BASE, "--batch-size", "10", "--epochs", "1", "--lr", "0.02")
    reference, result = (
        single_run(*argv),
        train("dp", 4, *argv, folder=tmp_path, patch=print_gathered),
    )
    assert result.code == 0, result.err
    assert printed(result.out, "gathered")[:20] == 20 * [
        [[3], [3], [3], [1]]
    ]  # one number a sample, and none of the outputs
    assert deviation(result.gradients[0][0], reference.gradients[0][0]) <= 1e-12
    assert deviation(result.checkpoint()["model"], reference.checkpoint()["model"]) <= 1e-10


# ------------------------------------------------------------------------------------------------------------------------- 30


def drop_with_one_seed():
    torch.manual_seed(0)
    print(nn.functional.dropout(torch.ones(30)).tolist())


def print_masks(rank):
    """Print `mask [rank, dropped units]` for every forward of a dropout layer in training."""
    forward, calls = nn.Dropout.forward, itertools.count()

    def watched(self, value):
        output = forward(self, value)
        if self.training and next(calls) > 0:  # the first call is that of settle_buckets
            print("mask", json.dumps([rank, (output == 0).int().flatten().tolist()]))
        return output

    nn.Dropout.forward = watched


def print_masks_and_stop(rank):
    print_masks(rank)
    stop_after(3, rank)


def test_pitfall_30_dropout_differs_between_ranks(tmp_path):
    """All ranks drop the same units, which makes the noise of a global batch larger: one seed was given to every rank."""
    first, second = in_group(2, drop_with_one_seed)
    assert first == second

    argv = (*BASE, "--model", "dropout", "--epochs", "1")
    straight = train("ddp", 2, *argv, folder=tmp_path / "straight", patch=print_masks)
    masks = [tuple(mask) for _, mask in printed(straight.out, "mask")]
    assert len(masks) == len(set(masks)) == 12  # 6 steps of 2 ranks

    stopped = train("ddp", 2, *argv, folder=tmp_path, patch=print_masks_and_stop)
    assert stopped.code == 143 and stopped.checkpoint()["step"] == 4
    resumed = train("ddp", 2, *argv, "--resume", "auto", folder=tmp_path, patch=print_masks)
    for rank in (0, 1):
        before, again = (
            [mask for r, mask in printed(run.out, "mask") if r == rank]
            for run in (straight, resumed)
        )
        assert again[-2:] == before[-2:]  # steps 5 and 6
    assert all(
        tensor.equal(straight.checkpoint()["model"][name])
        for name, tensor in resumed.checkpoint()["model"].items()
    )


# ------------------------------------------------------------------------------------------------------------------------- 31


def each_rank_looks_for_itself():
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("folder", dist.__file__)
        print(store.check(["last.pt"]))
        store.set("last.pt", "")  # rank 0 goes on, and soon saves
        store.set("saved", "")
    else:
        store.wait(["saved"])  # rank 1 comes later
        print(store.check(["last.pt"]))


def hide_files_from_rank_1(rank):
    """As with a folder on each machine: only rank 0 has the checkpoint."""

    def missing(path):
        raise FileNotFoundError(path)

    if rank == 1:
        machinery.files.load_checkpoint = missing


def save_slowly(rank):
    """Rank 0 has a slow disk; print when it has saved, and when each rank leaves."""
    save, destroy = machinery.files.save_checkpoint, dist.destroy_process_group

    def slow_save(*arguments):
        time.sleep(0.5)
        save(*arguments)
        print("saved", time.monotonic())

    machinery.files.save_checkpoint = slow_save
    dist.destroy_process_group = lambda: (print("left", time.monotonic()), destroy())


def stop_and_save_slowly(rank):
    stop_after(3, rank)
    save_slowly(rank)


def test_pitfall_31_rank_0_reads_and_decides(tmp_path):
    """Some ranks resume and others start anew, or read half a file: each looked for itself, while rank 0 was writing."""
    assert [out.strip() for out in in_group(2, each_rank_looks_for_itself)] == ["False", "True"]

    stopped = train("ddp", 2, *BASE, folder=tmp_path, patch=functools.partial(stop_after, 8))
    resumed = train(
        "ddp", 2, *BASE, "--resume", "auto", folder=tmp_path, patch=hide_files_from_rank_1
    )
    assert stopped.code == 143 and resumed.code == 0, resumed.err
    assert without_speed(resumed.lines) == without_speed(undisturbed("ddp", 2, *BASE).lines)

    with open(tmp_path / "run" / "metrics.jsonl") as other_run:
        fcntl.flock(other_run, fcntl.LOCK_EX)
        second = train("ddp", 2, *BASE, "--resume", "auto", folder=tmp_path)
    assert second.code == 2 and "another run is writing there" in second.err

    for code, patch in ((143, stop_and_save_slowly), (0, save_slowly)):
        slow = train(
            "ddp", 2, *BASE, "--epochs", "1", folder=tmp_path / f"slow-{code}", patch=patch
        )
        assert slow.code == code
        assert min(printed(slow.out, "left")) > max(
            printed(slow.out, "saved")
        )  # a launcher ends the rest when one leaves with a code


# ------------------------------------------------------------------------------------------------------------------------- 32


def on_two_nodes(rank):
    """Each rank is the first, and only, process of its machine."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    save = machinery.files.save_checkpoint
    machinery.files.save_checkpoint = lambda content, path: (
        print("saves", rank),
        save(content, path),
    )


def gate_on_local_rank(rank):
    on_two_nodes(rank)
    machinery.run.get_rank = lambda: int(os.environ["LOCAL_RANK"])
    machinery.run.Run._open = open_own_folder


def open_own_folder(self):
    self.args.output_dir += (
        f"-{dist.get_rank()}"  # or the lock of metrics.jsonl would notice that two write there
    )
    return _open(self)


_open = machinery.run.Run._open


def test_pitfall_32_one_rank_of_all_machines_saves(tmp_path):
    """Several ranks write the same checkpoint: on more than one machine, each has a process whose local rank is 0."""
    wrong = train(
        "ddp", 2, *BASE, "--epochs", "1", folder=tmp_path / "wrong", patch=gate_on_local_rank
    )
    assert set(printed(wrong.out, "saves")) == {0, 1}

    right = train("ddp", 2, *BASE, "--epochs", "1", folder=tmp_path / "right", patch=on_two_nodes)
    assert right.code == 0 and printed(right.out, "saves") == [
        0,
        0,
        0,
    ]  # last.pt before the evaluation, best.pt and last.pt after it


# ------------------------------------------------------------------------------------------------------------------------- 33


def wrap_on_gpus_only():
    torch.manual_seed(0)
    for wrap in (False, True):
        net = nn.Linear(3, 1)
        model = DistributedDataParallel(net) if wrap else net
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        model(torch.full((2, 3), 1.0 + dist.get_rank())).sum().backward()
        optimizer.step()
        print(json.dumps(net.weight.tolist()))


def print_weights(rank):
    """Print the sum of the weights that each rank leaves training with."""
    end_epoch = machinery.run.Run.end_epoch

    def watched(self, metrics):
        print(
            "weights",
            json.dumps([[p.sum().item(), p.norm().item()] for p in self.state.net.parameters()]),
        )
        end_epoch(self, metrics)

    machinery.run.Run.end_epoch = watched


def test_pitfall_33_cpu_ranks_train_one_model(tmp_path):
    """A distributed run on the CPU trains as many models as it has ranks: the wrapper was left out where there is no GPU."""
    first, second = (out.splitlines() for out in in_group(2, wrap_on_gpus_only))
    assert first[0] != second[0]
    assert first[1] == second[1]

    result = train("ddp", 2, *BASE, "--epochs", "1", folder=tmp_path, patch=print_weights)
    first, second = printed(result.out, "weights")
    assert first == second
    assert deviation(result.gradients[0][0], result.gradients[1][0]) == 0.0
    start = train(
        "single",
        1,
        *BASE,
        "--epochs",
        "1",
        "--lr",
        "0",
        folder=tmp_path / "start",
        patch=print_weights,
    )
    assert printed(start.out, "weights")[0] != first  # they trained


# ------------------------------------------------------------------------------------------------------------------------- 35


def reduce_a_loss():
    weight = torch.tensor(
        1.0 + 3 * dist.get_rank(), dtype=torch.float64, requires_grad=True
    )  # 1 and 4
    loss = weight.sqrt()  # backward needs the result: d/dw = 1 / (2 sqrt(w))
    logged = common.reduce_value(loss)
    total = common.reduce_value(loss, average=False)
    loss.backward()
    right = [logged.item(), total.item(), loss.item(), weight.grad.item(), logged.requires_grad]

    loss = torch.sqrt(weight)
    dist.all_reduce(loss.data)  # in place, hidden from autograd
    weight.grad = None
    loss.backward()
    print(json.dumps([right, weight.grad.item()]))


def test_pitfall_35_reduced_loss_is_a_new_tensor():
    """Backward fails or is wrong, or the log shows a sum: the loss itself was all-reduced, in place."""
    for rank, out in enumerate(in_group(2, reduce_a_loss)):
        right, wrong_gradient = json.loads(out)
        gradient = 1 / (2 * (1 + rank))
        assert wrong_gradient == pytest.approx(1 / 6) and abs(wrong_gradient - gradient) > 0.05
        assert right == [1.5, 3.0, 1.0 + rank, pytest.approx(gradient, rel=1e-12), False]
    value = torch.tensor([2.0], requires_grad=True)
    alone = common.reduce_value(value)  # without a group
    assert alone.equal(value) and alone is not value and alone.data_ptr() != value.data_ptr()


# ------------------------------------------------------------------------------------------------------------------------- 36


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
    # The sampler's indices never were on a device, and torch's GradScaler reads its flag where no optimizer is fused: on the CPU.
    assert all(step[1] == 2 for step in right)
    assert all(step[1] == 3 for step in wrong)


# ------------------------------------------------------------------------------------------------------------------------- 37


def test_pitfall_37_one_rank_prints_and_writes(tmp_path):
    """Every line appears N times: each rank prints and writes its own."""
    assert len("".join(in_group(2, functools.partial(print, "epoch 1"))).splitlines()) == 2

    one, two = single_run(*BASE), undisturbed("ddp", 2, *BASE)
    starts = [
        [line[:20] for line in run.out.splitlines() if not line.startswith("output directory")]
        for run in (one, two)
    ]
    assert starts[0] == starts[1] and len(starts[0]) == 18 + 3
    assert two.out.count("output directory") == 1 and two.err == one.err == ""
    assert len(two.lines) == len(one.lines) == 21
    assert sorted(path.name for path in two.folder.iterdir()) == sorted(
        path.name for path in one.folder.iterdir()
    )


def test_pitfall_37_one_event_file(tmp_path):
    """TensorBoard shows N curves for one run: every rank opened an event file."""
    result = train("ddp", 2, *BASE, "--epochs", "1", "--tensorboard", folder=tmp_path)
    assert result.code == 0, result.err
    assert len(list(result.folder.rglob("events.out.tfevents.*"))) == 1


# ------------------------------------------------------------------------------------------------------------------------- 38


class WorkerPids(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor(os.getpid())


def print_threads_beside_accelerators(cores, processes):
    machinery.processes.resolve_device_type = lambda name: "cuda"
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
    machinery.processes.set_up_device("cpu")
    print(torch.get_num_threads())


def print_threads_of_spawned():
    os.environ.pop("OMP_NUM_THREADS", None)
    os.sched_getaffinity = lambda process: set(range(8))

    def worker(local_rank, args):
        machinery.processes.set_up_device("cpu")
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
        pids.append({pid for batch in loader for pid in batch.tolist()})
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


# ------------------------------------------------------------------------------------------------------------------------- 39


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
        wait_until(lambda: (folder / "last.pt").exists() or not running(launcher), 40)
        pids += descendants(launcher)
        assert len([pid for pid in pids if running(pid)]) >= 7
        os.kill(launcher, number)
        wait_until(
            lambda: not any(running(pid) for pid in pids), 30
        )  # a few seconds, or many on a busy machine
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


ENDLESS = ("--workers", "2", "--epochs", "100000", "--log-every", "1000")


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


def exit_with(function, log):
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    sys.exit(function())


def test_pitfall_39_nothing_outlives_torchrun(tmp_path):
    """The ranks of a torchrun that was killed train on, unseen: nothing tells them that their launcher is gone."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
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


# ------------------------------------------------------------------------------------------------------------------------- 40


def test_pitfall_40_two_launchers_are_one_job(tmp_path):
    """A job on several machines hangs at its start, or trains twice: every launcher looks for the others on its own localhost."""
    port = free_port()

    def node(rank):
        launcher = ("run", "launch")[rank]  # torchrun, and the old one
        command = [
            sys.executable,
            "-m",
            f"torch.distributed.{launcher}",
            "--nnodes=2",
            f"--node-rank={rank}",
            "--nproc-per-node=1",
        ]
        command += ["--master-addr=127.0.0.1", f"--master-port={port}", str(ROOT / "train_ddp.py")]
        return launch(*command, *BASE, "--output-dir", str(tmp_path / "torchrun"))

    with ThreadPoolExecutor() as pool:
        (code0, out0, err0), (code1, out1, err1) = pool.map(node, (0, 1))
    assert code0 == code1 == 0, err0 + err1
    assert "eval" in out0 and "eval" not in out1
    reference = single_run(*BASE).checkpoint()["model"]
    assert deviation(torch.load(tmp_path / "torchrun" / "last.pt")["model"], reference) <= 1e-10

    argv = [
        *BASE,
        "--nproc",
        "1",
        "--nnodes",
        "2",
        "--dist-url",
        f"tcp://127.0.0.1:{port}",
        "--output-dir",
        str(tmp_path / "spawn"),
    ]
    nodes = [
        functools.partial(spawn_launcher, [*argv, "--node-rank", str(rank)]) for rank in (0, 1)
    ]
    for rank, (code, out, err) in enumerate(run_processes(nodes, tmp_path)):
        assert code == 0, err
        assert f"node {rank} of 2 meets the others at tcp://127.0.0.1:{port}" in out, (
            "who waits says so"
        )
    assert deviation(torch.load(tmp_path / "spawn" / "last.pt")["model"], reference) <= 1e-10


@pytest.mark.parametrize(
    "url", [None, "tcp://127.0.0.1", "127.0.0.1:29500", "tcp://no-such-host.invalid:29500"]
)
def test_pitfall_40_unusable_address_is_an_error(url, tmp_path):
    """The launcher of the second machine waits for ever at an address where nobody can be: it must say so at once."""
    argv = [
        *BASE,
        "--nproc",
        "1",
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--timeout",
        "5",
        "--output-dir",
        str(tmp_path / "run"),
    ]
    target = functools.partial(spawn_launcher, argv + (["--dist-url", url] if url else []))
    ((code, _, err),) = run_processes([target], tmp_path, timeout=20)
    assert code == 2 and "--dist-url" in err, err


def print_ranks_of_slurm():
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
    }
    os.environ.update({f"SLURM_{name}": value for name, value in job.items()})
    machinery.options.parse_args("ddp", [])
    with pytest.raises(common.UsageError, match="no launcher"):
        machinery.rendezvous.ranks_from_env()
    os.environ.update({f"SLURM_{name}": value for name, value in step.items()})
    with pytest.raises(common.UsageError, match=r"cannot be cut into 7 devices"):
        machinery.options.parse_args("ddp", ["--batch-size", "6"])
    print(
        *machinery.rendezvous.ranks_from_env(),
        *(os.environ[name] for name in ("LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
    )


def test_pitfall_40_ranks_from_slurm():
    """Under `srun` every task believes to be rank 0 of 1: SLURM names ranks by other variables than torchrun."""
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & os.environ.keys()
    assert in_process(print_ranks_of_slurm).split() == ["5", "1", "7", "3", "gpu07", "24711"]


@pytest.mark.parametrize(
    ("nodes", "tasks", "address"),
    [("gpu[007-009]", "2(x2),1", "gpu007"), ("b,a[1-3]", "1(x4)", "b"), ("gpu3", "8", "127.0.0.1")],
)
def test_pitfall_40_address_from_slurm(nodes, tasks, address, monkeypatch):
    """The list of hosts is written in brackets, and the first is where rank 0 is; what the user has exported counts more."""
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.setenv(name, "")  # so that the end of the test restores it
        monkeypatch.delenv(name)
    slurm = {"PROCID": "0", "LOCALID": "0", "NODEID": "0", "JOB_ID": "1", "STEP_NUM_TASKS": "5"}
    for name, value in {**slurm, "STEP_NODELIST": nodes, "STEP_TASKS_PER_NODE": tasks}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert machinery.rendezvous.take_ranks_of_slurm() and os.environ["MASTER_ADDR"] == address
    assert not machinery.rendezvous.take_ranks_of_slurm(), "torchrun under srun has named the ranks"
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert machinery.rendezvous.take_ranks_of_slurm() and os.environ["MASTER_ADDR"] == "10.0.0.1"


# ------------------------------------------------------------------------------------------------------------------------- 41


FAILING_TASK = """
from small import *
import torch.distributed as dist

def per_sample_loss(outputs, targets):
    if dist.is_initialized() and dist.get_rank() == 1:  # a check before the run has no ranks
        raise RuntimeError("the labels of rank 1 are broken")
    return outputs.sum(1)
"""


def test_pitfall_41_torchrun_shows_the_cause(tmp_path):
    """torchrun ends with an exit code and no reason: without @record it does not learn the error of the rank that failed first."""
    plain = tmp_path / "plain.py"
    plain.write_text("raise RuntimeError('the labels are broken')")
    task = tmp_path / "failing.py"
    task.write_text(FAILING_TASK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    recorded = [
        *torchrun,
        "--nproc-per-node=2",
        str(ROOT / "train_ddp.py"),
        *BASE,
        "--task",
        str(task),
    ]
    recorded += ["--output-dir", str(tmp_path / "run")]

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


# ------------------------------------------------------------------------------------------------------------------------- 42


def strict_about_old_interfaces(rank):
    warnings.simplefilter("error", FutureWarning)
    nn.Module.compile = functools.partialmethod(
        nn.Module.compile, backend="eager"
    )  # what is tested are names, not kernels


def prefixed_names():
    net = nn.Linear(2, 1)
    print(
        *DistributedDataParallel(net).state_dict(), *torch.compile(copy.deepcopy(net)).state_dict()
    )


def test_pitfall_42_old_interfaces_and_prefixed_names(tmp_path):
    """FutureWarnings in every process, and checkpoints that no other mode can load: old AMP names, and those of the wrapper."""
    with pytest.warns(FutureWarning, match=r"torch.amp.GradScaler"):
        torch.cuda.amp.GradScaler(enabled=False)
    assert in_group(1, prefixed_names)[0].split() == [
        "module.weight",
        "module.bias",
        "_orig_mod.weight",
        "_orig_mod.bias",
    ]

    argv = (*BASE, "--dtype", "float32", "--amp", "bf16", "--average", "ema", "--epochs", "1")
    names = {"first.weight", "first.bias", "last.weight", "last.bias"}
    for mode, n, *compiled in (("single", 1), ("dp", 2), ("ddp", 2, "--compile"), ("spawn", 2)):
        result = train(
            mode, n, *argv, *compiled, folder=tmp_path / mode, patch=strict_about_old_interfaces
        )
        assert result.code == 0, result.err
        saved = result.checkpoint()
        assert saved["model"].keys() == names
        assert saved["average"].keys() - {"n_averaged"} == names
