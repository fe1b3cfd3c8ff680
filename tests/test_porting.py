"""What docs/porting.md says of other programs: the names exist, the arithmetic is right."""

import re
import shlex

from harness import ROOT, make_sampler

import common
import machinery.cli
from machinery.usertask import OPTIONAL, REQUIRED

PAGE = (ROOT / "docs" / "porting.md").read_text()


def rows(headline):
    """Return (there, here, difference) for each row of the table under a headline."""
    section = PAGE.split(f"\n## {headline}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:4]] for line in lines[1:]]


def test_rows_name_what_is_there():
    """Options, functions of common.py and sampling.py, functions of a task, lines of the scripts."""
    files = "train_ddp train_spawn sampling common examples/other_project".split()
    code = "".join((ROOT / f"{name}.py").read_text() for name in files)
    parser = machinery.cli.build_parser("spawn")
    machinery.cli.add_options_of_task(parser, machinery.cli.task_file("images"), {})
    options = parser._option_string_actions
    checked = 0
    tables = rows("Options") + rows("Calls") + rows("Lightning") + rows("Accelerate")
    tables += rows("Hugging Face's Trainer")
    for _, here, difference in tables:
        for span in re.findall(r"`([^`]+)`", f"{here} {difference}"):
            for name in re.findall(r"(?<![\w-])--[a-z][a-z-]+", span):
                assert name in options or name in ("--nproc-per-node", "--nodes"), span
                checked += 1
            for name in re.findall(r"common\.(\w+)", span):
                assert hasattr(common, name), span
                checked += 1
            for name in re.findall(r"^(\w+)$", span):
                known = name in (*REQUIRED, *OPTIONAL) or re.search(rf"\b{name}\b", code)
                others = "sync_dist max_steps set_seed StochasticWeightAveraging torchrun fp16 add_options __getitem__"
                assert known or name in others.split(), span
                checked += 1
    assert checked >= 60


def test_options_of_the_rows_are_accepted():
    for _, here, _ in rows("Lightning"):
        for span in re.findall(r"`(--[^`]+)`", here):
            alone = span in ("--optimizer", "--lr", "--schedule")
            if not alone and "FILE" not in span and "--resume auto" not in span:
                machinery.cli.build_parser("spawn").parse_args(shlex.split(span))


def test_batch_of_lightning_as_the_page_translates_it():
    """16 samples per device, 4 devices, 2 micro-batches."""
    (command,) = re.findall(r"```\nbash run\.sh (.*)\n```", PAGE)
    mode, n, *argv = shlex.split(command)
    per_device, devices, pieces = map(int, re.search(r"(\d+) × (\d+) × (\d+)\.", PAGE).groups())
    args = machinery.cli.build_parser(mode).parse_args(argv)
    assert (args.batch_size, args.accum_steps, int(n)) == (128, pieces, devices)
    for rank in range(devices):
        sampler = make_sampler(256, args.batch_size, rank, devices, args.accum_steps)
        _, parts = next(iter(sampler))
        assert [len(part) for part in parts] == [per_device] * pieces
