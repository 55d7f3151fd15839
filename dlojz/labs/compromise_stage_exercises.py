"""Lab 08: stages and submeshes by dynamic programming.

Layer 6 (labs). Invariant: the reference is Alpa's outer level (`dlojz.plan.alpa.inter_operator`); the wrong ways are
the same programme with one thing left out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import cache

from dlojz.labs.compromise_answers import Case, PartMistake, by_parts
from dlojz.labs.exercise import Exercise
from dlojz.labs.verdict import Said
from dlojz.plan.alpa.inter_operator import StageOption, pipeline
from dlojz.plan.alpa.pipeline_plan import PipelinePlan
from dlojz.text import say

TimeOf = Callable[[int, int, int], float]
"""Seconds of a stage for one micro-batch: first layer, last layer (included), GPUs."""


class Stages:
    """Times of stages whose layers weigh so much, on GPUs that get in each other's way.

    Args:
        work: of each layer, in any unit of time of one GPU.
        efficiency: of 1, 2, 4, … GPUs that share a stage.
        title: as a table shows it.
    """

    def __init__(self, work: tuple[float, ...], efficiency: tuple[float, ...], title: str = "") -> None:
        self.work, self.efficiency, self.title = work, efficiency, title

    @property
    def layers(self) -> int:
        """How many."""
        return len(self.work)

    def __call__(self, first: int, last: int, gpus: int) -> float:
        """Time of a stage for one micro-batch."""
        return sum(self.work[first : last + 1]) / (gpus * self.efficiency[gpus.bit_length() - 1])

    def __repr__(self) -> str:
        return self.title or f"Stages({self.work}, {self.efficiency})"


EIGHT, FALLING = (1.0,) * 8, (1.0, 0.9, 0.75)
KNOWN: dict[str, tuple[Stages, int, int]] = {
    "A": (Stages(EIGHT, (1.0, 1.0, 1.0), "A"), 4, 8),
    "B": (Stages(EIGHT, FALLING, "B"), 4, 8),
    "C": (Stages(EIGHT, FALLING, "C"), 4, 1),
    "D": (Stages(EIGHT, FALLING, "D"), 4, 64),
    "E": (Stages((4.0, 1.0, 1.0, 1.0, 1.0), FALLING, "E"), 4, 16),
    "F": (Stages((1.0, 1.0, 1.0, 1.0, 4.0), (1.0, 0.9, 0.8, 0.6), "F"), 8, 32),
}
"""Times, GPUs and micro-batches; their optima (tests/plan) were found by trying every plan."""


def plan_of(time_of: TimeOf, layers: int, gpus: int, micro_batches: int) -> PipelinePlan:
    """The package's plan."""
    return pipeline(
        lambda first, last, shape: (StageOption(time_of(first, last, shape.num_devices)),),
        layers,
        micro_batches,
        1,
        gpus,
    )


def shortest_step(time_of: TimeOf, layers: int, gpus: int, micro_batches: int) -> tuple[float]:
    """The least Σ t + (B − 1) · max t over all plans that use every layer once, in order, and all GPUs.

    Source: Zheng et al. 2022 (Alpa, OSDI 22), §5.2, equations 2 to 5.
    """
    return (plan_of(time_of, layers, gpus, micro_batches).step_s,)


def _least_sums(time_of: TimeOf, layers: int, gpus: int, *, spare: bool, single: bool) -> Iterator[tuple[float, float]]:
    """(t_max, least sum of stages none slower) for every t_max that a stage could have."""
    sizes = [1] if single else [2**power for power in range(gpus.bit_length())]
    times = {
        (first, last, size): time_of(first, last, size)
        for first in range(layers)
        for last in range(first, layers)
        for size in sizes
    }
    for t_max in sorted({*times.values(), math.inf}):

        @cache
        def least(first: int, left: int, t_max: float = t_max) -> float:
            if first == layers:
                return 0.0 if spare or not left else math.inf
            options = (
                times[first, last, size] + least(last + 1, left - size)
                for size in sizes
                if size <= left
                for last in range(first, layers)
                if times[first, last, size] <= t_max
            )
            return min(options, default=math.inf)

        yield t_max, least(0, gpus)


def _way(
    total: Callable[[float, float, int], float], *, spare: bool = False, single: bool = False
) -> Callable[..., float]:
    """A wrong total of sum, maximum and micro-batches, or a wrong space of plans."""

    def found(time_of: TimeOf, layers: int, gpus: int, micro_batches: int) -> float:
        pairs = [
            pair
            for pair in _least_sums(time_of, layers, gpus, spare=spare, single=single)
            if math.isfinite(pair[0]) and math.isfinite(pair[1])
        ]
        return min((total(added, t_max, micro_batches) for t_max, added in pairs), default=math.nan)

    return found


def _right_total(added: float, t_max: float, micro_batches: int) -> float:
    return added + (micro_batches - 1) * t_max


def _unlimited(time_of: TimeOf, layers: int, gpus: int, micro_batches: int) -> float:
    """The least sum whatever t_max, with the smallest t_max besides."""
    pairs = list(_least_sums(time_of, layers, gpus, spare=False, single=False))
    return pairs[-1][1] + (micro_batches - 1) * pairs[0][0]


def _greedy(time_of: TimeOf, layers: int, gpus: int, micro_batches: int) -> float:
    """The best number of equal stages: so many layers, so many GPUs each."""
    found = []
    for count in range(1, min(layers, gpus) + 1):
        if layers % count == 0 and gpus % count == 0 and (gpus // count).bit_count() == 1:
            each = layers // count
            times = [time_of(at, at + each - 1, gpus // count) for at in range(0, layers, each)]
            found.append(sum(times) + (micro_batches - 1) * max(times))
    return min(found)


def _cases() -> Iterator[Case]:
    for time_of, gpus, micro_batches in KNOWN.values():
        yield time_of, time_of.layers, gpus, micro_batches
    dice = random.Random(11)
    for layers, gpus, micro_batches in ((4, 4, 3), (6, 8, 10), (5, 2, 7), (2, 8, 5)):
        work = tuple(float(dice.randrange(1, 9)) for _ in range(layers))
        # Four GPUs take longer than two: a plan of few layers would rather spare some.
        yield Stages(work, (1.0, 0.85, 0.35, 0.15)), layers, gpus, micro_batches


def _told(case: Case) -> str:
    time_of, layers, gpus, micro_batches = case
    name = f"{time_of} " if time_of.title else ""
    return say(
        en=f"Case {name}({layers} layers of work {list(time_of.work)}, {gpus} GPUs, efficiencies "
        f"{list(time_of.efficiency)}, {micro_batches} micro-batches)",
        fr=f"Cas {name}({layers} couches de travail {list(time_of.work)}, {gpus} GPU, efficacités "
        f"{list(time_of.efficiency)}, {micro_batches} micro-batches)",
    )


def _mistakes() -> Iterator[PartMistake]:
    ways = (
        (
            _way(lambda added, t_max, b: added),
            "You minimise the sum of the stages alone: the slowest one sets the pace of the micro-batches that follow, "
            "(B − 1) · max t.",
            "Vous ne minimisez que la somme des étages : le plus lent donne la cadence des micro-batches suivants, "
            "(B − 1) · max t.",
        ),
        (
            _way(lambda added, t_max, b: b * t_max),
            "You count B · max t: the first micro-batch goes through every stage, Σ t, before B − 1 others follow at "
            "the pace of the slowest.",
            "Vous comptez B · max t : le premier micro-batch traverse tous les étages, Σ t, avant que B − 1 autres "
            "suivent au rythme du plus lent.",
        ),
        (
            _way(lambda added, t_max, b: added + b * t_max),
            "One micro-batch too many: the first is in Σ t already, so the slowest stage counts B − 1 times more.",
            "Un micro-batch de trop : le premier est déjà dans Σ t, l’étage le plus lent compte donc B − 1 fois de "
            "plus.",
        ),
        (
            _unlimited,
            "Your sum ignores t_max: for a given t_max, no stage may be slower; leave those out in the recursion.",
            "Votre somme ignore t_max : pour un t_max donné, aucun étage ne peut être plus lent ; écartez ceux-là dans "
            "la récursion.",
        ),
        (
            _way(_right_total, spare=True),
            "Your plans leave GPUs without work: at the end of the recursion, no layer and no GPU may be left.",
            "Vos plans laissent des GPU sans travail : à la fin de la récursion, il ne doit rester ni couche ni GPU.",
        ),
        (
            _greedy,
            "You cut into equal stages only; layers weigh differently, and so may stages and their submeshes.",
            "Vous ne coupez qu’en étages égaux ; les couches n’ont pas le même poids, les étages et leurs "
            "sous-maillages non plus.",
        ),
        (
            lambda time_of, layers, gpus, b: b * time_of(0, layers - 1, gpus),
            "You put all layers into one stage on all GPUs; with many micro-batches a pipeline of smaller ones wins.",
            "Vous mettez toutes les couches dans un seul étage, sur tous les GPU ; avec beaucoup de micro-batches, un "
            "pipeline d’étages plus petits gagne.",
        ),
    )
    for way, english, french in ways:
        yield PartMistake(0, way, Said(english, french))


STAGES = Exercise(
    id="pipeline-stages",
    title=Said("stages by dynamic programming", "des étages par programmation dynamique"),
    judge=by_parts(
        shortest_step,
        cases=_cases,
        names=(Said("the step", "la durée du pas"),),
        told=_told,
        mistakes=tuple(_mistakes()),
    ),
    praise=Said(
        "Right, in the six known cases and in four others: that is Alpa's outer level, in a dozen lines.",
        "Exact, dans les six cas connus et dans quatre autres : c’est le niveau externe d’Alpa, en une douzaine de "
        "lignes.",
    ),
    hints=(
        Said(
            "First fix t_max. What is the least sum of stages, none slower than t_max, for the layers from `first` on "
            "with `left` GPUs? It is made of a first stage and of the same question, smaller.",
            "Fixez d’abord t_max. Quelle est la plus petite somme d’étages, aucun n’étant plus lent que t_max, pour "
            "les couches à partir de `first`, avec `left` GPU ? Elle se compose d’un premier étage et de la même "
            "question, en plus petit.",
        ),
        Said(
            "least(first, left) = min over last ≥ first and n in 1, 2, 4, … ≤ left of time_of(first, last, n) + "
            "least(last + 1, left − n), for the times ≤ t_max; least(layers, 0) = 0, else infinite. Then the least of "
            "least(0, gpus) + (micro_batches − 1) · t_max over all t_max that time_of can give. lru_cache helps.",
            "least(first, left) = min, pour last ≥ first et n parmi 1, 2, 4, … ≤ left, de time_of(first, last, n) + "
            "least(last + 1, left − n), pour les durées ≤ t_max ; least(layers, 0) = 0, sinon infini. Puis le minimum "
            "de least(0, gpus) + (micro_batches − 1) · t_max sur tous les t_max que time_of peut donner. lru_cache "
            "est utile.",
        ),
    ),
)
