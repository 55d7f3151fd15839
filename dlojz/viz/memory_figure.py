"""Memory over one traced step, stacked by category, with its peak; beside it the step as it was predicted.

Layer 4. Invariant: a curve is what the probe sampled, or what the forecast holds; nothing is smoothed. A forecast knows
the order of the movements and not their seconds, so its panel has its own axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dlojz.footprint import CATEGORIES, Category
from dlojz.record import MemorySample, RunRecord
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.units import byte_units, format_bytes
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.footprint_figure import far_limit
from dlojz.viz.markup import visible
from dlojz.viz.palette import BLACK, CATEGORY_STYLES, category_label, phase_label

if TYPE_CHECKING:
    from dlojz.predict.forecast import Forecast


def memory_figure(
    record: RunRecord,
    path: str | Path | None = None,
    limit_bytes: int | None = None,
    predicted: Forecast | None = None,
) -> LabFigure:
    """Draw the memory of rank 0 over the traced step.

    Args:
        record: a run whose memory was traced.
        path: picture to write, if any.
        limit_bytes: memory of the device, drawn as a line; one far beyond the peak is told in words.
        predicted: the forecast of the same run, drawn beside it on the same scale.

    Raises:
        LabError: if the run was not traced, or the picture cannot be written.
    """
    measured = record.memory_timeline
    if not measured:
        raise LabError(
            say(
                en=f"the run {record.run_id} has no memory timeline (it ended before its second step, "
                "or was not traced): run it for at least 3 steps.",
                fr=f"l’exécution {record.run_id} n’a pas de chronologie mémoire (elle s’est terminée avant son "
                "deuxième pas, ou n’a pas été tracée) : exécutez-la sur 3 pas au moins.",
            )
        )
    panels = [measured, *([predicted.samples] if predicted else [])]
    highest = max(sum(sample.bytes_by_category.values()) for samples in panels for sample in samples)
    power = max(n for n in range(len(byte_units())) if max(highest, 1) >= 1024**n)
    peaks = [format_bytes(max(sum(sample.bytes_by_category.values()) for sample in samples)) for samples in panels]
    figure = new_figure(
        13.0 if predicted else 11.0,
        5.2 if predicted else 4.8,
        alt=say(
            en=f"Memory by category over one step of {record.title}; peak {peaks[0]}",
            fr=f"Mémoire par catégorie pendant un pas de {record.title} ; pic {peaks[0]}",
        )
        + (say(en=f", predicted {peaks[1]}", fr=f", prédit {peaks[1]}") if predicted else ""),
    )
    both = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    far = far_limit(limit_bytes, highest) if limit_bytes else ""
    ceiling = highest * 1.3 if not limit_bytes or far else max(highest * 1.3, limit_bytes * 1.15)
    for axes, samples in zip(both, panels, strict=True):
        _panel(axes, samples, 1024**power, ceiling / 1024**power, timed=samples is measured)
        if limit_bytes and not far:
            axes.axhline(limit_bytes / 1024**power, color=BLACK, linestyle="--", linewidth=1.4)
    both[0].set_ylabel(byte_units()[power])
    title = say(en="Memory over one step: ", fr="Mémoire pendant un pas : ") + visible(record.title)
    title += f" ({far})" if far else ""
    if predicted:
        both[0].set_title(say(en="measured", fr="mesuré"), loc="left")
        both[1].set_title(say(en="predicted", fr="prédit"), loc="left")
        figure.suptitle(title, fontweight="bold", fontsize=12)
    else:
        both[0].set_title(title, loc="left")
    _legend(figure, panels, limit_drawn=bool(limit_bytes and not far))
    return finish(figure, path)


def _panel(axes: Axes, samples: Sequence[MemorySample], scale: int, ceiling: float, timed: bool) -> None:
    """One step: over milliseconds where it was measured, over the share of its movements where it is predicted."""
    start, end = samples[0].time_s, samples[-1].time_s
    factor = 1e3 if timed else 100 / max(end - start, 1)
    along = [(sample.time_s - start) * factor for sample in samples]
    totals = [sum(sample.bytes_by_category.values()) / scale for sample in samples]
    shown = _categories([samples])
    areas = axes.stackplot(
        along,
        [[sample.bytes_by_category.get(name, 0) / scale for sample in samples] for name in shown],
        colors=[CATEGORY_STYLES[name].color for name in shown],
        step="post",
        labels=[category_label(name) for name in shown],
        edgecolor="#333333",
        linewidth=0.4,
    )
    for area, name in zip(areas, shown, strict=True):
        area.set_hatch(CATEGORY_STYLES[name].hatch)
    top = totals.index(max(totals))
    axes.plot(along[top], totals[top], marker="D", color=BLACK, markerfacecolor="white", markersize=8, zorder=5)
    right = along[top] > 0.5 * along[-1]
    axes.annotate(
        say(en="peak ", fr="pic ")
        + f"{format_bytes(totals[top] * scale)} ({phase_label(visible(samples[top].phase))})",
        (along[top], totals[top]),
        xytext=(-12 if right else 12, 12),
        textcoords="offset points",
        ha="right" if right else "left",
    )
    for first, last, phase in _phases(samples, along):
        axes.axvline(first, color="#666666", linewidth=0.8, linestyle=":")
        if last - first > 0.0125 * len(phase_label(visible(phase))) * (along[-1] or 1):
            axes.text(
                (first + last) / 2,
                ceiling * 0.985,
                phase_label(visible(phase)),
                ha="center",
                va="top",
                fontsize=9,
                color="#444444",
            )
    axes.set(
        xlabel=say(en="time within the step, ms", fr="temps dans le pas, ms")
        if timed
        else say(en="progress of the step, % of its allocations", fr="avancement du pas, % de ses allocations"),
        ylim=(0, ceiling),
        xlim=(0, along[-1] or 1),
    )
    plain(axes)


def _categories(panels: Sequence[Sequence[MemorySample]]) -> list[Category]:
    return [
        name
        for name in CATEGORIES
        if any(sample.bytes_by_category.get(name) for samples in panels for sample in samples)
    ]


def _legend(figure: LabFigure, panels: Sequence[Sequence[MemorySample]], limit_drawn: bool) -> None:
    """What the colours and hatches stand for, in the order of the stack, the limit above."""
    handles: list[Patch | Line2D] = [
        Patch(
            facecolor=CATEGORY_STYLES[name].color,
            hatch=CATEGORY_STYLES[name].hatch,
            edgecolor="#333333",
            linewidth=0.4,
            label=category_label(name),
        )
        for name in _categories(panels)
    ]
    if limit_drawn:
        label = say(en="limit of the device", fr="limite du matériel")
        handles.append(Line2D([], [], color=BLACK, linestyle="--", linewidth=1.4, label=label))
    figure.legend(handles=handles[::-1], loc="outside right upper", frameon=False, handleheight=1.2)


def _phases(samples: Sequence[MemorySample], along: Sequence[float]) -> list[tuple[float, float, str]]:
    """Start, end and name of each stretch of samples in one phase."""
    starts = [index for index in range(len(samples)) if index == 0 or samples[index].phase != samples[index - 1].phase]
    ends = [*starts[1:], len(samples) - 1]
    return [(along[start], along[end], samples[start].phase) for start, end in zip(starts, ends, strict=True)]
