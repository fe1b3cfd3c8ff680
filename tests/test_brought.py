"""What users bring with a state of its own: it is right, or a line names the way out. The task is tests/tasks/brought.py."""

import os
import shlex
import subprocess
import sys
import time

import pytest
import torch
from harness import ROOT, TASKS, check, train
from launches import free_port

from common import UsageError

ARGV = ("--task", str(TASKS / "brought.py"), *"--device cpu --batch-size 30 --epochs 1".split())
ARGV += ("--log-every", "1", "--warmup-epochs", "0", "--schedule", "constant", "--lr", "0.1")


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["hook", "late hook"])
def test_hook_of_a_parameter_is_refused_where_it_would_see_one_rank(mode, kind, tmp_path):
    refused = train(mode, 2, *ARGV, "--model", kind, folder=tmp_path)
    assert refused.code == 2 and "weight has a hook" in refused.err
    assert refused.err.endswith("use optimizer.register_step_pre_hook, or single\n")
    assert train("single", 1, *ARGV, "--model", kind, folder=tmp_path).code == 0


def test_buffer_keeps_the_type_that_the_task_gave_it(tmp_path):
    result = train("single", 1, *ARGV, "--model", "clock", folder=tmp_path)
    assert result.code == 0, result.err
    assert result.checkpoint()["model"]["since"].item() == 1_769_000_000.25


@pytest.mark.parametrize("kind", ["grows", "made late"])
def test_buffer_that_no_run_could_load_ends_the_run(kind, tmp_path):
    result = train("single", 1, *ARGV, "--model", kind, folder=tmp_path)
    assert result.code == 1, result.err
    words = "made, or changed in shape or type, seen: no new run could load it"
    assert words in result.err.splitlines()[-1], result.err
    assert not (tmp_path / "run" / "last.pt").exists()


@pytest.mark.parametrize("workers", ["0", "1"])
def test_loss_that_changes_its_targets_leaves_the_data_set_alone(workers, tmp_path):
    """A worker too: what it sends lies in memory that it shares. The truth is a loss that changes nothing."""
    argv = (*ARGV, "--no-check", "--epochs", "2", "--workers", workers)
    changing = train("single", 1, *argv, "--model", "in place", folder=tmp_path / "changing")
    plain = train("single", 1, *argv, folder=tmp_path / "plain")
    assert changing.code == plain.code == 0, changing.err + plain.err
    assert changing.lines[-1]["loss"] == plain.lines[-1]["loss"] > 0.1


def test_rate_of_a_group_is_scaled_as_layer_decay_asks(tmp_path):
    result = train("single", 1, *ARGV, folder=tmp_path)
    assert result.code == 0, result.err
    groups = result.checkpoint()["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == pytest.approx([0.05, 0.1])


def test_loss_with_parameters_beside_the_model_is_named(tmp_path):
    result = train("single", 1, *ARGV, "--model", "beside", folder=tmp_path)
    assert "nothing trains or saves the parameters of criterion;" in result.out
    other = train("single", 1, *ARGV, folder=tmp_path / "frozen")
    assert result.code == other.code == 0 and "nothing trains" not in other.out


@pytest.mark.parametrize("mode", ["single", pytest.param("fsdp", marks=pytest.mark.full)])
def test_tensors_that_an_optimizer_keeps_in_a_list_keep_their_type(mode, tmp_path):
    argv = (*ARGV, "--model", "lists", "--output-dir", tmp_path / "run")
    first = train(mode, 1, *argv, folder=tmp_path).checkpoint()["optimizer"]["state"]
    again = train(mode, 1, *argv, "--resume", "auto", "--epochs", "2", folder=tmp_path)
    second = again.checkpoint()["optimizer"]["state"]
    (kept,) = first["net.head.bias"]["kept"]
    assert kept.dtype == torch.float64 and kept.any()
    assert second["net.head.bias"]["kept"][0].equal(kept)


@pytest.mark.parametrize(
    ("mode", "n"),
    [
        ("single", 1),
        pytest.param("ddp", 2, marks=pytest.mark.full),
        pytest.param("fsdp", 2, marks=pytest.mark.full),
    ],
)
def test_schedule_free_optimizer_evaluates_and_saves_its_average_with_the_hook_of_the_docs(
    mode, n, tmp_path
):
    """The optimizer itself asserts that no step is made with the weights of the evaluation."""
    argv = (*ARGV, "--dtype", "float64", "--model", "schedule-free, switched")
    result = train(mode, n, *argv, "--epochs", "2", folder=tmp_path / "whole")
    train(mode, n, *argv, folder=tmp_path / "halves")
    halves = train(mode, n, *argv, "--resume", "auto", "--epochs", "2", folder=tmp_path / "halves")
    assert result.code == halves.code == 0 and "has eval()" not in result.out, result.err
    last, other = result.checkpoint(), halves.checkpoint()
    assert {group["mode"] for group in last["optimizer"]["param_groups"]} == {"eval"}
    for name, value in last["model"].items():
        assert value.equal(other["model"][name]), name
    plain = train("single", 1, *argv[:-1], "schedule-free", "--epochs", "2", folder=tmp_path)
    assert "the optimizer has eval()" in plain.out
    head, z = last["model"]["net.head.weight"], last["optimizer"]["state"]["net.head.weight"]["z"]
    y = plain.checkpoint()["model"]["net.head.weight"]  # never switched
    assert (y - head).abs().max() > 1e-4
    torch.testing.assert_close(head.lerp(z, 0.1), y, rtol=1e-10, atol=1e-12)


def test_model_that_draws_is_named_and_its_loss_still_checked(capfd):
    check("single", 1, *ARGV, "--model", "draws")
    assert "the second time; draw in __getitem__" in capfd.readouterr().out
    with pytest.raises(UsageError, match="depends on the outputs of sample"):
        check("single", 1, *ARGV, "--model", "draws and mixes")


def test_loss_that_mixes_training_samples_alone_is_refused():
    with pytest.raises(UsageError, match="other samples must not change it"):
        check("single", 1, *ARGV, "--model", "long")


def test_child_that_a_worker_starts_can_be_ended(tmp_path):
    argv = (*ARGV, "--model", "child", "--workers", "1", "--no-check", "--batch-size", "203")
    result = train("single", 1, *argv, folder=tmp_path)
    assert result.code == 0, result.err


def test_process_that_a_metric_forks_can_be_ended(tmp_path):
    """It is a copy of a run that answers a signal with a handler of its own."""
    result = train("single", 1, *ARGV, "--model", "fork", folder=tmp_path)
    assert result.code == 0, result.err


def test_number_that_a_thread_makes_of_the_weights_is_not_that_of_another_rank(tmp_path):
    """Only rank 0 of fsdp builds the weights; what a thread reads of them is not seen there."""
    result = train("fsdp", 2, *ARGV, "--model", "threaded", folder=tmp_path)
    assert result.code == 2 and "the model has .scale " in result.err, result.err
    assert train("ddp", 2, *ARGV, "--model", "threaded", folder=tmp_path).code == 0


@pytest.mark.slow
def test_rank_started_by_hand_outlives_its_shell(tmp_path):
    argv = [sys.executable, ROOT / "train_ddp.py", *ARGV, "--epochs", "20"]
    argv += ["--output-dir", tmp_path / "run"]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    script = f"nohup {shlex.join(map(str, argv))} > {tmp_path / 'out'} 2>&1 &"
    script += f" while [ ! -s {tmp_path}/run/metrics.jsonl ]; do sleep 0.1; done"
    environment = os.environ | ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    subprocess.run(["bash", "-c", script], env=environment, check=True, timeout=60)
    deadline = time.monotonic() + 90
    while "to evaluate it" not in (tmp_path / "out").read_text() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert "to evaluate it" in (tmp_path / "out").read_text()


@pytest.mark.parametrize(
    ("mode", "kind", "code", "words"),
    [
        ("single", "no rate", 2, "lr is None; give a number"),
        ("ddp", "forces", 1, "once_differentiable"),
        ("ddp", "re-entrant", 1, "use_reentrant=False"),
        ("ddp", "empty", 1, "add 0 * outputs.sum()"),
    ],
)
def test_last_line_names_the_way_out(mode, kind, code, words, tmp_path):
    n = 1 if mode == "single" else 2
    argv = (*ARGV, "--model", kind, "--no-check", "--timeout", "30")
    result = train(mode, n, *argv, folder=tmp_path)
    assert result.code == code and words in result.err.splitlines()[-1], result.err


def test_worker_that_cannot_send_its_batch_does_not_hang_the_run(tmp_path):
    argv = (*ARGV, "--model", "not to be sent", "--workers", "1", "--no-check")
    result = train("single", 1, *argv, folder=tmp_path)
    assert result.code == 1 and "exited unexpectedly with exit code 1" in result.err, result.err
    assert "Cowardly refusing to serialize non-leaf tensor" in result.err, "the cause"


def test_file_beside_the_task_that_an_import_would_not_find_is_named(tmp_path):
    (tmp_path / "mine.py").write_text("from task import *\n")
    (tmp_path / "task.py").write_text("")
    argv = ("--task", tmp_path / "mine.py", "--epochs", "1", "--batch-size", "700")
    result = train("single", 1, *argv, folder=tmp_path)
    assert result.code == 0 and f"warning: task in {tmp_path} cannot be imported" in result.out
    assert torch.isfinite(torch.tensor(result.lines[-1]["loss"]))


@pytest.mark.full
def test_sharded_run_does_what_a_task_left_for_the_end(tmp_path):
    """FSDP's threads may hang in Python's clean-up, so a rank leaves without it."""
    task = "import atexit, os\nfrom task import *\nwords = 'the last words of rank'\n"
    task += "atexit.register(lambda: print(words, os.environ.get('RANK'), flush=True))\n"
    (tmp_path / "words.py").write_text(task)
    argv = ["--task", tmp_path / "words.py", "--epochs", "1", "--output-dir", tmp_path / "run"]
    command = ["bash", ROOT / "run.sh", "fsdp", "1", *argv, "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "the last words of rank 0" in done.stdout, done.stderr
