"""Accumulation under DDP with no_sync for all but the last micro-batch."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + dist.get_rank())
for step in range(8):
    total = 0.0
    for micro in range(3):
        inputs, targets = torch.randn(16, 64), torch.randint(0, 10, (16,))
        with model.no_sync() if micro < 2 else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(model(inputs), targets) / 3
            loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {total:.6f} samples 48", flush=True)
dist.destroy_process_group()
