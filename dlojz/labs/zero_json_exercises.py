"""Lab 04: DeepSpeed's configuration, written for a run.

Layer 6 (labs). Invariant: what is judged is what DeepSpeed would do with the file, read back by
`dlojz.train.deepspeed_json`; no text is compared, and keys that change nothing are nobody's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from dlojz.config import RunConfig
from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.verdict import Said
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.units import MEBIBYTE

UNSAID = 97
"""Micro-batch of a run about which the file says nothing; no case asks for it."""


def deepspeed_settings(config: RunConfig, bucket_mib: float) -> dict[str, Any]:
    """DeepSpeed's configuration for a run, in its own words.

    Args:
        config: of which stage, offloading, precision and sizes of batches are said.
        bucket_mib: MiB of gradients that are reduced together; DeepSpeed counts elements.

    Source: deepspeed.ai, "DeepSpeed Configuration JSON".
    """
    layout = config.layout
    zero: dict[str, Any] = {"stage": layout.zero, "reduce_bucket_size": bucket_elements(config, bucket_mib)}
    if layout.offload in ("optimizer", "parameters"):
        zero["offload_optimizer"] = {"device": "cpu"}
    if layout.offload == "parameters":
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_batch_size": layout.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches,
        "bf16": {"enabled": config.precision == "bf16"},
        "zero_optimization": zero,
    }


def bucket_elements(config: RunConfig, bucket_mib: float) -> int:
    """Gradients in a bucket of so many MiB: of 2 bytes each in bf16, 4 in fp32."""
    return int(bucket_mib * MEBIBYTE) // (2 if config.precision == "bf16" else 4)


def _cases() -> list[tuple[RunConfig, float]]:
    common = {"engine": "deepspeed", "model": "coatnet_tiny"}
    return [
        (RunConfig.of(dp=4, zero=2, micro_batch=8, **common), 50),
        (RunConfig.of(dp=2, zero=1, micro_batch=16, micro_batches=4, precision="bf16", **common), 10),
        (RunConfig.of(dp=8, zero=3, micro_batch=2, offload="parameters", precision="bf16", **common), 100),
        (RunConfig.of(dp=3, zero=2, micro_batch=5, micro_batches=2, offload="optimizer", **common), 25),
        (RunConfig.of(dp=16, zero=3, micro_batch=4, offload="optimizer", precision="bf16", **common), 200),
    ]


def _judge(answer: Callable[..., Any]) -> None:
    for config, bucket_mib in _cases():
        document = answer(config, bucket_mib)
        text = _text(document)
        _check_batch(document, config)
        layout = config.layout
        base = RunConfig.of(model=config.model, dp=layout.dp, engine="deepspeed", micro_batch=UNSAID)
        try:
            given = _read(text, base)
        except LabError as error:
            raise Wrong(
                say(
                    en=f"Asked for: {_asked(config)}. With your settings, DeepSpeed or the lab refuses: {error}",
                    fr=f"Demandé : {_asked(config)}. Avec vos réglages, DeepSpeed ou le TP refuse : {error}",
                )
            ) from None
        _compare(given, config)
        _check_bucket(document["zero_optimization"].get("reduce_bucket_size"), config, bucket_mib)


def _read(text: str, base: RunConfig) -> RunConfig:
    from dlojz.train.deepspeed_json import read_deepspeed_json

    return read_deepspeed_json(text, base)


def _asked(config: RunConfig) -> str:
    """The run in the words of `RunConfig`."""
    layout = config.layout
    return (
        f"dp={layout.dp}, zero={layout.zero}, micro_batch={layout.micro_batch}, micro_batches={layout.micro_batches}, "
        f"precision={config.precision!r}, offload={layout.offload!r}"
    )


def _text(document: object) -> str:
    if document is None:
        raise Wrong(
            say(
                en="Your function returns nothing: end it with return.",
                fr="Votre fonction ne renvoie rien : terminez-la par return.",
            )
        )
    if not isinstance(document, Mapping):
        raise Wrong(
            say(
                en=f"A dictionary is expected, but your function returns a {type(document).__name__}: json.dump will "
                "write it to the file.",
                fr="Un dictionnaire est attendu, mais votre fonction renvoie un objet de type "
                f"{type(document).__name__} : json.dump se chargera de l’écrire dans le fichier.",
            )
        )
    try:
        return json.dumps(document)
    except (TypeError, ValueError) as error:
        raise Wrong(
            say(
                en=f"This dictionary cannot be written as JSON ({error}): use numbers, texts, True, False, lists and "
                "dictionaries.",
                fr=f"Ce dictionnaire ne s’écrit pas en JSON ({error}) : mettez-y des nombres, des textes, True, False, "
                "des listes et des dictionnaires.",
            )
        ) from None


def _check_batch(document: Mapping[str, Any], config: RunConfig) -> None:
    layout = config.layout
    total, micro = document.get("train_batch_size"), document.get("train_micro_batch_size_per_gpu")
    if total is None and micro is None:
        raise Wrong(
            say(
                en="DeepSpeed refuses a file that gives no size of batch: write train_micro_batch_size_per_gpu, "
                "gradient_accumulation_steps, or train_batch_size, their product with the number of ranks.",
                fr="DeepSpeed refuse un fichier sans taille de batch : écrivez train_micro_batch_size_per_gpu, "
                "gradient_accumulation_steps, ou train_batch_size, leur produit par le nombre de rangs.",
            )
        )
    if total == layout.micro_batch * layout.micro_batches != layout.global_batch:
        raise Wrong(
            say(
                en=f"train_batch_size={total} is the batch of one rank; DeepSpeed wants that of all {layout.dp} ranks: "
                "config.layout.global_batch.",
                fr=f"train_batch_size={total} est le batch d’un seul rang ; DeepSpeed attend celui des {layout.dp} "
                "rangs : config.layout.global_batch.",
            )
        )
    if micro == layout.global_batch != layout.micro_batch:
        raise Wrong(
            say(
                en=f"train_micro_batch_size_per_gpu={micro} is the global batch; one rank reads {layout.micro_batch} "
                "samples in one forward pass: config.layout.micro_batch.",
                fr=f"train_micro_batch_size_per_gpu={micro} est le batch global ; un rang lit {layout.micro_batch} "
                "échantillons par passe avant : config.layout.micro_batch.",
            )
        )


def _compare(given: RunConfig, config: RunConfig) -> None:
    pairs = {
        "zero": ("zero_optimization.stage", given.layout.zero, config.layout.zero),
        "precision": ("bf16.enabled", given.precision, config.precision),
        "micro_batch": ("train_micro_batch_size_per_gpu", given.layout.micro_batch, config.layout.micro_batch),
        "micro_batches": ("gradient_accumulation_steps", given.layout.micro_batches, config.layout.micro_batches),
        "offload": (
            "zero_optimization.offload_optimizer, offload_param",
            given.layout.offload,
            config.layout.offload,
        ),
    }
    for name, (key, read, wanted) in pairs.items():
        if read != wanted:
            raise Wrong(
                say(
                    en=f"Asked for: {_asked(config)}. DeepSpeed would run your settings with {name}={read!r}, not "
                    f"{wanted!r}: look at {key}.",
                    fr=f"Demandé : {_asked(config)}. Avec vos réglages, DeepSpeed prendrait {name}={read!r} et non "
                    f"{wanted!r} : regardez {key}.",
                )
            )


def _check_bucket(given: Any, config: RunConfig, bucket_mib: float) -> None:
    right, each = bucket_elements(config, bucket_mib), 2 if config.precision == "bf16" else 4
    if given == right:
        return
    if given is None:
        en, fr = (
            "reduce_bucket_size is missing; left out it is 500,000,000 elements, 1 GB in bf16.",
            "reduce_bucket_size manque ; par défaut, ce sont 500 000 000 éléments, soit 1 Go en bf16.",
        )
    elif given in (right * each, bucket_mib):
        en, fr = (
            f"reduce_bucket_size={given} is a number of bytes or MiB, but DeepSpeed counts elements, of {each} bytes "
            f"each in {config.precision}: {right}.",
            f"reduce_bucket_size={given} est un nombre d’octets ou de Mio, mais DeepSpeed compte des éléments, de "
            f"{each} octets chacun en {config.precision} : {right}.",
        )
    else:
        en, fr = (
            f"reduce_bucket_size={given}, but {bucket_mib:g} MiB hold {right} gradients of {each} bytes "
            f"({config.precision}).",
            f"reduce_bucket_size={given}, or {bucket_mib:g} Mio contiennent {right} gradients de {each} octets "
            f"({config.precision}).",
        )
    raise Wrong(say(en=en, fr=fr))


DEEPSPEED_JSON = Exercise(
    id="deepspeed-json",
    title=Said("DeepSpeed's JSON", "le JSON de DeepSpeed"),
    judge=_judge,
    praise=Said(
        "Right: five runs, and DeepSpeed would do each of them as asked.",
        "Exact : cinq exécutions, et DeepSpeed ferait chacune comme demandé.",
    ),
    hints=(
        Said(
            "The top level has the sizes of batches, bf16 and zero_optimization; what is ZeRO's own (stage, bucket, "
            "offloading) goes into the latter.",
            "Au premier niveau : les tailles de batch, bf16 et zero_optimization ; tout ce qui est propre à ZeRO "
            "(stage, bucket, déchargement) va dans cette dernière section.",
        ),
        Said(
            'zero_optimization: "stage", "reduce_bucket_size" (bucket_mib * 2**20 // 2 in bf16, // 4 in fp32) and, for '
            'offload "optimizer", "offload_optimizer": {"device": "cpu"}; for "parameters", "offload_param" as well.',
            'zero_optimization : "stage", "reduce_bucket_size" (bucket_mib * 2**20 // 2 en bf16, // 4 en fp32) et, '
            'pour offload "optimizer", "offload_optimizer": {"device": "cpu"} ; pour "parameters", '
            '"offload_param" en plus.',
        ),
    ),
)
