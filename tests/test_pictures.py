"""The pictures in docs/ are those of tools/pictures.py, and show what the text says."""

import itertools
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import matplotlib
import pictures
import pytest
import torch
from harness import ROOT
from PIL import ImageFont

FONT = f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans"  # wider than a browser's sans-serif
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = re.compile(r"!\[([^]]*)\]\(([^)]+\.svg)\)")


def read(name):
    return (ROOT / "docs" / f"{name}.svg").read_text()


def elements(name, kind):
    root = ElementTree.fromstring(read(name))
    return list(root.iter("{http://www.w3.org/2000/svg}" + kind))


def numbers():
    (element,) = elements("curves", "metadata")
    return json.loads(element.text)


def text_box(element):
    """Return left, top, right and bottom of a text."""
    size, x, y = (float(element.get(name)) for name in ("font-size", "x", "y"))
    bold = "-Bold" if element.get("font-weight") == "bold" else ""
    width = ImageFont.truetype(f"{FONT}{bold}.ttf", size).getlength(element.text)
    x -= width * {"start": 0, "middle": 0.5, "end": 1}[element.get("text-anchor")]
    return x, y - 0.75 * size, x + width, y + 0.25 * size


def rect_box(element):
    x, y, width, height = (float(element.get(name)) for name in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


def overlap(a, b):
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def inside(a, b):
    return b[0] <= a[0] and b[1] <= a[1] and a[2] <= b[2] and a[3] <= b[3]


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_picture_is_a_small_plain_file(name):
    text = read(name)
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(root[0].text) > 20, "a title for those who cannot see it"
    assert len(text) < 30_000 and not re.search(r"script|href|@import|url\(|\bnan\b|\binf\b", text)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_texts_of_a_picture_are_readable(name):
    """No text covers another one, and none leaves its box or the picture."""
    rects = [rect_box(rect) for rect in elements(name, "rect")]
    texts = {element.text: text_box(element) for element in elements(name, "text")}
    boxes = [text_box(element) for element in elements(name, "text")]
    assert len(boxes) >= 15
    for a, b in itertools.combinations(boxes, 2):
        assert not overlap(a, b), [text for text, box in texts.items() if box in (a, b)]
    for text, box in texts.items():
        for rect in rects:
            assert inside(box, rect) or not overlap(box, rect), f"{text} crosses an edge"


def test_checked_in_drawings_are_those_of_today():
    stale = "stale: python tools/pictures.py batch memory"
    assert read("batch") == pictures.draw_batch(), stale
    assert read("memory") == pictures.draw_memory(), stale
    assert read("curves") == pictures.draw_curves(numbers()), "stale: python tools/pictures.py"


def test_curves_are_equal_up_to_rounding():
    data = numbers()
    assert list(data["losses"]) == list(pictures.MODES)
    single = data["losses"]["single"]
    assert single[-1][0] == pictures.EPOCHS and single[-1][1] < 0.5 * single[0][1], "it learns"
    for losses in data["losses"].values():
        assert losses == [[epoch, pytest.approx(loss, rel=1e-12)] for epoch, loss in single]
    assert list(data["deviations"]) == ["dp", "ddp", "spawn", "fsdp"]
    for mode, values in data["deviations"].items():
        assert len(values) == pictures.EPOCHS
        assert all(0 < value < 1e-12 for value in values), f"{mode}: {values}"
    readme = (ROOT / "README.md").read_text()
    claimed = float(re.search(r"no parameter differs by more than (\S+)\]", readme)[1])
    assert max(max(values) for values in data["deviations"].values()) < claimed
    assert "| parameters, log lines and evaluation lines" in readme
    assert pictures.BOUND == 1e-10 and f"| one device | {pictures.BOUND:.0e} |" in readme


def test_deviation_by_hand():
    """The worst difference of any parameter over the largest parameter of all."""
    theirs = {"a": torch.tensor([1.0, -8.0]), "b": torch.tensor([2.0])}
    ours = {"a": torch.tensor([1.0, -8.25]), "b": torch.tensor([1.0])}
    assert pictures.deviation(ours, theirs) == 0.125
    assert pictures.deviation(theirs, theirs) == 0


def test_curves_stand_where_their_numbers_are():
    """The axes are read from their labels."""
    drawn = elements("curves", "polyline")
    data = numbers()
    for panel, shown, scale in (
        (drawn[:5], {m: [v for _, v in line] for m, line in data["losses"].items()}, float),
        (drawn[5:], data["deviations"], math.log10),
    ):
        assert [curve.get("data-mode") for curve in panel] == list(shown)
        labels = [e for e in elements("curves", "text") if e.get("text-anchor") == "end"]
        labels = [e for e in labels if ("e-" in e.text) == (scale is math.log10)]
        marks = {float(e.text): float(e.get("y")) - 4 for e in labels if " " not in e.text}
        low, high = min(marks), max(marks)
        assert scale is float or high / low > 1e6
        for curve in panel:
            points = [tuple(map(float, p.split(","))) for p in curve.get("points").split()]
            for value, (_, y) in zip(shown[curve.get("data-mode")], points, strict=True):
                share = (scale(value) - scale(low)) / (scale(high) - scale(low))
                assert y == pytest.approx(marks[low] + share * (marks[high] - marks[low]), abs=0.2)
        widths = {c.get("data-mode"): float(c.get("stroke-width")) for c in panel}
        assert widths["ddp"] > widths["spawn"], "the upper line does not hide the lower one"
    widths = [float(curve.get("stroke-width")) for curve in drawn[:5]]
    assert widths == sorted(widths, reverse=True) and len(set(widths)) == 5


def test_slices_in_the_picture_are_those_of_the_samplers():
    """By hand: 31 samples are cut into 8, 8, 8 and 7; the second micro-batch begins at 31."""
    parts = pictures.slices()
    assert [[len(piece) for piece in pieces] for pieces in parts] == [[8, 8]] * 3 + [[7, 7]]
    assert parts[0] == [list(range(8)), list(range(31, 39))]
    assert parts[3] == [list(range(24, 31)), list(range(55, 62))]
    fills = [rect.get("fill") for rect in elements("batch", "rect") if rect.get("height") == "24"]
    runs = [(fill, len(list(run))) for fill, run in itertools.groupby(fills)]
    assert runs == list(zip(pictures.RANKS * 2, [8, 8, 8, 7] * 2))
    words = [element.text for element in elements("batch", "text")]
    assert "global batch: 62 samples" in words and "micro-batch 2: 31 samples" in words
    assert any("(4 / 62)" in text and "16, 16, 16, 14 samples" in text for text in words)
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert "`--batch-size 62 --accum-steps 2` on 4 ranks" in readme and "8, 8, 8 and 7" in readme


def test_memory_in_the_picture_is_what_was_measured():
    """docs/fsdp.md: what a rank holds of a network of 100 MiB; shares are of that."""
    page = (ROOT / "docs" / "fsdp.md").read_text()
    rows = re.findall(r"^\| (ddp|fsdp) \| (\d) \| (\d+) \|", page, re.MULTILINE)
    assert len(rows) == 6
    for mode, n, held in rows:
        devices = pictures.kept(mode, int(n))
        assert len(devices) == int(n)
        for device in devices:
            lasting = sum(share for _, share, passing in device if not passing)
            assert lasting * 100 == pytest.approx(int(held), abs=0.5)
    bars = [rect for rect in elements("memory", "rect") if rect.get("data-mode")]
    heights = {}
    for bar in bars:
        key = bar.get("data-mode"), bar.get("data-device")
        if not bar.get("stroke-dasharray"):
            heights[key] = heights.get(key, 0) + float(bar.get("height"))
    whole = heights.pop(("single", "0"))
    assert heights.pop(("dp", "0")) == whole and ("dp", "1") not in heights, "copies pass"
    assert [heights.pop(("ddp", device)) for device in "012"] == [whole] * 3
    assert heights == {("fsdp", d): pytest.approx(whole / 3, abs=0.1) for d in "012"}


def test_pages_show_the_pictures_and_say_what_is_to_be_seen():
    shown = {}
    for page in PAGES:
        for alt, path in SHOWN.findall(" ".join(page.read_text().split())):
            assert (page.parent / path).exists()
            shown.setdefault(path.rpartition("/")[2], []).append((page.name, alt))
    assert "README.md" in dict(shown["curves.svg"])
    assert "lesson.md" in dict(shown["batch.svg"]) and "fsdp.md" in dict(shown["memory.svg"])
    for pages in shown.values():
        for page, alt in pages:
            assert len(alt.split()) >= 8 or page == "README.zh-CN.md", f"{page}: {alt}"


@pytest.mark.long
def test_command_draws_what_it_is_asked_for(tmp_path, monkeypatch, capsys):
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    assert pictures.main(["memory"]) == 0
    assert [path.name for path in tmp_path.glob("*/*")] == ["memory.svg"]
    assert (tmp_path / "docs" / "memory.svg").read_text() == read("memory")
    command = [sys.executable, str(ROOT / "tools" / "pictures.py"), "dogs"]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert finished.returncode == 2 and "dogs: there are batch, memory, curves" in finished.stderr


@pytest.mark.release  # two minutes
def test_curves_measured_again_are_the_same():
    old, new = numbers(), pictures.measure()
    for mode, losses in old["losses"].items():
        again = new["losses"][mode]
        assert again == [[epoch, pytest.approx(loss, rel=1e-9)] for epoch, loss in losses]
    for mode, values in new["deviations"].items():
        assert all(value < 1e-12 for value in values), f"{mode}: {values}"
        assert any(values)
    ElementTree.fromstring(pictures.draw_curves(new))
