"""Samples in many tar files, each of which is read as a whole, from its start to its end.

    python tests/made_data.py shards runs/made/shards 24 4
    bash run.sh ddp 2 --task examples/recipes/shards.py --data-dir runs/made/shards --window 4

--window N mixes the samples of N files at a time. Each rank and each loader worker keeps the last N
files, and so reads each file once an epoch. The check before a run, which takes samples at random,
reads some of them again and again: --no-check leaves it out.
"""

import functools
import io
import json
import tarfile
from pathlib import Path

import numpy as np
from orders import windowed_order
from vectors import *


def read(path):
    with tarfile.open(path) as tar:
        return [tar.extractfile(member).read() for member in tar]


class Shards(torch.utils.data.Dataset):
    def __init__(self, folder, window, dtype):
        sizes = json.loads((folder / "sizes.json").read_text())  # {"0000.tar": 13, ...}
        self.files, self.sizes = [folder / name for name in sizes], [*sizes.values()]
        self.ends, self.window, self.dtype = np.cumsum(self.sizes), window, dtype
        self.read = functools.lru_cache(window)(read)

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, index):
        shard = self.ends.searchsorted(index, "right")
        record = self.read(self.files[shard])[index - self.ends[shard]]  # counted from its end
        vector = torch.from_numpy(np.load(io.BytesIO(record)))
        return vector.to(self.dtype), int(vector.sum() > 0)

    def epoch_order(self, seed, epoch):
        return windowed_order(self.sizes, self.window, seed, epoch)


def add_options(parser):
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--window", type=int, default=4)


def build_datasets(args):
    dtype = getattr(torch, args.dtype)
    return [Shards(Path(args.data_dir) / part, args.window, dtype) for part in ("train", "val")]
