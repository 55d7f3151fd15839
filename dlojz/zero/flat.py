"""Parameters laid end to end in one tensor, so that N ranks can each own an equal share of them.

Layer 2. Invariant: the parameters are views of `whole`, in their order; `whole` is padded with zeros to a multiple of
the number of ranks, and rank r owns the r-th of its N equal parts, whatever parameter boundaries it cuts through.

Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §5.1; the layout is that of DeepSpeed's stages 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from dlojz.schema import LabError
from dlojz.text import say


def ranks_of(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank's number in a group, and how many ranks it has: (0, 1) where none have been joined."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def give_from_first(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """All ranks take the values of the group's first rank."""
    if ranks_of(group)[1] == 1:
        return
    source = dist.get_global_rank(group, 0) if group is not None else 0
    value = tensor.detach().contiguous()
    # Who: the first rank to all others. What: some weights or a buffer. How much: its bytes, once per run.
    dist.broadcast(value, src=source, group=group)
    tensor.detach().copy_(value)


class FlatWeights:
    """Some parameters in one flat tensor, and this rank's share of it.

    From now on the parameters are views of `whole`: who changes one changes the other.

    Args:
        parameters: of one type, on one device; at least one.
        group: the ranks that share them; by default all.

    Raises:
        LabError: if they are of several types.

    Attributes:
        whole: all weights, shape (size × share_numel,): as many as they are, padded to a multiple of `size`.
        share: this rank's part of `whole`, shape (share_numel,), a view: what its optimizer updates.
    """

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
        self.parameters, self.group = list(parameters), group
        types = sorted({str(parameter.dtype) for parameter in parameters})
        if len(types) > 1:
            raise LabError(
                say(
                    en=f"weights of several types were received ({', '.join(types)}), but a flat tensor has one: cast "
                    "the model first, e.g. model.float(), or put them into units of their own.",
                    fr=f"des poids de plusieurs types ont été reçus ({', '.join(types)}), mais un tenseur à plat n’en "
                    "a qu’un : convertissez d’abord le modèle, par exemple model.float(), ou mettez-les dans des "
                    "unités séparées.",
                )
            )
        self.rank, self.size = ranks_of(group)
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.share_numel = -(-sum(shape.numel() for shape in self.shapes) // self.size)
        self.whole = self.parameters[0].detach().new_zeros(self.size * self.share_numel)
        for parameter, piece in zip(self.parameters, self.pieces(self.whole), strict=True):
            piece.copy_(parameter.detach())
            parameter.data = piece
        give_from_first(self.whole, group)
        self.share = nn.Parameter(self.part_of(self.whole))

    def part_of(self, flat: Tensor) -> Tensor:
        """This rank's part of a flat tensor of the same length as `whole`, shape (share_numel,); a view."""
        return flat[self.rank * self.share_numel : (self.rank + 1) * self.share_numel]

    def pieces(self, flat: Tensor) -> Iterator[Tensor]:
        """A flat tensor cut into views of the parameters' shapes, in their order; the padding is left over."""
        start = 0
        for shape in self.shapes:
            yield flat[start : start + shape.numel()].view(shape)
            start += shape.numel()

    def take_gradients(self) -> Tensor:
        """The parameters' gradients in one flat tensor, padded; they themselves are freed. None counts as zeros."""
        flat = self.share.detach().new_zeros(self.size * self.share_numel)
        for parameter, piece in zip(self.parameters, self.pieces(flat), strict=True):
            if parameter.grad is not None:
                piece.copy_(parameter.grad)
                parameter.grad = None
        return flat
