"""tools/mutants.py cannot rot silently: each of its faults applies once, and its tests exist."""

import ast
import functools
import subprocess
import sys

import mutants
import pytest

ROOT = mutants.ROOT


@functools.lru_cache(50)
def tree_of(text):
    return ast.dump(ast.parse(text))


@pytest.mark.full
def test_every_mutant_applies_exactly_once_and_compiles():
    for mutant in mutants.MUTANTS:
        broken, text = mutant.apply(ROOT), (ROOT / mutant.file).read_text()
        assert ast.dump(ast.parse(broken)) != tree_of(text), mutant.name


def test_a_mutant_lives_on_when_code_is_only_written_otherwise(tmp_path):
    old, new = "    go(a, b)  # why\n    if c:\n", "    if c:\n        stop()\n"
    fault = mutants.Mutant("x", "some.py", old, new, ())
    call = "        go(\n            a,\n            b,\n        )\n"
    after = "        # other words\n        if c:\n            d()\n"
    (tmp_path / "some.py").write_text(call + after)
    assert fault.apply(tmp_path) == "        if c:\n            stop()\n            d()\n"


def test_there_are_many_but_not_too_many_and_all_differ():
    """Who meets them for the first time should be able to read them all."""
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert 40 <= len(set(names)) == len(names) <= 320
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in mutants.MUTANTS}) == len(names)
    paths = (ROOT / "tools").glob("mutants*.py")
    assert sum(len(path.read_text().splitlines()) for path in paths) <= 800


@pytest.mark.full
def test_the_tests_that_should_notice_them_exist():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "tests"]
    command += ["-p", "no:xdist", "-p", "no:cacheprovider"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    listed = found.stdout.splitlines()  # a mutant names one case of a test, or all of them
    tests = {name for line in listed for name in (line, line.partition("[")[0])}
    for mutant in mutants.MUTANTS:
        assert mutant.tests
        for test in mutant.selection():
            assert test in tests, f"{mutant.name}: {test}"


def test_packages_in_the_projects_own_environment_are_found():
    """run.sh makes .venv within the project; the tests of a mutant need what is installed there."""
    own, packages = str(ROOT / "tools"), str(ROOT / ".venv" / "lib" / "packages")
    paths = ["", own, packages, "/usr/lib/python3"]
    found = mutants.paths_of_others(paths, str(ROOT / ".venv"))
    assert found == [packages, "/usr/lib/python3"]


def test_a_mutant_that_does_not_apply_is_an_error():
    gone = mutants.MUTANTS[0]._replace(old="no such text")
    with pytest.raises(ValueError, match="occurs 0 times"):
        gone.apply(ROOT)
