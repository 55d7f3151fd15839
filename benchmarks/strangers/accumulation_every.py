"""Accumulation under DDP without no_sync: each micro-batch is reduced; four of them, the last step has one only."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(1 + dist.get_rank())
losses, step = [], 0
for number in range(25):
    inputs, targets = torch.randn(16, 64), torch.randint(0, 10, (16,))
    loss = nn.functional.cross_entropy(model(inputs), targets)
    (loss * 0.25).backward()
    losses.append(loss.item())
    if len(losses) == 4 or number == 24:
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {sum(losses) / len(losses):.6f} samples {16 * len(losses)}", flush=True)
        losses, step = [], step + 1
dist.destroy_process_group()
