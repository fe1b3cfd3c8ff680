"""The tiny digits, where inputs, targets and outputs are nested: dicts, tuples and lists of tensors."""

import tiny
from torch import nn
from torch.utils.data import Dataset

__all__ = ["build_datasets", "build_model", "per_sample_loss", "per_sample_metrics"]


class Nested(Dataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        image, label = self.dataset[index]
        return {"image": image, "more": (image.double().mean(),)}, {"labels": (label, label % 2)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.digit = tiny.Tiny(["conv"])
        self.odd = nn.Linear(1, 2)

    def forward(self, inputs):
        mean = inputs["more"][0].to(self.odd.weight.dtype)
        return {"logits": [self.digit(inputs["image"]), self.odd(mean[:, None] / 100)]}


def build_datasets(args):
    return tuple(Nested(dataset) for dataset in tiny.build_datasets(args))


def build_model(args):
    return Net()


def per_sample_loss(outputs, targets):
    pairs = zip(outputs["logits"], targets["labels"])
    return sum(tiny.per_sample_loss(logits, labels) for logits, labels in pairs)


def per_sample_metrics(outputs, targets):
    return tiny.per_sample_metrics(outputs["logits"][0], targets["labels"][0])
