"""Object detection in the style of YOLOv3 on COCO files: three scales, three anchors each, box AP.

    bash run.sh ddp 4 --task detect --data-dir coco --image-size 416 --best AP

--data-dir holds train2017/, val2017/ and annotations/instances_{train,val}2017.json. The package
pycocotools reads the files and computes AP.

The loss of a picture is divided by the boxes of that picture, never by those of the batch: a number
per sample is what makes it the same on every number of devices.
"""

import contextlib
import io
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import nn
from torchvision.ops import batched_nms, box_convert, box_iou, generalized_box_iou_loss
from torchvision.transforms import v2

from tasks.images import conv_bn, read_image

MOST = 50  # boxes of a picture; the smallest are left out
# Width and height of nine, as shares of the picture. Source: arXiv:1804.02767, for 416 pixels.
SIDES = [10, 13, 16, 30, 33, 23, 30, 61, 62, 45, 59, 119, 116, 90, 156, 198, 373, 326]
ANCHORS = torch.tensor(SIDES).view(9, 2) / 416


def add_options(parser):
    data_dir = parser.add_argument("--data-dir", required=True, help="directory of COCO's files")
    data_dir.may_change = True  # when a run is resumed
    parser.add_argument("--image-size", type=int, default=416, help="side of the square pictures")
    parser.add_argument("--width", type=int, default=32, help="channels of the first layer")
    parser.add_argument("--min-score", type=float, default=0.01, help="of a box that counts for AP")


class Boxes(torch.utils.data.Dataset):
    """Pictures uint8 [3, side, side], and boxes: centre, width, height as shares of the side."""

    def __init__(self, folder, part, side, training):
        with contextlib.redirect_stdout(io.StringIO()):
            coco = COCO(folder / "annotations" / f"instances_{part}.json")
        categories = sorted(coco.cats)
        self.classes = [coco.cats[number]["name"] for number in categories]
        self.samples, self.side, self.training = [], side, training
        for number in sorted(coco.imgs):
            image = coco.imgs[number]
            found = [a for a in coco.imgToAnns[number] if not a.get("iscrowd") and a["area"] > 0]
            found = sorted(found, key=lambda a: -a["area"])[:MOST]
            size = torch.tensor([image["width"], image["height"]] * 2)
            given = torch.tensor([a["bbox"] for a in found]).view(-1, 4)  # left, top, width, height
            boxes, labels = torch.zeros(MOST, 4), torch.zeros(MOST, dtype=torch.long)
            boxes[: len(found)] = box_convert(given, "xywh", "cxcywh") / size
            labels[: len(found)] = torch.tensor([categories.index(a["category_id"]) for a in found])
            path = str(folder / part / image["file_name"])
            self.samples.append((path, boxes, labels, torch.arange(MOST) < len(found)))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, boxes, labels, present = self.samples[index]
        image = v2.functional.resize(read_image(path), [self.side, self.side])
        if self.training and torch.rand(()) < 0.5:
            image, boxes = image.flip(-1), boxes.clone()
            boxes[:, 0] = 1 - boxes[:, 0]
        return image, {"boxes": boxes, "labels": labels, "present": present}


def build_datasets(args):
    folder, side = Path(args.data_dir), args.image_size
    return Boxes(folder, "train2017", side, True), Boxes(folder, "val2017", side, False)


class Detector(nn.Module):
    """Images [n, 3, side, side] -> three [n, 3, g, g, 5 + classes] for g = side / 8, / 16, / 32.

    The last dimension holds the centre, the size, whether there is an object, and its class.
    """

    def __init__(self, classes, width):
        super().__init__()
        sizes, pool = [3, *(width * 2**i for i in range(5))], nn.MaxPool2d(2)
        self.stages = nn.ModuleList(conv_bn(i, o, pool) for i, o in pairwise(sizes))
        self.heads = nn.ModuleList(nn.Conv2d(i, 3 * (5 + classes), 1) for i in sizes[3:])

    def forward(self, images):
        features = images.to(self.heads[0].weight.dtype) / 255
        outputs = []
        for i, stage in enumerate(self.stages):
            features = stage(features)
            if i >= 2:
                maps = self.heads[i - 2](features)
                outputs.append(maps.unflatten(1, (3, -1)).permute(0, 1, 3, 4, 2))
        return outputs


def build_model(args):
    annotations = Path(args.data_dir) / "annotations" / "instances_val2017.json"
    with contextlib.redirect_stdout(io.StringIO()):
        classes = len(COCO(annotations).cats)
    return Detector(classes, args.width)


def boxes_of(values, cells, grid, anchors):
    """Turn outputs [..., 4] of the cells (x, y) [..., 2] into corners, as shares of the side."""
    centres = (cells + values[..., :2].sigmoid()) / grid
    sizes = anchors * values[..., 2:4].clamp(-5, 5).exp()
    return torch.cat([centres - sizes / 2, centres + sizes / 2], -1)


def per_sample_loss(outputs, targets):
    """Every box trains one anchor, that of the likeliest shape, in the cell of its centre."""
    dtype, device = outputs[0].dtype, outputs[0].device
    anchors, boxes = ANCHORS.to(device, dtype), targets["boxes"].to(dtype)
    corners = box_convert(boxes, "cxcywh", "xyxy")
    smaller = torch.minimum(boxes[:, :, None, 2:], anchors).prod(-1)
    larger = boxes[:, :, None, 2:].prod(-1) + anchors.prod(-1) - smaller
    best = (smaller / larger).argmax(2)  # [n, MOST]: of nine anchors
    picture = torch.arange(len(boxes), device=device)[:, None].expand_as(best)
    losses = 0
    for s, output in enumerate(outputs):
        grid = output.shape[2]
        cells = (boxes[..., :2] * grid).long().clamp(max=grid - 1)
        place = (picture, best % 3, cells[..., 1], cells[..., 0])
        weight = (targets["present"] & (best // 3 == s)).to(dtype)
        chosen = output[place]  # [n, MOST, 5 + classes]
        found = boxes_of(chosen, cells, grid, anchors[best])
        classes = F.cross_entropy(chosen[..., 5:].mT, targets["labels"], reduction="none")
        wanted = torch.zeros_like(output[..., 4]).index_put(place, weight, accumulate=True)
        objects = F.binary_cross_entropy_with_logits(
            output[..., 4], wanted.clamp(max=1), reduction="none"
        )
        apart = generalized_box_iou_loss(found, corners)
        losses = losses + (weight * (2 * apart + classes)).sum(1) + objects.flatten(1).sum(1)
    return losses / targets["present"].sum(1).clamp(min=1)


def detect(outputs, min_score):
    """Return for each picture [k, 6]: corners, score, class, after non-maximum suppression."""
    everywhere, scores = [], []
    for s, output in enumerate(outputs):
        grid = output.shape[2]
        y, x = torch.meshgrid(*[torch.arange(grid, device=output.device)] * 2, indexing="ij")
        anchors = ANCHORS[3 * s : 3 * s + 3].to(output)[:, None, None]
        everywhere.append(boxes_of(output, torch.stack([x, y], -1), grid, anchors).flatten(1, 3))
        scores.append((output[..., 4:5].sigmoid() * output[..., 5:].softmax(-1)).flatten(1, 3))
    boxes, scores = torch.cat(everywhere, 1).float(), torch.cat(scores, 1).float()
    found = []
    for own, likely in zip(boxes, scores):
        score, label = likely.max(1)
        chosen = score.topk(min(300, len(score))).indices
        chosen = chosen[score[chosen] > min_score]
        kept = chosen[batched_nms(own[chosen], score[chosen], label[chosen], 0.5)][:100]
        found.append(torch.cat([own[kept], score[kept, None], label[kept, None].float()], 1).cpu())
    return found


def per_sample_metrics(outputs, targets, *, min_score):
    found, hits = detect(outputs, min_score), []
    boxes = box_convert(targets["boxes"], "cxcywh", "xyxy").cpu()
    present, labels = targets["present"].cpu(), targets["labels"].cpu()
    wanted = [torch.cat([b, c[:, None]], 1)[p] for b, c, p in zip(boxes, labels, present)]
    for own, true in zip(found, wanted):
        same = (box_iou(true[:, :4], own[:, :4]) > 0.5) & (true[:, 4:] == own[:, 5])
        hits.append(same.any(1).double().mean() if len(true) else torch.tensor(1.0).double())
    return {"recall": torch.stack(hits), "found": found, "wanted": wanted}


def dataset_metrics(outputs):
    """Return COCO's AP, the mean over IoU 0.5 to 0.95, and AP50."""
    true, found = [], []
    for i, (wanted, own) in enumerate(zip(outputs["wanted"], outputs["found"])):
        for rows, entries in ((wanted, true), (own, found)):
            boxes = box_convert(rows[:, :4], "xyxy", "xywh") * 1000  # COCO knows no shares
            # A true box has no score, and COCO reads none.
            for box, (*_, score, label) in zip(boxes.tolist(), rows[:, 3:].tolist()):
                entry = {"id": len(entries) + 1, "image_id": i, "category_id": int(label)}
                entry |= {"bbox": box, "area": box[2] * box[3], "score": score, "iscrowd": 0}
                entries.append(entry)
    if not true or not found:
        return {"AP": 0.0, "AP50": 0.0}
    with contextlib.redirect_stdout(io.StringIO()):
        coco, labels = COCO(), {entry["category_id"] for entry in true}
        images = [{"id": i} for i in range(len(outputs["wanted"]))]
        categories = [{"id": label} for label in labels]
        coco.dataset = {"images": images, "annotations": true, "categories": categories}
        coco.createIndex()
        scorer = COCOeval(coco, coco.loadRes(found), "bbox")
        scorer.evaluate()
        scorer.accumulate()
        scorer.summarize()
    return {"AP": scorer.stats[0], "AP50": scorer.stats[1]}
