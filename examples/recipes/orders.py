"""Orders of an epoch of your own: `epoch_order(seed, epoch)` of a data set returns its samples.

Here the classes come equally often, and shards.py mixes a few files at a time. All ranks compute
the same order, so draw from (seed, epoch) alone.
"""

import numpy as np
from vectors import *

from sampling import splitmix64


def generator(*key):
    return np.random.RandomState(divmod(splitmix64(*key), 2**32))


class Balanced(torch.utils.data.Dataset):
    """A data set with `targets`, each class of which is drawn equally often on average."""

    def __init__(self, data):
        self.data = data
        _, first, numbers = np.unique(data.targets, return_index=True, return_inverse=True)
        self.labels = first.argsort().argsort()[numbers]  # classes are numbered as they appear

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]

    def epoch_order(self, seed, epoch):
        draw, length = generator(seed, epoch, -1), len(self)
        by_class, sizes = self.labels.argsort(kind="stable"), np.bincount(self.labels)
        drawn = draw.randint(len(sizes), size=length)
        member = (draw.random_sample(length) * sizes[drawn]).astype(np.int64)
        order = by_class[(sizes.cumsum() - sizes)[drawn] + member]  # first of the class + member
        sorting = order.argsort(kind="stable")
        copies = order[sorting]  # those of a sample stand side by side
        times = np.arange(length) - np.searchsorted(copies, copies)  # how often it came before
        order[sorting] += length * times  # another number: a copy is augmented anew
        return order


def windowed_order(sizes, window, seed, epoch):
    """Return the files of these sizes in a random order, of which `window` at a time are mixed."""
    files = generator(seed, epoch, -1).permutation(len(sizes))
    firsts, parts = np.cumsum(sizes) - sizes, []
    for i, start in enumerate(range(0, len(files), window)):
        samples = [firsts[k] + np.arange(sizes[k]) for k in files[start : start + window]]
        parts.append(generator(seed, epoch, -1, i).permutation(np.concatenate(samples)))
    return np.concatenate(parts)


def build_datasets(args):
    return Balanced(Vectors(args, 80)), Vectors(args, 20)
