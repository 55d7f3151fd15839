"""LAMB and 1-bit LAMB.

LAMB is Adam with the step of each layer, a parameter tensor, as long as the layer's weights: c × u.

Source: You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (arXiv 1904.00962),
algorithm 2; the bounds on c are those of Li et al. 2021, "1-bit LAMB" (arXiv 2104.06069), equation (1).

1-bit LAMB is LAMB on gradients averaged in full for the first steps; then `exp_avg_sq` is frozen, one bit per number of
the momentum is sent, and `exp_avg_sq_fresh` goes on with gradients computed back from the momenta. Momentum, variances,
c and weights are the same bits on all ranks after every step.

Source: Li et al. 2021, "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's Convergence
Speed" (arXiv 2104.06069), algorithm 1, whose lines are named below. What differs: the biases of the moments are
corrected, as in LAMB itself (You et al. 2020), and that of c_avg, a running mean that begins at 0, for short warm-ups.
The momentum is compressed in units of √v: see `dlojz.by_hand.optimizers.communicating`. (DeepSpeed's OnebitLamb takes
in line 17 the quotient of the roots, and bounds it, line 19, before it limits its change, line 18; here it is as
written.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlojz.by_hand.optimizers.communicating import Communicating, loss_of, start_moments


def trust_ratio(weights: Tensor, update: Tensor, minimum: float, maximum: float) -> Tensor:
    """c: the norm of a layer's weights over that of its update, within bounds; 1 where either has none.

    Returns:
        fp32, shape (), on the layer's device: nothing waits for it.
    """
    weights_norm, update_norm = weights.norm(), update.norm()
    ratio = (weights_norm / update_norm).clamp(minimum, maximum)
    # Not `if`: a branch on a number of the GPU would make the host wait.
    return torch.where((weights_norm > 0) & (update_norm > 0), ratio, torch.ones_like(ratio))


def update_layer(weights: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
    """Update one layer by LAMB.

    Args:
        weights: of this layer; `.grad` is averaged over the ranks.
        group: `lr`, `betas`, `eps`, `weight_decay` and `clip`, as `Lamb` takes them.
        state: `step`, `exp_avg` and `exp_avg_sq`, which are updated.

    Returns:
        The trust ratio c, fp32, shape ().

    Source: You et al. 2020, algorithm 2, by the names of its lines.
    """
    (beta1, beta2), gradient = group["betas"], weights.grad
    assert gradient is not None
    state["step"] += 1
    step = int(state["step"])
    state["exp_avg"].lerp_(gradient, 1 - beta1)  # m = β1 m + (1 − β1) g
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)  # v = β2 v + (1 − β2) g²
    root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])  # √(v / (1 − β2^t)) + ε
    update = (state["exp_avg"] / root).div_(1 - beta1**step)  # r = m / (1 − β1^t) / …
    update.add_(weights, alpha=group["weight_decay"])  # u = r + λ x
    ratio = trust_ratio(weights, update, *group["clip"])
    weights.sub_(update.mul_(ratio), alpha=group["lr"])  # x = x − η c u
    return ratio


class Lamb(torch.optim.Optimizer):
    """LAMB on one process, or on gradients that have been averaged.

    Args:
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
        """Update every parameter that has a gradient."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    start_moments(parameter, self.state[parameter])
                    update_layer(parameter, group, self.state[parameter])
        return loss


class OneBitLamb(Communicating):
    """1-bit LAMB. How it is used: see `Communicating`.

    Args:
        params: parameters, or groups of them; a layer is one parameter.
        lr: γ, learning rate.
        warmup_steps: T_w, steps of plain LAMB.
        betas: β1 and β2, decay of the first and of the second moment, per step.
        eps: added to the root of the variance.
        weight_decay: decoupled, inside the norm of the update.
        clip: bounds of the trust ratio c.
        coefficient_beta: β3, decay of the mean of c over the warm-up.
        factor_clip: r_min and r_max, bounds of what c_avg is multiplied by.
        factor_threshold: r_threshold, by how much of itself that may change in a step.
        total_steps: steps of the run, where they are known.
        group: the ranks; by default all.

    Raises:
        LabError: if the warm-up is none, or as long as the run.
    """

    def __init__(  # noqa: PLR0913 - as many as algorithm 1 has
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        warmup_steps: int,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip: tuple[float, float] = (0.01, 10.0),
        coefficient_beta: float = 0.9,
        factor_clip: tuple[float, float] = (0.5, 4.0),
        factor_threshold: float = 0.1,
        total_steps: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "clip": clip}
        super().__init__(params, defaults, warmup_steps=warmup_steps, total_steps=total_steps, group=group)
        self.coefficient_beta, self.factor_clip, self.threshold = coefficient_beta, factor_clip, factor_threshold

    def full_step(self) -> None:
        """Line 2: the original LAMB for T_w steps, and the running mean of c."""
        beta3 = self.coefficient_beta
        for group, parameter, state in self.each():
            if "c_avg" not in state:  # line 1
                state["c_avg"] = parameter.new_zeros(())
                state["factor"] = parameter.new_ones(())
            ratio = update_layer(parameter, group, state)
            state["c_avg"].mul_(beta3).add_(ratio, alpha=1 - beta3)  # line 2: c_avg = β3 c_avg + (1 − β3) c

    def compressed_step(self) -> None:
        """Lines 7 to 14: the momentum averaged by one bit per number, then each layer by its scaled factor."""
        for group, parameter, state, mean in self.compressed_means():  # lines 6 to 11, 14
            if "exp_avg_sq_fresh" not in state:  # line 3: v_Tw stands still, v goes on
                state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()
            self._update_layer(group, parameter, state, mean)

    def _update_layer(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], mean: Tensor) -> None:
        """Lines 13 to 21 for one layer; `mean` is m̄ / √v_Tw."""
        (beta1, beta2), fresh = group["betas"], state["exp_avg_sq_fresh"]
        momentum = mean * self.root(group, state)
        gradient = (momentum - beta1 * state["exp_avg"]).div_(1 - beta1)  # line 15: g = (m − β1 m′) / (1 − β1)
        state["exp_avg"].copy_(momentum)  # line 13: m = m̄
        fresh.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)  # line 16: v = β2 v + (1 − β2) g²
        step = int(state["step"])
        # Line 17: r = max |v_Tw / v|, both without their bias.
        # A number whose variance is 0 on both sides gives 0, not NaN.
        quotient = state["exp_avg_sq"] / fresh.clamp_min(torch.finfo(fresh.dtype).tiny)
        factor = quotient.max() * ((1 - beta2**step) / (1 - beta2**self.warmup_steps))
        layer_r = state["factor"]
        factor = torch.clamp(factor, layer_r * (1 - self.threshold), layer_r * (1 + self.threshold))  # line 18
        layer_r.copy_(factor.clamp_(*self.factor_clip))  # line 19
        coefficient = layer_r * state["c_avg"]  # line 20: c = r c_avg
        # c_avg began at 0: the bias of so many steps is taken out.
        coefficient /= 1 - self.coefficient_beta**self.warmup_steps
        update = (mean / (1 - beta1**step)).add_(parameter, alpha=group["weight_decay"])
        parameter.sub_(update.mul_(coefficient), alpha=group["lr"])  # line 21: x = x − γ c m / √v_Tw
