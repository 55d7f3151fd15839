"""What cannot be combined with a pipeline, and why.

Layer 1. Invariant: only what follows from the fields of a layout; what a schedule itself needs (micro-batches, an even
number of ranks) is said by `dlojz.pipeline.catalogue`, which makes it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dlojz.text import say

if TYPE_CHECKING:
    from dlojz.layout import Layout

METHODS = ("uniform", "parameters", "flops")
PATTERN = "type:"
BOUNDS = "at:"
MAX_PATTERN = 200


def explicit_bounds(partition: str) -> tuple[int, ...] | None:
    """First blocks of the stages after the first, where `partition` lists them; None where it names a method."""
    if not partition.startswith(BOUNDS):
        return None
    parts = partition.removeprefix(BOUNDS).split(",")
    return tuple(int(part) for part in parts) if all(re.fullmatch(r"\s*\d{1,6}\s*", part) for part in parts) else ()


def pipeline_refusal(layout: Layout) -> str | None:
    """Why the fields of a layout do not go with its pipeline and what would work; None where they do."""
    if layout.pp == 1:
        return _without_a_pipeline(layout)
    if layout.zero >= 2 and (refusal := _sharding_refusal(layout)) is not None:
        return refusal
    if layout.engine == "deepspeed" and layout.schedule not in (None, "1f1b"):
        return say(
            en=f"DeepSpeed's pipeline has one schedule, 1f1b, but schedule={layout.schedule!r} was received: use "
            "engine='torch' or 'by_hand' for it, or leave schedule out.",
            fr=f"le pipeline de DeepSpeed n’a qu’un ordonnancement, 1f1b, mais schedule={layout.schedule!r} a été "
            "reçu : prenez engine='torch' ou 'by_hand', ou retirez schedule.",
        )
    if layout.engine == "deepspeed" and layout.chunks not in (None, 1):
        return say(
            en=f"DeepSpeed's pipeline has one stage per rank, but chunks={layout.chunks} was received: use "
            "engine='torch' or 'by_hand', or chunks=1.",
            fr=f"le pipeline de DeepSpeed a un étage par rang, mais chunks={layout.chunks} a été reçu : prenez "
            "engine='torch' ou 'by_hand', ou chunks=1.",
        )
    return _partition_refusal(layout)


def _sharding_refusal(layout: Layout) -> str | None:
    if layout.zero == 3 and layout.engine == "torch":
        return say(
            en=f"zero=3 would gather a stage's weights anew for every micro-batch of a pipeline (pp={layout.pp}): use "
            "zero=2, which gathers them once per step, or zero=0.",
            fr="zero=3 rassemblerait à nouveau les poids d’un étage pour chaque micro-batch d’un pipeline "
            f"(pp={layout.pp}) : prenez zero=2, qui les rassemble une fois par itération, ou zero=0.",
        )
    if layout.engine == "torch":
        return None
    return say(
        en=f"zero={layout.zero} shards gradients that a pipeline accumulates over micro-batches, so it cannot be "
        f"combined with pp={layout.pp}: use zero=1 or zero=0 with a pipeline, or engine='torch' with zero=2 (FSDP2).",
        fr=f"zero={layout.zero} découpe des gradients qu’un pipeline accumule sur ses micro-batches : il ne "
        f"se combine pas avec pp={layout.pp} ; avec un pipeline, prenez zero=1 ou zero=0, ou engine='torch' avec "
        "zero=2 (FSDP2).",
    )


def _without_a_pipeline(layout: Layout) -> str | None:
    for name, plain in (("schedule", None), ("chunks", None), ("partition", "uniform")):
        value = getattr(layout, name)
        if value != plain:
            return say(
                en=f"{name}={value!r} needs a pipeline, but pp=1 was received: set pp to 2 or more.",
                fr=f"{name}={value!r} demande un pipeline, mais pp=1 a été reçu : prenez pp=2 ou plus.",
            )
    return None


def _partition_refusal(layout: Layout) -> str | None:
    method = layout.partition
    if method.startswith(PATTERN) and 0 < len(method.removeprefix(PATTERN)) <= MAX_PATTERN:
        return _pattern_refusal(method)
    bounds = explicit_bounds(method)
    listed = bool(bounds) and 0 not in (bounds or ()) and list(bounds or ()) == sorted(set(bounds or ()))
    if not (listed or method in METHODS):
        return say(
            en=f"partition={method[:60]!r} is unknown: use uniform, parameters, flops, type:REGEX (class names of "
            "blocks), or at:4,8,12 with increasing first blocks of the stages after the first.",
            fr=f"partition={method[:60]!r} est inconnu : prenez uniform, parameters, flops, type:REGEX (noms de classe "
            "des blocs), ou at:4,8,12, premiers blocs croissants des étages après le premier.",
        )
    if layout.engine == "deepspeed" and (listed or method == "flops"):
        return say(
            en=f"DeepSpeed shares blocks out by uniform, parameters or type:REGEX, but partition={method!r} was "
            "received: use one of these.",
            fr=f"DeepSpeed répartit les blocs par uniform, parameters ou type:REGEX, mais partition={method!r} a été "
            "reçu : prenez l’un des trois.",
        )
    return None


def _pattern_refusal(method: str) -> str | None:
    try:
        re.compile(method.removeprefix(PATTERN))
    except re.error as error:
        return say(
            en=f"partition={method!r} is no regular expression ({error}): write e.g. type:AttentionBlock.",
            fr=f"partition={method!r} n’est pas une expression régulière ({error}) : écrivez par exemple "
            "type:AttentionBlock.",
        )
    return None


def pipeline_title(layout: Layout) -> str:
    """The name a person gives to a pipeline, e.g. `pipeline 1f1b × 4 (torch), dp=2`."""
    runs = {"torch": "torch", "deepspeed": "DeepSpeed", "by_hand": say(en="by hand", fr="à la main")}[layout.engine]
    chunks = f" × {layout.chunks}" if layout.chunks else ""
    zero = f", ZeRO-{layout.zero}" if layout.zero else ""
    replicas = f", dp={layout.dp}" if layout.dp > 1 else ""
    return f"pipeline {layout.schedule or '1f1b'} × {layout.pp}{chunks} ({runs}{zero}{replicas})"
