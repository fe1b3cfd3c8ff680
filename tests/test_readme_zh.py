"""README.zh-CN.md says in Chinese what README.md says, paragraph by paragraph, cell by cell.

Code is equal in both but for its comments.
"""

import re
from itertools import zip_longest

import pytest
from harness import ROOT

ENGLISH = (ROOT / "README.md").read_text()
CHINESE = (ROOT / "README.zh-CN.md").read_text()
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\(([^)]+)\)")
NUMBER = re.compile(r"\d+(?:[.,/]\d+|e-\d+)*")
COMMENT = re.compile(r"  +# .*$", re.MULTILINE)
HAN = re.compile(r"[\u4e00-\u9fff]")


def pieces(text):
    """Return (kind, text) of each heading, block of code, cell of a table, and paragraph."""
    blocks = []

    def hide(match):
        blocks.append(match[0])
        return f"\0{len(blocks) - 1}"

    found = []
    for part in re.split(r"\n{2,}", FENCE.sub(hide, text).strip()):
        if part.startswith("\0"):
            found.append(("code", COMMENT.sub("", blocks[int(part[1:])])))
        elif part.startswith("|"):
            for line in part.splitlines():
                cells = CODE.sub(lambda m: m[0].replace("|", "\0"), line).strip("| ").split("|")
                found.append(("row", str(len(cells))))
                found += [("cell", cell.strip()) for cell in cells]
        elif part.startswith("#"):
            found.append((part.split()[0], part))
        else:
            found.append(("paragraph", part))
    return found


def facts(text):
    """Return what must be the same in both languages; the order in a sentence is not."""
    text = re.sub(r"\]\(README(\.zh-CN)?\.md\)", "](OTHER)", text)
    bare = LINK.sub("]", CODE.sub("", text))
    return {
        "code": sorted(CODE.findall(text)),
        "links": sorted(LINK.findall(text)),
        "numbers": sorted(NUMBER.findall(bare)),
        "bold": text.count("**"),
        "picture": "![" in text,
    }


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
    kinds = [kind for kind, _ in pieces(ENGLISH)]
    assert kinds.count("code") == len(FENCE.findall(ENGLISH)) >= 3
    assert kinds.count("row") >= 40 and kinds.count("##") >= 8 and kinds.count("paragraph") >= 13


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("98 %", "97 %"),
        ("1e-10", "1e-12"),
        ("`--sync-bn`", "--sync-bn"),
        ("`--save-every N`", "`--save-each N`"),
        ("2.14", "2.1"),
        ("1,797", "1,979"),
        ("(docs/hang.md)", "(docs/speed.md)"),
        ("--epochs 3", "--epochs 4"),
        ("**", ""),
        ("\n| 2 |", "\n| 4 |"),
        ("\n\n## ", "\n\n### "),
        ("\n\n```python", "\n\nAnd so on.\n\n```python"),
        ("![", "["),
    ],
)
def test_comparison_sees(old, new):
    assert old in CHINESE
    assert differences(ENGLISH, CHINESE.replace(old, new, 1))
    assert differences(ENGLISH.replace(old, new, 1), CHINESE)


def test_comparison_sees_a_row_that_is_missing():
    rows = [line for line in CHINESE.splitlines() if line.startswith("| ")]
    for row in rows:
        assert differences(ENGLISH, CHINESE.replace(f"{row}\n", "")), row


def test_first_lines_lead_to_the_other_language():
    assert "[中文](README.zh-CN.md)" in ENGLISH.splitlines()[0]
    assert "[English](README.md)" in CHINESE.splitlines()[0]


def test_chinese_page_is_chinese():
    """Every text has Chinese words, and a space between them and Latin ones, as is usual."""
    comments = [COMMENT.findall("\n".join(FENCE.findall(text))) for text in (ENGLISH, CHINESE)]
    assert len(comments[0]) == len(comments[1]) > 5 and all(map(HAN.search, comments[1]))
    for kind, text in pieces(CHINESE):
        bare = LINK.sub("]", CODE.sub("", text))
        if kind not in ("code", "row") and re.search(r"[A-Za-z]{4}", bare):
            assert HAN.search(bare) or bare in ("torchrun", "run.sh"), text
        if kind != "code":
            assert not re.search(r"[\u4e00-\u9fff][A-Za-z0-9`]|[A-Za-z0-9`][\u4e00-\u9fff]", text)
            assert not re.search(r"[\u4e00-\u9fff][,;:?!]", text), f"Latin comma in {text}"
