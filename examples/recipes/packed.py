"""Packed sequences for an LSTM."""

from torch.nn.utils.rnn import pack_sequence
from vectors import *


def build_datasets(args):
    data = [torch.randn(1 + i % 9, 5, dtype=getattr(torch, args.dtype)) for i in range(100)]
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
