"""The figures of lab 09 draw what the student's functions give, what was predicted, and what was measured."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.labs import NotDone
from dlojz.labs.kit.exercise import Verdict
from dlojz.labs.kit.figures import Picture
from dlojz.labs.lab09_optimizers import figures
from dlojz.labs.lab09_optimizers.exercises_compression import freeze_step
from dlojz.labs.lab09_optimizers.exercises_updates import update_in_backward, watch_gradients
from dlojz.prediction import predict
from tests.display.legible import DRAWN_IN

NORMS = [[1 - math.exp(-step / (5 + seed)) for step in range(60)] for seed in range(3)]
ENDS = {5: [math.nan, 2.0, 1.5], 20: [1.0, 1.1, 0.9], 60: [1.0, 1.2, 0.8]}


def undone(*_: Any) -> Any:
    raise NotDone("compress-signs")


def drawn(made: Picture | Verdict) -> Any:
    assert isinstance(made, Picture)
    return made.figure


def run(optimizer: str, losses: tuple[float, ...] = (2.0, 1.0), **fields: Any) -> Any:
    """As a run that has measured what was predicted."""
    engine = {} if fields.get("gradient_compression") else {"engine": "by_hand"}
    config = RunConfig.of(
        model="llama_tiny", sequence_length=16, dp=2, micro_batch=1, steps=8, optimizer=optimizer, **engine, **fields
    )
    told = predict(config)
    told = told.model_copy(update={"source": "measured", "phases": told.phases.model_copy(update={"step_s": 0.1})})
    return SimpleNamespace(config=config, losses=losses, record=SimpleNamespace(footprint=lambda rank=0: told))


def test_figures_of_optimizers_say_what_is_still_to_do() -> None:
    for made in (
        figures.freezing(NORMS, ENDS, undone, 0.9, 0.9),
        figures.gradients_at_once([1, 2], undone),
    ):
        assert isinstance(made, Verdict)
        assert made.state == "todo"


@pytest.mark.parametrize("language", DRAWN_IN)
def test_the_three_walks_are_drawn(language: Any) -> None:
    use_language(language)
    ways = [0.0, -1.0], [0.0, 2.0], [0.0, -0.5]
    assert tuple(list(line.get_ydata()) for line in drawn(figures.walk(*ways)).axes[0].lines) == ways


@pytest.mark.parametrize("language", DRAWN_IN)
def test_the_steps_of_the_criterion_are_marked_and_who_diverged_is_counted(language: Any) -> None:
    use_language(language)
    left, right = drawn(figures.freezing(NORMS, ENDS, freeze_step, 0.9, 0.9)).axes
    marked = [int(line.get_xdata()[0]) for line in left.lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert marked == [freeze_step(row, 0.9, 0.9) for row in NORMS]
    shown = [list(line.get_ydata()) for line in right.lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert shown == [[2.0, 1.5], [1.0, 1.1, 0.9], [1.0, 1.2, 0.8]]
    assert [text.get_text() for text in right.texts] == ["× 1"]


def test_bytes_and_states_are_drawn_as_they_were_predicted_and_measured() -> None:
    runs = [run("adamw"), run("one_bit_adam")]
    sent, kept = drawn(figures.sent_and_kept(runs)).axes
    widths = sum(bar.get_width() for bar in sent.patches) * 2**20
    told = [one.record.footprint() for one in runs]
    assert widths == pytest.approx(2 * sum(t.sent_bytes for one in told for t in one.communication if t.group == "dp"))
    states = sum(bar.get_width() for bar in kept.patches) * 2**20
    assert states == pytest.approx(2 * sum(one.memory.states_bytes for one in told))


@pytest.mark.parametrize("language", DRAWN_IN)
def test_the_board_takes_runs_as_they_are(language: Any) -> None:
    use_language(language)
    runs = [run("adamw"), run("adamw", gradient_compression="fp16"), run("diloco", (2.0, 1.1), local_steps=4)]
    ways = [figures.way_of(one) for one in runs]
    assert [way.name for way in ways] == ["AdamW", "AdamW, fp16", "DiLoCo"]
    assert [way.losses for way in ways] == [(1.0,), (1.0,), (1.1,)]
    assert ways[0].sent_bytes == 2 * ways[1].sent_bytes == 4 * ways[2].sent_bytes
    assert "DiLoCo" in drawn(figures.board(runs)).alt


def test_gradients_are_counted_as_they_come() -> None:
    def loss_of(model: nn.Module) -> Any:
        return model(torch.ones(2, 3)).sum()

    def two_layers() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))

    whole = 4 * (15 + 5 + 10 + 2)
    plainly = watch_gradients(two_layers(), loss_of)
    assert plainly == sorted(plainly)
    assert plainly[-2:] == [whole, whole]
    within = watch_gradients(
        two_layers(), loss_of, lambda model: update_in_backward(model, lambda own: torch.optim.SGD(own, lr=0.1))
    )
    assert sorted(within) == [0, 8, 20, 40, 60]
    figure = drawn(figures.gradients_at_once(plainly, lambda: within))
    assert max(figure.axes[0].lines[0].get_ydata()) * 2**20 == pytest.approx(whole)
