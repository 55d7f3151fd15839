"""Expert-parallel engines: the lab's, and DeepSpeed's own layer under its engine.

**The lab's**: data parallelism whose ranks shard the experts of each mixture. After the last micro-batch's backward,
ranks that hold the same experts hold the same gradients of them, and all ranks those of everything else; losses and
weights are those of the same layout with ep=1.

    data axis, dp = 4, ep = 2:    rank 0: experts 0–3 │ rank 1: experts 4–7    an expert-parallel group (ep)
                                  rank 2: experts 0–3 │ rank 3: experts 4–7    ranks 0 and 2: an expert-data group (edp)

**DeepSpeed's**: weights, checkpoints and their names are those of the lab's model. Top-1 and top-2 gates with the same
weights choose the same experts with the same weights, so losses are equal to rounding as long as no token is dropped.
Differences:

- Top-1 keeps, of the tokens of a full expert, those that `topk` of equal numbers gives, not the first ones.
- Top-2 weighs a token whose other choice is dropped by 1, the lab by its share; and it balances the first choices
  alone, the lab all of them. From three choices on, the most probable tokens stay.
- The capacity is ⌈N/E · f·k⌉ in fp32, the lab's in double precision; neither is below 1 here, where DeepSpeed's default
  is 4 and up.
- Random token selection and noise on the second choice, on by default, are off here.

Source: Lepikhin et al. 2020, "GShard" (arXiv 2006.16668); Rajbhandari et al. 2022, "DeepSpeed-MoE" (arXiv 2201.05596),
for expert-parallel groups smaller than the data axis; DeepSpeed 0.19 `moe/layer.py`, `moe/sharded_moe.py`,
`runtime/engine.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.by_hand.ddp import DataParallel, fill_buckets
from dlojz.config.run_config import RunConfig
from dlojz.models.blocks import BlockList, mean_loss
from dlojz.models.experts.gate import with_auxiliary_loss
from dlojz.models.experts.layer import (
    ExpertTokens,
    Flavour,
    MixtureOfExperts,
    expert_parameters,
    mixtures,
    shard_experts,
)
from dlojz.prediction.shapes import bucket_bytes_of
from dlojz.train.axes import Axes
from dlojz.train.checkpoint_tensors import CheckpointTensors
from dlojz.train.engines.base import WEIGHTS
from dlojz.train.engines.deepspeed import DeepSpeedEngine, begin, load_deepspeed, put_state, whole_state
from dlojz.train.engines.replicated import ByHandEngine
from dlojz.train.engines.tensor_engines import Loss, TensorShare


class ExpertShare(TensorShare):
    """Share of a rank of a model with sharded experts: of theirs a block, of all else the whole.

    Args:
        model: the whole model, before its experts are sharded.
    """

    def __init__(self, config: RunConfig, model: nn.Module, axes: Axes, loss: Loss) -> None:
        super().__init__(config, model, axes, loss)
        self._experts = frozenset(expert_parameters(model))
        self._rank, self._size, self._group = axes.ep_rank, config.layout.ep, axes.group("ep")

    def whole(self, name: str, local_tensor: Tensor) -> Tensor:
        """Gather a whole parameter, or a moment of it, from the blocks of all ranks; a collective call."""
        if name not in self._experts:
            return local_tensor
        blocks = [torch.empty_like(local_tensor) for _ in range(self._size)]
        # Who: the ranks that shard the experts, at the end of a run or at a checkpoint. What: their blocks of one
        # parameter, (E/ep, …) each. How much: the bytes of the whole parameter.
        dist.all_gather(blocks, local_tensor.contiguous(), group=self._group)
        return torch.cat(blocks)

    def part(self, name: str, full_tensor: Tensor) -> Tensor:
        """Cut this rank's contiguous block of experts; nothing is sent."""
        return full_tensor.chunk(self._size)[self._rank] if name in self._experts else full_tensor


class ExpertDataParallel(DataParallel):
    """DataParallel that averages gradients of experts over the ranks that hold them, the others over all ranks.

    Args:
        module: the model, once this rank has its own experts only.
        experts: names of their parameters.
        bucket_bytes: a bucket leaves once it holds so much.
        group: all ranks of the data axis.
        expert_group: those of them that hold the same experts; it may be this rank alone.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        experts: Sequence[str],
        bucket_bytes: int,
        group: dist.ProcessGroup | None,
        expert_group: dist.ProcessGroup,
    ) -> None:
        parameters = dict(module.named_parameters())
        self._experts = {parameters[name] for name in experts}
        self._expert_group = expert_group
        super().__init__(module, bucket_bytes=bucket_bytes, group=group)

    def fill(self, parameters: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
        """Fill buckets of experts and buckets of the rest, in the order in which they will be full."""
        position_of = {parameter: number for number, parameter in enumerate(parameters)}
        dense_tensors = [parameter for parameter in parameters if parameter not in self._experts]
        expert_tensors = [parameter for parameter in parameters if parameter in self._experts]
        buckets = fill_buckets(dense_tensors, bucket_bytes) + fill_buckets(expert_tensors, bucket_bytes)
        # A bucket is full with its last gradient.
        return sorted(buckets, key=lambda bucket: position_of[bucket[-1]])

    def _broadcast(self) -> None:
        """Nothing: each rank has drawn the whole model from the seed of the run before it kept its experts."""

    def _send(self) -> None:
        if self.buckets[self._next][0] not in self._experts:
            super()._send()
        elif self._expert_group.size() == 1:
            self._next += 1  # nobody else holds these
        else:
            # The same all-reduce, among the ranks that hold these experts.
            everybody, self.group = self.group, self._expert_group
            try:
                super()._send()
            finally:
                self.group = everybody

    @torch.no_grad()
    def synchronize(self) -> None:
        """Wait for all buckets, and put the means into the gradients.

        Gradients of experts are divided by all dp ranks, not by the dp/ep that were summed: an expert has seen the
        tokens of all ep ranks of its group, each of which has taken the mean loss of its tokens.

        Raises:
            LabError: if no backward pass came before.
        """
        super().synchronize()
        if self._expert_group.size() == 1:
            for parameter in self._experts:
                if parameter.grad is not None:
                    parameter.grad.div_(self.size)


class ExpertEngine(ByHandEngine):
    """Engine of the lab's data parallelism, with the experts of each mixture sharded over neighbouring ranks."""

    def wrap(self, module: nn.Module) -> nn.Module:
        axes, layout = self.axes, self.config.layout
        self.share = ExpertShare(self.config, module, axes, mean_loss)
        names = expert_parameters(cast(BlockList, module))
        shard_experts(module, axes.ep_rank, layout.ep, axes.group("ep"))
        expert_group = axes.group("edp")
        assert expert_group is not None
        return ExpertDataParallel(
            module.to(self.device),
            experts=names,
            bucket_bytes=bucket_bytes_of(self.config),
            group=axes.group("dp"),
            expert_group=expert_group,
        )


_MATRICES = {"gate_EDF": "gate.weight", "up_EDF": "up.weight", "down_EFD": "down.weight"}
_BIASES = {"up_bias_EF": "up.bias", "down_bias_ED": "down.bias"}
_OF_EXPERT = _MATRICES | _BIASES
"""Parameters of a stack of experts → of one expert of DeepSpeed's, whose matrices are transposed."""


class Expert(nn.Module):
    """Feed-forward network of one expert, as the module that DeepSpeed expects.

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
        mixture: gives weights and routing.
        ep: ranks that shard the experts.
        ep_rank: this one's place among them.
    """

    def __init__(self, mixture: MixtureOfExperts, ep: int, ep_rank: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.routing = routing = mixture.routing
        self.auxiliary_scale = mixture.auxiliary_scale
        self.last: ExpertTokens | None = None
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
        local_experts = routing.experts // ep
        with torch.no_grad():
            self.gate_weight.copy_(mixture.gate.weight)
            for name, stack in mixture.experts.named_parameters():
                # `pieces` ends with this rank's last expert, the slice with the last of all.
                for piece, expert_weight in zip(self.pieces(name), stack[ep_rank * local_experts :], strict=False):
                    # The lab's (E, D, F) against (F, D) of a linear layer: transposed.
                    piece.copy_(expert_weight.T if name in _MATRICES else expert_weight)

    @property
    def gate_weight(self) -> Tensor:
        """``(E, D)``."""
        weight: Tensor = self.moe.deepspeed_moe.gate.wg.weight
        return weight

    def pieces(self, name: str) -> list[Tensor]:
        """List this rank's parts of a stack of experts, one per expert."""
        experts = self.moe.deepspeed_moe.experts.deepspeed_experts
        return [expert.get_parameter(_OF_EXPERT[name]) for expert in experts]

    def forward(self, x: Tensor) -> Tensor:
        """``(B, T, width)`` to the same shape; a collective call."""
        y, balance, counts = self.moe(x)
        tokens = x.shape[0] * x.shape[1]
        capacity = self.routing.capacity(tokens)
        self.last = ExpertTokens(
            tokens_E=counts,
            # Of all rows, those beyond each expert's capacity.
            dropped_share=(counts - capacity).clamp(min=0).sum() / (tokens * self.routing.top_k),
            balance=balance.detach(),
            z=balance.new_zeros(()),
            capacity=capacity,
        )
        return with_auxiliary_loss(y, self.routing.balance_loss * balance, self.auxiliary_scale)


class DeepSpeedExpertEngine(DeepSpeedEngine):
    """Engine of DeepSpeed without ZeRO, whose ranks shard the experts of DeepSpeed's mixtures.

    Source: DeepSpeed 0.19 `runtime/engine.py`, `_reduce_expert_gradients`: gradients of experts are summed over the
    ranks that hold them and divided by all ranks, as `dlojz.train.engines.expert_engines` does.
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
        """Name also DeepSpeed's own groups."""
        from deepspeed.utils import groups

        name = f"ep_size_{self._ep}"
        groups_by_axis = {
            "ep": groups._get_expert_parallel_group(name),
            "edp": groups._get_expert_data_parallel_group(name),
        }
        return super().group_names | {str(group.group_name): axis for axis, group in groups_by_axis.items()}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole parameters under the names of the lab's model."""
        yield from self.gathered(WEIGHTS)

    def gathered(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield one kind of state under the names of the lab's model."""
        for name, pieces in self._held.items():
            full_pieces = [whole_state(self.optimizer, piece, kind) for piece in pieces]
            leaf = name.rpartition(".")[2]
            if leaf not in _OF_EXPERT:
                yield name, full_pieces[0].cpu()
                continue
            block = torch.stack([piece.T if leaf in _MATRICES else piece for piece in full_pieces])
            blocks = [torch.empty_like(block) for _ in range(self._ep)]
            # Who: the ranks that shard the experts. What: their blocks of one parameter, (E/ep, …) each. How much:
            # the bytes of the whole parameter, at the end of a run and with each checkpoint.
            dist.all_gather(blocks, block, group=self.axes.group("ep"))
            yield name, torch.cat(blocks).cpu()

    @torch.no_grad()
    def restore(self, source: CheckpointTensors) -> None:
        """Restore from whole tensors under the names of the lab's model."""
        kinds = [WEIGHTS, *(kind for kind in self.moments if source.has(f"{kind}/{next(iter(self._held))}"))]
        begin(self.optimizer, tuple(kinds[1:]), source.updates)
        for name, pieces in self._held.items():
            leaf = name.rpartition(".")[2]
            for kind in kinds:
                full_tensor = source.tensor(f"{kind}/{name}")
                of_piece: Any = [full_tensor]
                if leaf in _OF_EXPERT:
                    local_experts = full_tensor.chunk(self._ep)[self.axes.ep_rank]
                    of_piece = [expert.T if leaf in _MATRICES else expert for expert in local_experts]
                for piece, weight in zip(pieces, of_piece, strict=True):
                    put_state(self.optimizer, piece, kind, weight.contiguous(), source.updates)


def _pieces_of(name: str, model: nn.Module, replaced: dict[str, DeepSpeedMixture]) -> list[Tensor]:
    """This rank's parts, in DeepSpeed's model, of a parameter of the lab's model."""
    for layer, mixture in replaced.items():
        if name.startswith(f"{layer}."):
            leaf = name.rpartition(".")[2]
            return mixture.pieces(leaf) if leaf in _OF_EXPERT else [mixture.gate_weight]
    return [model.get_parameter(name)]
