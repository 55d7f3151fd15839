"""The figures of pruning: what they say in both languages, what they draw, and that no text lies on another."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from benchmarks.lottery_ticket import KINDS, Ticket, lottery_figure
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.compress.masks import CubicSchedule
from dlojz.compress.two_to_four import SparseSpeed
from dlojz.display.figures.compress_figures import schedule_figure, speed_figure

from .overlap import overlapping

SCHEDULE = CubicSchedule(final=0.9, every=6, renewals=5)
MEASURED = [(step, SCHEDULE.sparsity(step) + 1e-6) for step in range(0, 31, 6)]
TICKETS = [
    Ticket("iterative", seed, 0.0, 0.98) for seed in range(3)
] + [
    Ticket(kind, seed, sparsity, 0.9 - 0.2 * place - 0.1 * sparsity - 0.01 * seed)
    for place, kind in enumerate(KINDS) for sparsity in (0.5, 0.75, 0.9375) for seed in range(3)
]  # fmt: skip
SPEEDS = [
    SparseSpeed(form, sparsity, 1 - sparsity, 1.0, ratio, 0.9 * ratio, 1.1 * ratio, 1e-3)
    for form, ratios in (("masked", (1.0, 1.01, 0.99)), ("csr", (4.0, 1.5, 0.25)))
    for sparsity, ratio in zip((0.0, 0.5, 0.9), ratios, strict=True)
]


def said(figure: Figure) -> str:
    legends = [text.get_text() for axes in figure.axes if axes.get_legend() for text in axes.get_legend().get_texts()]
    texts = [
        text
        for axes in figure.axes
        for text in (
            axes.get_title(loc="left"),
            axes.get_xlabel(),
            axes.get_ylabel(),
            *(t.get_text() for t in axes.texts),
        )
    ]
    return " ".join((figure.alt, *texts, *legends))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("en", ["to 90 %", "every 6 steps from step 0 to 30", "at most 0.0001 points", "predicted: the cubic", "loss"]),
        ("fr", ["jusqu’à 90 %", "tous les 6 pas, du pas 0 au pas 30", "à 0,0001 point au plus", "mesuré : zéros"]),
    ],
)
def test_a_schedule_is_drawn_with_what_was_measured(language: str, words: list[str], tmp_path: Path) -> None:
    use_language(language)
    losses = [10.0 ** -(step / 20) for step in range(44)]
    figure = schedule_figure(SCHEDULE, MEASURED, 44, losses, tmp_path / "schedule.png")
    assert all(word in said(figure) for word in words), said(figure)
    assert not overlapping(figure)
    assert "mathdefault" not in "".join(label.get_text() for label in figure.axes[1].get_yticklabels())
    predicted, steps, marks = figure.axes[0].lines
    assert list(marks.get_xdata()) == [0, 6, 12, 18, 24, 30]
    assert predicted.get_ydata()[15] == SCHEDULE.sparsity(15) and steps.get_ydata()[5] < 1e-5
    assert len(schedule_figure(SCHEDULE, MEASURED, 44).axes) == 1
    assert (tmp_path / "schedule.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("en", ["3 seed(s)", "winning ticket", "weights left", "random mask", "Accuracy by weights left"]),
        ("fr", ["3 graine(s)", "ticket gagnant", "poids restants", "masque au hasard", "6,25 % : "]),
    ],
)
def test_lottery_figure_draws_tickets_seed_by_seed_with_their_medians(
    language: str, words: list[str], tmp_path: Path
) -> None:
    use_language(language)
    figure = lottery_figure(TICKETS, tmp_path / "tickets.png")
    assert all(word in said(figure) for word in words), said(figure)
    assert not overlapping(figure)
    axes = figure.axes[0]
    seeds, medians = axes.lines[0], axes.lines[1]
    assert len(seeds.get_xdata()) == 12
    assert list(medians.get_ydata()) == pytest.approx([0.98, 0.84, 0.815, 0.79625])
    assert axes.get_xlim()[0] > axes.get_xlim()[1]  # fewer and fewer weights to the right


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("en", ["from about 66 % of zeros", "dense layer with zeros", "expected: multiplications left"]),
        ("fr", ["à partir d’environ 66 % de zéros", "lignes creuses (CSR)", "0,25 fois la couche dense"]),
    ],
)
def test_speeds_are_drawn_beside_what_is_expected(language: str, words: list[str], tmp_path: Path) -> None:
    """From 1.5 at 50 % to 0.25 at 90 %, one is met two fifths of the way."""
    use_language(language)
    figure = speed_figure(SPEEDS, "512 × 128 <b>$x$</b>", tmp_path / "speed.png")
    assert all(word in said(figure) for word in words), said(figure)
    assert not overlapping(figure)
    expected = figure.axes[0].lines[0]
    assert list(expected.get_ydata()) == pytest.approx([1.0, 0.5, 0.1])
    never = speed_figure([one for one in SPEEDS if one.sparsity < 0.9], "")
    assert ("never" if language == "en" else "jamais") in never.alt


def test_figures_of_nothing_are_refused() -> None:
    for draw in (lottery_figure, lambda nothing: speed_figure(nothing, "")):
        for language, word in (("en", "at least one"), ("fr", "au moins un")):
            use_language(language)
            with pytest.raises(LabError, match=word):
                draw([])
