"""Transfer learning in the style of the torchvision tutorial: a frozen backbone, a new head."""

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3))
        self.head = nn.Linear(64, 10)

    def forward(self, images):
        return self.head(self.backbone(images).mean(dim=(2, 3)))


torch.manual_seed(0)
model = Classifier()
for parameter in model.backbone.parameters():
    parameter.requires_grad = False
optimizer = torch.optim.SGD(model.head.parameters(), lr=0.01, momentum=0.9)
for step in range(8):
    images, labels = torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f} samples 8", flush=True)
