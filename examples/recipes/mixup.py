"""Mixup: a sample draws its partner from the set. Cutmix works alike."""

from vectors import *


class Mixed(Vectors):
    def __getitem__(self, index):
        partner = int(torch.randint(len(self), ()))
        share = torch.distributions.Beta(0.4, 0.4).sample().to(self.x.dtype)
        labels = F.one_hot(self.targets, 2).to(share)
        return [share * both[index] + (1 - share) * both[partner] for both in (self.x, labels)]


def build_datasets(args):
    return Mixed(args, 80), Vectors(args, 20)
