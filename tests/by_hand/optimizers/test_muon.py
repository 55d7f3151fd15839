"""Muon by hand: torch's weights to the bit, singular values near 1, and hidden matrices alone."""

import torch
from torch import nn

from dlojz.by_hand.optimizers.muon import Muon, hidden_matrices, orthogonal


def trained(by_hand: bool, dtype: torch.dtype, steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4)).to(dtype)
    matrices = [model[0].weight, model[2].weight]
    biases = [model[0].bias, model[2].bias]
    optimizers: list[torch.optim.Optimizer] = (
        [Muon(matrices, biases, lr=0.02, weight_decay=0.1)]
        if by_hand
        else [
            torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(biases, lr=0.02, weight_decay=0.1),
        ]
    )
    for _ in range(steps):
        model(torch.ones(5, 6, dtype=dtype)).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def test_muon_has_the_weights_of_torch_to_the_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for parameter, of_torch in zip(trained(True, dtype), trained(False, dtype), strict=True):
            assert torch.equal(parameter, of_torch)


def test_orthogonal_has_singular_values_near_one_for_wide_and_tall() -> None:
    torch.manual_seed(0)
    for shape in ((8, 32), (32, 8)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)).float())
        assert values.min() > 0.5 and values.max() < 1.3


def test_hidden_matrices_leave_out_embedding_head_bias_and_convolution() -> None:
    class Model(nn.Module):
        def __init__(self, *, tied: bool) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 4)
            self.convolution = nn.Conv1d(4, 4, 1)
            self.hidden = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
            self.head = nn.Linear(4, 11)
            if tied:
                self.head.weight = self.embedding.weight

    # With a tied head too the last hidden matrix is one of them.
    for tied in (False, True):
        assert hidden_matrices(Model(tied=tied)) == ("hidden.0.weight", "hidden.1.weight")
