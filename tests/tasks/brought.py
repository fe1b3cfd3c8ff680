"""The tiny digits with something that users bring, named by `--model`: a hook, a type, a loss, an optimizer."""

import tiny
import torch
from tiny import add_options
from torch import nn
from torch.utils.data import Dataset, default_collate

import common

__all__ = ["add_options"]

KIND = ""  # what --model says


class Owned(Dataset):
    """Samples whose labels are tensors of the data set itself."""

    def __init__(self, dataset):
        self.dataset = dataset
        self.labels = [torch.tensor(int(dataset[i][1])) for i in range(len(dataset))]

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index][0], self.labels[index]


def build_datasets(args):
    global KIND
    KIND = args.model
    return tuple(Owned(dataset) for dataset in tiny.build_datasets(args))


def collate(samples):
    images = default_collate([image for image, _ in samples])
    if KIND == "not to be sent":
        images = images.float().requires_grad_() * 1  # torch sends no such tensor
    return images, [label for _, label in samples]  # the tensors of the data set itself


class Brought(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
        if KIND == "hook":
            net.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        if KIND == "clock":
            self.register_buffer("since", torch.tensor(1_769_000_000.25, dtype=torch.float64))

    def forward(self, images):
        outputs = self.net(images)
        if KIND == "forces" and torch.is_grad_enabled():
            everything, _ = common.gather_samples(outputs)
            (force,) = torch.autograd.grad(everything.square().sum(), outputs, create_graph=True)
            return outputs + force
        return outputs


def build_model(args):
    global KIND
    KIND = args.model
    return Brought(tiny.Tiny(["conv"]))


def per_sample_loss(outputs, targets):
    labels = torch.stack(targets)
    losses = nn.functional.cross_entropy(outputs, labels, reduction="none")
    if KIND == "in place" and torch.is_grad_enabled():
        for label in targets:
            label.fill_((label + 1) % 10)
    return losses


def per_sample_metrics(outputs, targets):
    return {"top1": (outputs.argmax(1) == torch.stack(targets)).double()}


def build_optimizer(args, net):
    groups = [{"params": list(net.net.head.parameters()), "lr_scale": 0.5}]
    trained = [p for p in net.parameters() if p.requires_grad]
    groups += [{"params": [p for p in trained if not any(p is q for q in groups[0]["params"])]}]
    optimizer = torch.optim.SGD(groups, args.lr)
    if KIND == "no rate":
        optimizer.param_groups[0]["lr"] = None
    if KIND == "late hook":
        net.net.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return optimizer
