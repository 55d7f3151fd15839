"""Seconds of one forward and backward of each layer kind, for the few cuts that many layouts share.

Layer 3. Invariant: computed once per distinct (micro-batch, tensor and context parallelism, …) with plain Python, then
looked up; the columns that a layout adds (stages, replicas, ZeRO) do not change them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from dlojz.hardware import Cluster, Collective, Precision
from dlojz.predict.time.calibration import Calibration
from dlojz.predict.time.communication import all_to_all_s, collective_s
from dlojz.predict.time.engines import habit
from dlojz.predict.time.layouts import CHECKPOINTING, Integers, Layouts, Reals, element_bytes
from dlojz.predict.time.operators import operators_s
from dlojz.predict.time.workload import Cut, Kind, Workload

ASYNCHRONOUS = 0.3
"""Share of tensor-parallel messages that hides where they are cut up. Approximate: torchtitan gained 5 to 9 % of a step
of which about a fifth is such messages (Liang et al. 2024, 70 B)."""


@dataclass(frozen=True, eq=False)
class Passes:
    """Per layer kind (rows) and layout (columns), seconds of one micro-batch in one layer.

    Attributes:
        forward, backward: computation.
        again: computation of what was not kept.
        tensor_forward, tensor_backward: messages of tensor and context parallelism that are waited for; the latter
            with those of the recomputation.
    """

    forward: Reals
    backward: Reals
    again: Reals
    tensor_forward: Reals
    tensor_backward: Reals


def cuts_of(layouts: Layouts) -> tuple[list[Cut], Integers]:
    """The distinct cuts of many layouts, and which one each layout has."""
    names = (
        "micro_batch", "tp", "cp", "sequence_parallel", "fused_attention", "gradient_bytes", "fused_accumulation",
        "blocking", "eager", "ep",
    )  # fmt: skip
    columns = [getattr(layouts, name) for name in names]
    key = np.zeros(len(layouts), np.int64)
    for column in columns:
        key = key * (int(column.max(initial=0)) + 1) + column
    _, first, place = np.unique(key, return_index=True, return_inverse=True)
    cuts = [
        Cut(mb, tp, cp, bool(sp), bool(fused), size, bool(adds), bool(blocks), bool(eager), ep)
        for mb, tp, cp, sp, fused, size, adds, blocks, eager, ep in zip(
            *(column[first].tolist() for column in columns), strict=True
        )
    ]
    return cuts, place.reshape(-1)


def kind_times(
    kind: Kind, cut: Cut, cluster: Cluster, calibration: Calibration, precision: Precision, decoder: bool = True
) -> tuple[float, float, float]:
    """Forward, backward and the forward of what selective checkpointing computes again, in seconds, of one layer.

    That is attention's core in a decoder, and in a block of an image model all that is no product.

    Source: Korthikanti et al. 2022, §5; `dlojz.models.blocks.run_checkpointed` keeps products, convolutions, attention.
    """
    operators = kind.operators(cut)
    seconds = partial(operators_s, gpu=cluster.gpu, calibration=calibration, precision=precision, blocking=cut.blocking)
    again = [one for one in operators if (one.core if decoder else not one.forward)]
    return *seconds(operators), seconds(again)[0]


def message_times(
    kind: Kind, cut: Cut, cluster: Cluster, calibration: Calibration, precision: Precision = "fp16"
) -> tuple[float, float]:
    """Seconds of the messages of one layer, forward and backward, none of them hidden.

    Tensor parallelism: `sums` all-reduces of the boundary tensor, with sequence parallelism as a reduce-scatter and an
    all-gather each. Context parallelism: keys and values go around the ring once forward, and twice (with their
    gradients) backward. Expert parallelism: two all-to-alls of all rows forward, and two backward.

    Source: Shoeybi et al. 2019 (arXiv 1909.08053), §3; Korthikanti et al. 2022, §4.2.2; Liu et al. 2023 (arXiv
    2310.01889), §3; Lepikhin et al. 2020 (arXiv 2006.16668), for dispatch and combine.
    """
    size = element_bytes(precision)
    message = size * kind.elements * cut.micro_batch / cut.cp
    one = 0.0
    if cut.tp > 1:
        parts: tuple[Collective, ...] = ("all_reduce",)
        if cut.sequence_parallel:
            parts = ("reduce_scatter", "all_gather")
        one = sum(float(collective_s(part, cluster, calibration, message, cut.tp)) for part in parts)
    ring = 0.0
    if cut.cp > 1 and kind.ring_elements:
        keys = size * kind.ring_elements * cut.micro_batch / cut.tp
        ring = float(collective_s("all_gather", cluster, calibration, keys, cut.cp, cut.tp))
    exchanged = 0.0
    if cut.ep > 1 and kind.exchange_elements:
        rows = size * kind.exchange_elements * cut.micro_batch / cut.cp
        exchanged = 2 * float(all_to_all_s(cluster, calibration, rows, cut.ep, cut.tp))
    return kind.sums[0] * one + ring + exchanged, kind.sums[1] * one + 2 * ring + exchanged


def passes_of(workload: Workload, cluster: Cluster, layouts: Layouts, calibration: Calibration) -> Passes:
    """The seconds of every layer kind for every layout.

    Selective checkpointing computes attention's core again (of image models all but products; see `kind_times`), full
    checkpointing all of a layer, with its messages.

    Source: Korthikanti et al. 2022, §5; SC21 (Narayanan et al. 2021), §3.5.
    """
    cuts, place = cuts_of(layouts)
    precision, decoder = layouts.precision, workload.size is not None
    kinds = workload.kinds
    table = np.zeros((5, len(kinds), len(cuts)))
    for column, cut in enumerate(cuts):
        for row, kind in enumerate(kinds):
            table[:3, row, column] = kind_times(kind, cut, cluster, calibration, precision, decoder)
            table[3:, row, column] = message_times(kind, cut, cluster, calibration, precision)
    forward, backward, core, message, message_back = table[:, :, place]
    exposed = 1.0 - np.maximum(habit(layouts, "hidden_tensor"), ASYNCHRONOUS * layouts.asynchronous)
    inner = np.array([kind.recomputed for kind in kinds])[:, None]
    full = inner * (layouts.checkpointing == CHECKPOINTING.index("full"))
    selective = inner * (layouts.checkpointing == CHECKPOINTING.index("selective"))
    share = habit(layouts, "selective_share") if decoder else np.zeros(len(layouts))
    again = full * forward + selective * np.where(share > 0, share * forward, core)
    return Passes(forward, backward, again, message * exposed, (message_back + full * message) * exposed)
