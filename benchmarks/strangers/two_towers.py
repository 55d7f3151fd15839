"""Two towers as two modules with one optimizer, in the style of recommender systems: users and items."""

import itertools

import torch
from torch import nn

torch.manual_seed(0)
users = nn.Sequential(nn.Linear(48, 256), nn.ReLU(), nn.Linear(256, 32))
items = nn.Sequential(nn.Linear(96, 128), nn.ReLU(), nn.Linear(128, 32))
optimizer = torch.optim.Adagrad(itertools.chain(users.parameters(), items.parameters()), lr=0.05)
for step in range(8):
    user_rows, item_rows = torch.randn(20, 48), torch.randn(20, 96)
    clicked = torch.randint(0, 2, (20,)).float()
    scores = (users(user_rows) * items(item_rows)).sum(1)
    loss = nn.functional.binary_cross_entropy_with_logits(scores, clicked)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f} samples 20", flush=True)
