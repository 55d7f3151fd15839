"""A cut into stages as tables in a terminal: stage by stage, method by method, unit by unit.

Layer 4. Invariant: only says what the partitions hold; loads carry the unit of the blocks' weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING

from rich.table import Table

from dlojz.pipeline.partition import Partition, total_time
from dlojz.text import say
from dlojz.viz.markup import visible

if TYPE_CHECKING:
    from dlojz.pipeline.block_weights import BlockWeights
    from dlojz.pipeline.partition_peers import HowOften


def title(name: str) -> str:
    """A method or a unit in the reader's language."""
    return {
        "exact": say(en="exact", fr="exact"),
        "deepspeed": "DeepSpeed",
        "torchgpipe": "torchgpipe",
        "uniform": say(en="uniform", fr="uniforme"),
        "parameters": say(en="parameters", fr="paramètres"),
        "flops": "FLOPs",
        "time": say(en="time", fr="temps"),
        "regex": "regex",
    }[name]


def ratio_text(value: float) -> str:
    """A ratio to two decimals, with the decimal mark of the reader's language."""
    return say(en=f"{value:.2f}", fr=f"{value:.2f}".replace(".", ","))


def headline(model: str, weighed: BlockWeights, stages: int) -> str:
    """What is cut, into how many stages, and what is balanced."""
    blocks, model = len(weighed.kinds), visible(model)
    return say(
        en=f"{model}: {blocks} blocks, number of stages: {stages}, balanced by: {weighed.title()}",
        fr=f"{model} : {blocks} blocs, nombre d’étages : {stages}, équilibrés selon : {weighed.title()}",
    )


def stages_table(cut: Partition, weighed: BlockWeights) -> Table:
    """Each stage: its blocks, its load, its share of the mean, what its blocks are."""
    table = _table(
        say(en="stage", fr="étage"),
        say(en="blocks", fr="blocs"),
        say(en="load", fr="charge"),
        say(en="÷ mean", fr="÷ moyenne"),
    )
    table.add_column("")
    table.add_column(say(en="what they are", fr="ce qu’ils sont"))
    mean = sum(cut.loads) / cut.num_stages
    for stage, (own, load) in enumerate(zip(cut.stages, cut.loads, strict=True)):
        kinds = ", ".join(
            kind if count == 1 else f"{count} × {kind}"
            for kind, count in ((kind, len(list(run))) for kind, run in groupby(weighed.kinds[own]))
        )
        heaviest = "◀" if load == cut.bottleneck else ""
        span = f"{own.start}" if own.stop == own.start + 1 else f"{own.start}–{own.stop - 1}"
        ratio = ratio_text(load / mean if mean else 1.0)
        table.add_row(str(stage), span, weighed.text(load), ratio, heaviest, visible(kinds))
    return table


def methods_table(cuts: Mapping[str, Partition], weighed: BlockWeights, micro_batches: int) -> Table:
    """Each method's bottleneck and step beside those of the first, which is the optimum."""
    best = next(iter(cuts.values()))
    table = _table(
        say(en="method", fr="méthode"),
        say(en="bottleneck", fr="goulot"),
        say(en="÷ optimum", fr="÷ optimum"),
        say(en="imbalance", fr="déséquilibre"),
        say(en=f"step, m={micro_batches}", fr=f"pas, m={micro_batches}"),
    )
    table.add_column(say(en="blocks per stage", fr="blocs par étage"))
    shortest = total_time(best.loads, micro_batches)
    for name, cut in cuts.items():
        table.add_row(
            title(name),
            weighed.text(cut.bottleneck),
            ratio_text(cut.bottleneck / best.bottleneck if best.bottleneck else 1.0),
            ratio_text(cut.imbalance),
            "× " + ratio_text(total_time(cut.loads, micro_batches) / shortest if shortest else 1.0),
            " ".join(str(own.stop - own.start) for own in cut.stages),
        )
    return table


def legend(micro_batches: int) -> str:
    """What the signs of the two tables stand for."""
    return say(
        en=f"◀ bottleneck; step: Σ tᵢ + (m − 1) max tᵢ for {micro_batches} micro-batches, against the exact cut's",
        fr=f"◀ goulot ; pas : Σ tᵢ + (m − 1) max tᵢ pour {micro_batches} micro-batches, rapporté au découpage exact",
    )


def units_table(imbalances: Mapping[str, Mapping[str, float]]) -> Table:
    """The imbalance of the cut by each unit, in each unit."""
    units = next(iter(imbalances.values()))
    columns = (say(en=f"imbalance in {title(unit)}", fr=f"déséquilibre en {title(unit)}") for unit in units)
    table = _table(say(en="cut by", fr="découpage selon"), *columns)
    for by, found in imbalances.items():
        table.add_row(title(by), *map(ratio_text, found.values()))
    return table


def counts_table(counts: Iterable[HowOften]) -> Table:
    """How often each tool misses the optimum over random cases, and its worst one."""
    counts = list(counts)
    cases = counts[0].cases
    table = _table(
        say(en=f"over {cases:,} random cases", fr=f"sur {cases:,} cas aléatoires".replace(",", "\u202f")),
        say(en="not optimal", fr="non optimal"),
        say(en="worst ÷ optimum", fr="pire ÷ optimum"),
    )
    table.add_column(say(en="worst case", fr="pire cas"))
    for each in counts:
        share = 100 * each.missed_share
        stages = say(en=f"{each.worst_stages} stages", fr=f"{each.worst_stages} étages")
        table.add_row(
            title(each.peer),
            say(en=f"{share:.1f}%", fr=f"{share:.1f} %".replace(".", ",")),
            ratio_text(each.worst_ratio),
            f"[{','.join(map(str, each.worst_weights))}], {stages}" if each.missed else "",
        )
    return table


def _table(*titles: str) -> Table:
    """A table whose first column is words and whose others are figures."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for index, heading in enumerate(titles):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    return table
