"""Asynchronous orders: where updates stand, that nothing deadlocks, that the steady state has no bubble."""

from itertools import pairwise

import pytest

from dlojz.base.errors import LabError
from dlojz.pipeline.orders.asynchronous import ampnet, pipedream, pipedream_2bw, pipemare
from dlojz.pipeline.schedule import BACKWARD, FORWARD, UPDATE, Action, Costs, Schedule
from dlojz.pipeline.simulator import simulate
from dlojz.pipeline.validity import problems

METHODS = {"pipedream": pipedream, "pipedream-2bw": pipedream_2bw, "pipemare": pipemare, "ampnet": ampnet}


def spelled(schedule: Schedule, rank: int) -> str:
    return " ".join(str(action) for action in schedule.orders[rank])


def test_pipedream_updates_after_each_backward() -> None:
    schedule = pipedream(2, 4)
    assert spelled(schedule, 0) == "0F0 0F1 0B0 0U0 0F2 0B1 0U1 0F3 0B2 0U2 0B3 0U3"
    assert spelled(schedule, 1) == "1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2 1F3 1B3 1U3"
    assert schedule.asynchronous
    assert not schedule.barrier


def test_2bw_updates_after_each_batch_and_pipemare_injects_twice_as_many() -> None:
    assert spelled(pipedream_2bw(2, 5), 0) == "0F0 0F1 0B0 0F2 0B1 0U1 0F3 0B2 0F4 0B3 0U3 0B4 0U4"
    assert spelled(pipemare(2, 6), 0) == "0F0 0F1 0F2 0F3 0B0 0U0 0F4 0B1 0U1 0F5 0B2 0U2 0B3 0U3 0B4 0U4 0B5 0U5"
    assert spelled(pipemare(2, 4, batch=2), 1) == "1F0 1F1 1B0 1F2 1B1 1U1 1F3 1B2 1B3 1U3"


@pytest.mark.parametrize("name", METHODS)
def test_asynchronous_orders_of_every_size_have_no_problems(name: str) -> None:
    for ranks in (1, 2, 3, 4, 8):
        for micro_batches in (1, 2, ranks, 2 * ranks + 1):
            assert problems(METHODS[name](ranks, micro_batches)) == []


@pytest.mark.parametrize("name", METHODS)
def test_an_update_names_the_last_gradient_it_uses(name: str) -> None:
    for order in METHODS[name](4, 12).orders:
        for before, action in pairwise(order):
            if action.kind == UPDATE:
                assert before == action._replace(kind=BACKWARD)


@pytest.mark.parametrize("name", METHODS)
def test_simulate_finds_no_bubble_in_the_steady_state_of_asynchronous_orders(name: str) -> None:
    """One micro-batch more costs its own work alone, F + B, on every rank; U = 1 is paid once per update."""
    one, two = (simulate(METHODS[name](4, micro_batches)).makespan for micro_batches in (40, 41))
    assert two - one == 3
    if name in ("pipedream", "pipemare"):
        costs = Costs(update=1.0)
        one, two = (simulate(METHODS[name](4, micro_batches), costs).makespan for micro_batches in (40, 41))
        assert two - one == 4


def test_the_three_writings_of_pipedream_differ_in_their_rule_not_in_their_order() -> None:
    stashing, vertical, none = (pipedream(3, 6, stashing=rule) for rule in ("stashing", "vertical", "none"))
    assert stashing.orders == vertical.orders == none.orders
    assert [one.name for one in (stashing, vertical, none)] == [
        "pipedream",
        "pipedream-vertical",
        "pipedream-no-stashing",
    ]


def test_ampnet_never_has_more_in_flight_than_it_may() -> None:
    for in_flight in (1, 2, 3, 7):
        flying, most = 0, 0
        for action in ampnet(4, 12, in_flight=in_flight).orders[0]:
            flying += {FORWARD: 1, BACKWARD: -1}.get(action.kind, 0)
            most = max(most, flying)
        assert most == in_flight


def test_ampnet_takes_what_has_arrived_backwards_first() -> None:
    """In the simulated times of its own costs, no forward starts while a backward waits, and no rank idles for long."""
    costs = Costs(forward=(1, 3, 2), backward=(2, 1, 5), latency=0.25, update=0.5)
    schedule = ampnet(3, 10, in_flight=5, update_every=2, costs=costs)
    timeline = simulate(schedule, costs)
    end = {action: timeline.ends[number] for number, action in enumerate(schedule.actions)}
    for number, action in enumerate(schedule.actions):
        if action.kind != FORWARD:
            continue
        order = schedule.orders[action.stage]
        behind = next(one for one in order[order.index(action) :] if one.kind == BACKWARD)
        source = behind._replace(stage=action.stage + 1) if action.stage < 2 else behind._replace(kind=FORWARD)
        delay = 0.25 if action.stage < 2 else 0.0
        assert timeline.starts[number] < end[source] + delay
    assert schedule.orders != ampnet(3, 10, in_flight=5, update_every=2).orders  # who arrives first decides


def test_ampnet_updates_after_so_many_gradients_of_the_stage_and_leaves_the_rest() -> None:
    schedule = ampnet(2, 7, update_every=3)
    for stage, order in enumerate(schedule.orders):
        assert [action for action in order if action.kind == UPDATE] == [
            Action(UPDATE, stage, 2),
            Action(UPDATE, stage, 5),
        ]


def test_pipedream_and_ampnet_refuse_what_cannot_be_with_what_can() -> None:
    with pytest.raises(LabError, match=r"at least as many micro-batches as stages \(4\).*batch is 3: use 4 or more"):
        pipedream_2bw(4, 8, batch=3)
    with pytest.raises(LabError, match="unknown stashing 'vertcal': did you mean 'vertical'"):
        pipedream(4, 8, stashing="vertcal")  # type: ignore[arg-type]
    for method in METHODS.values():
        with pytest.raises(LabError, match="ranks must be a whole number of at least 1, but 0 was received"):
            method(0, 4)
    with pytest.raises(LabError, match="in_flight must be a whole number of at least 1"):
        ampnet(2, 4, in_flight=0)
