import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "tasks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests run side by side
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
    os.environ.pop(name, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    import slurm

    if not torch.accelerator.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an accelerator"))
    if reason := slurm.missing():
        for item in items:
            if item.get_closest_marker("slurm"):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the scripts have changed when they were imported


def pytest_sessionfinish() -> None:
    harness = sys.modules.get("harness")
    if harness and harness.scratch_folder.cache_info().currsize:
        shutil.rmtree(harness.scratch_folder(), ignore_errors=True)
