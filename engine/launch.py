"""Start the ranks of a run on this machine, by torchrun or mp.spawn, and return one exit code.

`bash run.sh ddp|fsdp N [options]` runs this file: it checks the options once, and then calls
torchrun in this process, so that a rank's exit code becomes that of the run.
"""

import logging
import os
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # it was engine/: a task's `import run` would find ours

import torch.multiprocessing as mp

from engine.options import parse_args
from engine.run import SIGNALS


def share_cores(processes: int) -> None:
    """Give each process its share of the cores: with all of them in each they would fight."""
    cores = len(os.sched_getaffinity(0)) // processes
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores)))


def exit_code(rank: int, code: int, directory: str) -> int:
    """Return the code of the run after the first rank has failed, and print how to go on."""
    how = "failed first: see above; after a time-out see docs/hang.md"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else how
    often = ": often memory was short, see dmesg" if code == -signal.SIGKILL else ""
    if code not in (2, *SIGNALS.values()):
        print(f"rank {rank} {how}{often}", file=sys.stderr)
        if Path(directory, "last.pt").exists():
            print(f"to go on: the same command with --output-dir {directory} --resume auto")
    return code if code > 0 else 128 - code if -code in SIGNALS else 1


def main() -> int:
    import torch.distributed.run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    mode, n, options = sys.argv[1], sys.argv[2], sys.argv[3:]
    devices = (torch.accelerator.device_count() or 2) if n == "auto" else int(n)
    sys.argv[0] = script = f"train_{mode}.py"
    args = parse_args(mode, options, devices)  # a wrong option ends here
    share_cores(devices)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks are all on this machine
    # nohup has set SIG_IGN.
    signals = ",".join(n.name for n in SIGNALS if signal.getsignal(n) != signal.SIG_IGN)
    torchrun = ["--standalone", f"--nproc-per-node={devices}", f"--signals-to-handle={signals}"]
    options += ["--output-dir", args.output_dir]  # its default is another one in each process
    logging.disable(logging.ERROR)  # torchrun's own lines about signals and failed ranks
    try:
        torch.distributed.run.main([*torchrun, str(ROOT / script), *options])
    except SignalException as stop:  # torchrun has passed it on, and waited for the ranks
        saved = Path(args.output_dir, "last.pt").exists()
        return SIGNALS[stop.sigval] if saved else 128 + stop.sigval
    except ChildFailedError as error:  # the rank has printed why
        rank, failure = error.get_first_failure()
        return exit_code(rank, failure.exitcode, args.output_dir)
    return 0


def spawn(worker: Callable[..., None], args: Namespace) -> int:
    """Start `worker(local_rank, args, init_method)` in --nproc processes; return the exit code."""
    share_cores(args.nproc)
    os.environ["LOCAL_WORLD_SIZE"] = str(args.nproc)  # for their loaders
    with tempfile.TemporaryDirectory() as folder:  # on one machine the ranks meet at a file
        arguments = args, args.dist_url or f"file://{folder}/ranks"
        context = mp.spawn(worker, arguments, nprocs=args.nproc, join=False)
        received = [0]

        def pass_on(number: int, frame: Any) -> None:  # the ranks save, and end
            received.append(number)
            for process in context.processes:
                if process.is_alive():
                    os.kill(process.pid, number)

        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, pass_on)
        try:
            while not context.join(grace_period=10):
                pass
        except mp.ProcessRaisedException as error:
            print(error, file=sys.stderr)  # with the traceback of the rank
            return exit_code(error.error_index, 1, args.output_dir)
        except mp.ProcessExitedException as error:  # the rank has printed why
            return exit_code(error.error_index, error.exit_code, args.output_dir)
    return SIGNALS.get(received[-1], 0)  # mp.spawn's processes end with 0 after an early Ctrl-C


if __name__ == "__main__":
    sys.exit(main())
