"""The load of the experts as it is drawn: every step, the capacity, and what is said of it in words."""

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.display.figures.run_figures import expert_load_figure
from dlojz.results.record import ExpertLoad


def loads(tokens: tuple[int, ...], dropped: float, layer: str = "blocks.2.mixture") -> list[ExpertLoad]:
    return [ExpertLoad(step=step, layer=layer, tokens=tokens, capacity=20, dropped=dropped) for step in range(30)]


BALANCED, COLLAPSED = loads((16, 16, 16, 16), 0.0), loads((60, 4, 0, 0), 0.625)


def test_all_steps_of_all_experts_are_drawn_in_fair_shares() -> None:
    figure = expert_load_figure({"with": BALANCED, "without": COLLAPSED})
    meshes = [axes.collections[0] for axes in figure.axes if axes.collections and axes.get_title(loc="left")]
    assert [mesh.get_array().shape for mesh in meshes] == [(4, 30), (4, 30)]
    assert meshes[0].get_array()[:, 0].tolist() == [1, 1, 1, 1]
    assert meshes[1].get_array()[:, 29].tolist() == [3.75, 0.25, 0, 0]
    assert meshes[0].get_clim() == meshes[1].get_clim() == (0, 3.75)  # one scale for both
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[3].get_lines()}
    assert set(lines["busiest expert"]) == {3.75} and set(lines["idlest expert"]) == {0}
    assert set(lines["capacity"]) == {1.25}


def test_expert_load_figure_says_in_words_what_it_shows() -> None:
    figure = expert_load_figure({"with": BALANCED, "without": COLLAPSED})
    assert figure.alt == (
        "Load of the experts over the last steps. with: the busiest of 4 experts takes 25% of the choices, 0 are all "
        "but idle, 0% of the choices are dropped; without: the busiest of 4 experts takes 94% of the choices, 2 are "
        "all but idle, 62% of the choices are dropped"
    )
    use_language("fr")
    assert "avec : le plus chargé des 4 experts prend 25 % des choix" in expert_load_figure({"avec": BALANCED}).alt


def test_expert_load_figure_takes_the_last_layer() -> None:
    both = [*BALANCED, *loads((64, 0, 0, 0), 0.7, "blocks.4.mixture")]
    assert "takes 100%" in expert_load_figure({"$x$": both}).alt


def test_expert_load_figure_refusals() -> None:
    with pytest.raises(LabError, match="give the loads of at least one training"):
        expert_load_figure({})
    with pytest.raises(LabError, match="dense has no load of experts: train a model with a mixture"):
        expert_load_figure({"dense": []})
    use_language("fr")
    with pytest.raises(LabError, match="dense n’a aucune charge d’experts : entraînez un modèle"):
        expert_load_figure({"dense": []})
