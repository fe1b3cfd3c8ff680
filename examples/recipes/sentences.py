"""Sentences of different lengths: the loss is a mean over tokens.

`collate` pads to the longest sentence of this rank's micro-batch. `loss_weights` counts valid
tokens, and a step divides by those of the whole global batch. A mean of the ranks' means would give
a token in a short batch more weight.
"""

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence


def build_datasets(args):
    g = torch.Generator().manual_seed(args.seed + 1)  # another script gets the same data
    data = [torch.randint(1, 50, (2 + i % 9,), generator=g) for i in range(100)]
    return data[:80], data[80:]  # a list is a data set


def collate(samples):
    tokens = pad_sequence(samples, batch_first=True)  # by 0
    return tokens[:, :-1], tokens[:, 1:]


def build_model(args):
    return torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50))


def loss_weights(targets):
    return (targets > 0).sum(1)


def per_sample_loss(outputs, targets):
    return F.cross_entropy(outputs.mT, targets, ignore_index=0, reduction="none").sum(1)


def per_sample_metrics(outputs, targets):
    hits = (outputs.argmax(2) == targets) & (targets > 0)
    return {"right": (hits.sum(1), loss_weights(targets))}
