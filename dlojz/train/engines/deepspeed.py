"""DeepSpeed ZeRO: stage 0 replicates all, 1 shards optimizer states, 2 gradients too, 3 weights too.

Layer 3. Invariant: the same optimizer object as in every other engine, given to DeepSpeed, which wraps it.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(arXiv 1910.02054).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dlojz.config import RunConfig
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.train.axes import Axes
from dlojz.train.deepspeed_json import deepspeed_json
from dlojz.train.engines.base import Engine, Inventory, make_offload, make_optimizer, mean_loss, optimizer_states
from dlojz.train.engines.deepspeed_states import begin, put_state, whole_state
from dlojz.train.engines.states import WEIGHTS, Source
from dlojz.train.engines.tensor import TensorShare

__all__ = ["DeepSpeedEngine", "deepspeed_json"]


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists and dictionaries, as DeepSpeed keeps them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for element in value:
            yield from _tensors(element)


_HOST_BUFFERS = (
    "param_buffer_of_bit16_for_cpu_offload_groups",  # stages 1 and 2: updated weights on their way back
    "temp_grad_buffer_for_cpu_offload",
    "accumulated_grads_in_cpu",  # stages 1 and 2: gradients of the micro-batches before the last
    "grad_partitions_flat_buffer",  # stage 3: the same
)
"""Attributes of DeepSpeed's optimizers that are in host memory once the optimizer is offloaded."""


def load_deepspeed(device: torch.device) -> Any:
    """The library, told where it trains."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # DeepSpeed insists on it, whatever the launcher
    import deepspeed

    # An inference-only shared-memory operator that DeepSpeed would compile for 40 s at its first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class DeepSpeedEngine(Engine):
    """DeepSpeed with the ZeRO stage of the layout."""

    def __init__(self, config: RunConfig, model: nn.Module, device: torch.device) -> None:
        deepspeed = load_deepspeed(device)
        self.config, self.device, self.module = config, device, model.to(device)
        self.axes = Axes(config.layout, device)
        optimizer = make_optimizer(config, self.module.parameters())
        self.model: Any
        self.model, self.optimizer, *_ = deepspeed.initialize(
            model=self.module, optimizer=optimizer, config=deepspeed_json(config), dist_init_required=False
        )
        self.share = TensorShare(config, self.module, self.axes, mean_loss)
        self.offload = make_offload(config, self.module)

    def autocast(self) -> AbstractContextManager[object]:
        return nullcontext()  # the weights themselves are bf16

    def forward(self, inputs: Tensor, targets: Tensor, *, last: bool) -> Tensor:
        if self.config.precision == "bf16" and inputs.is_floating_point():
            inputs = inputs.bfloat16()
        with self.activations():
            logits = self.model(inputs)
        return mean_loss(logits, targets)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        # Who: all dp ranks. What: stages 0 and 1 all-reduce the gradient with the last micro-batch, stages 2 and 3
        # reduce it with every one. How much: see dlojz.predict.communication.
        self.model.backward(loss)  # divides by the number of micro-batches itself
        if not last:
            self.model.step()  # counts the micro-batch; it updates nothing before the last

    def update(self) -> None:
        # Stages 1 and 2: each rank updates its share of the weights, then all shares are all-gathered.
        self.model.step()

    def inventory(self) -> Inventory:
        zero: Any = self.optimizer
        inner = getattr(zero, "optimizer", zero)
        parameters = list(self.module.parameters())
        shards = [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
        updated = self._updated()
        gradients = [tensor.grad for tensor in (*parameters, *updated) if tensor.grad is not None]
        for name in (
            "averaged_gradients",
            "fp32_groups_gradients_flat",
            "grad_partitions_flat_buffer",
            "all_grad_tensors",
        ):
            gradients += _tensors(getattr(zero, name, None))
        own = {id(parameter) for parameter in parameters}
        held: Inventory = {
            "weights": shards or [*parameters],
            "gradients": gradients,
            "optimizer": optimizer_states(inner),
            "master": [tensor for tensor in updated if id(tensor) not in own],
            "buffers": list(self.module.buffers()),
            # Stage 3: parameters that are gathered whole at this moment.
            "workspace": [*parameters] if shards else [],
        }
        elsewhere = {tensor.untyped_storage()._cdata for tensor in self._states_on_host()}
        return {
            category: [tensor for tensor in tensors if tensor.untyped_storage()._cdata not in elsewhere]
            for category, tensors in held.items()
        }

    def offloaded(self) -> list[Tensor]:
        """Activations, and the states that the layout offloads."""
        return [*super().offloaded(), *self._states_on_host()]

    def _updated(self) -> list[Tensor]:
        """What the optimizer updates: the parameters themselves, or flat pieces of a copy of them."""
        zero: Any = self.optimizer
        inner = getattr(zero, "optimizer", zero)
        return [
            *(parameter for group in inner.param_groups for parameter in group["params"]),
            *_tensors(getattr(zero, "fp32_partitioned_groups_flat", [])),
            *_tensors(getattr(zero, "single_partition_of_fp32_groups", [])),
            *_tensors(getattr(zero, "fp32_groups_flat_partition", [])),
        ]

    def _states_on_host(self) -> list[Tensor]:
        """States that DeepSpeed keeps in host memory, with the buffers through which they go there and back.

        With the optimizer go the master copy, its gradient in fp32 and the gradients of the micro-batches; with the
        parameters the shards of the weights too.
        """
        if self.config.layout.offload not in ("optimizer", "parameters"):
            return []
        zero: Any = self.optimizer
        updated = self._updated()
        moved = [*updated, *(tensor.grad for tensor in updated if tensor.grad is not None)]
        moved += optimizer_states(getattr(zero, "optimizer", zero))
        for name in _HOST_BUFFERS:
            moved += _tensors(getattr(zero, name, None))
        if self.config.layout.offload == "parameters":
            moved += [parameter.ds_tensor for parameter in self.module.parameters() if hasattr(parameter, "ds_tensor")]
            moved += _tensors(getattr(zero, "param_groups_fp16_flat_cpu_memory", None))
        return moved

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        import deepspeed

        for name, parameter in self.module.named_parameters():
            # Who: all dp ranks. What: one parameter, gathered whole (stage 3); at the end of the run only.
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.config.layout.zero == 3):
                yield name, parameter.detach().float().cpu().clone()

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """As every engine, from the copy in fp32 that DeepSpeed updates.

        Raises:
            LabError: if the states are in files on an NVMe disk, which are not read here.
        """
        self._check_kept()
        yield from super().states()

    def gathered(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """As every engine."""
        for name, parameter, _ in self.named():
            yield name, whole_state(self.optimizer, parameter, kind).cpu()

    @torch.no_grad()
    def restore(self, source: Source) -> None:
        """As every engine, into DeepSpeed's copy in fp32 and into the weights that forward reads."""
        self._check_kept()
        names = [name for name, _, _ in self.named()]
        kept = [WEIGHTS, *(kind for kind in self.moments if source.has(f"{kind}/{names[0]}"))]
        begin(self.optimizer, tuple(kept[1:]), source.updates)
        for name, parameter, _ in self.named():
            for kind in kept:
                put_state(self.optimizer, parameter, kind, source.tensor(f"{kind}/{name}"), source.updates)

    def _check_kept(self) -> None:
        if self.config.layout.nvme_path is not None:
            raise LabError(
                say(
                    en="states that DeepSpeed keeps on an NVMe disk are not taken into a checkpoint: leave nvme_path "
                    "out, and they are offloaded to host memory.",
                    fr="les états que DeepSpeed garde sur un disque NVMe ne sont pas mis dans un checkpoint : retirez "
                    "nvme_path, et ils seront déchargés en mémoire hôte.",
                )
            )

    def close(self) -> None:
        self.model.destroy()
