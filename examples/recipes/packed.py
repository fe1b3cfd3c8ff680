"""Packed sequences for an LSTM.

Over padding its last state would depend on the longest sequence of the slice.
"""

from torch.nn.utils.rnn import pack_sequence
from vectors import *


def build_datasets(args):
    g = torch.Generator().manual_seed(args.seed + 1)  # another script gets the same data
    options = {"generator": g, "dtype": getattr(torch, args.dtype)}
    data = [torch.randn(1 + i % 9, 5, **options) for i in range(100)]
    return data[:80], data[80:]


def collate(samples):
    labels = torch.stack([(own.sum() > 0).long() for own in samples])
    return pack_sequence(samples, enforce_sorted=False), labels


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 16), nn.Linear(16, 2)

    def forward(self, packed):
        _, (hidden, _) = self.lstm(packed)
        return self.head(hidden[-1])


def build_model(args):
    return Net()
