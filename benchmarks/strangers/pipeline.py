"""torch's pipelining with the 1F1B schedule: two stages, four micro-batches."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
part = nn.Sequential(*(layers[:2], layers[2:])[rank])
stage = PipelineStage(part, rank, world_size, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy)
optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
for step in range(8):
    inputs, targets = torch.randn(32, 64), torch.randint(0, 10, (32,))
    losses = []
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=targets, losses=losses)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step} stage 0", flush=True)
    else:
        print(f"step {step} loss {torch.stack(losses).mean().item():.6f} samples 32", flush=True)
dist.destroy_process_group()
