"""The tiny digits with something that users bring, named by `--model`: a hook, a type, an optimizer."""

import tiny
import torch
from tiny import add_options
from torch import nn
from torch.utils.data import Dataset, default_collate

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
    if KIND == "not-to-be-sent":
        images = images.float().requires_grad_() * 1  # torch sends no such tensor
    return images, [label for _, label in samples]


class Brought(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
        if KIND == "hook":
            net.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        if KIND == "clock":  # more precise than the network
            self.register_buffer("since", torch.tensor(1_769_000_000.25, dtype=torch.float64))

    def forward(self, images):
        return self.net(images)


def build_model(args):
    return Brought(tiny.Tiny(["conv"]))


def per_sample_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, torch.stack(targets), reduction="none")


def per_sample_metrics(outputs, targets):
    found = (outputs.argmax(1) == torch.stack(targets)).double()
    return {"top1": found, "found": found.tolist()}


def dataset_metrics(lists):
    return {"total": sum(lists["found"])}


class Remembering(torch.optim.SGD):
    """Keeps a more precise copy of each gradient, in a list, as Shampoo does."""

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter].setdefault("kept", [parameter.grad.double() / 3])
                parameter.grad.add_(kept[0].to(parameter.dtype), alpha=0.01)
        super().step()


class ScheduleFree(torch.optim.Optimizer):
    """Defazio et al., arXiv:2405.15682: steps of SGD on z, whose average x is evaluated; a step is made at y between the two."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "k": 0, "mode": "train"})

    @torch.no_grad()
    def move(self, mode, weight):
        for group in self.param_groups:
            for p in group["params"] if group["mode"] != mode else ():
                if p in self.state:
                    p.lerp_(self.state[p]["z"], weight)
            group["mode"] = mode

    def train(self):
        self.move("train", 0.1)

    def eval(self):
        self.move("eval", 1 - 1 / 0.9)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            assert group["mode"] == "train"
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                x = p.lerp(z, 1 - 1 / 0.9)
                z.sub_(p.grad, alpha=group["lr"])
                p.copy_(x.lerp(z, 1 / group["k"]).lerp(z, 0.1))


def build_optimizer(args, net):
    """Two groups, in another order than that of the network."""
    groups = [{"params": list(net.net.head.parameters())}]
    head = {id(parameter) for parameter in groups[0]["params"]}
    groups += [{"params": [p for p in net.parameters() if id(p) not in head]}]
    if KIND == "probe":
        return torch.optim.SGD(groups[:1], args.lr)
    if KIND == "late-hook":
        net.net.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    if KIND == "schedule-free":
        optimizer = ScheduleFree(groups, args.lr)
        net.register_forward_pre_hook(
            lambda module, _: optimizer.train() if module.training else optimizer.eval(),
            prepend=True,
        )
        return optimizer
    return (Remembering if KIND == "lists" else torch.optim.SGD)(groups, args.lr)
