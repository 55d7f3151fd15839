"""Read and write DeepSpeed's JSON: a run's options under DeepSpeed's keys, its optimizers included.

What is written is read back to the configuration it was written from. What is read is done as DeepSpeed would, or left
to the lab because it changes no result, or refused with the reason; an optimizer that is accepted updates exactly as
the lab's optimizer of that name. DeepSpeed itself is not loaded.

Source: deepspeed.ai, "DeepSpeed Configuration JSON"; DeepSpeed 0.19 `runtime/config.py`, `runtime/constants.py`,
`runtime/precision_config.py`, `runtime/zero/config.py`, `runtime/zero/offload_config.py` and `runtime/engine.py`
(`_configure_basic_optimizer`).
"""

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from dlojz.base.contract import parse_json
from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, one_of, say
from dlojz.config.engines import DEEPSPEED_BUCKET_ELEMENTS, SUB_GROUP_ELEMENTS
from dlojz.config.optimizers import OPTIMIZERS
from dlojz.config.run_config import RunConfig

Kind = Literal["count", "number", "switch", "word", "object", "any"]
_FILE: Final = Path(__file__).with_name("data") / "deepspeed.md"
_sentence = Sentences(_FILE)
_refused = _sentence.refused
"""A sentence about a configuration, by its key, and the error that says one."""


def _keys(kind: Kind, names: str) -> dict[str, Kind]:
    """Keys of one type, written with spaces between."""
    return dict.fromkeys(names.split(), kind)


DONE: Final[dict[str, Kind]] = {
    **_keys("count", "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps"),
    **_keys("object", "zero_optimization bf16 fp16 data_types optimizer pipeline"),
    **_keys("number", "gradient_clipping"),
    **_keys("switch", "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"),
}
"""Keys that the lab reads, or writes itself."""
SPEED: Final[dict[str, Kind]] = {
    **_keys("number", "steps_per_print"),
    **_keys("switch", "wall_clock_breakdown memory_breakdown dump_state disable_allgather disable_python_gc"),
    **_keys("switch", "dataloader_drop_last"),
    **_keys("word", "log_level"),
    **_keys("object", "aio checkpoint"),
}
"""Keys that change no result: what is printed, how files are written."""
_OFF: Final = (
    "torch_autocast amp flops_profiler tensorboard wandb csv_monitor comms_logger elasticity autotuning "
    "data_efficiency curriculum_learning progressive_layer_drop eigenvalue hybrid_engine"
)
OTHER_TRAINING: Final[dict[str, Any]] = {
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "sparse_gradients": False,
    "managed_gradient_accumulation": True,
    "gradient_allreduce_op": "mean",
    "communication_data_type": None,
    "seq_parallel_communication_data_type": "fp32",
    **{key: {"enabled": False} for key in _OFF.split()},
    "scheduler": None,
    "activation_checkpointing": {},
    "sparse_attention": None,
    "compression_training": {},
    "use_data_before_expert_parallelism": False,
}
"""Keys that would make another training, or another measurement, with the one value that does not."""

_PLACE: Final[dict[str, Kind]] = {
    **_keys("word", "device nvme_path"),
    **_keys("count", "buffer_count"),
    **_keys("switch", "pin_memory"),
}
SECTIONS: Final[dict[str, dict[str, Kind]]] = {
    "zero_optimization": {
        **_keys("any", "stage"),
        **_keys("object", "offload_optimizer offload_param"),
        **_keys("switch", "cpu_offload cpu_offload_param cpu_offload_use_pin_memory contiguous_gradients"),
        **_keys("switch", "reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions overlap_comm"),
        **_keys("switch", "load_from_fp32_weights elastic_checkpoint ignore_unused_parameters legacy_stage1"),
        **_keys("switch", "round_robin_gradients memory_efficient_linear override_module_apply"),
        **_keys("switch", "pipeline_loading_checkpoint log_trace_cache_warnings enable_sanity_checks"),
        **_keys("switch", "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save"),
        **_keys("switch", "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential"),
        **_keys("number", "reduce_bucket_size allgather_bucket_size sub_group_size stage3_prefetch_bucket_size"),
        **_keys("number", "stage3_param_persistence_threshold stage3_model_persistence_threshold"),
        **_keys("number", "stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold"),
    },
    "offload_optimizer": {**_PLACE, **_keys("switch", "pipeline_read pipeline_write fast_init")},
    "offload_param": {**_PLACE, **_keys("number", "buffer_size max_in_cpu")},
    "bf16": _keys("switch", "enabled immediate_grad_update check_grad_overflow"),
    "fp16": {
        **_keys("switch", "enabled auto_cast consecutive_hysteresis"),
        **_keys("number", "loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale"),
    },
    "data_types": _keys("any", "grad_accum_dtype param_dtype buffer_dtype"),
    "optimizer": {"type": "word", "params": "object", "legacy_fusion": "switch"},
    "pipeline": {
        "stages": "count",
        "partition": "word",
        "activation_checkpoint_interval": "number",
        **_keys("switch", "seed_layers pipe_partitioned grad_partitioned use_reentrant"),
    },
}


def check(document: Mapping[str, Any]) -> None:
    """Check a document: refuse what DeepSpeed refuses, and what would be another training than the lab's.

    Raises:
        LabError: at the first key that is unknown, has another type, or asks for what the lab does not do.
    """
    for key, value in document.items():
        if key in OTHER_TRAINING:
            _check_fixed(key, value)
        else:
            # With the keys checked above, so that a misspelt one of them is proposed.
            _check_value("", key, value, {**DONE, **SPEED, **dict.fromkeys(OTHER_TRAINING, "any")})
    zero = document.get("zero_optimization", {})
    for section in ("zero_optimization", "bf16", "fp16", "data_types", "optimizer", "pipeline"):
        for key, value in document.get(section, {}).items():
            _check_value(section, key, value, SECTIONS[section])
    for section in ("offload_optimizer", "offload_param"):
        for key, value in (zero.get(section) or {}).items():
            _check_value(section, key, value, SECTIONS[section])
        device = (zero.get(section) or {}).get("device", "none")
        if device not in ("none", "cpu"):
            raise LabError(one_of(f"{section}.device", device, ["none", "cpu"]))
    _check_stage(zero)
    if document.get("gradient_clipping", 0) != 0:
        raise _refused("clipping", clipping=document["gradient_clipping"])


def _check_stage(zero: Mapping[str, Any]) -> None:
    stage = zero.get("stage", 0)
    # True == 1 in Python, and would pass for stage 1.
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise LabError(one_of("zero_optimization.stage", stage, ["0", "1", "2", "3"]))
    if (zero.get("offload_param") or {}).get("device", "none") != "none" and stage != 3:
        raise _refused("offloaded parameters need stage 3", stage=stage)


def _check_fixed(key: str, value: Any) -> None:
    """Check a key that the lab takes with one value only."""
    fixed = OTHER_TRAINING[key]
    if isinstance(fixed, dict) and isinstance(value, Mapping):
        # An option without any content is off; one that has some, unless it is enabled.
        matches = not value if not fixed else not value.get("enabled", False)
    else:
        # False == 0 in Python: a switch in the place of a number is another value.
        matches = value == fixed and isinstance(value, bool) == isinstance(fixed, bool)
    if not matches:
        raise _refused("done by DeepSpeed alone", key=key)


def _unknown(section: str, key: str, legal: Mapping[str, Kind]) -> str:
    """Refuse an unknown key, naming the nearest of DeepSpeed's hundred keys."""
    close = difflib.get_close_matches(key, legal, n=1)
    section_text = f" {section}" if section else ""
    if not close:
        usual = [name for name in legal if legal is SECTIONS.get(section) or name in DONE]
        return one_of(say(en=f"DeepSpeed key{section_text}", fr=f"clé{section_text} de DeepSpeed"), key, usual)
    return _sentence("close key", section_text=section_text, key=key, close=close[0])


def _check_value(section: str, key: str, value: Any, legal: Mapping[str, Kind]) -> None:
    full_key = f"{section}.{key}" if section else key
    if key not in legal:
        raise LabError(_unknown(section, key, legal))
    if value == "auto":
        raise _refused("auto", full_key=full_key)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    is_legal = {
        "any": True,
        "switch": isinstance(value, bool),
        "number": number and value >= 0,
        "count": number and value >= 1 and float(value).is_integer(),
        "word": isinstance(value, str),
        "object": isinstance(value, Mapping),
    }[legal[key]]
    if not is_legal:
        raise _refused("value", full_key=full_key, kind=_sentence(f"kind {legal[key]}"), value=value)


def _left_to_the_lab(document: Mapping[str, Any]) -> Iterator[str]:
    """List the keys that change no result and that the lab sets itself, with their section."""
    check(document)
    # The keys of the section that `_states` reads.
    read_keys = {"stage", "offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param"}
    # In the other stages the key changes nothing.
    if document.get("zero_optimization", {}).get("stage") == 3:
        read_keys.add("sub_group_size")
    for key in document:
        if key in SPEED:
            yield key
    for key in document.get("zero_optimization", {}):
        if key not in read_keys:
            yield f"zero_optimization.{key}"
    for key in document.get("pipeline", {}):
        if key != "activation_checkpoint_interval":
            yield f"pipeline.{key}"  # DeepSpeed itself takes these from its PipelineModule


NAMES = {label: name for name in ("adamw", "sgd", "lamb") for label in OPTIMIZERS[name].deepspeed_names}
"""The lab's name of each of DeepSpeed's, in the order in which a refusal lists them; any case is read."""
NOT_IN_THE_LAB = ("Adagrad", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD", "OneBitAdam", "ZeroOneAdam", "OneBitLamb")
"""Optimizers that DeepSpeed has, or had, and the lab has not."""
WHOLE_LAYERS = ("Lamb", "OneBitLamb", "OneBitAdam", "ZeroOneAdam")
"""Optimizers that need whole layers (their norms, or their errors of compression), which no rank of ZeRO has."""
_ADAM = {"betas": [0.9, 0.999], "eps": 1e-8, "bias_correction": True, "amsgrad": False}
_FIXED: dict[str, dict[str, Any]] = {
    "adamw": {**_ADAM, "adam_w_mode": True},
    "lamb": {**_ADAM, "max_coeff": 10.0, "min_coeff": 0.01},
    "sgd": {"dampening": 0, "nesterov": False},
}
_HARMLESS = ("torch_adam", "foreach", "fused")
"""How the same update is computed."""


def optimizer_fields(section: Mapping[str, Any], stage: int) -> dict[str, Any]:
    """Read an `optimizer` section as fields of `RunConfig`.

    Args:
        section: with `type` and `params`, whose types were checked.

    Raises:
        LabError: for an optimizer that does not exist, that ZeRO cannot shard, or that the lab has not; for a rate
            that is unknown or that the lab fixes otherwise.
    """
    type_name = section.get("type")
    canonical_names = {name.lower(): name for name in (*NAMES, *NOT_IN_THE_LAB)}
    name = canonical_names.get(str(type_name).lower())
    if type_name is None or name is None:
        raise LabError(one_of("optimizer.type", type_name, NAMES))
    if stage and name in WHOLE_LAYERS:
        raise _refused("whole layers", name=name, stage=stage)
    if name in NOT_IN_THE_LAB:
        raise _refused("foreign optimizer", name=name, names=", ".join(NAMES))
    rule = NAMES[name]
    fields = {"optimizer": rule}
    for key, value in section.get("params", {}).items():
        fields |= _rate(rule, key, value)
    return fields


def _rate(rule: str, key: str, value: Any) -> dict[str, Any]:
    """Read one entry of `params`."""
    rate_fields = {"lr": "learning_rate", "weight_decay": "weight_decay"}
    # `type`, as True is an int for isinstance.
    if value == "auto" or (key in (*rate_fields, "momentum") and type(value) not in (int, float)):
        raise _refused("rate", key=key, value=value)
    if key in rate_fields:
        return {rate_fields[key]: value}
    if key == "momentum" and rule == "sgd":
        # The lab's rule `momentum` has 0.9.
        if value in (0, 0.9):
            return {"optimizer": "momentum" if value else "sgd"}
        raise _fixed("momentum", value, "0 / 0.9")
    if key in _HARMLESS:
        return {}
    fixed = _FIXED[rule]
    if key not in fixed:
        raise LabError(
            one_of("optimizer.params key", key, [*rate_fields, *fixed, *(["momentum"] if rule == "sgd" else [])])
        )
    if value != fixed[key]:
        raise _fixed(key, value, fixed[key])
    return {}


def _fixed(key: str, value: Any, fixed: Any) -> LabError:
    return _refused("fixed rate", key=key, fixed=fixed, value=value)


MAX_BYTES = 2**20
"""Size of the largest configuration file, in bytes."""


def deepspeed_json(config: RunConfig) -> dict[str, Any]:
    """Write DeepSpeed's configuration for this run, as a student would write it in a JSON file.

    Source: deepspeed.ai, "DeepSpeed Configuration JSON".
    """
    layout = config.layout
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches,
        "zero_optimization": {"stage": layout.zero, "reduce_bucket_size": DEEPSPEED_BUCKET_ELEMENTS},
        "bf16": {"enabled": config.precision == "bf16"},
        "gradient_clipping": 0.0,  # DeepSpeed clips at 1.0 unless told otherwise, which is another training
        "zero_allow_untested_optimizer": True,  # it wraps our torch optimizer, SGD included
    }
    types: dict[str, str] = {}
    if config.precision == "bf16":
        types["buffer_dtype"] = "bf16"  # CPU BatchNorm wants statistics in the weights' type
    if config.precision == "fp16":
        settings["fp16"] = {"enabled": True}  # with DeepSpeed's own dynamic loss scale
    if config.fp32_gradients:
        types["grad_accum_dtype"] = "fp32"
    if types:
        settings["data_types"] = types
    if layout.pp > 1:
        settings["pipeline"] = {"activation_checkpoint_interval": int(layout.checkpointing == "full")}
    if layout.zero == 3:
        # The textbook stage 3: no parameter is kept whole for being small, and each is freed after forward and
        # gathered again for backward. By default DeepSpeed keeps up to 1e9 of them for reuse.
        settings["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        }
    if layout.sub_group_size is not None:
        settings["zero_optimization"]["sub_group_size"] = layout.sub_group_size
    return settings | _offload(config, settings["zero_optimization"])


def _offload(config: RunConfig, zero: dict[str, Any]) -> dict[str, Any]:
    """Write the offloading into the section `zero`; returns the keys beside that section."""
    layout = config.layout
    if layout.offload not in ("optimizer", "parameters"):
        return {}
    zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if layout.offload == "parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {"zero_force_ds_cpu_optimizer": False}  # it updates with our torch optimizer, on the host


def read_deepspeed_json(source: str | os.PathLike[str], base: RunConfig | None = None) -> RunConfig:
    """Read the run that a DeepSpeed JSON file asks for.

    Args:
        source: a path, or the JSON text itself.
        base: what the file does not say: model, data, number of ranks, and all that DeepSpeed has no word for; by
            default the lab's defaults on one process.

    Returns:
        `base` with DeepSpeed as its engine, and what the file says.

    Raises:
        LabError: if the file cannot be read, DeepSpeed would refuse it, or it asks for what the lab does not run.
    """
    document = _document(source)
    base = base or RunConfig()
    check(document)
    fields = _states(document) | _precision(document) | _batch(document, base) | _pipeline(document)
    if (section := document.get("optimizer")) is not None:
        fields |= optimizer_fields(section, fields["zero"])
    # Where weights are fp32, gradients are so already.
    if fields.get("precision") == "fp32":
        fields["fp32_gradients"] = False
    return RunConfig.of(**{**base.to_dict(), "layout": _deepspeed_layout(base), **fields})


def json_left_to_the_lab(source: str | os.PathLike[str]) -> tuple[str, ...]:
    """List the keys of a DeepSpeed JSON file that change no result and are set by the lab: bucket sizes, …

    Raises:
        LabError: as `read_deepspeed_json`.
    """
    return tuple(_left_to_the_lab(_document(source)))


def _deepspeed_layout(base: RunConfig) -> Any:
    """Copy the layout of `base` without the fields of other engines."""
    layout = base.layout
    overrides = {"bucket_mib": None, "gradient_as_bucket_view": False, "zero": 0, "engine": "deepspeed"}
    overrides["sub_group_size"] = None
    # The lab offloads activations with any engine; of states the file decides.
    offload = layout.offload if layout.offload == "activations" else "none"
    return type(layout)(**{**layout.to_dict(), **overrides, "offload": offload})


def _document(source: str | os.PathLike[str]) -> dict[str, Any]:
    text, name = source, "the DeepSpeed configuration"
    # What begins like JSON is the text itself.
    if not isinstance(source, str) or not source.lstrip().startswith(("{", "[")):
        path = Path(source).expanduser()
        name = str(path)
        try:
            if path.stat().st_size > MAX_BYTES:
                raise _refused("large", name=name, most=MAX_BYTES)
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            if isinstance(error, LabError):  # which is a ValueError too
                raise
            reason = getattr(error, "strerror", None) or "it is no text"
            raise _refused("unreadable", name=name, reason=reason) from None
    try:
        document = parse_json(str(text))
    except LabError as error:
        raise LabError(f"{name}: {error}") from None
    if not isinstance(document, dict):
        raise _refused("no object", name=name, type_name=type(document).__name__)
    return document


def _states(document: Mapping[str, Any]) -> dict[str, Any]:
    """Read ZeRO stage, size of its sub-groups, and offloading."""
    zero = document.get("zero_optimization", {})
    stage = int(zero.get("stage", 0))
    # The second name of each is DeepSpeed's former one.
    optimizer = _is_offloaded(zero, "offload_optimizer") or bool(zero.get("cpu_offload"))
    parameters = _is_offloaded(zero, "offload_param") or bool(zero.get("cpu_offload_param"))
    fields: dict[str, Any] = {"zero": stage}
    if stage == 3 and "sub_group_size" in zero:
        elements = max(1, int(zero["sub_group_size"]))  # 0 makes a group of each parameter, as 1 does
        fields["sub_group_size"] = None if elements == SUB_GROUP_ELEMENTS else elements
    if parameters and not optimizer:
        raise _refused("parameters alone")
    if optimizer:
        fields["offload"] = "parameters" if parameters else "optimizer"
    return fields


def _pipeline(document: Mapping[str, Any]) -> dict[str, Any]:
    """Read the blocks between two checkpoints of a pipeline stage: 0 checkpoints nothing, 1 every block."""
    interval = document.get("pipeline", {}).get("activation_checkpoint_interval")
    if interval is None:
        return {}
    if interval not in (0, 1):
        raise _refused("interval", interval=interval)
    return {"checkpointing": "full" if interval else "none"}


def _is_offloaded(zero: Mapping[str, Any], name: str) -> bool:
    """Whether one kind of state is offloaded."""
    return bool((zero.get(name) or {}).get("device", "none") != "none")


def _precision(document: Mapping[str, Any]) -> dict[str, Any]:
    """Read the precision of the weights and of the gradients that are kept."""
    bf16, fp16 = (document.get(name, {}).get("enabled", False) for name in ("bf16", "fp16"))
    if bf16 and fp16:
        raise _refused("two precisions")
    # What the file does not say is left to `base`.
    fields: dict[str, Any] = {}
    if bf16 or fp16:
        fields["precision"] = "bf16" if bf16 else "fp16"
    elif "bf16" in document or "fp16" in document:
        fields["precision"] = "fp32"
    gradient_type = document.get("data_types", {}).get("grad_accum_dtype")
    # DeepSpeed accumulates in fp32, or in the type of the weights.
    legal = (None, "fp32", "float32", *(("bf16", "bfloat16") if bf16 else ("fp16", "float16") if fp16 else ()))
    if gradient_type not in legal:
        raise LabError(one_of("data_types.grad_accum_dtype", gradient_type, [name for name in legal if name]))
    if bf16 or fp16:
        fields["fp32_gradients"] = gradient_type in ("fp32", "float32")
    return fields


def _batch(document: Mapping[str, Any], base: RunConfig) -> dict[str, Any]:
    """Read micro-batch and accumulation: of the three sizes that DeepSpeed knows, any two give the third.

    Source: DeepSpeed 0.19 `runtime/config.py`, `_set_batch_related_parameters` and `_batch_assertion`.
    """
    total = document.get("train_batch_size")
    micro = document.get("train_micro_batch_size_per_gpu")
    accumulation = document.get("gradient_accumulation_steps")
    # Data-parallel ranks: what DeepSpeed divides the batch by.
    ranks = base.layout.dp
    if total is None:
        return {
            "micro_batch": base.layout.micro_batch if micro is None else int(micro),
            "micro_batches": base.layout.micro_batches if accumulation is None else int(accumulation),
        }
    if micro is None:
        steps = 1 if accumulation is None else int(accumulation)
        # DeepSpeed rounds down; the product is compared with the total below.
        micro = max(1, int(total) // (steps * ranks))
        accumulation = steps
    elif accumulation is None:
        accumulation = max(1, int(total) // (int(micro) * ranks))
    product = int(micro) * int(accumulation) * ranks
    if int(total) != product:
        raise _refused("batch", total=total, micro=micro, accumulation=accumulation, ranks=ranks, product=product)
    return {"micro_batch": int(micro), "micro_batches": int(accumulation)}
