"""`--task images`: what is read, crops in training, pixels in evaluation, models, and the loss."""

import re
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import ROOT, fetched, make_args, samples_of_epoch, train
from PIL import Image
from torch import nn
from torchvision import models

import common
import machinery.usertask
import sampling
import tasks.images as task


def arguments(folder, *more, dataset="imagefolder"):
    argv = ("--task", "images", "--dataset", dataset, "--data-dir", str(folder), *more)
    return make_args("single", *argv)


def noise(*shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=generator)


def image_tree(folder, images, *more):
    """Write images as PNG, which loses nothing, in two classes; the held-out ones are the same."""
    for part in ("train", "val"):
        for i, image in enumerate(images):
            path = folder / part / "ab"[2 * i // len(images)] / f"{i:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return arguments(folder, *more)


def windows_in(image, shift):
    """Return {bytes: (row, column, mirrored)}: all that a shift and a mirroring can make."""
    height, width = image.shape[1:]
    padded, windows = F.pad(image, (shift,) * 4), {}
    for y in range(2 * shift + 1):
        for x in range(2 * shift + 1):
            window = padded[:, y : y + height, x : x + width]
            windows[window.numpy().tobytes()] = y, x, False
            windows[window.flip(-1).contiguous().numpy().tobytes()] = y, x, True
    return windows


def test_images_in_memory_are_the_same_on_a_device():
    """There torch makes the batches, elsewhere numpy."""
    for images, different in (
        (noise(20, 3, 7, 9), 20),
        (noise(1, 3, 7, 9).expand(20, -1, -1, -1), 1),
    ):
        shift, flip = (2, True) if different > 1 else (0, False)
        here = task.ImagesInMemory(images, torch.arange(20), shift, flip)
        moved = here.to(torch.device("cpu"))
        assert type(moved.windows) is not type(here.windows)
        found = [sampling.KeyedDataset(d, 0).__getitems__((0, [*range(20)])) for d in (moved, here)]
        assert all(ours.equal(theirs) for ours, theirs in zip(*found))
        assert len(found[0][0].unique(dim=0)) == different and here.padded.equal(moved.padded)


# --------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "RGBA", "P"])
def test_files_of_every_kind_become_bytes_of_three_channels(mode, tmp_path):
    rows, columns = np.mgrid[:60, :80].astype(np.uint8)
    pixels = np.stack([3 * columns, 4 * rows, 255 - 2 * columns], axis=2)
    picture = Image.fromarray(pixels).convert(mode)
    wanted = torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1)
    kinds = {"RGB": ("jpg", "png"), "L": ("jpg", "png"), "CMYK": ("jpg",)}.get(mode, ("png",))
    for kind, allowed in zip(kinds, (12, 0) if "jpg" in kinds else (0,)):
        picture.save(tmp_path / f"picture.{kind}", quality=95)
        seen = task.read_image(str(tmp_path / f"picture.{kind}"))
        assert seen.dtype == torch.uint8 and seen.shape == (3, 60, 80)
        assert (seen.int() - wanted.int()).abs().max() <= allowed


@pytest.mark.parametrize("kind", ["uint16", ">u2", "int32", "float32"])
def test_white_is_what_the_file_says_not_the_lightest_point(kind, tmp_path):
    """16 bits end at 65535, so a dark picture stays dark. Nothing tells where 32 bits end."""
    ramp = np.arange(256).reshape(16, 16)
    values, path = (ramp // 2 * 257).astype(kind), tmp_path / "ramp.tif"
    if kind == ">u2":  # as ImageJ writes it; PIL cannot
        tags = {256: 16, 257: 16, 258: 16, 259: 1, 262: 1, 273: 122, 277: 1, 278: 16, 279: 512}
        entries = b"".join(struct.pack(">HHIHH", tag, 3, 1, n, 0) for tag, n in tags.items())
        path.write_bytes(struct.pack(">2sHIH108sI", b"MM", 42, 8, 9, entries, 0) + values.tobytes())
    else:
        Image.fromarray(values).save(path)
    if kind in ("int32", "float32"):
        with pytest.raises(OSError, match="nothing tells what is white; save it in 8 or 16 bits"):
            task.read_image(str(path))
    else:
        assert task.read_image(str(path)).int().equal(torch.from_numpy(ramp // 2).expand(3, -1, -1))


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_damaged_file_is_an_error_and_not_the_end_of_the_process(suffix, tmp_path):
    whole, path = tmp_path / f"whole.{suffix}", tmp_path / f"broken.{suffix}"
    Image.fromarray(noise(64, 64, 3).numpy()).save(whole)
    content = whole.read_bytes()
    pieces = [content[: len(content) * i // 8] for i in range(8)]
    if suffix == "png":  # which has checksums
        for i in range(1, 9):
            pieces.append(bytearray(content))
            pieces[-1][len(content) * i // 10] ^= 0xFF
    for broken in pieces:
        path.write_bytes(broken)
        with pytest.raises(OSError, match=rf"broken\.{suffix}"):
            task.read_image(str(path))


def test_folders_are_classes_and_val_goes_before_test(tmp_path):
    for part in ("train", "val", "test"):
        for name in ("zebra", "ant"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(2):
                Image.new("RGB", (20, 20)).save(tmp_path / part / name / f"{i}.png")

    def folders(*argv):
        return task.build_datasets(arguments(tmp_path, *argv))

    train_set, val_set = folders("--image-size", "16")
    for dataset, part in ((train_set, "train"), (val_set, "val")):
        paths = [(str(tmp_path / part / name), i) for name in ("ant", "zebra") for i in range(2)]
        assert [path for path, _ in dataset.samples] == [f"{path}/{i}.png" for path, i in paths]
        assert list(dataset.targets) == [0, 0, 1, 1] and dataset.classes == ["ant", "zebra"]
    assert train_set[0][0].shape == (3, 16, 16) and folders()[1][0][0].shape == (3, 224, 224)
    (tmp_path / "val").rename(tmp_path / "other")
    assert "test/ant" in folders()[1].samples[0][0]
    assert task.build_model(arguments(tmp_path)).head.out_features == 2


def test_what_is_no_picture_of_a_class_is_left_out_and_said(tmp_path, capfd):
    image = noise(3, 8, 8)
    args = image_tree(tmp_path, [image] * 4, "--image-size", "8")
    read = "a/x.JFIF a/y.gif a/deeper/z.webp"
    left_out = "a/._00.jpg a/.old/x.png .ipynb/x.png a/b.heic a/c.txt a/d.txt a/e f.png"
    for name in f"{read} {left_out}".split():
        path = tmp_path / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = {".JFIF": "JPEG", ".gif": "GIF", ".webp": "WEBP"}.get(path.suffix, "PNG")
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path, kind)
    (tmp_path / "val" / "a").rename(tmp_path / "val" / ".a")
    train_set, val_set = task.build_datasets(args)
    assert train_set.targets == [0] * 5 + [1] * 2 and len({*train_set.samples}) == 7
    assert all(sample.shape == (3, 8, 8) for sample, _ in train_set)
    assert val_set.targets == [1, 1] and val_set.classes == train_set.classes == ["a", "b"]
    said = [line.removeprefix(str(tmp_path)) for line in capfd.readouterr().out.splitlines()]
    found, left = said[0].split("; left out: ")
    assert found == "/train: 7 pictures, 2 classes, as a"
    wanted = {"2 hidden", "1 .heic", "2 .txt", "1 without a suffix", "2 beside the classes"}
    assert {*left.split(", ")} == wanted
    assert said[1:] == [
        "/val: 2 pictures, 2 classes, as a; left out: 1 beside the classes; classes without a picture: 1, as a"
    ]


@pytest.mark.parametrize(
    ("parts", "before", "after", "message"),
    [
        (
            "train val",
            "b",
            "a/b",
            r"two or more classes, .* found train, val, train/a, val/a: a level",
        ),
        ("train", "b/1.png", "b/1.svg", r"left out: 1 \.svg; classes without a picture: 1, as b$"),
        ("train", ".", "../other", r"needs .*/train, with a directory for each .*; found other, "),
        ("val", "b", "c", r"train lacks classes of .*/val: c"),
    ],
)
def test_directory_without_a_picture_of_each_class_is_refused(
    parts, before, after, message, tmp_path
):
    args = image_tree(tmp_path, noise(2, 3, 8, 8))
    (tmp_path / "train" / "b" / "01.png").rename(tmp_path / "train" / "b" / "1.png")
    for part in parts.split():
        (tmp_path / part / before).rename(tmp_path / part / after)
    with pytest.raises(common.UsageError, match=message):
        task.build_datasets(args)


def test_directory_of_the_evaluation_is_chosen_and_eval_only_needs_no_other(tmp_path):
    image_tree(tmp_path, noise(10, 3, 8, 8))
    (tmp_path / "val").rename(tmp_path / "validation")
    few = tmp_path / "few" / "test"
    for path in ("test/b", "few/test/a", "few/test/b"):
        (tmp_path / path).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / path / "1.png")

    def folder_of(*argv):
        _, val_set = task.build_datasets(arguments(tmp_path, "--image-size", "8", *argv))
        return str(Path(val_set.samples[0][0]).parent.parent)

    assert folder_of() == str(tmp_path / "validation"), "before test"
    for name, wanted in (("test", "test"), (few, "few/test"), ("few/test", "few/test")):
        assert folder_of("--val-dir", str(name)) == str(tmp_path / wanted)

    argv = "--task images --image-size 8 --batch-size 10 --workers 0 --epochs 1 --balanced".split()
    first = train("single", 1, *argv, "--data-dir", tmp_path, folder=tmp_path)
    best = tmp_path / "run" / "best.pt"
    argv += ["--eval-only", "--resume", best, "--output-dir", tmp_path / "new"]
    again = train("ddp", 2, *argv, "--data-dir", few.parent, folder=tmp_path)
    assert (first.code, again.code) == (0, 0), first.err + again.err
    assert "(2 samples)" in again.out


# --------------------------------------------------------------------------------- augmentation


def kinds(images):
    return len({image.numpy().tobytes() for image in images})


@pytest.mark.parametrize(("size", "least"), [(16, 20), (64, 40)], ids=["small", "photographs"])
def test_image_file_is_augmented_by_seed_epoch_and_sample_whoever_loads_it(size, least, tmp_path):
    args = image_tree(tmp_path, [noise(3, 70, 80)] * 40, "--image-size", str(size))
    train_set, val_set = task.build_datasets(args)

    def loaded(workers, world_size):
        samples = samples_of_epoch(train_set, 8, 3, workers, world_size)
        return torch.stack([samples[index] for index in range(40)])

    alone, seed = loaded(0, 1), args.seed
    assert alone.shape == (40, 3, size, size) and alone.dtype == torch.uint8
    assert kinds(alone) >= least, "one picture, forty samples"
    for workers, world_size in ((2, 1), (0, 3)):
        assert loaded(workers, world_size).equal(alone)
    torch.manual_seed(5)  # what else was drawn does not matter
    assert fetched(train_set, 3, [6, 2, 2], seed).equal(alone[[6, 2, 2]])
    for epoch, other_seed in ((4, seed), (3, seed + 1)):
        other = fetched(train_set, epoch, range(40), other_seed)
        assert (other != alone).flatten(1).any(1).sum() > 30
    assert kinds(fetched(val_set, epoch, [epoch], epoch)[0] for epoch in range(20)) == 1


def test_evaluation_resizes_the_shorter_side_and_takes_the_middle():
    image = noise(3, 120, 160)
    seen = task.pipeline(70, False)(image)
    whole = F.interpolate(image[None].double(), (80, 106), mode="bilinear", antialias=True)[0]
    assert seen.dtype == torch.uint8 and seen.shape == (3, 70, 70)
    assert (seen.double() - whole[:, 5:75, 18:88]).abs().max() <= 1.5, "but for roundings"


@pytest.mark.parametrize(("size", "shift"), [(39, 4), (40, 5), (8, 1)])
def test_small_images_are_shifted_by_an_eighth_and_half_of_them_mirrored(size, shift, tmp_path):
    image = noise(3, size, size)
    args = image_tree(tmp_path, [image] * 200, "--image-size", str(size))
    train_set, val_set = task.build_datasets(args)
    image = fetched(val_set, 0, [0])[0]  # as it was decoded
    windows = windows_in(image, shift)
    seen = fetched(train_set, 0, range(200))
    found = torch.tensor([windows[one.numpy().tobytes()] for one in seen])
    for axis in (0, 1):
        assert (found[:, axis].min(), found[:, axis].max()) == (0, 2 * shift), "to both sides"
        assert abs(found[:, axis].double().mean() - shift) < 0.15 * (2 * shift + 1)
    assert 70 < found[:, 2].sum() < 130
    assert len({tuple(row[:2]) for row in found.tolist()}) > min(40, (2 * shift + 1) ** 2 - 1)
    assert fetched(val_set, 1, [0])[0].equal(image)


@pytest.mark.parametrize(("name", "side", "flip"), [("mnist", 28, False), ("cifar10", 32, True)])
def test_arrays_are_augmented_in_training_only(name, side, flip, tmp_path, monkeypatch):
    channels = 3 if name == "cifar10" else 1
    images = noise(60, channels, side, side)

    class Source:
        classes = ("cat", "dog")

        def __init__(self, root, train, download):
            stored = images.permute(0, 2, 3, 1).numpy() if channels == 3 else images[:, 0]
            count = 60 if train else 20
            self.data, self.targets = stored[:count], list(range(count))

    monkeypatch.setattr(f"torchvision.datasets.{task.TORCHVISION[name]}", Source)
    train_set, val_set = task.build_datasets(arguments(tmp_path, dataset=name))
    assert (len(train_set), len(val_set)) == (60, 20) and val_set.classes == ("cat", "dog")
    seen, labels = val_set.__getitems__([19, 4])
    assert seen.equal(images[[19, 4]]) and labels.tolist() == [19, 4]
    shown, _ = train_set.__getitems__(list(range(60)))
    seen = [(view.numpy().tobytes(), windows_in(of, side // 8)) for view, of in zip(shown, images)]
    found = np.array([windows[view] for view, windows in seen])
    assert 15 < found[:, 2].sum() < 45 if flip else found[:, 2].sum() == 0
    assert found[:, :2].min() == 0 and found[:, :2].max() == 2 * (side // 8)


# ------------------------------------------------------------------------------ models and loss


def test_lines_for_a_model_of_torchvision_see_what_the_evaluation_saw(tmp_path):
    """The lines of docs/checkpoints.md, on a photograph."""
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    (code,) = re.findall(r"```python\n(import torch, torchvision\n.*?)```", page, re.DOTALL)
    argv = ("--model", "resnet18", "--image-size", "70")
    args = image_tree(tmp_path, [noise(3, 150, 211)] * 2, *argv)
    raw, net = (task.build_model(args).eval() for _ in range(2))
    _, val_set = task.build_datasets(args)
    with torch.no_grad():
        wanted, other = (model(val_set[0][0][None]) for model in (net, raw))
    assert (wanted - other).abs().max() > 1e-3
    checkpoint = {"model": raw.state_dict(), "weights": net.state_dict()}
    checkpoint |= {"data": {"classes": ["a", "b"]}, "config": {"image_size": 70}}
    torch.save(checkpoint, tmp_path / "best.pt")
    found: dict = {}
    code = code.replace("runs/mine/best.pt", str(tmp_path / "best.pt"))
    exec(code.replace("photo.jpg", val_set.samples[0][0]), found)
    assert (found["logits"] - wanted).abs().max() < 1e-5 * wanted.abs().max()


CASES = [("mnist", "resnet9", "float64"), ("cifar100", "resnet18", "float32")]


@pytest.mark.parametrize(("name", "model", "dtype"), CASES)
def test_network_sees_each_channel_normalised_in_its_precision(name, model, dtype, tmp_path):
    args = arguments(tmp_path, "--model", model, "--dtype", dtype, dataset=name)
    net, seen = machinery.usertask.Task(args).build_net().eval(), []
    net.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    channels, side, classes, *statistics = task.DATASETS[name]
    images = noise(1, channels, side, side)
    assert net(images).shape == (1, classes)
    mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in statistics)
    wanted = (images - mean) / std
    assert seen[0].dtype == getattr(torch, dtype)
    assert (seen[0].double() - wanted).abs().max() < {"float32": 1e-6, "float64": 1e-14}[dtype]
    assert not {"mean", "std"} & dict(net.named_buffers()).keys(), "not in a checkpoint"


@pytest.mark.parametrize("pretrained", [False, True])
def test_models_of_torchvision_have_one_output_and_the_classes_of_the_data(pretrained, monkeypatch):
    told = []

    def get_model(name, **settings):
        told.append((name, settings))
        return nn.Linear(1, 1)

    trained = nn.Linear(1, 1)
    nn.init.constant_(trained.weight, 5)  # no other draw gives it
    state = SimpleNamespace(get_state_dict=lambda check_hash: trained.state_dict())
    monkeypatch.setattr(models, "get_model", get_model)
    monkeypatch.setattr(models, "get_model_weights", lambda name: SimpleNamespace(DEFAULT=state))
    argv = ["--task", "images", "--dataset", "synthetic", *["--pretrained"] * pretrained]
    for name in ("resnet18", "googlenet", "inception_v3"):
        net = task.build_model(make_args("single", *argv, "--model", name))
        assert net.weight.equal(trained.weight) == pretrained
    plain = {"weights": None, "num_classes": 1000}
    one = {**plain, "aux_logits": False, "init_weights": True, "transform_input": True}
    assert told == [("resnet18", plain), ("googlenet", one), ("inception_v3", one)]


def test_models_of_torchvision_see_images_as_their_weights_did(tmp_path, monkeypatch):
    image_tree(tmp_path, noise(2, 3, 8, 8))
    monkeypatch.setattr(models, "get_model", lambda name, **settings: nn.Linear(1, 1))
    for name in models.list_models(module=models):
        seen = task.build_model(arguments(tmp_path, "--model", name))
        made = models.get_model_weights(name).DEFAULT.transforms()
        for own, wanted in ((seen.pixel_mean, made.mean), (seen.pixel_std, made.std)):
            assert (own.flatten() / 255 - torch.tensor(wanted)).abs().max() < 1e-3, name


def test_label_smoothing_reaches_the_loss():
    outputs = torch.randn(5, 10, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 3, 3, 9, 1])
    logs = outputs.log_softmax(1)
    for smoothing in (0.0, 0.3):
        args = make_args("single", "--task", "images", "--label-smoothing", str(smoothing))
        losses = machinery.usertask.Task(args).per_sample_loss(outputs, targets)
        expected = -(1 - smoothing) * logs[torch.arange(5), targets] - smoothing * logs.mean(1)
        assert torch.allclose(losses, expected, atol=1e-6)


def test_top5_is_shown_where_there_are_more_than_five_classes():
    for classes, names in ((5, ["top1"]), (6, ["top1", "top5"])):
        outputs = torch.arange(float(classes)).expand(2, classes)
        metrics = task.per_sample_metrics(outputs, torch.tensor([classes - 1, 1]))
        assert list(metrics) == names and metrics["top1"].tolist() == [1, 0]
