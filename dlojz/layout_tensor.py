"""What cannot be combined with tensor parallelism, and what a model's sizes allow.

Layer 1. Invariant: heads, groups of heads and hidden widths are shared out whole and equally; only a vocabulary may be
shared out unequally.

Source: Shoeybi et al. 2019 (arXiv 1909.08053), §3, for heads; Korthikanti et al. 2022 (arXiv 2205.05198), §4.2.2, for
the sequence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dlojz import models
from dlojz.models.sizes import AlexNetSize, CoAtNetSize, GPTSize, LlamaSize, ViTSize
from dlojz.text import say

if TYPE_CHECKING:
    from dlojz.config import RunConfig
    from dlojz.layout import Layout

MAX_PATTERN = 200


def tensor_refusal(layout: Layout) -> str | None:
    """Why the fields of a layout do not go with its tensor parallelism and what would work; None where they do."""
    if layout.tp == 1:
        for name, plain in (("sequence_parallel", False), ("tensor_parts", ""), ("async_tensor_parallel", False)):
            value = getattr(layout, name)
            if value != plain:
                return say(
                    en=f"{name}={value!r} needs tensor parallelism, but tp=1 was received: set tp to 2 or more.",
                    fr=f"{name}={value!r} demande du Tensor Parallelism, mais tp=1 a été reçu : prenez tp=2 ou plus.",
                )
        return None
    if layout.sequence_parallel and layout.tensor_parts:
        return say(
            en="sequence_parallel needs every part split, as a whole one would miss the other ranks' tokens, but "
            f"tensor_parts={layout.tensor_parts!r} was received: leave one of the two out.",
            fr="sequence_parallel demande que toutes les parties soient découpées, car il manquerait à une partie "
            f"entière les tokens des autres rangs, mais tensor_parts={layout.tensor_parts!r} a été reçu : retirez l’un "
            "des deux.",
        )
    if layout.async_tensor_parallel and layout.engine != "torch":
        return say(
            en=f"async_tensor_parallel is torch's, but engine={layout.engine!r} was received: use engine='torch'.",
            fr=f"async_tensor_parallel est une option de torch, mais engine={layout.engine!r} a été reçu : prenez "
            "engine='torch'.",
        )
    return _pattern_refusal(layout.tensor_parts)


def _pattern_refusal(pattern: str) -> str | None:
    try:
        re.compile(pattern)
        problem = "" if len(pattern) <= MAX_PATTERN else say(en="too long", fr="trop long")
    except re.error as error:
        problem = str(error)
    if not problem:
        return None
    return say(
        en=f"tensor_parts={pattern[:60]!r} is no regular expression ({problem}): write e.g. attention, mlp, or "
        "blocks\\.[0-3]\\.",
        fr=f"tensor_parts={pattern[:60]!r} n’est pas une expression régulière ({problem}) : écrivez par exemple "
        "attention, mlp, ou blocks\\.[0-3]\\.",
    )


def tensor_misfit(config: RunConfig) -> str | None:
    """Why a model's sizes do not go with a run's tensor parallelism and what would work; None where they do."""
    tp = config.layout.tp
    if tp == 1:
        return None
    size = models.spec(config.model).size
    if isinstance(size, AlexNetSize):
        return say(
            en=f"tp={tp} was received, but {config.model} has no tensor-parallel form: use a model of the coatnet, "
            "vit, gpt or llama families, or tp=1.",
            fr=f"tp={tp} a été reçu, mais {config.model} n’a pas de forme Tensor Parallel : prenez un modèle des "
            "familles coatnet, vit, gpt ou llama, ou tp=1.",
        )
    shared = list(_shared_out(size))
    for en, fr, number in shared:
        if number % tp:
            fitting = [d for d in range(2, min(number, 64) + 1) if all(n % d == 0 for _, _, n in shared)]
            works = ", ".join(f"tp={degree}" for degree in fitting) or "tp=1"
            return say(
                en=f"tp={tp} does not divide the {number} {en} of {config.model}: use {works}.",
                fr=f"tp={tp} ne divise pas les {number} {fr} de {config.model} : prenez {works}.",
            )
    return _sequence_misfit(config) if config.layout.sequence_parallel else None


def _sequence_misfit(config: RunConfig) -> str | None:
    tp, length = config.layout.tp, config.sequence_length
    if length is None:
        return say(
            en=f"sequence_parallel shares out the tokens of a text, but {config.model} reads images: use a gpt or "
            "llama model, or leave it out.",
            fr=f"sequence_parallel partage les tokens d’un texte, mais {config.model} lit des images : prenez un "
            "modèle gpt ou llama, ou retirez-le.",
        )
    if length % tp:
        near = max(tp, length - length % tp)
        return say(
            en=f"sequence_parallel shares {length} tokens among tp={tp} ranks, which does not come out even: use "
            f"sequence_length={near} or another multiple of {tp}.",
            fr=f"sequence_parallel partage {length} tokens entre tp={tp} rangs, ce qui ne tombe pas juste : prenez "
            f"sequence_length={near} ou un autre multiple de {tp}.",
        )
    return None


def _shared_out(size: CoAtNetSize | ViTSize | GPTSize | LlamaSize) -> Iterator[tuple[str, str, int]]:
    """What `tp` must divide: its name in English and in French, and how many there are."""
    if isinstance(size, CoAtNetSize):
        yield "channels of the stem", "canaux du premier bloc", size.stem_width
        for stage in size.stages:
            if stage.kind == "attention":
                yield "attention heads", "têtes d’attention", stage.width // size.head_dim
            yield "channels of a stage", "canaux d’un étage", stage.width
        return
    yield "attention heads", "têtes d’attention", size.num_heads
    if isinstance(size, LlamaSize):
        yield "key-value heads", "têtes de clés et valeurs", size.num_kv_heads
    yield "hidden features", "neurones cachés", 4 * size.width if isinstance(size, GPTSize) else size.mlp_width


def tensor_title(layout: Layout, rest: str) -> str:
    """The name a person gives to a layout with tensor parallelism, e.g. `TP × 2 (by hand), DDP × 2`."""
    runs = {"torch": "torch", "by_hand": say(en="by hand", fr="à la main")}.get(layout.engine, layout.engine)
    sequence = say(en=", sequence parallel", fr=", Sequence Parallelism") if layout.sequence_parallel else ""
    alone = layout.pp == 1 and layout.dp == 1 and not layout.zero
    return f"TP × {layout.tp} ({runs}{sequence})" + ("" if alone else f", {rest}")
