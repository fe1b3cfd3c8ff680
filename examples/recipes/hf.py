"""A model of transformers on a data set of Hugging Face, in arrow: sentences of two classes.

The names of the model's tensors begin with "hf.": `model.hf.save_pretrained(...)` exports it.
"""

import datasets
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForSequenceClassification


class Rows(torch.utils.data.Dataset):
    """Reads all rows of a batch at once, five times as fast as one by one, and pads them."""

    whole_batches = True

    def __init__(self, rows):
        self.rows = rows.with_format("torch")

    def __len__(self):
        return len(self.rows)

    def __getitems__(self, indices):
        batch = self.rows[indices]  # a dict of columns; do not draw here, see task.py
        ids = pad_sequence(batch["input_ids"], batch_first=True)  # by 0
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}, batch["labels"]


def build_datasets(args):
    """Your own: datasets.load_from_disk(DIR), with ids that a tokenizer made by `map`."""
    g = torch.Generator().manual_seed(args.seed + 1)
    ids = [torch.randint(1, 100, (3 + i % 17,), generator=g) for i in range(200)]
    labels = [int(sentence.float().mean() > 50) for sentence in ids]
    rows = datasets.Dataset.from_dict({"input_ids": [s.tolist() for s in ids], "labels": labels})
    return Rows(rows.select(range(160))), Rows(rows.select(range(160, 200)))


class Net(torch.nn.Module):
    """The scripts call model(inputs), models of transformers take names."""

    def __init__(self, hf):
        super().__init__()
        self.hf = hf

    def forward(self, inputs):
        return self.hf(**inputs).logits


def build_model(args):
    """Your own: BertForSequenceClassification.from_pretrained(DIR, num_labels=2)."""
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    size |= {"vocab_size": 100, "intermediate_size": 64, "num_labels": 2}
    config = BertConfig(**size, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    return Net(BertForSequenceClassification(config))


def build_optimizer(args, net):
    """No decay on biases and norms, as the Trainer does it."""
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": args.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, args.lr)


def per_sample_loss(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def per_sample_metrics(outputs, targets):
    return {"accuracy": (outputs.argmax(1) == targets).float()}
