"""The tiny digits with something that users bring, named by `--model`: a hook, a type, a loss, an optimizer."""

import multiprocessing
import signal
import subprocess
import threading
import time

import tiny
import torch
from tiny import add_options
from torch import nn
from torch.utils.checkpoint import checkpoint
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
        if KIND == "child":  # of a worker, as imageio has one for each video
            child = subprocess.Popen(["sleep", "60"])
            child.terminate()
            assert child.wait(timeout=20) == -signal.SIGTERM
        return self.dataset[index][0], self.labels[index]


def build_datasets(args):
    global KIND
    KIND = args.model
    train, val = (Owned(dataset) for dataset in tiny.build_datasets(args))
    if KIND == "long":  # in training alone
        train.labels = [label + 10 for label in train.labels]
    return train, val


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
        if KIND == "threaded":  # of which torch tells no other thread
            thread = threading.Thread(target=self.measure)
            thread.start()
            thread.join()
        if KIND == "made late":
            self.register_buffer("seen", None)
        if KIND == "grows":
            self.register_buffer("seen", torch.zeros(1))
        if KIND == "re-entrant":
            self.layer = nn.Linear(10, 10)

    def measure(self):
        self.scale = float(self.net.head.weight.detach().norm())

    def forward(self, images):
        outputs = self.net(images)
        if KIND == "made late" and self.training:
            self.seen = outputs.detach().mean()
        if KIND == "grows" and self.training:
            self.seen = torch.cat([self.seen, outputs.detach().mean().view(1)])
        if KIND in ("draws", "draws and mixes"):
            return outputs + torch.randn_like(outputs)
        if KIND == "re-entrant":
            for _ in range(2):  # as ALBERT calls one layer many times
                outputs = checkpoint(self.layer, outputs, use_reentrant=True)
        if KIND == "forces" and torch.is_grad_enabled():
            everything, _ = common.gather_samples(outputs)
            (force,) = torch.autograd.grad(everything.square().sum(), outputs, create_graph=True)
            return outputs + force
        return outputs


def build_model(args):
    global KIND
    KIND = args.model
    criterion.requires_grad_(KIND == "beside")
    return Brought(tiny.Tiny(["conv"]))


criterion = nn.Linear(1, 1)  # a loss with parameters of its own; the other kinds freeze it


def per_sample_loss(outputs, targets):
    labels = torch.stack(targets)
    losses = nn.functional.cross_entropy(outputs, labels % 10, reduction="none")
    if KIND == "long":
        return losses * (1 + labels.max())
    if KIND == "draws and mixes":
        return losses - losses.mean() / 2
    if KIND == "empty" and torch.is_grad_enabled():
        return losses.detach()
    if KIND == "in place" and torch.is_grad_enabled():
        for label in targets:
            label.fill_((label + 1) % 10)
    return losses


def per_sample_metrics(outputs, targets):
    found = (outputs.argmax(1) == torch.stack(targets)).double()
    return {"top1": found, "found": found.tolist()}


def wait_for_its_end(ready):
    ready.set()
    for _ in range(600):  # a signal that comes just before a sleep is answered after it
        time.sleep(0.1)


def dataset_metrics(lists):
    if KIND == "fork":  # as a Pool, which ends its processes by SIGTERM
        ready = multiprocessing.get_context("fork").Event()
        child = multiprocessing.get_context("fork").Process(target=wait_for_its_end, args=(ready,))
        child.start()
        ready.wait()  # a signal during the fork itself is lost by Python
        child.terminate()
        child.join(timeout=20)
        assert child.exitcode == -signal.SIGTERM
    return {"total": sum(lists["found"])}


class Remembering(torch.optim.SGD):
    """Keeps a more precise copy of each gradient, in a list, as Shampoo does."""

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("kept", [parameter.grad.double() / 3])
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
    groups = [{"params": list(net.net.head.parameters()), "lr_scale": 0.5}]
    trained = [p for p in net.parameters() if p.requires_grad]
    groups += [{"params": [p for p in trained if not any(p is q for q in groups[0]["params"])]}]
    optimizer = torch.optim.SGD(groups, args.lr)
    if KIND.startswith("schedule-free"):
        optimizer = ScheduleFree(groups, args.lr)
    if KIND == "schedule-free, switched":
        net.register_forward_pre_hook(
            lambda module, _: optimizer.train() if module.training else optimizer.eval(),
            prepend=True,
        )
    if KIND == "lists":
        optimizer = Remembering(groups, args.lr)
    if KIND == "no rate":
        optimizer.param_groups[0]["lr"] = None
    if KIND == "late hook":
        net.net.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return optimizer
