"""Fine-tuning in the style of T5 recipes: torch's Adafactor, whose second moments are rows and columns."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(200, 128), nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 200))
optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)
for step in range(7):
    ids = torch.randint(0, 200, (8, 12))
    loss = nn.functional.cross_entropy(model(ids).transpose(1, 2), ids)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f} samples 8 tokens 96", flush=True)
