"""What a checkpoint keeps of each parameter, and how it is put back, whatever lies where.

Layer 3. Invariant: what is kept are whole tensors in fp32, by the names that one process uses; so that what one layout
has kept, any other can take its share of. AdamW's count of updates is kept once: it is the number of steps, but for
DeepSpeed's stage 0 in bf16, which makes an update of zeros at its start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dlojz.zero.flat import FlatWeights

WEIGHTS: Final = "weights"
MOMENTS: Final[Mapping[str, tuple[str, ...]]] = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "lamb": ("exp_avg", "exp_avg_sq"),
    "one_bit_adam": ("exp_avg", "exp_avg_sq"),
    "one_bit_lamb": ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh", "c_avg", "factor"),
    "zero_one_adam": ("exp_avg", "exp_avg_sq"),
    "local_sgd": (),
    "diloco": ("exp_avg", "exp_avg_sq", "outer_weights", "outer_momentum"),
}
"""Tensors that optimizers keep for each parameter, by their keys; DiLoCo's two first are the first replica's."""
SCALARS: Final = ("c_avg", "factor")
"""Those of them that are one number; the others are of the parameter's shape."""


class Source(Protocol):
    """Where whole tensors come from; `dlojz.checkpoint.reading.Source` is one."""

    @property
    def updates(self) -> int:
        """Updates that the optimizer counts."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""

    def names(self, kind: str) -> list[str]:
        """Names of all tensors of a kind, without the kind."""

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, on the CPU."""

    def replicas(self) -> int:
        """How many replicas' buffers there are."""


def begun(optimizer: Any, updated: Tensor, kinds: tuple[str, ...], updates: int) -> dict[str, Tensor]:
    """The states that an optimizer makes for a tensor in its first step, as zeros, with the count of a later one.

    Source: torch 2.13, `optim/adam.py`, `_init_group`; `optim/sgd.py`.
    """
    state: dict[str, Tensor] = optimizer.state[updated]
    for kind in kinds:
        if kind not in state:
            like = updated.new_zeros(()) if kind in SCALARS else updated
            state[kind] = torch.zeros_like(like, memory_format=torch.preserve_format).detach()
    if "exp_avg" in kinds:
        fused = getattr(optimizer, "defaults", {}).get("fused")  # its kernel reads the count where it computes
        state["step"] = torch.tensor(float(updates), device=updated.device if fused else "cpu")
    return state


def counted(optimizer: Any) -> Tensor | None:
    """How many updates Adam has counted, of any tensor as of all; None where nothing is counted."""
    states = getattr(optimizer, "optimizer", optimizer).state.values()
    return next((torch.tensor(int(state["step"])) for state in states if "step" in state), None)


def as_laid(value: Tensor, like: Tensor) -> Tensor:
    """A rank's part of a state as its parameter lies: as a DTensor, where that is one."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor):
        return value
    return DTensor.from_local(
        value, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def local_part(whole: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of a whole tensor that lies as `like`; nothing is sent.

    A dimension that is split by both axes (FSDP2 over tensor parallelism) is split by the last axis first.
    """
    if not isinstance(like, DTensor):
        return whole
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis in reversed(range(like.device_mesh.ndim)):
        dim = getattr(like.placements[axis], "dim", None)
        if dim is None:
            continue  # whole on each rank of the axis
        length, ranks = whole.shape[dim], like.device_mesh.size(axis)
        share = -(-length // ranks)
        start = min(coordinate[axis] * share, length)
        whole = whole.narrow(dim, start, min(share, length - start))
    return whole


def put(own: Tensor, whole: Tensor) -> None:
    """Copy into a rank's part of a tensor what it holds of the whole."""
    target = own.detach()
    target = target.to_local() if isinstance(target, DTensor) else target
    target.copy_(local_part(whole, own))


def overlap(flat: FlatWeights, number: int, rank: int) -> tuple[slice, slice]:
    """Where a parameter of a flat tensor and a rank's share meet: in the parameter, flat, and in the share."""
    start = sum(shape.numel() for shape in flat.shapes[:number])
    first = rank * flat.share_numel
    low = max(start, first)
    high = max(low, min(start + flat.shapes[number].numel(), first + flat.share_numel))
    return slice(low - start, high - start), slice(low - first, high - first)


def gather_piece(flat: FlatWeights, number: int, own: Tensor) -> Tensor:
    """One parameter's part of a flat tensor, whole on every rank, from the ranks' shares; a collective call.

    Args:
        flat: how the parameters lie.
        number: of the parameter.
        own: this rank's share of a tensor that lies as the weights do: weights or a moment.
    """
    shape = flat.shapes[number]
    piece = own.new_empty(shape.numel())
    for rank in range(flat.size):
        of_piece, of_share = overlap(flat, number, rank)
        if of_piece.start == of_piece.stop:
            continue
        if rank == flat.rank:
            piece[of_piece] = own.detach()[of_share]
        if flat.size > 1:
            source = rank if flat.group is None else dist.get_global_rank(flat.group, rank)
            # Who: all ranks that share. What: the part of one parameter that one of them holds. How much: its bytes;
            # a sum over the ranks, of zeros but for one, would do as well, but turns -0 into 0.
            dist.broadcast(piece[of_piece], src=source, group=flat.group)
    return piece.view(shape)


def put_piece(flat: FlatWeights, number: int, own: Tensor, whole: Tensor) -> None:
    """Copy into this rank's share what it holds of one parameter; nothing is sent."""
    of_piece, of_share = overlap(flat, number, flat.rank)
    own.detach()[of_share].copy_(whole.reshape(-1)[of_piece])
