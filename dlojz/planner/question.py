"""Question to the planner, checked: a model, a cluster, GPUs, a batch.

What no layout could ever satisfy is refused here, in one sentence with what would work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dlojz.base.contract import check_whole
from dlojz.base.errors import LabError
from dlojz.base.language import one_of, refusal, say
from dlojz.cost_model import Calibration
from dlojz.hardware import Cluster, Precision
from dlojz.planner.planned_model import Subject
from dlojz.planner.space import Space, space_of

MOST_GPUS: Final = 2**17
MOST_BATCH: Final = 2**24
FLASH_FROM: Final = ("a100", "h100", "h200")
"""GPUs on which attention is one fused kernel by default. Source: Dao-AILab/flash-attention, README: from Ampere on."""
MARGINAL: Final = 0.9
"""Share of a GPU's memory from which a layout is called marginal: readings scatter by some percent, and the allocator
that frees and asks again has slowed published runs by 15 to 25 % (MPT, 30 B on 8 GPUs)."""


@dataclass(frozen=True, eq=False)
class Question:
    """Question to the planner.

    Attributes:
        batch: samples of one step.
        gpus: numbers of GPUs to try.
        engines: of `dlojz.planner.planned_model.OFFERS`.
        fused_attention: whether attention is one kernel.
        fused_loss: whether the cross-entropy is one kernel.
        steps: of the training, where it is known.
        hours: within which it must end; None without a limit.
        limit: what the limit is, e.g. `qos_gpu_a100-t3`; empty without a name.
    """

    subject: Subject
    cluster: Cluster
    calibration: Calibration
    batch: int
    gpus: tuple[int, ...]
    precision: Precision
    engines: tuple[str, ...]
    fused_attention: bool
    fused_loss: bool = False
    steps: int | None = None
    hours: float | None = None
    limit: str = ""

    @property
    def step_limit_s(self) -> float:
        """Longest step that ends in time; infinite without a limit."""
        return math.inf if self.steps is None or self.hours is None else self.hours * 3600 / self.steps

    @property
    def device_bytes(self) -> int:
        """Memory of one GPU."""
        return self.cluster.gpu.memory_bytes

    def space(
        self, fixed_values: Mapping[str, Sequence[int]] | None = None, gpus: Iterable[int] | None = None
    ) -> Space:
        """All layouts of the question.

        Args:
            fixed_values: values of columns to take instead of all.
            gpus: numbers to try instead.
        """
        numbers = gpus or self.gpus
        return space_of(
            self.subject, numbers, self.batch, self.engines, self.precision, self.fused_attention, fixed_values,
            fused_loss=self.fused_loss,
        )  # fmt: skip


def check_gpus(cluster: Cluster, number: object) -> int:
    """Check a number of GPUs against a cluster.

    Raises:
        LabError: if it does not fill whole nodes, or there are not so many.
    """
    gpus, full = check_whole("gpus", number, MOST_GPUS), cluster.gpus_per_node
    if gpus > full and gpus % full:  # a part of a node, or whole nodes
        below = gpus - gpus % full
        raise refusal(
            en=f"{gpus} GPUs do not fill whole nodes of {cluster.name}, which have {full}: use at most {full}, "
            f"or a multiple of {full}, such as {below} or {below + full}.",
            fr=f"{gpus} GPU ne remplissent pas des nœuds entiers de {cluster.name}, qui en ont {full} : "
            f"prenez-en au plus {full}, ou un multiple de {full}, par exemple {below} ou {below + full}.",
        )
    if gpus > cluster.num_gpus:
        raise refusal(
            en=f"{gpus} GPUs were asked for, but a job on {cluster.name} gets {cluster.num_gpus} at most "
            f"({cluster.num_nodes} nodes × {full}).",
            fr=f"{gpus} GPU ont été demandés, mais un travail sur {cluster.name} en obtient au plus "
            f"{cluster.num_gpus} ({cluster.num_nodes} nœuds × {full}).",
        )
    return gpus


def check_precision(cluster: Cluster, precision: str | None) -> Precision:
    """Check a precision against the cluster's GPU; by default bf16 where it has it, else fp16, else fp32.

    Raises:
        LabError: if the GPU has it not; the sentence lists those it has.
    """
    has = cluster.gpu.peak_flops
    usual: tuple[Precision, ...] = ("bf16", "fp16", "fp32")
    if precision is None:
        return next(name for name in usual if name in has)
    for name in usual:
        if name == precision and name in has:
            return name
    legal = [name for name in usual if name in has]
    if precision in usual:
        raise refusal(
            en=f"{cluster.gpu.title} has no {precision} matrix units: use {' or '.join(legal)}.",
            fr=f"{cluster.gpu.title} n’a pas d’unités de calcul {precision} : prenez {' ou '.join(legal)}.",
        )
    raise LabError(one_of("precision", precision, legal))


def batch_refusal(question: Question) -> str:
    """Say that no layout divides the batch, with the nearest ones that work; empty if one does."""
    replicas = {number: _replicas(question, number) for number in question.gpus}
    # Each number of GPUs has its own degrees.
    if any(question.batch % dp == 0 for degrees in replicas.values() for dp in degrees):
        return ""
    number, batch = question.gpus[0], question.batch
    fewest = min(replicas[number], default=0)
    if not fewest:
        return ""  # no degrees at all suit the model, which the search says better
    below = max((batch // dp * dp for dp in replicas[number]), default=0)
    above = min(-(-batch // dp) * dp for dp in replicas[number])  # multiples of dp around the batch
    works = say(en=" or ", fr=" ou ").join(str(batch_size) for batch_size in (below, above) if batch_size)
    name = question.cluster.name
    return say(
        en=f"no layout on {number} GPUs of {name} can deal a batch of {batch} out: the replicas, at least {fewest}, "
        f"must divide it; use {works}.",
        fr=f"aucune configuration sur {number} GPU de {name} ne peut répartir un batch de {batch} : les répliques, au "
        f"moins {fewest}, doivent le diviser ; prenez {works}.",
    )


def _replicas(question: Question, number: int) -> set[int]:
    """Numbers of replicas that the model and an engine allow; a batch of all GPUs is one that any of them divides."""
    space = space_of(
        question.subject, (number,), number, question.engines, question.precision, question.fused_attention,
        {"micro_batch": (1,)},
    )  # fmt: skip
    rows = np.flatnonzero((space.codes == 0).any(axis=1))  # at least one option allows it
    return set(space.degrees["dp"][rows].tolist())
