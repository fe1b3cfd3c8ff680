"""`--task images`: data sets, pixels in evaluation, crops in training, models, and the loss."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import ROOT, fetched, keyed, loader_of, make_args, make_sampler, train
from PIL import Image
from torch import nn

import common
import machinery.usertask
import sampling
import tasks.images as task


def arguments(folder, *more, dataset="imagefolder"):
    argv = ("--task", "images", "--dataset", dataset, "--data-dir", str(folder), *more)
    return make_args("single", *argv)


def noise(height, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)


def write(folder, *images):
    """Write images as PNG, which loses nothing; return the samples (path, label)."""
    samples = []
    for i, image in enumerate(images):
        path = folder / f"{i:03}.png"
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
        samples.append((str(path), i % 3))
    return samples


def resized(image, height, width):
    """Antialiased bilinear interpolation in float64, rounded to bytes."""
    wide = F.interpolate(image[None].double(), (height, width), mode="bilinear", antialias=True)
    return wide[0].round().clamp(0, 255)


@pytest.mark.parametrize(
    ("size", "height", "width"),
    [
        (64, 333, 100),
        (69, 120, 160),
        (70, 40, 60),
    ],
)
def test_evaluation_resizes_the_shorter_side_and_takes_the_middle(size, height, width, tmp_path):
    image = noise(height, width)
    dataset = task.ImageFiles(write(tmp_path, image), size, training=False)
    (seen,), _ = dataset.__getitems__([0])
    assert seen.dtype == torch.uint8 and seen.shape == (3, size, size)
    shorter = size * 8 // 7
    new = [shorter * height // min(height, width), shorter * width // min(height, width)]
    wanted = resized(image, *new)
    top, left = (round((side - size) / 2) for side in new)
    wanted = wanted[:, top : top + size, left : left + size]
    assert (seen.double() - wanted).abs().max() <= 1, "but for roundings"
    assert (seen.double() - wanted).abs().mean() < 0.3


# ----------------------------------------------------------------------------------------- training


def test_crop_is_keyed_by_the_sample_the_epoch_and_the_seed(tmp_path):
    samples = write(tmp_path, noise(90, 110)) * 8

    def cut(indices, epoch=0, seed=0):
        torch.manual_seed(len(indices))  # what else was drawn does not matter
        return fetched(task.ImageFiles(samples, 64, training=True), epoch, indices, seed)

    images = cut([0, 1, 2, 3, 4, 5, 6, 7])
    assert len({image.numpy().tobytes() for image in images}) == 8, "one file, eight samples"
    assert cut([6, 2]).equal(images[[6, 2]]) and cut([2, 2, 2]).equal(images[[2, 2, 2]])
    assert all(cut([index])[0].equal(images[index]) for index in range(8))
    everything = [images, cut(list(range(8)), epoch=1), cut(list(range(8)), seed=1)]
    assert len({image.numpy().tobytes() for several in everything for image in several}) == 24


def test_crop_is_made_as_torchvision_makes_it(tmp_path):
    """Antialiased, from the pixels of the file."""
    from torchvision.transforms import v2

    image = noise(300, 400)
    dataset = task.ImageFiles(write(tmp_path, image) * 8, 64, training=True)
    seen = fetched(dataset, 2, list(range(8)), seed=3)
    recipe = v2.Compose([v2.RandomResizedCrop(64, antialias=True), v2.RandomHorizontalFlip()])
    for index in range(8):
        torch.manual_seed(sampling.splitmix64(sampling.splitmix64(3, 2), index))
        assert seen[index].equal(recipe(image))


# ------------------------------------------------------------------------------------- small images


@pytest.mark.parametrize(("size", "shift"), [(39, 4), (40, 5), (8, 1)])
def test_small_images_are_shifted_by_an_eighth_and_half_of_them_mirrored(size, shift, tmp_path):
    image = noise(size, size).clamp(min=1)
    samples = write(tmp_path, image) * 200
    images, _ = task.ImageFiles(samples, size, training=True).__getitems__(list(range(200)))
    padded = F.pad(image, (shift,) * 4)
    windows = {}
    for y in range(2 * shift + 1):
        for x in range(2 * shift + 1):
            window = padded[:, y : y + size, x : x + size]
            windows[window.numpy().tobytes()] = y, x, False
            windows[window.flip(-1).contiguous().numpy().tobytes()] = y, x, True
    found = torch.tensor([windows[shown.numpy().tobytes()] for shown in images])
    for axis in (0, 1):
        assert (found[:, axis].min(), found[:, axis].max()) == (0, 2 * shift), "to both sides"
        assert abs(found[:, axis].double().mean() - shift) < 0.15 * (2 * shift + 1)
    assert 70 < found[:, 2].sum() < 130
    assert len({tuple(row[:2]) for row in found.tolist()}) > min(40, (2 * shift + 1) ** 2 - 1)


# --------------------------------------------------------------------------- whole batches of files


def image_tree(folder, side):
    """Two classes of 20 images each, PNG, which loses nothing; the held-out ones are the same."""
    from torchvision.io import write_png

    images = torch.randint(
        0, 256, (40, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    for part in ("train", "val"):
        for i, image in enumerate(images):
            path = folder / part / "ab"[i // 20] / f"{i:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_png(image, str(path))
    return images, arguments(folder)


@pytest.mark.parametrize("average", [False, True])
def test_lines_for_a_model_of_torchvision_see_what_the_evaluation_saw(average, tmp_path):
    """The lines of docs/checkpoints.md, on a photograph."""
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    (code,) = re.findall(r"```python\n(import torch, torchvision\n.*?)```", page, re.DOTALL)
    image_tree(tmp_path, 110)
    args = arguments(tmp_path, "--model", "resnet18", "--image-size", "70")
    raw, net = (task.build_model(args).eval() for _ in range(2))
    (name,) = write(tmp_path, noise(150, 211))
    (image,), _ = task.ImageFiles([name], 70, training=False).__getitems__([0])
    checkpoint = {"model": net.state_dict(), "average": {}}
    if average:
        checkpoint = {"model": raw.state_dict(), "average": {"n_averaged": 3, **net.state_dict()}}
    checkpoint |= {"classes": ["a", "b"], "config": {"image_size": 70}}
    torch.save(checkpoint, tmp_path / "best.pt")
    code = code.replace("runs/mine/best.pt", str(tmp_path / "best.pt"))
    found: dict = {}
    exec(code.replace("photo.jpg", name[0]), found)
    with torch.no_grad():
        wanted, other = net(image[None]), raw(image[None])
    assert (wanted - other).abs().max() > 1e-3
    assert (found["logits"] - wanted).abs().max() < 1e-5 * wanted.abs().max()


SMALL_NET = """from tasks.images import *
from torch import nn
class Net(nn.Linear):
    def forward(self, images): return super().forward(images.flatten(1).float() / 255)
def build_model(args): return Net(3 * 16 * 16, 2)
"""


def test_checkpoint_names_the_classes(tmp_path):
    image_tree(tmp_path, 16)
    (tmp_path / "task.py").write_text(SMALL_NET)
    argv = ("--task", tmp_path / "task.py", "--data-dir", tmp_path, "--image-size", "16")
    argv = (*argv, "--epochs", "1", "--batch-size", "10", "--workers", "0")
    result = train("ddp", 2, *argv, folder=tmp_path)
    assert result.code == 0, result.err
    assert result.checkpoint()["classes"] == ["a", "b"]


def loaded(args, dataset, workers, world_size=1):
    """Return [40, ...]: each sample of epoch 3, by its index, as so many workers of so many ranks load it."""
    images, args.workers = {}, workers
    for rank in range(world_size):
        sampler = make_sampler(40, 8, rank, world_size)
        sampler.set_position(3, 0)
        loader = loader_of(args, dataset, sampler, torch.device("cpu"))
        for (_, indices), (batch, _) in zip(list(sampler), loader):
            images |= dict(zip(indices, batch))
    return torch.stack([images[index] for index in range(40)])


@pytest.mark.parametrize(
    ("size", "side"), [(16, 16), (16, 20), (64, 80)], ids=["as it is", "resized", "photographs"]
)
def test_image_file_is_augmented_alike_whoever_loads_it(size, side, tmp_path):
    images, args = image_tree(tmp_path, side)
    args.image_size = size
    train_set, val_set = task.build_datasets(args)
    alone = loaded(args, train_set, 0)
    assert alone.shape == (40, 3, size, size) and alone.dtype == torch.uint8
    for workers, world_size in ((2, 1), (0, 3), (1, 3)):
        assert loaded(args, train_set, workers, world_size).equal(alone)
    assert (
        not any(image.equal(other) for image, other in zip(loaded(args, val_set, 0), alone))
        or size == 16
    )
    assert not fetched(train_set, 4, list(range(40))).equal(alone), (
        "another epoch, another augmentation"
    )
    assert len({image.numpy().tobytes() for image in loaded(args, val_set, 0)}) == 40, (
        "and none in evaluation, whatever the epoch"
    )
    held_out, targets = val_set.__getitems__([39, 0])
    assert targets.tolist() == [1, 0]
    if size == side:
        assert held_out.equal(images[[39, 0]])
        windows = task.windows_of(images, 2)
        for index in range(40):
            crops = torch.from_numpy(windows[index].reshape(3, 25, 16, 16).copy()).transpose(0, 1)
            assert any(
                alone[index].equal(crop) or alone[index].equal(crop.flip(-1)) for crop in crops
            )


def test_damaged_png_is_an_error_and_not_the_end_of_the_process(tmp_path):
    image_tree(tmp_path, 64)
    content = (tmp_path / "train" / "a" / "00.png").read_bytes()
    for i in range(8):
        broken = bytearray(content)
        broken[len(broken) * (i + 1) // 10] ^= 0xFF
        (tmp_path / "broken.png").write_bytes(broken)
        with pytest.raises(OSError, match=r"broken\.png"):
            task.read_images([str(tmp_path / "broken.png")])


def test_broken_image_is_named_or_replaced_in_a_whole_batch_too(tmp_path, capfd):
    images, args = image_tree(tmp_path, 16)
    args.image_size = 16
    (tmp_path / "val" / "a" / "03.png").write_bytes(b"no picture")
    (tmp_path / "val" / "b" / "39.png").write_bytes(
        (tmp_path / "val" / "b" / "39.png").read_bytes()[:300]
    )
    _, val_set = task.build_datasets(args)
    with pytest.raises(
        RuntimeError,
        match=r"sample 3 cannot be read: .*val/a/03\.png: .*; --skip-corrupt takes the next one",
    ):
        keyed(val_set, args).__getitems__((0, [2, 3]))
    args.skip_corrupt = True
    seen, targets = keyed(val_set, args).__getitems__((0, [3, 39, 7]))
    assert seen.equal(images[[4, 0, 7]]) and targets.tolist() == [0, 0, 0]
    assert capfd.readouterr().err.count("the next one takes its place") == 2


# ------------------------------------------------------- data sets, models, loss


def test_folders_are_classes_and_val_goes_before_test(tmp_path):
    for part, side in (("train", 20), ("val", 21), ("test", 22)):
        for name in ("zebra", "ant"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(2):
                Image.new("RGB", (side, side), (side, i, 0)).save(
                    tmp_path / part / name / f"{i}.png"
                )

    def folders(*argv):
        return task.build_datasets(arguments(tmp_path, *argv))

    train_set, val_set = folders("--image-size", "16")
    assert train_set.targets.tolist() == val_set.targets.tolist() == [0, 0, 1, 1]
    assert b"train/ant/0.png" in train_set.paths[0] and b"val/zebra/1.png" in val_set.paths[3]
    assert (train_set.training, val_set.training) == (True, False)
    assert train_set[0][0].shape == (3, 16, 16) and folders()[1][0][0].shape == (3, 224, 224)
    (tmp_path / "val").rename(tmp_path / "other")
    assert b"test/ant" in folders()[1].paths[0]
    (tmp_path / "test" / "ant").rename(tmp_path / "test" / "bee")
    with pytest.raises(common.UsageError, match=r"must have the same classes.*ant, bee"):
        folders()
    assert task.build_model(arguments(tmp_path)).head.out_features == 2


@pytest.mark.parametrize(
    ("name", "side", "flip"),
    [("mnist", 28, False), ("cifar10", 32, True)],
)
def test_arrays_are_augmented_in_training_only(name, side, flip, tmp_path, monkeypatch):
    channels = 3 if name == "cifar10" else 1
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(
        1, 256, (60, channels, side, side), dtype=torch.uint8, generator=generator
    )

    class Source:
        def __init__(self, root, train, download):
            self.classes = ["cat", "dog"]
            stored = images.permute(0, 2, 3, 1).numpy() if channels == 3 else images[:, 0]
            self.data, self.targets = (
                stored[: 60 if train else 20],
                list(range(60 if train else 20)),
            )

    monkeypatch.setattr(f"torchvision.datasets.{task.TORCHVISION[name]}", Source)
    args = arguments(tmp_path, dataset=name)
    train_set, val_set = task.build_datasets(args)
    assert (len(train_set), len(val_set)) == (60, 20) and val_set.classes == ["cat", "dog"]
    seen, labels = val_set.__getitems__([19, 4])
    assert seen.equal(images[[19, 4]]) and labels.tolist() == [19, 4]
    shown, _ = train_set.__getitems__(list(range(60)))
    shift, mirrored, offsets = side // 8, 0, []
    padded = F.pad(images, (shift,) * 4)
    places = [(y, x) for y in range(2 * shift + 1) for x in range(2 * shift + 1)]
    for image, whole in zip(shown, padded):

        def found(wanted, whole=whole):
            windows = ((p, whole[:, p[0] : p[0] + side, p[1] : p[1] + side]) for p in places)
            return [place for place, window in windows if window.equal(wanted)]

        straight = found(image)
        offsets += straight or found(image.flip(-1))
        mirrored += not straight
    assert len(offsets) == 60
    assert 15 < mirrored < 45 if flip else mirrored == 0
    assert np.min(offsets) == 0 and np.max(offsets) == 2 * shift


@pytest.mark.parametrize(
    ("name", "model", "dtype"),
    [("mnist", "resnet9", "float64"), ("cifar100", "resnet18", "float32")],
)
def test_network_sees_each_channel_normalised_in_its_precision(name, model, dtype, tmp_path):
    args = arguments(tmp_path, "--model", model, "--dtype", dtype, dataset=name)
    net, seen = machinery.usertask.Task(args).build_net().eval(), []
    net.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    channels, side, classes, mean, std = task.DATASETS[name]
    values = torch.arange(256, dtype=torch.uint8).repeat(channels * side * side // 256 + 1)
    images = values[: channels * side * side].view(1, channels, side, side)
    assert net(images).shape == (1, classes)
    exact = []
    for channel, center, spread in zip(images[0], mean, std):
        exact.append([(value - center) / spread for value in channel.flatten().tolist()])
    wanted = torch.tensor(exact, dtype=torch.float64).view_as(images)
    assert seen[0].dtype == getattr(torch, dtype)
    assert (seen[0].double() - wanted).abs().max() < {"float32": 1e-6, "float64": 1e-14}[dtype]
    assert not {"mean", "std"} & dict(net.named_buffers()).keys(), "not in a checkpoint"


@pytest.mark.parametrize("pretrained", [False, True])
def test_models_of_torchvision_have_one_output_and_the_classes_of_the_data(pretrained, monkeypatch):
    from torchvision import models

    told = []

    def get_model(name, **settings):
        told.append((name, settings))
        return nn.Linear(1, 1)

    trained = nn.Linear(1, 1)
    state = SimpleNamespace(get_state_dict=lambda check_hash: trained.state_dict())
    monkeypatch.setattr(models, "get_model", get_model)
    monkeypatch.setattr(models, "get_model_weights", lambda name: SimpleNamespace(DEFAULT=state))
    argv = ["--task", "images", "--dataset", "synthetic"]
    argv += ["--pretrained"] if pretrained else []
    for name in ("resnet18", "googlenet", "inception_v3"):
        net = task.build_model(make_args("single", *argv, "--model", name))
        assert net.weight.equal(trained.weight) == pretrained
    plain = {"weights": None, "num_classes": 1000}
    one = {**plain, "aux_logits": False, "init_weights": True, "transform_input": pretrained}
    assert told == [("resnet18", plain), ("googlenet", one), ("inception_v3", one)]


def test_model_for_three_channels_is_refused_for_one(tmp_path):
    with pytest.raises(
        common.UsageError, match="--model resnet18 takes 3 channels, --dataset mnist"
    ):
        task.build_model(arguments(tmp_path, "--model", "resnet18", dataset="mnist"))


def test_label_smoothing_reaches_the_loss():
    outputs, targets = (
        torch.randn(5, 10, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0, 3, 3, 9, 1]),
    )
    logs = outputs.log_softmax(1)
    for smoothing in (0.0, 0.3):
        args = make_args("single", "--task", "images", "--label-smoothing", str(smoothing))
        losses = machinery.usertask.Task(args).per_sample_loss(outputs, targets)
        expected = -(1 - smoothing) * logs[torch.arange(5), targets] - smoothing * logs.mean(1)
        assert torch.allclose(losses, expected, atol=1e-6)
