"""Gate: choose K experts for each token, their weights and rows, and the loss that balances the experts.

All shapes follow from the input's shape, so that a gate runs on the meta device too. It computes in fp32 in every
precision of the model (Fedus et al. 2021, "selective precision") and draws no random number: a recomputed block routes
its tokens alike.

`with_auxiliary_loss` adds the gradient of a loss to a backward pass: every engine, schedule or checkpointing trains a
mixture without knowing its auxiliary losses, and a run reports the loss of its task alone.

Shape suffixes: N tokens of this rank, D width, E experts, G groups of experts, F = E / G experts of a group, K choices
of a token, in the order of preference.

Source: Megatron-LM's ``MoEAuxLossAutoScaler`` (megatron/core/transformer/moe/moe_utils.py), for the auxiliary loss.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.models.experts.routing import Routing

INITIAL_DEVIATION = 0.02


@dataclass(frozen=True, kw_only=True)
class Routed:
    """Routes of the tokens of one micro-batch.

    Args:
        expert_KN: the experts of each token, integers below E, its first choice in the first row.
        weight_KN: weights of their outputs, fp32; zero where the token is dropped.
        row_KN: the token's row in its expert's buffer of C rows; C or more where the token is dropped.
        kept_KN: whether it has a row.
        tokens_E: choices of each expert, before its capacity cuts them; integers that sum to K·N.
        balance: the balance loss, a scalar with gradient (see `balance_loss`).
        z: the z-loss, a scalar with gradient (see `z_loss`).
    """

    expert_KN: Tensor
    weight_KN: Tensor
    row_KN: Tensor
    kept_KN: Tensor
    tokens_E: Tensor
    balance: Tensor
    z: Tensor


class Gate(nn.Module):
    """Gate: a linear layer without bias, a softmax, and the choice of the largest.

    Args:
        width: D, of the tokens.
        routing: how many experts, how many choices, how many groups.

    Source: Fedus et al. 2021 (arXiv 2101.03961), top-1: the weight is the probability of the chosen expert, so that the
    gate learns; Lepikhin et al. 2020 (arXiv 2006.16668), top-2: the weights of a token sum to 1; Jiang et al.
    2024 (arXiv 2401.04088), the same for top-k. Two levels: Shazeer et al. 2017 (arXiv 1701.06538).
    """

    def __init__(self, width: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(routing.experts, width))
        if routing.groups > 1:
            self.group_weight = nn.Parameter(torch.empty(routing.groups, width))
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=INITIAL_DEVIATION)

    def forward(self, x_ND: Tensor) -> Routed:
        """Choose for each of N tokens; losses and rows depend on these N alone."""
        routing = self.routing
        with torch.autocast(autocast_device(x_ND), enabled=False):
            # (N, D) @ (D, E) → (N, E), in fp32 even within autocast.
            logits_NE = F.linear(x_ND.float(), self.weight.float())
            if routing.groups == 1:
                probability_NE = logits_NE.softmax(dim=-1)
                expert_KN, weight_KN = choose(probability_NE, routing.top_k)
                z = z_loss(logits_NE)
            else:
                group_logits_NG = F.linear(x_ND.float(), self.group_weight.float())
                probability_NE, expert_KN, weight_KN = choose_in_group(group_logits_NG, logits_NE, routing.top_k)
                z = z_loss(group_logits_NG) + z_loss(logits_NE.unflatten(-1, (routing.groups, -1)))
            row_KN, tokens_E = rows(expert_KN, routing.experts)
            kept_KN = row_KN < routing.capacity(x_ND.shape[0])
            return Routed(
                expert_KN=expert_KN,
                weight_KN=weight_KN * kept_KN,
                row_KN=row_KN,
                kept_KN=kept_KN,
                tokens_E=tokens_E,
                balance=balance_loss(probability_NE, tokens_E),
                z=z,
            )

    def extra_repr(self) -> str:
        """Width and routing, where models are printed."""
        return f"{self.weight.shape[1]}, {self.routing}"


def choose(probability_NE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Choose the most probable experts of each token, and their weights.

    Returns:
        ``expert_KN`` and ``weight_KN``: the probability for k = 1 (divided by itself it would teach the gate nothing);
        for more, the probabilities of the chosen, divided by their sum.

    Source: Fedus et al. 2021 (arXiv 2101.03961), for k = 1; Lepikhin et al. 2020, algorithm 1, for k = 2.
    """
    # topk sorts: column 0 holds the first choice.
    weight_NK, expert_NK = probability_NE.topk(top_k, dim=-1)
    if top_k > 1:
        weight_NK = weight_NK / weight_NK.sum(dim=-1, keepdim=True)
    return expert_NK.t(), weight_NK.t()  # (K, N): rows are given out choice by choice


def choose_in_group(group_logits_NG: Tensor, logits_NE: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choose a group for each token by a first softmax, then its experts by a second one within the group.

    Returns:
        ``probability_NE``, the probability of the group times that within it, which sums to 1 over all experts;
        ``expert_KN``; ``weight_KN``, the probability of the group times the weight of `choose` within it.

    Source: Shazeer et al. 2017 (arXiv 1701.06538), hierarchical mixtures; its first level keeps several groups, this
    one keeps one.
    """
    groups = group_logits_NG.shape[-1]
    group_NG = group_logits_NG.softmax(dim=-1)
    within_NGF = logits_NE.unflatten(-1, (groups, -1)).softmax(dim=-1)  # (N, G, F); each group sums to 1
    best_N1, chosen_N1 = group_NG.max(dim=-1, keepdim=True)
    size = within_NGF.shape[-1]
    # The F probabilities within the chosen group: (N, G, F) → (N, 1, F) → (N, F).
    within_NF = within_NGF.gather(1, chosen_N1[..., None].expand(-1, -1, size)).squeeze(1)
    member_KN, weight_KN = choose(within_NF, top_k)
    probability_NE = (group_NG[..., None] * within_NGF).flatten(start_dim=1)  # (N, G, 1) × (N, G, F) → (N, E)
    # Group g holds the experts from g·F on.
    return probability_NE, chosen_N1.t() * size + member_KN, best_N1.t() * weight_KN


def rows(expert_KN: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Number the rows of each expert's buffer, and count the choices of each expert.

    All first choices come first, in the order of the tokens, then all second ones: if an expert is full, a token loses
    its second choice before another loses its first. For k = 1 no token takes the row of an earlier one; for more, a
    later token's first choice may take the row of an earlier one's second choice: a decoder that drops tokens is then
    not strictly causal.

    Returns:
        ``row_KN``, from 0, whatever the capacity; ``tokens_E``, whose sum is K·N.

    Source: Lepikhin et al. 2020 (GShard), algorithm 1.
    """
    chosen_E = torch.arange(experts, device=expert_KN.device)
    arrived_ME = (expert_KN.reshape(-1, 1) == chosen_E).cumsum(dim=0)  # M = K·N, choice by choice
    row_M = arrived_ME.gather(1, expert_KN.reshape(-1, 1)).squeeze(1) - 1
    return row_M.view_as(expert_KN), arrived_ME[-1].clone()  # a copy: a view would keep all rows alive


def balance_loss(probability_NE: Tensor, tokens_E: Tensor) -> Tensor:
    """Compute the balance loss E · Σ f·P: 1 if all experts get the same, E if one gets all; a scalar.

    f is an expert's share of all choices, before its capacity cuts them (GShard counts first choices only); P is its
    mean probability over the tokens. Only P has a gradient.

    Source: Fedus et al. 2021 (arXiv 2101.03961), equations 4 to 6, without the weight α.
    """
    share_E = tokens_E / tokens_E.sum()  # (E,); counts have no gradient
    return probability_NE.shape[-1] * (share_E * probability_NE.mean(dim=0)).sum()


def z_loss(logits: Tensor) -> Tensor:
    """Compute the z-loss, the mean of (log Σ exp logits)² over all but the last dimension; a scalar.

    Source: Zoph et al. 2022, "ST-MoE" (arXiv 2202.08906).
    """
    return logits.logsumexp(dim=-1).square().mean()


def autocast_device(x: Tensor) -> str:
    """Device type of a tensor's autocast; for meta, the CPU's."""
    return "cpu" if x.is_meta else x.device.type


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        context.scale, context.like = scale, (loss.dtype, loss.device)  # not the loss itself, whose graph would stay
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = context.like
        # d(task's loss + scale · loss) / d loss = scale, a scalar of the loss's type.
        return gradients[0], torch.full((), context.scale, dtype=dtype, device=device), None


def with_auxiliary_loss(x: Tensor, loss: Tensor, scale: float = 1.0) -> Tensor:
    """Return the activation unchanged; in backward, `loss` gets a gradient as if scale · loss had been added.

    Args:
        x: any tensor that the task's loss depends on.
        loss: a scalar.
        scale: factor of the task's loss in the engine: 1 / micro_batches where it averages them.
    """
    output: Tensor = _WithLoss.apply(x, loss, scale)
    return output
