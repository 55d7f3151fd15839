"""What few bits cost and what training gives back: accuracy after quantization, after tuning, and with it in mind.

    python benchmarks/quantization_accuracy.py --seeds 5 --out quantization_accuracy.json

For each seed one teacher (vit_tiny on the digits), then, for each number of bits and grid: quantized without training
(PTQ), quantized and then tuned (scales, biases, norms; the integers stay), and trained with straight-through gradients
(QAT), the last two for as many steps. Prints the median over the seeds, and the least and the largest.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from tqdm import tqdm

from dlojz.compress.quantization import convert, prepare
from dlojz.compress.quantized_model import quantize_model, stored_integers
from dlojz.compress.quantizers import RANGES, RangeChoice, Scheme, observe
from dlojz.compress.task import Settings, accuracy, digits, fit, new_model, payload_bytes

GRIDS: tuple[tuple[int, bool, RangeChoice], ...] = (
    (8, True, "min_max"),
    (8, False, "min_max"),
    (4, True, "min_max"),
    (4, False, "min_max"),
    (3, True, "min_max"),
    (3, False, "min_max"),
    (2, True, "min_max"),
    (2, True, "mse"),
    (2, False, "min_max"),
    (2, False, "mse"),
)
"""Bits, whether each output has its scale, how the range is chosen."""


@dataclass
class Cell:
    """Accuracies of one grid, one per seed."""

    grid: str
    stored_bytes: int
    ptq: list[float]
    tuned: list[float]
    qat: list[float]


def told(values: list[float]) -> str:
    """Median, least and largest."""
    return f"{statistics.median(values):.3f} [{min(values):.3f}, {max(values):.3f}]"


def main(
    seeds: int = 5,
    epochs: int = 3,
    learning_rate: float = 5e-4,
    teacher_epochs: int = 12,
    threads: int = 1,
    out: str = "",
) -> None:
    """Train, quantize, print and keep.

    Args:
        seeds: teachers.
        epochs: of tuning, and of quantization-aware training.
        learning_rate: of both.
        teacher_epochs: of the teachers.
        threads: of torch.
        out: JSON file; nothing is written where it is empty.
    """
    torch.set_num_threads(threads)
    task, begin = digits(), time.perf_counter()
    cells: dict[tuple[int, bool, RangeChoice], Cell] = {}
    static: dict[str, list[float]] = {choice: [] for choice in RANGES}
    teachers = []
    per_seed = Settings(teacher_epochs).steps(task) + 2 * sum(grid[0] < 8 for grid in GRIDS) * Settings(epochs).steps(
        task
    )
    bar = tqdm(total=seeds * per_seed, unit=" steps")
    for seed in range(seeds):
        bar.set_description(f"seed {seed}: teacher")
        teacher = new_model("vit_tiny", task, seed)
        fit(teacher, task, Settings(epochs=teacher_epochs, seed=seed), progress=lambda done, total: bar.update())
        teachers.append(accuracy(teacher, task))
        seen = observe(teacher, task.few(256).inputs_NCHW)
        for choice in RANGES:
            model = quantize_model(
                teacher, Scheme(), activations="static", activation_choice=choice, observed=seen
            )  # fmt: skip
            static[choice].append(accuracy(model, task))
        settings = Settings(epochs=epochs, learning_rate=learning_rate, seed=seed)
        for bits, per_channel, choice in GRIDS:
            scheme = Scheme(bits, True, per_channel)
            model = quantize_model(teacher, scheme, choice=choice)
            grid = f"{bits} bits, per {'channel' if per_channel else 'tensor'}, {choice}"
            bar.set_description(f"seed {seed}: {grid}")
            cell = cells.setdefault(
                (bits, per_channel, choice), Cell(grid, payload_bytes(stored_integers(model)), [], [], [])
            )
            cell.ptq.append(accuracy(model, task))
            if bits < 8:
                fit(model, task, settings, progress=lambda done, total: bar.update())
                cell.tuned.append(accuracy(model, task))
                learning = prepare(teacher, scheme, choice)
                fit(learning, task, settings, progress=lambda done, total: bar.update())
                cell.qat.append(accuracy(convert(learning), task))
    bar.close()
    print(f"\nteacher {told(teachers)}; {seeds} seeds, {time.perf_counter() - begin:.0f} s")
    for choice, values in static.items():
        print(f"INT8 weights and static inputs, {choice:<12}{told(values)}")
    print(f"{'grid':<28}{'bytes':>9}  {'PTQ':<24}{'tuned':<24}QAT")
    for cell in cells.values():
        trained = f"{told(cell.tuned):<24}{told(cell.qat)}" if cell.qat else ""
        print(f"{cell.grid:<28}{cell.stored_bytes:>9}  {told(cell.ptq):<24}{trained}")
    if out:
        found = {"teacher": teachers, "static": static, "cells": [asdict(cell) for cell in cells.values()]}
        Path(out).write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main)
