"""Curve fitting in the style of pytorch/examples/time_sequence_prediction: L-BFGS with a closure."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 8))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5)
inputs, targets = torch.randn(40, 32), torch.randn(40, 8)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    return loss


for step in range(6):
    loss = optimizer.step(closure)
    print(f"step {step} loss {loss.item():.6f} samples {len(inputs)}", flush=True)
