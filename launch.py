"""torchrun as `bash run.sh ddp N` starts it: with restarts, and ending as the ranks ended, where torchrun itself only knows 0 and 1.

python launch.py [torchrun's options] train_ddp.py [options]
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def hand_on(number: int, frame: Any) -> None:
    raise SignalException(f"got signal {number}", signal.Signals(number))  # torchrun then sends it to the ranks and waits for them


def main(argv: list[str]) -> int:
    """Run torchrun in this process and return the exit code of the ranks; say last on stderr why they ended early."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["END_FILE"] = str(Path(folder) / "end")  # rank 0 writes why it ended on purpose: see common.announce_end
        # A store of its own for every start: in the one that torchrun shares, restarted ranks find the addresses of dead ones and hang
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        signal.signal(signal.SIGUSR1, hand_on)  # SLURM's warning; torchrun itself does not know it and would die
        code, reason = 0, ""
        try:
            run.main(argv)
        except SignalException as stop:
            code, reason = 128 + stop.sigval.value, f"ended by {stop.sigval.name} before the first step"
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            died = f"killed by {failure.signal_name()}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
            message = failure.message if failure.exitcode > 0 and failure.error_file_data else died
            code, reason = 1, f"{error}\nrank {rank} failed first: {message}"
        if (end := Path(os.environ["END_FILE"])).exists():
            written, reason = end.read_text().strip().split(" ", 1)
            code = int(written)
    if reason:
        print(f"train_ddp.py: {reason}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
