"""Base of the optimizers that average over the ranks themselves: in full first, later one bit per number.

Each rank's own gradients come in, and nobody else averages them; a parameter without a gradient on this rank counts as
zeros, so that all ranks send the same in every step.

Algorithm 1 of 1-bit Adam and of 1-bit LAMB leave the compression C open. Here it is C[x] = √v × 1bit[x / √v], with the
same frozen variance v on all ranks: the numbers x / √v have one order of magnitude, the momenta x have not. With one
scale for all momenta, a number of tiny variance would receive the noise of the others, divided by nearly nothing: in
100 steps of the lab's `vit_tiny` (lr 0.003, warm-up 20) the largest weight, a bias of the attention's keys, whose
gradient is rounding only, grew to 109, against 1.6 with Adam and 1.9 with this compression. A number that had no
variance when it froze never moves, and has no part in the scale of its block. DeepSpeed multiplies each layer by its
own scale (1-bit LAMB, `scaling_coeff`) and masks out what has no gradient (`exp_avg_mask`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlojz.base.language import refusal
from dlojz.by_hand.ddp import pieces_of, ranks_of
from dlojz.by_hand.optimizers.one_bit import CompressedAllReduce
from dlojz.config.schedules import check_stages, no_effect_note

OWN = "own"
"""Key of a `state_dict` under which the tensors lie that differ from rank to rank."""


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """List all parameters, group after group: their order in a message."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Call the closure that a step was given, if any, with gradients."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def start_moments(parameter: Tensor, state: dict[str, Any]) -> None:
    """Put zeros into a parameter's state, once: `step`, `exp_avg` and `exp_avg_sq`, as torch's Adam names them."""
    # Not empty: taken so far, or loaded from a checkpoint.
    if not state:
        state["step"] = torch.tensor(0.0)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


class Communicating(torch.optim.Optimizer):
    """Optimizer that averages over the ranks itself, first the gradients in full, later compressed momenta.

    Give it the model's own gradients, not averaged: no DDP. Weights must be equal on all ranks at the start.

    Args:
        params: parameters, or groups of them, all trained, in fp32 and on one device.
        defaults: of the groups, `lr` and `betas` among them.
        warmup_steps: steps of the first stage, at least 1.
        total_steps: steps of the run, where they are known.
        group: the ranks; by default all.

    Raises:
        LabError: if the first stage lasts as long as the run, or not at all.
    """

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        warmup_steps: int,
        total_steps: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_stages(warmup_steps, total_steps)
        super().__init__(params, defaults)
        self.warmup_steps, self.total_steps, self.group = warmup_steps, total_steps, group
        self.size = ranks_of(group)[1]
        self.compressor: CompressedAllReduce | None = None
        """The errors of both sides; None before the first compressed step."""
        if self.size == 1:
            # stacklevel 3: the line that makes the optimizer, beyond the subclass.
            warnings.warn(no_effect_note(type(self).__name__), stacklevel=3)

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters, in the order in which a message holds them."""
        return parameters_of(self)

    @property
    def taken(self) -> int:
        """Steps taken so far."""
        # In the first parameter's state, so that it is saved and loaded with the moments.
        state = self.state.get(self.parameters[0])
        return int(state["step"]) if state else 0

    @property
    def compresses(self) -> bool:
        """Whether the next step belongs to the second stage."""
        return self.taken >= self.warmup_steps

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the weights; a collective call. In the first stage gradients are averaged in full."""
        loss = loss_of(closure)
        for _, parameter, state in self.each():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            start_moments(parameter, state)
        self.update()
        return loss

    def update(self) -> None:
        """Take one step of the first or of the second stage."""
        if self.compresses:
            self.compressed_step()
        else:
            self.average_gradients()
            self.full_step()

    def full_step(self) -> None:
        """Take a step of the first stage, on averaged gradients."""
        raise NotImplementedError

    def compressed_step(self) -> None:
        """Take a step of the second stage."""
        raise NotImplementedError

    def each(self) -> Iterator[tuple[dict[str, Any], Tensor, dict[str, Any]]]:
        """Yield every parameter: its group, itself, its state."""
        for group in self.param_groups:
            for parameter in group["params"]:
                yield group, parameter, self.state[parameter]

    def _pieces(self, flat: Tensor) -> Iterator[Tensor]:
        return pieces_of(flat, [parameter.shape for parameter in self.parameters])

    def average_gradients(self) -> None:
        """Put the mean over the ranks into the gradients; a collective call."""
        if self.size == 1:
            return
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in self.parameters if parameter.grad is not None])
        # Who: all ranks. What: every gradient, end to end, (Ψ,) in fp32, summed. How much: 4Ψ bytes.
        dist.all_reduce(flat, group=self.group)
        flat.div_(self.size)
        for parameter, piece in zip(self.parameters, self._pieces(flat), strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(piece)

    @property
    def renewed(self) -> int:
        """How often the variance has been renewed when the ranks compress."""
        return self.warmup_steps

    def root(self, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        """√v + ε, as Adam divides by it, v without the bias that it has since it was last renewed."""
        # Adam's bias correction of v after so many renewals: v / (1 − β2^k).
        correction = 1 - group["betas"][1] ** self.renewed
        return (state["exp_avg_sq"].sqrt() / math.sqrt(correction)).add_(group["eps"])

    def in_roots(self, values: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        """Divide by the root of the variance; 0 where there is no variance."""
        # Without variance √v + ε is ε alone, and the quotient would be noise.
        return (values / self.root(group, state)).masked_fill_(state["exp_avg_sq"] == 0, 0.0)

    def message(self, group: dict[str, Any], state: dict[str, Any], momentum: Tensor) -> Tensor:
        """Choose what this rank sends of a parameter: by default its momentum m = β1 m + (1 − β1) g."""
        return momentum

    def compressed_means(self) -> Iterator[tuple[dict[str, Any], Tensor, dict[str, Any], Tensor]]:
        """Average the messages over the ranks, one bit per number, and count the step; a collective call.

        Yields:
            A parameter's group, itself, its state, and the mean in units of √v, 0 where there is no variance.
        """
        # A generator: each message is taken up as it is made, and no flat copy of all momenta exists.
        means = self._pieces(self._compressor()(self._messages()))
        # `each` has the parameters in their order in the message.
        for (group, parameter, state), mean in zip(self.each(), means, strict=True):
            state["step"] += 1
            # A sign is never 0: a number that was sent as 0 comes back as its scale.
            yield group, parameter, state, mean.masked_fill_(state["exp_avg_sq"] == 0, 0.0)

    def _messages(self) -> Iterator[Tensor]:
        for group, parameter, state in self.each():
            assert parameter.grad is not None
            # lerp(m, g, 1 − β1) = β1 m + (1 − β1) g, a new tensor: `exp_avg` gets the mean instead.
            momentum = torch.lerp(state["exp_avg"], parameter.grad, 1 - group["betas"][0])
            yield self.in_roots(self.message(group, state, momentum), group, state)

    def _compressor(self) -> CompressedAllReduce:
        if self.compressor is None:
            numel = sum(parameter.numel() for parameter in self.parameters)
            self.compressor = CompressedAllReduce(numel, self.parameters[0].device, self.group)
        return self.compressor

    def own_states(self) -> dict[str, Tensor]:
        """Name the tensors that differ from rank to rank: a checkpoint keeps those of every rank."""
        if self.compressor is None or self.size == 1:
            return {}
        return {"worker_error": self.compressor.worker_error, "server_error": self.compressor.server_error}

    @torch.no_grad()
    def take_own_states(self, states: dict[str, Tensor]) -> None:
        """Restore what the same rank of as many ranks has kept; without it, all errors are zero.

        Raises:
            LabError: if it is of another number of ranks.
        """
        # Without states all errors are zero again.
        self.compressor = None
        if not states:
            return
        compressor = self._compressor()
        for name, error in (("worker_error", compressor.worker_error), ("server_error", compressor.server_error)):
            if name not in states or states[name].shape != error.shape:
                raise refusal(
                    en=f"the errors kept are of another number of ranks than {self.size} (or of another model): "
                    f"leave {OWN!r} out of the state, and compression begins anew.",
                    fr=f"les erreurs gardées sont celles d’un autre nombre de rangs que {self.size} (ou d’un "
                    f"autre modèle) : retirez {OWN!r} de l’état, et la compression repart de zéro.",
                )
            error.copy_(states[name])

    def state_dict(self) -> dict[str, Any]:
        """State as torch's, with this rank's own tensors: keep one of every rank."""
        # The base's alone: 0/1 Adam's local moments are in torch's part of the state already.
        errors = Communicating.own_states(self)
        return {**super().state_dict(), OWN: {name: tensor.clone() for name, tensor in errors.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state with this rank's own tensors.

        Raises:
            LabError: if they are of another number of ranks.
        """
        super().load_state_dict({key: value for key, value in state_dict.items() if key != OWN})
        Communicating.take_own_states(self, state_dict.get(OWN, {}))
