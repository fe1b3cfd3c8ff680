"""BYOL: the teacher is an average of the student, which a hook of the optimizer moves at each step.

Its BatchNorm computes with the batch, as the student's: on several devices use --sync-bn.
"""

from vectors import *


class Views(Vectors):
    """Two noisy views of each vector."""

    def __getitem__(self, index):
        x = self.x[index]
        return [x + 0.3 * torch.randn(8, dtype=x.dtype) for _ in range(2)], 0


def build_datasets(args):
    return Views(args, 80), Views(args, 20)


def encoder():
    layers = nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)
    return nn.Sequential(*layers)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = encoder(), encoder().requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())
        self.predictor = nn.Linear(4, 4)

    def forward(self, views):
        self.teacher.train(self.training)  # a run puts BatchNorm of frozen parts into evaluation
        with torch.no_grad():
            wanted = [self.teacher(view) for view in views]
        return [self.predictor(self.student(view)) for view in views], wanted


def build_model(args):
    return Pair()


def build_optimizer(args, net):
    @torch.no_grad()
    def follow(*_):
        for mean, new in zip(net.teacher.parameters(), net.student.parameters()):
            mean.lerp_(new, 0.05)

    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], args.lr, 0.9)
    optimizer.register_step_post_hook(follow)  # not called after a NaN, which makes no step
    return optimizer


def per_sample_loss(outputs, targets):
    guessed, wanted = outputs
    return sum(2 - 2 * F.cosine_similarity(*pair) for pair in zip(guessed, reversed(wanted)))


def per_sample_metrics(outputs, targets):
    return {"likeness": F.cosine_similarity(outputs[0][0], outputs[1][1])}
