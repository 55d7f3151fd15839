"""LAMB: Adam whose every layer's step is as long as its weights are.

Layer 2, loads torch. Invariant: a layer is a parameter tensor; its update is c × u, and c alone knows its norms.

Source: You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (arXiv 1904.00962),
algorithm 2; the bounds on c are those of Li et al. 2021, "1-bit LAMB" (arXiv 2104.06069), equation (1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def trust_ratio(weights: Tensor, update: Tensor, least: float, most: float) -> Tensor:
    """c: the norm of a layer's weights over that of its update, within bounds; 1 where either has none.

    Returns:
        fp32, shape (), on the layer's device: nothing waits for it.
    """
    weights_norm, update_norm = weights.norm(), update.norm()
    ratio = (weights_norm / update_norm).clamp(least, most)
    return torch.where((weights_norm > 0) & (update_norm > 0), ratio, torch.ones_like(ratio))


def lamb_direction(
    gradient: Tensor, state: dict[str, Any], weights: Tensor, *, betas: tuple[float, float], eps: float, decay: float
) -> Tensor:
    """u: Adam's update, with the decay of the weights in it; the moments and the count of steps go on.

    Args:
        gradient: of this layer, averaged over the ranks.
        state: `step`, `exp_avg` and `exp_avg_sq`.
        weights: of this layer.
        betas: decay of the first and of the second moment, per step.
        eps: added to the root of the variance.
        decay: of the weights.

    Source: You et al. 2020, algorithm 2, by the names of its lines.
    """
    beta1, beta2 = betas
    state["step"] += 1
    step = int(state["step"])
    state["exp_avg"].lerp_(gradient, 1 - beta1)  # m = β1 m + (1 − β1) g
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)  # v = β2 v + (1 − β2) g²
    root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(eps)  # √(v / (1 − β2^t)) + ε
    update: Tensor = (state["exp_avg"] / root).div_(1 - beta1**step)  # r = m / (1 − β1^t) / …
    return update.add_(weights, alpha=decay)  # r + λ x


class Lamb(torch.optim.Optimizer):
    """LAMB on one process, or on gradients that have been averaged.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: decay of the first and of the second moment, per step.
        eps: added to the root of the variance.
        weight_decay: decoupled, inside the norm of the update.
        clip: bounds of the trust ratio c.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip: tuple[float, float] = (0.01, 10.0),
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "clip": clip}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                update = lamb_direction(
                    parameter.grad,
                    state,
                    parameter,
                    betas=group["betas"],
                    eps=group["eps"],
                    decay=group["weight_decay"],
                )
                ratio = trust_ratio(parameter, update, *group["clip"])
                parameter.sub_(update.mul_(ratio), alpha=group["lr"])  # x = x − η c (r + λ x)
        return loss
