"""A pipeline of stages on submeshes: its step time, its memory, and how it shows itself.

Layer 4. Invariant: stages are in the order of the layers and hold every layer once. No torch; matplotlib only to draw.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §5.2, equation 2, for the step time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dlojz.plan.alpa.showing import ShownAsTable, number
from dlojz.plan.alpa.submesh import Submesh, tiled
from dlojz.text import say
from dlojz.units import format_bytes

if TYPE_CHECKING:
    from dlojz.viz.canvas import LabFigure


class PlannedStage(NamedTuple):
    """One stage.

    Args:
        first: its first layer.
        last: its last layer, included.
        submesh: nodes × GPUs that run it.
        time_s: forward and backward of one micro-batch.
        device_bytes: on one of its devices, with its micro-batches in flight.
        in_flight: micro-batches whose activations it keeps at most.
        label: how the submesh is used.
    """

    first: int
    last: int
    submesh: Submesh
    time_s: float
    device_bytes: float
    in_flight: int
    label: str


@dataclass(frozen=True)
class PipelinePlan(ShownAsTable):
    """All stages.

    Args:
        stages: from the first layer to the last.
        micro_batches: B of a step.
        nodes: of the cluster.
        gpus_per_node: of the cluster.
        memory_bytes: of one device; infinite if there is no limit.
        tried: candidates of t_max for which the dynamic programme was run.
        candidates: all of them.
        unit: of the times, if they have one.
        layer_names: what the layers are, if they have names.
        layer_specs: how the weights of each layer lie, if that is known: layer → its tensors and their specs.
    """

    stages: tuple[PlannedStage, ...]
    micro_batches: int
    nodes: int
    gpus_per_node: int
    memory_bytes: float = math.inf
    tried: int = 0
    candidates: int = 0
    unit: str = ""
    layer_names: tuple[str, ...] = ()
    layer_specs: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """T = Σ t_i + (B − 1)·max t_j."""
        times = [stage.time_s for stage in self.stages]
        return sum(times) + (self.micro_batches - 1) * max(times)

    @property
    def bubble(self) -> float:
        """Part of the step in which the slowest stage waits: its filling and draining."""
        return 1 - self.micro_batches * max(stage.time_s for stage in self.stages) / self.step_s

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the GPUs of each stage, node by node."""
        return tiled([stage.submesh for stage in self.stages], self.gpus_per_node)

    def title(self) -> str:
        """What was planned, and how long a step takes."""
        time, bubble = f"{number(self.step_s)} {self.unit}".rstrip(), f"{100 * self.bubble:.0f}"
        return say(
            en=f"{len(self.stages)} stages on {self.nodes} × {self.gpus_per_node} devices, B = {self.micro_batches}: "
            f"T = {time}, filling and draining {bubble} % "
            f"(t_max tried: {self.tried} of {self.candidates})",
            fr=f"Étages : {len(self.stages)}, sur {self.nodes} × {self.gpus_per_node} périphériques, "
            f"B = {self.micro_batches} : T = {time}, remplissage et vidage {bubble} % "
            f"(t_max essayés : {self.tried} sur {self.candidates})",
        )

    def columns(self) -> tuple[str, ...]:
        """Headings of the table."""
        return (
            say(en="stage", fr="étage"),
            say(en="layers", fr="couches"),
            say(en="submesh", fr="sous-maillage"),
            say(en="used as", fr="utilisé en"),
            "GPU",
            say(en="time", fr="temps"),
            say(en="in flight", fr="en vol"),
            say(en="memory per device", fr="mémoire par périphérique"),
        )

    def rows(self) -> list[tuple[str, ...]]:
        """One line per stage."""
        return [
            (
                str(index),
                f"{stage.first}" if stage.first == stage.last else f"{stage.first}–{stage.last}",
                str(stage.submesh),
                stage.label,
                f"{devices[0]}" if len(devices) == 1 else f"{devices[0]}–{devices[-1]}",
                number(stage.time_s),
                str(stage.in_flight),
                format_bytes(stage.device_bytes) if stage.device_bytes else "—",
            )
            for index, (stage, devices) in enumerate(zip(self.stages, self.devices, strict=True))
        ]

    def figure(self) -> LabFigure:
        """Stages over layers and devices, with how the weights of each layer lie."""
        from dlojz.viz.alpa_figure import stages_figure

        return stages_figure(self)
