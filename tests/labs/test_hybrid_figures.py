"""Figures of lab 07: grids, losses beside one process, and each rank's memory, in both languages.

What is looked at of every figure: letters of 9 pixels in a notebook, none cut by an edge, none on another.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.labs.lab07_hybrid import figures
from dlojz.prediction import predict
from tests.display.legible import DRAWN_IN
from tests.display.overlap import overlapping, too_small


def _run(losses: tuple[float, ...], **fields: Any) -> Any:
    """A run that has measured what is predicted."""
    config = RunConfig.of(model="llama_tiny", sequence_length=32, micro_batch=8, steps=len(losses), **fields)
    record = SimpleNamespace(footprint=lambda rank: predict(config, rank))
    return SimpleNamespace(config=config, losses=losses, record=record)


@pytest.mark.parametrize("language", DRAWN_IN)
def test_every_figure_is_legible(language: str) -> None:
    use_language(language)
    alone = _run((5.0, 4.5, 4.1), engine="single")
    both = _run((5.0, 4.500001, 4.1), engine="by_hand", dp=2, tp=2)
    for picture in (
        figures.drawn(dp=2, pp=4, tp=2, gpus_per_node=8),
        figures.losses([both, alone]),
        figures.memory(both, alone),
    ):
        figure: Any = getattr(picture, "figure", picture)
        assert too_small(figure) == [] and overlapping(figure) == [], figure.alt
