"""The grid of ranks: the published groups, every placement, the degrees' arithmetic and its refusals."""

from itertools import product
from math import prod

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.layout import AXES, MAX_RANKS, ORDERS, RankGrid, complete
from dlojz.config.run_config import RunConfig
from dlojz.prediction.shapes import RankPart

PICTURE = RankGrid(dp=2, pp=4, tp=2, gpus_per_node=8)
"""The course's: 2 nodes of 8 GPUs, tp 2, pp 4, dp 2; Megatron-LM's docstring takes the same one as its example."""


def test_the_groups_of_megatrons_docstring() -> None:
    pairs = [(first, first + 1) for first in range(0, 16, 2)]
    assert PICTURE.groups("tp") == tuple(pairs)
    assert PICTURE.groups("pp") == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    assert PICTURE.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15))


def test_the_picture_of_the_course() -> None:
    """TP and DP, which communicate most, stay on NVLink; PP, which communicates least, crosses InfiniBand."""
    assert PICTURE.nodes == (tuple(range(8)), tuple(range(8, 16)))
    assert PICTURE.inside("tp") and PICTURE.inside("dp") and not PICTURE.inside("pp")
    assert PICTURE.links("pp") == PICTURE.groups("pp") and PICTURE.links("tp") == PICTURE.links("dp") == ()
    stages = [{PICTURE.coordinates(rank).pp for rank in node} for node in PICTURE.nodes]
    assert stages == [{0, 1}, {2, 3}]
    assert PICTURE.coordinates(13) == (3, 0, 1) and PICTURE.rank_of(pp=3, dp=0, tp=1) == 13
    assert [PICTURE.node_of(rank) for rank in (3, 7, 11, 15)] == [0, 0, 1, 1]


def test_the_example_of_sagemaker() -> None:
    """A pipeline degree of 2 over 8 processes: four replicas; each over 2 GPUs, each part of the model on 4."""
    dp, pp, tp = complete(8, pp=2, tp=1)
    assert (dp, pp, tp) == (4, 2, 1)
    grid = RankGrid(dp, pp, tp, gpus_per_node=8)
    assert len(grid.groups("pp")) == 4 and {len(group) for group in grid.groups("pp")} == {2}
    assert len(grid.groups("dp")) == 2 and {len(group) for group in grid.groups("dp")} == {4}


@pytest.mark.parametrize("degrees", [(2, 4, 2), (3, 2, 4), (1, 1, 1), (5, 1, 3), (1, 6, 1)])
@pytest.mark.parametrize("order", ORDERS)
def test_every_placement_is_a_grid(degrees: tuple[int, int, int], order: str) -> None:
    dp, pp, tp = degrees
    grid = RankGrid(dp, pp, tp, gpus_per_node=4, order=order)
    places = [grid.coordinates(rank) for rank in range(grid.world_size)]
    assert sorted(places) == list(product(range(pp), range(dp), range(tp)))
    assert [grid.rank_of(**place._asdict()) for place in places] == list(range(grid.world_size))
    for axis in AXES:
        groups = grid.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
        for group in groups:
            assert [getattr(places[rank], axis) for rank in group] == list(range(grid.size(axis)))
            others = {tuple(getattr(places[rank], other) for other in AXES if other != axis) for rank in group}
            assert len(others) == 1 and all(grid.group_of(rank, axis) == group for rank in group)
        spanning = tuple(group for group in groups if len({rank // 4 for rank in group}) > 1)
        assert grid.links(axis) == spanning and grid.inside(axis) == (not spanning)
    inner = order.split("-", maxsplit=1)[0]
    assert grid.groups(inner)[0] == tuple(range(grid.size(inner)))


def test_the_order_of_the_lab_is_that_of_its_predictions() -> None:
    config = RunConfig.of(model="llama_tiny", dp=3, pp=2, tp=2)
    grid = RankGrid(3, 2, 2)
    for rank in range(12):
        place = grid.coordinates(rank)
        part = RankPart(config, rank)
        assert (part.pp_rank, part.dp_rank, part.tp_rank) == place


def test_the_bad_placement_puts_tensor_parallelism_across_nodes() -> None:
    bad = RankGrid(2, 4, 2, gpus_per_node=8, order="pp-dp-tp")
    assert bad.groups("tp") == tuple((rank, rank + 8) for rank in range(8)) == bad.links("tp")
    assert bad.inside("pp") and bad.inside("dp")


def test_the_last_node_may_be_smaller() -> None:
    grid = RankGrid(dp=3, pp=1, tp=2, gpus_per_node=4)
    assert grid.nodes == ((0, 1, 2, 3), (4, 5)) and grid.node_of(5) == 1
    assert RankGrid(dp=2, gpus_per_node=8).nodes == ((0, 1),)


@pytest.mark.parametrize("degrees", [(2, 4, 2), (1, 1, 1), (7, 3, 1)])
def test_the_degree_left_out_is_derived(degrees: tuple[int, int, int]) -> None:
    whole = dict(zip(("dp", "pp", "tp"), degrees, strict=True))
    assert complete(prod(degrees), **whole) == degrees
    for name in whole:
        assert complete(prod(degrees), **{**whole, name: None}) == degrees


@pytest.mark.parametrize(
    "fields, told",
    [
        ({"processes": 16, "tp": 2}, "give dp or pp too (1 where an axis is not used)"),
        ({"processes": 16}, "none was received for 16 processes"),
        ({"processes": 16, "dp": 2, "pp": 2, "tp": 2}, "dp=2, pp=2, tp=2 make 8 processes (dp × pp × tp), but 16 "),
        ({"processes": 16, "dp": 2, "pp": 2, "tp": 2}, "use dp=4 or 8 processes"),
        ({"processes": 7, "dp": 2, "pp": 2, "tp": 2}, "use 8 processes"),
        (
            {"processes": 16, "pp": 3, "tp": 1},
            "pp=3, tp=1 need a multiple of 3 processes, but 16 were received: use 15 or 18 processes",
        ),
        ({"processes": 2, "pp": 3, "tp": 1}, "use 3 processes"),
        ({"processes": 8, "pp": 0, "tp": 1}, "pp must be a whole number from 1"),
        ({"processes": 8, "pp": True, "tp": 1}, "True was received"),
        ({"processes": -8, "pp": 1, "tp": 1}, "processes must be"),
        ({"processes": 8.0, "pp": 1, "tp": 1}, "8.0 was received"),
    ],
)
def test_degrees_that_do_not_fit(fields: dict[str, int], told: str) -> None:
    with pytest.raises(LabError) as refused:
        complete(**fields)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    "ask, told",
    [
        (lambda: RankGrid(dp=0), "dp must be a whole number"),
        (lambda: RankGrid(tp=2, gpus_per_node=0), "gpus_per_node must be"),
        (lambda: RankGrid(tp="2"), "'2' was received"),  # type: ignore[arg-type]
        (lambda: RankGrid(order="tp-pp"), "unknown order 'tp-pp': did you mean 'tp-"),
        (lambda: RankGrid(dp=1024, pp=1024), f"at most {MAX_RANKS}"),
        (lambda: PICTURE.coordinates(16), "use 0 to 15"),
        (lambda: PICTURE.node_of(-1), "there is no rank -1"),
        (lambda: PICTURE.rank_of(pp=4), "pp=4 is outside the grid (dp=2, pp=4, tp=2): use 0 to 3"),
        (lambda: PICTURE.groups("ep"), "unknown axis 'ep'"),
    ],
)
def test_refusals(ask: object, told: str) -> None:
    for language, start in (("en", told), ("fr", "")):
        use_language(language)
        with pytest.raises(LabError) as refused:
            ask()  # type: ignore[operator]
        assert start in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("order", ORDERS)
def test_the_context_axis_is_just_inside_the_data_axis(order: str) -> None:
    grid = RankGrid(dp=2, pp=2, tp=2, cp=3, order=order)
    assert grid.world_size == 24 and grid.degrees == "dp=2, pp=2, tp=2, cp=3"
    stride = {axis: grid.groups(axis)[0][1] for axis in ("dp", "cp")}
    assert stride["dp"] == 3 * stride["cp"]
    for rank in range(24):
        place = grid.coordinates(rank)
        assert grid.rank_of(**place._asdict(), cp=grid.position(rank, "cp")) == rank
        replicas = grid.replicas_of(rank)
        assert len(replicas) == 6 and {grid.coordinates(other)[::2] for other in replicas} == {place[::2]}
    assert grid.position_words(grid.rank_of(pp=1, tp=1, cp=2)) == "1,0,2,1"
    assert [RankGrid(cp=2).communicates(axis) for axis in ("dp", "cp", "tp")] == [True, True, False]
    assert complete(24, pp=2, tp=2, cp=3) == (2, 2, 2)
    with pytest.raises(LabError, match="tp=2, cp=3 make 12 processes .dp × pp × tp × cp.*use dp=2 or"):
        complete(24, dp=1, pp=2, tp=2, cp=3)
