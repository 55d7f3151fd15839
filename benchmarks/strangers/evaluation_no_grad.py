"""Train for an epoch, evaluate under torch.no_grad(), again, with data loaders, as in pytorch/examples/mnist."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(160, 1, 12, 12), torch.randint(0, 10, (160,)))
train_loader, test_loader = DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=80)
model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(800, 10))
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
step = 0
for _ in range(2):
    model.train()
    for images, labels in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f} samples {len(labels)}", flush=True)
        step += 1
    model.eval()
    with torch.no_grad():
        correct = sum((model(images).argmax(1) == labels).sum().item() for images, labels in test_loader)
    scheduler.step()
print(f"check correct {correct}", flush=True)
