"""small.py with a metric whose name ASCII lacks."""

import small
from small import build_datasets, build_model, per_sample_loss  # noqa: F401


def per_sample_metrics(outputs, targets):
    return {"准确率": small.per_sample_metrics(outputs, targets)["top1"]}
