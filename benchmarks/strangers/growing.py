"""A progressive training whose images grow, as in ProGAN or progressive resizing: memory is largest at the end."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, side in enumerate((16, 16, 16, 24, 24, 32, 32, 48)):
    images, targets = torch.randn(8, 3, side, side), torch.randint(0, 16, (8,))
    loss = nn.functional.cross_entropy(model(images), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f} samples 8", flush=True)
