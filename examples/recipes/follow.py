"""Weights & Biases: `tail -n +1 -F runs/mine/metrics.jsonl | python examples/recipes/follow.py`."""

import json
import sys

import wandb

wandb.init(project="mine")
for line in sys.stdin:
    values = json.loads(line)
    event, step = values.pop("event"), values.pop("global_step")
    wandb.log({f"{event}/{name}": value for name, value in values.items()}, step=step)
