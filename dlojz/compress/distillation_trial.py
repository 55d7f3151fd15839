"""The same student taught in several ways, seed by seed: what is the teacher's doing, and what the labels'.

Layer 2, on `distillation`. Invariant: all arms of a seed share the teacher, the student's size and the number of
steps; they differ in what they see and in what their loss is.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field
from torch import nn

from dlojz.compress.distillation import Initialisation, distil, new_student
from dlojz.compress.distillation_losses import Mixture
from dlojz.compress.distilling import STUDENT_SEED
from dlojz.compress.fitting import Progress, Settings, accuracy
from dlojz.compress.measuring import parameters
from dlojz.compress.task import Task
from dlojz.schema import Contract
from dlojz.text import say

FEW = 100
"""Labels of the arms that have few."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to teach.

    Args:
        name: in files.
        mixture: of what the loss is made.
        initialise: what the student begins with.
        labels: how many images have a label; None: all.
        unlabelled: whether the other images are there, without label.
    """

    name: str
    mixture: Mixture
    initialise: Initialisation = "random"
    labels: int | None = None
    unlabelled: bool = False

    @property
    def title(self) -> str:
        """What it is, in the reader's language."""
        return _titles()[self.name]


_ALONE = Mixture(soft=0.0, labels=1.0)
_SOFT = Mixture()
_LOGITS = Mixture(soft=0.0, logits=1.0, labels=0.0)
_DISTILBERT = Mixture(soft=0.9, labels=0.1, hidden=1.0)

ARMS: tuple[Arm, ...] = (
    Arm(name="alone", mixture=_ALONE),
    Arm(name="soft", mixture=_SOFT),
    Arm(name="logits", mixture=_LOGITS),
    Arm(name="blocks_alone", mixture=_ALONE, initialise="teacher"),
    Arm(name="distilbert", mixture=_DISTILBERT, initialise="teacher"),
    Arm(name="few_alone", mixture=_ALONE, labels=FEW),
    Arm(name="few_soft", mixture=_SOFT, labels=FEW),
    Arm(name="few_unlabelled", mixture=_SOFT, labels=FEW, unlabelled=True),
    Arm(name="few_blocks_alone", mixture=_ALONE, initialise="teacher", labels=FEW),
    Arm(name="few_distilbert", mixture=_DISTILBERT, initialise="teacher", labels=FEW, unlabelled=True),
)
"""First with all labels, then with few."""


def _titles() -> dict[str, str]:
    return {
        "alone": say(en="alone: labels", fr="seul : étiquettes"),
        "soft": say(en="soft labels, T = 4", fr="étiquettes douces, T = 4"),
        "logits": say(en="logits, no labels", fr="logits, sans étiquettes"),
        "blocks_alone": say(en="alone, from the teacher's blocks", fr="seul, à partir des blocs du professeur"),
        "distilbert": say(en="DistilBERT's recipe", fr="recette de DistilBERT"),
        "few_alone": say(en=f"alone: {FEW} labels", fr=f"seul : {FEW} étiquettes"),
        "few_soft": say(en=f"soft labels, the same {FEW} images", fr=f"étiquettes douces, les mêmes {FEW} images"),
        "few_unlabelled": say(
            en=f"{FEW} labels, soft labels of all images", fr=f"{FEW} étiquettes, étiquettes douces partout"
        ),
        "few_blocks_alone": say(
            en=f"{FEW} labels, from the teacher's blocks", fr=f"{FEW} étiquettes, blocs du professeur"
        ),
        "few_distilbert": say(
            en=f"{FEW} labels, DistilBERT's recipe, all images", fr=f"{FEW} étiquettes, recette de DistilBERT"
        ),
    }


class StudentTrial(Contract):
    """One arm on the teacher of one seed."""

    arm: str
    seed: int
    student: str
    parameters: int = Field(gt=0)
    teacher_parameters: int = Field(gt=0)
    accuracy: float = Field(ge=0, le=1)
    teacher_accuracy: float = Field(gt=0, le=1)
    steps: int = Field(gt=0)

    @property
    def kept(self) -> float:
        """The student's accuracy over its teacher's."""
        return self.accuracy / self.teacher_accuracy


def teach(
    arm: Arm, teacher: nn.Module, task: Task, settings: Settings, *, student: str = "vit_mini",
    progress: Progress | None = None,
) -> StudentTrial:  # fmt: skip
    """Train one student and judge it.

    Args:
        arm: how it is taught.
        teacher: trained on the whole task.
        task: with all of its images and labels.
        settings: of a training on all images; with fewer images there are more epochs, for as many steps.
        student: model of the catalogue.
        progress: told after each step.
    """
    seen = task
    if arm.labels is not None:
        seen = task.partly_labelled(arm.labels) if arm.unlabelled else task.few(arm.labels)
    steps = settings.steps(task)
    epochs = round(steps / seen.batches_per_epoch(settings.batch_size))
    own = Settings(epochs, settings.learning_rate, settings.batch_size, settings.seed)
    model = new_student(student, teacher, task, settings.seed + STUDENT_SEED, arm.initialise)
    done = distil(model, teacher, seen, own, arm.mixture, progress=progress)
    return StudentTrial(
        arm=arm.name,
        seed=settings.seed,
        student=student,
        parameters=parameters(done.student),
        teacher_parameters=parameters(teacher),
        accuracy=accuracy(done.student, task),
        teacher_accuracy=accuracy(teacher, task),
        steps=len(done.losses),
    )


def median_kept(trials: Sequence[StudentTrial], arm: str) -> float:
    """Median over the seeds of a student's accuracy over its teacher's."""
    return statistics.median(one.kept for one in trials if one.arm == arm)
