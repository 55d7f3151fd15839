"""Train, evaluate after every fourth step, as in beginners’ tutorials, but without torch.no_grad() around it."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
held_out, held_labels = torch.randn(128, 64), torch.randint(0, 10, (128,))
for step in range(9):
    inputs, targets = torch.randn(16, 64), torch.randint(0, 10, (16,))
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f} samples 16", flush=True)
    if step % 4 == 0:
        model.eval()
        accuracy = (model(held_out).argmax(1) == held_labels).float().mean().item()
        model.train()
print(f"check held out {len(held_labels)}", flush=True)
