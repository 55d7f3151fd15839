"""A training with DDP, as its user wrote it: nothing of the lab is imported."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--accumulation", type=int, default=1)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
samples = TensorDataset(torch.randn(512, 16), torch.randint(4, (512,)))
loader = DataLoader(samples, batch_size=8, sampler=DistributedSampler(samples, shuffle=False))

print(f"rank {rank} of {world_size}, lr {args.lr}, port {os.environ['MASTER_PORT']}", flush=True)
done = 0
for number, (inputs, targets) in enumerate(loader, start=1):
    loss = nn.functional.cross_entropy(model(inputs), targets) / args.accumulation
    loss.backward()
    if number % args.accumulation == 0:
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        print(f"step {done}: {loss.item() * args.accumulation:.6f}", flush=True)
    if done == args.steps:
        break
dist.barrier()  # a thread of gloo that still holds the last message may abort the process at its end
dist.destroy_process_group()
