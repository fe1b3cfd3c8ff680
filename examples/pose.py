"""Human pose on COCO's keypoint files: a stacked hourglass, heat maps at two scales, OKS-AP.

    bash run.sh ddp 4 --task examples/pose.py --data-dir coco --image-size 256 --best AP

--data-dir holds train2017/, val2017/ and annotations/person_keypoints_{train,val}2017.json. A
sample is one person, cut out by the box of the annotation. pycocotools reads files and computes AP.
"""

import contextlib
import io
from pathlib import Path

import torch
import torch.nn.functional as F
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import nn
from torchvision.transforms import v2

from task import conv_bn, read_images

JOINTS = 17
SWAPPED = [0, 2, 1, 4, 3, 6, 5, 8, 7, 10, 9, 12, 11, 14, 13, 16, 15]  # left and right, mirrored


def add_options(parser):
    parser.add_argument("--stacks", type=int, default=2, help="hourglasses, one after the other")
    parser.add_argument("--width", type=int, default=128, help="channels of an hourglass")


class People(torch.utils.data.Dataset):
    """Pictures of people uint8 [3, side, side]; targets: where the joints are, in the cut and whole.

    `place` is the left top corner and the side of the cut, in pixels of the whole picture.
    """

    def __init__(self, folder, part, side, training):
        with contextlib.redirect_stdout(io.StringIO()):
            coco = COCO(folder / "annotations" / f"person_keypoints_{part}.json")
        self.samples, self.side, self.training = [], side, training
        for number in sorted(coco.anns):
            entry = coco.anns[number]
            if entry.get("iscrowd") or not entry["num_keypoints"]:
                continue
            left, top, width, height = entry["bbox"]
            size = 1.25 * max(width, height, 1)  # a square, with some room around the person
            place = [left + (width - size) / 2, top + (height - size) / 2, size]
            path = folder / part / coco.imgs[entry["image_id"]]["file_name"]
            joints = torch.tensor(entry["keypoints"]).view(JOINTS, 3).float()
            known = {"image": entry["image_id"], "area": entry["area"], "place": place}
            known = {name: torch.tensor(value).double() for name, value in known.items()}
            self.samples.append((str(path).encode(), joints, known))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, joints, known = self.samples[index]
        left, top, size = known["place"].tolist()
        (image,) = read_images([path])
        box = round(top), round(left), round(size), round(size)
        image = v2.functional.resized_crop(image, *box, [self.side, self.side])
        points = (joints[:, :2] - known["place"][:2].float()) / size  # shares of the cut
        visible = (joints[:, 2] > 0) & (points > 0).all(1) & (points < 1).all(1)
        if self.training and torch.rand(()) < 0.5:
            image, points = image.flip(-1), points * torch.tensor([-1, 1]) + torch.tensor([1, 0])
            points, visible = points[SWAPPED], visible[SWAPPED]
        maps = [heat_maps(points, visible, self.side // stride) for stride in (4, 8)]
        return image, {"maps": maps, "visible": visible, "joints": joints, **known}


def heat_maps(points, visible, grid):
    """Return [17, grid, grid]: a bell of one cell's width around each visible joint."""
    cells = torch.arange(grid) + 0.5
    squares = [(cells - points[:, i, None] * grid).square() for i in (0, 1)]
    return (-(squares[1][:, :, None] + squares[0][:, None]) / 2).exp() * visible[:, None, None]


def build_datasets(args):
    folder, side = Path(args.data_dir), args.image_size or 256
    return People(folder, "train2017", side, True), People(folder, "val2017", side, False)


class Hourglass(nn.Module):
    """Features [n, width, g, g] down to a fourth, and up again: features of g and of g / 2."""

    def __init__(self, width):
        super().__init__()
        self.skip, self.half_skip = conv_bn(width, width), conv_bn(width, width)
        self.down = conv_bn(width, width, nn.MaxPool2d(2))
        self.bottom = nn.Sequential(conv_bn(width, width, nn.MaxPool2d(2)), conv_bn(width, width))

    def forward(self, features):
        half = self.down(features)
        half = self.half_skip(half) + F.interpolate(self.bottom(half), scale_factor=2)
        return self.skip(features) + F.interpolate(half, scale_factor=2), half


class Stack(nn.Module):
    """Images [n, 3, side, side] -> for each hourglass [n, 17, side / 4, ...] and [n, 17, side / 8, ...]

    Each hourglass gets the heat maps of the one before, and has a loss of its own.
    """

    def __init__(self, stacks, width):
        super().__init__()
        pool = nn.MaxPool2d(2)
        self.stem = nn.Sequential(conv_bn(3, width, pool), conv_bn(width, width, pool))
        self.glasses = nn.ModuleList(Hourglass(width) for _ in range(stacks))
        self.fine = nn.ModuleList(nn.Conv2d(width, JOINTS, 1) for _ in range(stacks))
        self.coarse = nn.ModuleList(nn.Conv2d(width, JOINTS, 1) for _ in range(stacks))
        self.back = nn.ModuleList(nn.Conv2d(JOINTS, width, 1) for _ in range(stacks - 1))

    def forward(self, images):
        features = self.stem(images.to(self.fine[0].weight.dtype) / 255 - 0.5)
        outputs = []
        for i, glass in enumerate(self.glasses):
            whole, half = glass(features)
            outputs.append((self.fine[i](whole), self.coarse[i](half)))
            if i < len(self.back):
                features = features + whole + self.back[i](outputs[-1][0])
        return outputs


def build_model(args):
    return Stack(args.stacks, args.width)


def per_sample_loss(outputs, targets):
    """Squared error of the visible joints' maps, at both scales, summed over the hourglasses."""
    losses, visible = 0, targets["visible"]
    for pair in outputs:
        for maps, wanted in zip(pair, targets["maps"]):
            errors = (maps - wanted.to(maps.dtype)).square().flatten(2).sum(2)
            losses = losses + (errors * visible).sum(1)
    return losses / visible.sum(1).clamp(min=1)


def joints_of(maps):
    """Return (points [n, 17, 2] as shares of the cut, scores [n, 17]): the highest cell of each map.

    A quarter of a cell towards the higher neighbour is added, as usual since arXiv:1603.06937.
    """
    grid = maps.shape[-1]
    scores, best = maps.flatten(2).max(2)
    cells = torch.stack([best % grid, best // grid], 2)
    padded = F.pad(maps, (1, 1, 1, 1)).flatten(2)
    centre = (cells[..., 1] + 1) * (grid + 2) + cells[..., 0] + 1
    steps = (-1, 1, -grid - 2, grid + 2)
    sides = [padded.gather(2, (centre + step)[..., None])[..., 0] for step in steps]
    quarter = torch.stack([sides[1] - sides[0], sides[3] - sides[2]], 2).sign() / 4
    return (cells + 0.5 + quarter) / grid, scores


def per_sample_metrics(outputs, targets):
    points, scores = joints_of(outputs[-1][0].float())
    place = targets["place"][:, None].float()
    found = points * place[..., 2:] + place[..., :2]  # in pixels of the whole picture
    joints = targets["joints"]
    near = (found - joints[..., :2]).norm(dim=2) < 0.1 * place[..., 2]
    visible = targets["visible"]
    pck = (near & visible).sum(1) / visible.sum(1).clamp(min=1)
    found = torch.cat([found, scores[..., None]], 2).cpu()
    known = torch.stack([targets["image"], targets["area"]], 1).cpu()
    return {"pck": pck, "found": list(found), "joints": list(joints.cpu()), "known": known.tolist()}


def dataset_metrics(outputs):
    """Return COCO's AP of object keypoint similarity, the mean over 0.5 to 0.95, and AP50."""
    true, guesses = [], []
    rows = zip(outputs["known"], outputs["joints"], outputs["found"])
    for i, ((image, area), joints, found) in enumerate(rows, 1):
        entry = {"id": i, "image_id": int(image), "category_id": 1}
        known = int((joints[:, 2] > 0).sum())
        box = [*joints[:, :2].amin(0).tolist(), 1.0, 1.0]
        entry |= {"iscrowd": 0, "area": area, "bbox": box, "num_keypoints": known}
        true.append(entry | {"keypoints": joints.flatten().tolist()})
        guess = {"image_id": int(image), "category_id": 1, "score": found[:, 2].mean().item()}
        guesses.append(guess | {"keypoints": found.flatten().tolist()})
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        images = [{"id": number} for number in {entry["image_id"] for entry in true}]
        coco.dataset = {"images": images, "annotations": true, "categories": [{"id": 1}]}
        coco.createIndex()
        scorer = COCOeval(coco, coco.loadRes(guesses), "keypoints")
        scorer.evaluate()
        scorer.accumulate()
        scorer.summarize()
    return {"AP": scorer.stats[0], "AP50": scorer.stats[1]}
