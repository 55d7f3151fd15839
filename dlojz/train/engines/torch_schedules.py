"""A schedule of the lab as an object of torch's own: its class where torch ships it, else its table runtime.

Layer 3. Invariant: what is private of torch's is used in this file and nowhere else. The runtime reads a table of
actions, one row per rank (`_PipelineScheduleRuntime._load_csv`); it is what runs every schedule of torch's but GPipe
and 1F1B, so the lab's schedules run on the same code.

Source: torch 2.13, `torch/distributed/pipelining/schedules.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torchs_own
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _PipelineScheduleRuntime

from dlojz.pipeline.catalogue import SCHEDULES
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.torch_csv import to_csv, torch_refusal
from dlojz.schema import LabError


def torch_schedule(
    schedule: Schedule, stages: Sequence[PipelineStage], loss: Callable[[Tensor, Tensor], Tensor]
) -> Any:
    """What `step()` of executes the schedule.

    Args:
        schedule: any that torch can execute.
        stages: this rank's, in order.
        loss: mean loss of one micro-batch.

    Raises:
        LabError: if torch's runtime cannot execute it; the sentence says why.
    """
    refusal = torch_refusal(schedule)
    if refusal is not None:
        raise LabError(refusal)
    entry = SCHEDULES.get(schedule.name)
    options: dict[str, Any] = {"n_microbatches": schedule.micro_batches, "loss_fn": loss, "scale_grads": True}
    if entry is not None and entry.torch_class is not None:
        shipped = getattr(torchs_own, entry.torch_class)
        # torch's own 1F1B refuses fewer micro-batches than stages, though their order is the same as any other's.
        if not (shipped is torchs_own.Schedule1F1B and schedule.micro_batches < schedule.stages):
            return shipped(stages[0] if issubclass(shipped, PipelineScheduleSingle) else list(stages), **options)
    made = _PipelineScheduleRuntime(list(stages), **options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(to_csv(schedule), encoding="utf-8")
        made._load_csv(str(path), format="compute_only")
    return made
