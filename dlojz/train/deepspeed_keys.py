"""The keys of DeepSpeed's JSON file: which there are, what type each has, and what the lab does with it.

Layer 3. Invariant: no key is passed over in silence: it is done, or left to the lab because it changes no result, or
refused with the reason.

Source: DeepSpeed 0.19 `runtime/config.py`, `runtime/constants.py`, `runtime/precision_config.py`,
`runtime/zero/config.py`, `runtime/zero/offload_config.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from dlojz.schema import LabError, one_of
from dlojz.text import say

Kind = Literal["count", "number", "switch", "word", "object", "any"]
DONE: dict[str, Kind] = {
    "train_batch_size": "count",
    "train_micro_batch_size_per_gpu": "count",
    "gradient_accumulation_steps": "count",
    "zero_optimization": "object",
    "bf16": "object",
    "fp16": "object",
    "data_types": "object",
    "optimizer": "object",
    "pipeline": "object",
    "gradient_clipping": "number",
    "zero_allow_untested_optimizer": "switch",
    "zero_force_ds_cpu_optimizer": "switch",
}
"""Keys that the lab reads, or writes itself."""
SPEED: dict[str, Kind] = {
    "steps_per_print": "number",
    "wall_clock_breakdown": "switch",
    "memory_breakdown": "switch",
    "dump_state": "switch",
    "disable_allgather": "switch",
    "disable_python_gc": "switch",
    "dataloader_drop_last": "switch",
    "log_level": "word",
    "aio": "object",
    "checkpoint": "object",
}
"""Keys that change no result: what is printed, how files are written."""
OTHER_TRAINING: dict[str, Any] = {
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "sparse_gradients": False,
    "managed_gradient_accumulation": True,
    "gradient_allreduce_op": "mean",
    "communication_data_type": None,
    "seq_parallel_communication_data_type": "fp32",
    "torch_autocast": {"enabled": False},
    "amp": {"enabled": False},
    "flops_profiler": {"enabled": False},
    "tensorboard": {"enabled": False},
    "wandb": {"enabled": False},
    "csv_monitor": {"enabled": False},
    "comms_logger": {"enabled": False},
    "elasticity": {"enabled": False},
    "autotuning": {"enabled": False},
    "data_efficiency": {"enabled": False},
    "curriculum_learning": {"enabled": False},
    "progressive_layer_drop": {"enabled": False},
    "eigenvalue": {"enabled": False},
    "hybrid_engine": {"enabled": False},
    "scheduler": None,
    "activation_checkpointing": {},
    "sparse_attention": None,
    "compression_training": {},
    "use_data_before_expert_parallelism": False,
}
"""Keys that would make another training, or another measurement, with the one value that does not."""

_PLACE: dict[str, Kind] = {
    "device": "word",
    "nvme_path": "word",
    "buffer_count": "count",
    "pin_memory": "switch",
}
SECTIONS: dict[str, dict[str, Kind]] = {
    "zero_optimization": {
        "stage": "any",
        "offload_optimizer": "object",
        "offload_param": "object",
        "cpu_offload": "switch",
        "cpu_offload_param": "switch",
        "cpu_offload_use_pin_memory": "switch",
        **dict.fromkeys(
            (
                "contiguous_gradients",
                "reduce_scatter",
                "use_multi_rank_bucket_allreduce",
                "allgather_partitions",
                "overlap_comm",
                "load_from_fp32_weights",
                "elastic_checkpoint",
                "ignore_unused_parameters",
                "legacy_stage1",
                "round_robin_gradients",
                "memory_efficient_linear",
                "override_module_apply",
                "pipeline_loading_checkpoint",
                "log_trace_cache_warnings",
                "enable_sanity_checks",
                "stage3_gather_16bit_weights_on_model_save",
                "stage3_gather_fp16_weights_on_model_save",
                "stage3_use_all_reduce_for_fetch_params",
                "stage3_allgather_sequential",
            ),
            "switch",
        ),
        **dict.fromkeys(
            (
                "reduce_bucket_size",
                "allgather_bucket_size",
                "sub_group_size",
                "stage3_prefetch_bucket_size",
                "stage3_param_persistence_threshold",
                "stage3_model_persistence_threshold",
                "stage3_max_live_parameters",
                "stage3_max_reuse_distance",
                "stage3_module_granularity_threshold",
            ),
            "number",
        ),
    },
    "offload_optimizer": {**_PLACE, "pipeline_read": "switch", "pipeline_write": "switch", "fast_init": "switch"},
    "offload_param": {**_PLACE, "buffer_size": "number", "max_in_cpu": "number"},
    "bf16": {"enabled": "switch", "immediate_grad_update": "switch", "check_grad_overflow": "switch"},
    "fp16": {
        "enabled": "switch",
        "auto_cast": "switch",
        "consecutive_hysteresis": "switch",
        **dict.fromkeys(
            ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"), "number"
        ),
    },
    "data_types": {"grad_accum_dtype": "any", "param_dtype": "any", "buffer_dtype": "any"},
    "optimizer": {"type": "word", "params": "object", "legacy_fusion": "switch"},
    "pipeline": {
        "stages": "count",
        "partition": "word",
        "activation_checkpoint_interval": "number",
        **dict.fromkeys(("seed_layers", "pipe_partitioned", "grad_partitioned", "use_reentrant"), "switch"),
    },
}


def stage_of(document: Mapping[str, Any]) -> int:
    """ZeRO stage of a document that was checked."""
    return int(document.get("zero_optimization", {}).get("stage", 0))


def check(document: Mapping[str, Any]) -> None:
    """Refuse what DeepSpeed refuses, and what would be another training than the lab's.

    Raises:
        LabError: at the first key that is unknown, has another type, or asks for what the lab does not do.
    """
    for key, value in document.items():
        if key in OTHER_TRAINING:
            _check_fixed(key, value)
        else:
            _check_value("", key, value, {**DONE, **SPEED, **dict.fromkeys(OTHER_TRAINING, "any")})
    zero = document.get("zero_optimization", {})
    for section in ("zero_optimization", "bf16", "fp16", "data_types", "optimizer", "pipeline"):
        for key, value in document.get(section, {}).items():
            _check_value(section, key, value, SECTIONS[section])
    for section in ("offload_optimizer", "offload_param"):
        for key, value in (zero.get(section) or {}).items():
            _check_value(section, key, value, SECTIONS[section])
        device = (zero.get(section) or {}).get("device", "none")
        if device not in ("none", "cpu", "nvme"):
            raise LabError(one_of(f"{section}.device", device, ["none", "cpu", "nvme"]))
    _check_stage(zero)
    if document.get("gradient_clipping", 0) != 0:
        raise LabError(
            say(
                en=f"gradient_clipping={document['gradient_clipping']:g} would be another training: the lab never "
                "clips, so that all engines can be compared; write 0.0, or leave it out.",
                fr=f"gradient_clipping={document['gradient_clipping']:g} serait un autre entraînement : le TP "
                "n’écrête jamais, pour que tous les moteurs se comparent ; écrivez 0.0, ou retirez-le.",
            )
        )


def _check_stage(zero: Mapping[str, Any]) -> None:
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise LabError(one_of("zero_optimization.stage", stage, ["0", "1", "2", "3"]))
    if (zero.get("offload_param") or {}).get("device", "none") != "none" and stage != 3:
        raise LabError(
            say(
                en=f"offload_param needs ZeRO-3, but stage {stage} was received: write stage 3, or offload_optimizer.",
                fr=f"offload_param demande ZeRO-3, mais stage {stage} a été reçu : écrivez stage 3, ou "
                "offload_optimizer.",
            )
        )


def _check_fixed(key: str, value: Any) -> None:
    """A key that the lab takes with one value only."""
    fixed = OTHER_TRAINING[key]
    if isinstance(fixed, dict) and isinstance(value, Mapping):
        same = not value if not fixed else not value.get("enabled", False)
    else:
        same = value == fixed and isinstance(value, bool) == isinstance(fixed, bool)
    if not same:
        raise LabError(
            say(
                en=f"{key} is known to DeepSpeed and not done by the lab, which keeps one training and measures it "
                "itself: leave it out.",
                fr=f"DeepSpeed connaît {key}, mais le TP ne le fait pas : il garde un seul entraînement et le mesure "
                "lui-même ; retirez cette clé.",
            )
        )


def _unknown(section: str, key: str, legal: Mapping[str, Kind]) -> str:
    """DeepSpeed has a hundred keys: the nearest one says more than all of them."""
    close = difflib.get_close_matches(key, legal, n=1)
    where = f" {section}" if section else ""
    if not close:
        usual = [name for name in legal if legal is SECTIONS.get(section) or name in DONE]
        return one_of(say(en=f"DeepSpeed key{where}", fr=f"clé{where} de DeepSpeed"), key, usual)
    return say(
        en=f"DeepSpeed has no key{where} {key!r}: did you mean {close[0]!r}?",
        fr=f"DeepSpeed n’a pas de clé{where} {key!r} : peut-être {close[0]!r} ?",
    )


def _check_value(section: str, key: str, value: Any, legal: Mapping[str, Kind]) -> None:
    where = f"{section}.{key}" if section else key
    if key not in legal:
        raise LabError(_unknown(section, key, legal))
    if value == "auto":
        raise LabError(
            say(
                en=f"{where} is 'auto', which only Hugging Face's Trainer fills in: write the value.",
                fr=f"{where} vaut 'auto', que seul le Trainer de Hugging Face remplace : écrivez la valeur.",
            )
        )
    number = isinstance(value, int | float) and not isinstance(value, bool)
    legal_type = {
        "any": True,
        "switch": isinstance(value, bool),
        "number": number and value >= 0,
        "count": number and value >= 1 and float(value).is_integer(),
        "word": isinstance(value, str),
        "object": isinstance(value, Mapping),
    }[legal[key]]
    if not legal_type:
        words = {
            "switch": ("true or false", "true ou false"),
            "number": ("a number, at least 0", "un nombre, au moins 0"),
            "count": ("a whole number, at least 1", "un nombre entier, au moins 1"),
            "word": ("a text", "un texte"),
            "object": ("an object, {…}", "un objet, {…}"),
        }[legal[key]]
        raise LabError(
            say(
                en=f"{where} must be {words[0]}, but {value!r} was received.",
                fr=f"{where} doit être {words[1]}, mais {value!r} a été reçu.",
            )
        )


def left_to_the_lab(document: Mapping[str, Any]) -> Iterator[str]:
    """Keys of a legal document that change no result and that the lab sets itself, with their section."""
    check(document)
    read = {"stage", "offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param"}
    for key in document:
        if key in SPEED:
            yield key
    for key in document.get("zero_optimization", {}):
        if key not in read:
            yield f"zero_optimization.{key}"
    for key in document.get("pipeline", {}):
        if key != "activation_checkpoint_interval":
            yield f"pipeline.{key}"  # DeepSpeed itself takes these from its PipelineModule
