"""Figures and tables of lab 12: the libraries' runs side by side, and the student's loops and rules applied to them.

Layer 6 (labs), on `dlojz.viz`. Invariant: what was measured stands beside what the package predicts; a library that is
not installed is told in one sentence, with the command that installs it, and the notebook goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dlojz.labs.library_listing import Listing, program
from dlojz.labs.library_loops import loops, updates_made
from dlojz.labs.library_traffic_exercises import messages_of
from dlojz.labs.pipeline_figures import Picture, Sheet, or_to_do, pictured, plain_number
from dlojz.labs.run_bars import measured_footprint, memory_and_messages
from dlojz.labs.verdict import Verdict, show
from dlojz.libraries import LIBRARIES, REFERENCE, absence
from dlojz.libraries.side_by_side import leaves, rows, sent, status_words
from dlojz.text import say
from dlojz.units import format_bytes
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.library_tables import DASH, all_lines_words, difference_words, number
from dlojz.viz.palette import LINE_STYLES

if TYPE_CHECKING:
    from dlojz.config import RunConfig
    from dlojz.footprint import Traffic
    from dlojz.record import RunRecord
    from dlojz.runs import Run

__all__ = [
    "Listing",
    "Picture",
    "catalogue",
    "gap",
    "loops",
    "losses",
    "program",
    "side_by_side",
    "table",
    "told",
    "train",
    "train_each",
    "two_choices",
    "updates_made",
]

SAME_LOSS = 1e-5
"""Losses closer than this are those of the same training, rounded otherwise."""
HAIRLINE_BYTES = 2**14
"""Less than this is thinner than a line, on an axis of MiB."""


def catalogue() -> Sheet:
    """The libraries: what is installed here, and what each hides."""
    listed = []
    for name, one in LIBRARIES.items():
        here = one.version or say(en="yes", fr="oui") if one.installed else one.command
        listed.append((one.title, here, all_lines_words(name), one.runs(), one.hides()))
    head = (
        say(en="library", fr="bibliothèque"),
        say(en="installed, or by", fr="installée, ou par"),
        say(en="lines of code", fr="lignes de code"),
        say(en="its program runs", fr="son programme exécute"),
        say(en="it hides", fr="elle cache"),
    )
    return Sheet(head, tuple(listed))


def train(config: RunConfig, library: str, **changes: Any) -> Run | None:
    """The training by a library's program; where it is not installed, None, and the sentence that says so."""
    import dlojz

    missing = absence(library)
    if missing is not None:
        show(Verdict("note", missing + say(en=" It was not run here.", fr=" Il n’a pas été exécuté ici.")))
        return None
    run = dlojz.run(config, library=library, **changes)
    if not _completed(run):
        show(
            Verdict(
                "wrong",
                f"{title(run)}{say(en=':', fr=' :')} {status_words(run.state)}. "
                f"{run.record.reason if run.record else ''}",
            )
        )
    return run


def train_each(config: RunConfig, library: str, *changes: Mapping[str, Any]) -> list[Run | None]:
    """The same for several layouts; what is missing is said once."""
    if absence(library) is None:
        return [train(config, library, **each) for each in changes]
    return [train(config, library), *[None] * (len(changes) - 1)]


def _completed(run: Run) -> bool:
    return run.record is not None and run.record.status == "completed"


def title(run: Run) -> str:
    """A run's library and layout, without the names of the lab's own engines."""
    library = LIBRARIES.get(run.config.library)
    layout = run.config.layout.title.removesuffix(" (torch)")
    return f"{library.title} ({layout.removeprefix(library.title).strip()})" if library else f"dlojz ({layout})"


def _there(runs: Sequence[Run | None]) -> list[Run]:
    return [run for run in runs if run is not None and _completed(run)]


@pictured
def side_by_side(*runs: Run | None) -> LabFigure:
    """Rank 0 of the runs that there are: memory by category, and bytes sent; predicted in pale above."""
    there = _there(runs)
    opening = say(
        en="Memory by category at the moment of the peak, and bytes sent by collective, predicted and measured, of: ",
        fr="Mémoire par catégorie au moment du pic, et octets envoyés par communication, prédits et mesurés, pour : ",
    )
    titles = [title(run) for run in there]
    return memory_and_messages(there, titles, opening=opening, shown=_can_be_seen, ncols=4, at_peak=True)


def _can_be_seen(one: Traffic) -> bool:
    """Whether a rank sends this for the library, and enough of it for a bar: else a legend would name none."""
    return leaves(one) and one.sent_bytes >= HAIRLINE_BYTES


@pictured
def losses(*runs: Run | None) -> LabFigure:
    """Losses of the runs that there are, laid over each other; below, how far each is from the first."""
    there = _there(runs)
    first = there[0].losses
    figure = new_figure(7.5, 4.6, alt=say(en="Loss by step, and gaps to the first: ",
                        fr="Perte par pas, et écarts à la première : ") + ", ".join(map(title, there)))  # fmt: skip
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for place, (run, (color, line, marker)) in enumerate(zip(there, LINE_STYLES, strict=False)):
        look = {"color": color, "linestyle": line, "marker": marker, "markersize": 12 - 1.5 * place,
                "markerfacecolor": "none"}  # fmt: skip
        above.plot(run.losses, label=title(run), **look)
        if place:
            below.plot([abs(a - b) for a, b in zip(run.losses, first, strict=True)], **look)
    below.axhline(SAME_LOSS, color="black", linestyle=":", linewidth=1)
    below.set_yscale("symlog", linthresh=1e-7)
    below.set_ylim(-2e-8, 1e-4)
    below.set_yticks([0, 1e-7, 1e-6, 1e-5, 1e-4], ["0", "10⁻⁷", "10⁻⁶", "10⁻⁵", "10⁻⁴"])
    below.set_xticks(range(len(first)), [str(step) for step in range(1, len(first) + 1)])
    below.set_xlabel(say(en="step", fr="pas"))
    above.set_ylabel(say(en="loss", fr="perte"))
    below.set_ylabel(say(en="gap to PyTorch", fr="écart à PyTorch"))
    above.yaxis.set_major_formatter(lambda value, position: plain_number(value))
    above.legend(frameon=False, fontsize=8)
    for axes in (above, below):
        plain(axes)
    return finish(figure)


def gap(run: Run, other: Run) -> float:
    """The largest difference between two runs' losses."""
    return max(abs(a - b) for a, b in zip(run.losses, other.losses, strict=True))


def table(*runs: Run | None) -> Sheet:
    """One row per run, and one per library that has none, with the reason.

    The time of a step is that of this machine, over plain torch's: it says what a library costs besides, not which is
    faster on GPUs.
    """
    there = _there(runs)
    first = next(run.record for run in there if run.config.library == REFERENCE)
    done = []
    for run in there:
        name = run.config.library
        (row,) = rows({REFERENCE: _records(first), name: _records(run.record)}, names=[name])
        done.append(
            (
                title(run),
                all_lines_words(name),
                difference_words(row),
                _pair(row.states_bytes),
                _pair(row.peak_bytes),
                _pair(row.sent_bytes),
                DASH if row.step_ratio is None else f"×{number(row.step_ratio, 2)}",
            )
        )
    silent = [name for name in LIBRARIES if name not in {run.config.library for run in there}]
    not_run = [(LIBRARIES[name].title, all_lines_words(name), absence(name) or DASH, *[DASH] * 4) for name in silent]
    head = (
        say(en="program", fr="programme"),
        say(en="lines of code", fr="lignes de code"),
        say(en="largest gap of a loss", fr="plus grand écart de perte"),
        say(en="states, predicted | measured", fr="états, prédit | mesuré"),
        say(en="peak, predicted | measured", fr="pic, prédit | mesuré"),
        say(en="sent per step, predicted | counted", fr="envoyé par pas, prédit | compté"),
        say(en="step, over torch’s (one run)", fr="pas, rapporté à torch (une seule exécution)"),
    )
    return Sheet(head, (*done, *not_run))


def _records(record: RunRecord | None) -> list[RunRecord]:
    return [] if record is None else [record]


def two_choices(run: Run, other: Run) -> Sheet:
    """What two runs of one training have chosen otherwise, as measured on rank 0; the first is the reference."""
    same = say(en="yes", fr="oui") if gap(other, run) < SAME_LOSS else say(en="no", fr="non")
    measured = []
    for one, answer in ((run, DASH), (other, same)):
        footprint = measured_footprint(one)
        memory = footprint.memory
        held = (memory.optimizer_bytes, memory.states_bytes, (memory.at_peak_bytes or {}).get("workspace"),
                memory.peak_bytes, sent(footprint))  # fmt: skip
        measured.append((title(one), answer, *map(format_bytes, held)))
    head = (
        say(en="program", fr="programme"),
        say(en="the same losses, to 10⁻⁵", fr="mêmes pertes, à 10⁻⁵ près"),
        say(en="optimizer states", fr="états d’optimiseur"),
        say(en="all states", fr="tous les états"),
        say(en="temporaries and buckets, at the peak", fr="temporaires et tampons, au moment du pic"),
        say(en="peak", fr="pic"),
        say(en="sent per step", fr="envoyé par pas"),
    )
    return Sheet(head, tuple(measured))


def _pair(pair: tuple[float | None, float | None]) -> str:
    return " | ".join(map(format_bytes, pair))


@or_to_do
def told(stage: Callable[[Mapping[str, int], int], int], *runs: Run | None) -> Sheet | Verdict:
    """The messages of one step of each run, in units of the weights, and what the student's function reads off them."""
    from dlojz import models

    kept = {
        0: say(en="everything is whole everywhere", fr="tout est entier partout"),
        2: say(en="the optimizer is sharded", fr="l’optimiseur est réparti"),
        3: say(en="the weights are sharded too", fr="les poids aussi sont répartis"),
    }
    if not _there(runs):
        return Verdict("note", say(en="None of these runs took place here: there is no message to read.",
                                   fr="Aucune de ces exécutions n’a eu lieu ici : pas de message à lire."))  # fmt: skip
    names = ("all_reduce", "all_gather", "reduce_scatter")
    read_off = []
    for run in _there(runs):
        weight_bytes = 4 * models.describe(run.config.model).parameters
        messages = messages_of(measured_footprint(run))
        read = stage(dict(messages), weight_bytes)
        read_off.append(
            (
                title(run),
                *(f"{plain_number(round(messages.get(name, 0) / weight_bytes, 2))} Ψ" for name in names),
                kept.get(read, str(read)),
            )
        )
    head = (say(en="program", fr="programme"), *(name.replace("_", "-") for name in names),
            say(en="your function", fr="votre fonction"))  # fmt: skip
    return Sheet(head, tuple(read_off))
