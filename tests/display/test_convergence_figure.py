"""Losses over seeds: every seed is drawn, the gap is that of the medians, and a run that diverged hides nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.text import Text

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.by_hand.optimizers.convergence import Curves, curves_of, gap, reference_of
from dlojz.display.canvas import LabFigure
from dlojz.display.figures.training_figures import convergence_figure
from dlojz.results.record import RunRecord

STEPS = 40


def curves(optimizer: str, factor: float = 1.0, frozen_at: int | None = None, seeds: int = 3) -> Curves:
    """Losses that fall to 1 and stay there, each seed a little higher, from the tenth step on times a factor."""
    return Curves(
        optimizer,
        tuple(
            tuple((1 + 0.1 * seed + 2 * math.exp(-step / 3)) * (factor if step > 10 else 1) for step in range(STEPS))
            for seed in range(seeds)
        ),
        frozen_at,
    )


def words(figure: LabFigure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def test_the_gap_is_between_the_medians_of_the_last_tenth() -> None:
    ours, theirs = curves("one_bit_adam", 1.03, 10), curves("adamw")
    assert theirs.window == 4
    assert theirs.median() == pytest.approx(1.1, abs=1e-4)  # the second of three seeds; 2 e⁻¹² is left
    found = gap(ours, theirs)
    assert found.medians == pytest.approx(0.03) and found.paired == pytest.approx(0.03)
    assert not found.within(0.02) and found.within(0.031) and gap(theirs, ours).within(0.0)
    assert [one[-1] for one in theirs.smoothed()] == theirs.final()
    assert theirs.smoothed()[0][:2] == [3.0, pytest.approx((3.0 + 1 + 2 * math.exp(-1 / 3)) / 2)]


def test_curves_that_diverged_count_as_infinite() -> None:
    lost = Curves("one_bit_adam", ((1.0, math.nan), (1.0, 1.0), (1.0, 1.0)))
    assert lost.final() == [math.inf, 1.0, 1.0] and lost.median() == 1.0
    assert gap(lost, Curves("adamw", ((1.0, 1.0),) * 3)).seeds == (math.inf, 0.0, 0.0)


@pytest.mark.parametrize(
    ("language", "said"),
    [
        ("en", ["1-bit Adam beside AdamW: +3.0 %", "variance frozen\n from step 10", "band: ± 2 %"]),
        ("fr", ["1-bit Adam face à AdamW : +3,0 %", "variance gelée\n dès le pas 10", "bande : ± 2 %"]),
    ],
)
def test_convergence_figure_has_a_row_per_task_with_every_seed_and_the_gap(
    language: str, said: list[str], tmp_path: Path
) -> None:
    use_language(language)
    rows = {"$text$": [curves("adamw"), curves("one_bit_adam", 1.03, 10)], "digits": [curves("lamb")]}
    figure = convergence_figure(rows, tmp_path / "convergence.png")
    assert (tmp_path / "convergence.png").stat().st_size > 10_000
    losses, gaps = figure.axes[:2]
    assert len(losses.lines) == 2 * (3 + 1) + 1  # two optimizers, each with three seeds and their median; the freezing
    assert len(gaps.lines) == 1 + (3 + 1 + 1) + 1  # zero; three seeds, the medians and how they end; the freezing
    told = words(figure)
    assert all(sentence in told for sentence in said) and "$text$" in told
    assert said[0].rpartition(" beside ")[2].rpartition(": ")[2].rpartition(" : ")[2] in figure.alt


def test_convergence_figure_hides_nothing_by_a_seed_that_diverged() -> None:
    lost = Curves("one_bit_adam", ((*curves("adamw").losses[0][:-5], *[math.nan] * 5), *curves("adamw").losses[1:]), 10)
    figure = convergence_figure({"text": [curves("adamw"), lost]})
    # Medians of 1.0, 1.1, 1.2 and of ∞, 1.1, 1.2: 9.1 % more, and the picture reaches 1.3 times as far.
    assert "AdamW: +9.1 %" in words(figure)
    assert figure.axes[1].get_ylim()[1] == pytest.approx(1.3 * 100 / 11, rel=1e-3)


def test_records_are_taken_as_they_are(make_record: Callable[..., RunRecord]) -> None:
    layout = {"engine": "by_hand", "dp": 2}
    records = [
        make_record(optimizer=name, seed=seed, loss_shift=shift, **layout)
        for name, shift in (("adamw", 0.0), ("one_bit_adam", 0.01))
        for seed in (1, 0)
    ]
    found = curves_of(records)
    assert [(one.optimizer, len(one.losses), one.frozen_at) for one in found] == [
        ("adamw", 2, None),
        ("one_bit_adam", 2, 3),
    ]
    assert reference_of(found[1], found) is found[0] and reference_of(found[0], found) is None
    assert "1-bit Adam beside AdamW" in words(convergence_figure({"digits": records}))


@pytest.mark.parametrize("language", ["en", "fr"])
def test_convergence_figure_refuses_what_cannot_be_drawn_in_one_sentence(language: str) -> None:
    use_language(language)
    attempts = (
        lambda: convergence_figure({}),
        lambda: convergence_figure({"text": []}),
        lambda: Curves("adamw", ()),
        lambda: Curves("adamw", ((1.0, 2.0), (1.0,))),
        lambda: gap(curves("one_bit_adam", seeds=2), curves("adamw")),
    )
    for attempt in attempts:
        with pytest.raises(LabError) as refused:
            attempt()
        assert str(refused.value).endswith(".") and str(refused.value).count(". ") == 0
