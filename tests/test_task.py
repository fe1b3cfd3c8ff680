"""The default task: its digits, how they are shifted in training, its network, loss and metrics."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import ROOT, fetched, make_args

import machinery.usertask
import sampling
import task


def stored(first, last):
    """These digits as they lie in the file."""
    with np.load(ROOT / "data" / "digits.npz") as file:
        return torch.from_numpy(file["images"][first:last]).unsqueeze(1) * 15


def test_digits_are_shifted_by_one_pixel_in_training():
    sampling.KeyedDataset.key = 0  # whatever ran before
    train_set, _ = task.build_datasets(make_args())
    padded, seen = F.pad(stored(0, 300), (1,) * 4), train_set.__getitems__(list(range(300)))[0]
    shares = []
    for y in range(3):
        for x in range(3):
            same = padded[:, :, y : y + 8, x : x + 8] == seen
            shares.append(same.flatten(1).all(1).double().mean().item())
    assert 1 <= sum(shares) < 1.01 and min(shares) > 0.05, "each of nine places, and no mirroring"


def test_default_task_augments_by_the_seed_and_only_in_training():
    indices = list(range(100))
    train_set, held_out = task.build_datasets(make_args())
    assert (len(train_set), len(held_out)) == (1437, 360)
    first, other = (fetched(train_set, 0, indices, seed) for seed in (0, 1))
    assert not first.equal(other) and first.equal(fetched(train_set, 0, indices, 0))
    assert fetched(held_out, 0, indices).equal(stored(1437, 1537))
    assert held_out.classes == [str(digit) for digit in range(10)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_network_sees_digits_normalised_in_its_precision(dtype):
    net, seen = machinery.usertask.Task(make_args("single", "--dtype", dtype)).build_net(), []
    net.conv1.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    images = stored(0, 5)
    assert net(images).shape == (5, 10)
    assert seen[0].dtype == getattr(torch, dtype)
    wanted = (images.double() - 73.3) / 90.2
    assert (seen[0].double() - wanted).abs().max() < {"float32": 1e-6, "float64": 1e-14}[dtype]
    pixels = stored(0, 1437).double()
    assert abs(pixels.mean() - 73.3) < 0.1 and abs(pixels.std() - 90.2) < 0.1


def test_metrics_of_the_default_task():
    outputs = torch.arange(10.0).expand(4, 10)  # class 9 is the best guess, 5 the fifth
    metrics = task.per_sample_metrics(outputs, torch.tensor([9, 8, 5, 4]))
    assert list(metrics) == ["top1", "top5"]
    assert metrics["top1"].tolist() == [1, 0, 0, 0] and metrics["top5"].tolist() == [1, 1, 1, 0]


def test_options_of_a_loss_and_of_a_metric_are_filled_in(tmp_path):
    (tmp_path / "task.py").write_text(
        "def add_options(parser): parser.add_argument('--smoothing', type=float)\n"
        "def build_datasets(args): pass\ndef build_model(args): pass\n"
        "def per_sample_loss(o, t, *, smoothing, lr=5): return o, t, smoothing, lr\n"
        "def per_sample_metrics(o, t, *, seed, epochs): return o, t, seed, epochs\n"
    )
    path = str(tmp_path / "task.py")
    args = make_args("single", "--task", path, "--seed", "7", "--smoothing", "0.25")
    task = machinery.usertask.Task(args)
    assert task.per_sample_loss("o", "t") == ("o", "t", 0.25, 0.1), "and no default counts"
    assert task.per_sample_metrics("o", "t") == ("o", "t", 7, 30)
