"""Stages or replicas: every way to deal GPUs out to the two, with what each makes a step wait for.

Layer 6 (labs), on `dlojz.viz`. Invariant: seconds and bytes are the cost model's; a split that does not
fit is drawn too, and said not to.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from dlojz.hardware import cluster as cluster_named
from dlojz.labs.compromise_shown import EDGE, PLATE, calibration_of, illustrated, thousands
from dlojz.labs.pipeline_figures import Sheet
from dlojz.plan.choice import seconds
from dlojz.plan.question import FLASH_FROM, check_gpus, check_precision
from dlojz.plan.reasons import gigabytes, part_words
from dlojz.plan.subject import Subject, subject
from dlojz.predict.time import Layouts, estimate
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.palette import BLACK, VERMILION, YELLOW
from dlojz.viz.plan_figure import TIME_STYLES

WAITS: Final = ("bubble", "pipeline", "data")


class Split(NamedTuple):
    """One way to deal GPUs out to stages and replicas.

    Attributes:
        pp, dp: their product is fixed.
        bubble_s, pipeline_s, data_s: seconds of a step that wait for the pipeline, its messages, the replicas.
        step_s: of the whole step.
        memory_bytes: of the fullest GPU.
        fits: whether they are within its memory.
    """

    pp: int
    dp: int
    bubble_s: float
    pipeline_s: float
    data_s: float
    step_s: float
    memory_bytes: float
    fits: bool


def splits(
    model: str,
    cluster: str = "jean_zay_a100",
    gpus: int = 384,
    batch: int = 2048,
    *,
    tp: int | None = None,
    micro_batch: int = 1,
    zero: int = 1,
    checkpointing: str = "full",
) -> tuple[Split, ...]:
    """Every way to deal gpus ÷ tp out to stages (1F1B) and replicas, the fewest stages first.

    Gradients are not reduced beside the backward here, as in Megatron of 2021, so that both waits are seen whole.

    Args:
        model: of the catalogue, or a published decoder.
        cluster: of `dlojz.hardware`.
        gpus: in all.
        batch: samples of one step.
        tp: tensor-parallel ranks; by default as many as a node has and the model allows, 1 for an image model.
        micro_batch, zero, checkpointing: the same for all.

    Raises:
        LabError: for an illegal question, or if no split divides the batch.
    """
    site, asked = cluster_named(cluster), subject(model)
    gpus = check_gpus(site, gpus)
    tp = _tensor_ranks(asked, site.gpus_per_node, gpus) if tp is None else tp
    if tp < 1 or gpus % tp or asked.misfit(tp):
        raise LabError(asked.misfit(tp) if tp > 0 and asked.misfit(tp) else _no_split(gpus, batch, tp))
    degrees = [
        (pp, gpus // tp // pp)
        for pp in range(1, gpus // tp + 1)
        if (gpus // tp) % pp == 0 and batch % (gpus // tp // pp * micro_batch) == 0 and _fills(asked, pp)
    ]
    if not degrees:
        raise LabError(_no_split(gpus, batch, tp))
    pp, dp = (np.array(column) for column in zip(*degrees, strict=True))
    layouts = Layouts.of(
        precision=check_precision(site, None), dp=dp, tp=tp, pp=pp, zero=np.where(dp > 1, zero, 0),
        micro_batch=micro_batch, micro_batches=batch // (dp * micro_batch), checkpointing=checkpointing,
        fused_attention=int(site.gpu.name.split("-")[0] in FLASH_FROM), gradient_bytes=4,
    )  # fmt: skip
    made = estimate(asked.workload, site, layouts, calibration_of(site))
    columns = (
        pp,
        dp,
        made.parts.bubble,
        made.parts.pipeline,
        made.parts.data,
        made.step_s,
        made.memory_bytes,
        made.fits,
    )
    return tuple(Split(*(one.item() for one in row)) for row in zip(*columns, strict=True))


def _tensor_ranks(asked: Subject, per_node: int, gpus: int) -> int:
    """The most that a node has and the model allows; 1 for an image model, whose blocks are few."""
    if asked.is_image:
        return 1
    return max(tp for tp in range(1, per_node + 1) if gpus % tp == 0 and not asked.misfit(tp))


def _fills(asked: Subject, pp: int) -> bool:
    """Whether every stage gets a layer."""
    layers = asked.num_layers
    return pp <= layers and (asked.is_image or -(-layers // -(-layers // pp)) == pp)


def _no_split(gpus: int, batch: int, tp: int) -> str:
    return say(
        en=f"{gpus} GPUs with tp={tp} make no stages and replicas that share a batch of {batch} out: change tp, the "
        "batch or the number of GPUs.",
        fr=f"{gpus} GPU avec tp={tp} ne font ni étages ni répliques qui se partagent un batch de {batch} : changez tp, "
        "le batch ou le nombre de GPU.",
    )


@illustrated
def bubble_or_all_reduce(
    model: str, cluster: str = "jean_zay_a100", gpus: int = 384, batch: int = 2048, **fixed: Any
) -> tuple[LabFigure, Sheet]:
    """For each way to deal GPUs out to stages and replicas: what a step waits for, stacked.

    Args:
        model, cluster, gpus, batch: as `splits` takes them.
        **fixed: tp, micro_batch, zero, checkpointing, as `splits` takes them.
    """
    found = splits(model, cluster, gpus, batch, **fixed)
    site, limit = cluster_named(cluster), cluster_named(cluster).gpu.device.memory_bytes
    tp = gpus // (found[0].pp * found[0].dp)
    figure = new_figure(9.6, 4.6, alt=_split_alt(model, found))
    axes = figure.subplots()
    places, bottoms = np.arange(len(found)), np.zeros(len(found))
    for name in WAITS:
        heights = np.array([getattr(one, f"{name}_s") for one in found])
        style = TIME_STYLES[name]
        axes.bar(
            places, heights, bottom=bottoms, color=style.color, hatch=style.hatch, edgecolor=EDGE, linewidth=0.6,
            width=0.72, label=part_words(name),
        )  # fmt: skip
        bottoms += heights
    top = float(bottoms.max(initial=0)) or 1.0
    for place, one in enumerate(found):
        told = gigabytes(one.memory_bytes) if one.fits else f"{gigabytes(one.memory_bytes)}\n> {gigabytes(limit)}"
        axes.text(
            place, bottoms[place] + 0.02 * top, told, ha="center", va="bottom", fontsize=7.5,
            color=BLACK if one.fits else VERMILION, bbox=PLATE,
        )  # fmt: skip
    fitting = [place for place, one in enumerate(found) if one.fits]
    if fitting:
        best = min(fitting, key=lambda place: found[place].step_s)
        axes.plot(
            [best], [-0.045 * top], marker="*", markersize=13, color=YELLOW, markeredgecolor=BLACK, linestyle="none",
            label=say(en="shortest step that fits", fr="itération la plus courte qui tient"), clip_on=False,
        )  # fmt: skip
    axes.set_ylim(-0.1 * top, 1.22 * top)
    axes.set_xticks(places, [f"pp {one.pp}\ndp {one.dp}" for one in found], fontsize=8)
    thousands(axes.yaxis)
    axes.set_ylabel(say(en="seconds of a step", fr="secondes d’une itération"))
    axes.set_title(
        say(
            en=f"{model}, {gpus} GPUs of {site.title}, tp {tp}, batch {batch}:\nwhat a step waits for; above, "
            "memory of the fullest GPU",
            fr=f"{model}, {gpus} GPU de {site.title}, tp {tp}, batch {batch} :\nce qu’attend une itération ; "
            "au-dessus, mémoire du GPU le plus rempli",
        ),
        fontsize=9,
    )
    axes.legend(fontsize=8, frameon=False, loc="best")
    plain(axes)
    return finish(figure), _split_sheet(found)


def _split_sheet(found: tuple[Split, ...]) -> Sheet:
    head = (
        "pp",
        "dp",
        part_words("bubble"),
        part_words("pipeline"),
        part_words("data"),
        say(en="whole step", fr="itération entière"),
        say(en="fullest GPU", fr="GPU le plus rempli"),
        say(en="fits", fr="tient"),
    )
    yes, no = say(en="yes", fr="oui"), say(en="no", fr="non")
    return Sheet(
        head,
        tuple(
            (
                str(one.pp), str(one.dp), seconds(one.bubble_s), seconds(one.pipeline_s), seconds(one.data_s),
                seconds(one.step_s), gigabytes(one.memory_bytes), yes if one.fits else no,
            )
            for one in found
        ),
    )  # fmt: skip


def _split_alt(model: str, found: tuple[Split, ...]) -> str:
    each = ", ".join(f"pp {one.pp} dp {one.dp}: {seconds(one.bubble_s)} + {seconds(one.data_s)}" for one in found)
    return say(
        en=f"Bubble and data-parallel messages of a step of {model} by stages and replicas: {each}.",
        fr=f"Bulle et messages du Data Parallelism d’une itération de {model}, par étages et répliques : {each}.",
    )
