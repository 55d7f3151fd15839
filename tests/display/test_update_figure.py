"""The figure of update forms: what it says in words, in both languages, and what it draws."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlojz.base.language import use_language
from dlojz.display.figures.training_figures import update_figure
from dlojz.train.trials import FormMeasure


def measure(form: str, **changed: object) -> FormMeasure:
    fields: dict[str, object] = {
        **{"model": "alexnet", "form": form, "parameters": 20_300_000, "tensors": 16, "rounds": 30, "device": "CPU"},
        **{"update_s": 0.4, "step_s": 0.5, "update_ratio": 1.0},
        **{"step_ratio": 1.0, "step_ratio_low": 1.0, "step_ratio_high": 1.0},
        **{"predicted_peak_bytes": 460_000_000, "measured_peak_bytes": 460_000_000},
        **{"predicted_gradient_bytes": 81_200_000, **changed},
    }
    return FormMeasure(**fields)  # type: ignore[arg-type]


MEASURES = [
    measure("for_loop"),
    measure(
        "fused",
        update_ratio=0.125,
        step_ratio=0.34,
        step_ratio_low=0.3,
        step_ratio_high=0.4,
        measured_peak_bytes=325_600_000,
    ),
    measure("in_backward", update_s=None, update_ratio=None, predicted_peak_bytes=None),
]


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("en", ["step 0.34 times the first form's, peak 325.6 MB", "(the update alone ×0.12)", "325.6 (−134.4)"]),
        ("fr", ["pas 0,34 fois celui de la première forme, pic 325,6 Mo", "(la mise à jour seule ×0,12)"]),
    ],
)
def test_update_figure_says_what_is_saved_in_time_and_bytes(language: str, words: list[str], tmp_path: Path) -> None:
    use_language(language)
    try:
        figure = update_figure(MEASURES, tmp_path / "forms.png")
    finally:
        use_language("en")
    said = figure.alt + " ".join(text.get_text() for axes in figure.axes for text in axes.texts)
    for one in words:
        assert one in said
    assert (tmp_path / "forms.png").stat().st_size > 10_000


def test_update_figure_draws_a_predicted_form_above_what_is_measured() -> None:
    """Two bars per form, light and full, but for what has no prediction."""
    times, peaks = update_figure(MEASURES).axes
    assert [bar.get_width() for bar in peaks.patches] == pytest.approx([460, 460, 460, 325.6, 460])
    assert [bar.get_alpha() is not None for bar in peaks.patches] == [True, False, True, False, False]
    assert [label.get_text() for label in times.get_yticklabels()] == ["for_loop", "fused", "in_backward"]


def test_update_figure_reads_no_name_as_mathematics() -> None:
    figure = update_figure([measure("for_loop", model="$x$")])
    assert "$x$" in figure.axes[0].get_title(loc="left")
