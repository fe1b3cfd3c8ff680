"""The scripts as texts: short diffs, the same loops, no branch on the mode, sizes as the design says, a README that is not stale."""

import ast
import difflib
import re
import subprocess
import sys

import pytest
from harness import ROOT

import options

SCRIPTS = {mode: (ROOT / f"train_{mode}.py").read_text() for mode in ("single", "dp", "ddp", "spawn")}
BUDGETS = {("single", "ddp"): 35, ("single", "dp"): 20, ("ddp", "spawn"): 30}
OWN_LINES = 3350  # of the project's own Python: tests, the bench and the plot are beside it


def changed_lines(old, new):
    lines = difflib.unified_diff(SCRIPTS[old].splitlines(), SCRIPTS[new].splitlines(), n=0, lineterm="")
    return [line for line in list(lines)[2:] if not line.startswith("@@")]


@pytest.mark.parametrize(("old", "new"), BUDGETS)
def test_diff_between_modes_stays_in_its_budget(old, new):
    assert 5 < len(changed_lines(old, new)) <= BUDGETS[old, new]


def function(mode, name):
    (node,) = [node for node in ast.parse(SCRIPTS[mode]).body if getattr(node, "name", "") == name]
    return ast.get_source_segment(SCRIPTS[mode], node)


@pytest.mark.parametrize("name", ["train_one_epoch", "evaluate", "sync_on_last"])
def test_loops_of_ddp_and_spawn_are_the_same_text(name):
    assert function("ddp", name) == function("spawn", name)


def test_evaluation_is_the_same_text_on_one_device_and_on_many():
    assert function("single", "evaluate") == function("ddp", "evaluate")


@pytest.mark.parametrize("mode", SCRIPTS)
def test_same_functions_in_the_same_order_and_no_branch_on_rank_or_mode(mode):
    names = [node.name for node in ast.parse(SCRIPTS[mode]).body if isinstance(node, ast.FunctionDef)]
    shared = [name for name in names if name in ("train_one_epoch", "evaluate", "main")]
    assert shared == ["train_one_epoch", "evaluate", "main"]
    for loop in ("train_one_epoch", "evaluate"):
        assert not [node for node in ast.walk(ast.parse(function(mode, loop))) if isinstance(node, ast.If)], "a branch in a loop"
    assert not re.search(r"args\.\w+ [+*/-]?= ", SCRIPTS[mode]), "options are never reassigned"
    assert "is_rank0" not in SCRIPTS[mode] and "rank == 0" not in SCRIPTS[mode].replace("node_rank == 0", "")


def test_what_the_scripts_teach_is_not_hidden_in_the_helpers():
    helpers = (ROOT / "common.py").read_text() + (ROOT / "checkpoint.py").read_text()
    for lesson in ("init_process_group", "DistributedDataParallel(", "no_sync()", ".backward()", "scaler.step(", "GlobalBatchSampler("):
        assert lesson in SCRIPTS["ddp"], lesson
    for lesson in ("init_process_group", "DistributedDataParallel(", "no_sync()", "scaler.step("):
        assert lesson not in helpers, lesson


def test_task_knows_nothing_of_devices_and_common_nothing_of_the_task():
    task = (ROOT / "task.py").read_text()
    for word in ("rank", "world_size", "world size", "cuda", "is_distributed"):
        assert not re.search(rf"\b{word}\b", task.split('"""', 2)[2]), word
    assert not re.search(r"^(import task|from task)", (ROOT / "common.py").read_text(), re.MULTILINE)
    for path in (
        "common.py",
        "loading.py",
        "checkpoint.py",
        "options.py",
        "replicas.py",
        "task.py",
        *(f"train_{mode}.py" for mode in SCRIPTS),
    ):
        assert not re.search(r"torch\.cuda|\.cuda\(|== .cuda.", (ROOT / path).read_text()), f"{path} asks for one maker's device"


def test_own_python_stays_small():
    programs = [path for path in ROOT.glob("*.py") if path.stem not in ("bench", "plot")]
    assert sum(len(path.read_text().splitlines()) for path in programs) <= OWN_LINES


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_ruff_is_clean(command):
    finished = subprocess.run([sys.executable, "-m", "ruff", *command.split(), "."], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_slow_packages_are_imported_only_where_they_are_used():
    """Import time is start-up time in every process."""
    code = "import sys, train_ddp; print([m for m in ('torchvision', 'tensorboard', 'matplotlib', 'PIL') if m in sys.modules])"
    finished = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert finished.stdout.strip() == "[]", finished.stdout + finished.stderr


README = (ROOT / "README.md").read_text()


def test_readme_shows_the_diff_between_single_and_ddp():
    (block,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    assert block.splitlines() == [line for line in changed_lines("single", "ddp") if line != "+"]


def test_readme_states_the_sizes_of_the_diffs():
    for (old, new), _ in BUDGETS.items():
        assert f"`diff train_{old}.py train_{new}.py` has {len(changed_lines(old, new))} changed lines" in README


def test_readme_names_every_option_and_no_other():
    known = {option for mode in SCRIPTS for action in options.build_parser(mode)._actions for option in action.option_strings}
    known -= {option for option in known if option.startswith("--no-")} | {"-h", "--help", "--local-rank", "--local_rank"}
    (table,) = re.findall(r"## Options\n(.*?)\n## ", README, re.DOTALL)
    assert {option for option in re.findall(r"`(--[a-z-]*[a-z])", table) if not option.startswith("--no-")} == known


def test_readme_commands_exist():
    modes = set(re.findall(r"bash run\.sh (\w+)", README))
    assert {"single", "dp", "ddp", "spawn", "test"} <= modes <= set(re.findall(r"\b[a-z]+\b", (ROOT / "run.sh").read_text()))
    for path in re.findall(r"`((?:tests/)?\w+\.(?:py|sh))`", README):
        assert (ROOT / path).exists() or path.startswith("FILE"), path
    for mode, argv in re.findall(r"bash run\.sh (single|dp|ddp|spawn)(?: \d+)? (--(?!help)[^\n`#]+)", README):
        options.build_parser(mode).parse_args(argv.split())


def test_readme_and_requirements_name_the_same_oldest_versions():
    python, torch = re.search(r"Python ≥ (\d\.\d+), torch ≥ (\d\.\d+)", README).groups()
    assert f"torch>={torch}" in (ROOT / "requirements.txt").read_text().split()
    assert f'target-version = "py{python.replace(".", "")}"' in (ROOT / "pyproject.toml").read_text()
    assert f"${{1:-python{python}}}" in (ROOT / ".ci" / "floor").read_text()


@pytest.mark.release
def test_readme_shows_the_equivalence_of_the_code_as_it_is():
    import readme

    (block,) = re.findall(r"<!-- equivalence -->\n(.*?)\n<!-- end -->", README, re.DOTALL)
    cells, code = re.search(r"(\d+) cells, none above its bound.* code (\w+)\.", block).groups()
    assert int(cells) >= 150
    assert code == readme.code_digest(), "stale: bash run.sh equivalence --json FILE.json && python tests/readme.py FILE.json"


def test_readme_names_for_every_pitfall_the_code_that_avoids_it_and_its_test():
    (table,) = re.findall(r"## Pitfalls\n(.*?)\n## ", README, re.DOTALL)
    rows = re.findall(r"^\| (\d\d) \| (.+) \| (.+) \| `(\S+)` \|$", table, re.MULTILINE)
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    assert {number for number, *_ in rows} == set(re.findall(r"def test_pitfall_(\d\d)_", tests))
    for number, _, how, where in rows:
        texts = (ROOT / where).read_text() + "".join(
            (ROOT / name).read_text() for name in ("run.sh", "options.py", "common.py", "launch.py")
        )
        for code in re.findall(r"`([^`]+)`", how):
            assert code in texts, f"{number}: {code} is not in {where}"
