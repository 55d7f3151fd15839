"""The methods of distillation: from a `Start` to a `Shrunk`.

Layer 2, on `distillation`. Invariant: what a student weighs and how long it computes is foreseen from its entry in the
catalogue alone, before any of its weights is there.
"""

from __future__ import annotations

from typing import Any

import torch

from dlojz import models
from dlojz.compress.distillation import Initialisation, distil, larger_student_sentence, new_student
from dlojz.compress.distillation_losses import HiddenKind, Mixture
from dlojz.compress.fitting import Settings
from dlojz.compress.measuring import parameters, payload_bytes, stored_weights
from dlojz.compress.method import Shrunk, Start
from dlojz.compress.task import Task
from dlojz.schema import LabError
from dlojz.text import say

STUDENT_SEED = 100
"""Added to the seed of a start: a student does not begin with the weights that its teacher began with."""


def student_alone(start: Start, **shared: Any) -> Shrunk:
    """The student without a teacher: its loss is the cross-entropy with the labels."""
    return _shrunk(start, Mixture(soft=0.0, labels=1.0), **shared)


def soft(start: Start, *, temperature: float, labels: float, **shared: Any) -> Shrunk:
    """Softened probabilities, and labels of a weight; the two weights add up to 1."""
    mixture = Mixture(soft=_rest_of(labels), labels=labels, temperature=temperature)
    return _shrunk(start, mixture, **shared)


def logits(start: Start, *, labels: float, **shared: Any) -> Shrunk:
    """Mean square of the logits, and labels of a weight; the two weights add up to 1."""
    return _shrunk(start, Mixture(soft=0.0, logits=_rest_of(labels), labels=labels), **shared)


def hidden(
    start: Start, *, temperature: float, labels: float, hidden: float, hidden_kind: HiddenKind, **shared: Any
) -> Shrunk:
    """Softened probabilities and labels whose weights add up to 1, and hidden states of a weight of their own."""
    mixture = Mixture(
        soft=_rest_of(labels), labels=labels, hidden=hidden, temperature=temperature, hidden_kind=hidden_kind
    )
    return _shrunk(start, mixture, **shared)


def _rest_of(labels: float) -> float:
    """What is left of 1 for the teacher's part.

    Raises:
        LabError: for a share of the labels that is none.
    """
    if not 0 <= labels <= 1:
        raise LabError(
            say(
                en=f"labels is their share of the loss, from 0 to 1 (the teacher's part is the rest), but {labels!r} "
                "was received.",
                fr="labels est leur part dans la perte, de 0 à 1 (le reste est celle du professeur), mais "
                f"{labels!r} a été reçu.",
            )
        )
    return 1 - labels


def foreseen(student: str, teacher: str, task: Task) -> tuple[int, float | None]:
    """Bytes of a student's weights, and its FLOPs over the teacher's: the ratio of times if a FLOP takes the same in
    both; None for models of two families, whose FLOPs do not.
    """
    with torch.device("meta"):
        stored = stored_weights(models.build(student, image_size=task.image_size, num_classes=task.num_classes))
    if type(models.spec(student).size) is not type(models.spec(teacher).size):
        return payload_bytes(stored), None
    return payload_bytes(stored), _describe(student, task).flops / _describe(teacher, task).flops


def larger_than_teacher(student: str, teacher: str, task: Task) -> str | None:
    """The sentence that warns, before anything is trained, of a student that is no smaller; None for one that is."""
    return larger_student_sentence(*(_describe(name, task).parameters for name in (student, teacher)))


def _describe(name: str, task: Task) -> models.ModelSummary:
    return models.describe(name, task.image_size, num_classes=task.num_classes)


def _shrunk(
    start: Start,
    mixture: Mixture,
    *,
    student: str,
    initialise: Initialisation,
    epochs: int,
    learning_rate: float,
) -> Shrunk:
    predicted_bytes, ratio = foreseen(student, start.teacher_name, start.task)
    settings = Settings(epochs=epochs, learning_rate=learning_rate, seed=start.seed)
    model = new_student(student, start.teacher, start.task, start.seed + STUDENT_SEED, initialise)
    done = distil(model, start.teacher, start.task, settings, mixture, progress=start.progress)
    return Shrunk(
        model=done.student,
        stored=stored_weights(done.student),
        predicted_bytes=predicted_bytes,
        parameters=parameters(done.student),
        notes=done.notes,
        predicted_latency_ratio=ratio,
    )
