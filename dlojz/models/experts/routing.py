"""Routing of a mixture of experts: numbers of experts, of choices per token, of tokens per expert.

Source: Fedus et al. 2021, "Switch Transformers" (arXiv 2101.03961); Lepikhin et al. 2020, "GShard" (arXiv 2006.16668).
"""

import math
from dataclasses import dataclass

from dlojz.base.errors import LabError
from dlojz.models.foreign.names import model_sentence


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Routing of a mixture's tokens; a `Routing` that exists can be run.

    Args:
        experts: E, feed-forward networks in the mixture, at least 1.
        top_k: experts that see each token, 1 (Switch), 2 (GShard) or more, at most those of one group.
        capacity_factor: tokens that an expert takes, in units of its fair share k·N/E; above 0. Beyond, tokens are
            dropped: only the residual connection keeps them. E/k or more (or infinity) drops none.
        balance_loss: weight of the loss that balances the load, at least 0.
        z_loss: weight of the loss that keeps the gate's logits small, at least 0.
        groups: groups of experts among which a two-level gate chooses first; 1 is a flat gate. Divides `experts`.

    Raises:
        LabError: if the numbers do not go together.

    Source: Fedus et al. 2021, capacity factor and balance loss; Zoph et al. 2022, "ST-MoE" (arXiv 2202.08906), z-loss.
    """

    experts: int
    top_k: int = 1
    capacity_factor: float = 1.25
    balance_loss: float = 0.01
    z_loss: float = 0.0
    groups: int = 1

    def __post_init__(self) -> None:
        refusal = routing_refusal(
            experts=self.experts, top_k=self.top_k, capacity_factor=self.capacity_factor, groups=self.groups
        ) or _weight_refusal(balance_loss=self.balance_loss, z_loss=self.z_loss)
        if refusal is not None:
            raise LabError(refusal)

    def capacity(self, tokens: int) -> int:
        """Compute the tokens that one expert takes of one rank's micro-batch.

        Args:
            tokens: N, tokens of one rank's micro-batch.

        Returns:
            C = ⌈factor·k·N/E⌉, at least 1 and at most N: a token goes to an expert once at most.

        Source: Fedus et al. 2021, "expert capacity", for k = 1; Lepikhin et al. 2020 for k = 2.
        """
        if self.capacity_factor >= self.experts / self.top_k:  # also for infinity, which `ceil` refuses
            return tokens
        return min(tokens, max(1, math.ceil(self.capacity_factor * self.top_k * tokens / self.experts)))


def all_to_all_bytes(*, experts: int, capacity: int, width: int, element_bytes: int = 4) -> int:
    """Count the bytes of one rank's tensor in one all-to-all of a mixture: its whole buffer, (E, C, D).

    1/ep of them, for the rank's own experts, does not leave it. A layer has two all-to-alls in each forward pass
    (dispatch and combine) and two in each backward pass, for every micro-batch.

    Args:
        experts: E, of the whole mixture, not of one rank.
        capacity: C, of one rank's micro-batch (`Routing.capacity`).
        width: D.
        element_bytes: 4 in fp32, 2 in bf16.
    """
    return experts * capacity * width * element_bytes


def routing_refusal(*, experts: int, top_k: int, capacity_factor: float, groups: int = 1, ep: int = 1) -> str | None:
    """Explain why the numbers of a mixture do not fit together and what would work; None where they do.

    Args:
        experts: see `Routing`, as the three that follow.
        top_k: experts that see each token.
        capacity_factor: in units of the fair share.
        groups: of a two-level gate.
        ep: ranks over which the experts are sharded.
    """
    for name, count in (("experts", experts), ("top_k", top_k), ("expert_groups", groups), ("ep", ep)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            return model_sentence("whole number of a routing", name=name, count=count)
    if not capacity_factor > 0:  # so that NaN is refused too
        return model_sentence("capacity factor", capacity_factor=capacity_factor)
    if top_k > experts:
        return model_sentence("more choices than experts", top_k=top_k, experts=experts)
    if experts % ep:
        # At most 64 degrees fit into a sentence.
        works = ", ".join(f"ep={degree}" for degree in range(1, min(experts, 64) + 1) if experts % degree == 0)
        return model_sentence("ep divides the experts", ep=ep, experts=experts, works=works)
    if experts % groups or top_k > experts // groups:
        return model_sentence("groups of experts", groups=groups, experts=experts, top_k=top_k)
    return None


def _weight_refusal(**weights: float) -> str | None:
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            return model_sentence("weight of a loss", name=name, weight=weight)
    return None
