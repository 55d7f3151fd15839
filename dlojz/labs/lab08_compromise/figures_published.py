"""Figures of lab 08 about published runs: BLOOM's layouts, the training time of giants, pipeline or replicas.

Every usable row is drawn, also those that ran out of memory; predictions are the cost model's for the same layout.

Sources: bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md, lines 775 to 848; Narayanan et al.
2021 (arXiv 2104.04473), §5.1, equation 4, and Table 1.
"""

import statistics
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from dlojz.base.errors import LabError
from dlojz.base.language import decimal, say, yes_no
from dlojz.base.table import Table, titles
from dlojz.cost_model import Bill, Layouts, bill, calibration, estimate, training_s
from dlojz.cost_model.step import SECONDS_PER_DAY
from dlojz.cost_model.validation import PROFILE_OF, validate
from dlojz.cost_model.workload import decoder_workload
from dlojz.display.canvas import LabFigure, finish, new_figure, plain
from dlojz.display.style import (
    BLACK,
    BLUE,
    EDGE,
    HEADING,
    MEMORY_STYLES,
    NORMAL,
    ORANGE,
    SMALL,
    TIME_STYLES,
    VERMILION,
    YELLOW,
)
from dlojz.hardware import cluster
from dlojz.hardware import cluster as cluster_named
from dlojz.hardware.evidence import Measurement, table
from dlojz.labs.kit.exercise import Sentences
from dlojz.labs.kit.figures import PLATE, illustrated, logarithmic, thousands
from dlojz.planner.answer import HeldOutErrors, held_out, seconds
from dlojz.planner.ask import plan
from dlojz.planner.planned_model import Subject, subject
from dlojz.planner.question import calibration_of, check_gpus, check_precision, fuses_attention
from dlojz.planner.search import PARTS
from dlojz.planner.space import degrees_words, gigabytes, part_words

TEXTS = Sentences(Path(__file__).with_suffix(".md"))

BLOOM_TABLE: Final = "jean-zay-a100"
CHOSEN: Final = (8, 4, 12, 2)
"""dp, tp, pp and micro-batch of BLOOM as it was trained (row `final` of the table)."""
BATCH: Final = 2048
"""Sequences of its step; rows of 2016 are scaled to it."""


class Neighbour(NamedTuple):
    """Layout of the sweep.

    Attributes:
        layout: dp, tp, pp, micro-batch.
        measured_s: seconds of a step of 2048 sequences, one of each time it was measured; empty where it ran out.
        predicted_s: of the cost model.
        interval_s: between which four in five rows of tables left out lay.
        measured_bytes: on the fullest GPU, where it was read.
        parts: bytes of the fullest GPU by category, by the cost model.
    """

    layout: tuple[int, int, int, int]
    measured_s: tuple[float, ...]
    predicted_s: float
    interval_s: tuple[float, float]
    measured_bytes: tuple[float, ...]
    parts: dict[str, float]

    @property
    def is_chosen(self) -> bool:
        """Whether BLOOM was trained so."""
        return self.layout == CHOSEN

    @property
    def title(self) -> str:
        """Short description."""
        *degrees, size = self.layout
        return f"{degrees_words(*degrees)}, micro-batch {size}"


def sweep() -> list[Measurement]:
    """List the rows of one model of 72 layers on 384 GPUs after the repair of PCIe, with the whole batch."""
    return [
        row
        for row in table(BLOOM_TABLE)
        if row.usable
        and row.series == "after the PCIe fix"
        and (row.size.hidden, row.size.layers, row.size.heads, row.gpus) == (14336, 72, 64, 384)
        and row.global_batch > 2000
    ]


@cache
def neighbours_of_bloom() -> tuple[Neighbour, ...]:
    """List the layouts of the sweep by step time; those that ran out of memory last."""
    rows: dict[tuple[int, int, int, int], list[Measurement]] = {}
    for row in sweep():
        rows.setdefault((row.dp, row.tp, row.pp, row.micro_batch or 1), []).append(row)
    measurements = [readings[0] for readings in rows.values()]
    site, profile = cluster(BLOOM_TABLE.replace("-", "_")), PROFILE_OF[BLOOM_TABLE]
    prediction = estimate(
        decoder_workload(measurements[0].size), site, Layouts.from_measurements(measurements), calibration(profile)
    )
    errors = held_out(profile)
    low, high = (errors.low, errors.high) if errors else (1.0, 1.0)
    neighbours = []
    for index, (layout, readings) in enumerate(rows.items()):
        # the batch of a run may differ from BATCH: all in seconds of BATCH sequences, in proportion
        scale = BATCH / readings[0].global_batch
        # the estimate has one row for each layout, in the order of `rows`
        predicted_s = float(prediction.step_s[index]) * scale
        neighbours.append(
            Neighbour(
                layout,
                tuple(row.seconds * scale for row in readings if row.seconds),
                predicted_s,
                (predicted_s * low, predicted_s * high),
                tuple(row.memory_bytes for row in readings if row.memory_bytes),
                {name: float(getattr(prediction.memory, name)[index]) for name in PARTS},
            )
        )
    return tuple(sorted(neighbours, key=lambda neighbour: (not neighbour.measured_s, _took(neighbour))))


def _took(neighbour: Neighbour) -> float:
    return statistics.median(neighbour.measured_s) if neighbour.measured_s else neighbour.predicted_s


@illustrated
def bloom() -> tuple[LabFigure, Table]:
    """Draw seconds and bytes of every layout measured for BLOOM's 72-layer forerunner, beside the cost model.

    Left: readings as dots, the prediction with its interval. Right: the fullest GPU stacked by category, the reading of
    `nvidia-smi` as a dot, the GPU's memory as a line; "OOM" where the run ended so.
    """
    neighbours = neighbours_of_bloom()
    figure = new_figure(11.0, 0.27 * len(neighbours) + 2.0, alt=_bloom_alt(neighbours))
    time_axes, memory_axes = figure.subplots(1, 2, sharey=True, width_ratios=(1.0, 1.15))
    _times(time_axes, neighbours)
    _memories(memory_axes, neighbours)
    time_axes.set_yticks(range(len(neighbours)), [neighbour.title for neighbour in neighbours], fontsize=SMALL)
    for label, neighbour in zip(time_axes.get_yticklabels(), neighbours, strict=True):
        label.set_fontweight("bold" if neighbour.is_chosen else "normal")
    time_axes.set_ylim(len(neighbours) - 0.4, -0.6)
    for axes in (time_axes, memory_axes):
        plain(axes)
        thousands(axes.xaxis)
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=SMALL)
    return finish(figure), _bloom_sheet(neighbours)


def _times(axes: Axes, neighbours: tuple[Neighbour, ...]) -> None:
    positions = range(len(neighbours))
    predicted = [neighbour.predicted_s for neighbour in neighbours]
    axes.errorbar(
        predicted, positions,
        # matplotlib takes distances from the point: below, then above
        xerr=[[abs(neighbour.interval_s[side] - neighbour.predicted_s) for neighbour in neighbours] for side in (0, 1)],
        linestyle="none", marker="D", markersize=4.5, markerfacecolor="white", color=BLUE, capsize=3, elinewidth=1,
        label=say(en="cost model", fr="modèle de coût"),
    )  # fmt: skip
    dots = [(value, position) for position, neighbour in enumerate(neighbours) for value in neighbour.measured_s]
    axes.plot(
        *zip(*dots, strict=True), linestyle="none", marker="o", markersize=5, color=BLACK,
        label=say(en="measured", fr="mesuré"),
    )  # fmt: skip
    for position, neighbour in enumerate(neighbours):
        if not neighbour.measured_s:
            axes.text(
                neighbour.interval_s[1] + 2,
                position,
                "OOM",
                color=VERMILION,
                fontsize=SMALL,
                va="center",
                fontweight="bold",
            )
        if neighbour.is_chosen:
            axes.axhspan(position - 0.45, position + 0.45, color=YELLOW, alpha=0.35, zorder=0)
    axes.set_xlim(right=1.06 * max(neighbour.interval_s[1] for neighbour in neighbours))
    axes.set_xlabel(say(en="seconds of a step of 2048 sequences", fr="secondes d’un pas de 2048 séquences"))
    axes.set_title(TEXTS.say("times", "title"), fontsize=NORMAL)


def _memories(axes: Axes, neighbours: tuple[Neighbour, ...]) -> None:
    positions, lefts = np.arange(len(neighbours)), np.zeros(len(neighbours))
    for name, style in MEMORY_STYLES.items():
        widths = np.array([neighbour.parts[name] for neighbour in neighbours]) / 1e9
        if widths.max(initial=0) <= 0:
            continue
        axes.barh(
            positions, widths, left=lefts, color=style.color, hatch=style.hatch, edgecolor=EDGE, linewidth=0.4,
            height=0.72, label=part_words(name),
        )  # fmt: skip
        lefts += widths
    dots = [
        (value / 1e9, position) for position, neighbour in enumerate(neighbours) for value in neighbour.measured_bytes
    ]
    axes.plot(
        *zip(*dots, strict=True), linestyle="none", marker="o", markersize=6, color=BLACK, markeredgecolor="white",
        label=say(en="read by nvidia-smi", fr="lu par nvidia-smi"),
    )  # fmt: skip
    gpu = cluster(BLOOM_TABLE.replace("-", "_")).gpu
    limit = gpu.memory_bytes / 1e9
    axes.axvline(limit, color=VERMILION, linestyle="--", linewidth=1.4, label=gpu.title)
    for position, neighbour in enumerate(neighbours):
        if not neighbour.measured_s:
            axes.text(
                lefts[position] + 1.5, position, "OOM", color=VERMILION, fontsize=SMALL, va="center", fontweight="bold"
            )
    axes.set_xlim(0, 1.1 * float(lefts.max()))
    axes.set_xlabel(say(en="memory of the fullest GPU (GB)", fr="mémoire du GPU le plus rempli (Go)"))
    axes.set_title(
        say(en="memory: bars predicted, dots read", fr="mémoire : barres prédites, points lus"), fontsize=NORMAL
    )
    axes.tick_params(labelleft=False)


def _bloom_sheet(neighbours: tuple[Neighbour, ...]) -> Table:
    head = titles(*TEXTS.sentence("bloom sheet", "heads"))
    rows = [
        (
            ("★ " if neighbour.is_chosen else "") + neighbour.title,
            " / ".join(decimal(value) for value in neighbour.measured_s) + " s" if neighbour.measured_s else "OOM",
            seconds(neighbour.predicted_s),
            f"{seconds(neighbour.interval_s[0])} – {seconds(neighbour.interval_s[1])}",
            " / ".join(gigabytes(value) for value in neighbour.measured_bytes) or "—",
            gigabytes(sum(neighbour.parts.values())),
        )
        for neighbour in neighbours
    ]
    return Table(head, tuple(rows))


def _bloom_alt(neighbours: tuple[Neighbour, ...]) -> str:
    layouts_text = ", ".join(
        f"{row.title}: {seconds(_took(row)) if row.measured_s else 'OOM'} / {seconds(row.predicted_s)}"
        for row in neighbours
    )
    return TEXTS.say("bloom", "alt", layouts_text=layouts_text)


TOKENS: Final = 300e9
RATE: Final = 140e12
"""FLOP/s of one A100 that the formula takes for every model, as the paper does for its 175 B."""
COURSE: Final = (("megatron-1.7b", 512), ("megatron-18b", 1024), ("megatron-76b", 1792), ("megatron-1t", 3072))
"""Models of the course's table, and the batch that Narayanan et al. trained each with."""
NODES: Final = (1, 4)
SITE: Final = "dgx_a100"
GIANTS_TABLE: Final = "sc21-1"


class Training(NamedTuple):
    """Whole training of one model.

    Attributes:
        degrees: dp, tp, pp and cp of the cost model's layout; empty where none fits.
        formula_s: 8TP/(nX).
        model_s: of the cost model; None where no layout fits.
        interval: factors on it between which four in five rows of tables left out lay; None where it does not fit.
        published_s: what the published FLOP/s come to; None in the course's table.
        account: GPU-hours and energy of the cost model's training, of the formula's where that has none.
    """

    parameters: int
    gpus: int
    degrees: tuple[int, ...]
    formula_s: float
    model_s: float | None
    interval: HeldOutErrors | None
    published_s: float | None
    account: Bill


@cache
def course_table() -> tuple[Training, ...]:
    """Compute the course's models on 1 and 4 DGX A100: by the formula, and with the planner's best layout."""
    site, trainings = cluster(SITE), []
    for model, batch in COURSE:
        for nodes in NODES:
            gpus = nodes * site.gpus_per_node
            parameters, degrees, step_s, errors = _planned(model, gpus, batch)
            # 8TP/(nX): 6 operations per parameter and token, and 2 of recomputation
            formula_s = training_s(8 * parameters, TOKENS, gpus, RATE)
            # tokens of a step: batch × 2048
            whole_s = None if step_s is None else step_s * TOKENS / (batch * 2048)
            account = bill(site, gpus, whole_s or formula_s)
            trainings.append(Training(parameters, gpus, degrees, formula_s, whole_s, errors, None, account))
    return tuple(trainings)


def _planned(model: str, gpus: int, batch: int) -> tuple[int, tuple[int, ...], float | None, HeldOutErrors | None]:
    """Parameters, degrees of the best layout, seconds of its step and their interval; none where nothing fits."""
    try:
        best = plan(model, SITE, gpus, batch, sequence_length=2048).best
    except LabError:
        return subject(model).num_parameters, (), None, None
    candidate = best.candidate
    return (
        best.question.subject.num_parameters,
        (candidate.dp, candidate.tp, candidate.pp, candidate.cp),
        best.step_s,
        best.held_out,
    )


@cache
def published_table() -> tuple[Training, ...]:
    """Compute Narayanan's Table 1: by the formula, at the published rates, and by the cost model."""
    errors, trainings = held_out(PROFILE_OF[GIANTS_TABLE]), []
    for comparison in validate(GIANTS_TABLE).rows:
        row = comparison.row
        steps = TOKENS / (row.global_batch * row.size.sequence_length)
        formula_s = training_s(8 * row.size.num_parameters, TOKENS, row.gpus, RATE)
        account = bill(cluster(row.cluster), row.gpus, steps * comparison.predicted_s)
        trainings.append(
            Training(
                row.size.num_parameters, row.gpus, (row.dp, row.tp, row.pp, row.cp), formula_s,
                steps * comparison.predicted_s, errors, steps * comparison.measured_s, account,
            )
        )  # fmt: skip
    return tuple(trainings)


def duration(seconds: float) -> str:
    """Format a long time: in days, in weeks from three on, in years from seventy weeks on."""
    days = seconds / SECONDS_PER_DAY
    if days < 21:
        return say(en=f"{decimal(days)} d", fr=f"{decimal(days)} j")
    if days < 70 * 7:
        return say(en=f"{decimal(days / 7)} weeks", fr=f"{decimal(days / 7)} semaines")
    return say(en=f"{decimal(days / 365.25)} years", fr=f"{decimal(days / 365.25)} ans")


@illustrated
def giants() -> tuple[LabFigure, Table]:
    """Draw the training on 300 billion tokens: the course's table on 1 and 4 DGX A100, Narayanan's Table 1.

    Left and right the formula with 140 TFLOP/s per GPU beside the cost model (with its interval of four rows in five of
    tables left out); right also what the published FLOP/s come to. A model that fits nowhere has a formula's time all
    the same.
    """
    course, published = course_table(), published_table()
    figure = new_figure(11.0, 5.2, alt=_giants_alt(course, published))
    course_axes, published_axes = figure.subplots(1, 2, width_ratios=(1.0, 1.25))
    _drawn(course_axes, course, TEXTS.say("drawn", "table of the course"))
    _drawn(published_axes, published, TEXTS.say("drawn", "table of the paper"))
    handles, labels = published_axes.get_legend_handles_labels()
    crosses, words = course_axes.get_legend_handles_labels()
    extra = [(handle, word) for handle, word in zip(crosses, words, strict=True) if word not in labels]
    figure.legend(
        [*handles, *(handle for handle, _ in extra)], [*labels, *(word for _, word in extra)],
        loc="outside lower center", ncols=4, frameon=False,
    )  # fmt: skip
    return finish(figure), _giants_sheet((*course, *published))


def _drawn(axes: Axes, trainings: tuple[Training, ...], title: str) -> None:
    positions = list(range(len(trainings)))
    days = [training.formula_s / SECONDS_PER_DAY for training in trainings]
    axes.plot(
        positions, days, linestyle="none", marker="D", markersize=7, markerfacecolor="none", color=ORANGE,
        label="8TP/(nX), X = 140 TFLOP/s",
    )  # fmt: skip
    fits = [
        (position, training.model_s / SECONDS_PER_DAY, (training.interval.low, training.interval.high))
        for position, training in zip(positions, trainings, strict=True)
        if training.model_s is not None and training.interval is not None
    ]
    axes.errorbar(
        [position for position, _, _ in fits], [value for _, value, _ in fits],
        yerr=[[value * abs(factors[side] - 1) for _, value, factors in fits] for side in (0, 1)],
        linestyle="none", marker="o", markersize=5, color=BLUE, capsize=4,
        label=say(en="cost model", fr="modèle de coût"),
    )  # fmt: skip
    unfit_positions = [
        position for position, training in zip(positions, trainings, strict=True) if training.model_s is None
    ]
    if unfit_positions:
        axes.plot(
            unfit_positions, [days[position] for position in unfit_positions], linestyle="none", marker="x",
            markersize=11, color=VERMILION, label=say(en="fits in no layout", fr="ne tient dans aucune configuration"),
        )  # fmt: skip
    published_times = [
        (position, training.published_s)
        for position, training in zip(positions, trainings, strict=True)
        if training.published_s
    ]
    if published_times:
        axes.plot(
            [position for position, _ in published_times],
            [value / SECONDS_PER_DAY for _, value in published_times], linestyle="none", marker="+", markersize=11,
            color=BLACK, label=say(en="published FLOP/s", fr="FLOP/s publiés"),
        )  # fmt: skip
    axes.set_yscale("log")
    spread = max(days) / min(days)
    logarithmic(axes.yaxis, (1.0, 3.0) if spread > 100 else (1.0, 2.0, 3.0, 5.0, 7.0))
    axes.margins(x=0.06, y=0.12)
    axes.set_xticks(
        positions, [f"{_amount(training.parameters)}\n{training.gpus}" for training in trainings], fontsize=SMALL
    )
    axes.set_xlabel(say(en="billions of parameters; GPUs", fr="milliards de paramètres ; GPU"))
    axes.set_ylabel(say(en="days for 300 billion tokens (log.)", fr="jours pour 300 milliards de tokens (log.)"))
    axes.set_title(title, fontsize=HEADING)
    plain(axes)


def _giants_sheet(trainings: tuple[Training, ...]) -> Table:
    none = say(en="fits nowhere", fr="ne tient pas")
    rows = [
        (
            _billions(training.parameters),
            str(training.gpus),
            " · ".join(map(str, training.degrees[:3]))
            + (f" · cp {training.degrees[3]}" if training.degrees[3:] > (1,) else ""),
            duration(training.formula_s),
            none if training.model_s is None else duration(training.model_s),
            "" if training.published_s is None else duration(training.published_s),
            "" if training.model_s is None else decimal(training.account.gpu_hours / 1e3, 0),
            "" if training.model_s is None else decimal(training.account.energy_kwh / 1e3, 0),
        )
        for training in trainings
    ]
    head = titles(*TEXTS.sentence("giants sheet", "heads"))
    return Table(head, tuple(rows))


def _giants_alt(course: tuple[Training, ...], published: tuple[Training, ...]) -> str:
    trainings_text = ", ".join(
        f"{_billions(training.parameters)} / {training.gpus} GPU {duration(training.formula_s)} – "
        + (say(en="fits nowhere", fr="ne tient pas") if training.model_s is None else duration(training.model_s))
        for training in (*course, *published)
    )
    return TEXTS.say("giants", "alt", trainings_text=trainings_text)


def _amount(parameters: float) -> str:
    value = parameters / 1e9
    return decimal(value, 1 if value < 10 else 0)


def _billions(parameters: float) -> str:
    return f"{_amount(parameters)} {say(en='B', fr='Md')}"


WAITS: Final = ("bubble", "pipeline", "data")


class GpuSplit(NamedTuple):
    """Split of GPUs into stages and replicas.

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
) -> tuple[GpuSplit, ...]:
    """List every split of gpus ÷ tp into stages (1F1B) and replicas, the fewest stages first.

    Gradients are not reduced beside the backward here, as in Megatron of 2021, so that both waits are seen whole.

    Args:
        model: of the catalogue, or a published decoder.
        cluster: of `dlojz.hardware`.
        batch: samples of one step.
        tp: tensor-parallel ranks; by default as many as a node has and the model allows, 1 for an image model.
        micro_batch, zero, checkpointing: the same for all.

    Raises:
        LabError: for an illegal question, or if no split divides the batch.
    """
    site, network = cluster_named(cluster), subject(model)
    gpus = check_gpus(site, gpus)
    tp = _tensor_ranks(network, site.gpus_per_node, gpus) if tp is None else tp
    if tp < 1 or gpus % tp or network.split_conflict(tp):
        raise LabError(
            network.split_conflict(tp) if tp > 0 and network.split_conflict(tp) else _no_split(gpus, batch, tp)
        )
    degrees = [
        (pp, gpus // tp // pp)
        for pp in range(1, gpus // tp + 1)
        # each replica must get whole micro-batches
        if (gpus // tp) % pp == 0 and batch % (gpus // tp // pp * micro_batch) == 0 and _fills(network, pp)
    ]
    if not degrees:
        raise LabError(_no_split(gpus, batch, tp))
    pp, dp = (np.array(column) for column in zip(*degrees, strict=True))
    layouts = Layouts.of(
        # one replica has nothing to shard: ZeRO from two on
        precision=check_precision(site, None), dp=dp, tp=tp, pp=pp, zero=np.where(dp > 1, zero, 0),
        micro_batch=micro_batch, micro_batches=batch // (dp * micro_batch), checkpointing=checkpointing,
        fused_attention=int(fuses_attention(site)), gradient_bytes=4,
    )  # fmt: skip
    prediction = estimate(network.workload, site, layouts, calibration_of(site))
    columns = (
        pp,
        dp,
        prediction.parts.bubble,
        prediction.parts.pipeline,
        prediction.parts.data,
        prediction.step_s,
        prediction.memory_bytes,
        prediction.fits,
    )
    return tuple(GpuSplit(*(number.item() for number in row)) for row in zip(*columns, strict=True))


def _tensor_ranks(network: Subject, per_node: int, gpus: int) -> int:
    """The most that a node has and the model allows; 1 for an image model, whose blocks are few."""
    if network.is_image:
        return 1
    return max(tp for tp in range(1, per_node + 1) if gpus % tp == 0 and not network.split_conflict(tp))


def _fills(network: Subject, pp: int) -> bool:
    """Whether every stage gets a layer."""
    layers = network.num_layers
    # blocks of ceil(layers / pp) layers: a stage is empty where fewer than pp of them are filled
    return pp <= layers and (network.is_image or -(-layers // -(-layers // pp)) == pp)


def _no_split(gpus: int, batch: int, tp: int) -> str:
    return TEXTS.say("drawn", "no stages and replicas", gpus=gpus, tp=tp, batch=batch)


@illustrated
def bubble_or_all_reduce(
    model: str, cluster: str = "jean_zay_a100", gpus: int = 384, batch: int = 2048, **fixed: Any
) -> tuple[LabFigure, Table]:
    """Draw for each split into stages and replicas what a step waits for and computes beyond the least, stacked.

    Args:
        model, cluster, gpus, batch: as `splits` takes them.
        **fixed: tp, micro_batch, zero, checkpointing, as `splits` takes them.
    """
    gpu_splits = splits(model, cluster, gpus, batch, **fixed)
    site, limit = cluster_named(cluster), cluster_named(cluster).gpu.memory_bytes
    tp = gpus // (gpu_splits[0].pp * gpu_splits[0].dp)
    figure = new_figure(9.6, 4.6, alt=_split_alt(model, gpu_splits))
    axes = figure.subplots()
    positions, bottoms = np.arange(len(gpu_splits)), np.zeros(len(gpu_splits))
    for name in WAITS:
        heights = np.array([getattr(split, f"{name}_s") for split in gpu_splits])
        style = TIME_STYLES[name]
        axes.bar(
            positions, heights, bottom=bottoms, color=style.color, hatch=style.hatch, edgecolor=EDGE, linewidth=0.6,
            width=0.72, label=part_words(name),
        )  # fmt: skip
        bottoms += heights
    # What no split can avoid is left out; what some compute beyond it is drawn, so that the lowest bar is the best step
    work_s = np.array([split.step_s for split in gpu_splits]) - bottoms
    style = TIME_STYLES["forward"]
    axes.bar(
        positions, work_s - work_s.min(), bottom=bottoms, color=style.color, edgecolor=EDGE, linewidth=0.6,
        width=0.72, label=say(en="excess work of the busiest stage", fr="excès de l’étage le plus chargé"),
    )  # fmt: skip
    # the top of each bar: its step less what all splits compute
    bottoms += work_s - work_s.min()
    top = float(bottoms.max(initial=0)) or 1.0
    for position, split in enumerate(gpu_splits):
        memory_text = (
            gigabytes(split.memory_bytes) if split.fits else f"{gigabytes(split.memory_bytes)}\n> {gigabytes(limit)}"
        )
        axes.text(
            position, bottoms[position] + 0.02 * top, memory_text, ha="center", va="bottom", fontsize=SMALL,
            color=BLACK if split.fits else VERMILION, bbox=PLATE,
        )  # fmt: skip
    fitting = [position for position, split in enumerate(gpu_splits) if split.fits]
    if fitting:
        best = min(fitting, key=lambda position: gpu_splits[position].step_s)
        axes.plot(
            [best], [-0.045 * top], marker="*", markersize=13, color=YELLOW, markeredgecolor=BLACK, linestyle="none",
            label=say(en="shortest step that fits", fr="le pas le plus court qui tient"), clip_on=False,
        )  # fmt: skip
    axes.set_ylim(-0.1 * top, 1.22 * top)
    axes.set_xticks(positions, [f"pp {split.pp}\ndp {split.dp}" for split in gpu_splits], fontsize=SMALL)
    thousands(axes.yaxis)
    axes.set_ylabel(say(en="seconds of a step", fr="secondes d’un pas"))
    axes.set_title(
        TEXTS.say("drawn", "title of a step", model=model, gpus=gpus, title=site.title, tp=tp, batch=batch),
        fontsize=NORMAL,
    )
    axes.legend(fontsize=SMALL, frameon=False, loc="best")
    plain(axes)
    return finish(figure), _split_sheet(gpu_splits)


def _split_sheet(gpu_splits: tuple[GpuSplit, ...]) -> Table:
    head = (
        "pp",
        "dp",
        part_words("bubble"),
        part_words("pipeline"),
        part_words("data"),
        say(en="whole step", fr="pas entier"),
        say(en="fullest GPU", fr="GPU le plus rempli"),
        say(en="fits", fr="tient"),
    )
    return Table(
        head,
        tuple(
            (
                str(split.pp), str(split.dp), seconds(split.bubble_s), seconds(split.pipeline_s), seconds(split.data_s),
                seconds(split.step_s), gigabytes(split.memory_bytes), yes_no(split.fits),
            )
            for split in gpu_splits
        ),
    )  # fmt: skip


def _split_alt(model: str, gpu_splits: tuple[GpuSplit, ...]) -> str:
    splits_text = ", ".join(
        f"pp {split.pp} dp {split.dp}: {seconds(split.bubble_s)} + {seconds(split.data_s)}" for split in gpu_splits
    )
    return TEXTS.say("split", "alt", model=model, splits_text=splits_text)
