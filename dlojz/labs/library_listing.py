"""Lab 12: a program shown in a notebook, with what is new in it marked.

Layer 6 (labs). Invariant: every character of the program is escaped; colour carries no meaning alone: a new line has a
+ before it.
"""

from __future__ import annotations

import difflib
import io
import keyword
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

from dlojz.libraries import LIBRARIES, REFERENCE, library
from dlojz.libraries.lines import code_lines
from dlojz.text import say
from dlojz.viz.markup import safe
from dlojz.viz.palette import BLUE, VERMILION

_KEYWORD, _TEXT, _REMARK = f"color: {BLUE}", f"color: {VERMILION}", "color: #666666"
_NEW = "background: #FFF3D6"
_BLOCK = "line-height: 1.3; max-height: 32em; overflow: auto; color: #000000; background: #FFFFFF"


@dataclass(frozen=True)
class Listing:
    """A program, line by line.

    Args:
        name: of its file.
        lines: its text.
        new: numbers, from 0, of the lines of code that the program it is compared with does not have.
    """

    name: str
    lines: tuple[str, ...]
    new: frozenset[int]

    def __str__(self) -> str:
        marked = ((f"{self._mark(number)} {line}").rstrip() for number, line in enumerate(self.lines))
        return "\n".join((self._heading(), *marked))

    __repr__ = __str__

    def _mark(self, number: int) -> str:
        return "+" if number in self.new else " "

    def _heading(self) -> str:
        if not self.new:
            return self.name
        return say(
            en=f"{self.name} (+: {len(self.new)} lines of code that the plain program does not have)",
            fr=f"{self.name} (+ : {len(self.new)} lignes de code que n’a pas le programme simple)",
        )

    def _repr_html_(self) -> str:
        styles = _styles("\n".join(self.lines) + "\n")
        rows = []
        for number, line in enumerate(self.lines):
            text = "".join(
                f'<span style="{safe(style)}">{safe(piece)}</span>' if style else safe(piece)
                for piece, style in _pieces(line, styles.get(number, []))
            )
            rows.append(f'<span style="{_NEW}">+ {text}</span>' if number in self.new else f"  {text}")
        return f'<b>{safe(self._heading())}</b><pre style="{_BLOCK}">' + "\n".join(rows) + "</pre>"


Span = tuple[int, int, str]


def _styles(text: str) -> dict[int, list[Span]]:
    """Where keywords, texts and remarks are: by line from 0, the first and last columns and the look."""
    found: dict[int, list[Span]] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and keyword.iskeyword(token.string):
            style = _KEYWORD
        elif token.type == tokenize.STRING:
            style = _TEXT
        elif token.type == tokenize.COMMENT:
            style = _REMARK
        else:
            continue
        for row in range(token.start[0], token.end[0] + 1):
            first = token.start[1] if row == token.start[0] else 0
            last = token.end[1] if row == token.end[0] else 10**6
            found.setdefault(row - 1, []).append((first, last, style))
    return found


def _pieces(line: str, spans: list[Span]) -> Iterator[tuple[str, str]]:
    """A line cut where its look changes."""
    place = 0
    for first, last, style in spans:
        yield line[place:first], ""
        yield line[first:last], style
        place = last
    yield line[place:], ""


def new_lines(text: str, reference: str) -> frozenset[int]:
    """Numbers, from 0, of the lines of code of a program that another one does not have, as `diff` matches them."""
    mine, theirs = code_lines(text), code_lines(reference)
    matcher = difflib.SequenceMatcher(None, theirs, mine, autojunk=False)
    kept = {place for block in matcher.get_matching_blocks() for place in range(block.b, block.b + block.size)}
    new, number, lines = set(), 0, text.splitlines()
    for place, line in enumerate(mine):
        # A line of code is a line of the file without its remark: the next one that begins with it.
        while not lines[number].strip().startswith(line):
            number += 1
        if place not in kept:
            new.add(number)
        number += 1
    return frozenset(new)


def program(name: str) -> Listing:
    """The program of a library, with the lines marked that plain torch's does not have.

    Raises:
        LabError: if there is no such library.
    """
    path = library(name).program
    text = path.read_text(encoding="utf-8")
    plain = LIBRARIES[REFERENCE].program.read_text(encoding="utf-8")
    return Listing(path.name, tuple(text.splitlines()), new_lines(text, plain))
