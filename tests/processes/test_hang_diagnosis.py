"""From what every rank is doing to who is stuck, without any process."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlojz.base.language import use_language
from dlojz.processes.hang_diagnosis import (
    awaited,
    explain_lost,
    explain_stuck,
    explain_timeout,
    listed,
    mismatch,
    stuck_ranks,
)

RUNNING: dict[str, Any] = {"state": "running", "counts": {}, "sends": {}, "receives": {}}
ENDED: dict[str, Any] = {"state": "ended", "counts": {}, "sends": {}, "receives": {}}


def call(op: str, **more: Any) -> dict[str, Any]:
    return {"op": op, "number": 1, "shown": 1, "numel": 4, "shape": "[4]", "dtype": "float32", "how": "", **more}


def in_collective(members: range, number: int = 1) -> dict[str, Any]:
    waiting = call("all_reduce", group="g", members=list(members), number=number)
    return {"state": "waiting", "waiting": waiting, "counts": {"g": number}, "sends": {}, "receives": {}}


def receiving(rank: int, peer: int, sent: dict[str, int] | None = None) -> dict[str, Any]:
    channel = f"g|{peer}>{rank}|0"
    waiting = call("recv", channel=channel, peer=peer)
    return {"state": "waiting", "waiting": waiting, "counts": {}, "sends": sent or {}, "receives": {channel: 1}}


@pytest.mark.parametrize(
    ("ranks", "english", "french"),
    [
        ([3], "rank 3", "rang 3"),
        ([0, 1], "ranks 0 and 1", "rangs 0 et 1"),
        ([2, 1, 0, 5], "ranks 0–2 and 5", "rangs 0–2 et 5"),
        ([0, 2, 4], "ranks 0, 2 and 4", "rangs 0, 2 et 4"),
    ],
)
def test_ranks_in_words(ranks: list[int], english: str, french: str) -> None:
    assert (listed(ranks, french=False), listed(ranks, french=True)) == (english, french)


def test_a_collective_waits_for_those_who_have_not_called_it() -> None:
    states = [in_collective(range(3)), RUNNING, in_collective(range(3))]
    assert awaited(states, 0) == {1}
    assert stuck_ranks(states) == set()
    assert stuck_ranks([states[0], ENDED, states[2]]) == {0, 2}


def test_a_message_that_is_on_its_way_holds_nobody_up() -> None:
    states = [receiving(0, 1), {**ENDED, "sends": {"g|1>0|0": 1}}]
    assert awaited(states, 0) == set()
    assert stuck_ranks(states) == set()


def test_a_chain_that_ends_in_a_cycle_is_stuck_as_a_whole_and_the_cycle_is_named() -> None:
    states = [receiving(0, 1), receiving(1, 2), receiving(2, 1)]
    assert stuck_ranks(states) == {0, 1, 2}
    assert "between ranks 1 and 2" in explain_stuck(states, 0).message


def test_a_long_cycle_is_told_in_short() -> None:
    states = [receiving(rank, (rank + 1) % 8) for rank in range(8)]
    fault = explain_stuck(states, 5)
    assert fault.kind == "deadlock"
    assert "ranks 0–7" in fault.message and "(4 more)" in fault.message
    use_language("fr")
    assert "(encore 4)" in explain_stuck(states, 5).message


def test_calls_alike_are_no_mismatch_and_the_most_numerous_come_first() -> None:
    assert mismatch({0: call("all_reduce"), 1: call("all_reduce")}) is None
    fault = mismatch({0: call("barrier"), 1: call("all_reduce"), 2: call("all_reduce")})
    assert fault is not None
    assert fault.message.startswith(
        "Different order: ranks 1 and 2 call all_reduce #1 [4] float32, but rank 0 calls barrier"
    )
    assert mismatch({0: call("send", how="a"), 1: call("recv", how="b")}) is None


def test_other_endings_have_their_sentences() -> None:
    assert explain_lost([2, 1]).message == "Lost: the process of ranks 1 and 2 ended while others were waiting for it."
    busy = explain_timeout([in_collective(range(3)), RUNNING, RUNNING], 0, 10)
    assert busy.message.endswith("ranks 1 and 2 are still computing.")
    assert "although every rank has called it" in explain_timeout([in_collective(range(1))], 0, 10).message
    posted = {**ENDED, "sends": {"g|1>0|0": 1}}
    assert explain_timeout([receiving(0, 1), posted], 0, 13.785).message.endswith(
        "more than 14 s, although every rank has called it."
    )
    dropped = explain_timeout([receiving(0, 1), {**posted, "lost": {"g|1>0|0": True}}], 0, 10)
    assert "Rank 1 has called isend, but did not call wait()" in dropped.message
    use_language("fr")
    busy = explain_timeout([in_collective(range(3)), RUNNING, RUNNING], 0, 10)
    assert busy.message.endswith("les rangs 1 et 2 calculent encore.")


@given(st.lists(st.sampled_from(["running", "ended", "next", "all"]), min_size=2, max_size=8))
def test_only_ranks_that_cannot_go_on_are_stuck_and_each_has_a_sentence(kinds: list[str]) -> None:
    """However ranks wait: whoever is called stuck depends on none that still runs, and an explanation is found."""
    size = len(kinds)
    made = {
        "running": lambda rank: RUNNING,
        "ended": lambda rank: ENDED,
        "next": lambda rank: receiving(rank, (rank + 1) % size),
        "all": lambda rank: in_collective(range(size)),
    }
    states = [made[kind](rank) for rank, kind in enumerate(kinds)]
    stuck = stuck_ranks(states)
    for rank in stuck:
        needed = awaited(states, rank)
        assert any(other in stuck or kinds[other] == "ended" for other in needed)
        fault = explain_stuck(states, rank)
        assert fault.kind in ("missing", "deadlock") and fault.message
    free = [rank for rank, kind in enumerate(kinds) if kind in ("next", "all") and rank not in stuck]
    for rank in free:
        assert all(other not in stuck and kinds[other] != "ended" for other in awaited(states, rank))
