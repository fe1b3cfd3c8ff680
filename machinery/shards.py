"""Checkpoints in shards: each rank writes the rows that it holds, and reads those that it needs.

A folder beside last.pt has a file for each shard, 00000.pt and so on: a list of tensors. last.pt
names the folder, and in place of a sharded tensor it has the tensor's place in these lists.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import common

NAME = r"shards-\d{8,}-[0-9a-f]{8}"  # of a folder: the step, and what no other folder has


def split(state: Any, rows: list[Tensor]) -> Any:
    """Return the state with a place in `rows` for each sharded tensor, and the rest whole."""

    def take(tensor: Tensor) -> Any:
        if not hasattr(tensor, "full_tensor") or not tensor.placements[-1].is_shard(0):
            return common.whole(tensor)
        own = tensor.to_local().detach()
        padded = own.untyped_storage().nbytes() > own.nbytes  # a file would hold that too
        rows.append((own.clone() if padded else own).cpu())
        return {"place in shards": len(rows) - 1, "shape": list(tensor.shape)}

    return common.tree_map(take, state)


def is_place(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"place in shards", "shape"}


class Rows:
    """A tensor whose rows lie in several files, equally many in each; `rows[a:b]` reads some."""

    def __init__(self, read: Callable[[int], list[Tensor]], files: int, value: dict) -> None:
        self.read, self.files = read, files
        self.place, self.shape = value["place in shards"], torch.Size(value["shape"])

    def __getitem__(self, wanted: slice) -> Tensor:
        start, stop, _ = wanted.indices(self.shape[0])
        each = common.rows_per_shard(self.shape[0], self.files)
        end = max(0, stop - 1)
        files = range(min(start, end) // each, end // each + 1)
        pieces = ((self.read(i)[self.place], i * each) for i in files)
        parts = [piece[max(0, start - first) : stop - first] for piece, first in pieces]
        return torch.cat(parts) if len(parts) > 1 else parts[0]  # one stays in its file


def assemble(checkpoint: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the checkpoint with `Rows` for what is in shards. Each rank checks some files."""
    if not (folder := folder_of(checkpoint, path)):
        return checkpoint

    @functools.cache
    def read(i: int, verify: bool = False) -> list[Tensor]:
        return common.read_tensors(folder / f"{i:05}.pt", "--resume", verify)

    files = checkpoint["shards"]["files"]
    for i in range(common.get_rank(), files, common.get_world_size()):
        read(i, True)
    return common.tree_map(functools.partial(Rows, read, files), checkpoint, is_place)


def folder_of(checkpoint: Any, path: Path) -> Path | None:
    """Return the folder that a checkpoint names; None if its tensors are in itself."""
    shards = checkpoint.get("shards") if isinstance(checkpoint, dict) else None
    if not isinstance(shards, dict):
        return None
    if not re.fullmatch(NAME, name := str(shards.get("folder"))):  # as ../..
        raise common.UsageError(f"{path}: {name} is no folder of shards")
    return path.resolve().parent / name  # of the file itself, if this is a link to it


def copy_folder(path: Path, directory: Path) -> None:
    """Copy the folder that a checkpoint names, if there is one, into another directory."""
    if folder := folder_of(common.load_checkpoint(path, verify=False), path):
        (directory / folder.name).mkdir(exist_ok=True)
        for file in folder.glob("*.pt"):
            common.copy_checkpoint(file, directory / folder.name / file.name)


def remove_unnamed(directory: Path) -> None:
    """Remove the folders of shards that no checkpoint in the directory names."""
    if folders := {path for path in directory.resolve().iterdir() if re.fullmatch(NAME, path.name)}:
        for path in directory.glob("*.pt"):
            try:
                folders.discard(folder_of(common.read_tensors(path, "", verify=False), path))
            except common.UsageError:
                if re.fullmatch(r"(last|best|epoch-\d+)\.pt", path.name):
                    return  # it may name any of them; another file is not of this program
        for path in folders:
            shutil.rmtree(path, ignore_errors=True)
