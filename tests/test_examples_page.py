"""The commands of docs/examples.md: those for real data in small, those for made data as they are."""

import re
import shlex
import subprocess
import sys

import made_data
import pytest
import torch
from harness import ROOT, train

PAGE = (ROOT / "docs" / "examples.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
MADE = [name for name, text in SECTIONS.items() if "```console" in text]
SMALLER = {"--epochs": "3", "--batch-size": "6", "--workers": "0"}
SMALLER |= {"--device": "cpu", "--image-size": "64"}
CLEARLY = {"AP50": 0.15, "recall": 0.5, "pck": 0.5, "top1": 0.7}  # more than chance


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
    argv = [re.sub(r"^examples/", f"{ROOT}/examples/", part) for part in argv]
    result = train(mode, 2, *argv, folder=folder, timeout=400)
    assert result.code == 0, result.err
    return result


def test_page_has_the_classic_problems():
    words = "one page", "Detection", "Pose", "Fine-tuning", "ImageNet"
    assert [word for word in words if any(word in name for name in SECTIONS)] == [*words]
    assert len(MADE) == 4


FOR_A_RELEASE = [pytest.param(name, marks=pytest.mark.release) for name in [*MADE][1:]]


@pytest.mark.long
@pytest.mark.parametrize("name", [*MADE][:1] + FOR_A_RELEASE)
def test_command_for_real_data_runs(name, tmp_path):
    """On a small data set of the same format, with a small network, for three epochs."""
    commands, data = commands_of(SECTIONS[name], "bash"), tmp_path / "data"
    kind = {"Detection": "boxes", "Pose of several people": "people"}.get(name, "flowers")
    made_data.main(kind, data, 12, 6)
    made_data.main("weights", tmp_path / "start.pth")
    changes = SMALLER | {"--data-dir": str(data), "--output-dir": str(tmp_path / "0")}
    if "--task" in commands[0]:
        changes |= {"--width": "8"} | ({"--stacks": "1"} if kind == "people" else {})
    else:
        changes["--model"] = "resnet18"
    if "--weights" in commands[0]:
        changes["--weights"] = str(tmp_path / "start.pth")
    first = launch(commands[0], tmp_path, **changes)
    assert len(first.eval_lines()) == 3
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


@pytest.mark.release  # four minutes
@pytest.mark.parametrize("name", MADE)
def test_command_for_made_data_reaches_what_the_page_says(name, tmp_path):
    (block,) = re.findall(r"```console\n(.*?)```", SECTIONS[name], re.DOTALL)
    lines = block.replace("runs/made/", f"{tmp_path}/").splitlines()
    for line, shown in zip(lines, [*lines[1:], "$"]):
        if line.startswith("$ python tests/made_data.py"):
            made_data.main(*shlex.split(line)[3:])
        elif line.startswith("$ "):
            command = shlex.split(line.removeprefix("$ "))
            found = launch(command, tmp_path / str(len(line)), **{"--device": "cpu"}).eval_lines()
            wanted = {k: float(v) for k, v in re.findall(r"(\w+) ([\d.]+)(?=  )", shown)}
            assert len(wanted) >= 3
            for metric in wanted.keys() & CLEARLY.keys():
                # Another processor rounds in another way, and a small set makes that visible.
                assert found[-1][metric] == pytest.approx(wanted[metric], rel=0.4), (line, metric)
                assert found[-1][metric] > CLEARLY[metric]


@pytest.mark.release
def test_script_on_one_page_by_torchrun(tmp_path):
    section = SECTIONS["DDP on one page"]
    ((program, *argv),) = commands_of(section, "bash")
    assert program == "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", *argv[:-1], str(tmp_path / argv[-1])]
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120}
    for lines in (10, 0):  # then everything is done
        result = subprocess.run(command, **options)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("accuracy") == lines
        if lines:
            (shown,) = re.findall(r"accuracy ([\d.]+)\n```", section)
            reached = float(result.stdout.split()[-1])
            assert reached == pytest.approx(float(shown), abs=0.03) and reached > 0.85
