"""The small digits under networks that keep more than weights: `--model` names the kind."""

import torch
from pit_models import Net, add_options, build_datasets, per_sample_loss, per_sample_metrics
from torch import nn

__all__ = ["add_options", "build_datasets", "build_model", "per_sample_loss", "per_sample_metrics"]


class Layer(nn.Module):
    def forward(self, value):
        return value * self.factor(value) if self.training else value


class Replaced(Layer):
    """Its buffer becomes another tensor in each forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("gain", torch.ones(()))

    def factor(self, value):
        self.gain = self.gain * 0.9 + 0.2
        return self.gain


class Counts(Layer):
    """It keeps a number that is no tensor."""

    calls = 0

    def factor(self, value):
        self.calls += 1
        return 1 + 1 / (1 + self.calls)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class Parameters(nn.Module):
    """A list of parameters, and a layer of attention, whose parts are read without a call."""

    def __init__(self):
        super().__init__()
        self.list = nn.ParameterList(torch.ones(32, 32) / 32 for _ in range(3))
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, value):
        for matrix in self.list:
            value = value + value @ matrix
        return self.layer(value.unsqueeze(1)).squeeze(1)


class Held(nn.Module):
    """It has its parameters in a list of its own too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.held = [self.layer.weight]

    def forward(self, value):
        return value @ self.held[0]


KINDS = {"replaced": Replaced, "counts": Counts, "parameters": Parameters, "held": Held}


def build_model(args):
    net = Net("plain")
    net.between = KINDS[args.model]()
    return net
