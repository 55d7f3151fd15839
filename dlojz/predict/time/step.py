"""The time of a step from the times of its parts: pipeline, data parallelism, optimizer.

Layer 3. Invariant: the parts add up to the step; each is seconds on the stage that takes longest, and what that stage
waits for is the bubble. Every function takes arrays, one place per layout.

Symbols: p stages, m micro-batches, v chunks, F and B a stage's forward and backward of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from dlojz.hardware import Cluster, Collective
from dlojz.predict.time.calibration import Calibration
from dlojz.predict.time.communication import collective_s, neighbour_s
from dlojz.predict.time.engines import habit, unlimited
from dlojz.predict.time.layouts import OFFLOAD, SCHEDULES, Integers, Layouts, Reals
from dlojz.predict.time.passes import Passes
from dlojz.predict.time.stages import Stages
from dlojz.predict.time.workload import Workload

ADAM_BYTES = 34
"""Per parameter: master copy and two moments read and written in fp32 (24), gradient read (4 at most), weight written
(2), gradient read once more for the norm (4)."""


@dataclass(frozen=True, eq=False)
class Parts:
    """Seconds of a step, by what they go into; their sum is the step.

    Attributes:
        forward, backward, recompute: computation of the slowest stage, all micro-batches.
        tensor: messages of tensor and context parallelism that are waited for.
        pipeline: messages between stages, and waiting for neighbours.
        bubble: waiting for the pipeline to fill and empty, and for slower stages.
        data: gradients and weights of data parallelism and ZeRO that are waited for.
        optimizer: the update.
        constant: once per step.
    """

    forward: Reals
    backward: Reals
    recompute: Reals
    tensor: Reals
    pipeline: Reals
    bubble: Reals
    data: Reals
    optimizer: Reals
    constant: Reals

    @property
    def step_s(self) -> Reals:
        """Seconds of the step."""
        total: Reals = sum(getattr(self, field.name) for field in fields(self))
        return total


def ramp(layouts: Layouts, forward: Reals, backward: Reals) -> Reals:
    """How much of the other stages' F + B a stage waits for: 1, with chunks 1/v, with a split backward less.

    1F1B and GPipe: (p − 1)(F + B) in all; interleaved: (p − 1)(F + B)/v; ZB-H1: (p − 1)(F + B_input − B_weight), where
    the parts of the backward are taken as equal, so that (p − 1)·F is left.

    Source: Narayanan et al. 2021, §2.2; Qi et al. 2024 (arXiv 2401.10241), §2.2 and table 1.
    """
    whole = forward + backward
    zero_bubble = np.divide(forward, whole, out=np.ones_like(whole), where=whole > 0)
    is_zero_bubble = layouts.schedule == SCHEDULES.index("zb-h1")
    return np.where(is_zero_bubble, zero_bubble, 1.0) / layouts.chunks


def boundary_s(workload: Workload, cluster: Cluster, layouts: Layouts, calibration: Calibration) -> Reals:
    """Seconds that a stage spends per micro-batch and direction on its boundary: the message, and synchronising.

    With v chunks there are v boundaries. Where messages are not waited for, only the synchronisation is left.
    """
    elements = max(kind.elements for kind in workload.kinds)
    message = layouts.element_bytes * elements * layouts.micro_batch / layouts.cp
    group = layouts.dp * layouts.cp * layouts.tp
    sent = neighbour_s(cluster, calibration, message, layouts.pp, group, habit(layouts, "sliced"), layouts.tp)
    waits = np.where(layouts.pp > 1, calibration.micro_batch_s, 0.0)
    return layouts.chunks * (sent * habit(layouts, "blocking") + waits)


def gathered_s(
    weights: Reals, cluster: Cluster, layouts: Layouts, calibration: Calibration, ep: Integers | int = 1
) -> tuple[Reals, Reals, Reals]:
    """Seconds of data parallelism: (once per step, before or after; per micro-batch, beside it; last backward's).

    With Ψ weights of the stage: an all-reduce of the gradients (ZeRO-0), their reduce-scatter and an all-gather of the
    weights (1 and 2; with 2, DeepSpeed does the former after every micro-batch), with 3 two all-gathers of the weights
    and one reduce-scatter for every micro-batch, unless a pipeline keeps the weights gathered (torchtitan, Llama 3).

    Args:
        weights: of the stage, on one rank.
        ep: ranks that have shared these weights out already, neighbours on the data axis: only the others hold them.

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §7; ZeRO-2 under accumulation: DeepSpeed, `stage_1_and_2.py`.
    """
    ranks, stride = layouts.dp * layouts.cp / ep, layouts.tp * ep
    gradients, halves = weights * layouts.gradient_bytes, layouts.element_bytes * weights

    def of(collective: Collective, message: Reals, interfaces: Reals | float = np.inf) -> Reals:
        return collective_s(collective, cluster, calibration, message, ranks, stride, interfaces)

    interfaces = unlimited(habit(layouts, "gather_interfaces"))
    reduce_all = of("all_reduce", gradients)
    scatter = of("reduce_scatter", gradients)
    gather = of("all_gather", halves)
    for_layer = 2 * of("all_gather", halves, interfaces) + of("reduce_scatter", halves, interfaces)
    zero = layouts.zero
    # Where the engine keeps gradients, and gathered weights, whole over the micro-batches, it communicates once.
    each = (habit(layouts, "reduces_each") > 0) & (layouts.micro_batches > 1)
    regathers = (zero == 3) & ((layouts.pp == 1) | (habit(layouts, "reduces_each") > 0))
    every = np.where(regathers, for_layer, np.where((zero == 2) & each, scatter, 0.0))
    once = np.where((zero > 0) & ~regathers, gather, 0.0)
    last = np.where(zero == 0, reduce_all, np.where(every > 0, 0.0, scatter))
    return once, every, last


def exposed_s(message_s: Reals, computation_s: Reals, overlap: Reals) -> Reals:
    """Seconds that communication adds to the computation it runs beside: (C^q + M^q)^(1/q) − C, q = 1/(1 − overlap).

    Without overlap it adds all of M, with perfect overlap max(C, M) − C; in between the loss is greatest where both
    take as long, because neither then waits long enough for the other's delays to vanish.

    Source: our choice of a curve between both limits; ZeRO-3 in Narayanan et al. 2021, table 2, lies on q ≈ 1.6 to 2.
    """
    if not overlap.any():
        return message_s
    order = 1 / (1 - overlap)
    longer = np.maximum(np.maximum(message_s, computation_s), 1e-30)
    shorter = np.minimum(message_s, computation_s) / longer
    return longer * (1 + shorter**order) ** (1 - overlap) - computation_s


def update_s(weights: Reals, cluster: Cluster, layouts: Layouts, calibration: Calibration) -> Reals:
    """Seconds of the optimizer on the rank's share of the states; offloaded, over the host's link and memory.

    Source: bytes of Adam counted (`ADAM_BYTES`); ZeRO-Offload (arXiv 2101.06840), §4.1: gradients go down and weights
    come up, 2 bytes each.
    """
    share = np.where(layouts.zero > 0, layouts.zero_shards, 1)
    own = weights / share
    memory = cluster.gpu.memory_bytes_per_s * calibration.memory_efficiency
    host = own * (4 / HOST_LINK_BYTES_PER_S + ADAM_BYTES * cluster.gpus_per_node / HOST_MEMORY_BYTES_PER_S)
    moved = layouts.offload != OFFLOAD.index("none")
    return np.where(moved, host, own * ADAM_BYTES / memory) + 4 * weights / memory


def fetched_s(weights: Reals, layouts: Layouts) -> Reals:
    """Seconds in which a rank's share of weights that lie in the host's memory comes down its link, for the forward and
    for the backward of one micro-batch: 2 bytes per parameter and pass, which run beside the computation like ZeRO-3's
    gathers.

    Unconfirmed: no row tells the link's share from that of the gathers that follow it.

    Source: ZeRO-Infinity (arXiv 2104.07857), §6.1: each rank fetches its share over its own link; §6.2: beside
    computation and gathers, of which we take the latter only.
    """
    down = 2 * layouts.element_bytes * weights / layouts.zero_shards / HOST_LINK_BYTES_PER_S
    return np.where(layouts.offload == OFFLOAD.index("all"), down, 0.0)


HOST_LINK_BYTES_PER_S = 20e9
"""PCIe 4.0 × 16 as reached by large pinned copies; of one GPU. Unconfirmed on Jean Zay."""
HOST_MEMORY_BYTES_PER_S = 150e9
"""Of a node's host memory as an Adam on all cores reaches it. Unconfirmed on Jean Zay."""


def parts_of(
    workload: Workload,
    cluster: Cluster,
    layouts: Layouts,
    calibration: Calibration,
    passes: Passes,
    stages: Stages,
    weights: Reals,
) -> Parts:
    """The parts of a step for layouts that share one list of stages.

    A pipeline takes m(F + B) on its slowest stage, and beside that what the other stages need for one micro-batch:
    m·max(F + B) + (Σ(F + B) − max(F + B))·ramp, which is (m + p − 1)(F + B) for equal stages.

    Source: Narayanan et al. 2021, §2.2; for unequal stages Fan et al. 2021 (DAPPLE), §4.1, without their pivot.

    Args:
        passes: of these layouts.
        stages: theirs.
        weights: on the heaviest stage's rank.
    """
    counts = stages.counts
    boundary = boundary_s(workload, cluster, layouts, calibration)
    forward, backward, again, tensor = (
        counts @ each
        for each in (passes.forward, passes.backward, passes.again, passes.tensor_forward + passes.tensor_backward)
    )
    experts = float((counts @ np.array([kind.expert_parameters for kind in workload.kinds], float)).max()) / layouts.ep
    once, every, last = gathered_s(weights - experts, cluster, layouts, calibration)
    if experts.any():
        of_experts = gathered_s(experts, cluster, layouts, calibration, layouts.ep)
        once, every, last = (one + other for one, other in zip((once, every, last), of_experts, strict=True))
    # What ZeRO shares out is shared over fewer ranks for experts: as if a rank held those of all ep ranks.
    updated = weights + np.where(layouts.zero > 0, experts * (layouts.ep - 1), 0.0)
    every = every + fetched_s(weights, layouts)
    overlap = np.where((layouts.overlap > 0) | (layouts.zero == 3), calibration.overlap, 0.0)
    work = forward + backward + again + tensor + 2 * boundary
    slowest = np.argmax(work, axis=0)[None, :]
    pick = lambda table: np.take_along_axis(table, slowest, 0)[0]  # noqa: E731
    m = layouts.micro_batches
    heavy = pick(work)
    total = (stages.times[:, None] * work).sum(axis=0)
    exposed = exposed_s(every, heavy, overlap)
    after = exposed_s(last, pick(backward), overlap)
    before = exposed_s(once, pick(forward), overlap)
    rest = (total - heavy) * ramp(layouts, pick(forward), pick(backward + again))
    return Parts(
        forward=m * pick(forward),
        backward=m * pick(backward),
        recompute=m * pick(again),
        tensor=m * pick(tensor),
        pipeline=2 * m * boundary,
        bubble=rest,
        data=before + m * exposed + after,
        optimizer=update_s(updated, cluster, layouts, calibration),
        constant=np.full(len(layouts), calibration.step_s),
    )
