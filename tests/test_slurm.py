"""Jobs on a real SLURM of two nodes, started on this machine: see slurm.py. What needs no SLURM is tested as pitfalls 38 and 40."""

import subprocess
from pathlib import Path

import pytest
from harness import ROOT, TASKS, Result
from launches import free_port
from nodes import assert_equals_one_device

from slurm import NODES, cluster, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
EXACT = ("--dtype", "float64", "--device", "cpu", "--log-every", "1")
DIGITS = (*EXACT, "--epochs", "2", "--batch-size", "64")  # 3 ranks do not divide it
# long enough to be disturbed
LONG = (*EXACT, "--task", str(TASKS / "small.py"), "--epochs", "60", "--batch-size", "31")
SCRIPT = str(ROOT / "train_ddp.py")


@pytest.fixture(scope="module")
def slurm():
    with cluster() as running:
        yield running


def srun(slurm, folder, *command, **options):
    code, out, err = slurm.run(
        "srun", *command, "--output-dir", folder, cwd=ROOT, timeout=300, **options
    )
    assert code == 0, err
    return out


def test_srun_python_equals_one_device(slurm, tmp_path):
    out = srun(slurm, tmp_path, "--nodes", 2, "--ntasks", 3, "python", SCRIPT, *DIGITS)
    assert out.count("output directory") == 1, "one rank speaks"
    assert_equals_one_device(tmp_path, *DIGITS)


def test_srun_torchrun_equals_one_device(slurm, tmp_path):
    """One task and one rank a node."""
    meet = f"--rdzv-backend c10d --rdzv-endpoint {NODES[0]}:{free_port()} --rdzv-id job"
    torchrun = f"torchrun --nnodes 2 --nproc-per-node 1 {meet}".split()
    srun(slurm, tmp_path, *"--nodes 2 --ntasks-per-node 1".split(), *torchrun, SCRIPT, *DIGITS)
    assert_equals_one_device(tmp_path, *DIGITS)


def test_wrong_argument_ends_all_tasks(slurm, tmp_path):
    """Without --kill-on-bad-exit srun waits for the others, and they would wait for the first task until --timeout."""
    options = [*LONG, "--freeze", "nothing", "--output-dir", tmp_path / "run"]
    code, _, err = slurm.run("srun", "--ntasks", 3, "python", SCRIPT, *options)
    assert code == 2 and "--freeze nothing: no parameter has such a name" in err
    assert not (tmp_path / "run").exists()


def wait_for_lines(path: Path, n: int):
    wait_until(
        lambda: path.exists() and len(path.read_text().splitlines()) >= n,
        f"{n} lines in {path}",
        120,
    )


def test_signal_of_scancel_saves(slurm, tmp_path):
    command = ["srun", "--job-name", tmp_path.name, "--ntasks", 2, "python", SCRIPT]
    command += [*LONG, "--output-dir", tmp_path]
    with (
        open(tmp_path / "err", "w") as err,
        slurm.popen(*command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=err) as process,
    ):
        try:
            wait_for_lines(tmp_path / "metrics.jsonl", 10)
            job = slurm.ask("squeue", "--noheader", "--name", tmp_path.name, "--format", "%A")
            slurm.ask("scancel", "--signal", "TERM", f"{job}.0")
            assert process.wait(60) == 143
        finally:
            process.kill()
    assert "stopped by SIGTERM after saving step" in (tmp_path / "err").read_text()
    assert 0 < Result(0, "", "", tmp_path).checkpoint()["global_step"] < 360
    srun(slurm, tmp_path, "--nodes", 2, "--ntasks", 3, "python", SCRIPT, *LONG, "--resume", "auto")
    assert_equals_one_device(tmp_path, *LONG)


def test_batch_job_goes_on_by_itself(slurm, tmp_path):
    size = "--nodes 2 --ntasks-per-node 1 --cpus-per-task 2".split()
    command = ["sbatch", "--parsable", *size, "--output", tmp_path / "log"]
    command += [ROOT / "slurm" / "train.sbatch", *LONG, "--output-dir", tmp_path]
    job = slurm.ask(*command, cwd=ROOT)
    wait_for_lines(tmp_path / "metrics.jsonl", 10)
    # to the batch script alone, as --signal=B:USR1@120 sends it
    slurm.ask("scancel", "--batch", "--signal", "USR1", job)

    def state() -> str:
        return slurm.state(job)["JobState"]

    wait_until(
        lambda: state() in ("COMPLETED", "FAILED"),
        lambda: f"the end of the job\n{(tmp_path / 'log').read_text()}\n{slurm.logs()}",
        240,
    )
    log = (tmp_path / "log").read_text()
    assert state() == "COMPLETED" and slurm.state(job)["Restarts"] == "1", log
    assert log.count("stopped by SIGUSR1 after saving step") == 2, log  # both nodes say why
    assert log.count("resumed at epoch") == 1, log
    assert_equals_one_device(tmp_path, *LONG)
