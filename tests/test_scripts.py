"""The scripts as texts: short diffs, the same loops, no branch on the mode, imports in one direction.

And a README and pages that are not stale.
"""

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import readme
from harness import ROOT, train
from readme import DIFFS, SCRIPTS, changed_lines

import machinery.cli

BUDGETS = dict(zip(DIFFS, (35, 20, 30, 25)))
PARTS = ("train_*.py", "task.py", "tasks/*.py", "sampling.py", "common.py", "machinery/*.py")
PROGRAMS = sorted(path for part in PARTS for path in ROOT.glob(part))


@pytest.mark.parametrize(("old", "new"), BUDGETS)
def test_diff_between_modes_stays_in_its_budget(old, new):
    assert 5 < len(changed_lines(old, new)) <= BUDGETS[old, new]


def function(mode, name):
    (node,) = [node for node in ast.parse(SCRIPTS[mode]).body if getattr(node, "name", "") == name]
    return ast.get_source_segment(SCRIPTS[mode], node)


def test_loops_are_the_same_text():
    for name in ("train_one_epoch", "evaluate"):
        assert function("ddp", name) == function("spawn", name)
    assert function("single", "evaluate") == function("ddp", "evaluate")


@pytest.mark.parametrize("mode", SCRIPTS)
def test_same_functions_in_the_same_order_and_no_branch_on_rank_or_mode(mode):
    names = [
        node.name for node in ast.parse(SCRIPTS[mode]).body if isinstance(node, ast.FunctionDef)
    ]
    shared = [name for name in names if name in ("train_one_epoch", "evaluate", "main")]
    assert shared == ["train_one_epoch", "evaluate", "main"]
    for loop in ("train_one_epoch", "evaluate"):
        branches = (ast.If, ast.IfExp, ast.Match)
        nodes = ast.walk(ast.parse(function(mode, loop)))
        assert not [node for node in nodes if isinstance(node, branches)], "a branch in a loop"
    assert not re.search(r"args\.\w+ [+*/-]?= ", SCRIPTS[mode]), "options are never reassigned"
    assert not re.search(r"rank(\(\))? *[=!<>]=|if (not )?(\w+\.)*(get_)?rank\b", SCRIPTS[mode])


@pytest.mark.parametrize("mode", SCRIPTS)
def test_loaders_come_before_the_network_and_the_process_group(mode):
    """Their workers are forks: they would keep the one, and wait for locks of the other's threads."""
    later = ["task.build_net", *["dist.init_process_group("] * (mode not in ("single", "dp"))]
    last, *places = [SCRIPTS[mode].find(part) for part in ("= build_loader(val_set,", *later)]
    assert -1 < last < min(places)


def test_tasks_know_nothing_of_ranks_and_no_program_of_one_maker():
    for path in (ROOT / "task.py", *ROOT.glob("tasks/*.py")):
        code = path.read_text().split('"""', 2)[2]
        assert not re.search(r"\b(rank|world_size|world size|cuda|is_distributed)\b", code), path
    for path in PROGRAMS:
        found = re.search(r"torch\.cuda|\.cuda\(|== .cuda.", path.read_text())
        assert not found, f"{path} asks for one maker's device"


# ------------------------------------------------------------ imports

# Who may import whom: only what stands further to the right. So there is no circle either.
# The scripts stand before all, and import none of each other.
ORDER = "launch run shards cli modes check usertask identity notebook process rendezvous signals".split()
ORDER = [f"machinery.{name}" for name in ORDER]
ORDER += [
    "tasks.detect",
    "tasks.pose",
    "tasks.gpt",
    "tasks.images",
    "task",
    "sampling",
    "common",
    "machinery",
]


def imports(name, tree, modules):
    """Return (module, "in a function" or "") for each import of one of the project's modules."""
    found = []

    def visit(node, where):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            where = "in a function"
        for alias in node.names if isinstance(node, ast.Import) else ():
            found.append((alias.name, where))
        if isinstance(node, ast.ImportFrom):
            package = name if name == "machinery" else name.rpartition(".")[0]
            base = ".".join(filter(None, [package if node.level else "", node.module]))
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.append((whole if whole in modules else base, where))
        for child in ast.iter_child_nodes(node):
            visit(child, where)

    visit(tree, "")
    tops = {module.split(".")[0] for module in modules}
    return [(module, where) for module, where in found if module.split(".")[0] in tops]


def mistakes(root):
    """Return what is wrong with the imports of a project, one line each."""
    paths = [path for part in PARTS for path in root.glob(part)]
    names = {path: ".".join(path.relative_to(root).with_suffix("").parts) for path in paths}
    trees = {names[path].removesuffix(".__init__"): ast.parse(path.read_text()) for path in paths}
    found = []
    for name, tree in sorted(trees.items()):
        script = name.startswith("train_")
        if not script and name not in ORDER:
            found.append(f"{name} has no place in the order")
            continue
        for module, where in imports(name, tree, trees):
            if where:
                found.append(f"{name} imports {module} {where}")
            if module == "machinery.launch" and name != "train_spawn":
                found.append(f"{name} imports {module}")
            elif module not in ORDER or (not script and ORDER.index(module) <= ORDER.index(name)):
                found.append(f"{name} imports {module}, which is not below it")
    return found


def test_imports_go_one_way():
    assert mistakes(ROOT) == []


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_ruff_is_clean(command):
    command = [sys.executable, "-m", "ruff", *command.split(), "."]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.full
def test_slow_packages_are_imported_only_where_they_are_used():
    """Import time is start-up time in every process."""
    slow = ("torchvision", "tensorboard", "matplotlib", "PIL")
    code = "import sys, train_ddp, train_spawn, train_dp, machinery.launch; "
    code += f"print([m for m in {slow} if m in sys.modules])"
    command = [sys.executable, "-c", code]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert finished.stdout.strip() == "[]", finished.stdout + finished.stderr


README = (ROOT / "README.md").read_text()
FOLDERS = (ROOT, ROOT / "machinery", ROOT / "examples" / "recipes")  # of files that pages name
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
BESIDE = ("README.md", "README.zh-CN.md", "CONTRIBUTING.md")
ALL_PAGES = {**{name: (ROOT / name).read_text() for name in BESIDE}, **PAGES}


def anchors(path):
    """Return the names by which a link finds the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_readme_is_read_in_one_sitting():
    assert len(README.splitlines()) <= 160
    rest = README.splitlines()[40:]  # after the first screen
    assert len(" ".join(rest).split()) <= 1500
    for line in README.splitlines():
        for cell in line.split(" | ") if line.startswith("| ") else ():
            assert len(re.findall(r"[.;] ", re.sub(r"`.*?`", "", cell))) <= 1, cell


def test_pages_are_few_and_short():
    """A word has a letter or a digit: signs of a table are none."""
    words = re.findall(r"\S*\w\S*", "\n".join(PAGES.values()))
    assert len(PAGES) <= 13 and len(words) <= 15_200


def test_lesson_shows_the_diff_between_single_and_ddp_and_the_sizes_of_all():
    (block,) = re.findall(r"```diff\n(.*?)```", PAGES["lesson.md"], re.DOTALL)
    assert block.splitlines() == [line for line in changed_lines("single", "ddp") if line != "+"]
    text = " ".join(PAGES["lesson.md"].split())
    for old, new in BUDGETS:
        changed = f"has {len(changed_lines(old, new))} changed lines"
        assert f"`diff train_{old}.py train_{new}.py` {changed}" in text
    assert f"All {len(changed_lines('single', 'ddp'))} changed lines" in README


def test_lesson_and_readme_have_a_word_for_each_name_in_the_diff():
    """Names that train_single.py does not have, in the code of the lines of train_ddp.py."""
    added = [line[1:].split("  #")[0] for line in changed_lines("single", "ddp") if line[0] == "+"]
    code = "\n".join(line for line in added if not line.lstrip().startswith(("#", '"')))
    new = {*re.findall(r"\w{4,}", code)} - {*re.findall(r"\w+", SCRIPTS["single"])}
    gone = {"leaves_no_trace"}  # stands in train_single.py alone
    assert {"gradient_as_bucket_view", "find_unused_parameters", "backend"} <= new
    lesson = re.sub(r"```diff\n.*?```", "", PAGES["lesson.md"], flags=re.DOTALL)
    (table,) = re.findall(r"\| line in `train_ddp.py`.*?\n\n", README, re.DOTALL)
    words = {*re.findall(r"\w+", lesson + table)}
    assert new | gone <= words, f"not explained: {(new | gone) - words}"


def test_page_shows_the_loop_that_is_tested():
    (block,) = re.findall(
        r"<!-- own_loop_ddp.py -->\n```python\n(.*?)```\n<!-- end -->", PAGES["copy.md"], re.DOTALL
    )
    script = (ROOT / "examples" / "own_loop_ddp.py").read_text()
    assert block == script, "stale: python tools/readme.py"


def test_lines_that_readme_explains_stand_in_train_ddp():
    (table,) = re.findall(r"\| line in `train_ddp.py`.*?\n\n", README, re.DOTALL)
    rows = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    script = " ".join(SCRIPTS["ddp"].split())
    assert len(rows) == 11
    for row in rows:
        for part in row.split("..."):
            assert part.strip("(), ") in script, row


def test_page_of_options_is_that_of_the_parser():
    assert PAGES["options.md"] == readme.options_page(), "stale: python tools/readme.py"
    assert PAGES["options.md"].count("\n| `--") >= 50


@pytest.mark.parametrize("name", ALL_PAGES)
def test_commands_files_and_links_of_the_pages_exist(name):
    text = ALL_PAGES[name].replace("\\\n", " ")  # a command may have several lines
    # What is compared are programs of the reader's own.
    text = "\n".join(
        line for line in text.splitlines() if "compare " not in line and "same_run(" not in line
    )
    known = set(re.findall(r"\b[a-z]+\b", (ROOT / "run.sh").read_text()))
    assert set(re.findall(r"bash run\.sh (\w+)", text)) <= known
    for path in re.findall(r"`((?:\w+/)*\w+\.(?:py|sh|sbatch))`", text):
        found = any((folder / path).exists() for folder in FOLDERS)
        assert found or path in ("FILE.py", "mine.py", "train_NAME.py"), path
    for path in re.findall(r"\]\(((?!http)[^)]+)\)", text):
        folder = ROOT if name in BESIDE else ROOT / "docs"
        path, _, anchor = path.partition("#")
        assert (folder / (path or name)).exists(), path
        assert not anchor or anchor in anchors(folder / (path or name)), anchor
    commands = re.findall(
        r"(?:bash run\.sh (\w+)(?: \w+)?|train_(\w+)\.py) (--(?!help)[^\n`#|\[]+)", text
    )
    for by_run_sh, by_hand, argv in commands:
        mode = by_run_sh or by_hand
        if mode in SCRIPTS:
            argv = [part.replace("mine.py", "task.py") for part in shlex.split(argv)]
            parser = machinery.cli.build_parser(mode)
            task = parser.parse_known_args(argv)[0].task
            needs = {"hf": ["transformers", "datasets"], "timm_layers": ["timm"]}
            packages = needs.get(Path(task).stem, [])
            if all(map(importlib.util.find_spec, packages)):  # else its options are unknown
                machinery.cli.add_options_of_task(parser, task, {})
            parser.parse_args(argv)
        elif mode != "test":  # whose options are those of pytest
            folder = "tests/campaigns" if mode in ("faults", "fuzz") else "tools"
            program = (ROOT / folder / f"{mode}.py").read_text()
            assert all(f'"{name}"' in program for name in re.findall(r"--[a-z-]+", argv)), argv


def test_readme_shows_what_its_first_command_prints(tmp_path):
    """In float32: another processor rounds otherwise."""
    command, *lines = re.findall(r"```console\n\$ (.*# excerpt\n.*?)\n\$", README, re.DOTALL)[
        0
    ].splitlines()
    argv = shlex.split(command, comments=True)[4:-2]
    log = train("ddp", 2, *argv, folder=tmp_path).eval_lines()
    (line,) = [line for line in lines if "eval" in line]
    loss, top1 = (float(re.search(rf"{name} ([\d.]+)", line)[1]) for name in ("loss", "top1"))
    assert (log[0]["loss"], log[0]["top1"]) == pytest.approx((loss, top1), rel=0.02)
    best = float(re.search(r"best top1 ([\d.]+)", lines[-1])[1])
    assert max(line["top1"] for line in log) == pytest.approx(best, abs=0.02)


def test_options_that_readme_names_exist():
    named = set(re.findall(r"`(--[a-z_-]+)", README))
    known = {option.name for option in machinery.cli.OPTIONS}
    others = {"--kill-on-bad-exit", "--local_rank"}  # of srun, and of old launchers
    assert len(named) >= 10 and named - known <= others


def test_task_of_the_readme_is_complete_and_learns(tmp_path):
    (code,) = re.findall(r"```python\n(import torch\n.*?)```", README, re.DOTALL)
    assert len(code.splitlines()) <= 12
    file = tmp_path / "mine.py"
    file.write_text(code)
    lines = {}
    for mode, devices in (("single", 1), ("ddp", 2)):
        argv = ("--task", str(file), "--epochs", "4", "--dtype", "float64")
        result = train(mode, devices, *argv, folder=tmp_path / mode)
        lines[mode] = [line["minus_error"] for line in result.eval_lines()]
    assert lines["single"] == pytest.approx(lines["ddp"], rel=1e-10)
    assert lines["single"][-1] > -0.6 > -1.2 > lines["single"][0]


def test_readme_and_requirements_name_the_same_oldest_versions():
    python, torch = re.search(r"Python ≥ (\d\.\d+), torch ≥ (\d\.\d+)", README).groups()
    assert f"torch>={torch}" in (ROOT / "requirements.txt").read_text().split()
    assert (
        f'target-version = "py{python.replace(".", "")}"' in (ROOT / "pyproject.toml").read_text()
    )
    assert f"${{1:-python{python}}}" in (ROOT / ".ci" / "floor").read_text()
    assert f'"{python}"' in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


@pytest.mark.full
def test_docs_show_the_equivalence_of_the_code_as_it_is():
    (block,) = re.findall(
        r"<!-- equivalence -->\n(.*?)\n<!-- end -->", PAGES["equivalence.md"], re.DOTALL
    )
    cells, code = re.search(r"(\d+) cells, none above its bound.* code (\w+)\.", block).groups()
    assert int(cells) >= 150
    assert code == readme.code_digest(), (
        "stale: bash run.sh equivalence --json FILE.json && python tools/readme.py FILE.json"
    )


def test_docs_name_for_every_pitfall_the_code_that_avoids_it_and_its_test():
    row = r"^\| (\d\d) \| (.+) \| (.+) \| `(\S+)` \|(?: `(\w+)`)? \|$"
    rows = re.findall(row, PAGES["pitfalls.md"], re.MULTILINE)
    assert len(rows) == PAGES["pitfalls.md"].count("\n| ") - PAGES["pitfalls.md"].count("| NN |")
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    own = {number for number, *_, test in rows if not test}
    shown = {*re.findall(r"^def test_pitfall_(\d\d)_", tests, re.MULTILINE)}
    assert own <= shown <= {number for number, *_ in rows}
    for number, _, how, where, test in rows:
        assert f"\ndef {test}(" in tests or not test, f"{number}: there is no {test}"
        names = ("run.sh", "machinery/cli.py", "common.py", "machinery/launch.py")
        code_of = "".join((ROOT / name).read_text() for name in (where, *names))
        for code in re.findall(r"`([^`]+)`", how):
            assert code in code_of, f"{number}: {code} is not in {where}"
