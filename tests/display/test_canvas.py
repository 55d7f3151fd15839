"""What all figures have in common."""

import base64
from collections.abc import Callable
from typing import Any

import pytest
from IPython.core.formatters import DisplayFormatter

from dlojz.base.language import use_language
from dlojz.display.canvas import LabFigure, finish, new_figure
from dlojz.labs.kit.figures import Picture


@pytest.mark.parametrize(("language", "half"), [("en", "0.5"), ("fr", "0,5")])
def test_finish_writes_numbers_of_axes_as_the_reader_does(language: str, half: str) -> None:
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


@pytest.mark.parametrize("shown", [lambda figure: figure, Picture], ids=["figure", "picture"])
@pytest.mark.parametrize("in_jupyterlab", [True, False])
def test_a_figure_carries_its_description_wherever_it_is_shown(
    shown: Callable[[LabFigure], Any], in_jupyterlab: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the metadata of its PNG, which nbconvert reads; and as HTML for JupyterLab, which does not read them."""
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    if in_jupyterlab:
        monkeypatch.setenv("JPY_SESSION_NAME", "/x/en/01_big_models.ipynb")
    figure = new_figure(2, 1, 'a "peak" of 3 < 4\nMiB')
    data, metadata = DisplayFormatter().format(shown(figure))
    assert metadata["image/png"] == {"alt": 'a "peak" of 3 < 4 MiB'}
    assert data["text/plain"] == figure.alt
    assert ("text/html" in data) is in_jupyterlab
    if in_jupyterlab:
        html = data["text/html"]
        assert html.startswith('<img alt="a &quot;peak&quot; of 3 &lt; 4 MiB" ')
        assert base64.b64decode(html.partition("base64,")[2].removesuffix('">')) == data["image/png"]
