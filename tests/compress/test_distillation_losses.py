"""The losses of distillation: equal to torch's, weighted as asked, and refused where they mean nothing."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.compress.distillation import Mixture, hidden_loss, label_loss, logit_loss, soft_loss
from dlojz.compress.task import UNKNOWN


def logits(seed: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(8, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0, 20.0])
def test_soft_loss_is_torchs_divergence_times_the_square_of_the_temperature(temperature: float) -> None:
    student, teacher = logits(0), logits(1)
    probabilities = F.softmax(teacher / temperature, dim=1)
    divergence = torch.nn.KLDivLoss(reduction="batchmean")(F.log_softmax(student / temperature, 1), probabilities)
    assert soft_loss(student, teacher, temperature).item() == pytest.approx(temperature**2 * divergence.item(), 1e-12)


def test_soft_loss_has_the_gradient_of_the_cross_entropy_with_soft_targets() -> None:
    """The entropy of the teacher, by which the two differ, does not depend on the student."""
    temperature, teacher = 4.0, logits(1)
    found = []
    for loss in (
        lambda own: soft_loss(own, teacher, temperature),
        lambda own: temperature**2 * F.cross_entropy(own / temperature, F.softmax(teacher / temperature, 1)),
    ):
        student = logits(0).requires_grad_()
        loss(student).backward()
        found.append(student.grad)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-15)


def test_soft_loss_at_high_temperature_has_the_gradient_of_centred_logits() -> None:
    """Hinton et al. 2015, section 2.1: (z − v) / (N T²) per sample, for logits whose mean is 0, times our T²."""
    student, teacher = logits(0).requires_grad_(), logits(1)
    soft_loss(student, teacher, 1000.0).backward()
    own, others = student.detach(), teacher
    centred = (own - own.mean(1, keepdim=True)) - (others - others.mean(1, keepdim=True))
    expected = centred / own.shape[1] / own.shape[0]
    # What is left out is of the order of the logits over T: 10 / 1000.
    torch.testing.assert_close(student.grad, expected, rtol=0, atol=0.02 * expected.abs().max().item())
    student.grad = None
    soft_loss(student, teacher, 1.0).backward()
    assert (student.grad - expected).abs().max() > 0.2 * expected.abs().max()


def test_each_loss_is_nothing_where_the_student_answers_as_the_teacher() -> None:
    same = logits(0)
    assert soft_loss(same, same, 4.0).item() == pytest.approx(0, abs=1e-12)
    assert logit_loss(same, same).item() == 0
    stream = same.unsqueeze(1)
    assert hidden_loss(stream, stream).item() == pytest.approx(0, abs=1e-12)
    assert hidden_loss(stream, 2 * stream).item() == pytest.approx(0, abs=1e-12)
    assert hidden_loss(stream, 2 * stream, "mse").item() == pytest.approx(F.mse_loss(stream, 2 * stream).item())
    assert hidden_loss(stream, -stream).item() == pytest.approx(2)


def test_the_cosine_is_that_of_torchs_embedding_loss() -> None:
    student, teacher = logits(0), logits(1)
    expected = F.cosine_embedding_loss(student, teacher, torch.ones(8, dtype=torch.float64))
    assert hidden_loss(student[None], teacher[None]).item() == pytest.approx(expected.item(), rel=1e-12)


def test_soft_loss_logit_loss_and_hidden_loss_give_the_teacher_no_gradient() -> None:
    student, teacher = logits(0).requires_grad_(), logits(1).requires_grad_()
    total = soft_loss(student, teacher, 2.0) + logit_loss(student, teacher)
    (total + hidden_loss(student[None], teacher[None])).backward()
    assert student.grad is not None and teacher.grad is None


def test_unknown_labels_count_for_nothing() -> None:
    student = logits(0)
    labels = torch.arange(8) % 10
    labels[3:] = UNKNOWN
    assert label_loss(student, labels).item() == pytest.approx(F.cross_entropy(student[:3], labels[:3]).item())
    nobody = student.requires_grad_()
    loss = label_loss(nobody, torch.full((8,), UNKNOWN))
    loss.backward()
    assert loss.item() == 0 and nobody.grad is not None and not nobody.grad.any()


def test_a_mixture_is_the_weighted_sum() -> None:
    student, teacher, labels = logits(0), logits(1), torch.arange(8) % 10
    mixture = Mixture(soft=0.5, logits=0.3, labels=0.2, temperature=3.0)
    expected = (
        0.5 * soft_loss(student, teacher, 3.0)
        + 0.3 * logit_loss(student, teacher)
        + 0.2 * F.cross_entropy(student, labels)
    )
    assert mixture.of_logits(student, teacher, labels).item() == pytest.approx(expected.item(), rel=1e-12)
    assert mixture.needs_teacher and not Mixture(soft=0.0, labels=1.0).needs_teacher


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf, 1e-9])
def test_soft_loss_and_mixture_refuse_a_temperature_that_is_not_positive(temperature: float) -> None:
    with pytest.raises(
        LabError, match=r"temperature must be greater than 0 \(from 0.01 to 1000\), but .* was received"
    ):
        soft_loss(logits(0), logits(1), temperature)
    with pytest.raises(LabError, match="temperature must be greater than 0"):
        Mixture(temperature=temperature)


def test_mixture_refuses_a_temperature_in_french_too() -> None:
    use_language("fr")
    try:
        with pytest.raises(LabError, match="temperature doit être strictement positive .*, mais 0 a été reçu"):
            Mixture(temperature=0)
    finally:
        use_language("en")


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ({"soft": -0.1}, "the weight soft must be a finite number, at least 0, but -0.1 was received"),
        ({"labels": math.nan}, "the weight labels must be a finite number"),
        ({"soft": 0.0, "labels": 0.0}, "are all 0: the student would learn nothing"),
        ({"hidden_kind": "cosinus"}, "unknown kind of hidden loss 'cosinus': did you mean 'cosine'?"),
    ],
)
def test_mixture_refuses_weights_that_mean_nothing(weights: dict[str, float], sentence: str) -> None:
    with pytest.raises(LabError, match=sentence):
        Mixture(**weights)  # type: ignore[arg-type]
