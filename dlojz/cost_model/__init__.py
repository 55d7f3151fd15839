"""Cost model: seconds and bytes of a training step of many layouts on a cluster, from shapes and published constants.

Physics first: operators with their shapes, messages with their bytes, a pipeline with its bubble; then at most a dozen
parameters within physical bounds, fitted on a named half of published rows. Nothing is measured.

Read in this order: `workload` (operators and how long each takes), `passes` (a layer, its messages, the stages), `step`
(a step, many layouts at once, one simulated, a whole training), `layout_memory` (bytes), `calibration`, `validation`.
"""

from __future__ import annotations

from dlojz.cost_model.calibration import BOUNDS, Calibration, Profile, calibration, profile
from dlojz.cost_model.layout_memory import Memories
from dlojz.cost_model.layouts import CHECKPOINTING, ENGINES, OFFLOAD, SCHEDULES, Layouts
from dlojz.cost_model.step import (
    Bill,
    Estimates,
    Parts,
    StepSimulation,
    bill,
    estimate,
    memories,
    simulate,
    step_parts,
    training_s,
)
from dlojz.cost_model.workload import Cut, Kind, Workload, workload

__all__ = [
    "BOUNDS",
    "CHECKPOINTING",
    "ENGINES",
    "OFFLOAD",
    "SCHEDULES",
    "Bill",
    "Calibration",
    "Cut",
    "Estimates",
    "Kind",
    "Layouts",
    "Memories",
    "Parts",
    "Profile",
    "StepSimulation",
    "Workload",
    "bill",
    "calibration",
    "estimate",
    "memories",
    "profile",
    "simulate",
    "step_parts",
    "training_s",
    "workload",
]
