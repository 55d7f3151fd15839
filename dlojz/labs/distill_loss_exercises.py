"""Lab 11: what a student learns from its teacher's soft answers.

Layer 6 (labs). Invariant: an answer is held to its value, then to its gradients: the student has one, the teacher none.

Shape suffixes: B samples, K classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dlojz.labs.compress_judging import Way, gradient_of, normal
from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.rank_evidence import same
from dlojz.labs.verdict import Said
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor


def soft_loss(student_BK: Tensor, teacher_BK: Tensor, temperature: float) -> Tensor:
    """T² times the mean over the samples of KL(teacher ‖ student), both softened by T; no gradient for the teacher.

    Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network" (arXiv 1503.02531), section 2.
    """
    p_BK = (teacher_BK.detach() / temperature).softmax(-1)
    log_q_BK = (student_BK / temperature).log_softmax(-1)
    return temperature**2 * (p_BK * (p_BK.log() - log_q_BK)).sum(-1).mean()


def _soft_cases() -> Iterator[tuple[Any, ...]]:
    for seed, samples, classes, temperature in ((1, 6, 5, 2.0), (2, 9, 3, 4.0), (3, 4, 7, 0.5)):
        yield 2 * normal(seed, samples, classes), 2 * normal(seed + 10, samples, classes), temperature


def _kl(p_BK: Tensor, q_BK: Tensor) -> Tensor:
    return (p_BK * (p_BK.log() - q_BK.log())).sum(-1)


def _scaled(power: float) -> Way:
    return lambda student, teacher, t: t**power * soft_loss(student, teacher, t) / t**2


def _at(student_t: float, teacher_t: float) -> Way:
    """Each softened by a power of the temperature."""
    return lambda student, teacher, t: (
        t**2 * _kl((teacher / t**teacher_t).softmax(-1), (student / t**student_t).softmax(-1)).mean()
    )


def _reversed(student: Tensor, teacher: Tensor, t: float) -> Tensor:
    return t**2 * _kl((student / t).softmax(-1), (teacher / t).softmax(-1)).mean()


def _cross(student: Tensor, teacher: Tensor, t: float) -> Tensor:
    return -(t**2) * ((teacher / t).softmax(-1) * (student / t).log_softmax(-1)).sum(-1).mean()


_SOFT_BY_VALUE = by_reference(
    soft_loss,
    cases=_soft_cases,
    mistakes=(
        Mistake(
            _scaled(0),
            Said(
                "The factor T² is missing: softened logits give gradients of about 1/T², so without it a change of "
                "temperature would also change how much this loss weighs beside another.",
                "Il manque le facteur T² : des logits adoucis donnent des gradients d’environ 1/T² ; sans lui, "
                "changer la température changerait aussi le poids de cette perte face à une autre.",
            ),
        ),
        Mistake(
            _scaled(1),
            Said(
                "The factor is T², not T: T divides once in the softmax of the student and once more in the difference "
                "of the two probabilities.",
                "Le facteur est T², et non T : T divise une fois dans le softmax de l’étudiant, et une fois encore "
                "dans l’écart des deux probabilités.",
            ),
        ),
        Mistake(
            lambda student, teacher, t: soft_loss(student, teacher, t) / student.shape[1],
            Said(
                'You average over classes too, as F.kl_div does by default: sum over the classes, then take the mean '
                'over the samples (reduction="batchmean").',
                "Vous moyennez aussi sur les classes, comme F.kl_div le fait par défaut : sommez sur les classes, puis "
                'moyennez sur les échantillons (reduction="batchmean").',
            ),
        ),
        Mistake(
            lambda student, teacher, t: soft_loss(student, teacher, t) * len(student),
            Said(
                "You add the samples up: take their mean, so that the size of the batch does not change the learning "
                "rate.",
                "Vous additionnez les échantillons : prenez leur moyenne, pour que la taille du batch ne change pas "
                "le taux d’apprentissage.",
            ),
        ),
        Mistake(
            _reversed,
            Said(
                "The divergence is the other way round, KL(student ‖ teacher): it is the teacher's probabilities that "
                "weigh the differences. Mind the order of F.kl_div(student's logarithms, teacher's probabilities).",
                "La divergence est prise à l’envers, KL(étudiant ‖ professeur) : ce sont les probabilités du "
                "professeur qui pondèrent les écarts. Attention à l’ordre de F.kl_div(logarithmes de l’étudiant, "
                "probabilités du professeur).",
            ),
        ),
        Mistake(
            _at(1, 0),
            Said("The teacher is not softened: divide its logits by T, too.",
                 "Le professeur n’est pas adouci : divisez aussi ses logits par T."),
        ),
        Mistake(
            _at(0, 1),
            Said("The student is not softened: divide its logits by T, too.",
                 "L’étudiant n’est pas adouci : divisez aussi ses logits par T."),
        ),
        Mistake(
            _at(-1, -1),
            Said(
                "You multiply the logits by T, which makes the probabilities harder: divide.",
                "Vous multipliez les logits par T, ce qui durcit les probabilités : divisez.",
            ),
        ),
        Mistake(
            _cross,
            Said(
                "That is the cross-entropy with the teacher's probabilities: its gradient is right, but it is not 0 "
                "when the student answers like the teacher. Add the teacher's Σ p log p, or use F.kl_div.",
                "C’est l’entropie croisée avec les probabilités du professeur : son gradient est juste, mais elle ne "
                "vaut pas 0 quand l’étudiant répond comme le professeur. Ajoutez Σ p log p du professeur, ou prenez "
                "F.kl_div.",
            ),
        ),
    ),
)  # fmt: skip


def _judge_soft(answer: Way) -> None:
    _SOFT_BY_VALUE(answer)
    for student_BK, teacher_BK, temperature in _soft_cases():
        student_BK.requires_grad_()
        teacher_BK.requires_grad_()
        found = gradient_of(answer(student_BK, teacher_BK, temperature), student_BK)
        wanted = gradient_of(soft_loss(student_BK, teacher_BK, temperature), student_BK)
        if found is None or wanted is None or not same(found, wanted):
            raise Wrong(
                say(
                    en="The value is right, but the student gets no gradient, or a wrong one: leave its logits linked "
                    "to the loss (no detach, no no_grad, no item).",
                    fr="La valeur est juste, mais l’étudiant ne reçoit pas de gradient, ou un gradient faux : laissez "
                    "ses logits liés à la perte (ni detach, ni no_grad, ni item).",
                )
            )
        if gradient_of(answer(student_BK, teacher_BK, temperature), teacher_BK) is not None:
            raise Wrong(
                say(
                    en="The value is right, but the teacher gets a gradient, too: it would be changed to please its "
                    "student, and its backward pass costs time. teacher.detach().",
                    fr="La valeur est juste, mais le professeur reçoit aussi un gradient : on le changerait pour "
                    "plaire à son étudiant, et sa passe arrière coûte du temps. teacher.detach().",
                )
            )


SOFT_LOSS = Exercise(
    id="soft-loss",
    title=Said("the teacher's soft answers", "les réponses nuancées du professeur"),
    judge=_judge_soft,
    praise=Said(
        "Right: zero when the student answers like the teacher, and as loud at any temperature.",
        "Exact : nulle quand l’étudiant répond comme le professeur, et aussi forte à toute température.",
    ),
    hints=(
        Said(
            "Two softmaxes of logits divided by T: probabilities p for the teacher, whose gradient you cut; logarithms "
            "log q for the student. Then Σ p (log p − log q).",
            "Deux softmax de logits divisés par T : des probabilités p pour le professeur, dont vous coupez le "
            "gradient ; des logarithmes log q pour l’étudiant. Puis Σ p (log p − log q).",
        ),
        Said(
            'T**2 * F.kl_div(log_q, p, reduction="batchmean"), where log_q = (student / T).log_softmax(-1) and '
            "p = (teacher.detach() / T).softmax(-1).",
            'T**2 * F.kl_div(log_q, p, reduction="batchmean"), où log_q = (student / T).log_softmax(-1) et '
            "p = (teacher.detach() / T).softmax(-1).",
        ),
    ),
)
