"""What all figures have in common."""

from __future__ import annotations

import pytest

from dlojz.base.language import use_language
from dlojz.display.canvas import finish, new_figure


@pytest.mark.parametrize(("language", "half"), [("en", "0.5"), ("fr", "0,5")])
def test_axes_write_numbers_as_the_reader_does(language: str, half: str) -> None:
    """Along both directions, in linear and logarithmic panels; labels that a figure has set stay."""
    use_language(language)
    figure = new_figure(8, 4, "alt")
    linear, logarithmic = figure.subplots(1, 2)
    linear.plot([0, 1], [0, 1])
    logarithmic.plot([0.5, 1, 50], [1, 2, 3])
    logarithmic.set_xscale("log")
    logarithmic.set_yticks([1, 2], ["v1.5", "v2"])
    finish(figure)
    for axis in (linear.xaxis, linear.yaxis):
        labels = [label.get_text() for label in axis.get_ticklabels()]
        assert "0" in labels and "1" in labels
        assert any(label == half or label == half[:-1] + "4" for label in labels)
    assert {"0.1", "0,1"} & {label.get_text() for label in logarithmic.get_xticklabels()} == {half[:-1] + "1"}
    assert [label.get_text() for label in logarithmic.get_yticklabels()] == ["v1.5", "v2"]
