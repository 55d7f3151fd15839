"""DDP with ZeroRedundancyOptimizer, torch's ZeRO-1, as in its tutorial."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(*(nn.Linear(128, 128) for _ in range(6))))
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.001)
torch.manual_seed(1 + dist.get_rank())
for step in range(8):
    inputs, targets = torch.randn(16, 128), torch.randn(16, 128)
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.6f} samples 16", flush=True)
dist.destroy_process_group()
