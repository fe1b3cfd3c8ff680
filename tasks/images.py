"""Image classification, `--task images`: torchvision's sets and models, or directories of pictures.

bash run.sh ddp 2 --task images --data-dir pictures --model resnet18
bash run.sh ddp 2 --task images --dataset cifar10 --data-dir data --download

`pictures` holds a directory for each class: pictures/train/cat/1.jpg, pictures/val/cat/9.jpg.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import os
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from common import fail, load_weights, print0
from sampling import keyed_uniform

# torchvision takes a second to import, so it is imported where it is used.

# name: (class of torchvision, channels, classes, mean, standard deviation) of bytes from 0 to 255
DATASETS = {
    "mnist": ("MNIST", 1, 10, (33.3,), (78.6,)),
    "fashion-mnist": ("FashionMNIST", 1, 10, (72.9,), (90.0,)),
    "cifar10": ("CIFAR10", 3, 10, (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)),
    "cifar100": ("CIFAR100", 3, 100, (129.3, 124.1, 112.4), (68.2, 65.4, 70.4)),
    "imagefolder": ("ImageFolder", 3, None, (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)),
}


def add_options(parser: argparse._ArgumentGroup) -> None:
    """Add the options of this task."""
    if not importlib.util.find_spec("torchvision"):
        fail("--task images needs the package torchvision: pip install torchvision")
    add = parser.add_argument
    add("--dataset", choices=[*DATASETS], default="imagefolder", help="default: %(default)s")
    add("--data-dir", type=os.path.abspath, metavar="DIR", help="of the data set's files")
    add("--val-dir", default="val", metavar="NAME", help="evaluation set (default: %(default)s)")
    switch = {"action": argparse.BooleanOptionalAction, "default": False}
    add("--download", **switch, help="fetch the data set if --data-dir lacks it")
    add("--image-size", type=int, metavar="N", help="side of imagefolder's images (default: 224)")
    model = "resnet9, for small images, or a classifier of torchvision (default: %(default)s)"
    add("--model", metavar="NAME", default="resnet9", help=model)
    add("--pretrained", **switch, help="start from torchvision's weights for --model")
    smoothing = "probability spread over all classes, in evaluation too (default: %(default)s)"
    add("--label-smoothing", type=float, metavar="X", default=0.1, help=smoothing)


def build_datasets(args: Namespace) -> tuple[Dataset, Dataset]:
    """Return the training set (augmented) and the held-out set of --dataset."""
    if not args.data_dir:
        fail(f"--dataset {args.dataset} needs --data-dir, the directory of its files")
    if args.dataset == "imagefolder":
        return image_folders(args)
    return torchvision_arrays(args)


def torchvision_arrays(args: Namespace) -> tuple[Dataset, Dataset]:
    """Read MNIST or CIFAR from torchvision's files into memory; --download fetches them."""
    from torchvision import datasets

    sets, kind = [], getattr(datasets, DATASETS[args.dataset][0])
    if args.download:
        Path(args.data_dir).mkdir(parents=True, exist_ok=True)
        with open(Path(args.data_dir, ".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of a machine one by one: the first fetches
            kind(args.data_dir, download=True)  # both parts
    for train in (True, False):
        source = kind(args.data_dir, train=train)  # raises RuntimeError if it is not there
        images = torch.as_tensor(source.data)
        images = images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2)
        shift = images.shape[-1] // 8 if train else 0
        flip = train and args.dataset != "mnist"
        labels = torch.as_tensor(source.targets)
        sets.append(ImagesInMemory(images.contiguous(), labels, shift, flip))
        sets[-1].classes = source.classes
    return sets[0], sets[1]


def image_folders(args: Namespace) -> tuple[Dataset, Dataset]:
    """Read --data-dir: one directory per class under train/, and in --val-dir."""
    train, val = Path(args.data_dir, "train"), Path(args.data_dir, args.val_dir)
    classes, size = directories(train), args.image_size or 224
    if len(classes) < 2 or not val.is_dir():
        wanted = f"{train}, with a directory for each of two or more classes, and {val}"
        fail(f"--data-dir {args.data_dir}: needs {wanted}; --val-dir names another one")
    if only := ", ".join(sorted({*directories(val)} - {*classes})):
        fail(f"--data-dir {args.data_dir}: {train} lacks classes of {val}: {only}")
    return pictures(train, classes, size, True), pictures(val, classes, size, False)


def directories(folder: Path) -> list[str]:
    """Return the names of the directories in a directory, but of hidden ones."""
    return sorted(path.name for path in folder.glob("[!.]*") if path.is_dir())


def pictures(folder: Path, classes: list[str], size: int, training: bool) -> Dataset:
    """Return the pictures of these classes. The evaluation set may lack some of them."""
    from torchvision.datasets import ImageFolder

    class Pictures(ImageFolder):
        def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
            return classes, {name: number for number, name in enumerate(classes)}  # of training

    images = Pictures(folder, pipeline(size, training), None, read_image, allow_empty=not training)
    print0(f"{folder}: {len(images)} pictures of {len(classes)} classes, such as {classes[0]}")
    return images


def pipeline(size: int, training: bool) -> nn.Module:
    """Return the transforms of an image file: a small one is shown whole, a photograph cropped."""
    from torchvision.transforms import v2

    if size < 64:
        moved = [v2.RandomCrop(size, size // 8), v2.RandomHorizontalFlip()] if training else []
        return v2.Compose([v2.Resize([size, size]), *moved])
    if training:
        return v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()])
    return v2.Compose([v2.Resize(size * 8 // 7), v2.CenterCrop(size)])


def read_image(path: str) -> Tensor:
    """Decode an image file to uint8 [3, H, W]. Raises OSError, with the file's name, if broken."""
    from PIL import Image
    from torchvision import io

    with contextlib.suppress(Exception):  # no JPEG, or damaged: PIL decides below
        return io.decode_jpeg(io.read_file(path), mode="RGB")  # twice as fast as PIL
    try:
        image = Image.open(path)
        if image.mode[0] in "IF":
            raise ValueError("more than 8 bits: nothing tells what is white; save it in 8 bits")
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    except Exception as error:  # PIL raises almost anything
        raise OSError(f"{path}: {error}") from None


class ImagesInMemory(Dataset):
    """Images uint8 [N, C, H, W] and labels int64 [N] -> (uint8 [C, H, W], int64 []).

    `shift` is the largest random shift in pixels; `flip` mirrors with probability 1/2.
    """

    whole_batches = True  # a batch at once, augmented by the keys of its samples
    in_memory = True  # loader workers would only copy

    def __init__(self, images: Tensor, labels: Tensor, shift: int = 0, flip: bool = False) -> None:
        self.targets, self.flip = labels, flip
        padded, side = F.pad(images, (shift,) * 4) if shift else images, images.shape[-2:]
        # All windows of the padded images: a view [N, C, 2 shift + 1, 2 shift + 1, H, W].
        view = np.lib.stride_tricks.sliding_window_view
        self.windows = view(padded.numpy(), tuple(side), axis=(2, 3))

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, targets = self.__getitems__([int(index)])
        return images[0], targets[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        draws = keyed_uniform(indices, 3)
        # The top and the left of each window, 0 to 2 shift.
        rows, columns = (draws[:, :2] * self.windows.shape[2]).astype(int).T
        # numpy is faster here than torch: it copies row by row, torch pixel by pixel.
        images = self.windows[np.asarray(indices), :, rows, columns]
        mirrored = draws[:, 2] < 0.5
        if self.flip:
            images[mirrored] = images[mirrored, ..., ::-1]
        return torch.from_numpy(images), self.targets[indices]


def conv_bn(inputs: int, outputs: int, *pool: nn.Module) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True), *pool)


class ResNet9(nn.Module):
    """A small, fast CIFAR network, [n, channels, 32, 32] -> [n, classes].

    In the style of the DAWNBench entries. Source: D. Page, "How to train your ResNet", 2018.
    """

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = conv_bn(channels, 64)
        self.down1 = conv_bn(64, 128, nn.MaxPool2d(2))
        self.block1 = nn.Sequential(conv_bn(128, 128), conv_bn(128, 128))
        self.down2 = conv_bn(128, 256, nn.MaxPool2d(2))
        self.down3 = conv_bn(256, 512, nn.MaxPool2d(2))
        self.block2 = nn.Sequential(conv_bn(512, 512), conv_bn(512, 512))
        self.head = nn.Linear(512, classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        features = self.down1(self.stem(images))
        features = self.down3(self.down2(features + self.block1(features)))
        features = features + self.block2(features)
        # Not adaptive_max_pool2d: --deterministic refuses its backward on CUDA.
        features = F.max_pool2d(features, features.shape[-2:]).flatten(1)
        return self.head(features) * 0.125  # small logits at the start


def build_model(args: Namespace) -> nn.Module:
    """Return --model for --dataset. It takes uint8 images and normalises them on its device."""
    from torchvision import models

    _, channels, classes, mean, std = DATASETS[args.dataset]
    if args.dataset == "imagefolder":
        classes = len(directories(Path(args.data_dir, "train")))
    if args.model == "resnet9":
        model = ResNet9(channels, classes)
    else:
        model = models.get_model(args.model, num_classes=classes)
    if args.pretrained:
        weights = models.get_model_weights(args.model).DEFAULT
        load_weights(model, weights.get_state_dict(check_hash=True), "--pretrained")
    dtype = getattr(torch, args.dtype)
    # Buffers, so that they move with the model, but not of a state dict; and a hook, not a layer:
    # parameters keep plain names.
    for name, values in (("pixel_mean", mean), ("pixel_std", std)):
        per_channel = torch.tensor(values, dtype=dtype).view(-1, 1, 1)
        model.register_buffer(name, per_channel, persistent=False)
    model.register_forward_pre_hook(normalize)
    return model.to(dtype)  # a checkpoint of --dtype float64 then loads without a further line


def normalize(model: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Turn uint8 images [n, C, H, W] into numbers with about zero mean and unit variance."""
    return ((inputs[0].to(model.pixel_mean.dtype) - model.pixel_mean) / model.pixel_std,)


def per_sample_loss(outputs: Tensor, targets: Tensor, *, label_smoothing: float) -> Tensor:
    """Return the cross-entropy of each sample: logits [n, classes], labels int64 [n] -> [n]."""
    return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=label_smoothing)


def per_sample_metrics(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return 1.0 where the label is the best guess (top1) or among the best five (top5); [n].

    Of five classes or fewer there is no top5.
    """
    guesses = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
    hits = (guesses == targets.unsqueeze(1)).float()
    found = {"top1": hits[:, 0], "top5": hits.sum(1)}
    return found if outputs.shape[1] > 5 else {"top1": found["top1"]}


train_metrics = per_sample_metrics  # in the training log too
