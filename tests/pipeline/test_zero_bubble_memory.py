"""The zero-bubble heuristic: the paper's own figures, and its limit kept whatever the costs."""

import random

import pytest

from dlojz.base.errors import LabError
from dlojz.pipeline.orders.zero_bubble import zb_h1, zb_h2, zero_bubble
from dlojz.pipeline.schedule import Costs
from dlojz.pipeline.simulator import UNIT_COSTS, peak_activations, simulate
from dlojz.pipeline.validity import problems

# Qi et al. 2024 (arXiv 2401.10241): times in ms of Table 9, bubble rates of Table 5; 8 stages, sequences of 1024.
MODELS = {"1.5B": (2304, 24), "6.2B": (4096, 32)}
ROWS = [
    # model, micro-batches, T_F, T_B, T_W, T_comm, rate of ZB-1p, of ZB-2p
    ("1.5B", 24, 18.522, 18.086, 9.337, 0.601, 0.1585, 0.0433),
    ("1.5B", 32, 18.513, 18.086, 9.331, 0.626, 0.1242, 0.0039),
    ("1.5B", 64, 18.546, 18.097, 9.321, 0.762, 0.0674, 0.0026),
    ("6.2B", 24, 29.718, 29.444, 19.927, 0.527, 0.1323, 0.0029),
    ("6.2B", 32, 29.802, 29.428, 19.530, 0.577, 0.1045, 0.0022),
    ("6.2B", 64, 29.935, 29.621, 19.388, 0.535, 0.0554, 0.0010),
]


def paper_costs(model: str, forward: float, for_input: float, for_weight: float, latency: float) -> Costs:
    """Times in ms; M_W over M_B of a layer: 32 h / (34 h + 5 a s) (§2.3)."""
    hidden, heads = MODELS[model]
    share = 32 * hidden / (34 * hidden + 5 * heads * 1024)
    return Costs(
        forward=forward,
        backward_input=for_input,
        backward_weight=for_weight,
        latency=latency,
        kept_for_weight=share,
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_zero_bubble_gives_table_5_of_the_paper_to_four_decimals(
    row: tuple[str, int, float, float, float, float, float, float],
) -> None:
    model, micro_batches, *times, one, two = row
    costs = paper_costs(model, *times)
    for limit, expected in ((8, one), (16, two)):
        schedule = zero_bubble(8, micro_batches, limit, costs)
        assert problems(schedule, limit, costs) == []
        timeline = simulate(schedule, costs)
        assert round((timeline.span - max(timeline.work)) / timeline.span, 4) == expected


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 8), (4, 16), (8, 16)])
def test_zero_bubble_with_equal_times_is_as_good_as_schedules_written_by_hand(ranks: int, micro_batches: int) -> None:
    one, two = (simulate(zero_bubble(ranks, micro_batches, limit)) for limit in (ranks, 2 * ranks))
    assert one.span <= simulate(zb_h1(ranks, micro_batches)).span
    assert two.span == simulate(zb_h2(ranks, micro_batches)).span == 3 * micro_batches


def test_zero_bubble_with_fewer_micro_batches_than_ranks() -> None:
    """(m + p − 1)(F + I) + W: Appendix H of the paper."""
    for ranks, micro_batches in ((4, 1), (4, 2), (4, 3), (8, 5), (1, 3)):
        least = (micro_batches + ranks - 1) * 2 + 1 if ranks > 1 else 3 * micro_batches
        assert simulate(zero_bubble(ranks, micro_batches, 2 * ranks)).makespan == least


def test_the_limit_is_kept_whatever_the_costs() -> None:
    draw = random.Random(5)
    for _ in range(60):
        ranks, micro_batches = draw.randint(1, 6), draw.randint(1, 14)
        times = {
            name: tuple(draw.randint(1, 9) for _ in range(ranks))
            for name in ("forward", "backward_input", "backward_weight")
        }
        costs = Costs(**times, latency=draw.choice((0, 0.5, 3)), kept_for_weight=draw.choice((0.0, 0.37, 1.0)))
        limit = draw.choice((1, 1.5, 2, ranks, 2 * ranks))
        schedule = zero_bubble(ranks, micro_batches, limit, costs)
        assert problems(schedule, limit, costs) == [], (ranks, micro_batches, costs, limit)
        simulate(schedule, costs)


def test_more_memory_makes_shorter_spans() -> None:
    spans = [simulate(zero_bubble(8, 24, limit)).span for limit in (1, 2, 4, 8, 16)]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] > spans[-1] == 72
    assert max(peak_activations(zero_bubble(8, 24, 1), UNIT_COSTS)) == 1


def test_zero_bubble_refuses_what_cannot_be_planned() -> None:
    with pytest.raises(LabError, match="a memory limit of 0.5 is less than one micro-batch"):
        zero_bubble(4, 8, 0.5)
    with pytest.raises(LabError, match="micro_batches must be a whole number of at least 1, but 0 was received"):
        zero_bubble(4, 0, 4)
    with pytest.raises(LabError, match="ranks must be a whole number of at least 1, but 0 was received"):
        zero_bubble(0, 4, 4)
