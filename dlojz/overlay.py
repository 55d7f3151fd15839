"""A pipeline run laid over its simulation: the measured step beside the one that the simulator gives for it.

Layer 4. Invariant: the schedule is the run's own, the costs are means of what the run has measured, and nothing else is
fitted; where the two part is what the simulator leaves out.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dlojz.pipeline.cuts import schedule_of
from dlojz.pipeline.measured import Overlay, overlay, steps_of
from dlojz.record import RunRecord
from dlojz.schema import LabError
from dlojz.text import say

if TYPE_CHECKING:
    from dlojz.viz.canvas import LabFigure


def overlay_of(record: RunRecord, step: int | None = None, replica: int = 0) -> Overlay:
    """One step of a pipeline run, measured and simulated.

    Args:
        record: a run with pp > 1 that timed its actions.
        step: which of those kept; by default the one of median length.
        replica: which of the dp pipelines.

    Raises:
        LabError: if the run is no pipeline, or did not time that step.
    """
    layout = record.config.layout
    if layout.pp == 1:
        raise LabError(
            say(
                en=f"the run {record.run_id} is no pipeline (pp=1), so there is no schedule to lay it over: run one "
                "with pp=2 or more.",
                fr=f"l’exécution {record.run_id} n’est pas un pipeline (pp=1) : il n’y a pas d’ordonnancement auquel "
                "la superposer ; lancez-en une avec pp=2 ou plus.",
            )
        )
    if not steps_of(record.spans):
        raise LabError(
            say(
                en=f"the run {record.run_id} has no timed step, as it ended too early: run it again with 5 steps or "
                "more.",
                fr=f"l’exécution {record.run_id} n’a aucun pas chronométré, car elle s’est arrêtée trop tôt : "
                "relancez-la avec 5 pas ou plus.",
            )
        )
    ranks = {pipeline * layout.dp + replica: pipeline for pipeline in range(layout.pp)}
    return overlay(schedule_of(layout), record.spans, step, ranks)


def overlay_figure_of(record: RunRecord, path: str | Path | None = None, step: int | None = None) -> LabFigure:
    """The figure of `overlay_of`: each rank's simulated line above its measured one.

    Raises:
        LabError: as `overlay_of`, or if the picture cannot be written.
    """
    from dlojz.viz.pipeline_overlay import overlay_figure

    both = overlay_of(record, step)
    return overlay_figure(both.simulated, both.measured, path, mark=record.mark)
