"""The default task: which data sets there are, how their images are augmented, its models, losses and metrics."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import ROOT, fetched, make_args
from PIL import Image
from torch import nn

import common
import machinery.cli
import machinery.launch
import machinery.process
import machinery.run
import machinery.usertask
import sampling
import task

# ----------------------------------------------------------------------- which images, which labels


def test_folders_are_classes_and_val_goes_before_test(tmp_path):
    for part, side in (("train", 20), ("val", 21), ("test", 22)):
        for name in ("zebra", "ant"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(2):
                Image.new("RGB", (side, side), (side, i, 0)).save(
                    tmp_path / part / name / f"{i}.png"
                )

    def folders(*argv):
        argv = ("--dataset", "imagefolder", "--data-dir", str(tmp_path), *argv)
        return task.build_datasets(make_args("single", *argv))

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
    args = make_args("single", "--dataset", name, "--data-dir", str(tmp_path))
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


# ------------------------------------------------------------------------------------ normalisation


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("name", "model"), [("digits", "digitnet"), ("cifar10", "resnet9"), ("cifar100", "resnet18")]
)
def test_network_sees_each_channel_normalised_in_its_precision(name, model, dtype, tmp_path):
    argv = ["--dataset", name, "--model", model, "--dtype", dtype]
    argv += [] if name == "digits" else ["--data-dir", str(tmp_path)]
    args = make_args("single", *argv)
    net, seen = machinery.usertask.build_net(args, task).eval(), []
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
    sampling.KeyedDataset.epoch_key = 0  # whatever ran before
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


def test_default_task_augments_by_the_seed_and_only_in_training():
    indices = list(range(100))
    train_set, held_out = task.build_datasets(make_args())
    first, other = (fetched(train_set, 0, indices, seed) for seed in (0, 1))
    assert not first.equal(other) and first.equal(fetched(train_set, 0, indices, 0))
    with np.load(ROOT / "data" / "digits.npz") as file:
        stored = torch.from_numpy(file["images"][1437:1537]).unsqueeze(1) * 15
    assert fetched(held_out, 0, indices).equal(stored)


# ---------------------------------------------------------------------------------------- downloads


# ------------------------------------------------------------------------- models, loss and metrics


def test_label_smoothing_reaches_the_loss():
    outputs, targets = (
        torch.randn(5, 10, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0, 3, 3, 9, 1]),
    )
    logs = outputs.log_softmax(1)
    for smoothing in (0.0, 0.3):
        losses = machinery.usertask.load_task(
            make_args("single", "--label-smoothing", str(smoothing))
        ).per_sample_loss(outputs, targets)
        expected = -(1 - smoothing) * logs[torch.arange(5), targets] - smoothing * logs.mean(1)
        assert torch.allclose(losses, expected, atol=1e-6)


def test_metrics_of_the_default_task():
    outputs = torch.arange(10.0).expand(4, 10)  # class 9 is the best guess, 5 the fifth
    metrics = task.per_sample_metrics(outputs, torch.tensor([9, 8, 5, 4]))
    assert list(metrics) == ["top1", "top5"]
    assert metrics["top1"].tolist() == [1, 0, 0, 0] and metrics["top5"].tolist() == [1, 1, 1, 0]


def test_options_of_a_loss_and_of_a_metric_are_filled_in(tmp_path):
    (tmp_path / "task.py").write_text(
        "def build_datasets(args): pass\ndef build_model(args): pass\n"
        "def per_sample_loss(o, t, *, label_smoothing, lr=5): return o, t, label_smoothing, lr\n"
        "def per_sample_metrics(o, t, *, seed, epochs): return o, t, seed, epochs\n"
    )
    path = str(tmp_path / "task.py")
    args = make_args("single", "--task", path, "--seed", "7", "--label-smoothing", "0.25")
    task = machinery.usertask.load_task(args)
    assert task.per_sample_loss("o", "t") == ("o", "t", 0.25, 0.1), "and no default counts"
    assert task.per_sample_metrics("o", "t") == ("o", "t", 7, 30)
