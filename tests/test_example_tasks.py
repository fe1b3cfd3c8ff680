"""`--task detect` and `--task pose`, on small data sets in the real file formats: they learn, and are exact."""

import contextlib
import io
import json

import coco
import pytest
import torch
from harness import ROOT, compare, make_args, train
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

import common
import machinery.usertask

SIZES = {"detect": (24, 11), "pose": (16, 7)}
MAKE = {"detect": coco.make_boxes, "pose": coco.make_people}
WIDTHS = {"detect": "--width 4", "pose": "--width 8 --stacks 2"}


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


# ------------------------------------------------------------------------------------------- AP

LEARN = {
    "detect": "--width 8 --batch-size 16 --lr 0.01 --epochs 14",
    "pose": "--width 16 --batch-size 4 --lr 0.01 --epochs 14",
}


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    """Return (name, command line, its run): the network has learned something."""
    name, folder = request.param, tmp_path_factory.mktemp(f"trained_{request.param}")
    MAKE[name](folder / "data", *{"detect": (96, 23), "pose": (48, 23)}[name])
    argv = [*command(name, folder / "data"), *LEARN[name].split(), "--best", "AP"]
    argv += ["--log-every", "100"]
    result = train("single", 1, *argv, folder=folder, timeout=600)
    assert result.code == 0, result.err
    return name, argv, result


@pytest.mark.slow
@pytest.mark.parametrize("trained", MAKE, indirect=True)
def test_network_learns_and_ap_decides_the_best_alike_in_every_mode(trained, tmp_path):
    """23 pictures in batches of 3: no world size divides them."""
    name, argv, result = trained
    lines = result.eval_lines()
    assert lines[0]["AP50"] < 0.05 and max(line["AP50"] for line in lines) > 0.2
    assert result.checkpoint("best.pt")["best"][0] == max(line["AP"] for line in lines)
    if name == "detect":
        assert result.checkpoint()["data"]["classes"] == ["red", "green"], (
            "in the order of their numbers"
        )
    expected = max(lines, key=lambda line: line["AP"])
    assert 0.03 < expected["AP"] < expected["AP50"] < 1
    options = [*argv, "--eval-only", "--resume", str(result.folder / "best.pt")]
    for mode, n in (("spawn" if name == "detect" else "dp", 3), ("ddp", 4)):
        again = train(mode, n, *options, folder=tmp_path / f"{mode}{n}")
        assert again.code == 0, again.err
        (line,) = again.eval_lines()
        for metric in ("AP", "AP50"):
            assert line[metric] == expected[metric], (mode, n, metric)
        for metric in {"recall", "pck"} & expected.keys():  # means: the ranks' sums round
            assert line[metric] == pytest.approx(expected[metric], rel=1e-12), (mode, n, metric)


def guesses_of_detect(module, net, image, size, number, truth, args):
    (found,) = module.detect(net(image[None]), args.min_score)
    for left, top, right, bottom, score, label in found.tolist():
        box = [left * size[0], top * size[1], (right - left) * size[0], (bottom - top) * size[1]]
        category = sorted(truth.cats)[int(label)]
        yield {"image_id": number, "category_id": category, "bbox": box, "score": score}


def guesses_of_pose(module, net, image, size, number, truth, args):
    for person in module.people_of(net(image[None])[-1][0])[0]:
        person = person * torch.tensor([*size, 1.0])
        guess = {"image_id": number, "category_id": 1, "score": person[:, 2].mean().item()}
        yield guess | {"keypoints": person.flatten().tolist()}


@pytest.mark.slow
@pytest.mark.parametrize("trained", MAKE, indirect=True)
def test_ap_is_what_pycocotools_says_of_the_annotation_file(trained):
    """The task makes its own COCO objects; here the file's annotations are scored directly."""
    name, argv, result = trained
    args = make_args("single", *argv)
    module = machinery.usertask.load_module(ROOT / "tasks" / f"{name}.py")
    file, kind, guesses_of = {
        "detect": ("instances", "bbox", guesses_of_detect),
        "pose": ("person_keypoints", "keypoints", guesses_of_pose),
    }[name]
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        truth = COCO(ROOT / args.data_dir / "annotations" / f"{file}_val2017.json")
        _, held_out = module.build_datasets(args)
        net = module.build_model(args)
        net.load_state_dict(result.checkpoint("best.pt")["model"])
        net.eval()
        guesses = []
        for i, number in enumerate(sorted(truth.imgs)):
            size = truth.imgs[number]["width"], truth.imgs[number]["height"]
            guesses += guesses_of(module, net, held_out[i][0], size, number, truth, args)
        assert any(a["iscrowd"] for a in truth.dataset["annotations"])
        scorer = COCOeval(truth, truth.loadRes(guesses), kind)
        scorer.evaluate()
        scorer.accumulate()
        scorer.summarize()
    line = max(result.eval_lines(), key=lambda line: line["AP"])
    assert line["AP"] == pytest.approx(scorer.stats[0], rel=1e-6)
    assert line["AP50"] == pytest.approx(scorer.stats[1], rel=1e-6) and scorer.stats[1] > 0.2


def test_truth_of_detect_is_the_file_s_own(tmp_path, monkeypatch):
    """More boxes than a network could learn at once, and a crowd: what is found in it is no mistake."""
    coco.make_boxes(tmp_path, 1, 1)
    path = tmp_path / "annotations" / "instances_val2017.json"
    content = json.loads(path.read_text())
    corners = [(6 * (i % 10), 6 * (i // 10)) for i in range(60)]
    content["annotations"] = [
        {
            "id": i + 1,
            "image_id": 0,
            "category_id": 3,
            "bbox": [x, y, 5, 5],
            "area": 25,
            "iscrowd": 0,
        }
        for i, (x, y) in enumerate([*corners, (40, 40)])
    ]
    content["annotations"][-1] |= {"bbox": [40, 40, 20, 20], "iscrowd": 1, "area": 400}
    path.write_text(json.dumps(content))
    module = machinery.usertask.load_module(ROOT / "tasks" / "detect.py")
    args = make_args("single", *command("detect", tmp_path), "--width", "4")
    _images, boxes = module.collate([module.build_datasets(args)[1][0]])
    boxes_in_shares = [(x, y, x + 5, y + 5, 0.9, 0) for x, y in [(44, 44), *corners[::-1]]]
    found = torch.tensor(boxes_in_shares) / torch.tensor([64, 64, 64, 64, 1, 1])
    monkeypatch.setattr(module, "detect", lambda outputs, min_score: [found])
    metrics = module.per_sample_metrics([torch.zeros(1)], boxes, min_score=0.01)
    assert metrics["recall"].tolist() == [1.0]
    assert module.dataset_metrics(metrics) == {"AP": 1.0, "AP50": 1.0}


def test_geometry_of_detect_is_exact_under_bf16(tmp_path):
    module = machinery.usertask.load_module(ROOT / "tasks" / "detect.py")
    with common.autocast(torch.device("cpu"), "bf16"):
        outputs = module.Detector(2, 4)(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))
    assert {output.dtype for output in outputs} == {torch.float32}


def test_pose_groups_joints_by_the_centre_they_point_to():
    """Two people whose joints lie all over the picture: the nearest centre would be the wrong one."""
    module = machinery.usertask.load_module(ROOT / "tasks" / "pose.py")
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
