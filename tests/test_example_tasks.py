"""The tasks of examples/, on small data sets in the real file formats: they learn, and are exact."""

import contextlib
import functools
import io
import os
import signal

import coco
import pytest
import torch
from harness import ROOT, compare, make_args, train
from patches import call_in_task, without_speed
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

import machinery.tasks

SIZES = {"detect": (24, 11), "pose": (16, 7)}
MAKE = {"detect": coco.make_boxes, "pose": coco.make_people}
WIDTHS = {"detect": "--width 4", "pose": "--width 8 --stacks 2"}


def command(name, folder):
    argv = f"--task {ROOT}/examples/{name}.py --data-dir {folder} --image-size 64 --workers 0"
    return [*argv.split(), "--optimizer", "adamw", "--device", "cpu"]


@pytest.fixture(scope="module", params=["detect", "pose"])
def small(request, tmp_path_factory):
    """Return (name, command line of two epochs in float64, its run on one device)."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    MAKE[name](folder / "data", *SIZES[name])
    argv = [*command(name, folder / "data"), *WIDTHS[name].split(), "--dtype", "float64"]
    argv += [
        "--epochs",
        "2",
        "--batch-size",
        "7",
        "--lr",
        "0.01",
        "--best",
        "AP",
        "--sync-bn",
        "--clip-grad-norm",
        "10",
    ]
    single = [argument for argument in argv if argument != "--sync-bn"]
    result = train("single", 1, *single, folder=folder / "single")
    assert result.code == 0, result.err
    return name, argv, result


@pytest.mark.parametrize(("mode", "n"), [("ddp", 3), ("spawn", 2)])
def test_example_is_the_same_on_many_devices(mode, n, small, tmp_path):
    _name, argv, single = small
    result = train(mode, n, *argv, folder=tmp_path)
    assert result.code == 0, result.err
    deviations = compare(result, single)
    assert max(deviations.values()) <= 1e-10, deviations
    assert single.eval_lines()[0]["loss"] != single.eval_lines()[1]["loss"]


def test_example_with_replicas_is_the_same_as_with_ranks(small, tmp_path):
    """nn.DataParallel cannot synchronise BatchNorm: compared with DDP, which need not either."""
    _name, argv, _ = small
    argv = [argument for argument in argv if argument != "--sync-bn"]
    argv[argv.index("--batch-size") + 1] = "8"  # nn.DataParallel cuts uneven pieces another way
    replicas = train("dp", 2, *argv, folder=tmp_path / "dp")
    assert replicas.code == 0, replicas.err
    ranks = train("ddp", 2, *argv, folder=tmp_path / "ddp")
    assert max(compare(replicas, ranks).values()) <= 1e-10


# ------------------------------------------------------------------------------ AP of a detector


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    folder = tmp_path_factory.mktemp("detector")
    coco.make_boxes(folder / "data", 96, 23)
    argv = [*command("detect", folder / "data"), "--width", "8", "--batch-size", "16"]
    argv += ["--lr", "0.01", "--epochs", "14", "--best", "AP", "--log-every", "100"]
    result = train("single", 1, *argv, folder=folder)
    assert result.code == 0, result.err
    return argv, result


def test_detector_learns_and_the_metric_decides_the_best(detector):
    _, result = detector
    lines = result.eval_lines()
    assert lines[0]["AP50"] < 0.05 and max(line["AP50"] for line in lines) > 0.2
    assert result.checkpoint("best.pt")["best"] == max(line["AP"] for line in lines)
    assert result.checkpoint()["classes"] == ["red", "green"], "in the order of their numbers"


def test_ap_is_bitwise_the_same_in_every_mode_and_at_every_world_size(detector, tmp_path):
    """23 pictures in batches of 3: no world size divides them."""
    argv, result = detector
    expected = max(result.eval_lines(), key=lambda line: line["AP"])
    assert 0.03 < expected["AP"] < expected["AP50"] < 1
    options = [*argv, "--eval-only", "--resume", str(result.folder / "best.pt")]
    modes = [("single", 1), ("dp", 3), *(("ddp", n) for n in (1, 2, 3, 4)), ("spawn", 2)]
    for mode, n in modes:
        again = train(mode, n, *options, folder=tmp_path / f"{mode}{n}")
        assert again.code == 0, again.err
        (line,) = again.eval_lines()
        for name in ("AP", "AP50", "recall"):
            assert line[name] == expected[name], (mode, n, name)


def test_ap_is_what_pycocotools_says_of_the_annotation_file(detector, tmp_path, monkeypatch):
    """The task makes its own COCO objects; here the file's annotations are scored directly."""
    argv, result = detector
    args = make_args("single", *argv)
    module = machinery.tasks.load_module(ROOT / "examples" / "detect.py")
    folder = ROOT.parent / args.data_dir
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(folder / "annotations" / "instances_val2017.json")
        _, held_out = module.build_datasets(args)
        net = module.build_model(args)
        net.load_state_dict(result.checkpoint("best.pt")["model"])
        net.eval()
        numbers, categories, guesses = sorted(truth.imgs), sorted(truth.cats), []
        for i, number in enumerate(numbers):
            image, size = held_out[i][0], truth.imgs[number]
            with torch.no_grad():
                (found,) = module.detect(net(image[None]), args.min_score)
            for left, top, right, bottom, score, label in found.tolist():
                box = [left * size["width"], top * size["height"]]
                box += [(right - left) * size["width"], (bottom - top) * size["height"]]
                guess = {"image_id": number, "category_id": categories[int(label)]}
                guesses.append(guess | {"bbox": box, "score": score})
        kept = [a for a in truth.dataset["annotations"] if not a["iscrowd"]]
        assert len(kept) < len(truth.dataset["annotations"]), "the task leaves crowds out"
        truth.dataset["annotations"] = kept
        truth.createIndex()
        scorer = COCOeval(truth, truth.loadRes(guesses), "bbox")
        scorer.evaluate()
        scorer.accumulate()
        scorer.summarize()
    line = max(result.eval_lines(), key=lambda line: line["AP"])
    assert line["AP"] == pytest.approx(scorer.stats[0], rel=1e-6)
    assert line["AP50"] == pytest.approx(scorer.stats[1], rel=1e-6) and scorer.stats[1] > 0.2


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_ap_after_a_stop_within_the_evaluation(small, tmp_path):
    _, argv, _ = small
    whole = train("ddp", 2, *argv, folder=tmp_path / "whole")
    stop = functools.partial(call_in_task, "per_sample_metrics", 1, terminate)
    stopped = train("ddp", 2, *argv, folder=tmp_path / "cut", patch=stop)
    assert stopped.code == 143 and "eval" in stopped.out, stopped.err
    resumed = train("ddp", 2, *argv, "--resume", "auto", folder=tmp_path / "cut")
    assert resumed.code == 0, resumed.err
    assert without_speed(resumed.lines) == without_speed(whole.lines)


def test_pose_learns(tmp_path):
    coco.make_people(tmp_path / "data", 48, 9)
    argv = [*command("pose", tmp_path / "data"), "--width", "16", "--batch-size", "8"]
    argv += ["--lr", "0.02", "--epochs", "20", "--log-every", "100"]
    result = train("single", 1, *argv, folder=tmp_path)
    assert result.code == 0, result.err
    lines = result.eval_lines()
    assert lines[0]["pck"] < 0.2 and lines[-1]["pck"] > 0.4
    assert lines[0]["AP50"] < 0.1 and lines[-1]["AP50"] > 0.3
