"""The figures of a campaign: what was measured, what does not fit, where the limit is; names shown letter by letter."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Text

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.display.canvas import LabFigure
from dlojz.display.figures.campaign_figures import (
    CampaignMark,
    batch_figure,
    does_not_fit,
    highest_of,
    pareto_figure,
    pareto_front,
    scaling_figure,
    style_of,
    truth_figure,
)

GIB = 2**30


def _marks() -> list[CampaignMark]:
    """Two layouts on 2, 4 and 8 ranks, with growing batches; the largest of the first does not fit."""
    marks = []
    for series, base, rate in (("DDP", 20, 30.0), ("ZeRO-3", 8, 24.0)):
        for ranks in (2, 4, 8):
            for batch in (1, 2, 4, 8):
                taken = (base + 3 * batch) * GIB
                over = taken > 40 * GIB
                marks.append(
                    CampaignMark(
                        series=f"{series}, {ranks} ranks",
                        family=f"{series}, batch {batch}",
                        batch=batch,
                        ranks=ranks,
                        state="oom" if over else "completed",
                        predicted_bytes=taken,
                        measured_bytes=None if over else taken + GIB // 10,
                        limit_bytes=40 * GIB,
                        limit_name="A100 40 GB",
                        samples_per_s=None if over else rate * ranks * batch**0.3,
                        predicted_samples_per_s=None if over else rate * ranks * batch**0.3 * 1.1,
                        predicted_message_bytes=base * GIB,
                        measured_message_bytes=None if over else base * GIB,
                        strong_efficiency=None if over else 1 - 0.02 * ranks,
                    )
                )
    return marks


FIGURES = {
    "batch": lambda marks, path=None: batch_figure(marks, "micro-batch, samples", path),
    "pareto": pareto_figure,
    "truth": truth_figure,
    "scaling": scaling_figure,
}


def _words(figure: LabFigure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


@pytest.mark.parametrize("name", FIGURES)
def test_campaign_figures_name_and_describe_every_series(name: str, tmp_path: Path) -> None:
    figure = FIGURES[name](_marks(), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    told = "DDP, batch 4" if name == "scaling" else "DDP, 4 ranks"
    assert told in _words(figure) and told in figure.alt


def outside(figure: LabFigure) -> list[tuple[float, float]]:
    """Marks that lie outside their axes; reference lines across the axes are none."""
    found = []
    for axes in figure.axes:
        (left, right), (bottom, top) = sorted(axes.get_xlim()), sorted(axes.get_ylim())
        points = [(float(x), float(y)) for line in axes.lines for x, y in line.get_xydata() if not _across(axes, line)]
        points += [(float(x), float(y)) for one in axes.collections for x, y in one.get_offsets()]
        found += [(x, y) for x, y in points if not (left <= x <= right and bottom <= y <= top)]
    return found


def _across(axes: Axes, line: Line2D) -> bool:
    return line.get_transform() != axes.transData


CROWDS: dict[str, Callable[[CampaignMark], CampaignMark]] = {
    "as measured": lambda mark: mark,
    "weak scaling beyond strong": lambda mark: replace(mark, strong_efficiency=0.6, weak_efficiency=1.3),
    "strong scaling beyond weak": lambda mark: replace(mark, strong_efficiency=2.4, weak_efficiency=0.2),
    "one kind of scaling alone": lambda mark: replace(mark, strong_efficiency=None, weak_efficiency=1.7),
    "measured far above the prediction": lambda mark: replace(mark, predicted_samples_per_s=1.0),
    "predicted far above the measurement": lambda mark: replace(
        mark, predicted_bytes=39 * GIB, measured_bytes=GIB, measured_message_bytes=1, predicted_samples_per_s=1e5
    ),
    "a limit far above": lambda mark: replace(mark, limit_bytes=4000 * GIB),
    "a limit far below": lambda mark: replace(mark, limit_bytes=GIB),
    "next to nothing": lambda mark: replace(mark, samples_per_s=1e-6, predicted_samples_per_s=1e-6, measured_bytes=1),
    "one batch": lambda mark: replace(mark, batch=4),
}


@pytest.mark.parametrize("crowd", CROWDS)
@pytest.mark.parametrize("name", FIGURES)
def test_every_mark_of_a_campaign_figure_lies_inside_its_axes(name: str, crowd: str) -> None:
    figure = FIGURES[name]([CROWDS[crowd](mark) for mark in _marks()])
    figure.canvas.draw()
    assert outside(figure) == []
    [last, *_] = [axes for axes in figure.axes if axes.lines]
    assert any(len(line.get_xdata()) for line in last.lines), "something is drawn"


@pytest.mark.parametrize("name", FIGURES)
def test_a_single_mark_lies_inside_its_axes(name: str) -> None:
    figure = FIGURES[name]([replace(_marks()[0], weak_efficiency=1.3, strong_efficiency=0.6)])
    figure.canvas.draw()
    assert outside(figure) == []


def test_the_limit_is_a_line_with_its_name_and_what_does_not_fit_is_crossed_out() -> None:
    memory = batch_figure(_marks(), "micro-batch").axes[1]
    [limit] = [line for line in memory.lines if len(set(line.get_ydata())) == 1 and line.get_linestyle() == "--"]
    assert limit.get_ydata()[0] == 40
    assert sum(line.get_marker() == "x" for line in memory.lines) == 3
    assert "A100 40 GB, 40.0 GiB" in _words(batch_figure(_marks(), "micro-batch"))


def test_batch_figure_says_a_far_limit_in_words() -> None:
    marks = [replace(mark, limit_bytes=4000 * GIB) for mark in _marks()]
    assert "limit: 3.91 TiB" in _words(batch_figure(marks, "micro-batch"))


def test_does_not_fit_holds_for_what_is_only_predicted_not_to_fit() -> None:
    [first, *_] = [mark for mark in _marks() if mark.state == "oom"]
    assert does_not_fit(replace(first, state="waiting"))
    assert not does_not_fit(replace(first, state="completed", measured_bytes=39 * GIB))


def test_the_pareto_front_holds_what_nothing_beats_in_both() -> None:
    base = _marks()[0]
    marks = [
        replace(base, measured_bytes=held * GIB, samples_per_s=rate)
        for held, rate in ((10, 5.0), (20, 4.0), (20, 9.0), (30, 9.0), (30, 12.0), (5, 1.0))
    ]
    front = [((mark.measured_bytes or 0) // GIB, mark.samples_per_s) for mark in pareto_front(marks)]
    assert front == [(5, 1.0), (10, 5.0), (20, 9.0), (30, 12.0)]


@pytest.mark.parametrize("name", FIGURES)
def test_campaign_figures_with_nothing_measured_and_names_that_are_no_mathematics(name: str) -> None:
    bare = CampaignMark(series="$\\foo$ <b>", family="_hidden", batch=1, ranks=2, state="waiting")
    words = _words(FIGURES[name]([bare]))
    assert "nothing measured yet" in words
    assert ("_hidden" if name == "scaling" else "$\\foo$ <b>") in words


def test_style_of_the_first_series_differs_and_pareto_figure_counts_more() -> None:
    assert len({style_of(number) for number in range(24)}) == 24
    many = [replace(_marks()[0], series=f"series {number}") for number in range(30)]
    assert "and 6 more series" in _words(pareto_figure(many))


def test_campaign_figures_in_french_and_refusals(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="ending"):
        scaling_figure(_marks(), tmp_path / "figure.xyz")
    use_language("fr")
    assert "ne tient pas" in _words(batch_figure(_marks(), "micro-batch"))


def test_of_several_points_at_one_batch_the_line_takes_the_highest() -> None:
    """The same global batch in other micro-batches: no vertical line joins them, and each has its mark."""
    assert highest_of([(4, 1.0), (2, 3.0), (4, 5.0), (4, 2.0)]) == [(2, 3.0), (4, 5.0)]
    marks = [replace(mark, batch=4) for mark in _marks()[:3]]
    for axes in batch_figure(marks, "batch").axes:
        for line in axes.lines:
            assert line.get_linestyle() == "None" or len(set(line.get_xdata())) == len(line.get_xdata())
