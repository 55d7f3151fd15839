"""The lottery ticket on vit_tiny and digits: winning tickets beside one-shot pruning, new weights and random masks.

    python benchmarks/lottery_ticket.py --seeds 5 --epochs 8 --out lottery

Every seed trains the dense network, then prunes and rewinds in rounds; at each sparsity three other tickets run the
same race. Writes OUT.json and OUT-fr.png, OUT-en.png, and prints the table of the medians.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path

import torch
import tyro
from tqdm import tqdm

from dlojz.compress.fitting import Settings
from dlojz.compress.lottery import KINDS, Race, Ticket, run_race, sparsities
from dlojz.compress.task import digits
from dlojz.text import use_language
from dlojz.viz.pruning_figure_lottery import lottery_figure

MODEL = "vit_tiny"


def main(
    seeds: int = 5,
    rounds: int = 5,
    sparsity: float = 0.96875,
    epochs: int = 8,
    rewind_epochs: int = 1,
    per_layer: bool = True,
    threads: int = 1,
    out: str = "",
) -> None:
    """Run the race, print and keep.

    Args:
        seeds: how many.
        rounds: of pruning.
        sparsity: after the last of them.
        epochs: of each training.
        rewind_epochs: epochs of the dense training that a ticket starts after.
        per_layer: the same share of each layer, else of all together.
        threads: of torch.
        out: path without ending; nothing is written where it is empty.
    """
    torch.set_num_threads(threads)
    task, settings = digits(), Settings(epochs=epochs)
    rewind_step = rewind_epochs * task.batches_per_epoch(settings.batch_size)
    tickets: list[Ticket] = []
    for seed in range(seeds):
        race = Race(MODEL, task, Settings(epochs=epochs, seed=seed), rewind_step, seed, per_layer)
        with tqdm(desc=f"seed {seed}", unit="step") as bar:

            def tell(done: int, total: int, bar: tqdm = bar) -> None:
                bar.total, bar.n = total, done
                bar.refresh() if done % 20 == 0 else None

            tickets += run_race(race, sparsities(sparsity, rounds), progress=tell)
    print(f"\n{MODEL}, digits, {epochs} epochs, rewound to step {rewind_step}, {seeds} seeds: median [min, max]")
    for level in sorted({round(one.sparsity, 3) for one in tickets}):
        print(f"{level:7.1%}  ", end="")
        for kind in KINDS:
            found = [one.accuracy for one in tickets if one.kind == kind and round(one.sparsity, 3) == level]
            cell = f"{statistics.median(found):.3f} [{min(found):.3f}, {max(found):.3f}]" if found else ""
            print(f"{kind}: {cell:<22}", end="  ")
        print()
    if out:
        kept = {"model": MODEL, "epochs": epochs, "rewind_step": rewind_step, "per_layer": per_layer}
        Path(f"{out}.json").write_text(json.dumps({**kept, "tickets": [asdict(one) for one in tickets]}, indent=1))
        for language in ("fr", "en"):
            use_language(language)
            lottery_figure(tickets, f"{out}-{language}.png")


if __name__ == "__main__":
    tyro.cli(main)
