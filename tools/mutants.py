"""Break the project on purpose, one small fault at a time, and see that a test fails each time.

bash run.sh mutants [options]

mutants_list.py is the table of the faults. Each is put into a copy of the project in a temporary
folder, and the tests that should notice it are run there. First all of these tests must pass in a
copy without a fault. A fault that no test notices is a survivor: a test is missing. Exit code 1 if
there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing.connection
import multiprocessing.forkserver
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from mutants_list import LIST

ROOT = Path(__file__).resolve().parent.parent
SIDE_BY_SIDE = 2
# What tests import that takes long, and nothing of the project
SLOW = ["torch._dynamo", "torch.distributed.run", "pytest", "unittest.mock"]
SLOW += ["torchvision.datasets", "torchvision.models", "torchvision.transforms.v2"]
context = multiprocessing.get_context("forkserver")
one_thread = threading.Lock()  # an exit code can be read only once
# Seconds for the tests of one mutant. No test should rest on a hang, so that it is a survivor.
TIMEOUT = 150


@functools.lru_cache(50)
def squeeze(text: str) -> tuple[str, list[int]]:
    """Return the text without what a formatter may change, and the place of each character left.

    That is white space, comments, and a comma before a closing bracket: a mutant lives on when
    code is only written otherwise.
    """
    hidden = {place for comment in re.finditer(r"  #.*", text) for place in range(*comment.span())}
    places = [i for i, character in enumerate(text) if i not in hidden and not character.isspace()]
    places = [
        i
        for i, after in zip(places, [*places[1:], None])
        if not (text[i] == "," and after is not None and text[after] in ")]}")
    ]
    return "".join(text[i] for i in places), places


@functools.cache
def files_of_tests() -> dict[str, list[str]]:
    """Return the files in which a test of each name is."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE):
            found.setdefault(name, []).append(path.name)
    return found


class Mutant(NamedTuple):
    """`old`, which stands exactly once in `file`, becomes `new`; `tests` should notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> str:
        """Return the broken text of the file."""
        text = (root / self.file).read_text()
        (squeezed, places), (wanted, _) = squeeze(text), squeeze(self.old)
        if (times := squeezed.count(wanted)) != 1:
            problem = f"what it replaces occurs {times} times in {self.file}, not once"
            raise ValueError(f"{self.name}: {problem}: {self.old!r}")
        first = squeezed.index(wanted)
        start, end = places[first], places[first + len(wanted) - 1] + 1
        line = text[text.rfind("\n", 0, start) + 1 :]
        moved = len(line) - len(line.lstrip(" ")) - (len(self.old) - len(self.old.lstrip(" ")))
        lines = self.new.strip().splitlines()
        rest = [" " * (moved if self.old.startswith(" ") else 0) + line for line in lines[1:]]
        return text[:start] + "\n".join([*lines[:1], *rest]) + text[end:]

    def selection(self) -> list[str]:
        """Return the tests as pytest wants them: with the file where each of them is found."""
        found = []
        for test in self.tests:
            files = files_of_tests().get(test.partition("[")[0], [])
            if len(files) != 1:
                raise ValueError(f"{test}: in {len(files)} files of tests, not in one: {files}")
            found.append(f"tests/{files[0]}::{test}")
        return found


MUTANTS = [Mutant(*row) for row in LIST]


def copy_project(source: Path, folder: Path) -> Path:
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache", "shared")
    return Path(shutil.copytree(source, folder / "project", ignore=ignored))


def serve() -> None:
    """Start the server from which each run of the tests is forked.

    Importing torch takes longer than most of the tests.
    """
    os.environ.update(OMP_NUM_THREADS="1", TESTS_FORK="1")
    context.set_forkserver_preload(SLOW)
    multiprocessing.forkserver.ensure_running()


def paths_of_others(paths: Iterable[str], environment: str) -> list[str]:
    """Return the paths that hold nothing of this project; its .venv holds the packages of others."""
    return [
        p for p in paths if p and (p.startswith(environment) or not Path(p).is_relative_to(ROOT))
    ]


def be_pytest(project: Path, arguments: list[str]) -> None:
    """Run pytest in this process, a fork of the server, as if it was started in the project."""
    os.setsid()
    os.chdir(project)
    output = os.open(project.parent / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(PYTHONDONTWRITEBYTECODE="1", TMPDIR=str(project.parent / "tmp"))
    tempfile.tempdir, sys.dont_write_bytecode = None, True
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[:] = [str(project), *paths_of_others(sys.path, sys.prefix)]
    for name in [name for name in sys.modules if name.startswith(("mutants", "__mp_main__"))]:
        del sys.modules[name]  # of this program; the project has its own
    import pytest

    code = pytest.main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_tests(project: Path, selection: Iterable[str], timeout: float) -> tuple[int | None, str]:
    """Run tests in a copy of the project; return pytest's exit code and its output.

    The code is None after a time-out. Nothing outlives the call.
    """
    (project.parent / "tmp").mkdir(exist_ok=True)
    options = ["-x", "-q", "-rf", "--tb=line", f"--basetemp={project.parent / 'basetemp'}"]
    options += ["-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-m", ""]  # the long tests too
    options += ["-s"]  # no capture, which forks of pytest would write into
    with one_thread:
        process = context.Process(target=be_pytest, args=(project, [*options, *selection]))
        process.start()
    multiprocessing.connection.wait([process.sentinel], timeout)
    with one_thread:
        code = process.exitcode
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what tests left behind, or all of them
        process.join()
    output = project.parent / "output"
    return code, output.read_text(errors="replace") if output.exists() else "pytest did not start"


class Outcome(NamedTuple):
    mutant: Mutant
    killer: str  # the test that failed first; empty for a survivor
    seconds: float
    remark: str = ""


def try_mutant(source: Path, mutant: Mutant) -> Outcome:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as name:
        project = copy_project(source, Path(name))
        (project / mutant.file).write_text(mutant.apply(project))
        code, output = run_tests(project, mutant.selection(), TIMEOUT)
    seconds = time.monotonic() - started
    failed = re.search(r"^FAILED tests/(\S+?\.py::\w+(?:\[[^\]]*\])?)", output, re.MULTILINE)
    if code == 1 and failed:
        return Outcome(mutant, failed[1], seconds)
    reasons = {0: "all selected tests pass", 1: "an error outside a test"}
    reasons |= {None: f"no end within {TIMEOUT} s"}
    reason = reasons.get(code, f"pytest ended with {code}")
    return Outcome(mutant, "", seconds, f"{reason}\n{output[-1500:]}")


def check_baseline(source: Path, selection: list[str]) -> None:
    """All tests must pass without a fault, or a failure would say nothing."""
    folder = tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True)

    def run(half: list[str]) -> tuple[int | None, str]:
        project = copy_project(source, Path(tempfile.mkdtemp(dir=folder.name)))
        return run_tests(project, half, 900) if half else (0, "")

    with folder, ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        halves = [sorted(selection)[i::SIDE_BY_SIDE] for i in range(SIDE_BY_SIDE)]
        for code, output in pool.map(run, halves):
            if code != 0:
                problem = "the tests fail without a fault, so that they cannot tell"
                sys.exit(f"{problem}:\n{output[-3000:]}")


def table(outcomes: list[Outcome]) -> str:
    rows = [["mutant", "file", "killed by", "seconds"]]
    for outcome in outcomes:
        killer = outcome.killer.replace("|", r"\|") or "**nothing**"
        rows.append([outcome.mutant.name, outcome.mutant.file, killer, f"{outcome.seconds:.0f}"])
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    rows.insert(1, [*("-" * width for width in widths[:3]), "-" * (widths[3] - 1) + ":"])
    cells = [[text.ljust(width) for text, width in zip(row, widths)] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def main(argv: list[str] | None = None) -> int:
    head = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="mutants", description=head, allow_abbrev=False)
    add = parser.add_argument
    only = "try the mutants whose name or file it is part of"
    add("--only", metavar="SUBSTRING", default="", help=only)
    add("--markdown", action="store_true", help="print the table alone, when all is done")
    listed = "print the mutants and the tests that should notice them; run nothing"
    add("--list", action="store_true", help=listed)
    args = parser.parse_args(argv)
    chosen = [mutant for mutant in MUTANTS if args.only in f"{mutant.name} {mutant.file}"]
    if not chosen:
        parser.error(f"--only {args.only}: no mutant has such a name")
    for mutant in chosen:
        mutant.apply(ROOT)
    if args.list:
        for mutant in chosen:
            print(f"{mutant.name} ({mutant.file}): {', '.join(mutant.tests)}")
        return 0
    started = time.monotonic()
    outcomes = []
    serve()
    folder = tempfile.TemporaryDirectory(prefix="mutants-")
    with folder, ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        source = copy_project(ROOT, Path(folder.name))  # what is edited meanwhile does not count
        check_baseline(source, [*{test: 0 for mutant in chosen for test in mutant.selection()}])
        for outcome in pool.map(functools.partial(try_mutant, source), chosen):
            outcomes.append(outcome)
            if not args.markdown:
                verdict = outcome.killer or f"SURVIVED: {outcome.remark}"
                print(f"{outcome.seconds:4.0f} s  {outcome.mutant.name}: {verdict}", flush=True)
    survivors = [outcome for outcome in outcomes if not outcome.killer]
    print(table(outcomes))
    killed, seconds = len(outcomes) - len(survivors), time.monotonic() - started
    print(f"\n{len(outcomes)} mutants, {killed} killed, {seconds:.0f} seconds.")
    for outcome in survivors:
        print(f"SURVIVED {outcome.mutant.name}: {outcome.remark.splitlines()[0]}", file=sys.stderr)
    return int(bool(survivors))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
