"""What samerun can make even in both commands, to see what else differs. It runs in the programs.

seed        torch, NumPy and random start from seed 0: for a script that sets no seed
order       RandomSampler and DistributedSampler draw one permutation for each epoch
augment     random numbers in a data set depend on the index of the sample alone
dropout     drops nothing
batchnorm   each sample is normalized by itself, so that no sample sees another one
float64     the default dtype
"""

import random
import zlib

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DistributedSampler, RandomSampler
from torch.utils.data._utils.fetch import _MapDatasetFetcher


def before_all(even):
    """Make even what does not need to know the network; called when torch has been imported."""
    if "float64" in even:
        torch.set_default_dtype(torch.float64)
    if "seed" in even:
        seed_all(0)
    if "order" in even:
        RandomSampler.__iter__, DistributedSampler.__iter__ = all_indices, own_indices
    if "augment" in even:
        _MapDatasetFetcher.fetch = fetch
    if "dropout" in even:
        for name in [name for name in dir(functional) if "dropout" in name]:
            setattr(functional, name, lambda input, *args, **kwargs: input)
        attention = functional.scaled_dot_product_attention

        def without_dropout(query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs):
            return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

        functional.scaled_dot_product_attention = without_dropout


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def permutation(sampler, size):
    """Return an order that depends on how often the sampler was asked, and on nothing else."""
    epoch = sampler.times_asked = getattr(sampler, "times_asked", -1) + 1
    return torch.randperm(size, generator=torch.Generator().manual_seed(epoch)).tolist()


def all_indices(sampler):
    """Stand in for RandomSampler.__iter__."""
    return iter(permutation(sampler, len(sampler.data_source))[: sampler.num_samples])


def own_indices(sampler):
    """Stand in for DistributedSampler.__iter__."""
    size = len(sampler.dataset)
    order = permutation(sampler, size) if sampler.shuffle else list(range(size))
    filled = (order * sampler.num_replicas)[: sampler.total_size]
    return iter(filled[sampler.rank :: sampler.num_replicas])


def fetch(fetcher, indices):
    """Stand in for a loader's fetch: each sample draws from a seed of its own."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    samples = []
    for index in indices if fetcher.auto_collation else [indices]:
        seed_all(zlib.crc32(str(index).encode()))
        samples.append(fetcher.dataset[index])
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    return fetcher.collate_fn(samples if fetcher.auto_collation else samples[0])


def network(module, even):
    """Make even what draws or mixes samples in a network, before its first training forward."""
    for layer in module.modules():
        if "dropout" in even and drops(layer):
            for name in ("p", "drop_prob", "dropout"):  # nn.LSTM has the last
                if isinstance(getattr(layer, name, None), float):
                    setattr(layer, name, 0.0)
        if "batchnorm" in even and "BatchNorm" in type(layer).__name__:
            layer.forward = lambda x, m=layer: functional.group_norm(x, 1, m.weight, m.bias, m.eps)


def drops(layer):
    """Return the share that a layer of this kind drops: dropout, stochastic depth."""
    kind = type(layer).__name__
    if "Dropout" in kind or kind in ("DropPath", "StochasticDepth"):
        return getattr(layer, "p", 0) or getattr(layer, "drop_prob", 0)
    return layer.dropout if isinstance(getattr(layer, "dropout", None), float) else 0


@torch.no_grad()
def shake(tensors, place):
    """Change the last bit of weights: how far such a run goes shows what roundings can do."""
    for tensor in tensors:
        part = place(tensor.detach())[1]
        if part.is_floating_point() or part.is_complex():
            signs = (torch.arange(part.numel()) % 2 * 2 - 1).view(part.shape).to(part)
            part.mul_(1 + torch.finfo(part.dtype).eps * signs)
