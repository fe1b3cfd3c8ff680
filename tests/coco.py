"""Small data sets in COCO's file format: made pictures as PNG files, and their annotations as JSON."""

import json
from pathlib import Path

import torch
from torchvision.io import write_png

PLACES = torch.tensor([[0.2 + 0.2 * (i % 4), 0.15 + 0.175 * (i // 4)] for i in range(17)])
COLOURS = {3: 0, 7: 1}  # category: channel; numbers with gaps, as COCO has them


def make_boxes(folder: Path, train: int, val: int, side: int = 64) -> None:
    """Write bright rectangles on noise, up to three a picture, red or green; some have none."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=generator).item()

    for part, count in (("train2017", train), ("val2017", val)):
        (folder / part).mkdir(parents=True)
        images, annotations = [], []
        for number in range(count):
            height, width = side, side + 8 * (number % 2)
            picture = 60 * torch.rand(3, height, width, generator=generator)
            for _ in range(int(draw(0, 3.999))):
                w, h = draw(14, 32), draw(14, 32)
                x, y = draw(0, width - w), draw(0, height - h)
                category = (3, 7)[int(draw(0, 2))]
                rows, columns = slice(round(y), round(y + h)), slice(round(x), round(x + w))
                picture[:, rows, columns] *= 0.3
                picture[COLOURS[category], rows, columns] += 170
                entry = {"id": len(annotations) + 1, "image_id": 10 * number, "area": w * h}
                entry |= {"category_id": category, "bbox": [x, y, w, h], "iscrowd": 0}
                annotations.append(entry)
            crowd = {"id": len(annotations) + 1, "image_id": 10 * number, "area": 64.0}
            crowd |= {"category_id": 3, "bbox": [1, 1, 8, 8], "iscrowd": 1}
            annotations += [crowd] if number % 5 == 0 else []
            name = f"{10 * number:012}.png"
            write_png(picture.clamp(0, 255).byte(), str(folder / part / name))
            images.append({"id": 10 * number, "file_name": name, "width": width, "height": height})
        categories = [{"id": 7, "name": "green"}, {"id": 3, "name": "red"}]
        content = {"images": images, "annotations": annotations, "categories": categories}
        write_annotations(folder, f"instances_{part}", content)


def write_annotations(folder: Path, name: str, content: dict) -> None:
    (folder / "annotations").mkdir(exist_ok=True)
    (folder / "annotations" / f"{name}.json").write_text(json.dumps(content))


def make_people(folder: Path, train: int, val: int, side: int = 96) -> None:
    """Write pictures of one to three "people" at any place: 17 blobs, each joint of its own colour.

    Some joints are hidden, and every fifth picture has a crowd without joints. People may overlap.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=generator).item()

    hues = torch.arange(17) * (2 * torch.pi / 17)
    colours = 120 + 120 * torch.stack([(hues + shift).cos() for shift in (0, 2.1, 4.2)], 1)
    for part, count in (("train2017", train), ("val2017", val)):
        (folder / part).mkdir(parents=True)
        images, annotations = [], []
        for number in range(count):
            height, width = side, side + 8 * (number % 2)
            rows, columns = torch.arange(height)[:, None] + 0.5, torch.arange(width) + 0.5
            picture = 20 * torch.rand(3, height, width, generator=generator)
            taken = []  # the boxes of this picture
            for _ in range(3):
                size = side * draw(0.4, 0.6)
                x, y = draw(0, width - size), draw(0, height - size)
                gaps = [max(abs(x - a), abs(y - b)) / max(size, c) for a, b, c in taken]
                if any(gap < 0.7 for gap in gaps):
                    continue
                taken.append((x, y, size))
                jitter = 0.3 * torch.rand(17, 2, generator=generator) - 0.15
                joints = (PLACES + jitter).clamp(0.08, 0.92) * size + torch.tensor([x, y])
                seen = torch.rand(17, generator=generator) < 0.6
                for (i, j), colour in zip(joints[seen], colours[seen]):
                    near = ((columns - i) ** 2 + (rows - j) ** 2) < 6
                    picture = torch.where(near, colour[:, None, None], picture)
                entry = {"id": len(annotations) + 1, "image_id": 10 * number, "category_id": 1}
                entry |= {"bbox": [x, y, size, size], "iscrowd": 0, "area": size**2}
                points = torch.cat([joints * seen[:, None], 2.0 * seen[:, None]], 1)
                entry |= {"num_keypoints": int(seen.sum()), "keypoints": points.flatten().tolist()}
                annotations.append(entry)
            crowd = {"id": len(annotations) + 1, "image_id": 10 * number, "category_id": 1}
            crowd |= {"bbox": [1, 1, 20, 20], "iscrowd": 1, "area": 400.0}
            crowd |= {"num_keypoints": 0, "keypoints": [0] * 51}
            annotations += [crowd] if number % 5 == 0 else []
            name = f"{10 * number:012}.png"
            write_png(picture.clamp(0, 255).byte(), str(folder / part / name))
            images.append({"id": 10 * number, "file_name": name, "width": width, "height": height})
        content = {"images": images, "annotations": annotations, "categories": [{"id": 1}]}
        write_annotations(folder, f"person_keypoints_{part}", content)
