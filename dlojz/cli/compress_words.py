"""The board of `dlojz compress` as a table, as sentences and as one JSON document.

Layer 6. Invariant: nothing is measured here; what is concluded is computed from the lines that are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from dlojz.compress.board_record import TEACHER, Board, Line, family_title
from dlojz.compress.methods import METHODS
from dlojz.text import say
from dlojz.units import byte_units, format_count, format_seconds

KEPT = 0.97
"""Of the teacher's accuracy: what DistilBERT kept of BERT's. Source: Sanh et al. 2019 (arXiv 1910.01108), abstract."""
STAR = "★"
KIBIBYTE = 1024
WEIGHTS, SPREAD, FORESEEN = "weights", "spread", "foreseen"
"""Columns, or parts of one, that a narrow table leaves out, in this order."""


def table(board: Board, width: int = 100) -> Table:
    """One line per method, the teacher first, a star before those of the front.

    Args:
        board: what is shown.
        width: characters of a line; where they are too few, the weights are left out, then what was foreseen of time
            and the rounds' spread, so that nothing of what stays is cut.
    """
    lines, front = board.lines(), {line.method for line in board.front()}
    for dropped in ((), (WEIGHTS,), (WEIGHTS, SPREAD), (WEIGHTS, SPREAD, FORESEEN)):
        rows = [_titles(dropped), *(_cells(line, line.method in front, dropped) for line in lines)]
        if sum(max(cell_len(cell) for cell in column) + 1 for column in zip(*rows, strict=True)) <= width:
            break
    shown = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", title=board.title(), title_justify="left")
    for place, name in enumerate(rows[0]):
        shown.add_column(Text(name), justify="left" if place == 0 else "right", no_wrap=True)
    for row in rows[1:]:
        shown.add_row(*(Text(cell) for cell in row))  # [0.95–1.10] is no markup
    return shown


def _titles(dropped: Sequence[str]) -> tuple[str, ...]:
    time = say(en="time", fr="temps")
    if FORESEEN not in dropped:
        time = say(en="pred.|time", fr="préd.|temps")
    if SPREAD not in dropped:
        time += say(en=" [half]", fr=" [moitié]")
    return (
        say(en="  method", fr="  méthode"),
        say(en="accuracy", fr="exact."),
        say(en="kept", fr="gardé"),
        *(() if WEIGHTS in dropped else (say(en="weights", fr="poids"),)),
        say(en=f"{byte_units()[1]}: pred.|file", fr=f"{byte_units()[1]} : préd.|fich."),
        "÷",
        time,
    )


def _cells(line: Line, on_front: bool, dropped: Sequence[str]) -> tuple[str, ...]:
    foreseen = "—" if line.predicted_latency_ratio is None else _ratio(line.predicted_latency_ratio)
    time = _ratio(line.latency_ratio) if FORESEEN in dropped else f"{foreseen}|{_ratio(line.latency_ratio)}"
    if SPREAD not in dropped:
        time += f" [{_ratio(line.latency_ratio_low)}–{_ratio(line.latency_ratio_high)}]"
    return (
        f"{STAR if on_front else ' '} {family_title(TEACHER) if line.method == TEACHER else line.method}",
        _percent(line.accuracy),
        _percent(line.kept),
        *(() if WEIGHTS in dropped else (format_count(line.parameters),)),
        f"{line.predicted_bytes / KIBIBYTE:.0f}|{line.file_bytes / KIBIBYTE:.0f}",
        _number(line.ratio, 1),
        format_seconds(line.latency_s) if line.method == TEACHER else time,
    )


def conclusion(board: Board) -> str:
    """What the board says, in a few sentences."""
    lines = [line for line in board.lines() if line.method != TEACHER]
    good = [line for line in lines if line.kept >= KEPT]
    if not lines:
        return say(en="No method was tried.", fr="Aucune méthode n’a été essayée.")
    if not good:
        best = max(lines, key=lambda line: line.accuracy)
        return say(
            en=f"None keeps {_percent(KEPT, 0)} of the teacher's accuracy; the best is {best.method}, which keeps "
            f"{_percent(best.kept)}.",
            fr=f"Aucune ne garde {_percent(KEPT, 0)} de l’exactitude du professeur ; la meilleure est {best.method}, "
            f"qui en garde {_percent(best.kept)}.",
        )
    small = min(good, key=lambda line: line.file_bytes)
    faster = [line for line in good if line.latency_ratio_high < 1]
    sentences = [
        say(
            en=f"Smallest that keeps {_percent(KEPT, 0)} of the teacher's accuracy: {small.method}, a file "
            f"{_number(small.ratio, 1)} times smaller, answers in {_number(small.latency_ratio, 2)} times the "
            "teacher's time.",
            fr=f"La plus petite qui garde {_percent(KEPT, 0)} de l’exactitude du professeur : {small.method}, un "
            f"fichier {_number(small.ratio, 1)} fois plus petit, des réponses en {_number(small.latency_ratio, 2)} "
            "fois le temps du professeur.",
        )
    ]
    if faster:
        fast = min(faster, key=lambda line: line.latency_ratio)
        sentences.append(
            say(
                en=f"Fastest of these: {fast.method}, in {_number(fast.latency_ratio, 2)} times the teacher's time.",
                fr=f"La plus rapide d’entre elles : {fast.method}, en {_number(fast.latency_ratio, 2)} fois le temps "
                "du professeur.",
            )
        )
    else:
        sentences.append(
            say(
                en="None of these is clearly faster than its teacher: in a quarter of the rounds or more, it is not.",
                fr="Aucune d’elles n’est nettement plus rapide que son professeur : dans un quart des tours au moins, "
                "elle ne l’est pas.",
            )
        )
    return "\n".join(sentences)


def remarks(board: Board) -> list[str]:
    """What was left out, and what a reader must know of a line."""
    found = [
        say(en=f"{name} was left out: {why}", fr=f"{name} a été laissée de côté : {why}")
        for name, why in board.left_out.items()
    ]
    colon = say(en=":", fr=" :")
    told: dict[str, list[str]] = {}
    for line in board.lines():
        for note in line.notes:
            told.setdefault(note, []).append(line.method)
    return [*found, *(f"{', '.join(names)}{colon} {note}" for note, names in told.items())]


def document(board: Board) -> dict[str, Any]:
    """The board as one JSON document: trials, medians, front."""
    return {
        **board.to_dict(),
        "lines": [line.to_dict() for line in board.lines()],
        "front": [line.method for line in board.front()],
    }


def catalogue() -> Table:
    """All methods with their options."""
    shown = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in (say(en="family", fr="famille"), say(en="method", fr="méthode"), ""):
        shown.add_column(name, no_wrap=bool(name))
    before = ""
    for method in METHODS.values():
        options = ", ".join(f"{name}={value}" for name, value in method.options.items())
        shown.add_row(
            family_title(method.family) if method.family != before else "",
            method.name,
            method.summary() + (f"\n  {options}" if options else ""),
        )
        before = method.family
    return shown


def catalogue_document() -> list[dict[str, Any]]:
    """The same as JSON."""
    return [
        {"name": one.name, "family": one.family, "summary": one.summary(), "options": dict(one.options)}
        for one in METHODS.values()
    ]


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace(".", say(en=".", fr=","))


def _ratio(value: float) -> str:
    return _number(value, 2)


def _percent(share: float, digits: int = 1) -> str:
    return _number(100 * share, digits) + say(en="%", fr=" %")
