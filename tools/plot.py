"""Draw the curves of runs into one picture: `bash run.sh plot DIR... [--output FILE.svg]`.

Each DIR is the output directory of a run; only its metrics.jsonl is read. Each line is thinner than
the one that it covers, so that you can see runs that coincide.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COUNTS = {"event", "epoch", "step", "global_step", "count"}  # where a line belongs
LOGARITHMIC = {"loss", "grad_norm"}  # where all values are positive


def read_run(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl. Raises OSError, or ValueError if it holds other things."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if not lines or not all(
        isinstance(line, dict) and COUNTS & line.keys() >= {"event", "global_step"}
        for line in lines
    ):
        raise ValueError("holds no lines of a run")
    return lines


def draw(runs: dict[str, list[dict[str, Any]]]) -> Figure:
    """Return a figure: a panel for each logged value over the global step, a line for each run."""
    from matplotlib.figure import Figure

    panels = {}  # (event, name), in the order of the first run
    for lines in runs.values():
        for line in lines:
            panels |= {(line["event"], name): None for name in line if name not in COUNTS}
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 2.9 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, (event, name) in zip(axes, panels):
        positive = True
        for i, (label, lines) in enumerate(runs.items()):
            points = [
                (line["global_step"], line[name])
                for line in lines
                if line["event"] == event and line.get(name) is not None
            ]
            positive = positive and all(value > 0 for _, value in points)
            width = 1 + 5 * (len(runs) - 1 - i) / max(1, len(runs))
            axis.plot(
                *zip(*points) if points else ((), ()),
                label=label,
                linewidth=width,
                marker="." if len(points) < 3 else "",
            )
        axis.set_title(f"{name} ({event})", fontsize=10)
        axis.set_yscale("log" if name in LOGARITHMIC and positive else "linear")
        axis.grid(alpha=0.3)
    for axis in axes[len(panels) :]:
        axis.remove()
    axes[0].legend(fontsize=8)
    figure.supxlabel("global step", fontsize=10)
    return figure


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="plot.py", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="DIR", help="output folder of a run"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="ends in .svg, .png or .pdf (runs.svg beside the first DIR)",
    )
    args = parser.parse_args(argv)
    args.output = args.output or args.folders[0].resolve().parent / "runs.svg"
    runs = {}
    for folder in args.folders:
        try:
            runs[str(folder)] = read_run(folder)
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or error
            advice = "name the output directory of a run"
            parser.error(f"{folder / 'metrics.jsonl'}: {problem}; {advice}")
    if (
        args.output.suffix not in (".svg", ".png", ".pdf")
        or not args.output.absolute().parent.is_dir()
    ):
        parser.error(
            f"--output {args.output}: must end in .svg, .png or .pdf, in a folder that exists"
        )
    draw(runs).savefig(args.output, dpi=150)
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
