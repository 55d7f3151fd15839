"""Bytes of a checkpoint, before it is written.

Layer 3. Invariant: equal to the bytes of the tensors that are written, in every layout, as a checkpoint holds the
logical state: what is replicated is kept once. The files are a little larger, by their headers and the manifest.

With Ψ parameters: 4Ψ of weights in fp32, 4Ψ for each moment (one for momentum, two for Adam, so 12Ψ in all); BatchNorm
statistics of each replica; in the second stage of an optimizer that compresses, the errors of each rank; of replicas
that go alone, what each has for itself; 5,056 bytes of each rank's random numbers; 8 bytes of Adam's count of updates.
No gradients, and no activations: that is why it is kept between two steps.

Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §3.1, for what the states of a training are.
"""

from __future__ import annotations

from dlojz.config import RunConfig
from dlojz.optimizer_stages import LOCAL
from dlojz.predict.shapes import model_shapes
from dlojz.predict.states import AUTOCAST, FP32_BYTES, MOMENTS, NUMBERS, compute_bytes, error_bytes

RANDOM_STATE_BYTES = 5056
"""Of torch's generator on the CPU (`at::CPUGeneratorImplState`); that of a GPU has 16 bytes more."""

COUNT_BYTES = 8
APART = {"local_sgd": 1, "diloco": 3}
"""Tensors of the parameters' size that every replica but the first has for itself between two meetings: the weights,
and the moments of an inner AdamW; just after a meeting it is one less, as all hold the same weights."""


def checkpoint_bytes(config: RunConfig) -> int:
    """Bytes of all tensors that a checkpoint of this run holds."""
    shapes, layout = model_shapes(config), config.layout
    parameter_bytes = FP32_BYTES * (1 + MOMENTS[config.optimizer]) * shapes.num_parameters
    buffer_bytes = FP32_BYTES if layout.strategy in AUTOCAST else compute_bytes(config)
    replica_bytes = buffer_bytes * shapes.float_buffer_elements + shapes.integer_buffer_bytes
    numbers = NUMBERS.get(config.optimizer, 0)
    count_bytes = (COUNT_BYTES if numbers else 0) + FP32_BYTES * max(0, numbers - 1) * len(shapes.parameters)
    own_bytes = layout.dp * error_bytes(config, shapes.num_parameters)
    if config.optimizer in LOCAL:
        own_bytes = (layout.dp - 1) * FP32_BYTES * APART[config.optimizer] * shapes.num_parameters
    return (
        parameter_bytes
        + count_bytes
        + own_bytes
        + _replicas(config) * replica_bytes
        + layout.world_size * RANDOM_STATE_BYTES
    )


def _replicas(config: RunConfig) -> int:
    """Sets of BatchNorm statistics: one per replica, and one per pipe of a bidirectional schedule."""
    if config.layout.pp == 1:
        return config.layout.dp
    from dlojz.pipeline.cuts import schedule_of

    return config.layout.dp * schedule_of(config.layout).pipes
