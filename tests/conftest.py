import atexit
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
sys.path[:0] = [str(TESTS / name) for name in ("", "tasks", "campaigns")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests run side by side
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the runs would ignore it too
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
    os.environ.pop(name, None)
if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers share it
    os.environ.setdefault(
        "PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir()
    )  # where pytest keeps the files of failed tests
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(
        prefix="train-tests-"
    )  # a process that is killed leaves files
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)


@pytest.fixture
def clock(monkeypatch):
    """The clock of machinery/run.py, which stands still until the test moves it."""
    import runs

    import machinery.run

    clock = runs.Clock()
    monkeypatch.setattr(machinery.run, "time", clock)
    return clock


@pytest.fixture
def handlers():
    """Put back the answers to signals that a Run in this process takes over."""
    import machinery.process

    before = {number: signal.getsignal(number) for number in machinery.process.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run on one device that has ended."""
    from harness import train
    from short_runs import SMALL

    return train(
        "single", 1, *SMALL, "--keep-every", "3", folder=tmp_path_factory.mktemp("finished")
    )


@pytest.fixture
def run(tmp_path):
    """A run that has ended an epoch, and made the steps of a second one."""
    from runs import end_epoch, make_run, make_step, start_epoch

    run = make_run(tmp_path, "--keep-every", 2, "--log-every", 4)
    for epoch in range(2):
        start_epoch(run)
        for _ in range(6):
            make_step(run, [1.0])
        if epoch == 0:
            end_epoch(run)
    return run


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu` look at test_gpu.py alone: others need packages that such a machine may lack."""
    others = collection_path.suffix == ".py" and collection_path.name != "test_gpu.py"
    return True if others and config.option.markexpr.startswith("gpu") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import nodes

    import slurm

    for marker, missing in (("slurm", slurm.missing), ("netns", nodes.missing)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = missing() if marked else ""
        for item in marked if reason else ():
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # which the scripts have changed when they were imported


def pytest_make_parametrize_id(val):
    """Name a test after the number of its signal, which Python 3.10 writes in another way."""
    return str(int(val)) if isinstance(val, signal.Signals) else None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """Put what a test has proved by `harness.prove` into its report, which travels from a worker to the terminal."""
    report = (yield).get_result()
    if call.when == "call" and "harness" in sys.modules:
        proved = sys.modules["harness"].proved
        report.user_properties += [("proved", list(one)) for one in proved]
        proved.clear()


def pytest_terminal_summary(terminalreporter) -> None:
    """Print the proof: what was compared with what, how often, the worst deviation, and what is allowed."""
    rows: dict[tuple[str, str, float], list[float]] = {}
    for report in (*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")):
        for name, one in report.user_properties if report.when == "call" else ():
            if name == "proved":
                what, with_what, deviation, allowed = one
                rows.setdefault((what, with_what, allowed), []).append(deviation)
    if rows:
        terminalreporter.section("proof")
        table = [("compared", "with", "times", "worst", "allowed")]
        for (what, with_what, allowed), found in sorted(rows.items()):
            worst = next((one for one in found if one != one), max(found))  # a NaN is the worst
            table.append(
                (
                    what,
                    with_what,
                    str(len(found)),
                    *(f"{one:.0e}" if one else "0" for one in (worst, allowed)),
                )
            )
        widths = [max(map(len, column)) for column in zip(*table)]
        for row in table:
            terminalreporter.line("  ".join(map(str.ljust, row, widths)).rstrip())
