"""What the processes of a command saw, rank by rank and step by step; and arithmetic with it."""

import collections
import pickle
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

EPS = {"float64": 2.0**-52, "float32": 2.0**-23}  # others: 2**-7, of bfloat16


@dataclass
class Run:
    letter: str  # A or B
    ranks: list[list[dict]]  # for each rank the records of its steps
    network: dict = field(default_factory=dict)  # the largest one: name, norms, noises, dtypes
    epochs: list[dict] = field(default_factory=list)  # of rank 0's loaders: size, sampler, extra
    last: list[list] = field(default_factory=list)  # of each rank: evaluated after the last step
    ended: bool = False  # by the program itself, before the last step to be seen

    def __post_init__(self):
        self.world = len(self.ranks)
        self.compiled = bool(self.ranks) and "compile" in self.ranks[0][-1]["wrapped"]
        self.made = self.steps = min((len(r) for r in self.ranks), default=0)
        finite = (np.isfinite(norm(self.whole(k, "gradients"))) for k in range(self.steps))
        self.nan = next((k for k, good in enumerate(finite) if not good), None)
        if self.nan is not None:
            self.steps = self.nan  # what comes after a NaN cannot be compared

    def at(self, k):
        return [steps[k] for steps in self.ranks]

    def whole(self, k, key):
        """Return the tensors of rank 0, or the sums of all shards."""
        steps = self.at(k)
        if not steps[0]["sharded"] or key == "buffers":
            return steps[0][key]
        return {n: sum(s[key][n] for s in steps if n in s[key]) for n in steps[0][key]}

    def spread(self, k, key):
        """Return how far the ranks are from rank 0."""
        first, *others = self.at(k)
        if first["sharded"]:
            return 0.0
        return max((max(gaps(first[key], o[key]).values(), default=0) for o in others), default=0.0)

    def calls(self, k):
        """Return for each rank the calls of the network that was called first."""
        ranks = [[c for p in step["pieces"] for c in p["calls"]] for step in self.at(k)]
        return [[c for c in calls if c["network"] == calls[0]["network"]] for calls in ranks]

    def samples(self, k):
        """Return for each rank (id, epoch, hash, hash of the target) of what it trained on."""
        return [[s for c in calls for s in c["samples"]] for calls in self.calls(k)]

    def outputs(self, k):
        """Return {hash of a sample: sums of its output}."""
        calls = [c for rank in self.calls(k) for c in rank]
        return {s[2]: o for c in calls for s, o in zip(c["samples"], c["outputs"]) if o is not None}

    def same_samples(self, k):
        """Say whether all ranks take the same ones."""
        first, *others = [sorted(str(key(s)) for s in rank) for rank in self.samples(k)]
        return bool(others and first) and all(o == first for o in others)

    def pieces(self, k):
        """Return (number of samples, local gradient, loss) of each backward on each rank."""
        every = [p for step in self.at(k) for p in step["pieces"]]
        counts = [sum(len(c["samples"]) for c in p["calls"][:1]) for p in every]
        return [(n, p["gradients"], p["loss"]) for n, p in zip(counts, every)]

    def evaluated(self):
        """Return for each rank the samples of the first evaluation after a step."""
        phases = [[*(s["evaluated"] for s in steps[1:]), rest] for steps, rest in
                  zip(self.ranks, self.last or [[]] * self.world)]  # fmt: skip
        return [next(filter(None, rank), []) for rank in phases]

    def sampler(self):
        """Return what the loader of the training set said at its first epoch."""
        sizes = {s[0][0] for rank in self.samples(0) for s in rank if s[0]} if self.steps else set()
        return next((e for e in self.epochs if e["size"] in sizes or not sizes), None)

    def rates(self):
        return [step["groups"][0].get("lr", 0.0) for step in self.ranks[0][: self.steps]]


def read(letter, folder, ended=False):
    """Return the Run that the processes have written to a folder."""
    ranks, networks = {}, []
    for path in sorted(Path(folder).glob("*.pkl")):
        seen = collections.defaultdict(list)
        with path.open("rb") as file:
            while True:
                try:
                    record = pickle.load(file)
                except (EOFError, pickle.UnpicklingError):
                    break
                seen[record["kind"]].append(record)
        networks += seen["network"]
        if seen["step"]:
            rank = seen["step"][0]["rank"]
            if rank not in ranks or len(ranks[rank]["step"]) < len(seen["step"]):
                ranks[rank] = seen
    kept = [ranks[r] for r in sorted(ranks)]
    unknown = {"name": "a network", "numbers": 0, "norms": [], "noises": [], "sync": False}
    network = max(reversed(networks), key=lambda n: n["numbers"], default=unknown)
    last = [[s for record in r["rest"] for s in record["evaluated"]] for r in kept]
    epochs = kept[0]["epoch"] if kept else []
    return Run(letter, [r["step"] for r in kept], network, epochs, last, ended)


def key(sample):  # what a loader calls a sample, or the hash of what went into the network
    return sample[0] or sample[2]


def norm(vectors):
    return float(np.sqrt(sum(float(v @ v) for v in vectors.values())))


def gaps(a, b):
    """Return the relative difference of each tensor that both have."""
    floor, found = 1e-4 * norm(a), {}
    for name in a.keys() & b.keys():
        size = max(np.linalg.norm(a[name]), np.linalg.norm(b[name]), floor)
        gap = float(np.linalg.norm(a[name] - b[name]) / size) if size else 0.0
        found[name] = gap if np.isfinite(gap) else np.inf
    return found


def multiple(a, b):
    """Return the factor c of b = c * a, and which share of b that leaves."""
    names = a.keys() & b.keys()
    c = sum(float(a[n] @ b[n]) for n in names) / (norm({n: a[n] for n in names}) ** 2 or 1)
    rest = {n: b[n] - c * a[n] for n in names}
    return c, norm(rest) / (norm({n: b[n] for n in names}) or 1)


def shares(target, pieces):
    """Return the factors with which the pieces' gradients make up the target, and what is left."""
    names = sorted(set(target).intersection(*(g for _, g, _ in pieces)))
    if not names or not 0 < len(pieces) < 33:
        return np.zeros(len(pieces)), np.inf
    columns = np.stack([np.concatenate([g[n] for n in names]) for _, g, _ in pieces], 1)
    goal = np.concatenate([target[n] for n in names])
    if not np.isfinite(columns).all():
        return np.zeros(len(pieces)), np.inf
    found = np.linalg.lstsq(columns, goal, rcond=None)[0]
    return found, float(np.linalg.norm(columns @ found - goal) / (np.linalg.norm(goal) or 1))


def rename(a, b):
    """Give B's parameters A's names, if those differ but order and sizes are the same."""
    mine, theirs = a.whole(0, "weights"), b.whole(0, "weights")
    sizes = [[len(v) for v in w.values()] for w in (mine, theirs)]
    if set(mine) == set(theirs) or sizes[0] != sizes[1]:
        return
    new = dict(zip(theirs, mine))
    for step in (s for steps in b.ranks for s in steps):
        for owner in (step, *step["pieces"]):
            for name in {"weights", "after", "gradients", "group_of"} & set(owner):
                owner[name] = {new.get(n, n): v for n, v in owner[name].items()}


class Limits:
    """How far B may be from A: 30 times as far as A is from A with another last bit."""

    def __init__(self, a, again=None):
        dtypes = a.network.get("dtypes") or ["float32"]
        self.floor = 20 * max(EPS.get(d, 2.0**-7) for d in dtypes)
        self.noise = collections.defaultdict(dict)  # {key: {(step, name): the largest so far}}
        largest = collections.defaultdict(float)
        for k in range(min(a.steps, again.steps) if again else 0):
            for what in ("weights", "gradients", "after", "buffers"):
                now = gaps(a.whole(k, what), again.whole(k, what))
                middle = float(np.median(list(now.values()))) if now else 0.0
                for name, gap in now.items():
                    largest[what, name] = max(largest[what, name], gap, middle)
                    self.noise[what][k, name] = largest[what, name]
        self.measured = again is not None

    def of(self, k, what, name):
        if not self.measured:
            return 1e-2
        return max(self.floor, 30 * self.noise[what].get((k, name), 0.0))

    def at(self, k, what="gradients"):
        names = {n for j, n in self.noise[what] if j == k}
        return max((self.of(k, what, n) for n in names), default=self.of(k, what, ""))

    def excess(self, k, what, a, b):
        """Return the gap of the tensor that is furthest beyond its limit, and its name; or None."""
        found = [(gap / self.of(k, what, n), gap, n) for n, gap in gaps(a, b).items()]
        ratio, gap, name = max(found, default=(0.0, 0.0, ""))
        return (gap, name) if ratio > 1 else None

    def seen(self, steps):
        """Return the steps until roundings alone make more than 1 % of difference."""
        return next((k for k in range(1, steps) if self.at(k, "weights") > 0.3), steps)
