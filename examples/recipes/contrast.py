"""A loss that compares samples, as SimCLR and CLIP: every rank sees the samples of all ranks.

With --accum-steps these are the samples of the micro-batch, which changes the loss. `dp` refuses
this task.
"""

from vectors import *

from common import gather_samples


class TwoViews(Vectors):
    def __getitem__(self, index):
        return self.x[index] + 0.3 * torch.randn(2, 8, dtype=self.x.dtype), 0


def build_datasets(args):
    return TwoViews(args, 80), TwoViews(args, 20)


def per_sample_loss(outputs, targets):  # [n, 2, d]
    every, first = gather_samples(F.normalize(outputs, dim=2))
    a, b = every.unbind(1)
    own = torch.arange(first, first + len(outputs), device=outputs.device)  # not from 0
    forth = F.cross_entropy(a[own] @ b.T / 0.2, own, reduction="none")
    return (forth + F.cross_entropy(b[own] @ a.T / 0.2, own, reduction="none")) / 2


def per_sample_metrics(outputs, targets):
    return {"minus_loss": -per_sample_loss(outputs, targets)}
