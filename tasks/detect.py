"""Object detection in the style of YOLOv3 on COCO files: three scales, three anchors each, box AP.

    bash run.sh ddp 4 --task detect --data-dir coco --image-size 416 --best AP

--data-dir holds train2017/, val2017/ and annotations/instances_{train,val}2017.json. The package
pycocotools reads the files and computes AP. `dp` cannot cut a list of boxes.

The loss of a picture is divided by the boxes of that picture, never by those of the batch: a number
per sample is what makes it the same on every number of devices.
"""

import contextlib
import io
import os
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from common import fail
from tasks.images import conv_bn, read_image

try:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval
    from torchvision.ops import batched_nms, box_convert, generalized_box_iou_loss
    from torchvision.transforms import v2
except ImportError:
    fail("--task detect and pose need: pip install torchvision pycocotools")

# Width and height of nine, as shares of the picture. Source: arXiv:1804.02767, for 416 pixels.
SIDES = [10, 13, 16, 30, 33, 23, 30, 61, 62, 45, 59, 119, 116, 90, 156, 198, 373, 326]
ANCHORS = torch.tensor(SIDES).view(9, 2) / 416


def add_options(parser):
    parser.add_argument("--data-dir", type=os.path.abspath, default="coco", help="of COCO's files")
    parser.add_argument("--image-size", type=int, default=416, help="side of the square pictures")
    parser.add_argument("--width", type=int, default=32, help="channels of the first layer")
    parser.add_argument("--min-score", type=float, default=0.01, help="of a box that counts for AP")


def read_coco(file):
    """Read a file of annotations, without the lines that pycocotools prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        return COCO(file)


class Boxes(torch.utils.data.Dataset):
    """Pictures uint8 [3, side, side], and boxes [k, 6]: corners as shares, 1 for a crowd, class."""

    def __init__(self, folder, part, side, training):
        coco = read_coco(folder / "annotations" / f"instances_{part}.json")
        labels = {number: label for label, number in enumerate(sorted(coco.cats))}
        self.classes = [coco.cats[number]["name"] for number in labels]
        self.samples, self.side, self.training = [], side, training
        for number in sorted(coco.imgs):
            image, found = coco.imgs[number], coco.imgToAnns[number]
            rows = [[*a["bbox"], a.get("iscrowd", 0), labels[a["category_id"]]] for a in found]
            boxes = torch.tensor(rows, dtype=torch.float32).view(-1, 6)
            size = torch.tensor([image["width"], image["height"]] * 2)
            boxes[:, :4] = box_convert(boxes[:, :4], "xywh", "xyxy") / size
            self.samples.append((str(folder / part / image["file_name"]), boxes))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, boxes = self.samples[index]
        image = v2.functional.resize(read_image(path), [self.side, self.side])
        if self.training and torch.rand(()) < 0.5:
            image, boxes = image.flip(-1), boxes.clone()
            boxes[:, [0, 2]] = 1 - boxes[:, [2, 0]]
        return image, boxes


def collate(samples):
    images, boxes = zip(*samples)
    return torch.stack(images), list(boxes)


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
        dtype = self.heads[0].weight.dtype
        features, outputs = images.to(dtype) / 255, []
        for i, stage in enumerate(self.stages):
            features = stage(features)
            if i >= 2:
                maps = self.heads[i - 2](features)
                # bf16 of --amp would put a box into another cell.
                outputs.append(maps.unflatten(1, (3, -1)).permute(0, 1, 3, 4, 2).to(dtype))
        return outputs


def build_model(args):
    annotations = Path(args.data_dir) / "annotations" / "instances_val2017.json"
    return Detector(len(read_coco(annotations).cats), args.width)


def boxes_of(values, cells, grid, anchors):
    """Turn outputs [..., 4] of the cells (x, y) [..., 2] into corners, as shares of the side."""
    centres = (cells + values[..., :2].sigmoid()) / grid
    sizes = anchors * values[..., 2:4].clamp(-5, 5).exp()
    return torch.cat([centres - sizes / 2, centres + sizes / 2], -1)


def per_sample_loss(outputs, targets):
    """Every box trains one anchor, that of the likeliest shape, in the cell of its centre."""
    rows = torch.cat([F.pad(boxes, (1, 0), value=i) for i, boxes in enumerate(targets)])
    picture, crowd, labels = rows[:, 0].long(), rows[:, 5], rows[:, 6].long()
    corners, anchors = rows[:, 1:5].to(outputs[0].dtype), ANCHORS.to(outputs[0])
    boxes = box_convert(corners, "xyxy", "cxcywh")
    smaller = torch.minimum(boxes[:, None, 2:], anchors).prod(-1)
    larger = boxes[:, None, 2:].prod(-1) + anchors.prod(-1) - smaller
    best = (smaller / larger).argmax(1)  # [boxes]: of nine anchors
    counts = torch.stack([(boxes[:, 4] == 0).sum() for boxes in targets])
    losses = boxes.new_zeros(len(targets))
    for s, output in enumerate(outputs):
        grid = output.shape[2]
        cells = (boxes[:, :2] * grid).long().clamp(0, grid - 1)
        place = (picture, best % 3, cells[:, 1], cells[:, 0])
        weight = ((crowd == 0) & (best // 3 == s)).to(boxes.dtype)
        chosen = output[place]  # [boxes, 5 + classes]
        found = boxes_of(chosen, cells, grid, anchors[best])
        classes = F.cross_entropy(chosen[:, 5:], labels, reduction="none")
        wanted = torch.zeros_like(output[..., 4]).index_put(place, weight, accumulate=True)
        objects = F.binary_cross_entropy_with_logits(
            output[..., 4], wanted.clamp(max=1), reduction="none"
        )
        apart = generalized_box_iou_loss(found, corners)
        losses = losses.index_add(0, picture, weight * (2 * apart + classes))
        losses = losses + objects.flatten(1).sum(1)
    return losses / counts.clamp(min=1)


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
    return {"found": detect(outputs, min_score), "wanted": [boxes.cpu() for boxes in targets]}


def dataset_metrics(outputs):
    true, found = [], []
    for i, (wanted, own) in enumerate(zip(outputs["wanted"], outputs["found"])):
        for rows, entries in ((wanted, true), (own, found)):
            boxes = box_convert(rows[:, :4], "xyxy", "xywh") * 1000  # COCO knows no shares
            # A found box has a score, a true one is a crowd or not.
            for box, (score, label) in zip(boxes.tolist(), rows[:, 4:].tolist()):
                entry = {"id": len(entries) + 1, "image_id": i, "category_id": int(label)}
                entry |= {"bbox": box, "area": box[2] * box[3], "score": score}
                entries.append(entry | {"iscrowd": int(score)})  # COCO sets 0 for a found box
    return average_precision(len(outputs["wanted"]), true, found, "bbox")


def average_precision(images, true, found, kind):
    """Return COCO's AP, the mean over IoU 0.5 to 0.95, and AP50; COCO ignores crowds itself."""
    if not true or not found:
        return {"AP": 0.0, "AP50": 0.0}
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {"images": [{"id": i} for i in range(images)], "annotations": true}
        coco.dataset["categories"] = [{"id": n} for n in {entry["category_id"] for entry in true}]
        coco.createIndex()
        scorer = COCOeval(coco, coco.loadRes(found), kind)
        scorer.evaluate()
        scorer.accumulate()
        scorer.summarize()
    return {"AP": scorer.stats[0], "AP50": scorer.stats[1]}
