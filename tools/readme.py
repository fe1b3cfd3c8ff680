"""Writes the parts of README.md that come from the code: `python tools/readme.py [FILE.json of run.sh equivalence --json FILE.json]`.

A test fails when they are stale.
"""

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
SCRIPTS = {
    mode: (ROOT / f"train_{mode}.py").read_text() for mode in ("single", "dp", "ddp", "spawn")
}
DIFFS = [("single", "ddp"), ("single", "dp"), ("ddp", "spawn")]  # whose sizes README states


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
        [f"{row[mode]:.0e}" if mode in row else "–" for mode in ("dp", "ddp", "spawn")]
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
    head = ["| feature | dp · ddp · spawn " * 3 + "|", "|---|---" * 3 + "|"]
    return [*head, *(f"| {' | '.join(line)} |" for line in columns), "", summary]


def main(argv: list[str]) -> None:
    diff = "\n".join(
        ["```diff", *(line for line in changed_lines("single", "ddp") if line != "+"), "```"]
    )
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"```diff\n.*?```", lambda _: diff, text, flags=re.DOTALL)
    for old, new in DIFFS:
        count = len(changed_lines(old, new))
        text = re.sub(rf"(`diff train_{old}.py train_{new}.py` has )\d+", rf"\g<1>{count}", text)
    if argv:
        block = "\n".join(
            [
                "<!-- equivalence -->",
                *equivalence_table(json.loads(Path(argv[0]).read_text())),
                "<!-- end -->",
            ]
        )
        text = re.sub(
            r"<!-- equivalence -->.*?<!-- end -->", lambda _: block, text, flags=re.DOTALL
        )
    (ROOT / "README.md").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
