"""torch FSDP2 (`fully_shard`): weights, gradients and optimizer states are sharded over the ranks, block by block.

Layer 3. Invariant: between steps a rank holds 1/dp of every parameter (padded along dimension 0).

Source: Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (arXiv 2304.11277).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dlojz.config import RunConfig
from dlojz.train.engines.base import Engine


def shard(config: RunConfig, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard a flat list of blocks over the data axis, one unit per block; in place.

    Args:
        config: the run; its layout says whether gathered weights are freed after forward.
        module: a model, or one stage of a pipeline; where it is split along a tensor axis, its shards are cut again.
        mesh: the ranks of the data axis.
    """
    policy = MixedPrecisionPolicy()
    if config.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for buffer in module.buffers():  # CPU BatchNorm wants its statistics in the type of its weights
            if buffer.is_floating_point():
                buffer.data = buffer.data.bfloat16()
    # Who: all dp ranks, for each block. What: its weights are all-gathered before its forward and, where they
    # were freed after it (ZeRO-3), once more before its backward; its gradient is reduce-scattered (mean) after
    # it. How much: see dlojz.predict.communication, which equals the count to the byte.
    # Each call moves one block to the device and shards it there, so that the whole model is never on one GPU.
    reshard = config.layout.zero == 3
    for block in cast(nn.ModuleList, module.blocks):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return cast(nn.Module, fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard))


class FSDP2Engine(Engine):
    """FSDP2 with one unit per block of the model: ZeRO-3, or ZeRO-2 where gathered weights are kept for backward."""

    def wrap(self, module: nn.Module) -> nn.Module:
        if self.axes.mesh is not None:
            mesh = self.axes.mesh["dp"]
        else:
            mesh = init_device_mesh(self.device.type, (self.config.layout.dp,), mesh_dim_names=("dp",))
        return shard(self.config, module, mesh)

    def autocast(self) -> AbstractContextManager[object]:
        return nullcontext()  # the policy above casts the gathered weights and each block's inputs

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.module.named_parameters():
            # Who: all dp ranks. What: one parameter, all-gathered whole; at the end of the run only.
            yield name, self.share.whole(name, parameter.detach()).cpu()

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """As every engine, of the shards: weights that are whole at the moment are given back first."""
        # Who: all dp ranks. What: one parameter, or one of its moments, all-gathered whole. How much: its bytes.
        self.close()
        yield from super().states()

    def close(self) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.reshard()
