"""Memory over one traced step, stacked by category, with its peak.

Layer 4. Invariant: the curve is what the probe sampled; nothing is smoothed.
"""

from __future__ import annotations

from pathlib import Path

from dlojz.footprint import CATEGORIES
from dlojz.record import MemorySample, RunRecord
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.units import byte_units, format_bytes
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.markup import visible
from dlojz.viz.palette import BLACK, CATEGORY_STYLES, category_label, phase_label


def memory_figure(record: RunRecord, path: str | Path | None = None, limit_bytes: int | None = None) -> LabFigure:
    """Draw the memory of rank 0 over the traced step.

    Args:
        record: a run whose memory was traced.
        path: picture to write, if any.
        limit_bytes: memory of the device, drawn as a line.

    Raises:
        LabError: if the run was not traced, or the picture cannot be written.
    """
    samples = record.memory_timeline
    if not samples:
        raise LabError(
            f"the run {record.run_id} has no memory timeline (it ended before its second step, "
            "or was not traced): run it for at least 3 steps."
        )
    times_ms = [(sample.time_s - samples[0].time_s) * 1e3 for sample in samples]
    totals = [sum(sample.bytes_by_category.values()) for sample in samples]
    units = byte_units()
    power = max(n for n in range(len(units)) if max(*totals, 1) >= 1024**n)
    shown = [name for name in CATEGORIES if any(sample.bytes_by_category.get(name) for sample in samples)]
    figure = new_figure(
        11.0,
        4.8,
        alt=say(
            en=f"Memory by category over one step of {record.config.title}; peak {format_bytes(max(totals))}",
            fr=f"Mémoire par catégorie pendant un pas de {record.config.title} ; pic {format_bytes(max(totals))}",
        ),
    )
    axes = figure.subplots()
    layers = [[sample.bytes_by_category.get(name, 0) / 1024**power for sample in samples] for name in shown]
    areas = axes.stackplot(
        times_ms,
        layers,
        colors=[CATEGORY_STYLES[name].color for name in shown],
        step="post",
        labels=[category_label(name) for name in shown],
        edgecolor="#333333",
        linewidth=0.4,
    )
    for area, name in zip(areas, shown, strict=True):
        area.set_hatch(CATEGORY_STYLES[name].hatch)
    top = totals.index(max(totals))
    highest = totals[top] / 1024**power
    axes.plot(times_ms[top], highest, marker="D", color=BLACK, markerfacecolor="white", markersize=8, zorder=5)
    right = times_ms[top] > 0.6 * times_ms[-1]
    axes.annotate(
        say(en="peak ", fr="pic ") + f"{format_bytes(totals[top])} ({phase_label(visible(samples[top].phase))})",
        (times_ms[top], highest),
        xytext=(-12 if right else 12, 12),
        textcoords="offset points",
        ha="right" if right else "left",
    )
    ceiling = highest * 1.3
    if limit_bytes:
        limit = limit_bytes / 1024**power
        axes.axhline(
            limit,
            color=BLACK,
            linestyle="--",
            linewidth=1.4,
            label=say(en="limit of the device", fr="limite du matériel"),
        )
        ceiling = max(ceiling, limit * 1.15)
    for start_ms, end_ms, phase in _phases(samples, times_ms):
        axes.axvline(start_ms, color="#666666", linewidth=0.8, linestyle=":")
        if end_ms - start_ms > 0.07 * (times_ms[-1] or 1):
            axes.text(
                (start_ms + end_ms) / 2,
                ceiling * 0.985,
                phase_label(visible(phase)),
                ha="center",
                va="top",
                fontsize=9,
                color="#444444",
            )
    axes.set(
        xlabel=say(en="time within the step, ms", fr="temps dans le pas, ms"),
        ylabel=units[power],
        ylim=(0, ceiling),
        xlim=(0, times_ms[-1] or 1),
    )
    axes.set_title(
        say(en="Memory over one step: ", fr="Mémoire pendant un pas : ") + visible(record.config.title), loc="left"
    )
    plain(axes)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, handleheight=1.2
    )
    return finish(figure, path)


def _phases(samples: tuple[MemorySample, ...], times_ms: list[float]) -> list[tuple[float, float, str]]:
    """Start, end and name of each stretch of samples in one phase."""
    starts = [index for index in range(len(samples)) if index == 0 or samples[index].phase != samples[index - 1].phase]
    ends = [*starts[1:], len(samples) - 1]
    return [(times_ms[start], times_ms[end], samples[start].phase) for start, end in zip(starts, ends, strict=True)]
