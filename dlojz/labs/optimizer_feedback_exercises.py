"""Lab 09: error feedback: what one message leaves unsaid, the next one says.

Layer 6 (labs). Invariant: an answer is used step after step, under several compressions, and held to all it says and
keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.judging import Mistake
from dlojz.labs.optimizer_sign_exercises import compress
from dlojz.labs.optimizer_trials import by_trial, normal, pair_of
from dlojz.labs.verdict import Said
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

Compress = Callable[["Tensor"], "Tensor"]
STEPS = 6


def feed_back(values: Tensor, error: Tensor, compress: Compress) -> tuple[Tensor, Tensor]:
    """What is said of the numbers and of what was left unsaid before, and what is left unsaid now.

    Source: Karimireddy et al. 2019, "Error Feedback Fixes SignSGD" (arXiv 1901.09847), algorithm EF-SGD.
    """
    told = compress(values + error)
    return told, values + error - told


def largest(values: Tensor) -> Tensor:
    """Another compression: all but the number of largest magnitude is set to zero."""
    import torch

    kept = torch.zeros_like(values)
    place = int(values.abs().argmax())
    kept[place] = values[place]
    return kept


def _use(answer: Callable[..., Any], seed: int, numel: int, compress: Compress) -> Tensor:
    """Everything told in some steps, and everything kept, end to end."""
    import torch

    error, seen = torch.zeros(numel), []
    for step in range(STEPS):
        told, error = pair_of(answer(normal(100 * seed + step, numel) + 0.5, error.clone(), compress), "(told, error)")
        for one in (told, error):
            if not isinstance(one, torch.Tensor) or one.shape != (numel,):
                raise Wrong(
                    say(
                        en=f"Both results have the shape of values, ({numel},), but one of yours is "
                        f"{tuple(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__}.",
                        fr=f"Les deux résultats ont la forme de values, ({numel},), mais l’un des vôtres est "
                        f"{tuple(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__}.",
                    )
                )
        seen += [told, error]
    return torch.cat(seen)


def _cases() -> Iterator[tuple[int, int, Compress]]:
    yield from ((1, 7, compress), (2, 40, compress), (3, 9, largest))


def _never_said(values: Tensor, error: Tensor, compress: Compress) -> tuple[Tensor, Tensor]:
    told = compress(values)
    return told, values - told


def _summed_never_said(values: Tensor, error: Tensor, compress: Compress) -> tuple[Tensor, Tensor]:
    told = compress(values)
    return told, error + values - told


def _last_only(values: Tensor, error: Tensor, compress: Compress) -> tuple[Tensor, Tensor]:
    told = compress(values + error)
    return told, values - told


def _reversed(values: Tensor, error: Tensor, compress: Compress) -> tuple[Tensor, Tensor]:
    told = compress(values + error)
    return told, told - values - error


def _taken_away(values: Tensor, error: Tensor, compress: Compress) -> tuple[Tensor, Tensor]:
    told = compress(values - error)
    return told, values - error - told


def _twice(values: Tensor, error: Tensor, compress: Compress) -> tuple[Tensor, Tensor]:
    told = compress(values + error)
    return told, error + (values + error - told)


def _afterwards(values: Tensor, error: Tensor, compress: Compress) -> tuple[Tensor, Tensor]:
    told = compress(values)
    return told + error, values - told


def _swapped(values: Tensor, error: Tensor, compress: Compress) -> tuple[Tensor, Tensor]:
    told, kept = feed_back(values, error, compress)
    return kept, told


ERROR_FEEDBACK = Exercise(
    id="error-feedback",
    title=Said("error feedback", "la compensation de l’erreur"),
    judge=by_trial(
        _use,
        feed_back,
        cases=_cases,
        mistakes=(
            Mistake(
                _never_said,
                Said(
                    "The error is computed but never said: compress values + error, not values alone.",
                    "L’erreur est calculée, mais jamais dite : compressez values + error, et non values seul.",
                ),
            ),
            Mistake(
                _summed_never_said,
                Said(
                    "The errors pile up and are never said: compress values + error, not values alone.",
                    "Les erreurs s’accumulent sans jamais être dites : compressez values + error, et non values seul.",
                ),
            ),
            Mistake(
                _last_only,
                Said(
                    "Of what was left unsaid before, what is not said this time either gets lost: the new error is "
                    "(values + error) − told, not values − told.",
                    "Ce qui restait à dire, et qui ne l’est pas cette fois non plus, se perd : la nouvelle erreur est "
                    "(values + error) − told, et non values − told.",
                ),
            ),
            Mistake(
                _reversed,
                Said(
                    "The error has the wrong sign: what is left to say is what was meant, less what was said.",
                    "L’erreur a le mauvais signe : ce qui reste à dire, c’est ce que l’on voulait dire, moins ce que "
                    "l’on a dit.",
                ),
            ),
            Mistake(
                _taken_away,
                Said(
                    "You take the error away: what was left unsaid is to be said in addition, values + error.",
                    "Vous retranchez l’erreur : ce qui n’a pas été dit doit l’être en plus, values + error.",
                ),
            ),
            Mistake(
                _twice,
                Said(
                    "The old error counts twice: it is in values + error already, so the new one replaces it.",
                    "L’ancienne erreur compte deux fois : elle est déjà dans values + error, la nouvelle la remplace.",
                ),
            ),
            Mistake(
                _afterwards,
                Said(
                    "The error is added after compression: what is sent then takes 32 bits per number again. Add it "
                    "before.",
                    "L’erreur est ajoutée après la compression : ce qui est envoyé reprend alors 32 bits par nombre. "
                    "Ajoutez-la avant.",
                ),
            ),
            Mistake(
                _swapped,
                Said(
                    "The two results are swapped: first what is told, then the error.",
                    "Les deux résultats sont inversés : d’abord ce qui est dit, puis l’erreur.",
                ),
            ),
            Mistake(
                lambda values, error, compress: (values + error, 0 * values),
                Said(
                    "Nothing is compressed: what is told is values + error itself.",
                    "Rien n’est compressé : ce qui est dit est values + error tel quel.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: nothing is lost, only put off. Over all steps, what was told plus the last error is what was meant.",
        "Exact : rien n’est perdu, seulement différé. Sur tous les pas, ce qui est dit plus la dernière erreur font ce "
        "que l’on voulait dire.",
    ),
    hints=(
        Said(
            "What do you mean to say this time? The new numbers, and what is left from before. Compress that.",
            "Que voulez-vous dire cette fois ? Les nouveaux nombres, et ce qui restait. C’est cela que l’on compresse.",
        ),
        Said(
            "With meant = values + error: told = compress(meant), and the new error is meant - told.",
            "Avec meant = values + error : told = compress(meant), et la nouvelle erreur vaut meant - told.",
        ),
    ),
)
