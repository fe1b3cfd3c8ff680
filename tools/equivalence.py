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
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import harness
import torch
from made_data import make_text

import common
import sampling
import tasks.gpt

TASKS = ROOT / "tests" / "tasks", ROOT / "examples" / "recipes", ROOT / "tasks"
MODES = [("dp", n) for n in (2, 3, 4)] + [("ddp", n) for n in (1, 2, 3, 4)]
MODES += [("spawn", n) for n in (2, 3)] + [("fsdp", n) for n in (1, 2, 3, 4)]
RANKS = [mode for mode in MODES if mode[0] != "dp"]
NOT_SHARDED = [mode for mode in MODES if mode[0] != "fsdp"]
SEVERAL_RANKS = [mode for mode in RANKS if mode[1] > 1 and mode in NOT_SHARDED]

# 203 samples: the last ones of an epoch are dropped, and neither 4 ranks nor 3 micro-batches divide a batch of 30
BASE = "--dtype float64 --epochs 3 --batch-size 30 --log-every 1 --timeout 60 --workers 0"
BASE += " --schedule constant --warmup-epochs 0.5"
DIGITS = "tiny --model conv --lr 0.05"  # the name of the task, and what it needs to learn
ROUNDED = f"{DIGITS} --momentum 0"  # momentum would add up the roundings of many steps
DROPOUT = "tiny --model conv+dropout --lr 0.05"
BATCHNORM = "tiny --model conv+batchnorm --lr 0.05"
UNUSED = "tiny --model conv+unused --lr 0.05"
NESTED = "nested --lr 0.05"
# Of examples/recipes/
WORDS, PIXELS = "sentences --lr 3", "segmentation --lr 0.3"
BOXES, GRAPHS, PACKED = (f"{name} --lr 0.1" for name in ("boxes", "graphs", "packed"))
CONTRAST = "contrast --lr 0.5"
# TEXT is a directory of tokens, which measure_all makes. One matrix is the first layer and the last
GPT = "gpt --data-dir TEXT --context 16 --layers 2 --heads 2 --width 16 --samples 203 --lr 0.005"
LONGER = "--batch-size 13 --epochs 5 --schedule cosine --warmup-epochs 0"


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


# A reference returns the run that a cell must equal, and one that this must differ from, or the feature would have done nothing.


def one_device(feature: Feature, mode: str, n: int) -> tuple[Job, Job | None]:
    plain = Job("single", 1, f"{feature.setting} {BASE}")
    return single(feature), plain if feature.options else None


def single(feature: Feature, cut: tuple[str, int] | None = None) -> Job:
    return Job("single", 1, f"{feature.setting} {BASE} {feature.options}", cut)


def one_device_without(feature: Feature, mode: str, n: int) -> tuple[Job, Job | None]:
    """The option must change nothing at all, so that the reference is the run without it."""
    return Job("single", 1, f"{feature.setting} {BASE}"), None


def one_device_at_scaled_lr(feature: Feature, mode: str, n: int) -> tuple[Job, Job | None]:
    return Job("single", 1, f"{feature.setting} {BASE} --lr {0.02 * n}"), None


def same_pieces(feature: Feature, mode: str, n: int) -> tuple[Job, Job | None]:
    """Each piece has the dropout masks of its rank, and its own statistics of BatchNorm, of which rank 0's are kept.

    One device has neither, unless it sees the pieces.
    """
    job = single(feature, ("dp" if mode == "dp" else "ddp", n))
    return job, job._replace(cut=None) if n > 1 else None


def synchronised(feature: Feature, mode: str, n: int) -> tuple[Job, Job | None]:
    """With --sync-bn the pieces do not matter any more, and without it they would."""
    return single(feature), single(feature, ("ddp", n)) if n > 1 else None


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


# Rows that need a name and options alone
PLAIN = """
SGD with momentum and weight decay:
SGD without either: --momentum 0 --weight-decay 0
Nesterov: --nesterov
AdamW: --optimizer adamw --lr 0.005 --weight-decay 0.05
clipping: --clip-grad-norm 0.5
clipping, accumulation 3: --clip-grad-norm 0.5 --accum-steps 3
frozen layers: --freeze conv1.* norm2.bias
frozen layers, AdamW, accumulation 2: --freeze head.* --optimizer adamw --lr 0.005 --accum-steps 2
constant after a warm-up: --warmup-epochs 2
cosine after a warm-up: --schedule cosine --warmup-epochs 1
cosine to a tenth: --schedule cosine --final-lr 0.1
step after a warm-up: --schedule step --step-epochs 1 2 --step-gamma 0.3
cyclic after a warm-up: --schedule cyclic --step-epochs 2 --warmup-epochs 1
saw-tooth after a warm-up: --schedule sawtooth --step-epochs 2 --warmup-epochs 1
batch of 31, a prime: --batch-size 31
batch of 5, fewer than 2 a device: --batch-size 5 --lr 0.02
classes drawn equally often: --balanced
EMA of the weights: --average ema
"""
ADAMW, FIND = "--optimizer adamw --lr 0.005", "--find-unused-parameters"
REPLICA, SYNC = "BatchNorm per replica", "synchronised BatchNorm"
WITHOUT = one_device_without
ALL_BUT_DDP = [mode for mode in MODES if mode[0] != "ddp" and mode[1] > 1]

# fmt: off
FEATURES = [Feature(*line.split(":")) for line in PLAIN.split("\n") if line] + [
    Feature("accumulation 2", "--accum-steps 2", reference=WITHOUT),
    Feature("accumulation 3", "--accum-steps 3", reference=WITHOUT),
    Feature("learning rate scaled by N", "--lr 0.02 --scale-lr linear", reference=one_device_at_scaled_lr),
    Feature("channels last", "--channels-last", DIGITS, WITHOUT, NOT_SHARDED),
    Feature("compiled", "--compile", reference=WITHOUT, modes=[("ddp", 2)]),
    Feature("unused parameters", FIND, UNUSED, WITHOUT, NOT_SHARDED),
    Feature("unused parameters, accumulation 3", f"{FIND} --accum-steps 3", UNUSED, WITHOUT, NOT_SHARDED),
    Feature("unused parameters, AdamW, clipping", f"{FIND} {ADAMW} --clip-grad-norm 1", UNUSED, modes=NOT_SHARDED),
    Feature("nested inputs, targets and outputs", "", NESTED),
    Feature("nested, AdamW, accumulation 2, EMA", f"{ADAMW} --accum-steps 2 --average ema", NESTED),
    Feature("sentences, a mean over words", LONGER, WORDS),
    Feature("sentences, accumulation 3", f"{LONGER} --accum-steps 3", WORDS),
    Feature("a mean over valid pixels, accumulation 3", "--batch-size 13 --accum-steps 3", PIXELS),
    Feature("lists of boxes, accumulation 3", "--batch-size 13 --accum-steps 3", BOXES, modes=RANKS),
    Feature("graphs, accumulation 3", "--batch-size 13 --accum-steps 3", GRAPHS, modes=RANKS),
    Feature("an LSTM on packed sequences", LONGER, PACKED, modes=RANKS),
    Feature("samples compared", LONGER, CONTRAST, modes=RANKS),
    Feature("samples compared, accumulation 3", f"{LONGER} --accum-steps 3", CONTRAST, modes=RANKS),
    Feature("a language model", "", GPT),
    Feature("a language model, clipping, accumulation 3", "--clip-grad-norm 1 --accum-steps 3", GPT),
    Feature("a language model, compiled", "--compile", GPT, WITHOUT, [("ddp", 2), ("fsdp", 2)]),
    Feature("dropout", "", DROPOUT, same_pieces),
    Feature("dropout, accumulation 2", "--accum-steps 2", DROPOUT, same_pieces),
    Feature(REPLICA, "", BATCHNORM, same_pieces),
    Feature(f"{REPLICA}, accumulation 2", "--accum-steps 2", BATCHNORM, same_pieces),
    Feature(f"{REPLICA}, EMA", "--average ema", BATCHNORM, same_pieces),
    Feature("BatchNorm, DP equals DDP", "--batch-size 24", BATCHNORM, ddp, ALL_BUT_DDP),
    Feature(SYNC, "--sync-bn", BATCHNORM, synchronised, RANKS),
    Feature(f"{SYNC}, batch of 31", "--sync-bn --batch-size 31", BATCHNORM, synchronised, RANKS),
    Feature(f"{SYNC}, AdamW, EMA", f"--sync-bn {ADAMW} --average ema", BATCHNORM, synchronised, RANKS),
    Feature(f"{SYNC}, accumulation 2", "--sync-bn --accum-steps 2", BATCHNORM, synchronised, RANKS),
    Feature("gradients sent in bf16", "--grad-compress bf16", ROUNDED, WITHOUT, SEVERAL_RANKS, BF16_HOOK),
    Feature("gradients sent in fp16", "--grad-compress fp16", ROUNDED, WITHOUT, SEVERAL_RANKS, FP16_HOOK),
    Feature("computed in bf16 (AMP)", "--dtype float32 --amp bf16", ROUNDED, bound=BF16_COMPUTE),
    Feature("a language model in bf16 (AMP)", "--dtype float32 --amp bf16", GPT, modes=RANKS, bound=BF16_COMPUTE),
]
# fmt: on


# ------------------------------------------------------------------------------------------------- one-device runs in pieces


def pieces(kind: str, n: int, micro_batches: list) -> list[tuple[int, int, Any]]:
    """How a mode cuts a batch: (micro-batch, rank, samples) of each forward; written anew, with nothing from the scripts."""
    # as nn.DataParallel cuts, and as the sampler does
    cut = torch.Tensor.chunk if kind == "dp" else torch.Tensor.tensor_split
    return [
        (i, r, common.tree_map(lambda tensor, places=places: tensor[places], micro_batch))
        for i, micro_batch in enumerate(micro_batches)
        for r, places in enumerate(cut(torch.arange(len(micro_batch[1])), n))
    ]


def train_in_pieces(
    cut: tuple[str, int],
    args: Any,
    task: Any,
    model: torch.nn.Module,
    loader: Any,
    state: Any,
    run: Any,
) -> None:
    """Stands in for train_one_epoch of train_single.py: computes what the ranks compute, one after the other."""
    common.train_mode(model)
    for micro_batches in run.batches(loader):
        total = task.total_weight(micro_batches)
        for i, rank, (inputs, targets) in pieces(*cut, micro_batches):
            buffers = [buffer.clone() for buffer in model.buffers()]
            sampling.seed_rng(args.seed, state.global_step, i, rank)
            outputs = model(inputs)
            losses = task.per_sample_loss(outputs, targets)
            state.scaler.scale(losses.sum() / total).backward()
            for buffer, before in zip(model.buffers(), buffers if rank else ()):
                buffer.copy_(before)  # only rank 0's running statistics are kept
            run.meter.add(loss=task.weigh(losses, targets), **task.train_metrics(outputs, targets))
        state.scaler.unscale_(state.optimizer)
        norm = common.clip_grad_norm(state.net, args.clip_grad_norm)
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
        state.scheduler.step()
        state.average.after_step()
        run.end_step(norm)


def prepare(job: Job, folder: Path, patch: Callable | None, rank: int) -> None:
    """What is done in each process of a run before the script starts."""
    # torch.compile keeps files in both, which must not stay
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.tempdir = str(folder)
    if "--compile" in job.options:
        torch._inductor.config.compile_threads = 1
    if job.cut:
        import train_single

        train_single.train_one_epoch = functools.partial(train_in_pieces, job.cut)
    if patch:
        patch(rank)


def train(job: Job, scratch: Path, patch: Callable | None = None) -> harness.Result:
    folder = Path(tempfile.mkdtemp(dir=scratch))
    name, *argv = job.options.split()
    (task,) = (path for place in TASKS for path in place.glob(f"{name}.py"))
    argv = [str(scratch / "text") if word == "TEXT" else word for word in argv]
    argv = [job.mode, job.n, "--task", str(task), *argv]
    prepared = functools.partial(prepare, job, folder, patch)
    return harness.train(*argv, folder=folder, patch=prepared, timeout=240)


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
        within = all(  # false for a NaN
            value <= (self.bound.gradients if name == "gradients" else self.bound.rest)
            for name, value in self.deviations.items()
        )
        return not self.error and within and self.value >= self.bound.at_least

    def __str__(self) -> str:
        return f"{self.feature}, {self.mode} {self.n}"


def relative(name: str, lines: list[dict], reference: list[dict]) -> float:
    """The largest deviation of what has this name in some lines of the log."""
    pairs = [(a[name], b[name]) for a, b in zip(lines, reference, strict=True)]
    found = [abs(a - b) / max(abs(b), 1e-12) for a, b in pairs]
    return torch.tensor(found, dtype=torch.float64).max().item()  # a NaN stays one


def deviations(result: harness.Result, reference: harness.Result, exact: bool) -> dict[str, float]:
    """What harness.compare measures, and the averaged weights."""
    found = harness.compare(result, reference)
    assert result.gradients and all(result.gradients), "no gradient was recorded"
    if not exact:  # of rounded weights, one picture of 57 may well be classified otherwise
        found["evaluation"] = relative("loss", result.eval_lines(), reference.eval_lines())
    average = reference.checkpoint()["average"]
    if average["tensors"]:
        assert average["n_averaged"] > 1
        ours = result.checkpoint()["average"]
        assert ours["n_averaged"] == average["n_averaged"]
        found["average"] = harness.deviation(ours["tensors"], average["tensors"])
    return found


def differ(reference: harness.Result, contrast: harness.Result) -> bool:
    weights = harness.deviation(reference.checkpoint()["model"], contrast.checkpoint()["model"])
    loss = relative("loss", reference.eval_lines()[-1:], contrast.eval_lines()[-1:])
    return max(weights, loss) > 1e-4


def measure(
    feature: Feature, mode: str, n: int, runs: dict[Job, Future], train: Callable[[Job], Any]
) -> Cell:
    """Train one feature in one mode and compare; a failed assertion is a failed cell."""
    cell = Cell(feature.name, mode, n, feature.bound, {})
    try:
        jobs = feature.reference(feature, mode, n)
        reference, contrast = (job and runs[job].result() for job in jobs)
        assert reference.code == 0, f"the reference failed:\n{reference.err}"
        if contrast:
            assert contrast.code == 0, f"the contrast of the reference failed:\n{contrast.err}"
            assert differ(reference, contrast), "the feature changes nothing"
        result = train(Job(mode, n, f"{feature.setting} {BASE} {feature.options}"))
        found = deviations(result, reference, feature.bound.rest <= EXACT.rest)
        return cell._replace(deviations=found)
    # A run that broke, or whose files cannot be read, must not end the others
    except Exception as error:
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
        make_text(scratch / "text.txt", 30_000)
        tasks.gpt.prepare(scratch / "text.txt", scratch / "text")
        jobs = dict.fromkeys(
            job for cell in wanted for job in cell[0].reference(*cell) if job is not None
        )
        broken = functools.partial(train, scratch=scratch, patch=patch)
        try:  # references are submitted first, so that no cell waits for one that has not been started
            runs = {job: pool.submit(train, job, scratch) for job in jobs}
            futures = [pool.submit(measure, *cell, runs, broken) for cell in wanted]
            cells = []
            for future in futures:
                cells.append(future.result())
                told = f"[{len(cells)}/{len(wanted)}] {cells[-1]}: {shown(cells[-1])}"
                print(told, file=sys.stderr, flush=True)
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
    bounds = {cell.feature: cell.bound.rest for cell in cells}
    head = ["feature", *(f"{mode} {n}" for mode, n in MODES), "bound"]
    rows = [head, ["---"] * len(head)]
    for name, bound in bounds.items():
        rows.append([name, *(shown(found.get((name, *mode))) for mode in MODES), f"{bound:.0e}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(argv: list[str] | None = None, patch: Callable | None = None) -> int:
    """Print the table and return the exit code. `patch` breaks the runs (not their references) on purpose, to see that it is noticed."""
    parser = argparse.ArgumentParser(
        prog="equivalence", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("--only", metavar="TEXT", default="", help="cells with it, as 'AdamW' or 'dropout, ddp 2'")
    add("--json", metavar="FILE", type=Path, help="write every deviation of every cell there")
    args = parser.parse_args(argv)
    cells = measure_all(args.only, patch)
    if not cells:
        names = ", ".join(feature.name for feature in FEATURES)
        parser.error(f"--only {args.only}: no cell has such a name; features: {names}")
    print(table(cells))
    failed = sum(not cell.ok for cell in cells)
    print(f"\n{len(cells)} cells, {failed} of them above their bound, torch {torch.__version__}")
    for cell in cells:
        if not cell.ok:
            print(f"FAILED {cell}: {cell.error or cell.deviations}", file=sys.stderr)
    if args.json:
        entries = [{**cell._asdict(), "bound": cell.bound._asdict(), "ok": cell.ok,
                    "value": cell.value if cell.deviations else None}  # JSON knows no infinity
                   for cell in cells]  # fmt: skip
        args.json.write_text(json.dumps(entries, indent=1) + "\n")
    return int(not all(cell.ok for cell in cells))


if __name__ == "__main__":
    # Runs side by side, each with all the cores, would wait for each other
    os.environ["OMP_NUM_THREADS"] = "1"
    # which tells when it removes the semaphores of torch.compile's processes
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
