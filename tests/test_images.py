"""`--task images` and the digits: what is read, how it is augmented in training, what the network sees, loss and metrics."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import ROOT, fetched, samples_of_epoch, train
from PIL import Image
from single import single
from torch import nn
from torchvision import datasets, models

import task as digits
import tasks.images as images
from engine.options import parse_args


def arguments(folder, *more, dataset="imagefolder"):
    argv = ["--task", "images", "--dataset", dataset, "--data-dir", str(folder), *more]
    return parse_args("single", argv)


def noise(*shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=generator)


def image_tree(folder, pictures, *more):
    """Write pictures as PNG, which loses nothing, in two classes; the held-out ones are the same."""
    for part in ("train", "val"):
        for i, picture in enumerate(pictures):
            path = folder / part / "ab"[2 * i // len(pictures)] / f"{i:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture.permute(1, 2, 0).numpy()).save(path)
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


# ------------------------------------------------------------------------------ the default task


def stored(first, last):
    """These digits as they lie in the file."""
    with np.load(ROOT / "data" / "digits.npz") as file:
        return torch.from_numpy(file["images"][first:last]).unsqueeze(1) * 15


def test_digits_are_shifted_by_one_pixel_by_the_seed_and_only_in_training():
    train_set, held_out = digits.build_datasets(parse_args("single", []))
    assert (len(train_set), len(held_out)) == (1437, 360)
    seen, other = (fetched(train_set, 0, [*range(300)], seed) for seed in (0, 1))
    padded, shares = F.pad(stored(0, 300), (1,) * 4), []
    for y in range(3):
        for x in range(3):
            same = padded[:, :, y : y + 8, x : x + 8] == seen
            shares.append(same.flatten(1).all(1).double().mean().item())
    assert 0.999 < sum(shares) < 1.01 and min(shares) > 0.05, (
        "each of nine places, and no mirroring"
    )
    assert not seen.equal(other) and seen.equal(fetched(train_set, 0, [*range(300)], 0))
    assert fetched(held_out, 0, [*range(100)]).equal(stored(1437, 1537))
    assert held_out.classes == [str(digit) for digit in range(10)]


def test_metrics_count_the_best_guess_and_the_best_five():
    for module in (digits, images):
        outputs = torch.arange(10.0).expand(4, 10)  # class 9 is the best guess, 5 the fifth
        metrics = module.per_sample_metrics(outputs, torch.tensor([9, 8, 5, 4]))
        assert metrics["top1"].tolist() == [1, 0, 0, 0] and metrics["top5"].tolist() == [1, 1, 1, 0]
    few = images.per_sample_metrics(torch.arange(5.0).expand(2, 5), torch.tensor([4, 1]))
    assert [*few] == ["top1"] and few["top1"].tolist() == [1, 0]


SEEN = [("digits", "", "float32"), ("digits", "", "float64"), ("mnist", "resnet9", "float64"), ("cifar100", "resnet18", "float32")]  # fmt: skip


@pytest.mark.parametrize(("name", "model", "dtype"), SEEN)
def test_network_sees_each_channel_normalised_in_its_precision(name, model, dtype, tmp_path):
    if name == "digits":
        net = digits.build_model(None).to(getattr(torch, dtype))
        first, sizes, classes, statistics = net.conv1, (1, 8), 10, ((73.3,), (90.2,))
    else:
        net = images.build_model(
            arguments(tmp_path, "--model", model, "--dtype", dtype, dataset=name)
        )
        _, channels, classes, *statistics = images.DATASETS[name]
        sizes = channels, 28 if name == "mnist" else 32
        first = next(module for module in net.modules() if isinstance(module, nn.Conv2d))
    seen, pictures = [], noise(2, sizes[0], sizes[1], sizes[1])
    first.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    assert net.eval()(pictures).shape == (2, classes)
    mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in statistics)
    assert seen[0].dtype == getattr(torch, dtype)
    error = (seen[0].double() - (pictures - mean) / std).abs().max()
    assert error < {"float32": 1e-6, "float64": 1e-14}[dtype]
    assert not [key for key in net.state_dict() if "pixel" in key], "not in a checkpoint"


# ---------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "RGBA", "P"])
def test_files_of_every_kind_become_bytes_of_three_channels(mode, tmp_path):
    rows, columns = np.mgrid[:60, :80].astype(np.uint8)
    pixels = np.stack([3 * columns, 4 * rows, 255 - 2 * columns], axis=2)
    picture = Image.fromarray(pixels).convert(mode)
    wanted = torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1)
    kinds = {"RGB": ("jpg", "png"), "L": ("jpg", "png"), "CMYK": ("jpg",)}.get(mode, ("png",))
    for kind, allowed in zip(kinds, (12, 0) if "jpg" in kinds else (0,)):
        path = tmp_path / f"picture.{kind}"
        picture.save(path, quality=95)
        seen = images.read_image(str(path))
        assert seen.dtype == torch.uint8 and seen.shape == (3, 60, 80)
        assert (seen.int() - wanted.int()).abs().max() <= allowed
        if mode == "RGB":  # and a damaged one is an error with its name
            Image.fromarray(noise(60, 80, 3).numpy()).save(path)
            content = path.read_bytes()
            for i in range(8):
                path.write_bytes(content[: len(content) * i // 8])
                with pytest.raises(OSError, match=rf"picture\.{kind}"):
                    images.read_image(str(path))


@pytest.mark.parametrize("kind", ["uint16", "int32", "float32"])
def test_picture_of_more_than_eight_bits_is_refused(kind, tmp_path):
    """Nothing tells what is white."""
    Image.fromarray(np.arange(256).reshape(16, 16).astype(kind)).save(tmp_path / "ramp.tif")
    with pytest.raises(OSError, match=r"ramp\.tif.*save it in 8 bits"):
        images.read_image(str(tmp_path / "ramp.tif"))


def test_directories_are_classes_and_the_evaluation_set_may_lack_some(tmp_path):
    args = image_tree(tmp_path, noise(4, 3, 20, 20), "--image-size", "16")
    (tmp_path / "train" / ".cache").mkdir()
    (tmp_path / "val" / "a").rename(tmp_path / "val" / ".a")
    train_set, val_set = images.build_datasets(args)
    assert train_set.classes == val_set.classes == ["a", "b"]
    assert (list(train_set.targets), list(val_set.targets)) == ([0, 0, 1, 1], [1, 1])
    assert train_set[0][0].shape == (3, 16, 16) and images.build_model(args).head.out_features == 2
    assert images.build_datasets(arguments(tmp_path))[1][0][0].shape == (3, 224, 224)
    (tmp_path / "val").rename(tmp_path / "test")
    _, val_set = images.build_datasets(arguments(tmp_path, "--val-dir", "test"))
    assert val_set.samples[0][0].startswith(str(tmp_path / "test" / "b"))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("train/b", "other", "two or more classes"),
        ("val", "validation", "--val-dir names another one"),
        ("train", "other", "two or more classes"),
        ("val/b", "val/c", "lacks classes of .*/val: c"),
    ],
)
def test_directories_that_do_not_fit_are_refused(before, after, message, tmp_path, capsys):
    args = image_tree(tmp_path, noise(2, 3, 8, 8))
    (tmp_path / before).rename(tmp_path / after)
    with pytest.raises(SystemExit):
        images.build_datasets(args)
    err = capsys.readouterr().err
    assert f"--data-dir {tmp_path}" in err and re.search(message, err), err


# ---------------------------------------------------------------------------------- augmentation


@pytest.mark.parametrize(("size", "least"), [(16, 20), (64, 40)], ids=["small", "photographs"])
def test_image_file_is_augmented_by_seed_epoch_and_sample_whoever_loads_it(size, least, tmp_path):
    args = image_tree(tmp_path, [noise(3, 70, 80)] * 40, "--image-size", str(size))
    train_set, val_set = images.build_datasets(args)

    def loaded(workers, world_size):
        samples = samples_of_epoch(train_set, 8, 3, workers, world_size)
        return torch.stack([samples[index] for index in range(40)])

    alone = loaded(0, 1)
    assert alone.shape == (40, 3, size, size) and alone.dtype == torch.uint8
    assert len({picture.numpy().tobytes() for picture in alone}) >= least, "forty of one picture"
    assert loaded(2, 1).equal(alone) and loaded(0, 3).equal(alone)
    torch.manual_seed(5)  # what else was drawn does not matter
    assert fetched(train_set, 3, [6, 2, 2]).equal(alone[[6, 2, 2]])
    for epoch, seed in ((4, 0), (3, 1)):
        other = fetched(train_set, epoch, range(40), seed)
        assert (other != alone).flatten(1).any(1).sum() > 30
    assert all(fetched(val_set, k, [k], k)[0].equal(val_set[0][0]) for k in range(20))


def test_evaluation_resizes_the_shorter_side_and_takes_the_middle():
    image = noise(3, 120, 160)
    seen = images.pipeline(70, False)(image)
    whole = F.interpolate(image[None].double(), (80, 106), mode="bilinear", antialias=True)[0]
    assert seen.dtype == torch.uint8 and seen.shape == (3, 70, 70)
    assert (seen.double() - whole[:, 5:75, 18:88]).abs().max() <= 1.5, "but for roundings"


@pytest.mark.parametrize(("name", "flip"), [("files", True), ("cifar10", True), ("mnist", False)])
def test_small_images_are_shifted_by_an_eighth_and_half_of_them_mirrored(name, flip, tmp_path, monkeypatch):  # fmt: skip
    """But for digits, which no mirror shows."""
    side = 28 if name == "mnist" else 32
    picture = noise(1 if name == "mnist" else 3, side, side)
    if name == "files":
        train_set, val_set = images.build_datasets(image_tree(tmp_path, [picture] * 200, "--image-size", "32"))  # fmt: skip
    else:

        class Source:
            classes, targets = ("cat", "dog"), [*range(200)]

            def __init__(self, root, train=True, download=False):
                stored = picture[0] if name == "mnist" else picture.permute(1, 2, 0)
                self.data = stored.numpy()[None].repeat(200, 0)

        monkeypatch.setattr(datasets, images.DATASETS[name][0], Source)
        train_set, val_set = images.build_datasets(arguments(tmp_path, dataset=name))
        assert tuple(val_set.classes) == ("cat", "dog")
    windows, shift = windows_in(picture, side // 8), side // 8
    seen = fetched(train_set, 0, [*range(200)])
    found = torch.tensor([windows[one.contiguous().numpy().tobytes()] for one in seen])
    for axis in (0, 1):
        assert (found[:, axis].min(), found[:, axis].max()) == (0, 2 * shift), "to both sides"
        assert abs(found[:, axis].double().mean() - shift) < 0.15 * (2 * shift + 1)
    assert 70 < found[:, 2].sum() < 130 if flip else found[:, 2].sum() == 0
    assert all(one.equal(picture) for one in fetched(val_set, 1, [0, 1, 2])), "as it is"


# -------------------------------------------------------------------------------- models and loss


def test_pretrained_weights_are_those_of_torchvision(tmp_path, monkeypatch, capsys):
    trained = nn.Linear(1, 1)
    nn.init.constant_(trained.weight, 5)  # no other draw gives it
    state = SimpleNamespace(get_state_dict=lambda check_hash: trained.state_dict())
    monkeypatch.setattr(models, "get_model", lambda name, num_classes: nn.Linear(1, 1))
    monkeypatch.setattr(models, "get_model_weights", lambda name: SimpleNamespace(DEFAULT=state))
    for more, same in ((["--pretrained"], True), ([], False)):
        net = images.build_model(
            arguments(tmp_path, "--model", "resnet18", *more, dataset="cifar10")
        )
        assert net.weight.equal(trained.weight) == same


def test_label_smoothing_reaches_the_loss():
    outputs = torch.randn(5, 10, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 3, 3, 9, 1])
    logs = outputs.log_softmax(1)
    for smoothing in (0.0, 0.3):
        losses = images.per_sample_loss(outputs, targets, label_smoothing=smoothing)
        expected = -(1 - smoothing) * logs[torch.arange(5), targets] - smoothing * logs.mean(1)
        assert torch.allclose(losses, expected, atol=1e-6)


@pytest.mark.full
def test_images_train_alike_in_two_modes(tmp_path):
    image_tree(tmp_path, noise(12, 3, 8, 8))
    argv = "--task images --image-size 8 --batch-size 6 --workers 0 --epochs 1 --device cpu".split()
    argv += ["--data-dir", tmp_path, "--dtype", "float64", "--sync-bn"]
    one = single(tmp_path / "one", *argv[:-1])
    many = train("ddp", 2, *argv, folder=tmp_path / "many")
    assert one.code == many.code == 0, one.err + many.err
    assert many.lines[-1]["loss"] == pytest.approx(one.lines[-1]["loss"], rel=1e-9)
