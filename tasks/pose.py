"""Pose of several people on COCO's keypoint files: stacked hourglass, joints grouped, OKS-AP.

    bash run.sh ddp 4 --task pose --data-dir coco --image-size 512 --best AP

--data-dir holds train2017/, val2017/ and annotations/person_keypoints_{train,val}2017.json, which
pycocotools reads. The network finds the joints of all people in a picture, and at each joint the
way to the centre of that person (arXiv:1904.07850): joints that point to one centre are one person.
"""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.transforms import v2

from tasks.detect import average_precision, read_coco
from tasks.images import conv_bn, read_image

JOINTS, MOST = 17, 30  # of a person; people that are found in a picture
MARKS, MAPS = JOINTS + 1, 3 * JOINTS + 1  # joints and centre; with the ways from joints to centres
SWAPPED = [0, 2, 1, 4, 3, 6, 5, 8, 7, 10, 9, 12, 11, 14, 13, 16, 15, 17]  # in a mirror


def add_options(parser):
    parser.add_argument("--data-dir", type=os.path.abspath, default="coco", help="of COCO's files")
    parser.add_argument("--image-size", type=int, default=512, help="side of the square pictures")
    parser.add_argument("--stacks", type=int, default=2, help="hourglasses, one after the other")
    parser.add_argument("--width", type=int, default=128, help="channels of an hourglass")


class Pictures(torch.utils.data.Dataset):
    """Pictures uint8 [3, side, side]; targets: maps, and what the file says of people.

    `people` [..., 60]: joints and centre, each x, y, known; box; area; 1 a person, 2 a crowd. It is
    padded to the largest number of people in a picture of the set, so that `dp` can cut a batch.
    """

    def __init__(self, folder, part, side, training):
        coco = read_coco(folder / "annotations" / f"person_keypoints_{part}.json")
        self.samples, self.side, self.training = [], side, training
        most = max(1, *map(len, coco.imgToAnns.values()))
        for number in sorted(coco.imgs):
            image, people = coco.imgs[number], torch.zeros(most, 60).double()
            for i, a in enumerate(coco.imgToAnns[number]):
                (x, y, w, h), known = a["bbox"], a["num_keypoints"]
                row = [*a["keypoints"], x + w / 2, y + h / 2, known, x, y, w, h, a["area"]]
                people[i] = torch.tensor([*row, 1 + a["iscrowd"]]).double()
            if not training or people[:, 53].any():
                path = str(folder / part / image["file_name"])
                size = torch.tensor([image["width"], image["height"]])
                self.samples.append((path, people, size))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, people, size = self.samples[index]
        share = 0.7 + 0.3 * torch.rand(()) if self.training else 1.0
        extent = (size * share).ceil()  # a part of the picture, in evaluation the whole
        corner = ((size - extent) * torch.rand(2)).floor()
        box = [int(value) for value in (*corner.flip(0), *extent.flip(0))]
        image = v2.functional.resized_crop(read_image(path), *box, [self.side, self.side])
        marks = people[: max(1, int((people[:, 59] > 0).sum())), :54].view(-1, MARKS, 3)
        points = (marks[..., :2] - corner) / extent  # shares of the part
        seen = (marks[..., 2] > 0) & ((points > 0) & (points < 1)).all(2)
        if self.training and torch.rand(()) < 0.5:
            image, points[..., 0] = image.flip(-1), 1 - points[..., 0]
            points, seen = points[:, SWAPPED], seen[:, SWAPPED]
        maps = [maps_of(points.float(), seen, self.side // stride) for stride in (4, 8)]
        return image, {"maps": maps, "people": people, "size": size}


def maps_of(points, seen, grid):
    """Return [MAPS, grid, grid]: a bell around each joint and centre; the ways to the centres."""
    cells = (torch.arange(grid) + 0.5) / grid
    x, y = (-(((cells - points[..., i, None]) * grid) ** 2 / 2) for i in (0, 1))
    bells = (y[..., None] + x[..., None, :]).exp() * seen[..., None, None]  # [people, MARKS, ...]
    heat, owner = bells.max(0)
    x, y = (points[:, JOINTS, i][owner[:JOINTS]] for i in (0, 1))
    ways = torch.stack([x - cells, y - cells[:, None]], 1) * 8  # eighths of the picture
    return torch.cat([heat, ways.flatten(0, 1)])


def build_datasets(args):
    folder, side = Path(args.data_dir), args.image_size
    return Pictures(folder, "train2017", side, True), Pictures(folder, "val2017", side, False)


class Hourglass(nn.Module):
    """Features of g down to a fourth, and up again: features of g, maps of g and of g / 2."""

    def __init__(self, width):
        super().__init__()
        self.skip, self.half_skip = conv_bn(width, width), conv_bn(width, width)
        self.down = conv_bn(width, width, nn.MaxPool2d(2))
        self.bottom = nn.Sequential(conv_bn(width, width, nn.MaxPool2d(2)), conv_bn(width, width))
        self.fine, self.coarse = nn.Conv2d(width, MAPS, 1), nn.Conv2d(width, MAPS, 1)
        for head in (self.fine, self.coarse):
            nn.init.normal_(head.weight, std=0.001)  # small gradients at the start, for fp16

    def forward(self, features):
        half = self.down(features)
        half = self.half_skip(half) + F.interpolate(self.bottom(half), scale_factor=2)
        whole = self.skip(features) + F.interpolate(half, scale_factor=2)
        return whole, (self.fine(whole), self.coarse(half))


class Stack(nn.Module):
    """Images -> maps of side / 4 and side / 8 of each hourglass. Source: arXiv:1603.06937."""

    def __init__(self, stacks, width):
        super().__init__()
        pool = nn.MaxPool2d(2)
        self.stem = nn.Sequential(conv_bn(3, width, pool), conv_bn(width, width, pool))
        self.glasses = nn.ModuleList(Hourglass(width) for _ in range(stacks))
        self.back = nn.ModuleList(nn.Conv2d(MAPS, width, 1) for _ in range(stacks - 1))

    def forward(self, images):
        features = self.stem(images.to(self.glasses[0].fine.weight.dtype) / 255 - 0.5)
        whole, *outputs = self.glasses[0](features)
        for glass, back in zip(self.glasses[1:], self.back):
            features = features + whole + back(outputs[-1][0])
            whole, maps = glass(features)
            outputs.append(maps)
        return outputs


def build_model(args):
    return Stack(args.stacks, args.width)


def per_sample_loss(outputs, targets):
    """Return the mean over hourglasses and scales; each has a loss of its own."""
    losses = 0
    for pair in outputs:
        for maps, wanted in zip(pair, targets["maps"]):
            errors = maps - wanted  # at least in float32
            heat = wanted[:, :MARKS].to(errors)
            missed = errors[:, :MARKS].square().sum((1, 2, 3))
            losses = losses + missed / heat.square().sum((1, 2, 3)).clamp(min=1)
            weight = F.threshold(heat[:, :JOINTS], 0.3, 0)  # near the joints
            astray = errors[:, MARKS:].unflatten(1, (JOINTS, 2)).abs().sum(2)
            losses = losses + (astray * weight).sum((1, 2, 3)) / weight.sum((1, 2, 3)).clamp(min=1)
    return losses / (2 * len(outputs))


def people_of(maps):
    """Return [n, MOST, 17, 3]: joints as shares of the picture, and their scores."""
    heat, grid = maps[:, :MARKS], maps.shape[-1]
    peaks = heat.clamp(min=0) * (heat == F.max_pool2d(heat, 3, 1, 1))
    scores, places = peaks.flatten(2).topk(MOST)  # [n, MARKS, MOST]
    cells = torch.stack([places % grid, places // grid], 3) + 0.5
    # A quarter of a cell towards the higher neighbour, as usual since arXiv:1603.06937.
    slopes = torch.stack(torch.gradient(heat, dim=(3, 2)), 4).flatten(2, 3)
    points = (cells + slopes.gather(2, places[..., None].expand(-1, -1, -1, 2)).sign() / 4) / grid
    centres, sure = points[:, JOINTS, None], scores[:, JOINTS, None]  # [n, 1, MOST, ...]
    ways = maps[:, MARKS:].unflatten(1, (JOINTS, 2)).flatten(3)
    ways = ways.gather(3, places[:, :JOINTS, None].expand(-1, -1, 2, -1)).transpose(2, 3) / 8
    votes = (cells[:, :JOINTS] / grid + ways)[:, :, :, None]
    far = (votes - centres[:, :, None]).norm(dim=4) + 9 * (sure < 0.05)[:, :, None]
    fits = scores[:, :JOINTS, :, None] * (-far / 0.1).exp() * (far == far.amin(3, keepdim=True))
    fit, best = fits.max(2)  # of [n, 17, joints, centres]: a joint belongs to the nearest centre
    own = points[:, :JOINTS].gather(2, best[..., None].expand(-1, -1, -1, 2))
    return torch.cat([own, (fit * sure)[..., None]], 3).transpose(1, 2)


def per_sample_metrics(outputs, targets):
    found = people_of(outputs[-1][0].detach().float())
    found[..., :2] *= targets["size"][:, None, None]
    return {"found": list(found), "known": list(targets["people"])}


def dataset_metrics(outputs):
    """Return COCO's AP of object keypoint similarity, the mean over 0.5 to 0.95, and AP50."""
    true, guesses = [], []
    for image, (known, found) in enumerate(zip(outputs["known"], outputs["found"])):
        for row in known[known[:, 59] > 0].tolist():
            entry = {"id": len(true) + 1, "image_id": image, "category_id": 1, "area": row[58]}
            entry |= {"keypoints": row[:51], "bbox": row[54:58], "iscrowd": int(row[59] == 2)}
            true.append(entry | {"num_keypoints": row[53]})
        for person in found:
            guess = {"image_id": image, "category_id": 1, "score": person[:, 2].mean().item()}
            guesses.append(guess | {"keypoints": person.flatten().tolist()})
    return average_precision(len(outputs["known"]), true, guesses, "keypoints")
