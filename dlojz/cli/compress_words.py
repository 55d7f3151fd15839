"""The board of `dlojz compress` as a table, as sentences and as one JSON document.

Layer 6. Invariant: nothing is measured here; what is concluded is computed from the lines that are shown.
"""

from __future__ import annotations

from typing import Any

from rich.table import Table

from dlojz.compress.board_record import TEACHER, Board, Line
from dlojz.compress.methods import METHODS
from dlojz.text import say
from dlojz.units import byte_units, format_count, format_seconds

KEPT = 0.97
"""Of the teacher's accuracy: what DistilBERT kept of BERT's. Source: Sanh et al. 2019 (arXiv 1910.01108), abstract."""
STAR = "★"
KIBIBYTE = 1024


def table(board: Board) -> Table:
    """One line per method, the teacher first."""
    shown = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", title=title(board), title_justify="left")
    unit = byte_units()[1]
    titles = (
        "",
        say(en="method", fr="méthode"),
        say(en="accuracy", fr="exactitude"),
        say(en="kept", fr="gardé"),
        say(en="weights", fr="poids"),
        say(en=f"{unit}: pred.|file", fr=f"{unit} : préd.|fichier"),
        "÷",
        say(en="time: pred.|meas. [half]", fr="temps : préd.|mes. [moitié]"),
    )
    for place, name in enumerate(titles):
        shown.add_column(name, justify="left" if place < 2 else "right", no_wrap=True)
    front = {line.method for line in board.front()}
    for line in board.lines():
        shown.add_row(STAR if line.method in front else "", *_cells(line))
    return shown


def title(board: Board) -> str:
    """On what the board was made."""
    seeds = len(board.of(TEACHER))
    return say(
        en=f"{board.teacher} on {board.task} at {board.image_size}×{board.image_size}, {seeds} seed(s); answers of "
        f"{board.batch} images on {board.threads} thread(s)",
        fr=f"{board.teacher} sur {board.task} en {board.image_size}×{board.image_size}, {seeds} graine(s) ; réponses "
        f"de {board.batch} images sur {board.threads} thread(s)",
    )


def _cells(line: Line) -> tuple[str, ...]:
    foreseen = "—" if line.predicted_latency_ratio is None else _ratio(line.predicted_latency_ratio)
    spread = f"[{_ratio(line.latency_ratio_low)}–{_ratio(line.latency_ratio_high)}]"
    time = f"{foreseen}|{_ratio(line.latency_ratio)} {spread}"
    return (
        family_title(TEACHER) if line.method == TEACHER else line.method,
        _percent(line.accuracy),
        _percent(line.kept),
        format_count(line.parameters),
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
    fast = min(good, key=lambda line: line.latency_ratio)
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
    if fast.latency_ratio_high < 1:
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
                en="None of these answers faster than its teacher.",
                fr="Aucune d’elles ne répond plus vite que son professeur.",
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


def family_title(family: str) -> str:
    """A family in the reader's language."""
    return {
        "distillation": say(en="distillation", fr="distillation"),
        "quantization": say(en="quantization", fr="quantification"),
        "pruning": say(en="pruning", fr="élagage"),
        TEACHER: say(en="teacher", fr="professeur"),
    }.get(family, family)


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace(".", say(en=".", fr=","))


def _ratio(value: float) -> str:
    return _number(value, 2)


def _percent(share: float, digits: int = 1) -> str:
    return _number(100 * share, digits) + say(en="%", fr=" %")
