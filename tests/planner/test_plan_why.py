"""Refusals: the reason is true, the figures are the model's, and no smaller change would do."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.fields import LayoutFields
from dlojz.cost_model import CHECKPOINTING, Parts
from dlojz.hardware.decoder_size import DecoderSize
from dlojz.planner import answer
from dlojz.planner.answer import Plan
from dlojz.planner.ask import plan
from dlojz.planner.explain import code_of
from dlojz.planner.search import PARTS, fullest, rank_memories
from dlojz.planner.space import (
    CODE,
    FREE,
    LEAST_CONTEXT,
    NAMES,
    REASONS,
    WORDING,
    candidates_of,
    gigabytes,
    layout_row,
    more_percent,
    reason_words,
)
from dlojz.planner.tree import FAMILIES


def test_out_of_memory_says_how_much_where_and_why(bloom: Plan) -> None:
    verdict = bloom.why(dp=8, tp=4, pp=12, micro_batch=1, zero=1, checkpointing="none")
    assert verdict.reason == "memory" and not verdict.admitted
    over = verdict.memory_bytes - bloom.question.device_bytes
    assert over > 0 and verdict.sentence.startswith(f"OOM by {gigabytes(over)} on stage 0: activations")
    ranks = rank_memories(bloom.found.space, verdict.candidate)
    rank = fullest(ranks)
    assert rank.total_bytes == pytest.approx(verdict.memory_bytes, rel=1e-12)
    assert rank.in_flight == 12 and rank.layers == 6 and set(rank.parts) == set(PARTS)
    assert f"{gigabytes(rank.parts['activations'])} = 12 in flight × {gigabytes(rank.parts['activations'] / 12)}" in (
        verdict.sentence
    )
    assert [one.in_flight for one in ranks] == list(range(12, 0, -1))


def _place(made: Plan, candidate: object) -> int:
    for place, one in enumerate(candidates_of(made.found.space, np.arange(made.found.codes.size))):
        if one == candidate:
            return place
    raise AssertionError("not in the space")


def test_levers_say_what_they_bring_and_whether_it_is_enough(bloom: Plan) -> None:
    verdict = bloom.why(dp=8, tp=4, pp=12, micro_batch=1, zero=1, checkpointing="none")
    full = next(one for one in verdict.levers if dict(one.changed) == {"checkpointing": ("none", "full")})
    other = bloom.why(dp=8, tp=4, pp=12, micro_batch=1, zero=1, checkpointing="full")
    assert full.fits and other.admitted
    assert full.memory_delta_bytes == pytest.approx(other.memory_bytes - verdict.memory_bytes)
    assert full.step_ratio == pytest.approx(other.step_s / verdict.step_s)
    assert full.step_ratio > 1.2 and full.memory_delta_bytes < -20e9, "recomputation costs a forward: about a quarter"
    assert "checkpointing none → full: −" in full.words and "% time" in full.words
    assert [one.fits for one in verdict.levers] == sorted((one.fits for one in verdict.levers), reverse=True)


@pytest.mark.parametrize("reason", ["engine", "split", "batch", "schedule", "memory", "chunks"])
def test_no_admitted_layout_differs_in_fewer_choices_than_the_smallest_change(gpt2: Plan, reason: str) -> None:
    own = gpt2.refused.by(reason)
    admitted = candidates_of(gpt2.found.space, gpt2.found.admitted)
    for index in {0, len(own) // 2, len(own) - 1}:
        verdict = own[index]
        assert verdict.reason == reason and verdict.change is not None and verdict.sentence.endswith(".")

        def unlike(other: LayoutFields, one: LayoutFields = verdict.candidate) -> int:
            names = [name for name in ("gpus", *FREE) if name not in ("chunks", "schedule")]
            order = (one.chunks, one.schedule) != (other.chunks, other.schedule)
            return int(order) + sum(int(layout_row(one)[name] != layout_row(other)[name]) for name in names)

        least = min(unlike(other) for other in admitted)
        assert unlike(verdict.change.to) == least
        fastest = next(other for other in admitted if unlike(other) == least)  # they come in order of their step
        assert verdict.change.to == fastest
        assert code_of(gpt2.question, verdict.candidate) == ("" if reason == "memory" else reason)


def test_asking_for_a_layout_by_all_its_fields_gives_the_reason_of_the_search(gpt2: Plan) -> None:
    """A sample of the whole space: the verdict's reason is the code that the search gave."""
    flat = gpt2.found.codes.reshape(-1)
    for place in np.random.default_rng(0).choice(np.flatnonzero(flat != CODE["same"]), 40, replace=False).tolist():
        one = candidates_of(gpt2.found.space, place)[0]
        fields = {name: layout_row(one)[name] for name in ("gpus", "dp", *FREE)}
        verdict = gpt2.why(**fields)
        assert verdict.candidate == one and verdict.reason == REASONS[flat[place]]


@pytest.mark.parametrize(
    ("fields", "reason", "words"),
    [
        ({"dp": 3, "tp": 3, "pp": 3}, "gpus", "3 × 3 × 3 = 27 is not the 4 GPUs"),
        ({"tp": 3}, "gpus", "is not the 4 GPUs"),
        ({"tp": 4, "sequence_parallel": True, "engine": "deepspeed"}, "engine", "Tensor Parallelism"),
        ({"engine": "torch", "zero": 3, "pp": 2}, "engine", "torch has no ZeRO-3 with a pipeline: it has zero = 0, 2"),
        ({"pp": 4, "engine": "torch", "schedule": "1f1b"}, "stages", "6 layers, 2 to a stage, fill 3 of pp=4"),
        ({"pp": 2, "schedule": "interleaved", "chunks": 5}, "chunks", "pp × chunks = 2 × 5 = 10"),
        ({"micro_batch": 5}, "batch", "a batch of 12 is no multiple of dp × micro-batch"),
        ({"pp": 2, "schedule": "zb-h1", "micro_batch": 12}, "schedule", "at least pp = 2 micro-batches"),
        ({"offload": "parameters", "zero": 1}, "engine", "offload=parameters"),
    ],
)
def test_each_reason_is_told_with_its_numbers(tiny: Plan, fields: dict[str, object], reason: str, words: str) -> None:
    verdict = tiny.why(**fields)
    assert verdict.reason == reason and words in verdict.sentence
    assert str(verdict).splitlines()[0] == verdict.title and repr(verdict) == str(verdict)
    assert verdict.as_dict()["reason"] == reason


LONG = DecoderSize(layers=6, hidden=512, heads=8, vocabulary=1000, sequence_length=4 * LEAST_CONTEXT)


@pytest.fixture(scope="module")
def long() -> Plan:
    """A decoder whose sequences are long enough to be split."""
    return plan(LONG, "jean_zay_a100", gpus=8, batch=16, simulate=1)


@pytest.mark.parametrize(
    ("fields", "reason", "words"),
    [
        ({"cp": 2, "engine": "deepspeed"}, "engine", "deepspeed does not offer context parallelism."),
        ({"cp": 2, "engine": "torch", "zero": 0}, "engine", "with ZeRO-0, only with zero = 2, 3"),
        ({"cp": 3}, "gpus", "dp × tp × pp × cp = 1 × 1 × 1 × 3 = 3 is not the 8 GPUs"),
        ({"dp": 2, "tp": 2, "pp": 1, "cp": 4}, "gpus", "2 × 2 × 1 × 4 = 16 is not the 8 GPUs"),
        ({"dp": 1, "tp": 1, "pp": 1}, "gpus", "1 × 1 × 1 = 1 is not the 8 GPUs"),
    ],
)
def test_context_parallelism_has_its_reasons(long: Plan, fields: dict[str, object], reason: str, words: str) -> None:
    verdict = long.why(**fields)
    assert verdict.reason == reason and words in verdict.sentence


def test_context_parallelism_is_admitted_named_and_completed(long: Plan) -> None:
    assert long.why(cp=2).admitted and "cp 2" in long.why(cp=2).title
    asked = long.why(dp=2, tp=1, pp=2, micro_batch=1)  # what is left of eight GPUs splits the sequence
    assert asked.candidate.cp == 2 and asked.admitted
    assert "cp" not in long.choose(cp=1).title
    shares = long.why(cp=8)
    assert shares.admitted and "does not try" in shares.sentence, "fewer tokens than are searched"


def test_context_parallelism_needs_tokens_that_come_out_even_and_a_fused_attention(tiny: Plan) -> None:
    odd = replace(LONG, sequence_length=3 * LEAST_CONTEXT + 2)
    verdict = plan(odd, "jean_zay_a100", gpus=4, batch=16, simulate=1).why(cp=2, tp=1)
    assert verdict.reason == "sequence" and "in 2 × cp = 2 × 2 parts, 4 in all" in verdict.sentence
    written = plan(LONG, "jean_zay_a100", gpus=4, batch=16, fused_attention=False, simulate=1)
    assert all(one.cp == 1 for one in candidates_of(written.found.space, written.found.admitted))
    assert "without a fused attention" in written.why(cp=2).sentence
    assert tiny.why(cp=2).admitted and "does not try" in tiny.why(cp=2).sentence
    image = plan("coatnet_tiny", "jean_zay_a100", gpus=2, batch=4, simulate=1)
    assert "context parallelism for images" in image.why(cp=2).sentence


def test_sharing_the_sequence_out_is_a_lever() -> None:
    wide = DecoderSize(layers=24, hidden=4096, heads=32, vocabulary=32000, sequence_length=4 * LEAST_CONTEXT)
    made = plan(wide, "jean_zay_a100", gpus=8, batch=16, simulate=1)
    verdict = made.why(dp=8, tp=1, pp=1, engine="torch", zero=3, checkpointing="none", micro_batch=1)
    assert verdict.reason == "memory"
    lever = next(one for one in verdict.levers if dict(one.changed) == {"cp": (1, 2)})
    assert lever.memory_delta_bytes < 0 and lever.to.dp == 4
    assert made.why(**{name: getattr(lever.to, name) for name in ("dp", *FREE)}).memory_bytes == pytest.approx(
        verdict.memory_bytes + lever.memory_delta_bytes
    )


def test_more_percent_says_that_a_change_costs_nothing() -> None:
    assert more_percent(1.0) == more_percent(0.999) == "±0 %"
    assert more_percent(1.25) == "+25 %" and more_percent(0.9) == "−10 %"


def test_why_says_that_the_heads_must_be_divided(gpt2: Plan) -> None:
    verdict = gpt2.why(tp=2, gpus=8)
    assert verdict.reason == "split" and "25 attention heads" in verdict.sentence


def test_an_admitted_layout_says_how_far_it_is_from_the_first(tiny: Plan) -> None:
    first = tiny.why()
    assert first.admitted and first.rank == 1 and first.change is None
    last = candidates_of(tiny.found.space, tiny.found.admitted[-1])[0]
    verdict = tiny.why(**{name: getattr(last, name) for name in ("dp", *FREE)})
    assert verdict.admitted and verdict.rank == tiny.found.admitted.size and "slower than the first" in verdict.sentence
    assert verdict.step_s == pytest.approx(tiny.found.step_s[-1])


def test_why_answers_a_value_that_the_search_does_not_try() -> None:
    made = plan("gpt2", "jean_zay_a100", gpus=2, batch=20, simulate=1)
    verdict = made.why(micro_batch=5, dp=2, tp=1, pp=1, zero=0)
    assert verdict.admitted and "does not try" in verdict.sentence and 1 <= verdict.rank <= made.found.admitted.size + 1


def test_why_can_be_asked_for_a_library_that_was_not_searched(bloom: Plan) -> None:
    verdict = bloom.why(engine="deepspeed", tp=8, pp=12)
    assert verdict.reason == "engine" and "Tensor Parallelism" in verdict.sentence and verdict.change is not None
    heavy = bloom.why(engine="deepspeed", dp=128, tp=1, pp=3, zero=0)
    assert heavy.reason == "memory" and heavy.sentence.startswith("OOM by") and heavy.levers
    ranks = rank_memories(bloom.found.space, heavy.candidate)
    assert fullest(ranks).total_bytes == pytest.approx(heavy.memory_bytes, rel=1e-12)
    assert bloom.why(engine="megatron-core", tp=4, pp=12).admitted, "70 layers, embedding and logits: 72 = 12 · 6"
    uneven = bloom.why(engine="megatron-core", tp=4, pp=16)
    assert uneven.reason == "stages" and "70 layers, 5 to a stage, fill 14 of pp=16" in uneven.sentence


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tpp": 2}, "did you mean 'tp'"),
        ({"zero": 4}, "zero"),
        ({"zero": True}, "zero"),
        ({"tp": 0}, "tp must be a whole number from 1"),
        ({"tp": "2"}, "tp must be a whole number"),
        ({"schedule": "2f2b"}, "schedule"),
        ({"sequence_parallel": "maybe"}, "sequence_parallel"),
        ({"engine": "horovod"}, "engine"),
        ({"schedule": "1f1b", "chunks": 3}, "interleaved schedule has 2 chunks"),
    ],
)
def test_why_refuses_illegal_fields_in_one_sentence(tiny: Plan, fields: dict[str, object], words: str) -> None:
    with pytest.raises(LabError, match=words):
        tiny.why(**fields)


def test_plan_refuses_by_the_time_allowed_too() -> None:
    free = plan("gpt2", "jean_zay_a100", gpus=2, batch=64, simulate=1)
    hours = 1.05 * free.found.step_s[0] * 1000 / 3600
    made = plan("gpt2", "jean_zay_a100", gpus=2, batch=64, steps=1000, hours=hours, limit="qos_short", simulate=1)
    slow = made.refused.by("hours")
    assert len(slow) == free.found.admitted.size - made.found.admitted.size > 0
    verdict = slow[0]
    assert (
        "1000 steps would take" in verdict.sentence and "qos_short" in verdict.sentence and verdict.change is not None
    )
    with pytest.raises(LabError, match="ends 1000 steps within 1e-06 h .qos_short.: the fastest takes"):
        plan("gpt2", "jean_zay_a100", gpus=2, batch=64, steps=1000, hours=1e-6, limit="qos_short")


def test_why_refuses_offloading_more_than_the_host_holds_with_both_figures() -> None:
    """30 B on one node of 512 GB: 16 bytes of states and 2 of weights for each parameter are 533 GB."""
    size = DecoderSize(layers=48, hidden=7168, heads=56, vocabulary=50000, sequence_length=1024)
    made = plan(size, "jean_zay_a100", gpus=8, batch=64, simulate=1)
    verdict = made.why(engine="deepspeed", zero=3, offload="parameters", dp=8)
    assert verdict.reason == "host" and "8 ranks of a node would offload" in verdict.sentence
    assert gigabytes(18 * size.num_parameters) in verdict.sentence and gigabytes(512e9) in verdict.sentence


def test_the_list_of_reasons_is_closed_and_told_in_both_languages() -> None:
    assert set(NAMES) - {"gpus"} == set(REASONS[2:])
    parts = {*Parts.__dataclass_fields__, *PARTS}
    families = {f"family {name}" for name in FAMILIES}
    assert set(WORDING.pairs) == {*NAMES, "same", *parts, *families, *CHECKPOINTING}
    for language in ("en", "fr"):
        use_language(language)
        assert all(reason_words(name) for name in (*NAMES, "same"))


def test_refused_layouts_are_a_sequence(tiny: Plan) -> None:
    refused = tiny.refused
    assert len(refused[:3]) == 3 and next(iter(refused)).candidate == refused[0].candidate
    assert refused.nearest().reason in NAMES and repr(refused).count("\n") == len(refused.counts) - 1
    with pytest.raises(LabError, match="unknown reason"):
        refused.by("bad luck")
    with pytest.raises(LabError, match="no layout is refused for this reason"):
        refused.by("hours").nearest()
    with pytest.raises(LabError, match="OOM|batch"):
        tiny.choose(micro_batch=5)


@pytest.mark.parametrize(
    ("totals", "told"),
    [
        ((95, 90, 50), "; second, leaves 10.0 GB, 1.5 × time"),  # 90 of 100 is not marginal, 95 is
        ((95, 91, 50), "; third, leaves 50.0 GB, 2 × time"),
        ((95, 91, 99), ""),
    ],
)
def test_the_roomier_layout_is_the_fastest_that_is_not_marginal(
    totals: tuple[int, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100 GB, up to 90 are no risk; layouts stand in the order of their time: 1, 1.5 and 2 s."""
    names = ("first", "second", "third")
    monkeypatch.setattr(answer, "layout_title", lambda layout: layout)
    monkeypatch.setattr(answer, "gigabytes", lambda num_bytes: f"{num_bytes / 1e9:.1f} GB")
    monkeypatch.setattr(answer, "more_percent", lambda share: f"{share:g} ×")
    choice = SimpleNamespace(
        question=SimpleNamespace(device_bytes=100e9),
        estimated_s=1.0,
        found=SimpleNamespace(
            layout=lambda place: names[place],
            memory=SimpleNamespace(total_bytes=1e9 * np.array(totals)),
            step_s=np.array([1.0, 1.5, 2.0]),
        ),
    )
    assert answer.Choice._roomier(choice) == told  # type: ignore[arg-type]
