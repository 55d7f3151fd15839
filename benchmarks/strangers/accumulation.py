"""Accumulation in the style of nanoGPT: the loss is divided, the last accumulation of the data is incomplete."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = [(torch.randn(16, 64), torch.randint(0, 10, (16,))) for _ in range(29)]
losses, step = [], 0
for number, (inputs, targets) in enumerate(batches, start=1):
    loss = nn.functional.cross_entropy(model(inputs), targets)
    (loss / 4).backward()
    losses.append(loss.item())
    if number % 4 == 0 or number == len(batches):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step} loss {sum(losses) / len(losses):.6f} samples {16 * len(losses)}", flush=True)
        losses, step = [], step + 1
