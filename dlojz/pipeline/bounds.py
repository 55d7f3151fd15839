"""What no schedule can beat: lower bounds of the makespan and of the span, whatever the order and the memory.

Layer 2. Invariant: a bound depends on the placement, the micro-batches and the costs, never on the order of actions; no
schedule of the same placement is ever shorter.

Why there is one. A rank cannot begin before the first micro-batch has come to it (its head), it must then do all its
work, and after its last backward the gradient still has to reach stage 0 (its tail). With F, I, W the times of one
stage's forward and its two backwards, B = I + W, c the delay of a message and m micro-batches:

    head(s) = Σ_{j<s} (F_j + c)
    whole backward:  head(s) + m (F_s + B_s) + Σ_{j<s} (B_j + c)
    split backward:  head(s) + m (F_s + I_s + W_s)   and   head(s) + m (F_s + I_s) + tail(s),
                     tail(s) = the longest of W_s and I_{s−1} + c + tail(s − 1);  tail(0) = W_0

The bound is the largest of these over all stages. A rank with several chunks does the work of all of them from the head
of the first; each of its later chunks, with those behind it, gives a bound too.

Source: the heads-and-tails bound of machine scheduling (Carlier 1982, "The one-machine sequencing problem"), applied to
pipelines; for one chunk per rank and equal stages it gives (m + p − 1)(F + B) (Huang et al. 2019, arXiv 1811.06965,
§2.3) and (m + p − 1)(F + I) + W for m ≤ p (Qi et al. 2024, arXiv 2401.10241, App. H).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dlojz.pipeline.action import FORWARD
from dlojz.pipeline.costs import Costs
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.simulator import UNIT_COSTS


@dataclass(frozen=True)
class _Stage:
    """Times of one stage of one pipe, and what lies before and after it.

    `tail` is the way of its gradient to stage 0; `tail_of_input` goes on to the weight gradients on that way.
    """

    rank: int
    forward: float
    backward: float
    backward_input: float
    head: float
    tail: float
    tail_of_input: float


def lower_bound(schedule: Schedule, costs: Costs = UNIT_COSTS) -> float:
    """The makespan that no order of the same stages on the same ranks can beat.

    Splitting the backward is taken for allowed only where the schedule does it.

    Args:
        schedule: gives placement, micro-batches (of each pipe), token slices; its order does not matter.
        costs: times, in any unit; of bidirectional schedules too.
    """
    return max(_makespans(schedule, costs), default=0.0)


def lower_bound_of(
    ranks: int,
    micro_batches: int,
    costs: Costs = UNIT_COSTS,
    *,
    placement: Sequence[int] | None = None,
    split: bool = False,
) -> float:
    """The same, without a schedule.

    Args:
        ranks: number of ranks.
        micro_batches: micro-batches of a step.
        costs: times, in any unit.
        placement: rank of each stage; by default stage s is on rank s.
        split: whether backwards may be split.
    """
    return max(_bounds(_stages(tuple(placement or range(ranks)), costs, split, 1.0), micro_batches, split), default=0.0)


def span_bound(schedule: Schedule, costs: Costs = UNIT_COSTS) -> float:
    """The span that no order of the same stages on the same ranks can beat.

    The busiest rank's work; or the way from a rank's first forward to another rank, through all the work there, and
    back to its own last backward. With whole backwards, rank 0's span is the makespan, so the two bounds are the same.
    """
    return max((*_work(schedule, costs), *_round_trips(schedule, costs)), default=0.0)


def span_bound_of(
    ranks: int,
    micro_batches: int,
    costs: Costs = UNIT_COSTS,
    *,
    placement: Sequence[int] | None = None,
    split: bool = False,
) -> float:
    """The same, without a schedule; arguments as in `lower_bound_of`."""
    stages = _stages(tuple(placement or range(ranks)), costs, split, 1.0)
    work = (micro_batches * sum(s.forward + s.backward for s in stages if s.rank == rank) for rank in range(ranks))
    return max((*work, *_returns(stages, split, 1.0, micro_batches)), default=0.0)


def _stages(
    placement: tuple[int, ...], costs: Costs, split: bool, share: float, overlaps: bool = False
) -> list[_Stage]:
    """The stages of one pipe; `share` is the part of a sequence that the shortest token slice is."""
    count = len(placement)
    stages: list[_Stage] = []
    times = {n: costs.per_stage(n, count) for n in ("forward", "backward", "backward_input", "backward_weight")}
    head = tail = tail_of_input = 0.0
    for number, rank in enumerate(placement):
        forward, backward, for_input, for_weight = (times[name][number] for name in times)
        if overlaps and costs.overlapped is not None:
            together = min(costs.per_stage("overlapped", count))
            forward, backward = min(forward, together), min(backward, together)
        if split:
            # A schedule may split some backwards only: the shorter way bounds both.
            backward = min(backward, for_input + for_weight)
            for_input = min(backward, for_input)
            for_weight = backward - for_input
        if number:
            before = stages[-1]
            there, back = costs.delay(before.rank, rank), costs.delay(rank, before.rank)
            head = before.head + share * before.forward + there
            tail = before.tail + share * (before.backward_input if split else before.backward) + back
            tail_of_input = max(share * for_weight, before.tail_of_input + share * before.backward_input + back)
        else:
            tail_of_input = share * for_weight
        stages.append(_Stage(rank, forward, backward, for_input, head, tail, tail_of_input))
    return stages


def _bounds(stages: list[_Stage], micro_batches: int, split: bool) -> Iterator[float]:
    """The bounds of one pipe: each rank's last chunks, from the last one alone to all of them."""
    forwards, whole, for_input = (dict.fromkeys((stage.rank for stage in stages), 0.0) for _ in range(3))
    for stage in reversed(stages):
        forwards[stage.rank] += stage.forward
        whole[stage.rank] += stage.backward
        for_input[stage.rank] += stage.backward_input
        forward = forwards[stage.rank]
        if split:
            yield stage.head + micro_batches * (forward + whole[stage.rank])
            yield stage.head + micro_batches * (forward + for_input[stage.rank]) + stage.tail_of_input
        else:
            yield stage.head + micro_batches * (forward + whole[stage.rank]) + stage.tail


def _makespans(schedule: Schedule, costs: Costs) -> Iterator[float]:
    split = schedule.splits_backward
    pipes = _pipes(schedule, costs)
    if len(pipes) == 1 and not schedule.overlaps and schedule.token_slices == 1:
        yield from _bounds(pipes[0], schedule.micro_batches, split)
        return
    # Several pipes share a rank, or a forward hides behind a backward: the work that a rank is left with, between the
    # earliest of its heads and the shortest of its tails.
    for rank, work in enumerate(_work(schedule, costs)):
        held = [stage for pipe in pipes for stage in pipe if stage.rank == rank]
        if held:
            tail = 0.0 if split else min(stage.tail for stage in held)
            yield min(stage.head for stage in held) + work + tail
    for pipe, count in zip(pipes, _counts(schedule), strict=True):
        if count:
            yield from _one_slice(pipe, split, _shortest_slice(schedule, costs))


def _one_slice(stages: list[_Stage], split: bool, share: float) -> Iterator[float]:
    """One micro-batch alone, or its shortest slice: there and back."""
    last = stages[-1]
    if split:
        yield last.head + share * (last.forward + last.backward_input) + last.tail_of_input
    else:
        yield last.head + share * (last.forward + last.backward) + last.tail


def _pipes(schedule: Schedule, costs: Costs) -> list[list[_Stage]]:
    share = _shortest_slice(schedule, costs)
    return [
        _stages(placement, costs, schedule.splits_backward, share, schedule.overlaps)
        for placement in schedule.placement
    ]


def _shortest_slice(schedule: Schedule, costs: Costs) -> float:
    return min(costs.slice_times, default=1.0 / schedule.token_slices)


def _counts(schedule: Schedule) -> list[int]:
    """Micro-batches of each pipe."""
    if schedule.pipes == 1:
        return [schedule.micro_batches]
    elements = (element for action in schedule.actions for element in action.elements)
    seen = {(element.pipe, element.micro_batch) for element in elements if element.kind == FORWARD}
    return [sum(pipe == number for pipe, _ in seen) for number in range(schedule.pipes)]


def _work(schedule: Schedule, costs: Costs) -> list[float]:
    """Per rank, the least time it computes; where passes may overlap, as if all its forwards did with a backward."""
    sequences = sum(costs.slice_times) if costs.slice_times else 1.0
    work = [0.0] * schedule.ranks
    held: list[list[_Stage]] = [[] for _ in work]
    pairs = [0] * schedule.ranks
    for placement, count in zip(schedule.placement, _counts(schedule), strict=True):
        for stage in _stages(placement, costs, schedule.splits_backward, 1.0):
            work[stage.rank] += sequences * count * (stage.forward + stage.backward)
            held[stage.rank].append(stage)
            pairs[stage.rank] += count
    if schedule.overlaps and costs.overlapped is not None:
        together = min(costs.per_stage("overlapped", schedule.stages))
        for rank, stages in enumerate(held):
            saved = max(s.forward for s in stages) + max(s.backward for s in stages) - together
            work[rank] -= pairs[rank] * max(0.0, saved)
    return work


def _round_trips(schedule: Schedule, costs: Costs) -> Iterator[float]:
    for pipe, count in zip(_pipes(schedule, costs), _counts(schedule), strict=True):
        # Passes that overlap, or slices of a sequence, are not all in a row: there, one of them alone is the bound.
        alone = schedule.overlaps or schedule.token_slices > 1
        if count:
            yield from _returns(pipe, schedule.splits_backward, _shortest_slice(schedule, costs), 1 if alone else count)


def _returns(stages: list[_Stage], split: bool, share: float = 1.0, micro_batches: int = 1) -> Iterator[float]:
    """For each pair of stages: from the first forward of one to its last backward, through all the work of the other.

    The second stage's rank may hold more stages behind it: their work comes in between too.
    """
    behind = dict.fromkeys((stage.rank for stage in stages), 0.0)
    for number, stage in reversed(list(enumerate(stages))):
        behind[stage.rank] += stage.forward + (stage.backward_input if split else stage.backward)
        way = stage.head + micro_batches * share * behind[stage.rank] + stage.tail
        for first in stages[: number + 1]:
            yield way - first.head - first.tail + (share * (first.backward - first.backward_input) if split else 0.0)
