"""Why two runs are not the same: pure functions of what their processes saw (records.py).

A step is compared quantity by quantity, in the order in which it computes them: weights, settings,
samples, outputs, gradients, buffers. `alone` looks at what one run shows by itself: its ranks must
agree. Each comparison gives Facts; the first row of CAUSES whose question they answer names them.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from tools.compare.records import Limits, Run, common_outputs, gaps, key, norm, rename, shares


class Facts(SimpleNamespace):
    """What is known of a difference: its quantity, step and text, and what questions ask for."""


@dataclass
class Row:
    of: str  # the quantity that differs
    name: str
    asks: Callable[[Facts], object]
    why: str  # words, with facts in them
    even: str = ""  # what to make even, to look behind it: even.py
    hides: bool = False  # gradients, and all that follows
    note: bool = False  # no difference by itself


@dataclass
class Cause:
    name: str
    step: int | None  # from 0; None: of no step
    text: str
    why: str
    even: dict = field(default_factory=dict)
    hides: bool = False
    note: bool = False


def always(facts: Facts) -> bool:
    return True


def near(value: float, *others: float) -> bool:
    return any(bool(np.isclose(value, other, rtol=2e-3)) for other in others)


ALONE = "gradients of the processes"
# fmt: off
CAUSES = [
    # What one run shows by itself.
    Row("no seed", "no seed", always,
        "no seed is set; or it resumes from a file that it wrote: name that as {{dir}}/FILE", even="seed"),
    Row("optimizer", "optimizer of another network", lambda f: f.strange, hides=True,
        why="the network was copied, rebuilt or cut into shards after the optimizer was made"),
    Row("optimizer", "parameters in no optimizer", always, hides=True,
        why="made after the optimizer, or left out of its groups: they stay as they are"),
    Row("same samples", "rank of the sampler", lambda f: f.sampler == "DistributedSampler", hides=True,
        why="DistributedSampler has the same rank, or one replica, in all of them"),
    Row("same samples", "no sampler", always, hides=True,
        why="no DistributedSampler: N processes do the work of one"),
    Row("weights of the processes", "seed per process", always, even="weights",
        why="each process has its own seed, or none, before it builds the network; no DDP sends "
            "rank 0's weights"),
    Row("clipping of the processes", "clipping before the reduction", always, hides=True,
        why="clip after it, by the norm of the whole batch's gradient"),
    Row(ALONE, "no process group", lambda f: not f.connected, hides=True,
        why="no process group was made: each process trains a network of its own"),
    Row(ALONE, "past the wrapper", lambda f: f.made and not f.called, hides=True,
        why="the forward goes past the DDP wrapper: call the wrapper, not the network"),
    Row(ALONE, "not in DDP", lambda f: not f.called, hides=True,
        why="the network is not in DDP, and nothing else averages its gradients before the step"),
    Row(ALONE, "no_sync in the last micro-batch", lambda f: f.micro > 1, hides=True,
        why="no_sync is around the last micro-batch of a step too, which has to average"),
    Row(ALONE, "gradients are not averaged", always, "though DDP is called: cause not known", hides=True),
    Row("buffers of the processes", "buffers not broadcast", always,
        "each process evaluates, and saves, statistics of its own samples"),
    Row("NaN", "NaN", always, "nothing can be compared from here on"),
    Row("second epoch", "set_epoch is missing", always, even="order",
        why="call sampler.set_epoch(epoch) before each epoch, or draw with another seed in each"),
    Row("padding", "padded epoch", always, "DistributedSampler without drop_last", note=True),
    Row("no gradient", "zero gradients", always, "it trains nothing", note=True),
    # Where two runs part, in the order in which a step computes.
    Row("weights", "first weights", lambda f: f.step == 0, even="weights",
        why="another seed, or other draws before the network is built"),
    Row("weights", "new weights", always,
        "another state of the optimizer, like momentum of earlier steps; or something changes them "
        "after its step"),
    Row("optimizers", "another optimizer", always, "another class"),
    Row("learning rate", "scheduler per process", lambda f: f.pace, even="settings",
        why="{f.pace[0]}'s schedule runs {f.pace[1]} times as fast: for each step the scheduler "
            "steps {f.calls[0]} times in A, {f.calls[1]} in B"),
    Row("learning rate", "rate times processes", lambda f: f.n > 1 and near(f.ratio, f.n, 1 / f.n),
        "times {f.n}, the number of processes: it is scaled with the batch size", even="settings"),
    Row("learning rate", "learning rate", lambda f: f.step == 0, "another value", even="settings"),
    Row("learning rate", "schedule", always, "equal up to here: another schedule", even="settings"),
    Row("clipping", "clipping", always, "the limits of clip_grad_norm_"),
    Row("setting", "{f.option} of a group", lambda f: f.some, even="settings",
        why="the groups of the optimizer are not the same"),
    Row("setting", "{f.option}", always, "another value", even="settings"),
    Row("samples", "targets", lambda f: f.looks_alike, "they are drawn, shifted or transformed differently"),
    Row("samples", "augmentation", lambda f: f.alike, even="augment",
        why="random transforms draw from the state of each process or worker"),
    Row("samples", "batch per process", lambda f: f.n > 1 and near(f.ratio, f.n, 1 / f.n),
        "the batch size is that of a process in one, of all in the other"),
    Row("samples", "last batch", lambda f: f.ratio != 1 and f.step,
        "the last batch of an epoch: one drops it, fills it, or cuts it differently"),
    Row("samples", "batch size", lambda f: f.ratio != 1, "another number"),
    Row("samples", "samples twice", lambda f: f.twice,
        "processes share samples, or the sampler fills its last batch"),
    Row("samples", "sampler", lambda f: f.kinds[0] != f.kinds[1], even="order",
        why="drawn by {f.kinds[0]} in A, by {f.kinds[1]} in B"),
    Row("samples", "shuffle", lambda f: f.shuffle[0] != f.shuffle[1], even="order",
        why="shuffle is {f.shuffle[0]} in A, {f.shuffle[1]} in B"),
    Row("samples", "order of samples", always, even="order",
        why="{f.kinds[0]} draws another order: another seed, epoch or generator"),
    Row("outputs", "eval mode", lambda f: f.modes[0] != f.modes[1],
        "{f.in_eval} trains in eval mode: train() is missing after an evaluation"),
    Row("outputs", "precision", lambda f: f.casts[0] != f.casts[1],
        "A computes in {f.casts[0]}, B in {f.casts[1]}"),
    Row("outputs", "BatchNorm", lambda f: any(f.norms) and "batchnorm" not in f.even, even="batchnorm",
        why="{f.norms[0]} BatchNorm layers in A, {f.norms[1]} in B compute statistics of what a "
            "process has in one micro-batch"),
    Row("outputs", "dropout", lambda f: any(f.noises) and "dropout" not in f.even, even="dropout",
        why="{f.noises[0]} layers in A, {f.noises[1]} in B drop something, with masks of each process"),
    Row("outputs", "outputs", always, even="dropout",
        why="the network draws numbers, mixes its samples, or is another one: cause not known"),
    Row("missing", "frozen parameters", lambda f: f.frozen, "requires_grad is False there"),
    Row("missing", "unused parameters", always, "the loss there does not use them"),
    Row("gradients", "sum over processes", lambda f: f.times(f.n) and f.joined(f.n), even="gradient",
        why="over the {f.n} processes gradients are summed, not averaged; each process's loss is right"),
    Row("gradients", "divided twice", lambda f: f.times(1 / f.n) and f.joined(1 / f.n), even="gradient",
        why="gradients are divided by the {f.n} processes twice; each process's loss is right"),
    Row("gradients", "loss is a sum", lambda f: f.number_of(f.factor), even="gradient",
        why="{f.many}'s loss is a sum over {f.number} where {f.few} takes the mean"),
    Row("gradients", "loss divided too often", lambda f: f.number_of(1 / f.factor), even="gradient",
        why="{f.many} divides by {f.number} once more than {f.few}"),
    Row("gradients", "factor of the gradient", lambda f: f.multiple, even="gradient",
        why="another weight or scale of the loss: cause not known"),
    Row("gradients", "zero_grad is missing", lambda f: f.earlier,
        "{f.many}'s gradient of the step before is in it"),
    Row("gradients", "pieces left out", lambda f: f.pieces and f.left_out,
        "{f.weighs}: zero_grad is called between the micro-batches of a step"),
    Row("gradients", "mean of means", lambda f: f.pieces and f.by_count,
        "{f.weighs}: each piece counts alike, though they have unequal numbers of samples"),
    Row("gradients", "mean of means of tokens", lambda f: f.pieces and f.unequal,
        "{f.weighs}: {f.few} weighs by what its loss counts (tokens, boxes), which differs between them"),
    Row("gradients", "weights of the pieces", lambda f: f.pieces, "{f.weighs}: cause not known"),
    Row("gradients", "another loss", lambda f: not f.losses_alike, "outputs are equal, the loss is not"),
    Row("gradients", "gradient", always,
        "outputs and loss are equal: a part is detached, or something changes gradients after the "
        "backward; cause not known"),
    Row("buffers", "buffers", always, even="batchnorm",
        why="of BatchNorm: statistics of the samples of rank 0 alone; of others the cause is not known"),
    Row("length", "number of steps", always, "other epochs, or other steps per epoch"),
    Row("evaluation", "padded evaluation", lambda f: f.more and not f.less,
        "padded shards: these count twice, unless the program drops them"),
    Row("evaluation", "evaluation", always, "the sets differ, or a process leaves out a part"),
]
# fmt: on


def explain(found: Facts) -> Cause:
    """Return the cause of a difference: the first row whose question it answers."""
    row = next(row for row in CAUSES if row.of == found.of and row.asks(found))
    value = getattr(found, "value", True)  # None: there is no way to make this one even
    even = {row.even: value} if row.even and value is not None else {}
    name, why = row.name.format(f=found), row.why.format(f=found)
    return Cause(name, found.step, found.text, why, even, row.hides, row.note)


def diagnose(a: Run, b: Run, again: Run, limits: Limits, even: dict) -> list[Cause]:
    """Return the causes by which B is not A, and what both runs show, as notes."""
    rename(a, again)
    far = max(gaps(a.whole(0, "weights"), again.whole(0, "weights")).values(), default=0)
    if far > 1e-5 or list(samples(a, again, 0)):
        text = "A, started twice, is not the same run"
        return [explain(Facts(of="no seed", step=0, text=text))]
    sides = [[explain(f) for f in alone(run, limits)] for run in (a, b)]
    both = {c.name for c in sides[0]} & {c.name for c in sides[1]}
    mine = [*sides[0], *sides[1]]
    for cause in mine:
        cause.note |= cause.name in both
    differ = [c for c in mine if not c.note]
    parted = [*parting(a, b, limits, even, any(c.hides for c in differ))]
    if any("order" in c.even for c in differ):  # of the second epoch: what differs there follows
        parted = [f for f in parted if f.of != "samples" or not b.samples(f.step)[0][0][0][1]]
    found = mine + [explain(f) for f in parted]
    if any("order" in c.even for c in found):
        return found  # an evaluation may take samples of the training set: first their order
    return found + [explain(f) for f in evaluation(a, b)]


# ---- what one run shows by itself ----------------------------------------------------------------


def alone(run: Run, limits: Limits) -> Iterator[Facts]:
    """Yield what does not fit together in one run: its ranks, its optimizer, its epochs."""
    x, first, loader, allowed = run.letter, run.first(0), run.loader(), max(limits.floor, 1e-5)
    who = f"{x}: the {run.world} processes"
    if strange := first["strange"]:
        every = strange + len(first["group_of"])
        text = f"{x}: {strange} of {every} tensors of the optimizer are in no trained network"
        yield Facts(of="optimizer", step=0, text=text, strange=True)
    if names := run.first(run.made - 1)["forgotten"]:
        text = f"{x}: {len(names)} trainable parameters are in no optimizer: {', '.join(names[:3])}"
        yield Facts(of="optimizer", step=0, text=text, strange=False)
    taken = [sorted(map(key, rank)) for rank in run.samples(0)]
    if run.world > 1 and taken[0] and all(rank == taken[0] for rank in taken):
        text = f"{who} take the same {len(taken[0])} samples"
        yield Facts(of="same samples", step=0, text=text, sampler=loader["sampler"])
    if (apart := run.spread("weights", allowed)) and apart[0] == 0:
        text = f"{who} begin with different weights ({apart[1]:.1g})"
        yield Facts(of="weights of the processes", step=0, text=text)
    parted = run.spread("gradients", allowed)
    if parted:
        k, far = parted
        text, step = f"{who} step with different gradients ({far:.1g})", run.first(k)
        facts = {"connected": step["connected"], "micro": len(step["pieces"])}
        facts |= {"made": "DDP made" in step["wrappers"]}
        facts |= {"called": "DistributedDataParallel" in step["wrappers"]}
        yield Facts(of=ALONE, step=k, text=text, **facts)
    norms = [rank[0]["clips"][0][0] for rank in run.ranks if rank[0]["clips"]]
    if not parted and norms and max(norms) > min(norms) * (1 + 100 * allowed):
        each = ", ".join(f"{n:.3g}" for n in norms)
        text = f"{who} clip, each by its own norm ({each}), and average after that"
        yield Facts(of="clipping of the processes", step=0, text=text)
    if buffers := run.spread("buffers", allowed, start=1):
        text = f"{who} forward with different buffers ({buffers[1]:.1g})"
        yield Facts(of="buffers of the processes", step=buffers[0], text=text)
    if run.nan is not None:
        yield Facts(of="NaN", step=run.nan, text=f"{x}: gradients are NaN or infinite")
    elif not any(norm(run.whole(k, "gradients")) for k in range(run.steps)):
        yield Facts(of="no gradient", step=0, text=f"{x}: every gradient is 0 in {run.steps} steps")
    one, two = run.order(0), run.order(1)
    if two and one != sorted(one) and one[: len(two)] == two[: len(one)]:
        text = f"{x}: the second epoch has the order of the first one"
        yield Facts(of="second epoch", step=None, text=text)
    if (extra := loader["extra"]) > 0:
        text = f"{x}: the sampler fills each epoch of {loader['size']} samples with {extra} twice"
        yield Facts(of="padding", step=None, text=text)


# ---- where two runs part -------------------------------------------------------------------------


def parting(a: Run, b: Run, limits: Limits, even: dict, hidden: bool) -> Iterator[Facts]:
    """Yield what differs in the first step in which something does.

    hidden: one run alone has a fault after which no gradient is that of the whole batch.
    """
    rename(a, b)
    for k in range(min(a.steps, b.steps)):
        found = [*tensors("weights", a, b, k, limits), *settings(a, b, k), *samples(a, b, k)]
        if {f.of for f in found} <= {"learning rate", "setting"}:
            found += outputs(a, b, k, limits, even)
        if {f.of for f in found} <= {"learning rate", "setting"} and not hidden:
            found += gradients(a, b, k, limits) or tensors("buffers", a, b, k, limits)
        yield from found
        if found or hidden:
            return
    if a.ended and b.ended and a.made != b.made:
        text = f"A ends after {a.made} steps, B after {b.made}"
        yield Facts(of="length", step=None, text=text)


def tensors(what: str, a: Run, b: Run, k: int, limits: Limits) -> list[Facts]:
    """Compare weights or buffers before a step."""
    over = limits.excess(k, what, a.whole(k, what), b.whole(k, what))
    text = over and f"they differ by up to {over[0]:.2g} ({over[1]})"
    return [Facts(of=what, step=k, text=text)] if over else []


def settings(a: Run, b: Run, k: int) -> Iterator[Facts]:
    """Compare the optimizer's class, and what it and clipping use for each parameter."""
    x, y, n = a.first(k), b.first(k), max(a.world, b.world)
    if x["optimizer"] != y["optimizer"]:
        text = f"A has {x['optimizer']}, B {y['optimizer']}"
        yield Facts(of="optimizers", step=k, text=text)
        return
    clips = [[f"{limit:g}" for _, limit in side["clips"]] for side in (x, y)]
    if clips[0] != clips[1]:
        does = [f"clips by {' and '.join(c)}" if c else "does not clip" for c in clips]
        yield Facts(of="clipping", step=k, text=f"A {does[0]}, B {does[1]}")
    groups = [a.first(j)["groups"] for j in range(a.made)]  # which B can get, if it has as many
    value = groups if len(x["groups"]) == len(y["groups"]) else None
    differ = Counter()
    shared = [name for name in x["group_of"] if name in y["group_of"]]
    for name in shared:
        p, q = (side["groups"][side["group_of"][name]] for side in (x, y))
        differ.update((o, p[o], q[o]) for o in p.keys() & q.keys() if not same(p[o], q[o]))
    for (option, p, q), count in sorted(differ.items(), key=str):
        some = count < len(shared)
        words = f" for {count} of {len(shared)} parameters" if some else ""
        facts = {"step": k, "option": option, "some": some, "n": n, "value": value}
        if option == "lr":
            facts |= {"of": "learning rate", "ratio": q / p if p else np.inf, "pace": pace(a, b)}
            facts["calls"] = [run.first(1 if run.made > 1 else 0)["schedulers"] for run in (a, b)]
        text = f"{shown(p)} in A, {shown(q)} in B{words}"
        yield Facts(**{"of": "setting", "text": text, **facts})


def same(p: object, q: object) -> bool:
    numbers = all(isinstance(v, (int, float)) for v in (p, q))
    return p == q or (numbers and bool(np.isclose(p, q, rtol=1e-9, atol=0)))


def shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def pace(a: Run, b: Run) -> tuple[str, int] | None:
    """Return whose schedule is faster, and how many times, if one is."""
    for n in range(2, 9):
        for fast, slow in ((b, a), (a, b)):
            x, y = slow.rates()[::n], fast.rates()
            size = min(len(x), len(y))
            if len(set(x[:size])) > 2 and np.allclose(x[:size], y[:size], rtol=1e-6, atol=0):
                return fast.letter, n
    return None


def samples(a: Run, b: Run, k: int) -> Iterator[Facts]:
    """Compare which samples go into the networks, how they look, and their targets."""
    x, y = ([s for rank in run.samples(k) for s in rank] for run in (a, b))
    looks = [Counter(s[2] for s in side) for side in (x, y)]
    named = all(s[1] is not None for s in x + y)  # by a loader; else by their contents alone
    p, q = (Counter(key(s) if named else s[2] for s in side) for side in (x, y))
    of_look = [{s[2]: s[3] for s in side if s[3] is not None} for side in (x, y)]
    both = of_look[0].keys() & of_look[1].keys()
    other = sum(of_look[0][h] != of_look[1][h] for h in both)
    if looks[0] == looks[1] and not other:
        return
    sizes = [" + ".join(str(len(rank)) for rank in run.samples(k)) for run in (a, b)]
    text = f"{sum((p & q).values())} of {len(x)} samples are those of A"
    if looks[0] == looks[1]:
        text = f"the same inputs, but {other} of {len(x)} have another target"
    elif p == q:
        changed = len(y) - sum((looks[0] & looks[1]).values())
        text = f"the same samples, but {changed} look different"
    elif len(x) != len(y):
        text = f"a step takes {sizes[0]} samples in A, {sizes[1]} in B"
    loaders = [run.loader() for run in (a, b)]
    facts = {"kinds": [one["sampler"] for one in loaders], "n": max(a.world, b.world)}
    facts |= {"shuffle": [one["shuffle"] for one in loaders], "ratio": len(y) / max(1, len(x))}
    facts |= {"twice": len(q) < len(y) and len(p) == len(x), "alike": p == q}
    yield Facts(of="samples", step=k, text=text, looks_alike=looks[0] == looks[1], **facts)


def outputs(a: Run, b: Run, k: int, limits: Limits, even: dict) -> list[Facts]:
    """Compare what the networks make of the same samples with the same weights."""
    calls = [[c for rank in run.calls(k) for c in rank] for run in (a, b)]
    modes = [all(c["training"] for c in side) for side in calls]
    over = limits.excess(k, "outputs", *common_outputs(a, b, k))
    if not over and modes[0] == modes[1]:
        return []
    casts = [" ".join(sorted({c["dtype"] for c in side})) for side in calls]
    kinds = {n: [len(run.network[n]) for run in (a, b)] for n in ("norms", "noises")}
    text = f"the same samples and weights give other outputs, by {over[0] if over else 0:.1g}"
    facts = {"in_eval": "B" if modes[0] else "A", "even": even, **kinds}
    return [Facts(of="outputs", step=k, text=text, modes=modes, casts=casts, **facts)]


def gradients(a: Run, b: Run, k: int, limits: Limits) -> list[Facts]:
    """Compare the gradients before clipping, and say how one is made of the other's pieces."""
    few, many = (a, b) if a.world <= b.world else (b, a)
    x, y = few.whole(k, "gradients"), many.whole(k, "gradients")
    for mine, theirs, run, there in ((x, y, many, few), (y, x, few, many)):
        names = [n for n in mine if n not in theirs and n in run.first(k)["group_of"]]
        if names:
            frozen = set(names) <= set(run.first(k)["frozen"])
            text = f"{len(names)} have a gradient in {there.letter}, none in {run.letter}: {', '.join(names[:3])}"
            return [Facts(of="missing", step=k, text=text, frozen=frozen)]
    over = limits.excess(k, "gradients", x, y)
    if not over:
        return []
    allowed = min(max(30 * limits.at(k, "gradients"), 1e-6), 1e-3)
    factor, left = shares(y, [x])
    before = {n: v for n, v in many.whole(k - 1, "gradients").items() if n in y} if k else {}
    two, left_of_two = shares(y, [x, before])
    pieces = many.pieces(k)
    mine, rest = shares(x, [p for _, _, p in pieces])
    theirs, rest2 = shares(y, [p for _, _, p in pieces])
    losses = [float(np.mean([p[1] for p in run.pieces(k)] or [np.nan])) for run in (few, many)]
    counts, n = np.array([count for count, *_ in pieces], float), many.world
    f = Facts(of="gradients", step=k, few=few.letter, many=many.letter, n=n, factor=factor[0])
    f.multiple, f.counts, f.mine, f.theirs = left < allowed, counts, mine, theirs
    f.value = f.factor if many is b else 1 / f.factor
    if f.multiple and abs(f.factor - 1) < 1e-3:
        return []  # roundings, which are larger than those of A by chance
    if any(
        size > limit
        for r in (few, many)
        for j in range(k, r.made)
        for size, limit in r.first(j)["clips"]
    ):
        f.value = None  # what clipping leaves has another factor
    f.text = f"they differ by {over[0]:.1g} ({over[1]}), and are no multiple; mean loss {losses[0]:.6g} in {f.few}, {losses[1]:.6g} in {f.many}"
    if f.multiple:
        f.text = f"{f.many}'s gradient is {f.factor:.6g} times {f.few}'s"
    f.times = lambda c: f.multiple and n > 1 and near(f.factor, c)
    f.joined = lambda c: rest2 < 1e-3 and near(theirs.mean() * n, c)
    f.number_of = lambda c: f.multiple and number_of(f, c, few, many, k)
    f.earlier = left_of_two < allowed and abs(two[1]) > 1e-2
    f.losses_alike = np.isclose(*losses, rtol=max(limits.at(k, "outputs"), 1e-5))
    f.pieces = len(pieces) > 1 and max(rest, rest2) < max(allowed, 1e-4)
    f.weighs = f"{f.few} weighs {f.many}'s pieces of {numbers(counts)} samples by {numbers(mine)}, {f.many} by {numbers(theirs)}"
    if f.pieces:
        f.left_out = min(abs(theirs)) < 1e-3 * max(abs(theirs))
        f.unequal = np.ptp(mine) > 0.01 * max(abs(mine))
        ratio = mine / np.where(theirs, theirs, np.nan)
        by_count = np.allclose(ratio / ratio.mean(), counts / counts.mean(), rtol=1e-2)
        f.by_count = by_count and np.ptp(counts) > 0
    return [f]


def number_of(f: Facts, factor: float, few: Run, many: Run, k: int) -> bool:
    """Say whether a factor is the number of something, and what."""
    n, micro, per = many.world, len(many.first(k)["pieces"]), len(many.samples(k)[0])
    meanings = [(micro, f"{many.letter}'s {micro} micro-batches"), (n, f"the {n} processes")]
    meanings += [(len(few.first(k)["pieces"]), f"{few.letter}'s micro-batches")]
    meanings += [(per / micro, "the samples of a micro-batch"), (per, "the samples of a process")]
    meanings += [(n * micro, "processes and micro-batches"), (n * per, "the samples of a batch")]
    f.number = next((m for number, m in meanings if number > 1 and near(factor, number)), None)
    return f.number is not None


def evaluation(a: Run, b: Run) -> list[Facts]:
    """Compare which samples the first evaluation after a step counts."""
    x, y = ([rank for rank in run.evaluated() if rank] for run in (a, b))
    named = all(s[1] is not None for rank in (*x, *y) for s in rank)
    x, y = ([[key(s) if named else s[2] for s in rank] for rank in side] for side in (x, y))
    if not x or not y or all(Counter(rank) == Counter(x[0]) for rank in y):
        return []  # each process, or one alone, evaluates all of A's
    per = " + ".join(str(len(rank)) for rank in y)
    x, y = (Counter(s for rank in side for s in rank) for side in (x, y))
    more, less = sum((y - x).values()), sum((x - y).values())
    text = f"{sum(x.values())} samples in A, {sum(y.values())} in B ({per}): {more} too many, {less} missing"
    found = [Facts(of="evaluation", step=None, text=text, more=more, less=less)]
    return found if more or less else []


def numbers(values: np.ndarray) -> str:
    return " ".join(f"{round(float(v), 6) + 0.0:.3g}" for v in values)
