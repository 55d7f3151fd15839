"""Predict what a run costs one rank: from the configuration and shapes on the meta device, without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlojz.base.language import Sentences
from dlojz.config.run_config import RunConfig
from dlojz.hardware import Device
from dlojz.results.footprint import Footprint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")


def predict(
    model: RunConfig | str | nn.Module,
    inputs: Tensor | int | None = None,
    device: Device | str | None = None,
    *,
    rank: int = 0,
    tp_plan: Mapping[str, str] | None = None,
    **fields: Any,
) -> Footprint:
    """Predict the footprint of one rank: memory by category with its peak, communication per step, FLOPs.

    Seconds, which are not predicted here, are None.

    Args:
        model: the run; or the name of a model (`gpt_tiny`, `timm:convnext_base`, `my_file.py:build`); or a module, on
            any device, which stays as it is.
        inputs: of a module: a batch that it reads, a tensor, or a tuple or dict of tensors for its arguments, whose
            first dimension is the micro-batch where `fields` give none; of a run: its rank.
        device: a GPU or its name (see `dlojz.hardware`); by default the CPU.
        rank: from 0 to the world size; ranks differ where shards do not divide evenly.
        tp_plan: of a module, with tp > 1: patterns of its linear layers, `colwise` or `rowwise`, e.g.
            `{"blocks.*.fc1": "colwise", "blocks.*.fc2": "rowwise"}`; by default all that can be split is.
        fields: of a model: those of a configuration, flat, as `dlojz.run` takes them.

    Raises:
        LabError: if the rank or the device does not exist, the layout communicates along an axis not predicted yet, or
            the module does not run on the inputs.

    Example:
        `predict(module, torch.empty(16, 3, 224, 224), "a100-80", dp=8, zero=3, precision="bf16")`
    """
    if isinstance(model, RunConfig):
        if fields or not isinstance(inputs, int | None):
            raise phrase.refused("fields beside a configuration", fields=", ".join(fields) or "inputs")
        return _predicted(model, rank or inputs or 0, device)
    if isinstance(model, str):
        return _predicted(RunConfig.of(model=model, **fields), rank, device)
    if not hasattr(model, "named_parameters"):
        raise phrase.refused("nothing to predict", model=model)
    from dlojz.models.foreign.sources import name_of_module

    name, samples = name_of_module(model, inputs, tp_plan)
    config = RunConfig.of(model=name, **{"micro_batch": samples, **fields})
    return _predicted(config, rank, device)


def _predicted(config: RunConfig, rank: int, device: Device | str | None) -> Footprint:
    from dlojz.prediction.communication import predict_communication
    from dlojz.prediction.compute import step_flops
    from dlojz.prediction.forecast import check_rank, forecast
    from dlojz.prediction.shapes import RankPart, model_shapes

    check_rank(config, rank)
    return Footprint(
        source="predicted",
        rank=rank,
        parameters=model_shapes(config).num_parameters,
        memory=forecast(config, rank, device).memory,
        communication=predict_communication(RankPart(config, rank)),
        step_flops=step_flops(config, rank),
    )


__all__ = ["predict"]
