"""A dispatch mode of the script's own that counts operations, entered in the middle of the training."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Calls.number += 1
        return func(*args, **(kwargs or {}))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
calls = Calls()
for step in range(9):
    if step == 2:
        calls.__enter__()
    inputs, targets = torch.randn(16, 64), torch.randint(0, 10, (16,))
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f} samples 16", flush=True)
    if step == 6:
        calls.__exit__(None, None, None)
print(f"check calls {Calls.number}", flush=True)
