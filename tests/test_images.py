"""What becomes of an image file: its pixels in evaluation, its crop in training."""

import re

import pytest
import torch
import torch.nn.functional as F
from harness import ROOT, TASKS, fetched, keyed, loader_of, make_args, make_sampler, train
from PIL import Image
from short_runs import SMALL

import sampling
import task


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


@pytest.mark.parametrize(("size", "shift"), [(32, 4), (39, 4), (40, 5), (63, 7), (8, 1)])
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
    return images, make_args("single", "--dataset", "imagefolder", "--data-dir", str(folder))


@pytest.mark.parametrize("average", [False, True])
def test_lines_for_a_model_of_torchvision_see_what_the_evaluation_saw(average, tmp_path):
    """The lines of docs/checkpoints.md, on a photograph."""
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    (code,) = re.findall(r"```python\n(import torch, torchvision\n.*?)```", page, re.DOTALL)
    image_tree(tmp_path, 110)
    options = ("--model", "resnet18", "--image-size", "70", "--data-dir", str(tmp_path))
    args = make_args("single", "--dataset", "imagefolder", *options)
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


def test_checkpoint_names_the_classes(tmp_path):
    image_tree(tmp_path, 16)
    argv = ("--dataset", "imagefolder", "--data-dir", str(tmp_path), "--image-size", "16")
    argv = (*argv, "--epochs", "1", "--batch-size", "10")
    result = train("ddp", 2, *argv, folder=tmp_path)
    assert result.code == 0, result.err
    assert result.checkpoint()["classes"] == ["a", "b"]
    held_out = task.build_datasets(make_args("single"))[1]
    assert held_out.classes == [str(digit) for digit in range(10)]
    small = train("single", 1, *SMALL, "--epochs", "1", folder=tmp_path / "digits")
    assert small.checkpoint("best.pt")["classes"] == held_out.classes
    pose = ("--task", str(TASKS / "pose.py"), "--epochs", "1", "--batch-size", "30")
    assert train("dp", 2, *pose, folder=tmp_path / "pose").checkpoint()["classes"] is None


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
