"""Signals, real ones and many: saved at a step boundary, the exit code says which signal it was, nothing is left running."""

import functools
import itertools
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from harness import in_group, train
from launches import ROOT, TASKS, Launch, listening, read, treats
from patches import BASE, Patches, after_step, call_in_task, without_speed
from runs import make_run, make_step, start_epoch
from short_runs import EVERYTHING

import machinery.cli
import machinery.launch
import machinery.process
import machinery.run

OPTIONS = [
    "--task",
    str(TASKS / "small.py"),
    *"--batch-size 30 --epochs 10000 --log-every 6".split(),
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
    [
        ("single", 0, signal.SIGTERM.value),
        pytest.param("ddp", 2, signal.SIGUSR1.value, marks=pytest.mark.long),
    ],
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
def test_ctrl_c_to_run_sh_while_it_waits_for_a_command_is_not_forgotten(tmp_path):
    """Bash itself forgets a SIGINT, if the command that it waits for ends well: here, how many devices there are."""
    with Launch(["bash", "run.sh", "ddp", *OPTIONS], tmp_path) as launch:
        launch.wait_until(
            lambda: any("device_count" in read(pid, "cmdline") for pid in launch.processes())
        )
        launch.process.send_signal(signal.SIGINT)
        assert launch.end() == 130, launch.errors()
        assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_signal_to_one_rank_stops_all_ranks_at_the_same_step(tmp_path):
    with Launch(LAUNCHES["ddp"], tmp_path) as launch:
        launch.wait_for("epoch 3/.* step 6/6")
        os.kill(launch.ranks()[1], signal.SIGTERM)
        assert launch.end() == 143, launch.errors()
        assert launch.checkpoint()["global_step"] > 12
        assert "restart" not in launch.errors().lower(), "a stop that was asked for is no failure"


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "send"),
    [
        ("spawn", os.kill),
        pytest.param("ddp", os.kill, marks=pytest.mark.release),
        ("ddp", os.killpg),
    ],
)
def test_ctrl_c_while_ranks_start_is_answered_without_a_traceback(mode, send, tmp_path):
    """A Python that has just begun knows no handler of ours; and what it was told must not be forgotten."""
    with Launch(LAUNCHES[mode], tmp_path) as launch:
        launch.wait_until(
            lambda: any(treats(pid, signal.SIGINT, "SigCgt") for pid in launch.ranks())
        )
        send(launch.process.pid, signal.SIGINT)
        assert launch.end() == 130, launch.errors()
        assert launch.errors().rstrip().endswith("stopped by SIGINT with nothing to save")
        assert "Traceback" not in launch.errors() and not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", pytest.param("spawn", marks=pytest.mark.release)])
def test_ranks_that_wait_before_training_end_with_the_launcher(mode, tmp_path):
    """Whatever they do: what was called may ignore signals, or hold the interpreter, so that no handler of ours is heard."""
    (tmp_path / "task.py").write_text(
        "import os, signal, time, torch\nfrom small import *\n"
        "def build_optimizer(args, net):\n"
        "    if torch.distributed.is_initialized():\n"
        "        signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "        open(os.path.join(os.path.dirname(__file__), 'waits'), 'w').close()\n"
        "        time.sleep(1000)\n"
        "    return torch.optim.SGD(net.parameters(), lr=args.lr)\n"
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


@pytest.mark.release
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


@pytest.mark.long
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
    task = ["--task", str(tmp_path / "task.py"), "--workers", "1"]
    with Launch(LAUNCHES["ddp"], tmp_path, *task, **environment) as launch:
        launch.wait_for("epoch 3/.* step 6/6")
        rank = launch.ranks()[1]
        for worker in launch.workers():
            os.kill(worker, signal.SIGUSR2)  # which is not for it: it neither ends nor prints
        os.kill(rank, signal.SIGUSR2)
        ends = ("in <module>", "restart 1")  # restart: the signal was the end of the rank
        launch.wait_until(lambda: launch.errors().rstrip().endswith(ends))
        stacks = launch.errors()
        assert (
            len(
                re.findall(
                    r"^(Current thread|Thread) 0x\w+ .*most recent call first", stacks, re.MULTILINE
                )
            )
            >= 2
        )
        mains = re.findall(r'File ".*/train_ddp.py", line \d+ in main$', stacks, re.MULTILINE)
        assert len(mains) == 1, stacks
        assert re.search(r'File ".*/task.py", line \d+ in wait_here$', stacks, re.MULTILINE), (
            "of all its threads"
        )
        read_so_far = len(stacks)
        launch.wait_for("epoch 5/.* step 6/6")
        launch.process.send_signal(signal.SIGTERM)
        assert launch.end() == 143, launch.errors()
        assert launch.checkpoint()["global_step"] > 24
        assert launch.errors()[read_so_far:].count("\n") == 1, "what was saved"


# ----------------------------------------------------------------------------------- at bad moments


def interrupt(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", machinery.process.SIGNALS)
def test_signal_before_training_ends_the_run_at_once(number, tmp_path):
    """By what the system does, without words: nothing can be lost yet."""
    patch = functools.partial(
        call_in_task, "build_datasets", 0, functools.partial(interrupt, number)
    )
    result = train("single", 1, *BASE, folder=tmp_path, patch=patch)
    assert (result.code, result.err) == (-number, "")
    assert not result.folder.exists()


def look(path):
    print("saved:", path.exists() and torch.load(path)["step"])


def test_signal_in_the_last_step_of_an_epoch_saves_before_the_evaluation(tmp_path):
    """The ranks would agree on it in the next step, which comes after the evaluation."""
    stop = functools.partial(
        call_in_task, "per_sample_loss", 5, functools.partial(interrupt, signal.SIGTERM)
    )
    watch = functools.partial(
        call_in_task, "per_sample_metrics", 0, functools.partial(look, tmp_path / "run" / "last.pt")
    )
    result = train("ddp", 1, *EVERYTHING, folder=tmp_path, patch=Patches(stop, watch))
    assert result.code == 143 and "saved: 6" in result.out, result.out + result.err


def interrupt_and_look(path, size):
    os.kill(os.getpid(), signal.SIGTERM)
    print("saved before:", torch.load(path)["step"] == size)


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("ddp", 2)])
def test_signal_during_an_evaluation_finds_the_run_saved_and_stops_it_after_the_evaluation(
    mode, n, tmp_path
):
    """An evaluation may take longer than the seconds that a scheduler, or torchrun, gives a run to end."""
    straight = train(mode, n, *EVERYTHING, folder=tmp_path / "straight")
    last = tmp_path / "run" / "last.pt"
    patch = functools.partial(
        call_in_task, "per_sample_metrics", 1, functools.partial(interrupt_and_look, last, 6)
    )
    stopped = train(mode, n, *EVERYTHING, folder=tmp_path, patch=patch)
    assert stopped.code == 143 and "saved before: True" in stopped.out, stopped.err
    saved = stopped.checkpoint()
    assert (saved["epoch"], saved["step"], saved["global_step"]) == (1, 0, 6)
    resumed = train(mode, n, *EVERYTHING, "--resume", "auto", folder=tmp_path)
    assert resumed.out.count("resumed at epoch") == 1, "rank 0 says it, and no other"
    assert without_speed(resumed.lines) == without_speed(straight.lines)
    assert all(
        tensor.equal(straight.checkpoint()["model"][name])
        for name, tensor in resumed.checkpoint()["model"].items()
    )


def test_signal_in_the_last_evaluation_lets_the_run_end(tmp_path):
    patch = functools.partial(
        call_in_task, "per_sample_metrics", 2 * 8 + 3, functools.partial(interrupt, signal.SIGTERM)
    )
    result = train("single", 1, *EVERYTHING, folder=tmp_path, patch=patch)
    assert result.code == 0 and result.checkpoint()["epoch"] == 3, result.err


# ---------------------------------------------------------------------------------- several signals


USR1, INT, TERM = signal.SIGUSR1, signal.SIGINT, signal.SIGTERM
BY_STRENGTH = {
    USR1: 0,
    INT: 130,
    TERM: 143,
}  # the weakest first: SLURM's warning, the user, the system


def strongest(numbers):
    return max(numbers, key=list(BY_STRENGTH).index)


def agree_on(numbers, wait=False):
    """A signal, or none, for each rank; then all of them ask until they agree."""
    stop = machinery.run.StopSignal()
    assert stop.agreed() is None and stop.agreed() is None
    if number := numbers[dist.get_rank()]:
        os.kill(os.getpid(), number)
    answers = [stop.agreed(wait=wait) for _ in range(3)]
    dist.barrier()  # nobody is told of the next case while others still ask about this one
    return answers


def check_ranks():
    for numbers in [
        *itertools.permutations(BY_STRENGTH),
        (TERM, None, None),
        (None, None, USR1),
        (INT, USR1, None),
    ]:
        first, *others = agree_on(numbers)
        waited = agree_on(numbers, wait=True)
        assert waited == [strongest(filter(None, numbers))] * 3, (numbers, waited)
        assert first is None, "of the step before, in which nobody had been told"
        assert others == [strongest(filter(None, numbers))] * 2, (numbers, others)


def test_stronger_signal_wins_on_whichever_rank():
    in_group(3, check_ranks)


def signals_after_step_3(numbers, rank):
    """Each rank gets its own, in this order, within one step."""
    after_step(3, lambda: [os.kill(os.getpid(), number) for number in numbers[rank]])


@pytest.mark.parametrize(
    ("mode", "numbers", "winner"),
    [
        ("single", [(INT, TERM)], TERM),
        ("single", [(TERM, USR1)], TERM),
        ("dp", [(INT, USR1)], INT),
        ("ddp", [(USR1,), (INT,)], INT),
        ("spawn", [(TERM,), (USR1, INT)], TERM),
    ],
)
def test_run_ends_with_the_code_of_the_stronger_signal(mode, numbers, winner, tmp_path):
    patch = functools.partial(signals_after_step_3, numbers)
    result = train(mode, len(numbers) + (mode == "dp"), *BASE, folder=tmp_path, patch=patch)
    step = result.checkpoint()["global_step"]
    assert step == (3 if mode in ("single", "dp") else 4), "or one later, if ranks have to agree"
    assert result.code == BY_STRENGTH[winner]
    message = f"stopped by {winner.name} after saving step {step} (exit code {BY_STRENGTH[winner]})"
    said = [line for line in result.err.splitlines() if "stopped by" in line]
    assert said and all(line.endswith(message) for line in said), result.err


@pytest.mark.parametrize("number", BY_STRENGTH)
def test_stop_that_could_not_be_saved_says_so(number, handlers, tmp_path, capsys):
    run = make_run(tmp_path, "--log-every", "50")
    start_epoch(run)
    run.state.net.weight.data[0] = float("nan")
    os.kill(os.getpid(), number)
    with pytest.raises(machinery.process.Stopped) as stopped:
        make_step(run, [1.0])
    assert stopped.value.code == 3, "nothing that was lost is called done"
    assert stopped.value.reason == f"stopped by {number.name} at step 1, which was not saved"
    assert not (run.files.directory / "last.pt").exists()
    assert "non-finite values in weight" in capsys.readouterr().err


LATE = """
import os, signal, sys
from machinery.process import run_main
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=int(sys.argv[1])):
        kill(pid, number)
kept = Late()
sys.exit(run_main(lambda: 0))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGUSR1,
        *(
            pytest.param(number, marks=pytest.mark.release)
            for number in (signal.SIGINT, signal.SIGTERM)
        ),
    ],
)
def test_signal_in_pythons_last_clean_up_is_too_late(number):
    """The run is done, and its code is 0; Python has already taken its handlers away."""
    finished = subprocess.run(
        [sys.executable, "-c", LATE, str(int(number))], cwd=ROOT, capture_output=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
