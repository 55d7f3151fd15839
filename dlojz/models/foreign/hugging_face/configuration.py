"""Models of Hugging Face's transformers from a config.json: the class of `architectures`, its inputs, its loss.

A configuration is read as data; only classes that transformers itself has are built, with random weights in fp32. Of a
language model the loss is the cross-entropy of its logits; of classes of sequences, tokens or answers that of their
labels; every other class is given example inputs with labels, and computes its loss itself.
"""

import difflib
import importlib
import inspect
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from dlojz.base.language import integer, say
from dlojz.models.catalogue import Family
from dlojz.models.foreign.elsewhere import Adapters
from dlojz.models.foreign.example import Example, shapes_text
from dlojz.models.foreign.hugging_face.low_rank import adapt
from dlojz.models.foreign.hugging_face.task_inputs import InputsError, batch_for, losses, text_length
from dlojz.models.foreign.hugging_face.task_modules import Logits, LossOfTask
from dlojz.models.foreign.meta_checks import built, error_with_line, moved_to_meta, own_file
from dlojz.models.foreign.names import model_sentence, no_configuration
from dlojz.models.meta import ensure_grouped_products_on_meta, on_meta

_FALLBACKS = ("Seq2SeqLM", "MaskedLM", "CausalLM", "ImageClassification")
"""Tasks of which the first that a configuration serves is taken where it names no class."""
_LOGITS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")
_LABELLED = ("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING")
_IGNORED = ("auto_map", "quantization_config", "dtype", "torch_dtype", "architectures", "transformers_version")
"""Keys of a configuration that name code, or other weights than fp32 ones."""
_DTYPE = ("dtype", "torch_dtype")
_ATTENTION = ("attn_implementation", "_attn_implementation")
_EXPERTS = ("eager", "batched_mm", "grouped_mm")


class Configuration(NamedTuple):
    """What a config.json makes, and what that reads; the attributes are those of an `Origin`."""

    make: Callable[[int, int], nn.Module]
    family: Family
    size: int
    classes: int
    loss: Callable[[Any, Tensor], Tensor] | None
    example: Example | None
    title: str
    has_classes: bool = True


def read_configuration(file: Path, adapters: Adapters | None = None, target_length: int | None = None) -> Configuration:
    """Find the class that a config.json names, and what it reads; it is built with these adapters.

    Args:
        file: the config.json.
        adapters: put beside its layers; None for none.
        target_length: tokens of each target, which its decoder reads; None for as many as of the source.

    Raises:
        LabError: it is no configuration, or names what transformers does not have or cannot run on example inputs.
    """
    for noisy in ("torchao", "torch.utils._pytree"):  # libraries that transformers imports for quantized weights
        logging.getLogger(noisy).setLevel(logging.ERROR)
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    content = _content(file, transformers)
    config_class = transformers.CONFIG_MAPPING[content["model_type"]]

    def configured() -> Any:
        return config_class.from_dict(_plain(content))

    title = f"hf:{file}"
    config = built(title, configured)
    model_class, configured = _model_class(file, content, config, configured)
    config = built(title, configured)
    task = _task_of(model_class)
    note = _assumptions_note(content)
    has_decoder = "decoder_input_ids" in _arguments(model_class)
    if target_length and not has_decoder:
        raise _without_decoder(file, model_class.__name__, target_length)
    class_title = model_class.__name__
    if not content.get("architectures"):
        class_title += say(en=" (config.json names no class)", fr=" (config.json ne nomme pas de classe)")

    def build(size: int, classes: int) -> nn.Module:
        ensure_grouped_products_on_meta()
        config = configured()
        _resize(config, task, max(size, target_length or 0) if size else 0, classes)
        model = cast(nn.Module, model_class._from_config(config, dtype=torch.float32))  # not the file's type
        if adapters:
            adapt(model, adapters)
        return model

    if task == "IMAGE_CLASSIFICATION" and "pixel_values" in _arguments(model_class):
        return Configuration(
            lambda size, classes: Logits(build(size, classes), "pixel_values"),
            "image", _side(config), config.num_labels, None, None, class_title + note,
        )  # fmt: skip
    if task in (*_LOGITS, *_LABELLED) and not {"pixel_values", "input_features"} & set(_arguments(model_class)):
        text = config.get_text_config()
        words = class_title + (f", {integer(config.num_labels)} classes" if task in _LABELLED[:2] else "")
        if target_length:
            words += say(en=f", targets of {target_length} tokens", fr=f", cibles de {target_length} tokens")
        elif has_decoder:
            words += say(en=", decoder as long as the encoder", fr=", décodeur aussi long que l’encodeur")
        tokens = text_length(text)
        return Configuration(
            lambda size, classes: Logits(build(size, classes), lengths=(size or tokens, target_length or 0)),
            "text", tokens, text.vocab_size, losses(task, config), None, words + note,
        )  # fmt: skip
    try:
        batch = batch_for(model_class, config, task, lambda: build(0, 0), target_length)  # 0: sizes as in the file
    except InputsError as error:
        raise no_forecast(file, model_class.__name__, str(error)) from error
    try:
        # Tried once, so that what does not run is refused here and not by the prediction.
        with torch.random.fork_rng(devices=[]), on_meta(), torch.no_grad():
            inputs = {name: torch.empty_like(tensor, device="meta") for name, tensor in batch.items()}
            LossOfTask(moved_to_meta(build(0, 0))).eval()(**inputs)
    except Exception as error:
        message = model_sentence("does not run on its inputs", batch=shapes_text(batch), error=error_with_line(error))
        raise no_forecast(file, model_class.__name__, message) from error
    words = f"{class_title}, {shapes_text({name: tensor[:1] for name, tensor in batch.items()})}"
    classifies = task.endswith("CLASSIFICATION")
    return Configuration(
        lambda size, classes: LossOfTask(build(0, 0)),
        "tensors", 0, config.num_labels if classifies else 10, _own_loss, Example(batch, ()), words + note, classifies,
    )  # fmt: skip


def _own_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Return the loss that a model has computed."""
    del targets
    return output


def _content(file: Path, transformers: Any) -> dict[str, Any]:
    """Read a configuration's JSON; refuse what is none, or of an architecture that transformers does not have."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        kind = content["model_type"]
    except OSError as error:
        cwd, folder = Path.cwd(), file.parent if file.name == "config.json" else file
        raise no_configuration(str(folder.relative_to(cwd) if folder.is_relative_to(cwd) else folder)) from error
    except (ValueError, KeyError, TypeError) as error:
        message = f"{type(error).__name__}: {error}"
        raise model_sentence.refused("no configuration of transformers", file=file, message=message) from error
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        kinds = list(transformers.CONFIG_MAPPING)
        hints = ", ".join(difflib.get_close_matches(str(kind), kinds, n=3))
        version = transformers.__version__
        if hints:
            raise model_sentence.refused("architecture like others", version=version, kind=kind, file=file, hints=hints)
        raise model_sentence.refused(
            "unknown architecture", version=version, kind=kind, file=file, count=len(kinds), remedy=own_file()
        )
    return cast(dict[str, Any], content)


def _attention_of(content: dict[str, Any]) -> str | None:
    attention = next((content[key] for key in _ATTENTION if content.get(key)), None)
    return attention if isinstance(attention, str) else None


def _assumptions_note(content: dict[str, Any]) -> str:
    """Say what of a configuration is forecast as the run has it: the type of the weights, quantized or not, and the
    attention, which where only a GPU has it is PyTorch's."""
    dtype = next((content[key] for key in _DTYPE if content.get(key)), None)
    if quantized := content.get("quantization_config"):
        dtype = quantized.get("quant_method", "quantization_config") if isinstance(quantized, dict) else quantized
    notes = [] if dtype in (None, "auto", "float32") else [model_sentence("weights of a run", dtype=dtype)]
    if attention := _attention_of(content):
        is_torch, key = attention in ("eager", "sdpa"), "fused attention" if "flash" in attention else "other attention"
        notes.append(model_sentence("attention of torch" if is_torch else key, attention=attention))
    return "".join(f", {note}" for note in notes)


def _plain(content: Any) -> Any:
    """Copy a configuration without the keys that name code; numbers that JSON has not are written `__float__`.

    An attention that only a GPU has becomes PyTorch's, whose fused kernels keep the same tensors.
    """
    if isinstance(content, list):
        return [_plain(part) for part in content]
    if not isinstance(content, dict):
        return content
    if content.keys() == {"__float__"}:  # NaN or infinity
        return float(content["__float__"])
    plain = {key: _plain(part) for key, part in content.items() if key not in _IGNORED and not key.startswith("_")}
    plain.pop("attn_implementation", None)
    if (attention := _attention_of(content)) in ("eager", "sdpa"):
        plain["attn_implementation"] = attention
    elif attention is not None and "flash" in attention:
        plain["attn_implementation"] = "sdpa"
    if content.get("experts_implementation") not in _EXPERTS:
        plain.pop("experts_implementation", None)
    return plain


def _model_class(
    file: Path, content: dict[str, Any], config: Any, configured: Callable[[], Any]
) -> tuple[Any, Callable[[], Any]]:
    """Find the class that a configuration names, and what makes its own configuration.

    Raises:
        LabError: transformers has no such class, it has another configuration, or none is named and none suits.
    """
    transformers = importlib.import_module("transformers")
    names = content.get("architectures") or ()
    if not names:
        autos = (getattr(transformers, f"AutoModelFor{task}") for task in _FALLBACKS)
        suited = next((auto for auto in autos if type(config) in auto._model_mapping), transformers.AutoModel)
        if type(config) not in suited._model_mapping:
            reason = say(en="transformers has no model for it", fr="transformers n’a pas de modèle pour elle")
            raise no_forecast(file, content["model_type"], reason)
        entry = suited._model_mapping[type(config)]
        return (entry[0] if isinstance(entry, tuple) else entry), configured
    model_class: Any = getattr(transformers, str(names[0]), None)
    if not (inspect.isclass(model_class) and issubclass(model_class, transformers.PreTrainedModel)):
        version = transformers.__version__
        reason = model_sentence("no such class", version=version)
        raise no_forecast(file, str(names[0]), reason)
    config_class = cast(Any, model_class).config_class
    if config_class is None or isinstance(config, config_class):
        return model_class, configured
    for key in getattr(config, "sub_configs", {}):
        if isinstance(getattr(config, key, None), config_class):
            return model_class, lambda key=key: getattr(configured(), key)
    reason = model_sentence("another model type", config_class=config_class.__name__, model_type=content["model_type"])
    raise no_forecast(file, model_class.__name__, reason)


def _task_of(model_class: Any) -> str:
    """Name the task of a class by the mappings of transformers' automatic classes; empty for a class without a head."""
    mappings = vars(importlib.import_module("transformers.models.auto.modeling_auto"))
    start, end = "MODEL_FOR_", "_MAPPING_NAMES"
    tasks = [
        key.removeprefix(start).removesuffix(end) for key in mappings if key.startswith(start) and key.endswith(end)
    ]
    names = {task: mappings[f"{start}{task}{end}"].values() for task in tasks}
    # A class may serve several tasks: those whose loss is known first, pretraining last.
    order = sorted(tasks, key=lambda task: (task not in (*_LOGITS, *_LABELLED), task == "PRETRAINING"))
    for task in order:
        if any(model_class.__name__ in (entry if isinstance(entry, tuple) else (entry,)) for entry in names[task]):
            return task
    return ""


def _arguments(model_class: Any) -> list[str]:
    return list(inspect.signature(model_class.forward).parameters)


def _side(config: Any) -> int:
    """Return the side of a model's square images in pixels."""
    side = getattr(config, "image_size", None) or 224
    return int(side[0] if isinstance(side, list | tuple) else side)


def _resize(config: Any, task: str, size: int, classes: int) -> None:
    """Give a configuration the size of its input and its number of words or classes; 0 leaves both."""
    text = config.get_text_config()
    if task == "IMAGE_CLASSIFICATION" and size:
        config.num_labels, config.image_size = classes, size
    elif size:
        if classes != text.vocab_size:
            text.vocab_size = classes
            padding = getattr(text, "pad_token_id", None)
            # It would be no row of the smaller embedding.
            if isinstance(padding, int) and padding >= classes:
                text.pad_token_id = 0
        if 0 < (getattr(text, "max_position_embeddings", None) or size) < size:
            text.max_position_embeddings = size
    if task == "SEQUENCE_CLASSIFICATION" and getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = 0  # as every training of it must: the last token that is no padding is classified


def _without_decoder(file: Path, class_name: str, target_length: int) -> Exception:
    return model_sentence.refused("no decoder", target_length=target_length, class_name=class_name, file=file)


def no_forecast(file: Path, class_name: str, reason: str) -> Exception:
    """Make the refusal of a class that is not forecast, with the way out."""
    return model_sentence.refused(
        "class not forecast", class_name=class_name, file=file, reason=reason, own_file=own_file()
    )
