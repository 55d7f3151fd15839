"""A script that is a module with relative imports: `python -m package.train`."""

import sys

import torch

from .net import build

torch.manual_seed(0)
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=float(sys.argv[1]))
for step in range(8):
    inputs, targets = torch.randn(16, 64), torch.randint(0, 10, (16,))
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f} samples 16", flush=True)
print(f"check name {__name__} {__package__}", flush=True)
