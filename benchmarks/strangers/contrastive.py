"""A contrastive model of two towers in one module, in the style of CLIP: one call, a symmetric loss."""

import torch
from torch import nn


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Flatten(), nn.Linear(192, 256), nn.ReLU(), nn.Linear(256, 64))
        self.words, self.text = nn.Embedding(300, 64), nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, ids):
        image = nn.functional.normalize(self.image(images), dim=1)
        text = nn.functional.normalize(self.text(self.words(ids).mean(1)), dim=1)
        return self.scale.exp() * image @ text.T


torch.manual_seed(0)
model = TwoTowers()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
same = torch.arange(24)
for step in range(8):
    images, ids = torch.randn(24, 3, 8, 8), torch.randint(0, 300, (24, 10))
    logits = model(images, ids)
    loss = (nn.functional.cross_entropy(logits, same) + nn.functional.cross_entropy(logits.T, same)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f} samples 24", flush=True)
