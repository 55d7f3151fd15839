"""Expert parallelism: each rank of a group keeps its share of every mixture's experts.

Layer 0, loads torch. Invariant: rank r of ep keeps the experts r·E/ep and the next E/ep − 1, whole; all the rest of
the model stays on every rank. The gradient of an expert is then the sum over the tokens of the whole group.

Source: Lepikhin et al. 2020, "GShard" (arXiv 2006.16668); Fedus et al. 2021 (arXiv 2101.03961), "expert parallelism".
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import nn

from dlojz.moe.layer import MixtureOfExperts
from dlojz.moe.routing import routing_refusal
from dlojz.schema import LabError
from dlojz.text import say


def mixtures(model: nn.Module) -> Iterator[tuple[str, MixtureOfExperts]]:
    """The mixtures of a model with their names, in the order of its modules."""
    for name, module in model.named_modules():
        if isinstance(module, MixtureOfExperts):
            yield name, module


def expert_parameters(model: nn.Module) -> list[str]:
    """Names of all parameters that `shard_experts` cuts, along their first dimension, in the order of the model."""
    return [
        f"{name}.experts.{parameter}"
        for name, layer in mixtures(model)
        for parameter, _ in layer.experts.named_parameters()
    ]


def shard_experts(model: nn.Module, ep_rank: int, ep: int, group: dist.ProcessGroup | None = None) -> None:
    """Keep one rank's share of the experts of every mixture, in place; the parameters of experts are new objects.

    Args:
        model: whole, with the same weights on all ranks; on any device.
        ep_rank: this rank within its group, from 0.
        ep: ranks of the group, a divisor of the number of experts.
        group: the ranks that share the experts out; None is all ranks.

    Raises:
        LabError: if ep does not divide the experts, or the experts were shared out before.
    """
    if ep >= 1 and not 0 <= ep_rank < ep:
        raise LabError(
            say(
                en=f"ep_rank must be at least 0 and less than ep={ep}, but {ep_rank} was received.",
                fr=f"ep_rank doit être au moins 0 et plus petit que ep={ep}, mais {ep_rank} a été reçu.",
            )
        )
    for name, layer in mixtures(model):
        _check(name, layer, ep)
    for _, layer in mixtures(model):
        held = layer.routing.experts // ep
        for key, parameter in list(layer.experts.named_parameters()):
            # A copy: a view would keep the storage of all experts alive.
            share = parameter.detach()[ep_rank * held : (ep_rank + 1) * held].clone()
            setattr(layer.experts, key, nn.Parameter(share, requires_grad=parameter.requires_grad))
        layer.ep, layer.group = ep, group


def _check(name: str, layer: MixtureOfExperts, ep: int) -> None:
    routing = layer.routing
    refusal = routing_refusal(
        experts=routing.experts, top_k=routing.top_k, capacity_factor=routing.capacity_factor, ep=ep
    )
    if refusal is None and layer.ep > 1:
        refusal = say(
            en=f"the experts of {name} are shared out over ep={layer.ep} ranks already: build the model again, whole.",
            fr=f"les experts de {name} sont déjà répartis sur ep={layer.ep} rangs : reconstruisez le modèle entier.",
        )
    if refusal is not None:
        raise LabError(refusal)
