"""Files and names that mean harm: no checkpoint runs code, no name reaches a shell, nothing of the current folder is imported."""

import ast
import io
import os
import pickle
import re
import shutil
import subprocess
import tarfile
import warnings
import zipfile

import pytest
import torch
from harness import ROOT, check, train
from short_runs import SMALL

import common


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def torch_zip(path, value):
    torch.save(value, path)


def hand_made_zip(path, value):
    """As torch.save would write it, but compressed, and with names that would leave the folder if they were unpacked."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in {
            "data.pkl": pickle.dumps(value, protocol=2),
            "version": b"3\n",
            "byteorder": b"little",
        }.items():
            file.writestr(f"archive/{name}", content)
        file.writestr("../../unpacked", b"")


def legacy(path, value):
    torch.save(value, path, _use_new_zipfile_serialization=False)


def bare_pickle(path, value):
    path.write_bytes(pickle.dumps(value))


def tar(path, value):
    """The format of torch before 0.1.10, whose reader calls pickle three times."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as file:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            content = pickle.dumps(value)
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))


def run_it(path):
    """What a careless program would do with the file."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            content = file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as file:
            content = file.extractfile("pickle").read()
    else:
        content = path.read_bytes()
    stream = io.BytesIO(content)
    while stream.tell() < len(content):  # the legacy format is a row of pickles
        unpickler = pickle.Unpickler(stream)
        unpickler.persistent_load = lambda key: None
        unpickler.load()


def refused(argv, capfd):
    with pytest.raises(common.UsageError) as error:
        check("single", 1, *argv)
    assert "\n" not in str(error.value) and capfd.readouterr() == ("", "")
    return str(error.value)


PLACES = {
    "alone": lambda harm: harm,
    "among the weights": lambda harm: {
        "format": common.FORMAT,
        "config": {},
        "model": {"conv1.weight": harm},
    },
    "as an option": lambda harm: {"format": common.FORMAT, "config": {"lr": harm}, "model": {}},
    "as a key": lambda harm: {"format": common.FORMAT, "config": {}, "model": {}, harm: 0},
}


@pytest.mark.parametrize(
    ("write", "place"),
    [
        *((torch_zip, place) for place in PLACES),
        *((write, "as an option") for write in (hand_made_zip, legacy, bare_pickle, tar)),
    ],
)
def test_hostile_checkpoint_is_refused_in_one_line_and_does_not_run(write, place, tmp_path, capfd):
    path, owned = tmp_path / "last.pt", tmp_path / "owned"
    write(path, PLACES[place](Hostile(owned)))
    for argv in (["--resume", str(path)], ["--resume", "auto", "--output-dir", str(tmp_path)]):
        assert f"--resume {path}: damaged, or no file of tensors" in refused(argv, capfd)
        assert list(tmp_path.iterdir()) == [path]
    run_it(path)
    assert owned.exists(), "the file was hostile indeed"


def test_torchscript_program_is_no_checkpoint(tmp_path, capfd):
    """torch.load would hand it to torch.jit.load."""
    program = tmp_path / "program.pt"
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch.jit is deprecated, and torch.load says where it would hand the file to
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), program)
        assert "damaged, or no file of tensors" in refused(["--resume", str(program)], capfd)


FORBIDDEN = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "os.startfile",
    "torch.hub.load",
    "torch.jit.load",
}
FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "subprocess",
    "pty",
    "commands",
}


def dangers(source):
    """What a text of Python does that could run what a file or an option says."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [
                name.name for name in node.names if name.name.split(".")[0] in FORBIDDEN_MODULES
            ]
            found += [
                f"{name.name} as {name.asname}"
                for name in node.names
                if name.name == "os" and name.asname
            ]
        if isinstance(node, ast.ImportFrom):
            found += [f"from {node.module}"] * (
                node.module in FORBIDDEN_MODULES | {"os", "torch.serialization"}
            )
            found += [
                f"{node.module}.{name.name}"
                for name in node.names
                if f"{node.module}.{name.name}" in FORBIDDEN | {"torch.load"}
            ]
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            found += [name] * (
                name in FORBIDDEN or bool(re.match(r"os\.(exec|spawn|posix_spawn)", name))
            )
            found += [name] * (
                name.endswith("torch.load") and keywords.get("weights_only") != "True"
            )
            found += [f"{name} with a shell"] * (keywords.get("shell", "False") != "False")
            found += [f"{name} with pickles"] * (keywords.get("allow_pickle", "False") != "False")
    return found


TOOLS = ROOT / "tools"
PROGRAMS = sorted(
    str(path.relative_to(ROOT))
    for path in [
        *ROOT.glob("*.py"),
        *ROOT.glob("machinery/*.py"),
        TOOLS / "bench.py",
        TOOLS / "peers.py",
        TOOLS / "plot.py",
    ]
)
STARTS = {"tools/peers.py", "machinery/launch.py"}  # programs and the ranks, by lists of words


@pytest.mark.parametrize("path", PROGRAMS)
def test_no_program_runs_what_a_file_or_an_option_says(path):
    assert dangers((ROOT / path).read_text()) == ["subprocess"] * (path in STARTS)


@pytest.mark.parametrize(
    "source",
    [
        "eval(text)",
        "exec(open(path).read())",
        "import os\nos.system(f'ls {path}')",
        "import os as system",
        "from os import popen",
        "os.popen(command)",
        "os.execvp(path, [])",
        "import subprocess",
        "run(command, shell=True)",
        "import pickle",
        "from pickle import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=not trusted)",
        "from torch import load",
        "np.load(path, allow_pickle=True)",
        "torch.hub.load('some/repository', 'model')",
    ],
)
def test_the_search_for_dangers_finds(source):
    assert dangers(source)


def shellcheck(script):
    """Run the linter with the rule that every expansion is to be quoted; what it says of functions and `set -e` is a matter of taste."""
    command = ["shellcheck", "--enable=quote-safe-variables", "--severity=style", "-"]
    return subprocess.run(command, input=script, capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
@pytest.mark.parametrize(
    "line",
    [
        "",
        "ls $here",
        'ls "$@" $*',
        "ls ${needed[@]}",
        "cd $mode",
        "ls $(pwd)",
        "for x in $@; do ls; done",
    ],
)
def test_run_sh_is_clean_under_shellcheck_which_finds_what_is_not_quoted(line):
    script = (ROOT / "run.sh").read_text()
    finished = shellcheck(script.replace("\nshift\n", f"\nshift\n{line}\n"))
    assert finished.returncode == (1 if line else 0), finished.stdout


def test_run_sh_evaluates_no_text():
    script = (ROOT / "run.sh").read_text()
    assert not re.search(r"\beval\b|\bsource\b|^\s*\. |`|\bsh -c|\$\(\(10#", script, re.MULTILINE)


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


@pytest.mark.parametrize("mode", ["single", "dp", "ddp", "spawn", "fsdp"])
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
    script = "machinery/launch.py" if mode in ("ddp", "fsdp") else f"train_{mode}.py"
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


# ------------------------------------------------------------ a pickle in the place of a checkpoint


def test_hostile_pickle_is_refused_and_does_not_run(tmp_path):
    for save in (torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))):
        save(
            {"format": common.FORMAT, "model": Hostile(tmp_path / "owned")}, tmp_path / "hostile.pt"
        )
        result = train("single", 1, *SMALL, "--resume", tmp_path / "hostile.pt", folder=tmp_path)
        assert (
            result.code == 2
            and "damaged, or no file of tensors" in result.err
            and result.err.count("\n") == 1
        )
        assert not (tmp_path / "owned").exists()
    torch.load(tmp_path / "hostile.pt", weights_only=False) if zipfile.is_zipfile(
        tmp_path / "hostile.pt"
    ) else pickle.loads((tmp_path / "hostile.pt").read_bytes())
    assert (tmp_path / "owned").exists(), "the file was hostile indeed"
