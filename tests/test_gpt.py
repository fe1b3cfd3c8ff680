"""`--task gpt`: the same on many devices; its first step, and what it reaches, are those of a plain program."""

import pytest
import torch
import torch.nn.functional as F
from harness import compare, make_args, train
from made_data import make_text

import sampling
import tasks.gpt as gpt

SMALL = "--task gpt --context 16 --layers 2 --heads 2 --width 16 --device cpu --workers 0"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    make_text(folder / "text.txt", 300_000)
    gpt.prepare(folder / "text.txt", folder)
    return folder


@pytest.fixture(scope="module")
def single(data, tmp_path_factory):
    """Return the command line of two epochs in float64, and its run on one device."""
    argv = [*SMALL.split(), "--data-dir", data, "--dtype", "float64", "--samples", "120"]
    argv += "--epochs 2 --batch-size 15 --accum-steps 3 --lr 0.01 --warmup-epochs 0.5".split()
    argv += "--clip-grad-norm 1 --log-every 1 --eval-batch-size 128 --optimizer adamw".split()
    result = train("single", 1, *argv, folder=tmp_path_factory.mktemp("single"))
    assert result.code == 0, result.err
    return argv, result


REMEMBERING = """from torch.utils.checkpoint import checkpoint
from tasks import gpt
from tasks.gpt import *
class Block(gpt.Block):
    def forward(self, values):
        return checkpoint(super().forward, values, use_reentrant=False)
def build_model(args):
    net = gpt.build_model(args)
    for block in net.blocks:
        block.__class__ = Block
    return net
"""


@pytest.mark.parametrize(
    ("mode", "n", "remembers"),
    [("ddp", 2, False), pytest.param("fsdp", 2, False, marks=pytest.mark.full), pytest.param("fsdp", 2, True, marks=pytest.mark.full)],
)  # fmt: skip
def test_language_model_is_the_same_on_many_devices(mode, n, remembers, single, tmp_path):
    """With a matrix that the first and the last layer share; and with activation checkpoints."""
    argv, reference = single
    if remembers:
        (tmp_path / "remembering.py").write_text(REMEMBERING)
        argv = ["--task", tmp_path / "remembering.py", *argv[2:]]
    deviations = compare(train(mode, n, *argv, folder=tmp_path), reference)
    assert max(deviations.values()) < 1e-10, deviations


def test_first_step_is_that_of_a_plain_program(single):
    argv, reference = single
    args = make_args("single", *map(str, argv))
    train_set, _ = gpt.build_datasets(args)
    torch.manual_seed(args.seed)
    net = gpt.build_model(args).double()
    indices = sampling.epoch_order(len(train_set), args.seed, 0)[: args.batch_size].tolist()
    tokens, following = sampling.KeyedDataset(train_set, args.seed).__getitems__((0, indices))
    assert tokens.shape == (15, 16) and tokens[:, 1:].equal(following[:, :-1])
    logits = net(tokens)
    chances = logits.log_softmax(2).gather(2, following.unsqueeze(2))
    (-chances.mean()).backward()
    norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm().item()
    line = reference.train_lines()[0]
    assert line["loss"] == pytest.approx(-chances.mean().item(), rel=1e-12)
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-10)
    changed = tokens.clone()
    changed[:, 9] += 1
    same = net(changed).isclose(logits, rtol=1e-12).all(2).all(0)
    assert same[:9].all() and not same[9:].any(), "a token sees no later one, but all earlier ones"


@pytest.mark.slow
def test_default_options_reach_what_plain_torch_reaches_in_the_same_steps(data, tmp_path):
    """The figures of docs/recipes.md. The plain program draws other windows, and decays all weights."""
    argv = ["--task", "gpt", "--data-dir", data, "--device", "cpu"]
    run = train("ddp", 2, *argv, folder=tmp_path, timeout=500)
    assert run.code == 0, run.err
    steps, reached = run.eval_lines()[-1]["global_step"], run.eval_lines()[-1]["loss"]

    args = make_args("single", *map(str, argv))
    torch.manual_seed(0)
    net, (train_set, val_set) = gpt.build_model(args), gpt.build_datasets(args)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.1)
    for _ in range(steps):
        tokens, following = map(torch.stack, zip(*(train_set[0] for _ in range(64))))
        loss = F.cross_entropy(net(tokens).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        tokens, following = map(torch.stack, zip(*(val_set[i] for i in range(len(val_set)))))
        plain = F.cross_entropy(net(tokens).flatten(0, 1), following.flatten()).item()
    assert steps == 390 and 0.25 < reached < 0.33 and reached < 1.05 * plain
