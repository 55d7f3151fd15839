"""Lab 08: whether measurements prove that one layout is faster than another.

Layer 6 (labs). Invariant: rounds are compared in pairs, because what slows the machine down slows both of a round.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence

from dlojz.labs.compromise_answers import Case, Numbers, PartMistake, by_parts
from dlojz.labs.exercise import Exercise
from dlojz.labs.verdict import Said
from dlojz.text import say


def compare_rounds(first_s: Sequence[float], second_s: Sequence[float]) -> Numbers:
    """(ratio, p): median of second over first, round by round, and how likely so many wins are by chance.

    p is that of the two-sided sign test: if neither were faster, each round that is no tie would be won by either with
    probability 1/2.

    Source: Conover 1999, "Practical Nonparametric Statistics", §3.4.
    """
    ratios = [second / first for first, second in zip(first_s, second_s, strict=True)]
    return statistics.median(ratios), min(1.0, 2 * _tail(*_wins(first_s, second_s)))


def _wins(first_s: Sequence[float], second_s: Sequence[float]) -> tuple[int, int]:
    """Rounds won by the one that won more, and rounds that are no ties."""
    pairs = list(zip(first_s, second_s, strict=True))
    ahead, behind = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
    return max(ahead, behind), ahead + behind


def _tail(wins: int, rounds: int) -> float:
    """Probability of at least so many heads."""
    return sum(math.comb(rounds, k) for k in range(wins, rounds + 1)) / 2**rounds


def _rounds() -> Iterator[Case]:
    """Noise that hits both of a round alike, and is larger than what sets them apart."""
    dice = random.Random(4)
    for count, edge in ((8, 1.05), (12, 1.02), (9, 1.0), (15, 0.97), (7, 1.3), (10, 1.01)):
        first, second = [], []
        for _ in range(count):
            weather = dice.choice((1.0, 1.1, 1.6, 2.3))
            first.append(round(0.02 * weather * dice.uniform(0.98, 1.02), 5))
            second.append(round(0.02 * edge * weather * dice.uniform(0.98, 1.02), 5))
        second[0] = first[0]  # a tie
        yield first, second


def _told_rounds(case: Case) -> str:
    first, second = case
    return say(
        en=f"For the rounds {first} and {second}",
        fr=f"Pour les tours {first} et {second}",
    )


def _ratio(way: Callable[[Sequence[float]], float], english: str, french: str) -> PartMistake:
    return PartMistake(0, lambda first, second: way(second) / way(first), Said(english, french))


_UNPAIRED = (
    "compares all rounds of one with all rounds of the other. A slow moment of the machine hits both of a round: take "
    "the ratio within each round first, then the median.",
    "compare tous les tours de l’une à tous ceux de l’autre. Un moment lent de la machine touche les deux mesures d’un "
    "tour : prenez d’abord le rapport dans chaque tour, puis la médiane.",
)

PAIRED = Exercise(
    id="paired-rounds",
    title=Said("is the first really faster?", "la première est-elle vraiment plus rapide ?"),
    judge=by_parts(
        compare_rounds,
        cases=_rounds,
        names=(Said("the ratio", "le rapport"), Said("p", "p")),
        told=_told_rounds,
        mistakes=(
            PartMistake(
                0,
                lambda first, second: statistics.median([a / b for a, b in zip(first, second, strict=True)]),
                Said(
                    "Your ratio is the other way round: second over first, above 1 where the first is faster.",
                    "Votre rapport est à l’envers : seconde sur première, plus grand que 1 si la première est la plus "
                    "rapide.",
                ),
            ),
            _ratio(
                statistics.median, f"Your ratio of medians {_UNPAIRED[0]}", f"Votre rapport de médianes {_UNPAIRED[1]}"
            ),
            _ratio(
                statistics.fmean, f"Your ratio of means {_UNPAIRED[0]}", f"Votre rapport de moyennes {_UNPAIRED[1]}"
            ),
            _ratio(min, f"Your ratio of the best times {_UNPAIRED[0]}", f"Votre rapport des minima {_UNPAIRED[1]}"),
            PartMistake(
                0,
                lambda first, second: statistics.fmean([b / a for a, b in zip(first, second, strict=True)]),
                Said(
                    "You take the mean of the ratios: one disturbed round moves it as far as it will; take the median.",
                    "Vous prenez la moyenne des rapports : un seul tour perturbé la déplace à son gré ; prenez la "
                    "médiane.",
                ),
            ),
            PartMistake(
                1,
                lambda first, second: _tail(*_wins(first, second)),
                Said(
                    "Your p is one-sided: you did not know beforehand which would win, so count both sides (and at "
                    "most 1).",
                    "Votre p est unilatéral : vous ne saviez pas d’avance laquelle gagnerait ; comptez les deux côtés "
                    "(et 1 au plus).",
                ),
            ),
            PartMistake(
                1,
                lambda first, second: 2 * _tail(*_wins(first, second)),
                Said(
                    "A probability is at most 1: where both win equally often, the two sides overlap.",
                    "Une probabilité vaut 1 au plus : quand les deux gagnent aussi souvent, les deux côtés se "
                    "recouvrent.",
                ),
            ),
            PartMistake(
                1,
                lambda first, second: min(1.0, 2 * _tail(_wins(first, second)[0], len(first))),
                Said(
                    "You count ties among the rounds: a tie speaks for neither, leave it out.",
                    "Vous comptez les ex æquo parmi les tours : un ex æquo ne parle pour aucune, laissez-le de côté.",
                ),
            ),
            PartMistake(
                1,
                lambda first, second: min(
                    1.0, 2 * math.comb(*reversed(_wins(first, second))) / 2 ** _wins(first, second)[1]
                ),
                Said(
                    "You take the probability of exactly so many wins; the question is about so many or more.",
                    "Vous prenez la probabilité d’exactement autant de victoires ; il s’agit d’autant ou plus.",
                ),
            ),
            PartMistake(
                1,
                lambda first, second: 1 - min(1.0, 2 * _tail(*_wins(first, second))),
                Said(
                    "You return 1 − p: small is to mean that chance would hardly do it.",
                    "Vous renvoyez 1 − p : une petite valeur doit dire que le hasard y arriverait à peine.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: a ratio that the machine's moods leave alone, and how far to trust its sign.",
        "Exact : un rapport insensible aux humeurs de la machine, et la confiance que mérite son signe.",
    ),
    hints=(
        Said(
            "Go round by round: in each, one of the two wins. How often would a coin, tossed once per round, come down "
            "at least as one-sided?",
            "Allez tour par tour : à chacun, l’une des deux gagne. À quelle fréquence une pièce, lancée une fois par "
            "tour, tomberait-elle au moins aussi souvent du même côté ?",
        ),
        Said(
            "n = rounds that are no tie, w = the larger number of wins: p = min(1, 2 · Σ_{k ≥ w} math.comb(n, k) / "
            "2ⁿ). The ratio is statistics.median of second / first.",
            "n = tours sans ex æquo, w = le plus grand nombre de victoires : p = min(1, 2 · Σ_{k ≥ w} math.comb(n, k) "
            "/ 2ⁿ). Le rapport est statistics.median de seconde / première.",
        ),
    ),
)
