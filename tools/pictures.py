"""Draw docs/curves.svg: `python tools/pictures.py`.

All five modes train the digits in float64, which takes two minutes. The picture holds the numbers
that it shows.
"""

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
MODES = {"single": "#222222", "dp": "#e69f00", "ddp": "#0072b2", "spawn": "#8fd0f5"}
MODES["fsdp"] = "#c2247b"
INK, GREY, PAPER = "#222222", "#777777", "#ffffff"
DEVICES, EPOCHS, EVERY = 3, 8, 4
OPTIONS = f"--epochs {EPOCHS} --dtype float64 --log-every {EVERY} --keep-every 1 --device cpu"
BOUND = 1e-10  # of parameters after several epochs, in the README's table


class Drawing:
    """An SVG picture: `str(drawing)` is its text. Lengths are pixels, y grows downwards."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        self.parts = [f"<title>{escape(title)}</title>"]
        self.add("rect", x=0, y=0, width=width, height=height, fill=PAPER, rx=6)

    def __str__(self) -> str:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {self.size} font-family="sans-serif">'
        return "\n".join([head, *self.parts, "</svg>"]) + "\n"

    def add(self, name: str, content: str | None = None, **attributes: Any) -> None:
        """Add an element; `stroke_width=2` becomes stroke-width="2"."""
        words = [name]
        for key, value in attributes.items():
            value = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
            words.append(f"{key.replace('_', '-')}={quoteattr(str(value))}")
        end = "/>" if content is None else f">{escape(content)}</{name}>"
        self.parts.append(f"<{' '.join(words)}{end}")

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str, **more: Any) -> None:
        self.add("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, **more)

    def text(self, x: float, y: float, text: str, size: int = 13, **more: Any) -> None:
        more = {"text_anchor": "start", "fill": INK} | more
        self.add("text", text, x=x, y=y, font_size=size, **more)

    def curve(self, points: list[tuple[float, float]], width: float, mode: str) -> None:
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        more = {"stroke_width": width, "stroke_linejoin": "round", "data_mode": mode}
        self.add("polyline", points=text, fill="none", stroke=MODES[mode], **more)


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
            trained = [line for line in lines if line["event"] == "train"]
            steps = max(line["step"] for line in trained)
            losses[mode] = [[line["global_step"] / steps, line["loss"]] for line in trained]
            files = [folder / f"epoch-{epoch + 1:04}.pt" for epoch in range(EPOCHS)]
            models[mode] = [torch.load(file, weights_only=True)["model"] for file in files]
    single = models.pop("single")
    found = {mode: [*map(deviation, own, single)] for mode, own in models.items()}
    return {"torch": torch.__version__.split("+")[0], "losses": losses, "deviations": found}


def deviation(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    largest = max(tensor.abs().max() for tensor in theirs.values())
    return (max((ours[name] - theirs[name]).abs().max() for name in theirs) / largest).item()


def draw_curves(data: dict[str, Any]) -> str:
    """Return the picture of what `measure` has returned, with the data in its metadata."""
    picture = Drawing(760, 560, "Loss of five modes, and how far each is from a single device")
    picture.add("metadata", json.dumps(data))
    picture.text(20, 30, "Five modes, one training run", 17, font_weight="bold")
    left, right, below = 70, 740, {"text_anchor": "middle", "fill": GREY}

    def x(epoch: float) -> float:
        return left + (right - left) * epoch / EPOCHS

    def panel(top: float, bottom: float, title: str, marks: dict[str, float]) -> None:
        picture.text(20, top - 14, title)
        for label, y in marks.items():
            picture.line(left, y, right, y, "#dddddd")
            picture.text(left - 8, y + 4, label, 12, text_anchor="end", fill=GREY)
        for epoch in range(EPOCHS + 1):
            picture.line(x(epoch), bottom, x(epoch), bottom + 5, GREY)
            picture.text(x(epoch), bottom + 19, str(epoch), 12, **below)
        picture.line(left, bottom, right, bottom, GREY)

    def y_loss(loss: float) -> float:
        return 260 - 170 * (loss - 0.5) / 2

    panel(90, 260, "Training loss", {f"{v:.1f}": y_loss(v) for v in (0.5, 1, 1.5, 2, 2.5)})
    start = 250.0  # of the legend
    for i, (mode, colour) in enumerate(MODES.items()):
        width = 15 - 3.25 * i  # each thinner than those that it covers
        points = [(x(epoch), y_loss(loss)) for epoch, loss in data["losses"][mode]]
        picture.curve(points, width, mode)
        picture.line(start, 72, start + 26, 72, colour, stroke_width=width)
        label = mode if mode == "single" else f"{mode} {DEVICES}"
        picture.text(start + 34, 76.0, label)
        start += 100

    def y_log(value: float) -> float:
        return 500 - 160 * (math.log10(value) + 17) / 8

    marks = {f"1e-{power}": y_log(10.0**-power) for power in range(17, 8, -2)}
    panel(340, 500, "Largest difference of a parameter from single, relative", marks)
    picture.line(left, y_log(BOUND), right, y_log(BOUND), INK, stroke_dasharray="6 4")
    picture.text(right, y_log(BOUND) - 7, f"the tests allow {BOUND:.0e}", 12, text_anchor="end")
    for mode, width in zip(data["deviations"], (3, 7, 3, 2)):
        values = data["deviations"][mode]
        points = [(x(i + 1), y_log(value)) for i, value in enumerate(values)]
        picture.curve(points, width, mode)
        for point in points:
            radius = width / 2 + 2
            picture.add("circle", cx=point[0], cy=point[1], r=radius, fill=MODES[mode])
    picture.text((left + right) / 2, 534, "epoch", 12, **below)
    last = ", ".join(f"{mode} {values[-1]:.0e}" for mode, values in data["deviations"].items())
    more = f"At the end: {last}. Digits, float64, CPU, torch {data['torch']}."
    picture.text(20, 551, more, 12, fill=GREY)
    return str(picture)


if __name__ == "__main__":
    (ROOT / "docs" / "curves.svg").write_text(draw_curves(measure()))
    print("wrote docs/curves.svg")
