"""Accumulation in the style of trainers that divide the loss and clone it before backward."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    total = 0.0
    for _ in range(2):
        inputs, targets = torch.randn(12, 64), torch.randint(0, 10, (12,))
        loss = nn.functional.cross_entropy(model(inputs), targets)
        scaled = (loss / 2).clone()
        scaled.backward()
        total += loss.item() / 2
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {total:.6f} samples 24", flush=True)
