"""Figures and tables of lab 10: what is drawn is what was given; what is still to do is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.base.table import Table
from dlojz.config.run_config import RunConfig
from dlojz.display.style import VERMILION
from dlojz.labs import NotDone
from dlojz.labs.kit.exercise import Verdict
from dlojz.labs.kit.figures import Picture
from dlojz.labs.lab10_experts import figures
from dlojz.labs.lab10_experts import figures as measures
from dlojz.labs.lab10_experts.exercises_ranks import EXPERTS, MixtureTrial, exchange_bytes, mixture, train_mixture
from dlojz.labs.lab10_experts.exercises_routing import gate, places
from dlojz.models.experts.layer import StepLoad
from dlojz.prediction import predict
from dlojz.results.footprint import Footprint
from dlojz.results.record import HeldOutLoss, Trajectory


def undone(*_: Any, **__: Any) -> Any:
    raise NotDone("gate")


def drawn(picture: Any) -> Any:
    assert isinstance(picture, Picture)
    assert picture.figure.alt
    return picture.figure


def test_what_is_to_do_is_said() -> None:
    for said in (
        figures.seats(undone, undone),
        figures.seats(gate, undone),
        figures.dropped_or_empty(gate, undone),
        figures.beside_package(gate, places, undone),
        measures.over_links(undone),
    ):
        assert isinstance(said, Verdict)
        assert said.state == "todo"


@pytest.mark.parametrize(("k", "factor"), [(1, 1.0), (2, 1.25)])
def test_every_choice_has_a_seat_or_is_drawn_as_dropped(k: int, factor: float) -> None:
    (axes,) = drawn(figures.seats(gate, places, k=k, factor=factor)).axes
    _, chosen = gate(figures.crowd(12, 4), k)
    dropped = int((places(chosen, 4, factor) < 0).sum())
    told = sorted(int(text.get_text()) for text in axes.texts)
    assert told == sorted([*range(12)] * k)
    from matplotlib.colors import to_rgba

    edges = [patch for patch in axes.patches if patch.get_edgecolor() == to_rgba(VERMILION)]
    assert len(edges) == dropped > 0


def test_what_is_dropped_and_what_is_empty_add_up() -> None:
    for crowding in (0.0, 1.0, 100.0):
        for factor in (0.5, 1.25, 4.0):
            dropped, empty = figures.shares(gate, places, factor, crowding)
            room = 256 * factor  # 8 experts, whose fair share of 256 choices is a whole number
            assert (1 - dropped) * 256 == pytest.approx((1 - empty) * room)
    assert figures.shares(gate, places, 1.25, 100.0)[0] == pytest.approx(1 - 1.25 / 8)
    left, right = drawn(figures.dropped_or_empty(gate, places)).axes
    assert [list(line.get_ydata()) for line in left.lines[:1]] == [
        [100 * figures.shares(gate, places, factor, 0.0)[0] for factor in left.lines[0].get_xdata()]
    ]
    assert len(right.lines) == 4


@pytest.mark.parametrize("ranks", [2, 3])
def test_as_many_rows_arrive_as_leave(ranks: int) -> None:
    (axes,) = drawn(figures.journey(ranks)).axes
    leaving = [patch for patch in axes.patches if patch.get_x() < ranks * 4.2]
    assert 2 * len(leaving) == len(axes.patches) == 2 * ranks * (2 * ranks) * 2


def test_the_students_layer_stands_beside_the_packages_and_the_dense_one() -> None:
    sheet = figures.beside_package(gate, places, mixture)
    assert isinstance(sheet, Table)
    assert [row[2] for row in sheet.rows] == ["0", "0", "0"]
    # Tokens are dropped, and so the dense mixture gives something else, until each expert has room for all.
    assert [row[1] != "0.0%" for row in sheet.rows] == [row[3] != "0" for row in sheet.rows] == [True, True, False]
    unweighted = figures.beside_package(gate, places, lambda x, weights, *rest: mixture(x, weights * 0 + 1, *rest))
    assert all(row[2] != "0" for row in unweighted.rows)


def test_a_trial_keeps_what_every_mixture_did() -> None:
    trial = train_mixture(balance_loss=0.1, steps=2)
    assert len(trial.losses) == 2
    assert len(trial.loads) == 4  # two mixtures, two steps
    assert all(sum(load.tokens) == 8 * 32 and len(load.tokens) == EXPERTS for load in trial.loads)
    # The same weights and samples; the balance loss is not part of the loss that is told.
    assert train_mixture(balance_loss=0.0, steps=1).losses == trial.losses[:1]


def _trial(balance_loss: float, *tokens: tuple[int, ...]) -> MixtureTrial:
    loads = tuple(
        StepLoad(step=step, layer="blocks.2.mixture", tokens=one, capacity=20, dropped=0.5 - step / 4, balance=1.0)
        for step, one in enumerate(tokens)
    )
    return MixtureTrial(balance_loss=balance_loss, loads=loads, losses=(1.0,) * len(tokens))


def test_loads_are_summed_up() -> None:
    trial = _trial(0.0, (100, 0, 0, 0), (50, 50, 0, 0))
    assert (trial.dropped_share, trial.busiest_share, trial.idle_experts) == (0.375, 0.75, 2.5)
    sheet = measures.loads_table(trial, _trial(0.1, (25, 25, 25, 25)))
    assert sheet.rows == (
        ("without balance loss", "75.0%", "2.5", "37.5%"),
        ("with balance loss, weight 0.1", "25.0%", "0", "50.0%"),
    )
    use_language("fr")
    assert measures.loads_table(trial).rows[0] == ("sans perte d’équilibrage", "75,0 %", "2,5", "37,5 %")
    assert "sans perte d’équilibrage" in drawn(measures.loads(trial)).alt


def test_links_are_those_of_the_students_bytes() -> None:
    sheet = measures.over_links(exchange_bytes)
    assert isinstance(sheet, Table)
    sent = exchange_bytes(4096, 4096, 8, 2, 1.25, 8, 2)
    assert sent == 4 * 8 * 1280 * 4096 * 2 * 7 / 8
    computing = measures.expert_seconds()
    assert computing == pytest.approx(18 * 2 * 4096 * 4096 * 14336 / 200e12)
    for row, rate in zip(sheet.rows, (300e9, 25e9), strict=True):
        seconds = sent / rate
        assert row[2] == f"{1e3 * seconds:.3g} ms"
        assert row[4] == f"{seconds / (seconds + computing):.1%}"


def _run(config: RunConfig, footprint: Footprint | None) -> Any:
    record = None if footprint is None else SimpleNamespace(footprint=lambda rank=0: footprint)
    return SimpleNamespace(config=config, record=record, losses=[2.0, 1.5])


def test_runs_stand_beside_their_predictions() -> None:
    config = RunConfig.of(model="moe_tiny", engine="by_hand", dp=2, ep=2, micro_batch=4)
    forecast = predict(config)
    memory, sent = drawn(measures.side_by_side([_run(config, forecast)])).axes
    for axes in (memory, sent):
        pale = [patch.get_width() for patch in axes.patches if patch.get_alpha() != 1.0]
        full = [patch.get_width() for patch in axes.patches if patch.get_alpha() == 1.0]
        assert pale == full != []
    total = sum(one.sent_bytes for one in forecast.communication if one.group != "control")
    assert sum(patch.get_width() for patch in sent.patches) * 2**20 == pytest.approx(2 * total)
    with pytest.raises(LabError, match="run it again"):
        measures.side_by_side([_run(config, None)])


def _trajectory(config: RunConfig, steps: int) -> Trajectory:
    return Trajectory(
        config=config,
        lengths=(128,) * steps,
        tokens=(512,) * steps,
        step_s=(0.25,) * steps,
        losses=(3.0,) * steps,
        variance_norm=(1.0,) * steps,
        variance_max=(0.125,) * steps,
        held_out=(HeldOutLoss(step=steps, tokens=512 * steps, seconds=1.0, loss=2.5),),
    )


def test_trials_are_summed_up_in_both_languages() -> None:
    config = RunConfig.of(model="gpt_tiny", micro_batch=4, steps=4)
    sheet = figures.trials_table({"without": _trajectory(config, 4), "mine": _trajectory(config, 2)})
    assert sheet.rows == (
        ("without curriculum", "4", "2048", "2.5", "0.12", "1"),
        ("mine", "2", "1024", "2.5", "0.12", "0.5"),
    )
    use_language("fr")
    assert figures.trials_table({"linear": _trajectory(config, 4)}).rows[0][0] == "linéaire"


def test_lengths_and_trials_are_drawn() -> None:
    config = RunConfig.of(
        model="gpt_tiny", micro_batch=1, steps=6, curriculum="linear", curriculum_start=64, curriculum_steps=4,
        curriculum_multiple=32,
    )  # fmt: skip
    assert len(drawn(figures.lengths({"linear": config})).axes) == 2
    assert len(drawn(figures.trials({"linear": _trajectory(config, 6)})).axes) == 4
