"""Every figure that a test draws is read as in a notebook: no letter under 9 pixels, no text cut by an edge."""

from collections.abc import Iterator

import pytest

from dlojz.base.language import use_language
from dlojz.display.canvas import LabFigure
from tests.display.overlap import outside, too_small

DRAWN_IN = [pytest.param("en", marks=pytest.mark.nightly), "fr"]
"""Languages in which a test draws the same figure: by day in French, whose words are the longer ones."""


@pytest.fixture(params=DRAWN_IN)
def language(request: pytest.FixtureRequest) -> str:
    """The language in which a figure is drawn; the next test begins in English."""
    use_language(request.param)
    return str(request.param)


@pytest.fixture(autouse=True)
def legible_figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Look at what a test of this room has drawn, once it has ended."""
    drawn: dict[int, LabFigure] = {}
    draw = LabFigure.draw_without_rendering

    def kept(figure: LabFigure) -> None:
        drawn[id(figure)] = figure
        draw(figure)

    monkeypatch.setattr(LabFigure, "draw_without_rendering", kept)
    yield
    for figure in drawn.values():
        assert too_small(figure) == [], figure.alt
        if outside(figure):
            draw(figure)  # as the picture that is saved: a second draw arranges what the first has measured
        assert outside(figure) == [], figure.alt
