"""Make a small data set in the file format of a real one.

python tests/made_data.py boxes FOLDER 96 24    # so many pictures train, and are held out
"""

import io
import json
import random
import sys
import tarfile
from pathlib import Path

import numpy as np
import torch
from coco import make_boxes, make_people
from torchvision.io import write_jpeg

# name: colours of the middle and of the petals, number of petals
FLOWERS = {
    "daisy": ((230, 200, 40), (230, 230, 230), 9),
    "poppy": ((40, 30, 30), (220, 50, 40), 4),
    "sunflower": ((110, 70, 30), (230, 200, 40), 12),
}


def make_flowers(folder: Path, train: int, val: int, side: int = 72) -> None:
    """Write JPEG files of one flower on a meadow, one directory per class in train/ and val/."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.arange(side)[:, None] + 0.5, torch.arange(side + 8) + 0.5
    meadow = torch.tensor([60.0, 120.0, 50.0])[:, None, None]
    for part, count in (("train", train), ("val", val)):
        for i in range(count):
            name = [*FLOWERS][i % len(FLOWERS)]
            middle, petals, number = FLOWERS[name]
            x, y, size, turn = torch.rand(4, generator=generator).tolist()
            x, y, size = (
                side * (0.35 + 0.3 * x),
                side * (0.35 + 0.3 * y),
                side * (0.2 + 0.15 * size),
            )
            far, angle = torch.hypot(columns - x, rows - y), torch.atan2(rows - y, columns - x)
            edge = size * (0.6 + 0.4 * (number * (angle + 7 * turn)).cos().abs())
            picture = torch.where(far < edge, torch.tensor(petals)[:, None, None], meadow)
            picture = torch.where(far < 0.35 * size, torch.tensor(middle)[:, None, None], picture)
            light = 0.5 + 0.5 * torch.rand(3, 1, 1, generator=generator)
            noise = 40 * torch.randn(picture.shape, generator=generator)
            path = folder / part / name / f"{i:04}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_jpeg((picture * light + noise).clamp(0, 255).byte(), str(path))


def make_shards(folder: Path, train: int, val: int) -> None:
    """Write so many tar files of 10 to 30 vectors of eight numbers; sizes.json counts them."""
    generator = np.random.default_rng(0)
    for part, count in (("train", train), ("val", val)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        sizes = {f"{i:04}.tar": int(generator.integers(10, 31)) for i in range(count)}
        for name, size in sizes.items():
            write_tar(folder / part / name, generator.normal(size=(size, 8)))
        (folder / part / "sizes.json").write_text(json.dumps(sizes))


def write_tar(path: Path, vectors: np.ndarray) -> None:
    with tarfile.open(path, "w") as tar:
        for i, vector in enumerate(vectors):
            np.save(file := io.BytesIO(), vector)
            member = tarfile.TarInfo(f"{i}.npy")
            member.size = len(file.getvalue())
            tar.addfile(member, io.BytesIO(file.getvalue()))


KINDS = {"boxes": make_boxes, "people": make_people, "flowers": make_flowers}
KINDS["shards"] = make_shards


# Name: (one, several). A verb agrees with a noun that may stand five words before it, which no table of pairs of bytes can know.
NOUNS = {"cat": "cats", "dog": "dogs", "bird": "birds", "child": "children", "fox": "foxes"}
VERBS = {"sees": "see", "hears": "hear", "likes": "like", "follows": "follow"}
PLACES = ["near the river", "under a tree", "in the old house", "behind the hill"]


def make_text(file: Path, length: int) -> None:
    """Write so many bytes of sentences of a small grammar."""
    draw = random.Random(0)

    def phrase(depth: int) -> tuple[str, int]:
        many = draw.randrange(2)
        one, several = draw.choice([*NOUNS.items()])
        words = f"the {several if many else one}"
        if draw.random() < 0.3:
            words += f" {draw.choice(PLACES)}"
        if depth and draw.random() < 0.3:
            words += f" that {sentence(depth - 1, many)}"
        return words, many

    def sentence(depth: int, many: int | None = None) -> str:
        subject = ""
        if many is None:
            words, many = phrase(depth)
            subject = f"{words} "
        one, several = draw.choice([*VERBS.items()])
        return f"{subject}{several if many else one} {phrase(depth - 1 if depth else 0)[0]}"

    text = ""
    while len(text) < length:
        text += f"{sentence(2).capitalize()}.\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text[:length])


def main(kind: str, folder: str, *counts: str) -> None:
    if kind == "text":
        make_text(Path(folder), *map(int, counts))
    else:
        KINDS[kind](Path(folder), *map(int, counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
