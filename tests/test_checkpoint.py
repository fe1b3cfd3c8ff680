"""Checkpoints: what is in them, that writing one never loses one, and that a resumed run is the run it resumes."""

import json
import os
import pickle
import resource
import shutil
import signal
import zipfile
from pathlib import Path

import pytest
import torch
from harness import (
    TASKS,
    compare,
    deviation,
    factor_of,
    run_processes,
    single_run,
    train,
    undisturbed,
)
from pitfalls import without_speed

import common
import machinery.options
import machinery.processes
import machinery.run

SMALL = (
    "--task",
    str(TASKS / "small.py"),
    "--epochs",
    "4",
    "--batch-size",
    "30",
    "--log-every",
    "4",
)
KEYS = {
    "format",
    "model",
    "optimizer",
    "scheduler",
    "scaler",
    "average",
    "epoch",
    "step",
    "global_step",
    "best",
    "config",
}
KEYS |= {
    "log",
    "samples",
}  # the sums since the last line of the log, and the length of the training set


def walk(value):
    yield value
    for child in (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (list, tuple))
        else ()
    ):
        yield from walk(child)


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("dp", 2), ("ddp", 2), ("spawn", 2)])
def test_keys_are_those_of_the_format_and_values_are_plain(mode, n, tmp_path):
    saved = train(
        mode, n, *SMALL, "--epochs", "1", "--average", "ema", folder=tmp_path
    ).checkpoint()
    assert saved.keys() == KEYS
    assert {type(value) for value in walk(saved)} <= {
        dict,
        list,
        tuple,
        str,
        int,
        float,
        bool,
        type(None),
        torch.Tensor,
        saved["model"].__class__,
    }
    names = [
        "conv1.weight",
        "conv1.bias",
        "conv2.weight",
        "conv2.bias",
        "conv3.weight",
        "conv3.bias",
        "head.weight",
        "head.bias",
    ]
    assert list(saved["model"]) == names, "neither module. nor _orig_mod."
    assert saved["average"].keys() == {*names, "n_averaged"}
    assert (saved["epoch"], saved["step"], saved["global_step"]) == (1, 0, 6)


def stop_after(step):
    """A patch that sends this process's rank 0 a real SIGTERM after a step; see `train`."""
    return Stopper(step)


class Stopper:
    def __init__(self, step):
        self.step = step

    def __call__(self, rank):
        end_step, at = machinery.run.Run.end_step, self.step

        def end_step_and_signal(run, grad_norm):
            if rank == 0 and run.state.global_step + 1 == at:
                os.kill(os.getpid(), signal.SIGTERM)
            end_step(run, grad_norm)

        machinery.run.Run.end_step = end_step_and_signal


@pytest.mark.parametrize("step", [1, 5, 6, 9])
@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("dp", 2), ("ddp", 2), ("spawn", 3)])
def test_interrupted_and_resumed_run_is_bitwise_the_uninterrupted_one(mode, n, step, tmp_path):
    argv = (
        *SMALL,
        "--task",
        TASKS / "everything.py",
        "--average",
        "ema",
    )  # dropout and BatchNorm too
    straight = undisturbed(mode, n, *argv)
    stopped = train(mode, n, *argv, folder=tmp_path / "resumed", patch=stop_after(step))
    assert stopped.code == 143, stopped.err
    assert step <= stopped.checkpoint()["global_step"] <= step + 2, (
        "the boundary that all ranks agree on comes at most a step later"
    )
    resumed = train(mode, n, *argv, "--resume", "auto", folder=tmp_path / "resumed")
    assert resumed.code == 0, resumed.err
    for part in ("model", "optimizer", "average"):
        pairs = list(zip(walk(straight.checkpoint()[part]), walk(resumed.checkpoint()[part])))
        assert len(pairs) > 8
        assert all(
            torch.equal(a, b) if isinstance(a, torch.Tensor) else isinstance(a, dict) or a == b
            for a, b in pairs
        )
    assert without_speed(resumed.lines) == without_speed(straight.lines), (
        "each line once, and the same"
    )


@pytest.mark.parametrize(
    ("mode", "n"), [("single", 1), ("dp", 3), ("ddp", 1), ("ddp", 4), ("spawn", 3)]
)
def test_checkpoint_of_one_mode_and_world_size_resumes_in_any_other(mode, n, tmp_path):
    argv = (*SMALL, "--dtype", "float64")
    stopped = train("ddp", 2, *argv, folder=tmp_path, patch=stop_after(9))
    assert stopped.code == 143
    resumed = train(mode, n, *argv, "--resume", "auto", folder=tmp_path, steps=0)
    deviations = compare(resumed, single_run(*argv))
    assert max(deviations.values()) <= 1e-10, deviations


REFUSED = [
    "--seed 1",
    "--batch-size 29",
    "--lr 0.2",
    "--schedule constant",
    "--optimizer adamw",
    "--average ema",
    "--dataset synthetic",
]
REFUSED += [
    "--label-smoothing 0",
    "--accum-steps 2",
    "--clip-grad-norm 1",
    "--weight-decay 0",
    "--dtype float64",
    "--task TASKS/everything.py",
    "--balanced",
]
ACCEPTED = [
    "--workers 1",
    "--log-every 3",
    "--epochs 6",
    "--save-every 2",
    "--keep-every 1",
    "--timeout 60",
    "--channels-last",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return train(
        "single", 1, *SMALL, "--keep-every", "3", folder=tmp_path_factory.mktemp("finished")
    )


@pytest.mark.parametrize("change", REFUSED)
def test_changed_option_that_would_change_the_run_is_refused_by_name(change, finished, tmp_path):
    option, *value = change.replace("TASKS", str(TASKS)).split()
    result = train(
        "single",
        1,
        *SMALL,
        option,
        *value,
        "--resume",
        finished.folder / "last.pt",
        folder=tmp_path,
    )
    assert result.code == 2
    assert (
        f"error: {option} " in result.err
        and "was made with" in result.err
        and result.err.count("\n") == 1
    )


@pytest.mark.parametrize("change", ACCEPTED)
def test_harmless_change_is_accepted(change, finished, tmp_path):
    result = train(
        "single",
        1,
        *SMALL,
        *change.split(),
        "--resume",
        finished.folder / "last.pt",
        folder=tmp_path,
    )
    assert result.code == 0, result.err
    assert (
        result.checkpoint()["global_step"] == (36 if "epochs 6" in change else 24)
        if (tmp_path / "run" / "last.pt").exists()
        else True
    )


def test_more_epochs_follow_the_longer_schedule_from_the_first_step(finished, tmp_path):
    longer = train(
        "single",
        1,
        *SMALL,
        "--epochs",
        "6",
        "--log-every",
        "1",
        "--resume",
        finished.folder / "last.pt",
        folder=tmp_path,
    )
    args = machinery.options.parse_args("single", [*SMALL, "--epochs", "6"])
    expected = [0.1 * factor_of(args, step, 6) for step in range(24, 36)]
    assert [line["lr"] for line in longer.train_lines()] == pytest.approx(expected, rel=1e-12)


def test_best_and_kept_checkpoints(finished, tmp_path):
    result = train("single", 1, *SMALL, "--keep-every", "2", folder=tmp_path)
    assert {path.name for path in result.folder.iterdir()} == {
        "metrics.jsonl",
        "last.pt",
        "best.pt",
        "epoch-0002.pt",
        "epoch-0004.pt",
    }
    scores = [line["top1"] for line in result.eval_lines()]
    best = result.checkpoint("best.pt")
    assert best["best"] == max(scores) and best["epoch"] == scores.index(max(scores)) + 1
    evaluated = train(
        "single",
        1,
        *SMALL,
        "--eval-only",
        "--resume",
        result.folder / "best.pt",
        folder=tmp_path / "eval",
    )
    assert evaluated.code == 0, evaluated.err
    assert evaluated.eval_lines()[-1]["top1"] == max(scores)


def save_beyond_the_limit(folder):
    common.save_checkpoint({"format": 1, "x": torch.zeros(10)}, Path(folder) / "last.pt")
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    common.save_checkpoint({"format": 1, "x": torch.rand(100_000)}, Path(folder) / "last.pt")


def test_full_disk_in_the_middle_of_a_save_leaves_the_old_file_and_no_other(tmp_path):
    import functools

    (tmp_path / "run").mkdir()
    (code, _, err), *_ = run_processes(
        [functools.partial(save_beyond_the_limit, str(tmp_path / "run"))], tmp_path
    )
    assert code == 1 and "Error" in err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["last.pt"]
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["x"].equal(torch.zeros(10))
    assert err.splitlines()[-1].startswith(
        f"OSError: {tmp_path / 'run' / 'last.pt'} could not be written (is the disk full?)"
    )


def test_save_is_durable_before_it_is_visible(tmp_path, monkeypatch):
    """The order of system calls that survives a power cut: write, fsync the file, rename, fsync the folder."""
    calls = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(
            os,
            name,
            lambda *a, name=name, original=original: (calls.append((name, *a)), original(*a))[1],
        )
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda *a: (calls.append(("save",)), save(*a))[1])
    common.save_checkpoint({"format": 1}, tmp_path / "last.pt")
    assert [call[0] for call in calls] == ["save", "fsync", "replace", "fsync"]
    assert calls[2][1].parent == calls[2][2].parent, "renamed within one folder"


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text"])
def test_damaged_file_is_named_and_the_run_goes_on_from_another_one(damage, finished, tmp_path):
    shutil.copytree(finished.folder, tmp_path / "run")
    path = tmp_path / "run" / "last.pt"
    content = bytearray(path.read_bytes())
    if damage == "flipped":  # one bit in the middle of the largest tensor
        with zipfile.ZipFile(path) as file:
            largest = max(file.infolist(), key=lambda info: info.file_size)
        content[largest.header_offset + largest.file_size // 2] ^= 4
    path.write_bytes(
        {"truncated": content[:-1000], "flipped": content, "empty": b"", "text": b"hello"}[damage]
    )
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    for resume, folder in ((path, tmp_path / "other"), ("auto", tmp_path)):
        refused = train("single", 1, *SMALL, "--resume", resume, folder=folder)
        assert (
            refused.code == 2
            and f"--resume {path}: damaged, or not a checkpoint" in refused.err
            and refused.err.count("\n") == 1
        )
        assert refused.err.endswith("; name another file\n") and not refused.out
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before
    resumed = train(
        "single", 1, *SMALL, "--resume", path.with_name("epoch-0003.pt"), folder=tmp_path
    )
    assert resumed.code == 0, resumed.err
    assert all(
        tensor.equal(finished.checkpoint()["model"][name])
        for name, tensor in resumed.checkpoint()["model"].items()
    )
    assert without_speed(resumed.lines) == without_speed(finished.lines)


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_hostile_pickle_is_refused_and_does_not_run(tmp_path):
    for save in (torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))):
        save({"format": 1, "model": Hostile(tmp_path / "owned")}, tmp_path / "hostile.pt")
        result = train("single", 1, *SMALL, "--resume", tmp_path / "hostile.pt", folder=tmp_path)
        assert (
            result.code == 2
            and "damaged, or not a checkpoint" in result.err
            and result.err.count("\n") == 1
        )
        assert not (tmp_path / "owned").exists()
    torch.load(tmp_path / "hostile.pt", weights_only=False) if zipfile.is_zipfile(
        tmp_path / "hostile.pt"
    ) else pickle.loads((tmp_path / "hostile.pt").read_bytes())
    assert (tmp_path / "owned").exists(), "the file was hostile indeed"


def test_second_run_in_one_folder_is_refused(tmp_path):
    result = train("single", 1, *SMALL, folder=tmp_path, patch=start_another_run_in(tmp_path))
    assert result.code == 0, result.err
    assert "second run: 2" in result.out and "another run is writing there" in result.err


class start_another_run_in:
    def __init__(self, folder):
        self.folder = folder

    def __call__(self, rank):
        save = machinery.run.Run.save

        def save_and_start_another(run, *names):
            machinery.run.Run.save = save
            import train_single

            argv = [*SMALL, "--output-dir", str(self.folder / "run")]
            child = os.fork()
            if not child:
                os._exit(machinery.processes.run_main(lambda: train_single.main(argv)))
            print("second run:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            save(run, *names)

        machinery.run.Run.save = save_and_start_another


def test_non_finite_parameters_never_reach_a_file(tmp_path):
    result = train("single", 1, *SMALL, folder=tmp_path, patch=poison_weights_in_epoch_3)
    assert (
        "not saved, the last good checkpoint stays: non-finite values in conv1.weight" in result.err
    )
    saved = result.checkpoint()
    assert saved["epoch"] == 2 and all(
        tensor.isfinite().all() for tensor in saved["model"].values()
    )


def poison_weights_in_epoch_3(rank):
    end_epoch = machinery.run.Run.end_epoch

    def poison(run, metrics):
        if run.state.epoch == 2:
            run.state.net.conv1.weight.data[0] = float("nan")
        end_epoch(run, metrics)

    machinery.run.Run.end_epoch = poison


def test_log_is_cut_back_to_the_checkpoint_even_if_its_last_line_is_torn(finished, tmp_path):
    shutil.copytree(finished.folder, tmp_path / "run")
    shutil.copyfile(tmp_path / "run" / "epoch-0003.pt", tmp_path / "run" / "last.pt")
    log = tmp_path / "run" / "metrics.jsonl"
    log.write_text(log.read_text() + '{"event": "train", "epo')
    resumed = train("single", 1, *SMALL, "--resume", "auto", folder=tmp_path)
    assert without_speed(resumed.lines) == without_speed(finished.lines)
    assert len({json.dumps(line) for line in resumed.lines}) == len(resumed.lines)


@pytest.mark.parametrize("line", ["{}", "5", '{"event": "eval", "global_step": 1}', "\udcff"])
def test_line_of_another_program_in_the_log_is_cut_off(line, finished, tmp_path):
    shutil.copytree(finished.folder, tmp_path / "run")
    with open(tmp_path / "run" / "metrics.jsonl", "a", errors="surrogateescape") as log:
        log.write(line + "\n")
    resumed = train("single", 1, *SMALL, "--resume", "auto", folder=tmp_path)
    assert resumed.code == 0 and resumed.lines == finished.lines, resumed.err


def test_averages_and_momentum_differ_from_the_weights(finished):
    saved = finished.checkpoint()
    momentum = {
        str(key): state["momentum_buffer"] for key, state in saved["optimizer"]["state"].items()
    }
    weights = {str(i): tensor for i, tensor in enumerate(saved["model"].values())}
    assert deviation(momentum, weights) > 1e-3, (
        "what the bitwise comparisons above compare is not all the same"
    )
