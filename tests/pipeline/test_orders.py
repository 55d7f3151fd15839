"""Every schedule of the catalogue can be executed, whatever its size; and what distinguishes some of them."""

from itertools import product

import pytest

from dlojz.base.errors import LabError
from dlojz.pipeline.orders.synchronous import gpipe, interleaved, interleaved_zero_bubble, looped, one_f_one_b, zigzag
from dlojz.pipeline.orders.zero_bubble import zb_h1
from dlojz.pipeline.schedule import BACKWARD, FORWARD, Action, Schedule
from dlojz.pipeline.schedule_catalogue import SCHEDULES, build
from dlojz.pipeline.simulator import peak_activations, simulate
from dlojz.pipeline.validity import problems

SIZES = [(ranks, m) for ranks in (1, 2, 3, 4, 6, 8) for m in sorted({1, 2, 3, 5, ranks, 2 * ranks, 2 * ranks + 2, 24})]
MORE: list[tuple[str, dict[str, int]]] = [
    ("interleaved", {"chunks": 3}),
    ("looped-bfs", {"chunks": 3}),
    ("interleaved-zb", {"chunks": 1}),
    ("interleaved-zb", {"chunks": 4}),
    ("hanayo", {"waves": 3}),
    ("gpipe", {"lifo": True}),
]


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in SCHEDULES), *MORE])
def test_a_schedule_can_be_executed_at_every_size(name: str, options: dict[str, int]) -> None:
    """Nothing is missing, doubled, out of order or blocked, and no activation is left over; or the size is refused."""
    built = 0
    for ranks, micro_batches in SIZES:
        try:
            schedule = build(name, ranks, micro_batches, **options)  # type: ignore[arg-type]
        except LabError:
            continue
        built += 1
        assert problems(schedule) == [], (ranks, micro_batches)
        assert schedule.name == name
        assert (schedule.ranks, schedule.micro_batches) == (ranks, micro_batches)
        assert schedule.asynchronous == (SCHEDULES[name].family == "asynchronous")
        assert simulate(schedule).makespan > 0
        if not options:
            assert schedule.chunks == SCHEDULES[name].chunks or ranks == 1
    assert built >= 8


def test_interleaved_groups_of_any_legal_size_can_be_executed() -> None:
    for make, ranks, micro_batches, chunks in product(
        (interleaved, interleaved_zero_bubble), (2, 4), (1, 3, 4, 6, 9, 10), (2, 3)
    ):
        for group in range(1, micro_batches + 2):
            try:
                schedule = make(ranks, micro_batches, chunks, group)
            except LabError:
                rest, least = micro_batches % group, min(ranks, micro_batches)
                assert group < least or 0 < rest < least
                continue
            assert problems(schedule) == [], (ranks, micro_batches, chunks, group)


def test_interleaved_follows_megatron_in_a_ragged_last_group() -> None:
    """`get_schedule_table` of 10 micro-batches, 2 chunks, groups of 6: six per chunk, then four per chunk."""
    forwards = [a for a in interleaved(4, 10, 2, group=6).orders[3] if a.kind == FORWARD]
    chunks = [action.stage // 4 for action in forwards]
    assert chunks == [0] * 6 + [1] * 6 + [0] * 4 + [1] * 4
    assert [action.micro_batch for action in forwards] == [*range(6), *range(6), *range(6, 10), *range(6, 10)]


@pytest.mark.parametrize("beyond", [Action("F", 0, 2), Action("F", 1, 1), Action("F", 0, -1)])
def test_an_action_that_is_not_of_the_schedule_is_refused(beyond: Action) -> None:
    orders = [[Action("F", 0, 0), beyond, Action("B", 0, 0), Action("B", 0, 1)]]
    with pytest.raises(LabError, match=r"is outside the schedule, which has stages 0 to 0, micro-batches .* 0 to 1"):
        _ = Schedule.of("custom", orders, [0], 2).graph


def test_peak_activations_of_one_f_one_b_are_its_warm_up() -> None:
    for ranks, micro_batches in ((4, 8), (4, 2), (1, 3), (8, 5)):
        schedule = one_f_one_b(ranks, micro_batches)
        for rank, order in enumerate(schedule.orders):
            first_backward = [action.kind for action in order].index(BACKWARD)
            assert first_backward == min(ranks - rank, micro_batches)
        assert peak_activations(schedule) == tuple(min(ranks - rank, micro_batches) for rank in range(ranks))


def test_one_f_one_b_orders_are_given_by_deepspeeds_slots() -> None:
    """Stage s runs F_i at slot 2i + s and B_i at slot 2i + 2p − 1 − s (class TrainSchedule)."""
    for ranks, count in product((1, 2, 3, 4, 8), (1, 2, 3, 4, 8, 17)):
        for rank, order in enumerate(one_f_one_b(ranks, count).orders):
            slots = {2 * number + rank: Action(FORWARD, rank, number) for number in range(count)}
            slots |= {2 * (number + ranks) - 1 - rank: Action(BACKWARD, rank, number) for number in range(count)}
            assert order == tuple(slots[slot] for slot in sorted(slots))


def test_one_chunk_of_interleaved_zero_bubble_is_zb_h1() -> None:
    for ranks, micro_batches in ((2, 4), (4, 8), (4, 12), (8, 16)):
        assert interleaved_zero_bubble(ranks, micro_batches, 1).orders == zb_h1(ranks, micro_batches).orders


def test_gpipe_lifo_turns_only_the_backwards_round() -> None:
    first, last = gpipe(2, 3).orders[0], gpipe(2, 3, lifo=True).orders[0]
    assert first[:3] == last[:3]
    assert first[3:] == last[3:][::-1] != last[3:]


def test_looped_and_zigzag_placements() -> None:
    assert looped(3, 2) == (0, 1, 2, 0, 1, 2)
    assert zigzag(3, 2) == (0, 1, 2, 2, 1, 0)
    assert zigzag(2, 4) == (0, 1, 1, 0, 0, 1, 1, 0)


def test_only_schedules_that_gain_from_it_do_without_a_barrier() -> None:
    free = {
        name for name, entry in SCHEDULES.items() if entry.family == "synchronous" and not build(name, 4, 8).barrier
    }
    assert {"zb-h2", "zb-v"} <= free <= {"zb-h2", "zb-v", "zb-1p", "zb-2p"}


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "options", "sentence"),
    [
        ("1f1b", 0, 8, {}, "ranks must be a whole number of at least 1, but 0 was received"),
        ("gpipe", 4, 0, {}, "micro_batches must be a whole number of at least 1, but 0"),
        ("gpipe", 4, 2.5, {}, "but 2.5 was received"),
        ("naive", True, 2, {}, "but True was received"),
        ("zb-h1", 4, 3, {}, "at least p = 4 micro-batches, but 3 was received: take 4 or more, or the schedule 1f1b"),
        ("zb-h2", 4, 6, {}, "at least 2p − 1 = 7 micro-batches, but 6 was received: take 7 or more, .* zb-h1"),
        ("zb-h2", 4, 2, {}, "schedule 1f1b"),
        (
            "dualpipe",
            3,
            8,
            {},
            "an even number of ranks, .* but 3 was received: take 2 or 4, or the schedule dualpipe-v",
        ),
        ("dualpipe", 4, 6, {}, "at least 2p = 8 micro-batches, but 6 was received"),
        ("dualpipe", 4, 9, {}, "a multiple of 2 micro-batches .*, but 9 was received: take 8 or 10"),
        ("dualpipe-v", 4, 7, {}, "at least 2p = 8 micro-batches, but 7 was received: take 8 or more, .* zb-v"),
        ("chimera", 3, 6, {}, "an even number of ranks, .* but 3 was received: take 2 or 4, or the schedule 1f1b"),
        ("chimera", 4, 6, {}, "a multiple of 4 micro-batches .*, but 6 was received: take 4 or 8"),
        ("chimera", 4, 2, {}, "but 2 was received: take 4"),
        (
            "interleaved",
            4,
            8,
            {"chunks": 1},
            "at least 2 chunks .*, but 1 was received: take chunks=2 .* schedule 1f1b",
        ),
        ("looped-bfs", 4, 8, {"chunks": 1}, "but 1 was received: take chunks=2 or more, or the schedule gpipe"),
        ("interleaved", 4, 9, {}, "equal rounds, but 9 micro-batches on 4 ranks .*: take 8 or 10"),
        ("interleaved", 4, 8, {"group": 3}, "groups of at least 4 .*, but group=3 .* take group=8, or a divisor of 8"),
        ("interleaved", 4, 9, {"group": 4}, "leaves one of 1"),
        ("hanayo", 4, 8, {"waves": 0}, "waves must be a whole number of at least 1, but 0"),
        ("hanayo", 4, 8, {"chunks": 3}, "2 chunks per wave, but chunks=3 was received: give waves instead"),
        ("zb-v", 4, 8, {"chunks": 4}, r"zb-v has 2 stage\(s\) per rank, but chunks=4 was received: leave chunks out"),
        ("1f1b", 4, 8, {"chunks": 2}, "take a schedule that has the choice .*interleaved"),
        ("1f1b", 4, 8, {"waves": 2}, r"1f1b has no option waves: .*\(hanayo\)"),
        ("1f1b", 4, 8, {"wawes": 2}, "unknown option 'wawes': did you mean 'waves'"),
        ("1f1b", 4, 8, {"memory_limit": 3}, "rank 0 keeps 4 stage-micro-batches at 0F3, but the limit is 3"),
        ("1f2b", 4, 8, {}, "unknown schedule '1f2b': did you mean '1f1b'"),
    ],
)
def test_build_refuses_in_one_sentence_what_does_not_fit(
    name: str, ranks: int, micro_batches: int, options: dict[str, int], sentence: str
) -> None:
    with pytest.raises(LabError, match=sentence):
        build(name, ranks, micro_batches, **options)  # type: ignore[arg-type]
