"""Make one ordinary file of a checkpoint in shards: `python tools/whole.py DIR/last.pt OUT.pt`.

It is the file that the run would have written without --shards. It must fit into memory.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import UsageError, load_checkpoint, save_checkpoint, tree_map
from machinery.shards import Rows, assemble


def load_whole(path: Path) -> dict[str, Any]:
    """Return the checkpoint of this path with whole tensors, in shards or not."""
    joined: dict[int, Tensor] = {}  # a tensor of `model` may stand in `weights` too

    def join(rows: Rows) -> Tensor:
        if rows.place not in joined:
            joined[rows.place] = rows[:]
        return joined[rows.place]

    checkpoint = assemble(load_checkpoint(path), path)
    checkpoint.pop("shards", None)
    return tree_map(join, checkpoint, lambda value: isinstance(value, Rows))


def main() -> None:
    parser = argparse.ArgumentParser(prog="whole", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    try:
        save_checkpoint(load_whole(args.checkpoint), args.out)
    except (UsageError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
