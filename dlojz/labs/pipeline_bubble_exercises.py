"""Lab 05: how long a pipeline's step takes, and its bubble, told in the two ways that are in use.

Layer 6 (labs). Invariant: the references are the published closed forms of `dlojz.pipeline.closed_forms`; the lab lays
them over simulated steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said
from dlojz.pipeline.closed_forms import fraction, overhead, total_time
from dlojz.text import say

_SIZES = ((4, 9), (4, 8), (2, 4), (8, 16), (5, 1), (1, 6))
_TIMES = ((1, 2), (3, 5), (2, 2))


def pipeline_step(ranks: int, micro_batches: int, forward: float, backward: float) -> tuple[float, float, float]:
    """Of GPipe or 1F1B with equal stages: length of the step, bubble fraction, bubble overhead.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), §2.2.1, for the length and the overhead; Huang et al. 2019 (arXiv
    1811.06965), §2.3, for the fraction.
    """
    return (
        total_time(ranks, micro_batches, forward, backward),
        fraction(ranks, micro_batches),
        overhead(ranks, micro_batches),
    )


def _pipelines() -> Iterator[tuple[int, int, int, int]]:
    for ranks, micro_batches in _SIZES:
        for forward, backward in _TIMES:
            yield ranks, micro_batches, forward, backward


_judge_length = by_reference(
    total_time,
    cases=_pipelines,
    mistakes=(
        Mistake(
            lambda p, m, f, b: m * p * (f + b),
            Said(
                "That length is the naive way's, one stage at a time: m·p·(t_f + t_b). In a pipeline the stages work "
                "at the same time, on different micro-batches.",
                "Cette durée est celle de la manière naïve, un étage à la fois : m·p·(t_f + t_b). Dans un pipeline, "
                "les étages travaillent en même temps, sur des micro-batches différents.",
            ),
        ),
        Mistake(
            lambda p, m, f, b: m * (f + b),
            Said(
                "That length is the work of one stage, the ideal time. The last stage cannot begin before the first "
                "micro-batch has crossed the others: add the bubble.",
                "Cette durée est le travail d’un étage, la durée idéale. Le dernier étage ne peut pas commencer avant "
                "que le premier micro-batch ait traversé les autres : ajoutez la bulle.",
            ),
        ),
        Mistake(
            lambda p, m, f, b: (m + p) * (f + b),
            Said(
                "The length is one too many: the first micro-batch crosses p stages, and m − 1 others follow it.",
                "La durée compte un tour de trop : le premier micro-batch traverse p étages, puis m − 1 autres le "
                "suivent.",
            ),
        ),
        Mistake(
            lambda p, m, f, b: (m + p - 1) * f + m * b,
            Said(
                "Your length counts the filling, but not the draining: the gradient of the last micro-batch goes back "
                "through all stages too.",
                "Votre durée compte le remplissage, mais pas la vidange : le gradient du dernier micro-batch retraverse"
                " lui aussi tous les étages.",
            ),
        ),
        Mistake(
            lambda p, m, f, b: (m + p - 1) * f,
            Said(
                "The backward pass is missing: each stage also spends t_b on every micro-batch.",
                "Il manque la passe arrière : chaque étage passe aussi t_b sur chaque micro-batch.",
            ),
        ),
    ),
)
_judge_fraction = by_reference(
    lambda p, m, f, b: fraction(p, m),
    cases=_pipelines,
    mistakes=(
        Mistake(
            lambda p, m, f, b: overhead(p, m),
            Said(
                "Your fraction is the overhead, idle time over work; the fraction compares with all the time there is: "
                "for 4 stages and 8 micro-batches, 3/11 and not 3/8.",
                "Votre fraction est le surcoût, l’attente rapportée au travail ; la fraction se rapporte à tout le "
                "temps disponible : pour 4 étages et 8 micro-batches, 3/11 et non 3/8.",
            ),
        ),
        Mistake(
            lambda p, m, f, b: 1 - fraction(p, m),
            Said(
                "Your fraction is the share of time in which the ranks compute; the bubble is the rest.",
                "Votre fraction est la part du temps où les rangs calculent ; la bulle est le reste.",
            ),
        ),
        Mistake(
            lambda p, m, f, b: (p - 1) * (f + b),
            Said(
                "Your fraction is a time, that of the bubble: divide it by the length of the step.",
                "Votre fraction est un temps, celui de la bulle : divisez-le par la durée du pas.",
            ),
        ),
    ),
)
_judge_overhead = by_reference(
    lambda p, m, f, b: overhead(p, m),
    cases=_pipelines,
    mistakes=(
        Mistake(
            lambda p, m, f, b: fraction(p, m),
            Said(
                "Your overhead is the fraction once more; the overhead is idle time over work, not over all time: it "
                "may well exceed 1.",
                "Votre surcoût est encore la fraction ; le surcoût, c’est l’attente rapportée au travail, et non au "
                "temps total : il peut dépasser 1.",
            ),
        ),
        Mistake(
            lambda p, m, f, b: 1 + overhead(p, m),
            Said(
                "Your overhead is all time over work; it is what exceeds 1: only the idle time counts.",
                "Votre surcoût est le temps total sur le travail ; c’est ce qui dépasse 1 : seule compte l’attente.",
            ),
        ),
    ),
)


def _judge(answer: Callable[..., Any]) -> None:
    _judge_length(lambda *case: _three(answer(*case))[0])
    _judge_fraction(lambda *case: _three(answer(*case))[1])
    _judge_overhead(lambda *case: _three(answer(*case))[2])


def _three(given: Any) -> tuple[Any, ...]:
    if given is None:
        raise Wrong(
            say(
                en="Your function returns nothing: end it with return.",
                fr="Votre fonction ne renvoie rien : terminez-la par return.",
            )
        )
    if not isinstance(given, tuple | list) or len(given) != 3:
        raise Wrong(
            say(
                en="Three numbers are expected, the length, the fraction, the overhead: return length, fraction, "
                "overhead.",
                fr="On attend trois nombres, la durée, la fraction et le surcoût : return length, fraction, overhead.",
            )
        )
    return tuple(given)


PIPELINE_BUBBLE = Exercise(
    id="pipeline-bubble",
    title=Said("the bubble by hand", "la bulle à la main"),
    judge=_judge,
    praise=Said(
        "Right: m micro-batches of work, p − 1 of bubble, whatever t_f and t_b. Whenever a bubble is quoted, ask: over "
        "what?",
        "Exact : m micro-batches de travail, p − 1 de bulle, quels que soient t_f et t_b. Devant une bulle annoncée, "
        "demandez toujours : rapportée à quoi ?",
    ),
    hints=(
        Said(
            "Follow the forward pass on the last stage: when does it get the first micro-batch, and how many has it "
            "then to pass? The backward is the mirror image. What exceeds the work is the bubble.",
            "Suivez la passe avant sur le dernier étage : quand reçoit-il le premier micro-batch, et combien en a-t-il "
            "ensuite à traiter ? La passe arrière en est l’image dans un miroir. Ce qui dépasse le travail est la "
            "bulle.",
        ),
        Said(
            "Length: (p − 1)·t_f until the last stage begins, then m·t_f; the same with t_b. The bubble is (p − 1)("
            "t_f + t_b): divide it by the length, then by the work, m(t_f + t_b).",
            "Durée : (p − 1)·t_f avant que le dernier étage commence, puis m·t_f ; de même avec t_b. La bulle est "
            "(p − 1)(t_f + t_b) : divisez-la par la durée, puis par le travail, m(t_f + t_b).",
        ),
    ),
)
