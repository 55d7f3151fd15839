"""Base of optimizers that average over the ranks themselves, and of those that freeze the variance.

What the optimizers that communicate have in common: the mean of the gradients, the compressed mean, what is kept.

Gradients come to the optimizer as each rank's own, and nobody else averages them; a parameter without a gradient on
this rank counts as zeros, so that all ranks send the same in every step.

A momentum in units of its frozen variance: what the second stage compresses.

A number that had no variance when it froze is never moved, and takes no part in the scale of its block.

Algorithm 1 of 1-bit Adam and of 1-bit LAMB leave the compression C open. Here it is C[x] = √v × 1bit[x / √v], the same
√v on all ranks: what is compressed is the step that each number is to go, which has one order of magnitude for all of
them, and not its momentum, which has not. Under one scale for all, what is said of a number of tiny variance is the
noise of the others, and is then divided by next to nothing: in 100 steps of the lab's `vit_tiny` (lr 0.003, warm-up 20)
the largest weight, a bias of the attention's keys, which has no gradient but rounding, grew to 109, where Adam's is 1.6
and this one's 1.9. DeepSpeed multiplies each layer by a scale of its own (1-bit LAMB, `scaling_coeff`) and masks out
what has no gradient (`exp_avg_mask`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlojz.base.errors import LabError
from dlojz.base.language import say
from dlojz.by_hand.optimizers.one_bit import CompressedAllReduce
from dlojz.by_hand.zero.flat import ranks_of
from dlojz.config.schedules import check_stages, no_effect_note

OWN = "own"
"""Key of a `state_dict` under which the tensors lie that differ from rank to rank."""


class Communicating(torch.optim.Optimizer):
    """An optimizer that averages over the ranks itself, first the gradients in full, later what it has compressed.

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
            warnings.warn(no_effect_note(type(self).__name__), stacklevel=3)

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters, group after group: the order in which they lie in a message."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def taken(self) -> int:
        """Steps taken so far."""
        state = self.state.get(self.parameters[0])
        return int(state["step"]) if state else 0

    @property
    def compresses(self) -> bool:
        """Whether the next step belongs to the second stage."""
        return self.taken >= self.warmup_steps

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update; a collective call. In the first stage gradients are averaged in full."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin()
        self.update()
        return loss

    def update(self) -> None:
        """One step of the stage that it belongs to; where there are more than two, an optimizer has its own."""
        if self.compresses:
            self.compressed_step()
        else:
            self.average_gradients()
            self.full_step()

    def full_step(self) -> None:
        """A step of the first stage, on averaged gradients."""
        raise NotImplementedError

    def compressed_step(self) -> None:
        """A step of the second stage."""
        raise NotImplementedError

    def each(self) -> Iterator[tuple[dict[str, Any], Tensor, dict[str, Any]]]:
        """Every parameter with its group before it and its state behind."""
        for group in self.param_groups:
            for parameter in group["params"]:
                yield group, parameter, self.state[parameter]

    def pieces(self, flat: Tensor) -> Iterator[Tensor]:
        """A flat tensor cut into views of the parameters' shapes, in their order."""
        start = 0
        for parameter in self.parameters:
            yield flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()

    def begin(self) -> None:
        """Give zeros to parameters without a gradient, and in the first step their states to all."""
        for _, parameter, state in self.each():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if not state:
                state["step"] = torch.tensor(0.0)
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def average_gradients(self) -> None:
        """Put the mean over the ranks into the gradients; a collective call."""
        if self.size == 1:
            return
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in self.parameters if parameter.grad is not None])
        # Who: all ranks. What: every gradient, end to end, (Ψ,) in fp32, summed. How much: 4Ψ bytes.
        dist.all_reduce(flat, group=self.group)
        flat.div_(self.size)
        for parameter, piece in zip(self.parameters, self.pieces(flat), strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(piece)

    def compressed_mean(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """The mean over the ranks of tensors of the parameters' shapes, by one bit per number; a collective call."""
        return self.pieces(self._compressor()(tensors))

    def _compressor(self) -> CompressedAllReduce:
        if self.compressor is None:
            numel = sum(parameter.numel() for parameter in self.parameters)
            self.compressor = CompressedAllReduce(numel, self.parameters[0].device, self.group)
        return self.compressor

    def own_states(self) -> dict[str, Tensor]:
        """The tensors that differ from rank to rank, by name: what a checkpoint keeps of every rank."""
        return self._errors()

    def _errors(self) -> dict[str, Tensor]:
        if self.compressor is None or self.size == 1:
            return {}
        return {"worker_error": self.compressor.worker_error, "server_error": self.compressor.server_error}

    def take_own_states(self, kept: dict[str, Tensor]) -> None:
        """Go on with what the same rank of as many ranks has kept; without it, nothing is held back.

        Raises:
            LabError: if it is of another number of ranks.
        """
        self._take_errors(kept)

    @torch.no_grad()
    def _take_errors(self, kept: dict[str, Tensor]) -> None:
        self.compressor = None
        if not kept:
            return
        now = self._compressor()
        for name, own in (("worker_error", now.worker_error), ("server_error", now.server_error)):
            if name not in kept or kept[name].shape != own.shape:
                raise LabError(
                    say(
                        en=f"the errors kept are of another number of ranks than {self.size} (or of another model): "
                        f"leave {OWN!r} out of the state, and compression begins anew.",
                        fr=f"les erreurs gardées sont celles d’un autre nombre de rangs que {self.size} (ou d’un "
                        f"autre modèle) : retirez {OWN!r} de l’état, et la compression repart de zéro.",
                    )
                )
            own.copy_(kept[name])

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with this rank's own tensors: keep one of every rank."""
        return {**super().state_dict(), OWN: {name: tensor.clone() for name, tensor in self._errors().items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, with this rank's own tensors.

        Raises:
            LabError: if they are of another number of ranks.
        """
        super().load_state_dict({key: value for key, value in state_dict.items() if key != OWN})
        self._take_errors(state_dict.get(OWN, {}))


def root_of(variance: Tensor, correction: float, eps: float) -> Tensor:
    """√v + ε, as Adam divides by it.

    Args:
        variance: `exp_avg_sq`, any shape.
        correction: of its bias, 1 − β2^t, of the step in which it was last renewed.
        eps: added to the root.
    """
    return (variance.sqrt() / math.sqrt(correction)).add_(eps)


def in_roots(values: Tensor, variance: Tensor, root: Tensor) -> Tensor:
    """Numbers in units of their root; 0 where there is no variance."""
    return (values / root).masked_fill_(variance == 0, 0.0)
