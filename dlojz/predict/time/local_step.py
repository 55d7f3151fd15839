"""The step of a run on the measured machine: the cost model, with what a CPU's host adds to it.

Layer 3. Invariant: the parts are those of `dlojz.predict.time.step`; here an operation is over before the next is
launched, the update counts its tensors, the engines' own code costs what it cost on blocks that compute nothing, and
a message between two computations waits for the ranks to wake up: all from measurements, none of them of a model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dlojz import models
from dlojz.config import RunConfig
from dlojz.predict.time.estimate import step_parts
from dlojz.predict.time.layouts import SCHEDULES, Layouts, Reals
from dlojz.predict.time.measured import Measured
from dlojz.predict.time.measured_site import Site, site
from dlojz.predict.time.step import Parts
from dlojz.predict.time.workload import workload
from dlojz.schema import LabError
from dlojz.text import say

ENGINE = "megatron"
"""Whose habits the cost model takes: waits for its neighbours, reduces once per step."""


COMPUTING = ("forward", "backward", "recompute", "bubble")
"""Parts that take as long as operations do."""


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


def local_parts(machine: Measured, config: RunConfig) -> Parts:
    """Seconds of the parts of one step of a run on the measured machine; each an array of one.

    Args:
        machine: its measurements, with as many ranks as the run has, or more.
        config: the run; in the precision that the machine's products were measured in.

    Raises:
        LabError: for a schedule that the cost model has not, what is offloaded, an engine whose own cost is not
            measured, or more ranks than were measured.
    """
    layout = config.layout
    schedule = layout.schedule or "1f1b"
    if schedule not in SCHEDULES or layout.offload != "none" or layout.engine == "deepspeed":
        raise LabError(
            say(
                en=f"a step on this machine is predicted for the schedules {', '.join(SCHEDULES)} without offload, "
                f"with engine torch or by_hand, but {schedule}, offload={layout.offload!r}, "
                f"engine={layout.engine!r} was received.",
                fr=f"une itération sur cette machine se prédit pour les ordonnancements {', '.join(SCHEDULES)} sans "
                f"offload, avec engine torch ou by_hand, mais {schedule}, offload={layout.offload!r}, "
                f"engine={layout.engine!r} a été reçu.",
            )
        )
    image = models.spec(config.model).family == "image"
    here = _site(machine, layout.world_size, image)
    parts = _computed(machine, config, image)
    held = tensors_of(config.model, config.image_size, config.sequence_length, config.num_classes)
    tensor, pipeline = _met(here, config, parts)
    return replace(
        parts,
        recompute=parts.recompute + _recomputing_s(here, config, held),
        tensor=tensor,
        pipeline=pipeline,
        data=parts.data + _wrapping_s(here, config, held),
        optimizer=np.array([update_s(here, config, held)]),
    )


def local_step_s(machine: Measured, config: RunConfig) -> float:
    """Seconds of one step of a run on the measured machine: the sum of `local_parts`."""
    return float(local_parts(machine, config).step_s[0])


@lru_cache(maxsize=16)
def _site(machine: Measured, ranks: int, image: bool) -> Site:
    return site(machine, ranks, image=image)


def _computed(machine: Measured, config: RunConfig, image: bool) -> Parts:
    """The cost model's parts. Where stages wait, fewer ranks compete for the cores than there are.

    Of p stages, m·v/(m·v + p − 1) compute at a time on average; between two numbers of ranks that were measured, times
    are taken to be on a line.
    """
    layout = config.layout
    columns = Layouts.of(
        precision=config.precision, dp=layout.dp, tp=layout.tp, pp=layout.pp, zero=layout.zero,
        micro_batch=layout.micro_batch, micro_batches=layout.micro_batches, checkpointing=layout.checkpointing,
        schedule=layout.schedule or "1f1b", chunks=_chunks(config), gradient_bytes=4, blocking=1, engine=ENGINE,
    )  # fmt: skip
    work = workload(config.model, config.image_size, config.sequence_length)

    def of(ranks: int) -> Parts:
        here = _site(machine, ranks, image)
        made = step_parts(work, here.cluster, columns, here.calibration)
        return replace(made, **{name: here.chained * getattr(made, name) for name in COMPUTING})

    all_busy = of(layout.world_size)
    if layout.pp == 1:
        return all_busy
    slots = layout.micro_batches * _chunks(config)
    busy = layout.world_size * slots / (slots + layout.pp - 1)
    below = max(one.ranks for one in machine.setups if one.ranks <= busy)  # one rank alone was measured in any case
    above = min(one.ranks for one in machine.setups if one.ranks >= busy)
    share = (busy - below) / (above - below) if above > below else 0.0
    few, many = of(below), of(above)
    mixed = {name: (1 - share) * getattr(few, name) + share * getattr(many, name) for name in COMPUTING}
    return replace(all_busy, **mixed)


def _chunks(config: RunConfig) -> int:
    return (config.layout.chunks or 2) if config.layout.schedule == "interleaved" else 1


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


def _wrapping_s(here: Site, config: RunConfig, held: Tensors) -> float:
    """What data parallelism's engine costs a step beyond its bytes: FSDP2 for every micro-batch, DDP once."""
    layout = config.layout
    if layout.dp == 1:
        return 0.0
    blocks, tensors = held.blocks / layout.pp, held.tensors / layout.pp
    if layout.zero < 2:
        return here.engine_s("ddp", blocks, tensors)
    return layout.micro_batches * here.engine_s(f"fsdp{layout.zero}", blocks, tensors)


def _recomputing_s(here: Site, config: RunConfig, held: Tensors) -> float:
    """What checkpointing costs a step beyond computing again."""
    layout = config.layout
    if layout.checkpointing != "full":
        return 0.0
    each = here.engine_s("checkpoint", held.blocks / layout.pp, held.tensors / layout.pp)
    return layout.micro_batches * each


def _met(here: Site, config: RunConfig, parts: Parts) -> tuple[Reals, Reals]:
    """Messages of tensor parallelism and between stages: each met between computations, with torch's own code around.

    Beside its bytes a message costs what an all-reduce between two computations took, instead of its start after
    another one; layers split by torch cost the host's dispatch too.
    """
    layout = config.layout
    start = float(here.cluster.intra.alpha_s("all_reduce", here.ranks)) if here.ranks > 1 else 0.0
    waiting = max(0.0, here.meeting_s - start)
    tensor, pipeline = parts.tensor, parts.pipeline
    if layout.tp > 1:
        around = max(0.0, here.engine_s("dtensor", 1) - start) if layout.engine == "torch" else 0.0
        tensor = tensor + _tensor_messages(config) * (waiting + around)
    if layout.pp > 1:
        pipeline = pipeline + 2 * layout.micro_batches * _chunks(config) * waiting
    return tensor, pipeline


def _tensor_messages(config: RunConfig) -> int:
    """How many messages a rank's step has along the tensor axis.

    Source: `dlojz.predict.tensor_communication`, which the probe confirms.
    """
    from dlojz.predict.shapes import model_shapes
    from dlojz.predict.tensor_communication import tensor_traffic

    traffic = tensor_traffic(config, model_shapes(config), 0)
    return sum(one.count or 0 for one in traffic)
