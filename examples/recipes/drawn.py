"""What a WeightedRandomSampler does, and a library of augmentation with its own generator.

Such a library needs a seed for each sample: for albumentations `transform.set_random_seed(...)`.
"""

import numpy as np
from vectors import *


class Drawn(Vectors):
    def __init__(self, args, n):
        super().__init__(args, n)
        self.bounds = (1.0 + self.targets).cumsum(0)  # class 1 twice as often

    def __getitem__(self, index):
        index = int(torch.searchsorted(self.bounds, torch.rand(()) * self.bounds[-1]))
        library = np.random.default_rng(np.random.randint(2**31))
        return self.x[index] + library.normal(), self.targets[index]


def build_datasets(args):
    return Drawn(args, 80), Vectors(args, 20)
