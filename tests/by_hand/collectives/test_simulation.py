"""Every algorithm computes what its collective is defined to be, for any number of ranks; the rest is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlojz.base.errors import LabError
from dlojz.by_hand import collectives
from dlojz.by_hand.collectives.algorithm_catalogue import ALGORITHMS, holds_at_start, node_size, programs, wanted_at_end
from dlojz.by_hand.collectives.algorithms import CollectiveStep, Receive, Send
from dlojz.by_hand.collectives.simulation import Held, lockstep, simulate

ALL = st.sampled_from(collectives.names())
SIZES = st.integers(1, 17)
WHOLE = (0,)


def _defined(collective: str, values: list[list[int]], rank: int, chunk: int) -> int:
    """The collective's definition, without any algorithm."""
    if collective == "all_to_all":
        return values[chunk][rank]
    if collective == "all_gather":
        return values[chunk][chunk]
    return values[0][chunk] if collective == "broadcast" else sum(row[chunk] for row in values)


@settings(max_examples=300)
@given(name=ALL, size=SIZES, data=st.data())
def test_the_result_is_the_definition_of_the_collective(name: str, size: int, data: st.DataObject) -> None:
    chunks = collectives.num_chunks(name, size)
    row = st.lists(st.integers(-99, 99), min_size=chunks, max_size=chunks)
    values = data.draw(st.lists(row, min_size=size, max_size=size))
    per_node = data.draw(st.sampled_from([number for number in range(1, size + 1) if size % number == 0]))
    simulation = simulate(name, values, per_node=per_node)
    collective = ALGORITHMS[name].collective
    for rank in range(size):
        for chunk in range(chunks):
            if wanted_at_end(collective, rank, chunk):
                assert simulation.states[-1][rank][chunk].value == _defined(collective, values, rank, chunk)
                assert simulation.done(-1, rank, chunk)


@given(name=ALL, size=SIZES)
def test_simulate_counts_each_contribution_once_and_no_message_is_too_big(name: str, size: int) -> None:
    simulation = simulate(name, size)
    for state in simulation.states:
        for row in state:
            assert all(len(set(held.ranks)) == len(held.ranks) for held in row)
    all_programs = programs(name, size)
    assert len({len(steps) for steps in all_programs}) == 1 == len(simulation.states) - len(all_programs[0])


@given(name=ALL, size=SIZES)
def test_a_program_speaks_to_others_only_and_each_step_has_a_message(name: str, size: int) -> None:
    for rank, steps in enumerate(programs(name, size)):
        for step in steps:
            assert step.send is None or (step.send.to != rank and 0 <= step.send.to < size)
            assert step.receive is None or (step.receive.source != rank and 0 <= step.receive.source < size)
    assert all(simulate(name, size).transfers)


@pytest.mark.parametrize("name", collectives.names())
def test_collective_program_of_one_rank_has_nothing_to_do(name: str) -> None:
    assert collectives.program(name, 0, 1) == ()
    assert simulate(name, [[7]]).values() == [[7]]


@given(size=SIZES, step=st.integers(0, 16))
def test_the_ring_has_a_partial_sum_of_one_more_rank_after_each_step(size: int, step: int) -> None:
    """In reduce-scatter the block that arrives at rank r in step k holds the k + 2 ranks that end with r."""
    simulation = simulate("ring_reduce_scatter", size)
    if step < size - 1:
        for rank in range(size):
            held = simulation.states[step + 1][rank][(rank - step - 2) % size]
            assert held.ranks == tuple(sorted((rank - back) % size for back in range(step + 2)))


def test_collective_program_of_the_ring_of_four_as_every_course_draws_it() -> None:
    assert collectives.program("ring_all_reduce", 1, 4) == tuple(
        CollectiveStep(Send(2, (sent,)), Receive(0, (received,), add))
        for sent, received, add in [
            (1, 0, True), (0, 3, True), (3, 2, True), (2, 1, False), (1, 0, False), (0, 3, False),
        ]
    )  # fmt: skip


def test_what_a_rank_does_not_have_at_the_start_is_not_read() -> None:
    assert simulate("tree_broadcast", [[5], [None], [None]]).values() == [[5], [5], [5]]
    assert simulate("ring_all_gather", [[1, 99], [99, 2]]).values() == [[1, 2], [1, 2]]
    assert not holds_at_start("all_gather", 0, 1)


def _start(size: int) -> tuple[tuple[Held, ...], ...]:
    return tuple((Held(rank, (rank,)),) for rank in range(size))


@pytest.mark.parametrize(
    "steps, sentence",
    [
        (
            [CollectiveStep(receive=Receive(1, WHOLE, True)), CollectiveStep()],
            "rank 0 waits for rank 1, which sends it nothing",
        ),
        ([CollectiveStep(send=Send(1, WHOLE)), CollectiveStep()], "rank 0 sends to rank 1, which does not receive"),
        (
            [CollectiveStep(send=Send(1, (0, 0))), CollectiveStep(receive=Receive(0, WHOLE, True))],
            r"2 chunk\(s\) to rank 1, which expects 1",
        ),
        ([CollectiveStep(Send(1, WHOLE), Receive(1, WHOLE, True))] * 2, "rank 0 waits for rank 1"),
    ],
)
def test_lockstep_refuses_messages_without_a_partner_by_name(steps: list[CollectiveStep], sentence: str) -> None:
    with pytest.raises(LabError, match=f"step 1: .*{sentence}"):
        lockstep([[step] for step in steps], _start(2))


def test_what_is_not_held_is_not_sent() -> None:
    start = ((Held(None, ()),), (Held(1, (1,)),))
    with pytest.raises(LabError, match="rank 0 sends chunk 0, which it does not hold"):
        lockstep([[CollectiveStep(send=Send(1, WHOLE))], [CollectiveStep(receive=Receive(0, WHOLE, False))]], start)


def test_a_swap_sends_what_was_held_when_the_step_began() -> None:
    swap = [
        [CollectiveStep(Send(1, WHOLE), Receive(1, WHOLE, False))],
        [CollectiveStep(Send(0, WHOLE), Receive(0, WHOLE, False))],
    ]
    assert [[held.value for held in row] for row in lockstep(swap, _start(2))[0][-1]] == [[1], [0]]


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: collectives.program("ring_al_reduce", 0, 4), "did you mean 'ring_all_reduce'"),
        (lambda: collectives.program("ring_all_reduce", 4, 4), "rank 4 does not exist: 4 ranks are numbered 0 to 3"),
        (lambda: collectives.program("ring_all_reduce", 0, 0), "at least 1, but 0"),
        (lambda: collectives.program("ring_all_reduce", 0, True), "at least 1, but True"),
        (lambda: collectives.program("hierarchical_all_reduce", 0, 6, per_node=4), "nodes of 4: use one of 1, 2, 3, 6"),
        (lambda: simulate("ring_all_reduce", [[1, 2], [3]]), r"2 chunk\(s\) per rank, but rank 1 was given 1"),
        (lambda: simulate("ring_all_reduce", []), "at least 1, but 0"),
    ],
)
def test_simulate_and_collective_program_refusals(call: object, sentence: str) -> None:
    with pytest.raises(LabError, match=sentence):
        call()  # type: ignore[operator]


def test_nodes_have_four_ranks_where_that_is_possible() -> None:
    assert [node_size(size) for size in (1, 2, 4, 6, 7, 8, 512)] == [1, 1, 2, 3, 1, 4, 4]


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_the_ring_sends_the_chunks_that_lab_03_asks_for(size: int) -> None:
    """Its figure, its stepper, its exercise and its hints number the chunks alike."""
    rounds = collectives.simulate("ring_all_reduce", size).transfers
    assert len(rounds) == 2 * (size - 1)
    for number, transfers in enumerate(rounds):
        gathering, step = divmod(number, size - 1)
        sent = {one.source: one.chunks for one in transfers}
        assert sent == {rank: ((rank + gathering - step) % size,) for rank in range(size)}
        assert all(one.add is not bool(gathering) for one in transfers)
