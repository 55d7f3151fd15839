"""The figures of lab 03: of the student's own functions, drawn or still to do."""

from collections.abc import Callable
from typing import Any

import pytest

from dlojz.base.language import say
from dlojz.base.table import Table
from dlojz.display.canvas import LabFigure
from dlojz.labs import NotDone
from dlojz.labs.kit.exercise import Verdict
from dlojz.labs.lab03_data_parallel import figures
from dlojz.labs.lab03_data_parallel.exercises_ddp import fill_buckets
from dlojz.labs.lab03_data_parallel.exercises_ring import scaled_rate

GRADIENT_BYTES = [4096, 512, 64, 2048, 300]


def undone(*_: Any, **__: Any) -> Any:
    raise NotDone("some-exercise")


def strided(num_samples: int, rank: int, size: int, epoch: int, seed: int) -> range:
    return range(rank, num_samples, size)


def drawn(answer: Callable[..., Any] | None) -> list[LabFigure | Verdict]:
    return [
        figures.buckets(answer or fill_buckets, GRADIENT_BYTES, 2048),
        figures.shares(answer or strided, 24, 3),
        figures.rates(answer or scaled_rate, base_rate=0.1, scales=(1, 4), warmup_steps=5, steps=20),
    ]


def test_figures_of_data_parallelism_say_what_is_still_to_do(language: str) -> None:
    for said in drawn(undone):
        assert isinstance(said, Verdict)
        assert said.state == "todo"
        assert "some-exercise" in said.message


def test_a_figure_draws_what_the_function_gives_and_says_so(language: str) -> None:
    buckets, shares, rates = drawn(None)
    for figure in (buckets, shares, rates):
        assert isinstance(figure, LabFigure)
        assert figure._repr_mimebundle_()[0]["image/png"].startswith(b"\x89PNG")
    count = len(fill_buckets(GRADIENT_BYTES, 2048))
    assert isinstance(buckets, LabFigure)
    assert buckets.alt.startswith(f"{count} ")
    heights = [bar.get_height() for bar in buckets.axes[0].patches]
    assert sum(heights) * 1024 == pytest.approx(sum(GRADIENT_BYTES))
    assert isinstance(shares, LabFigure)
    for axes in shares.axes:
        seen = [int(y) for points in axes.collections for _, y in points.get_offsets()]
        assert sorted(seen) == list(range(24))
    assert isinstance(rates, LabFigure)
    assert max(rates.axes[0].lines[1].get_ydata()) == pytest.approx(0.4)


def test_large_batches_lay_losses_over_the_samples_read(language: str) -> None:
    figure = figures.large_batches({"small": (16, [2.0] * 40), "large": (64, [2.0, 1.0] * 5)})
    assert isinstance(figure, LabFigure)
    ends = [line.get_xdata()[-1] for line in figure.axes[0].lines]
    assert ends == [640, 640]
    assert "small" in figure.alt and "large" in figure.alt


def test_what_larger_batches_do_is_tabled(language: str) -> None:
    ends = {"16": 0.1, "64": 0.4, "64, × 4": 0.1, "256": 0.7, "256, × 16": 0.8, "256, × 16, warm-up": 0.2}
    answers = figures.large_batches_seen({name: (16, [end] * 8) for name, end in ends.items()})
    assert isinstance(answers, Table)
    assert [row[1] for row in answers.rows] == [say(en=en, fr=fr) for en, fr in [("yes", "oui")] * 3 + [("no", "non")]]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]), ([4.0] * 10 + [0.0] * 10, [4.0] * 10 + [2.0] + [0.0] * 9), ([], [])],
)
def test_smoothed_losses_average_the_last_tenth(losses: list[float], expected: list[float]) -> None:
    assert figures.smoothed(losses) == expected
