"""DeepSpeed's JSON: written and read back, and refused in one sentence where DeepSpeed or the lab would not do it."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.deepspeed_json import deepspeed_json, json_left_to_the_lab, read_deepspeed_json
from dlojz.config.run_config import RunConfig

COURSE = """{
    "zero_optimization": {
        "stage":2,
        "contiguous_gradients": true,
        "overlap_comm": true,
        "reduce_scatter": true,
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 5e8
    }
}"""


@st.composite
def configurations(draw: st.DrawFn) -> RunConfig:
    """Every run of DeepSpeed that a JSON file can tell of."""
    zero = draw(st.integers(0, 3))
    offload = draw(
        st.sampled_from(["none", "activations", *["optimizer"] * (zero >= 1), *["parameters"] * (zero == 3)])
    )
    precision = draw(st.sampled_from(["fp32", "bf16", "fp16"]))
    return RunConfig.of(
        engine="deepspeed",
        zero=zero,
        dp=draw(st.integers(1, 8)),
        micro_batch=draw(st.integers(1, 64)),
        micro_batches=draw(st.integers(1, 8)),
        precision=precision,
        fp32_gradients=precision != "fp32" and draw(st.booleans()),
        offload=offload,
        sub_group_size=draw(st.sampled_from([None, 1, 10**8, 10**12])) if zero == 3 else None,
        checkpointing=draw(st.sampled_from(["none", "selective", "full"])),
    )


@given(configurations())
def test_what_is_written_is_read_back(config: RunConfig) -> None:
    """From a base that knows the model and the ranks only, as the course's command does."""
    layout = config.layout
    stays = layout.offload if layout.offload == "activations" else "none"
    base = RunConfig.of(dp=layout.dp, checkpointing=layout.checkpointing, offload=stays)
    assert read_deepspeed_json(json.dumps(deepspeed_json(config)), base) == config
    assert read_deepspeed_json(json.dumps(deepspeed_json(config)), config) == config


def test_deepspeed_itself_reads_what_is_written() -> None:
    """Each section, by the classes with which DeepSpeed checks it; they refuse unknown keys and wrong types."""
    from deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
    from deepspeed.runtime.zero.config import get_zero_config

    config = RunConfig.of(engine="deepspeed", zero=3, precision="bf16", offload="parameters", fp32_gradients=True)
    settings = deepspeed_json(config)
    zero = get_zero_config(settings)
    assert zero.stage == 3 and zero.max_reuse_distance == 0
    assert zero.offload_param.device == zero.offload_optimizer.device == "cpu"
    assert get_bfloat16_config(settings).enabled and not get_float16_config(settings).enabled
    assert settings["data_types"]["grad_accum_dtype"] == "fp32"
    assert settings["zero_force_ds_cpu_optimizer"] is False


def test_the_course_s_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "ds_config_zero2.json"
    path.write_text(COURSE)
    base = RunConfig.of(micro_batch=28, steps=200, image_size=288, dp=4)
    config = read_deepspeed_json(path, base)
    assert config == RunConfig.of(**{**base.to_dict(), "layout": base.layout}, engine="deepspeed", zero=2)
    assert read_deepspeed_json(str(path), base) == read_deepspeed_json(COURSE, base) == config
    assert json_left_to_the_lab(path) == tuple(
        f"zero_optimization.{key}" for key in json.loads(COURSE)["zero_optimization"] if key != "stage"
    )


@pytest.mark.parametrize(
    ("document", "fields"),
    [
        ({"train_batch_size": 32}, {"micro_batch": 16}),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, {"micro_batch": 4, "micro_batches": 4}),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, {"micro_batch": 4, "micro_batches": 4}),
        ({"train_micro_batch_size_per_gpu": 8}, {"micro_batch": 8}),
        ({"optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.9, 0.999]}}}, {"learning_rate": 0.1}),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, {"optimizer": "momentum"}),
        ({"optimizer": {"type": "Lamb"}}, {"optimizer": "lamb"}),
        ({"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}}, {"precision": "fp16"}),
        ({"bf16": {"enabled": False}}, {"precision": "fp32"}),
        ({"wandb": {"enabled": False}, "steps_per_print": 10, "gradient_clipping": 0}, {}),
        ({"flops_profiler": {"detailed": True}}, {}),  # DeepSpeed leaves off what is not enabled
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, {"zero": 2, "offload": "optimizer"}),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}}}, {"zero": 1}),
        ({"zero_optimization": {"stage": 3, "sub_group_size": 5e8}}, {"zero": 3, "sub_group_size": 5 * 10**8}),
        ({"zero_optimization": {"stage": 3, "sub_group_size": 1e9}}, {"zero": 3}),  # DeepSpeed's default
        ({"zero_optimization": {"stage": 2, "sub_group_size": 5e8}}, {"zero": 2}),  # which only stage 3 reads
    ],
)
def test_ordinary_files_are_understood(document: dict[str, Any], fields: dict[str, Any]) -> None:
    base = RunConfig.of(dp=2, micro_batch=16)
    assert read_deepspeed_json(json.dumps(document), base) == RunConfig.of(
        **{"dp": 2, "micro_batch": 16, "engine": "deepspeed", **fields}
    )


ZERO = "zero_optimization"
REFUSED: list[tuple[Any, str]] = [
    ({ZERO: {"stage": 5}}, "unknown zero_optimization.stage '5': legal values: 0, 1, 2, 3."),
    ({ZERO: {"stage": True}}, "legal values: 0, 1, 2, 3."),
    ({ZERO: 2}, "zero_optimization must be an object"),
    ({"zero_optimisation": {}}, "did you mean 'zero_optimization'?"),
    ({ZERO: {"stag": 2}}, "no key zero_optimization 'stag': did you mean 'stage'?"),
    ({"qqqq": 1}, "'qqqq': legal values: train_batch_size"),
    ({"bf16": {"enabled": "yes"}}, "bf16.enabled must be true or false, but 'yes' was received"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "both enabled"),
    ({"data_types": {"grad_accum_dtype": "fp64"}}, "unknown data_types.grad_accum_dtype 'fp64'"),
    ({"train_micro_batch_size_per_gpu": 0}, "must be a whole number, at least 1, but 0 was received"),
    ({"train_micro_batch_size_per_gpu": "auto"}, "only Hugging Face's Trainer fills in"),
    (
        {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
        "train_batch_size=30 is not micro-batch × accumulation × ranks = 4 × 2 × 2 = 16",
    ),
    ({"train_batch_size": 1}, "= 1 × 1 × 2 = 2"),
    ({ZERO: {"stage": 3}, "optimizer": {"type": "Lamb"}}, "ZeRO-3 gives each rank a flat share"),
    ({ZERO: {"stage": 3}, "optimizer": {"type": "OneBitAdam"}}, "cannot be sharded"),
    ({"optimizer": {"type": "Lion"}}, "not one of the lab's"),
    ({"optimizer": {"type": "AdmW"}}, "did you mean 'AdamW'?"),
    ({"optimizer": {}}, "unknown optimizer.type 'None'"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": "fast"}}}, "params.lr must be a number"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": -1}}}, "learning_rate must be greater than 0"),
    ({"optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.9]}}}, "is [0.9, 0.999] in the lab"),
    ({"optimizer": {"type": "SGD", "params": {"momentum": 0.5}}}, "is 0 / 0.9 in the lab"),
    ({"optimizer": {"type": "AdamW", "params": {"momentum": 0.5}}}, "unknown optimizer.params key 'momentum'"),
    ({"gradient_clipping": 1.0}, "gradient_clipping=1 would be another training"),
    ({"scheduler": {"type": "WarmupLR"}}, "scheduler is known to DeepSpeed and not done by the lab"),
    ({"flops_profiler": {"enabled": True}}, "flops_profiler is known to DeepSpeed"),
    ({ZERO: {"stage": 2, "offload_param": {"device": "cpu"}}}, "offload_param needs ZeRO-3"),
    ({ZERO: {"stage": 3, "offload_param": {"device": "cpu"}}}, "without offload_optimizer"),
    ({ZERO: {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "unknown offload_optimizer.device 'nvme'"),
    ({ZERO: {"stage": 3, "offload_optimizer": {"device": "gpu"}}}, "unknown offload_optimizer.device 'gpu'"),
    ({ZERO: {"stage": 3, "offload_optimizer": {"ratio": 0.5}}}, "offload_optimizer 'ratio'"),
    ({ZERO: {"offload_optimizer": {"device": "cpu"}}}, "from ZeRO-1 on"),
    ([1], "must hold a JSON object"),
]


@pytest.mark.parametrize(("document", "words"), REFUSED, ids=range(len(REFUSED)))
@pytest.mark.parametrize("language", ["en", "fr"])
def test_what_is_wrong_is_said_in_one_sentence(document: Any, words: str, language: str) -> None:
    use_language(language)
    with pytest.raises(LabError) as refused:
        read_deepspeed_json(json.dumps(document), RunConfig.of(dp=2))
    sentence = str(refused.value)
    assert "\n" not in sentence and sentence.endswith((".", "?"))
    if language == "en":
        assert words in sentence


def test_a_file_that_is_no_json_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text('{\n  "zero_optimization": {\n    "stage" 2\n  }\n}')
    with pytest.raises(LabError, match=r"broken.json: not a readable JSON document: .* line 3"):
        read_deepspeed_json(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LabError, match="cannot be read: it is no text"):
        read_deepspeed_json(path)
    with pytest.raises(LabError, match=r"missing.json cannot be read: No such file"):
        read_deepspeed_json(tmp_path / "missing.json")
    with pytest.raises(LabError, match="repeats the key 'bf16'"):
        read_deepspeed_json('{"bf16": {}, "bf16": {}}')
    path.write_text('{"a":' + " " * 2**20 + "1}")
    with pytest.raises(LabError, match="is larger than"):
        read_deepspeed_json(path)
