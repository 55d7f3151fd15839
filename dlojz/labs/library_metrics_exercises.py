"""Lab 12: what `gather_for_metrics` does: all ranks' values in the order of the data, without the samples seen twice.

Layer 6 (labs). Invariant: the answer runs on real ranks; what it must give is computed in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake
from dlojz.labs.rank_judging import by_ranks
from dlojz.labs.verdict import Said

if TYPE_CHECKING:
    from torch import Tensor

EACH = 4
"""Samples of a rank in one batch."""
LAST, WHOLE = "last batch", "whole batch"
LABELS = {
    LAST: Said("what is gathered of the last batch", "ce qui est rassemblé du dernier batch"),
    WHOLE: Said("what is gathered of a batch that is whole", "ce qui est rassemblé d’un batch complet"),
}


def gather_for_metrics(values: Tensor, real: int) -> Tensor:
    """The values of all ranks, one rank after the other, without those that only fill the last batch.

    Args:
        values: of this rank, (samples of a rank, …), as many on each.
        real: how many rows, of all ranks together, are no repetitions.

    Source: Accelerate 1.15, `Accelerator.gather_for_metrics`, which knows `real` from its loader.
    """
    import torch
    import torch.distributed as dist

    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)  # Who: all ranks. What: this rank's values. How much: their bytes.
    return torch.cat(parts)[:real]


def _data(size: int, seed: int) -> Tensor:
    import torch

    return torch.randn(size * EACH, 3, generator=torch.Generator().manual_seed(seed))


def _real(size: int) -> int:
    """Samples of the last batch: the last rank has one of its own, filled up with repetitions of the first."""
    return (size - 1) * EACH + 1


def _filled(size: int, seed: int) -> Tensor:
    """The last batch, as the loader fills it up: the first samples once more."""
    import torch

    data, real = _data(size, seed + 1), _real(size)
    return torch.cat([data[:real], _data(size, seed)[: size * EACH - real]])


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Any]:
    mine = slice(rank * EACH, (rank + 1) * EACH)
    return {
        WHOLE: answer(_data(size, seed)[mine], size * EACH),
        LAST: answer(_filled(size, seed)[mine], _real(size)),
    }


def _expected(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    return {WHOLE: _data(size, seed), LAST: _filled(size, seed)[: _real(size)]}


def _all(values: Tensor) -> list[Tensor]:
    import torch
    import torch.distributed as dist

    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return parts


def _uncut(values: Tensor, real: int) -> Tensor:
    import torch

    return torch.cat(_all(values))


def _cut_by_rank(values: Tensor, real: int) -> Tensor:
    import torch

    parts = _all(values)
    return torch.cat([part[: real // len(parts)] for part in parts])


def _interleaved(values: Tensor, real: int) -> Tensor:
    import torch

    return torch.stack(_all(values), dim=1).flatten(0, 1)[:real]


def _last_ones(values: Tensor, real: int) -> Tensor:
    import torch

    return torch.cat(_all(values))[-real:]


def _summed(values: Tensor, real: int) -> Tensor:
    import torch.distributed as dist

    values = values.clone()
    dist.all_reduce(values)
    return values / dist.get_world_size()


def _stacked(values: Tensor, real: int) -> Tensor:
    import torch

    return torch.stack(_all(values))


GATHER_METRICS = Exercise(
    id="gather-metrics",
    title=Said("a metric over all ranks", "une mesure sur tous les rangs"),
    judge=by_ranks(
        trial=_trial,
        expected=_expected,
        labels=LABELS,
        mistakes=(
            Mistake(
                _uncut,
                Said(
                    "The samples that only fill the last batch are kept: they count twice in the metric. Cut what is "
                    "gathered down to real rows.",
                    "Les échantillons qui ne font que compléter le dernier batch sont gardés : ils comptent deux fois "
                    "dans la mesure. Ne gardez que real lignes de ce qui est rassemblé.",
                ),
            ),
            Mistake(
                _cut_by_rank,
                Said(
                    "You cut every rank's part; but only the last ranks have repetitions, at the end: gather first, "
                    "then cut once.",
                    "Vous coupez la part de chaque rang ; or seuls les derniers rangs ont des répétitions, à la fin : "
                    "rassemblez d’abord, puis coupez une fois.",
                ),
            ),
            Mistake(
                _interleaved,
                Said(
                    "You take one sample of each rank in turn; here each rank has a batch of consecutive samples: one "
                    "rank after the other (torch.cat).",
                    "Vous prenez tour à tour un échantillon de chaque rang ; ici chaque rang a un batch d’échantillons "
                    "consécutifs : un rang après l’autre (torch.cat).",
                ),
            ),
            Mistake(
                _last_ones,
                Said(
                    "You keep the last rows: the repetitions are at the end, so keep the first ones.",
                    "Vous gardez les dernières lignes : les répétitions sont à la fin, gardez donc les premières.",
                ),
            ),
            Mistake(
                _summed,
                Said(
                    "You average over the ranks: a metric needs the values of all samples, one by one (all-gather).",
                    "Vous faites la moyenne sur les rangs : une mesure a besoin des valeurs de tous les échantillons, "
                    "une par une (all-gather).",
                ),
            ),
            Mistake(
                _stacked,
                Said(
                    "The ranks have become a dimension of their own: put their rows end to end (torch.cat), then cut.",
                    "Les rangs forment une dimension à part : mettez leurs lignes bout à bout (torch.cat), puis "
                    "coupez.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: every sample once, in order, on every rank. Accelerate's gather_for_metrics does just that.",
        "Exact : chaque échantillon une fois, dans l’ordre, sur chaque rang. C’est ce que fait gather_for_metrics.",
    ),
    hints=(
        Said(
            "Which collective gives every rank the tensors of all, unchanged? And where are the repetitions, once all "
            "is laid end to end?",
            "Quelle communication donne à chaque rang les tenseurs de tous, inchangés ? Et où sont les répétitions, "
            "une fois le tout mis bout à bout ?",
        ),
        Said(
            "parts = [torch.empty_like(values) for _ in range(dist.get_world_size())], dist.all_gather(parts, values), "
            "torch.cat(parts), then the first real rows.",
            "parts = [torch.empty_like(values) for _ in range(dist.get_world_size())], dist.all_gather(parts, values), "
            "torch.cat(parts), puis les real premières lignes.",
        ),
    ),
)
