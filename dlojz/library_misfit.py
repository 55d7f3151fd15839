"""What cannot be asked of a training that is written as a library's user writes it.

Layer 1, loads no torch. Invariant: a run that exists with a library is one that its program can be asked for on its
command line; whether the library is installed is another question, asked when it is to be run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from dlojz import models
from dlojz.models.sizes import CoAtNetSize, GPTSize
from dlojz.text import say

if TYPE_CHECKING:
    from dlojz.config import RunConfig

NO_LIBRARY: Final = "none"
PLAIN_FIELDS: Final[dict[str, object]] = {
    "precision": "fp32",
    "optimizer": "adamw",
    "update": "auto",
    "curriculum": "none",
}
"""What the programs have one way of, and which."""
PLAIN_LAYOUT: Final[dict[str, object]] = {
    "ep": 1,
    "checkpointing": "none",
    "offload": "none",
    "bucket_mib": None,
    "gradient_as_bucket_view": False,
    "gradient_compression": "none",
}
"""The same, of the layout."""
LAID_OUT: Final[dict[str, tuple[tuple[str, tuple[int, ...]], ...]]] = {
    "torch": (("torch", (0, 2, 3)),),
    "deepspeed": (("deepspeed", (0, 1, 2, 3)),),
    "accelerate": (("torch", (0, 2, 3)), ("deepspeed", (0, 1, 2, 3))),
    "megatron": (("torch", (0,)), ("by_hand", (0,))),
    "colossalai": (("torch", (0,)),),
}
"""The engines and ZeRO stages that each library's program has an equal of."""
SPLITS: Final[dict[str, tuple[str, ...]]] = {"megatron": ("tp", "pp")}
"""The axes, besides replicas, along which each library's program splits a model."""


def engine_of(given: Mapping[str, Any]) -> dict[str, str]:
    """The engine that a library is, as a field of the layout, where no layout is given; nothing for the others."""
    return {"engine": "deepspeed"} if given.get("library") == "deepspeed" and given.get("layout") is None else {}


def fill_in_library(filled: dict[str, Any]) -> None:
    """Put the layout that a library has by default, where none was given."""
    if engine := engine_of(filled):
        filled["layout"] = engine


def library_misfit(config: RunConfig) -> str | None:
    """Why a run does not go with its library's program and what would work; None where it does."""
    name = config.library
    if name == NO_LIBRARY:
        return None
    if config.experts is not None:
        return say(
            en=f"model={config.model!r} has a mixture of experts, which no library's program here trains: use a dense "
            f"model such as gpt_tiny{or_none()}",
            fr=f"model={config.model!r} a un mélange d’experts, qu’aucun programme de bibliothèque n’entraîne ici : "
            f"prenez un modèle dense comme gpt_tiny{or_none()}",
        )
    for fields, one in ((PLAIN_FIELDS, config), (PLAIN_LAYOUT, config.layout)):
        for field, plain in fields.items():
            if (value := getattr(one, field)) != plain:
                return say(
                    en=f"{field}={value!r} is none of what the program of library={name!r} does: use {field}="
                    f"{plain!r}{or_none()}",
                    fr=f"{field}={value!r} n’est pas dans ce que fait le programme de library={name!r} : prenez "
                    f"{field}={plain!r}{or_none()}",
                )
    layout = config.layout
    for axis in ("tp", "pp"):
        degree = getattr(layout, axis)
        if degree > 1 and axis not in SPLITS.get(name, ()):
            return say(
                en=f"{axis}={degree} was received, but the program of library={name!r} splits no model that way: use "
                f"{axis}=1{or_none()}",
                fr=f"{axis}={degree} a été reçu, mais le programme de library={name!r} ne découpe pas ainsi le "
                f"modèle : prenez {axis}=1{or_none()}",
            )
    return _own_misfit(config) or _engine_misfit(config)


def or_none() -> str:
    """How a sentence ends that may be answered by the lab's own training, instead of a library's program."""
    return say(en=", or library='none'.", fr=", ou library='none'.")


def stage_misfit(name: str, zero: object) -> str | None:
    """Why a library's program is not asked for this ZeRO stage, whatever the engine; None where it can be.

    Args:
        name: of the library.
        zero: stage; None where none is asked for.
    """
    stages = sorted({stage for _, known in LAID_OUT[name] for stage in known})
    if zero is None or zero in stages:
        return None
    works = ", ".join(map(str, stages))
    return say(
        en=f"zero={zero} was received, but the program of library={name!r} has zero={works} only.",
        fr=f"zero={zero} a été reçu, mais le programme de library={name!r} n’a que zero={works}.",
    )


def _own_misfit(config: RunConfig) -> str | None:
    """What a library has against this model, or this way of splitting it; None where it has nothing."""
    own = {"megatron": _megatron_misfit, "colossalai": _colossalai_misfit}.get(config.library)
    return own(config) if own else None


def _megatron_misfit(config: RunConfig) -> str | None:
    size, layout = models.spec(config.model).size, config.layout
    if not isinstance(size, GPTSize):  # its mixtures are refused with the routing of their experts
        return say(
            en=f"model={config.model!r} was received, but the program of library='megatron' trains Megatron-core's own "
            f"GPT: use a model of the gpt family such as gpt_tiny{or_none()}",
            fr=f"model={config.model!r} a été reçu, mais le programme de library='megatron' entraîne le GPT de "
            f"Megatron-core : prenez un modèle de la famille gpt comme gpt_tiny{or_none()}",
        )
    if layout.sequence_parallel:
        return say(
            en="sequence_parallel=True was received, but without NVIDIA's Apex or Transformer Engine Megatron-core's "
            f"GPT has torch's layer norm, which it refuses to combine with it: use sequence_parallel=False{or_none()}",
            fr="sequence_parallel=True a été reçu, mais sans Apex ni Transformer Engine de NVIDIA le GPT de "
            "Megatron-core prend la layer norm de torch, qu’il refuse de combiner avec : prenez "
            f"sequence_parallel=False{or_none()}",
        )
    if layout.pp > 1 and layout.schedule not in (None, "1f1b"):
        return say(
            en=f"schedule={layout.schedule!r} was received, but the program of library='megatron' asks Megatron-core "
            f"for 1f1b: use schedule='1f1b'{or_none()}",
            fr=f"schedule={layout.schedule!r} a été reçu, mais le programme de library='megatron' demande 1f1b à "
            f"Megatron-core : prenez schedule='1f1b'{or_none()}",
        )
    if size.depth % layout.pp:
        return say(
            en=f"pp={layout.pp} was received, but Megatron-core gives each stage as many layers, and {config.model} "
            f"has {size.depth}: use a pp that divides {size.depth}.",
            fr=f"pp={layout.pp} a été reçu, mais Megatron-core donne à chaque étage autant de couches, et "
            f"{config.model} en a {size.depth} : prenez un pp qui divise {size.depth}.",
        )
    return None


def _colossalai_misfit(config: RunConfig) -> str | None:
    if not isinstance(models.spec(config.model).size, CoAtNetSize):
        return None
    return say(
        en=f"model={config.model!r} has BatchNorm, which Colossal-AI turns into SyncBatchNorm: that computes on GPUs "
        f"only and over the samples of all replicas, which is another training: use a vit, gpt or llama "
        f"model{or_none()}",
        fr=f"model={config.model!r} a des BatchNorm, que Colossal-AI change en SyncBatchNorm : celle-ci ne calcule que "
        "sur GPU et sur les échantillons de toutes les répliques, ce qui est un autre entraînement : prenez un modèle "
        f"vit, gpt ou llama{or_none()}",
    )


def _engine_misfit(config: RunConfig) -> str | None:
    name, layout = config.library, config.layout
    known = LAID_OUT[name]
    engine = "torch" if layout.engine == "single" else layout.engine
    if any(engine == one and layout.zero in stages for one, stages in known):
        return None
    works = ", ".join(f"engine={one!r}, zero={'|'.join(map(str, stages))}" for one, stages in known)
    return say(
        en=f"engine={layout.engine!r}, zero={layout.zero} was received, but the program of library={name!r} has no "
        f"such layout: use {works}.",
        fr=f"engine={layout.engine!r}, zero={layout.zero} a été reçu, mais le programme de library={name!r} n’a pas "
        f"cette répartition : prenez {works}.",
    )
