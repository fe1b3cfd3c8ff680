"""Which of several signals wins: the one that comes later in machinery.processes.SIGNALS."""

import functools
import itertools
import json
import os
import signal

import pytest
import torch.distributed as dist
from harness import in_group, train
from pitfalls import BASE, after_step, in_process, printed
from runs import make_run, make_step, start_epoch

import machinery.processes
import machinery.run

USR1, INT, TERM = signal.SIGUSR1, signal.SIGINT, signal.SIGTERM
CODES = {USR1: 0, INT: 130, TERM: 143}  # the weakest first: SLURM's warning, the user, the system


def strongest(numbers):
    return max(numbers, key=list(CODES).index)


def test_order_and_codes_of_the_signals():
    assert list(machinery.processes.SIGNALS.items()) == list(CODES.items())


def print_winners():
    for count in (1, 2, 3):
        for numbers in itertools.permutations(CODES, count):
            stop = machinery.run.StopSignal()
            assert stop.agreed() is None, "none yet"
            for number in numbers:
                os.kill(os.getpid(), number)
            print("won", json.dumps([list(numbers), stop.agreed(), stop.agreed()]))


def test_stronger_signal_wins_whichever_comes_first():
    won = printed(in_process(print_winners), "won")
    assert len(won) == 3 + 6 + 6
    for numbers, first, again in won:
        assert first == again == strongest(map(signal.Signals, numbers)), numbers


def agree_on(numbers, wait=False):
    """A signal, or none, for each rank; then all of them ask until they agree."""
    stop = machinery.run.StopSignal()
    assert stop.agreed() is None and stop.agreed() is None
    if number := numbers[dist.get_rank()]:
        os.kill(os.getpid(), number)
    answers = [stop.agreed(wait=wait) for _ in range(3)]
    dist.barrier()  # nobody is told of the next case while others still ask about this one
    return answers


def check_ranks():
    for numbers in [
        *itertools.permutations(CODES),
        (TERM, None, None),
        (None, None, USR1),
        (INT, USR1, None),
    ]:
        first, *others = agree_on(numbers)
        waited = agree_on(numbers, wait=True)
        assert waited == [strongest(filter(None, numbers))] * 3, (numbers, waited)
        assert first is None, "of the step before, in which nobody had been told"
        assert others == [strongest(filter(None, numbers))] * 2, (numbers, others)


def test_stronger_signal_wins_on_whichever_rank():
    in_group(3, check_ranks)


def signals_after_step_3(numbers, rank):
    """Each rank gets its own, in this order, within one step."""
    after_step(3, lambda: [os.kill(os.getpid(), number) for number in numbers[rank]])


@pytest.mark.parametrize(
    ("mode", "numbers", "winner"),
    [
        ("single", [(INT, TERM)], TERM),
        ("single", [(TERM, USR1)], TERM),
        ("dp", [(INT, USR1)], INT),
        ("ddp", [(USR1,), (INT,)], INT),
        ("spawn", [(TERM,), (USR1, INT)], TERM),
    ],
)
def test_run_ends_with_the_code_of_the_stronger_signal(mode, numbers, winner, tmp_path):
    patch = functools.partial(signals_after_step_3, numbers)
    result = train(mode, len(numbers) + (mode == "dp"), *BASE, folder=tmp_path, patch=patch)
    step = result.checkpoint()["global_step"]
    assert step == (3 if mode in ("single", "dp") else 4), "or one later, if ranks have to agree"
    assert result.code == CODES[winner]
    message = f"stopped by {winner.name} after saving step {step} (exit code {CODES[winner]})"
    said = [line for line in result.err.splitlines() if "stopped by" in line]
    assert said and all(line.endswith(message) for line in said), result.err


@pytest.mark.parametrize("number", CODES)
def test_stop_says_what_it_saved_and_ends_with_its_code(number, handlers, tmp_path):
    run = make_run(tmp_path, "--log-every", "50")
    start_epoch(run)
    make_step(run, [1.0])
    os.kill(os.getpid(), number)
    with pytest.raises(machinery.processes.Stopped) as stopped:
        make_step(run, [1.0])
    assert stopped.value.code == CODES[number]
    assert stopped.value.reason == f"stopped by {number.name} after saving step 2"
    assert (run.files.directory / "last.pt").exists()


@pytest.mark.parametrize("number", CODES)
def test_stop_that_could_not_be_saved_says_so(number, handlers, tmp_path, capsys):
    run = make_run(tmp_path, "--log-every", "50")
    start_epoch(run)
    run.state.net.weight.data[0] = float("nan")
    os.kill(os.getpid(), number)
    with pytest.raises(machinery.processes.Stopped) as stopped:
        make_step(run, [1.0])
    assert stopped.value.code == (CODES[number] or 1), "nothing that was lost is called done"
    assert stopped.value.reason == f"stopped by {number.name} at step 1, which was not saved"
    assert not (run.files.directory / "last.pt").exists()
    assert "non-finite values in weight" in capsys.readouterr().err
