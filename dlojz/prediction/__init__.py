"""Predict what a run costs one rank: from the configuration and shapes on the meta device, without running anything."""

from __future__ import annotations

from dlojz.config.run_config import RunConfig
from dlojz.hardware import Device
from dlojz.results.footprint import Footprint


def predict(config: RunConfig, rank: int = 0, device: Device | str | None = None) -> Footprint:
    """Predict the footprint of one rank: memory by category with its peak, communication per step, FLOPs.

    Seconds, which are not predicted here, are None.

    Args:
        config: the run.
        rank: from 0 to the world size; ranks differ where shards do not divide evenly.
        device: a GPU or its name (see `dlojz.hardware`); by default the CPU.

    Raises:
        LabError: if the rank or the device does not exist, or the layout communicates along an axis not predicted yet.
    """
    from dlojz.prediction.communication import predict_communication
    from dlojz.prediction.compute import step_flops
    from dlojz.prediction.forecast import check_rank, forecast
    from dlojz.prediction.shapes import model_shapes

    check_rank(config, rank)
    shapes = model_shapes(config)
    return Footprint(
        source="predicted",
        rank=rank,
        parameters=shapes.num_parameters,
        memory=forecast(config, rank, device).memory,
        communication=predict_communication(config, shapes, rank),
        step_flops=step_flops(config, rank),
    )


__all__ = ["predict"]
