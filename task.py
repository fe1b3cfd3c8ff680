"""The part you replace: the data, the model, the loss and the metrics of one problem. Here: image classification.

A task is any file with these four functions (`--task FILE.py`); no other file knows the problem, and this one knows nothing of devices.

    build_datasets(args) -> (train, val)                 map-style; a sample is (input, target), nested tensors; with `in_memory = True`
                                                          it is loaded without workers, and --balanced needs `targets`, the classes
    build_model(args) -> nn.Module                        called with the random state seeded by --seed
    per_sample_loss(outputs, targets) -> Tensor [n]       differentiable; keyword-only parameters are filled from the options they name
    per_sample_metrics(outputs, targets) -> {name: [n]}   the first one, higher is better, decides which checkpoint is `best.pt`

Losses and metrics are per sample because sums of those are exact however a batch is cut; an average of averages is not.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import common

# name: (channels, image size, classes, mean, standard deviation), the last two on the scale 0..255 of the stored bytes
DATASETS = {
    "digits": (1, 8, 10, (73.3,), (90.2,)),
    "mnist": (1, 28, 10, (33.3,), (78.6,)),
    "fashion-mnist": (1, 28, 10, (72.9,), (90.0,)),
    "cifar10": (3, 32, 10, (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)),
    "cifar100": (3, 32, 100, (129.3, 124.1, 112.4), (68.2, 65.4, 70.4)),
    "imagefolder": (3, 224, None, (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)),
    "synthetic": (3, 224, 1000, (127.5, 127.5, 127.5), (73.6, 73.6, 73.6)),
}
TORCHVISION_CLASS = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "cifar10": "CIFAR10", "cifar100": "CIFAR100"}


def windows_of(images: Tensor, shift: int) -> np.ndarray:
    """Return all windows [H, W] of images [N, C, H, W] padded by `shift`: a view [N, C, 2 shift + 1, 2 shift + 1, H, W]."""
    padded = F.pad(images, (shift,) * 4) if shift else images
    return np.lib.stride_tricks.sliding_window_view(padded.numpy(), tuple(images.shape[-2:]), axis=(2, 3))


def shift_and_flip(windows: np.ndarray, index: np.ndarray, draws: np.ndarray, flip: bool) -> Tensor:
    """Return [n, C, H, W]: one window of each image of `index`, mirrored or not, as draws [n, 3] in [0, 1) decide.

    In numpy, which copies whole rows where torch's indexing goes pixel by pixel.
    """
    rows, columns = (draws[:, :2] * windows.shape[2]).astype(int).T
    images = windows[index, :, rows, columns]
    if flip:
        mirrored = draws[:, 2] < 0.5
        images[mirrored] = images[mirrored, ..., ::-1]
    return torch.from_numpy(images)


class ImagesInMemory(Dataset):
    """Images in memory, fetched and augmented a whole batch at a time.

    images uint8 [N, C, H, W], labels int64 [N]; `shift` is the largest random shift in pixels, `flip` mirrors every second image.
    A sample is (uint8 [C, H, W], int64 []), a pure function of (seed, epoch, index): the same whoever loads it.
    """

    in_memory = True  # loader workers would only copy

    def __init__(self, images: Tensor, labels: Tensor, *, shift: int = 0, flip: bool = False, seed: int = 0) -> None:
        self.windows, self.targets = windows_of(images, shift), labels
        self.flip, self.seed, self.epoch = flip, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        index = np.asarray(indices)
        draws = common.keyed_uniform(self.seed, self.epoch, index, 3)
        return shift_and_flip(self.windows, index, draws, self.flip), self.targets[torch.from_numpy(index)]


def build_datasets(args: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Return the training set (augmented) and the held-out set of `--dataset`."""
    if args.image_size and args.dataset not in ("imagefolder", "synthetic"):
        fixed = f"--dataset {args.dataset}, whose images have a side of {DATASETS[args.dataset][1]}"
        raise common.UsageError(f"--image-size {args.image_size} has no effect on {fixed}; leave it out")
    if args.dataset == "digits":
        with np.load(Path(common.__file__).with_name("data") / "digits.npz") as file:
            images = torch.from_numpy(file["images"]).unsqueeze(1) * 15  # 0..16 to 0..240, to fill the byte
            labels = torch.from_numpy(file["labels"]).long()
        train = ImagesInMemory(images[:1437], labels[:1437], shift=1, seed=args.seed)
        return train, ImagesInMemory(images[1437:], labels[1437:])
    if args.dataset == "imagefolder":
        return image_folders(args)
    if args.dataset == "synthetic":  # a view of one random image: costs no memory and no time, for benchmarks
        channels, size, classes = DATASETS["synthetic"][:3]
        shape = (1, channels, args.image_size or size, args.image_size or size)
        image = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        return tuple(ImagesInMemory(image.expand(n, -1, -1, -1), torch.arange(n) % classes) for n in (10_000, 1_000))
    return torchvision_arrays(args)


def torchvision_arrays(args: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100 from torchvision's files, held in memory; `--download` fetches what is missing."""
    from torchvision import datasets

    flip = args.dataset != "mnist"
    sets = []
    for train in (True, False):
        try:
            with common.one_at_a_time(args.data_dir) if args.download else contextlib.nullcontext():
                source = getattr(datasets, TORCHVISION_CLASS[args.dataset])(args.data_dir, train=train, download=args.download)
        except (RuntimeError, OSError) as error:
            way = "could not be fetched" if args.download else "is not here; --download fetches it"
            raise common.UsageError(f"--data-dir {args.data_dir}: {args.dataset} {way} ({error})") from error
        images = torch.as_tensor(source.data)
        images = images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()
        augment = {"shift": images.shape[-1] // 8, "flip": flip, "seed": args.seed} if train else {}
        sets.append(ImagesInMemory(images, torch.as_tensor(source.targets), **augment))
    return sets[0], sets[1]


def image_folders(args: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """`--data-dir` with one folder a class under train/ and under val/ or test/; JPEG or PNG of any size."""
    from torchvision.datasets import ImageFolder

    root = Path(args.data_dir)
    held_out = next((root / name for name in ("val", "test") if (root / name).is_dir()), None)
    if not (root / "train").is_dir() or held_out is None:
        raise common.UsageError(f"--data-dir {root}: needs train/ and val/ (or test/), each with one folder a class")
    try:
        folders = ImageFolder(root / "train"), ImageFolder(held_out)
    except FileNotFoundError as error:  # no class, or a class without an image
        raise common.UsageError(f"--data-dir {root}: {error}") from error
    if only := ", ".join(sorted({*folders[0].classes} ^ {*folders[1].classes})):  # labels count folders: a gap shifts the rest
        raise common.UsageError(f"--data-dir {root}: training and evaluation set must have the same classes; only one of them has {only}")
    size = args.image_size or DATASETS["imagefolder"][1]
    return tuple(ImageFiles(folder.samples, size, training=not i, seed=args.seed) for i, folder in enumerate(folders))


class ImageFiles(Dataset):
    """Image files, decoded and augmented a whole batch at a time: (path, class) -> (uint8 [3, size, size], int64 []).

    From 64 pixels on the usual recipe for photographs; smaller images fill the frame, and are only resized to it, shifted by up to an
    eighth, and mirrored. All a pure function of (seed, epoch, index).
    """

    def __init__(self, samples: list[tuple[str, int]], size: int, *, training: bool, seed: int) -> None:
        from torchvision.transforms import v2

        self.paths = np.array([os.fsencode(path) for path, _ in samples])  # one block: workers would copy a list, bit by bit
        self.targets = torch.tensor([label for _, label in samples])
        self.frame, self.training, self.small, self.seed, self.epoch = (size, size), training, size < 64, seed, 0
        if self.small:
            self.transform = v2.Resize(self.frame, antialias=True)
        elif training:
            self.transform = v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()])
        else:
            self.transform = v2.Compose([v2.Resize(size * 8 // 7, antialias=True), v2.CenterCrop(size)])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, targets = self.__getitems__([index])
        return images[0], targets[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        step = 16 if self.small else 1  # a call costs a quarter of decoding a small image; but photographs would fill the memory
        groups = (indices[start : start + step] for start in range(0, len(indices), step))
        images = torch.stack([self._fit(*pair) for group in groups for pair in zip(group, read_images(self.paths[group].tolist()))])
        if self.small and self.training:
            draws = common.keyed_uniform(self.seed, self.epoch, np.asarray(indices), 3)
            images = shift_and_flip(windows_of(images, self.frame[0] // 8), np.arange(len(indices)), draws, flip=True)
        return images, self.targets[indices]

    def _fit(self, index: int, image: Tensor) -> Tensor:
        if self.small and image.shape[1:] == self.frame:
            return image
        torch.default_generator.manual_seed(common.mix(self.seed, self.epoch, index))
        return self.transform(image)


def read_images(paths: list[str | bytes]) -> list[Tensor]:
    """Decode image files to uint8 [3, H, W] each. Raises OSError, naming the file, if one is broken."""
    with contextlib.suppress(Exception):  # one is no JPEG, or broken: PIL can perhaps read it, and says better what is wrong
        from torchvision.io import decode_jpeg  # twice as fast as PIL; not decode_image: a damaged PNG would kill the process

        files = []
        for path in paths:
            with open(path, "rb", buffering=0) as file:  # twice as fast as torchvision's own reading
                files.append(bytearray(file.read()))
            if not files[-1].startswith(b"\xff\xd8"):
                raise ValueError("no JPEG")
        return decode_jpeg([torch.frombuffer(file, dtype=torch.uint8) for file in files], mode="RGB")
    if len(paths) > 1:  # what the others become must not depend on it
        return [read_images([path])[0] for path in paths]
    from PIL import Image
    from torchvision.transforms.v2.functional import pil_to_tensor

    try:
        with Image.open(os.fsdecode(paths[0])) as image:
            if image.mode.startswith("I"):  # sixteen bits of grey, of which PIL would not take the upper eight
                image = image.point(lambda value: value * (1 / 256)).convert("L")
            return [pil_to_tensor(image.convert("RGB"))]
    except Exception as error:  # PIL raises almost anything
        raise OSError(f"{os.fsdecode(paths[0])}: {error}") from None


class DigitNet(nn.Module):
    """Three convolutions for 8×8 digits, [n, 1, H, W] -> [n, classes].

    No BatchNorm and no dropout: what depends on how a batch is cut would make its numbers depend on the mode.
    """

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 48, 3, padding=1)
        self.conv2 = nn.Conv2d(48, 48, 3, padding=1)
        self.conv3 = nn.Conv2d(48, 96, 3, padding=1)
        self.head = nn.Linear(96 * 2 * 2, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(images)))), 2)
        features = F.adaptive_max_pool2d(F.relu(self.conv3(features)), 2)
        return self.head(features.flatten(1))


def conv_bn(inputs: int, outputs: int, *pool: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True), *pool)


class ResNet9(nn.Module):
    """A small, fast CIFAR network in the style of the DAWNBench entries. [n, channels, 32, 32] -> [n, classes]

    Source: D. Page, "How to train your ResNet", 2018; written anew here.
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
        features = F.adaptive_max_pool2d(features + self.block2(features), 1).flatten(1)
        return self.head(features) * 0.125  # keeps the logits small at the start, where the learning rate is large


BUILT_IN = {"digitnet": DigitNet, "resnet9": ResNet9}


def build_model(args: argparse.Namespace) -> nn.Module:
    """Return `--model` for `--dataset`; it takes uint8 images and normalises them on its own device: a quarter of the bytes to move."""
    channels, size, classes, mean, std = DATASETS[args.dataset]
    if args.dataset == "imagefolder":
        classes = sum(folder.is_dir() for folder in (Path(args.data_dir) / "train").iterdir())
    if args.model in BUILT_IN:
        if args.weights == "default":
            raise common.UsageError(f"--weights default: torchvision has none for {args.model}; name a file")
        model = BUILT_IN[args.model](channels, classes)
    else:
        from torchvision import models

        known = models.list_models(module=models)
        if args.model not in known:
            close = difflib.get_close_matches(args.model, [*BUILT_IN, *known], 3) or BUILT_IN
            raise common.UsageError(
                f"--model {args.model}: unknown; close names: {', '.join(close)}; any torchvision classification model works"
            )
        two_outputs = args.model in ("googlenet", "inception_v3")
        one = {"aux_logits": False, "init_weights": True, "transform_input": args.weights == "default"} if two_outputs else {}
        model = models.get_model(args.model, weights=None, num_classes=classes, **one)
        if args.weights == "default":
            common.load_weights(args, model, models.get_model_weights(args.model).DEFAULT.get_state_dict(check_hash=True))
        if (args.image_size or size) < 64:
            common.print0(f"note: {args.model} is made for 224 pixels and loses most of smaller images in its first layers; see resnet9")
    model.register_forward_pre_hook(functools.partial(normalize, mean=mean, std=std, dtype=getattr(torch, args.dtype)))
    return model


def normalize(module: nn.Module, inputs: tuple[Tensor], *, mean: tuple, std: tuple, dtype: torch.dtype) -> tuple[Tensor]:
    """Turn uint8 images [n, C, H, W] into numbers with about zero mean and unit variance; a hook, so that parameter names stay plain."""
    (images,) = inputs
    shift, scale = per_channel(mean, images.device, dtype), per_channel(std, images.device, dtype)
    return ((images.to(dtype) - shift) / scale,)


@functools.lru_cache
def per_channel(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """[C, 1, 1] on the device, made once: a copy from the host in every step would make the host wait."""
    return torch.tensor(values, device=device, dtype=dtype).view(-1, 1, 1)


def per_sample_loss(outputs: Tensor, targets: Tensor, *, label_smoothing: float) -> Tensor:
    """Cross-entropy of each sample: logits [n, classes], labels int64 [n] -> [n]."""
    return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=label_smoothing)


def per_sample_metrics(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """1.0 where the label is the best guess (top1) or among the best five (top5), else 0.0; each [n]."""
    guesses = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
    hits = (guesses == targets.unsqueeze(1)).float()
    return {"top1": hits[:, 0], "top5": hits.sum(1)}
