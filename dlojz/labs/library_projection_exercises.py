"""Lab 12: torch's weights of an attention's projections, laid out for a tensor-parallel rank of Megatron.

Layer 6 (labs). Invariant: pure rearrangement of rows; nothing is computed and nothing is sent.

Shape suffixes: D width, H heads, E width of a head (D = H · E).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said

if TYPE_CHECKING:
    from torch import Tensor

CASES = ((4, 3, 2, 1), (6, 2, 3, 1), (4, 2, 4, 2), (2, 3, 1, 0))
"""Heads, width of a head, ranks, rank; the last on one rank."""


def megatron_qkv(weight: Tensor, heads: int, tp: int, rank: int) -> Tensor:
    """A rank's rows, (3D / tp, D), in the order q, k, v of a head, then of the next head.

    Args:
        weight: `in_proj_weight` of `nn.MultiheadAttention`, (3D, D): all of Q, then all of K, then all of V.
        heads: of the whole layer.
        tp: ranks that share it.
        rank: among them.

    Source: megatron-core 0.16, `transformer/attention.py`, `SelfAttention.get_query_key_value_tensors`.
    """
    width = weight.shape[1]
    by_head_HE = weight.view(3, heads, width // heads, width).transpose(0, 1)
    return by_head_HE.reshape(3 * width, width).chunk(tp)[rank]


def _cases() -> Iterator[tuple[Tensor, int, int, int]]:
    import torch

    for number, (heads, each, tp, rank) in enumerate(CASES):
        generator = torch.Generator().manual_seed(80 + number)
        yield torch.randn(3 * heads * each, heads * each, generator=generator), heads, tp, rank


def _rows(weight: Tensor, heads: int, tp: int, rank: int) -> Tensor:
    return weight.chunk(tp)[rank]


def _three_parts(weight: Tensor, heads: int, tp: int, rank: int) -> Tensor:
    import torch

    return torch.cat([part.chunk(tp)[rank] for part in weight.chunk(3)])


def _strided(weight: Tensor, heads: int, tp: int, rank: int) -> Tensor:
    width = weight.shape[1]
    by_head = weight.view(3, heads, width // heads, width).transpose(0, 1)
    return by_head[rank::tp].reshape(3 * width // tp, width)


def _by_row(weight: Tensor, heads: int, tp: int, rank: int) -> Tensor:
    width = weight.shape[1]
    by_row = weight.view(3, heads, width // heads, width).permute(1, 2, 0, 3)
    return by_row.reshape(3 * width, width).chunk(tp)[rank]


def _columns(weight: Tensor, heads: int, tp: int, rank: int) -> Tensor:
    return megatron_qkv(weight, heads, 1, 0).chunk(tp, dim=1)[rank]


def _whole(weight: Tensor, heads: int, tp: int, rank: int) -> Tensor:
    return megatron_qkv(weight, heads, 1, 0)


def _first(weight: Tensor, heads: int, tp: int, rank: int) -> Tensor:
    return megatron_qkv(weight, heads, tp, 0)


MEGATRON_QKV = Exercise(
    id="megatron-qkv",
    title=Said("from torch to Megatron: Q, K and V", "de torch à Megatron : Q, K et V"),
    judge=by_reference(
        megatron_qkv,
        cases=_cases,
        mistakes=(
            Mistake(
                _rows,
                Said(
                    "You cut torch's rows as they lie: all of Q comes first, so the first rank gets queries, and the "
                    "last one values. Each rank needs the q, k and v of its own heads.",
                    "Vous coupez les lignes de torch telles quelles : Q tout entier vient d’abord, le premier rang "
                    "reçoit donc des requêtes, et le dernier des valeurs. Chaque rang a besoin des q, k et v de ses "
                    "propres têtes.",
                ),
            ),
            Mistake(
                _three_parts,
                Said(
                    "The heads are the right ones, but not their order: you put all of the rank's q first, then all "
                    "its k. Megatron reads q, k, v of a head, then those of the next: no shape would tell.",
                    "Ce sont les bonnes têtes, mais pas le bon ordre : vous mettez d’abord tous les q du rang, puis "
                    "tous ses k. Megatron lit q, k, v d’une tête, puis ceux de la suivante : aucune forme ne le "
                    "signalerait.",
                ),
            ),
            Mistake(
                _strided,
                Said(
                    "You deal the heads out in turn; a rank has consecutive ones: the first heads / tp to rank 0.",
                    "Vous distribuez les têtes à tour de rôle ; un rang en a de consécutives : les heads / tp "
                    "premières au rang 0.",
                ),
            ),
            Mistake(
                _by_row,
                Said(
                    "You interleave row by row: within a head, all rows of q come first, then those of k, then of v.",
                    "Vous entrelacez ligne par ligne : dans une tête, viennent d’abord toutes les lignes de q, puis "
                    "celles de k, puis de v.",
                ),
            ),
            Mistake(
                _columns,
                Said(
                    "You cut along the inputs (dim 1). Heads are outputs, and torch's weight is (outputs, inputs): "
                    "Megatron's column-parallel layer cuts dim 0 of it.",
                    "Vous coupez selon les entrées (dim 1). Les têtes sont des sorties, et le poids de torch est "
                    "(sorties, entrées) : la couche « par colonnes » de Megatron en coupe la dimension 0.",
                ),
            ),
            Mistake(
                _whole,
                Said(
                    "The order is right, but that is the whole layer: keep the rank's part.",
                    "L’ordre est juste, mais c’est la couche entière : ne gardez que la part du rang.",
                ),
            ),
            Mistake(
                _first,
                Said(
                    "Every rank gets the part of rank 0: take that of rank.",
                    "Chaque rang reçoit la part du rang 0 : prenez celle de rank.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: whole heads on each rank, each with its q, k and v. A checkpoint is converted just so.",
        "Exact : des têtes entières sur chaque rang, chacune avec ses q, k et v. C’est ainsi qu’on convertit un "
        "checkpoint.",
    ),
    hints=(
        Said(
            "Give the rows their true dimensions with view: which of Q, K, V; which head; which row of the head. Which "
            "two of them must change places?",
            "Rendez aux lignes leurs vraies dimensions avec view : lequel de Q, K, V ; quelle tête ; quelle ligne de "
            "la tête. Lesquelles doivent changer de place ?",
        ),
        Said(
            "weight.view(3, heads, -1, width).transpose(0, 1), back to (3 · width, width) with reshape, then "
            "chunk(tp)[rank].",
            "weight.view(3, heads, -1, width).transpose(0, 1), retour à (3 · width, width) par reshape, puis "
            "chunk(tp)[rank].",
        ),
    ),
)
