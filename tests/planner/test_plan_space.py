"""The space: every combination once, each with the reason that a plain reading of the rules gives it."""

from collections import Counter
from dataclasses import fields

import numpy as np
import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.cost_model import Layouts, calibration, estimate
from dlojz.cost_model.layouts import usual_kernel
from dlojz.hardware import cluster
from dlojz.hardware.decoder_size import DecoderSize
from dlojz.hardware.evidence import table
from dlojz.hardware.gpus import ATTENTION_KERNELS
from dlojz.planner.answer import Plan
from dlojz.planner.ask import plan
from dlojz.planner.planned_memory import other_loss_bytes
from dlojz.planner.planned_model import OFFERS, Subject, chosen, published, subject
from dlojz.planner.question import Question, software_columns
from dlojz.planner.space import (
    CODE,
    LEAST_CONTEXT,
    REASONS,
    PlannedLayout,
    candidates_of,
    columns_of,
    degrees_of,
    divisors,
    planned_layout,
    reason_counts,
    space_of,
)


def question_of(
    model: Subject, gpus: tuple[int, ...], batch: int, engines: tuple[str, ...], fused: bool = True
) -> Question:
    return Question(model, cluster("selene"), calibration("a100"), batch, gpus, "bf16", engines, fused)


def _plainly(one: PlannedLayout, size: DecoderSize, batch: int, fused: bool) -> str:  # noqa: PLR0911 - one rule a line
    """The same rules, one layout at a time and without arrays."""
    offer = OFFERS[one.engine]
    if one.sequence_parallel and one.tp == 1:
        return "same"
    if one.schedule != "1f1b" and one.pp == 1:
        return "same"
    if one.context_exchange != "ring" and one.cp == 1:
        return "same"
    if one.zero and one.dp * one.cp == 1 and one.offload == "none":
        return "same"
    wrong = [
        one.zero not in (offer.zero_pipeline if one.pp > 1 else offer.zero),
        one.pp > 1 and one.schedule not in offer.schedules,
        one.checkpointing not in offer.checkpointing,
        one.schedule == "zb-h1" and one.checkpointing != "none",
        one.tp > 1 and not offer.tensor[0],
        one.sequence_parallel and not offer.sequence,
        one.cp > 1 and not (fused and one.zero in offer.context),
        one.cp > 1 and one.context_exchange not in offer.exchanges,
        one.offload != "none" and (one.tp > 1 or one.pp > 1),
        one.offload != "none" and one.zero < offer.offload.get(one.offload, 9),
    ]
    if any(wrong):
        return "engine"
    if any(number % one.tp for number in (size.heads, size.kv_heads, size.mlp_width)):
        return "split"
    if one.context_exchange == "all_to_all" and size.kv_heads % (one.tp * one.cp):
        return "split"
    parts = (one.tp if one.sequence_parallel else 1) * (2 * one.cp if one.cp > 1 else 1)
    if size.sequence_length % parts:
        return "sequence"
    stages = [0] * one.pp
    each = -(-size.layers // one.pp)
    for layer in range(size.layers):
        stages[layer // each] += 1
    parts = one.pp * (one.chunks or 1)
    counted = [more for more in ((0, 1, 2) if offer.slots else (0,)) if (size.layers + more) % parts == 0]
    if 0 in stages and not any(counted):
        return "stages"
    if parts > one.pp and not counted:
        return "chunks"
    if batch % (one.dp * one.micro_batch):
        return "batch"
    if (one.chunks or 1) > 1 and one.micro_batches % one.pp:
        return "schedule"
    if one.schedule == "zb-h1" and one.micro_batches < one.pp:
        return "schedule"
    return ""


@pytest.mark.parametrize(
    ("size", "gpus", "batch", "fused"),
    [
        (DecoderSize(6, 96, 6, 100, 32, kv_heads=2), (4,), 12, True),
        (DecoderSize(8, 64, 4, 100, 30), (8,), 16, True),
        (DecoderSize(5, 48, 3, 100, 32), (1, 6), 7, True),
        (DecoderSize(6, 96, 6, 100, 4 * LEAST_CONTEXT), (12,), 6, True),  # cp = 1, 2, 3, 4, of which 3 divides nothing
        (DecoderSize(6, 96, 6, 100, 4 * LEAST_CONTEXT), (4,), 6, False),
    ],
)
def test_every_code_is_that_of_the_rules_read_plainly(
    size: DecoderSize, gpus: tuple[int, ...], batch: int, fused: bool
) -> None:
    names = ("megatron-core", "megatron-deepspeed", "deepspeed", "torch")
    space = space_of(question_of(subject(size), gpus, batch, names, fused))
    everything = candidates_of(space, np.arange(space.codes.size))
    found = [REASONS[code] for code in space.codes.reshape(-1).tolist()]
    plainly = [_plainly(one, size, batch, fused) for one in everything]
    assert all(one.dp * one.tp * one.pp * one.cp == one.world_size for one in everything)
    assert found == plainly
    assert len(set(everything)) == len(everything), "no layout is there twice"
    assert {"", "engine", "batch"} <= set(found)
    counted = Counter(reason for reason in plainly if reason not in ("", "same"))
    assert reason_counts(space.codes) == counted


def test_what_is_given_to_the_cost_model_is_what_the_candidate_says(tiny: Plan) -> None:
    places = tiny.found.admitted[::7]
    by_space, by_words = (
        tiny.found.space.cost_layouts(tiny.found.space.columns(places)),
        tiny.found.space.cost_layouts(columns_of(candidates_of(tiny.found.space, places))),
    )
    names = [field.name for field in fields(by_space) if field.name != "precision"]
    for name in names:
        assert (getattr(by_space, name) == getattr(by_words, name)).all(), name
    assert (by_space.global_batch == 12).all() and (by_space.gpus == 4).all()


def test_degrees_of_all_ways_to_deal_gpus_out() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(1) == [1]
    found = degrees_of(subject("gpt2"), [12], 4, {"micro_batch": (1,)})
    ways = {(dp, tp, pp) for dp in divisors(12) for tp in divisors(12) for pp in divisors(12) if dp * tp * pp == 12}
    assert set(zip(found["dp"].tolist(), found["tp"].tolist(), found["pp"].tolist(), strict=True)) == ways


@pytest.mark.parametrize(("tokens", "degrees"), [(2048, {1}), (16383, {1}), (16384, {1, 2}), (65536, {1, 2, 3, 4, 6})])
def test_context_parallelism_is_searched_where_every_rank_keeps_enough_tokens(tokens: int, degrees: set[int]) -> None:
    found = degrees_of(subject("megatron-18b", sequence_length=tokens), [12], 4, {"micro_batch": (1,)})
    assert set(found["cp"].tolist()) == degrees and min(tokens // one for one in degrees) >= min(tokens, LEAST_CONTEXT)
    assert set(degrees_of(subject("coatnet_tiny"), [12], 4, {})["cp"].tolist()) == {1}


def test_chosen_libraries_are_those_that_can_run_the_model() -> None:
    assert chosen(None, catalogue=True) == ("deepspeed", "torch", "by_hand")
    assert "by_hand" not in chosen(None, catalogue=False)
    assert chosen("torch, deepspeed", catalogue=True) == ("deepspeed", "torch")
    with pytest.raises(LabError, match="did you mean 'deepspeed'"):
        chosen("deepsped", catalogue=True)
    with pytest.raises(LabError, match="by_hand"):
        chosen("by_hand", catalogue=False)


def test_published_models_have_their_published_sizes() -> None:
    assert "megatron-1t" in published() and "bloom-176b" in published()
    for name in published():
        assert subject(name).size is not None
    assert subject("megatron-1t").num_parameters == pytest.approx(1.008e12, rel=1e-3)
    assert subject("bloom-176b").num_parameters == pytest.approx(176.2e9, rel=2e-3)
    assert subject("Megatron_1T").name == "megatron-1t"
    assert subject("megatron-1t", sequence_length=4096).sequence_length == 4096
    with pytest.raises(LabError, match="reads text"):
        subject("megatron-1t", image_size=224)
    with pytest.raises(LabError, match="did you mean 'megatron-1t'"):
        subject("megatron-1tt")


def test_an_image_model_is_split_by_what_the_catalogue_says() -> None:
    image = subject("coatnet_tiny")
    assert image.is_image and [image.split_conflict(tp) for tp in (1, 2)] == ["", ""]
    assert "tp=7" in image.split_conflict(7)
    space = space_of(question_of(image, (4,), 8, ("torch", "by_hand", "deepspeed")))
    ones = [one for one in candidates_of(space, np.flatnonzero(space.codes.reshape(-1) == 0)) if one.tp > 1]
    assert {one.engine for one in ones} == {"by_hand"}, "convolutions are split by hand alone"
    assert CODE["same"] == 1


def test_a_conflict_is_told_in_the_language_of_who_asks() -> None:
    """One after the other: what is remembered of one reader is not given to the next."""
    image = subject("coatnet_tiny")
    told = []
    for name in ("en", "fr", "en"):
        use_language(name)
        told.append(image.split_conflict(7))
    assert told[0] == told[2] != told[1]
    assert "ne divise pas" in told[1]


def test_cost_layouts_have_the_software_of_a_measured_row() -> None:
    """NeMo's Llama 2 70B as a question for megatron-core: the planner's seconds and bytes are those of `validate`."""
    row = next(one for one in table("nemo-h100") if one.row == "nemo-h100/LLAMA2-70B-64")
    site, profile = cluster(row.cluster), calibration("h100")
    said = "torch=2.6 transformer_engine=1.13 fused_optimizer=yes"
    columns = software_columns(said, site.gpu) | {"gradient_bytes": 2}  # the scripts of these runs say so
    question = Question(
        subject(row.size), site, profile, row.global_batch, (64,), "fp8", ("megatron-core",), True, columns=columns
    )
    space = space_of(question)
    names = ("dp", "tp", "pp", "cp", "zero", "chunks", "schedule", "micro_batch")
    layout = planned_layout(
        **{name: getattr(row, name) for name in names}, micro_batches=row.micro_batches, sequence_parallel=True,
        engine="megatron-core",
    )  # fmt: skip
    planned, measured = space.cost_layouts(columns_of([layout])), Layouts.from_measurements([row])
    assert ATTENTION_KERNELS[planned.attention_kernel[0]] == row.attention_kernel == "cudnn"
    for name in ("torch", "transformer_engine", "fused_optimizer", "tensor_overlap", "gather_overlap"):
        assert getattr(planned, name).tolist() == getattr(measured, name).tolist(), name
    work = question.subject.workload
    both = [estimate(work, site, layouts, profile) for layouts in (planned, measured)]
    assert both[0].step_s == pytest.approx(both[1].step_s) and both[0].memory_bytes == pytest.approx(
        both[1].memory_bytes
    )
    # torch's own attention stays FlashAttention-2 on this GPU, and Transformer Engine's is that on A100.
    assert usual_kernel("torchtitan", site.gpu) == usual_kernel("megatron-core", cluster("selene").gpu) == "flash2"


def test_software_columns_reads_facts_and_refuses_others() -> None:
    gpu = cluster("selene").gpu
    assert software_columns("torch=2.0 fused_loss=yes", gpu) == {"torch": 200, "fused_loss": 1}
    assert software_columns("transformer_engine=none,attention_kernel=flash1", gpu)["transformer_engine"] == 0
    for text, refused in (
        ("torsh=2.0", "unknown software 'torsh': did you mean 'torch'"),
        ("torch=new", "torch takes a version such as torch=2.1, but 'torch=new' was received"),
        ("attention_kernel=cudnn", r"unknown attention_kernel \(A100 80 GB\) 'cudnn'"),
        ("fused_loss=maybe", "unknown fused_loss 'maybe'"),
    ):
        with pytest.raises(LabError, match=refused):
            software_columns(text, gpu)


def test_other_loss_bytes_are_what_the_answer_says() -> None:
    """Llama-3-8B's sizes on few GPUs: 10 bytes per logit pass by pass, 4 in one kernel, at the loss."""
    size = DecoderSize(2, 1024, 8, 128256, 8192)
    answer = plan(size, "selene", gpus=8, batch=8, engines="megatron-core", simulate=0)
    needs = [plan(size, "selene", 8, 8, engines="megatron-core", simulate=0, software=f"fused_loss={flag}").best
             for flag in ("no", "yes")]  # fmt: skip
    other = other_loss_bytes(answer.found.space, answer.best.candidate)
    assert answer.best.memory_bytes == needs[0].memory_bytes > (other or 0)
    assert "fused_loss=yes" in dict(answer.best.lines())["software"] and "fused_loss=no" in needs[1].software_words
