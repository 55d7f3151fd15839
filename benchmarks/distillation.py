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
from pathlib import Path

import torch
import tyro
from tqdm import tqdm

from dlojz.compress.distillation_trial import ARMS, StudentTrial, teach
from dlojz.compress.fitting import Settings
from dlojz.compress.task import digits
from dlojz.compress.teachers import trained_teacher
from dlojz.record import write_atomic
from dlojz.text import use_language
from dlojz.viz.compress_figure_distillation import distillation_figure


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
            teacher = trained_teacher("vit_tiny", task, settings, progress=lambda done, total: bar.update())
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
