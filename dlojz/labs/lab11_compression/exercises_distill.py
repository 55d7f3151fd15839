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

from dlojz.labs.kit.exercise import Said
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
        "the factor T² is missing": "temperature**2 * →",
        "the factor is T, not T²": "temperature**2 → temperature",
        "you average over classes too": ".sum(-1).mean() → .mean()",
        "you add the samples up": ".sum(-1).mean() → .sum()",
        "the divergence is the other way round": (
            "teacher_BK.detach() → student_BK; (student_BK / temperature).log → (teacher_BK / temperature).log"
        ),
        "the teacher is not softened": "teacher_BK.detach() / temperature → teacher_BK",
        "the student is not softened": "student_BK / temperature → student_BK",
        "you multiply the logits by T": "/ temperature → * temperature",
        "the cross-entropy with the teacher's probabilities": "p_BK.log() - log_q_BK → -log_q_BK",
        "you divide by T²": "temperature**2 → temperature**-2",
        "you multiply by 2T": "temperature**2 → 2 * temperature",
        "your softmax runs over the samples": "softmax(-1) → softmax(0)",
        "the square difference of the probabilities": "p_BK * (p_BK.log() - log_q_BK) → (p_BK - log_q_BK.exp()) ** 2",
        "the sign is the other way round": "temperature**2 → -(temperature**2)",
        "F.kl_div of the student's probabilities": "- log_q_BK → - log_q_BK.exp()",
        "one loss per sample is left": ".mean() →",
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
        "the soft loss of unlabelled samples only": (
            "(student_BK, teacher_BK, → (student_BK[~known_B], teacher_BK[~known_B],"
        ),
        "alpha and 1 − alpha swapped": "alpha * soft_loss → (1 - alpha) * soft_loss; + (1 - alpha) → + alpha",
        "the true labels are compared at temperature T": "student_BK[known_B] → student_BK[known_B] / temperature",
        "the cross-entropy divided by all samples": "(1 - alpha) * → (1 - alpha) * known_B.float().mean() *",
        "the soft loss of labelled samples only": (
            "(student_BK, teacher_BK, → (student_BK[known_B], teacher_BK[known_B],"
        ),
        "the soft loss is not weighed": "alpha * soft_loss → soft_loss",
        "the cross-entropy is not weighed": "(1 - alpha) * →",
        # -1 as the number of a class, and -1 cut off at 0
        "samples without label": (
            "student_BK[known_B], labels_B[known_B] → student_BK, labels_B % student_BK.shape[1]",
            "student_BK[known_B], labels_B[known_B] → student_BK, labels_B.clamp(min=0)",
        ),
        "neither loss is weighed": "alpha * soft_loss → soft_loss; (1 - alpha) * →",
        "you take the plain mean of the two losses": "alpha * soft_loss → 0.5 * soft_loss; (1 - alpha) → 0.5",
        "the true labels do not count": "if not known_B.any() → if True",
        "the teacher does not count": "return soft + → return",
        "samples of class 0 are left out": "labels_B != UNKNOWN → labels_B > 0",
        "the cross-entropy is a sum over the samples": "(1 - alpha) * → (1 - alpha) * known_B.sum() *",
        "the soft loss without its temperature": "teacher_BK, temperature) → teacher_BK, 1.0)",
        "the soft loss lacks its factor T²": "alpha * soft_loss → alpha / temperature**2 * soft_loss",
        "F.nll_loss of plain logits": "cross_entropy → nll_loss",
    },
    then=_check_labels,
)
