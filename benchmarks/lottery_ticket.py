"""The lottery ticket on vit_tiny and digits: winning tickets beside one-shot pruning, new weights and random masks.

    python benchmarks/lottery_ticket.py --seeds 5 --epochs 8 --out lottery

Every seed trains the dense network, then prunes and rewinds in rounds; at each sparsity three other tickets run the
same race:

    iterative   train, remove a share of what is left, rewind, and so on: the winning ticket
    one_shot    all removed at once after one dense training, then rewound
    new_weights the winning ticket's mask on the weights of another seed
    new_mask    the winning ticket's weights under a mask drawn at random, with as many in each layer

Writes OUT.json and OUT-fr.png, OUT-en.png, and prints the table of the medians.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
import tyro
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from torch import Tensor, nn
from tqdm import tqdm

from dlojz.base.errors import LabError
from dlojz.base.language import say, use_language
from dlojz.compress import masks
from dlojz.compress.pruning import Race, shifted, sparsities, train_ticket, winning_tickets
from dlojz.compress.task import Progress, Settings, accuracy, digits
from dlojz.display.canvas import LabFigure, finish, new_figure, plain
from dlojz.display.style import BLUE, GREEN, ORANGE, PURPLE

Kind = Literal["iterative", "one_shot", "new_weights", "new_mask"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_OTHER_SEED = 100_003


@dataclass(frozen=True)
class Ticket:
    """One sparse network after its training.

    Args:
        kind: where its mask and its weights come from.
        seed: of the race.
        sparsity: share of the prunable weights that are zero, counted.
        accuracy: on the held-out samples, from 0 to 1.
    """

    kind: Kind
    seed: int
    sparsity: float
    accuracy: float


def random_mask_like(ticket: masks.Masks, seed: int) -> dict[str, Tensor]:
    """As many places open in each layer as in the ticket, but drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: mask.flatten()[torch.randperm(mask.numel(), generator=generator)].reshape(mask.shape)
        for name, mask in ticket.items()
    }


def run_race(
    race: Race, levels: Sequence[float], kinds: Sequence[Kind] = KINDS, progress: Progress | None = None
) -> list[Ticket]:
    """Every kind of ticket at every sparsity, from one seed.

    Args:
        race: the training.
        levels: rising sparsities.
        kinds: those that are compared; the winning ticket is always there, the others' masks come from it.
        progress: told after each step of all trainings.

    Returns:
        The tickets; first the dense network, as an iterative ticket of sparsity 0.
    """
    own = race.settings.steps(race.task)
    others = [kind for kind in kinds if kind != "iterative"]
    total = own * (1 + len(levels) * (1 + len(others)))
    dense = train_ticket(race, None, progress=shifted(progress, 0, total))
    winners = list(winning_tickets(race, levels, shifted(progress, own, total), dense))
    found = [_judged(race, "iterative", model) for model in (dense, *(model for _, model in winners))]
    done = own * (1 + len(levels))
    for level, (ticket, _) in zip(levels, winners, strict=True):
        for kind in others:
            seed = race.seed + _OTHER_SEED if kind == "new_weights" else None
            mask = _other_mask(kind, race, dense, level, ticket)
            model = train_ticket(race, mask, seed=seed, progress=shifted(progress, done, total))
            found.append(_judged(race, kind, model))
            done += own
    return found


def _other_mask(kind: Kind, race: Race, dense: nn.Module, level: float, ticket: masks.Masks) -> masks.Masks:
    if kind == "one_shot":
        return masks.magnitude_masks(masks.weights(dense), level, per_layer=race.per_layer)
    return ticket if kind == "new_weights" else random_mask_like(ticket, race.seed + _OTHER_SEED)


def _judged(race: Race, kind: Kind, model: nn.Module) -> Ticket:
    removed, total = masks.removed_and_all(model)
    return Ticket(kind, race.seed, removed / total, accuracy(model, race.task))


_LOOKS = {
    "iterative": (BLUE, "-", "o"),
    "one_shot": (GREEN, "-.", "^"),
    "new_weights": (ORANGE, "--", "s"),
    "new_mask": (PURPLE, ":", "D"),
}


def ticket_label(kind: Kind) -> str:
    """A kind of ticket in the reader's language."""
    return {
        "iterative": say(en="winning ticket (rounds, rewound)", fr="ticket gagnant (en plusieurs tours, rembobiné)"),
        "one_shot": say(en="pruned at once, rewound", fr="élagué d’un coup, rembobiné"),
        "new_weights": say(en="the winner’s mask, other weights", fr="masque du gagnant, autres poids"),
        "new_mask": say(en="the winner’s weights, random mask", fr="poids du gagnant, masque au hasard"),
    }[kind]


def lottery_figure(tickets: Sequence[Ticket], path: str | Path | None = None) -> LabFigure:
    """Draw accuracy against the share of the weights that are left: a mark for each seed, a line for the medians.

    Args:
        tickets: of one seed or of several, the dense network among them (see `dlojz.compress.pruning.run_race`).
        path: picture to write, if any.

    Raises:
        LabError: without a ticket; if the picture cannot be written.
    """
    if not tickets:
        raise LabError(
            say(
                en="a figure of lottery tickets needs at least one, but none was received.",
                fr="une figure de tickets de loterie en demande au moins un, mais aucun n’a été reçu.",
            )
        )
    figure = new_figure(9.0, 4.6, alt=description(tickets))
    axes = figure.subplots()
    seeds = len({one.seed for one in tickets})
    for place, kind in enumerate(KINDS):
        _kind(axes, kind, place, [one for one in tickets if one.kind == kind])
    _dense(axes, tickets)
    levels = sorted({_left(one) for one in tickets})
    axes.set_xscale("log")
    axes.set_xlim(1.25 * levels[-1], levels[0] / 1.25)
    axes.xaxis.set_major_locator(FixedLocator(levels))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _percent(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _percent(value)))
    plain(axes)
    axes.set_xlabel(say(en="weights left, of those that are pruned", fr="poids restants, parmi ceux qu’on élague"))
    axes.set_ylabel(say(en="accuracy, held-out images", fr="exactitude, images de test"))
    axes.set_title(
        say(en=f"Lottery tickets: {seeds} seed(s), medians", fr=f"Tickets de loterie : {seeds} graine(s), médianes"),
        loc="left",
        fontsize=10,
        fontweight="bold",
    )
    axes.legend(frameon=False, fontsize=8, loc="lower left", handlelength=3.5)
    return finish(figure, path)


def description(tickets: Sequence[Ticket]) -> str:
    """The figure in words: the median of each kind at each sparsity."""
    told = [
        f"{ticket_label(kind)}, {_percent(left)} : {_percent(median)}".replace(" :", say(en=":", fr=" :"))
        for kind in KINDS
        for left, median in _medians([one for one in tickets if one.kind == kind])
    ]
    return say(en="Accuracy by weights left. ", fr="Exactitude selon les poids restants. ") + "; ".join(told) + "."


def _left(one: Ticket) -> float:
    return round(1 - one.sparsity, 4)


def _medians(tickets: Sequence[Ticket]) -> list[tuple[float, float]]:
    return [
        (left, statistics.median(one.accuracy for one in tickets if _left(one) == left))
        for left in sorted({_left(one) for one in tickets}, reverse=True)
    ]


def _kind(axes: Axes, kind: Kind, place: int, tickets: Sequence[Ticket]) -> None:
    if not tickets:
        return
    color, dashes, marker = _LOOKS[kind]
    beside = 1.0 + 0.03 * (place - 1.5)  # side by side: marks of several kinds would hide each other
    axes.plot([_left(one) * beside for one in tickets], [one.accuracy for one in tickets], color=color, marker=marker,
              linestyle="", markersize=4, alpha=0.5, markerfacecolor="none")  # fmt: skip
    lefts, medians = zip(*_medians(tickets), strict=True)
    axes.plot([left * beside for left in lefts], medians, color=color, linestyle=dashes, marker=marker, markersize=7,
              linewidth=2, label=ticket_label(kind))  # fmt: skip


def _dense(axes: Axes, tickets: Sequence[Ticket]) -> None:
    dense = [one.accuracy for one in tickets if one.sparsity == 0]
    if dense:
        axes.axhline(statistics.median(dense), color="#444444", linewidth=0.9)
        axes.annotate(say(en="dense", fr="dense"), (1.0, statistics.median(dense)), xycoords=("axes fraction", "data"),
                      xytext=(-4, 3), textcoords="offset points", ha="right", fontsize=8, color="#444444")  # fmt: skip


def _percent(share: float) -> str:
    number = f"{100 * share:.3g}"
    return say(en=f"{number} %", fr=f"{number.replace('.', ',')} %")


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
