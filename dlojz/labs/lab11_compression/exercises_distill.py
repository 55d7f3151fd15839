"""Exercises of lab 11 on distillation: the loss of the teacher's soft answers, and its mix with true labels.

The student gets a gradient, the teacher none; labels may be known for some samples, for all, or for none.

Shape suffixes: B samples, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlojz.labs.kit.exercise import Mistake, Said
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.judges import gradient_of, normal, refuse_nothing
from dlojz.labs.kit.rank_judges import same

TEXTS = Texts(__file__)


Way = Callable[..., Any]


def soft_loss(student_BK: Tensor, teacher_BK: Tensor, temperature: float) -> Tensor:
    """Compute T² times the mean over samples of KL(teacher ‖ student), both softened by T, teacher detached.

    Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network" (arXiv 1503.02531), section 2.
    """
    p_BK = (teacher_BK.detach() / temperature).softmax(-1)
    log_q_BK = (student_BK / temperature).log_softmax(-1)
    # Σ p log p has no gradient for the student: it only makes the loss 0 where both answer alike.
    return temperature**2 * (p_BK * (p_BK.log() - log_q_BK)).sum(-1).mean()


def _soft_cases() -> Iterator[tuple[Any, ...]]:
    for seed, samples, classes, temperature in ((1, 6, 5, 2.0), (2, 9, 3, 4.0), (3, 4, 7, 0.5)):
        yield 2 * normal(seed, samples, classes), 2 * normal(seed + 10, samples, classes), temperature


def _kl(p_BK: Tensor, q_BK: Tensor) -> Tensor:
    return (p_BK * (p_BK.log() - q_BK.log())).sum(-1)


def _no_logarithm(student_BK: Tensor, p_BK: Tensor) -> Tensor:
    """F.kl_div of probabilities that are taken for logarithms."""
    return (p_BK * (p_BK.log() - student_BK.softmax(-1))).sum(-1).mean()


def _scaled(power: float) -> Way:
    return lambda student, teacher, t: t**power * soft_loss(student, teacher, t) / t**2


def _at(student_t: float, teacher_t: float) -> Way:
    """Each softened by a power of the temperature."""
    return lambda student, teacher, t: (
        t**2 * _kl((teacher / t**teacher_t).softmax(-1), (student / t**student_t).softmax(-1)).mean()
    )


def _check_gradients(answer: Way) -> None:
    for student_BK, teacher_BK, temperature in _soft_cases():
        student_BK.requires_grad_()
        teacher_BK.requires_grad_()
        # A value says nothing of its graph: whose gradient is cut shows in autograd alone.
        student_gradient = gradient_of(answer(student_BK, teacher_BK, temperature), student_BK)
        reference_gradient = gradient_of(soft_loss(student_BK, teacher_BK, temperature), student_BK)
        if student_gradient is None or reference_gradient is None or not same(student_gradient, reference_gradient):
            raise TEXTS.wrong("soft-loss", "no gradient of the student, or a wrong one")
        if gradient_of(answer(student_BK, teacher_BK, temperature), teacher_BK) is not None:
            raise TEXTS.wrong("soft-loss", "a gradient of the teacher")


SOFT_LOSS = TEXTS.exercise(
    "soft-loss",
    soft_loss,
    cases=_soft_cases,
    mistakes={
        "the factor T² is missing": _scaled(0),
        "the factor is T, not T²": _scaled(1),
        "you average over classes too": lambda student, teacher, t: soft_loss(student, teacher, t) / student.shape[1],
        "you add the samples up": lambda student, teacher, t: soft_loss(student, teacher, t) * len(student),
        "the divergence is the other way round": lambda student, teacher, t: (
            t**2 * _kl((student / t).softmax(-1), (teacher / t).softmax(-1)).mean()
        ),
        "the teacher is not softened": _at(1, 0),
        "the student is not softened": _at(0, 1),
        "you multiply the logits by T": _at(-1, -1),
        "the cross-entropy with the teacher's probabilities": lambda student, teacher, t: (
            -(t**2) * ((teacher / t).softmax(-1) * (student / t).log_softmax(-1)).sum(-1).mean()
        ),
        "you divide by T²": _scaled(-2),
        "you multiply by 2T": lambda student, teacher, t: 2 * t * soft_loss(student, teacher, t) / t**2,
        "your softmax runs over the samples": lambda student, teacher, t: (
            t**2 * _kl((teacher / t).softmax(0), (student / t).softmax(0)).mean()
        ),
        "the square difference of the probabilities": lambda student, teacher, t: (
            t**2 * ((teacher / t).softmax(-1) - (student / t).softmax(-1)).square().sum(-1).mean()
        ),
        "the sign is the other way round": lambda student, teacher, t: -soft_loss(student, teacher, t),
        "F.kl_div of the student's probabilities": lambda student, teacher, t: (
            t**2 * _no_logarithm(student / t, (teacher / t).softmax(-1))
        ),
        "one loss per sample is left": lambda student, teacher, t: (
            t**2 * _kl((teacher / t).softmax(-1), (student / t).softmax(-1))
        ),
    },
    then=_check_gradients,
)


UNKNOWN = -1
"""The label of a sample that has none."""


def mixed_loss(student_BK: Tensor, teacher_BK: Tensor, labels_B: Tensor, temperature: float, alpha: float) -> Tensor:
    """Mix the soft loss of all samples (alpha) with the cross-entropy of the labelled ones (1 − alpha).

    Args:
        labels_B: classes, `UNKNOWN` where there is none; where nobody has one, the second term is 0.
        temperature: of the soft loss alone.
        alpha: from 0 to 1.
    """
    known_B = labels_B != UNKNOWN
    soft = alpha * soft_loss(student_BK, teacher_BK, temperature)
    if not known_B.any():
        return soft
    return soft + (1 - alpha) * F.cross_entropy(student_BK[known_B], labels_B[known_B])


def _mixed_cases() -> Iterator[tuple[Any, ...]]:
    for seed, unknown, temperature, alpha in ((4, 3, 3.0, 0.7), (5, 5, 2.0, 0.2), (6, 1, 4.0, 0.4)):
        generator = torch.Generator().manual_seed(seed)
        labels_B = torch.randint(5, (8,), generator=generator)
        labels_B[torch.randperm(8, generator=generator)[:unknown]] = UNKNOWN
        yield 2 * normal(seed, 8, 5), 2 * normal(seed + 10, 8, 5), labels_B, temperature, alpha


def _hard(student: Tensor, labels: Tensor, divided: bool = False, t: float = 1.0) -> Tensor:
    labelled = labels != UNKNOWN
    total = F.cross_entropy(student[labelled] / t, labels[labelled], reduction="sum")
    # divided: a mean over all samples, as if unlabelled ones had a loss of 0.
    return total / (len(labels) if divided else labelled.sum())


def _of_target(student: Tensor, labels: Tensor) -> Tensor:
    """The mean logit of the true class."""
    labelled = labels != UNKNOWN
    return student[labelled].gather(1, labels[labelled].unsqueeze(1)).mean()


def _soft_of_known(student: Tensor, teacher: Tensor, labels: Tensor, t: float, alpha: float) -> Tensor:
    labelled = labels != UNKNOWN
    return alpha * soft_loss(student[labelled], teacher[labelled], t) + (1 - alpha) * _hard(student, labels)


def _as_a_class(class_index: int) -> Way:
    """What becomes of -1 if it is an index, or cut off at 0."""

    def way(student: Tensor, teacher: Tensor, labels: Tensor, t: float, alpha: float) -> Tensor:
        # -1 % K = K − 1: as an index, -1 is the last class.
        return mixed_loss(student, teacher, labels.where(labels != UNKNOWN, class_index % student.shape[1]), t, alpha)

    return way


_INDEXED = TEXTS.sentence("mixed-loss", "samples without label")


def _check_labels(answer: Way) -> None:
    student_BK, teacher_BK = normal(7, 6, 5), normal(8, 6, 5)
    # No label at all, then all of them: each case before has both kinds of samples.
    for labels_B in (torch.full((6,), UNKNOWN), torch.arange(6) % 5):
        loss, reference_loss = (loss_of(student_BK, teacher_BK, labels_B, 2.0, 0.5) for loss_of in (answer, mixed_loss))
        if loss is None:
            refuse_nothing(None)
        loss = torch.as_tensor(loss)
        if same(loss, reference_loss):
            continue
        if not bool((labels_B == UNKNOWN).all()):
            raise TEXTS.wrong("mixed-loss", "unknown labels: all samples divide")
        if bool(loss.isnan().any()):
            raise TEXTS.wrong("mixed-loss", "unknown labels: a mean of two")
        if same(loss, soft_loss(student_BK, teacher_BK, 2.0)):
            raise TEXTS.wrong("mixed-loss", "unknown labels: nothing is left out")
        raise TEXTS.wrong("mixed-loss", "unknown labels: another loss")


MIXED_LOSS = TEXTS.exercise(
    "mixed-loss",
    mixed_loss,
    cases=_mixed_cases,
    leaves={0: Said("the student's logits", "les logits de l’étudiant")},
    mistakes={
        "the soft loss of unlabelled samples only": lambda s, t, y, temperature, alpha: (
            alpha * soft_loss(s[y == UNKNOWN], t[y == UNKNOWN], temperature) + (1 - alpha) * _hard(s, y)
        ),
        "alpha and 1 − alpha swapped": lambda s, t, y, temperature, alpha: mixed_loss(s, t, y, temperature, 1 - alpha),
        "the true labels are compared at temperature T": lambda s, t, y, temperature, alpha: (
            alpha * soft_loss(s, t, temperature) + (1 - alpha) * _hard(s, y, t=temperature)
        ),
        "the cross-entropy divided by all samples": lambda s, t, y, temperature, alpha: (
            alpha * soft_loss(s, t, temperature) + (1 - alpha) * _hard(s, y, divided=True)
        ),
        "the soft loss of labelled samples only": _soft_of_known,
        "the soft loss is not weighed": lambda s, t, y, temperature, alpha: (
            soft_loss(s, t, temperature) + (1 - alpha) * _hard(s, y)
        ),
        "the cross-entropy is not weighed": lambda s, t, y, temperature, alpha: (
            alpha * soft_loss(s, t, temperature) + _hard(s, y)
        ),
        "unlabelled samples count as the last class": Mistake(_as_a_class(-1), *_INDEXED),
        "unlabelled samples count as class 0": Mistake(_as_a_class(0), *_INDEXED),
        "neither loss is weighed": lambda s, t, y, temperature, alpha: soft_loss(s, t, temperature) + _hard(s, y),
        "you take the plain mean of the two losses": lambda s, t, y, temperature, alpha: (
            (soft_loss(s, t, temperature) + _hard(s, y)) / 2
        ),
        "the true labels do not count": lambda s, t, y, temperature, alpha: alpha * soft_loss(s, t, temperature),
        "the teacher does not count": lambda s, t, y, temperature, alpha: (1 - alpha) * _hard(s, y),
        "samples of class 0 are left out": lambda s, t, y, temperature, alpha: mixed_loss(
            s, t, y.where(y != 0, UNKNOWN), temperature, alpha
        ),
        "the cross-entropy is a sum over the samples": lambda s, t, y, temperature, alpha: (
            alpha * soft_loss(s, t, temperature) + (1 - alpha) * _hard(s, y, divided=True) * len(y)
        ),
        "the soft loss without its temperature": lambda s, t, y, temperature, alpha: mixed_loss(s, t, y, 1.0, alpha),
        "the soft loss lacks its factor T²": lambda s, t, y, temperature, alpha: (
            alpha * soft_loss(s, t, temperature) / temperature**2 + (1 - alpha) * _hard(s, y)
        ),
        "F.nll_loss of plain logits": lambda s, t, y, temperature, alpha: (
            alpha * soft_loss(s, t, temperature) - (1 - alpha) * _of_target(s, y)
        ),
    },
    then=_check_labels,
)
