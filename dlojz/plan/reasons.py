"""The closed list of reasons for which a layout is refused, in the words of a table.

Layer 4. Invariant: every refusal is one of these; what merely makes a layout slow is advice, never a reason.
"""

from __future__ import annotations

from typing import Final

from dlojz.text import say

NAMES: Final = (
    "gpus",
    "engine",
    "split",
    "sequence",
    "stages",
    "chunks",
    "batch",
    "schedule",
    "memory",
    "host",
    "hours",
)
"""All reasons, in the order in which they are looked at; `gpus` is met only where a layout is asked for by name."""


def reason_words(name: str) -> str:
    """A reason in a few words of the reader's language."""
    return {
        "same": say(en="says the same as a plainer layout", fr="revient à une configuration plus simple"),
        "gpus": say(
            en="the product of the degrees is not the number of GPUs",
            fr="le produit des degrés n’est pas le nombre de GPU",
        ),
        "engine": say(en="the library does not offer it", fr="la bibliothèque ne le propose pas"),
        "split": say(en="tp does not divide heads or widths", fr="tp ne divise pas les têtes ou les largeurs"),
        "sequence": say(en="the ranks do not divide the sequence", fr="les rangs ne divisent pas la séquence"),
        "stages": say(en="the layers cannot fill the stages", fr="les couches ne remplissent pas les étages"),
        "chunks": say(en="the layers cannot fill the chunks", fr="les couches ne remplissent pas les chunks"),
        "batch": say(en="the batch cannot be dealt out", fr="le batch ne se répartit pas"),
        "schedule": say(
            en="too few, or unsuited, micro-batches for the schedule",
            fr="nombre de micro-batches inadapté à l’ordonnancement",
        ),
        "memory": say(en="out of memory (OOM)", fr="mémoire insuffisante (OOM)"),
        "host": say(en="the host's memory is too small", fr="mémoire de l’hôte insuffisante"),
        "hours": say(en="not done within the time allowed", fr="pas terminé dans le temps accordé"),
    }[name]


def part_words(name: str) -> str:
    """A part of a step, or a category of memory, in the reader's language."""
    return {
        "forward": say(en="forward", fr="passe avant"),
        "backward": say(en="backward", fr="passe arrière"),
        "recompute": say(en="recomputation", fr="recalcul"),
        "tensor": say(en="tensor-parallel messages", fr="messages du Tensor Parallelism"),
        "pipeline": say(en="pipeline messages", fr="messages du pipeline"),
        "bubble": say(en="pipeline bubble", fr="bulle du pipeline"),
        "data": say(en="data-parallel messages, exposed", fr="messages du Data Parallelism, exposés"),
        "optimizer": say(en="optimizer", fr="optimiseur"),
        "constant": say(en="constant per step", fr="constante par itération"),
        "weights": say(en="weights", fr="poids"),
        "gradients": say(en="gradients", fr="gradients"),
        "activations": say(en="activations", fr="activations"),
        "edges": say(en="embedding and logits", fr="embedding et logits"),
        "live": say(en="layer being computed", fr="couche en cours de calcul"),
        "reserve": say(en="CUDA, NCCL, fragments", fr="CUDA, NCCL, fragments"),
    }[name]


def decimal(value: float, digits: int = 1) -> str:
    """A number with the decimal mark of the reader's language."""
    written = f"{value:,.{digits}f}"
    return say(en=written, fr=written.replace(",", "\u202f").replace(".", ","))


def shortest(value: float) -> str:
    """A number with no more digits than it takes, with the decimal mark of the reader's language."""
    return say(en=f"{value:g}", fr=f"{value:g}".replace(".", ","))


def more_percent(ratio: float) -> str:
    """How much more a ratio is than one, in whole percent with its sign; ±0 where it rounds to nothing."""
    percent = round(100 * (ratio - 1))
    return f"{percent:+d} %".replace("-", "−") if percent else "±0 %"


def gigabytes(num_bytes: float) -> str:
    """Bytes as decimal gigabytes, as the tables of the literature print them; with a proper minus sign."""
    unit = say(en="GB", fr="Go")
    digits = 2 if abs(num_bytes) < 1e9 else 1
    return f"{decimal(num_bytes / 1e9, digits)} {unit}".replace("-", "−")
