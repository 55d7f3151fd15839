"""A word language model with an LSTM in the style of pytorch/examples: length first, the state is carried on."""

import torch
from torch import nn


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm, self.decoder = nn.Embedding(120, 64), nn.LSTM(64, 96), nn.Linear(96, 120)

    def forward(self, ids, state):
        outputs, state = self.lstm(self.embedding(ids), state)
        return self.decoder(outputs), state


torch.manual_seed(0)
model, text = Words(), torch.randint(0, 120, (8 * 35 + 1, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
state = (torch.zeros(1, 10, 96), torch.zeros(1, 10, 96))
for step in range(8):
    ids, targets = text[35 * step : 35 * step + 35], text[35 * step + 1 : 35 * step + 36]
    state = tuple(part.detach() for part in state)
    outputs, state = model(ids, state)
    loss = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
    model.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f} samples 10 tokens 350", flush=True)
