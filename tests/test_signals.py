"""Real signals to real launches: saved at a step boundary, the exit code says which signal it was, nothing is left running."""

import os
import re
import signal
import subprocess
import sys

import pytest
from launches import ROOT, TASKS, Launch, listening, read

OPTIONS = [
    "--task",
    str(TASKS / "small.py"),
    "--batch-size",
    "30",
    "--epochs",
    "10000",
    "--log-every",
    "6",
]
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 0}
LAUNCHES = {
    "single": ["bash", "run.sh", "single", *OPTIONS],
    "spawn": ["bash", "run.sh", "spawn", "2", *OPTIONS],
    "ddp": ["bash", "run.sh", "ddp", "2", *OPTIONS],
}


def assert_only_this_machine_can_reach(launch):
    ranks = [pid for pid in launch.ranks() if pid != launch.process.pid]
    assert set(listening(launch.processes()).values()) == ({"127.0.0.1"} if ranks else set())
    # where the machine's own name is not that of the loopback
    assert all("GLOO_SOCKET_IFNAME=lo\0" in read(pid, "environ") for pid in ranks)


@pytest.mark.parametrize(
    ("mode", "workers", "number"),
    [("single", 0, signal.SIGTERM.value), ("ddp", 2, signal.SIGUSR1.value)],
)
def test_signal_to_the_launcher_saves_and_ends_with_its_code(mode, workers, number, tmp_path):
    """Of a launcher of spawned processes: pitfall 39."""
    with Launch(LAUNCHES[mode], tmp_path, "--workers", str(workers)) as launch:
        launch.wait_for("epoch 3/.* step 6/6")
        assert_only_this_machine_can_reach(launch)
        launch.process.send_signal(number)
        assert launch.end() == CODES[number], launch.errors()
        saved = launch.checkpoint()
        assert saved["global_step"] > 12 and not list((tmp_path / "run").glob(".*tmp*"))
        message = f"stopped by {signal.Signals(number).name} after saving step {saved['global_step']} (exit code {CODES[number]})"
        assert launch.errors().rstrip().endswith(message), "the last line says what happened"


@pytest.mark.long
def test_ctrl_c_reaches_the_whole_process_group(tmp_path):
    with Launch(LAUNCHES["ddp"], tmp_path) as launch:
        launch.wait_for("epoch 3/.* step 6/6")
        os.killpg(launch.process.pid, signal.SIGINT)
        assert launch.end() == 130, launch.errors()
        assert launch.checkpoint()["global_step"] > 12


def test_ctrl_c_to_run_sh_while_it_waits_for_a_command_is_not_forgotten(tmp_path):
    """Bash itself forgets a SIGINT, if the command that it waits for ends well: here, how many devices there are."""
    with Launch(["bash", "run.sh", "ddp", *OPTIONS], tmp_path) as launch:
        launch.wait_until(
            lambda: any("device_count" in read(pid, "cmdline") for pid in launch.processes())
        )
        launch.process.send_signal(signal.SIGINT)
        assert launch.end() == 130, launch.errors()
        assert not (tmp_path / "run").exists()


def test_signal_to_one_rank_stops_all_ranks_at_the_same_step(tmp_path):
    with Launch(LAUNCHES["ddp"], tmp_path) as launch:
        launch.wait_for("epoch 3/.* step 6/6")
        os.kill(launch.ranks()[1], signal.SIGTERM)
        assert launch.end() == 143, launch.errors()
        assert launch.checkpoint()["global_step"] > 12
        assert "restart" not in launch.errors().lower(), "a stop that was asked for is no failure"


def catches(pid, number):
    mask = re.search(r"SigCgt:\s*(\w+)", read(pid, "status"))
    return bool(mask) and bool(int(mask[1], 16) & 1 << number - 1)


@pytest.mark.parametrize(
    ("mode", "send"), [("spawn", os.kill), ("ddp", os.kill), ("ddp", os.killpg)]
)
def test_ctrl_c_while_ranks_start_is_answered_without_a_traceback(mode, send, tmp_path):
    """A Python that has just begun knows no handler of ours; and what it was told must not be forgotten."""
    with Launch(LAUNCHES[mode], tmp_path) as launch:
        launch.wait_until(lambda: any(catches(pid, signal.SIGINT) for pid in launch.ranks()))
        send(launch.process.pid, signal.SIGINT)
        assert launch.end() == 130, launch.errors()
        assert launch.errors().rstrip().endswith("stopped by SIGINT with nothing to save")
        assert "Traceback" not in launch.errors() and not (tmp_path / "run").exists()


@pytest.mark.long
def test_signal_to_one_rank_before_training_ends_the_run_and_restarts_nothing(tmp_path):
    (tmp_path / "task.py").write_text(
        "import os\nfrom small import *\nfrom small import build_model as build\n"
        "def build_model(args):\n    os.environ.get('RANK') == '1' and os.kill(os.getpid(), 2)\n    return build(args)\n"
    )
    environment = {"PYTHONPATH": str(ROOT / "tests" / "tasks")}
    with Launch(
        LAUNCHES["ddp"], tmp_path, "--task", str(tmp_path / "task.py"), **environment
    ) as launch:
        assert launch.end() == 1, launch.errors()  # nobody has asked the launcher to stop
        assert launch.errors() == "train_ddp.py: process 1 was killed by SIGINT\n"
        assert "Traceback" not in launch.errors(), "of the rank that lost its connection"


@pytest.mark.parametrize("mode", ["ddp", "spawn"])
def test_ranks_that_wait_before_training_end_with_the_launcher(mode, tmp_path):
    """Whatever they do: what was called may ignore signals, or hold the interpreter, so that no handler of ours is heard."""
    (tmp_path / "task.py").write_text(
        "import os, signal, time\nfrom small import *\nfrom small import build_model as build\n"
        "def build_model(args):\n"
        "    if 'LOCAL_RANK' in os.environ:\n"
        "        signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "        open(os.path.join(os.path.dirname(__file__), 'waits'), 'w').close()\n"
        "        time.sleep(1000)\n"
        "    return build(args)\n"
    )
    environment = {"PYTHONPATH": str(ROOT / "tests" / "tasks")}
    with Launch(
        LAUNCHES[mode],
        tmp_path,
        "--task",
        str(tmp_path / "task.py"),
        stdout=subprocess.DEVNULL,
        **environment,
    ) as launch:
        launch.wait_until((tmp_path / "waits").exists)
        assert_only_this_machine_can_reach(launch)
        launch.process.kill()
        assert launch.end() == 137


def test_rank_that_waits_for_another_in_c_answers_signals(tmp_path):
    """Python would call no handler while init_process_group waits; until training begins a signal needs none."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "task.py").write_text(
        "import os, time\nfrom small import *\nfrom small import build_datasets as build\n"
        "def build_datasets(args):\n    os.environ.get('RANK') == '1' and time.sleep(1000)\n    return build(args)\n"
    )
    environment = {"PYTHONPATH": str(ROOT / "tests" / "tasks"), "TMPDIR": str(tmp_path / "tmp")}
    with Launch(
        LAUNCHES["ddp"], tmp_path, "--task", str(tmp_path / "task.py"), **environment
    ) as launch:
        launch.wait_until(
            lambda: any(path.stat().st_size for path in (tmp_path / "tmp").glob("*/ranks-*"))
        )  # rank 0 left its address
        launch.process.send_signal(signal.SIGUSR1)
        assert launch.end() == 138, launch.errors()
        assert launch.errors() == "train_ddp.py: stopped by SIGUSR1 with nothing to save\n"


def test_signal_when_all_is_done_changes_nothing(tmp_path):
    """Such as a Ctrl-C for a launcher that only has to remove its temporary folder."""
    (tmp_path / "late.py").write_text(
        "import os, signal, sys, tempfile\nimport machinery.launch, machinery.processes\n"
        "cleanup = tempfile.TemporaryDirectory.cleanup\n"
        "def late(folder):\n    os.kill(os.getpid(), signal.SIGTERM)\n    cleanup(folder)\n    print('cleared up')\n"
        "tempfile.TemporaryDirectory.cleanup = late\n"
        "sys.exit(machinery.processes.run_main(machinery.launch.main))\n"
    )
    command = [sys.executable, str(tmp_path / "late.py"), "1", *OPTIONS[:4], "--epochs", "1"]
    with Launch(command, tmp_path, PYTHONPATH=str(ROOT)) as launch:
        launch.wait_for("cleared up")
        assert (launch.end(), launch.errors()) == (0, "")


def test_sigusr2_shows_the_stacks_of_a_rank_and_lets_it_train_on(tmp_path):
    """To see where a run hangs."""
    (tmp_path / "task.py").write_text(
        "import os, threading\nfrom small import *\nfrom small import build_model as build\n"
        "def wait_here():\n    threading.Event().wait()\n"
        "def build_model(args):\n"
        "    os.environ.get('RANK') == '1' and threading.Thread(target=wait_here, daemon=True).start()\n"
        "    return build(args)\n"
    )
    environment = {"PYTHONPATH": str(ROOT / "tests" / "tasks")}
    task = ["--task", str(tmp_path / "task.py")]
    with Launch(LAUNCHES["ddp"], tmp_path, *task, **environment) as launch:
        launch.wait_for("epoch 3/.* step 6/6")
        os.kill(launch.ranks()[1], signal.SIGUSR2)
        launch.wait_until(lambda: launch.errors().rstrip().endswith("in <module>"))
        stacks = launch.errors()
        assert (
            len(
                re.findall(
                    r"^(Current thread|Thread) 0x\w+ .*most recent call first", stacks, re.MULTILINE
                )
            )
            >= 2
        )
        assert re.search(r'File ".*/train_ddp.py", line \d+ in main$', stacks, re.MULTILINE), stacks
        assert re.search(r'File ".*/task.py", line \d+ in wait_here$', stacks, re.MULTILINE), (
            "of all its threads"
        )
        read_so_far = len(stacks)
        launch.wait_for("epoch 5/.* step 6/6")
        launch.process.send_signal(signal.SIGTERM)
        assert launch.end() == 143, launch.errors()
        assert launch.checkpoint()["global_step"] > 24
        assert launch.errors()[read_so_far:].count("\n") == 1, "what was saved"
