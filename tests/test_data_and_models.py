"""What is trained on and what is trained: balanced classes, fast augmentation, weights from elsewhere, frozen and averaged BatchNorm."""

import fcntl
import functools
import itertools
import json
import os
import random
import re
import resource
import shutil
import time
import zipfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import (
    TASKS,
    check,
    compare,
    deviation,
    keyed,
    loader_of,
    make_args,
    make_sampler,
    run_processes,
    sampler_of,
    single_run,
    train,
)
from pitfalls import BASE, in_process, printed, stop_after, without_speed
from torch import nn
from torch.optim.swa_utils import update_bn

import common
import machinery.run
import machinery.tasks
import task

EVERYTHING = (
    "--task",
    str(TASKS / "everything.py"),
    "--dtype",
    "float64",
    "--epochs",
    "2",
    "--batch-size",
    "30",
    "--device",
    "cpu",
)
MODES = [("single", 1), ("dp", 2), ("ddp", 2), ("spawn", 2)]

# ------------------------------------------------------------------------------------------------------------------- balanced


class Labelled:
    """Ninety samples of class 7, nine of class 3 and one of class 5."""

    targets = [7] * 90 + [3] * 9 + [5]

    def __len__(self):
        return 100


def balanced(rank=0, world_size=1, epoch=0, dataset=Labelled):
    args = Namespace(batch_size=10, accum_steps=1, seed=0, balanced=True)
    sampler = sampler_of(args, dataset(), rank, world_size)
    sampler.set_position(epoch, 0)
    return [indices for _, indices in sampler]


def test_balanced_draws_every_class_equally_often_and_every_sample_of_it():
    drawn = torch.tensor(
        [index for epoch in range(30) for batch in balanced(epoch=epoch) for index in batch]
    )
    assert len(drawn) == 3000 and drawn.unique().tolist() == list(range(100))
    classes = torch.tensor(Labelled.targets)[drawn]
    for label in (7, 3, 5):
        assert 0.30 < (classes == label).double().mean() < 0.37
    counts = drawn.bincount(minlength=100)
    assert counts[:90].max() < 30 and counts[90:99].min() > 70, "alike within a class"
    assert balanced() != balanced(epoch=1) and balanced() == balanced()


def test_balanced_order_is_the_same_at_any_world_size():
    for world_size in (2, 3, 4):
        pieces = [balanced(rank, world_size) for rank in range(world_size)]
        assert [
            [index for piece in pieces for index in piece[step]] for step in range(10)
        ] == balanced()


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (None, "needs a training set with `targets`, one number or text per sample, its class"),
        ([0] * 99, r".*\(ValueError: \[99\] targets for 100 samples\)"),
        (torch.zeros(100, 2), r".*\(ValueError: \[100, 2\] targets for 100 samples\)"),
        ([{"class": 1}] * 100, "its class \\(TypeError"),
    ],
)
def test_balanced_needs_the_class_of_each_sample(targets, message):
    dataset = type(
        "Other",
        (),
        {"__len__": Labelled.__len__} | ({} if targets is None else {"targets": targets}),
    )
    with pytest.raises(common.UsageError, match=f"--balanced .*{message}"):
        balanced(dataset=dataset)


@pytest.mark.parametrize(
    "kind",
    [
        list,
        torch.tensor,
        np.array,
        lambda values: [str(v) for v in values],
        lambda values: list(torch.tensor(values)),
    ],
)
def test_balanced_takes_targets_of_any_kind(kind):
    order = balanced(
        dataset=type("Other", (Labelled,), {"targets": kind(sorted(Labelled.targets))})
    )
    assert order == balanced(
        dataset=type("Other", (Labelled,), {"targets": sorted(Labelled.targets)})
    )


def test_balanced_run_is_the_same_in_another_mode(tmp_path):
    argv = (*BASE, "--balanced")
    reference = single_run(*argv)
    assert compare(reference, single_run(*BASE))["gradients"] > 1e-3, "other samples"
    assert max(compare(train("ddp", 3, *argv, folder=tmp_path), reference).values()) < 1e-10


# --------------------------------------------------------------------------------------------------------- augmentation, downloads


def test_flip_mirrors_about_every_second_image_and_shift_cuts_a_window():
    images = torch.randint(
        0, 256, (400, 3, 6, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    dataset = task.ImagesInMemory(images, torch.arange(400), shift=1, flip=True, seed=0)
    seen, targets = dataset.__getitems__(list(range(399, -1, -1)))
    assert targets.tolist() == list(range(399, -1, -1)) and seen.dtype == torch.uint8
    padded, mirrored = F.pad(images, (1,) * 4), 0
    for image, index in zip(seen, targets):
        windows = [padded[index, :, y : y + 6, x : x + 7] for y in range(3) for x in range(3)]
        straight = any(image.equal(window) for window in windows)
        assert straight or any(image.equal(window.flip(-1)) for window in windows)
        mirrored += not straight
    assert 150 < mirrored < 250
    again, _ = dataset.__getitems__([5])
    assert again[0].equal(seen[394]), "whatever batch it comes in"
    assert padded[:, :, 1:-1, 1:-1].equal(images), "the images themselves are not touched"


def image_tree(folder, side):
    """Two classes of 20 images each, PNG, which loses nothing; the held-out ones are the same."""
    from torchvision.io import write_png

    images = torch.randint(
        0, 256, (40, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    for part in ("train", "val"):
        for i, image in enumerate(images):
            path = folder / part / "ab"[i // 20] / f"{i:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_png(image, str(path))
    return images, make_args("single", "--dataset", "imagefolder", "--data-dir", str(folder))


def loaded(args, dataset, workers, world_size=1):
    """Return [40, ...]: each sample of epoch 3, by its index, as so many workers of so many ranks load it."""
    images, args.workers = {}, workers
    for rank in range(world_size):
        sampler = make_sampler(40, 8, rank, world_size)
        sampler.set_position(3, 0)
        loader = loader_of(args, dataset, sampler, torch.device("cpu"))
        for (_, indices), (batch, _) in zip(list(sampler), loader):
            images |= dict(zip(indices, batch))
    return torch.stack([images[index] for index in range(40)])


@pytest.mark.parametrize(
    ("size", "side"), [(16, 16), (16, 20), (64, 80)], ids=["as it is", "resized", "photographs"]
)
def test_image_file_is_augmented_alike_whoever_loads_it(size, side, tmp_path):
    images, args = image_tree(tmp_path, side)
    args.image_size = size
    train_set, val_set = task.build_datasets(args)
    alone = loaded(args, train_set, 0)
    assert alone.shape == (40, 3, size, size) and alone.dtype == torch.uint8
    for workers, world_size in ((2, 1), (0, 3), (1, 3)):
        assert loaded(args, train_set, workers, world_size).equal(alone)
    assert (
        not any(image.equal(other) for image, other in zip(loaded(args, val_set, 0), alone))
        or size == 16
    )
    train_set.set_epoch(4)
    assert not train_set.__getitems__(list(range(40)))[0].equal(alone), (
        "another epoch, another augmentation"
    )
    assert len({image.numpy().tobytes() for image in loaded(args, val_set, 0)}) == 40, (
        "and none in evaluation, whatever the epoch"
    )
    held_out, targets = val_set.__getitems__([39, 0])
    assert targets.tolist() == [1, 0]
    if size == side:
        assert held_out.equal(images[[39, 0]])
        windows = task.windows_of(images, 2)
        for index in range(40):
            crops = torch.from_numpy(windows[index].reshape(3, 25, 16, 16).copy()).transpose(0, 1)
            assert any(
                alone[index].equal(crop) or alone[index].equal(crop.flip(-1)) for crop in crops
            )


def test_broken_image_is_named_or_replaced_in_a_whole_batch_too(tmp_path, capfd):
    images, args = image_tree(tmp_path, 16)
    args.image_size = 16
    (tmp_path / "val" / "a" / "03.png").write_bytes(b"no picture")
    (tmp_path / "val" / "b" / "39.png").write_bytes(
        (tmp_path / "val" / "b" / "39.png").read_bytes()[:300]
    )
    _, val_set = task.build_datasets(args)
    with pytest.raises(
        RuntimeError,
        match=r"sample 3 cannot be read: .*val/a/03\.png: .*; --skip-corrupt takes the next one",
    ):
        keyed(val_set, args).__getitems__((0, [2, 3]))
    args.skip_corrupt = True
    seen, targets = keyed(val_set, args).__getitems__((0, [3, 39, 7]))
    assert seen.equal(images[[4, 0, 7]]) and targets.tolist() == [0, 0, 0]
    assert capfd.readouterr().err.count("the next one takes its place") == 2


def test_files_that_torchvision_cannot_decode_are_read_by_pil(tmp_path):
    from PIL import Image

    image = Image.fromarray(torch.randint(0, 256, (9, 7, 3), dtype=torch.uint8).numpy())
    image.save(tmp_path / "image.bmp")
    assert task.read_images([str(tmp_path / "image.bmp")])[0].equal(
        torch.tensor(np.asarray(image)).permute(2, 0, 1)
    )
    Image.new("I;16", (4, 4), 0x7F80).save(tmp_path / "deep.png")
    deep = task.read_images([str(tmp_path / "deep.png")])[0]
    assert deep.dtype == torch.uint8 and deep.shape == (3, 4, 4) and (deep == 0x7F).all(), (
        "the upper byte"
    )
    film = [Image.new("RGB", (4, 4), (i, 0, 0)) for i in range(3)]
    film[0].save(tmp_path / "film.gif", save_all=True, append_images=film[1:])
    assert task.read_images([str(tmp_path / "film.gif")])[0].shape == (3, 4, 4), "its first image"


def test_jpeg_files_are_decoded_together_and_each_as_if_alone(tmp_path, monkeypatch):
    """A call of torchvision's decoder costs a quarter of decoding a small image; a broken one must not change its neighbours."""
    import torchvision
    from torchvision.io import write_jpeg

    paths = [str(tmp_path / f"{i:02}.jpg") for i in range(40)]
    for path in paths:
        write_jpeg(torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8), path)
    sizes, decode_jpeg = [], torchvision.io.decode_jpeg

    def counted(files, mode):
        sizes.append(len(files))
        return decode_jpeg(files, mode)

    dataset = task.ImageFiles(list(zip(paths, range(40))), 16, training=False, seed=0)
    alone = [task.read_images([path])[0] for path in paths]
    assert len({image.numpy().tobytes() for image in alone}) == 40
    monkeypatch.setattr(torchvision.io, "decode_jpeg", counted)
    images, targets = dataset.__getitems__([*range(39, -1, -1)])
    assert images.equal(torch.stack(alone[::-1])) and targets.tolist() == [*range(39, -1, -1)]
    assert sizes == [16, 16, 8]
    sizes.clear()
    task.ImageFiles(list(zip(paths, range(40))), 64, training=False, seed=0).__getitems__([3, 2, 1])
    assert sizes == [1, 1, 1], "photographs would fill the memory"

    content = Path(paths[3]).read_bytes()
    Path(paths[3]).write_bytes(content[: len(content) // 2])
    with pytest.raises(OSError, match=r"03\.jpg: "):
        dataset.__getitems__([2, 3])
    torchvision.io.write_png(alone[7], paths[5])
    images, _ = dataset.__getitems__([4, 5, 6])
    assert images.equal(torch.stack([alone[4], alone[7], alone[6]])), "of two kinds"


def test_damaged_png_is_an_error_and_not_the_end_of_the_process(tmp_path):
    image_tree(tmp_path, 64)
    content = (tmp_path / "train" / "a" / "00.png").read_bytes()
    for i in range(8):
        broken = bytearray(content)
        broken[len(broken) * (i + 1) // 10] ^= 0xFF
        (tmp_path / "broken.png").write_bytes(broken)
        with pytest.raises(OSError, match=r"broken\.png"):
            task.read_images([str(tmp_path / "broken.png")])


def test_data_in_memory_is_loaded_without_workers_and_files_with(tmp_path):
    _, args = image_tree(tmp_path, 16)
    workers = {}
    for name, dataset in (
        ("files", task.build_datasets(args)[0]),
        ("memory", task.build_datasets(make_args())[0]),
    ):
        workers[name] = loader_of(
            make_args(), dataset, make_sampler(40, 8), torch.device("cpu")
        ).num_workers
    assert workers == {"files": min(8, torch.get_num_threads()), "memory": 0}


def count_up(path):
    for _ in range(200):
        with task.file_lock(path.parent):
            number = int(path.read_text())
            path.write_text(str(number + 1))


def test_one_process_at_a_time_downloads(tmp_path):
    path = tmp_path / "data" / "count"
    path.parent.mkdir()
    path.write_text("0")
    results = run_processes([functools.partial(count_up, path)] * 3, tmp_path)
    assert [code for code, _, _ in results] == [0, 0, 0], results
    assert path.read_text() == "600" and list(path.parent.iterdir()) == [path], (
        "and no lock file stays"
    )


def test_torchvision_sets_are_downloaded_under_the_lock(tmp_path, monkeypatch):
    calls = []

    class Source:
        data, targets = torch.zeros(20, 28, 28, dtype=torch.uint8), list(range(10)) * 2

        def __init__(self, root, train, download):
            other = os.open(root, os.O_RDONLY)
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                calls.append((train, download, "free"))
            except BlockingIOError:
                calls.append((train, download, "locked"))
            os.close(other)

    monkeypatch.setattr("torchvision.datasets.MNIST", Source)
    folder = tmp_path / "new"
    task.build_datasets(
        make_args("single", "--dataset", "mnist", "--data-dir", str(folder), "--download")
    )
    assert calls == [(True, True, "locked"), (False, True, "locked")]
    train_set, _ = task.build_datasets(
        make_args("single", "--dataset", "mnist", "--data-dir", str(folder))
    )
    assert calls[2:] == [(True, False, "free"), (False, False, "free")], (
        "nothing is locked where nothing is written"
    )
    assert len(train_set) == 20 and train_set.targets.tolist() == Source.targets


# ------------------------------------------------------------------------------------------------------------ weights, the check


def state_dict(seed=1):
    return machinery.tasks.build_net(
        make_args("single", "--seed", str(seed)), task, torch.device("cpu")
    ).state_dict()


def test_weights_of_another_network_are_loaded_as_far_as_they_fit_and_the_rest_is_named(
    tmp_path, capsys
):
    weights = state_dict()
    given = {
        f"module._orig_mod.{name}": value for name, value in weights.items() if name != "conv1.bias"
    }
    given |= {
        "module._orig_mod.head.weight": torch.zeros(1000, 384),
        "extra.weight": torch.zeros(2),
    }
    for name, content in (
        ("plain", given),
        ("checkpoint", {"model": given, "epoch": 3}),
        ("other", {"state_dict": given}),
    ):
        torch.save(content, tmp_path / name)
        net = machinery.tasks.build_net(
            make_args("single", "--weights", str(tmp_path / name)), task, torch.device("cpu")
        )
        for parameter, value in net.state_dict().items():
            assert value.equal(weights[parameter]) == (
                parameter not in ("conv1.bias", "head.weight")
            ), parameter
        assert capsys.readouterr().out.splitlines() == [
            f"weights: 6 of the model's 8 tensors are from --weights {tmp_path / name}",
            "weights: not loaded: conv1.bias [48], not in the file",
            "weights: not loaded: head.weight [10, 384], [1000, 384] in the file",
            "weights: not in the model: extra.weight",
        ]


def load_into(net, content, path, *options):
    torch.save(content, path)
    args = make_args("single", "--weights", str(path), *options)
    return machinery.tasks.build_net(
        args, Namespace(build_model=lambda args: net), torch.device("cpu")
    ).state_dict()


def test_weights_of_a_checkpoint_are_its_average_once_there_is_one(tmp_path):
    trained, average = {"weight": torch.ones(1, 2)}, {"weight": torch.full((1, 2), 2.0)}
    for count, wanted in ((3, average), (0, trained)):
        content = {
            "model": trained,
            "average": {**average, "n_averaged": torch.tensor(count)},
            "epoch": 1,
        }
        assert load_into(nn.Linear(2, 1, bias=False), content, tmp_path / "last.pt")[
            "weight"
        ].equal(wanted["weight"])


def test_prefix_that_is_a_name_of_the_model_stays(tmp_path):
    net = nn.Module()
    net.module, net.head = nn.Linear(2, 2), nn.Linear(2, 1)
    given = {
        name: torch.full_like(value, i + 1)
        for i, (name, value) in enumerate(net.state_dict().items())
    }
    for prefix in ("", "module."):
        loaded = load_into(
            net, {prefix + name: value for name, value in given.items()}, tmp_path / "weights.pt"
        )
        assert all(value.equal(given[name]) for name, value in loaded.items())


def test_weights_keep_their_precision(tmp_path):
    weight = torch.tensor([[0.1, 1e300]], dtype=torch.float64)
    net = nn.Linear(2, 1, bias=False)
    assert load_into(net, {"weight": weight}, tmp_path / "weights.pt", "--dtype", "float64")[
        "weight"
    ].equal(weight)
    with pytest.raises(common.UsageError, match="weight is not finite"):
        load_into(nn.Linear(2, 1, bias=False), {"weight": weight}, tmp_path / "weights.pt")


def test_weights_that_do_not_fit_at_all_or_are_damaged_are_refused(tmp_path):
    for name, content, message in (
        (
            "foreign",
            {"layer.weight": torch.zeros(3)},
            "no tensor fits the model, whose tensors are conv1.weight,",
        ),
        ("list", [torch.zeros(3)], "no tensor fits the model"),
        ("code", {"conv1.weight": os.getcwd}, "damaged, or not a file of weights"),
    ):
        torch.save(content, tmp_path / name)
        with pytest.raises(
            common.UsageError, match=f"--weights {tmp_path / name}: {message}"
        ) as refusal:
            check("single", 1, "--weights", str(tmp_path / name))
        assert "weights_only" not in str(refusal.value), "torch's advice to let it run its code"
    torch.save(state_dict(), tmp_path / "stored")
    with (
        zipfile.ZipFile(tmp_path / "stored") as stored,
        zipfile.ZipFile(tmp_path / "small", "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for member in stored.namelist():
            small.writestr(member, stored.read(member))
    with open(tmp_path / "small", "ab") as file:
        file.write(
            b"PK\5\6"
        )  # with it, to the zipfile module the file is none, but to torch.load it is
    assert not zipfile.is_zipfile(tmp_path / "small")
    for option in ("--weights", "--resume"):
        with pytest.raises(common.UsageError, match=f"{option} {tmp_path / 'small'}: damaged"):
            check("single", 1, option, str(tmp_path / "small"))
    torch.save(state_dict(), tmp_path / "old", _use_new_zipfile_serialization=False)
    check("single", 1, "--weights", str(tmp_path / "old"))
    torch.save(
        {name: value * float("nan") for name, value in state_dict().items()}, tmp_path / "nan"
    )
    with pytest.raises(common.UsageError, match=r"conv1.weight, conv1.bias, .* is not finite"):
        check("single", 1, "--weights", str(tmp_path / "nan"))
    torch.save(state_dict(), tmp_path / "flipped")
    content = bytearray((tmp_path / "flipped").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "flipped").write_bytes(content)
    with pytest.raises(
        common.UsageError, match="damaged, or not a file of weights: ValueError: checksum of"
    ):
        check("single", 1, "--weights", str(tmp_path / "flipped"))


@pytest.mark.parametrize(("mode", "n"), MODES)
def test_weights_are_where_training_starts_in_every_mode(mode, n, tmp_path):
    torch.save(state_dict(), tmp_path / "weights.pt")
    argv = (
        "--epochs",
        "1",
        "--task",
        TASKS / "small.py",
        "--batch-size",
        "100",
        "--dtype",
        "float64",
        "--lr",
        "0",
    )
    result = train(mode, n, *argv, "--weights", tmp_path / "weights.pt", folder=tmp_path)
    assert result.code == 0 and result.out.count("weights: 8 of the model's 8 tensors") == 1, (
        result.out + result.err
    )
    assert all(
        value.equal(state_dict()[name].double())
        for name, value in result.checkpoint()["model"].items()
    )
    resumed = train(mode, n, *argv[2:], "--epochs", "2", "--resume", "auto", folder=tmp_path)
    assert resumed.code == 0, "whoever goes on needs the weights no more"


def test_small_images_are_told_of_a_coarse_stem(capsys):
    build = functools.partial(make_args, "single", "--dataset", "synthetic", "--image-size")
    task.build_model(build("32", "--model", "resnet18"))
    assert capsys.readouterr().out.startswith("note: resnet18 is made for 224 pixels")
    task.build_model(build("64", "--model", "resnet18"))
    task.build_model(build("32", "--model", "resnet9"))
    assert capsys.readouterr().out == ""


def print_traces():
    def traces():
        threads = next(
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("Threads")
        )
        states = (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        )
        return threads, torch.get_num_threads(), states

    torch.set_num_threads(2)
    torch.manual_seed(3)
    before = traces()
    check("single", 1, "--model", "resnet9")
    check("single", 1, "--task", str(TASKS / "faulty.py"))  # whose samples are loaded one by one
    deadline = time.monotonic() + 10  # a thread that was joined may leave the system a little later
    while before != (after := traces()) and time.monotonic() < deadline:
        pass
    print(before == after)


def test_check_starts_no_thread_and_draws_no_random_number():
    assert in_process(print_traces) == "True\n"


def test_check_is_silent(tmp_path, capfd):
    """What it finds right is said by the run, once."""
    torch.save(state_dict(), tmp_path / "weights.pt")
    check("single", 1, "--weights", str(tmp_path / "weights.pt"))
    assert capfd.readouterr() == ("", "")


REGISTERS = """import logging, torch
from task import build_datasets, build_model, per_sample_loss, per_sample_metrics
torch.library.define("only_once::double", "(Tensor x) -> Tensor")
logging.basicConfig(level="INFO")
logging.info("the task is here")
"""


@pytest.mark.parametrize("mode", ["single", "dp", "ddp"])
def test_task_may_register_and_log(mode, tmp_path):
    """What it registers with torch it can register only once in a process; and the check must not take its output away."""
    (tmp_path / "registers.py").write_text(REGISTERS)
    argv = ("--task", tmp_path / "registers.py", "--epochs", "1", "--batch-size", "700")
    result = train(
        mode, 1, *argv, folder=tmp_path, patch=no_launcher_has_checked if mode != "ddp" else None
    )
    assert result.code == 0, result.err
    assert "the task is here" in result.err


STATEFUL = """import numpy as np, torch
from small import build_model, per_sample_loss, per_sample_metrics
from torch.utils.data import TensorDataset

rng = np.random.default_rng(0)

def build_datasets(args):
    labels = torch.arange(60) % 10
    return tuple(TensorDataset(torch.from_numpy(rng.integers(0, 255, (60, 1, 8, 8), dtype=np.uint8)), labels) for _ in range(2))
"""


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("dp", 2)])
def test_check_leaves_no_trace_in_the_state_of_the_task(mode, n, tmp_path):
    """Else those that were checked by a launcher, or by another rank, would train on other data."""
    (tmp_path / "stateful.py").write_text(STATEFUL)
    argv = (*BASE, "--task", tmp_path / "stateful.py", "--epochs", "1", "--batch-size", "20")
    reference = train(
        "single", 1, *argv, folder=tmp_path / "other"
    )  # as launched: checked elsewhere
    result = train(mode, n, *argv, folder=tmp_path, patch=no_launcher_has_checked)
    assert result.code == reference.code == 0, result.err + reference.err
    assert deviation(result.gradients[0][0], reference.gradients[0][0]) < 1e-12


def no_launcher_has_checked(rank):
    del os.environ["LAUNCH_PID"]


@pytest.mark.parametrize("mode", ["single", "dp", "ddp"])
def test_script_alone_checks_too(mode, tmp_path):
    """Not only `run.sh`: a task whose loss cannot be right is one line, not a traceback in the first step."""
    (tmp_path / "mean.py").write_text(
        "from task import build_datasets, build_model, per_sample_metrics\ndef per_sample_loss(outputs, targets): return outputs.mean()"
    )
    result = train(
        mode, 1, "--task", tmp_path / "mean.py", folder=tmp_path, patch=no_launcher_has_checked
    )
    assert (
        result.code == 2
        and "per_sample_loss must be one number per sample, shape [2] for 2 samples, got shape []"
        in result.err
    )
    assert len(result.err.splitlines()) == 1


# ---------------------------------------------------------------------------------------------------------- frozen, averaged BatchNorm


def print_sent_bytes(rank):
    import train_ddp

    class Watched(train_ddp.DistributedDataParallel):
        def __init__(self, module, **keywords):
            super().__init__(module, **keywords)
            print("sent:", self._get_ddp_logging_data()["total_parameter_size_bytes"])

    train_ddp.DistributedDataParallel = Watched


@pytest.mark.parametrize(("mode", "n"), MODES)
def test_frozen_batchnorm_keeps_its_statistics(mode, n, tmp_path):
    trained = single_run(*EVERYTHING).checkpoint()["model"]
    means = [name for name in trained if name.endswith("running_mean")]
    assert means and all(trained[name].abs().sum() > 0 for name in means)
    norms = [name.removesuffix("running_mean") for name in means]
    result = train(
        mode, n, *EVERYTHING, "--freeze", *(f"{norm}*" for norm in norms), folder=tmp_path
    )
    frozen = result.checkpoint()["model"]
    for norm in norms:
        assert (
            frozen[f"{norm}running_mean"].abs().sum() == 0
            and frozen[f"{norm}num_batches_tracked"] == 0
        )
        assert (frozen[f"{norm}running_var"] == 1).all()
    half = train(
        mode,
        n,
        *EVERYTHING,
        "--freeze",
        *(f"{norm}weight" for norm in norms),
        folder=tmp_path / "half",
    ).checkpoint()["model"]
    assert half[means[0]].abs().sum() > 0, "its bias is trained"


def test_no_gradient_of_frozen_parameters_is_sent(tmp_path):
    argv = ("--epochs", "1", "--batch-size", "700", "--freeze", "conv*")
    result = train("ddp", 2, *argv, folder=tmp_path, patch=print_sent_bytes)
    assert result.out.count(f"sent: {(384 * 10 + 10) * 4}\n") == 2, result.out + result.err


SWA = (*BASE, "--model", "batchnorm", "--average", "swa", "--epochs", "4")


def test_swa_statistics_are_those_that_torch_estimates(tmp_path):
    result = single_run(*SWA)
    average = {
        name: value
        for name, value in result.checkpoint()["average"].items()
        if name != "n_averaged"
    }
    args = make_args("single", *SWA)
    own = machinery.tasks.load_task(args)
    net = machinery.tasks.build_net(args, own, torch.device("cpu"))
    net.load_state_dict(average)
    train_set, _ = own.build_datasets(args)
    sampler = sampler_of(args, train_set)
    sampler.set_position(3, 0)
    update_bn(loader_of(args, train_set, sampler, torch.device("cpu")), net)
    for name, value in net.state_dict().items():
        assert torch.allclose(value, average[name], rtol=1e-12, atol=1e-14), name
    trained = result.checkpoint()["model"]
    means = [name for name in trained if name.endswith("running_mean")]
    assert means and not any(
        torch.allclose(average[name], trained[name], rtol=1e-3) for name in means
    )
    (norm,) = [module for module in net.modules() if isinstance(module, nn.BatchNorm1d)]
    assert norm.momentum == 0.1


@pytest.mark.parametrize(
    ("mode", "n", "others"), [("dp", 2, ("ddp", 2)), ("ddp", 3, None), ("spawn", 2, None)]
)
def test_swa_statistics_are_the_same_in_every_mode(mode, n, others, tmp_path):
    argv = SWA if others else (*SWA, "--sync-bn")
    reference = train(*others, *argv, folder=tmp_path / "other") if others else single_run(*argv)
    result = train(mode, n, *argv, folder=tmp_path)
    assert result.code == reference.code == 0, result.err + reference.err
    average = reference.checkpoint()["average"]
    for name, value in result.checkpoint()["average"].items():
        assert torch.allclose(value, average[name], rtol=1e-10, atol=1e-12), name
    assert max(compare(result, reference).values()) < 1e-10


POISONED = """import itertools
import torch
from torch import nn
from small import build_datasets, per_sample_loss, per_sample_metrics

calls = itertools.count()

class Pixels(nn.Module):
    def forward(self, images):
        estimating = self.training and not torch.is_grad_enabled()
        return images.flatten(1).double() / (0 if estimating and next(calls) == 3 else 90)

def build_model(args):
    return nn.Sequential(Pixels(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
"""


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("ddp", 2)])
def test_batch_that_is_not_finite_is_left_out_of_swa_statistics(mode, n, tmp_path):
    (tmp_path / "poisoned.py").write_text(POISONED)
    argv = (*SWA, "--task", str(tmp_path / "poisoned.py"))
    result = train(mode, n, *argv, folder=tmp_path / "run")
    assert result.code == 0 and "not saved" not in result.err, result.err
    average, steps = result.checkpoint()["average"], result.checkpoint()["global_step"] // 4
    assert average["2.num_batches_tracked"] == steps - 1
    assert all(value.isfinite().all() for value in average.values())


DROPOUT_FIRST = """import torch
from torch import nn
from small import build_datasets, per_sample_loss, per_sample_metrics

class Pixels(nn.Module):
    def forward(self, images):
        return images.flatten(1).double() / 90

def build_model(args):
    return nn.Sequential(Pixels(), nn.Dropout(0.5), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
"""


@pytest.mark.parametrize(
    ("mode", "n", "workers"), [("single", 1, 1), ("dp", 2, 0), ("spawn", 2, 1)]
)
def test_swa_statistics_behind_dropout_do_not_depend_on_who_loads(mode, n, workers, tmp_path):
    """Loading a sample draws from the same generator as dropout does, unless a worker loads it."""
    (tmp_path / "dropout.py").write_text(DROPOUT_FIRST)
    argv = (*SWA, "--task", tmp_path / "dropout.py", "--epochs", "1")
    result = train(mode, n, *argv, "--workers", str(workers), folder=tmp_path / "one")
    others = train(
        "ddp" if n > 1 else "single", n, *argv, "--workers", "0", folder=tmp_path / "other"
    )
    assert result.code == others.code == 0, result.err + others.err
    average = others.checkpoint()["average"]
    for name, value in result.checkpoint()["average"].items():
        assert torch.allclose(
            torch.as_tensor(value), torch.as_tensor(average[name]), rtol=1e-10, atol=1e-12
        ), name


def keep_last(path, rank):
    """Copy last.pt before each evaluation."""
    import train_single

    evaluate = train_single.evaluate

    def watched(args, *others):
        shutil.copy(Path(args.output_dir) / "last.pt", path)
        return evaluate(args, *others)

    train_single.evaluate = watched


def test_evaluation_of_a_checkpoint_from_before_its_evaluation_is_that_evaluation(tmp_path):
    before = tmp_path / "before.pt"
    result = train("single", 1, *SWA, folder=tmp_path, patch=functools.partial(keep_last, before))
    assert torch.load(before)["step"] == 6, (
        "saved after the last step, before the statistics were there"
    )
    looked = train("single", 1, *SWA, "--eval-only", "--resume", before, folder=tmp_path / "looked")
    assert looked.code == 0, looked.err
    (again,) = looked.eval_lines()
    assert result.eval_lines()[-1] == again and len(result.eval_lines()) == 4


def test_swa_leaves_frozen_batchnorm_alone(tmp_path):
    result = train("single", 1, *SWA, "--freeze", "between.*", folder=tmp_path)
    assert result.checkpoint()["average"]["between.running_mean"].abs().sum() == 0


def test_interrupted_swa_goes_on_bitwise(tmp_path):
    argv = (*SWA[:-1], "8")  # averaged after epochs 7 and 8
    straight = single_run(*argv)
    assert (
        train("single", 1, *argv, folder=tmp_path, patch=functools.partial(stop_after, 45)).code
        == 143
    )
    last = tmp_path / "run" / "last.pt"
    looked = train("single", 1, *argv, "--eval-only", "--resume", last, folder=tmp_path / "looked")
    assert looked.eval_lines()[0]["loss"] == straight.eval_lines()[6]["loss"], (
        "within an epoch the average has the statistics that it was last evaluated with"
    )
    resumed = train("single", 1, *argv, "--resume", "auto", folder=tmp_path)
    for name, value in straight.checkpoint()["average"].items():
        assert torch.equal(
            torch.as_tensor(resumed.checkpoint()["average"][name]), torch.as_tensor(value)
        ), name
    assert without_speed(resumed.lines) == without_speed(straight.lines)


def print_closed(rank):
    from torch.utils import tensorboard

    close = tensorboard.SummaryWriter.close
    tensorboard.SummaryWriter.close = lambda writer: (close(writer), print("closed"))


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("ddp", 2)])
def test_tensorboard_shows_what_the_log_says(mode, n, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    argv = ("--epochs", "2", "--batch-size", "700", "--warmup-epochs", "0")
    result = train(mode, n, *argv, "--tensorboard", folder=tmp_path, patch=print_closed)
    assert result.code == 0, result.err
    assert result.out.count("closed") == 1, "or what waits in its queue may be lost"
    events = EventAccumulator(str(result.folder)).Reload()
    assert {
        "train/loss",
        "train/lr",
        "train/images_per_s",
        "train/grad_norm",
        "eval/loss",
        "eval/top1",
    } <= set(events.Tags()["scalars"])
    shown = {event.step: event.value for event in events.Scalars("eval/loss")}
    assert shown == pytest.approx(
        {line["global_step"]: line["loss"] for line in result.eval_lines()}
    ) and list(shown) == [2, 4]
    plain = train(mode, n, *argv, folder=tmp_path / "plain")
    assert all(
        value.equal(plain.checkpoint()["model"][name])
        for name, value in result.checkpoint()["model"].items()
    ), "and only looks"


def print_memory(rank):
    end_epoch = machinery.run.Run.end_epoch

    def watched(run, metrics):
        end_epoch(run, metrics)
        print(
            "memory",
            json.dumps(
                int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
            ),
        )

    machinery.run.Run.end_epoch = watched


def test_memory_does_not_grow_with_the_epochs(tmp_path):
    result = train(
        "ddp",
        2,
        *BASE,
        "--epochs",
        "24",
        "--average",
        "ema",
        "--workers",
        "1",
        folder=tmp_path,
        patch=print_memory,
    )
    assert result.code == 0, result.err
    sizes = printed(result.out, "memory")
    per_rank = [sizes[rank * 24 : (rank + 1) * 24] for rank in range(2)]
    for size in per_rank:
        assert max(size[4:]) <= 1.01 * size[3], f"kB after each epoch: {size}"


WIDE = """from torch import nn
from small import build_datasets, per_sample_loss, per_sample_metrics
class Wide(nn.Sequential):
    def forward(self, images):
        return super().forward(images.flatten(1).float() / 90)
def build_model(args):
    return Wide(nn.Linear(64, 2**16), nn.ReLU(), nn.Linear(2**16, 10))
"""


def print_page_faults(rank):
    end_step = machinery.run.Run.end_step

    def watched(run, grad_norm):
        end_step(run, grad_norm)
        print("faults", json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_minflt))

    machinery.run.Run.end_step = watched


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("dp", 2)])  # DDP keeps its buckets
def test_memory_of_the_gradients_is_kept_from_step_to_step(mode, n, tmp_path):
    """They are freed in every step, 20 MB here. If they went back to the system, their 5,000 pages would be missed in the next."""
    (tmp_path / "wide.py").write_text(WIDE)
    argv = (
        "--task",
        tmp_path / "wide.py",
        "--epochs",
        "1",
        "--batch-size",
        "16",
        "--device",
        "cpu",
    )
    result = train(mode, n, *argv, folder=tmp_path / "run", patch=print_page_faults)
    assert result.code == 0, result.err
    faults = [after - before for before, after in itertools.pairwise(printed(result.out, "faults"))]
    assert len(faults) >= 10 and sorted(faults)[len(faults) // 2] < 500, faults


# ---------------------------------------------------------------------------------------------------------- sent in small pieces


def watch_hook(rank):
    """Print whether each future was done when the hook returned it."""
    register = nn.parallel.DistributedDataParallel.register_comm_hook

    def watched(model, state, hook):
        def call(state, bucket):
            future = hook(state, bucket)
            print("done", json.dumps([bucket.index(), future.done()]))
            return future

        register(model, state, call)

    nn.parallel.DistributedDataParallel.register_comm_hook = watched
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1000  # so that a small network has two


def test_buckets_that_powersgd_sends_do_not_overtake_one_another(tmp_path):
    """torch's hook starts a bucket's second all-reduce when its first is done: over gloo two buckets then mix, and the process aborts."""
    result = train(
        "ddp", 2, *BASE, "--grad-compress", "powersgd", folder=tmp_path, patch=watch_hook
    )
    assert result.code == 0, result.err
    calls = printed(result.out, "done")
    assert {index for index, _ in calls} == {0, 1} and all(done for _, done in calls)
