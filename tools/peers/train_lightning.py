"""Train with Lightning's Trainer: on one device or, under torchrun, on several."""

import os

import torch
from given import collate, given
from lightning import LightningModule, Trainer
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Classifier(LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, index):
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


args, train_set, net = given()
ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
silent = dict.fromkeys(silent, False)
trainer = Trainer(accelerator=args.device, devices=ranks, max_epochs=args.epochs, **silent)
loader = DataLoader(
    train_set,
    args.batch_size // trainer.world_size,
    shuffle=True,
    num_workers=args.workers,
    persistent_workers=args.workers > 0,
    collate_fn=collate,
    drop_last=True,
)
trainer.fit(Classifier(net), loader)
