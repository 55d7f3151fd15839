"""Pictures of lab 11 and of the board: what is drawn is what was given; what is still to do is said."""

from __future__ import annotations

from typing import Any

import pytest

from dlojz.compress.board_record import TEACHER, Board, BoardTrial
from dlojz.compress.task import digits, new_model
from dlojz.display.figures.compress_figures import compress_figure
from dlojz.labs import NotDone
from dlojz.labs.kit.exercise import Verdict
from dlojz.labs.kit.figures import Picture
from dlojz.labs.kit.judges import normal
from dlojz.labs.lab11_compression import figures
from dlojz.labs.lab11_compression.exercises_quantize import quantize_rows


def drawn(picture: Any) -> Any:
    assert isinstance(picture, Picture)
    assert picture.figure.alt
    return picture.figure


def test_figures_of_compress_say_what_is_to_do() -> None:
    def undone(*_: Any) -> Any:
        raise NotDone("rows")

    said = figures.noise(undone, normal(1, 20, 8))
    assert isinstance(said, Verdict)
    assert said.state == "todo"


def test_probabilities_are_softened() -> None:
    task = digits()
    teacher = new_model("vit_tiny", task, 0)
    _, *panels = drawn(figures.softened(teacher, task, (1, 4))).axes
    heights = [[patch.get_height() for patch in axes.patches] for axes in panels]
    for found in heights:
        assert sum(found) == pytest.approx(100, rel=1e-4)
    assert max(heights[0]) > max(heights[1])
    assert all("the true one" in axes.get_xlabel() for axes in panels)


def test_noise_is_what_a_uniform_error_foresees() -> None:
    weight_OI = normal(2, 64, 64)
    (axes,) = drawn(figures.noise(quantize_rows, weight_OI, (8, 6))).axes
    predicted, measured, whole_predicted, whole_measured = (list(line.get_ydata()) for line in axes.lines)
    assert predicted == pytest.approx(measured, abs=0.3)
    assert whole_predicted == pytest.approx(whole_measured, abs=0.3)
    assert all(row > whole for row, whole in zip(measured, whole_measured, strict=True))


def _trial(method: str, accuracy: float, payload_bytes: int, latency: float) -> BoardTrial:
    return BoardTrial(
        method=method, family="pruning", seed=0, accuracy=accuracy, parameters=1, predicted_bytes=1000,
        payload_bytes=payload_bytes, file_bytes=payload_bytes + 24, latency_s=latency, latency_ratio=latency,
        latency_ratio_low=latency, latency_ratio_high=latency, made_in_s=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("least", "ticks"),
    [(0.964, ["96%", "96.5%", "97%", "97.5%", "98%", "98.5%"]), (0.4, ["50%", "80%", "90%", "95%", "97%", "98%"])],
)
def test_compress_figure_gives_close_accuracies_finer_ticks(least: float, ticks: list[str]) -> None:
    board = Board(
        task="digits", image_size=16, teacher="vit_tiny", epochs=1, batch=1, rounds=1, threads=1,
        trials=(_trial(TEACHER, 0.986, 1000, 1.0), _trial("worse", least, 1000, 1.5)),
    )  # fmt: skip
    axes = compress_figure(board).axes[0]
    shown = [axes.yaxis.get_major_formatter()(at, 0) for at in axes.get_yticks()]
    assert shown == ticks
