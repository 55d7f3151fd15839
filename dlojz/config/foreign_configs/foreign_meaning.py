"""Say what the keys of another program's configuration mean here: each is taken, without effect here, or unknown.

What a program's keys mean are data, one TOML for each program in `data/`: a key names our field, or has words that
stand for its values; patterns of keys without effect have a reason; `fails` are the sizes with which the program stops.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from dlojz import models
from dlojz.base.contract import check_whole, parse_json
from dlojz.base.errors import LabError
from dlojz.base.language import say
from dlojz.base.table import visible
from dlojz.config.foreign_configs.foreign_documents import (
    DATA,
    MAX_BYTES,
    ForeignDocument,
    read_document,
    sentence,
    shown_value,
)

_OFF: Final[tuple[Any, ...]] = (None, False, "", "none", "null", "None", [], {})
_OFFLOADS: Final = ("none", "optimizer", "parameters")
MOST_WHOLE: Final = 2**24
MOST_GPUS: Final = 2**20
INTERLEAVED: Final = "interleaved"
DECISIVE: Final = ("zero", "deepspeed_file", "adapter", "checkpointing", "offload")
"""Fields without which no figure is given, where the value of their key is not known."""
UNMODELLED: Final = "unmodelled"
"""Reason of keys that change memory or time, and are in no figure."""
INLINE: Final = "deepspeed."
"""First letters of the keys of DeepSpeed's JSON where another program's file holds it."""
_STAGE: Final = re.compile(r"(?:zero|stage|z)[_-]?([0-3])(?![0-9])")
"""ZeRO stage in the name of a file."""


@dataclass(frozen=True)
class Program:
    """Program whose configurations are read: its keys, and the sizes with which it stops.

    Attributes:
        signs: keys, or patterns of them, of which a configuration of it has one at least.
        keys: key → our field, or `to` and the values that words stand for.
        effectless: reason → patterns of keys.
    """

    name: str
    title: str
    signs: str
    engine: str = ""
    source: str = ""
    sections: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)
    effectless: Mapping[str, str] = field(default_factory=dict)
    fails: tuple[Mapping[str, Any], ...] = ()

    def plain(self, key: str) -> str:
        """Write a key as the data does: `--micro-batch-size` → `micro_batch_size`, without sections that only group."""
        plain = key.removeprefix("--").replace(".--", ".").replace("-", "_")
        prefix = next((section for section in self.sections.split() if plain.startswith(section)), "")
        return plain.removeprefix(prefix)

    def reason(self, key: str) -> str:
        """Name the reason why a key has no effect here; empty for one that has, or is unknown."""
        # What is not in the figures before all else: wide patterns of another reason would hide it.
        for reason, patterns in sorted(self.effectless.items(), key=lambda item: item[0] != UNMODELLED):
            # `a.*` is the section `a` too, which an empty one leaves alone.
            if any(fnmatchcase(key, pattern) or f"{key}.*" == pattern for pattern in patterns.split()):
                return reason
        return ""


def _table(name: str) -> dict[str, Any]:
    return tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))


@cache
def programs() -> dict[str, Program]:
    """Load the programs, by the names of their files."""
    names = sorted(path.stem for path in DATA.glob("*.toml") if path.stem != "models")
    return {name: Program(name=name, **_table(name)) for name in names}


class KeyMeaning(NamedTuple):
    """What a key means here.

    Attributes:
        value: as shown, secrets hidden.
        status: `taken` as a field; `effectless` with its reason; `unknown`.
        meaning: the field and its value, or why there is none.
    """

    key: str
    value: str
    status: Literal["taken", "effectless", "unknown"]
    meaning: str


@dataclass(frozen=True)
class ForeignConfig:
    """Configuration of another program.

    Attributes:
        fields: what it says, by our names; what it leaves open has the program's default.
        origins: field → key and value that say it.
        switched: keys that are on, for those that exclude one another.
        unheeded: fields that a key would set, with a sentence where its value is not known here.
    """

    program: Program
    document: ForeignDocument
    meanings: tuple[KeyMeaning, ...]
    fields: Mapping[str, Any]
    origins: Mapping[str, tuple[str, Any]]
    switched: frozenset[str]
    unheeded: tuple[tuple[str, str], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        keys = [meaning._asdict() for meaning in self.meanings]
        return {"file": self.document.name, "program": self.program.name, "form": self.document.form, "keys": keys}

    def said(self, name: str) -> str:
        """Write a field as the file does, `num_layers = 96`; one that follows from others has our name."""
        key, value = self.origins.get(name, (name, self.fields.get(name)))
        return f"{visible(key.removeprefix('--'))} {shown_value(key, value)}".rstrip()


def read_foreign(path: str | Path) -> ForeignConfig:
    """Read another program's configuration.

    Raises:
        LabError: if the file cannot be read, or is none of a program known here.
    """
    document = read_document(Path(path).expanduser())
    program = _program_of(document)
    fields: dict[str, Any] = dict(program.defaults)
    origins: dict[str, tuple[str, Any]] = {}
    meanings, unheeded, switched = [], [], set()
    for key, value in document.entries:
        owner, plain = program, program.plain(key)
        if plain.startswith(INLINE) and plain not in program.keys:  # DeepSpeed's JSON within the file
            owner, plain = programs()["deepspeed"], plain.removeprefix(INLINE)
            fields.setdefault("engine", "deepspeed")
        if value not in _OFF and value != "auto":
            switched.add(plain)
        status, meaning, found_fields = _meaning(owner, plain, value)
        if status == "unknown" and plain in owner.keys:
            spec = owner.keys[plain]
            name = spec if isinstance(spec, str) else spec["to"]
            words = "valueless" if name in DECISIVE else "unheeded"
            text = sentence(words, key=visible(key), value=shown_value(key, value), why=meaning)
            unheeded.append((name, text))
        for name, converted in found_fields.items():
            if key.startswith(("#", "$")) and name in origins:  # what surrounds a command completes it
                continue
            # Parameters in the host's memory include the optimizer's states.
            if name == "offload" and _OFFLOADS.index(converted) < _OFFLOADS.index(fields.get(name, "none")):
                continue
            fields[name], origins[name] = converted, (key, value)
        meanings.append(KeyMeaning(key, shown_value(key, value), status, meaning))
    if (precision := fields.pop("auto", None)) and "precision" not in origins:  # DeepSpeed's trainer says it
        fields["precision"] = precision
        text = sentence("auto_precision", key=visible(origins["auto"][0]), value=precision)
        unheeded.append(("precision", text))
    return ForeignConfig(
        program, document, tuple(meanings), fields, origins, frozenset(switched), tuple(dict.fromkeys(unheeded))
    )


def _program_of(document: ForeignDocument) -> Program:
    """Find the program that knows most of a document's keys, and has one of its signs there."""
    scores = {}
    for program in programs().values():
        keys = [program.plain(key) for key, _ in document.entries]
        if any(fnmatchcase(key, sign) for key in keys for sign in program.signs.split()):
            scores[program.name] = sum(2 * (key in program.keys) + bool(program.reason(key)) for key in keys)
    if not scores:
        keys_text = visible(", ".join(key for key, _ in document.entries[:5]))
        titles = ", ".join(program.title for program in programs().values() if program.signs)
        raise LabError(sentence("no_program", file=document.name, keys=keys_text, titles=titles))
    return programs()[max(scores, key=lambda name: scores[name])]


Meaning = tuple[Literal["taken", "effectless", "unknown"], str, dict[str, Any]]


def _meaning(program: Program, key: str, value: Any) -> Meaning:
    """Find what a key means: its status, words, and the field that it sets."""
    spec = program.keys.get(key, programs()["launchers"].keys.get(key))
    if key.endswith("_target_") and (recipe := _RECIPE.search(str(value))):
        spec, value = "model", "-".join(recipe.groups())
    if spec is None:
        return _without_field(program, key, value)
    name, words = (spec, {}) if isinstance(spec, str) else (spec["to"], {w: v for w, v in spec.items() if w != "to"})
    # Several words, in a list or in one text.
    is_text_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
    word = (" ".join(value) if is_text_list else str(value)).lower()
    # The program's own files are known by their names.
    word = word if word in words else word.rpartition("/")[2]
    word = "*" if "*" in words and word not in words and value not in _OFF else word  # any value
    if word in words:
        meant = words[word]
        if str(meant).startswith("auto "):  # what the program that reads the file fills in
            name, meant = "auto", str(meant).removeprefix("auto ")
        fields = meant if isinstance(meant, dict) else {name: meant}  # or one value that sets several fields
        return "taken", ", ".join(f"{field} = {_plain_value(part)}" for field, part in fields.items()), fields
    if value in _OFF or value == "auto":
        return "effectless", sentence("auto" if value == "auto" else "unset"), {}
    unresolved = isinstance(value, str) and value.startswith("$")
    # Where all words stand for texts or switches, no number is meant.
    counted = not words or any(type(number) is int for number in words.values())
    number = _whole(value) if counted else None
    if name == "every" and (dense := _dense_layers(value)) is not None:
        name, number = "dense_layers", dense
    if name in _TEXTS and not unresolved:
        return "taken", f"{name} = {shown_value(key, value)}", {name: str(value)}
    if number is not None:
        return "taken", f"{name} = {number}", {name: number}
    if unresolved:
        problem = sentence("unassigned")
    elif counted:
        problem = sentence("no_whole_number", most=MOST_WHOLE - 1)
    else:
        legal = ", ".join(words)
        problem = sentence("unknown_value", legal=legal)
    return "unknown", problem, {}


def _without_field(program: Program, key: str, value: Any) -> Meaning:
    """Say why a key sets no field here, if that is known."""
    reason = program.reason(key) or programs()["launchers"].reason(key)
    reason = "unset" if value in _OFF and reason in ("", UNMODELLED) else reason
    if not reason:
        return "unknown", sentence("unknown"), {}
    return "effectless", sentence(reason), {}


_RECIPE: Final = re.compile(r"\.(\w+?)(?:Config|ModelProvider)(\d\w*)$")  # NeMo 2, Bridge: `llama.Llama3Config8B`
_TEXTS: Final = ("model", "family", "flavor", "unread", "kind", "preference", "lora_targets", "gpu_list")
"""Fields whose value is a text."""


def _dense_layers(value: Any) -> int | None:
    """Count the layers before the first mixture in Megatron's list, `([0]*3+[1]*58)`; None where dense ones follow."""
    if isinstance(value, list) and re.fullmatch("0*1+", text := "".join(map(str, value))):
        return text.count("0")
    match = re.fullmatch(r"\(?\[0\](?:\*(\d{1,4}))?\+\[1\](?:\*\d{1,4})?\)?", str(value).replace(" ", ""))
    return int(match[1] or 1) if match else None


def _plain_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _whole(value: Any) -> int | None:
    try:
        number = float(value) if not isinstance(value, bool | list) else math.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return int(number) if number.is_integer() and 0 <= number < MOST_WHOLE else None


SIZES: Final = ("layers", "hidden", "heads", "kv_heads", "mlp_width", "vocabulary", "tied")


def named_sizes(name: str) -> dict[str, Any]:
    """Find the sizes of a model that a configuration names: of the catalogue (`model`), published, or of a folder here.

    Returns:
        fields of a size, or `model`, a name of the catalogue; empty for a name that is not known.

    Raises:
        LabError: if it is a folder whose config.json cannot be read.
    """
    config_file = _config_file(name)
    if config_file.is_file() and config_file.stat().st_size < MAX_BYTES:
        return _config_json(config_file)
    if name in models.names():
        return {"model": name}
    base_name = name.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    published = _table("models")
    for pattern, model in published["catalogue"].items():
        if re.search(pattern, base_name):
            return {"model": model}
    for pattern, sizes in published["sizes"].items():
        if re.search(pattern, base_name):
            # Bias of queries, keys and values alone (Qwen 2) is no thousandth of the parameters.
            settings = dict(zip((*SIZES, "head_width"), sizes, strict=False))
            return {**settings, "gated": True, "biased": False, "positions": "none"}
    return {}


def _config_file(name: str) -> Path:
    folder = Path(name.removeprefix("hf:")).expanduser()
    return folder if folder.name == "config.json" else folder / "config.json"


ADAPTERS: Final[tuple[str, ...]] = ("lora", "lora_targets", "lora_base")
"""Fields of a run with adapters."""


def _adapters(config: ForeignConfig, values: dict[str, Any], name: str, assumed: list[str]) -> dict[str, Any]:
    """Complete the fields of adapters beside a model of transformers; empty where there are none, or none described.

    What is not described stays as `adapter`. LLaMA-Factory, which names its `finetuning_type`, has other defaults than
    peft and TRL.

    Source: hiyouga/LLaMA-Factory, `hparams/finetuning_args.py`, lora_rank and lora_target; huggingface/trl,
    `trainer/model_config.py`, lora_r; peft, `utils/constants.py`.
    """
    if values.get("dora"):
        values["adapter"] = "DoRA"
    elif values.get("lora_base") and values.get("adapter") in (None, "LoRA"):
        values["adapter"] = "QLoRA" if values["lora_base"] == "4bit" else "LoRA"
    if values.get("adapter") not in ("LoRA", "QLoRA"):
        return {}
    if not _config_file(name).is_file():
        values["adapter"] = sentence("adapters_of_a_name", adapter=values["adapter"], model=shown_value("model", name))
        return {}
    is_factory = "finetuning_type" in {config.program.plain(key) for key, _ in config.document.entries}
    if not values.get("lora"):
        values["lora"] = 8 if is_factory else 16
        assumed.append(sentence("adapter_rank", rank=values["lora"]))
    base = values.get("lora_base") or ("4bit" if values.pop("adapter") == "QLoRA" else "none")
    values["adapter"] = ""
    targets = ",".join(re.findall(r"[\w.-]+", str(values.get("lora_targets") or ("all-linear" if is_factory else ""))))
    return dict(zip(ADAPTERS, (values["lora"], "all-linear" if targets == "all" else targets, base), strict=True))


def _config_json(path: Path) -> dict[str, Any]:
    """Read the sizes of a Llama-like decoder off a model's config.json, as transformers names them."""
    content = parse_json(path.read_text(encoding="utf-8"))
    names = (
        "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
        "vocab_size",
    )  # fmt: skip
    missing = [name for name in names if name != "num_key_value_heads" and not isinstance(content.get(name), int)]
    if missing:
        raise LabError(sentence("no_decoder", folder=visible(path.parent.name), missing=", ".join(missing)))
    sizes = dict(zip(SIZES, [content.get(name) or 0 for name in names], strict=False))
    experts, head_width = _mixture(content), content.get("head_dim") or 0
    if latent := content.get("kv_lora_rank"):
        sizes |= {"latent": latent, "query_latent": content.get("q_lora_rank") or 0}
        sizes["rotated_width"], head_width = content.get("qk_rope_head_dim") or 0, content.get("qk_nope_head_dim") or 0
    llama_like = {"gated": True, "biased": False, "positions": "none", "tied": bool(content.get("tie_word_embeddings"))}
    return {**sizes, **llama_like, **experts, "head_width": head_width}


def _mixture(content: Mapping[str, Any]) -> dict[str, Any]:
    """Read the experts of a config.json by the names of Mixtral, Qwen and DeepSeek; empty of a dense decoder."""
    count = content.get("num_local_experts") or content.get("num_experts") or content.get("n_routed_experts")
    if not count:
        return {}
    width = content.get("moe_intermediate_size") or 0
    shared = content.get("n_shared_experts") or (content.get("shared_expert_intermediate_size") or 0) // (width or 1)
    return {
        "experts": count, "top_k": content.get("num_experts_per_tok") or 1, "expert_width": width,
        "shared_experts": shared, "dense_layers": content.get("first_k_dense_replace") or 0,
        "every": content.get("decoder_sparse_step") or 1,
    }  # fmt: skip


@dataclass(frozen=True)
class ForeignRun:
    """Run that a configuration describes.

    Attributes:
        size: fields of a decoder's size, or `model`, a name of the catalogue, with the length of its samples.
        layout: fields of a layout: degrees, micro-batches, options.
        columns: of the cost model, what the program's options set otherwise than its library does by habit.
        assumed: sentences: what was not said and how it was completed.
        undescribed: what it asks for that no figure here describes.
        failures: sentences: why the program itself would stop.
        warnings: the same where it goes on.
        keeps_bf16: whether weights, gradients and states are bf16 themselves.
    """

    size: dict[str, Any]
    layout: dict[str, Any]
    gpus: int
    precision: str
    columns: dict[str, int]
    fused_attention: bool | None
    fused_loss: bool
    steps: int | None
    assumed: tuple[str, ...]
    undescribed: tuple[str, ...]
    failures: tuple[str, ...]
    warnings: tuple[str, ...]
    keeps_bf16: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def run_fields(self) -> dict[str, Any]:
        """Fields of a run of a model of the catalogue, for `RunConfig.of`."""
        layout = {name: value for name, value in self.layout.items() if name != "schedule" or self.layout["pp"] > 1}
        layout["chunks"] = layout["chunks"] if layout["chunks"] > 1 else None
        precision = "bf16-true" if self.keeps_bf16 else "bf16" if self.precision == "fp8" else self.precision
        # DeepSpeed's `grad_accum_dtype`; fp32 keeps fp32 anyway.
        is_wide = self.columns.get("gradient_bytes") == 4 and precision in ("bf16", "fp16")
        wide = {"fp32_gradients": True} if is_wide and layout["engine"] == "deepspeed" else {}
        return {**self.size, **layout, "precision": precision, **wide}

    def sentences(self) -> list[str]:
        """What was assumed, why the program itself would stop or warn, and what no figure describes."""
        assumed, lacking = ", ".join(self.assumed), ", ".join(self.undescribed)
        groups = {"assumed": (assumed,), "failure": self.failures, "warning": self.warnings, "undescribed": (lacking,)}
        return [sentence(name, text=text) for name, texts in groups.items() for text in texts if text]


def foreign_run(config: ForeignConfig, **overrides: Any) -> ForeignRun:
    """Complete what a configuration says to a run.

    Args:
        **overrides: fields given beside the file, which hold before it: gpus, nodes, batch, model, sequence_length, …

    Raises:
        LabError: if the number of GPUs, the model or the length of its samples is said nowhere.
    """
    values = {**config.fields, **overrides}
    assumed = [text for name, text in config.unheeded if name not in DECISIVE]
    lacking = [key for key, _, _, meaning in config.meanings if meaning == sentence(UNMODELLED)]
    size = _size(config, values, overrides, assumed)
    name = str(overrides.get("model") or values.get("model") or "")
    adapters = _adapters(config, values, name, assumed)
    if lacking and not values.get("adapter"):
        assumed.append(sentence("left_out", keys=visible(", ".join(lacking))))
    _pipeline(values)
    gpus = _gpus(config, values, overrides, assumed)
    settings = {**values, **size, "gpus": gpus, "two": 2}
    degrees = math.prod(int(values.get(name) or 1) for name in ("tp", "pp", "cp"))
    # Where degrees do not divide the GPUs, the rules below say so.
    dp = settings["dp"] = gpus // degrees or 1
    _batch(config, settings, dp, overrides, assumed)
    _stages(settings)
    recomputed = _recomputed(config, settings, assumed)
    layout, columns = _states(config, settings, dp, assumed)
    failures, warnings = _failures(config, settings)
    undescribed = [str(settings[name]) for name in ("undescribed", "adapter") if settings.get(name)]
    undescribed += [sentence("preference")] if settings.get("preference") else []
    undescribed += [recomputed] if recomputed else []
    if settings.get("uneven_stages"):
        undescribed.append(sentence("uneven_stages"))
    # Without the flag Megatron cuts experts as it cuts all else.
    if settings.get("experts") and layout["tp"] > 1 and (settings.get("expert_tensor") or layout["tp"]) > 1:
        undescribed.append(sentence("cut_experts", tp=layout["tp"]))
    undescribed += [text for name, text in config.unheeded if name in DECISIVE and name not in overrides]
    precision = "fp8" if settings.get("fp8") else str(settings.get("precision", "fp32"))
    # FSDP casts what is trained to fp32; the frozen weights beside adapters stay as they were loaded.
    plain = layout["engine"] == "torch" and degrees == 1 and (adapters or not settings.get("zero"))
    keeps_bf16 = bool(plain) and precision == settings.get("weights") == "bf16" and not undescribed
    if adapters:
        tokens = {"sequence_length": size["sequence_length"]} if "sequence_length" in size else {}
        size = {"model": f"hf:{_config_file(name).parent}", **tokens, **adapters}
    assumed += [sentence("true_frozen" if adapters else "true_weights")] if keeps_bf16 else []
    fused = settings.get("fused_attention")
    steps = settings.get("steps") or None
    return ForeignRun(
        size, layout, gpus, precision, columns, fused, bool(settings.get("fused_loss")), steps, tuple(assumed),
        tuple(undescribed), tuple(failures), tuple(warnings), keeps_bf16,
    )  # fmt: skip


_SIZE_FIELDS: Final = (
    "layers", "hidden", "heads", "kv_heads", "mlp_width", "vocabulary", "gated", "tied", "biased", "positions",
    "experts", "top_k", "every", "head_width", "expert_width", "dense_layers",
)  # fmt: skip


def _size(
    config: ForeignConfig, values: dict[str, Any], overrides: Mapping[str, Any], assumed: list[str]
) -> dict[str, Any]:
    """Find the model: given beside the file, named by it, or its sizes."""
    name = overrides.get("model") or values.get("model")
    if values.get("flavor") and "model" not in overrides:
        name = f"{values.get('family', 'llama3')}-{values['flavor']}"
    sizes = named_sizes(str(name)) if name else {}
    if name and not sizes and "layers" not in values:
        raise LabError(sentence("no_model", file=config.document.name, model=shown_value("model", name)))
    if not sizes:
        sizes = _own_sizes(config, values, assumed)
    tokens = values.get("sequence_length")
    return {**sizes, **({"sequence_length": tokens} if tokens else {})}


def _own_sizes(config: ForeignConfig, values: dict[str, Any], assumed: list[str]) -> dict[str, Any]:
    """Take the sizes that a file says itself, as Megatron-LM completes them."""
    missing = [name for name in ("layers", "hidden", "heads", "sequence_length") if not values.get(name)]
    if missing:
        raise LabError(sentence("no_sizes", file=config.document.name, missing=", ".join(missing)))
    sizes = {name: values[name] for name in _SIZE_FIELDS if values.get(name) is not None}
    hidden, heads = int(sizes["hidden"]), int(sizes["heads"])
    if values.get("grouped") is False:
        sizes.pop("kv_heads", None)
    elif values.get("grouped") and "kv_heads" not in sizes:
        sizes["kv_heads"] = 1
    if sizes.get("gated") and not sizes.get("mlp_width"):
        sizes["mlp_width"] = int(4 * hidden * 2 / 3) // 64 * 64  # arguments.py: a multiple of 64 below 8/3 of hidden
    if sizes.get("head_width") and sizes["head_width"] * heads == hidden:
        sizes["head_width"] = 0
    if not sizes.get("experts"):
        of_mixtures = ("top_k", "every", "expert_width", "dense_layers")
        sizes = {name: value for name, value in sizes.items() if name not in of_mixtures}
    elif shared := values.get("shared_width"):
        width = sizes.get("expert_width") or sizes.get("mlp_width") or 4 * hidden
        sizes["shared_experts"] = shared // width
        if shared % width:
            values["undescribed"] = f"moe_shared_expert_intermediate_size {shared}"
    if values.get("latent_attention"):  # the defaults of Megatron's MLATransformerConfig
        names = {"latent": 32, "query_latent": 0, "latent_head_width": 128, "rotated_width": 64}
        latent = {name: values.get(name) or usual for name, usual in names.items()}
        sizes |= {"head_width": latent.pop("latent_head_width"), **latent}
        if (values.get("value_width") or 128) != sizes["head_width"]:
            values["undescribed"] = f"v_head_dim {values.get('value_width') or 128}"
    if not sizes.get("vocabulary"):
        vocabulary = sizes["vocabulary"] = values.get("tokenizer") or 50257
        assumed.append(sentence("vocabulary", words=vocabulary))
    return sizes


def _gpus(config: ForeignConfig, values: Mapping[str, Any], overrides: Mapping[str, Any], assumed: list[str]) -> int:
    """Count the GPUs: given beside the file, or said by it.

    Raises:
        LabError: if neither says it.
    """
    if "gpus" in overrides:
        return check_whole("gpus", overrides["gpus"], MOST_GPUS)
    tasks = int(values.get("tasks_per_node") or 0)  # one for all GPUs of a node, or one for each
    gpu_numbers = re.fullmatch(r"(?:[\w.-]+:)?(\d+(?:,\d+)*)", str(values.get("gpu_list", "")))
    said_gpus = values.get("gpus_per_node") or (gpu_numbers[1].count(",") + 1 if gpu_numbers else 0)
    node_gpus = said_gpus or (tasks if tasks > 1 else 8)
    if (gpus := values.get("gpus")) and "nodes" not in overrides:
        return int(gpus)
    if nodes := overrides.get("nodes") or values.get("nodes") or (1 if said_gpus else 0):
        if not said_gpus and tasks < 2:
            assumed.append(sentence("node_gpus"))
        return int(nodes) * int(node_gpus)
    raise LabError(sentence("no_gpus", file=config.document.name))


def _pipeline(values: dict[str, Any]) -> None:
    """Complete chunks and schedule of a pipeline."""
    pp, per_chunk, layers = values.get("pp") or 1, values.get("layers_per_chunk"), values.get("layers")
    if per_chunk and layers and layers % (pp * per_chunk) == 0:
        values["chunks"] = layers // (pp * per_chunk)
    # Without a number, torchtitan cuts a rank's layers in two.
    values["chunks"] = values.get("chunks") or (2 if values.get("schedule") == INTERLEAVED else 1)
    if values["chunks"] > 1:
        values["schedule"] = INTERLEAVED


_OVERLAPS: Final = ("tensor_overlap", "overlap", "gather_overlap")
"""Columns of the cost model that flags of Megatron switch."""


def _stages(settings: dict[str, Any]) -> None:
    """Complete what flags say of stages that hold different numbers of layers: what has to divide, and what is planned.

    Planned are stages of as many layers, embedding and logits counted, and a last one of what is left over.
    """
    layers, pp = int(settings.get("layers") or 0), int(settings.get("pp") or 1)
    ends = [settings[name] for name in ("first_layers", "last_layers") if settings.get(name)]
    if counted := (settings.get("counts_embedding") or 0) + (settings.get("counts_loss") or 0):
        settings["counted_layers"] = layers + counted
        settings["embedding_slots"] = int(counted == 2)
    if ends and pp > len(ends):
        settings |= {"middle_layers": layers - sum(ends), "middle_stages": pp - len(ends)}
    rounded = layers - (pp - 1) * -(-layers // pp)
    settings["uneven_stages"] = (
        (ends and ends != [rounded])
        or settings.get("first_layers")
        or (counted == 1 and not settings.get("counts_loss"))
    )


def _recomputed(config: ForeignConfig, settings: dict[str, Any], assumed: list[str]) -> str:
    """Complete what Megatron's flags say of recomputation; returns what of it is not planned: a part of the layers."""
    method, layers = settings.get("recompute_method"), settings.get("recomputed_layers") or 1
    keys = {config.program.plain(key) for key, _ in config.document.entries}
    # Before there was a granularity, NeMo's method alone was of whole layers.
    if method and "activations_checkpoint_method" in keys and "activations_checkpoint_granularity" not in keys:
        settings.setdefault("checkpointing", "full")
    if settings.get("recomputes"):  # LLaMA-Factory does unless disable_gradient_checkpointing
        settings.setdefault("checkpointing", "full")
    if settings.get("checkpointing") != "full" or not method:
        return ""
    stage_layers = -(-int(settings.get("layers") or 0) // ((settings.get("pp") or 1) * settings["chunks"]))
    if method == 2 and layers < stage_layers:
        return sentence("some_layers", layers=layers, stage_layers=stage_layers)
    assumed += [sentence("layers_together", layers=layers)] if method == 1 and layers > 1 else []
    return ""


def _batch(
    config: ForeignConfig, settings: dict[str, Any], dp: int, overrides: Mapping[str, Any], assumed: list[str]
) -> None:
    """Complete micro-batch, number of micro-batches and global batch: any two give the third."""
    pp, total = settings.get("pp") or 1, overrides.get("batch") or settings.get("global_batch")
    if local := settings.get("local_batch"):  # torchtitan: what a pipeline cuts, without one the micro-batch
        settings["micro_batch"] = settings.get("pp_micro_batch") or 1 if pp > 1 else local
        total = total or local * dp
        settings.setdefault("micro_batches", max(1, total // (dp * settings["micro_batch"])))
    micro, written = settings.get("micro_batch"), config.origins.keys() | overrides.keys()
    if "batch" in overrides:
        # A default gives way to the number of micro-batches that the file says; a size that it says, before the number.
        if "micro_batches" in written and not {"micro_batch", "local_batch"} & written:
            micro = None
        else:
            settings["micro_batches"] = None
    number = settings.get("micro_batches")
    if not micro:
        micro = max(1, total // (dp * (number or 1))) if total else 1
        if not total:
            assumed.append(sentence("micro_batch"))
    if not number:
        number = max(1, total // (dp * micro)) if total else 1
        if not total and "micro_batch" not in config.origins:
            assumed.append(sentence("accumulation"))
    if "batch" in overrides and dp * micro * number != total:
        assumed.append(sentence("rounded_batch", batch=dp * micro * number, total=total))
    settings |= {"micro_batch": micro, "micro_batches": number, "global_batch": total or dp * micro * number}


def _states(
    config: ForeignConfig, settings: dict[str, Any], dp: int, assumed: list[str]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Complete engine, ZeRO stage and options: the layout, and the columns of the cost model that it sets."""
    degrees = {name: int(settings.get(name) or 1) for name in ("tp", "pp", "cp", "ep")}
    engines = {"deepspeed": "deepspeed", "megatron": "megatron-core"}
    engine = settings.get("engine") or engines.get(settings.get("kind", ""), config.program.engine)
    if settings.get("kind") == "fsdp" and "zero" not in config.origins:
        settings["zero"] = 3
    if level := settings.get("deepspeed_file"):  # axolotl's own files: 4 is stage 3 with offload
        engine, settings["zero"] = "deepspeed", min(3, int(level))
        settings["offload"] = "parameters" if level > 3 else settings.get("offload", "none")
    if engine == "megatron-deepspeed" and settings.get("precision") == "bf16" and not settings.get("zero"):
        settings["zero"] = 1  # deepspeed/runtime/bf16_optimizer.py
        assumed.append(sentence("bf16_optimizer"))
    columns: dict[str, int] = {}
    if settings.get("compiled_parts") == 1:  # the loss alone
        settings["compiled"] = 0
    if settings.get("zero") == "hybrid":  # FSDP's HYBRID_SHARD: within a node, with a replica on each
        settings["zero"], gpus = 3, int(settings["gpus"])
        node_gpus = gpus // int(settings["nodes_of_gpus"]) if settings.get("nodes_of_gpus") else 8
        if not settings.get("nodes_of_gpus"):
            assumed.append(sentence("node_gpus"))
        settings["dp_replicate"] = max(1, gpus // max(1, node_gpus))
    replicas = settings.get("dp_replicate") or 1
    if replicas > 1 and (sharing := dp // replicas * degrees["cp"]) > 1:
        columns["zero_shards"] = sharing  # hybrid sharding: within a replica's ranks alone
    elif replicas > 1:
        settings["zero"] = 0
    for name in ("dropout", "gradient_bytes", "compiled", "asynchronous", "embedding_slots", "blocking", *_OVERLAPS):
        if settings.get(name) is not None:
            columns[name] = int(settings[name])
    if config.program.name == "torchtitan" and not columns.get("compiled"):
        columns["eager"] = 1
    if settings.get("ac_option") == 2:
        assumed.append(sentence("second_layer"))
    engine = _of_named_file(settings, assumed) or engine
    optimizer, usual = settings.get("optimizer"), config.program.defaults.get("optimizer")
    if optimizer != usual:
        assumed.append(sentence("optimizer", usual=usual, optimizer=optimizer))
    offload = settings.get("offload", "none")
    if offload != "none" and engine != "deepspeed":
        assumed.append(sentence("offload"))
        offload = "none"
    layout = {
        **degrees, "dp": dp, "engine": engine, "micro_batch": settings["micro_batch"],
        "micro_batches": settings["micro_batches"],
        # One rank has nothing to shard, but what is offloaded needs a stage even there.
        "zero": int(settings.get("zero") or 0) if dp * degrees["cp"] > 1 or offload != "none" else 0,
        "chunks": settings["chunks"] if degrees["pp"] > 1 else 1,
        "checkpointing": settings.get("checkpointing", "none"), "offload": offload,
        "sequence_parallel": bool(settings.get("sequence_parallel")) and degrees["tp"] > 1,
        **({"context_exchange": settings["context_exchange"]} if "context_exchange" in settings else {}),
    }  # fmt: skip
    if degrees["pp"] > 1 and settings.get("schedule"):
        layout["schedule"] = settings["schedule"]
    return layout, columns


def _of_named_file(settings: dict[str, Any], assumed: list[str]) -> str:
    """Take the stage of DeepSpeed's JSON that a file names from its name; no figures where that says none."""
    if not (path := settings.get("unread")):
        return ""
    stage = _STAGE.search(str(path).rpartition("/")[2].lower())
    if stage is None:
        settings["undescribed"] = sentence("named_file", path=shown_value("", path))
        return ""
    settings["zero"] = int(stage[1])
    assumed.append(sentence("unread", path=shown_value("", path), stage=stage[1]))
    return "deepspeed"


def _failures(config: ForeignConfig, settings: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Say with which sizes the program itself stops, or warns."""
    failures: list[str] = []
    warnings: list[str] = []
    for rule in config.program.fails:
        if reason := _failure(config, settings, rule):
            (warnings if rule.get("warns") else failures).append(reason)
    return list(dict.fromkeys(failures)), warnings


def _applies(config: ForeignConfig, settings: Mapping[str, Any], rule: Mapping[str, Any]) -> bool:
    """Whether the conditions of a rule are met."""
    large = all(int(settings.get(name) or 0) >= minimum for name, minimum in rule.get("least", {}).items())
    alike = all(settings.get(name) == value for name, value in rule.get("equal", {}).items())
    exempt = any(settings.get(name) or name in config.switched for name in rule.get("unless", ()))
    return large and alike and not exempt and set(rule.get("both", ())) <= config.switched


def _failure(config: ForeignConfig, settings: Mapping[str, Any], rule: Mapping[str, Any]) -> str:
    """Write the sentence of a rule that does not hold; empty where it holds, or does not apply."""

    def amount(name: str) -> int:
        return int(settings.get(name) or 0)

    def words(name: str) -> str:
        # What was given beside the file, or follows from it, has our name.
        written = name in config.origins and config.fields.get(name) == settings.get(name)
        return config.said(name) if written else f"{name} {amount(name)}"

    if not _applies(config, settings, rule):
        return ""
    problem, factors = "", [name for name in rule.get("divisors", rule.get("factors", ())) if amount(name) > 1]
    product = math.prod(amount(name) for name in factors)
    factors_text = " × ".join("2" if name == "two" else words(name) for name in factors) or "1"
    if both := rule.get("both"):
        problem = sentence("both", first=both[0], second=both[1])
    elif "dividend" in rule:
        dividend, total = amount(rule["dividend"]), f" = {product}" if len(factors) > 1 else ""
        if dividend % product:
            problem = sentence(
                "no_multiple", dividend=words(rule["dividend"]), factors=factors_text + total
            ) + _what_works(factors[-1], dividend, product // amount(factors[-1]))
    elif pair := rule.get("at_least"):
        if 0 < amount(pair[0]) < amount(pair[1]):
            problem = sentence("needs", cause=words(pair[1]), missing=f"{words(pair[0])} ≥ {amount(pair[1])}")
    elif "equals" in rule:
        if rule["equals"] in (*config.origins, "gpus") and product != amount(rule["equals"]):
            problem = sentence("unequal", total=words(rule["equals"]), factors=f"{factors_text} = {product}")
    elif missing := [f"{name} ≥ {minimum}" for name, minimum in rule["needs"].items() if amount(name) < minimum]:
        cause = " ".join(words(name) for name in (*rule.get("least", {}), *rule.get("equal", {})))
        problem = sentence("needs", cause=cause, missing=", ".join(missing))
    return sentence("says", problem=problem, title=config.program.title, says=rule["says"]) if problem else ""


def _what_works(name: str, dividend: int, factor: int) -> str:
    """List values of a divisor that would work, the first eight."""
    if name == "two" or factor <= 0 or dividend % factor:
        return ""
    works = [str(value) for value in range(1, min(dividend // factor, 4096) + 1) if dividend // factor % value == 0][:8]
    return say(en="; ", fr=" ; ") + sentence("may_be", name=name, values=", ".join(works))


def change_lines(config: ForeignConfig, before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Write the change from one layout to another as lines of the file's own syntax.

    Returns:
        the lines; None where the file has no key for one of the fields that change.
    """
    lines = []
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    if any(config.origins[name][0].startswith(INLINE) for name in changed if name in config.origins):
        return None  # a line of JSON within another file
    for name in ("dp", "schedule", "engine"):
        changed.pop(name, None)  # they follow from the others
    if "chunks" in changed and "layers_per_chunk" in config.origins:
        layers = config.fields.get("layers") or 0
        changed["layers_per_chunk"] = layers // (after["pp"] * changed.pop("chunks")) if layers else 1
    if "deepspeed_file" in config.origins and changed.keys() & {"zero", "offload"}:  # another of axolotl's own files
        stage = {"none": after["zero"], "parameters": 4}.get(after["offload"], 0)
        changed = {name: value for name, value in changed.items() if name not in ("zero", "offload")}
        changed["deepspeed_file"] = stage
    if config.fields.get("experts") and after["tp"] > 1 and after["engine"] == "megatron-core":
        if not after["sequence_parallel"]:
            return None  # Megatron refuses it
        changed |= {} if config.fields.get("expert_tensor") == 1 else {"expert_tensor": 1}
    if changed.get("checkpointing", "full") != "full":  # a method is of whole layers alone
        methods = [*_on(config, "recompute_method"), *_on(config, "recomputed_layers")]
        lines += [_line(config, key, None) for key in methods]
    for name, value in changed.items():
        if name == "offload" and value == "none" and (keys := _on(config, name)):  # of all keys that offload something
            lines += [_line(config, *_written(config, name, value, key)) for key in keys]  # type: ignore[arg-type]
            continue
        key, written = _written(config, name, value)
        if name == "deepspeed_file" and isinstance(written, str):
            folder, slash, _ = str(config.origins[name][1]).rpartition("/")
            written = folder + slash + written
        if key is None:
            # Its number follows where the global batch has a key; written where the file leaves that open.
            if (
                name == "micro_batches"
                and (total := _written(config, "global_batch", after["dp"] * after["micro_batch"] * value))[0]
            ):
                lines += [] if "global_batch" in config.origins else [_line(config, *total)]  # type: ignore[arg-type]
                continue
            if name == "sequence_parallel" and config.program.defaults.get("sequence_parallel"):
                continue
            return None
        lines.append(_line(config, key, written))
        lines += [_line(config, *pair) for pair in _beside(config, key, written)]
    return tuple(lines)


def _keys_of(program: Program, name: str) -> list[str]:
    return [key for key, spec in program.keys.items() if (spec if isinstance(spec, str) else spec["to"]) == name]


def _on(config: ForeignConfig, name: str) -> list[str]:
    """List the keys of a field that the file has and that are on."""
    return [key for key in _keys_of(config.program, name) if key in config.switched]


def _written(config: ForeignConfig, name: str, value: Any, own_key: str = "") -> tuple[str | None, Any]:
    """Find the key for a field, one that the file has before others, and the value as the program writes it."""
    owner, nested = config.program, config.program.name == "accelerate"
    keys = _keys_of(owner, name)
    own_key = own_key or (owner.plain(config.origins[name][0]) if name in config.origins else "")
    if name == "checkpointing" and "recomputes" in config.origins:
        own_key = "disable_gradient_checkpointing"
    kind = {"fsdp": "fsdp_config", "deepspeed": "deepspeed_config", "megatron": "megatron_lm_config"}.get(
        config.fields.get("kind", "")
    )
    for key in sorted(keys, key=lambda key: key != own_key):
        if nested and kind and "." in key and not key.startswith(kind):
            continue
        spec = owner.keys[key]
        if isinstance(spec, str):
            return key, value
        words = {
            meaning: word for word, meaning in reversed(spec.items()) if word != "to" and type(meaning) is type(value)
        }
        if value in words:
            word = words[value]
            return key, {"true": True, "false": False}.get(word, int(word) if word.isdigit() else word)
        if value in (False, 0, "none"):  # a switch that is off is not written
            return key, None
        if any(type(meaning) is int for meaning in spec.values()) and type(value) is int and name != "zero":
            return key, value
    return None, None


def _full(config: ForeignConfig, key: str) -> str:
    """Write a key with the section that the file has it in, else with the one that its degrees are in."""
    entries = [name for name, _ in config.document.entries]
    if own := next((name for name in entries if config.program.plain(name) == key), ""):
        return own.removeprefix("--")
    degree, _ = config.origins.get("tp", ("", None))
    return (
        degree.rpartition(".")[0] + "." + key if "." in degree and "." not in key and config.program.sections else key
    )


def _beside(config: ForeignConfig, key: str, value: Any) -> list[tuple[str, Any]]:
    words = config.program.also.get(f"{key} {value}", "").split()
    return list(zip(words[::2], words[1::2], strict=True))


def _line(config: ForeignConfig, key: str, value: Any) -> str:
    """Write a key with its value as the file's form does; None is a key to take away."""
    form, name = config.document.form, _full(config, key)
    *sections, last = name.split(".")
    if value is None:
        option = f"--{name.replace('_', '-')}" if form == "words" else name
        return sentence("without", name=option)
    if form == "words":
        option = f"--{name}" if "." in name or config.program.name != "megatron" else f"--{name.replace('_', '-')}"
        return option if value is True else f"{option} {shlex.quote(str(value))}"
    text = json.dumps(value)
    if form == "python":
        return f"config.{name} = {value!r}"  # as torchtitan's registry changes a configuration
    if form == "toml":
        return f"{name} = {text}"
    if form == "yaml":
        plain = text if isinstance(value, bool | int) else value
        head = "".join(f"{'  ' * depth}{section}:\n" for depth, section in enumerate(sections))
        return f"{head}{'  ' * len(sections)}{last}: {plain}"
    return "".join(f'"{section}": {{' for section in sections) + f'"{last}": {text}' + "}" * len(sections)
