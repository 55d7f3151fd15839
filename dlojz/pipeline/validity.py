"""Check a schedule: complete, in order, free of deadlocks, within memory, executable by the lab's runtimes.

`problems` is empty exactly if every rank can run its list to the end and every micro-batch passes every stage forward
and backward once. What torch's runtime executes is said by `exchange_formats.torch_refusal`. No torch.

Also plans token slices: a slice costs more the more tokens stand before it, so equal lengths are not equal times.
`plan_slices` finds the lengths of least pipelined time on its grid.

Source: Li et al. 2021, TeraPipe (arXiv 2102.07988), §3.3: T = Σ t_i + (p − 1) max t_i, and the dynamic programme.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, shortest
from dlojz.config.fields import ASYNCHRONOUS
from dlojz.pipeline.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTES,
    EVICT,
    FORWARD,
    LOAD,
    Action,
    Costs,
    Schedule,
)
from dlojz.pipeline.simulator import UNIT_COSTS, deltas

TEXTS = Sentences(Path(__file__).parent / "data" / "validity.md")


def check_executable(schedule: Schedule, *, asynchronous: bool = False) -> None:
    """Refuse schedules that the lab's runtimes do not execute.

    Args:
        asynchronous: whether the runtime with weight versions is asked.

    Raises:
        LabError: for token slices, evictions, and updates within the step (or, of asynchronous schedules, those whose
            backward uses other weights than its forward).
    """
    reasons = {
        "token slices": schedule.token_slices > 1,
        "evictions": any(action.kind in (EVICT, LOAD) for action in schedule.actions),
        "updates": schedule.asynchronous and not (asynchronous and schedule.name in ASYNCHRONOUS),
    }
    for key, applies in reasons.items():
        if applies:
            reason = TEXTS.sentence("not executable", key)
            raise TEXTS.refusal("not executable", "refusal", name=schedule.name, reason=reason)


SliceTime = Callable[[int, int], float]
"""(tokens of the slice, tokens before it) → time that one stage takes for it."""

_Times = NDArray[np.float64]


@dataclass(frozen=True)
class SlicePlan:
    """Lengths and times of the token slices of a sequence.

    Attributes:
        lengths: tokens of each slice, first to last.
        times: time of each slice on one stage: what `Costs.slice_times` takes, with `forward=1`.
        total: Σ times + (p − 1) max times, the time of one sequence through p stages, forward.
    """

    lengths: tuple[int, ...]
    times: tuple[float, ...]
    total: float


def causal_slice_flops(length: int, context: int, hidden: int, layers: int = 1) -> float:
    """Count floating-point operations of the forward of a slice of `length` tokens after `context` others.

    Matrix products with weights: 24 l h² per layer; attention scores and their sum of values: 4 h for each pair of a
    token and one it may look at, l c + l (l + 1) / 2 pairs (a token looks at itself too). All slices together give
    24 s h² + 2 s (s + 1) h, the causal half of what follows.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), Appendix: 24 B s h² + 4 B s² h per layer, without causality.
    """
    pairs = length * context + length * (length + 1) / 2
    return layers * (24.0 * length * hidden**2 + 4.0 * hidden * pairs)


def causal_slice_time(hidden: int, flops_per_s: float, overhead_s: float = 0.0, layers: int = 1) -> SliceTime:
    """Build the time of a slice in seconds: its operations at a rate, and an overhead (kernel launches, sends).

    Without an overhead the finest cut is always the best one; with it, it is not (Li et al. 2021, §3.3, Fig. 3).

    Raises:
        LabError: for a rate that is not above 0, or a negative overhead.
    """
    if not flops_per_s > 0 or overhead_s < 0:
        raise TEXTS.refusal("refusals", "no rate", flops_per_s=flops_per_s, overhead_s=overhead_s)
    return lambda length, context: overhead_s + causal_slice_flops(length, context, hidden, layers) / flops_per_s


def pipelined_time(times: Sequence[float], ranks: int) -> float:
    """Compute Σ t_i + (p − 1) max t_i: one sequence through p equal stages, forward (Li et al. 2021, eq. 3)."""
    return math.fsum(times) + (ranks - 1) * max(times, default=0.0)


def slice_times(lengths: Sequence[int], time: SliceTime) -> tuple[float, ...]:
    """Compute the time of each slice, given all lengths from the first token on."""
    times, context = [], 0
    for length in lengths:
        times.append(time(length, context))
        context += length
    return tuple(times)


def least_waits(
    times: Sequence[float], delays: Sequence[float], slices: Sequence[float], micro_batches: int
) -> list[float]:
    """Bound, per stage, its idle time before its first forward of some slice from below, whatever the order.

    Let x be the first forward of a slice l on stage s. Before x, stage s has run only forwards of slices before l (a
    backward needs the whole sequence), of total relative time π, so it was idle for start(x) − π F_s. For every stage
    r ≤ s, with head(r) = Σ_{q<r} (t_0 F_q + c_q), the earliest that anything comes to r:

        start(x) ≥ head(r) + π g + Σ_{r≤q<s} (t_l F_q + c_q),    g = min(F_r, max(F_q, F_{q+1}) for r ≤ q < s)

    by induction from r to s. On stage r, the slices before x take π F_r from head(r) on. What stands before x on stage
    q + 1 and not on q runs on both after x has left q, which takes max(F_q, F_{q+1}) of it; the rest of what stands
    before x on q + 1 stood there on q. As π lies between Σ_{i<l} t_i (the sequence of x) and m Σ_{i<l} t_i (all
    sequences), the idle time is bounded. Backwards are the same with time reversed.

    For equal stages the waits are s (t F + c) with t = max t_i, those of a proportionate flow shop.

    Args:
        times: F, of a whole sequence, in each stage.
        delays: c, of the message from each stage to the next; one less than stages.
        slices: t, their relative times, in order.
        micro_batches: m, sequences.

    Source: own derivation; for equal stages Pinedo, "Scheduling" (Springer 2016), §6.1, proportionate flow shops, and
    Li et al. 2021, eq. 3.
    """
    # Slice 0 comes first to every stage.
    heads = [0.0, *accumulate(slices[0] * time + delay for time, delay in zip(times, delays, strict=False))]
    waits = list(heads)
    # `start_stage`, `stage` and the stages between are r, s and q above.
    for start_stage, head in enumerate(heads):
        rate, path_time, delay = times[start_stage], 0.0, 0.0
        for stage in range(start_stage + 1, len(times)):
            # g: the least of F_r and of the slower stage in each pair of neighbours on the way.
            rate = min(rate, max(times[stage - 1], times[stage]))
            path_time, delay = path_time + times[stage - 1], delay + delays[stage - 1]
            gained, before = rate - times[stage], 0.0
            for share in slices:
                # π is least with this sequence alone before x, and largest with all sequences.
                minimum_wait = gained * before * (1 if gained > 0 else micro_batches)
                waits[stage] = max(waits[stage], head + share * path_time + delay + minimum_wait)
                before += share
    return waits


def sequence_makespan(
    forward: Sequence[float],
    backward: Sequence[float],
    forward_delays: Sequence[float],
    backward_delays: Sequence[float],
    slices: Sequence[float],
) -> float:
    """Compute the time of one sequence alone, forward and backward; its slices have one order only.

    Args:
        forward, backward: times of a whole sequence, in each stage, each on its own rank.
        forward_delays, backward_delays: of the messages from each stage to the next, and from the next to it.
        slices: their relative times, in order.
    """
    # `ready`: when each slice's message is there; `free`: when each stage has run its last forward.
    ready, free = [0.0] * len(slices), []
    for time, delay in zip(forward, (*forward_delays, 0.0), strict=True):
        clock = 0.0
        for number, share in enumerate(slices):
            clock = max(clock, ready[number]) + share * time
            ready[number] = clock + delay
        free.append(clock)
    # Stages and slices in reverse; a stage begins once its forwards are done.
    for time, delay in zip(reversed(backward), (*reversed(backward_delays), 0.0), strict=True):
        clock = free.pop()
        for number, share in reversed(list(enumerate(slices))):
            clock = max(clock, ready[number]) + share * time
            ready[number] = clock + delay
    return ready[0]


def plan_slices(tokens: int, ranks: int, time: SliceTime, *, grid: int = 1) -> SlicePlan:
    """Choose the lengths of token slices whose pipelined time is the least.

    For each candidate time of the slowest slice, dynamic programming finds the cheapest cut that keeps to it:
    f(s) = min over the last slice l of f(s − l) + t(l, s − l). There are n (n + 1) / 2 candidates for n grid steps,
    tried in rising order until none can improve on the best.

    Args:
        time: what a slice costs; at least 0 and finite.
        grid: lengths are multiples of it (tensor cores like 8); it divides `tokens`.

    Source: Li et al. 2021, TeraPipe (arXiv 2102.07988), §3.3, Algorithm 1 and its two optimisations.

    Raises:
        LabError: for sizes below 1, a grid that does not divide the tokens, or a time that is negative or not finite.
    """
    if min(tokens, ranks, grid) < 1 or tokens % grid:
        raise TEXTS.refusal("refusals", "uneven grid", tokens=tokens, grid=grid, ranks=ranks)
    steps = tokens // grid
    table = _table(steps, grid, time)
    cheapest = _cut(table, math.inf)[0]
    best: tuple[float, list[int]] = (math.inf, [])
    # Candidates for the time of the slowest slice, in rising order.
    for slowest in np.unique(table[np.isfinite(table)]).tolist():
        # Even the cheapest cut cannot improve on the best with this slowest slice, nor with a longer one.
        if cheapest + (ranks - 1) * slowest >= best[0]:
            break
        total, lengths = _cut(table, slowest)
        if math.isfinite(total):
            # The true time: the slowest slice may take less than the limit.
            lengths = [length * grid for length in lengths]
            total = pipelined_time(slice_times(lengths, time), ranks)
            best = min(best, (total, lengths))
    times = slice_times(best[1], time)
    return SlicePlan(tuple(best[1]), times, pipelined_time(times, ranks))


def _table(steps: int, grid: int, time: SliceTime) -> _Times:
    """[end of the slice][its start], in grid steps: its time; infinite where there is no such slice."""
    table = np.full((steps + 1, steps + 1), math.inf)
    for end in range(1, steps + 1):
        for start in range(end):
            value = time((end - start) * grid, start * grid)
            if not (math.isfinite(value) and value >= 0):
                raise TEXTS.refusal(
                    "refusals",
                    "no time of a slice",
                    value=value,
                    slice_tokens=(end - start) * grid,
                    tokens_before=start * grid,
                )
            table[end, start] = value
    return table


def _cut(table: _Times, slowest: float) -> tuple[float, list[int]]:
    """The cheapest cut whose slices take no more than `slowest`, and its lengths in grid steps."""
    steps = len(table) - 1
    # total[e]: the cheapest cut of the first e grid steps; start_of[e]: where its last slice begins.
    allowed = np.where(table <= slowest, table, math.inf)
    total, start_of = np.zeros(steps + 1), [0] * (steps + 1)
    for end in range(1, steps + 1):
        sums = total[:end] + allowed[end, :end]
        start_of[end] = int(sums.argmin())
        total[end] = sums[start_of[end]]
    lengths, end = [], steps
    while end and math.isfinite(total[steps]):
        lengths.append(end - start_of[end])
        end = start_of[end]
    return float(total[steps]), lengths[::-1]


MAX_PROBLEMS = 5
"""Length of a list of problems."""


def check(schedule: Schedule, memory_limit: float | None = None, costs: Costs = UNIT_COSTS) -> None:
    """Refuse a schedule that cannot be executed.

    Raises:
        LabError: with the first problem.
    """
    for problem in problems(schedule, memory_limit, costs):
        raise LabError(problem)


def problems(schedule: Schedule, memory_limit: float | None = None, costs: Costs = UNIT_COSTS) -> list[str]:
    """List what is wrong with a schedule, at most five sentences; empty if it is valid.

    Args:
        memory_limit: activations that a rank may keep, in stage-micro-batches; None: any number.
        costs: memory kept by each stage.
    """
    return list(islice(_problems(schedule, memory_limit, costs), MAX_PROBLEMS))


def _problems(schedule: Schedule, memory_limit: float | None, costs: Costs) -> Iterator[str]:
    sound = True
    for problem in (*_counted(schedule), *_placed(schedule), *_ordered(schedule)):
        sound = False
        yield problem
    if sound:
        # Not of an incomplete order: what is missing would be told a second time.
        try:
            schedule.graph  # noqa: B018  (compiling it finds the deadlocks)
        except LabError as error:
            yield str(error)
    if memory_limit is not None:
        yield from _over_limit(schedule, memory_limit, costs)


def _elements(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    for rank, order in enumerate(schedule.orders):
        for action in order:
            for element in action.elements:
                yield rank, element


def _counted(schedule: Schedule) -> Iterator[str]:
    """Each forward once; each backward once, whole or in its two parts."""
    counted = Counter(element for _, element in _elements(schedule))
    for action, times in counted.items():
        if times > 1 and action.kind in COMPUTES:
            yield TEXTS.say("problems", "repeated", action=action, times=times)
    # A micro-batch goes down one pipe, which its actions tell.
    pipe_of = {(e.micro_batch): e.pipe for _, e in _elements(schedule)} if schedule.pipes > 1 else {}
    for micro_batch in range(schedule.micro_batches):
        for stage in range(schedule.stages):
            for token_slice in range(schedule.token_slices):
                action = Action(FORWARD, stage, micro_batch, pipe_of.get(micro_batch, 0), token_slice)
                yield from _passes(action, counted, schedule.rank_of(action))


def _passes(action: Action, counted: Counter[Action], rank: int) -> Iterator[str]:
    if not counted[action]:
        yield TEXTS.say("problems", "forward missing", action=action, rank=rank, stage=action.stage)
    backward, for_input, for_weight = (
        action._replace(kind=kind) for kind in (BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    )
    has = tuple(bool(counted[part]) for part in (backward, for_input, for_weight))
    # B alone, or both I and W.
    if has in ((True, False, False), (False, True, True)):
        return
    if not any(has):
        parts = {"backward": backward, "for_input": for_input, "for_weight": for_weight}
        yield TEXTS.say("problems", "backward missing", rank=rank, **parts)
    elif has[0]:
        extra = for_input if has[1] else for_weight
        yield TEXTS.say("problems", "computed twice", backward=backward, extra=extra)
    else:
        half, twin = (for_input, for_weight) if has[1] else (for_weight, for_input)
        yield TEXTS.say("problems", "half missing", half=half, twin=twin)


def _placed(schedule: Schedule) -> Iterator[str]:
    """Every action on the rank that holds its stage, and within the schedule's numbers."""
    for rank, action in _elements(schedule):
        inside = (
            0 <= action.stage < schedule.stages
            and 0 <= action.micro_batch < schedule.micro_batches
            and 0 <= action.pipe < schedule.pipes
            and 0 <= action.token_slice < schedule.token_slices
        )
        if not inside:
            limits = {"last_stage": schedule.stages - 1, "last_micro_batch": schedule.micro_batches - 1}
            yield TEXTS.say("problems", "outside", action=action, rank=rank, **limits)
        elif schedule.rank_of(action) != rank:
            holder = schedule.rank_of(action)
            yield TEXTS.say("problems", "on another rank", action=action, rank=rank, stage=action.stage, holder=holder)


def _ordered(schedule: Schedule) -> Iterator[str]:
    """A micro-batch is passed forward, then backward, then its weight gradients; slices in order, then in reverse.

    A slice's forward reads keys and values of the slice before it; its backward takes their gradients from the next.
    """
    for prerequisite_of in (_pass_before, partial(_slice_before, token_slices=schedule.token_slices)):
        for rank, order in enumerate(schedule.orders):
            position_of = {element: number for number, action in enumerate(order) for element in action.elements}
            for action, number in position_of.items():
                before = prerequisite_of(action)
                # −1: it is missing, which `_counted` tells.
                if before is None or position_of.get(before, -1) < number:
                    continue
                key = "order" if before.token_slice == action.token_slice else "order of slices"
                yield TEXTS.say("problems", key, rank=rank, action=action, before=before)


def _pass_before(action: Action) -> Action | None:
    if action.kind in (BACKWARD, BACKWARD_INPUT):
        return action._replace(kind=FORWARD)
    return action._replace(kind=BACKWARD_INPUT) if action.kind == BACKWARD_WEIGHT else None


def _slice_before(action: Action, token_slices: int) -> Action | None:
    if action.kind == FORWARD and action.token_slice > 0:
        return action._replace(token_slice=action.token_slice - 1)
    if action.kind in (BACKWARD, BACKWARD_INPUT) and action.token_slice + 1 < token_slices:
        return action._replace(token_slice=action.token_slice + 1)
    return None


def _over_limit(schedule: Schedule, limit: float, costs: Costs) -> Iterator[str]:
    share = 1 / schedule.token_slices
    for rank, order in enumerate(schedule.orders):
        memory = 0.0
        for action in order:
            # Evictions change a partner too; when, only times can tell.
            changes = [u for e in action.elements for holder, _, u in deltas(e, rank, costs, share) if holder == rank]
            # The most at any moment of the action.
            highest = max(accumulate(changes, initial=memory))
            memory += sum(changes)
            if highest > limit + 1e-9:
                units = {"kept": shortest(highest), "limit": shortest(limit)}
                yield TEXTS.say("problems", "over the limit", rank=rank, action=action, **units)
                break
