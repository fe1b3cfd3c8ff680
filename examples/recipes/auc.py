"""AUC is no mean over samples: the metrics return lists, and dataset_metrics gets the whole set.

It runs on rank 0 alone. A metric of torchmetrics would wait there for the other ranks: its compute()
gathers, unless it was built with sync_on_compute=False.
"""

from vectors import *


def per_sample_metrics(outputs, targets):
    score = (outputs[:, 1] - outputs[:, 0]).tolist()
    hits = (outputs.argmax(1) == targets).float()
    return {"top1": hits, "score": score, "label": targets.tolist()}


def dataset_metrics(lists):
    """By the ranks of the scores (Mann and Whitney); equal scores share the mean of their ranks."""
    score, positive = torch.tensor(lists["score"]).double(), torch.tensor(lists["label"]) == 1
    _, place, size = score.unique(return_inverse=True, return_counts=True)
    ranks = (size.cumsum(0) - (size - 1).double() / 2)[place]  # from 1
    n = positive.sum().double()
    wins = ranks[positive].sum() - n * (n + 1) / 2  # of a positive over a negative
    return {"auc": (wins / (n * (len(ranks) - n))).item()}
