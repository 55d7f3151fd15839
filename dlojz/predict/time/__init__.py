"""The cost model: seconds and bytes of a training step of many layouts on a cluster, from shapes and from published
constants.

Layer 3. Invariant: physics first: operators with their shapes, messages with their bytes, a pipeline with its bubble;
then at most a dozen parameters within physical bounds, fitted on a named half of published rows. Nothing is measured.

Read in this order: `workload` and `decoder` (what is computed), `operators` (how long one operator takes),
`communication` (how long a message takes), `passes` (a layer), `stages` and `step` (a step), `memory` (bytes),
`estimate` (many layouts at once), `simulate` (one, played out), `training` (days, energy, carbon).
"""

from __future__ import annotations

from dlojz.predict.time.calibration import BOUNDS, Calibration, Profile, calibration, profile, write_profile
from dlojz.predict.time.estimate import Estimates, estimate, memories, step_parts
from dlojz.predict.time.layouts import CHECKPOINTING, ENGINES, OFFLOAD, SCHEDULES, Layouts
from dlojz.predict.time.memory import Memories
from dlojz.predict.time.simulate import Simulation, simulate
from dlojz.predict.time.step import Parts
from dlojz.predict.time.training import Bill, bill, train, training_s
from dlojz.predict.time.workload import Cut, Kind, Workload, workload

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
    "Simulation",
    "Workload",
    "bill",
    "calibration",
    "estimate",
    "memories",
    "profile",
    "simulate",
    "step_parts",
    "train",
    "training_s",
    "workload",
    "write_profile",
]
