"""What can be said of a schedule without simulating it: length, bubble, activations kept, messages.

Layer 2. Invariant: every form is one published or derived formula with its source and the domain where it is exact; out
of it the figure is None, never a guess. Stages are equal, sends do not block; F, I, W, B = I + W are times of one stage
for one micro-batch, c the time of one hop between ranks, v the chunks per rank, g the micro-batches that pass a chunk
together, k and w the activations kept for the backward for the input and for the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlojz.pipeline.catalogue import TOKEN_SLICES, entry
from dlojz.pipeline.costs import Costs
from dlojz.pipeline.orders.laws import LAWS, Case
from dlojz.pipeline.simulator import UNIT_COSTS


def total_time(ranks: int, micro_batches: int, forward: float, backward: float) -> float:
    """Length of an iteration of GPipe or 1F1B: (m + p − 1)(t_f + t_b).

    Source: Narayanan et al. 2021 (arXiv 2104.04473), §2.2.1; equal stages, no latency, any m and p.
    """
    return (micro_batches + ranks - 1) * (forward + backward)


def overhead(ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """Bubble over work: (p − 1)/(v·m).

    Source: Narayanan et al. 2021 (arXiv 2104.04473), §2.2; with v > 1, m a multiple of p.
    """
    return (ranks - 1) / (chunks * micro_batches)


def fraction(ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """Bubble over the whole iteration: (p − 1)/(v·m + p − 1).

    Source: Huang et al. 2019 (arXiv 1811.06965), §2.3, for v = 1.
    """
    return (ranks - 1) / (chunks * micro_batches + ranks - 1)


def speedup(ranks: int, micro_batches: int) -> float:
    """Over one rank that does all the work: m·p/(m + p − 1), 3 for 4 stages and 9 micro-batches.

    Source: p·m(t_f + t_b), the work of all stages, over `total_time`.
    """
    return micro_batches * ranks / (micro_batches + ranks - 1)


def chimera_fraction(ranks: int, micro_batches: int, pairs: int = 1) -> float:
    """Bubble of Chimera with f pairs of pipes, where B = F: (p − 2f)/(2fm + p − 2f).

    Source: Li and Hoefler 2021 (arXiv 2107.06925). Exact for one pair (simulated); for more pairs, which are
    not built here, as published.
    """
    return (ranks - 2 * pairs) / (2 * pairs * micro_batches + ranks - 2 * pairs)


def hanayo_fraction(ranks: int, waves: int) -> float:
    """Bubble of Hanayo for m = p and B = 2F: (2p − 2)/(3pW + p − 1). Approximate.

    Source: secondary (after Liu et al. 2023, arXiv 2308.15762). A backward-first list schedule has 0.333, 0.213, 0.119
    for p = 4 and W = 1, 2, 4, this formula 0.4, 0.222, 0.118; 0.333 is proven optimal for W = 1.
    """
    return (2 * ranks - 2) / (3 * ranks * waves + ranks - 1)


@dataclass(frozen=True)
class ClosedForm:
    """What the formulas of one schedule give; None where there is none for these numbers.

    Attributes:
        name: the schedule.
        makespan, span: as in `Timeline`, in the unit of the costs.
        ideal: work per rank (their mean), in the same unit.
        peaks: per rank, the activations kept at most, in stage-micro-batches.
        hops: messages between ranks in an iteration, forward and backward, each one boundary activation.
        formula: what comes on top of the work, in symbols.
        source: where it comes from.
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

    @property
    def span_bubble_rate(self) -> float | None:
        """(span − work) / span (Qi et al. 2024, Table 5)."""
        return None if self.span is None else 1 - self.ideal / self.span


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
    """What formulas tell of a schedule; None where it has none, or where stages or links differ or sends block.

    Args:
        name: a name of the catalogue, or an alias; sizes must be legal for it (`catalogue.build` refuses others).
        ranks, micro_batches, chunks, waves, token_slices: as in `catalogue.build`.
        costs: the same for every stage and link.

    Raises:
        LabError: for an unknown name.
    """
    schedule = entry(name)
    law = LAWS.get(schedule.name)
    times = _equal(costs)
    if law is None or times is None:
        return None
    one_pipe = schedule.name not in ("chimera", "dualpipe")
    v = (chunks or (2 * waves if waves else schedule.chunks)) if one_pipe else 1
    forward, for_input, for_weight, backward, latency, both, kept, kept_for_weight = times
    together = micro_batches // max(1, micro_batches // ranks)
    slices = (token_slices or TOKEN_SLICES) if schedule.name == "terapipe" else 1
    case = Case(
        ranks, micro_batches, v, together, forward, for_input, for_weight, backward, latency, both, kept,
        kept_for_weight, slices,
    )  # fmt: skip
    work = micro_batches * v * (forward + backward)
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
        law.domain(),
    )


def _equal(costs: Costs) -> tuple[float, ...] | None:
    """F, I, W, B, c, F&B, k, w, if they are the same for every stage and link."""
    per_stage = (costs.forward, costs.backward_input, costs.backward_weight, costs.kept_for_input,
                 costs.kept_for_weight, costs.backward, costs.overlapped, costs.latency, costs.bandwidth)  # fmt: skip
    if any(isinstance(value, tuple) for value in per_stage) or costs.sends != "buffered" or costs.slice_times:
        return None
    names = ("forward", "backward_input", "backward_weight", "backward")
    forward, for_input, for_weight, backward = (costs.of_stage(one, 0) for one in names)
    both = forward + backward if costs.overlapped is None else costs.of_stage("overlapped", 0)
    kept = (costs.of_stage(one, 0) for one in ("kept_for_input", "kept_for_weight"))
    return (forward, for_input, for_weight, backward, costs.delay(0, 1), both, *kept)
