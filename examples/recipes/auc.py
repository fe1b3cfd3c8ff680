"""AUC is no mean over samples: the metrics return lists, and dataset_metrics gets the whole set."""

from vectors import *


def per_sample_metrics(outputs, targets):
    score = (outputs[:, 1] - outputs[:, 0]).tolist()
    hits = (outputs.argmax(1) == targets).float()
    return {"top1": hits, "score": score, "label": targets.tolist()}


def dataset_metrics(lists):
    score, label = (torch.tensor(lists[name]).double() for name in ("score", "label"))
    pairs = score[label == 1, None] > score[None, label == 0]  # is a positive above a negative?
    return {"auc": pairs.double().mean().item()}
