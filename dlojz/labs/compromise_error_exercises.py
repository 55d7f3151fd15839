"""Lab 08: whether a model says more than a constant does.

Layer 6 (labs). Invariant: an error is counted on rows that nothing was fitted on.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from dlojz.labs.compromise_answers import Case, Numbers, PartMistake, by_parts
from dlojz.labs.exercise import Exercise
from dlojz.labs.verdict import Said
from dlojz.text import say


class Row(NamedTuple):
    """A published measurement with its prediction.

    Args:
        work: operations of a step, per GPU.
        measured_s, predicted_s: seconds of a step.
        fitted: whether the model's parameters were fitted on this row.
    """

    work: float
    measured_s: float
    predicted_s: float
    fitted: bool


def held_out_errors(rows: Sequence[Row]) -> Numbers:
    """(model, constant): mean absolute relative errors on the rows that nothing was fitted on.

    The constant is one rate per GPU, the median of work over measured seconds of the fitted rows.

    Source: `dlojz.plan.validation`.
    """
    held = [row for row in rows if not row.fitted]
    rate = statistics.median(row.work / row.measured_s for row in rows if row.fitted)
    return (
        _mean_error(held, lambda row: row.predicted_s),
        _mean_error(held, lambda row: row.work / rate),
    )


def _mean_error(rows: Sequence[Row], guess: Callable[[Row], float]) -> float:
    return statistics.fmean(abs(guess(row) / row.measured_s - 1) for row in rows)


def _trivial(rows: Sequence[Row], rate_of: Callable[[Sequence[Row]], float]) -> float:
    rate = rate_of(rows)
    return _mean_error([row for row in rows if not row.fitted], lambda row: row.work / rate)


def _rates(rows: Sequence[Row]) -> list[float]:
    return [row.work / row.measured_s for row in rows]


def _tables() -> Iterator[tuple[list[Row]]]:
    dice = random.Random(9)
    for count in (11, 24, 17):
        rows = []
        for number in range(count):
            fitted = number % 3 != 0
            measured = dice.uniform(5.0, 90.0)
            off = dice.uniform(0.97, 1.05) if fitted else dice.uniform(0.8, 1.15)
            rows.append(Row(measured * dice.uniform(1.1e14, 1.6e14), measured, measured * off, fitted))
        dice.shuffle(rows)
        yield (rows,)


def _told_table(case: Case) -> str:
    held = sum(not row.fitted for row in case[0])
    return say(
        en=f"For a table of {len(case[0])} rows, of which {held} are held out",
        fr=f"Pour une table de {len(case[0])} lignes, dont {held} mises de côté",
    )


def _on(part: int, which: Callable[[Row], bool], english: str, french: str) -> PartMistake:
    def way(rows: Sequence[Row]) -> float:
        some = [row for row in rows if which(row)]
        rate = statistics.median(_rates([row for row in rows if row.fitted]))
        return _mean_error(some, (lambda row: row.predicted_s) if part == 0 else (lambda row: row.work / rate))

    return PartMistake(part, way, Said(english, french))


HELD_OUT = Exercise(
    id="held-out",
    title=Said("does the model add anything?", "le modèle apporte-t-il quelque chose ?"),
    judge=by_parts(
        held_out_errors,
        cases=_tables,
        names=(
            Said("the model's error", "l’erreur du modèle"),
            Said("the constant's error", "l’erreur du débit constant"),
        ),
        told=_told_table,
        mistakes=(
            _on(
                0,
                lambda row: True,
                "You count all rows: on those that the parameters were fitted on, a small error proves nothing.",
                "Vous comptez toutes les lignes : sur celles qui ont servi à ajuster les paramètres, une petite erreur "
                "ne prouve rien.",
            ),
            _on(
                0,
                lambda row: row.fitted,
                "You count the fitted rows, the very ones that prove nothing: take the others.",
                "Vous comptez les lignes ajustées, justement celles qui ne prouvent rien : prenez les autres.",
            ),
            PartMistake(
                0,
                lambda rows: statistics.fmean(row.predicted_s / row.measured_s - 1 for row in rows if not row.fitted),
                Said(
                    "You leave the sign: errors of +20% and −20% would cancel out. That is the bias; take absolute "
                    "values first.",
                    "Vous gardez le signe : +20 % et −20 % se compenseraient. C’est le biais ; prenez d’abord les "
                    "valeurs absolues.",
                ),
            ),
            PartMistake(
                0,
                lambda rows: statistics.fmean(
                    abs(row.measured_s / row.predicted_s - 1) for row in rows if not row.fitted
                ),
                Said(
                    "You divide by the prediction: a model that foretells endless steps would be off by 100% at most. "
                    "Divide by what was measured.",
                    "Vous divisez par la prédiction : un modèle qui prédirait des pas sans fin ne se tromperait que de "
                    "100 %. Divisez par la mesure.",
                ),
            ),
            PartMistake(
                0,
                lambda rows: statistics.fmean(abs(row.predicted_s - row.measured_s) for row in rows if not row.fitted),
                Said(
                    "Your error is in seconds: long steps would decide alone. Divide by what was measured.",
                    "Votre erreur est en secondes : les longs pas décideraient seuls. Divisez par la mesure.",
                ),
            ),
            _on(
                1,
                lambda row: True,
                "The constant, too, is judged on the held-out rows; you count all of them.",
                "Le débit constant aussi se juge sur les lignes mises de côté ; vous les comptez toutes.",
            ),
            PartMistake(
                1,
                lambda rows: _trivial(rows, lambda some: statistics.median(_rates(some))),
                Said(
                    "Your constant has seen the held-out rows: its rate, too, comes from the fitted ones alone.",
                    "Votre constante a vu les lignes mises de côté : son débit aussi vient des seules lignes ajustées.",
                ),
            ),
            PartMistake(
                1,
                lambda rows: _trivial(rows, lambda some: statistics.fmean(_rates([row for row in some if row.fitted]))),
                Said(
                    "You take the mean rate of the fitted rows; the median is asked for, which no odd row can move.",
                    "Vous prenez le débit moyen des lignes ajustées ; on demande la médiane, qu’une ligne aberrante ne "
                    "déplace pas.",
                ),
            ),
            PartMistake(
                1,
                lambda rows: _trivial(
                    rows, lambda some: statistics.median(_rates([row for row in some if not row.fitted]))
                ),
                Said(
                    "Your constant is fitted on the very rows that judge it; take its rate from the fitted ones.",
                    "Votre constante est ajustée sur les lignes mêmes qui la jugent ; prenez son débit sur les lignes "
                    "ajustées.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: only what it has not seen judges a model, and only what a constant cannot do is its own.",
        "Exact : seul ce qu’il n’a pas vu juge un modèle, et n’est à lui que ce qu’une constante ne fait pas.",
    ),
    hints=(
        Said(
            "Two lists: the rows that were fitted on, and the others. From which does the constant take its rate, and "
            "on which are both judged?",
            "Deux listes : les lignes ajustées et les autres. Sur laquelle la constante prend-elle son débit, et sur "
            "laquelle juge-t-on les deux ?",
        ),
        Said(
            "rate = statistics.median(work / measured_s) of the fitted rows; the constant predicts work / rate. Both "
            "errors are the mean of abs(predicted / measured − 1) over the rows that are not fitted.",
            "rate = statistics.median(work / measured_s) des lignes ajustées ; la constante prédit work / rate. Les "
            "deux erreurs sont la moyenne de abs(prédit / mesuré − 1) sur les lignes non ajustées.",
        ),
    ),
)
