"""The scripts as texts: short diffs, the same loops, imports in one direction, budgets; and pages whose links and commands exist."""

import ast
import difflib
import importlib.util
import re
import subprocess
import sys

import pytest
from launches import ROOT

from engine.options import parse_args

MODES = "single dp ddp spawn fsdp".split()
SCRIPTS = {mode: (ROOT / f"train_{mode}.py").read_text() for mode in MODES}
BUDGETS = {("single", "ddp"): 35, ("single", "dp"): 20, ("ddp", "spawn"): 30, ("ddp", "fsdp"): 25}
PRODUCT = [*ROOT.glob("train_*.py"), ROOT / "task.py", ROOT / "common.py", ROOT / "sampling.py"]
PRODUCT += [*ROOT.glob("engine/*.py"), ROOT / "run.sh"]
NEEDED = {"hf.py": "transformers", "timm_layers.py": "timm"}  # of a task on a page
NEEDED |= {"detect": "pycocotools", "pose": "pycocotools"}
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "tests" / "README.md"]


def changed_lines(old, new):
    texts = SCRIPTS[old].splitlines(), SCRIPTS[new].splitlines()
    lines = [*difflib.unified_diff(*texts, n=0, lineterm="")][2:]
    return [line for line in lines if not line.startswith("@@")]


@pytest.mark.parametrize(("old", "new"), BUDGETS)
def test_diff_between_modes_stays_in_its_budget(old, new):
    assert 5 < len(changed_lines(old, new)) <= BUDGETS[old, new]


def test_lesson_shows_the_diffs_as_they_are():
    page = (ROOT / "docs" / "lesson.md").read_text()
    shown = re.search(r"```diff\n(.*?)```", page, re.DOTALL)[1].splitlines()
    assert shown == changed_lines("single", "ddp")
    assert f"`diff train_single.py train_ddp.py`, {len(shown)} changed lines" in page
    for old, new in [*BUDGETS][1:]:
        count = len(changed_lines(old, new))
        assert f"| `diff train_{old}.py train_{new}.py` | {count} |" in page


def function(mode, name):
    (node,) = [node for node in ast.parse(SCRIPTS[mode]).body if getattr(node, "name", "") == name]
    return ast.get_source_segment(SCRIPTS[mode], node)


def test_loops_are_the_same_text_without_a_branch():
    for name in ("train_one_epoch", "evaluate"):
        assert function("ddp", name) == function("spawn", name)
        for mode in SCRIPTS:
            nodes = ast.walk(ast.parse(function(mode, name)))
            assert not [node for node in nodes if isinstance(node, (ast.If, ast.IfExp, ast.Match))]


def test_product_stays_in_its_budget():
    lines = {path: path.read_text().splitlines() for path in PRODUCT}
    assert sum(map(len, lines.values())) <= 2_700
    assert sum(len(lines[ROOT / f"train_{mode}.py"]) for mode in SCRIPTS) <= 600
    assert [path for path in PRODUCT if max(map(len, lines[path]), default=0) > 100] == []


# Who may import whom: only what stands further to the right, so that there is no circle.
ORDER = "launch run check options modes task_file sampling common".split()


def test_imports_go_one_way():
    for path in PRODUCT[:-1]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in (name.removeprefix("engine.") for name in names):
                assert not name.startswith("train_"), f"{path} imports {name}"
                if name in ORDER and path.stem in ORDER:
                    assert ORDER.index(path.stem) < ORDER.index(name), f"{path} imports {name}"


@pytest.mark.parametrize("command", ["check --no-cache", "format --check --no-cache"])
def test_ruff_is_clean(command):
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 60}
    files = subprocess.run(["git", "ls-files", "*.py", "*.ipynb"], **options).stdout.split()
    command = [sys.executable, "-m", "ruff", *command.split(), *(files or ["."])]
    finished = subprocess.run(command, **options)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.full
def test_slow_packages_are_imported_only_where_they_are_used():
    slow = ("torchvision", "tensorboard", "matplotlib", "PIL", "torch._dynamo")
    code = "import sys, train_ddp, train_spawn, train_dp, engine.launch; "
    code += f"print([m for m in {slow} if m in sys.modules])"
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert finished.stdout.strip() == "[]", finished.stdout + finished.stderr


def anchors(path):
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_commands_of_the_pages_exist(page, monkeypatch, tmp_path):
    text = page.read_text().replace("\\\n", " ")  # a command may have several lines
    for link in re.findall(r"\]\(((?!http)[^)]+)\)", text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    monkeypatch.chdir(ROOT)
    commands = re.findall(
        r"(?:bash run\.sh (\w+)(?: \w+)?|train_(\w+)\.py) (--(?!help)[^\n`#|\[]+)", text
    )
    for by_run_sh, by_hand, argv in commands:
        mode, argv = by_run_sh or by_hand, argv.replace('"', "").split()
        needed = [NEEDED[name] for word in argv for name in NEEDED if word.endswith(name)]
        if (
            page.name == "compare.md"
            or mode not in SCRIPTS
            or not all(map(importlib.util.find_spec, needed))
        ):
            continue
        argv = [word.replace("mine.py", "task.py") for word in argv if word not in ("...", "…")]
        for option in ("--resume", "--weights", "--eval-only"):  # their files are the reader's
            while option in argv:
                i = argv.index(option)
                del argv[i : i + 1 + (option != "--eval-only")]
        argv += ["--output-dir", str(tmp_path / "run")]
        parse_args(mode, argv, 1)  # a wrong option is one line, and SystemExit(2)
