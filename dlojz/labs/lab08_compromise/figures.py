"""Figures of lab 08 about searches: shardings, pipeline stages, errors of the cost model, messages, measured layouts.

Its notebook finds those about published trainings here too (`figures_published`).

Totals are summed again from the choice that is drawn. What is said of a row that the model misses comes from its table,
its neighbours or `docs/validation.md`.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §4.2, equation 1, and §5.2, equation 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from dlojz.base.language import brief_percent, decimal, refusal, rounded, say
from dlojz.base.table import Table, titles, visible
from dlojz.cost_model.validation import RowResult, TableResult, validate
from dlojz.display.canvas import LabFigure, decimal_marks, finish, new_figure, plain
from dlojz.display.style import BLACK, BLUE, EDGE, GREY, LINE_STYLES, ORANGE, SERIES, SHADE, VERMILION, YELLOW
from dlojz.hardware.evidence import Measurement
from dlojz.labs.kit.exercise import Said
from dlojz.labs.kit.figures import HEAT, PLATE, given, illustrated, logarithmic, pictured, short, thousands
from dlojz.labs.lab08_compromise.exercises_alpa import Chain, chain_cost
from dlojz.labs.lab08_compromise.figures_published import bloom as bloom  # noqa: PLC0414
from dlojz.labs.lab08_compromise.figures_published import bubble_or_all_reduce as bubble_or_all_reduce  # noqa: PLC0414
from dlojz.labs.lab08_compromise.figures_published import giants as giants  # noqa: PLC0414
from dlojz.planner.answer import seconds
from dlojz.planner.this_machine import LocalChoice

Path = Sequence[int]


@pictured
def mlp_sharding(costs: Chain, solution: Any = None, **others: Any) -> LabFigure:
    """Draw the strategies of every layer with their cost, and the path of a solution through them.

    Frames show the path; between two layers stands what resharding costs; the legend has the sum. At the right, what
    resharding costs between two neighbours for every pair of strategies.

    Args:
        costs: names of the strategies, cost of each in every layer, and the matrices between layers.
        solution: number of the strategy of each layer, or what has it (`.strategies()`), or a function without
            arguments that gives either; none by default.
        **others: further solutions by name, to compare.

    Raises:
        LabError: for a solution that does not name a strategy for each layer.
    """
    solutions = others if solution is None else {"yours": solution, **others}
    paths = {
        _usual(
            name, yours=say(en="chosen", fr="choisi"), batch=say(en="data parallelism", fr="Data Parallelism")
        ): _path(given(one), costs)
        for name, one in solutions.items()
    }
    totals = {name: chain_cost(costs.costs, costs.resharding, path) for name, path in paths.items()}
    layers, rows = len(costs.costs), len(costs.strategies)
    told = [f"{name} {rounded(total, 4)}" for name, total in totals.items()]
    alt = say(
        en=f"Costs of {rows} strategies in {layers} layers. Totals: {', '.join(told) or 'none'}.",
        fr=f"Coûts de {rows} stratégies dans {layers} couches. Totaux : {', '.join(told) or 'aucun'}.",
    )
    figure = new_figure(min(5.2 + 0.95 * layers, 11.0), 0.6 * rows + 1.7, alt=alt)
    left, right = figure.subplots(1, 2, width_ratios=(max(layers, 3), rows + 0.8))
    names = [_usual(one) for one in costs.strategies]
    table = np.array([[_cell(some, k) for some in costs.costs] for k in range(rows)])
    _heat(left, table, f"{say(en='layer', fr='couche')} {{}}", names)
    left.set_title(
        say(en="cost of each strategy, in each layer", fr="coût de chaque stratégie, par couche"), fontsize=9
    )
    for place, ((name, path), (color, dashes, _)) in enumerate(zip(paths.items(), LINE_STYLES[4:], strict=False)):
        half = 0.45 - 0.05 * place  # of the frame around a cell's number, so that several solutions are told apart
        label = say(en=f"{name}: {rounded(totals[name], 4)}", fr=f"{name} : {rounded(totals[name], 4)}")
        look: dict[str, Any] = {"linestyle": dashes, "linewidth": 2}
        for layer, k in enumerate(path):
            frame = Rectangle((layer - half, k - half), 2 * half, 2 * half, fill=False, edgecolor=color, **look)
            frame.set_label(label if layer == 0 else "")
            left.add_patch(frame)
        for layer, (here, there) in enumerate(pairwise(path)):
            left.plot([layer + half, layer + 1 - half], [here, there], color=color, **look)
            paid = costs.resharding[layer][here][there]
            if paid and not place:
                left.text(
                    layer + 0.5, (here + there) // 2 + 0.5, f"+{rounded(paid, 4)}", fontsize=8.5, color=color,
                    ha="center", va="center",
                    bbox={"facecolor": "white", "edgecolor": color, "linewidth": 0.5, "pad": 1.2},
                )  # fmt: skip
    if costs.resharding:
        _heat(right, np.array(costs.resharding[0]), "{}", names, names)
        right.set_xlabel(say(en="next layer", fr="couche suivante"))
        right.set_title(say(en="resharding, layers 1 → 2", fr="redécoupage, couches 1 → 2"), fontsize=9)
    else:
        right.set_axis_off()
    if paths:
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return finish(figure)


_NAMES = {
    "column": Said("by columns", "par colonne"),
    "row": Said("by rows", "par ligne"),
    "batch": Said("along the batch", "selon le batch"),
    "alone": Said("each layer alone", "chaque couche seule"),
    "greedy": Said("greedy", "glouton"),
    "package": Said("the package", "le paquet"),
    "lab_03": Said("lab 03", "TP 03"),
}


def _usual(name: str, **others: str) -> str:
    """A usual name in the reader's language; another one as it is."""
    return others.get(name) or str(_NAMES.get(name, visible(name).replace("_", " ")))


def _path(solution: Any, costs: Chain) -> list[int]:
    taken = solution.strategies() if hasattr(solution, "strategies") else solution
    path = list(taken) if isinstance(taken, Sequence | np.ndarray) else []
    legal = len(path) == len(costs.costs) and all(
        isinstance(k, int | np.integer) and 0 <= k < len(some) for k, some in zip(path, costs.costs, strict=False)
    )
    if not legal:
        raise refusal(
            en=f"a solution names one strategy, from 0, for each of the {len(costs.costs)} layers, but "
            f"{visible(repr(taken)[:80])} was received.",
            fr=f"une solution nomme une stratégie, à partir de 0, pour chacune des {len(costs.costs)} couches ; "
            f"reçu : {visible(repr(taken)[:80])}.",
        )
    return [int(k) for k in path]


def _cell(some: Sequence[float], place: int) -> float:
    return float(some[place]) if place < len(some) else math.nan


def _heat(axes: Axes, table: np.ndarray[Any, Any], across: str, down: Sequence[str], names: Sequence[str] = ()) -> None:
    """A table in colours with its numbers; the deeper the blue, the more it costs."""
    finite = table[np.isfinite(table)]
    top = float(finite.max(initial=0)) or 1.0
    axes.imshow(np.where(np.isfinite(table), table, np.nan), cmap=HEAT, vmin=0, vmax=1.9 * top, aspect="auto")
    for row, line in enumerate(table):
        for column, value in enumerate(line):
            if math.isfinite(value):
                axes.text(column, row, rounded(value, 4), ha="center", va="center", fontsize=8.5)
    columns = names or [across.format(column + 1) for column in range(table.shape[1])]
    axes.set_xticks(range(table.shape[1]), [visible(one) for one in columns], fontsize=8)
    axes.set_yticks(range(len(down)), [visible(one) for one in down], fontsize=8)
    axes.set_xticks(np.arange(table.shape[1] + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(down) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="both", length=0)


MOST_NUMBERED = 10
"""Layers up to which every cell of a stage table has its number."""
MOST_DRAWN = 600
"""Micro-batches × stages up to which a pipeline is drawn whole."""
Stage = tuple[int, int, int]
"""First layer, last layer (included), devices."""


@pictured
def stages(table: Mapping[Stage, float], chosen: Any, num_micro_batches: int, *, unit: str = "s") -> LabFigure:
    """Draw the table t(first … last, devices) as heat maps, the stages chosen in it, and their pipeline.

    Args:
        table: (first layer, last layer included, devices) → time of one micro-batch; what is absent cannot be.
        chosen: the stages, as such triples in the order of the layers, or a `PipelinePlan`, or a function without
            arguments that gives either.
        num_micro_batches: B, at least 1.
        unit: of the times; empty if they have none.

    Raises:
        LabError: for stages that the table does not have, that leave a layer out, or without a micro-batch.
    """
    picked = _stages(given(chosen), table, num_micro_batches)
    times = [float(table[stage]) for stage in picked]
    total = sum(times) + (num_micro_batches - 1) * max(times)
    sizes = sorted({devices for _, _, devices in table})
    layers = 1 + max(last for _, last, _ in table)
    figure = new_figure(
        max(3.1 * len(sizes), 8.6), 3.4 + 0.42 * len(picked) + 1.5, alt=_stages_alt(picked, times, total)
    )
    halves = figure.add_gridspec(2, 1, height_ratios=(3.3, 0.42 * len(picked) + 1.7))
    upper, lower = figure.add_subfigure(halves[0]), figure.add_subfigure(halves[1])
    panels = upper.subplots(1, len(sizes), squeeze=False)[0]
    for place, (axes, devices) in enumerate(zip(panels, sizes, strict=True)):
        _stage_table(axes, table, picked, layers, devices, first=place == 0)
    _pipeline(lower.subplots(), picked, times, num_micro_batches, unit)
    return finish(figure)


def _stages(chosen: Any, table: Mapping[Stage, float], num_micro_batches: int) -> list[Stage]:
    if hasattr(chosen, "stages"):
        chosen = [(one.first, one.last, one.submesh.num_devices) for one in chosen.stages]
    try:
        picked = [(int(first), int(last), int(devices)) for first, last, devices in chosen]
    except (TypeError, ValueError):
        picked = []
    layers = 1 + max((last for _, last, _ in table), default=-1)
    covered = [layer for first, last, _ in picked for layer in range(first, last + 1)]
    if not picked or covered != list(range(layers)) or any(stage not in table for stage in picked):
        raise refusal(
            en=f"stages are triples (first layer, last layer, devices) of the table that hold each of the {layers} "
            f"layers once, in order, but {visible(repr(chosen)[:80])} was received.",
            fr="les étages sont des triplets (première couche, dernière couche, périphériques) de la table, qui "
            f"contiennent chacune des {layers} couches une fois, dans l’ordre ; reçu : {visible(repr(chosen)[:80])}.",
        )
    if num_micro_batches < 1:
        raise refusal(
            en=f"a step has at least one micro-batch, but {num_micro_batches} was received: use 1 or more.",
            fr=f"un pas a au moins un micro-batch, mais {num_micro_batches} a été reçu : prenez 1 ou plus.",
        )
    return picked


def _stage_table(
    axes: Axes, table: Mapping[Stage, float], picked: Sequence[Stage], layers: int, devices: int, *, first: bool
) -> None:
    """t for one number of devices: first layer down, last layer across; chosen stages framed, with their number."""
    values = np.full((layers, layers), np.nan)
    for (start, last, own), time in table.items():
        if own == devices and math.isfinite(time):
            values[start, last] = time
    longest = max(time for time in table.values() if math.isfinite(time))
    axes.imshow(values, cmap=HEAT, vmin=0, vmax=1.9 * longest, aspect="auto")
    if layers <= MOST_NUMBERED:
        for start, last in np.argwhere(np.isfinite(values)):
            size = 7.5 if layers <= 7 else 6
            axes.text(last, start, short(values[start, last]), ha="center", va="center", fontsize=size)
    for place, (start, last, own) in enumerate(picked):
        if own == devices:
            axes.add_patch(
                Rectangle((last - 0.5, start - 0.5), 1, 1, fill=False, edgecolor=VERMILION, linewidth=2.4, zorder=4)
            )
            axes.text(
                last - 0.5, start - 0.5, str(place), ha="center", va="center", fontsize=7.5, color="white", zorder=5,
                fontweight="bold", bbox={"boxstyle": "circle,pad=0.18", "facecolor": VERMILION, "edgecolor": "none"},
            )  # fmt: skip
    axes.set_xticks(range(layers))
    axes.set_yticks(range(layers))
    axes.tick_params(labelsize=7, length=0)
    axes.set_xlabel(say(en="last layer", fr="dernière couche"), fontsize=8.5)
    if first:
        axes.set_ylabel(say(en="first layer", fr="première couche"), fontsize=8.5)
    axes.set_title(say(en=f"{devices} GPU" + "s" * (devices > 1), fr=f"{devices} GPU"), fontsize=9)
    axes.spines[:].set_visible(False)


def _pipeline(axes: Axes, picked: Sequence[Stage], times: Sequence[float], number_of: int, unit: str) -> None:
    """Micro-batch after micro-batch through the stages; each begins when its stage is free and its input is there."""
    drawn = min(number_of, max(1, MOST_DRAWN // len(picked)))
    total = sum(times) + (number_of - 1) * max(times)
    ends = np.zeros(len(picked))
    for micro_batch in range(drawn):
        ready = 0.0
        for stage, time in enumerate(times):
            start = max(ready, ends[stage])
            ready = ends[stage] = start + time
            axes.add_patch(
                Rectangle(
                    (start, stage - 0.4), time, 0.8, facecolor=SERIES[micro_batch % len(SERIES)], edgecolor=EDGE,
                    linewidth=0.4,
                )
            )  # fmt: skip
            if time > total / 45:
                axes.text(start + time / 2, stage, str(micro_batch), ha="center", va="center", fontsize=7)
    axes.axvline(total, color=BLACK, linestyle="--", linewidth=1)
    axes.set_xlim(0, 1.02 * total)
    axes.set_ylim(len(picked) - 0.45, -0.55)
    labels = [
        say(
            en=f"{place}: layer{'s' * (last > first)} {_span(first, last)} on {devices} GPU",
            fr=f"{place} : couche{'s' * (last > first)} {_span(first, last)} sur {devices} GPU",
        )
        for place, (first, last, devices) in enumerate(picked)
    ]
    axes.set_yticks(range(len(picked)), labels, fontsize=8)
    axes.set_xlabel(say(en="time", fr="temps") + (f" ({unit})" if unit else ""))
    decimal_marks(axes.xaxis)
    waits = 1 - number_of * max(times) / total
    axes.set_title(
        f"T = Σt + (B − 1)·max t = {short(sum(times))} + {number_of - 1} × {short(max(times))} = {rounded(total, 4)}"
        + (f" {unit}" if unit else "")
        + say(en="; filling and draining ", fr=" ; remplissage et vidage ")
        + brief_percent(waits),
        fontsize=9, loc="left",
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


def _stages_alt(picked: Sequence[Stage], times: Sequence[float], total: float) -> str:
    each = ", ".join(
        f"{_span(first, last)} × {devices} GPU = {rounded(time, 4)}"
        for (first, last, devices), time in zip(picked, times, strict=True)
    )
    return say(
        en=f"Stages chosen in a table of times, and the pipeline they make, {rounded(total, 4)} long: {each}.",
        fr=f"Étages choisis dans une table de durées, et leur pipeline, long de {rounded(total, 4)} : {each}.",
    )


FAR: Final = 0.10
"""Error from which a row is annotated."""
SAME: Final = ("size", "gpus", "dp", "tp", "pp", "cp", "zero", "chunks", "checkpointing", "precision", "series")
"""What a row has in common with the neighbour that it is told apart from: all but micro-batch and batch."""


def known(one: RowResult, among: Sequence[RowResult] = ()) -> str:
    """Say what is known of a row that the cost model misses.

    Args:
        among: all rows of its table, to look for a neighbour with another micro-batch.

    Source: `docs/validation.md`; the head and the notes of the row's table.
    """
    row = one.row
    said = _of_table(row)
    if said:
        return said
    if "not printed" in row.note or "heads by" in row.note or "batch of the head" in row.note:
        return say(
            en="the source leaves a part of the layout open; it was completed",
            fr="la source laisse ouverte une partie de la configuration ; elle a été complétée",
        )
    twin = _neighbour(one, among)
    if twin is not None:
        there = brief_percent(twin.error, signed=True)
        return say(
            en=f"nothing known; with micro-batch {twin.row.micro_batch} the same layout is {there} off",
            fr=f"rien de connu ; avec un micro-batch de {twin.row.micro_batch}, l’écart est de {there}",
        )
    return say(en="nothing is known", fr="rien n’est connu")


def _of_table(row: Measurement) -> str:
    """What `docs/validation.md` says of rows like this one; empty where it says nothing."""
    match row.table:
        case "mt-nlg":
            return say(
                en="never fitted on; its software is slower than Narayanan’s on the same machine",
                fr="jamais ajusté ; son logiciel est plus lent que celui de Narayanan sur la même machine",
            )
        case "sc21-2" if row.zero == 3:
            return say(
                en="ZeRO-3 of 2021: the model lets it gather through one network card per node",
                fr="ZeRO-3 de 2021 : le modèle ne lui accorde qu’une carte réseau par nœud",
            )
        case "jean-zay-v100":
            return say(
                en="shared network: one layout took 129, 217, 125 and 225 s on four days",
                fr="réseau partagé : une même configuration a pris 129, 217, 125 et 225 s en quatre jours",
            )
        case "jean-zay-a100" if row.size.head_size == 128:
            return say(
                en="heads 128 wide, fast on some days and not on others",
                fr="têtes de largeur 128, rapides certains jours et pas d’autres",
            )
        case "vtrain-multi" if row.tp in (2, 4) and row.pp > 1:
            return say(
                en="tp 2 or 4 with a pipeline: slower than with another micro-batch; the layout does not say why",
                fr="tp 2 ou 4 avec pipeline : plus lent qu’avec un autre micro-batch ; rien ne dit pourquoi",
            )
    return ""


def _neighbour(one: RowResult, among: Sequence[RowResult]) -> RowResult | None:
    """The row that differs in its micro-batch alone and that the model comes closest to; None without one nearer."""
    same = [
        other
        for other in among
        if other.row.micro_batch != one.row.micro_batch
        and all(getattr(other.row, name) == getattr(one.row, name) for name in SAME)
    ]
    nearest = min(same, key=lambda other: abs(other.error), default=None)
    return nearest if nearest is not None and abs(nearest.error) < FAR else None


@illustrated
def errors(table_name: str = "jean-zay-a100") -> tuple[LabFigure, Table]:
    """Draw predicted over measured for every row of a published table; explain those over 10 %.

    Args:
        table_name: of `dlojz.cost_model.validation.validated()`.

    Raises:
        LabError: for a table that prints no times, or that there is not.
    """
    found = validate(table_name)
    reasons = _reasons(found)
    figure = new_figure(11.0, 4.6 + 0.19 * len(reasons), alt=_alt(found))
    axes = figure.subplots()
    _points(axes, found, reasons)
    colon = say(en=": ", fr=" : ")
    told = "\n".join(
        letter + colon + reason + (f" ({len(rows)})" if len(rows) > 1 else "")
        for letter, (reason, rows) in reasons.items()
    )
    figure.supxlabel(told, x=0.06, ha="left", fontsize=8)
    return finish(figure), _sheet(found, reasons)


def _reasons(found: TableResult) -> dict[str, tuple[str, list[RowResult]]]:
    """The rows far off, under one letter for each reason, in the order of the table."""
    by_reason: dict[str, list[RowResult]] = {}
    for one in found.rows:
        if abs(one.error) > FAR:
            by_reason.setdefault(known(one, found.rows), []).append(one)
    return {chr(ord("a") + place): pair for place, pair in enumerate(by_reason.items())}


def _points(axes: Axes, found: TableResult, reasons: dict[str, tuple[str, list[RowResult]]]) -> None:
    places = {one.row.row: place for place, one in enumerate(found.rows)}
    axes.axhspan(-100 * FAR, 100 * FAR, color=SHADE, zorder=0)
    axes.axhline(0, color=GREY, linewidth=1)
    for held, face, label in (
        (True, BLUE, say(en="held out", fr="mise de côté")),
        (False, "none", say(en="fitted on", fr="ajustée")),
    ):
        rows = [one for one in found.rows if one.held_out == held]
        axes.plot(
            [places[one.row.row] for one in rows], [100 * one.error for one in rows], linestyle="none", marker="o",
            markersize=5, markerfacecolor=face, markeredgecolor=BLUE, label=label,
        )  # fmt: skip
    axes.plot(
        range(len(found.rows)), [100 * (one.trivial_s / one.measured_s - 1) for one in found.rows],
        linestyle="none", marker="_", markersize=6, color=GREY, zorder=1,
        label=say(en="constant FLOP/s per GPU", fr="FLOP/s par GPU constants"),
    )  # fmt: skip
    for letter, (_, far) in reasons.items():
        for one in far:
            axes.annotate(
                letter, (places[one.row.row], 100 * one.error), xytext=(0, 6 if one.error > 0 else -6),
                textcoords="offset points", ha="center", va="bottom" if one.error > 0 else "top", fontsize=8.5,
                color=VERMILION, fontweight="bold",
            )  # fmt: skip
    axes.margins(y=0.12)
    axes.set_ylim(min(axes.get_ylim()[0], -16.0), max(axes.get_ylim()[1], 24.0))
    axes.set_xlim(-1, len(found.rows))
    axes.set_xticks([])
    thousands(axes.yaxis)
    axes.set_ylabel(say(en="predicted over measured, %", fr="prédit sur mesuré, %"))
    axes.set_xlabel(
        say(en="measured trainings, in the order of the source", fr="entraînements mesurés, dans l’ordre de la source")
    )
    axes.set_title(_title(found), fontsize=9.5, loc="left")
    axes.legend(fontsize=8, loc="upper right", ncols=3, framealpha=0.9)
    plain(axes)


def _title(found: TableResult) -> str:
    return say(
        en=f"{found.name}: {len(found.rows)} rows; held-out error {brief_percent(found.mean)} on average, a constant "
        f"rate {brief_percent(found.trivial)}",
        fr=f"{found.name} : {len(found.rows)} lignes ; erreur moyenne des lignes mises de côté "
        f"{brief_percent(found.mean)}, débit constant {brief_percent(found.trivial)}",
    )


def _sheet(found: TableResult, reasons: dict[str, tuple[str, list[RowResult]]]) -> Table:
    head = titles(
        en="row in the source; dp · tp · pp; micro-batch; measured; predicted; error; in the fit; what is known",
        fr="ligne de la source; dp · tp · pp; micro-batch; mesuré; prédit; erreur; ajustement; ce qu’on en sait",
    )
    held, fitted = say(en="held out", fr="mise de côté"), say(en="fitted on", fr="ajustée")
    rows = [
        (
            one.row.row.partition("/")[2],
            f"{one.row.dp} · {one.row.tp} · {one.row.pp}",
            str(one.row.micro_batch),
            seconds(one.measured_s),
            seconds(one.predicted_s),
            brief_percent(one.error, signed=True),
            held if one.held_out else fitted,
            letter + say(en=": ", fr=" : ") + reason,
        )
        for letter, (reason, far) in reasons.items()
        for one in far
    ]
    return Table(head, tuple(rows))


def _alt(found: TableResult) -> str:
    far = [one for one in found.rows if abs(one.error) > FAR]
    each = ", ".join(f"{one.row.row.partition('/')[2]} {brief_percent(one.error, signed=True)}" for one in far)
    return _title(found) + ". " + say(en=f"Over 10 %: {each or 'none'}.", fr=f"Au-delà de 10 % : {each or 'aucune'}.")


Line = tuple[float, float]
"""α in seconds and β in seconds per byte."""


@pictured
def alpha_beta(
    points: Sequence[tuple[float, float]], *, factor: float = 1.0, **fits: Line | Callable[[], Line]
) -> LabFigure:
    """Draw measured messages, the lines t = α + factor·n·β through them, and each line's residuals.

    Args:
        points: bytes and seconds of each message, measured; what else they hold is not looked at.
        factor: bytes that the busiest link carries per byte of the message.
        **fits: name → (α in s, β in s per byte), or a function without arguments that gives them.

    Raises:
        LabError: without a point, or for a message or a duration that is not above 0.
    """
    measured = sorted((float(point[0]), float(point[1])) for point in points)
    if not measured or min(min(pair) for pair in measured) <= 0:
        raise refusal(
            en=f"points are pairs of bytes and seconds above 0, but {visible(measured[:1])} was received first.",
            fr="points contient des paires d’octets et de secondes positifs ; la première reçue : "
            f"{visible(measured[:1])}.",
        )
    lines = {_usual(name, yours=say(en="yours", fr="la vôtre")): _line(given(fit)) for name, fit in fits.items()}
    sizes, times = (np.array(column) for column in zip(*measured, strict=True))
    figure = new_figure(8.2, 5.4, alt=_alpha_beta_alt(len(measured), lines))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.1, 1.0))
    upper.plot(sizes, 1e3 * times, linestyle="none", marker="o", color=BLACK, markersize=5,
               label=say(en="measured", fr="mesuré"))  # fmt: skip
    along = np.geomspace(sizes.min(), sizes.max(), 200)
    for (name, (alpha, beta)), (color, dashes, marker) in zip(lines.items(), LINE_STYLES[1:], strict=False):
        drawn, there = alpha + factor * beta * along, alpha + factor * beta * sizes
        above = drawn > 0  # a line that goes below 0 has no place on a logarithmic axis
        label = say(
            en=f"{name}: α = {seconds(alpha)}, β = {short(1e9 * beta)} ns/B",
            fr=f"{name} : α = {seconds(alpha)}, β = {short(1e9 * beta)} ns/o",
        ).replace("= -", "= −")
        upper.plot(along[above], 1e3 * drawn[above], color=color, linestyle=dashes, linewidth=1.6, label=label)
        lower.plot(sizes, 100 * (there / times - 1), color=color, linestyle=dashes, marker=marker, markersize=5)
    upper.set_xscale("log")
    upper.set_yscale("log")
    upper.set_ylim(4e2 * times.min(), 2.5e3 * times.max())  # a line may go below 0, the measurements do not
    logarithmic(upper.yaxis, (1.0, 3.0))
    upper.set_ylabel(say(en="milliseconds (log.)", fr="millisecondes (log.)"))
    upper.legend(fontsize=8.5, frameon=False)
    lower.axhline(0, color=GREY, linewidth=1)
    lower.set_xlim(0.7 * sizes.min(), 1.4 * sizes.max())
    logarithmic(lower.xaxis)
    lower.xaxis.set_major_formatter(lambda value, _: _size(value))
    lower.set_xlabel(say(en="bytes of the message (log.)", fr="octets du message (log.)"))
    lower.set_ylabel(say(en="line over\nmeasured, %", fr="droite sur\nmesuré, %"))
    for axes in (upper, lower):
        plain(axes)
    return finish(figure)


def _line(value: Any) -> Line:
    try:
        alpha, beta = (float(one) for one in value)
    except (TypeError, ValueError):
        raise refusal(
            en=f"a fit is a pair (α, β) of numbers, but {visible(repr(value)[:80])} was received.",
            fr=f"un ajustement est une paire (α, β) de nombres, mais {visible(repr(value)[:80])} a été reçu.",
        ) from None
    return alpha, beta


def _size(value: float) -> str:
    for factor, unit_en, unit_fr in ((1e9, "GB", "Go"), (1e6, "MB", "Mo"), (1e3, "kB", "ko")):
        if value >= factor:
            return f"{short(value / factor)} {say(en=unit_en, fr=unit_fr)}"
    return f"{short(value)} {say(en='B', fr='o')}"


def _alpha_beta_alt(number: int, lines: Mapping[str, Line]) -> str:
    each = "; ".join(
        f"{name} α = {seconds(alpha)}, β = {short(1e9 * beta)} ns" for name, (alpha, beta) in lines.items()
    )
    return say(
        en=f"{number} measured messages, seconds against bytes on logarithmic axes, and lines through them: {each}.",
        fr=f"{number} messages mesurés, durée selon la taille en échelle logarithmique, et des droites : {each}.",
    )


@illustrated
def neighbours(rows: Sequence[LocalChoice], measured_s: Sequence[float]) -> tuple[LabFigure, Table]:
    """Draw layouts of this machine, predicted beside measured, and what the first choice loses.

    Args:
        rows: of `plan_here`, in any order.
        measured_s: seconds of a step of each, in the same order.

    Raises:
        LabError: if there is none, or not one time for each.
    """
    if not rows or len(rows) != len(measured_s) or min(measured_s) <= 0:
        raise refusal(
            en=f"each of the {len(rows)} layouts needs its measured seconds, but {len(measured_s)} were received: "
            "give measure_steps the configurations of the same rows.",
            fr=f"à chacune des {len(rows)} configurations, il faut sa durée mesurée, mais {len(measured_s)} ont "
            "été reçues : donnez à measure_steps les configurations de ces mêmes lignes.",
        )
    pairs = sorted(zip(rows, map(float, measured_s), strict=True), key=lambda pair: pair[0].step_s)
    loss = pairs[0][1] / min(value for _, value in pairs) - 1
    figure = new_figure(10.0, 0.5 * len(pairs) + 1.9, alt=_neighbours_alt(pairs, loss))
    axes = figure.subplots()
    _bars(axes, pairs)
    axes.set_title(_loss_words(pairs, loss), fontsize=9.5, loc="left")
    return finish(figure), _neighbours_sheet(pairs)


def _bars(axes: Axes, pairs: Sequence[tuple[LocalChoice, float]]) -> None:
    places = np.arange(len(pairs))
    predicted, measured = [1e3 * row.step_s for row, _ in pairs], [1e3 * value for _, value in pairs]
    for shift, values, color, hatch, label in (
        (-0.19, predicted, ORANGE, "//", say(en="predicted", fr="prédit")),
        (0.19, measured, BLUE, "", say(en="measured (median)", fr="mesuré (médiane)")),
    ):
        bars = axes.barh(
            places + shift, values, 0.36, color=color, hatch=hatch, edgecolor=EDGE, linewidth=0.6, label=label
        )
        axes.bar_label(bars, [short(value) for value in values], padding=3, fontsize=8, bbox=PLATE)
    fastest = int(np.argmin(measured))
    reach = 1.12 * max(*predicted, *measured)
    beside: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "clip_on": False, "markeredgecolor": BLACK}
    first, best = say(en="first choice", fr="premier choix"), say(en="fastest measured", fr="la plus rapide mesurée")
    axes.plot([1.015], [0], marker="*", markersize=13, color=YELLOW, label=first, linestyle="none", **beside)
    axes.plot([1.04], [fastest], marker="P", markersize=9, color=BLUE, label=best, linestyle="none", **beside)
    axes.set_xlim(0, reach)
    axes.set_ylim(len(pairs) - 0.4, -0.6)
    axes.set_yticks(places, [visible(row.title) for row, _ in pairs], fontsize=8.5)
    axes.set_xlabel(say(en="milliseconds of a step", fr="millisecondes d’un pas"))
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    plain(axes)
    axes.figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)


def _loss_words(pairs: Sequence[tuple[LocalChoice, float]], loss: float) -> str:
    if loss <= 0:
        return say(
            en=f"first choice of {len(pairs)}: also the fastest measured",
            fr=f"premier choix sur {len(pairs)} : c’est aussi la plus rapide mesurée",
        )
    return say(
        en=f"first choice of {len(pairs)}: {brief_percent(loss)} above the fastest measured",
        fr=f"premier choix sur {len(pairs)} : {brief_percent(loss)} au-dessus de la plus rapide mesurée",
    )


def _neighbours_sheet(pairs: Sequence[tuple[LocalChoice, float]]) -> Table:
    fastest = min(value for _, value in pairs)
    head = titles(
        en="layout; predicted; measured; predicted over measured; over the fastest",
        fr="configuration; prédit; mesuré; prédit sur mesuré; sur la plus rapide",
    )
    rows = [
        (
            ("★ " if place == 0 else "") + row.title,
            seconds(row.step_s),
            seconds(value),
            brief_percent(row.step_s / value - 1, signed=True),
            f"× {decimal(value / fastest, 2)}",
        )
        for place, (row, value) in enumerate(pairs)
    ]
    return Table(head, tuple(rows))


def _neighbours_alt(pairs: Sequence[tuple[LocalChoice, float]], loss: float) -> str:
    each = ", ".join(f"{visible(row.title)}: {seconds(row.step_s)} / {seconds(value)}" for row, value in pairs)
    return f"{_loss_words(pairs, loss)}. " + say(
        en=f"Predicted / measured seconds of a step: {each}.", fr=f"Durée d’un pas, prédite / mesurée : {each}."
    )
