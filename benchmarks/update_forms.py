"""The forms of an update, each model's in one run: seconds as paired ratios, peak measured beside predicted.

    python benchmarks/update_forms.py --rounds 30 --out update_forms

In each round every form makes one step, the first one in turn; ratios are to `for_loop` in the same round, with their
median. Models of many small tensors (coatnet_tiny, vit_ti_16) and of few large ones (alexnet). Writes OUT.json and
OUT-fr.png, OUT-en.png, and prints the table.
"""

from __future__ import annotations

import gc

import torch
import tyro

from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.display.figures.training_figures import update_figure
from dlojz.train.trials import FORMS, FormMeasure, measure_forms, write_measures

MODELS = {
    "coatnet_tiny": {"image_size": 32, "micro_batch": 4},
    "vit_ti_16": {"image_size": 64, "micro_batch": 2},
    "alexnet": {"image_size": 64, "micro_batch": 1},
}


def row(one: FormMeasure) -> str:
    """One line of the table."""
    update = "      –        –" if one.update_s is None else f"{1e3 * one.update_s:7.2f}  {one.update_ratio:7.3f}"
    step = f"{1e3 * one.step_s:8.2f}  {one.step_ratio:6.3f} [{one.step_ratio_low:.3f}, {one.step_ratio_high:.3f}]"
    predicted = one.predicted_peak_bytes
    beside = "" if predicted is None else f"{predicted / 1e6:9.2f}  {predicted / one.measured_peak_bytes - 1:+7.2%}"
    gradients = f"{one.predicted_gradient_bytes / 1e6:8.2f}"
    return f"{one.form:<12} {update}  {step}  {one.measured_peak_bytes / 1e6:9.2f} {beside}  {gradients}"


def main(rounds: int = 30, optimizer: str = "adamw", threads: int = 1, device: str = "auto", out: str = "") -> None:
    """Measure, print and keep.

    Args:
        rounds: steps of each form.
        optimizer: sgd, momentum or adamw.
        threads: of torch on the CPU.
        device: auto, cpu or cuda.
        out: path without ending; nothing is written where it is empty.
    """
    torch.set_num_threads(threads)
    measures = []
    for model, fields in MODELS.items():
        config = RunConfig.of(model=model, optimizer=optimizer, device=device, learning_rate=1e-5, **fields)
        found = measure_forms(config, FORMS, rounds)
        gc.collect()
        measures += found
        print(f"\n{model}: {found[0].parameters / 1e6:.2f} M parameters in {found[0].tensors} tensors, {optimizer}, "
              f"{rounds} rounds, {found[0].device}")  # fmt: skip
        print("form          update ms   ratio   step ms   ratio [quartiles]      peak MB  predicted   error  grad. MB")
        for one in found:
            print(row(one))
    if out:
        write_measures(f"{out}.json", measures)
        for language in ("fr", "en"):
            use_language(language)
            update_figure(measures, f"{out}-{language}.png")


if __name__ == "__main__":
    tyro.cli(main)
