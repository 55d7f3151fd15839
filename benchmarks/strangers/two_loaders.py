"""Semi-supervised training: labelled and unlabelled images from two loaders, both passed in each step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
labelled = DataLoader(TensorDataset(torch.randn(64, 64), torch.randint(0, 10, (64,))), batch_size=8)
unlabelled = DataLoader(TensorDataset(torch.randn(256, 64)), batch_size=32)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
for step, ((inputs, targets), (others,)) in enumerate(zip(labelled, unlabelled)):
    logits = model(torch.cat([inputs, others]))
    supervised = nn.functional.cross_entropy(logits[:8], targets)
    entropy = -(logits[8:].softmax(1) * logits[8:].log_softmax(1)).sum(1).mean()
    loss = supervised + 0.1 * entropy
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f} samples {len(logits)}", flush=True)
