"""Engine around Megatron-core's objects, for the probes, and the way back to whole weights.

Megatron's DDP keeps the gradients of all parameters in one contiguous buffer during the whole training: that buffer is
counted as gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from dlojz.config.run_config import RunConfig
from dlojz.libraries.megatron_adapter import own_parameters
from dlojz.libraries.seen_engines import SeenTorch
from dlojz.train import loop
from dlojz.train.engines.base import Inventory


class SeenMegatron(SeenTorch):
    """Engine around a rank's part of a `GPTModel` in Megatron-core's `DistributedDataParallel`."""

    def __init__(self, config: RunConfig, module: nn.Module, device: torch.device) -> None:
        super().__init__(config, module, device)
        self._wrapped: Any = module
        self.module = cast(nn.Module, module.module)  # the wrapper's `buffers` is another list

    @property
    def group_names(self) -> dict[str, str]:
        """Axis of each of Megatron's process groups; the norm of the gradient goes to all ranks of a replica."""
        replica = "pp" if parallel_state.get_pipeline_model_parallel_world_size() > 1 else "tp"
        groups = (
            (parallel_state.get_embedding_group(False), "tied"),
            (parallel_state.get_model_parallel_group(), replica),
            (parallel_state.get_tensor_model_parallel_group(), "tp"),
            (parallel_state.get_data_parallel_group(with_context_parallel=True), "dp"),
            (parallel_state.get_pipeline_model_parallel_group(), "pp"),
        )
        return {str(group.group_name): axis for group, axis in groups if group is not None}

    @property
    def replicas(self) -> int:
        """Number of ranks that read different samples."""
        return int(parallel_state.get_data_parallel_world_size())

    def inventory(self) -> Inventory:
        tensors = super().inventory()
        # Not `parameter.grad`, which Megatron sets to None: one buffer, counted whole.
        gradients: list[Tensor] = [buffer.grad_data for buffer in self._wrapped.buffers]
        return tensors | {"gradients": [*gradients, *tensors["gradients"]], "buffers": []}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole parameters by the lab's names, in the order of the lab's model; a collective call."""
        with torch.device("meta"):
            lab_model = loop.build_model(self.config)
        rank_parameters = dict(own_parameters(self.module, len(list(lab_model.blocks)) - 2))  # type: ignore[arg-type]
        stages, group = self.config.layout.pp, parallel_state.get_pipeline_model_parallel_group()
        for name, parameter in lab_model.named_parameters():
            owner = torch.tensor([parallel_state.get_pipeline_model_parallel_rank() if name in rank_parameters else -1])
            tensor = (
                self._whole(rank_parameters[name])
                if name in rank_parameters
                else torch.empty(parameter.shape, device=self.device)
            )
            if stages > 1:
                # Who: the stages of a pipeline, at the end of the run. What: the owner of this parameter, then itself.
                # How much: 8 bytes, and its own.
                dist.all_reduce(owner, op=dist.ReduceOp.MAX, group=group)
                dist.broadcast(tensor, dist.get_global_rank(group, int(owner)), group=group)
            yield name, tensor.cpu()

    def _whole(self, parameter: Tensor) -> Tensor:
        """Gather a parameter from the ranks of the tensor axis."""
        part = parameter.detach().contiguous()
        if not getattr(parameter, "tensor_model_parallel", False) or self.config.layout.tp == 1:
            return part.clone()
        parts = [torch.empty_like(part) for _ in range(self.config.layout.tp)]
        # Who: the ranks of the tensor axis, at the end of the run. What: their slices. How much: the parameter's bytes.
        dist.all_gather(parts, part, group=parallel_state.get_tensor_model_parallel_group())
        return torch.cat(parts, dim=parameter.partition_dim)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Forget Megatron's groups: a process that trains once more makes its own."""
        parallel_state.destroy_model_parallel()
