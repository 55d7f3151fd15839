"""FSDP2 in the style of pytorch/examples: blocks and root are sharded, gradients clipped."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(3)]
model = nn.Sequential(*blocks, nn.Linear(64, 10))
for block in model[:3]:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
torch.manual_seed(1 + dist.get_rank())
for step in range(8):
    inputs, targets = torch.randn(16, 64), torch.randint(0, 10, (16,))
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.6f} samples 16", flush=True)
dist.destroy_process_group()
