"""Weight versions and staleness: counted from updates, equal to what the papers state, zero without updates."""

import pytest

from dlojz.base.errors import LabError
from dlojz.pipeline.orders.asynchronous import (
    Audit,
    Weights,
    ampnet,
    pipedream,
    pipedream_2bw,
    pipemare,
    version_audit,
    weights_of,
)
from dlojz.pipeline.orders.bidirectional import chimera
from dlojz.pipeline.orders.synchronous import gpipe, one_f_one_b, terapipe
from dlojz.pipeline.orders.zero_bubble import zb_h1
from dlojz.pipeline.schedule import BACKWARD, FORWARD, UPDATE, Action, Costs, Schedule, parse_action
from dlojz.pipeline.simulator import simulate

SIZES = (1, 2, 3, 4, 8)


def peaks(audit: Audit) -> tuple[int, ...]:
    """Largest staleness of each stage."""
    return tuple(max(one for one in stage if one is not None) for stage in audit.staleness)


@pytest.mark.parametrize("n", SIZES)
def test_pipedream_is_n_minus_i_stale_and_keeps_one_version_more(n: int) -> None:
    audit = version_audit(pipedream(n, 3 * n + 2))
    expected = tuple(n - i for i in range(1, n + 1))
    assert audit.settled_staleness == audit.settled_backward_staleness == peaks(audit) == expected
    assert audit.versions_kept == tuple(tau + 1 for tau in expected)
    assert audit.mixed == ()


def test_pipedream_forward_k_has_seen_k_minus_n_plus_i_updates() -> None:
    n = 4
    schedule = pipedream(n, 12)
    versions = dict(zip(schedule.actions, version_audit(schedule).versions, strict=True))
    for stage in range(n):
        for k in range(12):
            expected = max(k - (n - 1 - stage), 0)
            assert versions[Action(FORWARD, stage, k)] == versions[Action(BACKWARD, stage, k)] == expected
            assert versions[Action(UPDATE, stage, k)] == k + 1


@pytest.mark.parametrize("n", SIZES)
def test_version_audit_of_vertical_sync_is_n_minus_1_stale_everywhere(n: int) -> None:
    audit = version_audit(pipedream(n, 3 * n + 2, stashing="vertical"))
    assert audit.settled_staleness == audit.settled_backward_staleness == (n - 1,) * n
    assert audit.versions_kept == (n,) * n
    assert audit.mixed == ()


@pytest.mark.parametrize("n", SIZES)
def test_without_stashing_one_version_is_kept_and_gradients_mix_two(n: int) -> None:
    audit = version_audit(pipedream(n, 3 * n + 2, stashing="none"))
    assert audit.settled_staleness == tuple(n - i for i in range(1, n + 1))
    assert audit.settled_backward_staleness == (0,) * n
    assert audit.versions_kept == (1,) * n
    # All but the first micro-batch, on all stages but the last.
    assert audit.mixed == tuple((stage, k) for stage in range(n - 1) for k in range(1, 3 * n + 2))


@pytest.mark.parametrize("batch", [4, 5, 8])
def test_2bw_is_one_batch_stale_with_two_versions(batch: int) -> None:
    schedule = pipedream_2bw(4, 4 * batch + 2, batch=batch)
    audit = version_audit(schedule)
    assert audit.versions_kept == (2,) * 4
    assert audit.mixed == ()
    for stage in range(4):
        assert audit.staleness[stage] == tuple(min(k // batch, 1) for k in range(4 * batch + 2))
    for action, version in zip(schedule.actions, audit.versions, strict=True):
        if action.kind != UPDATE:
            assert version == max(action.micro_batch // batch - 1, 0)


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_pipemare_is_2_times_p_minus_i_plus_1_over_n_stale(batch: int) -> None:
    ranks = 4
    audit = version_audit(pipemare(ranks, 40, batch=batch))
    expected = [(2 * (ranks - i) + 1) / batch for i in range(1, ranks + 1)]
    assert audit.settled_staleness == pytest.approx(expected, abs=1e-12)  # means of whole numbers, batch=3 rounds
    assert audit.settled_backward_staleness == (0.0,) * ranks
    assert audit.versions_kept == (1,) * ranks
    stashed = version_audit(pipemare(ranks, 40, batch=batch), weights="stashing")
    assert stashed.settled_backward_staleness == stashed.settled_staleness == audit.settled_staleness
    assert stashed.mixed == ()


@pytest.mark.parametrize("schedule", [gpipe(4, 8), one_f_one_b(4, 8), zb_h1(4, 8), chimera(4, 8), terapipe(2, 3, 4)])
def test_nothing_is_stale_in_a_synchronous_schedule(schedule: Schedule) -> None:
    audit = version_audit(schedule)
    assert set(audit.versions) == {0}
    assert {tau for row in audit.staleness + audit.backward_staleness for tau in row} == {0}
    assert audit.versions_kept == (1,) * schedule.stages
    assert audit.updates == (0,) * schedule.stages
    assert audit.mixed == ()


@pytest.mark.parametrize(
    "schedule",
    [
        pipedream(3, 9),
        pipemare(3, 9, batch=2),
        ampnet(3, 9, in_flight=5, update_every=2, costs=Costs(forward=(1, 3, 2), backward=(2, 1, 5))),
    ],
)
def test_staleness_is_the_number_of_updates_between_forward_and_its_update(schedule: Schedule) -> None:
    """Counted a second time, from simulated times: updates of the stage that end after the forward's start."""
    audit, timeline = version_audit(schedule), simulate(schedule, Costs(update=0.5))
    start = {action: timeline.starts[number] for number, action in enumerate(schedule.actions)}
    for stage in range(schedule.stages):
        updates = sorted(start[action] for action in schedule.actions if action[:2] == (UPDATE, stage))
        for k in range(schedule.micro_batches):
            begun, done = start[Action(FORWARD, stage, k)], start[Action(BACKWARD, stage, k)]
            using = [at for at in updates if at > done]
            expected = sum(begun < at < using[0] for at in updates) if using else None
            assert audit.staleness[stage][k] == expected


@pytest.mark.parametrize("weights", ["stashing", "newest", None])
def test_versions_kept_are_those_still_wanted_and_the_newest(weights: Weights | None) -> None:
    """The definition itself, action by action, for schedules of every method."""
    for schedule in (pipedream(4, 9), pipedream_2bw(3, 11, batch=5), pipemare(3, 12), ampnet(4, 9, update_every=2)):
        audit, start = version_audit(schedule, weights), schedule.first_of_rank
        for stage, order in enumerate(schedule.orders):
            newest, most = 0, 0
            for at, action in enumerate(order):
                wanted = {audit.versions[start[stage] + n] for n in range(at, len(order)) if order[n].kind != UPDATE}
                most = max(most, len({one for one in wanted if one is not None and one <= newest} | {newest}))
                newest += action.kind == UPDATE
            assert audit.versions_kept[stage] == most


def test_ampnet_staleness_is_limited_by_what_is_in_flight() -> None:
    few, many = (max(peaks(version_audit(ampnet(4, 40, in_flight=number)))) for number in (2, 8))
    assert few == 1
    assert few < many <= 7
    assert peaks(version_audit(ampnet(4, 40, in_flight=1))) == (0, 0, 0, 0)


def test_gradients_that_no_update_uses_have_no_staleness() -> None:
    audit = version_audit(ampnet(2, 7, update_every=3))
    assert audit.staleness[0][6] is None
    assert audit.update_of[1] == (0, 0, 0, 1, 1, 1, None)


def test_a_split_backward_counts_from_its_weight_part() -> None:
    order = "0F0 0I0 0F1 0I1 0W0 0U0 0F2 0I2 0W1 0U1 0W2 0U2"
    schedule = Schedule.of("custom", [[parse_action(one) for one in order.split()]], [0], 3, asynchronous=True)
    audit = version_audit(schedule)
    assert audit.update_of == ((0, 1, 2),)
    assert audit.staleness == audit.backward_staleness == ((0, 1, 1),)
    assert audit.versions == (0, 0, 0, 0, 0, 1, 1, 1, 0, 2, 1, 3)
    assert audit.versions_kept == (2,)


def test_a_version_that_does_not_exist_yet_is_refused() -> None:
    with pytest.raises(LabError, match=r"0F2 would use version 1 .* has only made 0 update"):
        version_audit(pipedream(4, 8), weights="double-buffered")
    with pytest.raises(LabError, match="unknown weights 'newst': did you mean 'newest'"):
        version_audit(pipedream(4, 8), weights="newst")  # type: ignore[arg-type]


def test_weights_of_an_order_follow_from_its_name() -> None:
    assert [weights_of(one) for one in (pipedream(2, 4), pipedream_2bw(2, 4), pipemare(2, 4), ampnet(2, 4))] == [
        "stashing",
        "double-buffered",
        "newest",
        "newest",
    ]
