"""1-bit Adam and 0/1 Adam.

1-bit Adam is torch's AdamW on gradients averaged in full for the first steps; then the variance `exp_avg_sq` is frozen,
and one bit per number of the momentum is sent. Momentum and weights are the same bits on all ranks after every step.

Source: Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed"
(arXiv 2102.02888), algorithm 1, whose lines are named below by what they do; those of its second stage are lines 5 to
13 of algorithm 1 of 1-bit LAMB too (Li et al. 2021, arXiv 2104.06069). It corrects no bias of the moments; torch's Adam
does, and so does the second stage: the momentum's as in every step, the variance's as of the step in which it froze.
What is compressed is the momentum in units of √v: see `dlojz.by_hand.optimizers.communicating`.

0/1 Adam sends one bit from the first steps on, and renews the variance more and more seldom, in the end never.
Variance, moments and weights are the same bits on all ranks after every step that synchronises; between two of these
each rank takes local steps. The steps, from 0 (`dlojz.by_hand.optimizers.sent_bytes`):

    in T_v     gradients averaged in full, a step of Adam: the variance is renewed. At first these are all steps
    in T_u     one bit of each number: of the sum u of this rank's steps since the ranks last met
    in none    a local step; nothing is sent

Source: Lu et al. 2022, "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam" (arXiv 2202.06009),
algorithm 1, whose lines are named below by what they do. What differs: in a step of T_v the momentum takes the averaged
gradient itself, as in DeepSpeed's ZeroOneAdam, so that there is a variance from the first step on; the biases of the
moments are corrected, the variance's by how often it was renewed; and u is compressed in units of √v.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adam import adam

from dlojz.by_hand.optimizers import sent_bytes
from dlojz.by_hand.optimizers.communicating import Communicating


class OneBitAdam(Communicating):
    """1-bit Adam, with decoupled decay of the weights. How it is used: see `Communicating`.

    Args:
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
            # torch's functional Adam takes lists, one entry per parameter.
            states = [self.state[parameter] for parameter in parameters]
            adam(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],  # max_exp_avg_sqs: amsgrad only
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
        # m̂ = C[m + δ] to the server; m̄ = C[mean + δ̄] to all
        for group, parameter, state, mean in self.compressed_means():
            torch.mul(mean, self.root(group, state), out=state["exp_avg"])  # m = m̄
            # Decoupled decay, before the step, as in torch's AdamW.
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(mean, alpha=group["lr"] / (1 - group["betas"][0] ** int(state["step"])))  # x = x − γ m / √v


_LOCAL = ("exp_avg", "moved", "met")
"""States that differ from rank to rank between two synchronisations."""


class ZeroOneAdam(Communicating):
    """0/1 Adam, with decoupled decay of the weights. How it is used: see `Communicating`.

    Args:
        lr: γ, learning rate; constant between two synchronisations, or not.
        warmup_steps: step from which the variance is not renewed any more, and synchronisations become rarer.
        betas: decay of the first and of the second moment, per step (of the second: per renewal).
        eps: added to the root of the variance.
        weight_decay: decoupled, as in AdamW.
        variance_scaler: κ, renewals after which the interval between two of them doubles.
        local_scaler: synchronisations after which the interval between two of them doubles.
        local_clipper: H, the longest interval between two synchronisations, in steps.
        total_steps: steps of the run, where they are known: the last one synchronises.
        group: the ranks; by default all.

    Raises:
        LabError: if the warm-up is none, or as long as the run.
    """

    def __init__(  # noqa: PLR0913 - as many as its two sets of steps have
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        warmup_steps: int,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        variance_scaler: int = sent_bytes.VARIANCE_SCALER,
        local_scaler: int = sent_bytes.LOCAL_SCALER,
        local_clipper: int = sent_bytes.LOCAL_CLIPPER,
        total_steps: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, warmup_steps=warmup_steps, total_steps=total_steps, group=group)
        self.renewals = tuple(sent_bytes.variance_steps(warmup_steps, variance_scaler))
        """T_v."""
        self._local_scaler, self._local_clipper = local_scaler, local_clipper

    @property
    def synchronises(self) -> bool:
        """Whether the next step is in T_u."""
        options = {"scaler": self._local_scaler, "clipper": self._local_clipper}
        return sent_bytes.synchronises(self.taken, self.warmup_steps, self.total_steps, **options)

    def update(self) -> None:
        """Take a step in full, by one bit, or locally."""
        # T_v first: whole gradients are needed to renew the variance, even in a step that would synchronise.
        if self.taken in self.renewals:
            self._adam_step()
        elif self.synchronises:
            self._one_bit_step()
        else:
            self._local_step()

    def own_states(self) -> dict[str, Tensor]:
        """Name the errors and, between two synchronisations, this rank's weights and steps since the last one."""
        states = super().own_states()
        # Just after a synchronisation only the errors differ from rank to rank.
        if not self._apart:
            return states
        states |= {f"{name}.{number}": state[name] for number, name, state in self._numbered()}
        states |= {f"weights.{number}": parameter.detach() for number, parameter in enumerate(self.parameters)}
        # Python floats: in fp64 the sums of γ come back as they were.
        return states | {"rates": torch.tensor([state["rates"] for _, _, state in self.each()], dtype=torch.float64)}

    @torch.no_grad()
    def take_own_states(self, states: dict[str, Tensor]) -> None:
        """Restore what the same rank of as many ranks has kept.

        Raises:
            LabError: if it is of another number of ranks.
        """
        super().take_own_states({name: states[name] for name in ("worker_error", "server_error") if name in states})
        if "rates" not in states:
            return
        for (_, parameter, state), rates in zip(self.each(), states["rates"], strict=True):
            state["rates"] = float(rates)
            # Made first, so that the loop below finds them; their values come from the checkpoint.
            state["met"], state["moved"] = parameter.clone(), torch.zeros_like(parameter)
        for number, name, state in self._numbered():
            state[name].copy_(states[f"{name}.{number}"])
        for number, parameter in enumerate(self.parameters):
            parameter.copy_(states[f"weights.{number}"])

    @property
    def _apart(self) -> bool:
        """Whether the ranks have gone local steps since they last met."""
        return "met" in self.state.get(self.parameters[0], {})

    def _numbered(self) -> Iterator[tuple[int, str, dict[str, Any]]]:
        for number, (_, _, state) in enumerate(self.each()):
            yield from ((number, name, state) for name in _LOCAL)

    @property
    def renewed(self) -> int:
        """How often the variance has been renewed so far."""
        return sum(step < self.taken for step in self.renewals)

    def _adam_step(self) -> None:
        """t ∈ T_v: the full-precision all-reduce of g, then v = β2 v + (1 − β2) ḡ², and Adam's step with both."""
        renewed = self.renewed + 1  # this one included
        self.average_gradients()
        for group, parameter, state in self.each():
            (beta1, beta2), gradient = group["betas"], parameter.grad
            state["step"] += 1
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            state["exp_avg"].lerp_(gradient, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            root = (state["exp_avg_sq"].sqrt() / (1 - beta2**renewed) ** 0.5).add_(group["eps"])
            parameter.addcdiv_(state["exp_avg"], root, value=-self._rate(group, state))

    def _one_bit_step(self) -> None:
        """t ∈ T_u: the one-bit all-reduce of u; it says the momentum, and where to go from where all last met."""
        for group, parameter, state, mean in self.compressed_means():  # ū / √v
            # Σ γ over the local steps and this one, as ū is a sum of γ m.
            rates = state.pop("rates", 0.0) + self._rate(group, state)
            torch.mul(mean, self.root(group, state), out=state["exp_avg"]).div_(rates)  # m = ū / Σ γ
            # Local steps have moved this rank's weights: back to those that all ranks had.
            if (met := state.pop("met", None)) is not None:
                parameter.copy_(met)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(mean)  # x = x′ − ū / √v
            state.pop("moved", None)  # u = 0, t′ = t

    def message(self, group: dict[str, Any], state: dict[str, Any], momentum: Tensor) -> Tensor:
        """Send u, the sum of γ m since the ranks last met."""
        # Of the step that `compressed_means` counts only later.
        momentum.mul_(self._rate(group, state, 1))
        return momentum.add_(state["moved"]) if "moved" in state else momentum  # u = u + γ m

    def _local_step(self) -> None:
        """Neither: m = β1 m + (1 − β1) g, x = x − γ m / √v, u = u + γ m, on this rank alone."""
        for group, parameter, state in self.each():
            # First local step since the ranks met: note the weights that all have.
            if "met" not in state:
                state["met"], state["moved"], state["rates"] = parameter.clone(), torch.zeros_like(parameter), 0.0
            state["step"] += 1
            state["exp_avg"].lerp_(parameter.grad, 1 - group["betas"][0])
            rate = self._rate(group, state)
            state["moved"].add_(state["exp_avg"], alpha=rate)
            state["rates"] += rate
            for weights in (parameter, state["met"]):  # they decay wherever they are
                weights.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(self.in_roots(state["exp_avg"], group, state), alpha=rate)

    def _rate(self, group: dict[str, Any], state: dict[str, Any], ahead: int = 0) -> float:
        """γ of this step, or of a step ahead, the momentum's bias corrected."""
        return float(group["lr"] / (1 - group["betas"][0] ** (int(state["step"]) + ahead)))
