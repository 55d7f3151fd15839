"""The libraries side by side: what their rows read from records, and from nothing where there is none."""

import io
from typing import Any, get_args

import pytest
from rich.console import Console

from dlojz import predict
from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.display.figures.library_figures import measured_table, notes, ratio_words
from dlojz.libraries.library_catalogue import LIBRARIES
from dlojz.libraries.side_by_side import LibraryRow, largest_difference, rows, sent, status_words, traffic_pairs
from dlojz.results.footprint import Footprint
from dlojz.results.record import RunRecord, Status

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


def test_what_is_sent_is_not_what_is_received_nor_the_labs_own() -> None:
    """A stage of a pipeline sends its activations on and receives as many bytes of gradients."""
    piped = by_name(rows([record("torch"), _piped()]))
    assert piped["torch"].sent_bytes == (3_501_056.0,) * 2
    activations = 4 * 4 * 128 * 128  # of two micro-batches of 2 samples: tokens × width × 4 bytes
    assert piped["megatron"].sent_bytes == (float(activations),) * 2
    assert sum(one for _, one, _ in piped["megatron"].traffic_bytes if one is not None) >= 2 * activations
    assert sent(None) is None


def _piped() -> RunRecord:
    config = RunConfig.of(model="gpt_tiny", dp=1, pp=2, micro_batch=2, micro_batches=2, library="megatron", steps=STEPS)
    measured = predict(config).model_copy(update={"source": "measured"})
    return record("torch").model_copy(update={"config": config, "footprints": (measured,)})


def test_how_a_run_ended_is_said_in_the_readers_language() -> None:
    use_language("fr")
    said = {status: status_words(status) for status in get_args(Status)}
    failed = RunRecord(run_id="f", config=record("deepspeed").config, status="failed", reason="rang 0 : cassé.")
    assert by_name(rows([record("torch"), failed]))["deepspeed"].note == "échec : rang 0 : cassé."
    use_language("en")
    assert all(status != words for status, words in said.items()) and status_words("oom") == "oom"


def test_ratios_are_taken_within_a_round() -> None:
    """The machine was twice as slow in the second round: of which a ratio of medians would know nothing."""
    rounds = {
        "torch": [record("torch", step_s=one) for one in (0.5, 1.0, 0.5)],
        "accelerate": [record("accelerate", step_s=one) for one in (0.6, 1.1, 0.7)],
    }
    row = by_name(rows(rounds))["accelerate"]
    assert row.step_ratio == pytest.approx(1.2) and row.rounds == 3
    assert (row.step_ratio_low, row.step_ratio_high) == (pytest.approx(1.15), pytest.approx(1.3))


def failed(library: str) -> RunRecord:
    return RunRecord(run_id="f", config=record(library).config, status="failed", reason="rank 0: it broke.")


@pytest.mark.parametrize("lost", [None, failed("deepspeed"), record("deepspeed", losses=(3.0,)).model_copy(
    update={"status": "failed", "reason": "rank 0: it broke.", "step_s": (9.0, 9.0, 9.0, 5.0)})])  # fmt: skip
def test_a_round_that_failed_leaves_its_place_and_is_told(lost: RunRecord | None) -> None:
    """The first of DeepSpeed's; plain torch's second round is the one that its own second is held against."""
    found = rows({
        "torch": [record("torch", step_s=one) for one in (1.0, 2.0, 4.0)],
        "deepspeed": [lost, record("deepspeed", step_s=2.0), record("deepspeed", step_s=4.0)],
    })  # fmt: skip
    plain, row = by_name(found)["torch"], by_name(found)["deepspeed"]
    assert (row.step_ratio, row.step_ratio_low, row.step_ratio_high) == (1.0, 1.0, 1.0)
    assert (row.rounds, plain.rounds, row.steps_timed) == (2, 3, STEPS - 3)
    assert row.note.startswith("1 of 3 rounds: ") and ("it broke" in row.note or lost is None) and plain.note == ""


def test_without_the_reference_of_a_round_there_is_no_ratio_of_it() -> None:
    found = rows({"torch": [None, record("torch")], "deepspeed": [record("deepspeed", step_s=1.5)] * 2})
    row = by_name(found)["deepspeed"]
    assert (row.step_ratio, row.rounds, row.difference) == (3.0, 1, 0.0)


def test_what_a_library_did_otherwise_is_marked_at_its_ratio() -> None:
    """It is the ratio of two trainings that are not the same; and one round alone is said to be one."""
    wrapped = {"library": "Accelerate 1.2.3", "wrapped_in": "DistributedDataParallel"}
    other = record("accelerate", zero=3).model_copy(update={"environment": wrapped})
    sharded, accelerate = rows([record("torch", zero=3), other], names=["torch", "accelerate"])
    assert (sharded.otherwise, accelerate.otherwise) == (False, True)
    assert ratio_words(sharded) == "×1.00 (1 round)" and ratio_words(accelerate) == "×1.00 (1 round) *"
    assert notes([sharded, accelerate])[0].startswith("Accelerate *: ")


def test_the_table_says_whether_final_weights_are_equal_and_what_was_timed() -> None:
    changed = record("deepspeed").model_copy(update={"weights_sha256": "01"})
    shown = Console(width=200, record=True, file=io.StringIO())
    shown.print(measured_table(rows({"torch": [record("torch")] * 3, "deepspeed": [changed] * 3})))
    told = {line[:20].strip(): line[20:].split() for line in shown.export_text().splitlines()}
    assert told["final weights equal"] == ["yes", "no"]
    assert told["steps timed"] == ["3", "×", "3"] * 2


def test_rows_of_what_was_not_run_say_why_and_have_no_figures() -> None:
    found = by_name(rows([record("torch")], refused={"megatron": "it is refused."}))
    assert not found["megatron"].ran and found["megatron"].note == "it is refused."
    silent = found["megatron"]
    assert silent.difference is silent.step_ratio is silent.bytes_equal is None and silent.traffic_bytes == ()
    assert silent.change.lines > 0, "its program is there to be read"


def test_rows_of_a_run_that_failed_say_so() -> None:
    row = by_name(rows([record("torch"), failed("deepspeed")]))["deepspeed"]
    assert not row.ran and row.note == "failed: rank 0: it broke."


def test_without_plain_torch_there_is_no_difference() -> None:
    row = by_name(rows([record("deepspeed")], names=["deepspeed"]))["deepspeed"]
    assert row.difference is None and row.step_ratio is None and row.step_s == 0.5


def test_traffic_pairs_have_a_message_that_was_not_predicted_as_unequal() -> None:
    before = predict(RunConfig.of(model="gpt_tiny", dp=2))
    one = before.communication[-1].model_copy(update={"collective": "broadcast", "message_bytes": 5712})
    after = before.model_copy(update={"communication": (*before.communication, one)})
    assert traffic_pairs(before, after) == (("all_reduce", 3_501_056, 3_501_056), ("broadcast", 0, 5712))
    assert traffic_pairs(None, after)[0] == ("all_reduce", None, 3_501_056)
    assert isinstance(after, Footprint)


def test_the_largest_difference_is_over_the_steps_that_both_have() -> None:
    assert largest_difference((1.0, 2.0, 9.0), (1.5, 2.25)) == 0.5
    assert largest_difference((), (1.0,)) is None


def test_rows_are_plain_data() -> None:
    told = rows([record("torch")])[0].to_dict()
    assert told["ran"] and told["peak_bytes"]["predicted"] == told["peak_bytes"]["measured"]
    assert told["traffic_bytes"][0] == {"collective": "all_reduce", "predicted": 3_501_056, "measured": 3_501_056}
