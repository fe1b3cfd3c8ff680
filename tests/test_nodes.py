"""Several nodes: launchers on two hosts with addresses of their own, see nodes.py, and what is said when they are not alike."""

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from harness import rank_of_run, run_processes
from launches import ROOT, TASKS, Launch, free_port, send
from nodes import DEVICE, PORT, assert_equals_one_device, job, spawn, two_hosts
from patches import BASE, spawn_launcher, stop_after, wrap_in_task

import common
import machinery.launch
import machinery.process
import machinery.run
import machinery.usertask
import train_spawn

GATED = (*BASE, "--task", str(TASKS / "gate.py"), "--timeout", "20")
SCRIPT = str(ROOT / "train_ddp.py")


def torchrun(address, rank, nproc):
    """The command line of the static form, as docs/multinode.md has it."""
    nodes = f"--nnodes=2 --node-rank={rank} --nproc-per-node={nproc}"
    place = f"--master-addr={address} --master-port={PORT}"
    return [sys.executable, *f"-m torch.distributed.run {nodes} {place}".split(), SCRIPT]


def elastic(address, rank):
    """The command line of the elastic form: the same on every node."""
    nodes = "--nnodes=1:2 --nproc-per-node=1 --max-restarts=3 --rdzv-id=job --rdzv-backend=c10d"
    meet = f"--rdzv-endpoint={address}:{PORT} --rdzv-conf=last_call_timeout=3"
    return [sys.executable, *f"-m torch.distributed.run {nodes} {meet}".split(), SCRIPT]


@contextlib.contextmanager
def at_the_gate(hosts, folder, commands, *options, **environment):
    """Two nodes, one rank each, in the middle of the second epoch, where they stay until the file that is yielded exists."""
    gate = folder / "gate"
    with job(
        hosts, folder, commands, *GATED, *options, GATE=str(gate), GATE_AT="9", **environment
    ) as nodes:
        for rank, node in enumerate(nodes):
            deadline = time.monotonic() + 90
            node.wait_until(
                lambda rank=rank, deadline=deadline: (
                    (folder / f"gate-{rank}").exists() or time.monotonic() > deadline
                )
            )
            assert (folder / f"gate-{rank}").exists(), node.errors()
        yield nodes, gate


def clock_ahead(folder):
    """A folder for PYTHONPATH in which Python finds, at its start, that it is tomorrow."""
    folder.mkdir()
    lines = ["import time", "now = time.time", "time.time = lambda: now() + 86400"]
    (folder / "sitecustomize.py").write_text("\n".join(lines))
    return str(folder)


@pytest.mark.full
@pytest.mark.netns
def test_two_hosts_are_one_device(tmp_path):
    """Also if they differ in the number of ranks."""
    with two_hosts() as hosts:
        commands = [torchrun(hosts[0].address, rank, nproc) for rank, nproc in enumerate((2, 1))]
        with job(hosts, tmp_path, commands, *BASE) as nodes:
            assert [node.end() for node in nodes] == [0, 0], nodes[0].errors() + nodes[1].errors()
            evaluations = re.findall(r"^epoch \d+/3  eval  ", nodes[0].output(), re.MULTILINE)
            assert len(evaluations) == 3 and nodes[1].output() == "", "global rank 0 alone speaks"
    assert_equals_one_device(tmp_path / "run", *BASE)


@pytest.mark.netns
@pytest.mark.slow
def test_hosts_may_have_ipv6_alone(tmp_path):
    """Then the interface is named, as the table of routes that the ranks read is one of IPv4."""
    with two_hosts(own_names=False, addresses=("fd00::1", "fd00::2")) as hosts:
        named = ["env", f"GLOO_SOCKET_IFNAME={DEVICE}"]
        commands = [[*named, *spawn("[fd00::1]", rank)] for rank in range(2)]
        with job(hosts, tmp_path, commands, *BASE) as nodes:
            assert [node.end() for node in nodes] == [0, 0], nodes[0].errors() + nodes[1].errors()
    assert_equals_one_device(tmp_path / "run", *BASE)


@pytest.mark.netns
@pytest.mark.slow
def test_lost_node_ends_the_job_which_goes_on_later(tmp_path):
    """Where the name of every host is 127.0.1.1, as on Debian: gloo would listen there; and where the clocks are a day apart."""
    with two_hosts(own_names=False) as hosts:
        commands = [spawn(hosts[0].address, rank) for rank in (0, 1)]
        commands[1] = ["env", f"PYTHONPATH={clock_ahead(tmp_path / 'clock')}", *commands[1]]
        with at_the_gate(hosts, tmp_path, commands) as (nodes, gate):
            send(nodes[1].processes(), signal.SIGKILL)
            gate.touch()
            assert nodes[0].end() == 1
            assert "Traceback" in nodes[0].errors(), "torch says which connection was lost"
            assert torch.load(tmp_path / "run" / "last.pt")["epoch"] == 1
        with job(hosts, tmp_path, commands, *GATED, "--resume", "auto") as nodes:
            assert [node.end() for node in nodes] == [0, 0], nodes[0].errors() + nodes[1].errors()
            assert "resumed at epoch 2, step 0" in nodes[0].output()
    assert_equals_one_device(tmp_path / "run", *BASE)


@pytest.mark.netns
@pytest.mark.slow
def test_elastic_job_goes_on_without_a_node(tmp_path):
    """Torchrun starts the ranks that are left again, from last.pt."""
    with two_hosts() as hosts:
        commands = [elastic(hosts[0].address, rank) for rank in (0, 1)]
        more = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with at_the_gate(hosts, tmp_path, commands, "--resume", "auto", **more) as (nodes, gate):
            send(nodes[1].processes(), signal.SIGKILL)
            gate.touch()
            assert nodes[0].end() == 0, nodes[0].errors()
    assert_equals_one_device(tmp_path / "run", *BASE)


def change_on_rank_1(name, change, rank):
    if rank == 1:
        wrap_in_task(name, change)


def shorter(build_datasets):
    training, evaluation = build_datasets()
    return torch.utils.data.Subset(training, range(len(training) - 1)), evaluation


def reversed_parameters(build_net):
    """As a loop over a `set` of names makes them."""
    net = build_net()
    for module in net.modules():
        parameters = dict(module.named_parameters(recurse=False))
        for name in parameters:
            delattr(module, name)
        for name, parameter in reversed(parameters.items()):
            setattr(module, name, parameter)
    return net


def reversed_training(build_datasets):
    """As files would be in the order of another file system."""
    training, evaluation = build_datasets()
    training = torch.utils.data.Subset(training, range(len(training))[::-1])
    training.classes = evaluation.classes
    return training, evaluation


def ranks(folder, *own, patch=None, common_options=()):
    """Two ranks of train_ddp.py, of which the second has options of its own; return their (exit code, stdout, stderr)."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        argv = [*BASE, *common_options, "--output-dir", str(folder / "run")]
        both = ([*argv, *(own if rank else ())] for rank in (0, 1))
        targets = [
            functools.partial(
                rank_of_run, "ddp", rank, 2, argv, str(scratch / "meet"), scratch / "none", 0, patch
            )
            for rank, argv in enumerate(both)
        ]
        return run_processes(targets, scratch)


@pytest.mark.parametrize(
    ("own", "change", "words"),
    [
        # would train on, to a wrong result
        (["--seed", "1"], (), "--seed is 0 on rank 0, but 1 on rank 1; all nodes need the same"),
        ([], ("build_datasets", shorter), "training samples is 203 on rank 0, but 202 on rank"),
        ([], ("build_net", reversed_parameters), "the order of parameters is "),
    ],
    ids=["seed", "training set", "parameters"],
)
def test_ranks_that_mean_different_runs_are_told(own, change, words, tmp_path):
    patch = functools.partial(change_on_rank_1, *change) if change else None
    for i, (code, _, err) in enumerate(ranks(tmp_path, *own, patch=patch)):
        assert code == 2 and (i or words in err), err
    assert not (tmp_path / "run").exists()


def test_other_samples_on_a_node_are_a_warning(tmp_path):
    """A file may be decoded into other pixels there. Files in another order look the same."""
    patch = functools.partial(change_on_rank_1, "build_datasets", reversed_training)
    (code, out, err), (code1, out1, _) = ranks(
        tmp_path, patch=patch, common_options=["--epochs", "1"]
    )
    assert code == code1 == 0, err
    warning = "warning: rank 1 reads other samples than rank 0: are the files the same?"
    assert out.count(warning) == 1 and warning not in out1


def alone_on_its_node(rank):
    """Each rank is the first of a node of its own."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")


def stopped_with_ruined_weights(rank):
    alone_on_its_node(rank)
    stop_after(5, rank)
    machinery.run.RunFiles.write_checkpoint = lambda *_: "non-finite values in weight"


def test_stop_that_was_not_saved_is_not_called_saved_on_any_node(tmp_path):
    for code, _, err in ranks(tmp_path, patch=stopped_with_ruined_weights):
        assert code == 3 and "is not saved, the last" in err.splitlines()[-1], err


def option_of_the_task(rank):
    load = machinery.usertask.Task.__init__

    def adding(task, args):
        args.cache = f"/scratch/{rank}"
        load(task, args)

    machinery.usertask.Task.__init__ = adding


def test_what_belongs_to_a_node_may_differ(tmp_path):
    """Also what a task puts into its arguments."""
    own = ["--workers", "1", "--output-dir", str(tmp_path / "other")]
    more = {"patch": option_of_the_task, "common_options": ["--epochs", "1"]}
    for code, _, err in ranks(tmp_path, *own, **more):
        assert code == 0, err


def at_an_address(port, rank):
    """Let the ranks meet as on several nodes."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(address, LOCAL_RANK="0", LAUNCH_RENDEZVOUS_FILE="")


# In torch's own words: on rank 0, on the others.
NOT_MET = ("1/2 clients joined", "timed out after 3000ms while trying to connect to (127.0.0.1,")


@pytest.mark.full
def test_rank_that_cannot_start_does_not_leave_the_other_waiting(tmp_path):
    own = ["--weights", str(tmp_path / "none")]
    more = {"patch": functools.partial(at_an_address, free_port())}
    (code, _, err), (code1, _, err1) = ranks(
        tmp_path, *own, **more, common_options=["--timeout", "3"]
    )
    assert code1 == 2 and "--weights" in err1
    assert code == machinery.process.FAILED  # of which a launcher makes 1
    assert NOT_MET[0] in err


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_spawned_ranks_whose_partners_never_come_say_so(rank, tmp_path):
    place = f"--nproc 1 --nnodes 2 --node-rank {rank} --dist-url tcp://127.0.0.1:{free_port()}"
    argv = [*BASE, *place.split(), "--timeout", "3", "--output-dir", str(tmp_path / "run")]
    target = functools.partial(spawn_launcher, argv)
    ((code, _, err),) = run_processes([target], tmp_path, timeout=60)
    assert code == 1 and NOT_MET[rank] in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--node-rank 2 --dist-url tcp://10.0.0.1:7", "--node-rank 2 must be below --nnodes 2"),
        ("--node-rank 1", "needs --node-rank, which counts machines from 0, and --dist-url"),
        ("--node-rank 1 --dist-url tcp://fd00::1:7", "--dist-url: must be tcp://HOST:PORT"),
    ],
)
def test_several_nodes_are_checked_before_anything_is_started(options, words, monkeypatch):
    monkeypatch.setattr(train_spawn.mp, "spawn", lambda *_, **__: pytest.fail("was started"))
    with pytest.raises(common.UsageError, match=words):
        train_spawn.main(["--nnodes", "2", *options.split(), *BASE])


@pytest.mark.full
def test_signal_to_one_launcher_stops_all_of_them(tmp_path):
    """And at once: a launcher whose ranks have ended with 0 would wait five minutes for the one that the signal has ended."""
    port, gate = free_port(), tmp_path / "gate"
    options = (*GATED, "--output-dir", str(tmp_path / "run"))
    with contextlib.ExitStack() as stack:
        nodes = []
        for rank in (0, 1):
            (tmp_path / str(rank)).mkdir()
            node = Launch(
                spawn("127.0.0.1", rank, port),
                tmp_path / str(rank),
                *options,
                stdout=subprocess.DEVNULL,
                GATE=str(gate),
                GATE_AT="9",
            )
            nodes.append(stack.enter_context(node))
        nodes[0].wait_until(lambda: all((tmp_path / f"gate-{rank}").exists() for rank in (0, 1)))
        send([nodes[1].process.pid], signal.SIGUSR1)
        gate.touch()
        assert [node.end(timeout=60) for node in nodes] == [0, 0]
        for node in nodes:
            assert "stopped by SIGUSR1 after saving step" in node.errors().splitlines()[-1]


# -------------------------------------------------------------------------------------- Kubernetes

PODS, PER_POD = 2, 2


def variables(pod, port):
    """What a PyTorchJob of Kubeflow sets in a pod, as docs/multinode.md says."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    pet = {"NNODES": str(PODS), "NPROC_PER_NODE": str(PER_POD), "NODE_RANK": str(pod), **place}
    own = {**place, "RANK": str(pod), "WORLD_SIZE": str(PODS)}
    return own | {f"PET_{name}": value for name, value in pet.items()}


@pytest.mark.slow
def test_pods_of_kubeflow_are_one_device(tmp_path):
    """The page's own command, as a shell starts it in each of two pods, here on one machine."""
    page = (ROOT / "docs" / "multinode.md").read_text()
    section = page.split("\n## Kubernetes\n")[1].split("\n## ")[0]
    text = re.findall(r"```bash\n(torchrun .*)\n```", section)[0]
    text = text.replace("/shared/run --resume auto", str(tmp_path / "run"))
    assert "train_ddp.py" in text
    port, pods = free_port(), []
    with contextlib.ExitStack() as stack:
        for pod in range(PODS):
            folder = tmp_path / f"pod{pod}"
            folder.mkdir()
            command = ["timeout", "400", "bash", "-c", f'exec {text} "$@"', "pod", *BASE]
            more = ["--output-dir", str(tmp_path / "run")]
            launch = Launch(command, folder, *more, **variables(pod, port))
            pods.append(stack.enter_context(launch))
        out = pods[0].process.stdout.read()
        codes = [pod.end() for pod in pods]
        assert codes == [0, 0], "".join(pod.errors() for pod in pods)
    assert "train_ddp.py on 4 x cpu" in out
    assert_equals_one_device(tmp_path / "run", *BASE)


def test_pod_without_torchrun_is_refused(monkeypatch):
    """The RANK of a PyTorchJob is that of the pod: to train with it would be wrong in silence."""
    for name, value in variables(1, 29500).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(common.UsageError, match=r"no launcher has set RANK, .* \('LOCAL_RANK'\)"):
        common.ranks_from_env()
