"""The pictures in docs/ show what was measured and what the code does."""

import itertools
import json
import math
import re
import xml.etree.ElementTree as ElementTree

import pictures
import pytest
from harness import ROOT

from sampling import GlobalBatchSampler


def elements(name, kind):
    root = ElementTree.parse(ROOT / "docs" / f"{name}.svg").getroot()
    return list(root.iter("{http://www.w3.org/2000/svg}" + kind))


def test_curves_are_equal_up_to_rounding():
    """The file holds its numbers; they are those of the picture, and as README says."""
    (element,) = elements("curves", "metadata")
    data = json.loads(element.text)
    drawn = (ROOT / "docs" / "curves.svg").read_text()
    assert drawn == pictures.draw_curves(data), "stale: python tools/pictures.py"
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
    claimed = float(re.search(r"no parameter differs by more than a relative (\S+)\]", readme)[1])
    assert max(max(values) for values in data["deviations"].values()) < claimed
    assert pictures.BOUND == 1e-10 and f"| one device | {pictures.BOUND:.0e} |" in readme


def test_slices_in_the_picture_are_those_of_the_samplers():
    sizes = []  # of each micro-batch, rank by rank
    for rank in range(4):
        sampler = GlobalBatchSampler(range(62), 62, 0, 2, rank=rank, world_size=4)
        sizes.append([len(part) for part in next(iter(sampler))[1]])
    assert sizes == [[8, 8]] * 3 + [[7, 7]]
    fills = [rect.get("fill") for rect in elements("batch", "rect") if rect.get("height") == "24"]
    assert [len(list(run)) for _, run in itertools.groupby(fills)] == [8, 8, 8, 7] * 2
    readme = (ROOT / "README.md").read_text()
    assert "`--batch-size 62 --accum-steps 2` on 4 ranks" in readme and "8, 8, 8 and 7" in readme


def test_memory_in_the_picture_is_what_was_measured():
    """docs/fsdp.md has what a rank holds of a network whose parameters take 100 MiB."""
    page = (ROOT / "docs" / "fsdp.md").read_text()
    rows = re.findall(r"^\| (ddp|fsdp) \| (\d) [a-z ]+ \| (\d+) \|", page, re.MULTILINE)
    assert len(rows) == 8
    lasting = {}
    for bar in elements("memory", "rect"):
        if bar.get("data-mode") and not bar.get("stroke-dasharray"):
            key = bar.get("data-mode"), bar.get("data-device")
            lasting[key] = lasting.get(key, 0) + float(bar.get("data-share"))
    for mode, n, held in rows:  # a share of fsdp is 1/N, in the picture a third
        share = lasting[mode, "0"] * (3 / int(n) if mode == "fsdp" else 1)
        assert math.isclose(share * 100, int(held), rel_tol=0.02)
    assert lasting["dp", "0"] == lasting["single", "0"] and ("dp", "1") not in lasting
