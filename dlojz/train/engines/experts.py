"""Expert parallelism as the lab writes it: data parallelism whose ranks share the experts of each mixture out.

Layer 3. Invariant: after the last micro-batch's backward, ranks that hold the same experts hold the same gradients of
them, and all ranks those of everything else; losses and weights are those of the same layout with ep=1.

    data axis, dp = 4, ep = 2:    rank 0: experts 0–3 │ rank 1: experts 4–7    an expert-parallel group (ep)
                                  rank 2: experts 0–3 │ rank 3: experts 4–7    ranks 0 and 2: an expert-data group (edp)

Source: Lepikhin et al. 2020, "GShard" (arXiv 2006.16668); Rajbhandari et al. 2022, "DeepSpeed-MoE" (arXiv
2201.05596), for expert-parallel groups smaller than the data axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlojz.config import RunConfig
from dlojz.data_parallel import BUCKET_BYTES, DataParallel, fill_buckets
from dlojz.models.blocks import BlockList
from dlojz.moe.parallel import expert_parameters, shard_experts
from dlojz.train.axes import Axes
from dlojz.train.engines.base import mean_loss
from dlojz.train.engines.by_hand import ByHandEngine
from dlojz.train.engines.tensor import Loss, TensorShare
from dlojz.units import MEBIBYTE


class ExpertShare(TensorShare):
    """What a rank holds of a model whose experts are shared out: of theirs a block, of all else the whole.

    Args:
        config: the run.
        model: the whole model, before its experts are shared out.
        axes: this rank's place.
        loss: mean loss of whole logits.
    """

    def __init__(self, config: RunConfig, model: nn.Module, axes: Axes, loss: Loss) -> None:
        super().__init__(config, model, axes, loss)
        self._experts = frozenset(expert_parameters(model))
        self._rank, self._size, self._group = axes.ep_rank, config.layout.ep, axes.group("ep")

    def whole(self, name: str, own: Tensor) -> Tensor:
        """A whole parameter, or a moment of it, from the blocks of all ranks; a collective call."""
        if name not in self._experts:
            return own
        blocks = [torch.empty_like(own) for _ in range(self._size)]
        # Who: the ranks that share the experts out, at the end of a run or at a checkpoint. What: their blocks of one
        # parameter, (E/ep, …) each. How much: the bytes of the whole parameter.
        dist.all_gather(blocks, own.contiguous(), group=self._group)
        return torch.cat(blocks)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's block of experts, a contiguous one; nothing is sent."""
        return whole.chunk(self._size)[self._rank] if name in self._experts else whole


class ExpertDataParallel(DataParallel):
    """A model that averages the gradients of its experts over the ranks that hold them, the others over all ranks.

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
        named = dict(module.named_parameters())
        self._experts = {named[name] for name in experts}
        self._expert_group = expert_group
        super().__init__(module, bucket_bytes=bucket_bytes, group=group)

    def fill(self, parameters: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
        """Buckets of experts and buckets of the rest, in the order in which they will be full."""
        place = {parameter: number for number, parameter in enumerate(parameters)}
        rest = [parameter for parameter in parameters if parameter not in self._experts]
        own = [parameter for parameter in parameters if parameter in self._experts]
        buckets = fill_buckets(rest, bucket_bytes) + fill_buckets(own, bucket_bytes)
        return sorted(buckets, key=lambda bucket: place[bucket[-1]])

    def _broadcast(self) -> None:
        """Nothing to do: each rank has drawn the whole model from the seed of the run before it kept its experts."""

    def _send(self) -> None:
        if self.buckets[self._next][0] not in self._experts:
            super()._send()
        elif self._expert_group.size() == 1:
            self._next += 1  # nobody else holds these
        else:
            everybody, self.group = self.group, self._expert_group
            try:
                super()._send()
            finally:
                self.group = everybody

    @torch.no_grad()
    def synchronize(self) -> None:
        """Wait for all buckets, and put the means into the gradients.

        Those of experts are divided by all dp ranks, not by the dp/ep that were summed: within an expert-parallel group
        an expert has seen the tokens of all ep ranks, so that its gradient is a sum over them already. Summed over the
        expert-data group it is a sum over dp ranks, each of which has taken the mean loss of its own tokens.

        Raises:
            LabError: if no backward pass came before.
        """
        super().synchronize()
        if self._expert_group.size() == 1:
            for parameter in self._experts:
                if parameter.grad is not None:
                    parameter.grad.div_(self.size)


class ExpertEngine(ByHandEngine):
    """The lab's data parallelism, with the experts of each mixture shared out over neighbouring ranks."""

    def wrap(self, module: nn.Module) -> nn.Module:
        axes, layout = self.axes, self.config.layout
        self.share = ExpertShare(self.config, module, axes, mean_loss)
        names = expert_parameters(cast(BlockList, module))
        shard_experts(module, axes.ep_rank, layout.ep, axes.group("ep"))
        alike = axes.group("edp")
        assert alike is not None
        given_mib = layout.bucket_mib
        return ExpertDataParallel(
            module.to(self.device),
            experts=names,
            bucket_bytes=BUCKET_BYTES if given_mib is None else int(given_mib * MEBIBYTE),
            group=axes.group("dp"),
            expert_group=alike,
        )
