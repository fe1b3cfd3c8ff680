"""A language model, `--task gpt`: a small GPT, on a file of tokens.

python tasks/gpt.py prepare book.txt data/book     # its bytes become train.bin and val.bin
bash run.sh ddp 2 --task gpt --data-dir data/book --output-dir runs/book
python tasks/gpt.py generate runs/book/best.pt "Once upon a time"

A token is a byte, so no tokenizer is needed. Tokens of any tokenizer work too: write them into the
two files as uint16, or as uint32 if --vocabulary is above 65536.
"""

from __future__ import annotations

import argparse
import os
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

sys.path.append(str(Path(__file__).resolve().parent.parent))  # where it is run as a program

from common import fail


def add_options(parser: argparse._ArgumentGroup) -> None:
    """Add the options of this task, and set defaults that suit text."""
    settings = {"lr": 3e-3, "weight_decay": 0.1, "warmup_epochs": 0.5, "clip_grad_norm": 1.0}
    parser.set_defaults(optimizer="adamw", epochs=6, best="loss", **settings)
    add = parser.add_argument
    add("--data-dir", type=os.path.abspath, metavar="DIR", help="of train.bin and val.bin")
    add("--context", type=int, default=64, metavar="N", help="tokens of a sample (%(default)s)")
    add("--vocabulary", type=int, default=256, metavar="N", help="number of tokens (%(default)s)")
    add("--layers", type=int, default=2, metavar="N", help="blocks (%(default)s)")
    add("--heads", type=int, default=2, metavar="N", help="of each attention (%(default)s)")
    add("--width", type=int, default=64, metavar="N", help="numbers per token (%(default)s)")
    add("--dropout", type=float, default=0.0, metavar="X", help="probability (%(default)s)")
    add("--samples", type=int, metavar="N", help="of an epoch (default: to cover the text once)")


def build_datasets(args: Namespace) -> tuple[Dataset, Dataset]:
    """Return random windows of train.bin, and all windows of val.bin, one after the other."""
    if not args.data_dir:
        fail("--task gpt needs --data-dir, the directory of train.bin and val.bin")
    folder = Path(args.data_dir)
    return Windows(folder / "train.bin", args, True), Windows(folder / "val.bin", args, False)


class Windows(Dataset):
    """Windows of a file of tokens: (int64 [context], int64 [context]), the second is one later."""

    def __init__(self, file: Path, args: Namespace, random: bool) -> None:
        self.file, self.context, self.random = file, args.context, random
        self.vocabulary = args.vocabulary
        self.type = np.dtype(np.uint16 if args.vocabulary <= 2**16 else np.uint32)
        self.tokens = file.stat().st_size // self.type.itemsize if file.is_file() else 0
        if self.tokens < self.context + 2:
            problem = f"{file} is not there, or has less than {self.context + 2} tokens"
            fail(f"--data-dir: {problem}; see tasks/gpt.py prepare")
        self.samples = (random and args.samples) or (self.tokens - 1) // self.context

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        if self.random:  # seeded for each sample, in each epoch
            start = int(torch.randint(self.tokens - self.context, ()))
        # Opened here: an open file would be shared by the loader workers.
        tokens = np.memmap(self.file, dtype=self.type, mode="r")
        window = torch.from_numpy(tokens[start : start + self.context + 1].astype(np.int64))
        if window.max() >= self.vocabulary:
            problem = f"token {window.max()} is not below --vocabulary {self.vocabulary}"
            raise ValueError(f"{self.file}: {problem}; they are read as {self.type}")
        return window[:-1], window[1:]


def prepare(text: Path, directory: Path) -> None:
    """Write the bytes of a text as tokens: nine tenths into train.bin, the rest into val.bin."""
    tokens = np.frombuffer(text.read_bytes(), dtype=np.uint8).astype(np.uint16)
    directory.mkdir(parents=True, exist_ok=True)
    cut = len(tokens) * 9 // 10
    tokens[:cut].tofile(directory / "train.bin")
    tokens[cut:].tofile(directory / "val.bin")


class Block(nn.Module):
    """Attention and a feed-forward part, [n, T, width] -> [n, T, width]. A token sees no later one.

    Source: Radford et al., "Language models are unsupervised multitask learners", 2019.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, values: Tensor) -> Tensor:
        n, length, width = values.shape
        parts = self.attend(self.norm1(values)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [n, heads, T, width / heads]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        mixed = mixed.transpose(1, 2).reshape(n, length, width)
        values = values + self.drop(self.project(mixed))
        return values + self.drop(self.contract(F.gelu(self.expand(self.norm2(values)))))


class GPT(nn.Module):
    """Tokens int64 [n, T] -> logits [n, T, vocabulary] of the next token of each place."""

    def __init__(self, args: Namespace) -> None:
        super().__init__()
        self.context = args.context
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.places = nn.Embedding(args.context, args.width)
        self.drop = nn.Dropout(args.dropout)
        blocks = [Block(args.width, args.heads, args.dropout) for _ in range(args.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # smaller where all blocks add to the same values
                into_sum = name.endswith(("project.weight", "contract.weight"))
                deviation = 0.02 / (2 * args.layers) ** 0.5 if into_sum else 0.02
                nn.init.normal_(parameter, std=deviation)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        self.head.weight = self.tokens.weight  # one matrix reads and writes tokens

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        values = self.drop(self.tokens(tokens) + self.places(places))
        for block in self.blocks:
            values = block(values)
        return self.head(self.norm(values))


def build_model(args: Namespace) -> nn.Module:
    return GPT(args)


def shard_modules(net: GPT) -> list[nn.Module]:
    """Return what fsdp shards each for itself: not the embedding, which the head shares."""
    return list(net.blocks)


def build_optimizer(args: Namespace, net: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices alone, not norms and biases."""
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() >= 2]
    others = [parameter for parameter in trained if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, args.lr, betas=(args.momentum, 0.95), fused=True)


def per_sample_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of each window's tokens: [n, T, vocabulary], [n, T] -> [n]."""
    losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(1)  # all windows have the same number of tokens


def per_sample_metrics(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return the share of tokens that are the best guess, [n]."""
    return {"right": (outputs.argmax(-1) == targets).float().mean(1)}


@torch.no_grad()
def generate(net: GPT, tokens: list[int], count: int, temperature: float = 0.8) -> list[int]:
    """Return the tokens and `count` more, each drawn from what the network expects next."""
    net.eval()
    for _ in range(count):
        window = torch.tensor([tokens[-net.context :]])
        chances = (net(window)[0, -1].double() / temperature).softmax(0)
        tokens = [*tokens, int(chances.multinomial(1))]
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare a text, or let a trained model write.")
    parser.add_argument("command", choices=["prepare", "generate"])
    parser.add_argument("file", type=Path, metavar="TEXT|CHECKPOINT", help="what is read")
    parser.add_argument("word", metavar="DIR|BEGINNING", help="what is written, or continued")
    parser.add_argument("--count", type=int, default=300, help="tokens to generate (%(default)s)")
    args = parser.parse_args()
    if args.command == "prepare":
        return prepare(args.file, Path(args.word))
    checkpoint = torch.load(args.file, weights_only=True)
    net = build_model(Namespace(**checkpoint["config"]))
    net.load_state_dict(checkpoint["weights"])
    written = generate(net, list(args.word.encode()), args.count)
    print(bytes(written).decode(errors="replace"))


if __name__ == "__main__":
    main()
