"""Why two runs are not the same: pure functions of what their processes saw (records.py).

`own` yields the faults that one run shows by itself. `parting` returns what differs at the first
step at which two runs part, in the order in which a step computes it: weights, settings, samples,
outputs, gradients, new weights, buffers. A cause that `even` names can be made even (even.py).
"""

import collections
from dataclasses import dataclass, field

import numpy as np

from tools.compare.records import gaps, key, multiple, norm, rename, shares

SEEDED = {"RandomSampler", "DistributedSampler"}  # whose order can be made even


@dataclass
class Cause:
    what: str
    step: int | None
    text: str
    why: str = ""
    even: dict = field(default_factory=dict)
    note: bool = False  # no difference by itself, or one that lies behind all steps


# ---- what one run shows by itself ----------------------------------------------------------------


def own(run, limits):
    x, first = run.letter, run.at(0)[0]
    last = run.at(run.made - 1)[0]
    if first["strange"]:
        count, of = first["strange"], first["strange"] + len(first["group_of"])
        yield Cause(
            "optimizer of another network", 0,
            f"{x}: {count} of {of} tensors of the optimizer belong to no network that is trained",
            "the network was copied, rebuilt or cut into shards after the optimizer was made",
        )  # fmt: skip
    if names := last["forgotten"]:
        yield Cause(
            "parameters in no optimizer", 0,
            f"{x}: {len(names)} trainable parameters are in no optimizer: {', '.join(names[:3])}",
            "made after the optimizer, or left out of its groups: they stay as they are",
        )  # fmt: skip
    thrown = [s["thrown"] for s in run.ranks[0][1 : run.steps]]
    if thrown and min(thrown) > 0:
        yield Cause(
            "gradients thrown away", 1,
            f"{x}: the gradients of {thrown[0]} samples are thrown away before each step",
            "zero_grad is called between the micro-batches of a step",
        )  # fmt: skip
    yield from _ranks(run, limits, x, first)
    for k in range(run.steps):
        events = run.at(k)[0]["events"]
        if "clip" in events and "all_reduce" in events[events.index("clip") :]:
            norms = ", ".join(f"{s['clips'][0][0]:.3g}" for s in run.at(k) if s["clips"])
            yield Cause(
                "clipping before the reduction", k,
                f"{x}: clips before all_reduce, each process by its own norm ({norms})",
                "clip after it, by the norm of the whole batch's gradient",
            )  # fmt: skip
            break
    if run.nan is not None:
        text = f"{x}: the gradients are NaN or infinite; nothing can be compared from here on"
        yield Cause("NaN", run.nan, text)
    elif not any(norm(run.whole(k, "gradients")) for k in range(run.steps)):
        text = f"{x}: every gradient is 0 in all {run.steps} steps: it trains nothing"
        yield Cause("zero gradients", 0, text, note=True)
    order = collections.defaultdict(list)
    for k in range(run.steps):
        for (_, index), epoch, *_ in (s for s in run.samples(k)[0] if s[0]):
            order[epoch].append(index)
    one, two = (order[e] for e in sorted(order)[:2]) if len(order) > 1 else ([], [])
    if two and one != sorted(one) and one[: len(two)] == two[: len(one)]:
        text = f"{x}: the second epoch has the order of the first one"
        why = "sampler.set_epoch(epoch) is missing"
        yield Cause("order of the second epoch", None, text, why, {"order": True})
    sampler = run.sampler()
    if sampler and sampler["extra"] > 0:
        text = f"{x}: the sampler fills each epoch of {sampler['size']} samples with {sampler['extra']} that come twice"
        yield Cause("padded epoch", None, text, "DistributedSampler without drop_last", note=True)


def _ranks(run, limits, x, first):
    """What the ranks of a run show beside each other."""
    if run.world < 2:
        if first["world"] > 1:
            text = f"{x}: only 1 of {first['world']} processes makes steps"
            yield Cause("processes without steps", 0, text)
        return
    if run.same_samples(0):
        why = "no DistributedSampler: N processes do the work of one"
        if (run.sampler() or {"sampler": ""})["sampler"] == "DistributedSampler":
            why = "DistributedSampler has the same rank, or one replica, in all of them"
        text = f"{x}: all {run.world} processes take the same {len(run.samples(0)[0])} samples"
        yield Cause("the same samples on each rank", 0, text, why)
    allowed = max(limits.floor, 1e-5)
    apart = run.spread(0, "weights")
    if apart > allowed:
        yield Cause(
            "first weights of the ranks", 0,
            f"{x}: the {run.world} processes begin with different weights ({apart:.1g})",
            "each process has a seed of its own, or none, before the network is built; no DDP sends rank 0's weights",
            {"weights": True},
        )  # fmt: skip
    k = next((k for k in range(run.steps) if run.spread(k, "gradients") > allowed), None)
    if k is not None and k + 1 < run.steps and apart <= allowed >= run.spread(k + 1, "weights"):
        text = f"{x}: the weights are averaged after the step, in place of the gradients"
        yield Cause("averaged weights", k, text, "local SGD: another algorithm")
    elif k is not None:
        wrapped, pieces = first["wrapped"], run.pieces(k)
        why = "no_sync around the last micro-batch, or ranks that average different things"
        if not first["connected"]:
            why = "no process group was made: each process trains a network of its own"
        elif "DistributedDataParallel" not in wrapped:
            why = "the network is not in DDP, and nothing else averages them"
        elif not wrapped["DistributedDataParallel"]:
            why = "the forward goes past the DDP wrapper: call the wrapper, not the network"
        found, left = shares(run.at(k)[0]["gradients"], pieces)
        if left < 1e-3 and len(pieces) < 9:
            why += f". Rank 0's gradient is made of {len(pieces)} pieces by {_numbers(found)}"
        text = f"{x}: gradients differ between the processes by {run.spread(k, 'gradients'):.1g}"
        yield Cause("gradients are not averaged", k, text, why)
    k = next((k for k in range(1, run.steps) if run.spread(k, "buffers") > allowed), None)
    if k is not None:
        yield Cause(
            "buffers of the ranks", k,
            f"{x}: the processes forward with different buffers ({run.spread(k, 'buffers'):.1g})",
            "not broadcast: each process evaluates, and saves, statistics of its own samples",
        )  # fmt: skip


# ---- where two runs part -------------------------------------------------------------------------


def parting(a, b, limits):
    """Return the causes at the first step at which two runs differ."""
    rename(a, b)
    known = {c.what for c in own(b, limits)} - {c.what for c in own(a, limits)}
    blind = known & {"clipping before the reduction", "the same samples on each rank"}
    blind |= known & {"gradients are not averaged", "averaged weights", "processes without steps"}
    silent = known & {"optimizer of another network", "parameters in no optimizer"}
    for k in range(min(a.steps, b.steps)):
        found = []
        if over := limits.excess(k, "weights", a.whole(k, "weights"), b.whole(k, "weights")):
            text = f"they differ by up to {over[0]:.2g} ({over[1]})"
            if k == 0:
                why = "another seed, or other draws before the network is built"
                found.append(Cause("first weights", 0, text, why, {"weights": True}))
            else:
                why = "something other than the optimizer changes them between the steps"
                found.append(Cause("weights between steps", k, text, why))
        found += [*settings(a, b, k), *samples(a, b, k)]
        if not {c.what for c in found} - {"learning rate", "weight_decay"} and not blind:
            found += list(outputs(a, b, k, limits)) or list(gradients(a, b, k, limits))
        if not found and not blind and not silent:
            if over := limits.excess(k, "after", a.whole(k, "after"), b.whole(k, "after")):
                text = f"equal gradients and settings, but the new weights differ by {over[0]:.1g} ({over[1]})"
                why = "another state: momentum of an earlier step, or the number of steps before"
                found.append(Cause("optimizer's step", k, text, why))
            elif over := limits.excess(k, "buffers", a.whole(k, "buffers"), b.whole(k, "buffers")):
                why = "statistics of the samples of rank 0 alone" if b.network["norms"] else ""
                text = f"they differ by {over[0]:.1g} ({over[1]})"
                even = {"batchnorm": True} if b.network["norms"] else {}
                found.append(Cause("buffers", k, text, why, even))
        if found or blind or (silent and k == 0):
            return found
    if a.ended and b.ended and a.made != b.made:
        text = f"A ends after {a.made} steps, B after {b.made}"
        return [Cause("number of steps", None, text, "other epochs, or other steps per epoch")]
    return []


def settings(a, b, k):
    x, y = a.at(k)[0], b.at(k)[0]
    if x["optimizer"] != y["optimizer"]:
        yield Cause("optimizer", k, f"A has {x['optimizer']}, B {y['optimizer']}")
        return
    differ = collections.defaultdict(list)
    for name in x["group_of"].keys() & y["group_of"].keys():
        p, q = (s["groups"][s["group_of"][name]] for s in (x, y))
        for option in p.keys() & q.keys():
            numbers = all(isinstance(v, (int, float)) for v in (p[option], q[option]))
            close = numbers and np.isclose(p[option], q[option], rtol=1e-9, atol=0)
            if p[option] != q[option] and not close:
                differ[option, str(p[option]), str(q[option])].append(name)
    even = {}
    if len(x["groups"]) == len(y["groups"]):
        even = {"settings": [a.at(j)[0]["groups"] for j in range(a.made)]}
    for (option, p, q), names in sorted(differ.items()):
        p, q = _short(p), _short(q)
        what = "learning rate" if option == "lr" else option
        some = f" for {len(names)} of {len(x['group_of'])} parameters: {names[0]}, ..."
        text = f"{what} is {p} in A, {q} in B" + some * (len(names) < len(x["group_of"]))
        yield Cause(what, k, text, _rate(a, b, k) if option == "lr" else "", even)


def _rate(a, b, k):
    """Say why learning rates differ from step k on."""
    one, two = a.rates(), b.rates()
    for n in (2, 3, 4, 8):
        for fast, slow, letter in ((two, one, "B"), (one, two, "A")):
            pairs = [(slow[n * j], fast[j]) for j in range(len(fast)) if n * j < len(slow)]
            if (
                len(pairs) > 2
                and len({p for p, _ in pairs}) > 1
                and np.allclose(*zip(*pairs), rtol=1e-6, atol=0)
            ):
                calls = [r.ranks[0][1]["schedulers"] for r in (a, b)]
                return f"{letter}'s schedule runs {n} times as fast: the scheduler steps {calls[0]} times per step in A, {calls[1]} in B"  # fmt: skip
    ratio = two[k] / one[k] if one[k] else 0
    if b.world > 1 and np.isclose(ratio, b.world):
        return f"times {b.world}, the number of processes: it is scaled with the batch size"
    if k:
        return f"A: {_numbers(one[k - 1 : k + 3])}; B: {_numbers(two[k - 1 : k + 3])}: another schedule"
    return f"times {ratio:.4g}"


def samples(a, b, k):
    x, y = ([s for rank in run.samples(k) for s in rank] for run in (a, b))
    if sorted(s[2] for s in x) == sorted(s[2] for s in y):
        targets = [{s[2]: s[3] for s in side} for side in (x, y)]
        other = sum(v != targets[1][h] for h, v in targets[0].items() if v and targets[1][h])
        if other:
            text = f"the same inputs, but {other} of {len(x)} have another target"
            yield Cause("targets", k, text, "targets are drawn, shifted or transformed differently")
        return
    named = all(s[0] for s in x + y)  # by a loader; else by their contents alone
    p, q = (collections.Counter(key(s) if named else s[2] for s in side) for side in (x, y))
    if p == q:
        same = collections.Counter(s[2] for s in x) & collections.Counter(s[2] for s in y)
        text = f"the same samples, but {len(y) - sum(same.values())} of {len(y)} look different"
        why = "random transforms draw from the state of each process or worker"
        yield Cause("augmentation", k, text, why, {"augment": True})
        return
    per = " + ".join(str(len(rank)) for rank in b.samples(k))
    if len(x) != len(y):
        text = f"a step takes {len(x)} samples in A, {len(y)} in B ({per})"
        why, n = "", max(a.world, b.world)
        if len(x) * n == len(y) or len(x) == len(y) * n:
            more = "more" if len(y) > len(x) else "fewer"
            why = f"{n} times {more}: the batch size counts for each process in one, for all in the other"
        elif k:
            why = "the last batch of an epoch: one drops it, fills it, or cuts it differently"
            if extra := (b.sampler() or {"extra": 0})["extra"]:
                why = f"the last batch of an epoch, which B's sampler fills with {extra} that come twice"
        yield Cause("batch size", k, text, why)
        return
    if b.same_samples(k):
        return  # a cause that B shows by itself
    text = f"{sum((p & q).values())} of {len(x)} samples are those of A"
    if len(q) < len(y) and len(p) == len(x):
        why = "processes share samples, or the sampler fills its last batch"
        yield Cause("duplicates", k, f"{text}; {len(y) - len(q)} of B's come twice", why)
        return
    loaders = [
        run.sampler() or {"sampler": "the program itself", "shuffle": None} for run in (a, b)
    ]
    kinds = [loader["sampler"] for loader in loaders]
    why = f"drawn by {kinds[0]} in A, by {kinds[1]} in B"
    if kinds[0] == kinds[1]:
        why = f"{kinds[0]} draws another order: another seed, epoch or generator"
        if loaders[0]["shuffle"] != loaders[1]["shuffle"]:
            why = f"shuffle is {loaders[0]['shuffle']} in A, {loaders[1]['shuffle']} in B"
    yield Cause(
        "order of samples",
        k,
        text,
        why,
        {"order": True} if set(kinds) <= SEEDED else {"seed": True},
    )


def outputs(a, b, k, limits):
    x, y = a.outputs(k), b.outputs(k)
    common = [h for h in x if h in y and x[h][0] == y[h][0]]  # padding changes their size
    x, y = ({h: np.array(side[h][1:]) for h in common} for side in (x, y))
    scale = max((float(np.linalg.norm(v)) for v in x.values()), default=0) or 1
    far = max((float(np.linalg.norm(x[h] - y[h])) for h in common), default=0.0) / scale
    if far <= max(limits.at(k, "gradients"), limits.at(k, "weights")):
        return
    why, even, network = [], {}, b.network
    casts = [" ".join(sorted({c["dtype"] for rank in r.calls(k) for c in rank})) for r in (a, b)]
    if casts[0] != casts[1]:
        why.append(f"A computes in {casts[0]}, B in {casts[1]}")
    norms = [n["norms"] for n in (a.network, network)]
    if len(norms[0]) != len(norms[1]):
        why.append(
            f"{len(norms[0])} BatchNorm layers are in training mode in A, {len(norms[1])} in B"
        )
        even["batchnorm"] = True
    elif norms[0]:
        how = (
            "synchronized, yet unequal"
            if network["sync"]
            else "each process and micro-batch computes statistics of its own samples"
        )
        why.append(f"{len(norms[0])} BatchNorm layers: {how}")
        even["batchnorm"] = True
    noises = [len(n["noises"]) for n in (a.network, network)]
    if noises[0] or noises[1] or not why:
        masks = f"{noises[1]} dropout layers draw masks in each process"
        if noises[0] != noises[1]:
            masks = f"{noises[0]} dropout layers in A, {noises[1]} in B"
        why.append(masks if any(noises) else "the network draws numbers, or mixes its samples")
        even["dropout"] = True
    names = ["BatchNorm"] * ("batchnorm" in even) + ["dropout"] * any(noises)
    text = f"the same samples and weights give other outputs, by up to {far:.1g}"
    what = "precision" if casts[0] != casts[1] else " and ".join(names) or "outputs"
    yield Cause(what, k, text, "; ".join(why), {} if what == "precision" else even)


def gradients(a, b, k, limits):
    x, y = a.whole(k, "gradients"), b.whole(k, "gradients")
    only = False
    for letter, other, run in (("A", "B", b), ("B", "A", a)):
        mine, theirs = (x, y) if letter == "A" else (y, x)
        names = [n for n in mine if n not in theirs and n in run.at(k)[0]["group_of"]]
        if names:
            only = True
            frozen = set(names) <= set(run.at(k)[0]["frozen"])
            text = f"{len(names)} parameters have a gradient in {letter}, none in {other}: {', '.join(names[:3])}"
            why = (
                "requires_grad is False there"
                if frozen
                else f"the loss does not use them in {other}"
            )
            yield Cause("frozen parameters" if frozen else "no gradient", k, text, why)
    over = limits.excess(k, "gradients", x, y)
    if only or not over:
        return
    losses = [float(np.mean([p[2] for p in r.pieces(k)] or [np.nan])) for r in (a, b)]
    text = f"they differ by {over[0]:.1g} ({over[1]}); mean loss {losses[0]:.6g} in A, {losses[1]:.6g} in B"
    clips = [[c for c, _ in ((s[1], s[0]) for s in r.at(k)[0]["clips"])] for r in (a, b)]
    if clips[0] != clips[1]:
        limit = [f"clips by {c[0]:g}" if c else "does not clip" for c in clips]
        yield Cause("clipping", k, text, f"A {limit[0]}, B {limit[1]}")
        return
    c, left = multiple(x, y)
    near = min(max(30 * limits.at(k), 1e-6), 1e-3)
    if left < near:
        yield Cause(
            "factor of the gradient",
            k,
            f"B's gradient is {c:.6g} times A's",
            _factor(a, b, k, c),
            {"gradient": c},
        )
        return
    if k and (before := {n: v for n, v in b.whole(k - 1, "gradients").items() if n in y}):
        both = [(0, x, 0.0), (0, before, 0.0)]
        found, rest = shares(y, both)
        if rest < near and abs(found[1]) > 1e-2:
            why = "zero_grad is missing before the backward"
            text = f"B's gradient is {found[0]:.3g} times A's and {found[1]:.3g} times B's own of the step before"
            yield Cause("gradient of an earlier step", k, text, why)
            return
    yield _weights_of_pieces(a, b, k, x, y, text, near) or _other_gradient(x, y, k, text, left)


def _weights_of_pieces(a, b, k, x, y, text, near):
    """Say how A's and B's gradients are made of the gradients of B's backwards."""
    pieces = b.pieces(k)
    mine, rest = shares(x, pieces)
    theirs, rest2 = shares(y, pieces)
    if len(pieces) < 2 or max(rest, rest2) > max(near, 1e-4):
        return None
    counts = np.array([n for n, *_ in pieces], float)
    text = f"A weighs B's pieces of {_numbers(counts)} samples by {_numbers(mine)}, B by {_numbers(theirs)}"
    why = "B gives its pieces other weights"
    if np.ptp(counts) and np.allclose(
        mine / mine.mean() * counts.mean(), theirs / theirs.mean() * counts, rtol=1e-2
    ):
        why = (
            "a mean of means: each piece counts alike, though they have unequal numbers of samples"
        )
    elif np.ptp(theirs) > 0.01 * abs(theirs).max() and np.ptp(counts) == 0:
        why = "B weighs equal pieces unequally: clipped, scaled or left out by each process"
    elif np.ptp(mine) > 0.01 * abs(mine).max():
        why = "a mean of means: A weighs by what its loss counts (tokens, boxes), whose number differs between B's pieces"
    return Cause("weights of the pieces", k, text, why)


def _other_gradient(x, y, k, text, left):
    each = {n: multiple({n: x[n]}, {n: y[n]}) for n in x if np.any(x[n])}
    if each and all(rest < 1e-3 for _, rest in each.values()):
        groups = collections.Counter(f"{c:.3g}" for c, _ in each.values()).most_common(4)
        found = ", ".join(f"{c} times A's in {n} tensors" for c, n in groups)
        return Cause("factors of the gradient", k, text, found)
    differ = [n for n, gap in gaps(x, y).items() if gap > 0.01]
    if 0 < len(differ) < len(x) / 2:
        text += f"; only {len(differ)} of {len(x)} tensors differ by more than 1 %"
    return Cause(
        "gradient",
        k,
        text,
        f"no multiple of A's (a share of {left:.1g} is left): another loss, or a network that mixes samples",
    )


def _factor(a, b, k, c):
    """Say where a factor of all gradients comes from; B's pieces tell how its ranks are joined."""
    pieces, n = b.pieces(k), b.world
    found, left = shares(b.whole(k, "gradients"), pieces)
    joined = found.mean() * n if left < 1e-3 and len(pieces) else 1.0  # 1: averaged, n: summed
    if n > 1 and np.isclose(joined, c, rtol=1e-2):
        how = (
            "summed, not averaged"
            if np.isclose(c, n, rtol=1e-2)
            else "divided by the number of processes twice"
        )
        if np.isclose(c, n, rtol=1e-2) or np.isclose(c, 1 / n, rtol=1e-2):
            return f"over the {n} processes gradients are {how}; the loss of each process is right"
    micro = [len(r.at(k)[0]["pieces"]) for r in (a, b)]
    per = len(b.samples(k)[0])
    known = [
        (micro[1], f"B's {micro[1]} micro-batches"),
        (micro[0], f"A's {micro[0]} micro-batches"),
        (n, f"the {n} processes"),
        (n * micro[1], "the processes and micro-batches"),
        (per // micro[1] if micro[1] else 0, "the samples of a micro-batch"),
        (per, "the samples of a process"),
        (per * n, "the samples of a batch"),
    ]
    for number, meaning in known:
        if number > 1 and np.isclose(c, number, rtol=1e-3):
            return f"B's loss is a sum over {meaning} where A takes the mean"
        if number > 1 and np.isclose(c, 1 / number, rtol=1e-3):
            return f"B divides by {meaning} once more than A"
    return "a constant: another weight or scale of the loss"


def evaluation(a, b):
    """Compare which samples the first evaluation after a step counts."""
    x, y = ([rank for rank in run.evaluated() if rank] for run in (a, b))
    if not x or not y:
        return
    if all(sorted(map(str, rank)) == sorted(map(str, x[0])) for rank in y):
        return  # each process, or one alone, evaluates all of A's
    x, y = (collections.Counter(str(s) for rank in side for s in rank) for side in (x, y))
    more, less = sum((y - x).values()), sum((x - y).values())
    if more or less:
        per = " + ".join(str(len(rank)) for rank in b.evaluated())
        text = f"{sum(x.values())} samples are evaluated in A, {sum(y.values())} in B ({per}): {more} too many, {less} missing"
        why = (
            "padded shards: these count twice, unless the program drops them"
            if more and not less
            else "the sets differ"
        )
        what = "padded evaluation" if more and not less else "evaluation"
        yield Cause(what, None, text, why)


def _numbers(values):
    return " ".join(f"{round(float(v), 6) + 0.0:.3g}" for v in values)


def _short(text):
    try:
        return f"{float(text):.6g}"
    except ValueError:
        return text
