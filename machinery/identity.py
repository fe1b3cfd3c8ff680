"""Do the ranks, the checkpoint and the data belong to one run?"""

from __future__ import annotations

import hashlib
import io
import math
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from common import print0, tree_map
from machinery.process import bad_input
from sampling import KeyedDataset


def identity(train: KeyedDataset, val: KeyedDataset) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what tells data apart: class names and both lengths; and hashes of a few samples.

    Another hash is no proof of other data: pixels are decoded differently on another processor.
    """
    # As torchvision's data sets have them.
    classes = [getattr(keyed.dataset, "classes", None) for keyed in (train, val)]
    names = (list(map(str, some)) for some in classes if isinstance(some, (list, tuple)))
    found, hashes = {"classes": next(names, None)}, {}
    for name, keyed in (("training samples", train), ("evaluation samples", val)):
        found[name] = n = len(keyed.dataset)
        unseeded = KeyedDataset(keyed.dataset, 0, keyed.skip_corrupt, keyed.collate)
        some = [digest(unseeded.__getitems__((0, [i]))) for i in range(0, n, math.ceil(n / 8))]
        hashes[f"hashes of {name}"] = hash_of(" ".join(some).encode())
    return found, hashes


def digest(batch: Any) -> str:
    """Return a hash of a batch, or of another value that torch.save can write."""
    # Clones, as a view would be hashed with all the memory behind it.
    batch = tree_map(lambda value: value.cpu().clone(), batch)
    torch.save(batch, file := io.BytesIO())
    return hash_of(file.getvalue())


def hash_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def fingerprint(path: Path) -> str:
    """Return a hash of the checksums that the file lists of its parts, without reading them."""
    with zipfile.ZipFile(path) as file:
        parts = [(part.filename, part.file_size, part.CRC) for part in file.infolist()]
    return hash_of(repr(parts).encode())


def check_agreement(
    config: dict[str, Any],
    net: nn.Module,
    data: dict[str, Any],
    hashes: dict[str, str],
    device: torch.device,
) -> None:
    """Raise on every rank if the ranks do not mean the same run. Call it on every rank.

    With another --batch-size on one node the ranks would hang. With another --seed or data set they
    would go on to a wrong result. Other hashes of samples are a warning.
    """
    if not dist.is_initialized():
        return
    must_agree = {f"--{name.replace('_', '-')}": value for name, value in config.items()} | data
    names = " ".join(name for name, _ in net.named_parameters())
    must_agree |= {"the order of parameters": hash_of(names.encode()), "the device": device.type}
    must_agree["torch"] = torch.__version__
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (must_agree, hashes))
    for rank, (theirs, their_hashes) in enumerate(ranks):
        for name, first in ranks[0][0].items():
            other = theirs.get(name, "unknown")
            if first != other:
                found = f"{first} on rank 0, but {other} on rank {rank}"
                raise bad_input(f"{name} is {found}; all nodes need the same")
        if their_hashes != ranks[0][1]:
            print0(f"warning: rank {rank} reads other samples than rank 0: are the files the same?")
