"""Why two runs are not the same: pure functions of what their processes saw (records.py).

`alone` looks at what one run shows by itself: its ranks must agree. `parting` compares two runs in
the order in which a step computes: weights, settings, samples, outputs, gradients, buffers.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tools.compare.records import Limits, Run, furthest, rename, shares


@dataclass
class Cause:
    name: str
    step: int | None  # from 0; None: of no step
    text: str  # what differs, and by how much
    why: str
    even: dict = field(default_factory=dict)  # what to make even, to look behind it
    hides: bool = False  # gradients, and all that follows
    note: bool = False  # no difference by itself


def near(value: float, *others: float) -> bool:
    return any(bool(np.isclose(value, other, rtol=2e-3)) for other in others)


def diagnose(a: Run, b: Run, again: Run, limits: Limits, even: dict) -> list[Cause]:
    """Return the causes by which B is not A, and what both runs show, as notes."""
    rename(a, again)
    far = furthest(a.whole(0, "weights"), again.whole(0, "weights"))
    if far > 1e-5 or list(samples(a, again, 0)):
        why = "no seed is set; or it resumes from a file that it wrote: name that as {dir}/FILE"
        text = "A, started twice, is not the same run"
        return [Cause("no seed", 0, text, why, {"seed": True})]
    sides = [list(alone(run, limits)) for run in (a, b)]
    both = {c.name for c in sides[0]} & {c.name for c in sides[1]}
    found = [*sides[0], *sides[1]]
    for cause in found:
        cause.note |= cause.name in both
    differ = [c for c in found if not c.note]
    parted = list(parting(a, b, limits, even, hidden=any(c.hides for c in differ)))
    if any("order" in c.even for c in differ):  # of the second epoch: what differs there follows
        parted = [c for c in parted if "order" not in c.even or not b.samples(c.step)[0][0].epoch]
    found += parted
    if any("order" in c.even for c in found):
        return found  # an evaluation may take samples of the training set: first their order
    return found + list(evaluation(a, b))


# ---- what one run shows by itself ----------------------------------------------------------------


def alone(run: Run, limits: Limits) -> Iterator[Cause]:
    """Yield what does not fit together in one run: its ranks, its optimizer, its epochs."""
    first, loader, allowed = run.first(0), run.loader(), max(limits.floor, 1e-5)
    who = f"the {run.world} processes"

    def cause(name: str, text: str, why: str, step: int | None = 0, **more) -> Cause:
        return Cause(name, step, f"{run.letter}: {text}", why, **more)

    if strange := first["strange"]:
        every = strange + len(first["group_of"])
        text = f"{strange} of {every} tensors of the optimizer are in no trained network"
        why = "the network was copied, rebuilt or cut into shards after the optimizer was made"
        yield cause("optimizer of another network", text, why, hides=True)
    if names := run.first(run.made - 1)["forgotten"]:
        text = f"{len(names)} trainable parameters are in no optimizer: {', '.join(names[:3])}"
        why = "made after the optimizer, or left out of its groups: they stay as they are"
        yield cause("parameters in no optimizer", text, why, hides=True)
    taken = [sorted(str(s.key) for s in rank) for rank in run.samples(0)]
    if run.world > 1 and taken[0] and all(rank == taken[0] for rank in taken):
        text = f"{who} take the same {len(taken[0])} samples"
        why = "no DistributedSampler, or one with the same rank in all: N processes do one's work"
        yield cause("no sampler", text, why, hides=True)
    if (apart := run.spread("weights", allowed)) and apart[0] == 0:
        text = f"{who} begin with different weights ({apart[1]:.1g})"
        why = "each has its own seed, or none, before it builds the network; no DDP sends rank 0's"
        yield cause("seed per process", text, why, even={"weights": True})
    norms = [rank[0]["clips"][0][0] for rank in run.ranks if rank[0]["clips"]]
    if parted := run.spread("clipped", allowed):
        events = run.first(parted[0])["events"]
        name, why = "not averaged", "nothing averages the gradients before the step: no DDP?"
        if "DistributedDataParallel" in events:
            name = "no_sync in the last micro-batch"
            why = "no_sync is around the last micro-batch of a step too, which has to average"
        elif "DDP made" in events:
            name = "past the wrapper"
            why = "the forward goes past the DDP wrapper: call the wrapper, not the network"
        text = f"{who} step with different gradients ({parted[1]:.1g})"
        yield cause(name, text, why, parted[0], hides=True)
    elif norms and max(norms) > min(norms) * (1 + 100 * allowed):
        each = ", ".join(f"{n:.3g}" for n in norms)
        text = f"{who} clip, each by its own norm ({each}), and average after that"
        why = "clip after it, by the norm of the whole batch's gradient"
        yield cause("clipping before the reduction", text, why, hides=True)
    if apart := run.spread("buffers", allowed, start=1):
        text = f"{who} forward with different buffers ({apart[1]:.1g})"
        why = "each process evaluates, and saves, statistics of its own samples"
        yield cause("buffers not broadcast", text, why, apart[0])
    if run.nan is not None:
        why = "nothing can be compared from here on"
        yield cause("NaN", "gradients are NaN or infinite", why, run.nan)
    one, two = run.order(0), run.order(1)
    if two and one != sorted(one) and one[: len(two)] == two[: len(one)]:
        text = "the second epoch has the order of the first one"
        why = "call sampler.set_epoch(epoch) before each epoch, or draw with another seed in each"
        yield cause("set_epoch is missing", text, why, None, even={"order": True})
    if loader["extra"] > 0:
        text = f"the sampler fills each epoch of {loader['size']} with {loader['extra']} twice"
        yield cause("padded epoch", text, f"{loader['sampler']} without drop_last", note=True)


# ---- where two runs part -------------------------------------------------------------------------


def parting(a: Run, b: Run, limits: Limits, even: dict, hidden: bool) -> Iterator[Cause]:
    """Yield what differs in the first step in which something does.

    hidden: one run alone has a fault after which no gradient is that of the whole batch.
    """
    rename(a, b)
    for k in range(min(a.steps, b.steps)):
        changed = list(settings(a, b, k))
        found = [*state("weights", a, b, k, limits), *samples(a, b, k)]
        found = found or list(outputs(a, b, k, limits, even))
        if not found and not hidden:
            found = list(gradients(a, b, k, limits)) or list(state("buffers", a, b, k, limits))
        yield from changed + found
        if changed or found or hidden:
            return
    if a.ended and b.ended and a.made != b.made:
        text = f"A ends after {a.made} steps, B after {b.made}"
        yield Cause("number of steps", None, text, "other epochs, or other steps per epoch")


def state(what: str, a: Run, b: Run, k: int, limits: Limits) -> Iterator[Cause]:
    """Compare the weights or the buffers before a step."""
    if over := limits.excess(what, a, b, k):
        name, even = "new weights", {}
        why = "another state of the optimizer, like momentum; or something else changes them"
        if what == "buffers":
            name, even = "buffers", {"batchnorm": True}
            why = "of BatchNorm: statistics of rank 0's samples alone; of others cause not known"
        elif k == 0:
            name, even = "first weights", {"weights": True}
            why = "another seed, or other draws before the network is built"
        yield Cause(name, k, f"they differ by up to {over[0]:.2g} ({over[1]})", why, even)


def settings(a: Run, b: Run, k: int) -> Iterator[Cause]:
    """Compare the optimizer's class, and what it and clipping use for each parameter."""
    x, y, n = a.first(k), b.first(k), max(a.world, b.world)
    if x["optimizer"] != y["optimizer"]:
        text = f"A has {x['optimizer']}, B {y['optimizer']}"
        yield Cause("another optimizer", k, text, "another class")
        return
    clips = [" and ".join(f"{limit:g}" for _, limit in side["clips"]) for side in (x, y)]
    if clips[0] != clips[1]:
        text = f"A clips by {clips[0] or 'nothing'}, B by {clips[1] or 'nothing'}"
        yield Cause("clipping", k, text, "the limits of clip_grad_norm_")
    even = {}
    if len(x["groups"]) == len(y["groups"]):
        even = {"settings": [a.first(j)["groups"] for j in range(a.made)]}
    shared = x["group_of"].keys() & y["group_of"].keys()
    differ = Counter()
    for name in shared:
        p, q = (side["groups"][side["group_of"][name]] for side in (x, y))
        values = [(option, shown(p[option]), shown(q[option])) for option in p.keys() & q.keys()]
        differ.update(value for value in values if value[1] != value[2])
    for (option, p, q), count in sorted(differ.items()):
        name, why = option, "another value"
        text = f"{p} in A, {q} in B"
        if count < len(shared):
            name, why = f"{option} of a group", "the groups of the optimizer are not the same"
            text += f" for {count} of {len(shared)} parameters"
        elif option == "lr":
            name, why = rate(a, b, float(q) / (float(p) or np.inf), n)
        yield Cause(name, k, text, why, even)


def shown(value: object) -> str:
    """Return a setting in words, which are equal for numbers that differ by a rounding."""
    if isinstance(value, (tuple, list)):
        return ", ".join(map(shown, value))
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def rate(a: Run, b: Run, ratio: float, n: int) -> tuple[str, str]:
    """Name what makes another learning rate."""
    calls = [run.scheduler_steps() for run in (a, b)]
    if calls[0] != calls[1] and all(calls):
        why = f"for each step the scheduler steps {calls[0]} times in A, {calls[1]} in B"
        return "scheduler per process", why
    if n > 1 and near(ratio, n, 1 / n):
        why = f"times {n}, the number of processes: it is scaled with the batch size"
        return "rate times processes", why
    return "learning rate", "another value, or another schedule"


def samples(a: Run, b: Run, k: int) -> Iterator[Cause]:
    """Compare which samples go into the networks, and how they look."""
    x, y = ([s for rank in run.samples(k) for s in rank] for run in (a, b))
    looks = [Counter(s.look for s in side) for side in (x, y)]
    known = all(s.index is not None for s in x + y)  # by a loader; else by their contents alone
    p, q = (Counter(s.key if known else s.look for s in side) for side in (x, y))
    if looks[0] == looks[1]:
        return
    if p == q:
        changed = len(y) - sum((looks[0] & looks[1]).values())
        text = f"the same samples, but {changed} look different"
        why = "random transforms draw from the state of each process or worker"
        yield Cause("augmentation", k, text, why, {"augment": True})
        return
    if len(x) != len(y):
        n, ratio = max(a.world, b.world), len(y) / max(1, len(x))
        text = f"a step takes {a.per_rank(k)} samples in A, {b.per_rank(k)} in B"
        name, why = "batch size", "another number; the last batch of an epoch may be cut or filled"
        if n > 1 and near(ratio, n, 1 / n):
            name = "batch per process"
            why = "the batch size is that of a process in one, of all in the other"
        yield Cause(name, k, text, why)
        return
    text = f"{sum((p & q).values())} of {len(x)} samples are those of A"
    if len(q) < len(y) and len(p) == len(x):
        why = "processes share samples, or the sampler fills its last batch"
        yield Cause("samples twice", k, text, why)
        return
    drawn = [
        e["sampler"] + (f", shuffle {e['shuffle']}" if e["shuffle"] is not None else "")
        for e in (a.loader(), b.loader())
    ]
    why = f"drawn by {drawn[0]} in A, by {drawn[1]} in B, or with another seed or epoch (set_epoch, set_position)"
    yield Cause("order of samples", k, text, why, {"order": True})


def outputs(a: Run, b: Run, k: int, limits: Limits, even: dict) -> Iterator[Cause]:
    """Compare what the networks make of the same samples with the same weights."""
    calls = [[call for rank in run.calls(k) for call in rank] for run in (a, b)]
    modes = []
    for side in calls:
        evaluates = " in eval mode" * any(not call["training"] for call in side)
        modes.append(" and ".join(sorted({call["dtype"] for call in side})) + evaluates)
    over = limits.excess("outputs", a, b, k)
    if not over and modes[0] == modes[1]:
        return
    text = f"the same samples and weights give other outputs, by {over[0] if over else 0:.1g}"
    norms, noises = ([run.network[kind] for run in (a, b)] for kind in ("norms", "noises"))
    if modes[0] != modes[1]:
        why = f"A computes in {modes[0]}, B in {modes[1]}"
        yield Cause("mode or precision", k, text, why)
    elif any(norms) and "batchnorm" not in even:
        why = f"{norms[0]} BatchNorm layers in A, {norms[1]} in B compute statistics of what a "
        why += "process has in one micro-batch"
        yield Cause("BatchNorm", k, text, why, {"batchnorm": True})
    elif any(noises) and "dropout" not in even:
        why = (
            f"{noises[0]} layers in A, {noises[1]} in B drop something, with masks of each process"
        )
        yield Cause("dropout", k, text, why, {"dropout": True})
    else:
        why = "the network draws numbers, mixes its samples, or is another one: cause not known"
        yield Cause("outputs", k, text, why, {"dropout": True})


def gradients(a: Run, b: Run, k: int, limits: Limits) -> Iterator[Cause]:
    """Compare the gradients before clipping, and say how one is made of the other's pieces."""
    few, many = (a, b) if a.world <= b.world else (b, a)
    x, y = few.whole(k, "gradients"), many.whole(k, "gradients")
    for mine, theirs, run, there in ((x, y, few, many), (y, x, many, few)):
        names = [n for n in mine if n not in theirs and n in run.first(k)["group_of"]]
        if names:
            text = f"{len(names)} have a gradient in {run.letter}, none in {there.letter}: "
            why = f"in {there.letter} requires_grad is False, or the loss does not use them"
            yield Cause("frozen parameters", k, text + ", ".join(names[:3]), why)
            return
    over = limits.excess("gradients", a, b, k)
    allowed = min(max(30 * limits.at(k, "gradients"), 1e-6), 1e-3)
    [factor], left = shares(y, [x])
    if not over or (left < allowed and abs(factor - 1) < 1e-3):
        return  # roundings, which may be larger than those of A by chance
    losses, pieces = zip(*(many.pieces(k) or [(np.nan, {})]))
    (mine, rest), (theirs, their_rest) = shares(x, pieces), shares(y, pieces)
    if left < allowed:
        joined = theirs.mean() * many.world if their_rest < 1e-3 else np.nan
        name, why = factor_of(factor, joined, few, many, k)
        text = f"{many.letter}'s gradient is {factor:.6g} times {few.letter}'s"
        clips = [c for run in (a, b) for j in range(k, run.made) for c in run.first(j)["clips"]]
        even = {"gradient": float(factor if many is b else 1 / factor)}
        if any(size > limit for size, limit in clips):
            even = {}  # what clipping leaves has another factor
        yield Cause(name, k, text, why, even)
        return
    few_loss = np.mean([loss for loss, _ in few.pieces(k)] or [np.nan])
    text = f"they differ by {over[0]:.1g} ({over[1]}), and are no multiple; "
    text += f"mean loss {few_loss:.6g} in {few.letter}, {np.mean(losses):.6g} in {many.letter}"
    if len(pieces) > 1 and max(rest, their_rest) < max(allowed, 1e-4):
        name = "weights of the pieces"
        why = f"{few.letter} weighs {many.letter}'s pieces by {numbers(mine)}, "
        why += f"{many.letter} by {numbers(theirs)}: "
        alike = [np.ptp(factors) < 0.01 * max(abs(factors)) for factors in (mine, theirs)]
        if any(alike) and min(*abs(mine), *abs(theirs)) > 1e-3:
            name = "mean of means"
            why += "in one each piece counts alike, in the other by its samples or tokens"
        else:
            why += "cause not known"
    else:
        name = "gradient"
        why = "another loss, a part is detached, or something changes gradients: cause not known"
    yield Cause(name, k, text, why)


def factor_of(factor: float, joined: float, few: Run, many: Run, k: int) -> tuple[str, str]:
    """Name a factor of the gradient. joined: what the reduction made of the sum of the pieces."""
    n, micro, per = many.world, len(many.first(k)["pieces"]), len(many.samples(k)[0])
    right = "each process's loss is right"
    if n > 1 and near(factor, n) and near(joined, n):
        return "sum over processes", f"gradients are summed over the {n} processes; {right}"
    if n > 1 and near(factor, 1 / n) and near(joined, 1 / n):
        return "divided twice", f"gradients are divided by the {n} processes twice; {right}"
    meanings = [(micro, f"{micro} micro-batches"), (n, f"the {n} processes")]
    meanings += [(n * micro, "processes and micro-batches"), (n * per, "the samples of a batch")]
    meanings += [(per / micro, "the samples of a micro-batch"), (per, "the samples of a process")]
    for number, meaning in meanings:
        if number > 1 and near(factor, number):
            why = f"{many.letter}'s loss is a sum over {meaning} where {few.letter} takes the mean"
            return "loss is a sum", why
        if number > 1 and near(1 / factor, number):
            why = f"{many.letter} divides by {meaning} once more than {few.letter}"
            return "loss divided too often", why
    return "factor of the gradient", "another weight or scale of the loss: cause not known"


def evaluation(a: Run, b: Run) -> Iterator[Cause]:
    """Compare which samples the first evaluation after a step counts."""
    x, y = ([rank for rank in run.evaluated if rank] for run in (a, b))
    known = all(s.index is not None for rank in (*x, *y) for s in rank)
    x, y = ([Counter(s.key if known else s.look for s in r) for r in side] for side in (x, y))
    if not x or not y or all(rank == x[0] for rank in y):
        return  # each process, or one alone, evaluates all of A's
    per = " + ".join(str(rank.total()) for rank in y)
    x, y = (sum(side, Counter()) for side in (x, y))
    more, less = (y - x).total(), (x - y).total()
    text = f"{x.total()} samples in A, {y.total()} in B ({per}): {more} too many, {less} missing"
    if less:
        yield Cause("evaluation", None, text, "the sets differ, or a process leaves out a part")
    elif more:
        why = "padded shards: these count twice, unless the program drops them"
        yield Cause("padded evaluation", None, text, why)


def numbers(values: np.ndarray) -> str:
    return " ".join(f"{round(float(v), 6) + 0.0:.3g}" for v in values)
