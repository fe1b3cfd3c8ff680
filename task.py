"""The part you replace: data sets, model, loss and metrics of one problem. Here: digits.

A task is any file (--task FILE.py) with the first four functions below; tasks/ has others. The
scripts know nothing of the problem, and a task nothing of devices.

build_datasets(args) -> (train, val)     map-style; a sample is (input, target), each a tensor, a
                                         number, or a nested tuple, list or dict of them; anything
                                         else needs `collate`; `in_memory = True`: no workers.
                                         Each rank must build the same sets: seed each generator
build_model(args) -> nn.Module           called with the random state seeded by --seed
per_sample_loss(outputs, targets)        Tensor [n], differentiable. A parameter after *, as beta
                                         in (outputs, targets, *, beta), gets the option --beta
per_sample_metrics(outputs, targets)     {name: Tensor [n]}; the first metric, where higher is
                                         better, decides which checkpoint is best.pt (see --best).
                                         A list of n values is collected for dataset_metrics

Loss and metrics are numbers per sample: however a batch is cut, they add up to the same. A loss
that compares samples takes those of all ranks from common.gather_samples. A task may also have:

collate(samples)                         (inputs, targets): a batch of a list of samples, which may
                                         have different sizes, and objects with `.to(device)`.
                                         Do not draw in it. The default stacks tensors
loss_weights(targets)                    Tensor [n]: valid tokens, pixels or boxes of each sample.
                                         The loss of a step is then the sum of per_sample_loss over
                                         the global batch / the sum of these weights. So
                                         per_sample_loss returns the sum over each sample, not its
                                         mean. A metric may be a pair, (sums [n], weights [n])
build_optimizer(args, net)               an optimizer of torch.optim, with groups and rates of its
                                         own. The schedule scales each rate
dataset_metrics(lists)                   {name: float}: metrics that are no mean over samples, as
                                         AP. `lists` has the lists of per_sample_metrics, in order
train_metrics(outputs, targets)          the metrics of the training log, beside the loss
shard_modules(net)                       for fsdp: the modules that are sharded each for itself
add_options(parser)                      calls parser.add_argument for options of its own: numbers,
                                         texts, lists; parser.set_defaults(lr=0.01) for the others
"""

from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from sampling import keyed_uniform


def build_datasets(args: Namespace) -> tuple[Dataset, Dataset]:
    """Return 1,437 digits to train on, and 360 to evaluate with."""
    with np.load(Path(__file__).resolve().with_name("data") / "digits.npz") as file:
        images = torch.from_numpy(file["images"]).unsqueeze(1) * 15  # 0..16 becomes 0..240
        labels = torch.from_numpy(file["labels"]).long()
    return Digits(images[:1437], labels[:1437], shift=1), Digits(images[1437:], labels[1437:])


class Digits(Dataset):
    """Images uint8 [N, 1, 8, 8] and labels int64 [N] -> (uint8 [1, 8, 8], int64 []).

    Each image is shifted at random by up to `shift` pixels. The samples are fetched as a whole
    batch, which is faster. Another data set would have __getitem__ alone, and draw random numbers
    with torch, numpy or Python: each sample is read with a seed of its own.
    """

    whole_batches = True  # see __getitems__
    in_memory = True  # on a CPU loader workers would only copy

    def __init__(self, images: Tensor, labels: Tensor, shift: int = 0) -> None:
        # All windows of the padded images: a view [N, 1, 2 shift + 1, 2 shift + 1, 8, 8].
        self.windows = F.pad(images, (shift,) * 4).unfold(2, 8, 1).unfold(3, 8, 1)
        self.targets, self.shift = labels, shift
        self.classes = [str(digit) for digit in range(10)]  # their names, for the checkpoint

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, targets = self.__getitems__([index])
        return images[0], targets[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return a batch: images [n, 1, 8, 8] and labels [n]."""
        draws = torch.from_numpy(keyed_uniform(indices, 2))  # [n, 2] in [0, 1), by sample and epoch
        top, left = (draws * (2 * self.shift + 1)).long().T  # each [n], 0 to 2 * shift
        return self.windows[indices, :, top, left], self.targets[indices]


class DigitNet(nn.Module):
    """Three convolutions, uint8 [n, 1, 8, 8] -> [n, 10].

    Without BatchNorm and dropout its numbers do not depend on how a batch is cut.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 48, 3, padding=1)
        self.conv2 = nn.Conv2d(48, 48, 3, padding=1)
        self.conv3 = nn.Conv2d(48, 96, 3, padding=1)
        self.head = nn.Linear(96 * 2 * 2, 10)

    def forward(self, images: Tensor) -> Tensor:
        pixels = (images.to(self.head.weight.dtype) - 73.3) / 90.2  # mean and deviation of the set
        features = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(pixels)))), 2)
        features = F.max_pool2d(F.relu(self.conv3(features)), 2)
        return self.head(features.flatten(1))


def build_model(args: Namespace) -> nn.Module:
    """Return the network; its weights are random numbers of --seed."""
    return DigitNet()


def per_sample_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each sample: logits [n, 10], labels int64 [n] -> [n].

    Label smoothing, in evaluation too: with it a few more digits are read right.
    """
    return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)


def per_sample_metrics(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return 1.0 where the label is the best guess (top1) or among the best five (top5); [n]."""
    guesses = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
    hits = (guesses == targets.unsqueeze(1)).float()
    return {"top1": hits[:, 0], "top5": hits.sum(1)}


train_metrics = per_sample_metrics  # in the training log too
