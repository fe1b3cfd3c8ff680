"""samerun: equal runs are called the same, and a planted fault is named by its cause."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from samerun import CannotSay, same_run
from samerun.command_line import main

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PLANTED = HERE / "planted.py"


def command(world, script, arguments=""):
    """Return the command of a script on so many ranks."""
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {world} "
    return f"{sys.executable} {torchrun * (world > 1)}{script} {arguments}"


def verdict(fault, both="", world=2):
    """Compare planted.py on one rank with a fault of it on two."""
    return report(command(1, PLANTED, f"none {both}"), command(world, PLANTED, f"{fault} {both}"))


def report(a, b, **options):
    """Return the lines that a user reads."""
    try:
        return same_run(a, b, **options).lines
    except (AssertionError, CannotSay) as error:
        return str(error).splitlines()


# ---- equal pairs ---------------------------------------------------------------------------------


@pytest.mark.full
def test_the_observer_changes_no_bit(tmp_path):
    arguments = "none --norm batch --dropout 0.2 --augment --accum 2 --save"
    a, b, plain = (command(2, PLANTED, f"{arguments} {tmp_path}/{n}.pt") for n in ("a", "b", "c"))
    same_run(a, b, steps=1000)
    subprocess.run(plain.split(), check=True)
    watched, unwatched = torch.load(tmp_path / "b.pt"), torch.load(tmp_path / "c.pt")
    assert watched.keys() == unwatched.keys()
    assert all(torch.equal(watched[name], unwatched[name]) for name in watched)


EQUAL = [
    "",
    "--accum 2",
    "--accum 4 --clip 0.3",
    "--float64",
    "--float64 --accum 2 --clip 0.3",
    "--plain",
    "--plain --accum 2",
    "--tokens",
    "--optimizer adam",
    "--optimizer adam --float64 --clip 0.3",
]


def check_same(lines, both=""):
    assert lines[0].startswith("THE SAME TRAINING RUN in "), lines
    [apart] = re.findall(r"the weights agree to (\S+),", "\n".join(lines))
    assert float(apart) < (1e-13 if "float64" in both else 1e-5)


@pytest.mark.planted
@pytest.mark.parametrize("both", EQUAL)
def test_equal_runs_are_called_the_same(both):
    check_same(verdict("none", both), both)


@pytest.mark.planted
@pytest.mark.parametrize("fault, both", [("none", "--accum 2"), ("no-sync-never", "--accum 2")])
def test_four_ranks_are_the_same_run(fault, both):
    check_same(verdict(fault, both, world=4))


MODES = {
    "ddp": (2, "train_ddp.py", ""),
    "fsdp": (2, "train_fsdp.py", ""),
    "dp": (1, "train_dp.py", "--replicas 2"),
    "spawn": (1, "train_spawn.py", "--nproc 2"),
}


@pytest.mark.planted
@pytest.mark.parametrize("mode", MODES)
def test_modes_are_the_same_run(mode):
    world, script, arguments = MODES[mode]
    out = "--device cpu --dtype float64 --accum-steps 2"
    a = command(1, ROOT / "train_single.py", out)
    b = command(world, ROOT / script, f"{arguments} {out}")
    check_same(report(a, b, steps=6), "float64")


@pytest.mark.planted
def test_examples_on_one_page_are_the_same_run():
    a, b = (
        command(n, ROOT / "examples" / f"minimal_{mode}.py", "2 {dir}/out.pt")
        for n, mode in ((1, "single"), (2, "ddp"))
    )
    check_same(report(a, b))


# ---- planted faults ------------------------------------------------------------------------------

FAULTS = [  # fault, options of both, the first cause, words of its reason or its text
    ("no-sampler", "", "no sampler", "N processes do one's work"),
    ("wrong-rank", "", "no sampler", "with the same rank"),
    ("set-epoch", "", "set_epoch is missing", "order of the first one"),
    ("other-seed", "", "order of samples", "another sampler, seed"),
    ("no-shuffle", "", "order of samples", "epoch or shuffle"),
    ("none", "--samples 99", "batch size", "cut or filled"),
    ("seed-per-rank", "", "seed per process", "begin with different weights"),
    ("other-init", "", "first weights", "another seed"),
    ("sum-of-ranks", "", "sum over processes", "2 times A's"),
    ("divided-twice", "", "divided twice", "0.5 times A's"),
    ("loss-sum", "", "loss is a sum", "over the samples of a micro-batch"),
    ("divided-by-world", "", "loss divided too often", "the 2 processes once more"),
    ("divided-by-world", "--clip 0.01", "loss divided too often", "the 2 processes once more"),
    ("no-division", "--accum 2", "loss is a sum", "2 micro-batches"),
    ("scaled", "", "factor of the gradient", "0.3 times A's"),
    ("batch-per-rank", "", "batch per process", "32 samples in A, 32 + 32 in B"),
    ("batch-cut-twice", "", "batch per process", "32 samples in A, 8 + 8 in B"),
    ("scheduler-per-process", "", "learning rate", "steps more often"),
    ("no-scheduler", "", "learning rate", "another value"),
    ("rate-times-world", "", "learning rate", "the number of processes"),
    ("momentum", "", "momentum", "0.9 in A, 0.8 in B"),
    ("decay-groups", "", "weight_decay of a group", "groups of the optimizer"),
    ("adamw", "--optimizer adam", "another optimizer", "A has Adam, B AdamW"),
    ("loaded-momentum", "", "new weights", "like momentum"),
    ("weights-changed", "", "new weights", "something else changes them"),
    ("clip-first", "--clip 0.3", "clipping before the reduction", "each by its own norm"),
    ("clip-limit", "--clip 0.3", "clipping", "by 0.3 in A, by 0.15 in B"),
    ("no-clip", "--clip 0.3", "clipping", "by nothing in B"),
    ("past-the-wrapper", "", "not averaged", "past its wrapper"),
    ("no-ddp", "", "not averaged", "no DDP"),
    ("no-group", "", "not averaged", "no DDP"),
    ("no-sync-last", "--accum 2", "not averaged", "in the last micro-batch"),
    ("copied", "", "tensors without a gradient", "copied"),
    ("rebuilt-head", "", "tensors without a gradient", "2 of A's optimizer"),
    ("forgotten-head", "", "tensors without a gradient", "head.weight"),
    ("frozen", "", "tensors without a gradient", "1 of A's optimizer"),
    ("detached", "", "gradient", "a part is detached"),
    ("unequal-ends", "", "mean of means", "each piece counts alike"),
    ("token-mean-of-means", "--tokens", "mean of means", "samples or tokens"),
    ("smoothing", "", "gradient", "another loss"),
    ("shifted-targets", "", "gradient", "mean loss"),
    ("zero-grad-between", "--accum 2", "weights of the pieces", "B by 0 0.5 0 0.5"),
    ("none", "--norm batch", "BatchNorm", "in one micro-batch"),
    ("none", "--dropout 0.2", "dropout", "its own masks"),
    ("stays-in-eval", "", "mode or precision", "B in float32 in eval mode"),
    ("none", "--augment", "augmentation", "random transforms"),
    ("no-broadcast", "--norm batch", "buffers not broadcast", "statistics of its own samples"),
    ("padded-evaluation", "", "padded evaluation", "27 samples in A, 28 in B (14 + 14): 1 too many"),
    ("unused-branch", "", "tensors without a gradient", "side.weight"),
    ("noise", "", "outputs", "draws numbers"),
    ("autocast", "", "mode or precision", "A computes in float32, B in bfloat16"),
    ("nan", "", "NaN", "nothing can be compared"),
]  # fmt: skip
QUICK = ["sum-of-ranks", "past-the-wrapper", "set-epoch"]


@pytest.mark.parametrize(
    "fault, both, cause, words",
    [pytest.param(*row, marks=[pytest.mark.planted] * (row[0] not in QUICK)) for row in FAULTS],
)
def test_a_planted_fault_is_named(fault, both, cause, words):
    lines = verdict(fault, both)
    assert lines[0].startswith("NOT THE SAME TRAINING RUN"), lines
    assert re.match(rf"1\. {re.escape(cause)}(, at step \d+)?: ", lines[1]), lines
    assert words in lines[1] + lines[2], lines
    assert len(lines) <= 25


BEHIND = [  # causes, each behind the one before, and what is made even at the end
    ("set-epoch", "", ["set_epoch is missing"], "order"),
    ("none", "--norm batch", ["BatchNorm"], "batchnorm"),
    ("none", "--augment", ["augmentation"], "augment"),
    ("none", "--norm batch --dropout 0.2", ["BatchNorm", "dropout"], "batchnorm, dropout"),
]


@pytest.mark.planted
@pytest.mark.parametrize("fault, both, causes, even", BEHIND)
def test_causes_behind_causes_are_found(fault, both, causes, even):
    lines = verdict(fault, both)
    assert re.findall(r"^\d\. ([^:,]+)", "\n".join(lines), re.M) == causes, lines
    assert any(line.startswith(f"With {even} made even nothing else differs") for line in lines)


@pytest.mark.planted
def test_the_cause_that_hides_the_rest_is_named():
    """It is the first one here; the second one could be made even, and was."""
    lines = verdict("past-the-wrapper", "--augment")
    assert re.findall(r"^\d\. ([^:,]+)", "\n".join(lines), re.M) == ["not averaged", "augmentation"]
    assert any("what lies behind cause 1 cannot be seen" in line for line in lines), lines


@pytest.mark.planted
def test_the_cause_on_the_other_side_is_named_too():
    for fault, text in (("past-the-wrapper", "1. not averaged, at step 1: A: the 2 processes"),
                        ("loss-sum", "1. loss is a sum, at step 1: A's gradient is 16 times B's")):  # fmt: skip
        assert report(command(2, PLANTED, fault), command(1, PLANTED, "none"))[1].startswith(text)


# ---- commands that do not train as expected ------------------------------------------------------

HEAD = "import torch\ntorch.manual_seed(0)\nnet = torch.nn.Linear(4, 2)\n"
HEAD += "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
LOOP = "for i in range(6):\n    optimizer.zero_grad()\n    net(torch.ones(8, 4) * i).sum().backward()\n"
STEP = LOOP + "    optimizer.step()\n"
STRANGE = {
    "crash": ("raise RuntimeError('out of cheese')", "out of cheese"),
    "late crash": (STEP + "    assert i < 2, 'no third step'", "after 3 steps"),
    "no optimizer": (LOOP, "made no step"),
    "NaN": (STEP.replace(".sum()", ".sum().mul(float('nan'))"), "NaN or infinite"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.planted] * (n != "late crash")) for n in STRANGE]
)
def test_a_command_that_cannot_run_is_said(name, tmp_path):
    text, words = STRANGE[name]
    (tmp_path / "script.py").write_text(HEAD + text)
    with pytest.raises(CannotSay, match=r"^A") as error:
        same_run(command(1, tmp_path / "script.py"), "true")
    assert words in str(error.value)


@pytest.mark.planted
def test_a_command_that_hangs_is_ended(tmp_path, capsys):
    (tmp_path / "hang.py").write_text("import os, time\nos.fork() or os.setsid()\ntime.sleep(99)")
    assert main([f"{sys.executable} {tmp_path}/hang.py", "true", "--timeout", "1"]) == 2
    assert "did not end within 1 seconds" in capsys.readouterr().out
    assert not left(tmp_path), "a process was left"


def test_a_command_that_does_not_train_is_said(capsys):
    for command_a, words in (("echo hello", "A made no step"), ("/no/such", "'/no/such' does not")):
        assert main([command_a, "true"]) == 2
        assert capsys.readouterr().out.startswith(f"CANNOT SAY: {words}")


def test_an_unknown_name_of_even_is_refused(capsys):
    assert main(["a", "b", "--even", "weather"]) == 2
    assert "even has no 'weather': use seed, order" in capsys.readouterr().out


GAN = """
D, G = torch.nn.Linear(4, 1), torch.nn.Linear(3, 4)
optimizers = [torch.optim.Adam(n.parameters(), 0.01) for n in (D, G)]
for i in range(6):
    fake = G(torch.randn(8, 3))
    losses = (lambda: D(torch.randn(8, 4)).mean() - D(fake.detach()).mean(), lambda: D(fake).mean())
    for optimizer, loss in zip(optimizers, losses):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
"""
SEVERAL = """
second = torch.nn.Linear(2, 2)
optimizer.add_param_group({"params": second.parameters()})
for i in range(6):
    optimizer.zero_grad()
    second(net(torch.randn(8, 4)).relu()).sum().backward()
    optimizer.step()
"""
UNUSUAL = {
    "GAN": GAN,
    "several networks": SEVERAL,
    "compile": "net.compile()\n" + STEP,
    "prints much": STEP + "    print('x' * 1000000)\n",
    "forks": "import os\n" + STEP + "    os.fork() or os._exit(0)\n",
}


@pytest.mark.planted
@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_script_is_the_same_as_itself(name, tmp_path, capsys):
    text = HEAD + UNUSUAL[name]
    (tmp_path / "script.py").write_text(text)
    (tmp_path / "other.py").write_text(text.replace("0.01", "0.02").replace("0.1", "0.2"))
    one, other = (command(1, tmp_path / f"{n}.py") for n in ("script", "other"))
    assert main([one, one]) == 0
    assert main([one, other]) == 1
    assert "learning rate" in capsys.readouterr().out


# What public programs do, and what once was misjudged: (script, A's and B's world size and arguments, what is said)
START = 'import os, sys, torch\nN, R = (int(os.environ.get(n, d)) for n, d in (("WORLD_SIZE", 1), ("RANK", 0)))\n'
START += "first, second = map(int, sys.argv[1:])\ntorch.manual_seed(0)\ng = torch.Generator().manual_seed(1)\n"
AHEAD = """
data = torch.utils.data.TensorDataset(torch.randn(96, 7, generator=g), torch.randint(3, (96,), generator=g))
net = torch.nn.Linear(7, 3)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
def ahead(loader):
    last = None
    for x, y in loader:
        if last is not None:
            yield last
        last = x * 2, y
    yield last
for epoch in range(3):
    order = torch.Generator().manual_seed(epoch)
    loader = torch.utils.data.DataLoader(data, first, shuffle=True, generator=order)
    for k, (x, y) in enumerate(ahead(loader)):
        (torch.nn.functional.cross_entropy(net(x), y) / second).backward()
        if (k + 1) % second == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
MASK = """
if N > 1:
    torch.distributed.init_process_group("gloo")
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
    def forward(self, x):
        return (self.layer(x)[:, None] + self.mask).softmax(-1).sum(1)
net, x = Net(), torch.randn(96, 4, generator=g)
model = torch.nn.parallel.DistributedDataParallel(net) if N > 1 else net
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for k in range(6):
    own = slice(16 * k + first * R, 16 * k + first * (R + 1))
    optimizer.zero_grad()
    model(x[own]).square().mean().backward()
    optimizer.step()
"""
TOKENS = """
ids = torch.randint(1, 50, (96, 8), generator=g)
rows = [{"types": torch.zeros_like(i), "ids": i, "mask": torch.ones_like(i), "y": i[0] % 3} for i in ids]
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 3)
    def forward(self, types, ids, mask):
        return self.head(self.words(ids).mean(1))
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
order = torch.Generator().manual_seed(second)
for batch in torch.utils.data.DataLoader(rows, first, shuffle=True, generator=order):
    y = batch.pop("y")
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(**batch), y).backward()
    optimizer.step()
"""
PUBLIC = {
    "fetches a batch ahead": (AHEAD, (1, 16, 1), (1, 8, 2), ""),
    "a mask of infinities": (MASK, (1, 16, 0), (2, 8, 0), ""),
    "tokens in another order": (TOKENS, (1, 16, 0), (1, 16, 1), "order of samples"),
}


@pytest.mark.planted
@pytest.mark.parametrize("name", PUBLIC)
def test_what_public_programs_do_is_judged_rightly(name, tmp_path, capsys):
    text, *sides, cause = PUBLIC[name]
    (tmp_path / "script.py").write_text(START + text)
    one, other = (command(n, tmp_path / "script.py", f"{i} {j}") for n, i, j in sides)
    assert main([one, other]) == bool(cause)
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("NOT THE SAME TRAINING RUN: 1 cause" if cause else "THE SAME TRAINING")
    assert second.startswith(f"1. {cause}" if cause else "Nothing differs")


# ---- one for each style in which strangers write: (script, A's and B's ranks and argument, what is said) --

HEAD_OF_ALL = """
import copy, os, sys, torch, torch.distributed as dist
from torch.nn import functional as F
N, R = (int(os.environ.get(n, d)) for n, d in (("WORLD_SIZE", 1), ("RANK", 0)))
how = sys.argv[1]
if N > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
g = torch.Generator().manual_seed(1)
x, y = torch.randn(96, 8, generator=g), torch.randint(4, (96,), generator=g)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
ddp = torch.nn.parallel.DistributedDataParallel
def rows(k):
    return list(range(8 * k, 8 * k + 8))[R::N]
"""
TRAIN = """
for k in range(12):
    loss = F.cross_entropy(model(x[rows(k)]), y[rows(k)])
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
STYLES = {
    "raw": """
w = torch.randn(8, 4).requires_grad_()
optimizer = torch.optim.SGD([w], 0.1)
model = lambda x: x @ w * (3 if how == "wrong" else 1)
""" + TRAIN,
    "prompt": """
net.requires_grad_(False)
p = torch.zeros(8, requires_grad=True)
optimizer = torch.optim.Adam([p], 0.05)
if how == "right":
    p.register_hook(lambda g: (dist.all_reduce(g), g / N)[1] if N > 1 else g)
model = lambda x: net(x + p)
""" + TRAIN,
    "inside": """
class Averaging(torch.optim.SGD):
    def step(self, closure=None):
        for p in net.parameters():
            if N > 1:
                dist.all_reduce(p.grad)
                p.grad /= 1 if how == "wrong" else N
        return super().step(closure)
model, optimizer = net, Averaging(net.parameters(), 0.1)
""" + TRAIN,
    "zero": """
from torch.distributed.optim import ZeroRedundancyOptimizer as Zero
model = ddp(net) if N > 1 else net
optimizer = Zero(net.parameters(), torch.optim.Adam, lr=0.01) if N > 1 else torch.optim.Adam(net.parameters(), 0.01)
""" + TRAIN,
    "rates": """
model = ddp(net) if N > 1 else net
optimizer = torch.optim.SGD(net.parameters(), 0.1 * (1 + R) if how == "wrong" else 0.1)
""" + TRAIN,
    "fsdp1": """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
model = FSDP(net, device_id=torch.device("cpu")) if N > 1 else net
optimizer = torch.optim.SGD(model.parameters(), 0.1)
""" + TRAIN,
    "short": "model, optimizer = net, torch.optim.SGD(net.parameters(), 0.1)" + TRAIN.replace("12", "int(how)"),
    "conjugated": """
w = torch.nn.Parameter(torch.randn(8, 4, dtype=torch.cfloat))
optimizer = torch.optim.SGD([w], 0.1)
w.register_hook(lambda g: g.conj().resolve_conj() if how == "wrong" else g)
model = lambda x: (x.cfloat() @ w).abs()
""" + TRAIN,
    "half": """
net = net.bfloat16()
x = x.bfloat16()
model, optimizer = ddp(net) if N > 1 else net, torch.optim.SGD(net.parameters(), 0.1)
if how == "wrong":
    net[2].register_forward_hook(lambda m, i, o: o * 2)
""" + TRAIN,
    "average": """
average = torch.optim.swa_utils.AveragedModel(net)
model, optimizer = net, torch.optim.SGD(net.parameters(), 0.1)
optimizer.register_step_post_hook(lambda *_: [average.update_parameters(net) for _ in range(1 + (how == "wrong"))])
""" + TRAIN,
    "time first": """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__(); self.r = torch.nn.LSTM(8, 4)
    def forward(self, x):
        return self.r(x[None].repeat(5, 1, 1))[0][-1]
lstm = Net(); lstm = ddp(lstm) if N > 1 else lstm
optimizer = torch.optim.SGD(lstm.parameters(), 0.1)
model = lambda x: lstm(x) * (N if how == "wrong" else 1)
""" + TRAIN,
    "no seed": """
torch.seed()
x = torch.randn(96, 8)
model, optimizer = net, torch.optim.SGD(net.parameters(), 0.1)
""" + TRAIN,
    "sparse": """
model = torch.nn.EmbeddingBag(9, 4, sparse=True)
x, optimizer = (x > 0).long(), torch.optim.SparseAdam(model.parameters(), 0.02 if how == "wrong" else 0.01)
""" + TRAIN,
    "functional": """
from torch.func import functional_call, grad, vmap
optimizer = torch.optim.SGD(net.parameters(), 0.1)
one = lambda p, a, b: F.cross_entropy(functional_call(net, p, (a[None],)), b[None]) * (2 if how == "wrong" else 1)
for k in range(12):
    p = {n: p.detach() for n, p in net.named_parameters()}
    for n, found in vmap(grad(one), (None, 0, 0))(p, x[rows(k)], y[rows(k)]).items():
        net.get_parameter(n).grad = found.mean(0)
    optimizer.step()
""",
    "dropout": """
net.insert(1, torch.nn.Dropout(0.2 if how == "wrong" else 0.1))
model, optimizer = net, torch.optim.SGD(net.parameters(), 0.1)
""" + TRAIN,
}  # fmt: skip
SAID = [  # style, ranks and argument of B, first line or first cause
    ("raw", 1, "right", "THE SAME"),
    ("raw", 1, "wrong", "gradient"),
    ("prompt", 2, "right", "THE SAME"),
    ("prompt", 2, "wrong", "not averaged"),
    ("inside", 2, "right", "THE SAME"),
    ("inside", 2, "wrong", "new weights"),
    ("zero", 2, "right", "THE SAME"),
    ("rates", 2, "wrong", "weights per process"),
    ("fsdp1", 2, "right", "CANNOT SAY: B: 1 of 1 tensors"),
    ("short", 1, "9", "number of steps"),
    ("conjugated", 1, "wrong", "gradient"),
    ("half", 2, "right", "THE SAME"),
    ("half", 2, "wrong", "outputs"),
    ("average", 1, "wrong", "average of the weights"),
    ("time first", 2, "right", "THE SAME"),
    ("time first", 2, "wrong", "gradient"),
    ("no seed", 1, "right", "CANNOT SAY: A, started twice, is not the same run"),
    ("sparse", 1, "wrong", "learning rate"),
    ("functional", 1, "wrong", "factor of the gradient"),
    ("dropout", 1, "wrong", "drop probability"),
]


@pytest.mark.planted
@pytest.mark.parametrize("style, ranks, how, said", SAID)
def test_styles_of_strangers_are_judged_rightly(style, ranks, how, said, tmp_path):
    (tmp_path / "train.py").write_text(HEAD_OF_ALL + STYLES[style])
    right = "12" if style == "short" else "right"
    a, b = (command(n, tmp_path / "train.py", word) for n, word in ((1, right), (ranks, how)))
    lines = report(a, b)
    if not said[0].isupper():
        assert lines[0].startswith("NOT THE SAME"), lines
    assert lines[0].startswith(said) or lines[1].startswith(f"1. {said}"), lines


@pytest.mark.planted
def test_a_resumed_run_is_one_run(tmp_path):
    text = HEAD_OF_ALL + STYLES["short"].replace("range(int(how))", "range(start, int(how))")
    load = "file, start = sys.argv[2], 0\nif os.path.exists(file):\n    start, state = torch.load(file)\n"
    load += "    net.load_state_dict(state)\n"
    text = text.replace("model, optimizer", load + "model, optimizer")
    text += "torch.save([k + 1, net.state_dict()], file)\n"
    (tmp_path / "train.py").write_text(text)
    whole, half = (command(1, tmp_path / "train.py", f"{n} {{dir}}/f") for n in (12, 6))
    lines = report(whole, f"sh -c '{half}; {whole}'")
    assert lines[0].startswith("THE SAME TRAINING RUN in 12 steps"), lines


def test_sigterm_ends_what_was_started_and_a_stopped_program_is_no_success(tmp_path):
    done = tmp_path / "done"
    (tmp_path / "train.py").write_text(HEAD + STEP.replace("range(6)", "range(10**9)"))
    a = f"sh -c '{command(1, tmp_path / 'train.py')} && touch {done}'"
    tool = [sys.executable, str(HERE.parent / "samerun"), a, a, "--steps", "5"]
    assert subprocess.run(tool, timeout=100, capture_output=True).returncode == 0
    assert not done.exists()
    (tmp_path / "train.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(99)")
    with subprocess.Popen(tool[:4], stderr=subprocess.PIPE) as process:
        process.stderr.readline()  # it has begun
        process.terminate()
        assert process.wait(20) == 143
    assert not left(tmp_path), "a process was left"


def left(mark):
    """Return the command lines of processes that name a directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [text for text in [path.read_text()] if str(mark) in text]
    return found


@pytest.mark.planted
def test_forks_and_fresh_processes_give_one_verdict():
    a, b = command(1, PLANTED, "none"), command(2, PLANTED, "sum-of-ranks")
    forked, fresh = (report(a, b, steps=6, fresh=fresh) for fresh in (False, True))
    assert forked == fresh
