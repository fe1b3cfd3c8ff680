"""Distillation: the frozen teacher is a part of the network, and of its checkpoints."""

import vectors
from vectors import *


class Pair(nn.Module):
    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()  # always
        return self

    def forward(self, x):
        return self.student(x), self.teacher(x)


def build_model(args):
    student, teacher = vectors.build_model(args), vectors.build_model(args)
    return Pair(student, teacher)  # after teacher.load_state_dict(...)


def per_sample_loss(outputs, targets):
    student, teacher = (logits.log_softmax(1) for logits in outputs)
    apart = F.kl_div(student, teacher, log_target=True, reduction="none").sum(1)
    return apart + F.nll_loss(student, targets, reduction="none")


def per_sample_metrics(outputs, targets):
    return vectors.per_sample_metrics(outputs[0], targets)
