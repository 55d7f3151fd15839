"""Muon for the matrices, AdamW for all else, in the style of the nanoGPT speed runs."""

import torch
from torch import nn

torch.manual_seed(0)
hidden = nn.Sequential(nn.Linear(128, 256, bias=False), nn.ReLU(), nn.Linear(256, 128, bias=False))
model = nn.Sequential(nn.Embedding(100, 128), hidden, nn.LayerNorm(128), nn.Linear(128, 100))
matrices = list(hidden.parameters())
others = [parameter for name, parameter in model.named_parameters() if not name.startswith("1.")]
optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3)]
for step in range(8):
    ids = torch.randint(0, 100, (4, 16))
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    print(f"step {step} loss {loss.item():.6f} samples 4 tokens 64", flush=True)
