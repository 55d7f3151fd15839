"""Muon: the momentum of a hidden matrix, made orthogonal, is its update; all else is updated by AdamW.

The momentum M (n × m) becomes nearly U Vᵀ of its singular value decomposition U S Vᵀ by five Newton–Schulz steps, which
are products of matrices in bf16:

    X ← M / ‖M‖;   five times:   A = X Xᵀ,   X ← a X + (b A + c A A) X

    states     one momentum of nm numbers; AdamW keeps two, for embeddings, heads, biases, norms and convolutions
    products   5 × (4 n² m + 2 n³) FLOPs with n ≤ m, whatever the batch: n/T of forward and backward on T tokens
    workspace  the update, X twice and A three times, of one matrix at a time

The whole matrix is needed: where a rank has some of its rows (FSDP2), the update is gathered first, in bf16, each rank
computes all products, and keeps its rows of the result.

Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks" (blog of Keller Jordan), for the
steps, a, b and c; Liu et al. 2025, "Muon is Scalable for LLM Training" (arXiv 2502.16982), §2.2, for the factor
0.2 √max(n, m), with which the learning rate is AdamW's; torch 2.13, `optim/_muon.py`, whose weights are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

NEWTON_SCHULZ: Final = (3.4445, -4.7750, 2.0315)
"""a, b and c."""
STEPS: Final = 5
MOMENTUM: Final = 0.95


def hidden_matrices(model: nn.Module) -> tuple[str, ...]:
    """List the parameters of two dimensions, but for embeddings and the head, which is the last module that has one."""
    matrices_of = {
        name: [parameter for parameter in module.parameters(recurse=False) if parameter.ndim == 2]
        for name, module in model.named_modules()
    }
    head = next((matrices for matrices in reversed(matrices_of.values()) if matrices), [])
    embeddings = [
        parameter
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    ]
    left_out = {id(parameter) for parameter in (*embeddings, *head)}
    return tuple(
        name for name, parameter in model.named_parameters() if parameter.ndim == 2 and id(parameter) not in left_out
    )


def orthogonal(update_nm: Tensor) -> Tensor:
    """Make the singular values of a matrix nearly 1.

    Args:
        update_nm: (n, m), of any floating type; one in bf16 is overwritten.

    Returns:
        (n, m), in bf16: U S′ Vᵀ with S′ between about 0.5 and 1.5.
    """
    a, b, c = NEWTON_SCHULZ
    x_km = update_nm.bfloat16()
    is_tall = x_km.size(0) > x_km.size(1)
    # Of the two products X Xᵀ and Xᵀ X the smaller one, k × k with k = min(n, m).
    x_km = x_km.T if is_tall else x_km
    x_km.div_(x_km.norm().clamp(min=1e-7))  # no singular value is above 1
    for _ in range(STEPS):
        gram_kk = x_km @ x_km.T
        polynomial_kk = torch.addmm(gram_kk, gram_kk, gram_kk, beta=b, alpha=c)
        x_km = torch.addmm(x_km, polynomial_kk, x_km, beta=a)
    return x_km.T if is_tall else x_km


class Muon(torch.optim.Optimizer):
    """Muon for hidden matrices, torch's AdamW for the other parameters: one optimizer with the states of both.

    Args:
        matrices: parameters of two dimensions; DTensors are gathered.
        others: groups of parameters, or parameters, for AdamW.
        lr: learning rate of both.
        weight_decay: decoupled, of both.
    """

    def __init__(self, matrices: Iterable[Tensor], others: list[Any], lr: float, weight_decay: float = 0.0) -> None:
        self.adamw = torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay) if others else None
        super().__init__([{"params": list(matrices)}], {"lr": lr, "weight_decay": weight_decay})
        if self.adamw is not None:
            self.adamw.state = self.state  # each touches the states of its parameters alone
            self.param_groups += self.adamw.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update each matrix after the other, then all else."""
        del closure
        group = self.param_groups[0]
        for weights in group["params"]:
            if weights.grad is not None:
                self._update(weights, group["lr"], group["weight_decay"])
        if self.adamw is not None:
            self.adamw.step()

    def _update(self, weights_nm: Tensor, lr: float, weight_decay: float) -> None:
        gradient_nm, state = weights_nm.grad, self.state[weights_nm]
        assert gradient_nm is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient_nm, memory_format=torch.preserve_format)
        state["momentum_buffer"].lerp_(gradient_nm, 1 - MOMENTUM)
        update_nm = gradient_nm.lerp(state["momentum_buffer"], MOMENTUM)  # Nesterov's
        if isinstance(update_nm, DTensor):
            # Who: the ranks that have rows of the matrix. What: all-gather of its update, in bf16: 2 n m bytes.
            rows_nm: Any = update_nm.bfloat16()
            whole_nm = orthogonal(rows_nm.full_tensor())
            # Each rank takes its rows of what all have computed: nothing is sent.
            update_nm = distribute_tensor(whole_nm, update_nm.device_mesh, update_nm.placements, src_data_rank=None)
        else:
            update_nm = orthogonal(update_nm)
        weights_nm.mul_(1 - lr * weight_decay)
        weights_nm.add_(update_nm, alpha=-lr * 0.2 * math.sqrt(max(weights_nm.shape)))
