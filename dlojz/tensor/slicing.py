"""Which part of a parameter a rank holds.

Layer 2. Invariant: the ranks' slices, side by side along the dimension that is split, are the whole parameter; a
module says of each of its split parameters which dimension that is (`split_dims`), and nothing else needs to know.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from dlojz.schema import LabError
from dlojz.tensor.axis import TensorAxis
from dlojz.text import say


def share_bounds(length: int, size: int, rank: int) -> tuple[int, int]:
    """First index of a rank's part, and the one after its last: equal parts, the last ones smaller where they must be.

    Example:
        >>> [share_bounds(10, 4, rank) for rank in range(4)]
        [(0, 3), (3, 6), (6, 9), (9, 10)]

    Raises:
        LabError: if a rank would have nothing.
    """
    share = -(-length // size)
    if rank * share >= length:
        raise LabError(
            say(
                en=f"a dimension of {length} leaves nothing to rank {rank} of {size}: use fewer tensor-parallel ranks.",
                fr=f"une dimension de {length} ne laisse rien au rang {rank} sur {size} : prenez moins de rangs de "
                "Tensor Parallelism.",
            )
        )
    return rank * share, min((rank + 1) * share, length)


def own_slice(whole: Tensor, dim: int, axis: TensorAxis) -> nn.Parameter:
    """This rank's slice of a parameter along `dim`, as a parameter with memory of its own."""
    start, end = share_bounds(whole.shape[dim], axis.size, axis.rank)
    return nn.Parameter(whole.detach().narrow(dim, start, end - start).clone())


def split_dims(model: nn.Module) -> dict[str, int]:
    """The split parameters of a model by name, with the dimension along which each is split."""
    found: dict[str, int] = {}
    for path, module in model.named_modules():
        dims: dict[str, int] = getattr(module, "split_dims", {})
        if dims and module.axis.size == 1:
            continue  # a part that the pattern has left whole
        found |= {f"{path}.{name}" if path else name: dim for name, dim in dims.items()}
    return found


def gather_whole(own: Tensor, dim: int, shape: Sequence[int], axis: TensorAxis) -> Tensor:
    """A whole parameter again, of the given shape, from the ranks' slices.

    Who: all ranks of the axis, at the end of a run. What: the slices, padded to the longest. How much: the parameter's
    bytes.
    """
    share = -(-shape[dim] // axis.size)
    padded_shape = list(own.shape)
    padded_shape[dim] = share
    padded = own.new_zeros(padded_shape)
    padded.narrow(dim, 0, own.shape[dim]).copy_(own)
    return axis.all_gather(padded, dim).narrow(dim, 0, shape[dim])
