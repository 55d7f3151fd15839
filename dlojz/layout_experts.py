"""What cannot be combined with a mixture of experts, and what its numbers allow.

Layer 1. Invariant: every rank of an expert-parallel group holds equally many experts, and a run of a model without
experts carries no number of a mixture.

Source: Fedus et al. 2021 (arXiv 2101.03961), §2; Lepikhin et al. 2020 (arXiv 2006.16668), §3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

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
    return None


def fill_in_routing(filled: dict[str, Any], size: object) -> None:
    """Put what a model with experts has by default where nothing was given."""
    experts = getattr(size, "experts", None)
    if experts is None:
        return
    for name, plain in experts.defaults().items():
        if filled.get(name) is None:
            filled[name] = plain


def routing_misfit(config: RunConfig) -> str | None:
    """Why the numbers of a mixture do not go together, or with the model, and what would work; None where they do."""
    from dlojz import models

    experts = getattr(models.spec(config.model).size, "experts", None)
    if experts is None:
        return _without_experts(config)
    num_experts, top_k = config.experts or 1, config.top_k or 1
    groups, factor = config.expert_groups or 1, config.capacity_factor
    if factor is not None and factor <= 0:
        return say(
            en=f"capacity_factor must be greater than 0, but {factor:g} was received: 1 is each expert's fair share, "
            "1.25 is usual.",
            fr=f"capacity_factor doit être plus grand que 0, mais {factor:g} a été reçu : 1 est la juste part de "
            "chaque expert, 1,25 est l’usage.",
        )
    if top_k > num_experts:
        return say(
            en=f"top_k={top_k} sends a token to more experts than the {num_experts} that there are: use at most "
            f"top_k={num_experts}.",
            fr=f"top_k={top_k} envoie un token à plus d’experts que les {num_experts} qui existent : prenez au plus "
            f"top_k={num_experts}.",
        )
    if num_experts % config.layout.ep:
        works = ", ".join(f"ep={ep}" for ep in range(1, min(num_experts, 64) + 1) if num_experts % ep == 0)
        return say(
            en=f"ep={config.layout.ep} does not divide the {num_experts} experts: use {works}.",
            fr=f"ep={config.layout.ep} ne divise pas les {num_experts} experts : prenez {works}.",
        )
    if num_experts % groups or top_k > num_experts // groups:
        return say(
            en=f"expert_groups={groups} does not cut {num_experts} experts into equal groups of at least "
            f"top_k={top_k}: a two-level gate chooses one group, then top_k of its experts.",
            fr=f"expert_groups={groups} ne découpe pas {num_experts} experts en groupes égaux d’au moins "
            f"top_k={top_k} : une porte à deux niveaux choisit un groupe, puis top_k de ses experts.",
        )
    return None


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
