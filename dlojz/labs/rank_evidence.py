"""What ranks gave, beside what they should have given.

Layer 6 (labs), pure. Invariant: one piece of evidence is one result on every rank, compared up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dlojz.labs.verdict import Said

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 1e-4
"""Relative; the inputs are of order one in fp32, and the order of a sum changes no more than 1e-6 of it."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One result, on every rank.

    Args:
        name: what it is; one that begins with `gradient` belongs to the backward pass.
        label: how sentences call it.
        given: what each rank gave.
        expected: what each rank should hold.
        local: what each rank holds without any communication; empty where that says nothing.
        whole: the tensor of which `expected` are shards, or None.
        bias: what is to be added once over all ranks, or None.
    """

    name: str
    label: Said
    given: Sequence[Any]
    expected: Sequence[Tensor]
    local: Sequence[Tensor] = field(default=())
    whole: Tensor | None = None
    bias: Tensor | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.expected)

    @property
    def backward(self) -> bool:
        """Whether this belongs to the backward pass."""
        return self.name.startswith("gradient")

    def right(self, rank: int) -> bool:
        """Whether this rank's value is the expected one."""
        return same(self.given[rank], self.expected[rank])


def same(value: Any, right: Tensor) -> bool:
    """Equal up to rounding, in shape too."""
    import torch

    if not isinstance(value, torch.Tensor) or value.shape != right.shape:
        return False
    value, right = value.double(), right.double()
    scale = right.abs().max().clamp(min=1.0) if right.numel() else 1.0
    return bool(((value - right).abs() <= TOLERANCE * scale).all())


def gathered(
    given: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Tensor]], **more: Any
) -> Iterator[Evidence]:
    """Evidence for each result, in the order of the first rank's expected ones.

    Args:
        given: by rank, what it gave by name.
        expected: by rank, what it should hold by name.
        more: `local` (by rank, by name), `whole`, `bias` and `labels` (by name), as far as there are any.
    """
    for name in expected[0]:
        local = [rank[name] for rank in more.get("local") or () if name in rank]
        yield Evidence(
            name=name,
            label=(more.get("labels") or {}).get(name, Said(f"the {name}", f"« {name} »")),
            given=[rank.get(name) for rank in given],
            expected=[rank[name] for rank in expected],
            local=local,
            whole=(more.get("whole") or {}).get(name),
            bias=(more.get("bias") or {}).get(name),
        )
