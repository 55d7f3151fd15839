"""DeepSpeed's mixture of experts in the place of the lab's, with the same weights, under DeepSpeed's engine.

Layer 3. Invariant: weights, checkpoints and their names are those of the lab's model: what one of the two has kept the
other takes up.

Where the two agree: top-1 and top-2 gates with the same weights choose the same experts and weigh them alike, so that
losses are equal to rounding as long as no token is dropped. Where they do not, by DeepSpeed's choice:

- Top-1 keeps, of the tokens of an expert that is full, those that `topk` of equal numbers gives, not the first ones.
- Top-2 weighs a token whose other choice is dropped by 1, the lab by its share; and it balances the first choices
  alone, the lab all of them. From three choices on, the most probable tokens stay.
- The capacity is ⌈N/E · f·k⌉ in fp32, the lab's in double precision; neither is below 1 here, where DeepSpeed's default
  is 4 and up.
- Random token selection and noise on the second choice, on by default, are off here: the lab draws no number.

Source: DeepSpeed 0.19 `moe/layer.py`, `moe/sharded_moe.py`, `runtime/engine.py`; Rajbhandari et al. 2022,
"DeepSpeed-MoE" (arXiv 2201.05596).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.config import RunConfig
from dlojz.moe.balance import with_auxiliary_loss
from dlojz.moe.experts import Flavour
from dlojz.moe.layer import Load, MixtureOfExperts
from dlojz.moe.parallel import mixtures
from dlojz.train.engines.deepspeed import DeepSpeedEngine, load_deepspeed
from dlojz.train.engines.deepspeed_states import begin, put_state, whole_state
from dlojz.train.engines.states import WEIGHTS, Source

_MATRICES = {"gate_EDF": "gate.weight", "up_EDF": "up.weight", "down_EFD": "down.weight"}
_BIASES = {"up_bias_EF": "up.bias", "down_bias_ED": "down.bias"}
_OF_EXPERT = _MATRICES | _BIASES
"""Parameters of a stack of experts, and of one expert of DeepSpeed's, whose matrices are transposed."""


class Expert(nn.Module):
    """One feed-forward network, as DeepSpeed wants it: a module of its own.

    Args:
        width, mlp_width: of its input and of its hidden layer.
        flavour: `gelu` with biases, `swiglu` without.
    """

    def __init__(self, width: int, mlp_width: int, flavour: Flavour) -> None:
        super().__init__()
        biased = flavour == "gelu"
        if not biased:
            self.gate = nn.Linear(width, mlp_width, bias=False)
        self.gated = not biased
        self.up = nn.Linear(width, mlp_width, bias=biased)
        self.down = nn.Linear(mlp_width, width, bias=biased)

    def forward(self, x: Tensor) -> Tensor:
        """``(…, width)`` to the same shape."""
        hidden = F.silu(self.gate(x)) * self.up(x) if self.gated else F.gelu(self.up(x), approximate="tanh")
        output: Tensor = self.down(hidden)
        return output


class DeepSpeedMixture(nn.Module):
    """`deepspeed.moe.layer.MoE` behind the interface of the lab's mixture.

    Args:
        mixture: whose weights and routing it takes.
        ep: ranks that share the experts out.
        ep_rank: this one's place among them.
    """

    def __init__(self, mixture: MixtureOfExperts, ep: int, ep_rank: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.routing = routing = mixture.routing
        self.auxiliary_scale = mixture.auxiliary_scale
        self.last: Load | None = None
        _, width, mlp_width = mixture.experts.up_EDF.shape
        factor = min(routing.capacity_factor, routing.experts / routing.top_k)  # more would be rows for nobody
        self.moe = MoE(
            width,
            Expert(width, mlp_width, mixture.experts.flavour),
            num_experts=routing.experts,
            ep_size=ep,
            k=routing.top_k,
            capacity_factor=factor,
            eval_capacity_factor=factor,
            min_capacity=1,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        held = routing.experts // ep
        with torch.no_grad():
            self.gate_weight.copy_(mixture.gate.weight)
            for name, whole in mixture.experts.named_parameters():
                for own, given in zip(self.pieces(name), whole[ep_rank * held :], strict=False):
                    own.copy_(given.T if name in _MATRICES else given)

    @property
    def gate_weight(self) -> Tensor:
        """``(E, D)``."""
        weight: Tensor = self.moe.deepspeed_moe.gate.wg.weight
        return weight

    def pieces(self, name: str) -> list[Tensor]:
        """This rank's parts of a stack of experts, one per expert."""
        experts = self.moe.deepspeed_moe.experts.deepspeed_experts
        return [expert.get_parameter(_OF_EXPERT[name]) for expert in experts]

    def forward(self, x: Tensor) -> Tensor:
        """``(B, T, width)`` to the same shape; a collective call."""
        y, balance, counts = self.moe(x)
        tokens = x.shape[0] * x.shape[1]
        capacity = self.routing.capacity(tokens)
        self.last = Load(
            tokens_E=counts,
            dropped_share=(counts - capacity).clamp(min=0).sum() / (tokens * self.routing.top_k),
            balance=balance.detach(),
            z=balance.new_zeros(()),
            capacity=capacity,
        )
        return with_auxiliary_loss(y, self.routing.balance_loss * balance, self.auxiliary_scale)


class DeepSpeedExpertEngine(DeepSpeedEngine):
    """DeepSpeed without ZeRO, whose ranks share the experts of its own mixtures out.

    Source: DeepSpeed 0.19 `runtime/engine.py`, `_reduce_expert_gradients`: gradients of experts are summed over the
    ranks that hold them and divided by all ranks, as `dlojz.train.engines.experts` does.
    """

    def __init__(self, config: RunConfig, model: nn.Module, device: torch.device) -> None:
        load_deepspeed(device)
        self._ep = config.layout.ep
        names = [name for name, _ in model.named_parameters()]
        replaced: dict[str, DeepSpeedMixture] = {}
        for name, mixture in list(mixtures(model)):
            replaced[name] = DeepSpeedMixture(mixture, self._ep, dist.get_rank() % self._ep)
            model.set_submodule(name, replaced[name])
        self._held = {name: _pieces_of(name, model, replaced) for name in names}
        super().__init__(config, model, device)

    @property
    def group_names(self) -> dict[str, str]:
        """With DeepSpeed's own groups."""
        from deepspeed.utils import groups

        name = f"ep_size_{self._ep}"
        found = {"ep": groups._get_expert_parallel_group(name), "edp": groups._get_expert_data_parallel_group(name)}
        return super().group_names | {str(group.group_name): axis for axis, group in found.items()}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """As every engine, under the names of the lab's model."""
        yield from self.gathered(WEIGHTS)

    def gathered(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """As every engine, under the names of the lab's model."""
        for name, pieces in self._held.items():
            own = [whole_state(self.optimizer, piece, kind) for piece in pieces]
            leaf = name.rpartition(".")[2]
            if leaf not in _OF_EXPERT:
                yield name, own[0].cpu()
                continue
            block = torch.stack([one.T if leaf in _MATRICES else one for one in own])
            blocks = [torch.empty_like(block) for _ in range(self._ep)]
            # Who: the ranks that share the experts out. What: their blocks of one parameter, (E/ep, …) each. How much:
            # the bytes of the whole parameter, at the end of a run and with each checkpoint.
            dist.all_gather(blocks, block, group=self.axes.group("ep"))
            yield name, torch.cat(blocks).cpu()

    @torch.no_grad()
    def restore(self, source: Source) -> None:
        """As every engine, from whole tensors under the names of the lab's model."""
        kept = [WEIGHTS, *(kind for kind in self.moments if source.has(f"{kind}/{next(iter(self._held))}"))]
        begin(self.optimizer, tuple(kept[1:]), source.updates)
        for name, pieces in self._held.items():
            leaf = name.rpartition(".")[2]
            for kind in kept:
                whole = source.tensor(f"{kind}/{name}")
                of_piece: Any = [whole]
                if leaf in _OF_EXPERT:
                    own = whole.chunk(self._ep)[self.axes.ep_rank]
                    of_piece = [one.T if leaf in _MATRICES else one for one in own]
                for piece, given in zip(pieces, of_piece, strict=True):
                    put_state(self.optimizer, piece, kind, given.contiguous(), source.updates)


def _pieces_of(name: str, model: nn.Module, replaced: dict[str, DeepSpeedMixture]) -> list[Tensor]:
    """What this rank holds of a parameter of the lab's model, in DeepSpeed's."""
    for layer, mixture in replaced.items():
        if name.startswith(f"{layer}."):
            leaf = name.rpartition(".")[2]
            return mixture.pieces(leaf) if leaf in _OF_EXPERT else [mixture.gate_weight]
    return [model.get_parameter(name)]
