"""Jobs on a real SLURM of two nodes, started on this machine: see slurm.py. What needs no SLURM is tested as pitfalls 38 and 40."""

import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, TASKS, Result, compare, single_run
from patches import without_speed

from slurm import NODES, cluster, free_ports, processes, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.full]
EXACT = ("--dtype", "float64", "--device", "cpu", "--log-every", "1")
DIGITS = (*EXACT, "--epochs", "2", "--batch-size", "64")  # 3 ranks do not divide it
LONG = (
    *EXACT,
    "--task",
    str(TASKS / "small.py"),
    "--epochs",
    "60",
    "--batch-size",
    "31",
)  # long enough to be disturbed
SCRIPT = str(ROOT / "train_ddp.py")


@pytest.fixture(scope="module")
def slurm():
    with cluster() as running:
        yield running


def assert_equals_one_device(folder, options):
    result, reference = Result(0, "", "", folder), single_run(*options)
    assert max(compare(result, reference).values()) < 1e-10
    steps = [(line["event"], line["global_step"]) for line in without_speed(result.lines)]
    assert len(set(steps)) == len(steps) == len(reference.lines), "each line is there once"


def srun(slurm, folder, *command, **options):
    code, out, err = slurm.run(
        "srun", *command, "--output-dir", folder, cwd=ROOT, timeout=300, **options
    )
    assert code == 0, err
    return out


@pytest.mark.parametrize(
    "tasks",
    [("--nodes", 1, "--ntasks", 3), ("--nodes", 2, "--ntasks", 3)],
    ids=["one node", "two nodes"],
)
def test_srun_python_equals_one_device(tasks, slurm, tmp_path):
    out = srun(slurm, tmp_path, *tasks, "python", SCRIPT, *DIGITS)
    assert out.count("output directory") == 1, "one rank speaks"
    assert_equals_one_device(tmp_path, DIGITS)


@pytest.mark.parametrize("nodes", [1, 2])
def test_srun_torchrun_equals_one_device(nodes, slurm, tmp_path):
    """One task a node, and two ranks."""
    meet = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"{NODES[0]}:{free_ports(1)[0]}",
        "--rdzv-id",
        str(nodes),
    ]
    torchrun = [
        "torchrun",
        "--nnodes",
        nodes,
        "--nproc-per-node",
        2 // nodes,
        *meet,
        SCRIPT,
        *DIGITS,
    ]
    srun(slurm, tmp_path, "--nodes", nodes, "--ntasks-per-node", 1, *torchrun)
    assert_equals_one_device(tmp_path, DIGITS)


def test_wrong_argument_ends_all_tasks(slurm, tmp_path):
    """Without --kill-on-bad-exit srun waits for the others, and they would wait for the first task until --timeout."""
    code, _, err = slurm.run(
        "srun",
        "--ntasks",
        3,
        "python",
        SCRIPT,
        *LONG,
        "--freeze",
        "nothing",
        "--output-dir",
        tmp_path / "run",
    )
    assert (
        code == 2
        and "--freeze nothing: no parameter has such a name" in err
        and not (tmp_path / "run").exists()
    )


def wait_for_lines(path: Path, n: int):
    wait_until(
        lambda: path.exists() and len(path.read_text().splitlines()) >= n,
        f"{n} lines in {path}",
        120,
    )


def test_signal_of_scancel_saves(slurm, tmp_path):
    command = [
        "srun",
        "--job-name",
        f"{tmp_path.name}",
        "--ntasks",
        2,
        "python",
        SCRIPT,
        *LONG,
        "--output-dir",
        tmp_path,
    ]
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
    assert_equals_one_device(tmp_path, LONG)


DISTURBANCES = {  # what happens to a job, and which signal reaches its ranks
    "warning": (
        "scancel --batch --signal USR1 JOB",
        "SIGUSR1",
    ),  # to the batch script alone, as --signal=B:USR1@120 sends it
    "requeue": ("scontrol requeue JOB", "SIGTERM"),
}


@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_batch_job_goes_on_by_itself(disturbance, slurm, tmp_path):
    what, number = DISTURBANCES[disturbance]
    size = [
        "--nodes",
        2,
        "--ntasks-per-node",
        1,
        "--cpus-per-task",
        2,
        "--output",
        tmp_path / "log",
    ]
    job = slurm.ask(
        "sbatch",
        "--parsable",
        *size,
        ROOT / "slurm" / "train.sbatch",
        *LONG,
        "--output-dir",
        tmp_path,
        cwd=ROOT,
    )
    wait_for_lines(tmp_path / "metrics.jsonl", 10)
    slurm.ask(*what.replace("JOB", job).split())

    def state() -> str:
        return slurm.state(job)["JobState"]

    wait_until(
        lambda: state() in ("COMPLETED", "FAILED"),
        lambda: f"the end of the job\n{(tmp_path / 'log').read_text()}\n{slurm.logs()}",
        240,
    )
    log = (tmp_path / "log").read_text()
    assert state() == "COMPLETED" and slurm.state(job)["Restarts"] == "1", log
    assert (
        log.count(f"stopped by {number} after saving step") == 2
        and log.count("resumed at epoch") == 1
    ), log  # both nodes say why
    assert_equals_one_device(tmp_path, LONG)


def test_nothing_outlives_whoever_started_it(tmp_path):
    """SLURM's daemons leave jobs behind when they are killed, and srun a process that would cancel them."""
    job = (
        f"echo $SLURM_CONF > {tmp_path}/part; mv {tmp_path}/part {tmp_path}/begun; exec sleep 1000"
    )
    with subprocess.Popen(
        [sys.executable, ROOT / "tests" / "slurm.py", "srun", "bash", "-c", job]
    ) as process:
        try:
            wait_until((tmp_path / "begun").exists, "a job")
        finally:
            process.kill()
    folder = Path((tmp_path / "begun").read_text().strip()).parent
    wait_until(lambda: not folder.exists(), f"the end of {folder}")
    assert not processes(folder)
