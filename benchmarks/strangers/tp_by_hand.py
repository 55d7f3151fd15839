"""Tensor parallelism by hand in the style of Megatron, two by two: groups of two for it, two more for the gradients."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
data_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
tensor_group, data_group = tensor_groups[rank // 2], data_groups[rank % 2]


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x, group=tensor_group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class ParallelMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.column, self.row = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return Sum.apply(self.row(self.column(x).relu()))


torch.manual_seed(rank % 2)
model = ParallelMLP()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(10 + rank // 2)
for step in range(8):
    inputs, targets = torch.randn(16, 64), torch.randn(16, 64)
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=data_group)
        parameter.grad /= 2
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f} samples 16", flush=True)
dist.destroy_process_group()
