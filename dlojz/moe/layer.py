"""A mixture of experts in the place of a block's MLP.

Layer 0, loads torch. Invariant: ``x_BTD`` in, ``x_BTD`` out; what a token gets depends on its rank's micro-batch
(through the capacity) and on nothing that other ranks hold, so that ep changes where experts are computed and not what.

Shape suffixes: B batch, T tokens, D width, N = B × T tokens of this rank, E experts, C capacity, K choices of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlojz.moe.balance import with_auxiliary_loss
from dlojz.moe.exchange import combine, dispatch, has_values
from dlojz.moe.experts import Experts, Flavour
from dlojz.moe.gate import Choice, Gate, autocast_device
from dlojz.moe.routing import Routing


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a mixture's last forward pass did with its tokens, on this rank; tensors without gradient, on its device.

    Args:
        tokens_E: choices that each expert has got, before its capacity cuts them; integers that sum to K·N.
        dropped_share: share of the K·N choices that found their expert full, a scalar from 0 to 1.
        balance: the balance loss without its weight, a scalar: 1 balanced, E collapsed.
        z: the z-loss without its weight, a scalar.
        capacity: C, rows of each expert for this rank's tokens.
    """

    tokens_E: Tensor
    dropped_share: Tensor
    balance: Tensor
    z: Tensor
    capacity: int


class MixtureOfExperts(nn.Module):
    """Gate, experts, and the way between them: ``x_BTD`` in, ``x_BTD`` out.

    A token whose experts are all full gets zeros: the block's residual connection alone carries it on.

    Args:
        width: D.
        mlp_width: width of each expert's hidden layer.
        routing: how tokens find their experts.
        flavour: ``gelu`` (GPT) or ``swiglu`` (Llama).

    Attributes:
        group: the ranks that share the experts out; None is all ranks. Set by `dlojz.moe.parallel.shard_experts`.
        ep: their number; 1 while all experts are here.
        auxiliary_scale: what the engine multiplies a micro-batch's loss by, 1 / micro_batches.
        last: what the last forward pass did, None before it and on a device without numbers.

    Source: Fedus et al. 2021, "Switch Transformers" (arXiv 2101.03961); Lepikhin et al. 2020, "GShard"
    (arXiv 2006.16668).
    """

    def __init__(self, width: int, mlp_width: int, routing: Routing, flavour: Flavour = "gelu") -> None:
        super().__init__()
        self.routing = routing
        self.gate = Gate(width, routing)
        self.experts = Experts(routing.experts, width, mlp_width, flavour)
        self.group: dist.ProcessGroup | None = None
        self.ep = 1
        self.auxiliary_scale = 1.0
        self.last: Load | None = None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, width)`` to the same shape; a collective call if ep > 1."""
        x_ND = x_BTD.flatten(end_dim=-2)
        choice: Choice = self.gate(x_ND)
        capacity = self.routing.capacity(x_ND.shape[0])
        if has_values(x_ND):
            self.last = _load(choice, capacity)
        rows_ECD = self._fill(_as_computed(x_ND), choice, capacity)
        outputs_ECD = combine(self.experts(dispatch(rows_ECD, self.ep, self.group)), self.ep, self.group)
        y_ND = self._gather(outputs_ECD, choice, capacity)
        weights = self.routing.balance_loss, self.routing.z_loss
        if any(weights):
            loss = weights[0] * choice.balance + weights[1] * choice.z
            y_ND = with_auxiliary_loss(y_ND, loss, self.auxiliary_scale)
        return y_ND.view(*x_BTD.shape[:-1], y_ND.shape[-1])

    def _fill(self, x_ND: Tensor, choice: Choice, capacity: int) -> Tensor:
        """Each token copied into the rows that it was given, ``(E, C, D)``; rows that nobody was given are zeros."""
        slots, (choices, width) = self.routing.experts * capacity, (choice.expert_KN.shape[0], x_ND.shape[1])
        slot_KN = choice.expert_KN * capacity + choice.row_KN
        slot_M = slot_KN.where(choice.kept_KN, slots).flatten()  # the dropped share one spare row, which is cut off
        rows_MD = x_ND.expand(choices, -1, -1).reshape(-1, width)
        buffer = x_ND.new_zeros(slots + 1, width).index_copy(0, slot_M, rows_MD)
        return buffer[:slots].view(self.routing.experts, capacity, width)

    def _gather(self, outputs_ECD: Tensor, choice: Choice, capacity: int) -> Tensor:
        """The outputs of each token's experts, weighted and summed, ``(N, D)``."""
        slots_SD = outputs_ECD.flatten(end_dim=1)
        # A dropped choice reads any row, here that of the last slot: its weight is zero.
        slot_KN = (choice.expert_KN * capacity + choice.row_KN).where(choice.kept_KN, slots_SD.shape[0] - 1)
        picked_KND = slots_SD.index_select(0, slot_KN.flatten()).view(*slot_KN.shape, -1)
        return (picked_KND * choice.weight_KN[..., None].to(picked_KND.dtype)).sum(dim=0)


def _as_computed(x: Tensor) -> Tensor:
    """The type in which the experts will compute, so that no more bytes travel than they read."""
    device = autocast_device(x)
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _load(choice: Choice, capacity: int) -> Load:
    return Load(
        tokens_E=choice.tokens_E.detach(),
        dropped_share=1 - choice.kept_KN.float().mean(),
        balance=choice.balance.detach(),
        z=choice.z.detach(),
        capacity=capacity,
    )
