"""A unit of ZeRO stage 3: weights that are whole while they are needed, and a share of them at all times.

Layer 2. Invariant: the share, in the weights' own type, is the truth; what is gathered is a copy of all shares, gone
when it is freed. Freed parameters have no elements (as in DeepSpeed), so that none is used by mistake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlojz.zero.base import refuse
from dlojz.zero.flat import FlatWeights


class ShardedWeights(FlatWeights):
    """The weights of one unit.

    Args:
        parameters, group: see `FlatWeights`.
        compute_dtype: type in which they are gathered; by default their own.

    Attributes:
        whole: all weights in `compute_dtype`; while they are freed, a tensor without memory.
        share: this rank's part of them in their own type, shape (share_numel,).
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        compute_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(parameters, group)
        self.share = nn.Parameter(self.share.detach().clone())
        self.whole = torch.empty_like(self.whole, dtype=compute_dtype or self.whole.dtype)
        self._num_bytes = self.whole.untyped_storage().nbytes()
        self._nothing = self.whole.new_empty(0)
        self._arriving: Any = None
        self._gathered = True
        self.free()

    def start_gather(self) -> None:
        """Ask for the whole weights, unless they are there or on their way; returns at once."""
        if self._gathered or self._arriving is not None:
            return
        # Autograd has kept views of this memory in forward; given back in the same place, they are right for backward.
        self.whole.untyped_storage().resize_(self._num_bytes)
        mine = self.share.detach().to(self.whole.dtype)
        if self.size == 1:
            self.whole.copy_(mine)
            self._gathered = True
            self._show()
            return
        # Who: all N ranks. What: each gives its share of one unit's weights, shape (padded elements / N,), and has all
        # of them afterwards, shape (padded elements,). How much: 4 bytes per element (2 in bf16), 4Ψ for all units, for
        # forward and once more for backward; a rank sends (N − 1) / N of them.
        self._arriving = dist.all_gather_into_tensor(self.whole, mine, group=self.group, async_op=True)

    def gather(self) -> None:
        """Have the whole weights: ask for them if need be, and wait."""
        self.start_gather()
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving, self._gathered = None, True
            self._show()

    def free(self) -> None:
        """Give back the memory of the whole weights; the share stays."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
        self._gathered = False
        for parameter in self.parameters:
            parameter.data = self._nothing
        self.whole.untyped_storage().resize_(0)

    def _show(self) -> None:
        for parameter, piece in zip(self.parameters, self.pieces(self.whole), strict=True):
            parameter.data = piece

    def gathered_share(self) -> Tensor:
        """All weights in their own type, shape (size × share_numel,), in memory of their own; a collective call."""
        mine = self.share.detach()
        if self.size == 1:
            return mine.clone()
        whole = mine.new_empty(self.size * self.share_numel)
        # Who: all N ranks. What and how much: as above, in the weights' own type; at the end of a run only.
        dist.all_gather_into_tensor(whole, mine, group=self.group)
        return whole


def default_units(module: nn.Module) -> list[nn.Module]:
    """The blocks of a model that has `blocks`, else its children, those of lists among them; else the module itself."""
    blocks = getattr(module, "blocks", None)
    if isinstance(blocks, nn.ModuleList):
        return list(blocks)
    units: list[nn.Module] = []
    for child in module.children():
        # A list is never called itself, so that nothing would gather its weights.
        listed = isinstance(child, nn.ModuleList | nn.ModuleDict)
        units += list(child.children()) if listed else [child]
    return units or [module]


def parameters_of_units(
    module: nn.Module, units: Sequence[nn.Module]
) -> tuple[list[tuple[nn.Module, list[nn.Parameter]]], list[nn.Parameter]]:
    """Each unit with the trainable parameters that are its alone, units without any left out; and all others.

    Raises:
        LabError: if a unit is not part of the module.
    """
    parts = set(module.modules())
    for unit in units:
        if unit not in parts:
            name, whole = type(unit).__name__, type(module).__name__
            refuse(
                en=f"the unit {name} is not part of {whole}: give submodules of it, in the order of the forward pass.",
                fr=f"l’unité {name} ne fait pas partie de {whole} : donnez-en des sous-modules, dans l’ordre de la "
                "passe avant.",
            )
    # A parameter of two units (a tied embedding, say) would be missing in one of them when the other frees it.
    owners = Counter(parameter for unit in units for parameter in unit.parameters())
    found = [(unit, [p for p in unit.parameters() if p.requires_grad and owners[p] == 1]) for unit in units]
    others = [p for p in module.parameters() if p.requires_grad and owners[p] != 1]
    return [(unit, parameters) for unit, parameters in found if parameters], others
