"""Two-timescale training as in actor-critic methods: the actor is updated in every second step only."""

import torch
from torch import nn

torch.manual_seed(0)
actor = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 8))
critic = nn.Sequential(nn.Linear(40, 256), nn.ReLU(), nn.Linear(256, 1))
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
step = 0
for iteration in range(10):
    states, rewards = torch.randn(24, 32), torch.randn(24, 1)
    with torch.no_grad():
        actions = actor(states)
    loss_critic = nn.functional.mse_loss(critic(torch.cat([states, actions], dim=1)), rewards)
    critic_optimizer.zero_grad()
    loss_critic.backward()
    critic_optimizer.step()
    print(f"step {step} loss_critic {loss_critic.item():.6f} samples 24", flush=True)
    step += 1
    if iteration % 2:
        loss_actor = -critic(torch.cat([states, actor(states)], dim=1)).mean()
        actor_optimizer.zero_grad()
        loss_actor.backward()
        actor_optimizer.step()
        print(f"step {step} loss_actor {loss_actor.item():.6f} samples 24", flush=True)
        step += 1
