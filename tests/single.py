"""train_single.py as another program calls it: `main([...])` in this process, which is quick."""

import contextlib
import io
from pathlib import Path

from harness import TASKS, Result

import train_single

# Six steps an epoch on 203 digits, 57 of them held out
SMALL = ["--task", str(TASKS / "small.py"), *"--epochs 2 --batch-size 30 --device cpu".split()]
HEAD = "import torch\nfrom torch import nn\nfrom small import *\n"


def single(folder, *argv):
    """Return what a run has left in `folder`/run, unless --output-dir names another folder."""
    words = [str(word) for word in argv]
    if "--output-dir" not in words:
        words += ["--output-dir", str(folder / "run")]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = train_single.main(words)
        except SystemExit as end:
            code = end.code
    directory = Path(words[words.index("--output-dir") + 1])
    return Result(code, out.getvalue(), err.getvalue(), directory)


def task_file(folder, text, name="mine"):
    """Write a task that is tests/tasks/small.py but for `text`; return its options."""
    path = folder / f"{name}.py"
    path.write_text(HEAD + text)
    return ["--task", str(path), *SMALL[2:]]
