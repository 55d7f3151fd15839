"""1-bit Adam: Adam for the first steps; then its variance stands still, and of the momentum one bit is sent.

Layer 2, loads torch. Invariant: the first stage is torch's own AdamW on gradients averaged in full. In the second
`exp_avg_sq` is what the first has left; the momentum and the weights are the same bits on all ranks after every step.

Source: Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed"
(arXiv 2102.02888), algorithm 1, whose lines are named below by what they do; those of its second stage are lines 5 to
13 of algorithm 1 of 1-bit LAMB too (Li et al. 2021, arXiv 2104.06069). It corrects no bias of the moments; torch's Adam
does, and so does the second stage: the momentum's as in every step, the variance's as of the step in which it froze.
What is compressed is the momentum in units of √v: see `dlojz.optim.frozen`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adam import adam

from dlojz.optim.communicating import Communicating
from dlojz.optim.frozen import in_roots, root_of


class OneBitAdam(Communicating):
    """1-bit Adam, with decoupled decay of the weights. How it is used: see `Communicating`.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        warmup_steps: T_w, steps of plain Adam.
        betas: decay of the first and of the second moment, per step.
        eps: added to the root of the variance.
        weight_decay: decoupled, as in AdamW.
        total_steps: steps of the run, where they are known.
        group: the ranks; by default all.

    Raises:
        LabError: if the warm-up is none, or as long as the run.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        warmup_steps: int,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        total_steps: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options, warmup_steps=warmup_steps, total_steps=total_steps, group=group)

    def full_step(self) -> None:
        """The original Adam, for T_w steps: torch's own, so that the first stage is AdamW to the bit."""
        for group in self.param_groups:
            parameters = group["params"]
            states = [self.state[parameter] for parameter in parameters]
            adam(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                decoupled_weight_decay=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def compressed_step(self) -> None:
        """For t ≥ T_w: the momentum averaged by one bit per number, the variance as it froze."""
        means = self.compressed_mean(self._told())  # m̂ = C[m + δ] to the server; m̄ = C[mean + δ̄] to all
        for (group, parameter, state), mean in zip(self.each(), means, strict=True):
            beta1, variance = group["betas"][0], state["exp_avg_sq"]
            state["step"] += 1
            mean.masked_fill_(variance == 0, 0.0)
            torch.mul(mean, self._root(group, state), out=state["exp_avg"])  # m = m̄
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(mean, alpha=group["lr"] / (1 - beta1 ** int(state["step"])))  # x = x − γ m / √v

    def _told(self) -> Iterator[Tensor]:
        """What this rank has to say, parameter by parameter."""
        for group, parameter, state in self.each():
            assert parameter.grad is not None
            momentum = torch.lerp(state["exp_avg"], parameter.grad, 1 - group["betas"][0])  # m = β1 m + (1 − β1) g
            yield in_roots(momentum, state["exp_avg_sq"], self._root(group, state))

    def _root(self, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return root_of(state["exp_avg_sq"], 1 - group["betas"][1] ** self.warmup_steps, group["eps"])
