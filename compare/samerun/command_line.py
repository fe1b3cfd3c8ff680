"""Are two training commands the same training run? If not: where do they part, in what, and why?

samerun "python train.py --bs 64" "torchrun --standalone --nproc-per-node 2 train_ddp.py --bs 32"

Both run for some steps, unchanged. Exit code 0: the same, 1: not the same, 2: cannot say.
"""

import argparse
import signal
import sys
import time

from samerun.compare import EVEN, compare
from samerun.running import CannotSay


def main(argv: list[str] | None = None) -> int:
    """Compare the commands of a command line; return the exit code."""
    about = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser("samerun", **about)
    option = parser.add_argument
    option("a", help="a command, in quotes; {dir} in it is a new directory for each run")
    option("b", help="the command that should be the same training run")
    option("--steps", type=int, default=0, help="of each run; default: into the second epoch")
    option("--even", default="", help=f"made even from the start: {','.join(EVEN)}")
    option("--float64", action="store_true", help="set this default dtype in both")
    option("--timeout", type=float, default=600, help="seconds that a run may take")
    option("--fresh", action="store_true", help="start each process anew, as by hand: slower")
    args = parser.parse_args(argv)
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - start:4.0f} s  {text}", file=sys.stderr, flush=True)

    options = {name: value for name, value in vars(args).items() if name not in ("a", "b")}
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends all that runs
    try:
        result = compare(args.a, args.b, say=say, **options)
    except CannotSay as error:
        print(f"CANNOT SAY: {error}")
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)
    print(*result.lines, sep="\n")
    return {True: 0, False: 1, None: 2}[result.same]
