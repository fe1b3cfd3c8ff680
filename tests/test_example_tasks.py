"""`--task detect` and `--task pose`, on small data sets in the real file formats: they learn, and are exact."""

import json

import coco
import pytest
import torch
from harness import ROOT, compare, make_args, train

from engine.task_file import load_module

COCO = pytest.importorskip("pycocotools.coco").COCO
COCOeval = pytest.importorskip("pycocotools.cocoeval").COCOeval
SIZES = {"detect": (24, 11), "pose": (16, 7)}
MAKE = {"detect": coco.make_boxes, "pose": coco.make_people}
WIDTHS = {"detect": "--width 4", "pose": "--width 8 --stacks 2"}


def module_of(name):
    return load_module(str(ROOT / "tasks" / f"{name}.py"))


def command(name, folder):
    side = {"detect": 64, "pose": 96}[name]
    argv = f"--task {name} --data-dir {folder} --image-size {side} --workers 0"
    return [*argv.split(), "--optimizer", "adamw", "--device", "cpu"]


@pytest.fixture(scope="module", params=["detect", pytest.param("pose", marks=pytest.mark.full)])
def small(request, tmp_path_factory):
    """Return (name, command line of two epochs in float64, its run on one device)."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    MAKE[name](folder / "data", *SIZES[name])
    argv = [*command(name, folder / "data"), *WIDTHS[name].split(), "--dtype", "float64"]
    argv += [*"--epochs 2 --batch-size 7 --lr 0.01 --best AP --sync-bn --clip-grad-norm 10".split()]
    single = [argument for argument in argv if argument != "--sync-bn"]
    result = train("single", 1, *single, folder=folder / "single")
    assert result.code == 0, result.err
    return name, argv, result


def test_example_is_the_same_on_many_devices(small, tmp_path):
    _name, argv, single = small
    result = train("ddp", 3, *argv, folder=tmp_path)
    assert result.code == 0, result.err
    deviations = compare(result, single)
    assert max(deviations.values()) <= 1e-10, deviations
    assert single.eval_lines()[0]["loss"] != single.eval_lines()[1]["loss"]


def test_truth_of_detect_is_the_file_s_own(tmp_path, monkeypatch):
    """More boxes than a network could learn at once, and a crowd: what is found in it is no mistake."""
    coco.make_boxes(tmp_path, 1, 1)
    path = tmp_path / "annotations" / "instances_val2017.json"
    content = json.loads(path.read_text())
    corners = [(6 * (i % 10), 6 * (i // 10)) for i in range(60)]
    box = {"image_id": 0, "category_id": 3, "area": 25, "iscrowd": 0}
    content["annotations"] = [
        box | {"id": i + 1, "bbox": [*corner, 5, 5]}
        for i, corner in enumerate([*corners, (40, 40)])
    ]
    content["annotations"][-1] |= {"bbox": [40, 40, 20, 20], "iscrowd": 1, "area": 400}
    path.write_text(json.dumps(content))
    module = module_of("detect")
    args = make_args("single", *command("detect", tmp_path), "--width", "4")
    _images, boxes = module.collate([module.build_datasets(args)[1][0]])
    boxes_in_shares = [(x, y, x + 5, y + 5, 0.9, 0) for x, y in [(44, 44), *corners[::-1]]]
    found = torch.tensor(boxes_in_shares) / torch.tensor([64, 64, 64, 64, 1, 1])
    monkeypatch.setattr(module, "detect", lambda outputs, min_score: [found])
    metrics = module.per_sample_metrics([torch.zeros(1)], boxes, min_score=0.01)
    assert module.dataset_metrics(metrics) == {"AP": 1.0, "AP50": 1.0}


def test_pose_groups_joints_by_the_centre_they_point_to():
    """Two people whose joints lie all over the picture: the nearest centre would be the wrong one."""
    module = module_of("pose")
    generator, grid = torch.Generator().manual_seed(0), 32
    points = 0.05 + 0.9 * torch.rand(2, 18, 2, generator=generator)
    points[:, 17] = torch.tensor([[0.3, 0.52], [0.7, 0.52]])
    near = (points[0] - points[1]).norm(dim=1) < 0.15  # one bell would hide the other
    points[1, near] = (points[0, near] + 0.45) % 0.9 + 0.05
    seen = torch.rand(2, 18, generator=generator) < 0.8
    seen[:, 17] = True
    (found,) = module.people_of(module.maps_of(points, seen, grid)[None])
    best = found[..., 2].mean(1).topk(3)
    assert best.values[2] < 0.01 < 0.3 < best.values[1], "two people"

    def mistakes(person, i):
        far = (found[person, :, :2] - points[i, :17]).norm(dim=1) * grid
        return int((far > 0.75)[seen[i, :17]].sum())

    first, second = best.indices[:2].tolist()
    assert 0 in (mistakes(a, 0) + mistakes(b, 1) for a, b in ((first, second), (second, first)))
    nearest = torch.cdist(points[:, :17], points[:, 17]).argmin(2)
    assert (nearest != torch.tensor([[0], [1]]))[seen[:, :17]].sum() > 5
