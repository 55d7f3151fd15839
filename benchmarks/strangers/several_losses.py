"""Multi-task training: two losses with a backward pass each, one optimizer."""

import torch
from torch import nn

torch.manual_seed(0)
body = nn.Sequential(nn.Linear(64, 256), nn.ReLU())
model = nn.ModuleDict({"body": body, "classes": nn.Linear(256, 10), "boxes": nn.Linear(256, 4)})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    inputs, classes, boxes = torch.randn(16, 64), torch.randint(0, 10, (16,)), torch.randn(16, 4)
    features = model["body"](inputs)
    loss_class = nn.functional.cross_entropy(model["classes"](features), classes)
    loss_box = nn.functional.l1_loss(model["boxes"](features), boxes)
    optimizer.zero_grad()
    loss_class.backward(retain_graph=True)
    loss_box.backward()
    optimizer.step()
    print(f"step {step} loss_class {loss_class.item():.6f} loss_box {loss_box.item():.6f} samples 16", flush=True)
