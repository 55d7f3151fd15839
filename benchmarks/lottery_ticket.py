"""Lab 11's lottery ticket over several seeds: winning tickets beside one-shot pruning, new weights and random masks.

    python benchmarks/lottery_ticket.py --seeds 5 --out lottery

Every seed trains the dense network, then prunes and rewinds in rounds; at each sparsity three other tickets run the
same race:

    iterative   train, remove a share of what is left, rewind, and so on: the winning ticket
    one_shot    all removed at once after one dense training, then rewound
    new_weights the winning ticket's mask on the weights of another seed
    new_mask    the winning ticket's weights under a mask drawn at random, with as many in each layer

Prints the table of the medians and writes OUT.json. Source: Frankle and Carbin 2019 (arXiv 1803.03635); Frankle et al.
2020 (arXiv 1912.05671) for rewinding to step k: training again from the same seed, masked after step k.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.nn.utils import prune
from tqdm import tqdm

from dlojz.compress.task import Task, accuracy, digits, new_model

KINDS = ("iterative", "one_shot", "new_weights", "new_mask")
MODEL, BATCH, RATE = "vit_tiny", 64, 1e-3
_OTHER_SEED = 100_003
Masks = Mapping[str, Tensor]


@dataclass(frozen=True)
class Ticket:
    """One sparse network after its training: where its mask and weights come from, its zeros, its accuracy."""

    kind: str
    seed: int
    sparsity: float
    accuracy: float


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers whose weights are pruned, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}


def train_ticket(
    task: Task, seed: int, steps: int, rewind: int, masks: Masks | None = None, *, order: int
) -> nn.Module:
    """Train from the first weights of a seed, masked after `rewind` steps; returns plain layers with zeros.

    Args:
        order: seed of the batches, the same for all tickets of a race.
    """
    model = new_model(MODEL, task, seed)
    layers = linear_layers(model)
    for layer in layers.values():
        prune.identity(layer, "weight")  # a mask of ones, until the ticket is put on
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(order)
    model.train()
    for step in range(steps):
        if masks is not None and step == rewind:
            for name, mask in masks.items():
                layers[name].weight_mask.copy_(mask)
        index = torch.randint(len(task.labels_N), (BATCH,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(task.inputs_NCHW[index]), task.labels_N[index]).backward()
        optimizer.step()
        decay.step()
    for layer in layers.values():
        prune.remove(layer, "weight")
    return model.eval()


def smallest_removed(model: nn.Module, sparsity: float) -> dict[str, Tensor]:
    """Mask the same share of the smallest magnitudes of each layer; zeros are the smallest, so masks only grow."""
    masks = {}
    for name, layer in linear_layers(model).items():
        sizes = layer.weight.detach().abs().flatten()
        mask = torch.ones_like(sizes)
        mask[sizes.argsort(stable=True)[: round(sparsity * len(sizes))]] = 0
        masks[name] = mask.view_as(layer.weight)
    return masks


def shuffled(masks: Masks, seed: int) -> dict[str, Tensor]:
    """Draw masks with as many ones in each layer."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: mask.flatten()[torch.randperm(mask.numel(), generator=draw)].view_as(mask) for name, mask in masks.items()
    }


def main(
    seeds: int = 5, rounds: int = 5, sparsity: float = 0.96875, steps: int = 176, rewind: int = 22, threads: int = 1,
    out: str = "",
) -> None:  # fmt: skip
    """Run the race, print and keep.

    Args:
        seeds: how many.
        rounds: of pruning.
        sparsity: after the last of them; each round removes the same share of what is left.
        steps: of each training.
        rewind: steps of the dense training that a ticket starts after.
        threads: of torch.
        out: path without ending; nothing is written where it is empty.
    """
    torch.set_num_threads(threads)
    task = digits()
    tickets: list[Ticket] = []
    levels = [1 - (1 - sparsity) ** (turn / rounds) for turn in range(1, rounds + 1)]
    progress = tqdm(total=seeds * (1 + len(levels) * len(KINDS)), unit=" trainings")
    for seed in range(seeds):

        def run(kind: str, level: float, first_seed: int, masks: Masks | None, seed: int = seed) -> nn.Module:
            model = train_ticket(task, first_seed, steps, rewind, masks, order=seed)
            tickets.append(Ticket(kind, seed, level, accuracy(model, task)))
            progress.update()
            return model

        dense = trained = run("iterative", 0.0, seed, None)
        for level in levels:
            winner = smallest_removed(trained, level)
            trained = run("iterative", level, seed, winner)
            run("one_shot", level, seed, smallest_removed(dense, level))
            run("new_weights", level, seed + _OTHER_SEED, winner)
            run("new_mask", level, seed, shuffled(winner, seed))
    print(f"\n{MODEL}, digits, {steps} steps, rewound to step {rewind}, {seeds} seeds: median [min, max]")
    for level in (0.0, *levels):
        cells = []
        for kind in KINDS:
            shares = [ticket.accuracy for ticket in tickets if (ticket.kind, ticket.sparsity) == (kind, level)]
            if shares:
                cells.append(f"{kind}: {statistics.median(shares):.3f} [{min(shares):.3f}, {max(shares):.3f}]")
        print(f"{level:7.1%}  " + "  ".join(cells))
    if out:
        Path(f"{out}.json").write_text(json.dumps([asdict(ticket) for ticket in tickets], indent=1))


if __name__ == "__main__":
    tyro.cli(main)
