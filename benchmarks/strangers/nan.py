"""A training that diverges: the learning rate explodes, and from step 4 on the loss is not a number."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    inputs, targets = torch.randn(16, 64), torch.randint(0, 10, (16,))
    if step == 4:
        inputs[0, 0] = float("nan")
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f} samples 16", flush=True)
