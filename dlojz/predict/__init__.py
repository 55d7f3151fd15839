"""What a run will cost one rank, before it is started.

Layer 3. Invariant: no process is created, no weight allocated, nothing trained: every figure follows from the
configuration and from shapes on the meta device.
"""

from __future__ import annotations

from dlojz.config import RunConfig
from dlojz.footprint import Footprint
from dlojz.schema import LabError


def predict(config: RunConfig, rank: int = 0) -> Footprint:
    """Footprint of one rank: model states by category, communication per step, FLOPs.

    What is not predicted yet (activations, workspace, peak, seconds) is None, never zero.

    Args:
        config: the run.
        rank: from 0 to the world size; ranks differ where shards do not divide evenly.

    Raises:
        LabError: if the rank does not exist, or the layout splits along an axis not predicted yet.
    """
    from dlojz.predict.communication import predict_communication
    from dlojz.predict.compute import step_flops
    from dlojz.predict.shapes import model_shapes
    from dlojz.predict.states import predict_states

    layout = config.layout
    if not 0 <= rank < layout.world_size:
        raise LabError(f"rank {rank} does not exist: {layout.degrees} has ranks 0 to {layout.world_size - 1}.")
    for name, predicted in (("tp", 1), ("pp", 1), ("offload", "none"), ("sequence_parallel", False)):
        value = getattr(layout, name)
        if value != predicted:
            raise LabError(
                f"{name}={value!r} is not predicted yet: this version predicts layouts that split along dp; "
                f"use {name}={predicted!r}."
            )
    shapes = model_shapes(config)
    return Footprint(
        source="predicted",
        rank=rank,
        parameters=shapes.num_parameters,
        memory=predict_states(config, shapes, rank),
        communication=predict_communication(config, shapes),
        step_flops=step_flops(config),
    )


__all__ = ["predict"]
