"""The figures of collectives: what is drawn is what is simulated or measured, is legible, and is said in words too."""

from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.text import Text

from dlojz.base.errors import LabError
from dlojz.by_hand import collectives
from dlojz.by_hand.collectives import AlphaBetaFit, TimedMessage, cost_s, fit, simulate
from dlojz.display.figures import communication_figures as stepping
from dlojz.display.figures.communication_figures import (
    STYLES,
    Stepper,
    calibration_figure,
    collective_figure,
    crossing,
    dominance,
    kind_of,
    step_figure,
    stepper,
    summary,
)

from .overlap import overlapping

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def calibration() -> AlphaBetaFit:
    """α = 50 µs, bandwidth 1 GB/s, exactly."""
    return fit(
        TimedMessage(n, cost_s("ring_all_reduce", n, 4, alpha_s=5e-5, beta_s_per_byte=1e-9), 4)
        for n in collectives.SIZES_BYTES
    )


@pytest.mark.parametrize("name", collectives.names())
@pytest.mark.usefixtures("language")
def test_collective_figure_draws_every_algorithm_legibly_for_four_ranks(name: str) -> None:
    figure = collective_figure(name, 4)
    assert overlapping(figure) == []
    assert figure.get_figwidth() <= 12


def test_collective_figure_of_eight_ranks_is_still_legible() -> None:
    figure = collective_figure("halving_doubling_all_reduce", 8)
    assert overlapping(figure) == [] and figure.get_figwidth() <= 12
    last = [axes for axes in figure.axes if axes.texts][-1]
    cell = next(patch for patch in last.patches if isinstance(patch, Rectangle)).get_window_extent()
    number = last.texts[0].get_window_extent()
    assert number.width < cell.width and number.height < cell.height


def test_collective_figure_has_the_cells_of_simulate() -> None:
    simulation = simulate("ring_all_reduce", 3)
    panels = [axes for axes in collective_figure("ring_all_reduce", 3).axes if axes.texts]
    assert len(panels) == 5
    for step, axes in enumerate(panels):
        numbers = [text.get_text() for text in axes.texts]
        expected = [
            part
            for row in simulation.states[step]
            for held in row
            for part in (f"{held.value}", f"{len(held.ranks)}/3")
        ]
        assert numbers == expected
        boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        kinds = [kind_of(simulation, step, rank, chunk) for rank in range(3) for chunk in range(3)]
        assert [box.get_hatch() or "" for box in boxes] == [STYLES[kind].hatch for kind in kinds]
        arrows = [patch for patch in axes.patches if isinstance(patch, FancyArrowPatch)]
        assert len(arrows) == (3 if step else 0)


def test_what_a_colour_says_a_hatch_or_a_line_says_too() -> None:
    looks = {(style.hatch, ":" if kind == "empty" else "-") for kind, style in STYLES.items()}
    assert len(looks) == len({style.color for style in STYLES.values()}) == len(STYLES)


def test_collective_figure_draws_and_says_given_values(tmp_path: Path) -> None:
    path = tmp_path / "ring.png"
    figure = collective_figure("ring_all_reduce", values=[[1, 2], [-3.5, 4]], path=path)
    assert path.read_bytes().startswith(PNG)
    assert {"−2.5", "6"} <= {text.get_text() for text in figure.findobj(Text)}  # type: ignore[attr-defined]
    assert "Step 2: rank 0 sends chunk 1 to rank 1, which keeps it" in figure.alt


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: collective_figure("ring_all_reduce", 17), "17 ranks could not be read: draw at most 16"),
        (lambda: collective_figure("ring_all_reduce", 0), "at least 1"),
        (lambda: collective_figure("rng_all_reduce"), "did you mean 'ring_all_reduce'"),
        (lambda: collective_figure("tree_reduce", path="x.exe"), "needs an ending"),
        (lambda: stepper("ring_all_reduce", 99), "could not be read"),
        (lambda: stepper("nothing"), "unknown algorithm"),
    ],
)
def test_collective_figure_and_stepper_refusals(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(LabError, match=sentence):
        call()


@pytest.mark.usefixtures("language")
def test_a_calibration_is_drawn_with_its_points_and_its_words(calibration: AlphaBetaFit, tmp_path: Path) -> None:
    figure = calibration_figure(calibration, tmp_path / "calibration.png")
    assert (tmp_path / "calibration.png").read_bytes().startswith(PNG)
    assert overlapping(figure) == []
    left, right = figure.axes
    dots = next(line for line in left.lines if line.get_marker() == "o")
    assert list(dots.get_ydata()) == [point.time_s for point in calibration.points]
    assert len(right.lines) == 6 and summary(calibration) in figure.alt


def test_summary_dominance_and_crossing_of_a_calibration(calibration: AlphaBetaFit) -> None:
    assert summary(calibration) == "α = 50.0 µs per message, bandwidth 1/β = 1.00 GB/s, residual 0%"
    assert dominance(calibration) == "below 195 KiB, latency takes more than half of the time"
    assert crossing(calibration, 2) == "" and crossing(calibration, 512).startswith(
        "512 ranks: the tree is faster below"
    )


def test_a_calibration_without_bandwidth_or_latency_is_drawn() -> None:
    falling = fit([TimedMessage(n, 1e-3 / (number + 1), 2) for number, n in enumerate(collectives.SIZES_BYTES)])
    calibration_figure(falling)
    assert dominance(falling) == "" and "—" in summary(falling)
    calibration_figure(fit([TimedMessage(n, n * 1e-9, 2) for n in collectives.SIZES_BYTES]))


def test_a_strange_name_in_a_calibration_is_drawn_letter_by_letter(calibration: AlphaBetaFit) -> None:
    figure = calibration_figure(calibration.model_copy(update={"collective": "$\\foo$\x00"}))
    figure.canvas.draw()
    assert all(not text.get_parse_math() for text in figure.findobj(Text))  # type: ignore[attr-defined]


def test_the_stepper_goes_back_and_forth_and_says_what_it_shows() -> None:
    widget = Stepper("ring_all_reduce", 3)
    assert widget.back.disabled and not widget.forth.disabled and widget.step.max == 4
    widget.forth.click()
    assert widget.step.value == 1
    assert "<li>rank 0 sends chunk 0 to rank 1, which adds it</li>" in widget.sentences.value
    assert ">rank 1</th>" in widget.sentences.value and 'role="status"' in widget.sentences.value
    assert 'alt="All-reduce on a ring, 3 ranks' in widget.picture.value
    widget.step.value = 4
    assert widget.forth.disabled and "final" in widget.sentences.value
    widget.back.click()
    assert widget.step.value == 3


def test_another_algorithm_or_number_of_ranks_begins_again() -> None:
    widget = Stepper("ring_all_reduce", 4)
    widget.step.value = 6
    widget.choice.value = "tree_broadcast"
    assert (widget.step.value, widget.step.max) == (0, 2)
    widget.ranks.value = 1
    assert widget.step.disabled and widget.back.disabled and widget.forth.disabled
    widget.ranks.value = 5
    assert not widget.step.disabled and widget.step.max == 3


def test_stepper_holds_controls_that_the_keyboard_reaches() -> None:
    box = stepper("tree_reduce", 2)
    names = [type(child).__name__ for row in box.children[:2] for child in row.children]
    assert names == ["Dropdown", "BoundedIntText", "Button", "IntSlider", "Button"]


@pytest.mark.usefixtures("language")
def test_a_single_step_is_legible() -> None:
    assert overlapping(step_figure(simulate("ring_all_reduce", 4), 2)) == []


def test_without_ipywidgets_the_stepper_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ipywidgets", None)
    with pytest.raises(LabError, match="install"):
        stepping.stepper()
