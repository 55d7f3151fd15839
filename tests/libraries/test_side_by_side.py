"""The libraries side by side: what their rows read from records, and from nothing where there is none."""

from __future__ import annotations

from typing import Any

import pytest

from dlojz import predict
from dlojz.config import RunConfig
from dlojz.footprint import Footprint
from dlojz.libraries import LIBRARIES
from dlojz.libraries.side_by_side import LibraryRow, largest_difference, rows, traffic_pairs
from dlojz.record import RunRecord

STEPS = 6


def record(library: str, losses: tuple[float, ...] = (3.0, 2.0), step_s: float = 0.5, **more: Any) -> RunRecord:
    """As if it had measured exactly what was predicted."""
    config = RunConfig.of(model="gpt_tiny", dp=2, library=library, steps=STEPS, **more)
    measured = predict(config).model_copy(update={"source": "measured"})
    return RunRecord(
        run_id=f"of-{library}",
        config=config,
        status="completed",
        losses=losses,
        step_s=(9.0, 9.0, 9.0, *[step_s] * (STEPS - 3)),
        weights_sha256="00",
        footprints=(measured,),
        environment={"library": f"{LIBRARIES[library].title} 1.2.3"},
    )


def by_name(found: list[LibraryRow]) -> dict[str, LibraryRow]:
    return {row.name: row for row in found}


def test_a_row_reads_the_record_and_the_prediction() -> None:
    found = by_name(rows([record("torch"), record("deepspeed", losses=(3.0, 2.5), step_s=0.75)]))
    plain, deepspeed = found["torch"], found["deepspeed"]
    assert (plain.difference, deepspeed.difference) == (0.0, 0.5)
    assert deepspeed.version == "1.2.3" and deepspeed.ran and deepspeed.bytes_equal
    assert deepspeed.step_ratio == pytest.approx(1.5) and deepspeed.step_s == 0.75, "traced steps are not timed"
    assert plain.peak_bytes[0] == plain.peak_bytes[1] == predict(record("torch").config).memory.peak_bytes
    assert plain.states_bytes == (14_004_436,) * 2
    assert plain.traffic_bytes == (("all_reduce", 3_501_056, 3_501_056),), "the lab's own group is no library's"
    assert plain.same_weights and deepspeed.same_weights


def test_ratios_are_taken_within_a_round() -> None:
    """The machine was twice as slow in the second round: of which a ratio of medians would know nothing."""
    rounds = {
        "torch": [record("torch", step_s=one) for one in (0.5, 1.0, 0.5)],
        "accelerate": [record("accelerate", step_s=one) for one in (0.6, 1.1, 0.7)],
    }
    row = by_name(rows(rounds))["accelerate"]
    assert row.step_ratio == pytest.approx(1.2) and row.rounds == 3
    assert (row.step_ratio_low, row.step_ratio_high) == (pytest.approx(1.15), pytest.approx(1.3))


def test_what_was_not_run_says_why_and_has_no_figures() -> None:
    found = by_name(rows([record("torch")], refused={"megatron": "it is refused."}))
    assert not found["megatron"].ran and found["megatron"].note == "it is refused."
    silent = found["megatron"]
    assert silent.difference is silent.step_ratio is silent.bytes_equal is None and silent.traffic_bytes == ()
    assert silent.change.lines > 0, "its program is there to be read"


def test_a_run_that_failed_says_so() -> None:
    failed = RunRecord(run_id="f", config=record("deepspeed").config, status="failed", reason="rank 0: it broke.")
    row = by_name(rows([record("torch"), failed]))["deepspeed"]
    assert not row.ran and row.note == "failed: rank 0: it broke."


def test_without_plain_torch_there_is_no_difference() -> None:
    row = by_name(rows([record("deepspeed")], names=["deepspeed"]))["deepspeed"]
    assert row.difference is None and row.step_ratio is None and row.step_s == 0.5


def test_a_message_that_was_not_predicted_is_unequal() -> None:
    before = predict(RunConfig.of(model="gpt_tiny", dp=2))
    one = before.communication[-1].model_copy(update={"collective": "broadcast", "message_bytes": 5712})
    after = before.model_copy(update={"communication": (*before.communication, one)})
    assert traffic_pairs(before, after) == (("all_reduce", 3_501_056, 3_501_056), ("broadcast", 0, 5712))
    assert traffic_pairs(None, after)[0] == ("all_reduce", None, 3_501_056)
    assert isinstance(after, Footprint)


def test_the_largest_difference_is_over_the_steps_that_both_have() -> None:
    assert largest_difference((1.0, 2.0, 9.0), (1.5, 2.25)) == 0.5
    assert largest_difference((), (1.0,)) is None


def test_a_row_is_plain_data() -> None:
    told = rows([record("torch")])[0].to_dict()
    assert told["ran"] and told["peak_bytes"]["predicted"] == told["peak_bytes"]["measured"]
    assert told["traffic_bytes"][0] == {"collective": "all_reduce", "predicted": 3_501_056, "measured": 3_501_056}
