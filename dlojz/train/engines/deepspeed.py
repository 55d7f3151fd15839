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

from dlojz.config import DEEPSPEED_BUCKET_ELEMENTS, RunConfig
from dlojz.train.engines.base import Engine, Inventory, make_optimizer, mean_loss, optimizer_states


def deepspeed_json(config: RunConfig) -> dict[str, Any]:
    """DeepSpeed's configuration for this run, as a student would write it in a JSON file.

    Source: deepspeed.ai, "DeepSpeed Configuration JSON".
    """
    layout = config.layout
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches,
        "zero_optimization": {
            "stage": layout.zero,
            "reduce_bucket_size": DEEPSPEED_BUCKET_ELEMENTS,
        },
        "bf16": {"enabled": config.precision == "bf16"},
        "gradient_clipping": 0.0,  # DeepSpeed clips at 1.0 unless told otherwise, which is another training
        "zero_allow_untested_optimizer": True,  # it wraps our torch optimizer, SGD included
    }
    if config.precision == "bf16":
        settings["data_types"] = {"buffer_dtype": "bf16"}  # CPU BatchNorm wants statistics in the weights' type
    if layout.zero == 3:
        # The textbook stage 3: no parameter is kept whole for being small, and each is freed after forward and
        # gathered again for backward. By default DeepSpeed keeps up to 1e9 of them for reuse.
        settings["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        }
    return settings


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists and dictionaries, as DeepSpeed keeps them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for element in value:
            yield from _tensors(element)


class DeepSpeedEngine(Engine):
    """DeepSpeed with the ZeRO stage of the layout."""

    def __init__(self, config: RunConfig, model: nn.Module, device: torch.device) -> None:
        os.environ.setdefault("DS_ACCELERATOR", device.type)
        os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # DeepSpeed insists on it, whatever the launcher
        import deepspeed

        # An inference-only shared-memory operator that DeepSpeed would compile for 40 s at its first start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.config, self.device, self.module = config, device, model.to(device)
        optimizer = make_optimizer(config, self.module.parameters())
        self.model: Any
        self.model, self.optimizer, *_ = deepspeed.initialize(
            model=self.module, optimizer=optimizer, config=deepspeed_json(config), dist_init_required=False
        )

    def autocast(self) -> AbstractContextManager[object]:
        return nullcontext()  # the weights themselves are bf16

    def forward(self, inputs: Tensor, targets: Tensor, *, last: bool) -> Tensor:
        if self.config.precision == "bf16" and inputs.is_floating_point():
            inputs = inputs.bfloat16()
        return mean_loss(self.model(inputs), targets)

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
        updated = [parameter for group in inner.param_groups for parameter in group["params"]]
        flat = [
            *_tensors(getattr(zero, "fp32_partitioned_groups_flat", [])),
            *_tensors(getattr(zero, "single_partition_of_fp32_groups", [])),
            *_tensors(getattr(zero, "fp32_groups_flat_partition", [])),
        ]
        gradients = [tensor.grad for tensor in (*parameters, *updated, *flat) if tensor.grad is not None]
        for name in (
            "averaged_gradients",
            "fp32_groups_gradients_flat",
            "grad_partitions_flat_buffer",
            "all_grad_tensors",
        ):
            gradients += _tensors(getattr(zero, name, None))
        own = {id(parameter) for parameter in parameters}
        return {
            "weights": shards or [*parameters],
            "gradients": gradients,
            "optimizer": optimizer_states(inner),
            "master": [tensor for tensor in (*updated, *flat) if id(tensor) not in own],
            "buffers": list(self.module.buffers()),
            # Stage 3: parameters that are gathered whole at this moment.
            "workspace": [*parameters] if shards else [],
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        import deepspeed

        for name, parameter in self.module.named_parameters():
            # Who: all dp ranks. What: one parameter, gathered whole (stage 3); at the end of the run only.
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.config.layout.zero == 3):
                yield name, parameter.detach().float().cpu().clone()

    def close(self) -> None:
        self.model.destroy()
