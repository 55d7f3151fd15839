"""The experts: feed-forward networks of one shape, stacked so that one product computes them all.

Layer 0, loads torch. Invariant: an expert sees its own rows only, so experts can be computed anywhere, in any number.

Shape suffixes: E experts held here, C rows of each (capacity × ranks that send), D width, F width of the hidden layer.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Flavour = Literal["gelu", "swiglu"]
INITIAL_DEVIATION = 0.02


class Experts(nn.Module):
    """E feed-forward networks: ``x_ECD`` in, ``y_ECD`` out.

    Args:
        experts: E.
        width: D.
        mlp_width: F.
        flavour: ``gelu``, with biases and GPT-2's approximation of the GELU; ``swiglu``, Llama's, without biases.

    Source: Radford et al. 2019 (GPT-2), gelu; Shazeer 2020, "GLU Variants Improve Transformer" (arXiv 2002.05202),
    swiglu.
    """

    def __init__(self, experts: int, width: int, mlp_width: int, flavour: Flavour) -> None:
        super().__init__()
        self.flavour = flavour
        if flavour == "swiglu":
            self.gate_EDF = nn.Parameter(torch.empty(experts, width, mlp_width))
        self.up_EDF = nn.Parameter(torch.empty(experts, width, mlp_width))
        self.down_EFD = nn.Parameter(torch.empty(experts, mlp_width, width))
        for matrix in self.parameters():
            nn.init.trunc_normal_(matrix, std=INITIAL_DEVIATION)
        if flavour == "gelu":
            self.up_bias_EF = nn.Parameter(torch.zeros(experts, mlp_width))
            self.down_bias_ED = nn.Parameter(torch.zeros(experts, width))

    def forward(self, x_ECD: Tensor) -> Tensor:
        """Each expert on its own rows; to the same shape."""
        if self.flavour == "swiglu":
            hidden_ECF = F.silu(torch.bmm(x_ECD, self.gate_EDF)) * torch.bmm(x_ECD, self.up_EDF)
            return torch.bmm(hidden_ECF, self.down_EFD)
        hidden_ECF = torch.baddbmm(self.up_bias_EF[:, None], x_ECD, self.up_EDF)
        hidden_ECF = F.gelu(hidden_ECF, approximate="tanh")
        return torch.baddbmm(self.down_bias_ED[:, None], hidden_ECF, self.down_EFD)

    def extra_repr(self) -> str:
        """What tells one stack from another where models are printed."""
        experts, width, mlp_width = self.up_EDF.shape
        return f"{experts}, {width}, {mlp_width}, {self.flavour}"
