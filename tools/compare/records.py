"""What the processes of a command saw, rank by rank and step by step; and arithmetic with it."""

import collections
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

Tensors = dict[str, np.ndarray]  # a small tensor's numbers by its name, of a large one signed sums
EPS = {"float64": 2.0**-52, "float32": 2.0**-23}  # others: 2**-7, of bfloat16
NO_LOADER = {"sampler": "the program itself", "shuffle": None, "size": 0, "extra": 0}


class Sample(NamedTuple):
    size: int  # of its data set
    epoch: int
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
    epochs: list[dict]  # of rank 0's loaders: size, sampler, extra
    evaluated: list[list[Sample]]  # of each rank: its first evaluation after a step
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
        """Return the tensors of rank 0, or the sums of all shards."""
        every = [rank[k][what] for rank in self.ranks]
        if self.first(k)["sharded"] and what != "buffers":
            return {name: sum(t[name] for t in every if name in t) for name in every[0]}
        return every[0]

    def spread(self, what: str, allowed: float, start: int = 0) -> tuple[int, float] | None:
        """Return the first step at which ranks are further than allowed from rank 0, and how far."""
        for k in range(start, self.steps):
            steps = [rank[k] for rank in self.ranks if not rank[k]["sharded"]]
            far = max((furthest(steps[0][what], step[what]) for step in steps[1:]), default=0)
            if far > allowed:
                return k, far
        return None

    def calls(self, k: int) -> list[list[dict]]:
        """Return for each rank the training calls of the network that was called first."""
        every = [rank[k]["calls"] for rank in self.ranks]
        every = [[c for c in calls if c["training"]] or calls for calls in every]
        return [[c for c in calls if c["network"] == calls[0]["network"]] for calls in every]

    def samples(self, k: int) -> list[list[Sample]]:
        """Return for each rank what it trained on."""
        return [[s for call in calls for s in call["samples"]] for calls in self.calls(k)]

    def per_rank(self, k: int) -> str:
        """Return how many samples each rank took, in words."""
        return " + ".join(str(len(rank)) for rank in self.samples(k))

    def outputs(self, k: int) -> dict[tuple, np.ndarray]:
        """Return sum and norm of each sample's output, by its hash and how many numbers it has."""
        found = {}
        for call in (c for rank in self.calls(k) for c in rank if c["outputs"] is not None):
            size, numbers = call["outputs"]
            rows = np.frombuffer(numbers).reshape(-1, 2)
            found.update({(s.look, size): row for s, row in zip(call["samples"], rows)})
        return found

    def pieces(self, k: int) -> list[tuple[float, Tensors]]:
        """Return loss and local gradient of each backward on each rank."""
        return [piece for rank in self.ranks for piece in rank[k]["pieces"]]

    def loader(self) -> dict:
        """Return what the loader of the training set said at its first epoch."""
        sizes = {s.size for rank in self.samples(0) for s in rank if s.index is not None}
        return next((e for e in self.epochs if e["size"] in sizes or not sizes), NO_LOADER)

    def scheduler_steps(self) -> int:
        """Return how often schedulers stepped after the first step."""
        counts = [step["events"].get("scheduler", 0) for step in self.ranks[0][:2]]
        return counts[-1] - counts[0]

    def order(self, epoch: int) -> list[int]:
        """Return the indices that rank 0 took in an epoch."""
        taken = [s for k in range(self.steps) for s in self.samples(k)[0] if s.index is not None]
        return [s.index for s in taken if s.epoch == epoch]


def read(letter: str, folder: Path, ended: bool = False) -> Run:
    """Return the Run that the processes have written to a folder."""
    ranks, networks = {}, []
    for path in folder.glob("*.pkl"):
        seen = collections.defaultdict(list)
        for record in records_of(path):
            seen[record["kind"]].append(record)
        networks += seen["network"]
        rank = seen["step"][0]["rank"] if seen["step"] else None
        if rank is not None and len(seen["step"]) > len(ranks.get(rank, {"step": []})["step"]):
            ranks[rank] = seen
    kept = [ranks[rank] for rank in sorted(ranks)]
    evaluated = []
    for rank in kept:
        after = [(e["step"], named(e["samples"])) for e in rank["evaluated"] if e["step"]]
        evaluated.append([s for step, samples in after if step == after[0][0] for s in samples])
    unknown = {"name": "a network", "numbers": 0, "norms": 0, "noises": 0, "dtypes": ["float32"]}
    network = max(networks, key=lambda n: n["numbers"], default=unknown)
    steps = [[*map(unpack, rank["step"])] for rank in kept]
    return Run(letter, steps, network, kept[0]["epoch"] if kept else [], evaluated, ended)


def records_of(path: Path) -> Iterator[dict]:
    """Yield what a process wrote, up to where it was killed."""
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return


def unpack(step: dict) -> dict:
    """Give a record of a step Tensors and Samples. Its gradients are those before clipping."""
    for what in ("weights", "gradients", "buffers"):
        step[what] = tensors(step[what])
    step["clipped"] = step["gradients"]
    left = np.prod([min(1, limit / (size + 1e-6)) for size, limit in step["clips"]])
    step["gradients"] = {name: values / left for name, values in step["gradients"].items()}
    step["pieces"] = [(loss, tensors(packed)) for loss, packed in step["pieces"]]
    for call in step["calls"]:
        call["samples"] = named(call["samples"])
    return step


def tensors(packed: tuple) -> Tensors:
    names, sizes, dtype, numbers = packed
    values = np.frombuffer(numbers, dtype).astype(np.float64)
    return dict(zip(names, np.split(values, np.cumsum(sizes)[:-1])))


def named(columns: tuple) -> list[Sample]:
    return [Sample(*mark, *values) for mark, *values in zip(*columns)]


def rename(a: Run, b: Run) -> None:
    """Give B's parameters A's names, if those differ but order and sizes are the same."""
    mine, theirs = a.whole(0, "weights"), b.whole(0, "weights")
    sizes = [[len(v) for v in weights.values()] for weights in (mine, theirs)]
    if set(mine) == set(theirs) or sizes[0] != sizes[1]:
        return
    new = dict(zip(theirs, mine))

    def renamed(values: dict) -> dict:
        return {new.get(name, name): value for name, value in values.items()}

    for step in (step for rank in b.ranks for step in rank):
        step |= {what: renamed(step[what]) for what in ("weights", "gradients", "group_of")}
        step["pieces"] = [(loss, renamed(local)) for loss, local in step["pieces"]]


# ---- arithmetic ----------------------------------------------------------------------------------


def norm(tensors: Tensors) -> float:
    return float(np.sqrt(sum(float(v @ v) for v in tensors.values())))


def gaps(a: Tensors, b: Tensors) -> dict[str, float]:
    """Return the relative difference of each tensor that both have."""
    floor, found = 1e-4 * norm(a), {}
    for name in a.keys() & b.keys():
        size = max(np.linalg.norm(a[name]), np.linalg.norm(b[name]), floor)
        gap = float(np.linalg.norm(a[name] - b[name]) / size) if size else 0.0
        found[name] = gap if np.isfinite(gap) else np.inf
    return found


def furthest(a: Tensors, b: Tensors) -> float:
    return max(gaps(a, b).values(), default=0.0)


def shares(target: Tensors, pieces: list[Tensors]) -> tuple[np.ndarray, float]:
    """Return the factors with which the pieces make up the target, and which part is left."""
    names = sorted(set(target).intersection(*pieces))
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
    x, y = a.outputs(k), b.outputs(k)
    both = sorted(x.keys() & y.keys())
    rows = [np.concatenate([side[h] for h in both] or [[]]) for side in (x, y)]
    return {"outputs": rows[0]}, {"outputs": rows[1]}


class Limits:
    """How far B may be from A: 30 times as far as A is from A with another last bit."""

    def __init__(self, a: Run, again: Run):
        self.floor = 20 * max(EPS.get(d, 2.0**-7) for d in a.network["dtypes"])
        self.noise = collections.defaultdict(dict)  # {(step, quantity): {name: largest so far}}
        largest = collections.defaultdict(float)
        for k in range(min(a.steps, again.steps)):
            for what in ("weights", "gradients", "buffers", "outputs"):
                now = gaps(*pair(what, a, again, k))
                middle = float(np.median(list(now.values()))) if now else 0.0
                for name, gap in now.items():
                    largest[what, name] = max(largest[what, name], gap, middle)
                    self.noise[k, what][name] = largest[what, name]

    def at(self, k: int, what: str) -> float:
        """Return the largest limit of a quantity's tensors in a step."""
        return max(self.floor, 30 * max(self.noise[k, what].values(), default=0.0))

    def excess(self, what: str, a: Run, b: Run, k: int) -> tuple[float, str] | None:
        """Return gap and name of the tensor that is furthest beyond its limit, if one is."""
        least, noise = self.at(k, what) / 10, self.noise[k, what]  # its own may be small by chance
        found = [
            (gap / max(self.floor, least, 30 * noise.get(name, 0.0)), gap, name)
            for name, gap in gaps(*pair(what, a, b, k)).items()
        ]
        ratio, gap, name = max(found, default=(0.0, 0.0, ""))
        return (gap, name) if ratio > 1 else None

    def seen(self, steps: int) -> int:
        """Return the steps until roundings alone make more than 1 % of difference."""
        return next((k for k in range(1, steps) if self.at(k, "weights") > 0.3), steps)
