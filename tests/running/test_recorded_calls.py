"""Who did not come, by what the ranks' flight recorders told; and nothing where they do not show it."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlojz.base.language import use_language
from dlojz.running.failures import diagnosis
from dlojz.running.failures.diagnosis import (
    StandstillReport,
    Symptoms,
    call_mismatch,
    calls_of,
    first_missing,
    hung_collective,
    missing_in,
    standstill,
)

LATE = "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete\n"
SUM, OTHER, FLAG = ("all_reduce", "Float", "[10]"), ("broadcast", "Float", "[3]"), ("all_reduce", "Float", "[2]")


def calls(**groups: list[tuple[str, ...]]) -> dict[str, dict[int, tuple[str, ...]]]:
    """By group: g0=[…] is the group "0"; collectives are numbered from 1."""
    return {name[1:]: dict(enumerate(told, start=1)) for name, told in groups.items()}


def found(told: dict[int, Any], log: str = LATE, world_size: int = 0) -> Any:
    known = {"steps": 2, "losses": (2.0, 1.9), "learning_rate": 0.1}
    size = world_size or len(told)
    return hung_collective(Symptoms("failed", "", size, logs={0: log}, calls=told, **known))  # type: ignore[arg-type]


def test_the_rank_that_is_behind_is_named_with_the_first_collective_it_missed() -> None:
    told = {0: calls(g0=[SUM, SUM, OTHER, SUM]), 1: calls(g0=[SUM, SUM]), 2: calls(g0=[SUM, SUM, OTHER])}
    cause = found(told)
    assert (cause.ranks, cause.kind) == ((1,), "collective")
    assert "rank 1 did not call broadcast #3 [3] float32, in which ranks 0 and 2 waited 2.00 s." in cause.what
    use_language("fr")
    assert "le rang 1 n’a pas appelé broadcast #3 [3] float32, où les rangs 0 et 2 ont attendu 2" in found(told).what


def test_a_rank_that_never_came_to_any() -> None:
    assert found({0: calls(g0=[SUM]), 1: calls(g1=[FLAG]), 2: calls(g0=[SUM], g1=[FLAG])}).ranks == (1,)


def test_call_mismatch_is_none_where_shapes_differ_and_numbers_of_elements_agree() -> None:
    told = {0: calls(g0=[("all_reduce", "Float", "[4,3]")]), 1: calls(g0=[("all_reduce", "Float", "[12]")])}
    assert call_mismatch(told) is None


def test_another_collective_or_another_shape_as_the_same_one() -> None:
    cause = found({0: calls(g0=[SUM, SUM]), 1: calls(g0=[SUM, OTHER])}, log="")
    assert cause.ranks == (0, 1)
    assert "rank 0 calls all_reduce #2 [10] float32, but rank 1 calls broadcast #2 [3] float32" in cause.what
    cause = found({0: calls(g0=[SUM]), 1: calls(g0=[FLAG])}, log="")
    assert "Different shape: rank 0 calls all_reduce #1 [10] float32, but rank 1 calls all_reduce #1 [2]" in cause.what


@pytest.mark.parametrize("operation", ["all_gather", "scatter"])
def test_call_mismatch_is_none_for_an_operation_whose_shapes_may_differ(operation: str) -> None:
    assert call_mismatch({0: calls(g0=[(operation, "Float", "[2]")]), 1: calls(g0=[(operation, "Float", "")])}) is None


def test_hung_collective_names_none_who_waits_for_the_late_one() -> None:
    """Four ranks, data × tensor: rank 1 sleeps; rank 3 waits for it, and rank 2 for rank 3."""
    told = {
        0: calls(g01=[SUM, SUM], g02=[SUM]),
        1: calls(g01=[SUM], g13=[SUM]),
        2: calls(g23=[SUM, SUM], g02=[SUM]),
        3: calls(g23=[SUM], g13=[SUM, OTHER]),
    }
    assert {each.ranks for each in missing_in(told)} == {(1,), (3,)}
    assert found(told).ranks == (1,)


def test_hung_collective_tells_a_circle_as_one() -> None:
    """Each of the two called the other group's collective first."""
    told = {0: calls(g0=[SUM, OTHER], g1=[FLAG]), 1: calls(g0=[SUM], g1=[FLAG, FLAG])}
    assert first_missing(missing_in(told)) is None
    cause = found(told)
    assert cause.ranks == (0, 1)
    assert cause.what == (
        "Deadlock between ranks 0 and 1: rank 0 waits in broadcast #2 [3] float32 for rank 1, rank 1 waits in "
        "all_reduce #2 [2] float32 for rank 0."
    )


@pytest.mark.parametrize(
    ("told", "log"),
    [
        ({0: calls(g0=[SUM, SUM]), 1: calls(g0=[SUM])}, "ValueError: the batch is empty\n"),  # nobody timed out
        ({0: calls(g0=[SUM]), 1: calls(g0=[SUM])}, ""),
        ({0: calls(g0=[SUM])}, ""),
        ({}, ""),
    ],
)
def test_hung_collective_concludes_nothing_from_what_does_not_show_it(told: dict[int, Any], log: str) -> None:
    assert found(told, log, world_size=2) is None


def test_calls_of_a_rank_are_those_of_its_last_attempt() -> None:
    event = {"event": "collectives", "groups": {"0": [[1, "all_reduce", "Float", "[10]"]]}}
    assert calls_of([event, {"event": "step", "step": 0}]) == {"0": {1: SUM}}
    assert calls_of([event, {"event": "start"}]) == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("a\x1b\u202e0", max_size=3), st.lists, max_leaves=6
)


@given(st.dictionaries(st.text(max_size=2), JSON | st.lists(st.lists(JSON, min_size=4, max_size=4)), max_size=3) | JSON)
def test_calls_of_a_rank_take_or_leave_out_whatever_it_tells(groups: Any) -> None:
    told = calls_of([{"event": "collectives", "groups": groups}])
    assert not any(
        sign in word for group in told.values() for call in group.values() for word in call for sign in "\x1b\u202e"
    )
    call_mismatch({0: told, 1: calls(g0=[SUM])})
    missing_in({0: told, 1: calls(g0=[SUM])})


def stalled(line: str, **groups: list[tuple[str, ...]]) -> dict[str, Any]:
    """An event of a rank that no longer ends a step."""
    called = {name[1:]: [[number, *call] for number, call in enumerate(calls, 1)] for name, calls in groups.items()}
    return {"event": "stalled", "time_s": 140.0, "line": line, "groups": called}


def after_a_step(*events: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"event": "start", "time_s": 90.0}, {"event": "step", "time_s": 100.0}, *events]


def test_standstill_names_the_rank_that_is_missing_and_the_line_of_each() -> None:
    events = {
        0: after_a_step(stalled("train.py:20 in main", g0=[SUM, FLAG])),
        1: after_a_step(stalled("train.py:7 in validate", g0=[SUM])),
        2: after_a_step(stalled("train.py:20 in main", g0=[SUM, FLAG])),
    }
    standing = standstill(events, 142.0)
    assert standing is not None and standing.missing is not None and standing.missing.ranks == (1,)
    first, *lines = standing.sentences(now_s=142.0).splitlines()
    assert first.startswith(
        "No step has ended for 42.0 s. Missing rank: rank 1 has not called all_reduce #2 [2] float32, in which ranks 0 "
        "and 2 wait. A collective needs every rank of its group. Look for an `if rank"
    )
    assert lines == ["  ranks 0 and 2: train.py:20 in main", "  rank 1: train.py:7 in validate"]
    use_language("fr")
    standing = standstill(events, 142.0)
    assert standing is not None
    first, *lines = standing.sentences(now_s=142.0).splitlines()
    assert first.startswith(
        "Aucun pas ne s’est terminé depuis 42,0 s. Rang manquant : le rang 1 n’a pas appelé all_reduce #2 [2] float32, "
        "où les rangs 0 et 2 attendent."
    )
    assert lines == ["  rangs 0 et 2 : train.py:20 in main", "  rang 1 : train.py:7 in validate"]


def test_standstill_names_different_collectives_and_a_rank_that_has_ended() -> None:
    events = {
        0: after_a_step(stalled("train.py:20 in main", g0=[SUM])),
        1: after_a_step(stalled("train.py:21 in main", g0=[OTHER])),
    }
    standing = standstill(events, 142.0)
    assert standing is not None and standing.missing is not None and standing.missing.ranks == (0, 1)
    standing = standstill({**events, 1: after_a_step({"event": "end", "time_s": 101.0})}, 142.0)
    assert standing is not None and standing.missing is None  # what it called is not known
    assert standing.sentences(120.0).splitlines()[1:] == ["  rank 0: train.py:20 in main", "  rank 1: ended"]


def test_standstill_is_none_while_a_rank_makes_steps_or_has_just_begun() -> None:
    waiting = after_a_step(stalled("train.py:20 in main", g0=[SUM]))
    assert standstill({0: waiting, 1: after_a_step()}, 142.0) is None
    assert standstill({0: waiting, 1: [{"event": "start", "time_s": 90.0}]}, 142.0) is None
    assert standstill({}, 142.0) is None


def test_standstill_shows_a_rank_that_is_silent_while_the_others_wait() -> None:
    """Rank 1 is stopped: it does not note that it stands still, as it would have within seconds of rank 0."""
    events = {0: after_a_step(stalled("train.py:20 in main", g0=[SUM])), 1: after_a_step()}
    assert standstill(events, 150.0) is None
    standing = standstill(events, 165.0)
    assert standing is not None and standing.missing is None
    assert standing.lines[1] == "silent: perhaps stopped"
    assert standstill({**events, 1: after_a_step({"event": "step", "time_s": 150.0})}, 200.0) is None


def test_standstill_before_the_first_step_is_told_where_ranks_wait_alone() -> None:
    """Rank 1 has called none yet; a script that only prepares its data is left alone."""
    start = {"event": "start", "time_s": 90.0}
    events = {0: [start, stalled("train.py:9 in main", g0=[SUM])], 1: [start, stalled("train.py:5 in read")]}
    standing = standstill(events, 142.0)
    assert standing is not None and standing.missing is not None and standing.missing.ranks == (1,)
    assert standing.sentences(130.0).startswith("No step has ended for 40.0 s. Missing rank: rank 1 has not c")
    assert standstill({0: [start, stalled("prepare.py:5 in read")]}, 142.0) is None


def test_standstill_of_two_groups_that_wait_for_each_other_names_both_calls() -> None:
    events = {
        0: after_a_step(stalled("train.py:20 in main", g1=[SUM], g2=[])),
        1: after_a_step(stalled("train.py:21 in main", g1=[], g2=[OTHER])),
    }
    standing = standstill(events, 142.0)
    assert standing is not None and standing.missing is not None and standing.missing.ranks == (0, 1)


def test_standstill_of_ranks_that_all_wait_in_the_same_collective_names_nobody() -> None:
    standing = standstill({rank: after_a_step(stalled("train.py:20 in main", g0=[SUM])) for rank in range(2)}, 142.0)
    assert standing is not None and standing.missing is None


def test_standstill_report_tells_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(diagnosis, "quiet_s", lambda folder: 60.0)
    events = {rank: after_a_step(stalled("train.py:20 in main", g0=[SUM])) for rank in range(2)}
    monkeypatch.setattr(diagnosis, "read_all_events", lambda folder: events)
    told: list[str] = []
    report = StandstillReport(tmp_path, told.append)
    for state in ("running", "running", "completed"):
        report.look(state)
    assert len(told) == 1
    events[1] = after_a_step(stalled("train.py:30 in save", g0=[SUM]))
    report.look("running")
    assert len(told) == 2 and told[1].splitlines()[-1] == "  rank 1: train.py:30 in save"
