"""What the processes of a command saw, rank by rank and step by step; and arithmetic with it."""

import collections
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

Tensors = dict[str, np.ndarray]  # a small tensor's numbers by its name, of a large one signed sums
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
EPS |= {"complex128": 2.0**-52, "complex64": 2.0**-23}
MERGED = ("weights", "gradients", "stepped", "types", "group_of", "unseen")  # of several optimizers


class Sample(NamedTuple):
    size: int  # of its data set
    epoch: int  # of its loader
    index: int | None  # in the data set; None: no loader told it
    look: int  # a hash of what went into the network

    @property
    def key(self) -> object:
        """What a loader calls it, or the hash of its contents."""
        return self.look if self.index is None else (self.size, self.index)


@dataclass
class Run:
    """One run of a command: `ranks` holds for each process the records of its steps."""

    letter: str  # A or B
    ranks: list[list[dict]]
    network: dict  # the largest one
    evaluated: list[list[Sample]]  # of each rank: its first evaluation after a step
    averages: dict[tuple, Tensors]  # of rank 0: by step and number of the copy
    ended: bool  # by the program itself, before the last step to be seen

    def __post_init__(self):
        self.world = len(self.ranks)
        self.made = self.steps = min((len(rank) for rank in self.ranks), default=0)
        finite = [np.isfinite(norm(self.whole(k, "gradients"))) for k in range(self.made)]
        self.nan = None if all(finite) else finite.index(False)
        if self.nan is not None:
            self.steps = self.nan  # what comes after a NaN cannot be compared

    def first(self, k: int) -> dict:
        """Return rank 0's record of a step."""
        return self.ranks[0][k]

    def whole(self, k: int, what: str) -> Tensors:
        """Return the tensors of rank 0; of shards the sum over ranks."""
        every = [rank[k][what] for rank in self.ranks]
        shards = self.first(k)["sharded"] if what != "buffers" else ()
        sums = {n: sum(t[n] for t in every if n in t) for n in shards if n in every[0]}
        return every[0] | sums

    def held(self) -> list[str]:
        """Return the names of all tensors of all optimizers."""
        return list(dict.fromkeys(n for r in self.ranks for k in r for n in k["held"]))

    def unseen(self) -> dict[str, str]:
        """Return why tensors of an optimizer were not seen, by name."""
        found = {n: why for r in self.ranks for k in r for n, why in k["unseen"].items()}
        seen = {n for k in range(self.steps) for n in self.first(k)["weights"]}
        never = {n: "no optimizer has stepped it" for n in self.held() if n not in seen}
        return never | found

    def spread(
        self, what: str, allowed: float = 0, start: int = 0
    ) -> tuple[int, float, list] | None:
        """Return the first step in which tensors of a rank are further than allowed from rank 0's.

        With it: how far, and which. A tensor may also be off by some roundings of its own type.
        """
        for k in range(start, self.steps):
            far = {}
            for other in self.ranks[1:]:
                for name, gap in gaps(self.first(k)[what], other[k][what]).items():
                    if gap > max(allowed, 20 * self.eps(name)):
                        far[name] = max(gap, far.get(name, 0.0))
            if far := {n: gap for n, gap in far.items() if n not in self.first(k)["sharded"]}:
                return k, max(far.values()), list(far)
        return None

    def averages_inside(self) -> bool:
        """Say whether the ranks step with other gradients, but then hold the same, to the last bit.

        Then the optimizer averages gradients, or weights are averaged or sent.
        """
        apart = self.spread("stepped", 1e-5)
        if not apart or apart[0] + 1 >= self.steps:
            return False
        for k in range(apart[0], self.steps):
            first, *others = (rank[k] for rank in self.ranks)
            for name in first["weights"].keys() - first["sharded"]:
                values = [other["weights"].get(name) for other in others]
                if any(
                    v is not None and not np.array_equal(v, first["weights"][name]) for v in values
                ):
                    return False
        return True

    def eps(self, name: str) -> float:
        """Return the relative size of a rounding in a tensor; of others the largest one."""
        if not hasattr(self, "rounding"):
            types = {n: t for rank in self.ranks for step in rank for n, t in step["types"].items()}
            self.rounding = {name: EPS.get(kind, 2.0**-7) for name, kind in types.items()}
        return self.rounding.get(name, max(self.rounding.values(), default=2.0**-23))

    def calls(self, k: int) -> list[list[dict]]:
        """Return for each rank the calls of the network that first got samples, if it trains."""
        every = [rank[k]["calls"] for rank in self.ranks]
        every = [[c for c in calls if c["training"]] or calls for calls in every]
        every = [[c for c in calls if c["samples"]] or calls for calls in every]
        return [[c for c in calls if c["network"] == calls[0]["network"]] for calls in every]

    def samples(self, k: int) -> list[list[Sample]]:
        """Return for each rank what it trained on."""
        return [[s for call in calls for s in call["samples"]] for calls in self.calls(k)]

    def split(self, k: int) -> bool:
        """Say whether all inputs of a step could be split into samples."""
        return all(not rank[k]["unsplit"] for rank in self.ranks) and all(self.samples(k))

    def per_rank(self, k: int) -> str:
        """Return how many samples each rank took, in words."""
        return " + ".join(str(len(rank)) for rank in self.samples(k))

    def outputs(self, k: int) -> list[tuple]:
        """Return hash, number of outputs, and their sum and norm, of each sample."""
        found = []
        for call in (c for rank in self.calls(k) for c in rank if c["outputs"] is not None):
            size, rows = call["outputs"]
            found += [(s.look, size, *row) for s, row in zip(call["samples"], rows)]
        return found

    def pieces(self, k: int) -> list[tuple[float, Tensors]]:
        """Return loss and local gradient of each backward on each rank."""
        return [piece for rank in self.ranks for piece in rank[k]["pieces"]]

    def orders(self) -> list[list[int]]:
        """Return the indices that rank 0 took, epoch by epoch: of the epochs that trained."""
        found = collections.defaultdict(list)
        for k in range(self.steps):
            for s in self.samples(k)[0]:
                if s.index is not None:
                    found[s.size, s.epoch].append(s.index)
        return list(found.values())


def read(letter: str, folder: Path, ended: bool = False) -> Run:
    """Return the Run that the processes have written to a folder."""
    processes, networks, lanes = [], [], {}
    for path in folder.glob("*.pkl"):
        seen = collections.defaultdict(list)
        for record in records_of(path):
            seen[record["kind"]].append(record)
        networks += seen["network"]
        processes += [seen] if seen["step"] else []
    for process in sorted(processes, key=lambda p: p["step"][0]["time"]):
        start, lane = process["step"][0], process["step"][0]["rank"]
        while lane in lanes and lanes[lane]["step"][-1]["time"] > start["time"]:
            lane += 1  # both train at one time, without knowing of each other
        earlier = lanes.setdefault(lane, collections.defaultdict(list))
        for kind, records in process.items():  # one after the other: it resumes
            earlier[kind] += records
    kept = [lanes[lane] for lane in sorted(lanes)]
    evaluated = []
    for rank in kept:
        after = [
            (e["step"], [Sample(*s) for s in e["samples"]]) for e in rank["evaluated"] if e["step"]
        ]
        evaluated.append([s for step, samples in after if step == after[0][0] for s in samples])
    network = {"name": "no network that was called", "numbers": 0, "norms": 0, "drops": []}
    network = max(reversed(networks), key=lambda n: n["numbers"], default=network)
    averages = kept[0]["average"] if kept else []
    averages = {(a["step"], a["number"]): a["weights"] for a in averages}
    steps = [merged(rank["step"]) for rank in kept]
    return Run(letter, steps, network, evaluated, averages, ended)


def records_of(path: Path) -> Iterator[dict]:
    """Yield what a process wrote, up to where it was killed."""
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return


def merged(records: list[dict]) -> list[dict]:
    """Return the steps, each with the tensors of all optimizers that stepped in it."""
    steps = []
    for step in map(unpack, records):
        if not steps or steps[-1]["number"] != step["number"]:
            steps.append(step)
            continue
        whole = steps[-1]
        step["group_of"] = {n: i + len(whole["groups"]) for n, i in step["group_of"].items()}
        whole["groups"] += step["groups"]
        whole["sharded"] |= step["sharded"]
        for name in MERGED:
            whole[name] |= step[name]
    return steps


def unpack(step: dict) -> dict:
    """Give a record of a step Samples, and gradients as they were before clipping."""
    step["stepped"], step["gradients"] = step["gradients"], dict(step["gradients"])
    for size, limit, names in step["clips"]:
        for name in step["gradients"].keys() & set(names):
            step["gradients"][name] = step["gradients"][name] / min(1, limit / (size + 1e-6))
    for call in step["calls"]:
        call["samples"] = [Sample(*s) for s in call["samples"]]
    return step


def rename(a: Run, b: Run) -> None:
    """Give the tensors of B's optimizers A's names: of one size, those with the nearest values."""
    mine, theirs = ({}, {})
    for run, first in ((a, mine), (b, theirs)):
        held = set(run.held())
        for k in reversed(range(run.made)):
            first |= {n: w for n, w in run.whole(k, "weights").items() if n in held}
    free = {n: w for n, w in mine.items() if n not in theirs or len(theirs[n]) != len(w)}
    new = {}
    for name, values in theirs.items():
        if name not in mine or name in free:
            apart = {n: norm({n: w - values}) for n, w in free.items() if len(w) == len(values)}
            if apart:
                new[name] = min(apart, key=apart.get)
                free.pop(new[name])
    if not new:
        return
    new |= {name: f"B's {name}" for name in set(new.values()) - new.keys()}

    def renamed(values: dict) -> dict:
        return {new.get(name, name): value for name, value in values.items()}

    for step in (step for rank in b.ranks for step in rank):
        step |= {what: renamed(step[what]) for what in MERGED}
        step["sharded"] = {new.get(name, name) for name in step["sharded"]}
        step["held"] = [new.get(name, name) for name in step["held"]]
        step["pieces"] = [(loss, renamed(local)) for loss, local in step["pieces"]]
    vars(b).pop("rounding", None)


# ---- arithmetic ----------------------------------------------------------------------------------


def norm(tensors: Tensors) -> float:
    return float(np.sqrt(sum(float(v @ v) for v in tensors.values())))


def gaps(a: Tensors, b: Tensors) -> dict[str, float]:
    """Return the relative difference of each tensor that both have."""
    floor, found = 1e-4 * norm(a), {}
    for name in a.keys() & b.keys():
        if len(a[name]) != len(b[name]):
            found[name] = np.inf
            continue
        size = max(np.linalg.norm(a[name]), np.linalg.norm(b[name]), floor)
        gap = float(np.linalg.norm(a[name] - b[name]) / size) if size else 0.0
        found[name] = gap if np.isfinite(gap) else np.inf
    return found


def shares(target: Tensors, pieces: list[Tensors]) -> tuple[np.ndarray, float]:
    """Return the factors with which the pieces make up the target, and which part is left."""
    names = sorted(set(target).intersection(*pieces))
    names = [n for n in names if {len(target[n])} == {len(p[n]) for p in pieces}]
    if not names or not 0 < len(pieces) < 33:
        return np.zeros(len(pieces)), np.inf
    columns = np.stack([np.concatenate([p[n] for n in names]) for p in pieces], 1)
    goal = np.concatenate([target[n] for n in names])
    if not np.isfinite(columns).all():
        return np.zeros(len(pieces)), np.inf
    found = np.linalg.lstsq(columns, goal, rcond=None)[0]
    return found, float(np.linalg.norm(columns @ found - goal) / (np.linalg.norm(goal) or 1))


def pair(what: str, a: Run, b: Run, k: int) -> tuple[Tensors, Tensors]:
    """Return A's and B's tensors in a step; of outputs those of the samples that both took."""
    if what != "outputs":
        return a.whole(k, what), b.whole(k, what)
    x, y = ({row[:2]: row[2:] for row in run.outputs(k)} for run in (a, b))
    both = sorted(x.keys() & y.keys())
    rows = [np.array([side[sample] for sample in both]).reshape(-1) for side in (x, y)]
    return {"outputs": rows[0]}, {"outputs": rows[1]}


class Limits:
    """How far B may be from A, in each tensor: 30 times as far as A with another last bit is.

    Where half a digit is a rounding (bfloat16, float16) it is 5 times as far.
    """

    def __init__(self, a: Run, again: Run):
        self.own_eps = a.eps
        calls = (call["dtype"] for k in range(a.made) for rank in a.calls(k) for call in rank)
        self.computed = max((EPS.get(kind, 0.0) for kind in set(calls)), default=0.0)
        self.noise = collections.defaultdict(dict)  # {(step, quantity): {name: largest so far}}
        largest = collections.defaultdict(float)
        for k in range(min(a.steps, again.steps)):
            for what in ("weights", "gradients", "buffers", "outputs"):
                now = gaps(*pair(what, a, again, k))
                middle = float(np.median(list(now.values()))) if now else 0.0
                for name, gap in now.items():
                    largest[what, name] = max(largest[what, name], gap, middle)
                    self.noise[k, what][name] = largest[what, name]

    def eps(self, name: str) -> float:
        """Return the size of a rounding in a tensor: of its own type, or of what computes it."""
        return max(self.own_eps(name), self.computed)

    def of(self, what: str, k: int, name: str) -> float:
        """Return how far a tensor may be from A's."""
        eps, noise = self.eps(name), self.noise[k, what].get(name, 0.0)
        return max(20 * eps, 30 * noise) if eps < 1e-5 else max(2 * eps, 5 * noise)

    def excess(self, what: str, a: Run, b: Run, k: int) -> tuple[float, str] | None:
        """Return gap and name of the tensor that is furthest beyond its limit, if one is."""
        apart = gaps(*pair(what, a, b, k)).items()
        found = [(gap / self.of(what, k, name), gap, name) for name, gap in apart]
        ratio, gap, name = max(found, default=(0.0, 0.0, ""))
        return (gap, name) if ratio > 1 else None

    def noisy(self, what: str, k: int) -> list[str]:
        """Return the tensors in which roundings alone make more than 1 % of difference."""
        noise = self.noise[k, what].items()
        return [name for name, far in noise if far > max(0.01, 4 * self.eps(name))]

    def seen(self, steps: int) -> int:
        """Return the steps until roundings alone change the outputs, or most of the weights."""
        for k in range(1, steps):
            most = 2 * len(self.noisy("weights", k)) > len(self.noise[k, "weights"])
            if most or self.noisy("outputs", k):
                return k
        return steps
