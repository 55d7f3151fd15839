"""Flat weights: parameters in one tensor that can be sharded, and the base of the ZeRO stages.

The parameters are views of `whole`, in their order; `whole` is padded with zeros to a multiple of the number of ranks,
and rank r owns the r-th of its N equal parts, across parameter boundaries. Source: Rajbhandari et al. 2020 (arXiv
1910.02054), §5.1; the layout is that of DeepSpeed's stages 1 and 2.

Only an elementwise optimizer can work on a share. SGD, Adam and their like update every number from its own gradient
and history. LAMB and Adafactor scale a layer's update by a norm over the whole layer, Muon and Shampoo need its matrix,
L-BFGS the whole gradient: on a share they would silently compute something else. `check_elementwise` judges by what an
optimizer does, not by its name, so that it holds for optimizers written in a notebook.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlojz.base.language import Sentences
from dlojz.by_hand.ddp import give_from_first, pieces_of, ranks_of

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")


class FlatWeights:
    """Parameters in one flat tensor, of which they become views, and this rank's share of it.

    Args:
        parameters: of one type, on one device; at least one.
        group: the ranks that share them; by default all.

    Raises:
        LabError: if they are of several types.

    Attributes:
        whole: all weights, padded to a multiple of `size`, shape (size × share_numel,).
        share: this rank's part of `whole`, shape (share_numel,), a view: what its optimizer updates.
    """

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
        self.parameters, self.group = list(parameters), group
        types = sorted({str(parameter.dtype) for parameter in parameters})
        if len(types) > 1:
            raise phrase.refused("several types", types=", ".join(types))
        self.rank, self.size = ranks_of(group)
        self.shapes = [parameter.shape for parameter in self.parameters]
        # ⌈Ψ / N⌉: the padding lies at the end, in the last share.
        self.share_numel = -(-sum(shape.numel() for shape in self.shapes) // self.size)
        self.whole = self.parameters[0].detach().new_zeros(self.size * self.share_numel)
        for parameter, piece in zip(self.parameters, self.pieces(self.whole), strict=True):
            piece.copy_(parameter.detach())
            # Now the module computes with views of `whole`.
            parameter.data = piece
        give_from_first(self.whole, group)
        # A view: an update of the share changes `whole`, and with it this rank's parameters.
        self.share = nn.Parameter(self.part_of(self.whole))

    def part_of(self, flat: Tensor) -> Tensor:
        """Return this rank's part of a flat tensor as long as `whole`, shape (share_numel,); a view."""
        return flat[self.rank * self.share_numel : (self.rank + 1) * self.share_numel]

    def pieces(self, flat: Tensor) -> Iterator[Tensor]:
        """Cut a flat tensor into views of the parameters' shapes, in their order; the padding is left over."""
        return pieces_of(flat, self.shapes)

    def take_gradients(self) -> Tensor:
        """Move the parameters' gradients into one flat tensor, padded; missing ones count as zeros."""
        flat = self.share.detach().new_zeros(self.size * self.share_numel)
        for parameter, piece in zip(self.parameters, self.pieces(flat), strict=True):
            if parameter.grad is not None:
                piece.copy_(parameter.grad)
                parameter.grad = None
        return flat


MakeOptimizer = Callable[[Sequence[Tensor]], torch.optim.Optimizer]
_SIDE = 6
_CUT = 13
_STEPS = 3


def check_elementwise(make_optimizer: MakeOptimizer, device: torch.device) -> None:
    """Check that an optimizer is elementwise: a small matrix, whole, then flat and cut in two, gives the same numbers.

    Args:
        device: where it will work.

    Raises:
        LabError: if it is no torch optimizer, or one that cannot be sharded.
    """
    matrix = torch.randn(_SIDE, _SIDE, generator=torch.Generator().manual_seed(0))
    flat = matrix.flatten()
    # The second part is far larger than the first: a norm over the whole is not that of either part.
    flat[_CUT:] *= 100
    # 6 × 6 numbers as one matrix, then as two vectors of 13 and 23, cut in the middle of a row.
    uncut_weights, name = _updated([flat.view(_SIDE, _SIDE)], make_optimizer, device)
    try:
        cut_weights, _ = _updated([flat[:_CUT], flat[_CUT:]], make_optimizer, device)
    except ValueError:  # Muon takes matrices only
        _refuse(name)
    if not torch.allclose(uncut_weights, cut_weights, rtol=1e-4, atol=1e-6):
        _refuse(name)


def _updated(weights: list[Tensor], make_optimizer: MakeOptimizer, device: torch.device) -> tuple[Tensor, str]:
    """The weights after a few steps, in one flat tensor, and the optimizer's name."""
    parameters = [weight.clone().to(device).requires_grad_() for weight in weights]
    optimizer: Any = make_optimizer(parameters)
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise phrase.refused("no optimizer", name=name)
    for step in range(1, _STEPS + 1):
        for parameter in parameters:
            # Another gradient in each step, itself elementwise: whole and cut weights get the same numbers.
            parameter.grad = (parameter.detach() * step).sin()
        try:
            optimizer.step()
        except TypeError:  # L-BFGS: step() wants a closure that computes the whole loss again
            _refuse(name)
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters]), name


def _refuse(name: str) -> NoReturn:
    raise phrase.refused("not elementwise", name=name)


class Zero(nn.Module):
    """Model whose training states are sharded over the ranks of a group.

    A training step is `loss = criterion(zero(inputs), targets)`, `zero.backward(loss)`, `zero.step()`. To accumulate
    over m micro-batches, call `zero.backward(loss / m)` for each, then `zero.step()` once. `step` also frees the
    gradients. Rank 0's weights and buffers are copied to all ranks at the start; buffers (BatchNorm's statistics) then
    stay each rank's own. Frozen parameters stay whole on every rank.

    Args:
        module: the whole model; freeze parameters before it is wrapped. Wrapped again, it obeys the last wrapper.
        make_optimizer: makes the optimizer of this rank's shares: `lambda shares: torch.optim.AdamW(shares, lr=1e-3)`.
            It is first tried on a few numbers.
        group: the ranks that share; by default all. One process communicates nothing.

    Raises:
        LabError: if nothing can be trained, or the optimizer cannot be sharded.
    """

    optimizer: Any

    def __init__(
        self, module: nn.Module, make_optimizer: MakeOptimizer, *, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.module, self.group = module, group
        self.rank, self.size = ranks_of(group)
        self.trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not self.trainable:
            name = type(module).__name__
            raise phrase.refused("no parameter", name=name)
        check_elementwise(make_optimizer, self.trainable[0].device)
        previous_zero = module.__dict__.pop("_zero", lambda: None)()
        if previous_zero is not None:  # a cell of a notebook is run twice
            previous_zero.release()
        for parameter in self.trainable:
            # Gradients of an earlier use would count in the first step.
            parameter.grad = None
        self.flats: list[FlatWeights] = []
        self._handles: list[Any] = []
        # Weak: the module keeps no ZeRO model alive.
        module.__dict__["_zero"] = weakref.ref(self)
        # Frozen weights and buffers; the others are sent as flat tensors.
        sharded = set(self.trainable)
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor not in sharded:
                give_from_first(tensor, group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Add one micro-batch's gradient."""
        raise NotImplementedError

    def step(self) -> None:
        """Update the weights, on every rank, and free the gradients.

        Raises:
            LabError: if no backward pass came before.
        """
        raise NotImplementedError

    @property
    def shares(self) -> list[Tensor]:
        """This rank's shares, flat tensors that its optimizer updates."""
        return [flat.share for flat in self.flats]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole parameters by name, the same on every rank; collective, as stage 3 has to gather them."""
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach()

    def release(self) -> None:
        """Restore the module, whole and without hooks; a collective call."""
        for handle in self._handles:
            handle.remove()

    def _check_gradients(self) -> None:
        if self.shares[0].grad is None:  # backward gives all shares theirs
            raise phrase.refused("no gradient")
