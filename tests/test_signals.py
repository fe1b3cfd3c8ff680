"""Signals, real ones and many: saved at a step boundary, the exit code says which signal it was, nothing is left running."""

import functools
import itertools
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from harness import in_group, train
from launches import ROOT, TASKS, Launch, listening, read, send, treats
from patches import BASE, Patches, after_step, call_in_task
from runs import make_run, make_step, start_epoch
from short_runs import EVERYTHING

import machinery.process
import machinery.run

OPTIONS = f"--task {TASKS / 'small.py'} --batch-size 30 --epochs 10000 --log-every 6".split()
ORPHAN = f"""
import os, signal, sys
sys.path.insert(0, "{ROOT}")
import multiprocessing, torch, sampling

class Late:
    __len__ = lambda self: 10
    def __getitem__(self, index):
        return torch.zeros(1), 0

started = sampling.be_worker
def late(number):  # in the worker, just before it asks for a signal at its parent's death
    os.kill(os.getppid(), signal.SIGKILL)
    while os.getppid() == multiprocessing.parent_process().pid:
        pass
    started(number)
    print("outlives its rank", flush=True)
    os._exit(0)

sampling.be_worker = late
sampler = sampling.GlobalBatchSampler(Late(), 5, 0)
list(sampling.build_loader(Late(), sampler, torch.device("cpu"), 0, workers=1))
"""
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129, signal.SIGUSR1: 0}
# Of a launcher and a SLURM step around this one, half of them empty
LEFT_OVER = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "other", "LAUNCH_PID": "1"}
LEFT_OVER |= {"RANK": "7", "LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "0", "SLURM_CPUS_ON_NODE": ""}
LEFT_OVER |= {"LAUNCH_RENDEZVOUS_FILE": "/tmp/none", "PYTHONSAFEPATH": "1"}
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
        pytest.param("ddp", 2, signal.SIGUSR1.value, marks=pytest.mark.full),
        pytest.param("spawn", 2, signal.SIGINT.value, marks=pytest.mark.full),
    ],
)
def test_signal_to_the_launcher_saves_and_ends_with_its_code(mode, workers, number, tmp_path):
    with Launch(LAUNCHES[mode], tmp_path, "--workers", str(workers), **LEFT_OVER) as launch:
        launch.wait_for("epoch 3/.* step 6/6")
        assert_only_this_machine_can_reach(launch)
        if mode == "ddp":  # docs/hang.md
            known = [re.search(r"\0RANK=(\d)\0", read(pid, "environ"))[1] for pid in launch.ranks()]
            assert known == ["0", "1"]
        launch.process.send_signal(number)
        assert launch.end() == CODES[number], launch.errors()
        saved = launch.checkpoint()
        assert saved["global_step"] > 12 and not list((tmp_path / "run").glob(".*tmp*"))
        message = f"stopped by {signal.Signals(number).name} after saving step {saved['global_step']} (exit code {CODES[number]})"
        assert launch.errors().rstrip().endswith(message), "the last line says what happened"


@pytest.mark.full
def test_ctrl_c_to_run_sh_while_it_waits_for_a_command_is_not_forgotten(tmp_path):
    """Bash itself forgets a SIGINT, if the command that it waits for ends well: here, how many devices there are."""
    with Launch(["bash", "run.sh", "ddp", *OPTIONS], tmp_path) as launch:
        launch.wait_until(
            lambda: any("device_count" in read(pid, "cmdline") for pid in launch.processes())
        )
        launch.process.send_signal(signal.SIGINT)
        assert launch.end() == 130, launch.errors()
        assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.parametrize("mode", ["spawn", "ddp"])
def test_ctrl_c_while_ranks_start_is_answered_without_a_traceback(mode, tmp_path):
    """A Python that has just begun knows no handler of ours; and what it was told must not be forgotten."""
    with Launch(LAUNCHES[mode], tmp_path) as launch:
        launch.wait_until(
            lambda: any(treats(pid, signal.SIGINT, "SigCgt") for pid in launch.ranks())
        )
        os.killpg(launch.process.pid, signal.SIGINT)  # as a terminal does
        assert launch.end() == 130, launch.errors()
        assert launch.errors().rstrip().endswith("stopped by SIGINT with nothing new to save")
        assert "Traceback" not in launch.errors() and not (tmp_path / "run").exists()


@pytest.mark.full
def test_ranks_that_wait_before_training_end_with_the_launcher(tmp_path):
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
    task, path = ["--task", str(tmp_path / "task.py")], {"PYTHONPATH": str(TASKS)}
    with Launch(LAUNCHES["ddp"], tmp_path, *task, stdout=subprocess.DEVNULL, **path) as launch:
        launch.wait_until((tmp_path / "waits").exists)
        assert_only_this_machine_can_reach(launch)
        launch.process.kill()
        assert launch.end() == 137


HANGS = """import os, time
from small import *
from small import per_sample_loss as loss
def per_sample_loss(outputs, targets):
    if outputs.requires_grad and os.environ["RANK"] == "1":
        open(os.path.join(os.path.dirname(__file__), "hangs"), "w").close()
        time.sleep(1000)
    return loss(outputs, targets)
"""


@pytest.mark.full
def test_advice_of_hang_md_finds_the_rank_that_hangs_and_ends_the_run(tmp_path):
    text = (ROOT / "docs" / "hang.md").read_text()
    (list_all,) = re.findall(r"^ +(pgrep .*?) +#", text, re.MULTILINE)
    (print_rank,), (print_parent,) = (re.findall(f"`({name} .*?)`", text) for name in ("tr", "ps"))

    def answer(command, pid=0):
        command = command.replace("PID", str(pid))
        return subprocess.check_output(command, shell=True, text=True, timeout=30).strip()

    (tmp_path / "task.py").write_text(HANGS)
    options = ["--task", str(tmp_path / "task.py"), "--workers", "1"]
    path = {"PYTHONPATH": str(TASKS)}
    with Launch(LAUNCHES["ddp"], tmp_path, *options, stdout=subprocess.DEVNULL, **path) as launch:
        launch.wait_until((tmp_path / "hangs").exists)
        listed = {int(line.split()[0]) for line in answer(list_all).splitlines()}
        ranks = {answer(print_rank, pid): pid for pid in launch.ranks()}
        assert ranks.keys() == {"RANK=0", "RANK=1"}
        assert listed & {*launch.processes()} == {*ranks.values(), *launch.workers()}
        assert {int(answer(print_parent, pid)) for pid in ranks.values()} == {launch.process.pid}
        send([*launch.workers(), ranks["RANK=1"]], signal.SIGUSR2)
        launch.wait_until(lambda: "task.py" in launch.errors())
        mains = re.findall(
            r'File ".*/train_ddp.py", line \d+ in main$', launch.errors(), re.MULTILINE
        )
        assert len(mains) == 1, "the loader workers say nothing"
        assert ranks["RANK=1"] in launch.processes(), "it goes on"
        send([launch.process.pid, *ranks.values()], signal.SIGKILL)
        assert launch.end() == 137


# ----------------------------------------------------------------------------------- at bad moments


def interrupt(number):
    os.kill(os.getpid(), number)


def test_signal_before_training_ends_the_run_at_once(tmp_path):
    """By what the system does, without words: nothing can be lost yet."""
    stop = functools.partial(interrupt, signal.SIGINT)
    patch = functools.partial(call_in_task, "build_datasets", 0, stop)
    result = train("single", 1, *BASE, folder=tmp_path, patch=patch)
    assert (result.code, result.err) == (-signal.SIGINT, "")
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


def test_signal_in_the_last_evaluation_lets_the_run_end(tmp_path):
    patch = functools.partial(
        call_in_task, "per_sample_metrics", 2 * 8 + 3, functools.partial(interrupt, signal.SIGTERM)
    )
    result = train("single", 1, *EVERYTHING, folder=tmp_path, patch=patch)
    assert result.code == 0 and result.checkpoint()["epoch"] == 3, result.err


# ---------------------------------------------------------------------------------- several signals


USR1, HUP, INT, TERM = signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGTERM
# the weakest first: SLURM's warning, the terminal, the user, the system
BY_STRENGTH = {USR1: 0, HUP: 129, INT: 130, TERM: 143}


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
    of_all = itertools.permutations(BY_STRENGTH, 3)
    for numbers in [*of_all, (TERM, None, None), (None, None, USR1), (INT, USR1, None)]:
        wanted = strongest(filter(None, numbers))
        # Not in the step in which nobody has been told yet.
        assert agree_on(numbers) == [None, wanted, wanted], numbers
        assert agree_on(numbers, wait=True) == [wanted] * 3, numbers


def test_stronger_signal_wins_on_whichever_rank():
    in_group(3, check_ranks)


def signals_after_step_3(numbers, rank):
    """Each rank gets its own, in this order, within one step."""
    after_step(3, lambda: [os.kill(os.getpid(), number) for number in numbers[rank]])


@pytest.mark.parametrize(
    ("mode", "numbers", "winner"),
    [("single", [(TERM, USR1)], TERM), ("spawn", [(USR1,), (HUP, USR1)], HUP)],
)
def test_run_ends_with_the_code_of_the_stronger_signal(mode, numbers, winner, tmp_path):
    patch = functools.partial(signals_after_step_3, numbers)
    result = train(mode, len(numbers), *BASE, folder=tmp_path, patch=patch)
    step = result.checkpoint()["global_step"]
    assert step == (3 if mode == "single" else 4), "or one later, if ranks have to agree"
    assert result.code == BY_STRENGTH[winner]
    message = f"stopped by {winner.name} after saving step {step} (exit code {BY_STRENGTH[winner]})"
    said = [line for line in result.err.splitlines() if "stopped by" in line]
    assert said and all(line.endswith(message) for line in said), result.err


def hang_up(rank):
    signal.signal(HUP, signal.SIG_IGN)  # as nohup starts a program
    after_step(3, functools.partial(interrupt, HUP))


def test_signal_that_nohup_ignores_stays_ignored(tmp_path):
    result = train("ddp", 2, *BASE, folder=tmp_path, patch=hang_up)
    assert result.code == 0 and result.checkpoint()["global_step"] == 18, result.err


@pytest.mark.full
def test_run_whose_terminal_is_closed_is_saved(tmp_path):
    """Then nothing can be printed, and the loader workers get the signal too."""
    options = [*OPTIONS, "--workers", "1", "--output-dir", str(tmp_path / "run")]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, str(ROOT / "train_single.py"), *options])
    shown = b""
    while b"epoch 2/" not in shown:
        shown += os.read(terminal, 65536)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 129
    assert torch.load(tmp_path / "run" / "last.pt")["global_step"] > 6


FIRST = """
import os, signal
from machinery.process import run_main
raise SystemExit(run_main(lambda: os.kill(os.getpid(), signal.SIGTERM) or 0))
"""


@pytest.mark.full
def test_signal_before_training_ends_the_first_process_of_a_container():
    """By default the system ends PID 1 by no signal."""
    container = ["unshare", "--pid", "--fork", sys.executable, "-c"]
    if subprocess.run([*container, ""], capture_output=True).returncode:
        pytest.skip("needs root and a PID namespace")
    assert subprocess.run([*container, FIRST], cwd=ROOT, timeout=120).returncode == 143


def slow_disk(rank):
    """The save of a stop takes longer than --timeout."""
    save = machinery.run.save_checkpoint

    def slow(checkpoint, *paths):
        time.sleep(4 if checkpoint["step"] == 3 else 0)
        save(checkpoint, *paths)

    machinery.run.save_checkpoint = slow
    after_step(2, functools.partial(interrupt, TERM))


@pytest.mark.full
def test_ranks_wait_for_a_save_longer_than_for_each_other(tmp_path):
    result = train("ddp", 2, *BASE, "--timeout", "2", folder=tmp_path, patch=slow_disk)
    assert result.code == 143 and result.checkpoint()["step"] == 3, result.err


def test_stop_that_could_not_be_saved_says_so(handlers, tmp_path):
    run = make_run(tmp_path, "--log-every", "50")
    start_epoch(run)
    run.state.net.weight.data[0] = float("nan")
    os.kill(os.getpid(), USR1)
    with pytest.raises(machinery.process.Stopped) as stopped:
        make_step(run, [1.0])
    assert stopped.value.code == 3, "nothing that was lost is called done"
    assert stopped.value.reason.startswith("diverged: step 1 is not saved")
    assert "non-finite values in weight;" in stopped.value.reason
    assert not (run.files.directory / "last.pt").exists()


LATE = """
import os, signal, sys
from machinery.process import run_main
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=int(sys.argv[1])):
        kill(pid, number)
kept = Late()
sys.exit(run_main(lambda: 0))
"""


@pytest.mark.full
def test_signal_in_pythons_last_clean_up_is_too_late():
    """The run is done, and its code is 0; Python has already taken its handlers away."""
    command = [sys.executable, "-c", LATE, str(int(USR1))]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.full
def test_loader_worker_whose_rank_dies_as_it_starts_ends_too():
    """Nothing would end it: the death that it asks to be told of has happened."""
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE) as rank:
        out, _ = rank.communicate(timeout=60)  # until the worker has ended too
    assert (rank.returncode, out) == (-signal.SIGKILL, b"")
