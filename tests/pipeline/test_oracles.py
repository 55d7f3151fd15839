"""Known answers: every figure of the oracle table, every published order, and Table 5 of the zero-bubble paper."""

import re

import pytest

from dlojz.base.errors import LabError
from dlojz.pipeline.schedule import Action, Costs, Schedule, overlapped
from dlojz.pipeline.schedule_catalogue import SCHEDULES, build
from dlojz.pipeline.simulator import Timeline, peak_activations, simulate
from tests.pipeline.closed_forms import closed_form

DEADLOCKS = {
    *("interleaved", "looped-bfs", "interleaved-zb", "zb-h2", "zb-2p", "zb-v", "dualpipe", "dualpipe-v"),
    *("pipemare", "ampnet"),
}
"""Orders in which two neighbours send to each other at different places: with sends that block, both wait."""
SIZES = [(4, 8), (4, 16), (8, 16), (2, 4)]
TABLE: list[tuple[str, dict[str, int], tuple[int, ...], tuple[int, ...]]] = [
    # name, options, makespans at SIZES, peaks at (4, 8); F = I = W = 1 per chunk, no latency
    ("gpipe", {}, (33, 57, 69, 15), (8, 8, 8, 8)),
    ("1f1b", {}, (33, 57, 69, 15), (4, 3, 2, 1)),
    ("zb-h1", {}, (27, 51, 55, 13), (4, 4, 4, 4)),
    ("interleaved-zb", {"chunks": 1}, (27, 51, 55, 13), (4, 4, 4, 4)),
    ("zb-h2", {}, (27, 51, 55, 13), (7, 7, 7, 7)),
    ("interleaved", {"chunks": 2}, (57, 105, 117, 27), (11, 9, 7, 5)),
    ("interleaved", {"chunks": 4}, (105, 201, 213, 51), (19, 17, 15, 13)),
    ("looped-bfs", {"chunks": 2}, (57, 105, 117, 27), (16, 16, 16, 16)),
    ("interleaved-zb", {"chunks": 2}, (51, 99, 103, 25), (8, 8, 8, 8)),
    ("interleaved-zb", {"chunks": 4}, (99, 195, 199, 49), (16, 16, 16, 16)),
    ("zb-v", {}, (51, 99, 103, 25), (8, 8, 8, 8)),
    ("dualpipe-v", {}, (54, 102, 110, 26), (9, 9, 9, 9)),
]


@pytest.mark.parametrize(("name", "options", "makespans", "peaks"), TABLE)
def test_simulate_gives_the_oracle_table(
    name: str, options: dict[str, int], makespans: tuple[int, ...], peaks: tuple[int, ...]
) -> None:
    for (ranks, micro_batches), makespan in zip(SIZES, makespans, strict=True):
        timeline = simulate(build(name, ranks, micro_batches, **options))  # type: ignore[arg-type]
        assert timeline.makespan == makespan, (ranks, micro_batches)
        work = 3 * micro_batches * (timeline.schedule.stages // ranks)
        assert timeline.ideal == work
        assert timeline.idle == (makespan - work,) * ranks
    assert peak_activations(build(name, 4, 8, **options)) == peaks  # type: ignore[arg-type]


def test_spans_and_the_growing_peaks_of_eight_ranks() -> None:
    assert simulate(build("zb-h1", 4, 8)).spans == (27, 26, 25, 24)
    assert simulate(build("zb-h2", 4, 8)).spans == (24, 24, 24, 24)
    assert simulate(build("interleaved-zb", 4, 8)).span == 51
    assert simulate(build("zb-v", 4, 8)).span == 48
    assert simulate(build("zb-v", 8, 16)).span == 96
    assert simulate(build("dualpipe-v", 4, 8)).span == 54
    assert peak_activations(build("interleaved", 8, 16)) == (23, 21, 19, 17, 15, 13, 11, 9)


def test_without_a_barrier_an_iteration_lasts_the_span() -> None:
    """ZB-H2 and ZB-V gain only there: with a barrier ZB-H2 is as long as ZB-H1."""
    assert [simulate(build(name, 4, 8)).span for name in ("zb-h2", "zb-v")] == [24, 48]
    assert simulate(build("zb-h1", 4, 8)).makespan == simulate(build("zb-h2", 4, 8)).makespan == 27


@pytest.mark.parametrize(
    ("name", "chunks", "makespan"),
    [
        ("gpipe", None, 34.5),
        ("1f1b", None, 37),
        ("interleaved", 2, 60.5),
        ("interleaved", 4, 112.5),
        ("looped-bfs", 2, 58.5),
        ("interleaved-zb", 2, 55),
        ("zb-v", None, 54.25),
        ("dualpipe-v", None, 58.5),
    ],
)
def test_simulate_with_a_latency_of_a_quarter(name: str, chunks: int | None, makespan: float) -> None:
    timeline = simulate(build(name, 4, 8, chunks=chunks), Costs(latency=0.25))
    assert timeline.makespan == makespan
    if name == "zb-v":
        assert timeline.span == 52


def test_simulate_with_unequal_parts() -> None:
    """F = 10, I = 11, W = 9."""
    costs = Costs(10, 11, 9)
    assert simulate(build("interleaved-zb", 4, 8), costs).makespan == 516
    assert simulate(build("zb-v", 4, 8), costs).makespan == 513
    assert simulate(build("zb-v", 4, 8), costs).span == 492
    assert simulate(build("dualpipe-v", 4, 8), costs).makespan == 546


@pytest.mark.parametrize(
    ("micro_batches", "makespans"),
    [(2, (15, 27, 27, 19, 22)), (3, (18, 30, 30, 23, 26)), (6, (27, 45, 45, 39, 39))],
)
def test_simulate_with_fewer_micro_batches_than_the_warm_up_takes(
    micro_batches: int, makespans: tuple[int, ...]
) -> None:
    names = ("gpipe", "looped-bfs", "interleaved", "interleaved-zb", "zb-v")
    assert tuple(simulate(build(name, 4, micro_batches)).makespan for name in names) == makespans


def test_simulate_chimera_and_dualpipe() -> None:
    equal = Costs(backward=1)
    rows = [(4, 4, 16, 10), (4, 8, 30, 18), (4, 16, 58, 34), (8, 8, 36, 22), (8, 16, 66, 38), (8, 32, 126, 70)]
    for ranks, micro_batches, double, single in rows:
        schedule = build("chimera", ranks, micro_batches)
        assert simulate(schedule).makespan == double
        assert simulate(schedule, equal).makespan == single
    assert simulate(build("1f1b", 8, 32)).makespan == 117  # and Chimera's units put end to end lose against it: 126
    for ranks, micro_batches, plain, gaining in [
        (4, 8, 26, 22), (4, 16, 50, 38), (8, 16, 54, 44), (8, 20, 66, 52), (8, 32, 102, 76),
    ]:  # fmt: skip
        schedule = build("dualpipe", ranks, micro_batches)
        assert simulate(schedule).makespan == plain
        assert simulate(schedule, Costs(overlapped=2)).makespan == gaining
    assert peak_activations(build("chimera", 4, 8)) == (3, 4, 4, 3)
    assert peak_activations(build("dualpipe", 4, 8)) == (5, 5, 5, 5)


def test_simulate_hanayo() -> None:
    for waves, bubble in ((1, 0.3333), (2, 0.2131), (4, 0.1193)):
        assert simulate(build("hanayo", 4, 4, waves=waves)).bubble_fraction == pytest.approx(bubble, abs=5e-5)
    assert simulate(build("hanayo", 4, 4)).makespan == 36  # proven optimal
    assert peak_activations(build("hanayo", 4, 4)) == (5, 6, 8, 8)  # 2.5, 3, 4, 4 micro-batches


def test_simulate_parts_gpipe_and_1f1b_with_unbalanced_stages() -> None:
    costs = Costs(forward=(2, 4, 2, 2), backward=(4, 8, 4, 4))
    assert simulate(build("gpipe", 4, 8), costs).makespan == 114
    assert simulate(build("1f1b", 4, 8), costs).makespan == 106


@pytest.mark.parametrize(("ranks", "micro_batches", "makespan"), [(2, 4, 15), (4, 8, 33), (4, 4, 21), (8, 16, 69)])
def test_simulate_deepspeeds_schedule_in_blocking_sends(ranks: int, micro_batches: int, makespan: float) -> None:
    """Its order is 1F1B's; blocking sends cost nothing where messages take no time."""
    assert simulate(build("deepspeed", ranks, micro_batches), Costs(sends="paired")).makespan == makespan
    if (ranks, micro_batches) == (4, 8):
        equal = Costs(backward=1, sends="paired")
        assert simulate(build("deepspeed", ranks, micro_batches), equal).makespan == 22
        slow = Costs(latency=0.1)
        assert simulate(build("deepspeed", ranks, micro_batches), slow).makespan == pytest.approx(33 + 16 * 0.1)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 1), (2, 2), (3, 5), (4, 8)])
def test_simulate_gpipe_in_blocking_sends(ranks: int, micro_batches: int) -> None:
    """A rank sends what it has made while it receives what it needs: m + p − 2 cycles take F + c, as many B + c."""
    costs = Costs(forward=1.0, backward=3.0, latency=0.25, sends="paired")
    expected = (micro_batches + ranks - 2) * (4.0 + 2 * 0.25) + 4.0
    assert simulate(build("gpipe", ranks, micro_batches), costs).makespan == expected


def test_an_overlapped_pass_waits_for_both_its_messages_where_sends_block() -> None:
    """F = 1, B = 2, c = 0.5, by hand: the middle rank's second forward is there at 3, its first backward at 6.5."""
    forward, backward = ([Action(kind, rank, one) for rank in range(3) for one in range(2)] for kind in "FB")
    middle = [forward[2], overlapped(forward[3], backward[2]), backward[3]]
    orders = [[*forward[:2], *backward[:2]], middle, [forward[4], backward[4], forward[5], backward[5]]]
    schedule = Schedule.of("custom", orders, [0, 1, 2], 2)
    timeline = simulate(schedule, Costs(latency=0.5, sends="paired"))
    assert timeline.starts.tolist() == [0, 1.5, 10, 16, 1.5, 6.5, 13.5, 3, 4, 10, 11]
    assert timeline.makespan == 18


@pytest.mark.parametrize("name", SCHEDULES)
def test_simulate_uses_nothing_before_it_is_there_where_sends_block(name: str) -> None:
    schedule, costs = build(name, 4, 8), Costs(latency=0.5, sends="paired")
    graph = schedule.graph
    rank, needs = graph.rank.tolist(), [*enumerate(graph.needs), *graph.also]
    try:
        timeline = simulate(schedule, costs)
    except LabError as error:  # neighbours whose messages cross, which buffers would take
        assert str(error).startswith("deadlock of blocking sends: rank ")
        assert name in DEADLOCKS
        return
    assert name not in DEADLOCKS
    for index, needed in needs:
        if needed < graph.actions:
            assert timeline.starts[index] >= timeline.ends[needed] + costs.delay(rank[needed], rank[index])
    assert timeline.makespan >= simulate(schedule, costs.with_(sends="buffered")).makespan


# --- orders, written as in the research: a, b chunks; d, u pipes down and up; 0-3 stands for 0, 1, 2, 3 ---

ZERO_BUBBLE = {
    "zb-h1": (
        "FFFFIWFIWFIWFIWFIWIWIWIW", "FFFIFIWFIWFIWFIWFIWIWIWW",
        "FFIFIFIWFIWFIWFIWFIWIWWW", "FIFIFIFIWFIWFIWFIWFIWWWW",
    ),
    "zb-h2": (
        "FFFFFFFIWFIWIWIWIWIWIWIW", "FFFFFIFIFIWFIWIWIWIWIWWW",
        "FFFIFIFIFIFIWFIWIWIWWWWW", "FIFIFIFIFIFIFIWFIWWWWWWW",
    ),
}  # fmt: skip
LOOPED = {
    ("interleaved", 0): "aF0-3 bF0-3 aF4 aF5 aF6 bB0 aF7 bB1 bF4 bB2 bF5 bB3 bF6 aB0 bF7 aB1 aB2 aB3 bB4-7 aB4-7",
    ("interleaved", 1): "aF0-3 bF0-3 aF4 bB0 aF5 bB1 aF6 bB2 aF7 bB3 bF4 aB0 bF5 aB1 bF6 aB2 bF7 aB3 bB4-7 aB4-7",
    ("interleaved", 2): "aF0-3 bF0-2 bB0 bF3 bB1 aF4 bB2 aF5 bB3 aF6 aB0 aF7 aB1 bF4 aB2 bF5 aB3 bF6 bB4 bF7 bB5 bB6 "
    "bB7 aB4-7",
    ("interleaved", 3): "aF0-3 bF0 bB0 bF1 bB1 bF2 bB2 bF3 bB3 aF4 aB0 aF5 aB1 aF6 aB2 aF7 aB3 bF4 bB4 bF5 bB5 bF6 bB6 "
    "bF7 bB7 aB4-7",
    ("looped-bfs", 0): "aF0-7 bF0-7 bB7-0 aB7-0",
    ("looped-bfs", 1): "aF0-7 bF0-7 bB7-0 aB7-0",
    ("looped-bfs", 2): "aF0-7 bF0-7 bB7-0 aB7-0",
    ("looped-bfs", 3): "aF0-7 bF0-7 bB7-0 aB7-0",
    ("interleaved-zb", 0): "aF0-3 bF0-3 bI0 bW0 aF4 bI1 bW1 aF5 bI2 bW2 aF6 bI3 bW3 aF7 aI0 aW0 bF4 aI1 aW1 bF5 aI2 "
    "aW2 bF6 aI3 aW3 bF7 bI4 bW4 bI5 bW5 bI6 bW6 bI7 bW7 aI4 aW4 aI5 aW5 aI6 aW6 aI7 aW7",
    ("interleaved-zb", 3): "aF0-3 bF0 bI0 bF1 bI1 bF2 bI2 bF3 bI3 bW0 aF4 aI0 bW1 aF5 aI1 bW2 aF6 aI2 bW3 aF7 aI3 aW0 "
    "bF4 bI4 aW1 bF5 bI5 aW2 bF6 bI6 aW3 bF7 bI7 bW4 aI4 bW5 aI5 bW6 aI6 bW7 aI7 aW4-7",
    ("zb-v", 0): "aF0-6 bF0 bI0 bW0 bF1 bI1 bW1 bF2 bI2 bW2 bF3 bI3 bW3 aF7 aI0 aW0 bF4 bI4 bW4 aI1 aW1 bF5 bI5 bW5 "
    "aI2 aW2 bF6 bI6 bW6 aI3 aW3 bF7 bI7 bW7 aI4 aW4 aI5 aW5 aI6 aW6 aI7 aW7",
    ("zb-v", 3): "aF0 bF0 aF1 bF1 aF2 bF2 aF3 bF3 bI0 bW0 aF4 aI0 aW0 bF4 bI1 bW1 aF5 aI1 aW1 bF5 bI2 bW2 aF6 aI2 aW2 "
    "bF6 bI3 bW3 aF7 aI3 aW3 bF7 bI4 bW4 aI4 bI5 aI5 bI6 aI6 bI7 aI7 aW4 bW5 bW6 bW7 aW5 aW6 aW7",
    ("dualpipe-v", 0): "aF0-6 bF0 bI0 bW0 bF1 bI1 bW1 bF2 bI2 bW2 bF3 (aF7+bB3) (bF4+aB0) bB4 (bF5+aB1) bB5 (bF6+aB2) "
    "bB6 (bF7+aB3) bB7 aI4 aW4 aI5 aW5 aI6 aW6 aI7 aW7",
    ("dualpipe-v", 3): "aF0 bF0 aF1 bF1 aF2 bF2 aF3 bF3 aF4 bB0 (bF4+aB0) (aF5+bB1) (bF5+aB1) (aF6+bB2) (bF6+aB2) "
    "(aF7+bB3) (bF7+aB3) bB4 aB4 bB5 aB5 bI6 aI6 bI7 aI7 bW6 aW6 bW7 aW7",
}
TWO_WAYS = {
    ("chimera", 0): "d0F0 d0F1 u3F0 u3B0 u3F1 u3B1 d0B0 d0B1",
    ("chimera", 1): "d1F0 u2F0 d1F1 u2F1 u2B0 d1B0 u2B1 d1B1",
    ("dualpipe", 0): "d0F0 d0F1 d0F2 u3F0 u3I0 u3W0 u3F1 (d0F3+u3B1) (u3F2+d0B0) u3B2 (u3F3+d0B1) u3B3 d0I2 d0W2 d0I3 "
    "d0W3",
    ("dualpipe", 1): "d1F0 u2F0 d1F1 u2F1 d1F2 u2B0 (u2F2+d1B0) (d1F3+u2B1) (u2F3+d1B1) u2B2 d1B2 u2I3 d1I3 u2W3 d1W3",
}


@pytest.mark.parametrize("name", ZERO_BUBBLE)
def test_the_order_of_a_handwritten_zero_bubble_schedule(name: str) -> None:
    """Kinds as published; the micro-batch is the occurrence."""
    for rank, (order, kinds) in enumerate(zip(build(name, 4, 8).orders, ZERO_BUBBLE[name], strict=True)):
        assert "".join(action.kind for action in order) == kinds
        for kind in "FIW":
            assert [action.micro_batch for action in order if action.kind == kind] == list(range(8))
        assert {action.stage for action in order} == {rank}


def _read(text: str, stage_of: dict[str, int], up_from: int = 0) -> tuple[Action, ...]:
    actions: list[Action] = []
    for cell in text.split():
        parts = []
        for part in cell.strip("()").split("+"):
            found = re.fullmatch(r"([abdu]\d?)([FBIW])(\d+)(?:-(\d+))?", part)
            assert found, part
            chunk, kind, first, last = found.groups()
            stage = stage_of[chunk] if chunk in stage_of else int(chunk[1:])
            pipe = int(chunk[0] == "u")
            low, high = int(first), int(last or first)
            numbers = range(low, high + 1) if high >= low else range(low, high - 1, -1)
            parts += [Action(kind, stage, number + pipe * up_from, pipe) for number in numbers]
        actions += [overlapped(*parts)] if "+" in cell else parts
    return tuple(actions)


@pytest.mark.parametrize(("name", "rank"), LOOPED)
def test_the_order_of_a_schedule_with_chunks(name: str, rank: int) -> None:
    second = 7 - rank if name in ("zb-v", "dualpipe-v") else 4 + rank
    assert build(name, 4, 8).orders[rank] == _read(LOOPED[name, rank], {"a": rank, "b": second})


@pytest.mark.parametrize(("name", "rank"), TWO_WAYS)
def test_the_order_of_a_bidirectional_schedule(name: str, rank: int) -> None:
    """Up micro-batches are numbered behind the ones down; the other half of the ranks is the mirror image."""
    micro_batches = 4 if name == "chimera" else 8
    schedule = build(name, 4, micro_batches)
    expected = _read(TWO_WAYS[name, rank], {}, up_from=micro_batches // 2)
    assert schedule.orders[rank] == expected
    assert schedule.orders[3 - rank] == tuple(_mirrored(action, micro_batches // 2) for action in expected)


def _mirrored(action: Action, half: int) -> Action:
    if action.parts:
        return overlapped(*(_mirrored(part, half) for part in action.parts))  # type: ignore[arg-type]
    return action._replace(pipe=1 - action.pipe, micro_batch=(action.micro_batch + half) % (2 * half))


# --- Qi et al. 2024, Tables 5 and 9 ---

MEASURED = {  # model, micro-batches: T_F, T_I, T_W, T_comm in ms; bubble rates of 1F1B, 1F1B-I, ZB-H1, ZB-H2
    ("1.5B", 24): ((18.522, 18.086, 9.337, 0.601), (0.2431, 0.1055, 0.1585, 0.1083)),
    ("1.5B", 32): ((18.513, 18.086, 9.331, 0.626), (0.1985, 0.0818, 0.1242, 0.0837)),
    ("1.5B", 64): ((18.546, 18.097, 9.321, 0.762), (0.1240, 0.0443, 0.0674, 0.0444)),
    ("6.2B", 24): ((29.718, 29.444, 19.927, 0.527), (0.2347, 0.0808, 0.1323, 0.0698)),
    ("6.2B", 32): ((29.802, 29.428, 19.530, 0.577), (0.1898, 0.0628, 0.1045, 0.0559)),
    ("6.2B", 64): ((29.935, 29.621, 19.388, 0.535), (0.1091, 0.0320, 0.0554, 0.0294)),
}
LAYERS = {"1.5B": 3, "6.2B": 4}
OURS_INTERLEAVED = {"1.5B": (0.1090, 0.0847, 0.0461), "6.2B": (0.0827, 0.0644, 0.0328)}


def span_rate(timeline: Timeline) -> float:
    """Bubble rate of the paper, (span − work of the busiest rank) / span, to the four decimals that it prints."""
    return round((timeline.span - max(timeline.work)) / timeline.span, 4)


def rate(schedule: Schedule, times: tuple[float, ...]) -> float:
    return span_rate(simulate(schedule, Costs(*times[:3], latency=times[3])))


@pytest.mark.parametrize(("model", "micro_batches"), MEASURED)
def test_simulate_gives_table_5_of_the_zero_bubble_paper(model: str, micro_batches: int) -> None:
    times, (plain, _, h1, h2) = MEASURED[model, micro_batches]
    assert rate(build("1f1b", 8, micro_batches), times) == plain
    assert rate(build("zb-h1", 8, micro_batches), times) == h1
    assert rate(build("zb-h2", 8, micro_batches), times) == h2


@pytest.mark.parametrize(("model", "micro_batches"), MEASURED)
def test_closed_form_of_interleaved_has_p_hops_more_than_table_5(model: str, micro_batches: int) -> None:
    """The order exposes 2(vp − 1) hops; the paper's cell is that less p hops: (p − 1)T/v + (2(vp − 1) − p)T_comm."""
    (forward, for_input, for_weight, hop), (_, published, _, _) = MEASURED[model, micro_batches]
    chunks, ranks = LAYERS[model], 8
    costs = Costs(forward / chunks, for_input / chunks, for_weight / chunks, latency=hop)
    timeline = simulate(build("interleaved", ranks, micro_batches, chunks=chunks), costs)
    form = closed_form("interleaved", ranks, micro_batches, chunks=chunks, costs=costs)
    assert form is not None
    assert form.span == pytest.approx(timeline.span, rel=1e-12)
    column = [key[1] for key in MEASURED if key[0] == model].index(micro_batches)
    assert span_rate(timeline) == OURS_INTERLEAVED[model][column]
    span = timeline.span - ranks * hop
    assert round((span - timeline.ideal) / span, 4) == published
