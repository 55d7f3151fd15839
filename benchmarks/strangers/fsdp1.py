"""FSDP1 with the strategy of its argument, wrapped by a policy, gradients clipped by the wrapper."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

dist.init_process_group("gloo")
torch.manual_seed(0)
block = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
net = nn.Sequential(nn.Embedding(100, 64), nn.TransformerEncoder(block, 2), nn.Linear(64, 100))
model = FullyShardedDataParallel(
    net,
    auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}),
    sharding_strategy=ShardingStrategy[sys.argv[1]],
    use_orig_params=len(sys.argv) > 2,
    device_id=torch.device("cpu"),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + dist.get_rank())
for step in range(8):
    ids = torch.randint(0, 100, (4, 24))
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    optimizer.zero_grad()
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f} samples 4 tokens 96", flush=True)
dist.destroy_process_group()
