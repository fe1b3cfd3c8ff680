"""The commands of docs/porting.md, each on a small data set of the kind that the old program read."""

import re
import shlex

import coco
import pytest
import torch
from harness import ROOT, train
from patches import without_speed
from torchvision.io import write_jpeg
from torchvision.models import get_model

PAGE = (ROOT / "docs" / "porting.md").read_text()
COMMANDS = [shlex.split(text) for text in re.findall(r"```bash\nbash run\.sh (.*)\n```", PAGE)]
SMALLER = {"--epochs": "4", "--image-size": "64", "--batch-size": "8", "--data-dir": "data"}


def image_folder(folder, count, side):
    """Write `count` JPEG files in all, of two classes, in train/ and val/."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, 3, side, side + 10)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for i, image in enumerate(images):
        name = ("daisy", "rose")[i % 2]
        path = folder / ("val" if i % 5 == 0 else "train") / name / f"{i:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image[i % 2] //= 2  # so that there is something to learn
        write_jpeg(image, str(path))


def smaller(command, folder, **changes):
    """Return (mode, N, options): with another number of devices, data that are here, short runs."""
    mode, _, *argv = command
    changed = SMALLER | {"--data-dir": str(folder), "--weights": f"{folder}/weights.pt"} | changes
    for i, option in enumerate(argv[:-1]):
        if option in changed:
            argv[i + 1] = changed[option]
        if argv[i + 1].startswith("examples/"):
            argv[i + 1] = str(ROOT / argv[i + 1])
    if "--image-size" not in argv:
        argv += ["--image-size", changed["--image-size"]]
    return mode, 2, [*argv, "--workers", "0", "--device", "cpu"]


def test_page_has_a_command_for_each_of_four_programs():
    assert len(COMMANDS) == 4
    assert len(re.findall(r"^## .*(ImageNet|template|YOLO|pose)", PAGE, re.MULTILINE)) == 4


@pytest.mark.parametrize("number", range(4), ids=["imagenet", "template", "yolo", "pose"])
def test_ported_command_runs(number, tmp_path):
    command = COMMANDS[number]
    folder = tmp_path / "data"
    if "imagefolder" in command:
        image_folder(folder, 60, 40)
        torch.save(get_model("resnet34", num_classes=5).state_dict(), folder / "weights.pt")
    elif "examples/detect.py" in command:
        coco.make_boxes(folder, 24, 5)
    else:
        coco.make_people(folder, 12, 3)
    changes = {"--stacks": "1"}
    changes |= {"--model": "resnet18"} if "resnet50" in command else {}
    changes |= {"--step-epochs": "2"} if "sawtooth" in command else {}
    mode, n, argv = smaller(command, folder, **changes)
    argv += ["--width", "8"] if "--task" in argv else []
    result = train(mode, n, *argv, folder=tmp_path)
    assert result.code == 0, result.err
    assert len(result.eval_lines()) == 4
    if "--freeze" in argv:
        start = torch.load(folder / "weights.pt", weights_only=True)
        model = result.checkpoint()["model"]
        assert model["layer1.0.conv1.weight"].equal(start["layer1.0.conv1.weight"])
        rates = [line["lr"] for line in result.train_lines()]
        assert max(rates) <= 0.002 and rates[-1] < rates[0], "twice the rate, for two devices"
    if "swa" in argv:
        assert result.checkpoint()["average"]["n_averaged"] == 1


@pytest.mark.release  # two minutes
def test_recipe_of_imagenet_is_the_same_in_every_mode(tmp_path):
    """200 images, ResNet-50, float64. BatchNorm sees each device's slice, or all with --sync-bn."""
    image_folder(tmp_path / "data", 200, 40)
    # The gradients are huge at the start: at a larger rate the smallest rounding grows fast.
    changes = {"--batch-size": "40", "--image-size": "32", "--epochs": "2", "--lr": "1e-6"}
    _, _, argv = smaller(COMMANDS[0], tmp_path / "data", **changes)
    argv += ["--dtype", "float64"]
    runs = {}
    for mode, n, more in (
        ("single", 1, ()),
        ("dp", 2, ()),
        ("ddp", 2, ()),
        ("spawn", 2, ()),
        ("ddp", 2, ("--sync-bn",)),
        ("spawn", 2, ("--sync-bn",)),
    ):
        folder = tmp_path / f"{mode}{n}{''.join(more)}"
        result = train(mode, n, *argv, *more, folder=folder, timeout=500)
        assert result.code == 0, result.err
        runs[(mode, *more)] = without_speed(result.lines)
    assert same(runs[("dp",)], runs[("ddp",)]) and same(runs[("spawn",)], runs[("ddp",)])
    for mode in ("ddp", "spawn"):
        assert same(runs[mode, "--sync-bn"], runs[("single",)])
    assert not same(runs[("ddp",)], runs[("single",)]), "the slices matter"


def same(ours, theirs):
    """Return whether the lines of two logs hold the same figures, up to rounding."""
    assert [line["event"] for line in ours] == [line["event"] for line in theirs]
    ours, theirs = (
        [{name: line[name] for name in line if name != "event"} for line in lines]
        for lines in (ours, theirs)
    )
    return all(a == pytest.approx(b, rel=1e-8) for a, b in zip(ours, theirs, strict=True))
