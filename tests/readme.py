"""Writes the parts of README.md that come from the code: `python tests/readme.py`. A test fails when they are stale."""

import re
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from test_scripts import BUDGETS, README, ROOT, changed_lines  # noqa: E402 (needs the path above)


def main() -> None:
    text = re.sub(r"```diff\n.*?```", lambda _: "\n".join(["```diff", *changed_lines("single", "ddp"), "```"]), README, flags=re.DOTALL)
    for old, new in BUDGETS:
        count = len(changed_lines(old, new))
        text = re.sub(rf"(`diff train_{old}.py train_{new}.py` has )\d+", rf"\g<1>{count}", text)
    (ROOT / "README.md").write_text(text)


if __name__ == "__main__":
    main()
