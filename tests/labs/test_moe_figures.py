"""Figures and tables of lab 10: what is drawn is what was given; what is still to do is said."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.base.table import Table
from dlojz.config.run_config import RunConfig
from dlojz.display.style import VERMILION
from dlojz.labs import NotDone
from dlojz.labs.kit.exercise import Verdict
from dlojz.labs.kit.figures import Picture
from dlojz.labs.lab10_experts import figures
from dlojz.labs.lab10_experts.exercises_ranks import exchange_bytes, mixture
from dlojz.labs.lab10_experts.exercises_routing import gate, places
from dlojz.prediction import predict
from dlojz.results.footprint import Footprint


def undone(*_: Any, **__: Any) -> Any:
    raise NotDone("gate")


def drawn(picture: Any) -> Any:
    assert isinstance(picture, Picture)
    assert picture.figure.alt
    return picture.figure


def test_figures_of_moe_say_what_is_to_do() -> None:
    for said in (
        figures.seats(undone, undone),
        figures.seats(gate, undone),
        figures.dropped_or_empty(gate, undone),
        figures.beside_package(gate, places, undone),
        figures.over_links(undone),
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
def test_journey_has_as_many_rows_arrive_as_leave(ranks: int) -> None:
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


def test_loads_are_drawn_in_both_languages() -> None:
    trainings = {0.0: [torch.tensor([100, 0, 0, 0])] * 2, 0.1: [torch.tensor([25, 25, 25, 25])] * 2}
    alt = drawn(figures.loads(trainings)).alt
    # Four experts have room for 32 of 100 tokens each.
    assert "without balance loss: the busiest of 4 experts takes 100% of the choices" in alt
    assert "68% of the choices are dropped" in alt
    use_language("fr")
    assert "sans perte d’équilibrage" in drawn(figures.loads(trainings)).alt


def test_links_are_those_of_the_students_bytes() -> None:
    sheet = figures.over_links(exchange_bytes)
    assert isinstance(sheet, Table)
    sent = exchange_bytes(4096, 4096, 8, 2, 1.25, 8, 2)
    assert sent == 4 * 8 * 1280 * 4096 * 2 * 7 / 8
    computing = figures.expert_seconds()
    assert computing == pytest.approx(18 * 2 * 1.25 * 4096 * 4096 * 14336 / 200e12)
    for row, rate in zip(sheet.rows, (300e9, 25e9), strict=True):
        seconds = sent / rate
        assert row[2] == f"{1e3 * seconds:.3g} ms"
        assert row[4] == f"{seconds / (seconds + computing):.1%}"


def _run(config: RunConfig, footprint: Footprint | None) -> Any:
    record = None if footprint is None else SimpleNamespace(footprint=lambda rank=0: footprint)
    return SimpleNamespace(config=config, record=record, losses=[2.0, 1.5])


def test_side_by_side_puts_runs_beside_their_predictions() -> None:
    config = RunConfig.of(model="moe_tiny", engine="by_hand", dp=2, ep=2, micro_batch=4)
    forecast = predict(config)
    memory, sent = drawn(figures.side_by_side([_run(config, forecast)])).axes
    for axes in (memory, sent):
        pale = [patch.get_width() for patch in axes.patches if patch.get_alpha() != 1.0]
        full = [patch.get_width() for patch in axes.patches if patch.get_alpha() == 1.0]
        assert pale == full != []
    total = sum(one.sent_bytes for one in forecast.communication if one.group != "control")
    assert sum(patch.get_width() for patch in sent.patches) * 2**20 == pytest.approx(2 * total)
    with pytest.raises(LabError, match="run it again"):
        figures.side_by_side([_run(config, None)])


def test_a_curriculum_is_drawn_where_its_loss_was_measured() -> None:
    steps = [figures.CurriculumStep(16, 64 * n, 0.5 * n, 0.1, 3.0 if n % 2 else None) for n in range(1, 5)]
    lengths, roots, by_tokens, by_seconds = drawn(figures.curriculum({"mine": steps})).axes
    assert list(lengths.lines[0].get_ydata()) == [16] * 4 and list(roots.lines[0].get_ydata()) == [0.1] * 4
    assert list(by_tokens.lines[0].get_xdata()) == [64, 192] and list(by_seconds.lines[0].get_xdata()) == [0.5, 1.5]
