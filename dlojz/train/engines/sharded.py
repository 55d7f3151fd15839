"""Engines that shard the model: torch's FSDP2 and the lab's ZeRO.

FSDP2 (`fully_shard`) shards weights, gradients and optimizer states over the ranks, block by block: between steps a
rank holds 1/dp of every parameter (padded along dimension 0). Source: Zhao et al. 2023, "PyTorch FSDP: Experiences on
Scaling Fully Sharded Data Parallel" (arXiv 2304.11277). The lab's ZeRO is `dlojz.by_hand.zero`: after the last
micro-batch's backward each rank's share of the gradient is the mean over all. Source: Rajbhandari et al. 2020, "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models" (arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dlojz.by_hand.zero import Zero, ZeroStage1, ZeroStage2, ZeroStage3
from dlojz.config.run_config import RunConfig
from dlojz.models.blocks import BlockList, tied_names
from dlojz.train.checkpoint_tensors import CheckpointTensors
from dlojz.train.engines.base import (
    WEIGHTS,
    Engine,
    Inventory,
    begun,
    gather_piece,
    make_optimizer,
    optimizer_states,
    put_piece,
)


def shard(config: RunConfig, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard a flat list of blocks over the data axis, one unit per block (embedding and tied head: one); in place.

    Args:
        config: the run; its layout says whether gathered weights are freed after forward.
        module: a model, or one stage of a pipeline; where it is split along a tensor axis, its shards are split again.
    """
    policy = MixedPrecisionPolicy()
    if config.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for buffer in module.buffers():  # CPU BatchNorm wants its statistics in the type of its weights
            if buffer.is_floating_point():
                buffer.data = buffer.data.bfloat16()
    # Who: all dp ranks, for each block. What: its weights are all-gathered before its forward and, where they
    # were freed after it (ZeRO-3), once more before its backward; its gradient is reduce-scattered (mean) after
    # it. How much: see dlojz.prediction.communication, which equals the count to the byte.
    # Each call moves one block to the device and shards it there, so that the whole model is never on one GPU.
    reshard = config.layout.zero == 3
    for unit in _units(module):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    root = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    if dist.get_backend(mesh.get_group()) == "gloo":
        # gloo's reduce-scatter of older torch adds where a mean is asked for, and does not say so (pytorch#162338):
        # let FSDP2 ask for the sum and divide by itself.
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)
    return cast(nn.Module, root)


def _units(module: nn.Module) -> list[list[nn.Module]]:
    """Group the blocks by unit: two that share a parameter are one, whole from the first's forward to the last's."""
    blocks = list(cast(nn.ModuleList, module.blocks))
    ends = {int(name.split(".")[1]) for pair in tied_names(module).items() for name in pair}
    single_blocks = [[block] for number, block in enumerate(blocks) if number not in ends]
    return [*single_blocks, [blocks[number] for number in sorted(ends)]] if ends else single_blocks


class FSDP2Engine(Engine):
    """Engine of FSDP2, one unit per block: ZeRO-3, or ZeRO-2 where gathered weights are kept for backward."""

    def wrap(self, module: nn.Module) -> nn.Module:
        if self.axes.mesh is not None:
            mesh = self.axes.mesh["dp"]
        else:
            mesh = init_device_mesh(self.device.type, (self.config.layout.dp,), mesh_dim_names=("dp",))
        return shard(self.config, module, mesh)

    def autocast(self) -> AbstractContextManager[object]:
        return nullcontext()  # the policy above casts the gathered weights and each block's inputs

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the states of the shards: weights that are whole at the moment are freed first."""
        # Who: all dp ranks. What: one parameter, or one of its moments, all-gathered whole. How much: its bytes.
        self.close()
        yield from super().states()

    def close(self) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.reshard()


class ZeroByHandEngine(Engine):
    """Engine of the lab's ZeRO stage over all replicas; in stage 3, one unit per block."""

    def __init__(self, config: RunConfig, model: nn.Module, device: torch.device) -> None:
        self.zero: Zero
        super().__init__(config, model, device)
        self.optimizer = self.zero.optimizer

    def wrap(self, module: nn.Module) -> nn.Module:
        make, group = partial(make_optimizer, self.config), self.axes.group("dp")
        if self.config.layout.zero == 3:
            dtype = torch.bfloat16 if self.config.precision == "bf16" else None
            blocks = cast(BlockList, module)
            units = None if blocks.is_chain else list(blocks.blocks)[:-1]  # the last one calls them
            self.zero = ZeroStage3(module.to(self.device), make, units=units, compute_dtype=dtype, group=group)
        else:
            stage = ZeroStage1 if self.config.layout.zero == 1 else ZeroStage2
            self.zero = stage(module.to(self.device), make, group=group)
        return self.zero

    def autocast(self) -> AbstractContextManager[object]:
        # In stage 3 the gathered weights are bf16 themselves: autocast would keep a cast copy of all of them for
        # backward, as large as what stage 3 frees.
        return nullcontext() if self.config.layout.zero == 3 else super().autocast()

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        # Who: all dp ranks. What: stage 1 communicates in `update` only; stages 2 and 3 reduce-scatter every
        # micro-batch's gradients, stage 3 gathers weights too. How much: see dlojz.prediction.communication.
        self.zero.backward(loss / self.config.layout.micro_batches)

    def update(self) -> None:
        # Stages 1 and 2: each rank's updated share of the weights is all-gathered.
        self.zero.step()

    def inventory(self) -> Inventory:
        shares: Sequence[Tensor] = self.zero.shares
        parameters = list(self.module.parameters())
        stage_3 = self.config.layout.zero == 3
        return {
            "weights": [*shares, *([] if stage_3 else parameters)],
            "gradients": [tensor.grad for tensor in (*parameters, *shares) if tensor.grad is not None],
            "optimizer": optimizer_states(self.optimizer),
            "buffers": list(self.module.buffers()),
            # Stage 3: the weights that are whole at this moment.
            "workspace": [flat.whole for flat in self.zero.flats] if stage_3 else [],
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        # Who: all dp ranks, in stage 3. What: each unit's weights, all-gathered; at the end of the run only.
        for name, weight in self.zero.weights():
            yield name, self.share.whole(name, weight).cpu()

    def gathered(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Gather one kind of state, parameter by parameter, from the ranks' shares."""
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        for flat in self.zero.flats:
            local_tensor = flat.share.detach() if kind == WEIGHTS else self.optimizer.state[flat.share].get(kind)
            if local_tensor is None:
                continue
            for number, parameter in enumerate(flat.parameters):
                name = names[cast(nn.Parameter, parameter)]
                yield name, self.share.whole(name, gather_piece(flat, number, local_tensor)).cpu()

    @torch.no_grad()
    def restore(self, source: CheckpointTensors) -> None:
        """Restore this rank's shares; in stages 1 and 2 the whole weights too."""
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        for flat in self.zero.flats:
            state = begun(self.optimizer, flat.share, self._kept(source), source.updates)
            for number, parameter in enumerate(flat.parameters):
                name = names[cast(nn.Parameter, parameter)]
                weight = self.share.part(name, source.tensor(f"{WEIGHTS}/{name}"))
                put_piece(flat, number, flat.share, weight)
                if self.config.layout.zero < 3:  # of which the share is a view
                    parameter.detach().copy_(weight)
                for kind in self.moments:
                    if source.has(f"{kind}/{name}"):
                        moment = self.share.part(name, source.tensor(f"{kind}/{name}"))
                        put_piece(flat, number, state[kind], moment)

    def _kept(self, source: CheckpointTensors) -> tuple[str, ...]:
        """Kinds of moments in the checkpoint: none, if it was written before the first update."""
        name, _ = next(self.module.named_parameters())
        return tuple(kind for kind in self.moments if source.has(f"{kind}/{name}"))
