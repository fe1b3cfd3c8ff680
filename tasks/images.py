"""Image classification, `--task images`: torchvision's sets and models, or directories of pictures.

bash run.sh ddp 2 --task images --data-dir pictures --model resnet18
bash run.sh ddp 2 --task images --dataset cifar10 --data-dir data --download

`pictures` holds a directory for each class: pictures/train/cat/1.jpg, pictures/val/cat/9.jpg.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import glob
import os
from argparse import Namespace
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset
from torchvision import datasets, models
from torchvision.io import decode_jpeg, read_file
from torchvision.transforms import v2

from common import UsageError, load_weights, print0
from sampling import keyed_uniform

# name: (channels, side in pixels, classes, mean, standard deviation) of bytes from 0 to 255
DATASETS = {
    "mnist": (1, 28, 10, (33.3,), (78.6,)),
    "fashion-mnist": (1, 28, 10, (72.9,), (90.0,)),
    "cifar10": (3, 32, 10, (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)),
    "cifar100": (3, 32, 100, (129.3, 124.1, 112.4), (68.2, 65.4, 70.4)),
    "imagefolder": (3, 224, None, (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)),
    "synthetic": (3, 224, 1000, (127.5, 127.5, 127.5), (73.6, 73.6, 73.6)),
}
TORCHVISION = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}
TORCHVISION |= {"cifar10": "CIFAR10", "cifar100": "CIFAR100"}
KINDS = {".jpg", ".jpeg", ".jfif", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


def add_options(parser: argparse._ArgumentGroup) -> None:
    """Add the options of this task."""
    add = parser.add_argument
    dataset = "what to train on (default: %(default)s)"
    add("--dataset", choices=[*DATASETS], default="imagefolder", help=dataset)
    add("--data-dir", metavar="DIR", help="directory of the data set's files")
    held_out = "the evaluation set: a path, from --data-dir (default: val, validation or test)"
    add("--val-dir", metavar="NAME", help=held_out)
    switch = {"action": argparse.BooleanOptionalAction, "default": False}
    add("--download", **switch, help="fetch the data set if --data-dir lacks it")
    side = "side of the square images of imagefolder and synthetic (default: 224)"
    add("--image-size", type=int, metavar="N", help=side)
    model = "resnet9, for small images, or any classifier of torchvision (default: %(default)s)"
    add("--model", metavar="NAME", default="resnet9", help=model)
    add("--pretrained", **switch, help="start from torchvision's weights for --model")
    smoothing = "probability spread over all classes, in evaluation too (default: %(default)s)"
    add("--label-smoothing", type=float, metavar="X", default=0.1, help=smoothing)


# --------------------------------------------------------------------------------------- data sets


def build_datasets(args: Namespace) -> tuple[Dataset, Dataset]:
    """Return the training set (augmented) and the held-out set of --dataset."""
    dataset, size = f"--dataset {args.dataset}", args.image_size
    if size is not None and size < 8:
        raise UsageError(f"--image-size {size}: must be a whole number, at least 8")
    if size and args.dataset not in ("imagefolder", "synthetic"):
        fixed = f"{dataset}, whose images have a side of {DATASETS[args.dataset][1]}"
        raise UsageError(f"--image-size {size} has no effect on {fixed}; leave it out")
    if args.dataset == "synthetic":  # views of one random image, for benchmarks
        channels, side, classes = DATASETS["synthetic"][:3]
        shape = (1, channels, size or side, size or side)
        generator = torch.Generator().manual_seed(0)
        image = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        labels = [torch.arange(n) % classes for n in (10_000, 1_000)]
        return tuple(ImagesInMemory(image.expand(len(y), -1, -1, -1), y) for y in labels)
    if not args.data_dir:
        raise UsageError(f"{dataset} needs --data-dir, the directory of its files")
    return image_folders(args) if args.dataset == "imagefolder" else torchvision_arrays(args)


def torchvision_arrays(args: Namespace) -> tuple[Dataset, Dataset]:
    """Read MNIST or CIFAR from torchvision's files into memory; --download fetches them."""
    sets, kind = [], getattr(datasets, TORCHVISION[args.dataset])
    for train in (True, False):
        try:
            with contextlib.ExitStack() as stack:
                if args.download:  # the processes of this machine one by one: the first fetches it
                    Path(args.data_dir).mkdir(parents=True, exist_ok=True)
                    descriptor = os.open(args.data_dir, os.O_RDONLY)
                    stack.callback(os.close, descriptor)
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                source = kind(args.data_dir, train=train, download=args.download)
        except (RuntimeError, OSError) as error:
            way = "could not be fetched" if args.download else "is not here; --download fetches it"
            raise UsageError(
                f"--data-dir {args.data_dir}: {args.dataset} {way} ({error})"
            ) from error
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
    train, val, classes = find_classes(args)
    if only := ", ".join(sorted({*directories(val)} - {*classes})):
        raise UsageError(f"--data-dir {args.data_dir}: {train} lacks classes of {val}: {only}")
    size = args.image_size or DATASETS["imagefolder"][1]
    if not args.eval_only:
        return Pictures(train, classes, size, True), Pictures(val, classes, size, False)
    held_out = Pictures(val, classes, size, False)
    # In place of the training set, which no step reads. One --batch-size must fit into it.
    repeated = ConcatDataset([held_out] * -(-args.batch_size // len(held_out)))
    repeated.targets = held_out.targets * len(repeated.datasets)  # for --balanced
    return repeated, held_out


def find_classes(args: Namespace) -> tuple[Path, Path, list[str]]:
    """Return the directories of the training and the evaluation set, and the classes' names.

    --eval-only needs the second directory alone.
    """
    root, train = Path(args.data_dir), Path(args.data_dir, "train")
    names = [args.val_dir] if args.val_dir else ["val", "validation", "test"]
    val = next((root / name for name in names if (root / name).is_dir()), root / names[0])
    if args.eval_only and not train.is_dir():
        train = val
    classes = directories(train)
    if len(classes) < 2 or not val.is_dir():
        wanted = f"{train}, with a directory for each of two or more classes, and {val}"
        found = ", ".join(directories(root) + directories(root, "*/*/")[:9]) or "no directory"
        raise UsageError(f"--data-dir {root}: needs {wanted}; found {found}: a level too deep?")
    return train, val, classes


def directories(folder: Path, pattern: str = "*/") -> list[str]:
    """Return the names of the directories in a directory, but of hidden ones."""
    return sorted(name.rstrip("/") for name in glob.glob(pattern, root_dir=folder))


class Pictures(datasets.ImageFolder):
    """Pictures of these classes, one directory each. Prints their number and what is left out."""

    def __init__(self, folder: Path, classes: list[str], size: int, training: bool) -> None:
        self.names, left_out = classes, Counter()

        def is_picture(path: str) -> bool:
            hidden = "/." in path.removeprefix(str(folder))
            kind = "hidden" if hidden else os.path.splitext(path)[1].lower()
            if kind not in KINDS:
                left_out[kind or "without a suffix"] += 1
            return kind in KINDS

        super().__init__(folder, pipeline(size, training), None, read_image, is_picture, True)
        beside = [e.name for e in os.scandir(folder) if e.is_file() or e.name.startswith(".")]
        left_out["beside the classes"] = len(beside)
        counts = ", ".join(f"{n} {kind}" for kind, n in left_out.items() if n) or "nothing"
        kinds = f"{len(classes)} classes, as {classes[0]}"  # maybe they are of a level too high
        found = f"{folder}: {len(self)} pictures, {kinds}; left out: {counts}"
        if empty := [classes[n] for n in sorted({*range(len(classes))} - {*self.targets})]:
            found += f"; classes without a picture: {len(empty)}, as {', '.join(empty[:5])}"
        if len(self) == 0 or (training and empty):
            raise UsageError(f"--data-dir: {found}")
        print0(found)

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        """Return the classes of the training set: the evaluation set may have fewer."""
        return self.names, {name: number for number, name in enumerate(self.names)}


def pipeline(size: int, training: bool) -> v2.Transform:
    """Return the transforms of an image file: a small one is shown whole, a photograph cropped."""
    if size < 64:
        moved = [v2.RandomCrop(size, size // 8), v2.RandomHorizontalFlip()] if training else []
        return v2.Compose([v2.Resize([size, size]), *moved])
    if training:
        return v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()])
    return v2.Compose([v2.Resize(size * 8 // 7), v2.CenterCrop(size)])


def read_image(path: str) -> Tensor:
    """Decode an image file to uint8 [3, H, W]. Raises OSError, with the file's name, if broken."""
    with contextlib.suppress(Exception):  # no JPEG, or damaged: PIL decides below
        return decode_jpeg(read_file(path), mode="RGB")  # twice as fast as PIL
    try:
        with Image.open(path) as image:
            if image.mode in ("I", "F"):
                raise ValueError("32 bits: nothing tells what is white; save it in 8 or 16 bits")
            if image.mode.startswith("I;16"):  # grey, 65535 is white
                image = Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
            return v2.functional.pil_to_tensor(image.convert("RGB"))
    except Exception as error:  # PIL raises almost anything
        raise OSError(f"{path}: {error}") from None


class ImagesInMemory(Dataset):
    """Images uint8 [N, C, H, W] and labels int64 [N] -> (uint8 [C, H, W], int64 []).

    `shift` is the largest random shift in pixels; `flip` mirrors with probability 1/2.
    """

    whole_batches = True  # a batch at once, augmented by the keys of its samples
    in_memory = True  # loader workers would only copy; a GPU can hold it, see `to`

    def __init__(self, images: Tensor, labels: Tensor, shift: int = 0, flip: bool = False) -> None:
        self.targets, self.flip = labels, flip
        self.padded = F.pad(images, (shift,) * 4) if shift else images
        side = tuple(images.shape[-2:])
        # All windows of the padded images: a view [N, C, 2 shift + 1, 2 shift + 1, H, W].
        view = np.lib.stride_tricks.sliding_window_view
        self.windows = view(self.padded.numpy(), side, axis=(2, 3))

    def to(self, device: torch.device) -> ImagesInMemory:
        """Return a copy with images and labels on the device; the host keeps its own."""
        moved = copy.copy(self)
        # --dataset synthetic repeats one image by `expand`: only that one is moved.
        stored = self.padded[:1] if self.padded.stride(0) == 0 else self.padded
        padded = stored.to(device).expand_as(self.padded)
        height, width = self.windows.shape[-2:]
        moved.windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        moved.targets = self.targets.to(device)
        return moved

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, targets = self.__getitems__([int(index)])
        return images[0], targets[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        draws = keyed_uniform(indices, 3)
        # The top and the left of each window, 0 to 2 shift.
        rows, columns = (draws[:, :2] * self.windows.shape[2]).astype(int).T
        mirrored = draws[:, 2] < 0.5
        if isinstance(self.windows, np.ndarray):
            # On a CPU numpy is faster: it copies row by row, torch pixel by pixel.
            images = self.windows[np.asarray(indices), :, rows, columns]
            if self.flip:
                images[mirrored] = images[mirrored, ..., ::-1]
            return torch.from_numpy(images), self.targets[indices]
        packed = torch.from_numpy(np.stack([indices, rows, columns, mirrored]))  # one copy
        index, top, left, mirror = packed.to(self.targets.device, non_blocking=True).unbind()
        images = self.windows[index, :, top, left]
        if self.flip:
            images = torch.where(mirror.bool().view(-1, 1, 1, 1), images.flip(3), images)
        return images, self.targets[index]


# ------------------------------------------------------------------------------------------ models


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
    channels, _, classes, mean, std = DATASETS[args.dataset]
    if args.dataset == "imagefolder":
        classes = len(find_classes(args)[2])
        if args.model == "efficientnet_v2_l":  # torchvision's weights for it were made for these
            mean = std = (127.5,) * 3
    if args.model == "resnet9":
        if args.pretrained:
            raise UsageError("--pretrained: torchvision has no weights for resnet9; see --weights")
        model = ResNet9(channels, classes)
    else:
        model = torchvision_model(args, classes)
    dtype = getattr(torch, args.dtype)
    # Buffers, so that they move with the model, but not of a state dict; and a hook, not a layer:
    # parameters keep plain names.
    for name, values in (("pixel_mean", mean), ("pixel_std", std)):
        per_channel = torch.tensor(values, dtype=dtype).view(-1, 1, 1)
        model.register_buffer(name, per_channel, persistent=False)
    model.register_forward_pre_hook(normalize)
    return model.to(dtype)  # a checkpoint of --dtype float64 then loads without a further line


def torchvision_model(args: Namespace, classes: int) -> nn.Module:
    options = {}
    if args.model in ("googlenet", "inception_v3"):  # they would return two outputs
        options = {"aux_logits": False, "init_weights": True, "transform_input": True}
    model = models.get_model(args.model, weights=None, num_classes=classes, **options)
    if args.pretrained:
        weights = models.get_model_weights(args.model).DEFAULT
        load_weights(model, weights.get_state_dict(check_hash=True), "--pretrained")
    return model


def normalize(model: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Turn uint8 images [n, C, H, W] into numbers with about zero mean and unit variance."""
    return ((inputs[0].to(model.pixel_mean.dtype) - model.pixel_mean) / model.pixel_std,)


# ------------------------------------------------------------------------------- loss and metrics


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
