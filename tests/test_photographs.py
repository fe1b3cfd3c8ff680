"""What becomes of an image: its pixels in evaluation, its crop in training, and its numbers."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import make_args
from PIL import Image
from torch import nn

import common
import machinery.tasks
import sampling
import task


def noise(height, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)


def plane(height, width):
    """Red is the row and green the column, so that a crop shows where it was cut."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([rows, columns, 7 * torch.ones_like(rows)]).to(torch.uint8)


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


# ---------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize(
    ("size", "height", "width"),
    [
        (64, 150, 211),
        (64, 333, 100),
        (69, 120, 160),
        (69, 160, 120),
        (64, 73, 73),
        (70, 40, 60),
        (224, 300, 400),
    ],
)
def test_evaluation_resizes_the_shorter_side_and_takes_the_middle(size, height, width, tmp_path):
    image = noise(height, width)
    dataset = task.ImageFiles(write(tmp_path, image), size, training=False, seed=0)
    (seen,), _ = dataset.__getitems__([0])
    assert seen.dtype == torch.uint8 and seen.shape == (3, size, size)
    shorter = size * 8 // 7
    new = [shorter * height // min(height, width), shorter * width // min(height, width)]
    wanted = resized(image, *new)
    top, left = (round((side - size) / 2) for side in new)
    wanted = wanted[:, top : top + size, left : left + size]
    assert (seen.double() - wanted).abs().max() <= 1, "but for roundings"
    assert (seen.double() - wanted).abs().mean() < 0.3


def test_evaluation_depends_on_nothing_but_the_file(tmp_path):
    samples = write(tmp_path, *(noise(100, 90 + i, i) for i in range(3)))
    datasets = [task.ImageFiles(samples, 64, training=False, seed=seed) for seed in (0, 1)]
    first, labels = datasets[0].__getitems__([0, 1, 2])
    assert labels.tolist() == [0, 1, 2] and labels.dtype == torch.int64
    datasets[1].set_epoch(5)
    assert datasets[1].__getitems__([2, 1, 0])[0].flip(0).equal(first)
    one, label = datasets[0][1]
    assert one.equal(first[1]) and label == 1


# ------------------------------------------------------------------------------------- training


@pytest.fixture(scope="module")
def crops(tmp_path_factory):
    """300 crops of one picture of 240 x 200 pixels, as (top, bottom, left, right, mirrored)."""
    samples = write(tmp_path_factory.mktemp("plane"), plane(240, 200)) * 300
    dataset = task.ImageFiles(samples, 64, training=True, seed=0)
    images = torch.cat([dataset.__getitems__(list(range(i, i + 50)))[0] for i in range(0, 300, 50)])
    assert images.shape == (300, 3, 64, 64) and images.dtype == torch.uint8
    boxes = []
    for rows, columns, mark in images.double():
        assert (mark == 7).all(), "no edge, no padding"
        assert rows.std(1).max() <= 1 and columns.std(0).max() <= 1, "neither turned nor mixed"
        top, bottom = rows[0].mean(), rows[-1].mean()
        left, right = columns[:, 0].mean(), columns[:, -1].mean()
        assert top < bottom, "not upside down"
        scale = 64 / 63  # the first and the last pixel stand for their middles
        boxes.append([top, bottom, min(left, right), max(left, right), left > right])
        boxes[-1] += [(bottom - top) * scale, abs(right - left) * scale]
    return torch.tensor(boxes, dtype=torch.float64)


def test_training_crops_are_of_any_size_and_shape_within_the_recipe(crops):
    heights, widths = crops[:, 5], crops[:, 6]
    areas, ratios = heights * widths / (240 * 200), widths / heights
    assert 0.07 < areas.min() < 0.12 and 0.85 < areas.max() < 1.03, "8 % to all of the picture"
    assert 0.4 < areas.mean() < 0.6 and 0.15 < (areas < 0.3).double().mean() < 0.35
    assert 0.72 < ratios.min() < 0.78 and 1.28 < ratios.max() < 1.38, "3:4 to 4:3"


def test_training_crops_are_cut_anywhere(crops):
    top, bottom, left, right, *_ = crops.T
    for low, high, side in ((top, bottom, 240), (left, right, 200)):
        room = side - (high - low)
        place = (low / room)[room > 40]
        assert place.min() < 0.1 and place.max() > 0.85 and 0.4 < place.mean() < 0.6


def test_half_of_the_crops_are_mirrored(crops):
    mirrored = crops[:, 4]
    assert 120 < mirrored.sum() < 180
    correlation = torch.corrcoef(torch.stack([mirrored, crops[:, 0]]))[0, 1]
    assert abs(correlation) < 0.2, "wherever they are cut"


def test_crop_is_keyed_by_the_sample_the_epoch_and_the_seed(tmp_path):
    samples = write(tmp_path, noise(90, 110)) * 8

    def cut(indices, epoch=0, seed=0):
        dataset = task.ImageFiles(samples, 64, training=True, seed=seed)
        dataset.set_epoch(epoch)
        torch.manual_seed(len(indices))  # what else was drawn does not matter
        return dataset.__getitems__(indices)[0]

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
    dataset = task.ImageFiles(write(tmp_path, image) * 8, 64, training=True, seed=3)
    dataset.set_epoch(2)
    seen, _ = dataset.__getitems__(list(range(8)))
    recipe = v2.Compose([v2.RandomResizedCrop(64, antialias=True), v2.RandomHorizontalFlip()])
    for index in range(8):
        torch.manual_seed(sampling.splitmix64(3, 2, index))
        assert seen[index].equal(recipe(image))


# --------------------------------------------------------------------------------- small images


@pytest.mark.parametrize(("height", "width"), [(20, 40), (40, 20), (63, 63), (33, 31), (100, 50)])
def test_small_images_fill_the_frame(height, width, tmp_path):
    image = noise(height, width)
    dataset = task.ImageFiles(write(tmp_path, image), 32, training=False, seed=0)
    (seen,), _ = dataset.__getitems__([0])
    wanted = resized(image, 32, 32)  # all of the image, whatever its shape
    assert seen.shape == (3, 32, 32) and (seen.double() - wanted).abs().max() <= 1


def test_image_of_the_right_size_is_not_touched(tmp_path):
    image = noise(63, 63)
    samples = write(tmp_path, image)
    assert task.ImageFiles(samples, 63, training=False, seed=0)[0][0].equal(image)
    (large,), _ = task.ImageFiles(samples, 64, training=False, seed=0).__getitems__([0])
    assert not large[:, :63, :63].equal(image), "from 64 pixels on it is resized and cropped"


@pytest.mark.parametrize(("size", "shift"), [(32, 4), (39, 4), (40, 5), (63, 7), (8, 1)])
def test_small_images_are_shifted_by_an_eighth_and_half_of_them_mirrored(size, shift, tmp_path):
    image = noise(size, size).clamp(min=1)
    samples = write(tmp_path, image) * 200
    images, _ = task.ImageFiles(samples, size, training=True, seed=0).__getitems__(list(range(200)))
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


def test_draws_decide_the_window_and_the_mirroring():
    """Equal parts of 0 to 1 for each of the windows, and half of it for each direction."""
    image = noise(6, 7)[None]
    windows, padded = task.windows_of(image, 2), F.pad(image, (2,) * 4)[0]
    below = 1 - 2.0**-53
    for row, y in ((0.0, 0), (0.1999999, 0), (0.2000001, 1), (0.5, 2), (0.7999999, 3), (below, 4)):
        for column, x in ((0.0, 0), (0.3999999, 1), (0.4000001, 2), (below, 4)):
            for mirror, turned in ((0.0, True), (0.4999999, True), (0.5, False), (below, False)):
                draws = np.array([[row, column, mirror]])
                window = padded[:, y : y + 6, x : x + 7]
                (seen,) = task.shift_and_flip(windows, np.array([0]), draws, flip=False)
                assert seen.equal(window)
                (seen,) = task.shift_and_flip(windows, np.array([0]), draws, flip=True)
                assert seen.equal(window.flip(-1) if turned else window)


def test_small_image_files_are_keyed_by_the_sample(tmp_path):
    samples = write(tmp_path, noise(30, 50)) * 30

    def shown(indices, epoch=0, seed=0):
        dataset = task.ImageFiles(samples, 24, training=True, seed=seed)
        dataset.set_epoch(epoch)
        return dataset.__getitems__(indices)[0]

    images = shown(list(range(30)))
    assert shown([17, 3]).equal(images[[17, 3]])
    assert not shown(list(range(30)), epoch=1).equal(images)
    assert not shown(list(range(30)), seed=1).equal(images)


# ------------------------------------------------------------------- which images, which labels


def test_folders_are_classes_and_val_goes_before_test(tmp_path):
    for part, side in (("train", 20), ("val", 21), ("test", 22)):
        for name in ("zebra", "ant"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(2):
                Image.new("RGB", (side, side), (side, i, 0)).save(
                    tmp_path / part / name / f"{i}.png",
                )

    def folders(*argv):
        argv = ("--dataset", "imagefolder", "--data-dir", str(tmp_path), *argv)
        return task.build_datasets(make_args("single", *argv))

    train_set, val_set = folders("--image-size", "16", "--seed", "5")
    assert train_set.targets.tolist() == val_set.targets.tolist() == [0, 0, 1, 1]
    assert b"train/ant/0.png" in train_set.paths[0] and b"val/zebra/1.png" in val_set.paths[3]
    assert (train_set.training, val_set.training, train_set.seed) == (True, False, 5)
    assert train_set[0][0].shape == (3, 16, 16) and folders()[1][0][0].shape == (3, 224, 224)
    (tmp_path / "val").rename(tmp_path / "other")
    assert b"test/ant" in folders()[1].paths[0]
    (tmp_path / "test" / "ant").rename(tmp_path / "test" / "bee")
    with pytest.raises(common.UsageError, match=r"must have the same classes.*ant, bee"):
        folders()
    args = make_args("single", "--dataset", "imagefolder", "--data-dir", str(tmp_path))
    assert task.build_model(args).head.out_features == 2


@pytest.mark.parametrize(
    ("name", "side", "flip"),
    [("mnist", 28, False), ("fashion-mnist", 28, True), ("cifar10", 32, True)],
)
def test_arrays_are_augmented_in_training_only(name, side, flip, tmp_path, monkeypatch):
    channels = 3 if name == "cifar10" else 1
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(
        1,
        256,
        (60, channels, side, side),
        dtype=torch.uint8,
        generator=generator,
    )

    class Source:
        def __init__(self, root, train, download):
            stored = images.permute(0, 2, 3, 1).numpy() if channels == 3 else images[:, 0]
            self.data, self.targets = (
                stored[: 60 if train else 20],
                list(range(60 if train else 20)),
            )

    monkeypatch.setattr(f"torchvision.datasets.{task.TORCHVISION[name]}", Source)
    args = make_args("single", "--dataset", name, "--data-dir", str(tmp_path), "--seed", "3")
    train_set, val_set = task.build_datasets(args)
    assert (len(train_set), len(val_set)) == (60, 20) and train_set.seed == 3
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


def test_synthetic_images_cost_nothing_and_have_the_size_that_was_asked_for():
    train_set, val_set = task.build_datasets(
        make_args("single", "--dataset", "synthetic", "--image-size", "40"),
    )
    assert (len(train_set), len(val_set)) == (10_000, 1_000)
    images, labels = train_set.__getitems__([0, 999, 1000])
    assert images.shape == (3, 3, 40, 40) and labels.tolist() == [0, 999, 0]
    assert images[0].equal(images[1]) and images.double().std() > 60
    assert val_set[0][0].equal(images[0])
    assert task.build_datasets(make_args("single", "--dataset", "synthetic"))[1][0][0].shape == (
        3,
        224,
        224,
    )


# -------------------------------------------------------------------------------- normalisation

PUBLISHED = {  # mean and standard deviation of each channel, on the scale 0..1
    "mnist": ([0.1307], [0.3081]),
    "fashion-mnist": ([0.2860], [0.3530]),
    "cifar10": ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    "cifar100": ([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
    "imagefolder": ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    "synthetic": ([0.5, 0.5, 0.5], [12**-0.5] * 3),
}
SHAPES = {
    "digits": (1, 8, 10),
    "mnist": (1, 28, 10),
    "fashion-mnist": (1, 28, 10),
    "cifar10": (3, 32, 10),
}
SHAPES |= {"cifar100": (3, 32, 100), "imagefolder": (3, 224, None), "synthetic": (3, 224, 1000)}


def test_constants_of_every_data_set():
    assert {name: values[:3] for name, values in task.DATASETS.items()} == SHAPES
    for name, published in PUBLISHED.items():
        for mine, known in zip(task.DATASETS[name][3:], published):
            assert np.allclose(np.array(mine) / 255, known, rtol=0, atol=4e-4), name
    images = task.build_datasets(make_args())[0].windows[:, :, 1, 1].astype(np.float64)
    (mean,), (std,) = task.DATASETS["digits"][3:]
    assert abs(images.mean() - mean) < 0.5 and abs(images.std() - std) < 0.5


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("name", "model"),
    [("digits", "digitnet"), ("cifar10", "resnet9"), ("cifar100", "resnet18")],
)
def test_network_sees_each_channel_normalised_in_its_precision(name, model, dtype, tmp_path):
    argv = ["--dataset", name, "--model", model, "--dtype", dtype]
    argv += [] if name == "digits" else ["--data-dir", str(tmp_path)]
    args = make_args("single", *argv)
    net, seen = machinery.tasks.build_net(args, task, torch.device("cpu")).eval(), []
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


def test_logits_of_resnet9_are_an_eighth_of_its_head():
    """Or the large learning rate that it is made for would be too large at the start."""
    net, seen = task.ResNet9(3, 10).eval(), []
    net.head.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs))
    logits = net(torch.randn(2, 3, 32, 32))
    assert logits.equal(seen[0] / 8) and net.head.bias is None


class Identity(nn.Module):
    def forward(self, images):
        return images


def test_constants_of_one_precision_are_not_those_of_another():
    """They are kept from call to call."""
    images = torch.full((1, 1, 2, 2), 200, dtype=torch.uint8)
    for dtype in (torch.float32, torch.float64, torch.float32):
        (found,) = task.normalize(Identity(), (images,), mean=(0.1,), std=(0.3,), dtype=dtype)
        assert found.dtype == dtype
        rounding = torch.finfo(dtype).eps
        assert math.isclose(found[0, 0, 0, 0].item(), 199.9 / 0.3, rel_tol=4 * rounding)


def test_fewer_than_five_classes_are_all_among_the_best_five():
    outputs, targets = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]]), torch.tensor([1, 2])
    metrics = task.per_sample_metrics(outputs, targets)
    assert {name: values.tolist() for name, values in metrics.items()} == {
        "top1": [1, 0],
        "top5": [1, 1],
    }


@pytest.mark.parametrize("weights", [None, "default"])
def test_models_of_torchvision_have_one_output_and_the_classes_of_the_data(weights, monkeypatch):
    from torchvision import models

    told = []

    def get_model(name, **settings):
        told.append((name, settings))
        return nn.Linear(1, 1)

    state = SimpleNamespace(get_state_dict=lambda check_hash: nn.Linear(1, 1).state_dict())
    monkeypatch.setattr(models, "get_model", get_model)
    monkeypatch.setattr(models, "get_model_weights", lambda name: SimpleNamespace(DEFAULT=state))
    argv = ["--weights", weights] if weights else []
    for name in ("resnet18", "googlenet", "inception_v3"):
        task.build_model(make_args("single", "--dataset", "synthetic", "--model", name, *argv))
    plain = {"weights": None, "num_classes": 1000}
    one = {**plain, "aux_logits": False, "init_weights": True, "transform_input": bool(weights)}
    assert told == [("resnet18", plain), ("googlenet", one), ("inception_v3", one)]


def test_digits_are_shifted_by_one_pixel_in_training():
    train_set, _ = task.build_datasets(make_args())
    with np.load(common.Path(task.__file__).with_name("data") / "digits.npz") as file:
        stored = torch.from_numpy(file["images"][:300]).unsqueeze(1) * 15
    padded, seen = F.pad(stored, (1,) * 4), train_set.__getitems__(list(range(300)))[0]
    shares = []
    for y in range(3):
        for x in range(3):
            same = padded[:, :, y : y + 8, x : x + 8] == seen
            shares.append(same.flatten(1).all(1).double().mean().item())
    assert 1 <= sum(shares) < 1.01 and min(shares) > 0.05, "each of nine places, and no mirroring"
