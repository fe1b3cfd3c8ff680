"""Train on one device, and print which lines of the project a reader has to read for it, as JSON.

python tests/traced_run.py OUTPUT_DIR [options of train_single.py]

A line is a statement that ran, wherever it ends; the body of a class or a file does not count.
`step` is what runs within train_one_epoch: steps, header and log. `run` is what runs within main.
"""

import ast
import inspect
import json
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.argv[0] = "train_single.py"

import train_single  # noqa: E402

ran: dict[str, set[tuple[str, int]]] = {"step": set(), "run": set()}  # (file, line)
called: dict[str, set[CodeType]] = {"step": set(), "run": set()}
within = {"run"}


def watch(frame: FrameType, event: str, argument: Any) -> Any:
    """Note the line; a call of sys.settrace's function returns what notes its lines."""
    code = frame.f_code
    ours = code.co_filename.startswith(str(ROOT)) and "site-packages" not in code.co_filename
    if not ours or not code.co_flags & inspect.CO_OPTIMIZED:
        return None  # torch's own, maybe in .venv; or the body of a class or a file
    if code.co_name == "train_one_epoch":
        within.add("step") if event != "return" else within.discard("step")
    for part in within:
        if event == "line":
            ran[part].add((code.co_filename, frame.f_lineno))
        elif event == "call" and not code.co_name.startswith("<"):  # as <lambda>
            called[part].add(code)
    return watch


def statement_of_line(file: str) -> dict[int, int]:
    """Return the first line of the statement that each line belongs to."""
    found: dict[int, int] = {}
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno
            for line in range(node.lineno, last + 1):
                found[line] = max(found.get(line, 0), node.lineno)
    return found


sys.settrace(watch)
train_single.main(["--output-dir", *sys.argv[1:]])
sys.settrace(None)
first = {file: statement_of_line(file) for file in {file for file, _ in ran["run"]}}
for part in ran:
    statements = {(file, first[file][line]) for file, line in ran[part]}
    names = {(code.co_filename, code.co_firstlineno) for code in called[part]}
    print(json.dumps({"part": part, "lines": len(statements), "functions": len(names)}))
