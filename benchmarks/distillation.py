"""A student with half of its teacher's parameters, taught in ten ways, each seed with a teacher of its own.

    python benchmarks/distillation.py --seeds 5 --out distillation

All students of a seed make the same number of steps. With all labels: alone, softened probabilities (Hinton et al.
2015), logits, the teacher's blocks alone, and DistilBERT's recipe; with 100 labels: the same, and the other images
without label. Writes OUT.json and OUT-fr.png, OUT-en.png, and prints the medians of accuracy and of what was kept.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from pydantic import Field
from torch import nn
from tqdm import tqdm

from dlojz.base.contract import Contract
from dlojz.base.files import write_atomic
from dlojz.base.language import say, use_language
from dlojz.compress.distillation import STUDENT_SEED, Initialisation, Mixture, distil, new_student
from dlojz.compress.task import Progress, Settings, Task, accuracy, digits, fit, new_model, parameters
from dlojz.display.canvas import LabFigure, finish, new_figure, plain
from dlojz.display.style import BLACK, BLUE, GREEN, GREY, ORANGE

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


GOAL = 0.97
"""What DistilBERT keeps of its teacher. Source: Sanh et al. 2019 (arXiv 1910.01108), abstract."""
HIDDEN_WITHIN = 0.0015
"""Half an image of 360, over an accuracy of nearly 1."""


def distillation_figure(trials: Sequence[StudentTrial], path: str | Path | None = None) -> LabFigure:
    """Draw one row per way to teach: a dot per seed, a bar for the median, and how much it kept in words.

    Args:
        trials: of any arms and seeds.
        path: picture to write, if any.

    Raises:
        LabError: if the picture cannot be written.
    """
    arms = [arm for arm in ARMS if any(one.arm == arm.name for one in trials)]
    figure = new_figure(10.5, 1.6 + 0.42 * len(arms), alt=description(trials))
    axes = figure.subplots()
    least = min(GOAL, *(one.kept for one in trials))
    most = max(1.0, *(one.kept for one in trials))
    axes.axvline(1, color=BLACK, linewidth=1)
    axes.axvline(GOAL, color=GREY, linewidth=1, linestyle="--")
    for place, arm in enumerate(arms):
        _row(axes, place, arm.initialise == "teacher", [one.kept for one in trials if one.arm == arm.name],
             median_kept(trials, arm.name), most)  # fmt: skip
    first_few = next((place for place, arm in enumerate(arms) if arm.labels is not None), None)
    if first_few:
        axes.axhline(first_few - 0.5, color="#bbbbbb", linewidth=0.8)
    axes.set_yticks(range(len(arms)), [arm.title for arm in arms], fontsize=9)
    axes.set_ylim(len(arms) - 0.5, -0.9)
    axes.set_xlim(least - 0.06 * (most - least), most + 0.16 * (most - least))
    axes.annotate(say(en="teacher", fr="professeur"), (1, -0.62), xytext=(4, 0), textcoords="offset points",
                  fontsize=8, va="center")  # fmt: skip
    axes.annotate(_percent(GOAL), (GOAL, -0.62), xytext=(-4, 0), textcoords="offset points", fontsize=8, va="center",
                  ha="right", color="#666666")  # fmt: skip
    plain(axes)
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _percent(value, 0)))
    axes.set_xlabel(
        say(
            en="accuracy over the teacher's of the same seed (held-out images)\n"
            "circle: begun with fresh weights; square: with the teacher's blocks",
            fr="exactitude rapportée à celle du professeur de même graine (images mises de côté)\n"
            "rond : parti de poids neufs ; carré : des blocs du professeur",
        ),
        fontsize=9,
    )
    axes.set_title(_title(trials), loc="left", fontsize=10)
    return finish(figure, path)


def description(trials: Sequence[StudentTrial]) -> str:
    """The figure in words: what each arm kept."""
    arms = [arm for arm in ARMS if any(one.arm == arm.name for one in trials)]
    colon = say(en=":", fr=" :")
    each = "; ".join(f"{arm.title}{colon} {_percent(median_kept(trials, arm.name))}" for arm in arms)
    return say(
        en=f"What a student keeps of its teacher's accuracy, median over the seeds. {each}.",
        fr=f"Ce qu’un étudiant garde de l’exactitude de son professeur, médiane des graines. {each}.",
    )


def _row(axes: Axes, place: int, begun: bool, kept: Sequence[float], middle: float, most: float) -> None:
    color, marker = (GREEN, "s") if begun else (BLUE, "o")
    axes.plot([middle, middle], [place - 0.3, place + 0.3], color=ORANGE, linewidth=4, solid_capstyle="butt", zorder=1)
    for same in _together(kept):
        for number, value in enumerate(same):
            axes.plot([value], [place + 0.15 * (number - (len(same) - 1) / 2)], color=color, marker=marker,
                      markersize=6, markeredgecolor="white", markeredgewidth=0.7, zorder=2)  # fmt: skip
    axes.annotate(_percent(middle), (1, place), xycoords=("axes fraction", "data"), xytext=(-4, 0),
                  textcoords="offset points", ha="right", va="center", fontsize=9)  # fmt: skip


def _together(kept: Sequence[float]) -> list[list[float]]:
    """Values by groups that one dot would hide: they are laid below one another."""
    groups: list[list[float]] = []
    for value in sorted(kept):
        if groups and value - groups[-1][0] < HIDDEN_WITHIN:
            groups[-1].append(value)
        else:
            groups.append([value])
    return groups


def _title(trials: Sequence[StudentTrial]) -> str:
    one = trials[0]
    share = one.parameters / one.teacher_parameters
    seeds, steps = len({trial.seed for trial in trials}), one.steps
    return say(
        en=f"{one.student}: {_percent(share)} of its teacher's parameters; {seeds} seed(s), {steps} steps each; "
        "orange: median",
        fr=f"{one.student} : {_percent(share)} des paramètres du professeur ; {seeds} graine(s), {steps} pas chacune ; "
        "orange : médiane",
    )


def _percent(share: float, digits: int = 1) -> str:
    return say(en=f"{100 * share:.{digits}f}%", fr=f"{100 * share:.{digits}f} %".replace(".", ","))


def table(trials: Sequence[StudentTrial]) -> str:
    """One line per arm."""
    teachers = {one.seed: one.teacher_accuracy for one in trials}
    share = trials[0].parameters / trials[0].teacher_parameters
    lines = [
        f"teacher: {statistics.median(teachers.values()):.4f} (median of {len(teachers)}); student: {share:.1%} of its "
        "parameters",
        f"{'arm':<18} accuracy    kept  worst   best",
    ]
    for arm in ARMS:
        own = [one for one in trials if one.arm == arm.name]
        kept = [one.kept for one in own]
        middle = statistics.median(one.accuracy for one in own)
        lines.append(f"{arm.name:<18} {middle:8.4f} {statistics.median(kept):7.4f} {min(kept):6.3f} {max(kept):6.3f}")
    return "\n".join(lines)


def main(seeds: int = 5, epochs: int = 12, student: str = "vit_mini", threads: int = 1, out: str = "") -> None:
    """Train, print and keep.

    Args:
        seeds: teachers.
        epochs: of a training on all images; the others make as many steps.
        student: model of the catalogue.
        threads: of torch.
        out: path without ending; nothing is written where it is empty.
    """
    torch.set_num_threads(threads)
    task, trials = digits(), []
    steps = Settings(epochs).steps(task)
    with tqdm(total=seeds * (len(ARMS) + 1) * steps, unit=" steps") as bar:
        for seed in range(seeds):
            settings = Settings(epochs, seed=seed)
            bar.set_description(f"seed {seed}: teacher")
            teacher = new_model("vit_tiny", task, seed)
            fit(teacher, task, settings, progress=lambda done, total: bar.update())
            for arm in ARMS:
                bar.set_description(f"seed {seed}: {arm.name}")
                trials.append(
                    teach(arm, teacher, task, settings, student=student, progress=lambda done, total: bar.update())
                )
            if out:
                write_atomic(Path(f"{out}.json"), json.dumps([one.to_dict() for one in trials], indent=1))
    print(table(trials))
    if out:
        for language in ("fr", "en"):
            use_language(language)
            distillation_figure(trials, f"{out}-{language}.png")


if __name__ == "__main__":
    tyro.cli(main)
