"""Oracle: closed forms of the schedules, length, bubble, memory and messages without simulation, each with its source.

Every form is a published or derived formula with the domain where it is exact, in which the simulator must give the
same; out of it the figure is None. Stages are equal, sends do not block; `Case` names the symbols.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from dlojz.pipeline.schedule import Costs
from dlojz.pipeline.schedule_catalogue import TOKEN_SLICES, entry
from dlojz.pipeline.simulator import UNIT_COSTS


class Case(NamedTuple):
    """Numbers of one case, named as in the papers.

    p ranks, m micro-batches, v chunks per rank, g micro-batches that pass a chunk together; F, I, W, B = I + W times of
    one stage for one micro-batch, c of one hop, both of a forward and a backward at once; k and w the activations kept
    for the backward for the input and for the weights; slices of a sequence.
    """

    p: int
    m: int
    v: int
    g: int
    F: float
    I: float  # noqa: E741  (the name in the paper)
    W: float
    B: float
    c: float
    both: float
    k: float
    w: float
    slices: int


class Law(NamedTuple):
    """Formulas of one schedule.

    Attributes:
        excess, span_excess: makespan and span beyond m·v·(F + B); None out of the domain.
        peaks: per rank, activations kept at most; None out of the domain.
        boundaries: boundaries between stages that lie between ranks.
        domain: where it is exact.
        saved: work that a rank saves on average by doing two things at once.
    """

    excess: Callable[[Case], float | None]
    span_excess: Callable[[Case], float | None]
    peaks: Callable[[Case], list[float] | None]
    boundaries: Callable[[Case], int]
    formula: str
    source: str
    domain: str
    saved: Callable[[Case], float] = lambda x: 0.0


def _straight(x: Case) -> int:
    return x.p - 1


def _looping(x: Case) -> int:
    # Stages go round the ranks: each of the vp − 1 boundaries lies between two ranks.
    return x.v * x.p - 1 if x.p > 1 else 0


def _zigzag(x: Case) -> int:
    # Where the zigzag turns, two stages lie on one rank: p − 1 boundaries for each of the v legs.
    return x.v * (x.p - 1)


def _nothing(x: Case) -> None:
    return None


def _naive(x: Case) -> float:
    # Each rank idles while the p − 1 others pass the micro-batch forward and back, over 2(p − 1) hops.
    return (x.p - 1) * x.m * (x.F + x.B + 2 * x.c)


def _gpipe(x: Case) -> float:
    return (x.p - 1) * (x.F + x.B + 2 * x.c)


def _one_f_one_b(x: Case) -> float:
    """2(p−1)m/p + 2(p−2) hops where p divides m; in general all but one micro-batch in p expose two more."""
    hops = 2 * (x.p - 1) + 2 * (x.m - 2 - (x.m - 2) // x.p) if x.p > 1 else 0
    return (x.p - 1) * (x.F + x.B) + hops * x.c


def _eager(x: Case) -> float | None:
    # In flight is one more micro-batch per hop, which hides it while c ≤ (F + B) / 2.
    return _gpipe(x) if x.c <= (x.F + x.B) / 2 else None


def _loops(x: Case, together: int) -> float | None:
    """`together` micro-batches pass a chunk before the next one begins."""
    # A group smaller than p leaves each rank p − g forwards and backwards without work whenever the chunk changes.
    start = max(0, x.p - together) * (x.v - 1)
    if together <= x.p or x.p == 1:
        hops = _looping(x)
        exact = x.c <= min(x.F, x.B)
    else:
        # Of a group larger than p, the g − p last micro-batches hide the message that loops back.
        hops = x.p - 1
        exact = x.p * x.c <= (together - x.p) * min(x.F, x.B)
    return (x.p - 1 + start) * (x.F + x.B) + 2 * hops * x.c if exact else None


def _zb_h1_span(x: Case) -> float | None:
    # g < p only where m < p: then there is no steady phase.
    if x.c or x.g < x.p:
        return None
    return (x.p - 1) * (x.I + max(0.0, x.F - x.W))


def _zb_h1(x: Case) -> float | None:
    if x.c and x.F == x.I == x.W and x.m > x.p and x.v == 1:
        return (x.p - 1) * (x.F + 4 * x.c) if x.c <= x.F / 2 else None
    span = _zb_h1_span(x)
    # The last rank starts after (p − 1) F, and does all its work from there.
    return None if span is None else max((x.p - 1) * x.F, span)


def _zb_few(x: Case) -> float | None:
    """One chunk and m ≤ p: (m + p − 1)(F + I) + W."""
    if x.v == 1 and x.m <= x.p and not x.c and x.W <= x.F and x.W <= x.I:
        return (x.m + x.p - 1) * (x.F + x.I) + x.W - x.m * (x.F + x.B)
    return _zb_h1(x)


def _zb_h2_span(x: Case) -> float | None:
    return None if x.c else (x.p - 1) * max(0.0, x.I - x.F, x.F + x.I - 2 * x.W)


def _zb_h2(x: Case) -> float | None:
    span = _zb_h2_span(x)
    return None if span is None else max((x.p - 1) * x.F, span)


def _equal_parts(x: Case) -> bool:
    # As many micro-batches as fill the V.
    return x.F == x.I == x.W and not x.c and x.m >= 2 * x.p - 1


def _chimera(x: Case) -> float | None:
    return None if x.c else (x.p - 2) * (max(x.F, x.B) + (x.m // x.p - 1) * abs(x.B - x.F))


def _pairs(half: int, outer: int, micro_batches: int) -> int:
    """Overlapped pairs that a rank runs at distance `outer` from its end, with so many micro-batches on each side."""
    inner = half - 1 - outer
    return 2 * (micro_batches - 2 * half + outer + 1) + inner - (inner == 0)


def _both_ways(x: Case, half: int, micro_batches: int) -> float | None:
    """(half − 1)(F&B + B − 3W) beyond the work of the rank in the middle, `half` ranks from each end."""
    if x.c or not x.F == x.I == x.W or not x.B <= x.both <= x.F + x.B:
        return None
    saved = (x.F + x.B - x.both) * _pairs(half, half - 1, micro_batches)
    return (half - 1) * (x.both + x.B - 3 * x.W) - saved


def _saved(x: Case, half: int, micro_batches: int) -> float:
    """Mean over the ranks of the time that running forward and backward at once saves."""
    return (x.F + x.B - x.both) * sum(_pairs(half, outer, micro_batches) for outer in range(half)) / half


def _hanayo(x: Case) -> float | None:
    return (x.p - 1) * (x.F + x.B) if x.F == x.B and not x.c and x.m % x.p == 0 else None


def _terapipe(x: Case) -> float:
    return (x.p - 1) * ((x.F + x.B) / x.slices + 2 * x.c)


def _per_rank(peak_of: Callable[[Case, int], float]) -> Callable[[Case], list[float]]:
    return lambda x: [peak_of(x, rank) for rank in range(x.p)]


def _few(x: Case, ahead: int) -> float:
    return x.k * min(ahead, x.m * x.v)


def _interleaved_zb_peaks(x: Case) -> list[float] | None:
    # r weight gradients wait on rank r for the end of the step, w each.
    return [((x.v - 1) * x.g + x.p - r) * x.k + r * x.w for r in range(x.p)] if x.m >= x.p else None


def _kept_in_v(x: Case) -> list[float] | None:
    # Two chunks per rank: 2p stage-micro-batches are p whole micro-batches, as in 1F1B.
    return [2 * x.p * x.k] * x.p if x.m >= 2 * x.p - 1 else None


_ANY = "any m and c"
_ZERO_BUBBLE = "Qi et al. 2024, arXiv 2401.10241"
_NO_LATENCY = "c = 0"
_BOTH = "F = I = W, B ≤ F&B ≤ F+B, c = 0"
LAWS: dict[str, Law] = {
    "naive": Law(
        _naive, _naive, _per_rank(lambda x, r: x.k), _straight, "(p−1)m(F+B+2c)",
        "one micro-batch at a time through p stages", _ANY,
    ),
    "gpipe": Law(
        _gpipe, _gpipe, _per_rank(lambda x, r: x.k * x.m), _straight, "(p−1)(F+B+2c)",
        "Huang et al. 2019, arXiv 1811.06965, §2.3", _ANY,
    ),
    "1f1b": Law(
        _one_f_one_b, _one_f_one_b, _per_rank(lambda x, r: _few(x, x.p - r)), _straight,
        "(p−1)(F+B) + [2(p−1)m/p + 2(p−2)]c", "Narayanan et al. 2021, arXiv 2104.04473, §2.2; hops: simulated", _ANY,
    ),
    "eager-1f1b": Law(
        _eager, _eager, _per_rank(lambda x, r: _few(x, 2 * (x.p - r) - 1)), _straight, "(p−1)(F+B+2c)",
        "Zhuang et al. 2023, arXiv 2211.05322", "c ≤ (F+B)/2",
    ),
    "interleaved": Law(
        lambda x: _loops(x, x.g), lambda x: _loops(x, x.g),
        _per_rank(lambda x, r: _few(x, (x.v - 1) * x.g + 2 * (x.p - 1 - r) + 1)), _looping,
        "(p−1)(F+B) + 2(vp−1)c", "Narayanan et al. 2021, arXiv 2104.04473, §2.2; hops: simulated",
        "groups of p and c ≤ F, B",
    ),
    "looped-bfs": Law(
        lambda x: _loops(x, x.m), lambda x: _loops(x, x.m), _per_rank(lambda x, r: x.k * x.m * x.v), _looping,
        "(p−1)(F+B+2c)", "Lamy-Poirier 2023, arXiv 2211.05953; hops: simulated",
        "pc ≤ (m−p)·min(F, B)",
    ),
    "interleaved-zb": Law(
        _zb_few, _nothing, _interleaved_zb_peaks, _looping, "(p−1)(F+I−W)",
        f"{_ZERO_BUBBLE}, §2.3; m ≤ p and one chunk: App. H",
        "c = 0 and m ≥ p, or one chunk and W ≤ F, I",
    ),
    "zb-h1": Law(
        _zb_h1, _zb_h1_span, _per_rank(lambda x, r: (x.p - r) * x.k + r * x.w), _straight, "(p−1)(F+I−W)",
        f"{_ZERO_BUBBLE}, §2.3 (W ≤ F, I); beyond: simulated",
        "c = 0, or F = I = W and c ≤ F/2",
    ),
    "zb-h2": Law(
        _zb_h2, _zb_h2_span, _per_rank(lambda x, r: (2 * (x.p - r) - 1) * x.k + 2 * r * x.w), _straight,
        "span: (p−1)(F+I−2W); makespan: (p−1)F at least", f"{_ZERO_BUBBLE}, §2.3; makespan: simulated", _NO_LATENCY,
    ),
    "zb-v": Law(
        lambda x: (x.p - 1) * x.F if _equal_parts(x) else None, lambda x: 0.0 if _equal_parts(x) else None,
        _kept_in_v, _zigzag, "span: 0; makespan: (p−1)F", f"{_ZERO_BUBBLE}, §6; makespan: simulated",
        "F = I = W, c = 0, m ≥ 2p−1",
    ),
    "chimera": Law(
        _chimera, _chimera, _per_rank(lambda x, r: x.k * (x.p // 2 + 1 + min(r, x.p - 1 - r))), _straight,
        "(p−2)[B + (m/p−1)(B−F)]", "Li and Hoefler 2021, arXiv 2107.06925; m > p with B > F: simulated",
        _NO_LATENCY,
    ),
    "dualpipe": Law(
        lambda x: _both_ways(x, x.p // 2, x.m // 2), _nothing, _per_rank(lambda x, r: x.k * (x.p + 1)), _straight,
        "(p/2−1)(F&B+B−3W)", "github.com/deepseek-ai/DualPipe, README",
        _BOTH, lambda x: _saved(x, x.p // 2, x.m // 2),
    ),
    "dualpipe-v": Law(
        lambda x: _both_ways(x, x.p, x.m), _nothing, _per_rank(lambda x, r: x.k * (2 * x.p + 1)), _zigzag,
        "(p−1)(F&B+B−3W)", "github.com/deepseek-ai/DualPipe, README (PP = 2p)",
        _BOTH, lambda x: _saved(x, x.p, x.m),
    ),
    "hanayo": Law(
        _hanayo, _hanayo, _nothing, _zigzag, "(p−1)(F+B)", "as interleaved 1F1B with v = 2W; simulated",
        "B = F, c = 0, m a multiple of p",
    ),
    "terapipe": Law(
        _terapipe, _terapipe, _nothing, _straight, "(p−1)[(F+B)/slices + 2c]", "Li et al. 2021, arXiv 2102.07988",
        "slices of equal time",
    ),
}  # fmt: skip
"""The schedules that have a closed form; others must be simulated."""


@dataclass(frozen=True)
class ClosedForm:
    """Figures of one schedule by its formulas; None where they are not exact.

    Attributes:
        makespan, span: as in `Timeline`, in the unit of the costs.
        ideal: work per rank (their mean), in the same unit.
        peaks: per rank, the activations kept at most, in stage-micro-batches.
        hops: messages between ranks in an iteration, forward and backward, each one boundary activation.
        formula: what comes on top of the work, in symbols.
        domain: where it is exact, in one sentence.
    """

    name: str
    makespan: float | None
    span: float | None
    ideal: float
    peaks: tuple[float, ...] | None
    hops: int
    formula: str
    source: str
    domain: str

    @property
    def bubble_fraction(self) -> float | None:
        """Idle time over ranks × makespan."""
        return None if self.makespan is None else 1 - self.ideal / self.makespan

    @property
    def bubble_overhead(self) -> float | None:
        """Idle time over work."""
        return None if self.makespan is None else self.makespan / self.ideal - 1


def closed_form(
    name: str,
    ranks: int,
    micro_batches: int,
    *,
    chunks: int | None = None,
    waves: int | None = None,
    token_slices: int | None = None,
    costs: Costs = UNIT_COSTS,
) -> ClosedForm | None:
    """Evaluate the formulas of a schedule; None where it has none, or where stages or links differ or sends block.

    Args:
        name: a name of the catalogue, or an alias; sizes must be legal for it (`schedule_catalogue.build`
            refuses others).
        ranks, micro_batches, chunks, waves, token_slices: as in `schedule_catalogue.build`.
        costs: the same for every stage and link.

    Raises:
        LabError: for an unknown name.
    """
    schedule = entry(name)
    law = LAWS.get(schedule.name)
    times = _equal(costs)
    if law is None or times is None:
        return None
    # Of two pipes a rank holds two stages, each for half of the micro-batches: as much work as v = 1.
    one_pipe = schedule.name not in ("chimera", "dualpipe")
    v = (chunks or (2 * waves if waves else schedule.chunks)) if one_pipe else 1
    forward, for_input, for_weight, backward, latency, overlap, units, kept_for_weight = times
    # The default group of `interleaved`: p where p divides m.
    together = micro_batches // max(1, micro_batches // ranks)
    slices = (token_slices or TOKEN_SLICES) if schedule.name == "terapipe" else 1
    case = Case(
        ranks, micro_batches, v, together, forward, for_input, for_weight, backward, latency, overlap, units,
        kept_for_weight, slices,
    )  # fmt: skip
    work = micro_batches * v * (forward + backward)
    # None: outside of the domain of that formula; the other figures hold.
    excess, span_excess, peaks = law.excess(case), law.span_excess(case), law.peaks(case)
    return ClosedForm(
        schedule.name,
        None if excess is None else work + excess,
        None if span_excess is None else work + span_excess,
        work - law.saved(case),
        None if peaks is None else tuple(peaks),
        2 * micro_batches * slices * law.boundaries(case),
        law.formula,
        law.source,
        law.domain,
    )


def _equal(costs: Costs) -> tuple[float, ...] | None:
    """F, I, W, B, c, F&B, k, w, if they are the same for every stage and link."""
    per_stage = (costs.forward, costs.backward_input, costs.backward_weight, costs.kept_for_input,
                 costs.kept_for_weight, costs.backward, costs.overlapped, costs.latency, costs.bandwidth)  # fmt: skip
    # A tuple differs per stage or link; the formulas have one symbol for all.
    if any(isinstance(value, tuple) for value in per_stage) or costs.sends != "buffered" or costs.slice_times:
        return None
    names = ("forward", "backward_input", "backward_weight", "backward")
    forward, for_input, for_weight, backward = (costs.of_stage(name, 0) for name in names)
    overlapped_time = costs.of_stage("overlapped", 0)
    kept_units = (costs.of_stage(name, 0) for name in ("kept_for_input", "kept_for_weight"))
    return (forward, for_input, for_weight, backward, costs.delay(0, 1), overlapped_time, *kept_units)
