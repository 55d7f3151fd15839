"""Figures and tables of lab 04: states by stage, ZeRO's published table, stages side by side, offloading, lost time.

What is drawn is what the student's own function gives, what the package predicts, or what a run measured; each figure
tells in words (its `alt`) what it shows.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from dlojz.base.language import MEBIBYTE, decimal, format_count, localized, say, significant
from dlojz.base.table import Table, titles
from dlojz.display.canvas import LabFigure, finish, new_figure, plain
from dlojz.display.style import (
    BLACK,
    CATEGORY_STYLES,
    COLLECTIVE_STYLES,
    GREY,
    HEADING,
    PREDICTED_ALPHA,
    SMALL,
    category_label,
)
from dlojz.hardware import Device
from dlojz.labs.kit.exercise import Sentences, or_to_do
from dlojz.labs.kit.figures import (
    answered,
    bar,
    figure_of,
    labelled,
    legend_above,
    measured_footprint,
    panel,
    plot_lines,
)
from dlojz.labs.lab04_zero.exercises_cost import compare_with_compute
from dlojz.prediction import predict
from dlojz.results.footprint import CATEGORIES, Category, Footprint
from dlojz.running.run import Run

TEXTS = Sentences(Path(__file__).with_suffix(".md"))

GIB = 2**30
SHOWN: tuple[Category, ...] = ("weights", "gradients", "optimizer", "master")


ZERO_PUBLISHED_RANKS = (1, 4, 16, 64, 256, 1024)
# Rajbhandari et al. 2020 (arXiv 1910.02054), table 1: gigabytes (10⁹) per GPU by number of GPUs, for stages 1, 2 and 3.
TABLE_1: dict[float, tuple[str, ...]] = {
    7.5e9: ("120 120 120", "52.5 41.3 30", "35.6 21.6 7.5", "31.4 16.6 1.88", "30.4 15.4 0.47", "30.1 15.1 0.12"),
    128e9: ("2048 2048 2048", "896 704 512", "608 368 128", "536 284 32", "518 263 8", "513 257 2"),
    1e12: (
        "16000 16000 16000",
        "7000 5500 4000",
        "4750 2875 1000",
        "4187 2218 250",
        "4046 2054 62.5",
        "4011 2013 15.6",
    ),
}


@or_to_do
def table_1(state_bytes: Callable[[float, int, int], float]) -> Table:
    """Lay a function of the bytes per rank beside ZeRO's table 1, and count the cells that agree.

    Args:
        state_bytes: called with parameters, ranks and stage.
    """
    rows, agreeing = [], 0
    for parameters, printed_rows in TABLE_1.items():
        for ranks, printed_row in zip(ZERO_PUBLISHED_RANKS, printed_rows, strict=True):
            cells = []
            for stage, printed in enumerate(printed_row.split(), start=1):
                ours = state_bytes(parameters, ranks, stage) / 1e9
                agreeing += abs(ours - float(printed)) < _last_digit(printed)
                cells += [decimal(ours, 2), f"({localized(printed)})"]
            rows.append((format_count(parameters), str(ranks), *cells))
    count = 3 * len(rows)
    agree = TEXTS.say("table 1", "agreeing cells", agreeing=agreeing, count=count)
    stages = "; ".join(
        f"{say(en='stage', fr='niveau')} {stage}; {say(en='(paper)', fr='(article)')}" for stage in (1, 2, 3)
    )
    unit = say(en="Stages: GB (10⁹ bytes) per GPU.", fr="Niveaux : Go (10⁹ octets) par GPU.")
    return Table(
        titles(en=f"parameters; GPUs; {stages}", fr=f"paramètres; GPU; {stages}"), tuple(rows), notes=(unit, agree)
    )


def _last_digit(printed: str) -> float:
    """One unit of the last digit; the paper rounds some figures and cuts others off."""
    return float(10.0 ** -len(printed.partition(".")[2]))


def _powers_in_full(axes: Axes) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())


@or_to_do
def states_by_ranks(
    state_bytes: Callable[[float, int, int], float], parameters: float, devices: Sequence[Device]
) -> LabFigure:
    """Bytes per rank by number of ranks, a line per stage, with the memory of some devices."""
    axes = panel(
        8.0,
        4.0,
        en=f"States of {format_count(parameters)} parameters, GiB per rank by number of ranks, for stages 0 to 3.",
        fr=f"États de {format_count(parameters)} paramètres, en Gio par rang selon le nombre de rangs, pour les "
        "niveaux 0 à 3.",
    )
    ranks = [2**power for power in range(11)]
    names = (
        say(en="no ZeRO", fr="sans ZeRO"),
        *(say(en=f"stage {level}", fr=f"niveau {level}") for level in (1, 2, 3)),
    )
    states = {name: [state_bytes(parameters, size, stage) / GIB for size in ranks] for stage, name in enumerate(names)}
    plot_lines(axes, ranks, states, markersize=4)
    for device in devices:
        limit = device.memory_bytes / GIB
        axes.axhline(limit, color=GREY, linestyle="--", linewidth=1)
        axes.annotate(
            device.title, (ranks[-1], limit), xytext=(0, 2), textcoords="offset points", ha="right", fontsize=SMALL
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ranks)
    _powers_in_full(axes)
    return labelled(
        axes, say(en="ranks", fr="rangs"), say(en="states per rank (GiB)", fr="états par rang (Gio)"), loc="lower left"
    )


def stages(runs: Sequence[Run]) -> LabFigure:
    """Runs side by side: states of rank 0 by category and the peak, predicted over measured; bytes sent per step.

    Raises:
        LabError: if a run was not measured.
    """
    pairs = [(run, predict(run.config), measured_footprint(run)) for run in runs]
    figure = new_figure(
        12.0,
        1.2 + 0.5 * len(runs),
        alt=say(
            en="States by category and bytes sent per step, predicted and measured, of: ",
            fr="États par catégorie et octets envoyés par pas, prédits et mesurés, pour : ",
        )
        + ", ".join(run.config.layout.title for run in runs),
    )
    memory, traffic_axes = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for row, (_, predicted, measured) in enumerate(pairs):
        for footprint, shift, alpha in ((predicted, -0.2, PREDICTED_ALPHA), (measured, 0.2, 1.0)):
            _stack_states(memory, footprint, row + shift, alpha)
            _stack_traffic(traffic_axes, footprint, row + shift, alpha)
    memory.set_yticks(range(len(pairs)), [run.config.layout.title for run, *_ in pairs])
    memory.invert_yaxis()
    memory.set_xlabel(say(en="rank 0 (MiB)", fr="rang 0 (Mio)"))
    traffic_axes.set_xlabel(say(en="sent per step (passes)", fr="envoyé par pas (passages)"))
    for axes in (memory, traffic_axes):
        plain(axes)
    memory.set_title(
        say(en="states; peak ◇; pale: predicted", fr="états ; pic ◇ ; en clair : prédit"), loc="left", fontsize=HEADING
    )
    traffic_axes.set_title(say(en="communication", fr="communication"), loc="left", fontsize=HEADING)
    legend_above(memory, ncols=4, height=1.06)
    legend_above(traffic_axes, ncols=4, height=1.06)
    return finish(figure)


def _stack_states(axes: Axes, footprint: Footprint, row: float, alpha: float) -> None:
    start_mib = 0.0
    measured = footprint.source == "measured"
    for category in (name for name in CATEGORIES if name in SHOWN):
        size = (footprint.memory.category(category) or 0) / MEBIBYTE
        style = CATEGORY_STYLES[category]
        label = category_label(category) if measured else None
        if size:
            bar(axes, row, size, start_mib, style, alpha, label)
        start_mib += size
    if footprint.memory.peak_bytes is not None:
        fill = "white" if measured else "none"
        peak = footprint.memory.peak_bytes / MEBIBYTE
        axes.plot(peak, row, "D", color=BLACK, markerfacecolor=fill, markersize=5, alpha=alpha)


def _stack_traffic(axes: Axes, footprint: Footprint, row: float, alpha: float) -> None:
    whole_bytes = 4 * (footprint.parameters or 0)
    start_passes = 0.0
    for traffic in footprint.communication:
        if traffic.group != "dp":
            continue
        # A pass sends (N - 1) / N of the model's fp32 bytes; so the unit is one pass of the whole model.
        share = (traffic.group_size - 1) / traffic.group_size
        size = traffic.sent_bytes / (whole_bytes * share)
        style = COLLECTIVE_STYLES[traffic.collective]
        label = traffic.collective.replace("_", "-") if footprint.source == "measured" and size > 1e-3 else None
        bar(axes, row, size, start_passes, style, alpha, label)
        start_passes += size


@or_to_do
def offloading(
    ratio: Callable[[int, float, float, float], float], *, flops_per_s: float, pcie_bytes_per_s: float
) -> LabFigure:
    """Seconds of transfers over seconds of computation, by tokens per rank and step, for some numbers of ranks."""
    axes = panel(7.0, 3.4, *TEXTS.sentence("offloading", "alt"))
    tokens = [2**power for power in range(8, 18)]
    names = {
        1: say(en="1 rank", fr="1 rang"),
        4: say(en="4 ranks", fr="4 rangs"),
        16: say(en="16 ranks", fr="16 rangs"),
    }
    ratios = {
        name: [ratio(ranks, count, flops_per_s, pcie_bytes_per_s) for count in tokens] for ranks, name in names.items()
    }
    plot_lines(axes, tokens, ratios, markersize=4)
    _against_one(axes)
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens)
    _powers_in_full(axes)
    axes.set_xlabel(say(en="tokens per rank and step", fr="tokens par rang et par pas"))
    axes.set_ylabel(say(en="transfers / computation", fr="transferts / calcul"))
    return figure_of(axes)


@or_to_do
def lost_time(
    zero_3: Callable[[Sequence[float], int, float, float], float], cases: Sequence[tuple[str, int]]
) -> LabFigure:
    """Communication over computation of stages 2 and 3 for models and numbers of ranks, by the student's function."""
    ratios = [compare_with_compute(model, ranks, zero_3) for model, ranks in cases]
    labels = [f"{model}\n{ranks} GPU" for model, ranks in cases]
    figure = new_figure(
        7.0,
        3.4,
        alt=say(en="Communication over computation: ", fr="Communication rapportée au calcul : ")
        + ", ".join(f"{model} × {ranks}" for model, ranks in cases),
    )
    axes = figure.subplots()
    series = {name: [ratio[name] for ratio in ratios] for name in ("ZeRO-2", "ZeRO-3")}
    plot_lines(axes, labels, series, markersize=5)
    _against_one(axes)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(say(en="communication / computation", fr="communication / calcul"))
    return finish(figure)


@or_to_do
def lost_time_seen(zero_3: Callable[[Sequence[float], int, float, float], float]) -> Table:
    """Answer where the student's ZeRO-3 communicates longer than it computes, and how that grows with the ranks."""
    cases = (("coatnet_0", 64), ("coatnet_7", 64), ("coatnet_7", 8), ("coatnet_7", 1024))
    small, large, few, many = (compare_with_compute(*case, zero_3)["ZeRO-3"] for case in cases)
    return answered(
        [
            (TEXTS.say("lost time seen", "CoAtNet-0 on 64 GPUs"), small > 1),
            (TEXTS.say("lost time seen", "CoAtNet-7 on 64 GPUs"), large > 1),
            (TEXTS.say("lost time seen", "CoAtNet-7 from 8 to 1,024 GPUs"), f"× {significant(many / few, 2)}"),
        ]
    )  # fmt: skip


def _against_one(axes: Axes) -> None:
    axes.axhline(1.0, color=GREY, linestyle="--", linewidth=1)
    axes.set_yscale("log")
    axes.legend(frameon=False)
    plain(axes)
