"""Ensembling in the style of Kaggle notebooks: the models of all folds are kept, trained one after the other."""

import torch
from torch import nn

torch.manual_seed(0)
models = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)) for _ in range(3)]
optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in models]
features, labels = torch.randn(24, 64), torch.randint(0, 10, (24,))
step = 0
for model, optimizer in zip(models, optimizers):
    for _ in range(6):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f} samples {len(labels)}", flush=True)
        step += 1
