import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.fields import explicit_bounds
from dlojz.config.layout import Layout
from dlojz.config.run_config import RunConfig, vocabulary_note
from dlojz.config.schedules import meets, settled_step
from dlojz.prediction.forecast import forecast
from dlojz.runnable import check_runnable


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dp": 0}, "dp must be at least 1, but 0"),
        ({"micro_batch": -4}, "micro_batch must be at least 1, but -4"),
        ({"zero": 4}, "zero must be at most 3, but 4"),
        ({"engine": "deepsped"}, "did you mean 'deepspeed'"),
        ({"engine": "torch", "zero": 1, "dp": 2}, "engine 'torch' has no ZeRO-1.*use engine 'deepspeed'"),
        ({"engine": "single", "zero": 3}, "has no ZeRO stage"),
        ({"engine": "single", "dp": 2}, "one process"),
        ({"zero": 2, "pp": 2, "engine": "deepspeed"}, "use zero=1 or zero=0 with a pipeline"),
        ({"schedule": "1f1b"}, "needs a pipeline"),
        ({"sequence_parallel": True}, "needs tensor parallelism"),
        (
            {"offload": "optimizer"},
            "offload='optimizer' is DeepSpeed's, from ZeRO-1 on.*use engine='deepspeed', zero=1",
        ),
        ({"offload": "optimizer", "engine": "deepspeed", "dp": 2}, "from ZeRO-1 on.*use engine='deepspeed', zero=1"),
        ({"offload": "parameters", "zero": 3, "dp": 2}, "from ZeRO-3 on.*use engine='deepspeed', zero=3"),
        ({"dp": 2, "zero": 3, "bucket_mib": 1}, "FSDP2 has no such buckets: use it with DDP"),
        ({"dp": 2, "engine": "deepspeed", "bucket_mib": 1}, "DeepSpeed ZeRO-0 has no such buckets"),
        ({"bucket_mib": 4}, "one process has no such buckets.*dp=2 or more"),
        ({"dp": 2, "bucket_mib": 0}, "bucket_mib must be at least 0.001, but 0"),
        ({"dp": 2, "engine": "by_hand", "gradient_as_bucket_view": True}, "option of DDP, but DDP by hand"),
        ({"dp": 6, "ep": 4}, r"ep=4 does not divide dp=6: use ep=2, ep=3, ep=6\.$"),
        ({"dp": 5, "ep": 2}, r"ep=2 does not divide dp=5: use ep=5\.$"),
        ({"zeros": 2}, "unknown key 'zeros': did you mean 'zero'.*micro_batches"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(LabError, match=words) as caught:
        Layout(**fields)
    assert "\n" not in str(caught.value)
    assert "validation error" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": "coatnet_9"}, "coatnet_9.*coatnet_0"),
        ({"image_size": 50}, "50"),
        ({"data": "cifar"}, "unknown data set 'cifar'.*digits"),
        ({"data": "text"}, "coatnet_tiny reads image"),
        ({"precision": "fp8"}, "unknown precision 'fp8'"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": -1.0}, "learning_rate must be greater than 0"),
        ({"steps": 10**400}, "steps"),
        ({"lr": 0.1}, "unknown key 'lr'"),
        ({"update": "fused", "optimizer": "lamb"}, "'fused' is a form of sgd, momentum, adamw, but optimizer='lamb'"),
        ({"update": "in_backward", "engine": "deepspeed"}, "'in_backward' is an option of the engines torch"),
        (
            {"library": "megatron", "model": "gpt_tiny", "engine": "deepspeed"},
            "engine='deepspeed', zero=0 was received.*use engine='torch', zero=0, engine='by_hand', zero=0",
        ),
        ({"model": "vit_tiny", "tp": 3}, r"the 4 attention heads of vit_tiny: use tp=2, tp=4\.$"),
        ({"model": "llama_tiny", "tp": 4}, r"the 2 key-value heads of llama_tiny: use tp=2\.$"),
        ({"model": "coatnet_tiny", "tp": 3}, r"the 8 channels of the stem of coatnet_tiny: use tp=2, tp=4\.$"),
        ({"model": "coatnet_tiny", "tp": 8}, r"the 4 attention heads of coatnet_tiny: use tp=2, tp=4\.$"),
        ({"layout": {"dp": "two"}}, "layout.*dp|dp"),
        *(
            (
                {"model": "gpt_tiny", "tp": 4, "sequence_parallel": True, "sequence_length": length},
                rf"sequence_length={near}\b",
            )
            for length, near in ((63, 60), (3, 4))
        ),
    ],
)
def test_a_run_that_cannot_be_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(LabError, match=words) as caught:
        RunConfig.of(**fields)
    assert "\n" not in str(caught.value)


def test_the_processes_must_be_the_product_of_the_degrees() -> None:
    layout = Layout(dp=3)
    layout.check_processes(3)
    with pytest.raises(LabError, match=r"dp=3, tp=1, pp=1 needs 3 processes.*2 were received: use dp=2"):
        layout.check_processes(2)
    with pytest.raises(LabError, match="use 4 processes"):
        Layout(tp=4).check_processes(3)
    with pytest.raises(LabError, match="use dp=1"):
        Layout(dp=2, tp=4).check_processes(4)


def test_what_a_run_uses_is_shown_without_what_it_leaves_alone() -> None:
    """Zeros are values, and stay; the same configuration comes back from it."""
    config = RunConfig.of(dp=2, bucket_mib=4)
    shown = config.in_use()
    assert shown["seed"] == shown["layout"]["zero"] == 0
    assert shown["layout"]["bucket_mib"] == 4
    assert not {"sequence_length", "keep_weights", "update", "experts", "curriculum_multiple"} & set(shown)
    assert not {"schedule", "offload", "ep"} & set(shown["layout"])
    assert RunConfig(**shown) == config


def test_what_is_left_out_is_filled_in_so_that_equal_runs_have_equal_hashes() -> None:
    bare, spelt = RunConfig.of(), RunConfig.of(model="coatnet_tiny", data="digits", image_size=64, dp=1)
    assert bare == spelt
    assert bare.hash == spelt.hash
    assert bare.hash != RunConfig.of(dp=2).hash
    assert RunConfig.of(model="gpt_tiny").data == "text"
    assert RunConfig.of(model="gpt_tiny").image_size is None


def test_the_global_batch_is_derived() -> None:
    assert Layout(dp=4, micro_batch=3, micro_batches=5).global_batch == 60
    assert "global_batch" not in Layout().to_dict()


def test_the_strategy_follows_from_the_degrees() -> None:
    strategies = [
        Layout(),
        Layout(dp=2),
        Layout(dp=2, engine="by_hand"),
        Layout(dp=2, zero=3),
        Layout(dp=2, engine="deepspeed", zero=1),
    ]
    assert [layout.strategy for layout in strategies] == ["single", "ddp", "by_hand", "fsdp2", "zero-1"]
    assert [layout.title for layout in strategies] == [
        "one process",
        "DDP",
        "DDP by hand",
        "FSDP2",
        "DeepSpeed ZeRO-1",
    ]


def test_only_what_differs_from_the_defaults_names_a_run() -> None:
    """A field that comes later leaves the names of older runs as they are; another bucket is another run."""
    named = "c6fc73cf219c"
    assert RunConfig.of(dp=2).hash == named
    assert RunConfig.of(dp=2, bucket_mib=None, gradient_as_bucket_view=False, seed=0).hash == named
    older = RunConfig.of(dp=2).to_dict()
    for later in ("update", "curriculum", "library"):
        del older[later]
    for later in ("ep", "bucket_mib", "gradient_compression"):
        del older["layout"][later]
    assert RunConfig.from_dict(older).hash == named
    hashes = {
        RunConfig.of(dp=2, **fields).hash
        for fields in ({}, {"bucket_mib": 25}, {"bucket_mib": 1}, {"gradient_as_bucket_view": True}, {"seed": 1})
    }
    assert len(hashes) == 5


layouts = st.builds(
    Layout,
    dp=st.integers(1, 64),
    engine=st.just("deepspeed"),
    zero=st.integers(0, 3),
    micro_batch=st.integers(1, 512),
    micro_batches=st.integers(1, 64),
    checkpointing=st.sampled_from(["none", "selective", "full"]),
)


@given(layout=layouts, seed=st.integers(0, 2**31 - 1), rate=st.floats(1e-9, 10))
@settings(max_examples=100)
def test_json_there_and_back(layout: Layout, seed: int, rate: float) -> None:
    config = RunConfig(layout=layout, seed=seed, learning_rate=rate)
    assert RunConfig.from_json(config.to_json()) == config
    assert RunConfig.from_json(config.to_json()).hash == config.hash


@given(
    st.dictionaries(
        st.sampled_from([*RunConfig.model_fields, "x"]), st.none() | st.integers() | st.text() | st.floats()
    )
)
@settings(max_examples=200)
def test_no_document_gives_anything_but_a_config_or_a_sentence(document: dict[str, Any]) -> None:
    try:
        config = RunConfig.from_json(json.dumps(document))
    except LabError as error:
        assert str(error)
    else:
        assert RunConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("en", "tp=2 is not run with engine 'deepspeed', which trains no tensor-parallel layers: use"),
        ("fr", "tp=2 ne s’exécute pas avec engine='deepspeed', qui n’entraîne pas lui-même de couches Tensor Parallel"),
    ],
)
def test_tensor_parallelism_under_deepspeed_is_forecast_and_not_run(language: Any, words: str) -> None:
    """As Megatron-DeepSpeed lays it out: `dlojz memory` says what it holds; a run is refused before it starts."""
    config = RunConfig.of(model="gpt_tiny", tp=2, pp=2, dp=2, zero=1, engine="deepspeed", micro_batches=4)
    assert forecast(config).memory.optimizer_bytes
    use_language(language)
    with pytest.raises(LabError) as refusal:
        check_runnable(config)
    assert str(refusal.value).startswith(words) and "\n" not in str(refusal.value)


def test_fp32_gradients_are_an_option_of_deepspeed_in_half_precision() -> None:
    with pytest.raises(LabError, match="fp32_gradients is an option of DeepSpeed in bf16 or fp16"):
        RunConfig.of(fp32_gradients=True)
    kept = RunConfig.of(fp32_gradients=True, engine="deepspeed", precision="bf16")
    assert kept.hash != RunConfig.of(engine="deepspeed", precision="bf16").hash


@pytest.mark.parametrize("layout", [{}, {"dp": 2, "zero": 2}, {"dp": 2, "zero": 1, "engine": "deepspeed"}])
def test_a_library_has_any_of_its_layouts(layout: dict[str, Any]) -> None:
    assert RunConfig.of(library="accelerate", **layout).library == "accelerate"


@pytest.mark.parametrize(
    ("fields", "first_step", "settled"),
    [
        ({"steps": 10}, 0, 2),  # the third of a run, or of an attempt
        ({"steps": 10}, 5, 7),
        ({"steps": 2}, 0, 1),
        ({"steps": 10, "dp": 2, "engine": "by_hand", "optimizer": "one_bit_adam", "warmup_steps": 4}, 0, 5),
        ({"steps": 40, "dp": 2, "gradient_compression": "powersgd"}, 0, 5),  # the first 4 are sent in full
        ({"steps": 40, "dp": 2, "gradient_compression": "powersgd"}, 5, 10),
        # Replicas meet after 8 steps behind the 3 of the warm-up: 3 to 10.
        (
            {
                "steps": 40,
                "dp": 2,
                "engine": "by_hand",
                "optimizer": "local_sgd",
                "local_steps": 8,
                "warmup_steps": 3,
            },
            0,
            10,
        ),
    ],
)
def test_the_step_that_counts_is_one_that_sends_what_later_ones_send(
    fields: dict[str, Any], first_step: int, settled: int
) -> None:
    assert settled_step(RunConfig.of(**fields), first_step) == settled


def test_replicas_meet_every_h_steps_behind_the_warm_up_and_at_the_end() -> None:
    assert [step for step in range(12) if meets(step, 3, 2, 12)] == [4, 7, 10, 11]


def test_a_fourth_of_the_steps_warms_a_compressing_optimizer_up() -> None:
    fields = {"dp": 2, "engine": "by_hand", "optimizer": "one_bit_adam"}
    assert [RunConfig.of(**fields, steps=steps).warmup_steps for steps in (2, 40)] == [1, 10]


def test_a_list_of_first_blocks_is_read_or_is_none() -> None:
    assert explicit_bounds("at:3, 7") == (3, 7)
    assert explicit_bounds("at:3,x") == ()
    assert explicit_bounds("flops") is None


def test_powersgd_has_1024_columns_at_most() -> None:
    fields = {"dp": 2, "gradient_compression": "powersgd"}
    assert RunConfig.of(**fields, powersgd_rank=1024).layout.powersgd_rank == 1024
    with pytest.raises(LabError, match="1024"):
        RunConfig.of(**fields, powersgd_rank=1025)


@pytest.mark.parametrize(
    ("fields", "title"),
    [
        ({"dp": 2}, "DDP"),
        ({"dp": 2, "gradient_compression": "powersgd", "powersgd_rank": 4}, "DDP + PowerSGD-4"),
        ({"dp": 2, "zero": 2}, "FSDP2 (ZeRO-2)"),
        ({"pp": 2, "engine": "by_hand"}, "pipeline 1f1b × 2 (by hand)"),
        ({"dp": 2, "tp": 2, "engine": "by_hand"}, "TP × 2 (by hand), DDP by hand"),
        ({"dp": 4, "ep": 2, "engine": "by_hand"}, "DDP by hand, EP × 2"),
    ],
)
def test_a_layout_has_the_name_that_a_person_gives_to_it(fields: dict[str, Any], title: str) -> None:
    assert Layout(**fields).title == title


def test_the_degrees_are_told_with_those_of_experts_where_there_are_some() -> None:
    assert Layout(dp=4, tp=2, engine="by_hand").degrees == "dp=4, tp=2, pp=1"
    assert Layout(dp=4, ep=2, engine="by_hand").degrees == "dp=4, tp=1, pp=1, ep=2"


@pytest.mark.parametrize(("steps", "whole_after"), [(1, 1), (2, 1), (20, 10), (21, 10)])
def test_a_curriculum_is_whole_after_half_of_the_run(steps: int, whole_after: int) -> None:
    config = RunConfig.of(model="gpt_tiny", curriculum="linear", steps=steps)
    assert config.curriculum_steps == whole_after


def test_the_vocabulary_that_a_text_model_trains_with_is_said() -> None:
    own, other = (vocabulary_note(RunConfig.of(model="gpt2", **fields)) for fields in ({}, {"data": "text"}))
    assert own == "gpt2 is trained with its own vocabulary of 50,257 tokens, on random ones (data=synthetic)."
    assert other.startswith("gpt2 is trained with the 256 tokens of data=text, not with its whole vocabulary of 50,257")
    assert vocabulary_note(RunConfig.of(model="gpt_tiny")) == vocabulary_note(RunConfig.of(model="vit_tiny")) == ""


@pytest.mark.parametrize(
    ("name", "value"), [("nvme_path", "/nvme"), ("async_tensor_parallel", True), ("curriculum_root", 2)]
)
def test_run_config_reads_over_a_former_field_of_a_record(name: str, value: object) -> None:
    config = RunConfig.of(dp=2, zero=3, engine="deepspeed", offload="parameters")
    content = config.to_dict()
    assert name not in content["layout"]
    content["layout"][name] = content[name] = value  # of the layout in some versions, of the run in others
    assert RunConfig.from_dict(content) == config
    assert RunConfig.from_dict(content).hash == config.hash
    with pytest.raises(LabError, match=f"unknown key '{name}'"):
        RunConfig.of(**{name: value})
