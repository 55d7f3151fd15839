"""Bytes on links: by hand on small grids, and byte for byte those of the predictions they are made from."""

from fractions import Fraction

import pytest

from dlojz.base.errors import LabError
from dlojz.by_hand.collectives.cost import cost_s
from dlojz.config.layout import ORDERS, RankGrid
from dlojz.config.run_config import RunConfig
from dlojz.hardware.links import Link
from dlojz.prediction.communication import predict_communication
from dlojz.prediction.link_traffic import Crossing, crossing, link_traffic
from dlojz.prediction.shapes import RankPart
from dlojz.results.footprint import Traffic

ALPHA_S, BETA = 1e-5, 1e-9
MESSAGE = 400


def told(collective: str, group: str, size: int, message_bytes: int = MESSAGE, count: int = 1) -> Traffic:
    return Traffic(
        collective=collective,
        group=group,
        group_size=size,
        count=count,
        message_bytes=message_bytes,
    )


def test_a_ring_over_two_nodes_crosses_twice() -> None:
    grid = RankGrid(dp=4, gpus_per_node=2)
    found = crossing([[told("all_reduce", "dp", 4)]] * 4, grid)
    assert [(flow.source, flow.target, flow.num_bytes) for flow in found.flows] == [
        (rank, (rank + 1) % 4, Fraction(600)) for rank in range(4)
    ]
    (row,) = found.rows
    assert (row.inside_bytes, row.between_bytes) == (1200, 1200)
    assert found.node_table == ((600, 600), (600, 600))


@pytest.mark.parametrize(
    "collective, sent",
    [
        ("all_reduce", [600] * 4),
        ("all_gather", [300] * 4),
        ("reduce_scatter", [300] * 4),
        ("all_to_all", [300] * 4),
        ("broadcast", [400, 400, 400, 0]),
        ("reduce", [0, 400, 400, 400]),
        ("gather", [0, 100, 100, 100]),
        ("scatter", [300, 0, 0, 0]),
        ("barrier", [0] * 4),
    ],
)
def test_what_each_rank_sends(collective: str, sent: list[int]) -> None:
    each = told(collective, "dp", 4)
    found = crossing([[each]] * 4, RankGrid(dp=4, gpus_per_node=4))
    totals = [sum(flow.num_bytes for flow in found.flows if flow.source == rank) for rank in range(4)]
    assert totals == sent
    if collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert totals[0] == each.sent_bytes
    assert sum(map(sum, found.node_table)) == sum(sent)


def by_hand() -> list[list[Traffic]]:
    """2 × 2 × 2: along tp 8 all-reduces of 4,000 bytes in all, along dp one of 1,000, along pp 300 each way."""
    return [
        [
            told("all_reduce", "tp", 2, 4000, 8),
            told("all_reduce", "dp", 2, 1000),
            told("send", "pp", 2, 300),
            told("recv", "pp", 2, 300),
        ]
    ] * 8


def test_the_order_decides_which_axis_leaves_the_node() -> None:
    def between(order: str) -> dict[str, int]:
        found = crossing(by_hand(), RankGrid(2, 2, 2, gpus_per_node=4, order=order))
        return {axis: found.bytes_of(axis, between=True) for axis in ("tp", "dp", "pp")}

    assert between("tp-dp-pp") == {"tp": 0, "dp": 0, "pp": 8 * 300}
    assert between("tp-pp-dp") == {"tp": 0, "dp": 8 * 1000, "pp": 0}
    assert between("pp-dp-tp") == {"tp": 8 * 4000, "dp": 0, "pp": 0}
    totals = {sum(map(sum, crossing(by_hand(), RankGrid(2, 2, 2, 4, order)).node_table)) for order in ORDERS}
    assert totals == {8 * (4000 + 1000 + 300)}


def test_crossing_in_the_picture_of_the_course_is_of_activations_only() -> None:
    """2 nodes of 8 GPUs, tp 2, pp 4, dp 2: of the three boundaries between stages, one lies between the nodes."""
    ends = [told("all_reduce", "tp", 2, 4000), told("all_reduce", "dp", 2, 1000), told("send", "pp", 4, 300)]
    middle = [*ends[:2], told("send", "pp", 4, 600)]
    grid = RankGrid(2, 4, 2, gpus_per_node=8)
    found = crossing([middle if grid.coordinates(rank).pp in (1, 2) else ends for rank in range(16)], grid)
    assert found.bytes_of("tp", between=True) == found.bytes_of("dp", between=True) == 0
    assert found.bytes_of("pp", between=True) == 4 * 300 * 2 and found.bytes_of("pp", between=False) == 4 * 300 * 4
    assert found.node_table[0][1] == found.node_table[1][0] == 4 * 300


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "pp": 4, "micro_batches": 8},
        {"dp": 2, "pp": 2, "chunks": 2, "schedule": "interleaved", "micro_batches": 4},
        {"dp": 2, "pp": 2, "schedule": "chimera", "engine": "by_hand", "micro_batches": 4},
        {"pp": 2, "schedule": "zb-v", "micro_batches": 4},
        {"dp": 2, "pp": 2, "zero": 1, "engine": "deepspeed", "micro_batches": 4},
        {"dp": 2, "pp": 2, "tp": 2, "engine": "by_hand", "micro_batches": 4},
    ],
    ids=lambda layout: f"{layout.get('engine', 'torch')} {layout.get('schedule', '1f1b')} tp={layout.get('tp', 1)}",
)
def test_every_byte_that_is_predicted_is_on_a_link_and_arrives(layout: dict[str, object]) -> None:
    config = RunConfig.of(model="vit_tiny", **layout)
    found = link_traffic(config)
    for rank in range(config.layout.world_size):
        predicted = predict_communication(RankPart(config, rank))
        for each in predicted:
            if each.collective == "recv":
                arrived = [flow for flow in found.flows if (flow.target, flow.collective) == (rank, "send")]
                assert sum(flow.num_bytes for flow in arrived) == each.message_bytes
                assert sum(flow.messages for flow in arrived) == each.count
                continue
            of_rank = [
                flow
                for flow in found.flows
                if (flow.source, flow.collective, flow.group) == (rank, each.collective, each.group)
            ]
            assert float(sum(flow.num_bytes for flow in of_rank)) == pytest.approx(each.sent_bytes, rel=1e-12)
    sends = sum(each.sent_bytes for rank in range(config.layout.world_size) for each in _sending(config, rank))
    assert sum(row.inside_bytes + row.between_bytes for row in found.rows) == pytest.approx(sends, abs=len(found.rows))


def _sending(config: RunConfig, rank: int) -> list[Traffic]:
    predicted = predict_communication(RankPart(config, rank))
    return [each for each in predicted if each.collective != "recv"]


def test_link_traffic_of_the_data_axis_over_the_network_depends_on_the_order_alone() -> None:
    config = RunConfig.of(model="vit_tiny", dp=2, pp=2, micro_batches=4)
    usual, other = (link_traffic(config, RankGrid(2, 2, 1, 2, order)) for order in ("tp-dp-pp", "tp-pp-dp"))
    assert usual.bytes_of("dp", between=True) == 0 < other.bytes_of("dp", between=True)
    assert other.bytes_of("pp", between=True) == 0 < usual.bytes_of("pp", between=True)
    for axis in ("dp", "pp"):
        assert sum(usual.bytes_of(axis, between=here) for here in (True, False)) == sum(
            other.bytes_of(axis, between=here) for here in (True, False)
        )


def test_seconds_are_those_of_the_cost_model() -> None:
    """A ring of one kind of link takes the closed form; one that crosses takes that of its slowest link."""
    link, slow = Link(ALPHA_S, 1 / BETA), Link(10 * ALPHA_S, 0.1 / BETA)
    inside: Crossing = crossing([[told("all_reduce", "dp", 4)]] * 4, RankGrid(dp=4, gpus_per_node=4))
    across: Crossing = crossing([[told("all_reduce", "dp", 4)]] * 4, RankGrid(dp=4, gpus_per_node=2))
    expected_s = cost_s("ring_all_reduce", MESSAGE, 4, alpha_s=ALPHA_S, beta_s_per_byte=BETA)
    assert inside.seconds(link, slow) == pytest.approx({"dp": expected_s}, rel=1e-12)
    assert across.seconds(link, slow) == pytest.approx({"dp": 10 * expected_s}, rel=1e-12)


def test_what_a_rank_sends_to_several_others_adds_up() -> None:
    """The middle rank of three sends to both sides, 2 messages and 300 bytes each; an all-to-all to 3 others."""
    link, slow = Link(ALPHA_S, 1 / BETA), Link(10 * ALPHA_S, 0.1 / BETA)
    ends, middle = ([told("send", "pp", 3, 300 * sides, 2 * sides)] for sides in (1, 2))
    piped = [ends, middle, ends]
    inside_s = 4 * ALPHA_S + 600 * BETA
    assert crossing(piped, RankGrid(pp=3)).seconds(link, slow) == pytest.approx({"pp": inside_s}, rel=1e-12)
    mixed = crossing(piped, RankGrid(pp=3, gpus_per_node=2))  # to the first rank in the node, to the last across
    assert mixed.seconds(link, slow) == pytest.approx({"pp": 11 * inside_s / 2}, rel=1e-12)
    exchanged = crossing([[told("all_to_all", "dp", 4)]] * 4, RankGrid(dp=4, gpus_per_node=4))
    assert exchanged.seconds(link, slow) == pytest.approx({"dp": 3 * ALPHA_S + 300 * BETA}, rel=1e-12)


def test_link_traffic_and_crossing_refuse_a_grid_that_does_not_fit() -> None:
    config = RunConfig.of(model="vit_tiny", dp=2)
    with pytest.raises(LabError, match=r"the grid has dp=4, pp=1, tp=1, but the run has dp=2, tp=1, pp=1"):
        link_traffic(config, RankGrid(dp=4))
    with pytest.raises(LabError, match="one entry per rank"):
        crossing([], RankGrid(dp=2))
    with pytest.raises(LabError, match="has 2 ranks in this grid, but all_reduce assumes 4"):
        crossing([[told("all_reduce", "dp", 4)]] * 2, RankGrid(dp=2))
    with pytest.raises(LabError, match="'sp' is none of a grid"):
        crossing([[told("all_reduce", "sp", 2)]] * 2, RankGrid(dp=2))
