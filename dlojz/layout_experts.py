"""What cannot be combined with a mixture of experts, and what its numbers allow.

Layer 1. Invariant: every rank of an expert-parallel group holds equally many experts, and a run of a model without
experts carries no number of a mixture.

Source: Fedus et al. 2021 (arXiv 2101.03961), §2; Lepikhin et al. 2020 (arXiv 2006.16668), §3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dlojz.moe.routing import Routing, routing_refusal
from dlojz.text import say

if TYPE_CHECKING:
    from dlojz.config import RunConfig
    from dlojz.layout import Layout

ROUTING_FIELDS: Final = ("experts", "top_k", "capacity_factor", "balance_loss", "z_loss", "expert_groups")
"""Fields of a run that only a mixture of experts has."""


def experts_refusal(layout: Layout) -> str | None:
    """Why the fields of a layout do not go with its expert parallelism and what would work; None where they do."""
    if layout.ep == 1:
        return None
    if layout.dp % layout.ep:
        works = ", ".join(f"ep={ep}" for ep in range(2, min(layout.dp, 64) + 1) if layout.dp % ep == 0) or "ep=1"
        return say(
            en=f"the dp replicas share the experts out, but ep={layout.ep} does not divide dp={layout.dp}: use "
            f"{works}.",
            fr=f"ce sont les dp répliques qui se partagent les experts, mais ep={layout.ep} ne divise pas "
            f"dp={layout.dp} : prenez {works}.",
        )
    if layout.engine == "torch":
        return say(
            en=f"engine 'torch' has no expert parallelism of its own, but ep={layout.ep} was received: use "
            "engine='by_hand' or 'deepspeed'.",
            fr=f"engine='torch' n’a pas d’Expert Parallelism, mais ep={layout.ep} a été reçu : prenez "
            "engine='by_hand' ou 'deepspeed'.",
        )
    if layout.tp > 1 or layout.pp > 1:
        return say(
            en=f"expert parallelism is within the data axis alone here, but ep={layout.ep} was received with "
            f"tp={layout.tp}, pp={layout.pp}: use tp=1, pp=1, or ep=1.",
            fr=f"l’Expert Parallelism se fait ici dans le seul axe des données, mais ep={layout.ep} a été reçu avec "
            f"tp={layout.tp}, pp={layout.pp} : prenez tp=1, pp=1, ou ep=1.",
        )
    if layout.zero:
        return say(
            en=f"ep={layout.ep} shares the experts out over ranks that keep their states whole, but zero={layout.zero} "
            "was received: use zero=0, or ep=1.",
            fr=f"ep={layout.ep} partage les experts entre des rangs qui gardent leurs états entiers, mais "
            f"zero={layout.zero} a été reçu : prenez zero=0, ou ep=1.",
        )
    return None


def fill_in_routing(filled: dict[str, Any], size: object) -> None:
    """Put what a model with experts has by default where nothing was given."""
    experts = getattr(size, "experts", None)
    if experts is None:
        return
    for name, plain in experts.defaults().items():
        if filled.get(name) is None:
            filled[name] = plain


def routing_of(config: RunConfig) -> Routing | None:
    """How the mixtures of a run's model route; None for a model without experts."""
    if config.experts is None:
        return None
    return Routing(
        experts=config.experts,
        top_k=config.top_k or 1,
        capacity_factor=config.capacity_factor or 1.0,
        balance_loss=config.balance_loss or 0.0,
        z_loss=config.z_loss or 0.0,
        groups=config.expert_groups or 1,
    )


def routing_misfit(config: RunConfig) -> str | None:
    """Why the numbers of a mixture do not go together, or with the model, and what would work; None where they do."""
    from dlojz import models

    experts = getattr(models.spec(config.model).size, "experts", None)
    if experts is None:
        return _without_experts(config)
    if config.layout.tp > 1:
        return say(
            en=f"Tensor Parallelism cannot split a mixture of experts, but tp={config.layout.tp} was received with "
            f"{config.model}: use tp=1; ep shares experts out.",
            fr=f"le Tensor Parallelism ne sait pas découper un mélange d’experts, mais tp={config.layout.tp} a été "
            f"reçu avec {config.model} : prenez tp=1 ; c’est ep qui partage les experts.",
        )
    return routing_refusal(
        experts=config.experts or 1,
        top_k=config.top_k or 1,
        capacity_factor=1.0 if config.capacity_factor is None else config.capacity_factor,
        groups=config.expert_groups or 1,
        ep=config.layout.ep,
    )


def _without_experts(config: RunConfig) -> str | None:
    given = [name for name in ROUTING_FIELDS if getattr(config, name) is not None]
    given += ["ep"] if config.layout.ep > 1 else []
    if not given:
        return None
    name = given[0]
    value = config.layout.ep if name == "ep" else getattr(config, name)
    return say(
        en=f"{name}={value} was received, but {config.model} has no experts: use a model with a mixture of experts "
        "such as moe_tiny, or leave it out.",
        fr=f"{name}={value} a été reçu, mais {config.model} n’a pas d’experts : prenez un modèle à mélange d’experts "
        "comme moe_tiny, ou retirez-le.",
    )
