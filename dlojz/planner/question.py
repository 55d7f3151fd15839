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
from dlojz.cost_model import Calibration
from dlojz.cost_model.calibration import class_defaults, of_gpu
from dlojz.cost_model.layouts import SOFTWARE
from dlojz.hardware import Cluster, Device, Precision
from dlojz.hardware.evidence import Version
from dlojz.hardware.gpus import ATTENTION_KERNELS, CPU
from dlojz.planner.planned_model import OFFERS, Subject, question_refused

TRUE: Final = "bf16-true"
"""Precision of runs whose weights are in bf16 themselves; their products are those of bf16."""
MOST_GPUS: Final = 2**17
MOST_BATCH: Final = 2**24
MARGINAL: Final = 0.9
"""Share of a GPU's memory from which a layout is called marginal: readings scatter by some percent, and the allocator
that frees and asks again has slowed published runs by 15 to 25 % (MPT, 30 B on 8 GPUs)."""
WITHIN_ERROR: Final = 0.05
"""Difference of two steps, as a share, that no prediction tells: of such layouts one that is not marginal comes first.

Source: the cost model's mean error on tables that it was not fitted on (docs/validation.md), less than what a GPU that
is nearly full has cost published runs (15 to 25 %). NeMo's Llama 2 7B of 131072 tokens on 128 H100: layouts at 94 % of
the memory are predicted 0.3 to 2.1 % faster than NVIDIA's tp 4 and cp 4; measured, nothing without cp came near (424
for 555 TFLOP/s).
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
        raise question_refused("gathering alone", words=",".join(words))
    columns = dict(zip(OVERLAPS, ("tensor_overlap", "overlap", "gather_overlap"), strict=True))
    return {column: 0 for word, column in columns.items() if word not in words}


def shard_columns(shards: object, engines: Sequence[str]) -> dict[str, int]:
    """Name the column of the cost model's layouts that says over how many ranks states are sharded; none over all.

    Args:
        shards: data- and context-parallel ranks of one copy of the states; 0: all of them.
        engines: libraries that are searched.

    Raises:
        LabError: if it is no whole number of at least 0, or no library of these shards over a part of the ranks.
    """
    if shards == 0 and not isinstance(shards, bool):
        return {}
    number = check_whole("shards", shards, MOST_GPUS)
    offering = [name for name, offer in OFFERS.items() if offer.hybrid < 4]
    if not set(engines) & set(offering):
        raise refusal(
            en=f"shards={number} was asked for, but {' and '.join(engines)} shard states over all ranks or none: use "
            f"{' or '.join(offering)}.",
            fr=f"shards={number} a été demandé, or {' et '.join(engines)} découpent les états sur tous les rangs ou "
            f"aucun : prenez {' ou '.join(offering)}.",
        )
    return {"zero_shards": number}


def true_columns(planned: Subject, keeps_bf16: bool) -> dict[str, int]:
    """Name the columns of a training whose weights are in bf16 themselves; adapters keep theirs in fp32."""
    return {"true_weights": 1, "gradient_bytes": 2} if keeps_bf16 and not planned.adapters else {}


_YES_OR_NO: Final = {"yes": 1, "no": 0}
SAID: Final = (*SOFTWARE, "attention_kernel", "fused_loss")
"""Facts of the software that a question may say; without them it is today's."""


def software_columns(text: str, gpu: Device) -> dict[str, int]:
    """Parse facts of the software, `torch=2.0 attention_kernel=flash2`, into columns of the cost model's layouts.

    Args:
        text: names of `SAID` with values, by spaces or commas: versions (`transformer_engine=none`), a kernel, yes or
            no.
        gpu: whose published rates a kernel must be among.

    Raises:
        LabError: for a name or value that is none of these.
    """
    columns: dict[str, int] = {}
    for part in text.replace(",", " ").split():
        name, _, value = part.partition("=")
        if name not in SAID:
            raise LabError(one_of("software", name, SAID))
        if name in ("torch", "transformer_engine"):
            try:
                columns[name] = 0 if (name, value) == ("transformer_engine", "none") else Version.of(value).number
            except ValueError:
                raise question_refused("version", name=name, part=part) from None
        elif name == "attention_kernel":
            rated = [kernel for kernel in ATTENTION_KERNELS if f"{kernel}_forward_128" in gpu.attention_flops]
            if value not in rated:
                raise LabError(one_of(f"attention_kernel ({gpu.title})", value, rated))
            columns[name] = ATTENTION_KERNELS.index(value)
        elif value in _YES_OR_NO:
            columns[name] = _YES_OR_NO[value]
        else:
            raise LabError(one_of(name, value, _YES_OR_NO))
    return columns


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
        keeps_bf16: whether weights, gradients and states are in bf16 themselves, as the frozen weights beside adapters.
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
    keeps_bf16: bool = False

    @property
    def run_precision(self) -> str:
        """Precision of the runs of its layouts."""
        return TRUE if self.keeps_bf16 else self.precision

    @property
    def is_of_runs(self) -> bool:
        """Whether only layouts that runs of this lab can have are planned, because no closed form has its bytes."""
        return self.subject.is_elsewhere or self.keeps_bf16

    @property
    def step_limit_s(self) -> float:
        """Longest step that ends in time; infinite without a limit."""
        return math.inf if self.steps is None or self.hours is None else self.hours * 3600 / self.steps

    @property
    def class_defaults(self) -> tuple[str, ...]:
        """Figures of the GPU that were not measured, and for which its class's stand in."""
        kernel = ATTENTION_KERNELS[self.columns.get("attention_kernel", 0)] if self.fused_attention else None
        return class_defaults(self.calibration, self.cluster.gpu, self.precision, kernel)

    @property
    def device_bytes(self) -> int:
        """Memory of one GPU."""
        return self.cluster.gpu.memory_bytes


def calibration_of(site: Cluster) -> Calibration:
    """The calibration of a cluster's GPUs: `of_gpu`."""
    return of_gpu(site.gpu)


def fuses_attention(site: Cluster) -> bool:
    """Whether attention is one fused kernel by default: on GPUs that have bf16, as those from Ampere on.

    Source: Dao-AILab/flash-attention, README: from Ampere on, and MI200 and MI300 of AMD.
    """
    return site.gpu.name != CPU and "bf16" in site.gpu.peak_flops


def check_gpus(cluster: Cluster, number: object) -> int:
    """Check a number of GPUs against a cluster.

    Raises:
        LabError: if it does not fill whole nodes, or there are not so many.
    """
    gpus, full = check_whole("gpus", number, MOST_GPUS), cluster.gpus_per_node
    if gpus > full and gpus % full:  # a part of a node, or whole nodes
        below = gpus - gpus % full
        raise question_refused("part of a node", gpus=gpus, cluster=cluster, full=full, below=below, above=below + full)
    if gpus > cluster.num_gpus:
        raise question_refused("too many GPUs", gpus=gpus, cluster=cluster, full=full)
    return gpus


def check_precision(cluster: Cluster, precision: str | None) -> Precision:
    """Check a precision against the cluster's GPU; by default bf16 where it has it, else fp16, else fp32.

    That of `bf16-true` is the one of its products, bf16.

    Raises:
        LabError: if the GPU has it not; the sentence lists those it has.
    """
    has = cluster.gpu.peak_flops
    usual: tuple[Precision, ...] = ("bf16", "fp16", "fp32", "fp8")
    precision = "bf16" if precision == TRUE else precision
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
    raise LabError(one_of("precision", precision, [*legal, *([TRUE] if "bf16" in has else [])]))
