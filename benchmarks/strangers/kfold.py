"""K-fold cross-validation as in tutorials on tabular data: a new model and a new optimizer for every fold."""

import torch
from sklearn.model_selection import KFold
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

torch.manual_seed(0)
table = TensorDataset(torch.randn(192, 64), torch.randint(0, 10, (192,)))
done = 0


def train_fold(train_rows, test_rows):
    global done
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for features, labels in DataLoader(Subset(table, train_rows.tolist()), batch_size=32, shuffle=True):
        loss = nn.functional.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {done} loss {loss.item():.6f} samples {len(labels)}", flush=True)
        done += 1
    with torch.no_grad():
        features, labels = table[test_rows.tolist()]
        return (model(features).argmax(1) == labels).float().mean().item()


scores = [train_fold(*rows) for rows in KFold(3, shuffle=True, random_state=0).split(range(len(table)))]
print(f"check folds {len(scores)}", flush=True)
