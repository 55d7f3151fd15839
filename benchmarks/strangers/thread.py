"""Training in a thread of its own, as Ray Train and interactive tools do, while the main thread waits."""

import threading

import torch
from torch import nn


def train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(8):
        inputs, targets = torch.randn(16, 64), torch.randint(0, 10, (16,))
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f} samples 16", flush=True)


trainer = threading.Thread(target=train)
trainer.start()
trainer.join()
