"""The game of schedules: figures worked out by hand, ready sets, refusals, the coach's ties, texts of positions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.pipeline.exchange_formats import to_csv
from dlojz.pipeline.game import coach
from dlojz.pipeline.game.coach import advice_of
from dlojz.pipeline.game.execution import layers_of
from dlojz.pipeline.game.position import (
    Level,
    Position,
    in_turn,
    level_count,
    level_of,
    position_of,
    position_of_csv,
    sentence,
)
from dlojz.pipeline.schedule import Action, Costs, Schedule, parse_action
from dlojz.pipeline.schedule_catalogue import build
from dlojz.pipeline.simulator import peak_activations, simulate
from dlojz.pipeline.validity import problems

LEVELS = range(1, 11)


def small_level(name: str, ranks: int, micro_batches: int, limit: float | None = None) -> Level:
    return Level(1, "", "", in_turn(build(name, ranks, micro_batches)), Costs(), limit, "makespan")


def played(level: Level, moves: str) -> Position:
    position = Position(level)
    for move in moves.split():
        position = position.after(parse_action(move))
    return position


def solved(number: int) -> Position:
    return position_of_csv(to_csv(level_of(number).reference), level_of(number))


def completions(position: Position) -> Iterator[Position]:
    """Every complete position that can follow: all orders in which ready actions are placed."""
    if position.is_complete:
        yield position
    for action in position.ready:
        yield from completions(position.after(action))


def names(actions: tuple[Action, ...]) -> set[str]:
    return {str(action) for action in actions}


def test_there_are_ten_levels_and_no_eleventh() -> None:
    assert level_count() == 10
    with pytest.raises(LabError, match="there are levels 1 to 10, but 11 was received"):
        level_of(11)


@pytest.mark.parametrize(
    ("number", "goal"),
    [
        (1, 9),  # p (f + b) = 3 · 3
        (2, 15),  # GPipe: (m + p − 1)(f + b) = 5 · 3
        (3, 21),  # proven by a solver; without the wall 6 · 3 = 18
        (4, 21),  # 1F1B: 7 · 3
        (5, 27),  # work 4 · 2 · 3 = 24, and the fill of one chunk's F and B: 3
        (6, 13),  # (p − 1) F + m (F + I + W) = 1 + 12
        (7, 15),  # no bubble: m (F + I + W)
        (8, 27),  # head 1, work of the slow stage 4 · 6, tail 2
        (9, 16),  # Chimera
        (10, 41.5),  # head 1.5 + 0.5, work 4 · 2 · 4.5, tail 3 + 0.5
    ],
)
def test_the_goal_of_each_level_is_what_was_worked_out_by_hand(number: int, goal: float) -> None:
    level = level_of(number)
    assert level.goal == pytest.approx(goal)
    bound, is_reached = level.bound
    assert bound == pytest.approx(15 if number == 9 else goal)
    assert is_reached is (number != 9)


@pytest.mark.parametrize("number", LEVELS)
def test_the_goal_of_each_level_is_reached_by_its_reference_move_by_move(number: int) -> None:
    level, position = level_of(number), solved(number)
    assert position.is_complete and position.reaches_goal
    assert problems(position.schedule, level.memory_limit, level.costs) == []
    assert level.value_of(position.timeline) == pytest.approx(level.goal)
    assert not Position(level, position.moves[:-1]).reaches_goal
    assert position_of(position.text).moves == position.moves


def test_the_micro_batches_of_a_schedule_are_numbered_anew_and_nothing_else_changes() -> None:
    """Looped breadth-first runs its backwards in reverse."""
    costs = level_of(10).costs
    schedule = build("looped-bfs", 2, 4, chunks=2)
    renamed = in_turn(schedule)
    assert renamed.orders != schedule.orders
    assert simulate(renamed, costs).ends.tolist() == simulate(schedule, costs).ends.tolist()
    assert peak_activations(renamed) == peak_activations(schedule)
    assert in_turn(renamed) == renamed


@pytest.mark.parametrize(
    ("number", "title"),
    [(2, "GPipe"), (4, "1F1B"), (5, "interleaved 1F1B"), (6, "ZB-H1"), (7, "ZB-H2"), (9, "Chimera")],
)
def test_a_schedule_of_the_catalogue_is_recognised_by_its_orders(number: int, title: str) -> None:
    position = solved(number)
    assert any(title in recognised for recognised in position.recognised)
    assert position.undone.recognised == ()


def test_1f1b_keeps_p_micro_batches_on_the_first_rank() -> None:
    position = solved(4)
    assert peak_activations(position.schedule) == (3, 2, 1)
    assert position.memory == (0, 0, 0)


def test_the_ready_actions_are_those_whose_inputs_are_placed_and_whose_rank_has_room() -> None:
    level = small_level("1f1b", 2, 3, limit=2)
    position = Position(level)
    assert names(position.ready) == {"0F0"}
    assert names(position.after(parse_action("0F0")).ready) == {"0F1", "1F0"}
    assert names(played(level, "0F0 0F1").ready) == {"1F0"}, "0F2 is behind the wall"
    assert names(played(level, "0F0 0F1 1F0 1B0").ready) == {"1F1", "0B0"}
    assert names(played(level, "0F0 0F1 1F0 1B0 0B0").ready) == {"0F2", "1F1"}


@pytest.mark.parametrize(
    ("moves", "move", "rank", "sentence"),
    [
        ("", "1F0", None, "1F0 needs the result of 0F0, which is not placed yet on rank 0: place 0F0 before it."),
        ("0F0 1F0", "0B0", None, "0B0 needs the result of 1B0, which is not placed yet on rank 1"),
        ("0F0", "0B0", None, "0B0 needs the result of 1B0"),
        ("0F0", "1B0", None, "1B0 needs the result of 1F0, which is not placed yet on rank 1"),
        ("", "0F1", None, "0F1 is not in turn: stage 0 takes the micro-batches in order, place 0F0 before it."),
        ("0F0", "0F0", None, "0F0 is already placed on rank 0"),
        ("0F0", "1F0", 0, "1F0 belongs to rank 1, which holds stage 1, but rank 0 was received"),
        ("", "2F0", None, "2F0 is no action of level 1"),
        ("", "0I0", None, "0I0 is no action of level 1"),
        (
            "0F0 0F1",
            "0F2",
            None,
            "memory wall: rank 0 keeps 2 of at most 2 stage-micro-batches, and 0F2 would make it 3: place a backward "
            "of rank 0 before it.",
        ),
    ],
)
def test_an_illegal_move_is_refused_with_its_reason(moves: str, move: str, rank: int | None, sentence: str) -> None:
    position = played(small_level("1f1b", 2, 3, limit=2), moves)
    with pytest.raises(LabError, match=re.escape(sentence)):
        position.after(parse_action(move), rank)
    assert names(position.undone.after(position.moves[-1]).ready if moves else position.ready) == names(position.ready)


def test_undoing_takes_the_latest_move_back_and_stops_at_the_beginning() -> None:
    level = small_level("1f1b", 2, 2)
    position = played(level, "0F0 0F1")
    assert position.undone.moves == (parse_action("0F0"),)
    assert position.undone.undone.undone.moves == ()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("limit", [None, 1.0])
def test_the_coach_shows_the_moves_from_which_an_enumeration_reaches_the_best(
    schedule: str, limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 × 2: every completion of every position on the way is enumerated, without the coach's bounds."""
    level = small_level(schedule, 2, 2, limit)
    level = replace(level, reference=next(completions(Position(level))).schedule)
    monkeypatch.setattr(coach, "position_of", lambda text: positions[text])
    positions: dict[str, Position] = {}
    position = Position(level)
    ties = 0
    while not position.is_complete:
        reached = {
            action: min(complete.timeline.makespan for complete in completions(position.after(action)))
            for action in position.ready
        }
        best = min(reached.values())
        # The text is only a key here: the level is none of the ten.
        key = f"{schedule} {limit} {len(position.moves)}"
        positions[key] = position
        advice = advice_of(key)
        assert advice.is_proven and advice.unknown == ()
        assert advice.best == pytest.approx(best)
        assert set(advice.equal) == {action for action, value in reached.items() if value == pytest.approx(best)}
        ties += len(advice.equal) > 1
        # On by the worst move: positions in which something is lost already are asked too.
        position = position.after(max(reached, key=lambda action: reached[action]))
    assert ties or limit


def test_the_coach_counts_a_span_from_each_ranks_own_start() -> None:
    advice = advice_of(Position(level_of(7)).text)
    assert (advice.best, advice.is_proven, names(advice.equal)) == (15, True, {"0F0"})


def test_the_coach_says_where_it_knows_a_bound_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coach, "MOST_STATES", 2)
    advice_of.cache_clear()
    advice = advice_of(Position(level_of(9)).text)
    advice_of.cache_clear()
    assert not advice.is_proven and advice.unknown
    assert advice.bound == 16


def test_the_coach_sees_a_dead_end_at_the_memory_wall() -> None:
    """Two chunks of a rank share one place: the second chunk's forward never fits beside the first one's."""
    level = replace(small_level("interleaved", 2, 2), memory_limit=1.0)
    position = played(level, "0F0 1F0")
    assert position.ready == ()
    assert "memory wall" in (position.refusal_of(parse_action("2F0")) or "")


def test_every_idle_gap_says_what_it_waits_for() -> None:
    waits = list(solved(4).waits())
    assert (
        "rank 0 waits from 3 to 7 because 0B0 needs 1B0 of rank 1, which ends at 7, and the memory wall keeps 0F3 "
        "out." in waits
    )
    assert "rank 2 waits from 0 to 2 because 2F0 needs 1F0 of rank 1, which ends at 2." in waits
    assert "rank 1 waits from 19 to 21: all its actions are placed; 0B4 of rank 0 ends the step." in waits
    under_way = list(played(level_of(4), "0F0").waits())
    assert "rank 1 waits from 0 to 1: 1F0 could be placed." in under_way


def test_a_position_is_one_line_and_comes_back() -> None:
    position = played(level_of(4), "0F0 0F1 1F0 2F0 2B0")
    assert re.fullmatch(r"1\.4\.0F0F1F2F2B\.[0-9a-f]{8}", position.text)
    assert position_of(f"#{position.text}\n") == position
    assert position_of(position.text, level_of(4)) == position


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda text: text[:-1], "is no whole position"),
        (lambda text: text.replace("1F", "1B"), "is no whole position"),
        (lambda text: text.replace("0F0F", "0F"), "is no whole position"),
        (lambda text: "", "'' is no whole position"),
        (lambda text: "<script>alert(1)</script>", "is no whole position"),
        (lambda text: "é" * 9, "is no whole position"),
        (lambda text: "0F" * 5000, "is no whole position"),
        (lambda text: "2" + text[1:], "positions of version 2 are not known here"),
    ],
)
def test_a_damaged_position_is_refused_in_one_sentence(change, sentence: str) -> None:  # type: ignore[no-untyped-def]
    text = played(level_of(4), "0F0 0F1 1F0").text
    with pytest.raises(LabError, match=sentence) as refused:
        position_of(change(text))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 250


def test_a_position_with_a_right_checksum_and_wrong_moves_is_refused() -> None:
    from dlojz.pipeline.game.position import _checked

    for moves in ("1F", "0F1F2F3F", "0F0F0F0F", "0I"):
        with pytest.raises(LabError, match="is no whole position"):
            position_of(_checked(f"1.4.{moves}."))
    with pytest.raises(LabError, match="there are levels 1 to 10, but 11 was received"):
        position_of(_checked("1.11.."))


def test_a_position_of_another_level_is_refused() -> None:
    with pytest.raises(LabError, match="this position is of level 4, but level 2 is open: open level 4 for it"):
        position_of(Position(level_of(4)).text, level_of(2))


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (["0F0,0B0", "1B0,1F0"], "deadlock|1B0 needs the result of 1F0"),
        (["0F0,0F0,0B0", "1F0,1B0"], "0F0 stands 2 times"),
        (["0F0,0B0", "1F0,1B0", "2F0"], "has 2 × 2 × 1 ranks, stages and micro-batches"),
        (["hello"], "is no action"),
        (["0F0"], "has 2 × 2 × 1"),
    ],
)
def test_orders_that_are_pasted_in_are_refused_in_one_sentence(rows: list[str], sentence: str) -> None:
    with pytest.raises(LabError, match=sentence):
        position_of_csv("\n".join(rows), small_level("1f1b", 2, 1))


def test_a_deadlock_that_is_pasted_in_is_refused_with_its_cycle() -> None:
    rows = ["0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1"]
    with pytest.raises(LabError, match="deadlock: rank 0 at 0B0 waits for 1B0 of rank 1"):
        position_of_csv("\n".join(rows), small_level("1f1b", 2, 2))


def test_a_reversed_order_that_is_pasted_in_is_taken_with_its_micro_batches_in_turn() -> None:
    level = level_of(2)
    position = position_of_csv(to_csv(build("gpipe", 3, 3, lifo=True)), level)
    assert position.reaches_goal and position.recognised == ("GPipe",)


def test_sentences_and_levels_are_in_both_languages() -> None:
    english = [(level_of(number).title, level_of(number).text) for number in LEVELS]
    use_language("fr")
    try:
        french = [(level_of(number).title, level_of(number).text) for number in LEVELS]
        assert "mur de mémoire" in (
            played(small_level("1f1b", 2, 3, limit=1), "0F0").refusal_of(Action("F", 0, 1)) or ""
        )
    finally:
        use_language("en")
    for (title, text), (titre, texte) in zip(english, french, strict=True):
        assert title != titre and text != texte
        assert "{" not in text + texte
    # What a text says of another schedule is simulated: 1F1B at uneven times, and interleaved under FSDP's.
    assert "takes 28 here" in english[7][1]
    assert "43,5" in french[9][1]


def test_every_sentence_is_in_both_languages_with_the_same_values() -> None:
    assert len(sentence.pairs) > 65 and len(sentence.sentences["page"]) > 15
    for name, said in sentence.pairs.items():
        english, french = (set(re.findall(r"{\w+}", text)) for text in said)
        assert english == french, name


def test_uneven_stages_have_layers_in_proportion_to_their_forwards() -> None:
    assert layers_of(level_of(8).costs, 3) == [1, 2, 1]
    assert layers_of(Costs(), 2) == [1, 1]


@pytest.mark.nightly
def test_a_schedule_that_was_built_by_hand_runs_on_ranks() -> None:
    from dlojz.pipeline.game.execution import ScheduleExecution

    schedule: Schedule = solved(6).schedule
    execution = ScheduleExecution(schedule, Costs())
    result = execution.overlay()
    assert result.measured.schedule.orders == schedule.orders
    assert result.measured.origin == "measured" and result.measured.makespan > 0
    assert not execution.is_running
