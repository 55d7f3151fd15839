"""Two phases in the style of fast.ai: first the head with one optimizer, then all with another, made at the start."""

import torch
from torch import nn

torch.manual_seed(0)
body, head = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()), nn.Linear(256, 10)
model = nn.Sequential(body, head)
warm = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
fine = torch.optim.AdamW(model.parameters(), lr=1e-3)
step = 0
for optimizer, steps in ((warm, 20), (fine, 10)):
    for _ in range(steps):
        inputs, targets = torch.randn(16, 64), torch.randint(0, 10, (16,))
        loss = nn.functional.cross_entropy(model(inputs), targets)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f} samples 16", flush=True)
        step += 1
