"""Lab 11: the teacher's soft answers mixed with the true labels, where there are any.

Layer 6 (labs). Invariant: an answer is held to batches with some labels unknown, then with all and with none of them.

Shape suffixes: B samples, K classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dlojz.labs.compress_judging import Way, normal, nothing
from dlojz.labs.distill_loss_exercises import soft_loss
from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.rank_evidence import same
from dlojz.labs.verdict import Said
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

UNKNOWN = -1
"""The label of a sample that has none."""


def mixed_loss(student_BK: Tensor, teacher_BK: Tensor, labels_B: Tensor, temperature: float, alpha: float) -> Tensor:
    """Alpha times the soft loss of all samples, plus (1 − alpha) times the cross-entropy of those that have a label.

    Args:
        student_BK: logits.
        teacher_BK: logits.
        labels_B: classes, `UNKNOWN` where there is none; where nobody has one, the second term is 0.
        temperature: of the soft loss alone.
        alpha: from 0 to 1.
    """
    import torch.nn.functional as F

    known_B = labels_B != UNKNOWN
    soft = alpha * soft_loss(student_BK, teacher_BK, temperature)
    if not known_B.any():
        return soft
    return soft + (1 - alpha) * F.cross_entropy(student_BK[known_B], labels_B[known_B])


def _mixed_cases() -> Iterator[tuple[Any, ...]]:
    import torch

    for seed, unknown, temperature, alpha in ((4, 3, 3.0, 0.7), (5, 5, 2.0, 0.2), (6, 1, 4.0, 0.4)):
        generator = torch.Generator().manual_seed(seed)
        labels_B = torch.randint(5, (8,), generator=generator)
        labels_B[torch.randperm(8, generator=generator)[:unknown]] = UNKNOWN
        yield 2 * normal(seed, 8, 5), 2 * normal(seed + 10, 8, 5), labels_B, temperature, alpha


def _hard(student: Tensor, labels: Tensor, divided: bool = False, t: float = 1.0) -> Tensor:
    import torch.nn.functional as F

    known = labels != UNKNOWN
    total = F.cross_entropy(student[known] / t, labels[known], reduction="sum")
    return total / (len(labels) if divided else known.sum())


def _soft_of_known(student: Tensor, teacher: Tensor, labels: Tensor, t: float, alpha: float) -> Tensor:
    known = labels != UNKNOWN
    return alpha * soft_loss(student[known], teacher[known], t) + (1 - alpha) * _hard(student, labels)


def _as_a_class(which: int) -> Way:
    """What becomes of -1 if it is an index, or cut off at 0."""

    def way(student: Tensor, teacher: Tensor, labels: Tensor, t: float, alpha: float) -> Tensor:
        return mixed_loss(student, teacher, labels.where(labels != UNKNOWN, which % student.shape[1]), t, alpha)

    return way


_INDEXED = Said(
    "Samples without label (-1) are taken for samples of a class: leave them out of the cross-entropy.",
    "Les échantillons sans étiquette (-1) sont pris pour ceux d’une classe : écartez-les de l’entropie croisée.",
)
_MIXED_BY_VALUE = by_reference(
    mixed_loss,
    cases=_mixed_cases,
    mistakes=(
        Mistake(
            lambda s, t, y, temperature, alpha: mixed_loss(s, t, y, temperature, 1 - alpha),
            Said("Alpha weighs the soft loss, 1 − alpha the true labels: you have swapped them.",
                 "Alpha pondère la perte de distillation, 1 − alpha les vraies étiquettes : vous les avez échangés."),
        ),
        Mistake(
            lambda s, t, y, temperature, alpha: alpha * soft_loss(s, t, temperature)
            + (1 - alpha) * _hard(s, y, t=temperature),
            Said("The true labels are compared at temperature T: they are not softened, so neither is the student.",
                 "Les vraies étiquettes sont comparées à la température T : elles ne sont pas adoucies, l’étudiant "
                 "n’a donc pas à l’être."),
        ),
        Mistake(
            lambda s, t, y, temperature, alpha: alpha * soft_loss(s, t, temperature)
            + (1 - alpha) * _hard(s, y, divided=True),
            Said("The cross-entropy is divided by the number of all samples: divide by that of those with a label.",
                 "L’entropie croisée est divisée par le nombre de tous les échantillons : divisez par celui des "
                 "échantillons étiquetés."),
        ),
        Mistake(
            _soft_of_known,
            Said("The teacher is asked about samples with a label only: it is for the others that it is most useful.",
                 "Le professeur n’est interrogé que sur les échantillons étiquetés : c’est pour les autres qu’il est "
                 "le plus utile."),
        ),
        Mistake(
            lambda s, t, y, temperature, alpha: soft_loss(s, t, temperature) + (1 - alpha) * _hard(s, y),
            Said("The soft loss is not weighed: multiply it by alpha.",
                 "La perte de distillation n’est pas pondérée : multipliez-la par alpha."),
        ),
        Mistake(
            lambda s, t, y, temperature, alpha: alpha * soft_loss(s, t, temperature) + _hard(s, y),
            Said("The cross-entropy is not weighed: multiply it by 1 − alpha.",
                 "L’entropie croisée n’est pas pondérée : multipliez-la par 1 − alpha."),
        ),
        Mistake(_as_a_class(-1), _INDEXED),
        Mistake(_as_a_class(0), _INDEXED),
    ),
)  # fmt: skip


def _judge_mixed(answer: Way) -> None:
    import torch

    student_BK, teacher_BK = normal(7, 6, 5), normal(8, 6, 5)
    _MIXED_BY_VALUE(answer)
    for labels_B in (torch.full((6,), UNKNOWN), torch.arange(6) % 5):
        found, wanted = (way(student_BK, teacher_BK, labels_B, 2.0, 0.5) for way in (answer, mixed_loss))
        if found is None:
            raise nothing()
        if not same(torch.as_tensor(found), wanted):
            raise Wrong(
                say(
                    en="With some labels unknown you are right; where nobody has a label, the mean of nothing is NaN: "
                    "the second term is 0 there.",
                    fr="Avec quelques étiquettes inconnues, c’est juste ; mais sans aucune étiquette, la moyenne de "
                    "rien est NaN : le second terme vaut alors 0.",
                )
                if bool((labels_B == UNKNOWN).all())
                else say(
                    en="With some labels unknown you are right, but not where all are known.",
                    fr="Avec quelques étiquettes inconnues, c’est juste, mais pas quand toutes sont connues.",
                )
            )


MIXED_LOSS = Exercise(
    id="mixed-loss",
    title=Said("with and without true labels", "avec et sans vraies étiquettes"),
    judge=_judge_mixed,
    praise=Said(
        "Right: one loss for images with a label and for images without.",
        "Exact : une seule perte pour les images étiquetées et pour les autres.",
    ),
    hints=(
        Said(
            "known = labels != -1 tells which samples have a label; student[known] and labels[known] are theirs. What "
            "if there is none?",
            "known = labels != -1 dit quels échantillons ont une étiquette ; student[known] et labels[known] sont les "
            "leurs. Et s’il n’y en a aucun ?",
        ),
        Said(
            "alpha * soft_loss(…) for all samples; then, if known.any(), add (1 - alpha) * "
            "F.cross_entropy(student[known], labels[known]).",
            "alpha * soft_loss(…) pour tous les échantillons ; puis, si known.any(), ajoutez (1 - alpha) * "
            "F.cross_entropy(student[known], labels[known]).",
        ),
    ),
)
