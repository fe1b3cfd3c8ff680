"""What users bring with a state of its own: it is right, or a line names the way out. The task is tests/tasks/brought.py."""

import subprocess

import pytest
import torch
from harness import ROOT, TASKS, train

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


@pytest.mark.parametrize(
    ("mode", "kind", "code", "words"),
    [
        ("single", "no rate", 2, "lr is None; give a number"),
        ("ddp", "forces", 1, "once_differentiable"),
    ],
)
def test_last_line_names_the_way_out(mode, kind, code, words, tmp_path):
    n = 2 if mode == "ddp" else 1
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
    task = "import atexit, os\nfrom task import *\nsay = functools.partial(print, flush=True)\n"
    task += "atexit.register(lambda: say('the last words of rank', os.environ.get('RANK')))\n"
    task = "import functools\n" + task
    (tmp_path / "words.py").write_text(task)
    argv = ["--task", tmp_path / "words.py", "--epochs", "1", "--output-dir", tmp_path / "run"]
    command = ["bash", ROOT / "run.sh", "fsdp", "1", *argv, "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "the last words of rank 0" in done.stdout, done.stderr
