"""What a mutant is, and the names of tests that many mutants share."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple


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


class Mutant(NamedTuple):
    """`old`, which stands exactly once in `file`, becomes `new`; `tests`, those that fail soonest first, are "checkpoint::test_name"."""

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
        return [
            f"tests/test_{file}.py{separator}{name}"
            for file, separator, name in (test.partition("::") for test in self.tests)
        ]


MUTANTS: list[Mutant] = []


def mutant(name: str, file: str, old: str, new: str, *tests: str) -> None:
    MUTANTS.append(Mutant(name, file if file.endswith(".sh") else f"{file}.py", old, new, tests))


BITWISE = "checkpoint::test_interrupted_and_resumed_run_is_bitwise_the_uninterrupted_one"
EQUAL = "equivalence::test_mode_equals_one_device"
FEATURE = "equivalence::test_feature_equals_one_device"
REFUSED = "cli::test_bad_input_is_refused_by_name"
LR = "training_math::test_learning_rate_in_the_log_is_the_function_of_the_step"
SCALE_LR = "training_math::test_scale_lr_multiplies_by_the_world_size_only_when_asked"
SKIP = "training_math::test_scaler_skips_and_counts_non_finite_gradients_at_every_precision"
AUGMENTED = "sampling::test_a_sample_is_augmented_alike_whoever_loads_it"
DAMAGED = "checkpoint::test_damaged_file_is_named_and_the_run_goes_on_from_another_one"
DURABLE = "checkpoint::test_save_is_durable_before_it_is_visible"
PIECES = "sampling::test_pieces_of_all_ranks_partition_each_global_batch[2]"
SHARDS = "sampling::test_evaluation_shards_partition_the_data_unpadded[3]"
ORDER = "sampling::test_order_is_a_function_of_seed_and_epoch"
SYNC_BN = "sync_batchnorm::test_equals_batchnorm_on_the_whole_batch"
UNIFORM = "sampling::test_keyed_uniform_is_uniform_and_depends_on_everything"
NAN = "survivors::test_nan_is_skipped_in_every_mode"
MASKS = "survivors::test_dropout_never_repeats"
DIVERGED = "survivors::test_ten_skipped_steps_in_a_row_end_the_run"
ONE, MANY = "pitfalls_01_14::test_pitfall_", "pitfalls_15_28::test_pitfall_"
LAST = "pitfalls_29_42::test_pitfall_"
ENDINGS = "endings::test_"
