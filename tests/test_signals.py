"""Real signals to real launches: saved at a step boundary, the exit code says which signal it was, nothing is left running."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from harness import run_processes, train
from launches import ROOT, TASKS, Launch, listening, read
from pitfalls import in_process

import common

OPTIONS = ["--task", str(TASKS / "small.py"), "--batch-size", "30", "--epochs", "10000", "--log-every", "6"]
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


@pytest.mark.parametrize(("mode", "workers", "number"), [("single", 0, signal.SIGTERM.value), ("ddp", 2, signal.SIGUSR1.value)])
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


@pytest.mark.parametrize("script", ["train_single.py", "train_dp.py", "train_ddp.py", "train_spawn.py", "launch.py"])
def test_ctrl_c_ends_the_import_of_torch(script, tmp_path):
    """Python would print a traceback, of every rank, for the seconds that the import takes."""
    command = [sys.executable, str(ROOT / script), "1"]
    with Launch(command, tmp_path) as launch:
        launch.wait_until(lambda: "libtorch" in read(launch.process.pid, "maps"))
        launch.process.send_signal(signal.SIGINT)
        assert (launch.end(), launch.errors()) == (130, "")


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
        launch.wait_until(lambda: any("device_count" in read(pid, "cmdline") for pid in launch.processes()))
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


def test_ctrl_c_while_spawned_processes_start_is_answered_without_a_traceback(tmp_path):
    """A Python that has just begun knows no handler of ours; and what it was told must not be forgotten."""
    with Launch(LAUNCHES["spawn"], tmp_path) as launch:
        launch.wait_until(lambda: any(catches(pid, signal.SIGINT) for pid in launch.ranks()))
        launch.process.send_signal(signal.SIGINT)
        assert launch.end() == 130, launch.errors()
        assert "Traceback" not in launch.errors() and not (tmp_path / "run").exists()


@pytest.mark.long
def test_signal_to_one_rank_before_training_ends_the_run_and_restarts_nothing(tmp_path):
    (tmp_path / "task.py").write_text(
        "import os\nfrom small import *\nfrom small import build_model as build\n"
        "def build_model(args):\n    os.environ.get('RANK') == '1' and os.kill(os.getpid(), 2)\n    return build(args)\n"
    )
    environment = {"PYTHONPATH": str(ROOT / "tests" / "tasks")}
    with Launch(LAUNCHES["ddp"], tmp_path, "--task", str(tmp_path / "task.py"), **environment) as launch:
        assert launch.end() == 130, launch.errors()
        assert launch.errors().rstrip().endswith("train_ddp.py: stopped by SIGINT with nothing to save")
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
    with Launch(LAUNCHES[mode], tmp_path, "--task", str(tmp_path / "task.py"), stdout=subprocess.DEVNULL, **environment) as launch:
        launch.wait_until((tmp_path / "waits").exists)
        assert_only_this_machine_can_reach(launch)
        launch.process.kill()
        assert launch.end() == 137


def test_rank_that_waits_for_another_in_c_answers_signals(tmp_path):
    """Python calls no handler while init_process_group waits, and torchrun kills what does not end, but only after half a minute."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "task.py").write_text(
        "import os, time\nfrom small import *\nfrom small import build_datasets as build\n"
        "def build_datasets(args):\n    os.environ.get('RANK') == '1' and time.sleep(1000)\n    return build(args)\n"
    )
    environment = {"PYTHONPATH": str(ROOT / "tests" / "tasks"), "TMPDIR": str(tmp_path / "tmp")}
    with Launch(LAUNCHES["ddp"], tmp_path, "--task", str(tmp_path / "task.py"), **environment) as launch:
        launch.wait_until(lambda: any(path.stat().st_size for path in (tmp_path / "tmp").glob("*/ranks-*")))  # rank 0 left its address
        launch.process.send_signal(signal.SIGUSR1)
        assert launch.end() == 138, launch.errors()
        assert "forcefully exiting" not in launch.errors() and "Traceback" not in launch.errors()


def test_signal_to_a_forked_process_of_the_task_does_not_end_the_run(tmp_path):
    """A pool of processes ends its own by SIGTERM; they have the pipe from which signals are answered."""
    (tmp_path / "task.py").write_text(
        "import os, signal\nfrom small import *\nfrom small import build_datasets as build\n"
        "def build_datasets(args):\n"
        "    if (child := os.fork()) == 0:\n        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
        "        while True: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.waitpid(child, 0)\n    return build(args)\n"
    )
    result = train("single", 1, *OPTIONS[:4], "--epochs", "1", "--task", tmp_path / "task.py", folder=tmp_path)
    assert (result.code, result.err) == (0, "")


def end_while_nobody_reads():
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
    common.exit_code(lambda: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(100))


def test_signal_ends_a_run_that_cannot_say_so(tmp_path):
    """As Ctrl-C ends what reads the messages too."""
    ((code, _, _),) = run_processes([end_while_nobody_reads], tmp_path, timeout=20)
    assert code == 143


def print_which_threads_block_signals():
    def main():
        for thread in threading.enumerate():
            mask = int(re.search(r"SigBlk:\s*(\w+)", read(os.getpid(), f"task/{thread.native_id}/status"))[1], 16)
            print(thread is threading.main_thread(), [bool(mask >> number - 1 & 1) for number in CODES])
        return 0

    return common.exit_code(main)


def test_only_the_main_thread_takes_signals():
    """Or those that it blocks while it starts processes would end the run at once, and leave what it started."""
    lines = in_process(print_which_threads_block_signals).splitlines()
    assert sorted(lines) == ["False [True, True, True]", "True [False, False, False]"]


def test_signal_when_all_is_done_changes_nothing(tmp_path):
    """While the launcher removes its temporary folder torchrun's handlers would still be there, and end it with a traceback."""
    (tmp_path / "late.py").write_text(
        "import os, signal, sys, tempfile\nimport launch\n"
        "cleanup = tempfile.TemporaryDirectory.cleanup\n"
        "def late(folder):\n    os.kill(os.getpid(), signal.SIGTERM)\n    cleanup(folder)\n    print('cleared up')\n"
        "tempfile.TemporaryDirectory.cleanup = late\n"
        "sys.exit(launch.exit_code(launch.main))\n"
    )
    command = [sys.executable, str(tmp_path / "late.py"), "1", *OPTIONS[:4], "--epochs", "1"]
    with Launch(command, tmp_path, PYTHONPATH=str(ROOT)) as launch:
        launch.wait_for("cleared up")
        assert (launch.end(), launch.errors()) == (0, "")
