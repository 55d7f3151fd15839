"""A script that is distributed where RANK says so, in the style of nanoGPT: one process is plain Python."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

distributed = int(os.environ.get("RANK", -1)) != -1
if distributed:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
if distributed:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    inputs, targets = torch.randn(16, 64), torch.randint(0, 10, (16,))
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f} samples 16", flush=True)
print(f"check distributed {distributed} port {'MASTER_PORT' in os.environ} argv", flush=True)
if distributed:
    dist.destroy_process_group()
