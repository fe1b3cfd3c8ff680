"""What compare can make even in both commands, to see what else differs. It runs in the programs.

compare.py writes {name: value} to plan.json; observer/sitecustomize.py loads this file.

seed        torch, NumPy and random start from seed 0: for a script that sets no seed
weights     the networks of B begin with the weights and buffers of A
order       RandomSampler and DistributedSampler draw one permutation for each epoch
augment     random numbers in a data set depend on the index of the sample alone
dropout     drops nothing
batchnorm   each sample is normalized by itself, so that no sample sees another one
settings    the groups of B's optimizer have the values of A's, step by step
gradient    B's gradient is divided by this factor before the step
"""

import hashlib
import os
import random

import numpy as np
import torch
from torch.nn import functional as F

NOISES = ("Dropout", "AlphaDropout", "FeatureAlphaDropout", "DropPath", "StochasticDepth")
DROPS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


def install(even):
    """Make even what does not need to know the network; called when torch has been imported."""
    if "float64" in even:
        torch.set_default_dtype(torch.float64)
    if "seed" in even:
        seed_all(0)
    if "order" in even:
        even_order()
    if "augment" in even:
        even_augmentation()
    if "dropout" in even:
        for name in DROPS:
            setattr(F, name, lambda input, *args, **kwargs: input)
        attention = F.scaled_dot_product_attention

        def without_dropout(query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs):
            return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

        F.scaled_dot_product_attention = without_dropout


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def even_order():
    """The permutation depends on how often the sampler was asked, and on nothing else."""
    from torch.utils.data import DistributedSampler, RandomSampler

    shards = DistributedSampler.__iter__

    def times_asked(sampler):
        sampler._times_asked = vars(sampler).get("_times_asked", -1) + 1
        return sampler._times_asked

    def whole(self):
        generator = torch.Generator().manual_seed(times_asked(self))
        order = torch.randperm(len(self.data_source), generator=generator)
        return iter(order[: self.num_samples].tolist())

    def shard(self):
        mine, self.seed, self.epoch = (self.seed, self.epoch), 0, times_asked(self)
        indices = list(shards(self))
        self.seed, self.epoch = mine
        return iter(indices)

    RandomSampler.__iter__, DistributedSampler.__iter__ = whole, shard


def even_augmentation():
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    def fetch(self, indices):
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        samples = []
        for index in indices if self.auto_collation else [indices]:
            seed_all(int(hashlib.blake2b(str(index).encode(), digest_size=4).hexdigest(), 16))
            samples.append(self.dataset[index])
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        return self.collate_fn(samples if self.auto_collation else samples[0])

    _MapDatasetFetcher.fetch = fetch


@torch.no_grad()
def even_network(network, number, even, folder, place, rank):
    """Before its first training forward: its weights, and what draws or computes over the batch."""
    tensors = [*network.parameters(), *network.buffers()]
    if "weights" in even and even["weights"] != folder:
        path = f"{even['weights']}/weights-{number}.pt"
        kept = torch.load(path) if os.path.exists(path) else []
        if [t.shape for t in kept] == [t.shape for t in tensors]:
            for mine, other in zip(tensors, kept):
                offset, part, _ = place(mine)
                part.copy_(other.flatten()[offset : offset + part.numel()].view(part.shape))
    elif rank == 0 and not any(hasattr(t, "placements") for t in tensors):
        torch.save([t.detach().clone() for t in tensors], f"{folder}/weights-{number}.pt")
    for module in network.modules():
        kind = type(module).__name__
        for attribute in ("p", "drop_prob"):
            if "dropout" in even and kind.startswith(NOISES) and hasattr(module, attribute):
                setattr(module, attribute, 0.0)
        if "batchnorm" in even and "BatchNorm" in kind:
            module.forward = lambda x, m=module: F.group_norm(x, 1, m.weight, m.bias, m.eps)


def rate(module):
    """Return the share that a dropout layer drops."""
    return getattr(module, "p", 0) or getattr(module, "drop_prob", 0)


@torch.no_grad()
def shake(network, place):
    """Change the last bit of the weights: how far such a run goes shows what roundings can do."""
    for parameter in network.parameters():
        part = place(parameter)[1]
        if part.is_floating_point():
            signs = (torch.arange(part.numel()) % 2 * 2 - 1).view(part.shape).to(part)
            part.mul_(1 + torch.finfo(part.dtype).eps * signs)


def settings(optimizer):
    """Return the numbers of each group: learning rate, weight decay, momentum."""
    skipped = {"params", "foreach", "fused", "capturable", "differentiable", "initial_lr"}
    groups = [
        {k: g[k] for k in g.keys() - skipped - {"param_names"}} for g in optimizer.param_groups
    ]
    for group in groups:
        for key, value in group.items():
            value = float(value) if isinstance(value, torch.Tensor) else value
            group[key] = tuple(value) if isinstance(value, list) else value
    return groups


def even_settings(optimizer, steps, count):
    """Give the groups the values of a step, where there are as many groups."""
    groups = steps[count] if steps and count < len(steps) else []
    if len(groups) == len(optimizer.param_groups):
        for group, values in zip(optimizer.param_groups, groups):
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def even_gradients(parameters, factor):
    for parameter in parameters if factor else ():
        if parameter.grad is not None:
            parameter.grad.div_(factor)
