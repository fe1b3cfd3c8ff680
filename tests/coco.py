"""Small data sets in COCO's file format: made pictures as PNG files, and their annotations as JSON."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torchvision.io import write_png

PLACES = torch.tensor([[0.2 + 0.2 * (i % 4), 0.15 + 0.175 * (i // 4)] for i in range(17)])
COLOURS = {3: 0, 7: 1}  # category: channel; numbers with gaps, as COCO has them
GENERATOR = torch.Generator()


def draw(low: float, high: float) -> float:
    return low + (high - low) * torch.rand((), generator=GENERATOR).item()


def write_set(
    folder: Path, kind: str, counts: tuple[int, int], categories: list, picture_of: Callable
) -> None:
    """Write the pictures of `picture_of(number)` and what is in them; each fifth has a crowd too."""
    GENERATOR.manual_seed(0)
    (folder / "annotations").mkdir(parents=True)
    for part, count in zip(("train2017", "val2017"), counts):
        (folder / part).mkdir()
        images, annotations = [], []
        for number in range(count):
            picture, objects, crowd = picture_of(number)
            for entry in [*objects, crowd | {"iscrowd": 1}][: len(objects) + (number % 5 == 0)]:
                own = {"id": len(annotations) + 1, "image_id": 10 * number, "iscrowd": 0}
                annotations.append(own | entry)
            name = f"{10 * number:012}.png"
            write_png(picture.clamp(0, 255).byte(), str(folder / part / name))
            size = {"height": picture.shape[1], "width": picture.shape[2]}
            images.append({"id": 10 * number, "file_name": name, **size})
        content = {"images": images, "annotations": annotations, "categories": categories}
        (folder / "annotations" / f"{kind}_{part}.json").write_text(json.dumps(content))


def make_boxes(folder: Path, train: int, val: int, side: int = 64) -> None:
    """Write bright rectangles on noise, up to three a picture, red or green; some have none."""

    def picture_of(number: int) -> tuple[Tensor, list[dict], dict]:
        height, width = side, side + 8 * (number % 2)
        picture, objects = 60 * torch.rand(3, height, width, generator=GENERATOR), []
        for _ in range(int(draw(0, 3.999))):
            w, h = draw(14, 32), draw(14, 32)
            x, y = draw(0, width - w), draw(0, height - h)
            category = (3, 7)[int(draw(0, 2))]
            rows, columns = slice(round(y), round(y + h)), slice(round(x), round(x + w))
            picture[:, rows, columns] *= 0.3
            picture[COLOURS[category], rows, columns] += 170
            objects.append({"category_id": category, "bbox": [x, y, w, h], "area": w * h})
        return picture, objects, {"category_id": 3, "bbox": [1, 1, 8, 8], "area": 64.0}

    categories = [{"id": 7, "name": "green"}, {"id": 3, "name": "red"}]
    write_set(folder, "instances", (train, val), categories, picture_of)


def make_people(folder: Path, train: int, val: int, side: int = 96) -> None:
    """Write pictures of one to three "people" at any place: 17 blobs, each joint of its own colour.

    Some joints are hidden, and the crowds have no joints. People may overlap.
    """
    hues = torch.arange(17) * (2 * torch.pi / 17)
    colours = 120 + 120 * torch.stack([(hues + shift).cos() for shift in (0, 2.1, 4.2)], 1)

    def picture_of(number: int) -> tuple[Tensor, list[dict], dict]:
        height, width = side, side + 8 * (number % 2)
        rows, columns = torch.arange(height)[:, None] + 0.5, torch.arange(width) + 0.5
        picture, objects = 20 * torch.rand(3, height, width, generator=GENERATOR), []
        taken = []  # the boxes of this picture
        for _ in range(3):
            size = side * draw(0.4, 0.6)
            x, y = draw(0, width - size), draw(0, height - size)
            gaps = [max(abs(x - a), abs(y - b)) / max(size, c) for a, b, c in taken]
            if any(gap < 0.7 for gap in gaps):
                continue
            taken.append((x, y, size))
            jitter = 0.3 * torch.rand(17, 2, generator=GENERATOR) - 0.15
            joints = (PLACES + jitter).clamp(0.08, 0.92) * size + torch.tensor([x, y])
            seen = torch.rand(17, generator=GENERATOR) < 0.6
            for (i, j), colour in zip(joints[seen], colours[seen]):
                near = ((columns - i) ** 2 + (rows - j) ** 2) < 6
                picture = torch.where(near, colour[:, None, None], picture)
            points = torch.cat([joints * seen[:, None], 2.0 * seen[:, None]], 1)
            entry = {"category_id": 1, "bbox": [x, y, size, size], "area": size**2}
            entry |= {"num_keypoints": int(seen.sum()), "keypoints": points.flatten().tolist()}
            objects.append(entry)
        crowd = {"category_id": 1, "bbox": [1, 1, 20, 20], "area": 400.0}
        return picture, objects, crowd | {"num_keypoints": 0, "keypoints": [0] * 51}

    write_set(folder, "person_keypoints", (train, val), [{"id": 1}], picture_of)
