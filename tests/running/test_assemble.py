"""A record holds what the ranks told, and nothing else."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dlojz.config.run_config import RunConfig
from dlojz.results.record import RunRecord
from dlojz.running.ending import Ending
from dlojz.running.state import assemble, finished_steps, losses_of

CONFIG = RunConfig.of(model="coatnet_tiny", dp=2, steps=4)


def steps(*losses: tuple[int, Any]) -> list[dict[str, Any]]:
    return [{"event": "step", "step": index, "loss": loss, "step_s": 0.1} for index, loss in losses]


def record(events: dict[int, list[dict[str, Any]]]) -> RunRecord:
    return assemble("a-run", CONFIG, events, Ending("completed"), 1.5)


def test_losses_of_rank_0_with_gaps_filled_by_the_others() -> None:
    assert losses_of({0: steps((0, 3.0), (2, 1.0)), 1: steps((0, 3.0), (1, 2.0))}) == (3.0, 2.0, 1.0)


def test_losses_stop_at_the_first_step_that_nobody_tells() -> None:
    assert losses_of({0: steps((0, 3.0), (2, 1.0))}) == (3.0,)
    assert losses_of({0: steps((1, 3.0))}) == ()


def test_values_of_a_wrong_type_are_no_losses() -> None:
    assert losses_of({0: steps((0, 3.0), (1, True))}) == (3.0,)
    assert losses_of({0: steps((0, "3.0"))}) == ()


def test_the_last_legal_footprint_of_each_rank_wins() -> None:
    def footprint(rank: int, parameters: Any) -> dict[str, Any]:
        return {"event": "footprint", "footprint": {"source": "measured", "rank": rank, "parameters": parameters}}

    made = record({0: [footprint(0, 1), footprint(0, 2), footprint(0, "many")], 1: [footprint(1, 3)]})
    assert [(one.rank, one.parameters) for one in made.footprints] == [(0, 2), (1, 3)]


def test_timeline_environment_and_weights() -> None:
    span = {"rank": 1, "step": 0, "phase": "forward", "start_s": 0.0, "end_s": 1.0}
    sample = {"time_s": 0.5, "phase": "forward", "bytes_by_category": {"weights": 4}}
    made = record(
        {
            0: [
                {"event": "start", "environment": {"torch": "2.13"}, "time_utc": "2030-01-01T00:00:00+00:00"},
                {"event": "memory_timeline", "samples": [sample, {"bad": 1}]},
                {"event": "weights", "sha256": "ab"},
            ],
            1: [{"event": "spans", "spans": [span, 7]}, {"event": "memory_timeline", "samples": [sample]}],
        }
    )
    assert [one.to_dict() for one in made.spans] == [{**span, "action": ""}]
    assert [one.to_dict() for one in made.memory_timeline] == [sample]
    assert (made.environment, made.weights_sha256, made.elapsed_s) == ({"torch": "2.13"}, "ab", 1.5)
    assert made.started_utc == "2030-01-01T00:00:00+00:00"


def test_finished_steps_counts_from_one() -> None:
    assert (finished_steps([]), finished_steps(steps((0, 1.0), (1, 1.0)))) == (0, 2)


TEXT = st.text("aé\0\x1b\ud800\u202e", max_size=4)
NUMBERS = st.sampled_from([0, 1, -1, 10**400, 0.5, -0.0, 1e308, 2**63])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(["start", "step", "footprint", "spans", "memory_timeline", "weights", "end"])
KEYS = st.sampled_from(["step", "loss", "footprint", "spans", "samples", "sha256", "environment", "time_utc", "status"])


@given(
    st.lists(
        st.builds(lambda name, rest: {**rest, "event": name}, NAMES, st.dictionaries(KEYS, JSON, max_size=4)),
        max_size=6,
    )
)
def test_whatever_a_rank_writes_a_record_is_made(events: list[dict[str, Any]]) -> None:
    made = record({0: events})
    assert RunRecord.from_json(made.to_json()) == made


def test_assemble_takes_the_timeline_of_the_last_attempt_of_a_run_that_went_on() -> None:
    def attempt(step: int) -> list[dict[str, Any]]:
        span = {"rank": 0, "step": step, "phase": "forward", "start_s": 0.0, "end_s": 1.0}
        return [{"event": "start"}, {"event": "step", "step": step, "loss": 1.0}, {"event": "spans", "spans": [span]}]

    record = assemble("run", RunConfig.of(model="coatnet_tiny"), {0: attempt(0) + attempt(1)}, Ending("completed"), 1.0)
    assert [span.step for span in record.spans] == [1]
    assert record.losses == (1.0, 1.0)
