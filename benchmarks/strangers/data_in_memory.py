"""A whole data set in memory, indexed by a permutation, as in scripts for CIFAR that avoid loaders."""

import torch
from torch import nn

torch.manual_seed(0)
images, labels = torch.randn(2000, 3, 16, 16), torch.randint(0, 10, (2000,))
model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
for step, rows in enumerate(torch.randperm(2000)[:512].split(64)):
    outputs = model(images[rows])
    loss = nn.functional.cross_entropy(outputs, labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f} samples {len(rows)}", flush=True)
