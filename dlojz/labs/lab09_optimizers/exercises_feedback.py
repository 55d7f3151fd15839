"""Exercise of lab 09 on error feedback: what is sent, and what is left to send."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlojz.labs.kit.exercise import Exercise, Mistake, Said, Wrong
from dlojz.labs.kit.judges import Judge, expect_several, normal
from dlojz.labs.lab09_optimizers.exercises_compression import compress

if TYPE_CHECKING:
    from torch import Tensor

Compress = Callable[["Tensor"], "Tensor"]
STEPS = 6


def feed_back(values: Tensor, error: Tensor, compress: Compress) -> tuple[Tensor, Tensor]:
    """Compress the values plus the error; return the message, and the new error.

    Source: Karimireddy et al. 2019, "Error Feedback Fixes SignSGD" (arXiv 1901.09847), algorithm EF-SGD.
    """
    told = compress(values + error)
    return told, values + error - told


def largest(values: Tensor) -> Tensor:
    """Keep the number of largest magnitude and set all others to zero."""
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
        given = answer(normal(100 * seed + step, numel) + 0.5, error.clone(), compress)
        told, error = expect_several(given, "(told, error)", 2)
        for one in (told, error):
            if not isinstance(one, torch.Tensor) or one.shape != (numel,):
                raise Wrong(
                    en=f"Both results have the shape of values, ({numel},), but one of yours is "
                    f"{tuple(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__}.",
                    fr=f"Les deux résultats ont la forme de values, ({numel},), mais l’un des vôtres est "
                    f"{tuple(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__}.",
                )
        seen += [told, error]
    return torch.cat(seen)


def _fed(meant: Callable[..., Tensor], left: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A wrong way: what it compresses, and what it keeps as the error."""

    def way(values: Tensor, error: Tensor, compress: Compress) -> tuple[Tensor, Tensor]:
        told = compress(meant(values, error))
        return told, left(values, error, told)

    return way


def _afterwards(values: Tensor, error: Tensor, compress: Compress) -> tuple[Tensor, Tensor]:
    told = compress(values)
    return told + error, values - told


ERROR_FEEDBACK = Exercise(
    id="error-feedback",
    title=Said("error feedback", "la compensation de l’erreur"),
    judge=Judge(
        feed_back,
        trial=_use,
        cases=((1, 7, compress), (2, 40, compress), (3, 9, largest)),
        mistakes=(
            Mistake(
                _fed(lambda values, error: values, lambda values, error, told: values - told),
                "The error is computed but never said: compress values + error, not values alone.",
                "L’erreur est calculée, mais jamais dite : compressez values + error, et non values seul.",
            ),
            Mistake(
                _fed(lambda values, error: values, lambda values, error, told: error + values - told),
                "The errors pile up and are never said: compress values + error, not values alone.",
                "Les erreurs s’accumulent sans jamais être dites : compressez values + error, et non values seul.",
            ),
            Mistake(
                _fed(lambda values, error: values + error, lambda values, error, told: values - told),
                "Of what was left unsaid before, what is not said this time either gets lost: the new error is (values "
                "+ error) − told, not values − told.",
                "Ce qui restait à dire, et qui ne l’est pas cette fois non plus, se perd : la nouvelle erreur est "
                "(values + error) − told, et non values − told.",
            ),
            Mistake(
                _fed(lambda values, error: values + error, lambda values, error, told: told - values - error),
                "The error has the wrong sign: it is what was meant, values + error, less what was said.",
                "L’erreur a le mauvais signe : ce qui reste à dire, c’est ce que l’on voulait dire, moins ce que l’on "
                "a dit.",
            ),
            Mistake(
                _fed(lambda values, error: values - error, lambda values, error, told: values - error - told),
                "You take the error away: what was left unsaid is to be said in addition, values + error.",
                "Vous retranchez l’erreur : ce qui n’a pas été dit doit l’être en plus, values + error.",
            ),
            Mistake(
                _fed(lambda values, error: values + error, lambda values, error, told: values + 2 * error - told),
                "The old error counts twice: it is in values + error already, so the new one replaces it.",
                "L’ancienne erreur compte deux fois : elle est déjà dans values + error, la nouvelle la remplace.",
            ),
            Mistake(
                _afterwards,
                "The error is added after compression: what is sent then takes 32 bits per number again. Add it "
                "before.",
                "L’erreur est ajoutée après la compression : ce qui est envoyé reprend alors 32 bits par nombre. "
                "Ajoutez-la avant.",
            ),
            Mistake(
                lambda values, error, compress: feed_back(values, error, compress)[::-1],
                "The two results are swapped: first what is sent, then the error.",
                "Les deux résultats sont inversés : d’abord ce qui est envoyé, puis l’erreur.",
            ),
            Mistake(
                lambda values, error, compress: (values + error, 0 * values),
                "Nothing is compressed: values + error is sent as it is.",
                "Rien n’est compressé : values + error est envoyé tel quel.",
            ),
            *(
                Mistake(way, en, fr)
                for way, en, fr in (
                    (
                        lambda values, error, compress: (compress(values + error), values - compress(values)),
                        "What is left is taken from values alone: what was meant, values + error, less what was sent.",
                        "Le reste est pris sur values seul : c’est ce qu’on voulait envoyer, values + error, moins "
                        "ce qui est envoyé.",
                    ),
                    (
                        lambda values, error, compress: (
                            compress(values) + compress(error),
                            values + error - compress(values) - compress(error),
                        ),
                        "You compress twice: what is sent is one message, compress(values + error).",
                        "Vous compressez deux fois : on n’envoie qu’un message, compress(values + error).",
                    ),
                    (
                        _fed(operator.add, lambda values, error, told: error - told),
                        "What is left forgets the new values: values + error − told.",
                        "Le reste oublie les nouvelles valeurs : values + error − told.",
                    ),
                    (
                        _fed(operator.add, lambda values, error, told: values + error),
                        "What was sent is not subtracted from what is left: values + error − told.",
                        "Ce qui est envoyé n’est pas retranché du reste : values + error − told.",
                    ),
                    (
                        lambda values, error, compress: (values + error - compress(values + error),) * 2,
                        "You send what is left: what is sent is compress(values + error).",
                        "Vous envoyez le reste : ce qui est envoyé, c’est compress(values + error).",
                    ),
                    (
                        _fed(operator.add, lambda values, error, told: (values + error - told).abs()),
                        "What is left lost its sign: no abs().",
                        "Le reste a perdu son signe : pas de abs().",
                    ),
                    (
                        lambda values, error, _: feed_back(values, error, compress),
                        "You call your own compression: use the one that you are given, `compress`.",
                        "Vous appelez votre propre compression : utilisez celle que l’on vous donne, `compress`.",
                    ),
                    (
                        _fed(operator.add, lambda values, error, told: 0 * error),
                        "Nothing is left to say: the error of this compression gets lost, values + error − told.",
                        "Il ne reste rien à dire : l’erreur de cette compression se perd, values + error − told.",
                    ),
                    (
                        _fed(
                            lambda values, error: (values + error) / 2,
                            lambda values, error, told: values + error - told,
                        ),
                        "You average values and error: they add up.",
                        "Vous faites la moyenne de values et error : on les additionne.",
                    ),
                )
            ),
        ),
    ),
    praise_en="Right: nothing is lost. Summed over all steps, the messages plus the last error equal the values.",
    praise_fr="Exact : rien n’est perdu. Sommés sur tous les pas, les messages plus la dernière erreur égalent les "
    "valeurs.",
    hint_en="What do you mean to say this time? The new numbers, and what is left from before. Compress that.",
    hint_fr="Que voulez-vous dire cette fois ? Les nouveaux nombres, et ce qui restait. C’est cela que l’on compresse.",
    nearer_en="With meant = values + error: told = compress(meant), and the new error is meant - told.",
    nearer_fr="Avec meant = values + error : told = compress(meant), et la nouvelle erreur vaut meant - told.",
)
