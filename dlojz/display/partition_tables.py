"""Tables of `dlojz partition`: the stages of a cut, the methods side by side, what each unit of weight makes uneven."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING

from dlojz.base.language import decimal, say
from dlojz.base.table import Table, visible
from dlojz.display.style import label
from dlojz.display.tables import phrase
from dlojz.pipeline.partition import Partition, total_time

if TYPE_CHECKING:
    from dlojz.pipeline.partition import BlockWeights


def title(name: str) -> str:
    """Translate a method or a unit."""
    return label("cut", name)


def headline(model: str, weighed: BlockWeights, stages: int) -> str:
    """Say what is cut, into how many stages, and what is balanced."""
    blocks, model = len(weighed.kinds), visible(model)
    return phrase("headline of a cut", model=model, blocks=blocks, stages=stages, weight=weighed.title())


def stages_table(cut: Partition, weighed: BlockWeights) -> Table:
    """List the stages: blocks, load, share of the mean, what the blocks are."""
    head = phrase.titles("columns of stages")
    rows = []
    mean = sum(cut.loads) / cut.num_stages
    for stage, (block_range, load) in enumerate(zip(cut.stages, cut.loads, strict=True)):
        # Neighbouring blocks of one kind are counted: "12 × encoder".
        kinds = ", ".join(
            kind if count == 1 else f"{count} × {kind}"
            for kind, count in ((kind, len(list(run))) for kind, run in groupby(weighed.kinds[block_range]))
        )
        heaviest = "◀" if load == cut.bottleneck else ""
        span = (
            f"{block_range.start}"
            if block_range.stop == block_range.start + 1
            else f"{block_range.start}–{block_range.stop - 1}"
        )
        ratio = decimal(load / mean if mean else 1.0, 2)
        rows.append((str(stage), span, weighed.text(load), ratio, heaviest, kinds))
    return Table(head, tuple(rows), align="lrrrl", whole=1)


def methods_table(cuts: Mapping[str, Partition], weighed: BlockWeights, micro_batches: int) -> Table:
    """List each method's bottleneck and step over those of the first, which is the optimum."""
    best = next(iter(cuts.values()))
    head = phrase.titles("columns of methods", micro_batches=micro_batches)
    shortest = total_time(best.loads, micro_batches)
    rows = tuple(
        (
            title(name),
            weighed.text(cut.bottleneck),
            decimal(cut.bottleneck / best.bottleneck if best.bottleneck else 1.0, 2),
            decimal(cut.imbalance, 2),
            "× " + decimal(total_time(cut.loads, micro_batches) / shortest if shortest else 1.0, 2),
            " ".join(str(block_range.stop - block_range.start) for block_range in cut.stages),
        )
        for name, cut in cuts.items()
    )
    return Table(head, rows, align="lrrrrl", whole=1)


def legend(micro_batches: int) -> str:
    """Explain the signs of the two tables."""
    return phrase("legend of the cuts", micro_batches=micro_batches)


def units_table(imbalances: Mapping[str, Mapping[str, float]]) -> Table:
    """List the imbalance of the cut by each unit, in each unit."""
    units = next(iter(imbalances.values()))
    columns = (say(en=f"imbalance in {title(unit)}", fr=f"déséquilibre en {title(unit)}") for unit in units)
    rows = tuple(
        (title(cut_unit), *(decimal(imbalance, 2) for imbalance in imbalance_by_unit.values()))
        for cut_unit, imbalance_by_unit in imbalances.items()
    )
    return Table((say(en="cut by", fr="découpage selon"), *columns), rows, whole=1)
