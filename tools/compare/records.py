"""What the processes of a command saw, rank by rank and step by step; and arithmetic with it."""

import collections
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]  # a small tensor's numbers by its name, of a large one signed sums
EPS = {"float64": 2.0**-52, "float32": 2.0**-23}  # others: 2**-7, of bfloat16
UNKNOWN = {"name": "a network", "numbers": 0, "norms": [], "noises": [], "dtypes": ["float32"]}
NO_LOADER = {"sampler": "the program itself", "shuffle": None, "size": 0, "extra": 0}


@dataclass
class Run:
    """One run of a command: `ranks` holds for each process the records of its steps."""

    letter: str  # A or B
    ranks: list[list[dict]]
    network: dict = field(default_factory=lambda: UNKNOWN)  # the largest one
    epochs: list[dict] = field(default_factory=list)  # of rank 0's loaders: size, sampler, extra
    last: list[list] = field(default_factory=list)  # of each rank: evaluated after the last step
    ended: bool = False  # by the program itself, before the last step to be seen

    def __post_init__(self):
        self.world = len(self.ranks)
        self.made = self.steps = min((len(r) for r in self.ranks), default=0)
        finite = (np.isfinite(norm(self.whole(k, "gradients"))) for k in range(self.made))
        self.nan = next((k for k, good in enumerate(finite) if not good), None)
        if self.nan is not None:
            self.steps = self.nan  # what comes after a NaN cannot be compared

    def first(self, k: int) -> dict:
        """Return rank 0's record of a step."""
        return self.ranks[0][k]

    def of_rank(self, rank: int, k: int, what: str) -> Tensors:
        """Return one rank's tensors. Gradients are those before clipping."""
        step = self.ranks[rank][k]
        tensors = step[what]
        if what == "gradients":
            shrunk = np.prod([min(1, limit / (size + 1e-6)) for size, limit in step["clips"]])
            tensors = {n: g / shrunk for n, g in tensors.items()}
        return tensors

    def whole(self, k: int, what: str) -> Tensors:
        """Return the tensors of rank 0, or the sums of all shards."""
        tensors = self.of_rank(0, k, what)
        if self.first(k)["sharded"] and what != "buffers":
            every = [self.of_rank(r, k, what) for r in range(self.world)]
            tensors = {n: sum(t[n] for t in every if n in t) for n in tensors}
        return tensors

    def spread(self, what: str, allowed: float, start: int = 0) -> tuple[int, float] | None:
        """Return the first step at which ranks are further than allowed from rank 0, and how far."""
        for k in range(start, self.steps):
            steps = [ranks[k] for ranks in self.ranks if not ranks[k]["sharded"]]
            far = [max(gaps(steps[0][what], s[what]).values(), default=0) for s in steps[1:]]
            if far and max(far) > allowed:
                return k, max(far)
        return None

    def calls(self, k: int) -> list[list[dict]]:
        """Return for each rank the calls of the network that was called first."""
        every = [ranks[k]["calls"] for ranks in self.ranks]
        return [[c for c in calls if c["network"] == calls[0]["network"]] for calls in every]

    def samples(self, k: int) -> list[list[tuple]]:
        """Return for each rank what it trained on: ((set's size, epoch), index, hash, target)."""
        return [[s for c in calls for s in c["samples"]] for calls in self.calls(k)]

    def outputs(self, k: int) -> dict[tuple, np.ndarray]:
        """Return sums of each sample's output, by its hash and how many numbers they sum."""
        found = {}
        for call in (c for rank in self.calls(k) for c in rank if c["outputs"] is not None):
            size, rows = call["outputs"]
            found.update({(s[2], size): row for s, row in zip(call["samples"], rows)})
        return found

    def pieces(self, k: int) -> list[tuple[int, float, Tensors]]:
        """Return (number of samples, loss, local gradient) of each backward on each rank."""
        return [piece for ranks in self.ranks for piece in ranks[k]["pieces"]]

    def evaluated(self) -> list[list[tuple]]:
        """Return for each rank the samples of the first evaluation after a step."""
        rests = self.last or [[]] * self.world
        phases = [[*(s["evaluated"] for s in steps[1:]), x] for steps, x in zip(self.ranks, rests)]
        return [next(filter(None, rank), []) for rank in phases]

    def loader(self) -> dict:
        """Return what the loader of the training set said at its first epoch."""
        sizes = {s[0][0] for rank in self.samples(0) for s in rank if s[1] is not None}
        return next((e for e in self.epochs if e["size"] in sizes or not sizes), NO_LOADER)

    def order(self, epoch: int) -> list[int]:
        """Return the indices that rank 0 took in an epoch."""
        taken = (s for k in range(self.steps) for s in self.samples(k)[0] if s[1] is not None)
        return [index for (_, number), index, *_ in taken if number == epoch]

    def rates(self) -> list[float]:
        """Return the learning rate of each step."""
        return [step["groups"][0].get("lr", 0.0) for step in self.ranks[0][: self.steps]]


def read(letter: str, folder: Path, ended: bool = False) -> Run:
    """Return the Run that the processes have written to a folder."""
    ranks, networks = {}, []
    for path in sorted(folder.glob("*.pkl")):
        seen = collections.defaultdict(list)
        for record in records_of(path):
            seen[record["kind"]].append(record)
        networks += seen["network"]
        for step in seen["step"]:
            for key in ("weights", "gradients", "buffers"):
                step[key] = unpack(step[key])
            step["pieces"] = [(n, loss, unpack(g)) for n, loss, g in step["pieces"]]
        rank = seen["step"][0]["rank"] if seen["step"] else None
        if rank is not None and len(seen["step"]) > len(ranks.get(rank, {"step": []})["step"]):
            ranks[rank] = seen
    kept = [ranks[r] for r in sorted(ranks)]
    network = max(networks, key=lambda n: n["numbers"], default=UNKNOWN)
    last = [[s for record in r["rest"] for s in record["evaluated"]] for r in kept]
    epochs = kept[0]["epoch"] if kept else []
    return Run(letter, [r["step"] for r in kept], network, epochs, last, ended)


def records_of(path: Path) -> Any:
    """Yield what a process wrote, up to where it was killed."""
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return


def unpack(packed: tuple) -> Tensors:
    names, sizes, numbers = packed
    if not names:
        return {}
    return dict(zip(names, np.split(numbers.astype(np.float64), np.cumsum(sizes)[:-1])))


def rename(a: Run, b: Run) -> None:
    """Give B's parameters A's names, if those differ but order and sizes are the same."""
    mine, theirs = a.whole(0, "weights"), b.whole(0, "weights")
    sizes = [[len(v) for v in w.values()] for w in (mine, theirs)]
    if set(mine) == set(theirs) or sizes[0] != sizes[1]:
        return
    new = dict(zip(theirs, mine))
    for step in (s for steps in b.ranks for s in steps):
        for tensors in (step["weights"], step["gradients"], step["group_of"],
                        *(g for _, _, g in step["pieces"])):  # fmt: skip
            renamed = {new.get(n, n): v for n, v in tensors.items()}
            tensors.clear()
            tensors.update(renamed)


# ---- arithmetic ----------------------------------------------------------------------------------


def key(sample: tuple) -> Any:
    """Return what a loader calls a sample, or the hash of what went into the network."""
    (size, _), index, look, _ = sample
    return look if index is None else (size, index)


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


def common_outputs(a: Run, b: Run, k: int) -> tuple[Tensors, Tensors]:
    """Return the outputs of the samples that both runs took in a step, each as one tensor."""
    x, y = a.outputs(k), b.outputs(k)
    both = sorted(x.keys() & y.keys())
    sides = [np.concatenate([side[h] for h in both]) for side in (x, y)] if both else []
    return tuple({"outputs": side} for side in sides) or ({}, {})


class Limits:
    """How far B may be from A: 30 times as far as A is from A with another last bit."""

    def __init__(self, a: Run, again: Run | None = None):
        self.floor = 20 * max(EPS.get(d, 2.0**-7) for d in a.network["dtypes"])
        self.noise = collections.defaultdict(dict)  # {(step, quantity): {name: largest so far}}
        largest = collections.defaultdict(float)
        for k in range(min(a.steps, again.steps) if again else 0):
            pairs = {
                w: (a.whole(k, w), again.whole(k, w)) for w in ("weights", "gradients", "buffers")
            }
            for what, pair in {**pairs, "outputs": common_outputs(a, again, k)}.items():
                now = gaps(*pair)
                middle = float(np.median(list(now.values()))) if now else 0.0
                for name, gap in now.items():
                    largest[what, name] = max(largest[what, name], gap, middle)
                    self.noise[k, what][name] = largest[what, name]

    def of(self, k: int, what: str, name: str) -> float:
        """Return the limit of a tensor. Its own noise may be small by chance, where others' is not."""
        return max(self.floor, 30 * self.noise[k, what].get(name, 0.0), self.at(k, what) / 10)

    def at(self, k: int, what: str) -> float:
        """Return the largest limit of a quantity's tensors in a step."""
        return max(self.floor, 30 * max(self.noise[k, what].values(), default=0.0))

    def excess(self, k: int, what: str, a: Tensors, b: Tensors) -> tuple[float, str] | None:
        """Return gap and name of the tensor that is furthest beyond its limit, if one is."""
        found = [(gap / self.of(k, what, n), gap, n) for n, gap in gaps(a, b).items()]
        ratio, gap, name = max(found, default=(0.0, 0.0, ""))
        return (gap, name) if ratio > 1 else None

    def seen(self, steps: int) -> int:
        """Return the steps until roundings alone make more than 1 % of difference."""
        return next((k for k in range(1, steps) if self.at(k, "weights") > 0.3), steps)
