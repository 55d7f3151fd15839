"""Hogwild as in pytorch/examples/mnist_hogwild: processes that update the same shared weights, each on its own."""

import torch
import torch.multiprocessing as mp
from torch import nn


def train(number, model):
    torch.manual_seed(number)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        inputs, targets = torch.randn(16, 64), torch.randint(0, 10, (16,))
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} worker {number} loss {loss.item():.4f} samples 16", flush=True)


if __name__ == "__main__":
    mp.set_start_method("spawn")
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    shared.share_memory()
    workers = [mp.Process(target=train, args=(number, shared)) for number in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    with torch.no_grad():
        shared(torch.randn(50, 64))
