"""The task of pit_models.py, whose ranks stop in their training step number GATE_AT, from 1, until there is a file named GATE.

Each makes GATE-RANK when it has come there, so that a test knows where the run is, and for how long, without any sleep.
"""

import itertools
import os
import time
from pathlib import Path

import pit_models
from pit_models import add_options, build_datasets, build_model, per_sample_metrics

__all__ = ["add_options", "build_datasets", "build_model", "per_sample_loss", "per_sample_metrics"]

GATE, AT = os.environ.get("GATE"), int(os.environ.get("GATE_AT", "0"))
steps = itertools.count(1)


def per_sample_loss(outputs, targets):
    if GATE and outputs.requires_grad and next(steps) == AT:
        Path(f"{GATE}-{os.environ['RANK']}").touch()
        while not Path(GATE).exists():
            time.sleep(0.01)
    return pit_models.per_sample_loss(outputs, targets)
