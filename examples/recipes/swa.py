"""Stochastic weight averaging: `python examples/recipes/swa.py`, after a run of vectors.py with

--schedule sawtooth --step-epochs 5 --warmup-epochs 0 --keep-every 5 --output-dir runs/mine

It averages the checkpoints of the low rates. Evaluate them by --eval-only --weights
runs/mine/swa.pt.
"""

import argparse
from pathlib import Path

import torch
import vectors as task
from torch.optim.swa_utils import update_bn

files = sorted(Path("runs/mine").glob("epoch-*.pt"))
kept = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
args = argparse.Namespace(**kept[0]["config"])
torch.manual_seed(args.seed)
train_set, _ = task.build_datasets(args)
model = task.build_model(args)
state = dict(kept[-1]["model"])  # counters stay as they are
for name, value in state.items():
    if value.is_floating_point():
        state[name] = sum(one["model"][name] for one in kept) / len(kept)
model.load_state_dict(state, assign=True)
update_bn(torch.utils.data.DataLoader(train_set, args.batch_size), model)
torch.save(model.state_dict(), "runs/mine/swa.pt")
