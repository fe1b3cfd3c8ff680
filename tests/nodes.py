"""Two hosts on one machine: network namespaces with names, addresses and a link of their own. Linux, root and iproute2 make them."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import Result, compare, single_run
from launches import ROOT, Launch, send, wait_for_end, without_gloo

DEVICE, PREFIX = "link0", "data-parallel-test-"  # in each of the two, and before their names
NAMES = itertools.count()
PORT = 29500  # each pair of hosts has its own
ENTER = 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"'  # what becomes of the process is the command itself: same id, same parent


def ip(*words: str) -> str:
    """Run ip; return what it prints, raise with its words if it fails."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


def missing() -> str:
    """Return what keeps this machine from having two hosts; nothing if it can."""
    absent = [name for name in ("ip", "unshare") if not shutil.which(name)]
    if os.geteuid() or absent:
        return f"two hosts need {'root' if os.geteuid() else f'{absent[0]}: apt-get install iproute2 util-linux'}"
    probe = f"{PREFIX}{os.getpid()}-probe"
    veth = f"ip -netns {probe} link add {DEVICE} type veth peer name link1"
    trial = f"ip netns add {probe} && ip netns exec {probe} unshare --uts true && {veth}"
    allowed = subprocess.run(["sh", "-c", trial], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True)
    return "" if allowed else "two hosts need network namespaces, which are not allowed here"


@dataclass
class Host:
    """A namespace; `name` is also the host name that its processes see, and that both hosts resolve to `address`."""

    name: str
    address: str

    def command(self, *command: str) -> list[str]:
        """What to start so that `command` runs on this host."""
        start = ["ip", "netns", "exec", self.name, *"unshare --uts sh -c".split()]
        return [*start, ENTER, self.name, *command]

    def processes(self) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]


@contextlib.contextmanager
def two_hosts(
    own_names: bool = True, addresses: tuple[str, str] = ("10.77.0.1", "10.77.0.2")
) -> Iterator[tuple[Host, Host]]:
    """Two hosts joined by a cable; all that is left on them is killed at the end.

    Without `own_names` a host's name is that of this machine, which /etc/hosts often gives to the loopback, as Debian does.
    """
    remove_leftovers()
    # the two can be alike in all tests that run side by side: only the names are seen from outside
    name = f"{PREFIX}{os.getpid()}-{next(NAMES)}"
    hosts = tuple(Host(f"{name}-{i}", address) for i, address in enumerate(addresses))
    with contextlib.ExitStack() as stack:
        for host in hosts:
            stack.callback(remove, host.name)
            ip("netns", "add", host.name)
            folder = Path("/etc/netns", host.name)  # `ip netns exec` shows its files in /etc
            folder.mkdir(parents=True)
            known = [f"{o.address if own_names else '127.0.1.1'} {o.name}" for o in hosts]
            (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        ends = [f"{DEVICE} netns {host.name}".split() for host in hosts]
        ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for host in hosts:
            address = (
                [f"{host.address}/64", "nodad"] if ":" in host.address else [f"{host.address}/24"]
            )
            ip("-netns", host.name, "address", "add", *address, "dev", DEVICE)
            for device in ("lo", DEVICE):
                ip("-netns", host.name, "link", "set", device, "up")
        yield hosts


def remove(name: str) -> None:
    """End all that runs in a namespace, and the namespace; its devices go with it."""
    with contextlib.suppress(AssertionError):  # it was not made
        left = Host(name, "").processes()
        send(left, signal.SIGKILL)
        wait_for_end(left, 10)
        ip("netns", "delete", name)
    shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)


def remove_leftovers() -> None:
    """Remove what a test process that was killed has left."""
    for name in re.findall(rf"^({PREFIX}\d+-\d+-[01])\b", ip("netns", "list"), re.MULTILINE):
        if not Path("/proc", name.removeprefix(PREFIX).split("-")[0]).exists():
            remove(name)


class Node(Launch):
    """A launch on one host, whose output goes into a file."""

    def __init__(
        self, host: Host, folder: Path, command: list[str], *options: str, **environment: str
    ) -> None:
        self.name = folder / f"node{host.name[-1]}"
        self.name.mkdir(parents=True, exist_ok=True)
        options = (*options, "--output-dir", str(folder / "run"))
        with open(self.name / "out", "w") as out:
            super().__init__(host.command(*command), self.name, *options, stdout=out, **environment)

    def output(self) -> str:
        return without_gloo((self.name / "out").read_text())


@contextlib.contextmanager
def job(
    hosts: tuple[Host, ...], folder: Path, commands: list, *options: str, **environment: str
) -> Iterator[list[Node]]:
    """Launches on the hosts, both writing to one folder, as on a shared file system."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(Node(host, folder, command, *options, **environment))
            for host, command in zip(hosts, commands)
        ]


def assert_equals_one_device(folder: Path, *options: str) -> None:
    """Fail unless a job has left what one device leaves: the same numbers, and every line of the log once."""
    result, reference = Result(0, "", "", folder), single_run(*options)
    assert max(compare(result, reference).values()) <= 1e-10
    ours, theirs = (
        [(line["event"], line["global_step"]) for line in run.lines] for run in (result, reference)
    )
    assert ours == theirs
    assert not list(folder.glob(".*")), "a temporary file is left"


def spawn(address: str, rank: int, port: int = PORT) -> list[str]:
    options = f"spawn 1 --nnodes 2 --node-rank {rank} --dist-url tcp://{address}:{port}"
    return ["bash", str(ROOT / "run.sh"), *options.split()]
