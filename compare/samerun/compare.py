"""Two commands run, what differs is made even in both, and they run again; then the verdict.

So causes behind causes are found. A third run is A with another last bit in its first weights: how
far that goes says what roundings can do.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from samerun import causes
from samerun.records import Limits, Run, gaps, norm, pair
from samerun.running import CannotSay, launch

FEWEST = 5  # steps, for a verdict
EVEN = ("seed", "order", "augment", "dropout", "batchnorm")  # see samerun_even.py


@dataclass
class Result:
    same: bool | None  # None: cannot say
    causes: list
    doubts: list  # why it cannot be called the same, with what to do
    deviations: list  # of the weights, by step
    noise: list  # deviations of A with another last bit
    lines: list = field(default_factory=list)


def compare(
    command_a: str,
    command_b: str,
    *,
    steps: int = 0,
    even: str = "",
    float64: bool = False,
    timeout: float = 600,
    fresh: bool = False,
    say: Callable[[str], None] = print,
) -> Result:
    """Run both commands until nothing else differs, or nothing more can be seen.

    even: names of EVEN with commas between them, to be made even from the start.
    """
    made_even = even.split(",") if even else []
    if wrong := [name for name in made_even if name not in EVEN]:
        raise CannotSay(f"even has no {wrong[0]!r}: use {', '.join(EVEN)}")
    made_even += ["float64"] * float64
    found = {}

    def run(letter: str, shake: bool = False) -> Run:
        """Return what a command did with these things made even."""
        words = f", with {', '.join(made_even)} made even" if made_even else ""
        say(f"{letter}{' again, with another last bit' * shake}{words}")
        plan = {"steps": steps, "shake": shake, "even": made_even}
        path = Path(tempfile.mkdtemp(dir=folder))
        return launch(letter, command_a if letter == "A" else command_b, path, plan, timeout, fresh)

    with tempfile.TemporaryDirectory(prefix="samerun-", ignore_cleanup_errors=True) as folder:
        while True:
            a, b, again = run("A"), run("B"), run("A", shake=True)
            limits = Limits(a, again)
            a.steps, b.steps = limits.seen(a.steps), limits.seen(b.steps)
            new = causes.diagnose(a, b, again, limits, made_even)
            found |= {c.name: c for c in new if c.name not in found}
            remedies = {c.even for c in new} - {"", *made_even}
            if not remedies:
                break
            made_even += sorted(remedies)
    far, noise = zip(*(apart(a, b, limits, k) for k in range(min(a.steps, b.steps))))
    result = Result(False, list(found.values()), [], list(far), list(noise))
    if not found.keys() - {causes.NO_SEED}:
        result.doubts = doubts(result, a, b, limits)
        result.same = None if result.doubts else True
    result.lines = report(result, a, b, limits, made_even, new)
    return result


def apart(a: Run, b: Run, limits: Limits, k: int) -> tuple[float, float]:
    """Return how far weights are from A's in a step: B's, and those of roundings alone."""
    noisy = limits.noisy("weights", k)
    far = [gap for name, gap in gaps(*pair("weights", a, b, k)).items() if name not in noisy]
    noise = [gap for name, gap in limits.noise[k, "weights"].items() if name not in noisy]
    return max(far, default=0.0), max(noise, default=0.0)


def doubts(result: Result, a: Run, b: Run, limits: Limits) -> list[tuple[str, str]]:
    """Return why two runs in which nothing differs are not called the same, and what to do."""
    for cause in result.causes:  # no seed
        return [(f"{cause.text}; {cause.why}", "set a seed, or give --even seed")]
    found, steps = [], min(a.steps, b.steps)
    if steps < FEWEST:
        todo = "--float64, or weights of another seed: roundings grow too fast"
        if steps == min(a.made, b.made):
            todo = f"run more steps, at least {FEWEST}"
        found.append((f"only {count(steps, 'step')} can be compared", todo))
    for run in (a, b):
        if unseen := run.unseen():
            names = ", ".join(list(unseen)[:3])
            text = f"{run.letter}: {len(unseen)} of {len(run.held())} tensors of the optimizer are "
            text += f"not seen: {next(iter(unseen.values()))} ({names})"
            late = "no optimizer has stepped it" in unseen.values()
            found.append((text, "more --steps" if late else "train without it, or freeze the rest"))
        if run.world < run.first(0)["world"]:
            text = f"{run.letter}: {run.world} of {run.first(0)['world']} processes step an "
            found.append(
                (text + "optimizer; what the others hold is not seen", "step it in each process")
            )
        lengths = [len(rank) for rank in run.ranks]
        if len(set(lengths)) > 1 and run.ended:
            text = f"{run.letter}: its processes make {', '.join(map(str, lengths))} steps"
            found.append((text, "give all processes as many"))
        failed = {what for rank in run.ranks for what in rank[run.made - 1]["failed"]}
        if failed := [what for what in failed if what.startswith(("see_step", "end_step"))]:
            found.append((f"{run.letter}: watching failed: {failed[0]}", "report it"))
    if all(run.spread("weights") for run in (a, b)):
        text = "in both the processes have different weights, and rank 0 alone is compared"
        found.append((text, "average the gradients, or start one process"))
    if not found and not any(norm(a.whole(k, "gradients")) for k in range(steps)):
        found.append(("no tensor has a gradient that is not zero", "more --steps"))
    for k, (far, noise) in enumerate(zip(result.deviations, result.noise)):
        if far > max(100 * noise, 1e-3):
            text = f"in step {k + 1} weights differ by {far:.0e}, and roundings make {noise:.0e}"
            found.append((text, "--float64, or compare without autocast"))
            break
    return found


# ---- the report ----------------------------------------------------------------------------------


def count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def report(
    result: Result, a: Run, b: Run, limits: Limits, even: list[str], last: list[causes.Cause]
) -> list[str]:
    """Return the lines for a person. last: by what the last runs still differ."""
    found, steps, names = result.causes, len(result.deviations), ", ".join(even)
    held = list(dict.fromkeys(a.held() + b.held()))
    missing = {*a.unseen(), *b.unseen()} & {*held}
    seen = [n for n in held if n not in missing]
    epochs = len(a.orders())
    lines = [f"THE SAME TRAINING RUN in {count(steps, 'step')}"]
    lines[0] += f" and {count(epochs, 'epoch')}" * (epochs > 1)
    lines[0] += f", {len(seen)} of {len(held)} tensors of the optimizer"
    if result.doubts:
        lines = [f"CANNOT SAY: {text}\n   do: {todo}" for text, todo in result.doubts]
        lines = "\n".join(lines).splitlines()
    elif found:
        lines = [f"NOT THE SAME TRAINING RUN: {count(len(found), 'cause')}"]
        for i, c in enumerate(found[:6], 1):
            where = "" if c.step is None else f", at step {c.step + 1}"
            lines += [f"{i}. {c.name}{where}: {c.text}", f"   why: {c.why}"]
        lines += [f"   and {len(found) - 6} more"] if len(found) > 6 else []
    if "order" in even and any(c.even == "order" for c in last):
        lines.append("With the order made even the runs still get other samples.")
        lines.append("Give both the same batches, and compare again.")
    elif last and not result.doubts:
        here = [i for i, c in enumerate(found, 1) if c.even not in even] or [len(found)]
        made = f"With {names} made even in both: what" if even else "What"
        lines.append(f"{made} lies behind cause {here[-1]} cannot be seen before it is mended.")
    before = min([steps, *(b.made if c.step is None else c.step for c in last)])
    if before and not result.doubts:
        start = "Nothing" + " else" * bool(found)
        start = f"With {names} made even nothing else" if even else start
        far, noise = result.deviations[before - 1], result.noise[before - 1]
        agree = f"the weights agree to {far:.0e}, roundings alone make {noise:.0e}"
        lines.append(
            f"{start} differs in {count(before, 'step')}{' before' * bool(last)}; {agree}."
        )
    if noisy := [n for n in seen if n in limits.noisy("weights", steps - 1)]:
        text = f"Roundings alone move {len(noisy)} of the tensors by more than 1 %: "
        lines.append(text + f"{', '.join(noisy[:3])}. Of these gradients alone are compared.")
    unseen = {"an evaluation": not any(a.evaluated) or not any(b.evaluated)}
    unseen["a second epoch"] = epochs == 1  # 0: no DataLoader tells
    unseen["averages of weights"] = not a.averages.keys() & b.averages.keys()
    unseen["which samples"] = not (a.split(0) and b.split(0))
    unseen[f"what {names} would change"] = bool(even)
    words = ", ".join(what for what, hidden in unseen.items() if hidden)
    lines += [f"Not seen in {count(steps, 'step')}: {words}."] if words else []
    for run in (a, b):
        network = f"{run.network['name']} of {run.network['numbers']:,} parameters"
        kinds = " and ".join(dict.fromkeys(g["optimizer"] for g in run.first(0)["groups"]))
        text = f"{run.per_rank(0)} samples, {network}, {kinds}"
        lines.append(f"{run.letter}: processes {run.world}, {text}")
    return lines
