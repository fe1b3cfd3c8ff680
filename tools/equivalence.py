"""Train every feature in every mode and print how far each run is from training on one device: `bash run.sh equivalence [options]`.

A cell of the table is the largest relative deviation, in float64 unless the feature is a lower precision, of: the gradients of the first
step on every rank; the parameters, buffers and averaged weights after the last; the loss and the gradient norm of every step; every
evaluation.
The program ends with exit code 1 if a cell is above its bound.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import harness
import torch

import common
import sampling

MODES = [
    ("dp", 2),
    ("dp", 3),
    ("dp", 4),
    ("ddp", 1),
    ("ddp", 2),
    ("ddp", 3),
    ("ddp", 4),
    ("spawn", 2),
    ("spawn", 3),
    ("fsdp", 1),
    ("fsdp", 2),
    ("fsdp", 3),
    ("fsdp", 4),
]
RANKS = [mode for mode in MODES if mode[0] != "dp"]
NOT_SHARDED = [mode for mode in MODES if mode[0] != "fsdp"]
SEVERAL_RANKS = [mode for mode in RANKS if mode[1] > 1 and mode in NOT_SHARDED]

# 203, 157 and 161 samples: the last ones of an epoch are dropped, and neither 4 ranks nor 3 micro-batches divide a batch of 30
BASE = "--dtype float64 --epochs 3 --batch-size 30 --log-every 1 --schedule constant --warmup-epochs 0.5 --workers 0 --timeout 60"
DIGITS = "tiny --model conv --lr 0.05"  # the task's file in tests/tasks, and what it needs to learn
ROUNDED = (
    "tiny --model conv --lr 0.05 --momentum 0"  # momentum would add up the roundings of many steps
)
DROPOUT = "tiny --model conv+dropout --lr 0.05"
BATCHNORM = "tiny --model conv+batchnorm --lr 0.05"
UNUSED = "tiny --model conv+unused --lr 0.05"
POSE = "pose --lr 0.002"
DETECTION = "detection --lr 0.1"


# ----------------------------------------------------------------------------------------------------------------------- bounds


class Bound(NamedTuple):
    """The largest deviation that passes. What loses precision must also differ by `at_least`, or it was never turned on."""

    gradients: float
    rest: float
    at_least: float = 0.0


# Sums in another order: 2**-53 a rounding, some hundreds of roundings in a gradient, and training multiplies what it is given.
EXACT = Bound(1e-12, 1e-10)
# The hook rounds each rank's gradient, its division by the world size and each of the sums: at most N + 1 = 5 roundings of 2**-9 (bf16, 8
# significant bits) or 2**-12 (fp16, 11 bits) of terms that may be twice as large as the gradient that they add up to. What follows the
# gradient has no such bound: where a rounding makes a max-pool choose another pixel, the next gradient jumps. 2**-4 and 2**-5 are about
# five times what 18 steps show, and a tenth of what the steps change.
BF16_HOOK = Bound(10 * 2**-9, 2**-4, at_least=2**-20)
FP16_HOOK = Bound(10 * 2**-12, 2**-5, at_least=2**-20)
# A layer's weight gradient is rounded to bf16 once a forward, so that N devices round N partial sums instead of one, each by 2**-9 at most;
# and a sum in another order may round an activation to its neighbour, 2**-8 away.
BF16_COMPUTE = Bound(10 * 2**-9, 2**-4)


# ------------------------------------------------------------------------------------------------------------------- references


class Job(NamedTuple):
    """One training run. With `cut` (see `pieces`), it is train_single.py on the pieces of each batch, one after the other."""

    mode: str
    n: int
    options: str
    cut: tuple[str, int] | None = None
    masks: bool = True  # a piece is computed under the random seed of its rank; False: all under that of rank 0


# A reference returns the run that a cell must equal, and one that this must differ from, or the feature would have done nothing.


def one_device(feature: Feature, mode: str, n: int) -> tuple[Job, Job | None]:
    plain = f"{feature.setting} {BASE}"
    return Job("single", 1, f"{plain} {feature.options}"), Job(
        "single", 1, plain
    ) if feature.options else None


def one_device_without(feature: Feature, mode: str, n: int) -> tuple[Job, Job | None]:
    """The option must change nothing at all, so that the reference is the run without it."""
    return Job("single", 1, f"{feature.setting} {BASE}"), None


def one_device_at_scaled_lr(feature: Feature, mode: str, n: int) -> tuple[Job, Job | None]:
    return Job("single", 1, f"{feature.setting} {BASE} --lr {0.02 * n}"), None


def same_masks(feature: Feature, mode: str, n: int) -> tuple[Job, Job | None]:
    """Ranks drop different units: one device does the same if each piece has its rank's seed, and does not if all have rank 0's."""
    job = Job(
        "single",
        1,
        f"{feature.setting} {BASE} {feature.options}",
        ("dp" if mode == "dp" else "ddp", n),
    )
    return job, job._replace(masks=False) if n > 1 else None


def same_pieces(feature: Feature, mode: str, n: int) -> tuple[Job, Job | None]:
    """BatchNorm normalises each piece by its own statistics, and keeps those of rank 0: one device does not, unless it sees the pieces."""
    job = Job(
        "single",
        1,
        f"{feature.setting} {BASE} {feature.options}",
        ("dp" if mode == "dp" else "ddp", n),
    )
    return job, job._replace(cut=None) if n > 1 else None


def synchronised(feature: Feature, mode: str, n: int) -> tuple[Job, Job | None]:
    """With --sync-bn the pieces do not matter any more, and without it they would."""
    options = f"{feature.setting} {BASE} {feature.options}"
    return Job("single", 1, options), Job("single", 1, options, ("ddp", n)) if n > 1 else None


def ddp(feature: Feature, mode: str, n: int) -> tuple[Job, Job | None]:
    job = Job("ddp", n, f"{feature.setting} {BASE} {feature.options}")
    return job, job._replace(mode="single", n=1)


# --------------------------------------------------------------------------------------------------------------------- features


class Feature(NamedTuple):
    """A row of the table: trained with `setting` + BASE + `options` in each of `modes`, and compared with its reference."""

    name: str
    options: str
    setting: str = DIGITS
    reference: Callable[[Feature, str, int], tuple[Job, Job | None]] = one_device
    modes: list[tuple[str, int]] = MODES
    bound: Bound = EXACT


FEATURES = [
    Feature("SGD with momentum and weight decay", ""),
    Feature("SGD without either", "--momentum 0 --weight-decay 0"),
    Feature("Nesterov", "--nesterov"),
    Feature("AdamW", "--optimizer adamw --lr 0.005 --weight-decay 0.05"),
    Feature("accumulation 2", "--accum-steps 2", reference=one_device_without),
    Feature("accumulation 3", "--accum-steps 3", reference=one_device_without),
    Feature("clipping", "--clip-grad-norm 0.5"),
    Feature("clipping, accumulation 3", "--clip-grad-norm 0.5 --accum-steps 3"),
    Feature("label smoothing", "--label-smoothing 0.3"),
    Feature("frozen layers", "--freeze conv1.* norm2.bias"),
    Feature(
        "frozen layers, AdamW, accumulation 2",
        "--freeze head.* --optimizer adamw --lr 0.005 --accum-steps 2",
    ),
    Feature("constant after a warm-up", "--warmup-epochs 2"),
    Feature("cosine after a warm-up", "--schedule cosine --warmup-epochs 1"),
    Feature("cosine to a tenth", "--schedule cosine --final-lr 0.1"),
    Feature("step after a warm-up", "--schedule step --step-epochs 1 2 --step-gamma 0.3"),
    Feature("cyclic after a warm-up", "--schedule cyclic --step-epochs 2 --warmup-epochs 1"),
    Feature("saw-tooth after a warm-up", "--schedule sawtooth --step-epochs 2 --warmup-epochs 1"),
    Feature(
        "learning rate scaled by N",
        "--lr 0.02 --scale-lr linear",
        reference=one_device_at_scaled_lr,
    ),
    Feature("batch of 31, a prime", "--batch-size 31"),
    Feature("batch of 5, fewer than 2 a device", "--batch-size 5 --lr 0.02"),
    Feature("classes drawn equally often", "--balanced"),
    Feature("channels last", "--channels-last", DIGITS, one_device_without, NOT_SHARDED),
    Feature("compiled", "--compile", reference=one_device_without, modes=[("ddp", 2)]),
    Feature(
        "unused parameters", "--find-unused-parameters", UNUSED, one_device_without, NOT_SHARDED
    ),
    Feature(
        "unused parameters, accumulation 3",
        "--find-unused-parameters --accum-steps 3",
        UNUSED,
        one_device_without,
        NOT_SHARDED,
    ),
    Feature(
        "unused parameters, AdamW, clipping",
        "--find-unused-parameters --optimizer adamw --lr 0.005 --clip-grad-norm 1",
        UNUSED,
        modes=NOT_SHARDED,
    ),
    Feature("heat maps at two scales (pose)", "", POSE),
    Feature("pose, AdamW, accumulation 2", "--optimizer adamw --lr 0.01 --accum-steps 2", POSE),
    Feature("three-scale detection (YOLO)", "", DETECTION),
    Feature("detection, clipping, EMA", "--clip-grad-norm 0.3 --average ema", DETECTION),
    Feature("dropout", "", DROPOUT, same_masks),
    Feature("dropout, accumulation 2", "--accum-steps 2", DROPOUT, same_masks),
    Feature("BatchNorm per replica", "", BATCHNORM, same_pieces),
    Feature("BatchNorm per replica, accumulation 2", "--accum-steps 2", BATCHNORM, same_pieces),
    Feature("BatchNorm per replica, EMA", "--average ema", BATCHNORM, same_pieces),
    Feature(
        "BatchNorm, DP equals DDP",
        "--batch-size 24",
        BATCHNORM,
        ddp,
        [m for m in MODES if m[0] != "ddp" and m[1] > 1],
    ),
    Feature("synchronised BatchNorm", "--sync-bn", BATCHNORM, synchronised, RANKS),
    Feature(
        "synchronised BatchNorm, batch of 31",
        "--sync-bn --batch-size 31",
        BATCHNORM,
        synchronised,
        RANKS,
    ),
    Feature(
        "synchronised BatchNorm, AdamW, EMA",
        "--sync-bn --optimizer adamw --lr 0.005 --average ema",
        BATCHNORM,
        synchronised,
        RANKS,
    ),
    Feature(
        "synchronised BatchNorm, accumulation 2",
        "--sync-bn --accum-steps 2",
        BATCHNORM,
        synchronised,
        RANKS,
    ),
    Feature("EMA of the weights", "--average ema"),
    Feature(
        "gradients sent in bf16",
        "--grad-compress bf16",
        ROUNDED,
        one_device_without,
        SEVERAL_RANKS,
        BF16_HOOK,
    ),
    Feature(
        "gradients sent in fp16",
        "--grad-compress fp16",
        ROUNDED,
        one_device_without,
        SEVERAL_RANKS,
        FP16_HOOK,
    ),
    Feature("computed in bf16 (AMP)", "--dtype float32 --amp bf16", ROUNDED, bound=BF16_COMPUTE),
]


# ------------------------------------------------------------------------------------------------- one-device runs in pieces


def pieces(
    kind: str, n: int, batch_size: int, accum_steps: int
) -> list[tuple[int, int, torch.Tensor]]:
    """How a mode cuts a batch: (micro-batch, rank, samples) of each forward; written anew, with nothing from the scripts."""
    cut = (
        torch.Tensor.chunk if kind == "dp" else torch.Tensor.tensor_split
    )  # as nn.DataParallel cuts, and as the sampler does
    micro_batches = torch.arange(batch_size).tensor_split(accum_steps)
    return [
        (i, r, piece)
        for i, samples in enumerate(micro_batches)
        for r, piece in enumerate(cut(samples, n))
    ]


def train_in_pieces(
    job: Job, args: Any, task: Any, model: torch.nn.Module, loader: Any, state: Any, run: Any
) -> None:
    """Stands in for train_one_epoch of train_single.py: computes what the ranks compute, one after the other."""
    model.train()
    for batch in run.batches(loader):
        for i, rank, samples in pieces(*job.cut, args.batch_size, args.accum_steps):
            inputs, targets = common.tree_map(
                lambda tensor, samples=samples: tensor[samples], batch
            )
            buffers = [buffer.clone() for buffer in model.buffers()]
            sampling.seed_rng(args.seed, state.global_step, i, rank if job.masks else 0)
            outputs = model(inputs)
            losses = task.per_sample_loss(outputs, targets)
            state.scaler.scale(losses.sum() / args.batch_size).backward()
            for buffer, before in (
                zip(model.buffers(), buffers) if rank else ()
            ):  # only rank 0's running statistics are kept
                buffer.copy_(before)
            run.meter.add(loss=losses, **task.train_metrics(outputs, targets))
        state.scaler.unscale_(state.optimizer)
        common.clip_grad_norm(state.net, args.clip_grad_norm, state.scaler.norm)
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
        state.scheduler.step()
        state.average.after_step(state.net)
        run.end_step(state.scaler.norm)


def prepare(job: Job, folder: Path, patch: Callable | None, rank: int) -> None:
    """What is done in each process of a run before the script starts."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.tempdir = str(
        folder
    )  # torch.compile keeps files in both, which must not stay
    if "--compile" in job.options:
        torch._inductor.config.compile_threads = 1
    if job.cut:
        import train_single

        train_single.train_one_epoch = functools.partial(train_in_pieces, job)
    if patch:
        patch(rank)


def train(job: Job, scratch: Path, patch: Callable | None = None) -> harness.Result:
    folder = Path(tempfile.mkdtemp(dir=scratch))
    task, *argv = job.options.split()
    argv = ["--task", str(harness.TASKS / f"{task}.py"), *argv]
    return harness.train(
        job.mode,
        job.n,
        *argv,
        folder=folder,
        patch=functools.partial(prepare, job, folder, patch),
        timeout=240,
    )


# --------------------------------------------------------------------------------------------------------------------- one cell


class Cell(NamedTuple):
    feature: str
    mode: str
    n: int
    bound: Bound
    deviations: dict[str, float]
    error: str = ""

    @property
    def value(self) -> float:
        return max(self.deviations.values(), default=float("inf"))

    @property
    def ok(self) -> bool:
        limits = {
            name: self.bound.gradients if name == "gradients" else self.bound.rest
            for name in self.deviations
        }
        within = all(
            value <= limits[name] for name, value in self.deviations.items()
        )  # false for a NaN
        return not self.error and within and self.value >= self.bound.at_least

    def __str__(self) -> str:
        return f"{self.feature}, {self.mode} {self.n}"


def relative(values: list[float], reference: list[float]) -> float:
    assert len(values) == len(reference) > 0
    return float(
        torch.tensor(
            [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(values, reference)],
            dtype=torch.float64,
        ).max()
    )


def deviations(result: harness.Result, reference: harness.Result, exact: bool) -> dict[str, float]:
    """What harness.compare measures, and the norms of the gradients, and the averaged weights."""
    found = harness.compare(result, reference)
    assert result.gradients and all(result.gradients), "no gradient was recorded"
    found["norms"] = relative(
        [line["grad_norm"] for line in result.train_lines()],
        [line["grad_norm"] for line in reference.train_lines()],
    )
    if not exact:  # of rounded weights, one picture of 57 may well be classified otherwise
        found["evaluation"] = relative(
            [line["loss"] for line in result.eval_lines()],
            [line["loss"] for line in reference.eval_lines()],
        )
    if averages := reference.checkpoint()["average"]:
        assert averages["n_averaged"] > 1
        found["average"] = harness.deviation(result.checkpoint()["average"], averages)
    return found


def differ(reference: harness.Result, contrast: harness.Result) -> bool:
    weights = harness.deviation(reference.checkpoint()["model"], contrast.checkpoint()["model"])
    loss = relative([reference.eval_lines()[-1]["loss"]], [contrast.eval_lines()[-1]["loss"]])
    return max(weights, loss) > 1e-4


def measure(
    feature: Feature,
    mode: str,
    n: int,
    runs: dict[Job, Future],
    scratch: Path,
    patch: Callable | None,
) -> Cell:
    """Train one feature in one mode and compare; a failed assertion is a failed cell."""
    cell = Cell(feature.name, mode, n, feature.bound, {})
    try:
        reference, contrast = (
            job and runs[job].result() for job in feature.reference(feature, mode, n)
        )
        assert reference.code == 0, f"the reference failed:\n{reference.err}"
        if contrast:
            assert contrast.code == 0, (
                f"what the reference is contrasted with failed:\n{contrast.err}"
            )
            assert differ(reference, contrast), "the feature changes nothing"
        result = train(Job(mode, n, f"{feature.setting} {BASE} {feature.options}"), scratch, patch)
        return cell._replace(
            deviations=deviations(result, reference, feature.bound.rest <= EXACT.rest)
        )
    except (
        Exception
    ) as error:  # a run that broke, or whose files cannot be read, must not end the others
        return cell._replace(error=f"{type(error).__name__}: {error}")


def measure_all(only: str, patch: Callable | None = None) -> list[Cell]:
    """Run all cells whose label contains `only`, two at a time; each reference runs once."""
    wanted = [
        (f, *mode)
        for f in FEATURES
        for mode in f.modes
        if only.lower() in f"{f.name}, {mode[0]} {mode[1]}".lower()
    ]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        scratch = Path(name)
        jobs = dict.fromkeys(
            job for feature, mode, n in wanted for job in feature.reference(feature, mode, n) if job
        )
        try:  # references are submitted first, so that no cell waits for one that has not been started
            runs = {job: pool.submit(train, job, scratch) for job in jobs}
            futures = [pool.submit(measure, *cell, runs, scratch, patch) for cell in wanted]
            cells = []
            for future in futures:
                cells.append(future.result())
                print(
                    f"[{len(cells)}/{len(wanted)}] {cells[-1]}: {shown(cells[-1])}",
                    file=sys.stderr,
                    flush=True,
                )
        finally:
            pool.shutdown(cancel_futures=True)  # waits for the runs under way
    return cells


# ------------------------------------------------------------------------------------------------------------------------ table


def shown(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    text = "failed" if cell.error else f"{cell.value:.1e}"
    return text if cell.ok else f"**{text}**"


def table(cells: list[Cell]) -> str:
    """A row a feature, a column a mode; a dash where a mode has no such feature (DataParallel cannot synchronise BatchNorm)."""
    found = {(cell.feature, cell.mode, cell.n): cell for cell in cells}
    features = [
        feature for feature in FEATURES if any(cell.feature == feature.name for cell in cells)
    ]
    rows = [["feature", *(f"{mode} {n}" for mode, n in MODES), "bound"]]
    rows += [
        [f.name, *(shown(found.get((f.name, *mode))) for mode in MODES), f"{f.bound.rest:.0e}"]
        for f in features
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rows.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join(
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths)) + " |"
        for row in rows
    )


def summary(cells: list[Cell]) -> str:
    exact, rest = (
        [cell for cell in cells if (cell.bound == EXACT) == kind] for kind in (True, False)
    )
    lines = [f"{len(cells)} cells, {sum(not cell.ok for cell in cells)} of them above their bound."]
    for kind, some in (("float64", exact), ("lower precision", rest)):
        if some:
            worst = max(some, key=lambda cell: cell.value)
            lines.append(f"Worst of {len(some)} in {kind}: {worst.value:.1e} ({worst}).")
    return " ".join(lines)


def main(argv: list[str] | None = None, patch: Callable | None = None) -> int:
    """Print the table and return the exit code. `patch` breaks the runs (not their references) on purpose, to see that it is noticed."""
    parser = argparse.ArgumentParser(
        prog="equivalence", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "--only",
        metavar="SUBSTRING",
        default="",
        help="run the cells that it is part of, as 'AdamW' or 'dropout, ddp 2'",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write every deviation of every cell there"
    )
    parser.add_argument(
        "--markdown",
        action="store_true",
        help="print the table alone, as it stands in docs/equivalence.md",
    )
    args = parser.parse_args(argv)
    started = time.monotonic()
    cells = measure_all(args.only, patch)
    if not cells:
        parser.error(
            f"--only {args.only}: no cell has such a name; features: {', '.join(feature.name for feature in FEATURES)}"
        )
    print(table(cells))
    print(f"\n{summary(cells)}")
    if not args.markdown:
        print(f"{time.monotonic() - started:.0f} seconds, torch {torch.__version__}")
    for cell in cells:
        if not cell.ok:
            print(f"FAILED {cell}: {cell.error or cell.deviations}", file=sys.stderr)
    if args.json:
        values = [
            cell.value if cell.deviations else None for cell in cells
        ]  # JSON knows no infinity
        entries = [
            {**cell._asdict(), "bound": cell.bound._asdict(), "value": value, "ok": cell.ok}
            for cell, value in zip(cells, values)
        ]
        args.json.write_text(json.dumps(entries, indent=1) + "\n")
    return int(not all(cell.ok for cell in cells))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = (
        "1"  # runs side by side, each with all the cores, would wait for each other
    )
    os.environ["PYTHONWARNINGS"] = (
        "ignore:resource_tracker"  # which tells when it removes the semaphores of torch.compile's processes
    )
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
