"""README.zh-CN.md says in Chinese what README.md says, paragraph by paragraph, cell by cell.

Code is equal in both but for its comments.
"""

import re
from itertools import zip_longest

from harness import ROOT

import machinery.cli

ENGLISH = (ROOT / "README.md").read_text()
CHINESE = (ROOT / "README.zh-CN.md").read_text()
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\(([^)]+)\)")
LINKED = re.compile(r"\]\((#|[^)]+)")  # a heading has another name in the other language
NUMBER = re.compile(r"\d+(?:[.,/]\d+|e-\d+)*")
COMMENT = re.compile(r"  +# .*$", re.MULTILINE)


def pieces(text):
    """Return (kind, text) of each heading, block of code, cell of a table, and paragraph."""
    blocks = FENCE.findall(text)
    found = []
    for part in re.split(r"\n{2,}", FENCE.sub("\0", text).strip()):
        if part.startswith("\0"):
            found.append(("code", COMMENT.sub("", blocks.pop(0))))
        elif part.startswith("|"):
            for line in part.splitlines():
                cells = CODE.sub(lambda m: m[0].replace("|", "\0"), line).strip("| ").split("|")
                found.append(("row", str(len(cells))))
                found += [("cell", cell.strip()) for cell in cells]
        else:
            found.append((part.split()[0] if part.startswith("#") else "paragraph", part))
    return found


def facts(text):
    """Return what must be the same in both languages; the order in a sentence is not."""
    text = re.sub(r"\]\(README(\.zh-CN)?\.md\)", "](OTHER)", text)
    bare = LINK.sub("]", CODE.sub("", text))
    of = {
        "code": CODE.findall(text),
        "links": LINKED.findall(text),
        "numbers": NUMBER.findall(bare),
    }
    return {k: sorted(v) for k, v in of.items()}, text.count("**"), "![" in text


def differences(english, chinese):
    """Return what one text says and the other does not."""
    found = []
    for ours, theirs in zip_longest(pieces(english), pieces(chinese), fillvalue=("", "")):
        if ours[0] != theirs[0] or (ours[0] in ("code", "row") and ours != theirs):
            return [*found, f"{ours} | {theirs}"]  # from here on nothing fits
        if facts(ours[1]) != facts(theirs[1]):
            found.append(f"{facts(ours[1])} | {facts(theirs[1])}")
    return found


def test_both_languages_state_the_same_facts():
    assert not differences(ENGLISH, CHINESE)


def test_comparison_sees_a_figure_a_name_and_a_row():
    row = next(line for line in CHINESE.splitlines() if line.startswith("| "))
    for old, new in (("97%", "98%"), ("`--sync-bn`", "`--bn`"), (f"{row}\n", "")):
        assert old in CHINESE and differences(ENGLISH, CHINESE.replace(old, new, 1))


def test_commands_in_place_of_old_habits_are_accepted():
    (section,) = re.findall(r"^## Old habits\n(.*?)^## ", ENGLISH, re.DOTALL | re.MULTILINE)
    now = " ".join(line.split(" | ")[1] for line in section.splitlines() if line.startswith("| "))
    assert {"ddp", "dp", "spawn"} == set(re.findall(r"bash run\.sh (\w+) 8", now))
    accepted = re.findall(r"`(--[^`]+)`", now)
    assert len(accepted) >= 5
    for options in accepted:
        alone = options in ("--local_rank", "--batch-size")
        machinery.cli.build_parser("ddp").parse_args(options.split() + ["8"] * alone)
