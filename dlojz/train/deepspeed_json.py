"""DeepSpeed's JSON file: written from a `RunConfig`, and read back to one.

Layer 3. Invariant: what is written is read back to the configuration it was written from; what is read is done as
DeepSpeed would, or refused in one sentence. No DeepSpeed is loaded.

Source: deepspeed.ai, "DeepSpeed Configuration JSON"; DeepSpeed 0.19 `runtime/config.py`, `runtime/zero/config.py` and
`runtime/zero/offload_config.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlojz.config import DEEPSPEED_BUCKET_ELEMENTS, RunConfig
from dlojz.schema import LabError, one_of, parse_json
from dlojz.text import say
from dlojz.train import deepspeed_keys as keys
from dlojz.train.deepspeed_optimizers import optimizer_fields

MAX_BYTES = 2**20
"""A configuration file is small; what is larger is another file."""


def deepspeed_json(config: RunConfig) -> dict[str, Any]:
    """DeepSpeed's configuration for this run, as a student would write it in a JSON file.

    Source: deepspeed.ai, "DeepSpeed Configuration JSON".
    """
    layout = config.layout
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches,
        "zero_optimization": {
            "stage": layout.zero,
            "reduce_bucket_size": DEEPSPEED_BUCKET_ELEMENTS,
        },
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
    return settings | _offload(config, settings["zero_optimization"])


def _offload(config: RunConfig, zero: dict[str, Any]) -> dict[str, Any]:
    """Say in `zero` what leaves the device; returns what is to be said beside it."""
    layout = config.layout
    if layout.offload not in ("optimizer", "parameters"):
        return {}
    place: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    if layout.nvme_path is not None:
        place = {"device": "nvme", "nvme_path": layout.nvme_path, "pin_memory": True}
    zero["offload_optimizer"] = place
    if layout.offload == "parameters":
        zero["offload_param"] = dict(place)
        if layout.nvme_path is not None:
            zero["offload_param"]["max_in_cpu"] = 0  # by default the first 1e9 weights stay in host memory
    return {"zero_force_ds_cpu_optimizer": False}  # it updates with our torch optimizer, on the host


def read_deepspeed_json(source: str | os.PathLike[str], base: RunConfig | None = None) -> RunConfig:
    """The run that a DeepSpeed JSON file asks for.

    Args:
        source: a path, or the JSON text itself.
        base: what the file does not say: model, data, number of ranks, and all that DeepSpeed has no word for; by
            default the lab's defaults on one process.

    Returns:
        `base` with DeepSpeed as its engine, and what the file says.

    Raises:
        LabError: if the file cannot be read, DeepSpeed would refuse it, or it asks for what the lab does not run.
    """
    return _read(source, base)[0]


def left_to_the_lab(source: str | os.PathLike[str]) -> tuple[str, ...]:
    """The keys of a DeepSpeed JSON file that are legal, change no result, and are set by the lab: bucket sizes, …

    Raises:
        LabError: as `read_deepspeed_json`.
    """
    return tuple(keys.left_to_the_lab(_document(source)))


def _read(source: str | os.PathLike[str], base: RunConfig | None) -> tuple[RunConfig, dict[str, Any]]:
    document = _document(source)
    base = base or RunConfig()
    keys.check(document)
    given = (
        _states(document) | _precision(document) | _optimizer(document) | _batch(document, base) | _pipeline(document)
    )
    if given.get("precision") == "fp32":
        given["fp32_gradients"] = False
    return RunConfig.of(**{**base.to_dict(), "layout": _deepspeed_layout(base), **given}), document


def _deepspeed_layout(base: RunConfig) -> Any:
    """The layout of `base` without what belongs to other engines."""
    layout = base.layout
    own = {"bucket_mib": None, "gradient_as_bucket_view": False, "nvme_path": None, "zero": 0, "engine": "deepspeed"}
    kept = layout.offload if layout.offload == "activations" else "none"
    return type(layout)(**{**layout.to_dict(), **own, "offload": kept})


def _document(source: str | os.PathLike[str]) -> dict[str, Any]:
    text, name = source, "the DeepSpeed configuration"
    if not isinstance(source, str) or not source.lstrip().startswith(("{", "[")):
        path = Path(source).expanduser()
        name = str(path)
        try:
            if path.stat().st_size > MAX_BYTES:
                raise LabError(
                    say(
                        en=f"{name} is larger than {MAX_BYTES} bytes, so it is no DeepSpeed configuration.",
                        fr=f"{name} dépasse {MAX_BYTES} octets : ce n’est pas une configuration de DeepSpeed.",
                    )
                )
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            if isinstance(error, LabError):
                raise
            why = getattr(error, "strerror", None) or "it is no text"
            raise LabError(
                say(
                    en=f"the DeepSpeed configuration {name} cannot be read: {why}.",
                    fr=f"la configuration DeepSpeed {name} ne peut pas être lue : {why}.",
                )
            ) from None
    try:
        document = parse_json(str(text))
    except LabError as error:
        raise LabError(f"{name}: {error}") from None
    if not isinstance(document, dict):
        raise LabError(
            say(
                en=f"{name} must hold a JSON object, {{…}}, but {type(document).__name__} was received.",
                fr=f"{name} doit contenir un objet JSON, {{…}}, mais {type(document).__name__} a été reçu.",
            )
        )
    return document


def _states(document: Mapping[str, Any]) -> dict[str, Any]:
    """ZeRO stage and offloading."""
    zero = document.get("zero_optimization", {})
    stage = int(zero.get("stage", 0))
    places = {name: _place(zero, name) for name in ("offload_optimizer", "offload_param")}
    optimizer, parameters = places["offload_optimizer"], places["offload_param"]
    if zero.get("cpu_offload"):
        optimizer = ("cpu", None)
    if zero.get("cpu_offload_param"):
        parameters = ("cpu", None)
    given: dict[str, Any] = {"zero": stage}
    if optimizer is None and parameters is None:
        return given
    if parameters is not None and optimizer != parameters:
        raise LabError(
            say(
                en="offload_param is there without an equal offload_optimizer: the lab offloads parameters together "
                "with the optimizer, so give both the same device and nvme_path, or offload_optimizer alone.",
                fr="offload_param est là sans offload_optimizer identique : le TP décharge les paramètres avec "
                "l’optimiseur. Donnez aux deux les mêmes device et nvme_path, ou offload_optimizer seul.",
            )
        )
    given["offload"] = "optimizer" if parameters is None else "parameters"
    given["nvme_path"] = (optimizer or (None, None))[1]
    return given


def _pipeline(document: Mapping[str, Any]) -> dict[str, Any]:
    """Blocks between two checkpoints of a pipeline stage: 0 checkpoints nothing, 1 every block."""
    interval = document.get("pipeline", {}).get("activation_checkpoint_interval")
    if interval is None:
        return {}
    if interval not in (0, 1):
        raise LabError(
            say(
                en=f"pipeline.activation_checkpoint_interval={interval} was received, but the lab checkpoints every "
                "block (1) or none (0).",
                fr=f"pipeline.activation_checkpoint_interval={interval} a été reçu, mais le TP met des points de "
                "contrôle à chaque bloc (1) ou à aucun (0).",
            )
        )
    return {"checkpointing": "full" if interval else "none"}


def _place(zero: Mapping[str, Any], name: str) -> tuple[str, str | None] | None:
    """Device and folder of one kind of offloading; None where there is none."""
    section = zero.get(name) or {}
    device = section.get("device", "none")
    if device == "none":
        return None
    folder = section.get("nvme_path")
    if device == "nvme" and not folder:
        raise LabError(
            say(
                en=f"{name}: device 'nvme' needs nvme_path, a folder on the disk, but none was received.",
                fr=f"{name} : device 'nvme' demande nvme_path, un dossier du disque, mais aucun n’a été reçu.",
            )
        )
    return device, (str(folder) if device == "nvme" else None)


def _precision(document: Mapping[str, Any]) -> dict[str, Any]:
    """Precision of the weights and of the gradients that are kept."""
    bf16, fp16 = (document.get(name, {}).get("enabled", False) for name in ("bf16", "fp16"))
    if bf16 and fp16:
        raise LabError(
            say(
                en="bf16 and fp16 are both enabled, which DeepSpeed refuses: enable one of them.",
                fr="bf16 et fp16 sont activés tous les deux, ce que DeepSpeed refuse : activez l’un des deux.",
            )
        )
    given: dict[str, Any] = {}
    if bf16 or fp16:
        given["precision"] = "bf16" if bf16 else "fp16"
    elif "bf16" in document or "fp16" in document:
        given["precision"] = "fp32"
    kept = document.get("data_types", {}).get("grad_accum_dtype")
    legal = (None, "fp32", "float32", *(("bf16", "bfloat16") if bf16 else ("fp16", "float16") if fp16 else ()))
    if kept not in legal:
        raise LabError(one_of("data_types.grad_accum_dtype", kept, [name for name in legal if name]))
    if bf16 or fp16:
        given["fp32_gradients"] = kept in ("fp32", "float32")
    return given


def _optimizer(document: Mapping[str, Any]) -> dict[str, Any]:
    """Update rule and its rates."""
    section = document.get("optimizer")
    return {} if section is None else optimizer_fields(section, keys.stage_of(document))


def _batch(document: Mapping[str, Any], base: RunConfig) -> dict[str, Any]:
    """Micro-batch and accumulation: of the three sizes that DeepSpeed knows, any two give the third.

    Source: DeepSpeed 0.19 `runtime/config.py`, `_set_batch_related_parameters` and `_batch_assertion`.
    """
    total = document.get("train_batch_size")
    micro = document.get("train_micro_batch_size_per_gpu")
    accumulation = document.get("gradient_accumulation_steps")
    ranks = base.layout.dp
    if total is None:
        return {
            "micro_batch": base.layout.micro_batch if micro is None else int(micro),
            "micro_batches": base.layout.micro_batches if accumulation is None else int(accumulation),
        }
    if micro is None:
        steps = 1 if accumulation is None else int(accumulation)
        micro = max(1, int(total) // (steps * ranks))
        accumulation = steps
    elif accumulation is None:
        accumulation = max(1, int(total) // (int(micro) * ranks))
    product = int(micro) * int(accumulation) * ranks
    if int(total) != product:
        raise LabError(
            say(
                en=f"train_batch_size={total} is not micro-batch × accumulation × ranks = {micro} × {accumulation} × "
                f"{ranks} = {product}: correct one of them, or leave train_batch_size out.",
                fr=f"train_batch_size={total} n’est pas micro-batch × accumulation × rangs = {micro} × {accumulation} "
                f"× {ranks} = {product} : corrigez l’un d’eux, ou retirez train_batch_size.",
            )
        )
    return {"micro_batch": int(micro), "micro_batches": int(accumulation)}
