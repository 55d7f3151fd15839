"""A model of one process with a pooler that the loss does not use, as BERT has it, and its own EMA copy inside."""

import copy

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        self.pooler = nn.Linear(64, 512)
        self.shadow = copy.deepcopy(self.body).requires_grad_(False)

    def forward(self, x):
        return self.body(x)


torch.manual_seed(0)
model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    inputs = torch.randn(32, 64)
    loss = nn.functional.mse_loss(model(inputs), inputs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for shadow, weight in zip(model.shadow.parameters(), model.body.parameters()):
            shadow.lerp_(weight, 0.1)
    print(f"step {step} loss {loss.item():.6f} samples 32", flush=True)
