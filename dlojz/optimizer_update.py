"""How an optimizer goes through the parameters: the forms of one update, and what cannot be asked of them.

Layer 1, loads no torch. Invariant: every form computes the same update; what differs is how many kernels are launched,
which temporaries are there, and how long gradients live.

    form          kernels             temporaries of AdamW        gradients
    for_loop      some per parameter  twice the largest tensor    all, until the update
    foreach       some for all        one tensor per parameter    all, until the update
    fused         one for all         none                        all, until the update
    in_backward   some per parameter  twice the tensor's own      freed as they come: those of about one module
    in_forward    some per parameter  twice the tensor's own      all, until their module is used again

Source: torch 2.13, `optim/adam.py` and `optim/sgd.py` (for_loop, foreach, fused); Jiang et al. 2021, "Optimizer Fusion:
Efficient Training with Better Locality and Parallelism" (arXiv 2104.00237), backward-fusion and forward-fusion.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dlojz.text import say

if TYPE_CHECKING:
    from dlojz.config import RunConfig

AT_ONCE: Final = ("for_loop", "foreach", "fused")
"""Forms of an update after the backward pass."""
IN_PASSES: Final = ("in_backward", "in_forward")
"""Forms of an update within the passes."""
OPTIMIZERS: Final = ("sgd", "momentum", "adamw")
"""Optimizers that have all these forms."""


def update_misfit(config: RunConfig) -> str | None:
    """Why the form of a run's update does not go with the rest of it and what would work; None where it does."""
    form, layout = config.update, config.layout
    if form == "auto":
        return None
    if config.optimizer not in OPTIMIZERS:
        return say(
            en=f"update={form!r} is a form of {', '.join(OPTIMIZERS)}, but optimizer={config.optimizer!r} was "
            "received: use one of these, or update='auto'.",
            fr=f"update={form!r} est une forme de {', '.join(OPTIMIZERS)}, mais optimizer={config.optimizer!r} a été "
            "reçu : prenez l’un d’eux, ou update='auto'.",
        )
    if layout.engine == "deepspeed":
        return say(
            en=f"update={form!r} is an option of the engines torch and by_hand, but engine='deepspeed', which updates "
            "flat tensors of its own, was received: use one of these, or update='auto'.",
            fr=f"update={form!r} est une option des moteurs torch et by_hand, mais engine='deepspeed', qui met à jour "
            "ses propres tenseurs plats, a été reçu : prenez l’un des deux, ou update='auto'.",
        )
    return _pass_misfit(config) if form in IN_PASSES else None


def _pass_misfit(config: RunConfig) -> str | None:
    """The same, of an update within the passes."""
    form, layout = config.update, config.layout
    if layout.strategy not in ("single", "ddp", "by_hand") or max(layout.tp, layout.pp, layout.ep) > 1:
        return say(
            en=f"update={form!r} updates each parameter within the passes, so that a rank must hold it and its "
            f"gradient whole, but {layout.title} was received: use zero=0, tp=1, pp=1, ep=1, or update='fused'.",
            fr=f"update={form!r} met à jour chaque paramètre pendant les passes, donc un rang doit le détenir entier, "
            f"et son gradient aussi, mais {layout.title} a été reçu : prenez zero=0, tp=1, pp=1, ep=1, ou "
            "update='fused'.",
        )
    if layout.gradient_compression != "none":
        return say(
            en=f"update={form!r} is run and predicted with gradients that are sent in full, but "
            f"gradient_compression={layout.gradient_compression!r} was received: use gradient_compression='none', or "
            "update='fused'.",
            fr=f"update={form!r} s’exécute et se prédit avec des gradients envoyés en entier, mais "
            f"gradient_compression={layout.gradient_compression!r} a été reçu : prenez gradient_compression='none', ou "
            "update='fused'.",
        )
    return _forward_misfit(config) if form == "in_forward" else _backward_misfit(config)


def _forward_misfit(config: RunConfig) -> str | None:
    """The same, of an update in the next forward pass."""
    if config.layout.gradient_as_bucket_view:
        return say(
            en="update='in_forward' frees each gradient in the next forward pass, but with "
            "gradient_as_bucket_view=True it is part of a bucket that stays: leave gradient_as_bucket_view out.",
            fr="update='in_forward' libère chaque gradient dans la passe avant suivante, mais avec "
            "gradient_as_bucket_view=True il fait partie d’un bucket qui reste : retirez gradient_as_bucket_view.",
        )
    return None


def _backward_misfit(config: RunConfig) -> str | None:
    """The same, of an update in the backward pass."""
    layout = config.layout
    if layout.micro_batches > 1:
        return say(
            en="update='in_backward' updates a parameter as soon as its gradient is there, before other micro-batches "
            f"could add theirs, but micro_batches={layout.micro_batches} was received: use micro_batches=1, or "
            "update='in_forward'.",
            fr="update='in_backward' met un paramètre à jour dès que son gradient est là, avant que d’autres "
            f"micro-batches n’ajoutent le leur, mais micro_batches={layout.micro_batches} a été reçu : prenez "
            "micro_batches=1, ou update='in_forward'.",
        )
    if layout.strategy == "ddp":
        return say(
            en="update='in_backward' frees gradients as they come, but torch's DDP keeps them all in its buckets, so "
            f"that nothing would be saved with dp={layout.dp}: use engine='by_hand', which sends and forgets a bucket "
            "at a time.",
            fr="update='in_backward' libère les gradients à mesure, mais le DDP de torch les garde tous dans ses "
            f"buckets, donc rien ne serait économisé avec dp={layout.dp} : prenez engine='by_hand', qui envoie et "
            "oublie un bucket à la fois.",
        )
    return None
