"""The figure of a curriculum shows what the trajectories hold, in the reader's language."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.config.schedules import length_at
from dlojz.display.figures.training_figures import curriculum_figure
from dlojz.results.record import HeldOutLoss, Trajectory

from .overlap import overlapping

STEPS = 10


def along(line: Any, axis: str) -> list[float]:
    return [float(value) for value in (line.get_xdata() if axis == "x" else line.get_ydata())]


def trajectory(shift: float = 0.0, *, watched: bool = True, **fields: Any) -> Trajectory:
    config = RunConfig.of(model="gpt_tiny", sequence_length=64, steps=STEPS, micro_batch=2, **fields)
    lengths = tuple(length_at(config, step) for step in range(STEPS))
    losses = tuple(4.0 - 0.2 * step + (2.5 if step == 6 else 0.0) + shift for step in range(STEPS))
    told: dict[str, Any] = {}
    if watched:
        told["variance_max"] = tuple(0.01 * (step + 1) for step in range(STEPS))
        told["variance_norm"] = tuple(float(step + 1) for step in range(STEPS))
        told["held_out"] = tuple(
            HeldOutLoss(step=s, tokens=100 * s, seconds=0.5 * s, loss=4 - 0.1 * s) for s in (0, 5, 10)
        )
    return Trajectory(
        config=config,
        lengths=lengths,
        tokens=tuple(2 * length for length in lengths),
        step_s=tuple(length / 1000 for length in lengths),
        losses=losses,
        **told,
    )


def trials(*, watched: bool = True) -> dict[str, list[Trajectory]]:
    grown = {"curriculum": "linear", "curriculum_steps": 8}
    return {
        "without": [trajectory(shift, watched=watched) for shift in (0.0, 0.1, 0.3)],
        "linear": [trajectory(shift, watched=watched, **grown) for shift in (0.0, 0.2)],
    }


def test_curriculum_figure_holds_the_series_in_four_panels() -> None:
    shown = trials()
    figure = curriculum_figure(shown, predicted={8: 0.1, 64: 1.0})
    tokens, time, variance, cost = figure.axes
    thick = [line for line in tokens.lines if line.get_linewidth() > 2]
    assert [along(line, "x") for line in thick] == [[0, 0.5, 1.0]] * 2  # thousands
    assert along(thick[0], "y") == pytest.approx([4.0, 3.5, 3.0])
    assert along(time.lines[-1], "x") == [0, 2.5, 5.0]
    crosses = [line for line in variance.lines if line.get_marker() == "x"]
    assert [len(along(line, "x")) for line in crosses] == [1] * 5  # one spike in each trajectory
    assert along(crosses[0], "y") == pytest.approx([0.07])
    measured = cost.lines[1]
    assert along(measured, "y") == pytest.approx([length / 64 for length in along(measured, "x")])
    assert "without 3.000, linear 3.000" in figure.alt
    assert overlapping(figure) == []


def test_the_thick_line_is_the_median_of_the_seeds() -> None:
    figure = curriculum_figure({"without": trials(watched=False)["without"]})
    axes = figure.axes[0]
    assert len(axes.lines) == 4
    assert along(axes.lines[-1], "y") == pytest.approx([loss + 0.1 for loss in trajectory().losses])
    assert axes.get_ylabel() == "training loss"
    assert len(figure.axes) == 2


def test_curriculum_figure_without_root_mean_squares_has_no_empty_panel() -> None:
    figure = curriculum_figure(trials(watched=False), predicted={8: 0.1, 64: 1.0})
    assert [axes.get_visible() for axes in figure.axes] == [True, True, True, False]


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("en", ["tokens read (thousands)", "largest √v of Adam", "spike of the loss", "predicted: FLOPs"]),
        ("fr", ["tokens lus (milliers)", "plus grand √v d’Adam", "pic de la perte", "prévu : FLOPs"]),
    ],
)
def test_the_reader_s_language_and_literal_names(language: str, words: list[str], tmp_path: Path) -> None:
    from matplotlib.text import Text

    use_language(language)
    shown = {"$\\alpha$ <b>": trials()["linear"]}
    figure = curriculum_figure(shown, predicted={8: 0.1, 64: 1.0}, path=tmp_path / "c.png")
    texts = [text for text in figure.findobj(Text) if text.get_text()]
    assert not any(text.get_parse_math() for text in texts)
    said = " ".join(text.get_text() for text in texts)
    assert all(word in said for word in words)
    assert "$\\alpha$" in said
    assert (tmp_path / "c.png").stat().st_size > 10_000


def test_curriculum_figure_of_nothing_is_refused() -> None:
    empty: dict[str, list[Trajectory]] = {"none": []}
    for nothing in ({}, empty):
        with pytest.raises(LabError, match="train first"):
            curriculum_figure(nothing)
