"""Why two runs are not the same: pure functions of what their processes saw (records.py).

`own` yields the faults that one run shows by itself. `parting` returns what differs at the first
step at which two runs part, in the order in which a step computes it: weights, settings, samples,
outputs, gradients, new weights, buffers. A cause that `even` names can be made even (even.py).
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from tools.compare.records import gaps, key, multiple, norm, rename, shares

WHY = {  # of the causes that have one reason alone
    "no seed": "no seed is set; or it resumes from a file that it wrote: name that as {dir}/FILE",
    "optimizer of another network": "the network was copied, rebuilt or cut into shards after the optimizer was made",
    "parameters in no optimizer": "made after the optimizer, or left out of its groups: they stay as they are",
    "gradients thrown away": "zero_grad is called between the micro-batches of a step",
    "clipping before the reduction": "clip after it, by the norm of the whole batch's gradient",
    "order of the second epoch": "sampler.set_epoch(epoch) is missing",
    "first weights of the ranks": "each process has its own seed, or none, before it builds the network; no DDP sends rank 0's weights",
    "averaged weights": "local SGD: another algorithm",
    "buffers of the ranks": "not broadcast: each process evaluates, and saves, statistics of its own samples",
    "padded epoch": "DistributedSampler without drop_last",
    "first weights": "another seed, or other draws before the network is built",
    "weights between steps": "something other than the optimizer changes them between the steps",
    "optimizer's step": "another state: momentum of an earlier step, or the number of steps before",
    "number of steps": "other epochs, or other steps per epoch",
    "targets": "targets are drawn, shifted or transformed differently",
    "augmentation": "random transforms draw from the state of each process or worker",
    "duplicates": "processes share samples, or the sampler fills its last batch",
    "gradient before clipping": "another scale of the loss or of the average, which clipping hides",
    "gradient of an earlier step": "zero_grad is missing before the backward",
    "padded evaluation": "padded shards: these count twice, unless the program drops them",
    "evaluation": "the sets differ, or a process leaves out a part",
}
# What a run shows by itself and hides the gradients of the whole batch, or what follows from them.
BLIND = {"clipping before the reduction", "the same samples on each rank", "averaged weights"}
BLIND |= {"gradients are not averaged", "processes without steps"}
SILENT = {"optimizer of another network", "parameters in no optimizer"}
SEEDED = {"RandomSampler", "DistributedSampler"}  # whose order can be made even
NO_LOADER = {"sampler": "the program itself", "shuffle": None, "extra": 0}


@dataclass
class Cause:
    what: str
    step: int | None  # from 0; None: of no step
    text: str
    why: str = ""
    even: dict = field(default_factory=dict)
    note: bool = False  # no difference by itself

    def __post_init__(self):
        self.why = self.why or WHY.get(self.what, "")


# ---- what one run shows by itself ----------------------------------------------------------------


def own(run, limits):
    x, first, many = run.letter, run.at(0)[0], f"{run.world} processes"
    if strange := first["strange"]:
        of = strange + len(first["group_of"])
        text = (
            f"{x}: {strange} of {of} tensors of the optimizer belong to no network that is trained"
        )
        yield Cause("optimizer of another network", 0, text)
    if names := run.at(run.made - 1)[0]["forgotten"]:
        text = f"{x}: {len(names)} trainable parameters are in no optimizer: {', '.join(names[:3])}"
        yield Cause("parameters in no optimizer", 0, text)
    thrown = [s["thrown"] for s in run.ranks[0][1 : run.steps]]
    if thrown and min(thrown) > 0:
        text = f"{x}: the gradients of {thrown[0]} samples are thrown away before each step"
        yield Cause("gradients thrown away", 1, text)
    if run.world == 1 < first["world"]:
        text = f"{x}: only 1 of {first['world']} processes makes steps"
        yield Cause("processes without steps", 0, text)
    if run.same_samples(0):
        text = f"{x}: all {many} take the same {len(run.samples(0)[0])} samples"
        why = "no DistributedSampler: N processes do the work of one"
        if (run.sampler() or NO_LOADER)["sampler"] == "DistributedSampler":
            why = "DistributedSampler has the same rank, or one replica, in all of them"
        yield Cause("the same samples on each rank", 0, text, why)
    yield from _spread(run, max(limits.floor, 1e-5), f"{x}: the {many}")
    for k in range(run.steps):
        events = run.at(k)[0]["events"]
        if "clip" in events and "all_reduce" in events[events.index("clip") :]:
            norms = ", ".join(f"{s['clips'][0][0]:.3g}" for s in run.at(k) if s["clips"])
            text = f"{x}: clips before all_reduce, each process by its own norm ({norms})"
            yield Cause("clipping before the reduction", k, text)
            break
    if run.nan is not None:
        text = f"{x}: gradients are NaN or infinite; nothing can be compared from here on"
        yield Cause("NaN", run.nan, text)
    elif not any(norm(run.whole(k, "gradients")) for k in range(run.steps)):
        text = f"{x}: every gradient is 0 in all {run.steps} steps: it trains nothing"
        yield Cause("zero gradients", 0, text, note=True)
    order = defaultdict(list)
    for k in range(run.steps):
        for (_, index), epoch, *_ in (s for s in run.samples(k)[0] if s[0]):
            order[epoch].append(index)
    one, two = (order[e] for e in sorted(order)[:2]) if len(order) > 1 else ([], [])
    if two and one != sorted(one) and one[: len(two)] == two[: len(one)]:
        text = f"{x}: the second epoch has the order of the first one"
        yield Cause("order of the second epoch", None, text, even={"order": True})
    loader = run.sampler() or NO_LOADER
    if loader["extra"] > 0:
        text = f"{x}: the sampler fills each epoch of {loader['size']} samples with {loader['extra']} that come twice"
        yield Cause("padded epoch", None, text, note=True)


def _spread(run, allowed, who):
    """What the ranks show beside each other: weights, gradients, buffers."""
    apart = run.spread(0, "weights")
    if apart > allowed:
        text = f"{who} begin with different weights ({apart:.1g})"
        yield Cause("first weights of the ranks", 0, text, even={"weights": True})
    k = next((k for k in range(run.steps) if run.spread(k, "gradients") > allowed), None)
    if k is not None and k + 1 < run.steps and apart <= allowed >= run.spread(k + 1, "weights"):
        text = f"{who} average their weights after the step, in place of the gradients"
        yield Cause("averaged weights", k, text)
    elif k is not None:
        first, pieces = run.at(k)[0], run.pieces(k)
        why = "no_sync around the last micro-batch, or ranks that average different things"
        if not first["connected"]:
            why = "no process group was made: each process trains a network of its own"
        elif "DistributedDataParallel" not in first["wrapped"]:
            why = "the network is not in DDP, and nothing else averages them"
        elif not first["wrapped"]["DistributedDataParallel"]:
            why = "the forward goes past the DDP wrapper: call the wrapper, not the network"
        found, left = shares(first["gradients"], pieces)
        if left < 1e-3 and len(pieces) < 9:
            why += f". Rank 0's gradient is made of {len(pieces)} pieces by {_numbers(found)}"
        text = f"{who} step with different gradients ({run.spread(k, 'gradients'):.1g})"
        yield Cause("gradients are not averaged", k, text, why)
    k = next((k for k in range(1, run.steps) if run.spread(k, "buffers") > allowed), None)
    if k is not None:
        text = f"{who} forward with different buffers ({run.spread(k, 'buffers'):.1g})"
        yield Cause("buffers of the ranks", k, text)


# ---- where two runs part -------------------------------------------------------------------------


def parting(a, b, limits):
    """Return the causes at the first step at which two runs differ."""
    rename(a, b)
    known = {c.what for c in own(b, limits)} ^ {c.what for c in own(a, limits)}
    for k in range(min(a.steps, b.steps)):
        found = [*weights(a, b, k, limits), *settings(a, b, k), *samples(a, b, k)]
        if not {c.what for c in found} - {"learning rate", "weight_decay"} and not known & BLIND:
            found += list(outputs(a, b, k, limits)) or list(gradients(a, b, k, limits))
            if not found and not known & SILENT:
                found += results(a, b, k, limits)
        if found or known & (BLIND | SILENT):
            return found
    if a.ended and b.ended and a.made != b.made:
        return [Cause("number of steps", None, f"A ends after {a.made} steps, B after {b.made}")]
    return []


def weights(a, b, k, limits):
    if over := limits.excess(k, "weights", a.whole(k, "weights"), b.whole(k, "weights")):
        text = f"they differ by up to {over[0]:.2g} ({over[1]})"
        if k == 0:
            yield Cause("first weights", 0, text, even={"weights": True})
        else:
            yield Cause("weights between steps", k, text)


def settings(a, b, k):
    x, y = a.at(k)[0], b.at(k)[0]
    if x["optimizer"] != y["optimizer"]:
        yield Cause("optimizer", k, f"A has {x['optimizer']}, B {y['optimizer']}")
        return
    differ, even = defaultdict(list), {}
    for name in (n for n in x["group_of"] if n in y["group_of"]):
        p, q = (s["groups"][s["group_of"][name]] for s in (x, y))
        for option in p.keys() & q.keys():
            numbers = all(isinstance(v, (int, float)) for v in (p[option], q[option]))
            close = numbers and np.isclose(p[option], q[option], rtol=1e-9, atol=0)
            if p[option] != q[option] and not close:
                differ[option, p[option], q[option]].append(name)
    if len(x["groups"]) == len(y["groups"]):
        even = {"settings": [a.at(j)[0]["groups"] for j in range(a.made)]}
    for (option, p, q), names in sorted(differ.items(), key=str):
        what = "learning rate" if option == "lr" else option
        p, q = (f"{v:.6g}" if isinstance(v, float) else v for v in (p, q))
        some = f" for {len(names)} of {len(x['group_of'])} parameters: {names[0]}, ..."
        text = f"{what} is {p} in A, {q} in B" + some * (len(names) < len(x["group_of"]))
        yield Cause(what, k, text, _rate(a, b, k) if option == "lr" else "", even)


def _rate(a, b, k):
    """Say why learning rates differ from step k on."""
    one, two = a.rates(), b.rates()
    for n in (2, 3, 4, 8):
        for fast, slow, letter in ((two, one, "B"), (one, two, "A")):
            x, y = slow[::n][: len(fast)], fast[: len(slow[::n])]
            if len(set(x)) > 2 and np.allclose(x, y, rtol=1e-6, atol=0):
                calls = [r.ranks[0][1]["schedulers"] for r in (a, b)]
                return f"{letter}'s schedule runs {n} times as fast: for each step the scheduler steps {calls[0]} times in A, {calls[1]} in B"
    if b.world > 1 and np.isclose(two[k], one[k] * b.world):
        return f"times {b.world}, the number of processes: it is scaled with the batch size"
    if k:
        return (
            f"another schedule: A {_numbers(one[k - 1 : k + 3])}, B {_numbers(two[k - 1 : k + 3])}"
        )
    return ""


def samples(a, b, k):
    x, y = ([s for rank in run.samples(k) for s in rank] for run in (a, b))
    looks = [Counter(s[2] for s in side) for side in (x, y)]
    if looks[0] == looks[1]:
        targets = [{s[2]: s[3] for s in side} for side in (x, y)]
        other = sum(v != targets[1][h] for h, v in targets[0].items() if v and targets[1][h])
        if other:
            text = f"the same inputs, but {other} of {len(x)} have another target"
            yield Cause("targets", k, text)
        return
    named = all(s[0] for s in x + y)  # by a loader; else by their contents alone
    p, q = (Counter(key(s) if named else s[2] for s in side) for side in (x, y))
    loaders = [run.sampler() or NO_LOADER for run in (a, b)]
    if p == q:
        other = len(y) - sum((looks[0] & looks[1]).values())
        text = f"the same samples, but {other} of {len(y)} look different"
        yield Cause("augmentation", k, text, even={"augment": True})
    elif len(x) != len(y):
        per = " + ".join(str(len(rank)) for rank in b.samples(k))
        text = f"a step takes {len(x)} samples in A, {len(y)} in B ({per})"
        why, n = "", max(a.world, b.world)
        if len(x) * n == len(y) or len(x) == len(y) * n:
            more = "more" if len(y) > len(x) else "fewer"
            why = (
                f"{n} times {more}: the batch size is that of a process in one, of all in the other"
            )
        elif k:
            why = "the last batch of an epoch: one drops it, fills it, or cuts it differently"
            if extra := loaders[1]["extra"]:
                why = f"the last batch of an epoch, which B's sampler fills with {extra} that come twice"
        yield Cause("batch size", k, text, why)
    elif not b.same_samples(k):  # which B shows by itself
        text = f"{sum((p & q).values())} of {len(x)} samples are those of A"
        if len(q) < len(y) and len(p) == len(x):
            yield Cause("duplicates", k, f"{text}; {len(y) - len(q)} of B's come twice")
            return
        kinds, shuffle = ([loader[n] for loader in loaders] for n in ("sampler", "shuffle"))
        why = f"{kinds[0]} draws another order: another seed, epoch or generator"
        if kinds[0] != kinds[1]:
            why = f"drawn by {kinds[0]} in A, by {kinds[1]} in B"
        elif shuffle[0] != shuffle[1]:
            why = f"shuffle is {shuffle[0]} in A, {shuffle[1]} in B"
        even = {"order": True} if set(kinds) <= SEEDED else {}
        yield Cause("order of samples", k, text, why, even)


def outputs(a, b, k, limits):
    x, y = a.outputs(k), b.outputs(k)
    common = [h for h in x if h in y and x[h][0] == y[h][0]]  # padding changes their size
    x, y = ({h: np.array(side[h][1:]) for h in common} for side in (x, y))
    scale = max((float(np.linalg.norm(v)) for v in x.values()), default=0) or 1
    far = max((float(np.linalg.norm(x[h] - y[h])) for h in common), default=0.0) / scale
    far_off = far > max(limits.at(k, "gradients"), limits.at(k, "weights"))
    text = f"the same samples and weights give other outputs, by up to {far:.1g}"
    casts, modes = ([{c[n] for rank in r.calls(k) for c in rank} for r in (a, b)]
                    for n in ("dtype", "training"))  # fmt: skip
    if modes[0] != modes[1]:
        letter = "A" if False in modes[0] else "B"
        why = f"{letter} trains in eval mode: train() is missing after an evaluation"
        yield Cause("training mode", k, text, why)
        return
    if far_off and casts[0] != casts[1]:
        why = f"A computes in {' '.join(sorted(casts[0]))}, B in {' '.join(sorted(casts[1]))}"
        yield Cause("precision", k, text, why)
        return
    if not far_off:
        return
    what, why, even = [], [], {}
    norms, noises = ([len(run.network[n]) for run in (a, b)] for n in ("norms", "noises"))
    if any(norms):
        what, even = ["BatchNorm"], {"batchnorm": True}
        why = [
            f"{norms[1]} BatchNorm layers compute statistics of each process's and micro-batch's own samples"
        ]
        if norms[0] != norms[1]:
            why = [f"{norms[0]} BatchNorm layers are in training mode in A, {norms[1]} in B"]
        elif b.network["sync"]:
            why = [f"{norms[1]} SyncBatchNorm layers, whose statistics are not equal"]
    if any(noises) or not why:
        even["dropout"] = True
        what += ["dropout"] * any(noises)
        words = f"{noises[1]} dropout layers draw other masks in each process"
        if noises[0] != noises[1]:
            words = f"{noises[0]} layers drop something in A, {noises[1]} in B"
        why.append(
            words
            if any(noises)
            else "the network draws numbers, mixes its samples, or is another one"
        )
    yield Cause(" and ".join(what) or "outputs", k, text, "; ".join(why), even)


def gradients(a, b, k, limits):
    x, y = a.whole(k, "gradients"), b.whole(k, "gradients")
    missing = False
    for letter, other, run, mine, theirs in (("A", "B", b, x, y), ("B", "A", a, y, x)):
        names = [n for n in mine if n not in theirs and n in run.at(k)[0]["group_of"]]
        if names:
            missing = True
            frozen = set(names) <= set(run.at(k)[0]["frozen"])
            text = f"{len(names)} parameters have a gradient in {letter}, none in {other}: {', '.join(names[:3])}"
            why = "requires_grad is False there" if frozen else "the loss there does not use them"
            yield Cause("frozen parameters" if frozen else "no gradient", k, text, why)
    over = limits.excess(k, "gradients", x, y)
    norms = [[n for n, _ in r.at(k)[0]["clips"]] for r in (a, b)]
    clipped_alike = not missing and not over and len(norms[0]) == len(norms[1])
    if clipped_alike and not np.allclose(*norms, rtol=max(30 * limits.at(k), 1e-3)):
        text = f"their norm is {norms[0][0]:.4g} in A, {norms[1][0]:.4g} in B; both are clipped to one size"
        yield Cause("gradient before clipping", k, text)
    if missing or not over:
        return
    losses = [float(np.mean([p[2] for p in r.pieces(k)] or [np.nan])) for r in (a, b)]
    text = f"they differ by {over[0]:.1g} ({over[1]}); mean loss {losses[0]:.6g} in A, {losses[1]:.6g} in B"
    clips = [[limit for _, limit in r.at(k)[0]["clips"]] for r in (a, b)]
    if clips[0] != clips[1]:
        limit = [f"clips by {c[0]:g}" if c else "does not clip" for c in clips]
        yield Cause("clipping", k, text, f"A {limit[0]}, B {limit[1]}")
        return
    c, left = multiple(x, y)
    near = min(max(30 * limits.at(k), 1e-6), 1e-3)
    if left < near:
        text = f"B's gradient is {c:.6g} times A's"
        yield Cause("factor of the gradient", k, text, _factor(a, b, k, c), {"gradient": c})
        return
    before = {n: v for n, v in b.whole(k - 1, "gradients").items() if n in y} if k else {}
    found, rest = shares(y, [(0, x, 0.0), (0, before, 0.0)])
    if rest < near and abs(found[1]) > 1e-2:
        text = f"B's gradient is {found[0]:.3g} times A's and {found[1]:.3g} times B's own of the step before"
        yield Cause("gradient of an earlier step", k, text)
        return
    yield _pieces(a, b, k, text, near) or _other(x, y, k, text, left, losses, limits.at(k))


def _pieces(a, b, k, text, near):
    """Say how A's and B's gradients are made of the local gradients of B's backwards."""
    pieces = b.pieces(k)
    mine, rest = shares(a.whole(k, "gradients"), pieces)
    theirs, rest2 = shares(b.whole(k, "gradients"), pieces)
    if len(pieces) < 2 or max(rest, rest2) > max(near, 1e-4):
        return None
    counts = np.array([n for n, *_ in pieces], float)
    text = f"A weighs B's pieces of {_numbers(counts)} samples by {_numbers(mine)}, B by {_numbers(theirs)}"
    unequal = np.ptp(counts) > 0
    why = "B gives its pieces other weights"
    ratio = mine / mine.mean() * theirs.mean() / np.where(theirs, theirs, np.nan)
    if unequal and np.allclose(ratio, counts / counts.mean(), rtol=1e-2):
        why = (
            "a mean of means: each piece counts alike, though they have unequal numbers of samples"
        )
    elif np.ptp(theirs) > 0.01 * abs(theirs).max() and not unequal:
        why = "B weighs equal pieces unequally: clipped, scaled or left out by each process"
    elif np.ptp(mine) > 0.01 * abs(mine).max():
        why = "a mean of means: A weighs by what its loss counts (tokens, boxes), whose number differs between B's pieces"
    return Cause("weights of the pieces", k, text, why)


def _other(x, y, k, text, left, losses, limit):
    """Say what is known of a gradient whose difference has no simple form."""
    each = {n: multiple({n: x[n]}, {n: y[n]}) for n in x if n in y and np.any(x[n])}
    if each and all(rest < 1e-3 for _, rest in each.values()):
        groups = Counter(f"{c:.3g}" for c, _ in each.values()).most_common(4)
        found = ", ".join(f"{c} times A's in {n} tensors" for c, n in groups)
        return Cause("factors of the gradient", k, text, found)
    differ = [n for n, gap in gaps(x, y).items() if gap > 0.01]
    why = f"no multiple of A's ({left:.1g} of it is left). The outputs are equal, the loss is not: another loss"
    if np.isclose(*losses, rtol=max(limit, 1e-5)):
        why = f"no multiple of A's ({left:.1g} of it is left). The loss is equal: a part is detached, or gradients are changed after the backward"
    if 0 < len(differ) < len(x):
        why += f"; {len(differ)} of {len(x)} tensors differ: {', '.join(differ[:3])}"
    return Cause("gradient", k, text, why)


def _factor(a, b, k, c):
    """Say where a factor of all gradients comes from; B's pieces tell how its ranks are joined."""
    pieces, n = b.pieces(k), b.world
    found, left = shares(b.whole(k, "gradients"), pieces)
    joined = found.mean() * n if left < 1e-3 and len(pieces) else 1.0  # 1: averaged, n: summed
    for factor, how in ((n, "summed, not averaged"), (1 / n, "divided by their number twice")):
        if n > 1 and np.allclose([joined, c], factor, rtol=1e-2):
            return f"over the {n} processes gradients are {how}; the loss of each process is right"
    micro = [len(r.at(k)[0]["pieces"]) for r in (a, b)]
    per = len(b.samples(k)[0])
    known = {micro[1]: f"B's {micro[1]} micro-batches"}
    known.setdefault(micro[0], f"A's {micro[0]} micro-batches")
    known.setdefault(n, f"the {n} processes")
    known.setdefault(n * micro[1], "the processes and micro-batches")
    known.setdefault(per // max(1, micro[1]), "the samples of a micro-batch")
    known.setdefault(per, "the samples of a process")
    known.setdefault(per * n, "the samples of a batch")
    for number, meaning in known.items():
        if number > 1 and np.isclose(c, number, rtol=1e-3):
            return f"B's loss is a sum over {meaning} where A takes the mean"
        if number > 1 and np.isclose(c, 1 / number, rtol=1e-3):
            return f"B divides by {meaning} once more than A"
    return "a constant: another weight or scale of the loss"


def results(a, b, k, limits):
    """What the step leaves: the new weights, and buffers."""
    if over := limits.excess(k, "after", a.whole(k, "after"), b.whole(k, "after")):
        text = (
            f"equal gradients and settings, but the new weights differ by {over[0]:.1g} ({over[1]})"
        )
        yield Cause("optimizer's step", k, text)
    elif over := limits.excess(k, "buffers", a.whole(k, "buffers"), b.whole(k, "buffers")):
        norms = bool(b.network["norms"])
        why = "statistics of the samples of rank 0 alone"
        even = {"batchnorm": True} if norms else {}
        yield Cause("buffers", k, f"they differ by {over[0]:.1g} ({over[1]})", why * norms, even)


def evaluation(a, b):
    """Compare which samples the first evaluation after a step counts."""
    x, y = ([rank for rank in run.evaluated() if rank] for run in (a, b))
    named = all(s[0] for rank in (*x, *y) for s in rank)  # by a loader; else by their contents
    x, y = ([[s[0] if named else s[2] for s in rank] for rank in side] for side in (x, y))
    if not x or not y or all(Counter(rank) == Counter(x[0]) for rank in y):
        return  # each process, or one alone, evaluates all of A's
    per = " + ".join(str(len(rank)) for rank in y)
    x, y = (Counter(s for rank in side for s in rank) for side in (x, y))
    more, less = sum((y - x).values()), sum((x - y).values())
    if more or less:
        text = f"{sum(x.values())} samples in A, {sum(y.values())} in B ({per}): {more} too many, {less} missing"
        yield Cause("evaluation" if less else "padded evaluation", None, text)


def _numbers(values):
    return " ".join(f"{round(float(v), 6) + 0.0:.3g}" for v in values)
