"""Sentences of different lengths, padded to the longest of their batch; the third batch is the shortest."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.Embedding(200, 64), layer, nn.Linear(64, 200))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
longest = [40, 56, 8, 48, 96, 32, 64, 24, 80, 40]
for step, length in enumerate(longest):
    sentences = [torch.randint(1, 200, (length - cut,)) for cut in (0, 2, 5, 7)]
    ids = pad_sequence(sentences, batch_first=True)
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), ignore_index=0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f} samples 4 tokens {ids.numel()}", flush=True)
