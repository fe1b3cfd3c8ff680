"""Measure what slow links cost, and what helps, between two hosts on this machine, as root: `python tools/links.py`.

Each row is a run of train_spawn.py over a cable of that rate, see nodes.py: one process a host, ResNet-18 on 32x32 images. The learning
rate is 0, so that the gradient of the last step can be compared with that of a run over an open cable that sends all of it.
"""

import itertools
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import bench
from nodes import job, missing, spawn, two_hosts

BYTES = {"1gbit": 125e6, "100mbit": 12.5e6}  # a second
RATES = {"open": "", "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
WAYS = {
    "as they are": (32, []),
    **{
        f"`--grad-compress {how}`": (32, ["--grad-compress", how])
        for how in ("bf16", "fp16", "powersgd")
    },
}
WAYS["`--batch-size 128 --accum-steps 4`"] = 128, ["--accum-steps", "4"]
OPTIONS = [
    "--task",
    str(ROOT / "tests" / "tasks" / "link.py"),
    "--device",
    "cpu",
    "--epochs",
    "1",
    "--lr",
    "0",
    "--momentum",
    "0",
]
OPTIONS += ["--schedule", "constant", "--warmup-epochs", "0", "--weight-decay", "0"]


def run(hosts: tuple, batch: int, options: list[str]) -> tuple[float, float, torch.Tensor]:
    """Return seconds and bytes sent a step, and the gradient of the last step, of a run on one or two hosts."""
    commands = (
        [spawn(hosts[0].address, rank) for rank in (0, 1)]
        if len(hosts) == 2
        else [["bash", str(ROOT / "run.sh"), "spawn", "1"]]
    )
    with tempfile.TemporaryDirectory() as name:
        link = Path(name, "link")
        with job(
            hosts,
            Path(name),
            commands,
            *OPTIONS,
            "--batch-size",
            str(batch),
            *options,
            LINK=str(link),
        ) as nodes:
            for node in nodes:
                if node.end(timeout=600):
                    sys.exit("".join(each.errors() for each in nodes))
        steps = json.loads(link.read_text())[-11:]  # after what it takes to get going
        gradient = torch.cat([grad.flatten() for grad in torch.load(link.with_suffix(".pt"))])
    seconds, sent = zip(*((b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(steps)))
    return median(seconds), median(sent), gradient


def main() -> None:
    if reason := missing():
        sys.exit(reason)
    head = "link | gradients sent | ms a step | predicted | images/s | MB sent a step | deviation of a step's gradient"
    print(f"| {head} |", "|---" * 7 + "|", sep="\n")
    alone: dict[str, float] = {}
    exact: dict[int, torch.Tensor] = {}
    for rate, limit in RATES.items():
        for way, (batch, options) in WAYS.items():
            with two_hosts(rate=limit) as hosts:
                if way not in alone:  # the half of the batch, with nobody to send anything to
                    alone[way], _, _ = run(hosts[:1], batch // 2, options)
                seconds, sent, gradient = run(hosts, batch, options)
            reference = exact.setdefault(batch, gradient)
            deviation = ((gradient - reference).norm() / reference.norm()).item()
            cells = [
                rate,
                way,
                f"{seconds * 1e3:.0f}",
                "–",
                f"{batch / seconds:.0f}",
                f"{sent / 1e6:.1f}",
                f"{deviation:.0e}",
            ]
            if limit:
                cells[3] = (
                    f"{bench.predict(alone[way], sent, 2, BYTES[limit], 0)['ring'] * 1e3:.0f}"
                )
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
