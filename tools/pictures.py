"""Draw the pictures of docs/: `python tools/pictures.py [curves] [batch] [memory]`, by default all.

batch and memory are drawn at once. For curves all five modes train the digits in float64, which
takes two minutes; docs/curves.svg holds the numbers that it shows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common import split_batch
from sampling import GlobalBatchSampler

MODES = {
    "single": "#222222",
    "dp": "#e69f00",
    "ddp": "#0072b2",
    "spawn": "#8fd0f5",
    "fsdp": "#c2247b",
}
RANKS = ("#a6cee3", "#fdbf6f", "#b2df8a", "#cab2d6")
INK, GREY, PAPER = "#222222", "#777777", "#ffffff"


class Drawing:
    """An SVG picture: `str(drawing)` is its text. Lengths are pixels, y grows downwards."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height = width, height
        self.parts = [f"<title>{escape(title)}</title>"]
        self.rect(0, 0, width, height, PAPER, rx=6)

    def __str__(self) -> str:
        size = (
            f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        )
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
        return "\n".join([head, *self.parts, "</svg>"]) + "\n"

    def add(self, name: str, content: str | None = None, **attributes: Any) -> None:
        """Add an element; `stroke_width=2` becomes stroke-width="2"."""
        words = [name]
        for key, value in attributes.items():
            value = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
            words.append(f"{key.replace('_', '-')}={quoteattr(str(value))}")
        end = "/>" if content is None else f">{escape(content)}</{name}>"
        self.parts.append(f"<{' '.join(words)}{end}")

    def rect(self, x: float, y: float, width: float, height: float, fill: str, **more: Any) -> None:
        self.add("rect", x=x, y=y, width=width, height=height, fill=fill, **more)

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str, **more: Any) -> None:
        self.add("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, **more)

    def curve(
        self, points: list[tuple[float, float]], stroke: str, width: float, mode: str
    ) -> None:
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        more = {"stroke_width": width, "stroke_linejoin": "round", "data_mode": mode}
        self.add("polyline", points=text, fill="none", stroke=stroke, **more)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: int = 13,
        anchor: str = "start",
        fill: str = INK,
        **more: Any,
    ) -> None:
        self.add("text", text, x=x, y=y, font_size=size, text_anchor=anchor, fill=fill, **more)


# ------------------------------------------------------------------------------------------ curves

DEVICES, EPOCHS, EVERY = 3, 8, 4
OPTIONS = f"--epochs {EPOCHS} --dtype float64 --log-every {EVERY} --keep-every 1 --device cpu"
BOUND = 1e-10  # of parameters after several epochs, in the README's table


def measure() -> dict[str, Any]:
    """Train in every mode. Return its losses, as [epoch, loss], and how far it is from single.

    That is, after each epoch, the largest difference of a parameter over the largest parameter.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{os.path.dirname(sys.executable)}:{environment['PATH']}"
    losses, models = {}, {}
    with tempfile.TemporaryDirectory() as name:
        for mode in MODES:
            folder = Path(name, mode)
            devices = [] if mode == "single" else [str(DEVICES)]
            command = ["bash", str(ROOT / "run.sh"), mode, *devices, *OPTIONS.split()]
            subprocess.run([*command, "--output-dir", str(folder)], check=True, env=environment)
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
            steps = max(line["step"] for line in lines if line["event"] == "train")
            losses[mode] = [
                [line["global_step"] / steps, line["loss"]]
                for line in lines
                if line["event"] == "train"
            ]
            files = [folder / f"epoch-{epoch + 1:04}.pt" for epoch in range(EPOCHS)]
            models[mode] = [torch.load(file, weights_only=True)["model"] for file in files]
    return {
        "torch": torch.__version__.split("+")[0],
        "losses": losses,
        "deviations": {
            mode: [deviation(*pair) for pair in zip(models[mode], models["single"])]
            for mode in MODES
            if mode != "single"
        },
    }


def deviation(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    largest = max(tensor.abs().max() for tensor in theirs.values())
    return (max((ours[name] - theirs[name]).abs().max() for name in theirs) / largest).item()


def draw_curves(data: dict[str, Any]) -> str:
    """Return the picture of what `measure` has returned, with the data in its metadata."""
    picture = Drawing(760, 560, "Loss of five modes, and how far each is from a single device")
    picture.add("metadata", json.dumps(data))
    picture.text(20, 30, "Five modes, one training run", 17, font_weight="bold")
    left, right = 70, 740

    def x(epoch: float) -> float:
        return left + (right - left) * epoch / EPOCHS

    def panel(top: float, bottom: float, title: str, marks: dict[str, float]) -> None:
        picture.text(20, top - 14, title)
        for label, y in marks.items():
            picture.line(left, y, right, y, "#dddddd")
            picture.text(left - 8, y + 4, label, 12, "end", GREY)
        for epoch in range(EPOCHS + 1):
            picture.line(x(epoch), bottom, x(epoch), bottom + 5, GREY)
            picture.text(x(epoch), bottom + 19, str(epoch), 12, "middle", GREY)
        picture.line(left, bottom, right, bottom, GREY)

    def y_loss(loss: float) -> float:
        return 260 - 170 * (loss - 0.5) / 2

    panel(90, 260, "Training loss", {f"{v:.1f}": y_loss(v) for v in (0.5, 1, 1.5, 2, 2.5)})
    start = 250.0  # of the legend
    for i, (mode, colour) in enumerate(MODES.items()):
        width = 15 - 3.25 * i  # each thinner than those that it covers
        points = [(x(epoch), y_loss(loss)) for epoch, loss in data["losses"][mode]]
        picture.curve(points, colour, width, mode)
        picture.line(start, 72, start + 26, 72, colour, stroke_width=width)
        label = mode if mode == "single" else f"{mode} {DEVICES}"
        picture.text(start + 34, 76.0, label)
        start += 100

    def y_log(value: float) -> float:
        return 500 - 160 * (math.log10(value) + 17) / 8

    marks = {f"1e-{power}": y_log(10.0**-power) for power in range(17, 8, -2)}
    panel(340, 500, "Largest difference of a parameter from single, relative", marks)
    picture.line(left, y_log(BOUND), right, y_log(BOUND), INK, stroke_dasharray="6 4")
    picture.text(right, y_log(BOUND) - 7, f"the tests allow {BOUND:.0e}", 12, "end")
    for mode, width in zip(data["deviations"], (3, 7, 3, 2)):
        values = data["deviations"][mode]
        points = [(x(i + 1), y_log(value)) for i, value in enumerate(values)]
        picture.curve(points, MODES[mode], width, mode)
        for point in points:
            radius = width / 2 + 2
            picture.add("circle", cx=point[0], cy=point[1], r=radius, fill=MODES[mode])
    picture.text((left + right) / 2, 534, "epoch", 12, "middle", GREY)
    last = ", ".join(f"{mode} {values[-1]:.0e}" for mode, values in data["deviations"].items())
    more = f"At the end: {last}. Digits, float64, CPU, torch {data['torch']}."
    picture.text(20, 551, more, 12, fill=GREY)
    return str(picture)


# ------------------------------------------------------------------------------------------- batch

BATCH, PIECES, WORLD_SIZE = 62, 2, 4


def slices() -> list[list[list[int]]]:
    """Return which places of the global batch each rank gets: [rank][micro-batch]."""
    samplers = [
        GlobalBatchSampler(range(BATCH), BATCH, 0, PIECES, False, rank, WORLD_SIZE)
        for rank in range(WORLD_SIZE)
    ]
    batches = [next(iter(sampler))[1] for sampler in samplers]
    alone = next(iter(GlobalBatchSampler(range(BATCH), BATCH, 0)))[1]  # what one device gets
    place = {index: i for i, index in enumerate(alone)}
    return [
        [
            [place[index] for index in piece.tolist()]
            for piece in split_batch(torch.tensor(b), PIECES)
        ]
        for b in batches
    ]


def draw_batch() -> str:
    """Return the picture of a global batch on its way to one averaged gradient."""
    picture = Drawing(760, 506, f"How {WORLD_SIZE} ranks share a global batch of {BATCH} samples")
    parts = slices()
    cell, gap, between = 10.5, 6, 20  # between micro-batches
    left = (760 - BATCH * cell - gap * PIECES * (WORLD_SIZE - 1) - between) / 2
    spots: dict[tuple[int, int], tuple[float, float]] = {}  # (micro-batch, rank): left, right
    x, ends = left, []
    for m in range(PIECES):
        begin = x
        for rank in range(WORLD_SIZE):
            width = len(parts[rank][m]) * cell
            spots[m, rank] = (x, x + width)
            x += width + gap
        ends.append((begin, x - gap))
        x += between - gap
    right = ends[-1][1]

    command = f"--batch-size {BATCH} --accum-steps {PIECES} on {WORLD_SIZE} ranks"
    picture.text(left, 30, f"One optimizer step: {command}", 17, font_weight="bold")
    picture.rect(left, 50, right - left, 26, "#eeeeee", stroke=GREY)
    picture.text(380, 68, f"global batch: {BATCH} samples", anchor="middle")
    for m, (begin, end) in enumerate(ends):
        count = sum(len(parts[rank][m]) for rank in range(WORLD_SIZE))
        picture.line((begin + end) / 2, 76, (begin + end) / 2, 92, GREY)
        picture.rect(begin, 92, end - begin, 26, "#eeeeee", stroke=GREY)
        label = f"micro-batch {m + 1}: {count} samples"
        picture.text((begin + end) / 2, 110, label, anchor="middle")

    box, space, top = 160, 14, 246
    boxes = [(760 - WORLD_SIZE * (box + space) + space) / 2 + i * (box + space) for i in range(4)]
    for (m, rank), (begin, end) in spots.items():
        middle, target = (begin + end) / 2, boxes[rank] + box * (m + 1) / (PIECES + 1)
        picture.line(middle, 118, middle, 134, GREY)
        for i in range(len(parts[rank][m])):
            picture.rect(begin + i * cell, 134, cell, 24, RANKS[rank], stroke=PAPER)
        picture.text(middle, 174, f"{len(parts[rank][m])} samples", 12, "middle")
        picture.line(middle, 182, target, top, RANKS[rank], stroke_width=4)
    for rank, x in enumerate(boxes):
        counts = [len(piece) for piece in parts[rank]]
        picture.rect(x, top, box, 90, RANKS[rank], rx=4)
        middle = x + box / 2
        picture.text(middle, top + 22, f"rank {rank}", 14, "middle", font_weight="bold")
        sizes = " and ".join(map(str, counts))
        picture.text(middle, top + 44, f"forwards of {sizes}", anchor="middle")
        picture.text(middle, top + 62, f"{PIECES} backwards:", anchor="middle")
        picture.text(middle, top + 80, "gradients add up", anchor="middle")
        picture.line(middle, top + 90, middle, top + 114, RANKS[rank], stroke_width=4)
    picture.rect(left, top + 114, right - left, 30, "#eeeeee", stroke=GREY)
    once = f"one all-reduce, in the backward of micro-batch {PIECES}: the mean of the ranks"
    picture.text(380, top + 134, once, anchor="middle")
    picture.line(380, top + 144, 380, top + 168, GREY, stroke_width=4)
    picture.rect(left, top + 168, right - left, 30, PAPER, stroke=INK, stroke_width=2)
    result = f"one gradient, the same on every rank: the mean over {BATCH} samples"
    picture.text(380, top + 188, result, 14, "middle", font_weight="bold")
    factor = f"loss = losses.sum() * ({WORLD_SIZE} / {BATCH})"
    shares = ", ".join(str(sum(map(len, pieces))) for pieces in parts)
    why = f"Each rank: {factor}. So the mean is exact, though the ranks hold {shares} samples."
    picture.text(380, top + 224, why, 12, "middle", GREY)
    picture.text(
        380, top + 244, "With one rank fewer or more, only the cuts move.", 12, "middle", GREY
    )
    return str(picture)


# ------------------------------------------------------------------------------------------ memory

KINDS = {
    "parameters": "#0072b2",
    "gradients": "#56b4e9",
    "optimizer state": "#e69f00",
    "activations": "#b2df8a",
}
COLLECTED = 1 / 8  # machinery/sharding.py: the share of the parameters that is whole at a time


def kept(mode: str, n: int) -> list[list[tuple[str, float, bool]]]:
    """Return for each of n devices: (kind, share of what one device alone has, is it passing).

    What passes is there in the forward and the backward only, not when the optimizer steps.
    """
    state = ("parameters", "gradients", "optimizer state")
    own = ("activations", 1 / n, True)
    if mode == "single":
        return [[*((kind, 1.0, False) for kind in state), ("activations", 1.0, True)]]
    if mode == "dp":
        copy = [("parameters", 1.0, True), ("gradients", 1.0, True), own]
        return [[*((kind, 1.0, False) for kind in state), own], *[copy] * (n - 1)]
    if mode == "fsdp":
        part = [("parameters", COLLECTED, True), ("gradients", COLLECTED, True)]
        return [[*((kind, 1 / n, False) for kind in state), *part, own]] * n
    return [[*((kind, 1.0, False) for kind in state), own]] * n


def draw_memory() -> str:
    """Return the picture of what each mode keeps on each device."""
    picture = Drawing(760, 430, f"What each mode keeps on each of {DEVICES} devices")
    title = f"What each of {DEVICES} devices holds in a step (SGD with momentum)"
    picture.text(30, 30, title, 17, font_weight="bold")
    words = {
        "single": ("everything", "on one device"),
        "dp": ("all on device 0,", "a copy in each step"),
        "ddp": ("all on every device,", "spawn: the same"),
        "fsdp": (f"1/{DEVICES} on every device,", "a part whole at a time"),
    }
    bar, gap, base, unit = 44, 8, 270, 46
    x = 50.0
    for mode, lines in words.items():
        devices = kept(mode, DEVICES)
        width = len(devices) * (bar + gap) - gap
        middle = x + width / 2
        for device, kinds in enumerate(devices):
            left, y = x + device * (bar + gap), float(base)
            for kind, share, passing in kinds:
                height = unit * share * (1.6 if kind == "activations" else 1)
                y -= height
                more = {"stroke": KINDS[kind] if passing else PAPER}
                if passing:
                    more |= {"stroke_dasharray": "3 2", "fill_opacity": 0.35}
                place = {"data_mode": mode, "data_device": device, "data_kind": kind}
                more |= {**place, "data_share": round(share, 4)}
                picture.rect(left, y, bar, height, KINDS[kind], **more)
            picture.text(left + bar / 2, base + 17, str(device), 12, "middle", GREY)
        picture.line(x - 4, base, x + width + 4, base, GREY)
        picture.text(middle, base + 40, mode, 15, "middle", font_weight="bold")
        for i, line in enumerate(lines):
            picture.text(middle, base + 60 + 16 * i, line, 12, "middle")
        x += width + 55
    x = 30.0
    for kind, colour in KINDS.items():
        picture.rect(x, 374, 16, 16, colour)
        picture.text(x + 22, 387, kind, 12)
        x += 132
    picture.rect(x, 374, 16, 16, GREY, fill_opacity=0.35, stroke=GREY, stroke_dasharray="3 2")
    picture.text(x + 22, 387, "forward and backward only", 12)
    scale = "One micro-batch in a step. Activations depend on the model and the batch."
    scale += " AdamW keeps twice the optimizer state."
    picture.text(30, 414, scale, 12, fill=GREY)
    return str(picture)


PICTURES = {"batch": draw_batch, "memory": draw_memory, "curves": lambda: draw_curves(measure())}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pictures.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    names = parser.parse_args(argv).names or PICTURES
    if unknown := set(names) - set(PICTURES):
        parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(PICTURES)}")
    for name in names:
        (ROOT / "docs" / f"{name}.svg").write_text(PICTURES[name]())
        print(f"wrote docs/{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
