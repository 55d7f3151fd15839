"""Mixture-of-experts layer that replaces a block's MLP: experts as batched products, and their shards on ranks.

``x_BTD`` in, ``x_BTD`` out. A token's output depends on its rank's micro-batch (through the capacity), not on other
ranks. Under expert parallelism rank r of ep keeps E/ep whole experts, from r·E/ep on; the rest of the model stays on
every rank, and the gradient of an expert is the sum over the tokens of the whole group.

Shape suffixes: B batch, T tokens, D width, N = B × T tokens of this rank, E experts, C capacity, K choices of a token,
F width of the hidden layer.

Source: Lepikhin et al. 2020, "GShard" (arXiv 2006.16668); Fedus et al. 2021 (arXiv 2101.03961), "expert parallelism".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.base.errors import LabError
from dlojz.models.experts.exchange import combine, dispatch, has_values
from dlojz.models.experts.gate import Gate, Routed, autocast_device, with_auxiliary_loss
from dlojz.models.experts.routing import Routing, routing_refusal
from dlojz.models.foreign.names import model_sentence

Flavour = Literal["gelu", "swiglu"]
INITIAL_DEVIATION = 0.02


class Experts(nn.Module):
    """Experts: E feed-forward networks, ``x_ECD`` in, ``y_ECD`` out.

    Args:
        experts: E.
        width: D.
        mlp_width: F.
        flavour: ``gelu``, with biases and GPT-2's approximation of the GELU; ``swiglu``, Llama's, without biases.

    Source: Radford et al. 2019 (GPT-2), gelu; Shazeer 2020, "GLU Variants Improve Transformer" (arXiv 2002.05202),
    swiglu.
    """

    def __init__(self, experts: int, width: int, mlp_width: int, flavour: Flavour) -> None:
        super().__init__()
        self.flavour = flavour
        if flavour == "swiglu":
            self.gate_EDF = nn.Parameter(torch.empty(experts, width, mlp_width))
        self.up_EDF = nn.Parameter(torch.empty(experts, width, mlp_width))
        self.down_EFD = nn.Parameter(torch.empty(experts, mlp_width, width))
        for matrix in self.parameters():
            nn.init.trunc_normal_(matrix, std=INITIAL_DEVIATION)
        if flavour == "gelu":
            self.up_bias_EF = nn.Parameter(torch.zeros(experts, mlp_width))
            self.down_bias_ED = nn.Parameter(torch.zeros(experts, width))

    def forward(self, x_ECD: Tensor) -> Tensor:
        """Apply each expert to its rows; to the same shape."""
        if self.flavour == "swiglu":
            hidden_ECF = F.silu(torch.bmm(x_ECD, self.gate_EDF)) * torch.bmm(x_ECD, self.up_EDF)
            return torch.bmm(hidden_ECF, self.down_EFD)
        # (E, C, D) @ (E, D, F) + (E, 1, F): one product for all experts, empty rows included.
        hidden_ECF = torch.baddbmm(self.up_bias_EF[:, None], x_ECD, self.up_EDF)
        hidden_ECF = F.gelu(hidden_ECF, approximate="tanh")
        return torch.baddbmm(self.down_bias_ED[:, None], hidden_ECF, self.down_EFD)  # (E, C, F) @ (E, F, D)

    def extra_repr(self) -> str:
        """Sizes and flavour, where models are printed."""
        experts, width, mlp_width = self.up_EDF.shape
        return f"{experts}, {width}, {mlp_width}, {self.flavour}"


@dataclass(frozen=True, kw_only=True)
class ExpertTokens:
    """Load of a mixture in its last forward pass on this rank; tensors without gradient, on its device.

    Args:
        tokens_E: choices of each expert, before its capacity cuts them; integers that sum to K·N.
        dropped_share: share of the K·N choices whose expert was full, a scalar from 0 to 1.
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
    """Mixture of experts: gate, dispatch, experts, combine; ``x_BTD`` in, ``x_BTD`` out.

    A token whose experts are all full gets zeros; the block's residual connection keeps it.

    Args:
        width: D.
        mlp_width: width of each expert's hidden layer.
        routing: numbers of experts, choices and rows.
        flavour: ``gelu`` (GPT) or ``swiglu`` (Llama).

    Attributes:
        group: the ranks over which `shard_experts` has sharded the experts; None is all ranks.
        ep: their number; 1 while all experts are here.
        auxiliary_scale: factor of a micro-batch's loss in the engine, 1 / micro_batches.
        last: load of the last forward pass; None before it and on a device without values.

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
        self.last: ExpertTokens | None = None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, width)`` to the same shape; a collective call if ep > 1."""
        x_ND = x_BTD.flatten(end_dim=-2)  # (B, T, D) → (N, D)
        choice: Routed = self.gate(x_ND)
        capacity = self.routing.capacity(x_ND.shape[0])
        if has_values(x_ND):
            self.last = _load(choice, capacity)
        rows_ECD = self._fill(_as_computed(x_ND), choice, capacity)
        # Two all-to-alls of (E, C, D), there and back; none if ep = 1.
        outputs_ECD = combine(self.experts(dispatch(rows_ECD, self.ep, self.group)), self.ep, self.group)
        y_ND = self._gather(outputs_ECD, choice, capacity)
        weights = self.routing.balance_loss, self.routing.z_loss
        if any(weights):
            loss = weights[0] * choice.balance + weights[1] * choice.z
            y_ND = with_auxiliary_loss(y_ND, loss, self.auxiliary_scale)
        return y_ND.view(*x_BTD.shape[:-1], y_ND.shape[-1])

    def _fill(self, x_ND: Tensor, choice: Routed, capacity: int) -> Tensor:
        """Copy each token into its rows, ``(E, C, D)``; other rows are zeros."""
        slots, (choices, width) = self.routing.experts * capacity, (choice.expert_KN.shape[0], x_ND.shape[1])
        # Slot e·C + r is row r of expert e.
        slot_KN = choice.expert_KN * capacity + choice.row_KN
        slot_M = slot_KN.where(choice.kept_KN, slots).flatten()  # the dropped share one spare row, which is cut off
        rows_MD = x_ND.expand(choices, -1, -1).reshape(-1, width)
        # No slot but the spare one is written twice, so that the copy is deterministic.
        buffer = x_ND.new_zeros(slots + 1, width).index_copy(0, slot_M, rows_MD)
        return buffer[:slots].view(self.routing.experts, capacity, width)

    def _gather(self, outputs_ECD: Tensor, choice: Routed, capacity: int) -> Tensor:
        """Sum the weighted outputs of each token's experts, ``(N, D)``."""
        slots_SD = outputs_ECD.flatten(end_dim=1)
        # A dropped choice reads any row, here that of the last slot: its weight is zero.
        slot_KN = (choice.expert_KN * capacity + choice.row_KN).where(choice.kept_KN, slots_SD.shape[0] - 1)
        picked_KND = slots_SD.index_select(0, slot_KN.flatten()).view(*slot_KN.shape, -1)  # (K·N, D) → (K, N, D)
        return (picked_KND * choice.weight_KN[..., None].to(picked_KND.dtype)).sum(dim=0)


def _as_computed(x: Tensor) -> Tensor:
    """Cast to the type in which the experts will compute, so that no more bytes are sent than they read."""
    device = autocast_device(x)
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _load(choice: Routed, capacity: int) -> ExpertTokens:
    return ExpertTokens(
        tokens_E=choice.tokens_E.detach(),
        dropped_share=1 - choice.kept_KN.float().mean(),
        balance=choice.balance.detach(),
        z=choice.z.detach(),
        capacity=capacity,
    )


def mixtures(model: nn.Module) -> Iterator[tuple[str, MixtureOfExperts]]:
    """Yield the mixtures of a model with their names, in the order of its modules."""
    for name, module in model.named_modules():
        if isinstance(module, MixtureOfExperts):
            yield name, module


def expert_parameters(model: nn.Module) -> list[str]:
    """Name all parameters that `shard_experts` shards, along their first dimension, in the order of the model."""
    return [
        f"{name}.experts.{parameter}"
        for name, layer in mixtures(model)
        for parameter, _ in layer.experts.named_parameters()
    ]


def shard_experts(model: nn.Module, ep_rank: int, ep: int, group: dist.ProcessGroup | None = None) -> None:
    """Shard the experts of every mixture, in place: keep one rank's, as new parameters.

    Args:
        model: whole, with the same weights on all ranks; on any device.
        ep_rank: this rank within its group, from 0.
        ep: ranks of the group, a divisor of the number of experts.
        group: the ranks of the shards; None is all ranks.

    Raises:
        LabError: if ep does not divide the experts, or they are sharded already.
    """
    # ep < 1 is refused by `_check`.
    if ep >= 1 and not 0 <= ep_rank < ep:
        raise model_sentence.refused("rank of an expert group", ep=ep, ep_rank=ep_rank)
    layers = dict(mixtures(model))
    # All layers are checked before one is changed.
    for name, layer in layers.items():
        _check(name, layer, ep)
    for layer in layers.values():
        rank_experts = layer.routing.experts // ep
        for key, parameter in list(layer.experts.named_parameters()):
            # A copy: a view would keep the storage of all experts alive.
            share = parameter.detach()[ep_rank * rank_experts : (ep_rank + 1) * rank_experts].clone()
            setattr(layer.experts, key, nn.Parameter(share, requires_grad=parameter.requires_grad))
        layer.ep, layer.group = ep, group


def _check(name: str, layer: MixtureOfExperts, ep: int) -> None:
    routing = layer.routing
    refusal = routing_refusal(
        experts=routing.experts, top_k=routing.top_k, capacity_factor=routing.capacity_factor, ep=ep
    )
    if refusal is None and layer.ep > 1:
        refusal = model_sentence("experts divided already", name=name, ep=layer.ep)
    if refusal is not None:
        raise LabError(refusal)
