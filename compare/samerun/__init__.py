"""Are two training commands the same training run? `samerun A B` on the command line; in a test:

from samerun import same_run

def test_ddp():
    same_run("python train.py --bs 64", "torchrun --nproc-per-node 2 train.py --bs 32")
"""

from samerun.compare import Result, compare
from samerun.running import CannotSay

__all__ = ["CannotSay", "Result", "compare", "same_run"]


def same_run(command_a: str, command_b: str, **options) -> Result:
    """Raise AssertionError with the report if two commands are not the same training run.

    Options are those of the command: steps=20, even="order,dropout", float64, timeout, fresh.
    CannotSay is raised where a command cannot run, or too little of it can be seen.
    """
    result = compare(command_a, command_b, **{"say": lambda text: None, **options})
    if result.same is None:
        raise CannotSay("\n".join(result.lines))
    assert result.same, "\n".join(result.lines)
    return result
