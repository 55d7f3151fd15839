"""Data parallelism by hand, as in "Writing distributed applications with PyTorch": gradients are averaged in a loop."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
torch.manual_seed(1 + dist.get_rank())
for step in range(8):
    inputs, targets = torch.randn(16, 64), torch.randint(0, 10, (16,))
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f} samples 16", flush=True)
dist.destroy_process_group()
