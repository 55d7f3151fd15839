"""Lab 07: the layout of a 3D run from what is asked of it.

Layer 6 (labs). Invariant: what counts is the layout itself, its degrees and batches; how it is written is free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dlojz.config import Layout, RunConfig
from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.hybrid_answers import refuse_nothing
from dlojz.labs.verdict import Said
from dlojz.text import say


class Asked(NamedTuple):
    """A specification: processes, stages, slices of a layer, samples of a micro-batch and of a step."""

    processes: int
    stages: int
    slices: int
    micro_batch: int
    global_batch: int


CASES = (Asked(8, 2, 2, 2, 16), Asked(16, 4, 2, 4, 64), Asked(24, 2, 4, 1, 18), Asked(8, 4, 1, 8, 128))


def layout_3d(processes: int, stages: int, slices: int, micro_batch: int, global_batch: int) -> Layout:
    """The layout: dp is what is left of the processes, micro_batches what is left of the batch.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), §3.1: m = B/(b·d) micro-batches per pipeline.
    """
    dp = processes // (stages * slices)
    return Layout(
        dp=dp,
        pp=stages,
        tp=slices,
        micro_batch=micro_batch,
        micro_batches=global_batch // (micro_batch * dp),
        engine="by_hand",
    )


def _judge(answer: Callable[..., Any]) -> None:
    for asked in CASES:
        layout = _layout(answer(*asked))
        _check_degrees(layout, asked)
        _check_batch(layout, asked)
        if layout.engine != "by_hand":
            raise Wrong(
                say(
                    en=f"The degrees are right, but the engine is {layout.engine!r}: engine='by_hand' is asked for.",
                    fr=f"Les degrés sont justes, mais le moteur est {layout.engine!r} : on demande engine='by_hand'.",
                )
            )


def _layout(given: Any) -> Layout:
    refuse_nothing(given)
    layout = given.layout if isinstance(given, RunConfig) else given
    if not isinstance(layout, Layout):
        raise Wrong(
            say(
                en=f"A dlojz.Layout is expected, but an object of type {type(given).__name__} was returned.",
                fr=f"On attend un dlojz.Layout, mais un objet de type {type(given).__name__} a été renvoyé.",
            )
        )
    return layout


def _told(asked: Asked) -> str:
    return say(
        en=f"Asked for: {asked.processes} processes, {asked.stages} stages, {asked.slices} slices, micro-batches of "
        f"{asked.micro_batch}, {asked.global_batch} samples per step. ",
        fr=f"Demandé : {asked.processes} processus, {asked.stages} étages, {asked.slices} tranches, micro-batches de "
        f"{asked.micro_batch}, {asked.global_batch} échantillons par pas. ",
    )


def _check_degrees(layout: Layout, asked: Asked) -> None:
    right = layout_3d(*asked)
    if (layout.pp, layout.tp) == (right.pp, right.tp):
        if layout.dp == right.dp:
            return
        told = say(
            en=f"dp={layout.dp} makes {layout.world_size} processes: a replica is made of {right.pp} × {right.tp} "
            f"ranks, so there are {right.dp} of them.",
            fr=f"dp={layout.dp} fait {layout.world_size} processus : une réplique compte {right.pp} × {right.tp} "
            f"rangs, il y en a donc {right.dp}.",
        )
    elif (layout.pp, layout.tp) == (right.tp, right.pp):
        told = say(
            en=f"pp={layout.pp} and tp={layout.tp} are swapped: stages cut between layers (pp), slices cut each layer "
            "(tp).",
            fr=f"pp={layout.pp} et tp={layout.tp} sont échangés : les étages coupent entre les couches (pp), les "
            "tranches coupent chaque couche (tp).",
        )
    else:
        told = say(
            en=f"You give pp={layout.pp} and tp={layout.tp}: pp is the number of stages, tp that of slices.",
            fr=f"Vous donnez pp={layout.pp} et tp={layout.tp} : pp est le nombre d’étages, tp celui des tranches.",
        )
    raise Wrong(_told(asked) + told)


def _check_batch(layout: Layout, asked: Asked) -> None:
    right = layout_3d(*asked)
    if (layout.micro_batch, layout.micro_batches) == (right.micro_batch, right.micro_batches):
        return
    if layout.micro_batch != asked.micro_batch:
        told = say(
            en=f"micro_batch={layout.micro_batch}, but one forward reads {asked.micro_batch} samples.",
            fr=f"micro_batch={layout.micro_batch}, mais une passe avant lit {asked.micro_batch} échantillons.",
        )
    elif layout.micro_batches == asked.global_batch // asked.micro_batch:
        told = say(
            en=f"With micro_batches={layout.micro_batches} a step reads {layout.global_batch} samples: each of the "
            f"{right.dp} replicas reads its own micro-batches, so divide by dp too.",
            fr=f"Avec micro_batches={layout.micro_batches}, un pas lit {layout.global_batch} échantillons : chacune "
            f"des {right.dp} répliques lit ses propres micro-batches, divisez donc aussi par dp.",
        )
    elif layout.micro_batches == max(asked.global_batch // (asked.micro_batch * asked.processes), 1):
        told = say(
            en=f"With micro_batches={layout.micro_batches} a step reads only {layout.global_batch} samples: you divide "
            "by all processes, but the ranks of a replica pass the same samples on (pp) or read them together (tp).",
            fr=f"Avec micro_batches={layout.micro_batches}, un pas ne lit que {layout.global_batch} échantillons : "
            "vous divisez par tous les processus, mais les rangs d’une réplique se passent les mêmes échantillons "
            "(pp) ou les lisent ensemble (tp).",
        )
    else:
        told = say(
            en=f"With micro_batches={layout.micro_batches} a step reads {layout.global_batch} samples.",
            fr=f"Avec micro_batches={layout.micro_batches}, un pas lit {layout.global_batch} échantillons.",
        )
    raise Wrong(_told(asked) + told)


LAYOUT_3D = Exercise(
    id="layout-3d",
    title=Said("a 3D run from its specification", "une exécution 3D à partir de son cahier des charges"),
    judge=_judge,
    praise=Said(
        "Right, for four specifications: degrees that use every process, and the batch that was asked for.",
        "Exact, pour quatre cahiers des charges : des degrés qui emploient chaque processus, et le batch demandé.",
    ),
    hints=(
        Said(
            "Which of the three degrees is not given, and what do the processes make of it? Then: how many samples "
            "does one micro-batch of all replicas read?",
            "Lequel des trois degrés n’est pas donné, et que vaut-il d’après les processus ? Ensuite : combien "
            "d’échantillons lit un micro-batch, sur toutes les répliques ?",
        ),
        Said(
            "dp = processes // (stages * slices); micro_batches = global_batch // (micro_batch * dp); "
            'dlojz.Layout(dp=…, pp=stages, tp=slices, micro_batch=…, micro_batches=…, engine="by_hand").',
            "dp = processes // (stages * slices) ; micro_batches = global_batch // (micro_batch * dp) ; "
            'dlojz.Layout(dp=…, pp=stages, tp=slices, micro_batch=…, micro_batches=…, engine="by_hand").',
        ),
    ),
)
