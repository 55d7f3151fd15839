"""Figures and tables of lab 11 on distillation: a teacher's soft answers, students alone and taught.

Layer 6 (labs), on `dlojz.viz`. Invariant: students of one seed begin with the same weights, make as many updates and
read their images in the same order where they have the same images; only the loss differs.

Shape suffixes: N images, K classes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dlojz.labs.compress_shown import answered
from dlojz.labs.distill_mixed_exercises import UNKNOWN
from dlojz.labs.pipeline_figures import Sheet, or_to_do, percent, pictured, plain_number
from dlojz.labs.verdict import Said, Verdict
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.palette import BLUE, SKY

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dlojz.compress.task import Task

MixedLoss = Callable[["Tensor", "Tensor", "Tensor", float, float], "Tensor"]
STUDENT, EPOCHS, LABELS, TEMPERATURE, ALPHA = "vit_mini", 5, 60, 4.0, 0.9
DISTILBERT_SHARE, DISTILBERT_KEPT = 0.60, 0.97
"""Share of BERT's parameters, and of its score on GLUE: Sanh et al. 2019 (arXiv 1910.01108), abstract: "reduce the size
of a BERT model by 40%, while retaining 97% of its language understanding capabilities"."""


@pictured
def softened(teacher: nn.Module, task: Task, temperatures: Sequence[float]) -> LabFigure:
    """A held-out image on which the teacher hesitates, and its probabilities at several temperatures."""
    from dlojz.compress.fitting import logits

    answers_NK = logits(teacher, task.held_out_NCHW)
    second_N = answers_NK.softmax(1).topk(2).values[:, 1]
    right_N = answers_NK.argmax(1) == task.held_out_labels_N
    chosen = int((second_N * right_N).argmax())
    label = int(task.held_out_labels_N[chosen])
    told = ", ".join(f"T = {plain_number(one)}" for one in temperatures)
    figure = new_figure(
        2.0 + 2.6 * len(temperatures), 2.6,
        alt=say(
            en=f"A handwritten {label}, and the teacher's probabilities for it at {told}: the higher T, the flatter. "
            "The dark bar is the true class.",
            fr=f"Un {label} manuscrit, et les probabilités du professeur à {told} : plus T est haut, plus elles "
            "s’aplatissent. La barre foncée est la vraie classe.",
        ),
    )  # fmt: skip
    first, *others = figure.subplots(1, 1 + len(temperatures), width_ratios=[0.7, *[1] * len(temperatures)])
    first.imshow(task.held_out_NCHW[chosen].mean(0).tolist(), cmap="gray_r")
    first.set_axis_off()
    first.set_title(say(en=f"a {label}", fr=f"un {label}"))
    for axes, temperature in zip(others, temperatures, strict=True):
        shares_K = (answers_NK[chosen] / temperature).softmax(0)
        places = range(len(shares_K))
        axes.bar(places, (100 * shares_K).tolist(), color=[BLUE if place == label else SKY for place in places])
        axes.set_title(f"T = {plain_number(temperature)}")
        axes.set_ylim(0, 100)
        axes.set_xticks(list(places))
        axes.set_xlabel(say(en="class (dark: the true one)", fr="classe (foncé : la vraie)"))
        plain(axes)
    others[0].set_ylabel(say(en="probability (%)", fr="probabilité (%)"))
    return finish(figure)


_ARMS = {
    "labels": Said("student alone, all labels", "étudiant seul, toutes les étiquettes"),
    "both": Said("student and teacher, all labels", "étudiant et professeur, toutes les étiquettes"),
    "few": Said("student alone, {labels} labels", "étudiant seul, {labels} étiquettes"),
    "taught": Said("student and teacher, {labels} labels", "étudiant et professeur, {labels} étiquettes"),
    "unlabelled": Said("student and teacher, no label", "étudiant et professeur, aucune étiquette"),
}


@dataclass(frozen=True, kw_only=True)
class Students:
    """What students have learnt, by what they were given.

    Args:
        share: their parameters over the teacher's.
        labels: true labels that the poorer ones were given.
        kept: by arm and seed, accuracy over that of the teacher.
    """

    share: float
    labels: int
    kept: dict[str, tuple[float, ...]]

    def median(self, arm: str) -> float:
        """Share of the teacher's accuracy that an arm keeps, median over the seeds."""
        return statistics.median(self.kept[arm])

    @property
    def sheet(self) -> Sheet:
        """One row per arm, DistilBERT below."""
        rows = [
            (
                str(_ARMS[arm]).format(labels=self.labels),
                percent(self.share),
                percent(self.median(arm)),
                " – ".join(percent(one) for one in (min(found), max(found))),
            )
            for arm, found in self.kept.items()
        ]
        published = percent(DISTILBERT_SHARE), percent(DISTILBERT_KEPT), "–"
        rows.append((say(en="DistilBERT (published)", fr="DistilBERT (publié)"), *published))
        head = (
            say(en="what is learnt from", fr="données d’apprentissage"),
            say(en="parameters", fr="paramètres"),
            say(en="accuracy kept, median", fr="exactitude gardée, médiane"),
            say(en="lowest – highest", fr="min – max"),
        )
        return Sheet(head, tuple(rows))

    def __repr__(self) -> str:
        return str(self.sheet)

    def _repr_html_(self) -> str:
        return self.sheet._repr_html_()


@or_to_do
def students(
    teacher: nn.Module, task: Task, mixed_loss: MixedLoss, *, seeds: Sequence[int] = (0, 1), labels: int = LABELS
) -> Students:
    """Train students alone and with the student's mixed loss.

    Args:
        teacher: trained.
        task: what it was trained for.
        mixed_loss: of logits, the teacher's logits, labels (-1: unknown), temperature and alpha.
        seeds: of the students' weights and of the order of the images.
        labels: true labels of the arms that have few.
    """
    import torch

    from dlojz.compress.fitting import Settings, accuracy, cross_entropy, fit, new_model

    def taught(alpha: float) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
        def loss(model: nn.Module, images: Tensor, known: Tensor) -> Tensor:
            with torch.no_grad():
                answers = teacher(images)
            return mixed_loss(model(images), answers, known, TEMPERATURE, alpha)

        return loss

    pair = torch.zeros(2, 3)
    mixed_loss(pair, pair, torch.tensor([0, -1]), TEMPERATURE, ALPHA)  # still to do? then nothing is trained
    partly, few = task.partly_labelled(labels), task.few(labels)
    updates = Settings(epochs=EPOCHS).steps(task)
    arms = {
        "labels": (task, cross_entropy, EPOCHS),
        "both": (task, taught(ALPHA), EPOCHS),
        "few": (few, cross_entropy, round(updates / few.batches_per_epoch(64))),
        "taught": (partly, taught(ALPHA), EPOCHS),
        "unlabelled": (replace(task, labels_N=torch.full_like(task.labels_N, UNKNOWN)), taught(1.0), EPOCHS),
    }
    base, share = accuracy(teacher, task), 0.0
    kept: dict[str, tuple[float, ...]] = {}
    for arm, (own, loss, epochs) in arms.items():
        found = []
        for seed in seeds:
            model = new_model(STUDENT, task, seed)
            share = _count(model) / _count(teacher)
            fit(model, own, Settings(epochs=epochs, seed=seed), loss=loss)
            found.append(accuracy(model, task) / base)
        kept[arm] = tuple(found)
    return Students(share=share, labels=labels, kept=kept)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def helps(trained: Students | Verdict) -> Sheet | Verdict:
    """Yes or no: the teacher brings much where labels are few, little where there are all; DistilBERT's mark."""
    if isinstance(trained, Verdict):
        return trained
    questions = (
        (
            say(
                en=f"with {trained.labels} labels, the teacher brings more than 5 points",
                fr=f"avec {trained.labels} étiquettes, le professeur apporte plus de 5 points",
            ),
            trained.median("taught") > trained.median("few") + 0.05,
        ),
        (
            say(
                en="with all labels, the teacher brings more than 5 points",
                fr="avec toutes les étiquettes, le professeur apporte plus de 5 points",
            ),
            trained.median("both") > trained.median("labels") + 0.05,
        ),
        (
            say(en="97% kept by 60% of the parameters or less", fr="97 % gardés par 60 % des paramètres au plus"),
            trained.share <= DISTILBERT_SHARE and trained.median("taught") >= DISTILBERT_KEPT,
        ),
    )
    return answered(questions)
