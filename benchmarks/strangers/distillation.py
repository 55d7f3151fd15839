"""Knowledge distillation: a frozen teacher under torch.no_grad(), a student that learns from its logits."""

import torch
from torch import nn

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10)).eval()
student = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
for step in range(8):
    inputs, targets = torch.randn(32, 64), torch.randint(0, 10, (32,))
    with torch.no_grad():
        wanted = (teacher(inputs) / 4).softmax(1)
    logits = student(inputs)
    soft = nn.functional.kl_div((logits / 4).log_softmax(1), wanted, reduction="batchmean") * 16
    loss = 0.5 * soft + 0.5 * nn.functional.cross_entropy(logits, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f} samples 32", flush=True)
