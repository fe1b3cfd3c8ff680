"""examples/minimal_ddp.py and minimal_single.py: one page each, and the numbers of the scripts."""

import ast
import functools
import importlib
import os
import re
import signal
import sys

import pytest
import torch
from harness import ROOT, TASKS, _record_gradients, deviation, run_processes, train
from launches import free_port
from patches import after_step

import sampling

EPOCHS = 2
SCRIPT = ["--task", str(TASKS / "minimal.py"), "--dtype", "float64", "--epochs", str(EPOCHS)]
SCRIPT += ["--batch-size", "64", "--lr", "0.1", "--warmup-epochs", "0", "--weight-decay", "0"]
SCRIPT += ["--device", "cpu", "--workers", "0"]


def rank_of_minimal(mode, rank, n, port, epochs, file, patch):
    """Run a script of examples/ as one rank of torchrun, in float64."""
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n}.items():
        os.environ[name] = str(value)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_default_dtype(torch.float64)
    sys.path.append(str(ROOT / "examples"))
    _record_gradients(file.with_name(f"gradients{rank}"), 1)
    if patch:
        patch()
    importlib.import_module(f"minimal_{mode}").main(epochs, file)


def run_minimal(n, folder, epochs=EPOCHS, patch=None):
    """Run on n ranks, minimal_single.py if n is 0; return (exit codes, lines, content of the file)."""
    folder.mkdir(exist_ok=True)
    file, port = folder / "minimal.pt", free_port()
    mode, ranks = ("ddp", range(n)) if n else ("single", range(1))
    arguments = {"port": port, "epochs": epochs, "file": file, "patch": patch}
    targets = [functools.partial(rank_of_minimal, mode, rank, n, **arguments) for rank in ranks]
    results = run_processes(targets, folder)
    codes = [code for code, _, _ in results]
    assert patch or codes == [0] * len(ranks), results
    return codes, results[0][1].splitlines(), torch.load(file, weights_only=True)


def order_of_minimal(length, seed, epoch, classes):
    return torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).numpy()


def use_order_of_minimal(rank):
    sampling.epoch_order = order_of_minimal


@pytest.mark.parametrize("n", [0, pytest.param(3, marks=pytest.mark.full)])
def test_minimal_script_computes_what_the_script_computes(n, tmp_path):
    """22 steps an epoch; no world size above 2 divides the batch of 64, nor the six of evaluation."""
    mode = "ddp" if n else "single"
    expected = train(mode, n or 1, *SCRIPT, folder=tmp_path / "whole", patch=use_order_of_minimal)
    assert expected.code == 0, expected.err
    _, lines, saved = run_minimal(n, tmp_path / "minimal")
    for rank in range(n or 1):
        (first,) = torch.load(tmp_path / "minimal" / f"gradients{rank}")
        assert deviation(first, expected.gradients[0][0]) <= 1e-10
    assert deviation(saved["net"], expected.checkpoint()["model"]) <= 1e-10
    assert len(lines) == len(expected.eval_lines()) == EPOCHS
    for line, entry in zip(lines, expected.eval_lines()):
        loss, accuracy = map(float, re.findall(r"\d\.\d+", line))
        assert loss == pytest.approx(entry["loss"], rel=1e-10, abs=1e-12)
        assert accuracy == pytest.approx(entry["top1"], abs=1e-6) and accuracy > 0.7


def kill_in_second_epoch():
    after_step(22 + 7, lambda: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.full
def test_minimal_script_that_was_killed_goes_on_with_the_same_bits(tmp_path):
    _, whole, expected = run_minimal(3, tmp_path / "whole", 3)
    codes, before, saved = run_minimal(3, tmp_path / "killed", 3, kill_in_second_epoch)
    assert set(codes) == {-signal.SIGKILL}
    assert saved["scheduler"]["last_epoch"] == 22, "the file of the first epoch"
    _, after, found = run_minimal(3, tmp_path / "killed", 3)
    assert before[0] == whole[0] and after == whole[1:] and len(whole) == 3
    for name, value in expected["net"].items():
        assert found["net"][name].equal(value), name
    for i, state in expected["optimizer"]["state"].items():
        assert found["optimizer"]["state"][i]["momentum_buffer"].equal(state["momentum_buffer"])
    assert found["scheduler"] == expected["scheduler"]


@pytest.mark.parametrize("mode", ["single", "ddp"])
def test_minimal_script_needs_torch_and_numpy_alone(mode):
    text = (ROOT / f"examples/minimal_{mode}.py").read_text()
    nodes = list(ast.walk(ast.parse(text)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    foreign = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    assert foreign == {"torch", "numpy"}
