"""Writes the parts of docs/ that come from the code: `python tools/readme.py [FILE.json]`.

docs/lesson.md, docs/options.md, and docs/equivalence.md from the file of
`bash run.sh equivalence --json FILE.json`. A test fails when they are stale.
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

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

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
    """A hash of what the programs do: comments, layout and docstrings left out."""
    digest = hashlib.sha256()
    programs = [*ROOT.glob("*.py"), *ROOT.glob("machinery/*.py")]
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


def options_page() -> str:
    """docs/options.md, from the table of options."""
    lines = [
        "# Options",
        "",
        "The same names and defaults in all scripts. Every switch has a negative form, such as",
        "`--no-compile`. This page is made by `python tools/readme.py`.",
    ]
    headline = ""
    for option in OPTIONS:
        settings = option.settings
        if settings["help"] is argparse.SUPPRESS:
            continue
        if option.group != headline:
            headline = option.group
            head = ["| option | value | default | meaning |", "|---|---|---|---|"]
            lines += ["", f"## {headline[0].upper()}{headline[1:]}", "", *head]
        switch = settings.get("action") is argparse.BooleanOptionalAction
        value = settings.get("metavar") or ", ".join(settings.get("choices", ["on or off"]))
        value += " ..." if settings.get("nargs") == "+" else ""
        default = "off" if switch else settings["default"]
        default = "task.py" if option.name == "--task" else "" if default in (None, []) else default
        meaning = re.sub(r" \(default: (%\(default\)s|task.py)\)", "", settings["help"])
        meaning += f" ({', '.join(option.modes)} only)" if option.modes else ""
        cells = [f"`{option.name}`", value, str(default), meaning]
        lines.append(f"| {' | '.join(cell.replace('|', ', ') for cell in cells)} |")
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
    if argv:
        table = equivalence_table(json.loads(Path(argv[0]).read_text()))
        block = "\n".join(["<!-- equivalence -->", *table, "<!-- end -->"])
        text = (DOCS / "equivalence.md").read_text()
        table = r"<!-- equivalence -->.*?<!-- end -->"
        text = re.sub(table, lambda _: block, text, flags=re.DOTALL)
        (DOCS / "equivalence.md").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
