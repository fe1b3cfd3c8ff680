"""tools/compare: equal runs are called the same, and a planted fault is named by its cause."""

import contextlib
import functools
import importlib.util
import json
import os
import runpy
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import ROOT, TASKS, run_processes
from launches import free_port

from tools.compare import causes, records, same_run
from tools.compare import compare as program


def rank_of_command(rank, world, port, folder, script, arguments, watched):
    """Be a process of a command: under the observer, as a fork of a process that has torch."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), COMPARE_DIR=str(folder))
    path = ROOT / "tools" / "compare" / "observer" / "sitecustomize.py"
    spec = importlib.util.spec_from_file_location("observer", path)
    observer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(observer)
    if watched:
        observer.install()
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def forked(command, folder, timeout, watched=True):
    """Stand in for `start`: run "N SCRIPT ARGUMENTS" on N ranks."""
    world, script, *arguments = shlex.split(command)
    shared = {"world": int(world), "port": free_port(), "folder": folder}
    shared |= {"script": str(TASKS / script), "arguments": arguments, "watched": watched}
    ranks = [functools.partial(rank_of_command, rank, **shared) for rank in range(int(world))]
    (folder / "out").mkdir()
    results = run_processes(ranks, folder / "out", timeout)
    (folder / "log").write_text("".join(out + err for _, out, err in results))
    return max(code for code, *_ in results)


@pytest.fixture
def in_forks(monkeypatch):
    """Commands are "N SCRIPT ARGUMENTS", and A with the same plan runs once in all tests."""
    monkeypatch.setattr(program, "start", forked)
    real = program.launch

    def launch(letter, command, folder, plan, timeout):
        if letter == "B":
            return real(letter, command, folder, plan, timeout)
        # Its first weights change nothing that is compared: they are those that A has by itself.
        even = {k: v for k, v in plan["even"].items() if k != "weights"}
        name = json.dumps([command, plan["steps"], plan["shake"], even])
        if name not in kept:
            kept[name] = Path(tempfile.mkdtemp()) / "run"
            real(letter, command, kept[name], plan, timeout)
        shutil.copytree(kept[name], folder)
        return records.read(letter, folder, not any(folder.glob("*.done")))

    monkeypatch.setattr(program, "launch", launch)


kept = {}


def verdict(fault, both="", only_b="", a="1 planted.py none", world=2, **options):
    b = f"{world} planted.py {fault} {both} {only_b}"
    return program.compare(f"{a} {both}", b, say=lambda text: None, timeout=100, **options)


# ---- equal pairs ---------------------------------------------------------------------------------

EQUAL = [
    ("none", ""),
    ("none", "--accum 2"),
    ("none", "--accum 4 --clip 0.3"),
    ("none", "--float64"),
    ("none", "--float64 --accum 2 --clip 0.3"),
    ("none", "--plain"),
    ("none", "--plain --accum 2"),
    ("none", "--tokens"),
    ("none", "--optimizer adam"),
    ("none", "--optimizer adam --float64 --clip 0.3"),
    ("no-sync-never", "--accum 2"),  # averages each micro-batch: slower, and the same
]


@pytest.mark.full
@pytest.mark.parametrize("fault, both", EQUAL)
@pytest.mark.parametrize("world", [2, 4])
def test_equal_runs_are_called_the_same(fault, both, world, in_forks):
    result = verdict(fault, both, world=world)
    assert result.same, result.lines
    assert result.lines[0] == "THE SAME TRAINING RUN"
    assert max(result.deviations) < (1e-12 if "float64" in both else 1e-4)


def test_a_run_is_the_same_as_itself_on_two_ranks(in_forks):
    result = verdict("none", steps=4)
    assert result.same, result.lines


MODES = {
    "ddp": "torchrun --master-port {port} --nproc-per-node 2 train_ddp.py --device cpu",
    "fsdp": "torchrun --master-port {port} --nproc-per-node 2 train_fsdp.py --device cpu",
    "dp": "{python} train_dp.py --replicas 2 --device cpu",
    "spawn": "{python} train_spawn.py --nproc 2 --device cpu",
}


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_modes_are_the_same_run(mode, monkeypatch, capsys):
    """By the command itself: real processes, exit code 0."""
    monkeypatch.chdir(ROOT)
    out = "--dtype float64 --accum-steps 2 --output-dir {dir}/out"
    command = MODES[mode].replace("{port}", str(free_port())).replace("{python}", sys.executable)
    code = program.main(
        [f"{sys.executable} train_single.py {out}", f"{command} {out}", "--steps=6"]
    )
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert printed.startswith("THE SAME TRAINING RUN\n")


@pytest.mark.full
def test_examples_on_one_page_are_the_same_run(monkeypatch):
    monkeypatch.chdir(ROOT)
    ddp = f"torchrun --master-port {free_port()} --nproc-per-node 2 examples/minimal_ddp.py"
    single = f"{sys.executable} examples/minimal_single.py"
    result = same_run(f"{single} 2 {{dir}}/a.pt", f"{ddp} 2 {{dir}}/b.pt")
    assert len(result.deviations) > 22  # an epoch is 22 steps


def trained(arguments, folder, watched):
    """Return the weights after a run of planted.py on two ranks, with or without the observer."""
    folder.mkdir()
    (folder / "plan.json").write_text('{"steps": 0, "shake": false, "even": {}}')
    forked(f"2 planted.py none {arguments} --save {folder}/w.pt", folder, 100, watched)
    assert any(folder.glob("*.pkl")) == watched
    return torch.load(folder / "w.pt")


@pytest.mark.parametrize("arguments", ["--norm batch --dropout 0.2 --augment --accum 2"])
def test_the_observer_changes_no_bit(arguments, tmp_path):
    one, two = (trained(arguments, tmp_path / str(w), w) for w in (False, True))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


# ---- planted faults ------------------------------------------------------------------------------

FAULTS = [  # fault, options of both, the first cause, a word of its reason
    ("no-sampler", "", "the same samples on each rank", "one replica"),
    ("wrong-rank", "", "the same samples on each rank", "the same rank"),
    ("set-epoch", "", "order of the second epoch", "set_epoch"),
    ("other-seed", "", "order of samples", "another seed"),
    ("no-shuffle", "", "order of samples", "shuffle is True in A, False in B"),
    ("none", "--samples 99", "batch size", "fills with 1 that come twice"),
    ("seed-per-rank", "", "first weights of the ranks", "its own seed"),
    ("other-init", "", "first weights", "another seed"),
    ("sum-of-ranks", "", "factor of the gradient", "summed, not averaged"),
    ("loss-sum", "", "factor of the gradient", "a sum over the samples of a micro-batch"),
    ("divided-twice", "", "factor of the gradient", "divided by their number twice"),
    ("divided-by-world", "--clip 0.01", "gradient before clipping", "which clipping hides"),
    ("divided-by-world", "", "factor of the gradient", "divides by the 2 processes once more"),
    ("no-division", "--accum 2", "factor of the gradient", "a sum over B's 2 micro-batches"),
    ("batch-per-rank", "", "batch size", "2 times more"),
    ("batch-cut-twice", "", "batch size", "2 times fewer"),
    ("scheduler-per-process", "", "learning rate", "B's schedule runs 2 times as fast"),
    ("no-scheduler", "", "learning rate", "another schedule"),
    ("rate-times-world", "", "learning rate", "times 2, the number of processes"),
    ("momentum", "", "momentum", ""),
    ("decay", "", "weight_decay", ""),
    ("decay-groups", "", "weight_decay", ""),
    ("adamw", "--optimizer adam", "optimizer", ""),
    ("loaded-momentum", "", "optimizer's step", "momentum of an earlier step"),
    ("weights-changed", "", "weights between steps", "something other than the optimizer"),
    ("clip-first", "--clip 0.3", "clipping before the reduction", "the whole batch's gradient"),
    ("clip-limit", "--clip 0.3", "clipping", "A clips by 0.3, B clips by 0.15"),
    ("no-clip", "--clip 0.3", "clipping", "B does not clip"),
    ("past-the-wrapper", "", "gradients are not averaged", "past the DDP wrapper"),
    ("no-ddp", "", "gradients are not averaged", "not in DDP"),
    ("no-group", "", "gradients are not averaged", "no process group"),
    ("no-sync-last", "--accum 2", "gradients are not averaged", "no_sync around the last"),
    ("local-sgd", "", "averaged weights", "local SGD"),
    ("copied", "", "optimizer of another network", "copied"),
    ("rebuilt-head", "", "optimizer of another network", "rebuilt"),
    ("forgotten-head", "", "parameters in no optimizer", "left out of its groups"),
    ("frozen", "", "frozen parameters", "requires_grad"),
    ("detached", "", "gradient", "The loss is equal: a part is detached"),
    ("unequal-ends", "", "weights of the pieces", "each piece counts alike"),
    (
        "token-mean-of-means",
        "--tokens",
        "weights of the pieces",
        "A weighs by what its loss counts",
    ),
    ("smoothing", "", "gradient", "another loss"),
    ("shifted-targets", "", "targets", "shifted"),
    ("no-zero-grad", "", "gradient of an earlier step", "zero_grad is missing"),
    ("zero-grad-between", "--accum 2", "gradients thrown away", "between the micro-batches"),
    ("none", "--norm batch", "BatchNorm", "each process's and micro-batch's own samples"),
    ("none", "--dropout 0.2", "dropout", "other masks"),
    ("stays-in-eval", "--dropout 0.2", "dropout", "other masks"),
    ("none", "--augment", "augmentation", "random transforms"),
    ("no-broadcast", "--norm batch", "buffers of the ranks", "not broadcast"),
    ("padded-evaluation", "", "padded evaluation", "count twice"),
    ("unused-branch", "", "outputs", "is another one"),
    ("noise", "", "outputs", "draws numbers"),
    ("autocast", "", "precision", "A computes in float32, B in bfloat16"),
    ("nan", "", "NaN", ""),
]


@pytest.mark.full
@pytest.mark.parametrize("fault, both, what, why", FAULTS)
def test_a_planted_fault_is_named(fault, both, what, why, in_forks):
    result = verdict(fault, both)
    assert not result.same
    assert result.lines[0].startswith("NOT THE SAME TRAINING RUN")
    assert result.causes[0].what == what, result.lines
    assert why in result.causes[0].why, result.lines
    assert len(result.lines) <= 25


ENDS = [  # what is made even, after which nothing else differs
    ("sum-of-ranks", "", "gradient"),
    ("set-epoch", "", "order"),
    ("scheduler-per-process", "", "settings"),
    ("other-init", "", "weights"),
    ("none", "--norm batch", "batchnorm"),
    ("none", "--dropout 0.2", "dropout"),
    ("none", "--augment", "augment"),
]


@pytest.mark.full
@pytest.mark.parametrize("fault, both, even", ENDS)
def test_behind_a_cause_that_is_made_even_nothing_differs(fault, both, even, in_forks):
    lines = verdict(fault, both).lines
    assert any(line.startswith(f"With {even} made even nothing else differs") for line in lines)


@pytest.mark.full
@pytest.mark.parametrize(
    "fault, both, causes",
    [
        ("sum-of-ranks", "--dropout 0.2", ["dropout", "factor of the gradient"]),
        ("stays-in-eval", "--dropout 0.2", ["dropout", "training mode"]),
        ("set-epoch", "--augment --norm batch", ["augmentation", "order of the second epoch", "BatchNorm"]),
        ("loss-sum", "--norm batch --dropout 0.2", ["BatchNorm and dropout", "factor of the gradient"]),
    ],
)  # fmt: skip
def test_causes_behind_causes_are_found(fault, both, causes, in_forks):
    result = verdict(fault, both)
    assert {c.what for c in result.causes} == set(causes), result.lines


@pytest.mark.full
def test_the_cause_on_the_other_side_is_named_too(in_forks):
    result = program.compare(
        "2 planted.py past-the-wrapper", "1 planted.py none", say=lambda text: None, timeout=100
    )
    assert "A: the 2 processes step with different gradients" in result.causes[0].text


# ---- diagnosis of made records -------------------------------------------------------------------


def made_run(letter="B", world=1, steps=4, **changes):
    """Return a run of a made network with two tensors; `changes` replace values in all steps."""
    ranks = []
    for rank in range(world):
        made = []
        for k in range(steps):
            rows = 8 // world
            samples = [
                ((32, 8 * k + rank * rows + i), 0, f"{k}-{rank * rows + i}", "t")
                for i in range(rows)
            ]
            call = {"samples": samples, "outputs": [None] * rows, "dtype": "float32"}
            call |= {"network": 0, "training": True}
            gradients = {"w": np.array([1.0, 2.0, k]), "b": np.array([0.5])}
            step = {"rank": rank, "world": world, "connected": True, "optimizer": "SGD"}
            step |= {"groups": [{"lr": 0.1, "weight_decay": 0.0}], "group_of": {"w": 0, "b": 0}}
            step |= {"strange": 0, "forgotten": [], "frozen": [], "sharded": False, "thrown": 0}
            step |= {"wrapped": {}, "buffers": {}, "events": [], "clips": [], "schedulers": 1}
            step |= {"evaluated": [], "second_epoch": False, "gradients": gradients}
            step |= {"weights": {"w": np.ones(3) - k, "b": np.ones(1)}}
            step |= {"after": {"w": np.ones(3) - k - 1, "b": np.ones(1)}}
            step["pieces"] = [{"loss": 1.0, "calls": [call], "gradients": gradients}]
            for name, value in changes.items():
                step[name] = value(step, rank, k) if callable(value) else value
            made.append(step)
        ranks.append(made)
    network = {
        "norms": [],
        "noises": [],
        "sync": False,
        "dtypes": ["float64"],
        "name": "N",
        "numbers": 4,
    }
    return records.Run(letter, ranks, network)


def named(a, b):
    limits = records.Limits(a, a)
    return [*causes.own(b, limits), *causes.parting(a, b, limits)]


def times(factor):
    return lambda step, rank, k: {n: factor * g for n, g in step["gradients"].items()}


def test_equal_records_have_no_cause():
    assert named(made_run("A"), made_run("B")) == []
    assert (
        named(made_run("A"), made_run("B", world=2, wrapped={"DistributedDataParallel": True}))
        == []
    )


MADE = [  # changes of B, the cause, a word of text or reason
    ({"gradients": times(3.0)}, "factor of the gradient", "3 times A's"),
    ({"gradients": times(1 / 8)}, "factor of the gradient", "divides by the samples of a micro-batch"),
    ({"groups": [{"lr": 0.2, "weight_decay": 0.0}]}, "learning rate", "0.1 in A, 0.2 in B"),
    ({"groups": [{"lr": 0.1, "weight_decay": 0.5}]}, "weight_decay", "0 in A, 0.5 in B"),
    ({"optimizer": "Adam"}, "optimizer", "A has SGD, B Adam"),
    ({"strange": 2}, "optimizer of another network", "2 of 4 tensors"),
    ({"forgotten": ["head"]}, "parameters in no optimizer", "head"),
    ({"thrown": 4}, "gradients thrown away", "4 samples"),
    ({"events": ["clip", "all_reduce"]}, "clipping before the reduction", "clips before all_reduce"),
    ({"clips": [(2.0, 1.0)], "gradients": times(0.5)}, "clipping", "A does not clip, B clips by 1"),
    ({"clips": [(4.0, 1.0)]}, "gradient before clipping", "2 in A, 4 in B"),
    ({"weights": {"w": np.zeros(3), "b": np.ones(1)}}, "first weights", "differ by up to 1"),
    ({"after": {"w": np.zeros(3), "b": np.ones(1)}}, "optimizer's step", "equal gradients"),
    ({"gradients": {"w": np.array([1.0, 2.0, 0.0])}}, "no gradient", "none in B: b"),
    ({"gradients": {"w": np.ones(3)}, "frozen": ["b"]}, "frozen parameters", "none in B: b"),
    ({"gradients": lambda s, r, k: {n: g * (np.nan if k == 2 else 1) for n, g in s["gradients"].items()}},
     "NaN", "NaN or infinite"),
    ({"gradients": lambda s, r, k: {"w": 2 * s["gradients"]["w"], "b": 3 * s["gradients"]["b"]}},
     "factors of the gradient", "2 times A's in 1 tensors"),
    ({"gradients": lambda s, r, k: {"w": s["gradients"]["w"] + (k > 0) * np.array([1, 2, k - 1.0]),
                                    "b": s["gradients"]["b"] + (k > 0) * 0.5}},
     "gradient of an earlier step", "zero_grad is missing"),
]  # fmt: skip


@pytest.mark.parametrize("changes, what, words", MADE)
def test_a_made_difference_is_named(changes, what, words):
    clips = [(2.0, 1.0)] if what == "gradient before clipping" else []
    found = named(made_run("A", clips=clips), made_run("B", **changes))
    assert found[0].what == what
    assert words in found[0].text + found[0].why


RANKS = [  # changes of B's two ranks
    ({"gradients": lambda s, r, k: {n: g * (1 + r) for n, g in s["gradients"].items()}},
     "averaged weights", "local SGD"),
    ({"weights": lambda s, r, k: {n: w + r for n, w in s["weights"].items()}},
     "first weights of the ranks", "its own seed"),
    ({"buffers": lambda s, r, k: {"mean": np.ones(2) * (1 + r)}}, "buffers of the ranks", "not broadcast"),
    ({"connected": False, "gradients": lambda s, r, k: {n: g * (1 + r) for n, g in s["gradients"].items()},
      "weights": lambda s, r, k: {n: w + r * k for n, w in s["weights"].items()}},
     "gradients are not averaged", "no process group"),
]  # fmt: skip


@pytest.mark.parametrize("changes, what, words", RANKS)
def test_what_ranks_show_beside_each_other_is_named(changes, what, words):
    found = list(causes.own(made_run("B", world=2, **changes), records.Limits(made_run("A"))))
    assert [c.what for c in found if words in c.why] == [what]


def calls(**changes):
    """Change the call of each step, as in calls(dtype="bfloat16")."""

    def change(step, rank, k):
        [piece] = step["pieces"]
        call = piece["calls"][0]
        new = {n: v(call, rank) if callable(v) else v for n, v in changes.items()}
        return [{**piece, "calls": [{**call, **new}]}]

    return change


def each(place, change):
    """Change one of a sample's (id, epoch, hash, target)."""

    def samples(call, rank):
        return [(*s[:place], change(s[place]), *s[place + 1 :]) for s in call["samples"]]

    return samples


def numbers(start):
    return lambda call, rank: [(4, start + i, 0.0, 0.0, 0.0) for i in range(len(call["samples"]))]


CALLS = [  # what each call of A's and of B's network saw
    ({}, {"samples": each(3, lambda target: "u")}, "targets", "8 of 8 have another target"),
    ({}, {"samples": each(2, lambda look: look + "'")}, "augmentation", "8 of 8 look different"),
    ({}, {"samples": lambda c, r: [((32, 99 + i), 0, f"{i}'", "t") for i in range(8)]}, "order of samples", "0 of 8"),
    ({}, {"samples": lambda c, r: c["samples"][:4] * 2}, "duplicates", "4 of B's come twice"),
    ({}, {"samples": lambda c, r: c["samples"][:3]}, "batch size", "8 samples in A, 3 in B (3)"),
    ({"outputs": numbers(0)}, {"outputs": numbers(1)}, "outputs", "draws numbers"),
    ({"outputs": numbers(0)}, {"outputs": numbers(1), "dtype": "bfloat16"}, "precision", "B in bfloat16"),
    ({}, {"training": False}, "training mode", "B trains in eval mode"),
]  # fmt: skip


@pytest.mark.parametrize("of_a, of_b, what, words", CALLS)
def test_what_goes_in_and_comes_out_is_compared(of_a, of_b, what, words):
    a, b = made_run("A", pieces=calls(**of_a)), made_run("B", pieces=calls(**of_b))
    found = named(a, b)
    assert [c.what for c in found] == [what]
    assert words in found[0].text + found[0].why


@pytest.mark.parametrize("kind, count", [("norms", 2), ("noises", 3)])
def test_layers_that_make_outputs_differ_are_named(kind, count):
    runs = [made_run(x, pieces=calls(outputs=numbers(i))) for i, x in enumerate("AB")]
    for run in runs:
        run.network[kind] = ["layer"] * count
    [cause] = named(*runs)
    assert cause.what == {"norms": "BatchNorm", "noises": "dropout"}[kind]
    assert cause.why.startswith(f"{count} ")
    assert cause.even == {{"norms": "batchnorm", "noises": "dropout"}[kind]: True}


def test_a_schedule_that_runs_twice_as_fast_is_named():
    def rates(pace):
        return lambda s, r, k: [{"lr": 0.1 * 0.9 ** (pace * k), "weight_decay": 0.0}]

    a, b = made_run("A", steps=8, groups=rates(1)), made_run("B", steps=8, groups=rates(2))
    assert named(a, b)[0].why.startswith("B's schedule runs 2 times as fast")
    assert named(b, a)[0].why.startswith("A's schedule runs 2 times as fast")


@pytest.mark.parametrize(
    "sizes, of_a, of_b, words",
    [
        ((6, 2), (0.75, 0.25), (0.5, 0.5), "each piece counts alike"),
        ((4, 4), (0.6, 0.4), (0.5, 0.5), "A weighs by what its loss counts"),
        ((4, 4), (0.5, 0.5), (0.5, 0.1), "B weighs equal pieces unequally"),
    ],
)
def test_a_gradient_is_explained_by_its_pieces(sizes, of_a, of_b, words):
    parts = [
        {"w": np.array([1.0, 2.0, 3.0]), "b": np.ones(1)},
        {"w": np.array([3.0, -1.0, 1.0]), "b": -np.ones(1)},
    ]

    def pieces(step, rank, k):
        mine = [((32, 8 * k + i), 0, f"{k}-{i}", "t") for i in range(8)]
        mine = mine[: sizes[0]] if rank == 0 else mine[sizes[0] :]
        call = {**step["pieces"][0]["calls"][0], "samples": mine, "outputs": [None] * len(mine)}
        return [{"loss": 1.0, "calls": [call], "gradients": parts[rank]}]

    def total(factors):
        return lambda step, rank, k: {
            n: sum(f * p[n] for f, p in zip(factors, parts)) for n in "wb"
        }

    a = made_run("A", gradients=total(of_a))
    b = made_run("B", world=2, pieces=pieces, gradients=total(of_b))
    [cause] = named(a, b)
    assert cause.what == "weights of the pieces"
    assert words in cause.why


def test_limits_are_thirty_times_the_noise_of_each_tensor():
    a = made_run("A")
    noisy = {
        "gradients": lambda s, r, k: {
            "w": s["gradients"]["w"] * (1 + 1e-6),
            "b": s["gradients"]["b"],
        }
    }
    limits = records.Limits(a, made_run("A", **noisy))
    assert limits.of(0, "gradients", "w") == pytest.approx(3e-5, rel=1e-3)
    over = {
        "gradients": lambda s, r, k: {
            "w": s["gradients"]["w"] * (1 + 2e-5),
            "b": s["gradients"]["b"],
        }
    }
    assert not causes.parting(a, made_run("B", **over), limits)
    over = {
        "gradients": lambda s, r, k: {
            "w": s["gradients"]["w"] * (1 + 4e-5),
            "b": s["gradients"]["b"],
        }
    }
    assert causes.parting(a, made_run("B", **over), limits)


def test_evaluation_counts_each_sample():
    samples = [((9, i), 0, str(i), None) for i in range(9)]
    a = made_run("A", evaluated=lambda s, r, k: samples if k == 2 else [])
    shards = [samples[0::2], [*samples[1::2], samples[0]]]
    b = made_run("B", world=2, evaluated=lambda s, r, k: shards[r] if k == 2 else [])
    [cause] = causes.evaluation(a, b)
    assert cause.what == "padded evaluation"
    assert "9 samples in A, 10 in B (5 + 5): 1 too many, 0 missing" in cause.text
    right = made_run("B", world=2, evaluated=lambda s, r, k: samples[r::2] if k == 2 else [])
    assert not list(causes.evaluation(a, right))
    each = made_run("B", world=2, evaluated=lambda s, r, k: samples if k == 2 else [])
    assert not list(causes.evaluation(a, each))


# ---- commands that do not train as expected ------------------------------------------------------

HEAD = "import torch\ntorch.manual_seed(0)\nnet = torch.nn.Linear(4, 2)\n"
HEAD += "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
LOOP = "for i in range(6):\n    optimizer.zero_grad()\n    net(torch.ones(8, 4) * i).sum().backward()\n"
STRANGE = {
    "crash": (HEAD + "raise RuntimeError('out of cheese')", "out of cheese"),
    "late crash": (
        HEAD + LOOP + "    optimizer.step()\n    assert i < 2, 'no third step'",
        "after 3 steps",
    ),
    "hang": (
        HEAD + "import os, time\nos.fork() or os.setsid()\ntime.sleep(99)",
        "did not end within",
    ),
    "no optimizer": (HEAD + LOOP, "made no step"),
    "no torch": ("print('hello')", "hello"),
    "not Python": ("def", "SyntaxError"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", STRANGE)
def test_a_command_that_cannot_run_is_said(name, tmp_path, capsys):
    text, words = STRANGE[name]
    (tmp_path / "script.py").write_text(text)
    command = f"{sys.executable} {tmp_path}/script.py"
    assert program.main([command, command, "--timeout", "20"]) == 2
    printed = capsys.readouterr().out
    assert printed.startswith("CANNOT SAY: A ")
    assert words in printed
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert str(tmp_path) not in path.read_text(), "a process was left"


def test_a_command_that_does_not_exist_is_said(capsys):
    assert program.main(["/no/such/program", "true"]) == 2
    assert "does not start" in capsys.readouterr().out


def test_an_unknown_name_of_even_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        program.main(["a", "b", "--even", "weather"])
    assert end.value.code == 2
    assert "--even weather: use seed, weights" in capsys.readouterr().err


GAN = """
D, G = torch.nn.Linear(4, 1), torch.nn.Linear(3, 4)
optimizers = [torch.optim.Adam(n.parameters(), 0.01) for n in (D, G)]
for i in range(6):
    fake = G(torch.randn(8, 3))
    for optimizer, loss in zip(optimizers, (lambda: D(torch.randn(8, 4)).mean() - D(fake.detach()).mean(), lambda: D(fake).mean())):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
"""
COMPILED = "net.compile()\n" + LOOP + "    optimizer.step()\n"
LOUD = LOOP + "    optimizer.step()\n    print('x' * 1000000)\n"
FORKS = "import os\n" + LOOP + "    optimizer.step()\n    os.fork() or os._exit(0)\n"


@pytest.mark.full
@pytest.mark.parametrize("name, text", [("GAN", GAN), ("compile", COMPILED), ("loud", LOUD), ("forks", FORKS)])  # fmt: skip
def test_a_strange_script_is_the_same_as_itself(name, text, tmp_path, capsys):
    (tmp_path / "script.py").write_text(HEAD + text)
    command = f"{sys.executable} {tmp_path}/script.py"
    files = ["--json", f"{tmp_path}/result.json", "--plot", f"{tmp_path}/picture.svg"]
    assert program.main([command, command, *files]) == 0
    printed = capsys.readouterr().out
    assert ("what compiled code does" in printed) == (name == "compile")
    assert json.loads((tmp_path / "result.json").read_text())["same"] is True
    assert (tmp_path / "picture.svg").read_text().startswith("<svg")
    (tmp_path / "other.py").write_text((HEAD + text).replace("0.01", "0.02").replace("0.1", "0.2"))
    assert program.main([command, f"{sys.executable} {tmp_path}/other.py"]) == 1
    assert "learning rate" in capsys.readouterr().out
