"""A Wasserstein GAN with gradient penalty: the critic is stepped five times for each step of the generator."""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64))
critic = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
optimizer_g = torch.optim.RMSprop(generator.parameters(), lr=5e-5)
optimizer_c = torch.optim.RMSprop(critic.parameters(), lr=5e-5)
step = 0
for _ in range(6):
    for _ in range(5):
        real, fake = torch.randn(16, 64), generator(torch.randn(16, 16)).detach()
        mixed = (real + torch.rand(16, 1) * (fake - real)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = 10 * ((slope.norm(dim=1) - 1) ** 2).mean()
        loss_critic = critic(fake).mean() - critic(real).mean() + penalty
        optimizer_c.zero_grad()
        loss_critic.backward()
        optimizer_c.step()
        print(f"step {step} loss_critic {loss_critic.item():.6f} samples 16", flush=True)
        step += 1
    loss_generator = -critic(generator(torch.randn(16, 16))).mean()
    optimizer_g.zero_grad()
    loss_generator.backward()
    optimizer_g.step()
    print(f"step {step} loss_generator {loss_generator.item():.6f} samples 16", flush=True)
    step += 1
