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
sys.path[:0] = [str(TESTS / name) for name in ("", "tasks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests run side by side
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the runs would ignore it too
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
    os.environ.pop(name, None)
if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers share it
    # pytest keeps the files of failed tests; a process that is killed leaves files too.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="train-tests-")
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)


@pytest.fixture
def handlers():
    """Put back the answers to signals that a Run in this process takes over."""
    import engine.run

    before = {number: signal.getsignal(number) for number in engine.run.SIGNALS}
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


def pytest_collection_modifyitems(items) -> None:
    """Begin with the samplers: what is wrong there makes many other tests red."""
    items.sort(key=lambda item: item.path.stem != "test_sampling")


def pytest_collection_finish() -> None:
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # which the scripts have changed when they were imported


def pytest_make_parametrize_id(val):
    """Name a test after the number of its signal, which Python 3.10 writes in another way."""
    return str(int(val)) if isinstance(val, signal.Signals) else None
