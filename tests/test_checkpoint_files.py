"""The files of a run: what they hold, who may write and read them, which of them is the best, what training starts from."""

import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from harness import deviation, log_lines, train, walk
from single import SMALL, single, task_file

EMA = ["--average", "ema"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four epochs, of which the first and the third are kept too."""
    folder = tmp_path_factory.mktemp("finished")
    result = single(folder, *SMALL, *EMA, "--epochs", "4", "--keep-every", "1", "--lr", "0.05")
    assert result.code == 0, result.err
    return result


def copied(finished, folder):
    shutil.copytree(finished.folder, folder / "run")
    return folder / "run"


# -------------------------------------------------------------------------------- what is in a file


KEYS = "format weights model optimizer scaler average meter epoch step best config data"
LAYERS = ("conv1", "conv2", "conv3", "head")
NAMES = [f"{layer}.{name}" for layer in LAYERS for name in ("weight", "bias")]


def look_at(saved, ranks):
    assert [*saved] == KEYS.split() and saved["format"] == 5
    plain = {dict, list, tuple, str, int, float, bool, type(None), torch.Tensor}
    assert {type(value) for value in walk(saved)} <= plain | {type(saved["model"])}
    assert [*saved["model"]] == [*saved["weights"]] == NAMES, "neither module. nor _orig_mod."
    assert saved["optimizer"]["names"] == NAMES and saved["optimizer"]["param_groups"]
    average = saved["average"]
    assert average.keys() == {"tensors", "n_averaged"} and average["n_averaged"] == 6
    assert [*average["tensors"]] == NAMES
    assert all(saved["weights"][n].equal(average["tensors"][n]) for n in NAMES)
    assert not any(saved["model"][n].equal(average["tensors"][n]) for n in NAMES)
    assert (saved["epoch"], saved["step"], len(saved["meter"])) == (1, 0, ranks)
    classes = [str(digit) for digit in range(10)]
    data = [*walk(saved["data"])]
    assert 203 in data and 57 in data and classes in data
    assert saved["config"]["average"] == "ema" and "resume" not in saved["config"]


@pytest.mark.parametrize(
    ("mode", "n"),
    [("single", 1), ("ddp", 2), *(pytest.param(*run, marks=pytest.mark.full) for run in (("dp", 2), ("fsdp", 2)))],
)  # fmt: skip
def test_keys_are_those_of_the_format_and_values_are_plain(mode, n, tmp_path):
    result = train(mode, n, *SMALL, *EMA, "--epochs", "1", folder=tmp_path)
    assert result.code == 0, result.err
    look_at(result.checkpoint(), n if mode in ("ddp", "fsdp") else 1)


MODES = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 10)
    def forward(self, images):
        return self.body(images.flatten(1).float() / 90)
    def get_extra_state(self):
        return self.training
    def set_extra_state(self, value):
        pass
def build_model(args):
    return Net()
"""


def test_network_is_in_training_mode_when_it_is_saved(tmp_path):
    """In the middle of an epoch, before its evaluation, and after it."""
    argv = task_file(tmp_path, MODES)
    result = single(tmp_path, *argv, "--save-every", "4", "--keep-every", "1")
    files = [result.checkpoint(f"{name}.pt") for name in ("last", "best", "epoch-0001")]
    assert all(file["model"]["_extra_state"] is True for file in files), result.err


# ------------------------------------------------------------------------------ a save that fails


def kill_at(call, rank):
    replace, calls = os.replace, itertools.count(1)

    def killed(*arguments):
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*arguments)

    os.replace = killed


RUINED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Linear(64, 10), nn.BatchNorm1d(64)
        self.register_buffer("mask", torch.full((2,), -torch.inf))
        self.ruined = nn.Parameter(torch.zeros(2), requires_grad=False)
    def forward(self, images):
        if self.training and PART:
            dict(self.state_dict(keep_vars=True))[PART].data[0] = torch.nan
        return self.body(images.flatten(1).float() / 90)
def build_model(args):
    return Net()
"""


@pytest.mark.parametrize("part", ["", "ruined", "norm.running_mean"])
def test_checkpoint_that_is_not_finite_is_refused_by_name_and_the_last_good_file_stays(
    part, tmp_path
):
    """But for buffers of other kinds, as a mask of infinities."""
    good = single(tmp_path, *task_file(tmp_path, RUINED.replace("PART", "''"), "good"))
    assert good.code == 0 and good.checkpoint()["model"]["mask"].isinf().all(), good.err
    argv = task_file(tmp_path, RUINED.replace("PART", repr(part)), "mine")
    result = single(tmp_path, *argv, "--resume", "auto", "--epochs", "3")
    assert (result.code, result.checkpoint()["epoch"]) == ((1, 2) if part else (0, 3)), result.err
    assert not part or f"not finite: {part}" in result.err


# ------------------------------------------------------------------------------ who may go on


def test_damaged_file_is_named_and_the_run_goes_on_from_another_one(finished, tmp_path):
    folder = copied(finished, tmp_path)
    path = folder / "last.pt"
    content = bytearray(path.read_bytes())
    content[content.index(finished.checkpoint()["model"]["head.weight"].numpy().tobytes())] ^= 1
    path.write_bytes(content)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    refused = single(tmp_path, "--resume", "auto", "--epochs", "5")
    assert refused.code == 2 and f"--resume {path}: damaged" in refused.err
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    resumed = single(tmp_path, "--resume", folder / "epoch-0003.pt")
    assert resumed.code == 0, resumed.err
    assert deviation(resumed.checkpoint()["model"], finished.checkpoint()["model"]) == 0
    assert log_lines(folder) == log_lines(finished.folder)


OTHER = """
LENGTHS = (203, 57)
def build_datasets(args):
    import task
    sets = task.build_datasets(args)
    for dataset, length in zip(sets, LENGTHS):
        dataset.targets = dataset.targets[:length]
        dataset.classes = [name.replace("nine", "9") for name in [*"012345678", "nine"]]
    return sets
"""
REFUSED = {  # what is new | within an epoch, at the end of one: refused or not
    "--dtype float64": (2, 2),
    "--seed 1": (2, 0),
    "--batch-size 29": (2, 0),
    "--accum-steps 2": (0, 0),
    "--workers 1 --lr 0.01": (0, 0),
    "task: (203, 57);9": (0, 0),  # a renamed file
    "task: (204, 57);9": (2, 2),
    "task: (203, 56);9": (2, 2),
    "task: (203, 57);10": (2, 2),
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run that was killed within its second epoch, and what became of it."""
    folder = tmp_path_factory.mktemp("begun")
    argv = [*SMALL, "--save-every", "4"]
    result = train(
        "single", 1, *argv, folder=folder / "within", patch=functools.partial(kill_at, 6)
    )
    assert (result.checkpoint()["epoch"], result.checkpoint()["step"]) == (1, 2), result.err
    shutil.copytree(result.folder, folder / "ended" / "run")
    assert single(folder / "ended", "--resume", "auto").code == 0
    return folder


@pytest.mark.parametrize("change", REFUSED)
def test_resume_refuses_what_would_be_another_run(change, begun, tmp_path):
    words = change.split()
    if words[0] == "task:":
        lengths, names = change.removeprefix("task: ").split(";")
        text = OTHER.replace("(203, 57)", lengths).replace('"9"', f'"{names}"')
        words = task_file(tmp_path, text)[:2]
    for place, code in zip(("within", "ended"), REFUSED[change]):
        shutil.copytree(begun / place, tmp_path / place)
        before = (tmp_path / place / "run" / "last.pt").read_bytes()
        resumed = single(tmp_path / place, "--resume", "auto", "--epochs", "3", *words)
        assert resumed.code == code, (place, resumed.err)
        assert code == 0 or (tmp_path / place / "run" / "last.pt").read_bytes() == before
        assert resumed.err.count("\n") == (code == 2)


HOLD = "import fcntl, sys\nlog = open(sys.argv[1], 'ab')\nfcntl.flock(log, fcntl.LOCK_EX)\nprint('has it', flush=True)\nsys.stdin.read()"


def test_directory_of_a_run_that_goes_on_is_refused(finished, tmp_path):
    folder = copied(finished, tmp_path)
    command = [sys.executable, "-c", HOLD, folder / "metrics.jsonl"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"has it\n"
        refused = single(tmp_path, "--resume", "auto", "--epochs", "5")
        assert refused.code == 2 and "another run is writing there" in refused.err
        evaluated = single(tmp_path, "--resume", folder / "best.pt", "--eval-only")
        assert evaluated.code == 0, "which writes nothing"
        holder.stdin.close()
    assert single(tmp_path, "--resume", "auto", "--epochs", "5").code == 0


READS = """
import fcntl
def per_sample_metrics(outputs, targets):
    open(LOG).close()  # with another kind of lock this would give the lock up
    with open(LOG) as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("locked")
    return {"top1": (outputs.argmax(1) == targets).float()}
"""


def test_lock_stays_though_the_process_opens_and_closes_its_log(tmp_path):
    log = tmp_path / "run" / "metrics.jsonl"
    argv = [*task_file(tmp_path, f"LOG = {str(log)!r}{READS}"), "--no-check", "--epochs", "1"]
    result = single(tmp_path, *argv)
    assert result.code == 0 and result.out.count("locked") == 8, result.out


# ------------------------------------------------------------------------------------ the best

SCORED = """
SCORES = [float(score) for score in TEXT.split()]
def dataset_metrics(lists):
    import json, pathlib
    lines = pathlib.Path(LOG).read_text().splitlines() if pathlib.Path(LOG).exists() else []
    epoch = len([line for line in lines if json.loads(line)["event"] == "eval"])
    return {"score": SCORES[epoch], "other": -SCORES[epoch]}
def per_sample_metrics(outputs, targets):
    return {"all": targets.tolist()}
"""
BEST = {  # scores, by --best, the epoch of best.pt in the end
    "0.5 0.5 0.25 0.5": ("score", 1),
    "-0.5 -0.49999999999999994 -0.5": ("score", 1),  # a rise by rounding
    "-3 -5 -2 -3": ("score:min", 2),
    "nan -7 nan": ("score", 2),
    "-inf 0.5 inf 0.75": ("score", 4),
    "1 3 2": ("other", 1),
}


def scored(folder, scores, *more):
    names = f"TEXT, LOG = {scores!r}, {str(folder / 'run' / 'metrics.jsonl')!r}\n"
    argv = [*task_file(folder, names + SCORED), "--epochs", str(len(scores.split()))]
    return single(folder, *argv, *more)


@pytest.mark.parametrize("scores", BEST)
def test_the_first_of_the_best_scores_decides(scores, tmp_path):
    by, epoch = BEST[scores]
    result = scored(tmp_path, scores, *(["--best", by] if by != "score" else []))
    assert result.code == 0, result.err
    best, last = result.checkpoint("best.pt"), result.checkpoint()
    assert (best["epoch"], best["best"], last["best"][1]) == (epoch, last["best"], epoch)
    assert f", in epoch {epoch}: {result.folder / 'best.pt'}" in result.out
    assert "NaN" not in (result.folder / "metrics.jsonl").read_text(), "which is no JSON"


def test_tie_is_kept_across_a_resume_and_kept_epochs_are_every_so_many(tmp_path):
    scores = "0.5 0.25 0.5 0.5 0.75 0.1"
    argv = ["--keep-every", "2", "--epochs"]
    for epochs in (2, 4):
        result = scored(tmp_path, scores, *argv, epochs, *["--resume", "auto"] * (epochs > 2))
    assert result.code == 0 and result.checkpoint("best.pt")["epoch"] == 1, result.err
    kept = {
        path.name: result.checkpoint(path.name)["epoch"] for path in result.folder.glob("e*.pt")
    }
    assert kept == {"epoch-0002.pt": 2, "epoch-0004.pt": 4}
    refused = scored(tmp_path, scores, *argv, 6, "--resume", "auto", "--best", "f1")
    assert (
        refused.code == 2
        and "--best f1: no such metric; use one of score, other, loss" in refused.err
    )


# ------------------------------------------------------------------------------ --eval-only


def test_eval_only_evaluates_what_was_trained_and_touches_nothing(finished, tmp_path):
    folder = copied(finished, tmp_path)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    wanted = finished.lines[-1]
    for argv in (["--resume", folder / "last.pt"], [*SMALL, "--weights", folder / "last.pt"]):
        for elsewhere in (folder, tmp_path / "new"):
            again = single(
                tmp_path, *argv, "--eval-only", "--output-dir", elsewhere, "--batch-size", "7"
            )
            assert again.code == 0, again.err
            assert f"eval  loss {wanted['loss']:.6f}" in again.out and "(57 samples)" in again.out
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert not (tmp_path / "new").exists()
    many = train("ddp", 2, "--eval-only", "--resume", folder / "last.pt", folder=tmp_path / "many")
    assert f"eval  loss {wanted['loss']:.6f}" in many.out, many.err
    fewer = single(tmp_path, *task_file(tmp_path, OTHER.replace("203, 57", "20, 57").replace("nine", "9")), "--eval-only", "--resume", folder / "last.pt", "--batch-size", "7")  # fmt: skip
    assert f"eval  loss {wanted['loss']:.6f}" in fewer.out, "of other training samples"


def test_eval_only_refuses_other_classes_and_missing_tensors(finished, tmp_path):
    argv = task_file(tmp_path, OTHER.replace('replace("nine", "9")', 'replace("nine", "10")'))
    for option in ("--weights", "--resume"):
        refused = single(tmp_path, *argv, "--eval-only", option, finished.folder / "best.pt")
        assert refused.code == 2 and "classes" in refused.err and refused.err.count("\n") == 1
    weights = finished.checkpoint()["model"]
    del weights["conv2.bias"]
    torch.save(weights, tmp_path / "less.pt")
    refused = single(tmp_path, *SMALL, "--eval-only", "--weights", tmp_path / "less.pt")
    assert refused.code == 2 and "conv2.bias" in refused.err


NOISE = """
def per_sample_metrics(outputs, targets):
    return {"drawn": torch.rand(len(targets)), "all": targets.tolist()}
def dataset_metrics(lists, *, seed):
    return {"of all": torch.rand(()), "seed": seed}
"""


def test_evaluation_draws_the_same_in_every_mode_and_epoch_and_may_ask_for_options(tmp_path):
    argv = [*task_file(tmp_path, NOISE), "--seed", "7", "--no-check", "--batch-size", "29"]
    results = [
        train(mode, n, *argv, folder=tmp_path / mode) for mode, n in (("single", 1), ("ddp", 3))
    ]
    assert [result.code for result in results] == [0, 0], results[0].err + results[1].err
    lines = [line for result in results for line in result.eval_lines()]
    assert len({line["of all"] for line in lines}) == 1 and {line["seed"] for line in lines} == {7}
    assert max(line["drawn"] for line in lines) - min(line["drawn"] for line in lines) < 1e-12
    assert len(lines) == 4 and 0 < lines[0]["of all"] < 1


# --------------------------------------------------------------------- what training starts from


def test_weights_from_elsewhere_are_loaded_as_far_as_they_fit_and_the_rest_is_named(
    finished, tmp_path
):
    weights = finished.checkpoint()["weights"]
    given = {f"module.{name}": value for name, value in weights.items() if name != "conv1.bias"}
    given |= {"module.head.weight": torch.zeros(1000, 384), "extra": torch.zeros(2)}
    argv = [*SMALL, "--lr", "0", "--epochs", "1", "--weights", tmp_path / "file"]
    for i, content in enumerate((given, {"model": given, "epoch": 3}, {"state_dict": given}, {"weights": given})):  # fmt: skip
        torch.save(content, tmp_path / "file")
        result = single(tmp_path / str(i), *argv)
        assert "6 of 8 tensors" in result.out and "missing: conv1.bias, head.weight" in result.out
        for name, value in result.checkpoint()["model"].items():
            assert value.equal(weights[name]) == (name not in ("conv1.bias", "head.weight")), name
    torch.save(weights, tmp_path / "file")
    result = train("ddp", 2, *argv, "--dtype", "float64", folder=tmp_path)
    assert result.out.count("8 of 8 tensors") == 1, result.err
    assert all(v.equal(weights[name].double()) for name, v in result.checkpoint()["model"].items())
    os.remove(tmp_path / "file")
    resumed = single(tmp_path, *argv[:-2], "--epochs", "2", "--resume", "auto")
    assert resumed.code == 0, "whoever goes on needs the weights no more"
