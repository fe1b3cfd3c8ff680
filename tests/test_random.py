"""Rows that are drawn: any task, options, modes and events keep the promise of RESUMED in test_runs.py.

`RANDOM_ROWS=300 bash run.sh test tests/test_random.py` tries so many. A row that fails is printed, and
may become a row of RESUMED.
"""

import os
import random

import pytest
from test_runs import check_resumed, rows

# option | share of the trials | values; a flag has none
OPTIONS = """
--batch-size       | 1.0  | 12 13 17 30
--epochs           | 1.0  | 2 3
--seed             | 0.5  | 1 12345 4611686018427387907
--accum-steps      | 0.35 | 2 3
--eval-batch-size  | 0.2  | 1 3 100
--optimizer        | 0.4  | adamw
--momentum         | 0.3  | 0.5 0.8
--weight-decay     | 0.3  | 0 0.01 0.1
--schedule         | 0.75 | constant cosine step cyclic sawtooth
--step-epochs      | 1.0  | 1 2
--step-gamma       | 0.2  | 0 0.3 0.9
--warmup-epochs    | 0.7  | 0 0.5 1 1.3
--final-lr         | 0.3  | 0.1 1
--clip-grad-norm   | 0.25 | 0.1 1 100
--average          | 0.45 | ema
--ema-decay        | 0.2  | 0 0.5 0.9
--channels-last    | 0.1  |
--freeze           | 0.1  | conv1.* head.bias
--sync-bn          | 0.5  |
--best             | 0.15 | loss
--save-every       | 0.5  | 1 2 5
--keep-every       | 0.2  | 1 2
--log-every        | 1.0  | 1 2 4 50
--workers          | 0.06 | 1 2
--deterministic    | 0.1  |
"""
# task | modes that can train it | options that it does not take; those of the second part change with the cut of a batch
SAME_IN_EVERY_MODE = """
digits             | dp ddp spawn fsdp | --sync-bn
balanced           | dp ddp spawn fsdp | --sync-bn
nested             | dp ddp spawn fsdp | --sync-bn --freeze
sentences          | dp ddp spawn fsdp | --sync-bn --freeze --channels-last
boxes              | ddp spawn fsdp    | --sync-bn --freeze
contrast           | ddp spawn fsdp    | --sync-bn --freeze --channels-last
noise              | dp ddp spawn fsdp | --sync-bn --freeze
batchnorm --sync-bn | ddp spawn fsdp   | --freeze
"""
SAME_IN_ITS_OWN_MODE = """
dropout            | dp ddp spawn fsdp | --sync-bn
batchnorm          | dp ddp spawn fsdp | --sync-bn
everything         | dp ddp spawn fsdp | --sync-bn --freeze
state --model counts | ddp spawn fsdp  | --sync-bn --freeze
"""
EVENTS = ["stop", "int", "hup", "usr1", "kill", "kill", "full", "raise", "evalstop", "evalkill"]


def draw(seed: int) -> tuple[str, str]:
    """Return options and chain of a row; the same seed gives the same row."""
    rng = random.Random(seed)
    moves = rng.random() < 0.6
    task, modes, never = rng.choice(rows(SAME_IN_EVERY_MODE if moves else SAME_IN_ITS_OWN_MODE))
    drawn = {}
    for name, share, values in rows(OPTIONS):
        value = rng.choice(values.split() or [""])
        if rng.random() < float(share) and name not in never.split():
            drawn[name] = value
    schedule = drawn.get("--schedule", "constant")
    useless = {"--final-lr"} if schedule != "cosine" else set()
    if schedule not in ("step", "cyclic", "sawtooth"):
        useless |= {"--step-epochs", "--step-gamma"}
    useless |= {"--accum-steps"} if task == "contrast" else set()  # compares those of a micro-batch
    words = [task, *(f"{n} {v}" for n, v in drawn.items() if n not in useless)]
    words += ["--lr 0.005"] if "--optimizer" in drawn else []

    def place() -> str:
        mode = rng.choice(["single", *modes.split()])
        mode = "ddp" if mode == "fsdp" and "--channels-last" in drawn else mode
        return f"{mode} {1 if mode == 'single' else rng.randint(1, 3)}"

    first, chain = place(), []
    # A run goes on with its folders, which no other mode reads.
    own = " --shards" if first.startswith("fsdp") and not moves and rng.random() < 0.5 else ""
    for _ in range(rng.randint(1, 2)):
        chain.append(f"{first}{own} {rng.choice(EVENTS)} {rng.randint(1, 12)}")
        first = place() if moves else first
    return " ".join(words), "; ".join([*chain, f"{first}{own}"])


@pytest.mark.parametrize("seed", range(int(os.environ.get("RANDOM_ROWS", "1"))))
def test_drawn_row(seed, tmp_path):
    options, chain = draw(seed)
    print(f"f | {options} | {chain}")
    check_resumed(options, chain, tmp_path, may_end_before=True)
