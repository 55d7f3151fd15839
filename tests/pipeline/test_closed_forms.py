"""Formulas against the simulator, swept over ranks, micro-batches, chunks, times and latency."""

from itertools import product

import pytest

from dlojz.base.errors import LabError
from dlojz.pipeline.analysis import fraction, overhead, total_time
from dlojz.pipeline.schedule import Costs, Schedule
from dlojz.pipeline.schedule_catalogue import SCHEDULES, build
from dlojz.pipeline.simulator import peak_activations, simulate
from tests.pipeline.closed_forms import LAWS, closed_form

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in sorted({1, 3, p, p + 1, 2 * p - 1, 2 * p, 3 * p + 2, 3 * p})]
TIMES = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2), (1, 3, 2), (3, 2, 2.5), (1, 0.5, 0.5)]
COSTS = [Costs(*times, latency=latency) for times, latency in product(TIMES, (0, 0.125, 0.5, 3))]
OPTIONS: dict[str, list[dict[str, int]]] = {
    "interleaved": [{"chunks": 2}, {"chunks": 3}],
    "looped-bfs": [{"chunks": 2}, {"chunks": 3}],
    "interleaved-zb": [{"chunks": 1}, {"chunks": 2}, {"chunks": 3}],
    "hanayo": [{"waves": 1}, {"waves": 2}],
    "terapipe": [{"token_slices": 1}, {"token_slices": 4}],
}


def crossings(schedule: Schedule) -> int:
    """Messages between ranks, counted in the compiled dependencies."""
    graph = schedule.graph
    edges = [(needed, index) for index, needed in enumerate(graph.needs) if needed < graph.actions]
    return sum(int(graph.rank[needed] != graph.rank[index]) for needed, index in (*edges, *graph.also))


@pytest.mark.parametrize("name", LAWS)
def test_a_closed_form_is_what_the_simulator_finds(name: str) -> None:
    found = 0
    for (ranks, micro_batches), options in product(SIZES, OPTIONS.get(name, [{}])):
        try:
            schedule = _cached(name, ranks, micro_batches, **options)
        except LabError:
            continue
        for costs in COSTS:
            if name == "hanayo":  # whose order depends on the times
                if costs.latency or ranks > 4:
                    continue
                schedule = build(name, ranks, micro_batches, costs=costs, **options)
            form = closed_form(name, ranks, micro_batches, costs=costs, **options)
            assert form is not None
            timeline = simulate(schedule, costs)
            where = (ranks, micro_batches, options, costs)
            assert form.ideal == pytest.approx(timeline.ideal, rel=1e-12), where
            if form.makespan is not None:
                found += 1
                assert form.makespan == pytest.approx(timeline.makespan, rel=1e-12), where
                assert form.bubble_fraction == pytest.approx(timeline.bubble_fraction, abs=1e-12), where
                assert form.bubble_overhead == pytest.approx(timeline.bubble_overhead, abs=1e-12), where
            if form.span is not None:
                assert form.span == pytest.approx(timeline.span, rel=1e-12), where
    assert found >= 8, "a form that is never in its domain tells nothing"


_built: dict[object, Schedule] = {}


def _cached(name: str, ranks: int, micro_batches: int, **options: int) -> Schedule:
    key = (name, ranks, micro_batches, *options.items())
    if key not in _built:
        _built[key] = build(name, ranks, micro_batches, **options)  # type: ignore[arg-type]
    return _built[key]


@pytest.mark.parametrize("name", LAWS)
def test_peaks_and_messages_are_what_the_order_gives(name: str) -> None:
    for (ranks, micro_batches), options in product(SIZES, OPTIONS.get(name, [{}])):
        try:
            schedule = _cached(name, ranks, micro_batches, **options)
        except LabError:
            continue
        for kept_for_weight in (1.0, 0.5):
            costs = Costs(kept_for_weight=kept_for_weight)
            form = closed_form(name, ranks, micro_batches, costs=costs, **options)
            assert form is not None
            assert form.hops == crossings(schedule), (ranks, micro_batches, options)
            if form.peaks is not None:
                assert form.peaks == peak_activations(schedule, costs), (ranks, micro_batches, options)


@pytest.mark.parametrize(("ranks", "both"), list(product((2, 4, 6, 8), (2, 2.25, 2.5, 3))))
def test_closed_form_of_dualpipe_with_a_gain_from_overlapping(ranks: int, both: float) -> None:
    costs = Costs(overlapped=both)
    for name, micro_batches in product(("dualpipe", "dualpipe-v"), (2 * ranks, 2 * ranks + 2, 4 * ranks)):
        form = closed_form(name, ranks, micro_batches, costs=costs)
        timeline = simulate(_cached(name, ranks, micro_batches), costs)
        assert form is not None
        assert form.ideal == pytest.approx(timeline.ideal)
        assert form.makespan == pytest.approx(timeline.makespan)


def test_total_time_and_overhead_are_the_formulas_of_the_course() -> None:
    assert total_time(4, 8, 1, 2) == 33
    assert overhead(4, 8) == 3 / 8
    assert fraction(4, 8) == 3 / 11
    assert simulate(_cached("gpipe", 4, 9)).speedup == pytest.approx(4 * 9 / (9 + 4 - 1))
    for ranks, micro_batches in SIZES:
        for name in ("gpipe", "1f1b"):
            timeline = simulate(_cached(name, ranks, micro_batches))
            assert timeline.makespan == total_time(ranks, micro_batches, 1, 2)
            assert timeline.bubble_overhead == pytest.approx(overhead(ranks, micro_batches), abs=1e-12)
            assert timeline.bubble_fraction == pytest.approx(fraction(ranks, micro_batches), abs=1e-12)
    timeline = simulate(build("interleaved", 4, 8, chunks=3))
    assert timeline.bubble_overhead == pytest.approx(3 / (3 * 8))
    assert timeline.bubble_fraction == pytest.approx(3 / (3 * 8 + 3))


def test_closed_form_of_1f1b_exposes_so_many_hops() -> None:
    """The research's numbers for p = 8: 2(p − 1)m/p + 2(p − 2)."""
    for micro_batches, hops in {8: 26, 16: 40, 24: 54, 32: 68, 40: 82}.items():
        form = closed_form("1f1b", 8, micro_batches, costs=Costs(latency=1))
        assert form is not None
        assert form.makespan == (micro_batches + 7) * 3 + hops
        assert hops == 2 * 7 * micro_batches / 8 + 2 * 6


def test_published_bubbles_of_the_bidirectional_and_wavy() -> None:
    """Chimera where B = F: (p − 2)/(2m + p − 2) (Li and Hoefler 2021); Hanayo beside what is published of it."""
    equal = Costs(backward=1)
    for ranks, times in product((2, 4, 8), (1, 2, 4)):
        timeline = simulate(_cached("chimera", ranks, ranks * times), equal)
        assert timeline.bubble_fraction == pytest.approx((ranks - 2) / (2 * ranks * times + ranks - 2), abs=1e-12)
    timeline = simulate(build("chimera", 8, 8))
    assert timeline.bubble_fraction == pytest.approx((8 - 2) / (1.5 * 8 + 8 - 2))
    for waves, ours in ((1, 0.3333), (2, 0.2131), (4, 0.1193)):
        assert simulate(build("hanayo", 4, 4, waves=waves)).bubble_fraction == pytest.approx(ours, abs=5e-5)
        timeline = simulate(build("hanayo", 4, 8, waves=waves, costs=equal), equal)
        assert timeline.bubble_fraction == pytest.approx(3 / (2 * waves * 8 + 3))


def test_no_form_is_invented() -> None:
    assert closed_form("zb-2p", 4, 8) is None
    assert closed_form("ampnet", 4, 8) is None
    assert closed_form("1f1b", 4, 8, costs=Costs(forward=(1, 2, 1, 1))) is None
    assert closed_form("1f1b", 4, 8, costs=Costs(sends="paired")) is None
    assert closed_form("1f1b", 2, 8, costs=Costs(latency=((0, 1), (1, 0)))) is None
    with pytest.raises(LabError, match="unknown schedule"):
        closed_form("1f2b", 4, 8)
    form = closed_form("zb-v", 4, 8, costs=Costs(backward_weight=2))
    assert form is not None
    assert form.makespan is form.span is form.bubble_fraction is None
    assert form.peaks == (8, 8, 8, 8)
    assert set(LAWS) <= set(SCHEDULES)
    for name in LAWS:
        form = closed_form(name, 4, 8)
        assert form is not None
        assert form.source
        assert form.domain
        assert form.formula
