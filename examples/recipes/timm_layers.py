"""A model of timm with layer decay: the lower a layer, the lower its rate. No decay on biases.

timm gives each group an `lr_scale`, by which its own schedulers multiply the rate.
"""

import timm
import torch
from timm.optim import create_optimizer_v2

import task
from task import per_sample_loss, per_sample_metrics


def add_options(parser):
    parser.add_argument("--layer-decay", type=float, default=0.75)


class Pictures(torch.utils.data.Dataset):
    """Digits as a ViT takes them: floats [1, 8, 8]."""

    def __init__(self, digits, args):
        self.digits, self.dtype = digits, getattr(torch, args.dtype)

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        picture, label = self.digits[index]
        return picture.to(self.dtype) / 120 - 1, label


def build_datasets(args):
    return [Pictures(digits, args) for digits in task.build_datasets(args)]


def build_model(args):
    """Your own would be timm.create_model(NAME, pretrained=True, num_classes=10)."""
    size = {"img_size": 8, "patch_size": 2, "in_chans": 1}
    size |= {"embed_dim": 48, "depth": 3, "num_heads": 3}
    return timm.create_model("vit_tiny_patch16_224", num_classes=10, **size)


def build_optimizer(args, net):
    settings = {"lr": args.lr, "weight_decay": args.weight_decay, "layer_decay": args.layer_decay}
    optimizer = create_optimizer_v2(net, "adamw", **settings)
    for group in optimizer.param_groups:
        group["lr"] *= group.get("lr_scale", 1.0)
    return optimizer
