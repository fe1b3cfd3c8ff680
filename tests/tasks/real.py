"""Real work in small: `--model` tokens, pixels, boxes, graphs, cloud or clip, on 67 training and 23 held-out samples.

Sizes differ from sample to sample, losses are means over tokens, pixels or boxes of the whole global batch, or compare samples.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import common

KINDS = ["tokens", "pixels", "boxes", "graphs", "cloud", "clip"]
IGNORED, kind = -100, ""  # kind: that of the process


def add_options(parser):
    parser.add_argument("--model", choices=KINDS, default="tokens")


# ------------------------------------------------------------------------------------------- samples


def make_sample(draw, dtype):
    """Return (input, target) of the process's kind, from a generator of its own."""

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=dtype)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=draw))

    if kind == "tokens":  # the next word; the first ones of some sentences are not to be learned
        words = torch.randint(0, 11, (number(2, 17),), generator=draw)
        labels = (words * 3 + 1) % 11
        labels[: number(0, 2 * len(words)) - len(words)] = IGNORED
        return words, labels
    if kind == "pixels":  # some pictures have no valid pixel
        picture = normal(2, 5, 5)
        labels = (picture[0] > 0).long() + (picture[1] > 0)
        labels[torch.rand(5, 5, generator=draw) < number(0, 5) / 4] = IGNORED
        return picture, labels
    if kind == "boxes":  # none to four a picture
        picture = normal(1, 6, 6)
        return picture, normal(number(0, 5), 4).abs() + picture.mean()
    if kind == "graphs":
        nodes = number(2, 9)
        edges = torch.randint(0, nodes, (2, number(1, 20)), generator=draw)
        features = normal(nodes, 3)
        return {"nodes": features, "edges": edges}, features[:, 0].mean() + nodes / 4
    if kind == "cloud":
        points = normal(number(1, 20), 3)
        return points, points.norm(dim=1).amax()
    shared = normal(4)
    return torch.stack([shared, shared.flip(0) + 0.3 * normal(4)]), 0  # clip: a picture, its text


def build_datasets(args):
    global kind
    kind = args.model
    draw = torch.Generator().manual_seed(5)
    samples = [make_sample(draw, getattr(torch, args.dtype)) for _ in range(90)]
    return samples[:67], samples[67:]


def collate(samples):
    inputs, targets = zip(*samples)
    if kind == "tokens":
        return pad_sequence(inputs, True), pad_sequence(targets, True, IGNORED)
    if kind == "boxes":
        return torch.stack(inputs), list(targets)
    if kind == "cloud":
        return list(inputs), torch.stack(targets)
    if kind == "graphs":
        sizes = [len(graph["nodes"]) for graph in inputs]
        starts = torch.tensor([0, *sizes]).cumsum(0)
        return {
            "nodes": torch.cat([graph["nodes"] for graph in inputs]),
            "edges": torch.cat([g["edges"] + start for g, start in zip(inputs, starts)], 1),
            "graph": torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
        }, torch.stack(targets)
    return torch.utils.data.default_collate(samples)


# --------------------------------------------------------------------------------------------- model


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        inside = {"tokens": nn.Embedding(11, 16), "pixels": nn.Conv2d(2, 16, 3, padding=1)}
        inside |= {"boxes": nn.Linear(36, 16), "clip": nn.Linear(4, 16)}
        self.first = inside.get(kind, nn.Linear(3, 16))
        self.between = nn.Linear(16, 16)
        self.last = nn.Linear(16, {"tokens": 11, "pixels": 3, "boxes": 4, "clip": 6}.get(kind, 1))

    def forward(self, inputs):
        if kind == "tokens":  # a word sees those before it: padding comes after
            seen = self.first(inputs).cumsum(1)
            return self.last(torch.tanh(self.between(seen)))
        if kind == "pixels":
            features = self.between(torch.tanh(self.first(inputs)).movedim(1, -1))
            return self.last(torch.tanh(features)).movedim(-1, 1)
        if kind == "cloud":
            every = torch.tanh(self.first(torch.cat(inputs)))  # one call: fsdp's ranks wait for it
            clouds = [points.amax(0) for points in every.split([*map(len, inputs)])]
            return self.last(torch.tanh(self.between(torch.stack(clouds))))[:, 0]
        if kind == "graphs":
            nodes = torch.tanh(self.first(inputs["nodes"]))
            source, target = inputs["edges"]
            nodes = nodes.index_add(0, target, self.between(nodes)[source] / 10)
            graphs = nodes.new_zeros(int(inputs["graph"][-1]) + 1, 16)
            return self.last(graphs.index_add(0, inputs["graph"], torch.tanh(nodes) / 5))[:, 0]
        flat = inputs.flatten(1) if kind == "boxes" else inputs
        return self.last(torch.tanh(self.between(self.first(flat))))


def build_model(args):
    global kind
    kind = args.model
    return Net()


# ---------------------------------------------------------------------------------------------- loss


def loss_weights(targets):
    if kind in ("tokens", "pixels"):
        return (targets != IGNORED).flatten(1).sum(1)
    if kind == "boxes":
        return torch.tensor([len(boxes) for boxes in targets])
    return torch.ones(len(targets))


def per_sample_loss(outputs, targets):
    if kind == "tokens":
        outputs = outputs.movedim(-1, 1)
    if kind in ("tokens", "pixels"):
        losses = F.cross_entropy(outputs, targets, ignore_index=IGNORED, reduction="none")
        return losses.flatten(1).sum(1)
    if kind == "boxes":
        return torch.stack([(box - own).square().sum() for box, own in zip(outputs, targets)])
    if kind == "clip":
        every, first = common.gather_samples(outputs)
        own = torch.arange(first, first + len(outputs), device=outputs.device)
        pictures, texts = (F.cross_entropy(outputs[:, i] @ every[:, 1 - i].T, own, reduction="none")
                           for i in (0, 1))  # fmt: skip
        return pictures + texts
    return (outputs - targets).square()


def per_sample_metrics(outputs, targets):
    if kind == "tokens":  # a mean over words too
        right = ((outputs.argmax(-1) == targets) & (targets != IGNORED)).sum(1)
        return {"right": (right.double(), loss_weights(targets))}
    return {"minus_loss": -per_sample_loss(outputs, targets)}
