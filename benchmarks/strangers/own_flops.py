"""A training within torch's FlopCounterMode, as repositories do that print their own FLOPs."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with FlopCounterMode(display=False) as counter:
    for step in range(8):
        inputs, targets = torch.randn(16, 64), torch.randint(0, 10, (16,))
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f} samples 16", flush=True)
print(f"check FLOP {counter.get_total_flops()}", flush=True)
