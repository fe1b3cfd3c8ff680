"""Runs as rows of four tables: what is started, what disturbs it, and what it must leave.

COMPARED  a mode computes what one device computes, in float64, to rounding
SEEN      what all modes share is what it was in earlier versions
RESUMED   a run that ends early, and goes on, leaves what an undisturbed run leaves
ENDS      exit code and last words of runs that cannot end well

A run is `MODE N`, options of its own, and events (patches.EVENTS): `ddp 2 stop 9`. `spawn 4` is two
machines. Options begin with the name of a task, or of one of SETTINGS. `-m full` tries the other modes
and rows too.
"""

import functools
import re

import numpy as np
import pytest
from harness import (
    ROOT,
    compare,
    deviation,
    differences,
    load_whole,
    log_lines,
    once,
    prove,
    train,
    undisturbed,
)
from patches import ENDING, EVENTS, Events, Pieces
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

# 203 samples: the last ones of an epoch are dropped, and neither 4 ranks nor 3 micro-batches divide 30.
BASE = (
    "--device cpu --dtype float64 --epochs 3 --batch-size 30 --log-every 1 --timeout 60 --workers 0"
)
BASE += " --schedule constant --warmup-epochs 0.5"
SENTENCE = "--batch-size 13 --epochs 5 --schedule cosine --warmup-epochs 0"
SETTINGS = {
    "digits": "tiny --lr 0.05",
    "balanced": "tiny --lr 0.05 --model conv+balanced",
    "dropout": "tiny --lr 0.05 --model conv+dropout",
    "batchnorm": "tiny --lr 0.05 --model conv+batchnorm",
    "unused": "tiny --lr 0.05 --model conv+unused --find-unused-parameters",
    "nested": "nested --lr 0.05",
    "sentences": f"sentences --lr 3 {SENTENCE}",
    "pixels": "segmentation --lr 0.3 --batch-size 13",
    "boxes": "boxes --lr 0.1 --batch-size 13",
    "graphs": "graphs --lr 0.1 --batch-size 13",
    "packed": f"packed --lr 0.1 {SENTENCE}",
    "contrast": f"contrast --lr 0.5 {SENTENCE}",
    "gpt": "gpt --data-dir TEXT --context 16 --layers 2 --heads 2 --width 16 --samples 203 --lr 0.005",
    "noise": "odd --lr 0.05 --model conv+noise",
    # BatchNorm, dropout and augmentation: all that makes exact resumption hard
    "everything": "everything --schedule cosine --log-every 4 --average ema",
    "plain": "pit_models --schedule cosine --warmup-epochs 1",
    "brought": "brought --lr 0.05",
}


def rows(table: str) -> list[list[str]]:
    lines = [line for line in table.strip().splitlines() if not line.startswith("#")]
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def parse(run: str) -> tuple[str, int, list[str], tuple]:
    """Return mode, number of devices, options and events of a run."""
    mode, n, *words = run.split()
    options, events, left = [], [], iter(words)
    for word in left:
        events.append((word, next(left))) if word in EVENTS else options.append(word)
    return mode, int(n), options, tuple(events)


def argv_of(options: str) -> list[str]:
    name, *more = options.split()
    name, *setting = SETTINGS.get(name, name).split()
    folders = (ROOT / "tests" / "tasks", ROOT / "examples" / "recipes", ROOT / "tasks")
    (task,) = (path for folder in folders for path in folder.glob(f"{name}.py"))
    words = ["--task", str(task), *BASE.split(), *setting, *more]
    return [str(once("text", make_tokens)) if word == "TEXT" else word for word in words]


def make_tokens(folder):
    """Write sentences of a few words, a byte a token."""
    words = np.random.RandomState(0).choice(["the cat ", "a dog ", "sees ", "and "], 6000)
    tokens = np.frombuffer("".join(words).encode(), np.uint8).astype(np.uint16)
    tokens[:27_000].tofile(folder / "train.bin")
    tokens[27_000:30_000].tofile(folder / "val.bin")


def full(*values, id=None):
    return pytest.param(*values, marks=pytest.mark.full, id=id)


# ------------------------------------------------------------------------- every mode is one device

# like: `one` device with the same options; `plain`: without those behind the +, which change nothing;
# `pieces`: one device that computes each rank's slice by itself; `whole`: one device without --sync-bn;
# `scaled`: one device at the rate times N. Then the runs that are tried without -m full; the modes that
# have the feature, all by default; and what is allowed for gradients and for the rest.
COMPARED = """
SGD with momentum and weight decay     | digits                                               | one    | dp 3, ddp 4, spawn 2
SGD without either                     | digits + --momentum 0 --weight-decay 0               | one    |
AdamW                                  | digits + --optimizer adamw --lr 0.005 --weight-decay 0.05 | one | dp 3
clipping, accumulation 3               | digits + --clip-grad-norm 0.5 --accum-steps 3        | one    | fsdp 2
frozen layers, AdamW, accumulation 2   | digits + --freeze head.* --optimizer adamw --lr 0.005 --accum-steps 2 | one | ddp 2
constant after a warm-up               | digits + --warmup-epochs 2                           | one    |
cosine to a tenth                      | digits + --schedule cosine --final-lr 0.1            | one    | dp 2
step after a warm-up                   | digits + --schedule step --step-epochs 1 2 --step-gamma 0.3 | one | spawn 4
cyclic after a warm-up                 | digits + --schedule cyclic --step-epochs 2 --warmup-epochs 1 | one | dp 2
saw-tooth after a warm-up              | digits + --schedule sawtooth --step-epochs 2 --warmup-epochs 1 | one | dp 2
batch of 31, a prime                   | digits + --batch-size 31                             | one    | dp 3
batch of 5, fewer than 2 a device      | digits + --batch-size 5 --lr 0.02                    | one    | ddp 3
an order of the data set's own         | balanced                                             | one    | ddp 3
EMA of the weights                     | digits + --average ema                               | one    | dp 3
another seed                           | digits + --seed 7                                    | one    |
accumulation 2                         | digits + --accum-steps 2                             | plain  | spawn 2, dp 3
accumulation 3                         | digits + --accum-steps 3                             | plain  | ddp 3
one sample a micro-batch               | digits + --accum-steps 30                            | plain  | single 1 | -
channels last, two workers             | digits + --channels-last --workers 2                 | plain  | ddp 2   | dp ddp spawn
compiled                               | digits + --compile                                   | plain  |         | spawn
rates scaled by the devices            | digits --lr 0.02                                     | scaled | ddp 3
unused parameters, accumulation 3      | unused + --accum-steps 3                             | plain  | ddp 3   | dp ddp spawn
unused parameters, AdamW, clipping     | unused + --optimizer adamw --lr 0.005 --clip-grad-norm 1 | one |        | dp ddp spawn
nested inputs, targets and outputs     | nested                                               | one    |
nested, AdamW, accumulation 2, EMA     | nested + --optimizer adamw --lr 0.005 --accum-steps 2 --average ema | one | spawn 2
what a module keeps beside tensors     | state --model counts                                 | one    | ddp 1   | -
parameters that are read without a call | state --model parameters                            | one    |         | fsdp
groups of the user's own, kept gradients | brought --model lists                              | one    | ddp 2   | ddp spawn fsdp
sentences, a mean over words           | sentences                                            | one    | ddp 3
sentences, accumulation 3              | sentences + --accum-steps 3                          | plain  | spawn 2
a mean over valid pixels, accumulation 3 | pixels + --accum-steps 3                           | plain  | dp 3
lists of boxes, accumulation 3         | boxes + --accum-steps 3                              | plain  | ddp 3   | ddp spawn fsdp
graphs, accumulation 3                 | graphs + --accum-steps 3                             | plain  |         | ddp spawn fsdp
an LSTM on packed sequences            | packed                                               | one    | ddp 2   | ddp spawn fsdp
samples compared                       | contrast                                             | one    |         | ddp spawn fsdp
samples compared, accumulation 3       | contrast + --accum-steps 3                           | one    | ddp 3   | ddp spawn fsdp
a language model                       | gpt                                                  | one    | ddp 4
a language model, clipping, accumulation 3 | gpt + --clip-grad-norm 0.1 --accum-steps 3         | one    |
dropout                                | dropout                                              | pieces | dp 3
dropout, accumulation 2                | dropout --accum-steps 2                              | pieces | ddp 3
BatchNorm per replica                  | batchnorm                                            | pieces | dp 3, spawn 2
BatchNorm per replica, EMA             | batchnorm --average ema                              | pieces | ddp 3
synchronised BatchNorm, batch of 31    | batchnorm --batch-size 31                            | whole  |         | ddp spawn fsdp
synchronised BatchNorm, AdamW, EMA     | batchnorm --optimizer adamw --lr 0.005 --average ema | whole  |         | ddp spawn fsdp
synchronised BatchNorm, accumulation 2 | batchnorm --accum-steps 2                            | whole  | ddp 3   | ddp spawn fsdp
numbers drawn in an evaluation         | noise                                                | one    | ddp 3
computed in bf16 (AMP)                 | digits --momentum 0 --dtype float32 + --amp bf16     | one    | ddp 2   | | 2e-2 6e-2
clipped in fp16 (AMP)                  | digits --momentum 0 --dtype float32 --clip-grad-norm 2 + --amp fp16 | one | ddp 2 | dp ddp spawn | 2e-2 6e-2
"""
MODES = ["dp 3", "ddp 4", "spawn 2", "fsdp 3"]
OWN = {"whole": ["--sync-bn"], "scaled": ["--scale-lr", "linear"]}  # of the run that is compared


def compared():
    for name, options, like, quick, *more in rows(COMPARED):
        modes, allowed = [*more, "", ""][:2]
        bounds = [float(bound) for bound in (allowed or "1e-12 1e-10").split()]
        quick = list(filter(None, quick.split(", ")))
        for run in quick:
            yield pytest.param(options, like, run, bounds, id=f"{name}, {run}")
        for run in MODES:
            if run not in quick and (not modes or run.split()[0] in modes.split()):
                yield full(options, like, run, bounds, id=f"{name}, {run}")


@pytest.mark.parametrize(("options", "like", "run", "bounds"), [*compared()])
def test_mode_equals_one_device(options, like, run, bounds, tmp_path):
    (mode, n, own, _), one = parse(run), functools.partial(undisturbed, "single", 1)
    left, _, right = options.partition("+ ")
    every, plain = argv_of(f"{left} {right}"), argv_of(left)
    pieces = Pieces("dp" if mode == "dp" else "ddp", n)
    if like == "plain":
        reference, contrast = one(*plain), None
    elif like == "pieces":
        reference, contrast = one(*every, patch=pieces), one(*every)
    elif like == "whole":
        reference, contrast = one(*every), one(*every, patch=pieces)
    else:
        every = [*every, "--lr", str(0.02 * n)] if like == "scaled" else every
        reference, contrast = one(*every), one(*plain) if right or like == "scaled" else None
    if contrast:  # else equality would prove nothing
        weights = (run.checkpoint()["weights"] for run in (reference, contrast))
        assert deviation(*weights) > 1e-4, "what the row is about changes nothing"
    words = plain if like == "scaled" else every
    result = train(mode, n, *words, *own, *OWN.get(like, []), folder=tmp_path, timeout=240)
    found = compare(result, reference)
    if bounds[1] > 1e-6:  # of rounded weights one picture may well be classified otherwise
        del found["evaluation"]
        assert max(found.values()) > 1e-6, "nothing was rounded"
    for name, value in found.items():
        prove(f"{name}: {run} is not one device", value, bounds[name != "gradients"])


# What all modes share, as the order of samples, augmentation, schedule and average, no comparison of modes
# can see. So these are the losses of earlier versions: of each epoch, in training and then in evaluation.
SEEN = """
digits --schedule cosine --weight-decay 0.01 | 2.321456 2.058494 2.042229 1.808678 1.762851 1.651769
balanced --average ema --optimizer adamw --lr 0.005 | 2.290709 2.155475 2.054987 1.885086 1.854546 1.684283
everything --average none --accum-steps 2 --seed 3 | 2.684739 2.140522 2.28827 1.744917 1.991616 1.654039
digits --freeze head.* --clip-grad-norm 0.5 --schedule sawtooth --step-epochs 1 | 2.34009 2.24225 2.258415 2.167546 2.199746 2.101607
digits --schedule cyclic --step-epochs 2 --optimizer adamw --lr 0.005 --momentum 0.8 | 2.347703 2.2421 2.204578 1.978049 2.001743 1.85289
digits --schedule step --step-epochs 1 2 --step-gamma 0.3 --momentum 0.5 --seed 5 | 2.41958 2.193889 2.175287 2.113636 2.12595 2.094424
sentences | 4.293836 4.939483 3.808842 5.396994 3.299386 5.292119 2.981478 5.260755 2.789492 5.249768
"""


@pytest.mark.parametrize(("options", "losses"), rows(SEEN), ids=[row[0] for row in rows(SEEN)])
def test_run_is_that_of_earlier_versions(options, losses):
    argv = argv_of(f"{options} --log-every 1000")
    found = [line["loss"] for line in undisturbed("single", 1, *argv).lines]
    assert found == pytest.approx([float(loss) for loss in losses.split()], rel=1e-6)


# ---------------------------------------------------------- what goes on is what was not interrupted

MANY = "balanced --model conv+balanced+batchnorm --batch-size 28 --accum-steps 2"
MANY += " --eval-batch-size 9 --optimizer adamw --lr 0.02 --momentum 0.8 --weight-decay 0.1 --schedule step"
MANY += " --seed 3 --step-epochs 1 2 --step-gamma 0.5 --scale-lr sqrt --clip-grad-norm 0.5 --average ema"
MANY += " --ema-decay 0.9 --freeze *.bias !head.* --best top1:min --sync-bn --log-every 3"
MANY += " --save-every 5 --keep-every 2 --timeout 50"  # many of another value than the default
ADAM = "plain --optimizer adamw --lr 0.003 --average ema"
HALF = "plain --dtype float32 --amp fp16 --epochs 2"
SAVES = "everything --save-every 4 --keep-every 2"

# Runs in one directory. Each but the first resumes the one before, and names no option but its own. In
# one mode the last one leaves every bit of an undisturbed run; in several, one device's numbers to 1e-10.
# f: with -m full.
RESUMED = f"""
  | everything                     | single 1 stop 9; single 1
  | everything                     | ddp 3 stop 9; ddp 3
f | everything                     | dp 2 stop 6; dp 2
f | everything                     | spawn 3 stop 9; spawn 3
  | everything                     | fsdp 2 int 9; fsdp 2
  | everything                     | ddp 2 usr1 2 ; ddp 2 hup 5; ddp 2
  | {MANY}                         | single 1 stop 10; single 1
f | {MANY}                         | ddp 2 stop 10; ddp 2
  | {HALF}                         | single 1 nan 2 stop 5; single 1
  | plain --log-every 4            | ddp 2 stop 8; single 1
f | plain                          | ddp 4 stop 8; fsdp 3
f | plain                          | fsdp 3 stop 8; spawn 2
f | sentences --log-every 4        | ddp 2 stop 7; fsdp 3
f | gpt                            | single 1 stop 6; fsdp 2
  | state --model counts           | single 1 stop 9; single 1
f | state --model replaced         | ddp 1 stop 9; ddp 1
  | brought --model lists          | ddp 2 stop 9; ddp 2
f | brought --model groups         | single 1 stop 9; fsdp 2
  | brought --model schedule-free  | single 1 stop 9; single 1
  | brought --model probe --clip-grad-norm 0.1 | single 1 stop 9; ddp 2
  | brought --model clock          | single 1 stop 9; ddp 2 stop 3; single 1
f | everything                     | fsdp 3 --shards stop 9; fsdp 3
f | {ADAM}                         | fsdp 3 --shards stop 5; fsdp 2 stop 3; fsdp 4
  | {SAVES}                        | single 1 kill 3 saved 0.0; single 1
  | {SAVES}                        | single 1 kill 12 saved 0.6; single 1
f | {SAVES}                        | ddp 2 kill 16 saved 1.2; ddp 2
f | {SAVES}                        | fsdp 2 --shards kill 6 saved 0.0; fsdp 2 --shards
f | {SAVES}                        | fsdp 2 --shards kill 3.1 saved 0.4; fsdp 2
f | {SAVES}                        | fsdp 2 --shards kill 12 saved 0.4; fsdp 2
  | {SAVES}                        | fsdp 2 --shards kill 14 saved 0.4; fsdp 2
f | {SAVES}                        | fsdp 2 --shards kill 21 saved 0.6; fsdp 2
f | {SAVES}                        | fsdp 2 --shards kill 28 saved 1.0; fsdp 2
  | {SAVES}                        | ddp 2 full 2 saved 0.4; ddp 2
  | {SAVES}                        | ddp 2 nan 8 stop 10; ddp 2
  | {SAVES}                        | ddp 2 raise 9; ddp 2
  | noise                          | ddp 2 evalstop 0; ddp 2
f | noise                          | ddp 2 evalkill 0 saved 0.6; ddp 2
"""


def resumed():
    for mark, options, chain in rows(RESUMED):
        options = " ".join(options.split())
        yield (full if mark else pytest.param)(options, chain, id=f"{options[:24]}: {chain}")


def position(folder):
    """Return the epoch, and the step within it, of the last checkpoint; 0, 0 without one."""
    names = ("last.pt", ".last.pt.before")  # a kill may come between two renames of a folder
    found = [folder / name for name in names if (folder / name).exists()]
    saved = load_whole(found[0]) if found else {"epoch": 0, "step": 0}
    return saved["epoch"], saved["step"]


@pytest.mark.parametrize(("options", "chain"), [*resumed()])
def test_resumed_run_leaves_what_an_undisturbed_one_leaves(options, chain, tmp_path):
    check_resumed(options, chain, tmp_path)


def check_resumed(options, chain, tmp_path, may_end_before=False):
    """Run a chain; `may_end_before`: an event may come too late."""
    argv, runs, before = argv_of(options), [parse(run) for run in chain.split(";")], (0, 0)
    for i, (mode, n, own, events) in enumerate(runs):
        again = ["--resume", "auto"] * (i > 0)
        words = [*again, *own] if any(before) else [*again, *argv, *own]  # else it is a new run
        result = train(mode, n, *words, folder=tmp_path, patch=Events(events))
        codes = next((ENDING[name] for name, _ in events if name in ENDING), {0})
        assert result.code in codes | ({0} if may_end_before else set()), result.err
        saved = position(tmp_path / "run")  # else a run that begins anew would hide a loss
        told = dict(events).get("saved")
        assert saved >= before and told in (None, "{}.{}".format(*saved)), saved
        assert " before)" not in result.out or own, "nothing is called a change"
        before = saved

    alike = len({run[:2] for run in runs}) == 1
    mode, n = runs[-1][:2] if alike else ("single", 1)
    steady = tuple(event for _, _, _, events in runs for event in events if event[0] not in ENDING)
    reference, allowed = undisturbed(mode, n, *argv, patch=Events(steady)), 0 if alike else 1e-10
    ours, theirs = (log_lines(run.folder) for run in (result, reference))
    found = differences(ours, theirs, "metrics.jsonl", allowed)
    for path in reference.folder.glob("*.pt"):
        whole, wanted = result.checkpoint(path.name), load_whole(path)
        for part in wanted.keys() - {"config"} - ({"meter"} if not alike else set()):
            found += differences(whole.get(part, {}), wanted[part], f"{path.name}: {part}", allowed)
        named = [part["config"].keys() - {"shards"} for part in (whole, wanted)]
        assert named[0] == named[1]
        for name in named[0]:
            found += differences(whole["config"][name], wanted["config"][name], name)
    assert not found, "; ".join(found[:3])
    left, wanted = ({path.name for path in run.folder.iterdir()} for run in (result, reference))
    assert left == wanted, "nothing else is left"


def test_folder_of_shards_becomes_a_file_that_every_mode_resumes(tmp_path):
    argv, file = argv_of(ADAM), tmp_path / "whole.pt"
    stopped = train("fsdp", 2, *argv, "--shards", folder=tmp_path, patch=Events((("stop", "8"),)))
    dcp_to_torch_save(stopped.folder / "last.pt", file)
    folder = tmp_path / "new"
    result = train("single", 1, "--resume", file, folder=folder)
    assert result.code == 0, result.err
    reference = undisturbed("single", 1, *argv)
    assert position(stopped.folder) == (1, 2)
    for part in ("weights", "optimizer"):
        pair = (run.checkpoint()[part] for run in (result, reference))
        assert not differences(*pair, part, 1e-10)


# ----------------------------------------------------------------------- what cannot end well says so

ENDS = """
  | plain                          | ddp 2 nan 0-9                  | 1 | diverged: gradients are NaN or inf
  | plain                          | single 1 nan 8-17              | 1 | diverged: gradients are NaN or inf
  | plain                          | single 1 raise 0               | 1 | RuntimeError: broken on purpose
  | plain                          | ddp 2 raise 0                  | 1 | RuntimeError: broken on purpose
f | plain --timeout 10             | ddp 2 hang 3                   | 1 | Timed out
f | plain --model unused           | ddp 2                          | 1 | find_unused_parameters=True
  | odd --model ruined --lr 0.05   | ddp 2                          | 1 | step 6 is not saved: not finite: ruined$
  | everything --save-every 4      | single 1 full 2                | 1 | No space left on device$
  | brought --model hook           | ddp 2                          | 2 | head.weight has a hook, .* use optimizer.register_step_pre_hook
f | brought --model late-hook      | fsdp 2                         | 2 | head.weight has a hook, .* use optimizer.register_step_pre_hook
f | state --model held             | fsdp 2                         | 1 | RuntimeError
  | plain --best nothing           | ddp 2                          | 2 | --best nothing: no such metric; use one of top1, top5, loss
  | plain --batch-size 300         | ddp 2                          | 2 | --batch-size 300 does not fit: use 2 .ranks x micro-batches. to .* .samples.$
  | brought --model not-to-be-sent --workers 1 | single 1           | 1 | DataLoader worker .* exited unexpectedly
"""


def ends():
    for mark, options, run, code, words in rows(ENDS):
        name = f"{options}: {run}"
        yield (full if mark else pytest.param)(options, run, int(code), words, id=name)


@pytest.mark.parametrize(("options", "run", "code", "words"), [*ends()])
def test_run_that_cannot_end_well_says_so(options, run, code, words, tmp_path):
    mode, n, own, events = parse(run)
    result = train(mode, n, *argv_of(options), *own, folder=tmp_path, patch=Events(events))
    assert result.code == code, result.err
    assert re.search(words, result.err, re.MULTILINE), result.err
    if (code == 2 and "best" not in options) or "finite" in words:
        assert not list(result.folder.glob("*.pt")), "no file of a ruined run"
