"""Signal to noise, foreseen beside measured: every setting is drawn, and what is not known is not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from matplotlib.text import Text

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.compress.method import LayerError
from dlojz.display.canvas import LabFigure
from dlojz.display.figures.compress_figures import sqnr_figure


def layers(first_db: float, off_db: float | None = 0.1, count: int = 4) -> list[LayerError]:
    return [
        LayerError(f"blocks.{index}.qkv", None if off_db is None else first_db + index + off_db, first_db + index, 8)
        for index in range(count)
    ]


def words(figure: LabFigure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


@pytest.mark.parametrize(
    ("language", "said", "told"),
    [
        (
            "en",
            ["predicted (dB)", "hollow: predicted, Δ²/12", "as predicted"],
            "INT8: 44.0 dB (blocks.0.qkv), predicted",
        ),
        ("fr", ["prédit (dB)", "creux : prédit, Δ²/12", "comme prédit"], "INT8 : 44,0 dB (blocks.0.qkv), prédit"),
    ],
)
def test_sqnr_figure_says_what_it_shows(language: str, said: list[str], told: str) -> None:
    use_language(language)
    figure = sqnr_figure({"INT8": layers(44), "INT4": layers(20)})
    for text in [*said, "INT8", "INT4", "0.qkv", "3.qkv"]:
        assert text in words(figure)
    assert told in figure.alt


def test_sqnr_figure_draws_measured_and_foreseen_where_they_are() -> None:
    figure = sqnr_figure({"INT8": layers(44), "INT4": layers(20, 2.0)})
    by_layer, against = figure.axes
    drawn = [list(line.get_ydata()) for line in by_layer.get_lines()]
    assert drawn == [[44, 45, 46, 47], [44.1, 45.1, 46.1, 47.1], [20, 21, 22, 23], [22, 23, 24, 25]]
    points = [(list(line.get_xdata()), list(line.get_ydata())) for line in against.get_lines()[:2]]
    assert points[1] == ([22, 23, 24, 25], [20, 21, 22, 23])


def test_sqnr_figure_leaves_out_what_was_not_foreseen_or_has_no_noise() -> None:
    exact = LayerError("blocks.9.qkv", math.inf, math.inf, 8)
    figure = sqnr_figure({"FP8": layers(30, None), "exact": [*layers(44), exact]})
    assert "predicted within 0.1 dB" in figure.alt and "FP8: 30.0 dB (blocks.0.qkv);" in figure.alt
    drawn = [list(line.get_ydata()) for line in figure.axes[0].get_lines()]
    assert all(math.isnan(value) for value in drawn[1])
    assert math.isnan(drawn[2][-1])
    alone = sqnr_figure({"FP8": layers(30, None)})
    assert len(alone.axes[1].get_lines()) == 1


def test_many_layers_are_not_all_named_and_a_name_is_no_formula(tmp_path: Path) -> None:
    path = tmp_path / "sqnr.png"
    figure = sqnr_figure({"$x^2$ <b>": layers(40, count=70)}, path)
    assert path.stat().st_size > 10_000
    assert "$x^2$" in words(figure)
    assert len(figure.axes[0].get_xticks()) == 24


@pytest.mark.parametrize("language", ["en", "fr"])
def test_sqnr_figure_of_nothing_is_refused(language: str) -> None:
    use_language(language)
    for nothing in ({}, {"INT8": []}, {str(index): layers(10) for index in range(9)}):
        with pytest.raises(LabError, match="from 1 to 8|de 1 à 8"):
            sqnr_figure(nothing)
