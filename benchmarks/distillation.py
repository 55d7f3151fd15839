"""Lab 11's distillation over several seeds: a student with half of its teacher's blocks, taught in five ways.

    python benchmarks/distillation.py --seeds 5 --out distillation

Each seed has a teacher of its own; all students make the same number of steps: with all labels, with 60 of them, each
also with the teacher's softened probabilities (Hinton et al. 2015) of all images, and with these alone. Prints what of
its teacher's accuracy a student keeps, medians over the seeds, and writes OUT.json.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from tqdm import tqdm

from dlojz.base.files import write_atomic
from dlojz.compress.task import Task, accuracy, digits, new_model, parameters

TEMPERATURE = 4.0
FEW = 60
"""Labels of the arms that have few."""
BATCH = 64
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Arm:
    """One way to teach: weight of the teacher's answers, from 0 to 1, labels, and whether the other images are seen."""

    name: str
    alpha: float
    labels: int | None = None
    unlabelled: bool = False


ARMS = (
    Arm("all labels", 0.0),
    Arm("all labels + teacher", 0.9),
    Arm("60 labels", 0.0, FEW),
    Arm("60 labels + teacher", 0.9, FEW, unlabelled=True),
    Arm("teacher alone", 1.0, 0, unlabelled=True),
)


@dataclass(frozen=True)
class StudentTrial:
    """One arm on the teacher of one seed."""

    arm: str
    seed: int
    accuracy: float
    teacher_accuracy: float

    @property
    def kept(self) -> float:
        """The student's accuracy over its teacher's."""
        return self.accuracy / self.teacher_accuracy


def train(model: nn.Module, loss: Loss, inputs: Tensor, labels: Tensor, steps: int, seed: int) -> nn.Module:
    """Train in place as the lab does: AdamW, batches drawn by the seed, a rate that falls by 2 % at each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(steps):
        index = torch.randint(len(inputs), (BATCH,), generator=generator)
        optimizer.zero_grad()
        loss(model, inputs[index], labels[index]).backward()
        optimizer.step()
        decay.step()
    return model


def taught_by(teacher: nn.Module | None, alpha: float) -> Loss:
    """α of the softened divergence over all samples, 1 − α of the cross-entropy over those with a label."""

    def loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        answers, known = model(inputs), labels != -1
        total = answers.new_zeros(())
        if teacher is not None and alpha:
            with torch.no_grad():
                soft = (teacher(inputs) / TEMPERATURE).softmax(-1)
            log_soft = (answers / TEMPERATURE).log_softmax(-1)
            total = alpha * TEMPERATURE**2 * F.kl_div(log_soft, soft, reduction="batchmean")
        if known.any() and alpha < 1:
            total = total + (1 - alpha) * F.cross_entropy(answers[known], labels[known])
        return total

    return loss


def teach(arm: Arm, teacher: nn.Module, task: Task, steps: int, seed: int, student: str) -> StudentTrial:
    """Train one student and judge it; a student does not begin with the weights that its teacher began with."""
    inputs, labels = task.inputs_NCHW, task.labels_N.clone()
    if arm.labels is not None:
        labels[arm.labels :] = -1
        if not arm.unlabelled:
            inputs, labels = inputs[: arm.labels], labels[: arm.labels]
    model = train(new_model(student, task, seed + 100), taught_by(teacher, arm.alpha), inputs, labels, steps, seed)
    return StudentTrial(arm.name, seed, accuracy(model, task), accuracy(teacher, task))


def main(seeds: int = 5, steps: int = 90, student: str = "vit_mini", threads: int = 1, out: str = "") -> None:
    """Train, print and keep.

    Args:
        seeds: teachers.
        steps: of each student; the teacher makes a third more.
        student: model of the catalogue.
        threads: of torch.
        out: path without ending; nothing is written where it is empty.
    """
    torch.set_num_threads(threads)
    task = digits()
    trials: list[StudentTrial] = []
    for seed in tqdm(range(seeds), unit=" teachers"):
        teacher = new_model("vit_tiny", task, seed)
        train(teacher, taught_by(None, 0.0), task.inputs_NCHW, task.labels_N, steps * 4 // 3, seed)
        teacher.eval()
        trials += [teach(arm, teacher, task, steps, seed, student) for arm in ARMS]
        if out:
            write_atomic(Path(f"{out}.json"), json.dumps([asdict(trial) for trial in trials], indent=1))
    share = parameters(new_model(student, task, 0)) / parameters(new_model("vit_tiny", task, 0))
    print(f"{student}: {share:.1%} of its teacher's parameters; {seeds} seeds, {steps} steps each")
    print(f"{'arm':<22} kept  worst   best")
    for arm in ARMS:
        kept = [trial.kept for trial in trials if trial.arm == arm.name]
        print(f"{arm.name:<22}{statistics.median(kept):5.3f}  {min(kept):5.3f}  {max(kept):5.3f}")


if __name__ == "__main__":
    tyro.cli(main)
