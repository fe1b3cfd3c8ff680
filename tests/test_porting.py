"""The commands of docs/porting.md, each on a small data set of the kind that the old program read."""

import re
import shlex

import coco
import pytest
import torch
from harness import ROOT, make_sampler, train
from patches import without_speed
from torchvision.io import write_jpeg
from torchvision.models import get_model

import common
import machinery.options
from machinery.tasks import Task

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


@pytest.mark.release
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


# ----------------------------------------------------------------------- Lightning and Accelerate


def rows(headline):
    """Return (there, here, difference) for each row of the table under a headline."""
    section = PAGE.split(f"\n## {headline}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:4]] for line in lines[1:]]


def test_rows_name_what_is_there():
    """Options, functions of common.py and sampling.py, functions of a task, lines of the scripts."""
    code = "".join(
        (ROOT / name).read_text()
        for name in ("train_ddp.py", "train_spawn.py", "sampling.py", "examples/other_project.py")
    )
    options = {option.name for option in machinery.options.OPTIONS}
    table = rows("Lightning") + rows("Accelerate")
    assert len(table) >= 45
    checked = 0
    for _, here, difference in table:
        for span in re.findall(r"`([^`]+)`", f"{here} {difference}"):
            for name in re.findall(r"(?<![\w-])--[a-z][a-z-]+", span):
                assert name in options or name == "--nproc-per-node", span
                checked += 1
            for name in re.findall(r"common\.(\w+)", span):
                assert hasattr(common, name), span
                checked += 1
            for name in re.findall(r"^(\w+)$", span):
                known = name in Task._fields or re.search(rf"\b{name}\b", code)
                assert known or name in ("sync_dist", "max_steps", "set_seed"), span
                checked += 1
        for command in re.findall(r"bash run\.sh (\w+)", here):
            assert command in ("ddp", "spawn", "fsdp")
    assert checked >= 50
    assert {"build_optimizer", "dataset_metrics", "per_sample_loss"} <= set(Task._fields)


def test_options_of_the_rows_are_accepted():
    for _, here, _ in rows("Lightning"):
        for span in re.findall(r"`(--[^`]+)`", here):
            if span in ("--optimizer", "--lr", "--schedule"):
                continue
            if "FILE" not in span and "--resume auto" not in span:
                argv = shlex.split(span)
                if "--nnodes" in argv:
                    argv += ["--master-addr", "127.0.0.1", "--master-port", "7"]
                machinery.options.build_parser("ddp").parse_args(argv)


def test_batch_of_lightning_as_the_page_translates_it():
    """16 samples per device, 4 devices, 2 micro-batches."""
    (command,) = re.findall(r"```\nbash run\.sh (.*)\n```", PAGE)
    mode, n, *argv = shlex.split(command)
    per_device, devices, pieces = map(int, re.search(r"(\d+) × (\d+) × (\d+)\.", PAGE).groups())
    args = machinery.options.build_parser(mode).parse_args(argv)
    assert (args.batch_size, args.accum_steps, int(n)) == (128, pieces, devices)
    for rank in range(devices):
        sampler = make_sampler(256, args.batch_size, rank, devices, args.accum_steps)
        _, indices = next(iter(sampler))
        parts = common.split_batch(torch.tensor(indices), args.accum_steps)
        assert [len(part) for part in parts] == [per_device] * pieces


@pytest.mark.parametrize(("batch", "exact"), [(64, True), (62, False)])
def test_gradient_of_accelerate_is_ours_if_slices_are_equal(batch, exact):
    """Theirs: the mean of each slice, over micro-batches and ranks. Ours: the mean of the batch."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(batch, generator=generator, dtype=torch.float64)  # of each sample
    world_size, pieces, means, sums = 4, 2, [], []
    for rank in range(world_size):
        _, indices = next(iter(make_sampler(batch, batch, rank, world_size, pieces)))
        for part in common.split_batch(gradients[indices], pieces):
            means.append(part.mean() / pieces)
            sums.append(part.sum() * (world_size / batch))
    theirs, ours = (torch.stack(parts).sum() / world_size for parts in (means, sums))
    assert ours.item() == pytest.approx(gradients.mean().item(), rel=1e-12)
    assert (theirs.item() == pytest.approx(ours.item(), rel=1e-12)) == exact


def test_names_of_a_lightning_checkpoint_do_not_fit(capsys):
    """As the page says: they begin with the attribute that holds the network."""
    net = torch.nn.Linear(2, 3)
    weights = {f"net.{name}": value for name, value in net.state_dict().items()}
    with pytest.raises(common.UsageError, match="no tensor fits"):
        common.load_weights(net, {"state_dict": weights, "epoch": 3}, "run.ckpt")
    common.load_weights(net, net.state_dict(), "run.pt")
    assert "2 of the model's 2 tensors" in capsys.readouterr().out
