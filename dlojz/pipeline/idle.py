"""Why a rank does not compute: every moment of idle time, with its cause.

Layer 2. Invariant: the gaps of a rank sum to its idle time, each moment has one cause, and nothing but the order of the
rank, the times and the delays of messages decides which:

| where the rank waits | cause |
|--|--|
| before its first backward | warm-up: the pipeline fills |
| after its last action, until the last rank is done | barrier: only the optimizer step ends that wait |
| else, after its last forward | drain: the pipeline empties |
| else, between forwards and backwards | imbalance: another rank was slower, or the order made it later |
| at the end of any of these waits, while the message that ends it is under way | latency |

So latency is what would vanish, here and now, if that one message took no time: min(gap, its delay). Delays that were
added up on other ranks before are part of the other causes.

Source: own definition, from the kinds of idle time that Narayanan et al. 2021 (arXiv 2104.04473, §2.2: flush), Fan et
al. 2021 (DAPPLE, §4: warm-up, steady phase, ending) and Qi et al. 2024 (arXiv 2401.10241, §4: optimizer barrier) name.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from dlojz.pipeline.action import BACKWARD, BACKWARD_INPUT, FORWARD, LOAD
from dlojz.pipeline.costs import Costs
from dlojz.pipeline.rendezvous import programs_of
from dlojz.pipeline.timeline import Timeline
from dlojz.schema import LabError, one_of
from dlojz.text import say

WARM_UP, LATENCY, IMBALANCE, DRAIN, BARRIER = CAUSES = ("warm-up", "latency", "imbalance", "drain", "barrier")
"""Every cause of idle time, in the order in which figures stack them."""


class Gap(NamedTuple):
    """Time in which a rank does not compute, for one cause.

    `before` is the number of the action that ends the wait, None after the rank's last action. A wait of which a part
    is latency is two gaps, one after the other.
    """

    rank: int
    start: float
    end: float
    cause: str
    before: int | None

    @property
    def duration(self) -> float:
        """How long it lasts, in the unit of the timeline."""
        return self.end - self.start


def title_of(cause: str) -> str:
    """What a cause is called in figures and tables.

    Raises:
        LabError: if there is no such cause.
    """
    titles = {
        WARM_UP: say(en="warm-up", fr="démarrage"),
        LATENCY: say(en="latency", fr="latence"),
        IMBALANCE: say(en="imbalance", fr="déséquilibre"),
        DRAIN: say(en="drain", fr="vidange"),
        BARRIER: say(en="barrier", fr="barrière"),
    }
    if cause not in titles:
        raise LabError(one_of("cause of idle time", cause, CAUSES))
    return titles[cause]


def meaning_of(cause: str) -> str:
    """One sentence that tells what a cause means.

    Raises:
        LabError: if there is no such cause.
    """
    meanings = {
        WARM_UP: say(
            en="The rank waits for its first work, or for its first gradient: the pipeline fills.",
            fr="Le rang attend son premier travail, ou son premier gradient : le pipeline se remplit.",
        ),
        LATENCY: say(
            en="The message that the rank waits for is under way.",
            fr="Le message que le rang attend est en chemin.",
        ),
        IMBALANCE: say(
            en="Between forwards and backwards, the rank waits for a slower one, or for one that works in another "
            "order.",
            fr="Entre passes avant et passes arrière, le rang en attend un autre, plus lent, ou qui suit un autre "
            "ordre.",
        ),
        DRAIN: say(
            en="The rank has run all its forwards and waits for gradients: the pipeline empties.",
            fr="Le rang a fini ses passes avant et attend des gradients : le pipeline se vide.",
        ),
        BARRIER: say(
            en="The rank is done and waits for the others, because the optimizer steps on all of them together.",
            fr="Le rang a fini et attend les autres, car l’optimiseur avance sur tous à la fois.",
        ),
    }
    if cause not in meanings:
        raise LabError(one_of("cause of idle time", cause, CAUSES))
    return meanings[cause]


def idle_by_cause(timeline: Timeline, costs: Costs | None = None) -> tuple[dict[str, float], ...]:
    """Per rank, the idle time of each cause (all of `CAUSES`, 0 included); their sum is the rank's `timeline.idle`.

    Args:
        timeline: simulated or measured.
        costs: tells how long messages take; by default those that were simulated. A measured timeline has none, so
            all its waits count as something else than latency unless costs are given.
    """
    found: tuple[dict[str, float], ...] = tuple(dict.fromkeys(CAUSES, 0.0) for _ in range(timeline.schedule.ranks))
    for gap in gaps(timeline, costs):
        found[gap.rank][gap.cause] += gap.duration
    return found


def gaps(timeline: Timeline, costs: Costs | None = None) -> tuple[Gap, ...]:
    """All waits of all ranks within the makespan, each with its cause, in order of time on each rank.

    Args:
        timeline: simulated or measured.
        costs: as in `idle_by_cause`.
    """
    schedule = timeline.schedule
    costs = costs or timeline.costs
    under_way = _delays(timeline, costs) if costs else [0.0] * len(schedule.actions)
    starts, ends = timeline.starts.tolist(), timeline.ends.tolist()
    first, last = timeline.start, timeline.start + timeline.makespan
    found: list[Gap] = []
    for rank, (begin, stop) in enumerate(pairwise(schedule.first_of_rank)):
        forwards = sum(e.kind == FORWARD for action in schedule.orders[rank] for e in action.elements)
        backwards, at = 0, first
        for number in range(begin, stop):
            if starts[number] > at:
                cause = WARM_UP if not backwards else IMBALANCE if forwards else DRAIN
                arrives = starts[number] - min(starts[number] - at, under_way[number])
                parts = (Gap(rank, at, arrives, cause, number), Gap(rank, arrives, starts[number], LATENCY, number))
                found += [gap for gap in parts if gap.end > gap.start]
            at = ends[number]
            for element in schedule.actions[number].elements:
                forwards -= element.kind == FORWARD
                backwards += element.kind in (BACKWARD, BACKWARD_INPUT)
        if last > at:
            found.append(Gap(rank, at, last, BARRIER, None))
    return tuple(found)


def _delays(timeline: Timeline, costs: Costs) -> list[float]:
    """For each action, how long the message was under way that it got last; 0 where it takes none."""
    schedule = timeline.schedule
    graph, ends = schedule.graph, timeline.ends.tolist()
    if costs.sends != "buffered":
        return _blocking_delays(timeline, costs)
    rank = graph.rank.tolist()
    latest = [float("-inf")] * graph.actions
    delays = [0.0] * graph.actions
    inputs = [(index, needed) for index, needed in enumerate(graph.needs) if needed < graph.actions]
    for index, needed in (*inputs, *graph.also):
        fetched = schedule.actions[needed].kind == LOAD
        delay = costs.eviction_transfer if fetched else costs.delay(rank[needed], rank[index])
        if ends[needed] + delay > latest[index]:
            latest[index], delays[index] = ends[needed] + delay, delay
    return delays


def _blocking_delays(timeline: Timeline, costs: Costs) -> list[float]:
    """Where sends block, a rank also waits while it sends: all that it passes between two actions counts."""
    schedule = timeline.schedule
    rank = schedule.graph.rank.tolist()
    delays = [0.0] * len(schedule.actions)
    for program in programs_of(schedule, costs.sends == "paired"):
        passed = 0.0
        for step in program:
            if isinstance(step, int):
                delays[step], passed = passed, 0.0
            else:
                passed += max(costs.delay(rank[message.producer], rank[message.consumer]) for message in step)
    return delays
