"""Writes the parts of docs/ that come from the code: `python tools/readme.py [FILE.json]`.

docs/lesson.md, docs/options.md, the script in docs/copy.md, and docs/equivalence.md from the file
of `bash run.sh equivalence --json FILE.json`. A test fails when they are stale.
"""

import argparse
import ast
import difflib
import hashlib
import json
import re
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tasks.images
from machinery.cli import OPTIONS

SCRIPTS = {
    mode: (ROOT / f"train_{mode}.py").read_text()
    for mode in ("single", "dp", "ddp", "spawn", "fsdp")
}
DOCS = ROOT / "docs"
DIFFS = [
    ("single", "ddp"),
    ("single", "dp"),
    ("ddp", "spawn"),
    ("ddp", "fsdp"),
]  # whose sizes are stated


def changed_lines(old: str, new: str) -> list[str]:
    """The lines of a diff between the scripts of two modes, unchanged ones left out."""
    lines = difflib.unified_diff(
        SCRIPTS[old].splitlines(), SCRIPTS[new].splitlines(), n=0, lineterm=""
    )
    return [line for line in list(lines)[2:] if not line.startswith("@@")]


def code_digest() -> str:
    """A hash of what the programs do, without tasks/: comments, layout and docstrings left out."""
    digest = hashlib.sha256()
    programs = [path for part in ("", "machinery/") for path in ROOT.glob(f"{part}*.py")]
    for path in sorted([*programs, ROOT / "tools" / "equivalence.py"]):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if (
                isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef))
                and ast.get_docstring(node) is not None
            ):
                node.body[0] = ast.Pass()
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()[:12]


def equivalence_table(cells: list[dict]) -> list[str]:
    """The worst of all numbers of devices for each feature and mode, three features a line."""
    worst: dict[str, dict[str, float]] = {}
    for cell in cells:
        row = worst.setdefault(cell["feature"], {})
        row[cell["mode"]] = max(row.get(cell["mode"], 0.0), *cell["deviations"].values())
    shown = [
        [f"{row[mode]:.0e}" if mode in row else "–" for mode in ("dp", "ddp", "spawn", "fsdp")]
        for row in worst.values()
    ]
    entries = [f"{name} | {' · '.join(values)}" for name, values in zip(worst, shown)]
    third = -(-len(entries) // 3)
    columns = zip_longest(
        entries[:third], entries[third : 2 * third], entries[2 * third :], fillvalue=" | "
    )
    exact = max(
        max(cell["deviations"].values()) for cell in cells if cell["bound"]["rest"] <= 1e-10
    )
    figures = f"{len(cells)} cells, none above its bound; the worst in float64 is {exact:.1e}."
    summary = f"{figures} Measured with torch {torch.__version__}, code {code_digest()}."
    head = ["| feature | dp · ddp · spawn · fsdp " * 3 + "|", "|---|---" * 3 + "|"]
    return [*head, *(f"| {' | '.join(line)} |" for line in columns), "", summary]


def row(name: str, settings: dict[str, Any], modes: tuple[str, ...] = ()) -> str:
    """Return a line of docs/options.md; `settings` as argparse takes them."""
    switch = settings.get("action") is argparse.BooleanOptionalAction
    value = settings.get("metavar") or ", ".join(settings.get("choices", ["on or off"]))
    value += " ..." if settings.get("nargs") == "+" else ""
    default = settings["default"]
    default = ("on" if default else "off") if switch else default
    default = "task.py" if name == "--task" else "" if default in (None, []) else default
    meaning = re.sub(r" ?\(default: (%\(default\)s|task.py)\)", "", settings["help"])
    meaning += f" ({', '.join(modes)} only)" if modes else ""
    cells = [f"`{name}`", value, str(default), meaning]
    return f"| {' | '.join(cell.replace('|', ', ') for cell in cells)} |"


def options_page() -> str:
    """Return docs/options.md, from the table of options and those of --task images."""
    lines = [
        "# Options",
        "",
        "The same names and defaults in all scripts. Every switch has a negative form, such as",
        "`--no-compile`. This page is made by `python tools/readme.py`.",
    ]
    head = ["", "| option | value | default | meaning |", "|---|---|---|---|"]
    headline = ""
    for option in OPTIONS:
        if option.settings["help"] is argparse.SUPPRESS:
            continue
        if option.group != headline:
            headline = option.group
            lines += ["", f"## {headline[0].upper()}{headline[1:]}", *head]
        lines.append(row(option.name, option.settings, option.modes))
    lines += [
        "",
        "## Of `--task images`",
        "",
        "A task adds options by `add_options`, see task.py. `--task NAME --help` lists them, for `detect`",
        "and `pose` too.",
        *head,
    ]
    group = argparse.ArgumentParser().add_argument_group()
    tasks.images.add_options(group)
    for action in group._group_actions:
        switch = isinstance(action, argparse.BooleanOptionalAction)
        settings = {name: getattr(action, name) for name in ("metavar", "default", "help")}
        settings |= {"choices": action.choices} if action.choices else {}
        settings |= {"action": argparse.BooleanOptionalAction} if switch else {}
        lines.append(row(action.option_strings[0], settings))
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    changed = [line for line in changed_lines("single", "ddp") if line != "+"]
    block = "\n".join(["```diff", *changed, "```"])
    text = (DOCS / "lesson.md").read_text()
    text = re.sub(r"```diff\n.*?```", lambda _: block, text, flags=re.DOTALL)
    for old, new in DIFFS:
        count = len(changed_lines(old, new))
        text = re.sub(
            rf"(`diff train_{old}.py train_{new}.py`\s+has\s+)\d+", rf"\g<1>{count}", text
        )
    (DOCS / "lesson.md").write_text(text)
    (DOCS / "options.md").write_text(options_page())
    script = (ROOT / "examples" / "own_loop_ddp.py").read_text()
    block = f"<!-- own_loop_ddp.py -->\n```python\n{script}```\n<!-- end -->"
    text = (DOCS / "copy.md").read_text()
    text = re.sub(
        r"<!-- own_loop_ddp.py -->.*?<!-- end -->", lambda _: block, text, flags=re.DOTALL
    )
    (DOCS / "copy.md").write_text(text)
    if argv:
        table = equivalence_table(json.loads(Path(argv[0]).read_text()))
        block = "\n".join(["<!-- equivalence -->", *table, "<!-- end -->"])
        text = (DOCS / "equivalence.md").read_text()
        table = r"<!-- equivalence -->.*?<!-- end -->"
        text = re.sub(table, lambda _: block, text, flags=re.DOTALL)
        (DOCS / "equivalence.md").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
