"""The step of a run on the measured machine: the cost model, with what a CPU's host adds to it.

Layer 3. Invariant: the parts are those of `dlojz.predict.time.step`; here an operation is over before the next is
launched, the update counts its tensors, and ZeRO-3 sends its messages block by block, all from measurements.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dlojz.config import RunConfig
from dlojz.predict.time.estimate import step_parts
from dlojz.predict.time.layouts import SCHEDULES, Layouts
from dlojz.predict.time.measured_site import Site
from dlojz.predict.time.step import Parts
from dlojz.predict.time.workload import workload
from dlojz.schema import LabError
from dlojz.text import say

ENGINE = "megatron"
"""Whose habits the cost model takes: waits for its neighbours, reduces once per step."""


class Tensors(NamedTuple):
    """A model's parameters.

    Attributes:
        tensors: how many tensors.
        elements: in all of them.
        blocks: of the model, each gathered at a time by ZeRO-3.
    """

    tensors: int
    elements: int
    blocks: int


@lru_cache(maxsize=32)
def tensors_of(model: str, image_size: int | None, sequence_length: int | None, num_classes: int) -> Tensors:
    """Counted on the meta device."""
    from dlojz.predict.shapes import build_on_meta

    built = build_on_meta(model, image_size, sequence_length, num_classes)
    sizes = [one.numel() for one in built.parameters()]
    return Tensors(len(sizes), sum(sizes), len(list(built.blocks)))


def local_parts(here: Site, config: RunConfig) -> Parts:
    """Seconds of the parts of one step of a run on the measured machine; each an array of one.

    Args:
        here: the machine with the run's number of ranks on it.
        config: the run; in the precision that the machine's products were measured in.

    Raises:
        LabError: for a schedule that the cost model has not, or what is offloaded.
    """
    layout = config.layout
    schedule = layout.schedule or "1f1b"
    if schedule not in SCHEDULES or layout.offload != "none":
        raise LabError(
            say(
                en=f"a step on this machine is predicted for the schedules {', '.join(SCHEDULES)} without offload, but "
                f"{schedule}, offload={layout.offload!r} was received.",
                fr=f"une itération sur cette machine se prédit pour les ordonnancements {', '.join(SCHEDULES)} sans "
                f"offload, mais {schedule}, offload={layout.offload!r} a été reçu.",
            )
        )
    columns = Layouts.of(
        precision=config.precision, dp=layout.dp, tp=layout.tp, pp=layout.pp, zero=layout.zero,
        micro_batch=layout.micro_batch, micro_batches=layout.micro_batches, checkpointing=layout.checkpointing,
        schedule=schedule, chunks=(layout.chunks or 2) if schedule == "interleaved" else 1, gradient_bytes=4,
        blocking=1, engine=ENGINE,
    )  # fmt: skip
    work = workload(config.model, config.image_size, config.sequence_length)
    parts = step_parts(work, here.cluster, columns, here.calibration)
    held = tensors_of(config.model, config.image_size, config.sequence_length, config.num_classes)
    data = float(parts.data[0])
    if layout.zero >= 2 and layout.dp > 1:
        data += _starts_s(here, config, held)
    return replace(parts, data=np.array([data]), optimizer=np.array([update_s(here, config, held)]))


def local_step_s(here: Site, config: RunConfig) -> float:
    """Seconds of one step of a run on the measured machine: the sum of `local_parts`."""
    return float(local_parts(here, config).step_s[0])


def update_s(here: Site, config: RunConfig, held: Tensors) -> float:
    """Seconds of AdamW on one rank: per tensor, and per element of its share.

    Tensors are counted whole on each rank of ZeRO and tensor parallelism, where every rank has a part of each, and
    shared out by a pipeline. Where torch keeps the parts together (DTensor), each operation costs the host more.
    """
    layout = config.layout
    parts = layout.tp * layout.pp * (layout.dp if layout.zero else 1)
    distributed = layout.engine == "torch" and (layout.zero >= 2 or layout.tp > 1) and layout.world_size > 1
    taken = here.sharded if distributed else here.update
    return held.tensors / layout.pp * taken.start + held.elements / parts * here.update.slope


def _starts_s(here: Site, config: RunConfig, held: Tensors) -> float:
    """Starts of the messages beyond the first of each kind: FSDP2 gathers and reduces block by block.

    ZeRO-3 gathers every block forward and backward, ZeRO-2 once per step; both reduce each block's gradients.

    Source: torch.distributed.fsdp.fully_shard, `reshard_after_forward`.
    """
    layout = config.layout
    link = here.cluster.intra
    gathered = float(link.alpha_s("all_gather", layout.dp))
    reduced = float(link.alpha_s("reduce_scatter", layout.dp))
    blocks = held.blocks / layout.pp - 1
    if layout.zero == 3:
        return blocks * layout.micro_batches * (2 * gathered + reduced)
    return blocks * (gathered + layout.micro_batches * reduced)
