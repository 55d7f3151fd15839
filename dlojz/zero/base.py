"""What the three stages have in common: how they are used, and what they refuse.

Layer 2. Invariant: the same training loop for every stage; what a stage shards shows nowhere in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn

from dlojz.schema import LabError
from dlojz.text import say
from dlojz.zero.elementwise import MakeOptimizer, check_elementwise
from dlojz.zero.flat import FlatWeights, give_from_first, ranks_of

__all__ = ["MakeOptimizer", "Zero"]


class Zero(nn.Module):
    """A model whose training states are shared out among the ranks of a group.

    A training step is `loss = criterion(zero(inputs), targets)`, `zero.backward(loss)`, `zero.step()`. To accumulate
    over m micro-batches, call `zero.backward(loss / m)` for each, then `zero.step()` once. `step` also forgets the
    gradients. Rank 0's weights and buffers are given to all ranks at the start; buffers (BatchNorm's statistics) then
    stay each rank's own. Frozen parameters stay whole on every rank.

    Args:
        module: the whole model; freeze parameters before it is wrapped. Wrapped again, it obeys the last wrapper.
        make_optimizer: makes the optimizer of the tensors it is given, which are this rank's shares:
            `lambda shares: torch.optim.AdamW(shares, lr=1e-3)`. It is first tried on a few numbers.
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
            refuse(
                en=f"no parameter of {name} needs a gradient: set requires_grad=True on those to train.",
                fr=f"aucun paramètre de {name} ne demande de gradient : mettez requires_grad=True pour en entraîner.",
            )
        check_elementwise(make_optimizer, self.trainable[0].device)
        former = module.__dict__.pop("_zero", lambda: None)()
        if former is not None:  # a cell of a notebook is run twice
            former.release()
        for parameter in self.trainable:
            parameter.grad = None
        self.flats: list[FlatWeights] = []
        self._handles: list[Any] = []
        module.__dict__["_zero"] = weakref.ref(self)
        sharded = set(self.trainable)
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor not in sharded:
                give_from_first(tensor, group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Add one micro-batch's gradient, as the stage does it."""
        raise NotImplementedError

    def step(self) -> None:
        """Update the weights, on every rank, and forget the gradients.

        Raises:
            LabError: if no backward pass came before.
        """
        raise NotImplementedError

    @property
    def shares(self) -> list[Tensor]:
        """This rank's shares: what its optimizer updates, flat tensors."""
        return [flat.share for flat in self.flats]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters by name, the same on every rank; call it on all ranks, for stage 3 has to gather them."""
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach()

    def release(self) -> None:
        """Give the module back as it was, whole and without hooks; call it on all ranks."""
        for handle in self._handles:
            handle.remove()

    def _check_gradients(self) -> None:
        if all(share.grad is None for share in self.shares):
            refuse(
                en="step() found no gradient: call backward(loss) first.",
                fr="step() n’a trouvé aucun gradient : appelez d’abord backward(loss).",
            )


def refuse(*, en: str, fr: str) -> NoReturn:
    """Refuse in one sentence."""
    raise LabError(say(en=en, fr=fr))
