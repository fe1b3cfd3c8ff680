"""The faults of tools/faults.py in short, without the start of a launch, and that the campaign itself notices what it should.

| fault | its short form |
|---|---|
| SIGKILL to all processes, within a save | here |
| SIGKILL to one rank, to the launcher | test_pitfalls_processes.py (06, 39) |
| SIGTERM, SIGINT, SIGUSR1 | test_signals.py, test_resume.py, test_pitfalls_checkpoints.py (11) |
| death of a rank, and the restart | here |
| exception, exit and death of a rank, exception in a loader worker, and the resume | here; that the job ends: test_pitfalls_processes.py (06) |
| SIGKILL to a loader worker | here |
| NaN loss, NaN input | here, with a resume; test_pitfalls_gradients.py (05), test_failures.py |
| full disk, file size limit | test_checkpoint_files.py, test_pitfalls_checkpoints.py (10) |
| last.pt truncated, with a flipped bit | here; test_checkpoint_files.py |
| a second run in the folder | test_resume.py |
| read-only folder | test_bad_input.py |
"""

import functools
import itertools
import os
import re
import shutil
import signal

import faults
import pytest
import torch
from harness import TASKS, Result, single_run, train, undisturbed
from launches import Launch
from patches import Patches, set_environment, stop_after, without_speed

import common

SMALL = (
    "--task",
    TASKS / "faulty.py",
    "--epochs",
    "3",
    "--batch-size",
    "30",
    "--save-every",
    "4",
    "--average",
    "ema",
    "--dtype",
    "float64",
)


def kill_at_call(number, rank):
    """SIGKILL just before the number-th of the system calls of which a save is made."""
    calls = itertools.count(1)
    for name in ("fsync", "replace"):
        original = getattr(os, name)

        def call(*arguments, original=original):
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments)

        setattr(os, name, call)


def assert_same(result, reference):
    """Both runs left the same, to the bit."""
    assert result.code == 0, result.err
    for name in ("last.pt", "best.pt"):
        ours, theirs = result.checkpoint(name), reference.checkpoint(name)
        different = [
            place
            for part in theirs
            if part != "config"
            for place in faults.differences(ours[part], theirs[part], part)
        ]
        assert not different
    assert without_speed(result.lines) == without_speed(reference.lines)
    assert not list(result.folder.glob(".*"))


# A save is fsync (of the log), fsync for each file, and replace, fsync for each name: last.pt in the fourth step, and in the sixth,
# which is the last of the epoch; then best.pt and last.pt after the evaluation. So the 3rd, 7th, 12th, 14th and 22nd put a new file
# into its place. Those of the first evaluation are calls 9 to 15.
@pytest.mark.parametrize(
    "number",
    [2, 7, 12, 22, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 11, 13, 14))],
)
def test_killed_within_a_save(number, tmp_path):
    killed = train(
        "single", 1, *SMALL, folder=tmp_path, patch=functools.partial(kill_at_call, number)
    )
    assert killed.code == -signal.SIGKILL
    files = [common.load_checkpoint(path)["global_step"] for path in killed.folder.glob("*.pt")]
    assert len(files) == (0 if number < 4 else 1 if number < 13 else 2), files
    assert_same(train("single", 1, *SMALL, "--resume", "auto", folder=tmp_path), single_run(*SMALL))


@pytest.mark.parametrize("mode", ["single", "ddp"])
def test_damaged_last_checkpoint_is_refused_and_the_best_one_leads_to_the_same(mode, tmp_path):
    n = {"single": 1, "ddp": 2}[mode]
    killed = train(mode, n, *SMALL, folder=tmp_path, patch=functools.partial(kill_at_call, 22))
    assert killed.code == -signal.SIGKILL
    last = tmp_path / "run" / "last.pt"
    last.write_bytes(last.read_bytes()[:-1000])
    log = killed.lines
    refused = train(mode, n, *SMALL, "--resume", "auto", folder=tmp_path)
    assert (
        refused.code == 2
        and f"--resume {last}: damaged" in refused.err
        and "Traceback" not in refused.err
    )
    assert refused.lines == log, "nothing is thrown away"
    resumed = train(mode, n, *SMALL, "--resume", tmp_path / "run" / "best.pt", folder=tmp_path)
    assert_same(resumed, undisturbed(mode, n, *SMALL))


@pytest.mark.parametrize(
    ("mode", "fault", "cause"),
    [
        ("ddp", "raises", "RuntimeError: broken in the loss"),
        ("ddp", "dies with 1", r"\A(?!(.*\n)*Traceback)"),  # its launcher says it
        ("dp", "raises", "RuntimeError: broken in the loss"),
        ("single", "worker raises", "RuntimeError: broken in a loader worker"),
        (
            "single",
            "worker is killed",
            "DataLoader worker .* (is killed by signal|exited unexpectedly)",
        ),
    ],
)
def test_failure_ends_the_run_and_the_resumed_one_is_the_same(mode, fault, cause, tmp_path):
    n, workers = (
        {"ddp": 2, "dp": 2, "single": 1}[mode],
        ("--workers", "1") if "worker" in fault else (),
    )
    values = {
        "FAULT": fault,
        "FAULT_AT": faults.sample_at(1, 50),
        "FAULT_ONCE": str(tmp_path / "once"),
    }
    broken = train(
        mode, n, *SMALL, *workers, folder=tmp_path, patch=functools.partial(set_environment, values)
    )
    assert (tmp_path / "once").exists() and broken.code == 1
    assert re.search(cause, broken.err)
    reference = (
        undisturbed("ddp", n, *SMALL)
        if mode == "ddp"
        else single_run(*SMALL)
        if mode == "single"
        else None
    )
    resumed = train(mode, n, *SMALL, "--resume", "auto", folder=tmp_path)
    assert_same(resumed, reference or train(mode, n, *SMALL, folder=tmp_path / "straight"))


@pytest.mark.long
def test_run_sh_ddp_goes_on_by_itself_when_a_rank_dies(tmp_path):
    values = {
        "FAULT": "dies with 1",
        "FAULT_AT": faults.sample_at(1, 50),
        "FAULT_ONCE": str(tmp_path / "once"),
        "PYTHONPATH": str(TASKS),
    }
    with Launch(["bash", "run.sh", "ddp", "2"], tmp_path, *map(str, SMALL), **values) as launch:
        code = launch.end()
        assert code == 0 and (tmp_path / "once").exists(), launch.errors()
        assert re.search(
            r"process [01] left with exit code 1; restart 1$", launch.errors(), re.MULTILINE
        ), launch.errors()
    reference = undisturbed("ddp", 2, *SMALL)
    assert_same(Result(0, "", "", tmp_path / "run"), reference)


@pytest.mark.parametrize("fault", ["NaN loss", "NaN input"])
def test_a_step_that_is_skipped_is_skipped_again(fault, tmp_path):
    values = {"FAULT": fault, "FAULT_AT": faults.sample_at(1, 60)}  # the third batch, rank 0
    patch = functools.partial(set_environment, values)
    straight = train("ddp", 2, *SMALL, folder=tmp_path / "straight", patch=patch)
    assert sum(line["skipped"] for line in straight.train_lines()) == 1
    assert straight.checkpoint()["epoch"] == 3, (
        "the statistics of BatchNorm are as before the step, or nothing could be saved any more"
    )
    stopped = train(
        "ddp", 2, *SMALL, folder=tmp_path, patch=Patches(patch, functools.partial(stop_after, 9))
    )
    assert stopped.code == 143
    assert_same(train("ddp", 2, *SMALL, "--resume", "auto", folder=tmp_path, patch=patch), straight)


# ---------------------------------------------------------------------------------------------------------- the campaign itself


def test_every_fault_comes_several_times_in_a_hundred_trials():
    names = [fault.name for fault in faults.choose(0, 100, None)]
    assert len(names) == 100 and all(
        names.count(fault.name) >= 3 for fault in faults.FAULTS if fault.prepare is not faults.mount
    )
    assert names != [fault.name for fault in faults.choose(1, 100, None)]
    assert {fault.name for fault in faults.choose(0, 5, "full disk")} == {"full disk"}


def test_a_trial_can_be_repeated(tmp_path):
    trials = [
        faults.Trial(faults.Campaign(0, tmp_path), number, faults.FAULTS[0]) for number in (3, 3, 4)
    ]
    first, again, other = ((str(trial), trial.fraction, trial.place) for trial in trials)
    assert first == again != other


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A trial whose run is over, and was the undisturbed one."""
    folder = tmp_path_factory.mktemp("compared")
    trial = faults.Trial(faults.Campaign(0, folder), 0, faults.FAULTS[0])
    trial.output.parent.mkdir()
    shutil.copytree(single_run(*SMALL).folder, trial.output)
    shutil.copytree(single_run(*SMALL).folder, folder / "reference")
    trial.reference = faults.Reference(folder / "reference", 1.0, 12)
    return trial


def change_tensor(folder, name):
    checkpoint = torch.load(folder / name, weights_only=True)
    checkpoint["model"]["1.weight"].view(torch.int64)[0] += 1  # its last bit
    torch.save(checkpoint, folder / name)


def repeat_line(folder):
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines()[-1] + "\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: change_tensor(folder, "last.pt"), "last.pt differs .*: model.1.weight"),
        (lambda folder: change_tensor(folder, "best.pt"), "best.pt differs .*: model.1.weight"),
        (lambda folder: (folder / "best.pt").unlink(), "no best.pt"),
        (repeat_line, "metrics.jsonl differs"),
        (lambda folder: (folder / ".last.pt.tmp").touch(), "left in the folder: .last.pt.tmp"),
    ],
)
def test_a_difference_is_a_loss(change, message, compared):
    compared.compare()
    before = {path: path.read_bytes() for path in compared.output.iterdir()}
    try:
        change(compared.output)
        with pytest.raises(faults.Lost, match=message):
            compared.compare()
    finally:
        shutil.rmtree(compared.output)
        compared.output.mkdir()
        for path, content in before.items():
            path.write_bytes(content)


def lose_third(trial):
    trial.folder.mkdir()
    faults.expect(trial.number != 2, "broken on purpose")
    return "survived"


def test_a_lost_trial_is_red_and_its_folder_stays(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(faults.Trial, "run", lose_third)
    monkeypatch.setattr(faults.tempfile, "mkdtemp", lambda prefix: str(tmp_path / prefix))
    monkeypatch.setattr(faults.signal, "signal", lambda *_: None)
    for trials, code in ((2, 0), (4, 1)):
        (tmp_path / "faults-").mkdir()
        assert (
            faults.main(
                [
                    "--trials",
                    str(trials),
                    "--only",
                    "full disk",
                    "--json",
                    str(tmp_path / "table.json"),
                ]
            )
            == code
        )
        assert (tmp_path / "faults-" / "trial-2").exists() == bool(code)
    out = capsys.readouterr().out
    assert (
        "Lost: broken on purpose" in out
        and 'again with: bash run.sh faults --seed 0 --only "full disk" --trial 2' in out
    )
    assert (
        "| full disk | 4 | 3 | 0 | 1 |" in out
        and '"lost": 1' in (tmp_path / "table.json").read_text()
    )
