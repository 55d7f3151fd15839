"""How long each slice of a sequence should be for a pipeline over token slices, and what a slice costs.

Layer 2. Invariant: a slice costs more the more tokens stand before it, so that equal lengths are not equal times;
`plan_slices` finds the lengths whose pipelined time is the least that exists (on its grid, within its tolerance).

Source: Li et al. 2021, TeraPipe (arXiv 2102.07988), §3.3: T = Σ t_i + (p − 1) max t_i, and the dynamic programme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlojz.pipeline.action import BACKWARD, BACKWARD_INPUT, FORWARD, Action
from dlojz.pipeline.schedule import Schedule
from dlojz.schema import LabError
from dlojz.text import say

SliceTime = Callable[[int, int], float]
"""(tokens of the slice, tokens before it) → time that one stage takes for it."""

_Times = NDArray[np.float64]


@dataclass(frozen=True)
class SlicePlan:
    """A sequence cut into slices.

    Attributes:
        lengths: tokens of each slice, first to last.
        times: time of each slice on one stage: what `Costs.slice_times` takes, with `forward=1`.
        total: Σ times + (p − 1) max times, the time of one sequence through p stages, forward.
    """

    lengths: tuple[int, ...]
    times: tuple[float, ...]
    total: float


def causal_slice_flops(length: int, context: int, hidden: int, layers: int = 1) -> float:
    """Floating-point operations of the forward of a slice of `length` tokens that have `context` tokens before them.

    Matrix products with weights: 24 l h² per layer; attention scores and their sum of values: 4 h for each pair of a
    token and one it may look at, l c + l (l + 1) / 2 pairs (a token looks at itself too). All slices together give
    24 s h² + 2 s (s + 1) h, the causal half of what follows.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), Appendix: 24 B s h² + 4 B s² h per layer, without causality.
    """
    pairs = length * context + length * (length + 1) / 2
    return layers * (24.0 * length * hidden**2 + 4.0 * hidden * pairs)


def causal_slice_time(hidden: int, flops_per_s: float, overhead_s: float = 0.0, layers: int = 1) -> SliceTime:
    """Time of a slice in seconds: its operations at a rate, and what each slice costs besides (kernel launches, sends).

    Without an overhead the finest cut is always the best one; with it, it is not (Li et al. 2021, §3.3, Fig. 3).

    Raises:
        LabError: for a rate that is not above 0, or a negative overhead.
    """
    if not flops_per_s > 0 or overhead_s < 0:
        raise LabError(
            say(
                en=f"flops_per_s must be above 0 and overhead_s 0 or more, but {flops_per_s!r} and {overhead_s!r} were "
                "received.",
                fr=f"flops_per_s doit être plus grand que 0 et overhead_s au moins égal à 0, mais {flops_per_s!r} et "
                f"{overhead_s!r} ont été reçus.",
            )
        )
    return lambda length, context: overhead_s + causal_slice_flops(length, context, hidden, layers) / flops_per_s


def pipelined_time(times: Sequence[float], ranks: int) -> float:
    """Σ t_i + (p − 1) max t_i: the time of one sequence through p equal stages, forward (Li et al. 2021, eq. 3)."""
    return math.fsum(times) + (ranks - 1) * max(times, default=0.0)


def slice_times(lengths: Sequence[int], time: SliceTime) -> tuple[float, ...]:
    """Time of each slice, given all lengths from the first token on."""
    times, context = [], 0
    for length in lengths:
        times.append(time(length, context))
        context += length
    return tuple(times)


def plan_slices(tokens: int, ranks: int, time: SliceTime, *, grid: int = 1, tolerance: float = 0.0) -> SlicePlan:
    """The lengths of slices whose pipelined time is the least.

    For each time that the slowest slice may take, the cheapest cut of the sequence that keeps to it is found from the
    first token on, f(s) = min over the last slice l of f(s − l) + t(l, s − l); the best over all these times is the
    answer. There are n (n + 1) / 2 such times for n grid steps, tried in rising order until (p − 1) times the
    next one and the cheapest cut of all cannot win any more.

    Args:
        tokens: s, tokens of a sequence.
        ranks: p.
        time: what a slice costs; at least 0 and finite.
        grid: lengths are multiples of it (tensor cores like 8); it divides `tokens`.
        tolerance: of times of the slowest slice that are closer than this, one only is tried: the plan is then at most
            (p − 1) × tolerance worse than the best.

    Source: Li et al. 2021, TeraPipe (arXiv 2102.07988), §3.3, Algorithm 1 and its two optimisations.

    Raises:
        LabError: for sizes below 1, a grid that does not divide the tokens, or a time that is negative or not finite.
    """
    _check_sizes(tokens, ranks, grid, tolerance)
    steps = tokens // grid
    table = _table(steps, grid, time)
    cheapest = _cut(table, math.inf)[0]
    best: tuple[float, list[int]] = (math.inf, [])
    last = -math.inf
    for slowest in np.unique(table[np.isfinite(table)]).tolist():
        if cheapest + (ranks - 1) * slowest >= best[0]:
            break
        if slowest - last < tolerance:
            continue
        last = slowest
        # A skipped time of the slowest slice is at most `tolerance` below the next one tried.
        total, lengths = _cut(table, slowest + tolerance)
        if math.isfinite(total):
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
                raise LabError(
                    say(
                        en=f"the time of a slice must be a finite number, 0 or more, but {value!r} was received for "
                        f"{(end - start) * grid} tokens after {start * grid}.",
                        fr=f"le temps d’une tranche doit être un nombre fini, au moins égal à 0, mais {value!r} a été "
                        f"reçu pour {(end - start) * grid} tokens après {start * grid}.",
                    )
                )
            table[end, start] = value
    return table


def _cut(table: _Times, slowest: float) -> tuple[float, list[int]]:
    """The cheapest cut whose slices take no more than `slowest`, and its lengths in grid steps."""
    steps = len(table) - 1
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


def _check_sizes(tokens: int, ranks: int, grid: int, tolerance: float) -> None:
    if min(tokens, ranks, grid) < 1 or tokens % grid or not 0 <= tolerance < math.inf:
        raise LabError(
            say(
                en=f"a sequence is cut into multiples of the grid, which must divide it, for at least 1 rank and a "
                f"tolerance of 0 or more, but tokens={tokens}, grid={grid}, ranks={ranks}, tolerance={tolerance} were "
                "received: use grid=1, which always fits.",
                fr=f"une séquence se coupe en multiples du pas grid, qui doit la diviser, pour au moins 1 rang et une "
                f"tolérance au moins égale à 0, mais tokens={tokens}, grid={grid}, ranks={ranks}, "
                f"tolerance={tolerance} ont été reçus : prenez grid=1, qui convient toujours.",
            )
        )


def slice_order_problems(schedule: Schedule) -> Iterator[str]:
    """What breaks the order of slices within a sequence: one sentence per pair of neighbours in the wrong order.

    On its stage, a slice's forward comes after that of the slice before it (whose keys and values it reads), and its
    backward after that of the slice behind it (which sends it gradients of these keys and values).
    """
    for rank, order in enumerate(schedule.orders):
        at = {element: number for number, action in enumerate(order) for element in action.elements}
        for action, number in at.items():
            before = _slice_before(action, schedule.token_slices)
            if before is not None and at.get(before, -1) > number:
                yield say(
                    en=f"rank {rank} runs {action} before {before}, whose result it needs: put {before} first (slices "
                    "run forward in order, backward in reverse).",
                    fr=f"le rang {rank} exécute {action} avant {before}, dont il a besoin : placez {before} d’abord "
                    "(les tranches se suivent dans l’ordre en passe avant, à rebours en passe arrière).",
                )


def _slice_before(action: Action, token_slices: int) -> Action | None:
    """The action of the neighbouring slice that it needs, if any."""
    if action.kind == FORWARD and action.token_slice > 0:
        return action._replace(token_slice=action.token_slice - 1)
    if action.kind in (BACKWARD, BACKWARD_INPUT) and action.token_slice + 1 < token_slices:
        return action._replace(token_slice=action.token_slice + 1)
    return None
