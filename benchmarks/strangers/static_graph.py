"""DDP with static_graph and activation checkpointing, as in recipes for large models."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Deep(), static_graph=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + dist.get_rank())
for step in range(8):
    inputs = torch.randn(32, 128, requires_grad=True)
    loss = nn.functional.mse_loss(model(inputs), inputs.detach())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f} samples 32", flush=True)
dist.destroy_process_group()
