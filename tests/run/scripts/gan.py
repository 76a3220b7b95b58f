"""Two models that are trained by turns; the discriminator is frozen while the generator learns."""

import sys

import torch
from torch import nn
from torch.nn import functional as F


class Generator(nn.Sequential):
    pass


class Discriminator(nn.Sequential):
    pass


torch.manual_seed(0)
generator = Generator(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))
discriminator = Discriminator(nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
optimizers = [torch.optim.Adam(each.parameters(), lr=1e-3) for each in (generator, discriminator)]
for _ in range(4):
    real, noise = torch.randn(128, 64), torch.randn(128, 16)
    ones, zeros = torch.ones(128, 1), torch.zeros(128, 1)
    loss = F.binary_cross_entropy_with_logits(discriminator(real), ones)
    loss = loss + F.binary_cross_entropy_with_logits(discriminator(generator(noise).detach()), zeros)
    optimizers[1].zero_grad()
    loss.backward()
    optimizers[1].step()
    discriminator.requires_grad_(False)
    loss = F.binary_cross_entropy_with_logits(discriminator(generator(noise)), ones)
    optimizers[0].zero_grad()
    loss.backward()
    optimizers[0].step()
    discriminator.requires_grad_(True)
torch.save({"generator": generator.state_dict(), "discriminator": discriminator.state_dict()}, sys.argv[1])
