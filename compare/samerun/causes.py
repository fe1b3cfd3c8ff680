"""Why two runs are not the same: pure functions of what their processes saw (records.py).

`alone` looks at what one run shows by itself: its ranks must agree. `parting` compares two runs in
the first step in which weights, settings or gradients differ. Only then it asks why: by samples,
outputs, and what one gradient is made of.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from samerun.records import Limits, Run, gaps, norm, rename, shares


@dataclass
class Cause:
    name: str
    step: int | None  # from 0; None: of no step
    text: str  # what differs, and by how much
    why: str
    even: str = ""  # what to make even, to look behind it
    hides: bool = False  # gradients, and all that follows


NO_SEED = "no seed"  # the only cause that is of A alone


def near(value: float, *others: float) -> bool:
    return any(bool(np.isclose(value, other, rtol=2e-3)) for other in others)


def diagnose(a: Run, b: Run, again: Run, limits: Limits, even: list[str]) -> list[Cause]:
    """Return the causes by which B is not A. What both runs do is no difference."""
    if text := restless(a, again, limits):
        text = f"A, started twice, is not the same run: {text}"
        why = "no seed is set; or it resumes from a file that it wrote: name that as {dir}/FILE"
        return [Cause(NO_SEED, 0, text, why, "seed")]
    rename(a, b)
    x, y = ({cause.name: cause for cause in alone(run)} for run in (a, b))
    found = [cause for name, cause in (x | y).items() if not (name in x and name in y)]
    parted = list(parting(a, b, limits, even, hidden=any(c.hides for c in found)))
    if any(c.even == "order" for c in found):  # of the second epoch: what differs there follows
        first = len(b.orders()[0])
        taken = np.cumsum([len(b.samples(k)[0]) for k in range(b.steps)])
        parted = [c for c in parted if c.even != "order" or taken[c.step] <= first]
    found += parted
    if not any(c.even == "order" for c in found):  # an evaluation may take samples of the training
        found += evaluation(a, b)
    return found or list(averages(a, b, again))


def restless(a: Run, again: Run, limits: Limits) -> str:
    """Return by what A differs from A with another last bit that is no rounding; or nothing."""
    x, y = (sorted(s.look for rank in run.samples(0) for s in rank) for run in (a, again))
    if x != y:
        return "other inputs go into the network in step 1"
    first = gaps(a.whole(0, "weights"), again.whole(0, "weights"))
    if far := [gap for name, gap in first.items() if gap > 100 * a.eps(name)]:
        return f"its first weights differ by {max(far):.1g}"
    for k in range(5):
        noise = limits.noise.get((k, "gradients"))
        if noise is None:  # of a run that ended
            return ""
        if a.whole(k, "gradients").keys() != noise.keys():
            return f"other tensors have gradients in step {k + 1}"
        far = float(np.median([*noise.values()] or [0]))
        if far > max([0.01, *(40 * limits.eps(name) for name in noise)]):
            return f"its gradients differ by {far:.1g} in step {k + 1}"
    return ""


# ---- what one run shows by itself ----------------------------------------------------------------


def alone(run: Run) -> Iterator[Cause]:
    """Yield what does not fit together in one run: its ranks, its optimizer, its epochs."""
    who = f"the {run.world} processes"

    def cause(name: str, text: str, why: str, step: int | None = 0, **more) -> Cause:
        return Cause(name, step, f"{run.letter}: {text}", why, **more)

    apart, parted = run.spread("weights"), run.spread("stepped", 1e-5)
    if apart and apart[0] == 0:
        text = f"{who} begin with different weights ({apart[1]:.1g})"
        why = "each has its own seed, or none, before it builds the network; no DDP sends rank 0's"
        yield cause("seed per process", text, why, hides=True)
    norms = [rank[0]["clips"][0][0] for rank in run.ranks if rank[0]["clips"]]
    if parted and not run.averages_inside() and parted[0] + 1 < run.steps:
        k, far, names = parted
        text = f"{who} step with gradients that differ by {far:.1g} ({', '.join(names[:3])})"
        why = "no DDP, a forward past its wrapper, or no_sync in the last micro-batch too"
        yield cause("not averaged", text, why, k, hides=True)
    elif not parted and norms and max(norms) > min(norms) * 1.001:
        text = f"{who} clip, each by its own norm ({numbers(norms)}), and average after that"
        why = "clip after it, by the norm of the whole batch's gradient"
        yield cause("clipping before the reduction", text, why, hides=True)
    if apart and apart[0] and not parted:
        settings = [shown(rank[apart[0] - 1]["groups"]) for rank in run.ranks]
        why = "from the same gradients: another state of the optimizer, or something changes them"
        if other := next((s for s in settings if s != settings[0]), None):
            why = f"their optimizers have other settings: {settings[0]} and {other}"
        text = f"{who} have different weights ({apart[1]:.1g})"
        yield cause("weights per process", text, why, apart[0], hides=True)
    if apart := run.spread("buffers", 1e-5, start=1):
        text = f"{who} forward with different buffers ({apart[1]:.1g})"
        why = "each process evaluates, and saves, statistics of its own samples"
        yield cause("buffers not broadcast", text, why, apart[0])
    if run.nan is not None:
        why = "nothing can be compared from here on"
        yield cause("NaN", "gradients are NaN or infinite", why, run.nan)
    one, two = (*run.orders(), [], [])[:2]
    if two and one != sorted(one) and one[: len(two)] == two[: len(one)]:
        text = "the second epoch has the order of the first one"
        why = "call sampler.set_epoch(epoch) before each epoch, or draw with another seed in each"
        yield cause("set_epoch is missing", text, why, None, even="order")


# ---- where two runs part -------------------------------------------------------------------------


def parting(a: Run, b: Run, limits: Limits, even: list[str], hidden: bool) -> Iterator[Cause]:
    """Yield what differs in the first step in which something does.

    hidden: one run alone has a fault after which no gradient is that of the whole batch.
    """
    inside = any(run.averages_inside() for run in (a, b))  # then weights tell what gradients do not
    for k in range(min(a.steps, b.steps)):
        changed = list(state("weights", a, b, k, limits))
        explained = [*missing(a, b, k), *modes(a, b, k, even)]  # other gradients follow from these
        found = [*explained, *settings(a, b, k), *changed]
        if inside:
            apart = k + 1 < min(a.steps, b.steps) and limits.excess("weights", a, b, k + 1)
        else:
            apart = differing(a, b, k, limits)
        if not apart and not changed:
            found += state("buffers", a, b, k, limits)
        elif apart and (k == 0 or not changed):
            why = list(samples(a, b, k))
            if not (why or changed or explained):
                why = list(outputs(a, b, k, limits, even))
                if not (why or hidden or inside):
                    why = list(gradients(a, b, k, limits))
            found += why
        yield from found
        if found or hidden:
            return
    for one, other in ((a, b), (b, a)):
        if one.ended and (other.made > one.made or (not other.ended and other.made == one.made)):
            goes = f"ends after {other.made}" if other.ended else f"goes on after {other.made}"
            text = f"{one.letter} ends after {one.made} steps, {other.letter} {goes}"
            yield Cause("number of steps", None, text, "other epochs, or other steps per epoch")


def state(what: str, a: Run, b: Run, k: int, limits: Limits) -> Iterator[Cause]:
    """Compare the weights or the buffers before a step."""
    if over := limits.excess(what, a, b, k):
        name, even = "new weights", ""
        why = "another state of the optimizer, like momentum; or something else changes them"
        if what == "buffers":
            name, even = "buffers", "batchnorm"
            why = "of BatchNorm: statistics of rank 0's samples alone; of others cause not known"
        elif not any(over[1] in a.first(j)["weights"] for j in range(k)):
            name = "first weights"
            why = "another seed, or other draws before the network is built"
        yield Cause(name, k, f"they differ by up to {over[0]:.2g} ({over[1]})", why, even)


def modes(a: Run, b: Run, k: int, even: list[str]) -> Iterator[Cause]:
    """Compare the probabilities of dropout, and in which mode and type the network computes."""
    x, y = (shown(run.network["drops"][:5]) or "0" for run in (a, b))
    if x != y and "dropout" not in even:
        why = "layers of the network drop another share"
        yield Cause("drop probability", k, f"{x} in A, {y} in B", why, "dropout")
    found = []
    for run in (a, b):
        calls = [call for rank in run.calls(k) for call in rank]
        evaluates = " in eval mode" * any(not call["training"] for call in calls)
        found.append(" and ".join(sorted({call["dtype"] for call in calls})) + evaluates)
    if found[0] != found[1] and all(found):
        why = f"A computes in {found[0]}, B in {found[1]}"
        yield Cause("mode or precision", k, "autocast, dtype, or train() and eval()", why)


def settings(a: Run, b: Run, k: int) -> Iterator[Cause]:
    """Compare the optimizer's class, and what it and clipping use for each tensor."""
    x, y = a.first(k), b.first(k)
    shared = x["group_of"].keys() & y["group_of"].keys()
    differ = Counter()
    for name in shared:
        p, q = (side["groups"][side["group_of"][name]] for side in (x, y))
        values = [(option, shown(p[option]), shown(q[option])) for option in p.keys() & q.keys()]
        differ.update(value for value in values if value[1] != value[2])
    if kinds := [pair for option, *pair in differ if option == "optimizer"]:
        text = f"A has {kinds[0][0]}, B {kinds[0][1]}"
        yield Cause("another optimizer", k, text, "another class")
        return
    clips = [" and ".join(f"{limit:g}" for _, limit, _ in side["clips"]) for side in (x, y)]
    if clips[0] != clips[1]:
        text = f"by {clips[0] or 'nothing'} in A, by {clips[1] or 'nothing'} in B"
        yield Cause("clipping", k, text, "clip_grad_norm_ has other limits, or is not called")
    for (option, p, q), count in sorted(differ.items()):
        name, why = option, "another value"
        text = f"{p} in A, {q} in B"
        if count < len(shared):
            name, why = f"{option} of a group", "the groups of the optimizer are not the same"
            text += f" for {count} of {len(shared)} parameters"
        elif option == "lr":
            n, ratio = max(a.world, b.world), float(q) / (float(p) or np.inf)
            name, why = "learning rate", "another value, or a scheduler that steps more often"
            if k == 0 and n > 1 and near(ratio, n, 1 / n):
                why = f"times {n}, the number of processes: it is scaled with the batch size"
        yield Cause(name, k, text, why)


def shown(value: object) -> str:
    """Return a setting in words, which are equal for numbers that differ by a rounding."""
    if isinstance(value, dict):
        return " ".join(f"{key} {shown(v)}" for key, v in sorted(value.items()))
    if isinstance(value, (tuple, list)):
        return ", ".join(map(shown, value))
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def samples(a: Run, b: Run, k: int) -> Iterator[Cause]:
    """Compare which samples go into the networks, and how they look."""
    x, y = ([s for rank in run.samples(k) for s in rank] for run in (a, b))
    looks = [Counter(s.look for s in side) for side in (x, y)]
    known = all(s.index is not None for s in x + y)  # by a loader; else by their contents alone
    p, q = (Counter(s.key if known else s.look for s in side) for side in (x, y))
    if looks[0] == looks[1] or not (a.split(k) and b.split(k)) or same_outputs(a, b, k):
        return
    for run in (a, b):
        taken = [sorted(str(s.key) for s in rank) for rank in run.samples(k)]
        if run.world > 1 and all(rank == taken[0] for rank in taken):
            text = f"{run.letter}: the {run.world} processes take the same {len(taken[0])} samples"
            why = "no DistributedSampler, or one with the same rank in all: N processes do one's "
            yield Cause("no sampler", k, text, why + "work", hides=True)
            return
    text = f"{(p & q).total()} of {len(x)} samples are those of A"
    if p == q:
        text = f"the same samples, but {len(y) - (looks[0] & looks[1]).total()} look different"
        why = "random transforms draw from the state of each process, or the data set is another"
        yield Cause("augmentation", k, text, why, "augment")
    elif len(x) != len(y):
        n, ratio = max(a.world, b.world), len(y) / len(x)
        text = f"a step takes {a.per_rank(k)} samples in A, {b.per_rank(k)} in B"
        name, why = "batch size", "another number; the last batch of an epoch may be cut or filled"
        if n > 1 and near(ratio, n, 1 / n):
            name = "batch per process"
            why = "the batch size is that of a process in one, of all in the other"
        yield Cause(name, k, text, why)
    elif not known:
        why = "other samples, another order, or numbers that each process draws"
        yield Cause("inputs of the network", k, text, why)
    else:
        why = "another sampler, seed, epoch or shuffle"
        yield Cause("order of samples", k, text, why, "order")


def same_outputs(a: Run, b: Run, k: int) -> bool:
    """Say whether the outputs are the same, in any order: then the inputs are padded otherwise."""
    x, y = (np.array(sorted(row[1:] for row in run.outputs(k))) for run in (a, b))
    return len(x) > 1 and x.shape == y.shape and np.allclose(x, y, rtol=1e-4)


def outputs(a: Run, b: Run, k: int, limits: Limits, even: list[str]) -> Iterator[Cause]:
    """Compare what the networks make of the same samples with the same weights."""
    over = limits.excess("outputs", a, b, k)
    if not over or same_outputs(a, b, k):
        return
    text = f"the same samples and weights give other outputs, by {over[0]:.1g}"
    norms, drops = [run.network["norms"] for run in (a, b)], a.network["drops"]
    if any(norms) and "batchnorm" not in even:
        why = "its statistics are those of what a process has in one micro-batch"
        yield Cause("BatchNorm", k, text, why, "batchnorm")
    elif drops and "dropout" not in even:
        why = "each process draws its own masks"
        yield Cause("dropout", k, text, why, "dropout")
    else:
        why = "the network draws numbers, mixes its samples, or is another one: cause not known"
        yield Cause("outputs", k, text, why, "dropout")


def missing(a: Run, b: Run, k: int) -> Iterator[Cause]:
    """Compare which tensors have a gradient."""
    for run, there in ((a, b), (b, a)):
        mine, theirs = (side.whole(k, "gradients") for side in (run, there))
        large = [name for name in mine if norm({name: mine[name]}) > 1e-6 * norm(mine)]
        names = [name for name in large if name not in theirs]
        if names and not there.first(k)["unseen"]:
            text = f"{len(names)} of {run.letter}'s optimizer have a gradient, but none in "
            text += f"{there.letter}'s: {', '.join(names[:3])}"
            why = f"in {there.letter} they are frozen, unused or in no optimizer, or the network "
            why += "was copied or rebuilt after the optimizer was made"
            yield Cause("tensors without a gradient", k, text, why)


def differing(a: Run, b: Run, k: int, limits: Limits) -> tuple[float, str] | None:
    """Return how far a gradient is beyond roundings, and of which tensor."""
    over = limits.excess("gradients", a, b, k)
    [factor], left = shares(b.whole(k, "gradients"), [a.whole(k, "gradients")])
    by_chance = left < allowed(limits, k) and abs(factor - 1) < max(3 * left, 1e-6)
    return None if over and over[0] < 0.01 and by_chance else over


def allowed(limits: Limits, k: int) -> float:
    """Return which part of a gradient may be left when it is made of others."""
    usual = [limits.of("gradients", k, name) for name in limits.noise[k, "gradients"]]
    most = max([1e-3, *(4 * limits.eps(name) for name in limits.noise[k, "gradients"])])
    return min(max(30 * float(np.median(usual or [0])), 1e-6), most)


def gradients(a: Run, b: Run, k: int, limits: Limits) -> Iterator[Cause]:
    """Say how one gradient, as it was before clipping, is made of the other's pieces."""
    few, many = (a, b) if a.world <= b.world else (b, a)
    x, y = few.whole(k, "gradients"), many.whole(k, "gradients")
    [factor], left = shares(y, [x])
    losses, pieces = zip(*(many.pieces(k) or [(np.nan, {})]))
    (mine, rest), (theirs, their_rest) = shares(x, pieces), shares(y, pieces)
    if left < allowed(limits, k):
        joined = theirs.mean() * many.world if their_rest < 1e-3 else np.nan
        name, why = factor_of(factor, joined, few, many, k)
        text = f"{many.letter}'s gradient is {factor:.6g} times {few.letter}'s"
        yield Cause(name, k, text, why)
        return
    name, why = "gradient", "another loss, a part is detached, zero_grad is missing, or the like"
    if not (a.split(k) and b.split(k)):
        why = "other samples, which cannot be told apart here, or another loss"
    far, tensor = limits.excess("gradients", a, b, k)
    few_loss = np.mean([loss for loss, _ in few.pieces(k)] or [np.nan])
    text = f"they differ by {far:.1g} ({tensor}), and are no multiple; mean loss {few_loss:.6g} in "
    text += f"{few.letter}, {np.mean(losses):.6g} in {many.letter}"
    if len(pieces) > 1 and max(rest, their_rest) < max(allowed(limits, k), 1e-4):
        name = "weights of the pieces"
        why = f"{few.letter} weighs {many.letter}'s pieces by {numbers(mine)}, "
        why += f"{many.letter} by {numbers(theirs)}"
        alike = [np.ptp(factors) < 0.01 * max(abs(factors)) for factors in (mine, theirs)]
        if any(alike) and min(*abs(mine), *abs(theirs)) > 1e-3:
            name = "mean of means"
            why += ": in one each piece counts alike, in the other by its samples or tokens"
            yield Cause(name, k, text, why)
            return
    yield Cause(name, k, text, f"{why}: cause not known")


def factor_of(factor: float, joined: float, few: Run, many: Run, k: int) -> tuple[str, str]:
    """Name a factor of the gradient. joined: what the reduction made of the sum of the pieces."""
    n, micro, per = many.world, len(many.first(k)["pieces"]) or 1, len(many.samples(k)[0])
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
    for way in ("look", "key"):  # their contents, before what a loader calls them
        ones, others = ([Counter(getattr(s, way) for s in r) for r in side] for side in (x, y))
        one, other = (sum(side, Counter()) for side in (ones, others))
        if not one or one == other or all(rank == ones[0] for rank in others):
            return  # each process, or one alone, evaluates all of A's
    more, less = (other - one).total(), (one - other).total()
    per = " + ".join(str(rank.total()) for rank in others)
    text = f"{one.total()} samples in A, {other.total()} in B ({per}): "
    text += f"{more} too many, {less} missing"
    if less and (more != less or all(s.index is not None for rank in (*x, *y) for s in rank)):
        yield Cause("evaluation", None, text, "the sets differ, or a process leaves out a part")
    elif more and not less:
        why = "padded shards: these count twice, unless the program drops them"
        yield Cause("padded evaluation", None, text, why)


def averages(a: Run, b: Run, again: Run) -> Iterator[Cause]:
    """Compare copies of a network that follow it, where they are evaluated or updated."""
    shared = sorted(a.averages.keys() & b.averages.keys() & again.averages.keys())
    for k, number in shared:
        mine = a.averages[k, number]
        noise = max(gaps(mine, again.averages[k, number]).values(), default=0)
        far = max(gaps(mine, b.averages[k, number]).values(), default=0)
        if k <= min(a.steps, b.steps) and far > max(1e-5, 30 * noise):
            text = f"it differs by {far:.1g} in a copy of the network that is evaluated or updated"
            why = "another decay, or updated another number of times in a step"
            yield Cause("average of the weights", k - 1, text, why)
            return


def numbers(values: np.ndarray) -> str:
    return " ".join(f"{round(float(v), 6) + 0.0:.3g}" for v in values)
