"""A GAN in the style of the DCGAN tutorial: two networks, two optimizers; a step is an update of either."""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64))
discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
for step in range(0, 16, 2):
    real, noise = torch.randn(32, 64), torch.randn(32, 16)
    ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)
    discriminator.zero_grad()
    loss_real = criterion(discriminator(real), ones)
    loss_real.backward()
    fake = generator(noise)
    loss_fake = criterion(discriminator(fake.detach()), zeros)
    loss_fake.backward()
    optimizer_d.step()
    losses = f"loss_real {loss_real.item():.6f} loss_fake {loss_fake.item():.6f}"
    print(f"step {step} {losses} samples 32", flush=True)
    generator.zero_grad()
    loss_g = criterion(discriminator(fake), ones)
    loss_g.backward()
    optimizer_g.step()
    print(f"step {step + 1} loss_g {loss_g.item():.6f} samples 32", flush=True)
