"""Averaged weights in the style of torch.optim.swa_utils: the EMA copy is evaluated after every third step."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
held_out = torch.randn(64, 64)
for step in range(8):
    inputs, targets = torch.randn(16, 64), torch.randint(0, 10, (16,))
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    averaged.update_parameters(model)
    print(f"step {step} loss {loss.item():.6f} samples 16", flush=True)
    if step % 3 == 1:
        averaged.eval()
        with torch.no_grad():
            averaged(held_out)
