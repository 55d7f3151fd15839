"""The Accelerate loop of its documentation: accumulate(), clipping while gradients are synchronized."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
torch.manual_seed(0)
data = TensorDataset(torch.randn(160, 64), torch.randint(0, 10, (160,)))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
losses, step = [], 0
for _ in range(2):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            print(f"step {step} loss {sum(losses) / len(losses):.6f} samples {8 * len(losses)}", flush=True)
            losses, step = [], step + 1
print(f"check wrapped in {type(model).__name__}", flush=True)
accelerator.end_training()
