"""A GAN: one backward gives the gradients of generator and discriminator.

They are two groups of one optimizer. Not with `dp` on GPUs: its replicas have no parameters that
`requires_grad_` could switch off, so the discriminator would learn to be fooled, without an error.
"""

from vectors import *


class WithNoise(Vectors):
    def __getitem__(self, index):
        return (self.x[index], torch.randn(4, dtype=self.x.dtype)), 0


def build_datasets(args):
    return WithNoise(args, 80), WithNoise(args, 20)


class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.d = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, inputs):
        real, noise = inputs
        fake = self.g(noise)
        scores = [self.d(real), -self.d(fake.detach())]
        self.d.requires_grad_(False)  # the generator's loss must not change it
        scores.append(self.d(fake))
        self.d.requires_grad_(True)
        return torch.cat(scores, 1)


def build_model(args):
    return GAN()


def build_optimizer(args, net):
    groups = [{"params": net.g.parameters()}, {"params": net.d.parameters(), "lr": 2 * args.lr}]
    return torch.optim.Adam(groups, args.lr, betas=(0.5, 0.999))


def per_sample_loss(outputs, targets):
    return F.softplus(-outputs).sum(1)


def per_sample_metrics(outputs, targets):
    return {"fooled": (outputs[:, 2] > 0).float()}
