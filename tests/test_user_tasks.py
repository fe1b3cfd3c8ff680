"""Tasks and programs of users: what is unusual but right gives the right result, what cannot be right is refused by name."""

import functools
import gc
import importlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
from argparse import Namespace

import numpy as np
import pytest
import torch
from harness import ROOT, TASKS, check, compare, deviation, make_args, run_processes, train
from patches import checked
from short_runs import ODD

import common
import machinery.cli
import machinery.process
import machinery.run
import machinery.signals
import machinery.usertask
import train_ddp


def test_metric_of_some_batches_alone_is_refused_before_the_run():
    """Half of a batch of two has one sample, for which this task returns a metric less."""
    message = "the metrics must have the same names for every batch; only some batches have extra"
    with pytest.raises(common.UsageError, match=message):
        check("single", 1, *ODD, "--model", "last_lacks", "--eval-batch-size", "2")


DEEP = """
from small import build_datasets, build_model, per_sample_metrics
def innermost(targets):
    return targets.no_such_thing
def between(targets):
    return innermost(targets)
def per_sample_loss(outputs, targets):
    return between(targets)
"""


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("ddp", 2)])
def test_error_of_a_task_before_the_run_shows_where_it_is_and_ends_with_one_line(
    mode, n, tmp_path, monkeypatch
):
    """Once, though each rank has it."""
    monkeypatch.syspath_prepend(str(TASKS))
    file = tmp_path / "deep.py"
    file.write_text(DEEP)
    result = train(mode, n, "--task", file, "--device", "cpu", folder=tmp_path, patch=checked)
    assert result.code == 2, result.err
    for name in ("per_sample_loss", "between", "innermost"):
        assert len(re.findall(rf'File "{file}", line \d+, in {name}\n', result.err)) == 1, (
            result.err
        )
    places = r"for samples \d+, \d+, \d+, \.\.\. of the training set"
    wanted = rf"error: --task {file}: per_sample_loss or loss_weights, {places}: AttributeError: .+"
    assert re.fullmatch(rf"\S+: {wanted}", result.err.splitlines()[-1]), result.err
    assert len(re.findall(wanted, result.err)) == 1
    assert not result.folder.exists()


def test_neighbours_of_a_task_replace_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(TASKS)])
    (tmp_path / "task.py").write_text("from small import *\n")
    (tmp_path / "small.py").write_text((TASKS / "small.py").read_text())
    monkeypatch.delitem(sys.modules, "small", raising=False)
    machinery.usertask.Task(make_args("single", "--task", str(tmp_path / "task.py")))
    assert sys.modules["small"].__file__ == str(tmp_path / "small.py")
    assert sys.path.index(str(tmp_path)) == len(sys.path) - 1
    monkeypatch.delitem(sys.modules, "small")


# ------------------------------------------------------------------------ called by another program


def surroundings():
    numbers = [*machinery.signals.SIGNALS, signal.SIGCHLD]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handlers = [signal.getsignal(number) for number in numbers]
    return handlers, mask, dict(os.environ), sys.stdout, sys.stderr


def call_main_again_and_again(folder):
    os.environ["RANK"] = "7"
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # spawn would wait for its ranks for ever
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    argv = [*ODD, "--model", "conv", "--epochs", "1", "--deterministic"]
    seen, end_epoch = [], machinery.run.Run.end_epoch
    machinery.run.Run.end_epoch = lambda *of: (seen.append(surroundings()), end_epoch(*of))
    before, ends = surroundings(), []

    def call(mode, *more):
        main = importlib.import_module(f"train_{mode}").main
        try:
            ends.append(main([*argv, *more, "--output-dir", f"{folder}/{len(ends)}"]))
        except common.UsageError:
            ends.append(2)
        assert surroundings() == before, (mode, more)

    def call_all():
        call("single")
        call("single", "--batch-size", "0")

    call_all()
    call("spawn", "--nproc", "2")
    thread = threading.Thread(target=call_all)
    thread.start()
    thread.join()
    assert ends == [0, 2, 0, 0, 2], ends
    handlers, _, environment, *_ = seen[0]
    assert handlers != before[0] and environment != before[2], "or this would prove nothing"
    files = []
    for _ in range(3):
        call("single", "--workers", "1")
        gc.collect()
        files.append(len(os.listdir("/proc/self/fd")))
    assert files[1] == files[2], "the pipes of the workers are closed"


@pytest.mark.full
def test_main_can_be_called_from_a_notebook_or_a_thread_and_leaves_no_trace(tmp_path):
    """And puts back how signals are answered, and the environment."""
    target = functools.partial(call_main_again_and_again, tmp_path)
    ((code, _, err),) = run_processes([target], tmp_path)
    assert code == 0, err


def test_spawn_from_a_script_without_a_main_guard_says_so_in_one_line(tmp_path):
    """Each process that is spawned imports the script, and would start processes of its own."""
    script = tmp_path / "mine.py"
    script.write_text("import train_spawn\ntrain_spawn.main(['--nproc', '2', '--epochs', '1'])\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, script, "--output-dir", tmp_path / "run"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    lines = done.stderr.splitlines()
    assert {*lines} == {"mine.py: error: put what calls main under: if __name__ == '__main__':"}
    assert not (tmp_path / "runs").exists()


def call_main_after_a_stop(folder):
    """A notebook keeps the last exception, and with it all that its frames hold."""
    import train_single

    argv = [*ODD, "--model", "conv", "--output-dir", f"{folder}/run"]
    from patches import after_step

    after_step(3, lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        train_single.main(argv)
    except machinery.process.Stopped as stop:
        kept = stop
    assert kept.code == 130
    assert train_single.main([*argv, "--resume", "auto"]) == 0


def test_main_can_go_on_where_a_stop_ended_it(tmp_path):
    ((code, _, err),) = run_processes(
        [functools.partial(call_main_after_a_stop, tmp_path)], tmp_path
    )
    assert code == 0, err


# ----------------------------------------------------------------------------- an optimizer of its own

GROUPS = """
import torch
from small import build_datasets, build_model, per_sample_loss, per_sample_metrics
def build_optimizer(args, net):
    biases = [p for p in net.parameters() if p.dim() == 1]
    weights = [p for p in net.parameters() if p.dim() > 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": args.lr / 10}]
    return torch.optim.Adam(groups, lr=args.lr)
"""


@pytest.fixture
def groups(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TASKS))
    (tmp_path / "groups.py").write_text(GROUPS)
    argv = ("--task", tmp_path / "groups.py", "--dtype", "float64", "--batch-size", "30")
    return (*argv, *"--epochs 3 --lr 0.003 --log-every 1 --final-lr 0.2 --scale-lr none".split())


def test_optimizer_of_a_task_is_the_same_in_every_mode(groups, tmp_path):
    single = train("single", 1, *groups, folder=tmp_path / "single")
    state = single.checkpoint()
    rates = [group["lr"] for group in state["optimizer"]["param_groups"]]
    assert state["optimizer"]["param_groups"][0]["weight_decay"] == 0.1
    assert rates[1] == pytest.approx(rates[0] / 10, rel=1e-12) and rates[0] > 0
    peaks = [group["initial_lr"] for group in state["optimizer"]["param_groups"]]
    assert peaks == pytest.approx([0.003, 0.0003])
    result = train("ddp", 3, *groups, folder=tmp_path / "ddp")
    assert result.code == 0, result.err
    assert deviation(result.checkpoint()["model"], state["model"]) < 1e-10


DRAWN = """
import random
import numpy as np
import torch
from torch.utils.data import TensorDataset

def build_datasets(args):
    x = torch.randn(60, 3, dtype=torch.float64) + random.random() + np.random.rand()
    data = TensorDataset(x, x.norm(dim=1, keepdim=True))
    return torch.utils.data.random_split(data, [43, 17])

def build_model(args):
    return torch.nn.Linear(3, 1)

def per_sample_loss(outputs, targets):
    return (outputs - targets).square().squeeze(1)

def per_sample_metrics(outputs, targets):
    return {"minus_error": -per_sample_loss(outputs, targets)}
"""


def seed_by_rank(rank):
    torch.manual_seed(rank + 100)
    random.seed(rank + 100)
    np.random.seed(rank + 100)


def test_data_that_a_task_draws_are_the_same_on_every_rank(tmp_path):
    """A task that forgets a seed would train each rank on other data, and nobody would see it."""
    (tmp_path / "drawn.py").write_text(DRAWN)
    argv = ("--task", tmp_path / "drawn.py", "--dtype", "float64", "--batch-size", "8")
    argv += ("--epochs", "3", "--lr", "0.02", "--log-every", "1")
    single = train("single", 1, *argv, folder=tmp_path / "single", patch=seed_by_rank)
    ranks = train("ddp", 3, *argv, folder=tmp_path / "ddp", patch=seed_by_rank)
    assert max(compare(ranks, single).values()) < 1e-10
    drawn = []
    for seed in ("0", "1"):
        args = make_args("single", "--task", str(tmp_path / "drawn.py"), "--seed", seed)
        drawn.append(machinery.usertask.Task(args).build_datasets()[0][0][0])
    assert not drawn[0].equal(drawn[1]), "--seed decides"


OWN_GENERATOR = """
    data = TensorDataset(x, x.norm(dim=1, keepdim=True))
    own = np.random.default_rng(0)
    class Noisy(TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + own.random(), y
    return Noisy(*data.tensors), data
"""


PLACES = """
import torch
from task import per_sample_loss, per_sample_metrics
top = torch.rand(5)
def build_datasets(args):
    return [[torch.rand(5)]], [[torch.rand(5)]]
build_model = print
"""


def test_top_of_the_file_data_and_model_draw_different_numbers(tmp_path):
    """A teacher that the top of a task makes would be the student that build_model makes."""
    (tmp_path / "places.py").write_text(PLACES)
    task = machinery.usertask.Task(make_args("single", "--task", str(tmp_path / "places.py")))
    top = sys.modules["task_places"].top
    train_set, val_set = task.build_datasets()
    torch.manual_seed(0)  # as for build_model
    plain = torch.rand(5)
    for drawn in (top, train_set[0][0], val_set[0][0]):
        assert not torch.isclose(drawn, plain).any() and drawn.std() > 0
    assert not torch.isclose(top, train_set[0][0]).any()


@pytest.mark.parametrize(
    ("made", "warned"), [("[open(NAME)] + [range(3)]", True), ("[numpy.memmap(NAME)] * 2", False)]
)
def test_open_file_comes_with_a_warning(made, warned, tmp_path, capsys):
    """Its position is shared by forked workers. A file that is mapped into memory has none."""
    np.arange(40).tofile(tmp_path / "records")
    (tmp_path / "task.py").write_text(
        f"import numpy\n"
        f"NAME = {str(tmp_path / 'records')!r}\n"
        f"class Records(list):\n"
        f"    pass\n"
        f"def build_datasets(args):\n"
        f"    train_set = Records(range(3))\n"
        f"    train_set.files = {made}\n"
        f"    return train_set, train_set\n"
        f"build_model = per_sample_loss = per_sample_metrics = print\n"
    )
    args = make_args("single", "--task", str(tmp_path / "task.py"))
    kept = machinery.usertask.Task(args).build_datasets()
    found = capsys.readouterr().err
    assert len(kept) == 2 and found.count("\n") == int(warned)
    assert (f"left open {tmp_path / 'records'}: loader workers would share" in found) == warned


NEAR_ZERO = """
import torch
def build_datasets(args):
    data = [(torch.ones(1).half(), torch.tensor([target])) for target in (1.000001, 2.0)]
    return data * 20, data * 20
class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 0 + 1 + 1e-7 * len(x)  # a rounding that depends on n
def build_model(args): return Net(1, 1)
def per_sample_loss(outputs, targets): return (outputs - targets).square().sum(1)
def per_sample_metrics(outputs, targets): return {"minus_loss": -per_sample_loss(outputs, targets)}
"""


@pytest.mark.parametrize("case", ["rounding", "half precision", "noise"])
def test_check_takes_rounding_and_half_precision(case, tmp_path):
    """A loss near zero is a difference of two numbers; autocast takes inputs of any precision.

    A metric like top1 jumps where outputs are rounded to half precision, or drawn.
    """
    text, options = NEAR_ZERO.replace(".half()", ""), []
    if case in ("half precision", "noise"):
        text = text.replace("{", '{"hits": outputs[:, 0] * 0 + len(outputs), ')
    if case == "half precision":
        text, options = text.replace("torch.ones(1)", "torch.ones(1).half()"), ["--amp", "bf16"]
    if case == "noise":
        text = text.replace("1e-7 * len(x)", "torch.rand(len(x), 1)")
    (tmp_path / "near.py").write_text(text)
    check("single", 1, "--task", str(tmp_path / "near.py"), "--batch-size", "8", *options)


def test_check_takes_images_that_come_one_by_one(tmp_path):
    """Of many sizes, so that only an evaluation batch of one can be made."""
    text = NEAR_ZERO.replace(
        "data * 20, data * 20", "data * 20, [(torch.ones(3, 1), torch.ones(1)), data[0]]"
    )
    text = text.replace(".half()", "").replace(".sum(1)", ".flatten(1).sum(1)")
    (tmp_path / "sizes.py").write_text(text)
    check("single", 1, "--task", str(tmp_path / "sizes.py"), "--batch-size", "8")


def test_check_forgets_what_another_run_in_this_process_has_gathered(monkeypatch):
    monkeypatch.setattr(common.gather_samples, "used", False)
    common.gather_samples(torch.ones(2))
    check("dp", 2, *ODD, "--model", "conv")


def test_data_set_with_a_generator_of_its_own_is_refused(tmp_path):
    """What it draws would depend on the workers, on the world size and on a resume."""
    start = DRAWN.index("    data = ")
    end = DRAWN.index("def build_model")
    (tmp_path / "noisy.py").write_text(DRAWN[:start] + OWN_GENERATOR + DRAWN[end:])
    argv = ("--task", str(tmp_path / "noisy.py"), "--batch-size", "8", "--dtype", "float64")
    with pytest.raises(common.UsageError, match="they differ when they are fetched again; draw"):
        check("single", 1, *argv)
    (tmp_path / "noisy.py").write_text(DRAWN)
    check("single", 1, *argv)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("None", "must return one optimizer with groups, got NoneType"),
        ("torch.optim.LBFGS(net.parameters())", "missing a required argument: 'closure'"),
        ("torch.optim.SGD(build_model(args).parameters())", "and no other; see also --freeze"),
        ("torch.optim.SGD(list(net.parameters())[1:])", "every parameter of the model that trains"),
    ],
)
def test_optimizer_that_cannot_be_right_is_refused(optimizer, message, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TASKS))
    text = re.sub(r"    return torch.optim.Adam.*\n", f"    return {optimizer}\n", GROUPS)
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(common.UsageError, match=message):
        check("single", 1, "--task", str(tmp_path / "own.py"))


SGD = "torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=numpy.float64(0.1))"
OWN_STATE = """
class Own(torch.optim.SGD):
    def step(self, *_):
        self.state[self.param_groups[0]["params"][0]]["seen"] = numpy.float64(1)
"""


@pytest.mark.parametrize(
    ("mode", "n", "optimizer"),
    [("single", 1, SGD), ("ddp", 2, "Own(net.parameters(), lr=0.1)")],
    ids=["option", "state"],
)
def test_what_no_run_could_load_comes_into_no_checkpoint(mode, n, optimizer, groups, tmp_path):
    """An option is seen before the run, what an optimizer adds in a step at the first save."""
    text = re.sub(r"    return torch.optim.Adam.*\n", f"    return {optimizer}\n", GROUPS)
    (tmp_path / "groups.py").write_text("import numpy\n" + text + OWN_STATE)
    result = train(mode, n, *groups, "--save-every", "2", folder=tmp_path)
    assert "numpy" in result.err
    assert not [*(tmp_path / "run").glob("*.pt*")], "no file that cannot be loaded"
    if optimizer == SGD:
        assert result.code == 2 and not result.lines
        problem = "a checkpoint of this model or optimizer could not be loaded: "
        assert problem in result.err
    else:
        assert result.code == 1 and len(result.lines) == 2, result.err


# ------------------------------------------------------------------- metrics of the whole data set

DRAWS = """
import torch
from small import build_datasets, build_model, per_sample_loss
def per_sample_metrics(outputs, targets):
    torch.rand(len(targets))
    return {"hits": (outputs.argmax(1) == targets).double(), "hit": [*range(len(targets))]}
def dataset_metrics(outputs, *, seed):
    return {"draw": torch.rand(()), "seed": seed}
"""


def test_metric_of_the_whole_set_may_draw_numbers_and_ask_for_options(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TASKS))
    (tmp_path / "draws.py").write_text(DRAWS)
    argv = ("--task", tmp_path / "draws.py", "--batch-size", "30", "--epochs", "1")
    argv = (*argv, "--eval-batch-size", "5", "--seed", "7")
    drawn = []
    for mode, n in (("single", 1), ("ddp", 3)):
        result = train(mode, n, *argv, folder=tmp_path / mode)
        assert result.code == 0, result.err
        assert result.eval_lines()[0]["seed"] == 7
        drawn.append(result.eval_lines()[0]["draw"])
    assert len({*drawn}) == 1 and 0 < drawn[0] < 1


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("{'lr': 1}", "dataset_metrics: the log itself uses the name lr"),
        ("{'hits': 1}", "dataset_metrics and per_sample_metrics both return hits"),
    ],
)
def test_metrics_of_the_whole_set_that_cannot_be_right(found, message, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TASKS))
    text = DRAWS.replace('{"draw": torch.rand(()), "seed": seed}', found)
    (tmp_path / "draws.py").write_text(text)
    task = machinery.usertask.Task(make_args("single", "--task", str(tmp_path / "draws.py")))
    meter = common.Meter(torch.device("cpu"))
    meter.add(loss=torch.ones(2), hits=torch.ones(2), hit=[0, 1])
    with pytest.raises((common.UsageError, ValueError), match=message):
        meter.mean(task.dataset_metrics)


# ------------------------------------------------------------------------------ options of a task

OWN = """
print("is read")
from small import build_datasets, per_sample_loss, per_sample_metrics
import small
def add_options(parser):
    parser.add_argument("--anchor-sizes", type=float, nargs="+", default=[1.0], help="of boxes")
    parser.add_argument("--frozen-stages", type=int, default=0)
def build_model(args):
    net = small.build_model(args)
    net.conv1.bias.data.fill_(args.anchor_sizes[-1])
    return net
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TASKS))
    (tmp_path / "own.py").write_text(OWN)
    argv = ("--task", str(tmp_path / "own.py"), "--batch-size", "30", "--epochs", "1")
    return (*argv, "--freeze", "conv1.bias")


def test_options_of_a_task_are_parsed_and_stored(own, tmp_path):
    """The file is run once in a process: it may register something, which torch allows once."""
    argv = (*own, "--anchor-sizes", "2", "3.5")
    for mode, n in (("single", 1), ("ddp", 2)):
        result = train(mode, n, *argv, folder=tmp_path / mode)
        assert result.code == 0, result.err
        assert result.out.count("is read") == n
        checkpoint = result.checkpoint()
        assert checkpoint["config"]["anchor_sizes"] == [2.0, 3.5]
        assert checkpoint["config"]["frozen_stages"] == 0
        assert (checkpoint["model"]["conv1.bias"] == 3.5).all()


def test_options_of_a_task_are_in_its_help(own, capsys):
    for argv, there in ((own, True), ((), False)):
        with pytest.raises(machinery.process.Stopped):
            make_args("ddp", *argv, "--help")
        shown = capsys.readouterr().out
        pattern = r"^task own:\n +--anchor-sizes [^-]* of boxes"
        assert bool(re.search(pattern, shown, re.MULTILINE)) == there and "--batch-size" in shown


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('"--lr", type=float', "conflicting option"),
        ('"--size", default=[Path("a")]', "--size must be a number, a text or a list of them"),
    ],
)
def test_options_of_a_task_that_cannot_be_right_are_refused(line, message, own, tmp_path):
    text = OWN.replace('"--frozen-stages", type=int, default=0', line)
    (tmp_path / "own.py").write_text("from pathlib import Path" + text)
    with pytest.raises(common.UsageError, match=message):
        make_args("single", *own)


@pytest.mark.full
def test_run_goes_on_with_an_option_that_is_new_and_with_what_a_task_puts_into_args(own, tmp_path):
    assert train("single", 1, *own, folder=tmp_path).code == 0
    text = OWN.replace(
        "add_options(parser):", "add_options(parser):\n    parser.add_argument('--new')"
    )
    text = text.replace("(args):", "(args):\n    args.more = str(args)", 1)
    (tmp_path / "own.py").write_text(text)
    for epochs in ("2", "3"):  # the second run finds what the first one has put in
        again = train("single", 1, *own, "--epochs", epochs, "--resume", "auto", folder=tmp_path)
        assert again.code == 0, again.err
    assert "more" not in again.checkpoint()["config"]


def other_anchor(rank):
    original = machinery.cli.parse_args
    train_ddp.parse_args = lambda *arguments: Namespace(
        **{**vars(original(*arguments)), "anchor_sizes": [1.0 + rank]}
    )


def test_options_of_a_task_must_be_the_same_on_all_nodes(own, tmp_path):
    result = train("ddp", 2, *own, folder=tmp_path, patch=other_anchor)
    assert result.code == 2
    assert "--anchor-sizes is [1.0] on rank 0, but [2.0] on rank 1" in result.err


def test_wrong_option_in_a_notebook_is_one_error_and_help_none(capsys):
    import train_single

    with pytest.raises(common.UsageError, match="did you mean --epochs") as found:
        train_single.main(["--epoch", "3"])
    assert len(found.traceback) <= 2, "of this line and of what it called"
    assert train_single.main(["--help"]) == 0 and "--batch-size" in capsys.readouterr().out
