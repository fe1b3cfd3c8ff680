"""LoRA: the weights of a trained network are frozen, and each layer gets a low-rank addition.

bash run.sh ddp 2 --task examples/recipes/vectors.py --output-dir runs/base
bash run.sh ddp 2 --task examples/recipes/lora.py --weights runs/base/best.pt --output-dir runs/lora
python examples/recipes/lora.py runs/lora/best.pt runs/merged.pt     # for vectors.py --weights
"""

import sys

import vectors
from vectors import *

SCALE = 2.0  # LoRA's alpha / rank


class Lora(nn.Linear):
    """A linear layer with frozen weights, plus `up @ down`. It keeps the names of the weights."""

    def __init__(self, layer, rank):
        super().__init__(layer.in_features, layer.out_features, device="meta")  # takes no memory
        self.weight, self.bias = layer.weight, layer.bias
        self.down = nn.Parameter(torch.randn(rank, self.in_features) / self.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(self.out_features, rank))  # at first it adds nothing

    def forward(self, x):
        return super().forward(x) + SCALE * F.linear(F.linear(x, self.down), self.up)


class Other(Vectors):
    """Another problem than that of the base."""

    def __init__(self, args, n):
        super().__init__(args, n)
        self.targets = (self.x[:, :4].sum(1) > 0).long()


def add_options(parser):
    parser.add_argument("--rank", type=int, default=2)


def build_datasets(args):
    return Other(args, 80), Other(args, 20)


def build_model(args):
    net = vectors.build_model(args).requires_grad_(False)  # --weights replaces its numbers
    for parent in [*net.modules()]:
        for name, layer in [*parent.named_children()]:
            if type(layer) is nn.Linear:
                setattr(parent, name, Lora(layer, args.rank))
    return net  # the optimizer takes what trains


def merge(state):
    """Return the weights of a plain network from those of one with adapters."""
    for name in [name.removesuffix("up") for name in state if name.endswith(".up")]:
        state[f"{name}weight"] += SCALE * state.pop(f"{name}up") @ state.pop(f"{name}down")
    return state


if __name__ == "__main__":
    checkpoint = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
    torch.save(merge(checkpoint["weights"]), sys.argv[2])
