"""Several machines: launchers that meet at an address, on this machine and on two hosts made of network namespaces."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import TASKS, deviation, single_run
from launches import ROOT, Launch, free_port, send
from patches import BASE

import common

# The ranks wait in step 9, in the second epoch, until the test goes on.
GATED = """import itertools, os, pathlib, sys, time
import torch.distributed as dist
sys.path.append(os.environ["TASKS"])
import pit_models
from pit_models import *
gate, steps = pathlib.Path(os.environ["GATE"]), itertools.count(1)
def per_sample_loss(outputs, targets):
    if outputs.requires_grad and next(steps) == 9:
        pathlib.Path(f"{gate}-{dist.get_rank()}").touch()
        while not gate.exists():
            time.sleep(0.01)
    return pit_models.per_sample_loss(outputs, targets)
"""
NAMES = itertools.count()


def torchrun(address, port, rank, nproc=1):
    """The command line of docs/multinode.md."""
    nodes = f"--nnodes=2 --node-rank={rank} --nproc-per-node={nproc}"
    place = f"--master-addr={address} --master-port={port}"
    command = [sys.executable, *f"-m torch.distributed.run {nodes} {place}".split()]
    return [*command, str(ROOT / "train_ddp.py")]


def spawn(address, port, rank):
    options = f"spawn 1 --nnodes 2 --node-rank {rank} --dist-url tcp://{address}:{port}"
    return ["bash", str(ROOT / "run.sh"), *options.split()]


@contextlib.contextmanager
def job(folder, commands, *options, **environment):
    """Launches that write to one directory, as on a shared file system."""
    (folder / "gated.py").write_text(GATED)
    with contextlib.ExitStack() as stack:
        nodes = []
        for i, command in enumerate(commands):
            (own := folder / f"node{i}").mkdir(exist_ok=True)
            words = (*options, "--output-dir", str(folder / "run"))
            more = {"GATE": str(folder / "gate"), "TASKS": str(TASKS), **environment}
            with open(own / "out", "w") as out:
                nodes.append(stack.enter_context(Launch(command, own, *words, stdout=out, **more)))
        yield nodes


def gated(folder):
    return [*BASE, "--task", str(folder / "gated.py")]


def open_gate(folder, nodes, action):
    """Wait until both ranks are in the second epoch, call `action()`, and let the ranks go on."""
    nodes[0].wait_until(lambda: all((folder / f"gate-{rank}").exists() for rank in (0, 1)))
    action()
    (folder / "gate").touch()


def ends(nodes, codes):
    found = [node.end(timeout=100) for node in nodes]
    assert found == codes, "".join(node.errors() for node in nodes)


def assert_equals_one_device(folder):
    reference = single_run(*BASE)
    saved = torch.load(folder / "run" / "last.pt", weights_only=True)["model"]
    assert deviation(saved, reference.checkpoint()["model"]) <= 1e-10
    log = (folder / "run" / "metrics.jsonl").read_text()
    assert log.count('"train"') == 18 and log.count('"eval"') == 3


# ------------------------------------------------------------------------------------- one machine


@pytest.mark.full
def test_two_torchruns_are_one_device_and_one_rank_speaks(tmp_path):
    port = free_port()
    commands = [torchrun("127.0.0.1", port, rank, nproc) for rank, nproc in enumerate((2, 1))]
    with job(tmp_path, commands, *BASE, GLOO_SOCKET_IFNAME="lo") as nodes:
        ends(nodes, [0, 0])
    outputs = [(tmp_path / f"node{i}" / "out").read_text() for i in (0, 1)]
    assert outputs[0].count("  eval  ") == 3 and "train_ddp.py on 3 x cpu" in outputs[0]
    assert outputs[1] == ""
    assert_equals_one_device(tmp_path)


@pytest.mark.full
def test_signal_to_one_of_two_launchers_stops_both(tmp_path):
    commands = [spawn("127.0.0.1", port, rank) for port in [free_port()] for rank in (0, 1)]
    with job(tmp_path, commands, *gated(tmp_path)) as nodes:
        pid = nodes[1].process.pid
        open_gate(tmp_path, nodes, lambda: os.kill(pid, signal.SIGUSR1))
        ends(nodes, [0, 0])
        assert "stopped by SIGUSR1 after saving step" in nodes[0].errors()
    commands = [spawn("127.0.0.1", port, rank) for port in [free_port()] for rank in (0, 1)]
    with job(tmp_path, commands, *gated(tmp_path), "--resume", "auto") as nodes:
        ends(nodes, [0, 0])
    assert_equals_one_device(tmp_path)


@pytest.mark.full
def test_nodes_that_mean_different_runs_are_told(tmp_path):
    """They would train on, to a wrong result."""
    port = free_port()
    commands = [[*spawn("127.0.0.1", port, rank), "--seed", str(rank)] for rank in (0, 1)]
    with job(tmp_path, commands, *BASE) as nodes:
        ends(nodes, [2, 2])
        assert "seed is 0 on rank 0, but 1 elsewhere" in nodes[1].errors()
    assert not (tmp_path / "run" / "last.pt").exists()


@pytest.mark.full
def test_launcher_whose_partner_never_comes_ends_after_the_timeout(tmp_path):
    with job(tmp_path, [spawn("127.0.0.1", free_port(), 0)], *BASE, "--timeout", "3") as nodes:
        ends(nodes, [1])
        assert "1/2 clients joined" in nodes[0].errors()


# Of a job, and so of a batch script too; and of a step of it
JOB = {"PROCID": "5", "LOCALID": "1", "NTASKS": "8", "JOB_ID": "24711", "JOB_NODELIST": "a[1-4]"}
STEP = {"STEP_NUM_TASKS": "7", "STEP_NODELIST": "gpu[07-09,12],login"}


def test_ranks_under_srun(monkeypatch, capsys):
    """SLURM names ranks by other variables than torchrun: each task would believe to be rank 0 of 1."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    for name, value in JOB.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(SystemExit) as refused:  # in the batch script itself
        common.ranks_from_env()
    assert refused.value.code == 2 and "no launcher has set RANK" in capsys.readouterr().err
    for name, value in STEP.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert common.ranks_from_env() == (5, 1, 7)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("gpu07", "24711")


# --------------------------------------------------------------------------------------- two hosts

ENTER = (
    'echo "$0" >/proc/sys/kernel/hostname && exec "$@"'  # the process becomes the command itself
)


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


class Host:
    """A namespace whose processes see the host name `name`; both hosts resolve it to `known_as`."""

    def __init__(self, name, address):
        self.name, self.address = name, address

    def command(self, *command):
        enter = ["ip", "netns", "exec", self.name, *"unshare --uts sh -c".split(), ENTER, self.name]
        return [*enter, *command]

    def processes(self):
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]

    def remove(self):
        with contextlib.suppress(AssertionError):  # it was not made
            send(self.processes(), signal.SIGKILL)
            ip("netns", "delete", self.name)
        shutil.rmtree(Path("/etc/netns", self.name), ignore_errors=True)


@contextlib.contextmanager
def two_hosts(own_names):
    """Two hosts joined by a cable. Without `own_names` each name is 127.0.1.1, as on Debian."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("two hosts need root, iproute2 and util-linux")
    name = f"data-parallel-test-{os.getpid()}-{next(NAMES)}"
    hosts = [Host(f"{name}-{i}", f"10.77.0.{i + 1}") for i in (0, 1)]
    with contextlib.ExitStack() as stack:
        for host in hosts:
            stack.callback(host.remove)
            if subprocess.run(["ip", "netns", "add", host.name], capture_output=True).returncode:
                pytest.skip("network namespaces are not allowed here")
            folder = Path("/etc/netns", host.name)  # `ip netns exec` shows its files in /etc
            folder.mkdir(parents=True)
            known = [f"{h.address if own_names else '127.0.1.1'} {h.name}\n" for h in hosts]
            (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(known))
        ends = [f"link0 netns {host.name}".split() for host in hosts]
        ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for host in hosts:
            ip("-netns", host.name, "address", "add", f"{host.address}/24", "dev", "link0")
            for device in ("lo", "link0"):
                ip("-netns", host.name, "link", "set", device, "up")
        yield hosts


@pytest.mark.full
def test_torchrun_on_two_hosts_is_one_device(tmp_path):
    with two_hosts(own_names=True) as hosts:
        address = hosts[0].address
        commands = [h.command(*torchrun(address, 29500, i)) for i, h in enumerate(hosts)]
        with job(tmp_path, commands, *BASE) as nodes:
            ends(nodes, [0, 0])
    assert_equals_one_device(tmp_path)


@pytest.mark.full
def test_lost_host_ends_the_job_which_goes_on_later(tmp_path):
    """Gloo would listen where the host's own name is, at 127.0.1.1: its interface has to be named."""
    with two_hosts(own_names=False) as hosts:
        address, named = hosts[0].address, {"GLOO_SOCKET_IFNAME": "link0"}
        commands = [h.command(*spawn(address, 29500, i)) for i, h in enumerate(hosts)]
        with job(tmp_path, commands, *gated(tmp_path), **named) as nodes:
            open_gate(tmp_path, nodes, lambda: send(hosts[1].processes(), signal.SIGKILL))
            assert nodes[0].end() == 1 and "Traceback" in nodes[0].errors()
        with job(tmp_path, commands, *gated(tmp_path), "--resume", "auto", **named) as nodes:
            ends(nodes, [0, 0])
    assert_equals_one_device(tmp_path)
