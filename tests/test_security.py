"""Files and names that mean harm: no checkpoint runs code, no name reaches a shell, nothing of the current folder is imported."""

import os
import pickle
import shutil
import subprocess
import zipfile

import pytest
import torch
from harness import ROOT
from runs import make_run

import common


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def torch_zip(path, value):
    torch.save(value, path)


def bare_pickle(path, value):
    path.write_bytes(pickle.dumps(value))


def run_it(path):
    """What a careless program would do with the file."""
    content = path.read_bytes()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            content = file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))
    pickle.loads(content)


def alone(harm):
    return harm


def as_an_option(harm):
    return {"format": common.FORMAT, "config": {"lr": harm}, "model": {}}


@pytest.mark.parametrize(
    ("write", "place"),
    [(torch_zip, alone), (torch_zip, as_an_option), (bare_pickle, as_an_option)],
)
def test_hostile_checkpoint_is_refused_in_one_line_and_does_not_run(write, place, tmp_path, capfd):
    path, owned = tmp_path / "run" / "last.pt", tmp_path / "owned"
    path.parent.mkdir()
    write(path, place(Hostile(owned)))
    for folder, choice in ((tmp_path / "other", path), (tmp_path, "auto")):
        with pytest.raises(common.UsageError) as error:
            make_run(folder, "--resume", choice)
        assert str(error.value).startswith(f"--resume {path}: damaged, or no file of tensors")
        assert "\n" not in str(error.value) and capfd.readouterr() == ("", "")
        assert not owned.exists()
    run_it(path)
    assert owned.exists(), "the file was hostile indeed"


HARMFUL = """it's "$HOME" $(touch owned) `touch owned` ; touch owned & * \\ -x"""
PYTHON = """#!/usr/bin/env bash
printf '%s\\0' "$PWD" "$@" $'\\n' >>"$LOG"
[[ $1 != - || -n $COMPLETE ]] || exit 1
[[ $1 != -I ]] || echo "$0"
[[ $1 != -c ]] || echo 2
"""


@pytest.fixture
def harmful(tmp_path, monkeypatch):
    """run.sh in a folder with a harmful name, called from there, with a Python that only writes down how it is called."""
    current, programs = tmp_path / HARMFUL, tmp_path / "programs"
    project = current / "project"
    for folder in (project, programs):
        folder.mkdir(parents=True)
    for name in ("run.sh", "requirements.txt"):
        shutil.copy(ROOT / name, project)
    (programs / "python3").write_text(PYTHON)
    (programs / "python3").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("CDPATH", str(current))  # makes cd print where it goes

    def call(*arguments, complete="yes"):
        command = ["bash", "project/run.sh", *arguments]
        finished = subprocess.run(
            command,
            cwd=current,
            env=os.environ | {"COMPLETE": complete},
            capture_output=True,
            text=True,
            timeout=60,
        )
        calls = [
            entry.split("\0")[:-1] for entry in (tmp_path / "log").read_text().split("\n\0")[:-1]
        ]
        assert not list(tmp_path.rglob("owned")), "a name was run"
        assert list(current.iterdir()) == [project]
        return finished, calls

    return project, current, call


@pytest.mark.parametrize("mode", ["single", "ddp"])
def test_run_sh_hands_harmful_names_on_as_they_are(mode, harmful):
    project, current, call = harmful
    given = [
        "--task",
        HARMFUL,
        f"--output-dir=-{HARMFUL}",
        "--freeze",
        "*",
        "$HOME",
        "",
        " ",
        "--resume",
        "--help me",
    ]
    n = "1" if mode == "single" else "8"
    finished, calls = call(
        mode, f"0{n}", *given
    )  # in the shell's arithmetic 08 would be a wrong octal number
    assert finished.returncode == 0 and finished.stderr == ""
    script = "machinery/launch.py" if mode == "ddp" else "train_single.py"
    assert (
        calls[-1][:2] == [str(current), str(project / script)] and calls[-1][-len(given) :] == given
    )
    assert mode == "single" or n in calls[-1]


def test_run_sh_imports_nothing_from_the_current_folder(harmful):
    """`python -c`, `-m` and `-` look for modules there first: someone's re.py would be run, or break the set-up."""
    project, _, call = harmful
    _, calls = call("ddp", "--epochs", "1")
    _, more = call("ddp", complete="")  # sets up
    own = [entry for entry in calls + more if entry[1] in ("-", "-c", "-m")]
    assert {entry[1] for entry in own} == {"-", "-c", "-m"}
    assert {entry[0] for entry in own} == {str(project)}
