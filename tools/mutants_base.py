"""What a mutant is, and the tests that many mutants share."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent.parent / "tests"


@functools.lru_cache(50)
def squeeze(text: str, file: str) -> tuple[str, list[int]]:
    """Return the text without what a formatter or a writer may change, and the place of each character that is left.

    In Python that is white space, comments, and a comma before a closing bracket: a mutant lives on when code is only written otherwise.
    """
    if file.endswith(".sh"):
        return text, list(range(len(text)))
    hidden = {place for comment in re.finditer(r"  #.*", text) for place in range(*comment.span())}
    places = [i for i, character in enumerate(text) if i not in hidden and not character.isspace()]
    places = [
        i
        for i, after in zip(places, [*places[1:], None])
        if not (text[i] == "," and after is not None and text[after] in ")]}")
    ]
    return "".join(text[i] for i in places), places


@functools.cache
def places() -> dict[str, list[str]]:
    """The files in which a test of each name is."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.glob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE):
            found.setdefault(name, []).append(path.name)
    return found


def place(test: str) -> str:
    files = places().get(test, [])
    if len(files) != 1:
        raise ValueError(f"{test}: found in {len(files)} files of tests, not in one: {files}")
    return files[0]


class Mutant(NamedTuple):
    """`old`, which stands exactly once in `file`, becomes `new`; `tests`, those that fail soonest first, are "test_name"."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> str:
        """Return the broken text of the file."""
        text = (root / self.file).read_text()
        squeezed, places = squeeze(text, self.file)
        wanted, _ = squeeze(self.old, self.file)
        if squeezed.count(wanted) != 1:
            raise ValueError(
                f"{self.name}: what it replaces occurs {squeezed.count(wanted)} times in {self.file}, not once: {self.old!r}"
            )
        first = squeezed.index(wanted)
        start, end = places[first], places[first + len(wanted) - 1] + 1
        if self.file.endswith(".sh"):
            return text[:start] + self.new + text[end:]
        line = text[text.rfind("\n", 0, start) + 1 :]
        moved = len(line) - len(line.lstrip(" ")) - (len(self.old) - len(self.old.lstrip(" ")))
        lines = self.new.strip().splitlines()
        rest = [" " * (moved if self.old.startswith(" ") else 0) + line for line in lines[1:]]
        return text[:start] + "\n".join([*lines[:1], *rest]) + text[end:]

    def selection(self) -> list[str]:
        """The tests as pytest wants them: with the file where each of them is found."""
        return [f"tests/{place(test.partition('[')[0])}::{test}" for test in self.tests]


MUTANTS: list[Mutant] = []


def mutant(name: str, file: str, old: str, new: str, *tests: str) -> None:
    MUTANTS.append(Mutant(name, file if file.endswith(".sh") else f"{file}.py", old, new, tests))


BITWISE = "test_interrupted_and_resumed_run_is_bitwise_the_uninterrupted_one"
EQUAL = "test_mode_equals_one_device"
FEATURE = "test_feature_equals_one_device"
REFUSED = "test_bad_input_is_refused_by_name"
LR = "test_learning_rate_in_the_log_is_the_function_of_the_step"
SCALE_LR = "test_scale_lr_multiplies_by_the_world_size_only_when_asked"
SKIP = "test_scaler_skips_and_counts_non_finite_gradients_at_every_precision"
AUGMENTED = "test_a_sample_is_augmented_alike_whoever_loads_it"
DAMAGED = "test_damaged_file_is_named_and_the_run_goes_on_from_another_one"
DURABLE = "test_save_is_durable_before_it_is_visible"
PIECES = "test_pieces_of_all_ranks_partition_each_global_batch[2]"
SHARDS = "test_evaluation_shards_partition_the_data_unpadded[3]"
ORDER = "test_order_is_a_function_of_seed_and_epoch"
SYNC_BN = "test_equals_batchnorm_on_the_whole_batch"
UNIFORM = "test_keyed_uniform_is_uniform_and_depends_on_everything"
NAN = "test_nan_is_skipped_in_every_mode"
MASKS = "test_dropout_never_repeats"
DIVERGED = "test_ten_skipped_steps_in_a_row_end_the_run"
TOLD, LOST_NODE = (
    "test_ranks_that_mean_different_runs_are_told",
    "test_lost_node_ends_the_job_which_goes_on_later",
)
SEVERAL = "test_several_nodes_are_checked_before_anything_is_started"
BY_DESIGN, NOISE = (
    "test_buffers_by_design_survive_training_averages_and_saves",
    "test_pitfall_49_what_is_drawn_in_an_evaluation",
)
ORDERED = "test_files_of_an_epoch_appear_whole_durable_and_in_this_order"
WINS, WINNER = (
    "test_stronger_signal_wins_whichever_comes_first",
    "test_stronger_signal_wins_on_whichever_rank",
)
