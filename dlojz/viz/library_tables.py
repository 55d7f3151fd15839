"""The libraries in a terminal: the catalogue, and what was measured side by side.

Layer 4. Invariant: nothing is computed here; each cell of bytes is `predicted | measured`, as in `dlojz compare`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from dlojz.libraries import LIBRARIES, Library, absence, bridge_lines, lines_changed
from dlojz.libraries.side_by_side import LibraryRow
from dlojz.text import say
from dlojz.units import format_bytes
from dlojz.viz.markup import visible

DASH = "—"
OTHERWISE = " *"
"""Behind a ratio of two trainings that are not the same: the library has done something else than asked."""


def number(value: float, digits: int) -> str:
    """A number as the language writes it."""
    return f"{value:.{digits}f}".replace(".", say(en=".", fr=","))


def catalogue_table(hides: bool = True) -> Table:
    """Each library: version or what installs it, layouts, lines changed, and what it hides.

    Args:
        hides: whether there is room for the last column; `catalogue_sentences` says it otherwise.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in (
        say(en="library", fr="bibliothèque"),
        say(en="here", fr="ici"),
        say(en="its program runs", fr="son programme exécute"),
        say(en="lines", fr="lignes"),
        *([say(en="what its user no longer writes", fr="ce que l’on n’écrit plus")] if hides else []),
    ):
        table.add_column(title, overflow="fold")
    for one in LIBRARIES.values():
        more = [one.hides()] if hides else []
        table.add_row(one.title, _here(one), one.runs(), all_lines_words(one.name), *more)
    return table


def catalogue_sentences() -> list[str]:
    """What each library hides, in one line each."""
    return [_hides(one.title, one.hides()) for one in LIBRARIES.values()]


def _here(one: Library) -> str:
    if absence(one.name) is None:
        return one.version or say(en="in its own environment", fr="dans son environnement")
    return one.command


def lines_words(name: str) -> str:
    """Lines of code of a program, and how many are new or gone compared with plain torch's: `33 (+4 −9)`."""
    change = lines_changed(name)
    return f"{change.lines}" + (f" (+{change.added} −{change.removed})" if change.changed else "")


def all_lines_words(name: str) -> str:
    """The same, with those of the modules that bridge the lab and the library, where there are some."""
    bridge = bridge_lines(name)
    more = say(en=f" + {bridge} of bridge", fr=f" + {bridge} d’adaptation") if bridge else ""
    return lines_words(name) + more


def difference_words(row: LibraryRow) -> str:
    """Largest difference of a loss to plain torch's; 0 is said so."""
    if row.difference is None:
        return DASH
    return "0" if row.difference == 0 else f"{row.difference:.0e}"


def ratio_words(row: LibraryRow) -> str:
    """Step time over plain torch's, with the quartiles where there are several rounds; `*`: of another training."""
    if row.step_ratio is None:
        return DASH
    words = f"×{number(row.step_ratio, 2)}"
    if row.rounds > 1 and row.step_ratio_low is not None and row.step_ratio_high is not None:
        words += f" ({number(row.step_ratio_low, 2)}–{number(row.step_ratio_high, 2)})"
    elif row.rounds == 1:
        words += say(en=" (1 round)", fr=" (1 tour)")
    return words + OTHERWISE * row.otherwise


def _pair(pair: tuple[int | None, int | None]) -> Text:
    before, after = (format_bytes(value) for value in pair)
    return Text(f"{before} | {after}" if before != after else after)


def measured_table(rows: Sequence[LibraryRow]) -> Table:
    """What was measured with each library, of rank 0; those that were not run stand below it in `not_run`."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    ran = [row for row in rows if row.ran]
    table.add_column("")
    for row in ran:
        table.add_column(Text(visible(f"{row.title} {row.version}".strip())), justify="right", overflow="fold")
    lines: list[tuple[str, list[str | Text]]] = [
        (say(en="lines", fr="lignes"), [all_lines_words(row.name) for row in ran]),
        (say(en="loss: largest gap", fr="perte : plus grand écart"), [difference_words(row) for row in ran]),
        (say(en="final weights equal", fr="poids finals égaux"), [_equal(row.same_weights, False) for row in ran]),
        (say(en="last loss", fr="dernière perte"), [number(row.losses[-1], 4) if row.losses else DASH for row in ran]),
        (say(en="states", fr="états"), [_pair(row.states_bytes) for row in ran]),
        (say(en="peak", fr="pic"), [_pair(row.peak_bytes) for row in ran]),
        *_traffic_lines(ran),
        (say(en="bytes equal", fr="octets égaux"), [_equal(row.bytes_equal) for row in ran]),
        (say(en="steps timed", fr="pas chronométrés"), [f"{row.steps_timed} × {row.rounds}" for row in ran]),
        (say(en="step, ms", fr="pas, ms"), [number(row.step_s * 1e3, 0) if row.step_s else DASH for row in ran]),
        (say(en="over torch's", fr="par rapport à torch"), [ratio_words(row) for row in ran]),
    ]
    for label, cells in lines:
        table.add_row(label, *cells)
    return table


def _traffic_lines(ran: Sequence[LibraryRow]) -> list[tuple[str, list[str | Text]]]:
    names = list(dict.fromkeys(name for row in ran for name, _, _ in row.traffic_bytes))
    return [(name, [_traffic(row, name) for row in ran]) for name in names]


def _traffic(row: LibraryRow, name: str) -> Text:
    pair = next((one[1:] for one in row.traffic_bytes if one[0] == name), None)
    if pair is None:
        return Text(DASH)
    wrong = None not in pair and pair[0] != pair[1]
    before, after = (format_bytes(value) for value in pair)
    return Text(f"{before} {'≠' if wrong else '|'} {after}", style="bold red" if wrong else "")


def _equal(equal: bool | None, alarming: bool = True) -> Text:
    if equal is None:
        return Text(DASH)
    if equal:
        return Text(say(en="yes", fr="oui"))
    return Text(say(en="NO", fr="NON"), style="bold red") if alarming else Text(say(en="no", fr="non"))


def hides_sentences(rows: Sequence[LibraryRow]) -> list[str]:
    """What the user of each library no longer writes, in one line each."""
    return [_hides(row.title, row.hides) for row in rows]


def _hides(title: str, hides: str) -> str:
    return say(en=f"{title} hides: {hides}.", fr=f"{title} cache : {hides}.")


def notes(rows: Sequence[LibraryRow]) -> list[str]:
    """What was not run, with its reason, and what was done otherwise than asked."""
    told = []
    for row in rows:
        if not row.ran:
            told.append(say(en=f"{row.title}: not run. {row.note}", fr=f"{row.title} : pas exécuté. {row.note}"))
        elif row.note:
            told.append(f"{row.title}{OTHERWISE * row.otherwise}{say(en=':', fr=' :')} {row.note}")
    return told
