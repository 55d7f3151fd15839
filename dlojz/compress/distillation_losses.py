"""What a student is told to come close to: the teacher's probabilities, its logits, its hidden states, and the labels.

Layer 2. Invariant: each loss is 0 where the student answers as the teacher does (the labels' apart), and no gradient
reaches the teacher.

Shape suffixes: B batch, T tokens, D width, K classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from dlojz.compress.task import UNKNOWN
from dlojz.schema import LabError, one_of
from dlojz.text import say

HiddenKind = Literal["cosine", "mse"]
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 1000.0
"""Below, the softmax is an argmax; above, fp32 keeps nothing of what the probabilities differ by."""
_WEIGHTS = ("soft", "logits", "hidden", "labels")


def check_temperature(temperature: float) -> None:
    """Refuse a temperature that divides by nothing, or that nothing is left at.

    Raises:
        LabError: outside of 0.01 to 1000; 0, negative numbers and NaN among them.
    """
    if not LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE:
        raise LabError(
            say(
                en=f"temperature must be greater than 0 (from {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}), but "
                f"{temperature!r} was received: 1 leaves the probabilities as they are, 2 to 10 soften them.",
                fr="temperature doit être strictement positive "
                f"(de {_french(LEAST_TEMPERATURE)} à {_french(MOST_TEMPERATURE)}), mais {temperature!r} a été reçu : "
                "1 laisse les probabilités telles quelles, 2 à 10 les adoucissent.",
            )
        )


def soft_loss(student_BK: Tensor, teacher_BK: Tensor, temperature: float) -> Tensor:
    """T² times the Kullback-Leibler divergence of the teacher's softened probabilities from the student's, in nats.

    Args:
        student_BK: logits of the student.
        teacher_BK: logits of the teacher; no gradient reaches them.
        temperature: T, by which both are divided.

    Raises:
        LabError: for a temperature that is not positive.

    Source: Hinton et al. 2015 (arXiv 1503.02531), section 2: gradients of softened probabilities scale as 1/T², hence
    the factor. The divergence is their cross-entropy less the entropy of the teacher, whose gradient is nothing.
    """
    check_temperature(temperature)
    student = F.log_softmax(student_BK / temperature, dim=1)
    teacher = F.log_softmax(teacher_BK.detach() / temperature, dim=1)
    return temperature**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def logit_loss(student_BK: Tensor, teacher_BK: Tensor) -> Tensor:
    """Mean square of what the student's logits differ by from the teacher's, which get no gradient.

    Source: Ba and Caruana 2014 (arXiv 1312.6184), who regress on logits; Kim et al. 2021 (arXiv 2105.08919), who
    compare it with the divergence.
    """
    return F.mse_loss(student_BK, teacher_BK.detach())


def hidden_loss(student_BTD: Tensor, teacher_BTD: Tensor, kind: HiddenKind = "cosine") -> Tensor:
    """How far the student's stream is from the teacher's, averaged over the tokens.

    Args:
        student_BTD: stream behind one of the student's blocks, projected to the teacher's width if need be.
        teacher_BTD: the teacher's, which gets no gradient.
        kind: `cosine`, one less the cosine of the two vectors of a token, from 0 to 2; `mse`, mean square difference.

    Raises:
        LabError: for another kind.

    Source: Sanh et al. 2019 (arXiv 1910.01108), DistilBERT, for the cosine; Jiao et al. 2019 (arXiv 1909.10351),
    TinyBERT, for the mean square.
    """
    if kind not in get_args(HiddenKind):
        raise LabError(one_of(say(en="kind of hidden loss", fr="sorte de perte cachée"), kind, get_args(HiddenKind)))
    teacher_BTD = teacher_BTD.detach()
    if kind == "mse":
        return F.mse_loss(student_BTD, teacher_BTD)
    return (1 - F.cosine_similarity(student_BTD, teacher_BTD, dim=-1)).mean()


def label_loss(student_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Cross-entropy with the labels that are known, averaged over these; 0 where none of the batch is."""
    known = labels_B != UNKNOWN
    if not bool(known.any()):
        return student_BK.sum() * 0.0
    return F.cross_entropy(student_BK[known], labels_B[known])


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """What the student's loss is made of: a weighted sum.

    Args:
        soft: weight of the softened probabilities.
        logits: weight of the mean square of the logits.
        hidden: weight of the hidden states.
        labels: weight of the true labels; 0 is to learn without any.
        temperature: of the softened probabilities.
        hidden_kind: `cosine` or `mse`.

    Raises:
        LabError: if a weight is negative or not finite, all are 0, or the temperature is not positive.
    """

    soft: float = 0.9
    logits: float = 0.0
    hidden: float = 0.0
    labels: float = 0.1
    temperature: float = 4.0
    hidden_kind: HiddenKind = "cosine"

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        for name in _WEIGHTS:
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise LabError(
                    say(
                        en=f"the weight {name} must be a finite number, at least 0, but {value!r} was received.",
                        fr=f"le poids {name} doit être un nombre fini, positif ou nul, mais {value!r} a été reçu.",
                    )
                )
        if not any(getattr(self, name) for name in _WEIGHTS):
            raise LabError(
                say(
                    en="the weights soft, logits, hidden and labels are all 0: the student would learn nothing; give "
                    "at least one of them a positive weight.",
                    fr="les poids soft, logits, hidden et labels sont tous nuls : l’étudiant n’apprendrait rien ; "
                    "donnez un poids positif à l’un d’eux au moins.",
                )
            )
        hidden_loss(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1), self.hidden_kind)

    @property
    def needs_teacher(self) -> bool:
        """Whether anything but the labels counts."""
        return bool(self.soft or self.logits or self.hidden)

    def of_logits(self, student_BK: Tensor, teacher_BK: Tensor | None, labels_B: Tensor) -> Tensor:
        """The part that the logits decide; what has weight 0 is not computed.

        Args:
            student_BK: logits of the student.
            teacher_BK: logits of the teacher; None where no weight needs them.
            labels_B: true classes, `UNKNOWN` where nobody has told them; not read where their weight is 0.
        """
        total = student_BK.new_zeros(())
        if teacher_BK is not None and self.soft:
            total = total + self.soft * soft_loss(student_BK, teacher_BK, self.temperature)
        if teacher_BK is not None and self.logits:
            total = total + self.logits * logit_loss(student_BK, teacher_BK)
        if self.labels:
            total = total + self.labels * label_loss(student_BK, labels_B)
        return total


def _french(number: float) -> str:
    return f"{number:g}".replace(".", ",")
