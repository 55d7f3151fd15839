"""Which bytes of the model states DeepSpeed's offloading takes from the device, and how many it needs on the host.

Layer 3. Invariant: closed forms over parameter shapes, equal to what the engine holds in host memory, to the byte; what
goes to NVMe is DeepSpeed's arithmetic, not measured where the operator for it cannot be built.

With Ψ/N = s parameters per rank, b bytes each to compute with, and Adam, the host holds: the master copy 4s, its
gradient 4s and the moments 8s; and buffers on the way, bs for the weights or the gradients.

Source: Ren et al. 2021, "ZeRO-Offload" (arXiv 2101.06840), section 4; Rajbhandari et al. 2021, "ZeRO-Infinity" (arXiv
2104.07857), section 5; DeepSpeed 0.19 `runtime/zero/stage_1_and_2.py`, `stage3.py`, `offload_config.py`.
"""

from __future__ import annotations

from dlojz.config import RunConfig
from dlojz.footprint import Memory
from dlojz.predict.shapes import ModelShapes
from dlojz.predict.states import (
    FP32_BYTES,
    SUB_GROUP_ELEMENTS,
    compute_bytes,
    padded_parameters,
    touching_elements,
)

OPTIMIZER_BUFFERS = 4
"""Sub-groups that NVMe offloading of the optimizer holds in host memory at once (`buffer_count`)."""
PARAMETER_BUFFERS, PARAMETER_BUFFER_ELEMENTS = 5, 10**8
"""Buffers of NVMe offloading of the parameters, and elements of each (`buffer_count`, `buffer_size`)."""


def offload_states(config: RunConfig, shapes: ModelShapes, memory: Memory, rank: int = 0) -> Memory:
    """The states of one rank once the layout's offloading has moved what it moves.

    Args:
        config: the run.
        shapes: of its model.
        memory: the states without offloading, as `predict_states` gives them.
        rank: whose states they are.

    Returns:
        the same with `host_bytes` and `nvme_bytes`; unchanged where optimizer and parameters stay on the device.
    """
    if config.layout.offload not in ("optimizer", "parameters"):
        return memory
    moved = _stage_3 if config.layout.zero == 3 else _stages_1_and_2
    return memory.model_copy(update={"optimizer_bytes": 0, "master_bytes": 0, **moved(config, shapes, memory, rank)})


def _stages_1_and_2(config: RunConfig, shapes: ModelShapes, memory: Memory, rank: int) -> dict[str, int]:
    layout, each = config.layout, compute_bytes(config)
    share = padded_parameters(shapes.num_parameters, layout.dp) // layout.dp
    largest = max(parameter.numel for parameter in shapes.parameters)
    host_bytes = (memory.optimizer_bytes or 0) + (memory.master_bytes or 0) + FP32_BYTES * share
    host_bytes += each * share + each * largest  # updated weights and a gradient, each on its way
    accumulates_whole = layout.zero == 1 and layout.micro_batches > 1
    if layout.zero == 2 and layout.micro_batches > 1:
        # Each micro-batch's gradient goes to the host, whole for every parameter that reaches into the share.
        padding = max(0, (rank + 1) * share - max(rank * share, shapes.num_parameters))
        host_bytes += each * (touching_elements(shapes, layout.dp, rank) - padding)
    # Stage 1 keeps the sum over micro-batches on the device and moves it with the last one.
    return {"gradients_bytes": (memory.gradients_bytes or 0) if accumulates_whole else 0, "host_bytes": host_bytes}


def _stage_3(config: RunConfig, shapes: ModelShapes, memory: Memory, rank: int) -> dict[str, int]:
    own = sum(parameter.padded_numel(config.layout.dp) for parameter in shapes.parameters)
    weights_bytes, gradients_bytes = memory.weights_bytes or 0, memory.gradients_bytes or 0
    moved_weights_bytes = weights_bytes if config.layout.offload == "parameters" else 0
    left = {"gradients_bytes": 0, "weights_bytes": weights_bytes - moved_weights_bytes}
    master_bytes = memory.master_bytes or 0
    if config.layout.nvme_path is None:
        # The gradients of the micro-batches in the type of the weights, and their sum in fp32 for the update.
        host_bytes = (memory.optimizer_bytes or 0) + master_bytes + FP32_BYTES * own
        return left | {"host_bytes": host_bytes + gradients_bytes + moved_weights_bytes}
    buffer_bytes = OPTIMIZER_BUFFERS * FP32_BYTES * min(own, SUB_GROUP_ELEMENTS)
    if moved_weights_bytes:
        buffer_bytes += PARAMETER_BUFFERS * PARAMETER_BUFFER_ELEMENTS * compute_bytes(config)
    return left | {
        # The master copy, its gradient and the moments, each a file per sub-group.
        "nvme_bytes": master_bytes + FP32_BYTES * own + (memory.optimizer_bytes or 0) + moved_weights_bytes,
        "host_bytes": gradients_bytes + buffer_bytes,
    }
