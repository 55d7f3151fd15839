"""The figure of cuts: bars are loads, lines are bottlenecks, names stay text."""

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.display.figures.partition_figures import partition_figure
from dlojz.pipeline.partition import PEERS, BlockWeights, exact

KINDS = ("Stem", *["Block"] * 9, "Head")
PARAMETERS = (4_000, 20_000, 2_000, 13_000, 4_000, 1_000, 3_000, 1_000, 4_000, 6_000, 4_000)
WEIGHED = BlockWeights("parameters", KINDS, PARAMETERS, "")


def test_bars_are_as_high_as_loads_and_lines_as_bottlenecks() -> None:
    cuts = {"exact": exact(PARAMETERS, 4), **{name: cut(PARAMETERS, 4) for name, cut in PEERS.items()}}
    figure = partition_figure(cuts, WEIGHED, model="model")
    assert len(figure.axes) == 4 and figure.axes[0].get_ylabel() == "parameters, k"
    for axes, (name, cut) in zip(figure.axes, cuts.items(), strict=True):
        assert len(axes.patches) == len(KINDS) and axes.get_title(loc="left").startswith(name)
        tops = [0.0] * 4
        for bar in axes.patches:
            stage = round(bar.get_x() + bar.get_width() / 2)  # type: ignore[attr-defined]
            tops[stage] = max(tops[stage], bar.get_y() + bar.get_height())  # type: ignore[attr-defined]
        assert tops == pytest.approx([load / 1e3 for load in cut.loads])
        bottleneck, mean = (line.get_ydata()[0] for line in axes.lines)  # type: ignore[index]
        assert bottleneck == cut.bottleneck / 1e3 and mean == pytest.approx(sum(PARAMETERS) / 4e3)
    assert "20.0 k" in figure.alt and "24.0 k" in figure.alt


@pytest.mark.parametrize("language, words", [("en", ["stage", "bottleneck", "blocks"]), ("fr", ["étage", "goulot"])])
def test_the_reader_s_language_and_literal_names(language: str, words: list[str]) -> None:
    use_language(language)
    strange = BlockWeights("time", ("$x$", "b"), (0.001, 0.002), "s")
    figure = partition_figure({"$\\frac$": exact(strange.weights, 2)}, strange, model="<b>$m$</b>")
    from matplotlib.text import Text

    texts = [text for text in figure.findobj(Text) if text.get_text()]
    assert not any(text.get_parse_math() for text in texts)
    shown = " ".join(text.get_text() for text in texts)
    assert all(word in shown for word in words) and "$m$" in shown and "$x$" in shown
    assert figure.axes[0].get_ylabel() == "ms"


def test_partition_figure_of_many_stages_has_two_panels_a_row_and_whole_counts() -> None:
    ones = BlockWeights("uniform", ("Block",) * 40, (1,) * 40, "blocks")
    cuts = {name: exact(ones.weights, 20) for name in "abc"}
    figure = partition_figure(cuts, ones, model="m")
    assert len({axes.get_subplotspec().colspan.start for axes in figure.axes}) == 2  # type: ignore[union-attr]
    assert [axes.get_visible() for axes in figure.axes] == [True, True, True, False]
    assert all(float(tick).is_integer() for tick in figure.axes[0].get_yticks())


def test_partition_figure_of_nothing_is_refused() -> None:
    with pytest.raises(LabError, match="at least one cut"):
        partition_figure({}, WEIGHED, model="m")
