"""The small digits under networks that keep more than weights: `--model` names the kind."""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from pit_models import Net, build_datasets, per_sample_loss, per_sample_metrics

__all__ = [
    "add_options",
    "build_datasets",
    "build_model",
    "build_optimizer",
    "per_sample_loss",
    "per_sample_metrics",
]


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


class Passing(Layer):
    """Its buffer is in no state dict."""

    def __init__(self):
        super().__init__()
        self.register_buffer("gain", torch.ones(()), persistent=False)

    def factor(self, value):
        self.gain.mul_(0.9).add_(0.2)
        return self.gain.clone()


class Renewed(Layer):
    """Its cache, in no state dict, is another tensor in each forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.ones(1), persistent=False)

    def factor(self, value):
        self.cache = torch.ones(len(value))
        return 1


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


class OwnNorm(nn.BatchNorm1d):
    def forward(self, value):
        return super().forward(value).relu()


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


class Cached(Layer):
    """It makes a buffer in its first forward."""

    persistent = False

    def forward(self, value):
        return value * self.factor(value)

    def factor(self, value):
        if not hasattr(self, "table"):
            self.register_buffer("table", value.new_full((), 1.25), self.persistent)
        return self.table


class CachedForEver(Cached):
    persistent = True


class Volume(Layer):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.ones(1, 1, 1, 1, 1))

    def factor(self, value):
        return self.filter.view(())


KINDS = {
    "cached": Cached,
    "kept": CachedForEver,
    "volume": Volume,
    "replaced": Replaced,
    "passing": Passing,
    "renewed": Renewed,
    "counts": Counts,
    "norm": lambda: OwnNorm(32),
    "parameters": Parameters,
}


def add_options(parser):
    parser.add_argument("--model", default="plain")


def build_model(args):
    net = Net("plain")
    net.between = KINDS[args.model]()
    return net


class WithText(torch.optim.SGD):
    """Keeps something under a key that is no parameter."""

    def step(self, closure=None):
        self.state["calls"] = self.state.get("calls", 0) + 1
        return super().step(closure)


def build_optimizer(args, net):
    return WithText([p for p in net.parameters() if p.requires_grad], args.lr, 0.9)
