"""The commands of docs/recipes.md and docs/copy.md, on small data sets of the same formats."""

import os
import re
import shlex
import subprocess
import sys

import made_data
import pytest
import torch
from harness import ROOT, train

PAGE = (ROOT / "docs" / "recipes.md").read_text()
SECTIONS = dict(re.findall(r"^### (.*?)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
SHOWN = [name for name, text in SECTIONS.items() if "```console" in text]
MADE = [name for name in SHOWN if "```bash" in SECTIONS[name]]  # the others are of recipes
SMALLER = {"--epochs": "1", "--batch-size": "6", "--workers": "0"}
SMALLER |= {"--device": "cpu", "--image-size": "64"}


def commands_of(text, kind):
    (block,) = re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)
    return [shlex.split(line.removeprefix("$ ")) for line in block.splitlines()]


def launch(command, folder, **changes):
    """Run `bash run.sh MODE N ...` on two CPU processes, with these options changed or added."""
    _, script, mode, _, *argv = command
    assert script == "run.sh"
    for option, value in changes.items():
        if option in argv:
            argv[argv.index(option) + 1] = value
        else:
            argv += [option, value]
    result = train(mode, 2, *argv, folder=folder, timeout=400)
    assert result.code == 0, result.err
    return result


@pytest.mark.full
@pytest.mark.parametrize("name", MADE)
def test_command_for_real_data_runs(name, tmp_path):
    """On a small data set of the same format, with a small network, for one epoch."""
    commands, data = commands_of(SECTIONS[name], "bash"), tmp_path / "data"
    kind = {"Detection": "boxes", "Pose": "people", "A language model": "text"}.get(name, "flowers")
    made_data.main("weights", tmp_path / "start.pth")
    changes = SMALLER | {"--data-dir": str(data), "--output-dir": str(tmp_path / "0")}
    if kind == "text":
        made_data.main(kind, tmp_path / "text.txt", 4000)
        prepare = [sys.executable, ROOT / "tasks" / "gpt.py", "prepare"]
        subprocess.run([*prepare, tmp_path / "text.txt", data], check=True, timeout=120)
        commands[0].remove("--compile")  # it would take a minute
        del changes["--image-size"]
        changes |= {"--context": "16", "--layers": "1", "--heads": "2", "--width": "16"}
        changes |= {"--batch-size": "10", "--samples": "20"}
    else:
        made_data.main(kind, data, 12, 6)
    if kind == "flowers":
        changes["--model"] = "resnet18"
    elif kind != "text":
        changes |= {"--width": "8"} | ({"--stacks": "1"} if kind == "people" else {})
    if "--weights" in commands[0]:
        changes["--weights"] = str(tmp_path / "start.pth")
    first = launch(commands[0], tmp_path, **changes)
    assert len(first.eval_lines()) == 1
    if name == "Fine-tuning":
        changes |= {"--weights": str(tmp_path / "0/best.pt"), "--output-dir": str(tmp_path / "1")}
        second = launch(commands[1], tmp_path, **changes)
        start = torch.load(tmp_path / "start.pth", weights_only=True)
        before, after = first.checkpoint("best.pt")["model"], second.checkpoint()["model"]
        assert before["layer1.0.conv1.weight"].equal(start["layer1.0.conv1.weight"])
        assert not after["layer1.0.conv1.weight"].equal(start["layer1.0.conv1.weight"])
        assert f"{len(before)} of the model's {len(before)} tensors" in second.out
    else:
        assert len(commands) == 1


def slow_or_full(name):
    return pytest.param(
        name, marks=pytest.mark.slow if name in ("Diffusion", "LoRA") else pytest.mark.full
    )


@pytest.mark.parametrize("name", [slow_or_full(name) for name in SHOWN if name not in MADE])
def test_commands_of_a_recipe_run_in_this_order(name, tmp_path):
    """For two epochs, with results in another directory."""
    for package in {"Hugging Face": ("transformers", "datasets"), "timm": ("timm",)}.get(name, ()):
        pytest.importorskip(package, reason=f"the recipe needs {package}")
    for command in commands_of(SECTIONS[name], "console"):
        folders = {"runs/": f"{tmp_path}/runs/", "examples/": f"{ROOT}/examples/"}
        for there, here in folders.items():
            command = [re.sub(f"^{there}", here, part) for part in command]
        if command[0] == "bash":
            changes = {"--epochs": "2", "--workers": "0", "--device": "cpu"}
            folder = {} if "--output-dir" in command else {"--output-dir": f"{tmp_path}/runs/0"}
            assert len(launch(command, tmp_path, **changes, **folder).eval_lines()) == 2
            continue
        environment = dict(os.environ)
        while command[0] != "python":  # NAME=value
            name, _, value = command.pop(0).partition("=")
            environment[name] = value
        program = [sys.executable, *command[1:]]
        options = {"capture_output": True, "text": True, "timeout": 120, "env": environment}
        result = subprocess.run(program, cwd=ROOT, **options)
        assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_script_on_one_page_by_torchrun(tmp_path):
    page = (ROOT / "docs" / "copy.md").read_text()
    ((program, *argv),) = commands_of(page, "bash")
    assert program == "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", *argv[:-1], str(tmp_path / argv[-1])]
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120}
    result = subprocess.run(command, **options)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("accuracy") == 10
    (shown,) = re.findall(r"accuracy ([\d.]+)`", page)
    reached = float(result.stdout.split()[-1])
    assert reached == pytest.approx(float(shown), abs=0.03) and reached > 0.85
