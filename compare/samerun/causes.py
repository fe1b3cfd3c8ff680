"""Why two runs are not the same: pure functions of what their processes saw (records.py).

`alone` looks at what one run shows by itself: its ranks must agree. `parting` compares two runs in
the order in which a step computes: weights, settings, samples, outputs, gradients, buffers.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from samerun.records import Limits, Run, gaps, norm, rename, shares


@dataclass
class Cause:
    name: str
    step: int | None  # from 0; None: of no step
    text: str  # what differs, and by how much
    why: str
    even: dict = field(default_factory=dict)  # what to make even, to look behind it
    hides: bool = False  # gradients, and all that follows
    note: bool = False  # no difference by itself


NO_SEED, SEED = "no seed", {"seed": True}


def near(value: float, *others: float) -> bool:
    return any(bool(np.isclose(value, other, rtol=2e-3)) for other in others)


def diagnose(a: Run, b: Run, again: Run, limits: Limits, even: dict) -> list[Cause]:
    """Return the causes by which B is not A, and what both runs show, as notes."""
    if text := restless(a, again, limits):
        why = "no seed is set; or it resumes from a file that it wrote: name that as {dir}/FILE"
        return [Cause(NO_SEED, 0, f"A, started twice, is not the same run: {text}", why, SEED)]
    rename(a, b)
    sides = [list(alone(run)) for run in (a, b)]
    both = {c.name for c in sides[0]} & {c.name for c in sides[1]}
    found = [*sides[0], *sides[1]]
    for cause in found:
        cause.note |= cause.name in both
    differ = [c for c in found if not c.note]
    parted = list(parting(a, b, limits, even, hidden=any(c.hides for c in differ)))
    if any("order" in c.even for c in differ):  # of the second epoch: what differs there follows
        first = len(b.orders()[0])
        taken = np.cumsum([len(b.samples(k)[0]) for k in range(b.steps)])
        parted = [c for c in parted if "order" not in c.even or taken[c.step] <= first]
    found += parted
    if not any("order" in c.even for c in found):  # an evaluation may take samples of the training
        found += evaluation(a, b)
    return found if any(not c.note for c in found) else found + list(averages(a, b, again))


def restless(a: Run, again: Run, limits: Limits) -> str:
    """Return by what A differs from A with another last bit that is no rounding; or nothing."""
    x, y = [sorted(s.look for r in run.samples(0) for s in r) for run in (a, again)]
    if a.split(0) and x != y:
        return "other inputs go into the network in step 1"
    first = gaps(a.whole(0, "weights"), again.whole(0, "weights"))
    if far := [g for n, g in first.items() if g > 100 * a.eps(n)]:
        return f"its first weights differ by {max(far):.1g}"
    for k in range(min(5, a.steps, again.steps)):
        noise = [limits.noise[k, "gradients"][n] for n in a.whole(k, "gradients").keys()
                 & limits.noise[k, "gradients"].keys()]  # fmt: skip
        allowed = max(0.01, 40 * max(map(a.eps, a.first(k)["types"]), default=0))
        if a.whole(k, "gradients").keys() != again.whole(k, "gradients").keys():
            return f"other tensors have gradients in step {k + 1}"
        if noise and np.median(noise) > allowed:
            return f"its gradients differ by {np.median(noise):.1g} in step {k + 1}"
    return ""


# ---- what one run shows by itself ----------------------------------------------------------------


def alone(run: Run) -> Iterator[Cause]:
    """Yield what does not fit together in one run: its ranks, its optimizer, its epochs."""
    first, who = run.first(0), f"the {run.world} processes"

    def cause(name: str, text: str, why: str, step: int | None = 0, **more) -> Cause:
        return Cause(name, step, f"{run.letter}: {text}", why, **more)

    if strange := first["strange"]:
        text = f"{len(strange)} of {len(first['group_of'])} tensors of the optimizer are in no "
        why = "the network was copied, rebuilt or cut into shards after the optimizer was made"
        text += "trained network, and have no gradient"
        yield cause("optimizer of another network", text, why, hides=True)
    if names := run.first(run.made - 1)["forgotten"]:
        text = f"{len(names)} trainable parameters are in no optimizer: {', '.join(names[:3])}"
        why = "made after the optimizer, or left out of its groups: they stay as they are"
        yield cause("parameters in no optimizer", text, why, hides=True)
    apart = run.spread("weights")
    if apart and apart[0] == 0:
        text = f"{who} begin with different weights ({apart[1]:.1g})"
        why = "each has its own seed, or none, before it builds the network; no DDP sends rank 0's"
        yield cause("seed per process", text, why, even={"weights": True})
    norms = [rank[0]["clips"][0][0] for rank in run.ranks if rank[0]["clips"]]
    parted = run.spread("stepped", 1e-5)
    inside = run.averages_inside()
    if parted and not inside and parted[0] + 1 < run.steps:
        events = run.first(parted[0])["events"]
        name, why = "not averaged", "nothing averages the gradients before the step: no DDP?"
        names = [n for n, g in run.first(parted[0])["stepped"].items() if unlike(run, parted[0], n)]
        if len(names) < len(run.first(parted[0])["stepped"]):
            why = f"of {', '.join(names[:3])} alone, which may be outside of DDP"
        elif "DistributedDataParallel" in events:
            name = "no_sync in the last micro-batch"
            why = "no_sync is around the last micro-batch of a step too, which has to average"
        elif "DDP made" in events:
            name = "past the wrapper"
            why = "the forward goes past the DDP wrapper: call the wrapper, not the network"
        text = f"{who} step with different gradients ({parted[1]:.1g})"
        yield cause(name, text, why, parted[0], hides=True)
    elif not parted and norms and max(norms) > min(norms) * 1.001:
        each = ", ".join(f"{n:.3g}" for n in norms)
        text = f"{who} clip, each by its own norm ({each}), and average after that"
        why = "clip after it, by the norm of the whole batch's gradient"
        yield cause("clipping before the reduction", text, why, hides=True)
    for k, steps in enumerate(zip(*run.ranks)):
        if other := next((s for s in steps if shown(s["own"]) != shown(steps[0]["own"])), None):
            text = f"{who} step with other settings: {shown(steps[0]['own'])[:90]} and "
            text += shown(other["own"])[:90]
            yield cause("settings per process", text, "each has its own schedule or rate", k)
            break
    if apart and apart[0] and not parted:
        text = f"{who} have different weights ({apart[1]:.1g})"
        why = "from the same gradients: other settings, another state, or one changes them"
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
        yield cause("set_epoch is missing", text, why, None, even={"order": True})


def unlike(run: Run, k: int, name: str) -> bool:
    """Say whether a gradient is not the same on all ranks."""
    every = [rank[k]["stepped"] for rank in run.ranks]
    return any(gaps(every[0], other).get(name, 0) > 20 * run.eps(name) for other in every[1:])


# ---- where two runs part -------------------------------------------------------------------------


def parting(a: Run, b: Run, limits: Limits, even: dict, hidden: bool) -> Iterator[Cause]:
    """Yield what differs in the first step in which something does.

    hidden: one run alone has a fault after which no gradient is that of the whole batch.
    """
    inside = any(run.averages_inside() for run in (a, b))  # then weights tell what gradients do not
    for k in range(min(a.steps, b.steps)):
        found = [*drops(a, b), *settings(a, b, k), *modes(a, b, k)]
        changed = list(weights(a, b, k, limits))
        found += changed
        if inside:
            apart = k + 1 < b.steps and limits.excess("weights", a, b, k + 1)
        else:
            apart = [*others(a, b, k), *differing(a, b, k, limits)]
        if apart and (not changed or k == 0):
            why = [] if a.split(k) is not b.split(k) else list(samples(a, b, k, limits))
            if not why and not changed:
                why = list(outputs(a, b, k, limits, even))
            if not why and not changed and not hidden and not inside:
                why = list(gradients(a, b, k, limits))
            found += why
        elif not changed:
            found += buffers(a, b, k, limits)
        yield from found
        if found or hidden:
            return
    for one, other in ((a, b), (b, a)):
        if one.ended and (other.made > one.made or (not other.ended and other.made == one.made)):
            goes = f"ends after {other.made}" if other.ended else f"goes on after {other.made}"
            text = f"{one.letter} ends after {one.made} steps, {other.letter} {goes}"
            yield Cause("number of steps", None, text, "other epochs, or other steps per epoch")
            return


def drops(a: Run, b: Run) -> Iterator[Cause]:
    """Compare the probabilities of dropout."""
    x, y = a.network["drops"], b.network["drops"]
    if x != y:
        text = f"{shown(x[:5]) or 'none'} in A, {shown(y[:5]) or 'none'} in B"
        yield Cause("drop probability", 0, text, "of the network's layers", {"dropout": True})


def modes(a: Run, b: Run, k: int) -> Iterator[Cause]:
    """Compare in which mode and type the network computes."""
    found = []
    for run in (a, b):
        calls = [call for rank in run.calls(k) for call in rank]
        evaluates = " in eval mode" * any(not call["training"] for call in calls)
        found.append(" and ".join(sorted({call["dtype"] for call in calls})) + evaluates)
    if found[0] != found[1] and all(found):
        why = f"A computes in {found[0]}, B in {found[1]}"
        yield Cause("mode or precision", k, "autocast, dtype, or train() and eval()", why)


def weights(a: Run, b: Run, k: int, limits: Limits) -> Iterator[Cause]:
    """Compare the weights before a step."""
    if over := limits.excess("weights", a, b, k):
        text = f"they differ by up to {over[0]:.2g} ({over[1]})"
        if over[1] in a.start(k):
            why = "another seed, or other draws before the network is built"
            yield Cause("first weights", k, text, why, {"weights": True})
        else:
            why = "another state of the optimizer, like momentum; or something else changes them"
            yield Cause("new weights", k, text, why)


def buffers(a: Run, b: Run, k: int, limits: Limits) -> Iterator[Cause]:
    if over := limits.excess("buffers", a, b, k):
        text = f"they differ by up to {over[0]:.2g} ({over[1]})"
        why = "of BatchNorm: statistics of rank 0's samples alone; of others cause not known"
        yield Cause("buffers", k, text, why, {"batchnorm": True})


def settings(a: Run, b: Run, k: int) -> Iterator[Cause]:
    """Compare the optimizer's class, and what it and clipping use for each tensor."""
    x, y, n = a.first(k), b.first(k), max(a.world, b.world)
    shared = [n for n in x["group_of"] if n in y["group_of"]]
    differ = Counter()
    for name in shared:
        p, q = (side["groups"][side["group_of"][name]] for side in (x, y))
        values = [(option, shown(p[option]), shown(q[option])) for option in p.keys() & q.keys()]
        differ.update(value for value in values if value[1] != value[2])
    if classes := [(p, q) for option, p, q in differ if option == "optimizer"]:
        text = f"A has {classes[0][0]}, B {classes[0][1]}"
        yield Cause("another optimizer", k, text, "another class")
        return
    clips = [" and ".join(f"{limit:g}" for _, limit, _ in side["clips"]) for side in (x, y)]
    if clips[0] != clips[1]:
        text = f"A clips by {clips[0] or 'nothing'}, B by {clips[1] or 'nothing'}"
        yield Cause("clipping", k, text, "the limits of clip_grad_norm_")
    even = {"settings": []}
    for step in map(a.first, range(a.made)):
        places = {b.own_names.get(name, name): i for name, i in step["group_of"].items()}
        even["settings"].append({"groups": step["groups"], "group_of": places})
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
    if isinstance(value, dict):
        return ", ".join(f"{k} {shown(v)}" for k, v in sorted(value.items()))
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


def samples(a: Run, b: Run, k: int, limits: Limits) -> Iterator[Cause]:
    """Compare which samples go into the networks, and how they look."""
    x, y = ([s for rank in run.samples(k) for s in rank] for run in (a, b))
    looks = [Counter(s.look for s in side) for side in (x, y)]
    known = all(s.index is not None for s in x + y)  # by a loader; else by their contents alone
    p, q = (Counter(s.key if known else s.look for s in side) for side in (x, y))
    if looks[0] == looks[1] or same_outputs(a, b, k):
        return
    for run in (a, b):
        taken = [sorted(str(s.key) for s in rank) for rank in run.samples(k)]
        if run.world > 1 and taken[0] and all(rank == taken[0] for rank in taken):
            text = f"{run.letter}: the {run.world} processes take the same {len(taken[0])} samples"
            why = "no DistributedSampler, or one with the same rank in all: N processes do one's "
            yield Cause("no sampler", k, text, why + "work", hides=True)
            return
    if not (a.split(k) and b.split(k)):
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
    if not known:
        why = "other samples, another order, or numbers that each process draws: no loader tells"
        yield Cause("inputs of the network", k, text, why)
        return
    drawn = [
        e["sampler"] + (f", shuffle {e['shuffle']}" if e["shuffle"] is not None else "")
        for e in (a.loader(), b.loader())
    ]
    why = f"drawn by {drawn[0]} in A, by {drawn[1]} in B, or with another seed or epoch"
    yield Cause("order of samples", k, text, why, {"order": True})


def same_outputs(a: Run, b: Run, k: int) -> bool:
    """Say whether the outputs are the same, in any order: then the inputs are padded otherwise."""
    x, y = (np.array(sorted(map(tuple, run.outputs(k).values()))) for run in (a, b))
    return len(x) > 1 and x.shape == y.shape and np.allclose(x, y, rtol=1e-4)


def outputs(a: Run, b: Run, k: int, limits: Limits, even: dict) -> Iterator[Cause]:
    """Compare what the networks make of the same samples with the same weights."""
    over = limits.excess("outputs", a, b, k)
    if not over:
        return
    text = f"the same samples and weights give other outputs, by {over[0]:.1g}"
    norms, noises = ([run.network["norms"], len(run.network["drops"])] for run in (a, b))
    norms, noises = zip(norms, noises)
    if any(norms) and "batchnorm" not in even:
        why = f"{norms[0]} BatchNorm layers in A, {norms[1]} in B compute statistics of what a "
        why += "process has in one micro-batch"
        yield Cause("BatchNorm", k, text, why, {"batchnorm": True})
    elif any(noises) and "dropout" not in even:
        why = f"{noises[0]} layers in A, {noises[1]} in B drop something, with masks of each "
        yield Cause("dropout", k, text, why + "process", {"dropout": True})
    else:
        why = "the network draws numbers, mixes its samples, or is another one: cause not known"
        yield Cause("outputs", k, text, why, {"dropout": True})


def others(a: Run, b: Run, k: int) -> Iterator[Cause]:
    """Compare which tensors have a gradient that is not nothing."""
    x, y = a.whole(k, "gradients"), b.whole(k, "gradients")
    for mine, theirs, run, there in ((x, y, a, b), (y, x, b, a)):
        tiny = 1e-6 * norm(mine)
        names = [n for n in mine if n not in theirs and norm({n: mine[n]}) > tiny]
        if names and not there.first(k)["unseen"]:
            text = f"{len(names)} have a gradient in {run.letter}, none in {there.letter}: "
            why = f"in {there.letter} requires_grad is False, or the loss does not use them"
            name = "frozen parameters"
            if not set(names) & set(there.held()):
                name, why = "other parameters", f"{there.letter} has no such tensors"
            yield Cause(name, k, text + ", ".join(names[:3]), why)
            return


def differing(a: Run, b: Run, k: int, limits: Limits) -> list[tuple[float, str]]:
    """Return by how much gradients differ beyond roundings, and in which tensor."""
    over = limits.excess("gradients", a, b, k)
    if not over:
        return []
    factors, left = shares(b.whole(k, "gradients"), [a.whole(k, "gradients")])
    if left < allowed(limits, k) and abs(factors[0] - 1) < 1e-3:
        return []  # roundings, which may be larger than those of A by chance
    return [over]


def allowed(limits: Limits, k: int) -> float:
    """Return which part of a gradient may be left when it is made of others."""
    usual = [limits.of("gradients", k, name) for name in limits.noise[k, "gradients"]]
    return min(max(30 * float(np.median(usual or [0])), 1e-6), 1e-3)


def gradients(a: Run, b: Run, k: int, limits: Limits) -> Iterator[Cause]:
    """Compare the gradients before clipping, and say how one is made of the other's pieces."""
    if found := list(others(a, b, k)):
        yield from found
        return
    few, many = (a, b) if a.world <= b.world else (b, a)
    x, y = few.whole(k, "gradients"), many.whole(k, "gradients")
    over, rest_allowed = differing(a, b, k, limits)[0], allowed(limits, k)
    [factor], left = shares(y, [x])
    losses, pieces = zip(*(many.pieces(k) or [(np.nan, {})]))
    losses = [np.nan if loss is None else loss for loss in losses]
    (mine, rest), (theirs, their_rest) = shares(x, pieces), shares(y, pieces)
    if left < rest_allowed:
        joined = theirs.mean() * many.world if their_rest < 1e-3 else np.nan
        name, why = factor_of(factor, joined, few, many, k)
        text = f"{many.letter}'s gradient is {factor:.6g} times {few.letter}'s"
        clips = [c for run in (a, b) for j in range(k, run.made) for c in run.first(j)["clips"]]
        even = {"gradient": [float(factor if many is b else 1 / factor), k]}
        if any(size > limit for size, limit, _ in clips):
            even = {}  # what clipping leaves has another factor
        yield Cause(name, k, text, why, even)
        return
    few_loss = np.mean([loss for loss, _ in few.pieces(k) if loss is not None] or [np.nan])
    text = f"they differ by {over[0]:.1g} ({over[1]}), and are no multiple; "
    text += f"mean loss {few_loss:.6g} in {few.letter}, {np.mean(losses):.6g} in {many.letter}"
    if len(pieces) > 1 and max(rest, their_rest) < max(rest_allowed, 1e-4):
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
        if not (a.split(k) and b.split(k)):
            why = "the inputs cannot be split into samples: other ones, or another loss"
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
    for way in ("look", "key"):  # their contents, before what a loader calls them
        one, other = ([Counter(getattr(s, way) for s in r) for r in side] for side in (x, y))
        if not one or not other or all(rank == one[0] for rank in other):
            return  # each process, or one alone, evaluates all of A's
        per = " + ".join(str(rank.total()) for rank in other)
        one, other = (sum(side, Counter()) for side in (one, other))
        more, less = (other - one).total(), (one - other).total()
        if not more and not less:
            return
    text = f"{one.total()} samples in A, {other.total()} in B ({per}): "
    text += f"{more} too many, {less} missing"
    if less and (known or one.total() != other.total()):
        yield Cause("evaluation", None, text, "the sets differ, or a process leaves out a part")
    elif more and not less:
        why = "padded shards: these count twice, unless the program drops them"
        yield Cause("padded evaluation", None, text, why)


def averages(a: Run, b: Run, again: Run) -> Iterator[Cause]:
    """Compare copies of a network that follow it, where they are evaluated or updated."""
    for number, k in sorted(a.averages.keys() & b.averages.keys(), key=lambda pair: pair[::-1]):
        mine, theirs = a.averages[number, k], b.averages[number, k]
        noise = gaps(mine, again.averages.get((number, k), mine))
        for gap in gaps(mine, theirs).values():
            if k <= min(a.steps, b.steps) and gap > max(1e-5, 30 * max(noise.values())):
                text = f"it differs by {gap:.1g} in a tensor of a copy that is evaluated or updated"
                why = "another decay, or updated another number of times in a step"
                yield Cause("average of the weights", k - 1, text, why)
                return


def numbers(values: np.ndarray) -> str:
    return " ".join(f"{round(float(v), 6) + 0.0:.3g}" for v in values)
