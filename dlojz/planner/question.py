"""Question to the planner, checked: a model, a cluster, GPUs, a batch.

What no layout could ever satisfy is refused here, in one sentence with what would work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dlojz.base.contract import check_whole
from dlojz.base.errors import LabError
from dlojz.base.language import one_of, refusal
from dlojz.cost_model import Calibration, calibration
from dlojz.hardware import Cluster, Precision
from dlojz.planner.planned_model import Subject

MOST_GPUS: Final = 2**17
MOST_BATCH: Final = 2**24
FLASH_FROM: Final = ("a100", "h100", "h200")
"""GPUs on which attention is one fused kernel by default. Source: Dao-AILab/flash-attention, README: from Ampere on."""
PROFILE_OF_GPU: Final = {"v100": "v100", "a100": "a100", "h100": "h100", "h200": "h100"}
"""The calibration of each generation; H200 has the processor of H100 with more memory."""
MARGINAL: Final = 0.9
"""Share of a GPU's memory from which a layout is called marginal: readings scatter by some percent, and the allocator
that frees and asks again has slowed published runs by 15 to 25 % (MPT, 30 B on 8 GPUs)."""
UNTOLD: Final = 0.02
"""Difference of two steps, as a share, that no prediction tells: of such layouts one that is not marginal comes first.

Source: our choice. NeMo's Llama 2 7B of 131072 tokens on 128 H100: with tp 8 and without cp 0.3 % less is predicted
than with NVIDIA's tp 4 and cp 4, in 94 % of the memory; measured, nothing without cp came near (424 for 555 TFLOP/s).
"""


OVERLAPS: Final = ("tensor", "gradients", "weights")
"""Messages that may run beside computation: of tensor parallelism, of gradients, of the weights that ZeRO-1 gathers;
Megatron-LM's `--tp-comm-overlap`, `--overlap-grad-reduce`, `--overlap-param-gather`."""


def waited_columns(overlap: str | Sequence[str]) -> dict[str, int]:
    """Name the columns of the cost model's layouts that say which messages are waited for: those not in `overlap`.

    Raises:
        LabError: for a word not of `OVERLAPS` (`none` stands for none), or `weights` without `gradients`, which
            Megatron-LM refuses.
    """
    words = tuple(word.strip() for word in overlap.split(",")) if isinstance(overlap, str) else tuple(overlap)
    words = () if words == ("none",) else words
    for word in words:
        if word not in OVERLAPS:
            raise LabError(one_of("overlap", word, (*OVERLAPS, "none")))
    if "weights" in words and "gradients" not in words:
        raise refusal(
            en=f"overlap={','.join(words)} was received, but --overlap-param-gather needs --overlap-grad-reduce: add "
            "gradients, or leave weights out.",
            fr=f"overlap={','.join(words)} a été reçu, or --overlap-param-gather demande --overlap-grad-reduce : "
            "ajoutez gradients, ou retirez weights.",
        )
    columns = dict(zip(OVERLAPS, ("tensor_overlap", "overlap", "gather_overlap"), strict=True))
    return {column: 0 for word, column in columns.items() if word not in words}


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
        columns: of the cost model's layouts, where a program is run otherwise than its library is by habit: dropout, …
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
    columns: Mapping[str, int] = field(default_factory=dict)

    @property
    def step_limit_s(self) -> float:
        """Longest step that ends in time; infinite without a limit."""
        return math.inf if self.steps is None or self.hours is None else self.hours * 3600 / self.steps

    @property
    def device_bytes(self) -> int:
        """Memory of one GPU."""
        return self.cluster.gpu.memory_bytes


def calibration_of(site: Cluster) -> Calibration:
    """The calibration of a cluster's GPUs, which their generation names; an empty one where there is none."""
    profile = PROFILE_OF_GPU.get(site.gpu.generation)
    return Calibration(site.gpu.name) if profile is None else calibration(profile)


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
    usual: tuple[Precision, ...] = ("bf16", "fp16", "fp32", "fp8")
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
    if precision == "bf16-true":
        raise refusal(
            en="no layouts are searched with weights in bf16 alone, and 'bf16-true' was received: give bf16, fp16 or "
            "fp32; of one layout `dlojz memory MODEL --precision bf16-true --dp 8 --zero 3` predicts the memory.",
            fr="on ne cherche pas de dispositions avec des poids en bf16 seulement, et 'bf16-true' a été reçu : donnez "
            "bf16, fp16 ou fp32 ; d’une disposition, `dlojz memory MODÈLE --precision bf16-true --dp 8 --zero 3` "
            "prédit la mémoire.",
        )
    raise LabError(one_of("precision", precision, legal))
