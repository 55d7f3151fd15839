"""How gradients leave: in buckets, and as what. What cannot be combined with it.

Layer 1. Invariant: a layout that names a way of sending gradients has an engine that sends them that way.

Source: torch 2.13, `distributed/algorithms/ddp_comm_hooks`; Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient
Compression for Distributed Optimization" (arXiv 1905.13727).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dlojz.text import say

if TYPE_CHECKING:
    from dlojz.layout import Layout

POWERSGD_LEAST_START: Final = 2
"""Steps in full before PowerSGD, at least: DDP fills its buckets anew in its second step, and errors belong to buckets.

Source: torch 2.13, `powerSGD_hook.py`, `PowerSGDState.__init__`."""
POWERSGD_START_SHARE: Final = 10
"""One step in so many is sent in full before PowerSGD begins: torch's advice is to start with 10 % of the run.

Source: torch 2.13, `powerSGD_hook.py`, docstring of `PowerSGDState`, `start_powerSGD_iter`."""


def powersgd_start(steps: int) -> int:
    """Steps at the start of a run whose gradients PowerSGD sends in full."""
    return max(POWERSGD_LEAST_START, steps // POWERSGD_START_SHARE)


def begins_anew(steps: int) -> str:
    """What is said where a run goes on whose gradients PowerSGD compresses."""
    return say(
        en=f"a checkpoint keeps no errors of PowerSGD, as they belong to DDP's buckets: the next {steps} steps send "
        "their gradients in full, and compression then begins anew.",
        fr=f"un checkpoint ne garde pas les erreurs de PowerSGD, qui appartiennent aux buckets de DDP : les {steps} "
        "prochains pas envoient leurs gradients en entier, puis la compression repart de zéro.",
    )


def gradients_title(layout: Layout) -> str:
    """What a person adds to the name of a layout that compresses its gradients, e.g. ` + PowerSGD-4`."""
    names = {"none": "", "fp16": " + fp16", "bf16": " + bf16", "powersgd": f" + PowerSGD-{layout.powersgd_rank}"}
    return names[layout.gradient_compression]


def gradients_refusal(layout: Layout) -> str | None:
    """Why the fields of a layout do not go with how its gradients leave and what would work; None where they do."""
    if layout.bucket_mib is not None and layout.strategy not in ("ddp", "by_hand"):
        return say(
            en=f"bucket_mib={layout.bucket_mib:g} was received, but {layout.title} has no such buckets: use it with "
            "DDP (engine 'torch', zero=0, dp=2 or more) or engine 'by_hand'.",
            fr=f"bucket_mib={layout.bucket_mib:g} a été reçu, mais {layout.title} n’a pas de tels buckets : prenez-le "
            "avec DDP (engine='torch', zero=0, dp=2 ou plus) ou engine='by_hand'.",
        )
    if layout.gradient_as_bucket_view and layout.strategy != "ddp":
        return say(
            en=f"gradient_as_bucket_view is an option of DDP, but {layout.title} was received: use it with engine "
            "'torch', zero=0, dp=2 or more.",
            fr=f"gradient_as_bucket_view est une option de DDP, mais {layout.title} a été reçu : prenez-la avec "
            "engine='torch', zero=0, dp=2 ou plus.",
        )
    return _compression_refusal(layout)


def _compression_refusal(layout: Layout) -> str | None:
    """The same, of what the gradients are sent as."""
    compression = layout.gradient_compression
    if layout.powersgd_rank != 1 and compression != "powersgd":
        return say(
            en=f"powersgd_rank={layout.powersgd_rank} was received, but gradient_compression={compression!r} has no "
            "such matrices: use gradient_compression='powersgd', or leave powersgd_rank out.",
            fr=f"powersgd_rank={layout.powersgd_rank} a été reçu, mais gradient_compression={compression!r} n’a pas "
            "de telles matrices : prenez gradient_compression='powersgd', ou retirez powersgd_rank.",
        )
    if compression == "none" or (layout.strategy == "ddp" and layout.tp == 1):
        return None
    if layout.dp == 1:
        return say(
            en=f"gradient_compression={compression!r} compresses what replicas send each other, but dp=1 sends "
            "nothing: use dp=2 or more with engine='torch', zero=0, or leave it out.",
            fr=f"gradient_compression={compression!r} compresse ce que s’envoient les répliques, mais dp=1 n’envoie "
            "rien : prenez dp=2 ou plus avec engine='torch', zero=0, ou retirez-la.",
        )
    return say(
        en=f"gradient_compression={compression!r} is a hook of torch's DDP, but {layout.title} was received: use "
        "engine='torch', zero=0, tp=1, pp=1 with dp=2 or more.",
        fr=f"gradient_compression={compression!r} est un « hook » du DDP de torch, mais {layout.title} a été reçu : "
        "prenez engine='torch', zero=0, tp=1, pp=1 avec dp=2 ou plus.",
    )
