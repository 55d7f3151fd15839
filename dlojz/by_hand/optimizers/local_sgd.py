"""Local SGD and DiLoCo: every replica takes H steps alone, then all meet at the mean of their weights.

After a step in which the replicas meet, all hold the same weights, bit for bit; in all others nothing is sent. The
states of the inner optimizer (AdamW's moments) stay each replica's own. With Ψ parameters in fp32: 4Ψ bytes in one
all-reduce after H steps, thus 4Ψ/H per step.

Source: Stich 2018, "Local SGD Converges Fast and Communicates Little" (arXiv 1805.09767), algorithm 1; Lin et al. 2018,
"Don't Use Large Mini-Batches, Use Local SGD" (arXiv 1808.07217); Douillard et al. 2023, "DiLoCo: Distributed Low-
Communication Training of Language Models" (arXiv 2311.08105), algorithm 1.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from dlojz.by_hand.ddp import pieces_of, ranks_of
from dlojz.by_hand.optimizers.communicating import loss_of, parameters_of
from dlojz.config.schedules import check_local_steps, check_stages, meets, single_replica_note

OUTER_RATE = 0.7
OUTER_MOMENTUM = 0.9
"""Of DiLoCo's outer optimizer, SGD with Nesterov's momentum. Source: Douillard et al. 2023 (arXiv 2311.08105)."""
TAKEN = "taken"
"""Key of a `state_dict` under which the number of steps lies."""


class LocalSteps(torch.optim.Optimizer):
    """Base of the two; comes before the inner optimizer among a class's bases.

    Give it the model's own gradients, not averaged: no DDP. Weights must be equal on all ranks at the start.
    """

    inner: ClassVar[tuple[str, ...]] = ()
    """Keys of the states that differ from replica to replica, those of the inner optimizer."""

    def begin(
        self, local_steps: int, total_steps: int | None, group: dist.ProcessGroup | None, warmup_steps: int = 0
    ) -> None:
        """Note when to meet, and which ranks.

        Raises:
            LabError: if the replicas would not meet before the end of the run, or the warm-up is as long as it.
        """
        check_local_steps(local_steps, total_steps)
        if warmup_steps:
            check_stages(warmup_steps, total_steps)
        self.local_steps, self.warmup_steps, self.total_steps = local_steps, warmup_steps, total_steps
        self.group, self.taken = group, 0
        """Steps taken so far."""
        self.rank, self.size = ranks_of(group)
        if self.size == 1:
            warnings.warn(single_replica_note(type(self).__name__), stacklevel=4)

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters, in the order in which a message holds them."""
        return parameters_of(self)

    @property
    def meets(self) -> bool:
        """Whether the replicas meet after the next step."""
        return meets(self.taken, self.local_steps, self.warmup_steps, self.total_steps)

    @property
    def apart(self) -> bool:
        """Whether the replicas hold different weights at this moment."""
        # One replica, or averaged gradients so far: all weights are the same.
        if self.size == 1 or self.taken <= self.warmup_steps:
            return False
        # Of the step that was taken last.
        return not meets(self.taken - 1, self.local_steps, self.warmup_steps, self.total_steps)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of the inner optimizer on this replica alone; where they meet, a collective call."""
        loss = loss_of(closure)
        for parameter in self.parameters:
            if parameter.grad is None:  # of a part that this replica has not used
                parameter.grad = torch.zeros_like(parameter)
        # Asked before `taken` moves on.
        warming_up, meeting = self.taken < self.warmup_steps, self.meets
        if warming_up and self.size > 1:
            # Post-local SGD: in the warm-up the mean gradient replaces this replica's own.
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            for gradient, mean in zip(gradients, self.mean_of(gradients), strict=True):
                gradient.copy_(mean)
        self.go_alone()
        self.taken += 1
        if meeting and not warming_up:
            self.meet()
        return loss

    def go_alone(self) -> None:
        """Take the inner optimizer's step, on this replica's own gradients."""
        # Next in the order of bases: torch's SGD or AdamW.
        super().step()

    def meet(self) -> None:
        """Bring all replicas to one place; a collective call."""
        raise NotImplementedError

    def mean_of(self, tensors: list[Tensor], minus: list[Tensor] | None = None) -> Iterator[Tensor]:
        """Average tensors over the ranks, or their differences to others (`minus`); a collective call."""
        # (Ψ,): one message instead of one per parameter.
        flat = torch.empty(sum(tensor.numel() for tensor in tensors), device=tensors[0].device, dtype=tensors[0].dtype)
        pieces = list(pieces_of(flat, [tensor.shape for tensor in tensors]))
        for number, (piece, tensor) in enumerate(zip(pieces, tensors, strict=True)):
            if minus is None:
                piece.copy_(tensor)
            else:
                # The difference goes straight into the message.
                torch.sub(tensor, minus[number], out=piece)
        if self.size > 1:
            # Who: all ranks. What: a number for each parameter, end to end, (Ψ,) in fp32, summed. How much: 4Ψ bytes.
            dist.all_reduce(flat, group=self.group)
            flat.div_(self.size)
        yield from pieces

    def own_states(self) -> dict[str, Tensor]:
        """Name the tensors that differ from the first replica's: a checkpoint keeps those of every other one."""
        # The first replica's lie in the checkpoint itself.
        if self.rank == 0:
            return {}
        states: dict[str, Tensor] = {}
        for number, parameter in enumerate(self.parameters):
            states |= {f"{name}.{number}": self.state[parameter][name] for name in self.inner if self.state[parameter]}
            if self.apart:
                states[f"weights.{number}"] = parameter.detach()
        return states

    @torch.no_grad()
    def take_own_states(self, states: dict[str, Tensor]) -> None:
        """Restore what the same replica of as many has kept; without it, the first one's state stays."""
        for number, parameter in enumerate(self.parameters):
            for name in self.inner:
                if f"{name}.{number}" in states:
                    self.state[parameter][name].copy_(states[f"{name}.{number}"])
            if f"weights.{number}" in states:
                parameter.copy_(states[f"weights.{number}"])

    def state_dict(self) -> dict[str, Any]:
        """State as torch's, with the number of steps; keep one of every rank, and its weights."""
        return {**super().state_dict(), TAKEN: self.taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state and the number of steps."""
        super().load_state_dict({key: value for key, value in state_dict.items() if key != TAKEN})
        self.taken = int(state_dict[TAKEN])


class LocalSGD(LocalSteps, torch.optim.SGD):
    """SGD on each replica alone, and the mean of the weights after H steps.

    With H = 1 it is SGD on averaged gradients, as the mean of x − γ g_k is x − γ times the mean of g_k, L2 decay
    included: equal in exact arithmetic, and in floating point to rounding. That holds for steps that are linear in the
    gradient, which Adam's are not, and only as long as all replicas start from one x: not for H = 2.

    Args:
        lr: γ, learning rate.
        local_steps: H, steps from one meeting to the next, at least 1.
        warmup_steps: steps at the start in which gradients are averaged (Lin et al.'s post-local SGD); by default none.
        weight_decay: L2.
        total_steps: steps of the run, where they are known: after the last one the replicas meet.
        group: the ranks; by default all.

    Raises:
        LabError: if the replicas would not meet before the end of the run, or the warm-up is as long as it.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        local_steps: int,
        warmup_steps: int = 0,
        weight_decay: float = 0.0,
        total_steps: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self.begin(local_steps, total_steps, group, warmup_steps)

    def meet(self) -> None:
        """x = 1/K Σ x_k."""
        if self.size == 1:
            return
        for parameter, mean in zip(self.parameters, self.mean_of(self.parameters), strict=True):
            parameter.copy_(mean)


class DiLoCo(LocalSteps, torch.optim.AdamW):
    """AdamW on each replica alone, and after H steps one step of SGD with Nesterov's momentum on the mean change.

    Args:
        lr: of the inner AdamW.
        local_steps: H, steps from one meeting to the next, at least 1.
        outer_lr: of the outer step.
        outer_momentum: μ, of the outer step, from 0 to 1.
        betas, eps, weight_decay: of the inner AdamW.
        total_steps: steps of the run, where they are known: after the last one the replicas meet.
        group: the ranks; by default all.

    Raises:
        LabError: if the replicas would not meet before the end of the run.
    """

    inner = ("exp_avg", "exp_avg_sq")

    def __init__(  # noqa: PLR0913 - two optimizers' options
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        local_steps: int,
        outer_lr: float = OUTER_RATE,
        outer_momentum: float = OUTER_MOMENTUM,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        total_steps: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.begin(local_steps, total_steps, group)

    def go_alone(self) -> None:
        """θ_i = InnerOpt(θ_i, g_i); before the first one all note their start, θ."""
        # AdamW has no states before its first step; from then on there is nothing to note, and the zip below is empty.
        starts = [] if self.state else [parameter.detach().clone() for parameter in self.parameters]
        super().go_alone()
        for parameter, start in zip(self.parameters, starts, strict=bool(starts)):
            self.state[parameter] |= {"outer_weights": start, "outer_momentum": torch.zeros_like(start)}

    def meet(self) -> None:
        """Algorithm 1, lines named by what they do: Δ = 1/k Σ (θ − θ_i), then θ by the outer optimizer."""
        states = [self.state[parameter] for parameter in self.parameters]
        outer_gradients = self.mean_of([state["outer_weights"] for state in states], minus=self.parameters)
        for parameter, state, outer in zip(self.parameters, states, outer_gradients, strict=True):
            momentum, theta = state["outer_momentum"], state["outer_weights"]
            momentum.mul_(self.outer_momentum).add_(outer)  # b = μ b + Δ
            outer.add_(momentum, alpha=self.outer_momentum)  # Nesterov: Δ + μ b
            theta.sub_(outer, alpha=self.outer_lr)
            parameter.copy_(theta)
