"""A model with heads that this task does not use, under DDP with find_unused_parameters."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class ManyHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.ReLU())
        self.heads = nn.ModuleDict({name: nn.Linear(256, 256) for name in ("class", "box", "mask")})

    def forward(self, x, task):
        return self.heads[task](self.body(x))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(ManyHeads(), find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + dist.get_rank())
for step in range(8):
    inputs, targets = torch.randn(16, 64), torch.randint(0, 256, (16,))
    loss = nn.functional.cross_entropy(model(inputs, "class"), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f} samples 16", flush=True)
dist.destroy_process_group()
