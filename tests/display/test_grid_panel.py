"""The panel answers whatever is chosen, as its still twin does; the scene shows each rank once, in its node."""

import re
import sys
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.layout import AXES, ORDERS, RankGrid
from dlojz.display.grid_drawing import MOST_JOINED, advice, scene_of
from dlojz.display.widgets.grid_panel import GridAnswer, GridPanel, grid_panel, still_grid
from dlojz.prediction.link_traffic import crossing
from dlojz.results.footprint import Traffic

PICTURE = RankGrid(dp=2, pp=4, tp=2, gpus_per_node=8)


@pytest.fixture
def no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that need no model: one message along each axis."""

    def made_up(config: Any, grid: RankGrid) -> Any:
        def told(collective: str, axis: str) -> Traffic:
            size = grid.size(axis)
            return Traffic(collective=collective, group=axis, group_size=size, count=1, message_bytes=2**20)

        each = [told("all_reduce", "tp"), told("all_reduce", "dp"), told("send", "pp")]
        return crossing([[one for one in each if one.group_size > 1]] * grid.world_size, grid)

    monkeypatch.setattr("dlojz.display.widgets.grid_panel.link_traffic", made_up)


@pytest.mark.parametrize(
    "grid", [PICTURE, RankGrid(4, 4, 4, 4), RankGrid(3, 1, 2, 4), RankGrid(2, 2, 16, 32), RankGrid()], ids=repr
)
@pytest.mark.parametrize("axis", AXES)
def test_the_scene_shows_each_rank_once_in_its_node(grid: RankGrid, axis: str) -> None:
    scene = scene_of(grid, axis)
    assert [cell.rank for cell in scene.cells] == list(range(grid.world_size))
    assert len({(cell.x, cell.y) for cell in scene.cells}) == grid.world_size
    for cell in scene.cells:
        box = scene.nodes[grid.node_of(cell.rank)]
        assert box.x < cell.x and cell.x + 1 < box.x + box.width and box.y < cell.y and cell.y + 1 < box.y + box.height
        assert cell.rank in grid.groups(axis)[cell.group] and cell.place == grid.coordinates(cell.rank)
        assert box.x + box.width <= scene.width + 1e-9 and box.y + box.height <= scene.height + 1e-9
    if grid.world_size <= MOST_JOINED:
        assert len(scene.joins) == len(grid.groups(axis)) * (grid.size(axis) - 1)
        assert any(join.crosses for join in scene.joins) == (not grid.inside(axis))


@pytest.mark.usefixtures("no_bytes")
def test_it_follows_every_control() -> None:
    panel = GridPanel(dp=2, pp=4, tp=2, gpus_per_node=8, axis="pp")
    assert "pp: 4 groups of 4, across nodes" in panel.shown.value and panel.shown.value.count("<title>") == 16
    assert "tp stays inside the nodes" in panel.shown.value and "rank 13: pp 3, dp 0, tp 1" in panel.shown.value
    seen = {panel.shown.value}
    for name, value in {"order": "pp-dp-tp", "axis": "tp", "gpus_per_node": 4, "dp": 3, "pp": 2, "tp": 4}.items():
        panel.controls[name].value = value
        seen.add(panel.shown.value)
    assert len(seen) == 7 and panel.answer.grid == RankGrid(3, 2, 4, 4, "pp-dp-tp")
    assert "tp crosses nodes" in panel.shown.value and "innermost, order tp-dp-pp" in panel.shown.value


@pytest.mark.usefixtures("no_bytes")
def test_every_order_and_the_largest_grid_are_drawn() -> None:
    for order in ORDERS:
        assert "<svg" in still_grid(order=order).html()
    answer = still_grid(dp=16, pp=16, tp=2, gpus_per_node=8)
    assert answer.html().count("<title>") == 512 and not answer.problem


@pytest.mark.usefixtures("no_bytes")
def test_the_still_twin_shows_the_same_without_widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    still = still_grid(dp=2, pp=2, tp=2)
    html = still._repr_html_()
    assert 'src="data:image/png;base64,' in html and "<svg" not in html and "all_reduce" in html
    assert repr(still).startswith("8 ranks = dp 2 × pp 2 × tp 2, on 2 nodes of 4 GPUs") and "pp crosses" in repr(still)
    with pytest.raises(LabError, match=r"pip install 'dlojz\[labs\]', or use still_grid"):
        grid_panel()


def test_real_bytes_are_those_of_a_run() -> None:
    still = still_grid(model="vit_tiny", dp=2, pp=1, tp=1, gpus_per_node=1)
    assert still.crossing is not None and still.crossing.bytes_of("dp", between=True) > 0 and "MiB" in still.html()


@pytest.mark.parametrize(
    "fields, told",
    [
        ({"dp": 0}, "dp must be a whole number from 1"),
        ({"dp": "2"}, "dp must be a whole number"),
        ({"degree": 2}, "unknown field 'degree'"),
        ({"order": "<b>"}, "unknown order"),
        ({"axis": "ep"}, "unknown axis 'ep'"),
        ({"dp": 1000}, "at most 512 ranks"),
    ],
)
def test_what_is_no_grid_is_one_sentence(fields: dict[str, Any], told: str) -> None:
    answer = still_grid(**fields)
    assert answer.grid is None and answer.figure is None and told in repr(answer)
    assert "<b>&#x27;" not in answer.html() and "<svg" not in answer.html() and "<b><b>" not in answer.html()
    with pytest.raises(LabError, match=re.escape(told)):
        grid_panel(**fields)


def test_still_grid_shows_the_picture_where_only_the_bytes_are_unknown() -> None:
    answer = still_grid(tp=3, model="llama_tiny")
    assert answer.crossing is None and "The bytes are not known: tp=3" in answer.html() and "<svg" in answer.html()
    unknown = still_grid(model="<img src=x>")
    assert "<img" not in unknown.html() and "&lt;img" in unknown.html()
    with pytest.raises(LabError, match="unknown model"):
        grid_panel(model="<img src=x>")


@pytest.mark.usefixtures("no_bytes")
def test_both_languages() -> None:
    use_language("fr")
    html = still_grid(dp=2, pp=4, tp=2, gpus_per_node=8, axis="pp").html()
    assert "pp : 4 groupes de 4, à cheval sur des nœuds" in html and "nœud 1" in html and "Mio" in html
    assert "rang 13 : pp 3" in html and GridAnswer(None, problem="x").html().count("<p") == 1


@pytest.mark.parametrize(
    "grid, told",
    [
        (PICTURE, "tp stays inside the nodes; pp crosses nodes"),
        (RankGrid(dp=8, tp=1, gpus_per_node=4), "dp crosses nodes with the gradients"),
        (RankGrid(dp=2, tp=2, gpus_per_node=4), "No group leaves its node"),
        (RankGrid(dp=2, tp=4, gpus_per_node=4, order="dp-tp-pp"), "put it innermost, order tp-dp-pp"),
        (RankGrid(tp=8, gpus_per_node=4), "a node has 4 GPUs, so use tp=4 or less"),
        (RankGrid(dp=4, tp=3, gpus_per_node=4), "3 does not divide the 4 GPUs of a node, so use tp=2"),
    ],
    ids=repr,
)
def test_the_advice(grid: RankGrid, told: str) -> None:
    assert told in advice(grid)
    use_language("fr")
    assert advice(grid).endswith(".") and "cross" not in advice(grid)
