"""Figures of lab 02 about memory given for time: segments of a checkpointed model, and runs side by side.

Layer 6 (labs), on `dlojz.viz`. Invariant: what is drawn was traced with the student's own function, or measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dlojz.labs.verdict import NotDone, Verdict
from dlojz.record import RunRecord
from dlojz.text import say
from dlojz.units import format_bytes
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.palette import BLUE, CATEGORY_STYLES, LINE_STYLES, VERMILION, category_label

MIB = 2**20


class _Measured(Protocol):
    @property
    def record(self) -> RunRecord | None: ...


def _mib() -> str:
    return say(en="MiB", fr="Mio")


def segments(
    checkpointed: Callable[[Sequence[Any], Any, int], Any], blocks: Sequence[Any], x: Any, lengths: Sequence[int]
) -> LabFigure | Verdict:
    """What the student's forward keeps for backward, and its peak, by the length of the segments; traced.

    Args:
        checkpointed: the student's function.
        blocks: modules, of one length of input and output.
        x: what the first reads.
        lengths: blocks per segment, each to be traced.
    """
    from torch import nn

    from dlojz.predict.tracing import trace

    class Whole(nn.Module):
        """The blocks, run by the student's function."""

        def __init__(self, per_segment: int) -> None:
            super().__init__()
            self.blocks, self.per_segment = nn.ModuleList(blocks), per_segment

        def forward(self, x: Any) -> Any:
            return checkpointed(list(self.blocks), x, self.per_segment)

    try:
        checkpointed(blocks, x, len(blocks))
    except NotDone as error:
        return Verdict("todo", str(error))
    traces = [trace(Whole(length), x) for length in lengths]
    kept = [one.saved_bytes / MIB for one in traces]
    peaks = [one.peak_bytes / MIB for one in traces]
    best = lengths[peaks.index(min(peaks))]
    figure = new_figure(
        8.0,
        3.6,
        alt=say(
            en=f"{len(blocks)} blocks by length of the segments: what is kept falls, the peak is lowest for {best}.",
            fr=f"{len(blocks)} blocs selon la longueur des segments : ce qui est gardé diminue, le pic est le plus "
            f"bas pour {best}.",
        ),
    )
    axes = figure.subplots()
    axes.plot(
        lengths, peaks, color=VERMILION, marker="s", label=say(en="peak of both passes", fr="pic des deux passes")
    )
    axes.plot(
        lengths,
        kept,
        color=BLUE,
        marker="o",
        linestyle="--",
        label=say(en="kept between the two", fr="gardé entre les deux"),
    )
    axes.axvline(best, color="#999999", linestyle=":", linewidth=1)
    axes.set_xticks(list(lengths))
    axes.set_ylim(bottom=0)
    axes.set_xlabel(say(en="blocks per segment", fr="blocs par segment"))
    axes.set_ylabel(_mib())
    axes.legend(frameon=False)
    plain(axes)
    return finish(figure)


def operations_for_memory(runs: Mapping[str, _Measured]) -> LabFigure:
    """Measured runs: operations of a step, relative to the first run's, against the peak of memory, one point each.

    Operations and not seconds: on a machine that does other things at the same time, seconds tell little.
    """
    figure = new_figure(
        8.5,
        3.4,
        alt=say(en="Peak memory and operations of a step of: ", fr="Pic de mémoire et opérations d’un pas de : ")
        + ", ".join(runs),
    )
    axes = figure.subplots()
    first_flops: float | None = None
    most = 1.0
    for (name, run), (colour, _, marker) in zip(runs.items(), LINE_STYLES, strict=False):
        footprint = run.record.footprint() if run.record else None
        if footprint is None or not footprint.step_flops or footprint.memory.peak_bytes is None:
            continue
        first_flops = first_flops or footprint.step_flops
        most = max(most, footprint.step_flops / first_flops)
        moved_bytes = footprint.memory.host_bytes
        moved = (
            say(en=f" ({format_bytes(moved_bytes)} out and back)", fr=f" ({format_bytes(moved_bytes)} aller et retour)")
            if moved_bytes
            else ""
        )
        axes.plot(
            footprint.memory.peak_bytes / MIB,
            footprint.step_flops / first_flops,
            color=colour,
            marker=marker,
            markersize=10,
            linestyle="none",
            label=name + moved,
        )
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.15 * most)
    axes.yaxis.set_major_formatter(lambda value, position: say(en=f"{value:g}", fr=f"{value:g}".replace(".", ",")))
    axes.set_xlabel(say(en="measured peak", fr="pic mesuré") + f" ({_mib()})")
    axes.set_ylabel(say(en="operations of a step\n(times the first)", fr="opérations d’un pas\n(fois le premier)"))
    axes.legend(frameon=False, loc="lower left")
    plain(axes)
    return finish(figure)


def peak_and_maxima(samples: Sequence[Mapping[str, int]]) -> LabFigure:
    """One step's peak beside the largest value that each category takes: the sum of these is more."""
    at_peak: Mapping[str, int] = max(samples, key=lambda sample: sum(sample.values()))
    largest: dict[str, int] = {name: max(sample.get(name, 0) for sample in samples) for name in CATEGORY_STYLES}
    peak, sum_of_largest = format_bytes(sum(at_peak.values())), format_bytes(sum(largest.values()))
    figure = new_figure(
        8.5,
        2.4,
        alt=say(
            en=f"Peak {peak}; sum of the largest of each category {sum_of_largest}.",
            fr=f"Pic {peak} ; somme des maximums de chaque catégorie {sum_of_largest}.",
        ),
    )
    axes = figure.subplots()
    rows: dict[str, Mapping[str, int]] = {
        say(en="at the peak", fr="au moment du pic"): at_peak,
        say(en="largest of each", fr="maximum de chacune"): largest,
    }
    for row, (title, sample) in enumerate(reversed(rows.items())):
        left = 0.0
        for name, style in CATEGORY_STYLES.items():
            mib = sample.get(name, 0) / MIB
            if not largest[name]:
                continue
            axes.barh(
                row,
                mib,
                left=left,
                color=style.color,
                hatch=style.hatch,
                edgecolor="white",
                label=category_label(name) if title == next(iter(rows)) else None,
            )
            left += mib
    axes.set_yticks(range(len(rows)), list(reversed(rows)))
    axes.set_xlabel(_mib())
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.05))
    plain(axes)
    return finish(figure)
