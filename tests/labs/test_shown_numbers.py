"""Numbers that a student reads: the marks of the reader's language, in cells and in the texts of the labs.

A format of Python's own writes an English point, comma or percent sign in either language; `decimal` and `percent` of
`dlojz.base.language` write the reader's, and `yes_no` a truth that has words before it. A list,
a tensor or a dictionary is shown as Python writes it, for it is code.
"""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from dlojz.labs.kit.source import Code, read_source

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "solutions").glob("[0-9][0-9]_*.py"))
LABS = sorted((ROOT / "dlojz" / "labs").rglob("*.py"))

MARKS = re.compile(r"[.,_%eEfFgGn]")
"""In a format: what writes a fraction, an exponent, thousands or percents; a width and an alignment do not."""
NO_MARKS = re.compile(r"[<>^]?\d*\.0f")
"""A whole number without thousands apart is the same in both languages."""
NOT_FOR_READERS = {
    "kit/book.py": "lengths of a style sheet, which CSS writes with a point",
    "kit/build.py": "the instructors' page, which is in English",
}


def formats_of(code: str) -> Iterator[tuple[int, str]]:
    """Line and text of each format in an f-string."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FormattedValue) and isinstance(node.format_spec, ast.JoinedStr):
            parts = [one.value for one in node.format_spec.values if isinstance(one, ast.Constant)]
            yield node.lineno, "".join(map(str, parts))


def rounded_in_print(code: str) -> Iterator[int]:
    """Lines on which `print` is given a number that `round` has left with digits after the point."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            for inner in ast.walk(node):
                if isinstance(inner, ast.Call) and ast.unparse(inner.func) == "round" and len(inner.args) == 2:
                    yield inner.lineno


TRUTHS = ("equal", "allclose", "bool", "all", "any")
"""Functions that return a truth."""


def truths_in_print(code: str) -> Iterator[int]:
    """Lines on which `print` writes a truth after words that end in a colon, where readers expect yes or no."""
    for node in ast.walk(ast.parse(code)):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "print"):
            continue
        for words, value in pairwise(node.args):
            text = ast.unparse(words).rstrip("'\" ")
            is_truth = isinstance(value, ast.Compare) or (
                isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in TRUTHS
            )
            if text.endswith(":") and (is_truth or ast.unparse(value).endswith(".exact")):
                yield value.lineno


def in_one_language(code: str) -> list[str]:
    """Places of a cell where a number is written with the marks of English."""
    python = re.sub(r"^\s*[%!].*$", "", code, flags=re.MULTILINE)  # magics keep their line
    found = [f"line {line}: format {text!r}" for line, text in formats_of(python) if MARKS.search(text)]
    found += [f"line {line}: truth in print" for line in truths_in_print(python)]
    return found + [f"line {line}: round in print" for line in rounded_in_print(python)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_cell_prints_numbers_in_the_language_of_the_reader(path: Path) -> None:
    cells = [cell for cell in read_source(path).cells if isinstance(cell, Code)]
    found = [f"{cell.name or cell.text[:40]}: {place}" for cell in cells for place in in_one_language(cell.text)]
    assert not found, f"write these by decimal() or percent() of dlojz.base.language: {found}"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('print(f"{x:.1f} ms")', ["line 1: format '.1f'"]),
        ('%%ranks 2\nprint(f"{x:6.0%}")', ["line 2: format '6.0%'"]),
        ('print(f"{n:,} tokens")', ["line 1: format ','"]),
        ('times = f"{x:,.0f}"', ["line 1: format ',.0f'"]),
        ('print(f"{x:.{digits}f}")', ["line 1: format '.f'"]),
        ('print(f"{x:g}, {x:.2e}")', ["line 1: format 'g'", "line 1: format '.2e'"]),
        ("print([round(x, 2) for x in losses])", ["line 1: round in print"]),
        ('print("same: // pareil :", torch.equal(x, y), "less:", a < b)', ["line 1: truth in print"] * 2),
        ('print("bytes as predicted:", dlojz.compare(runs).exact)', ["line 1: truth in print"]),
        ('print("same:", yes_no(torch.equal(x, y)), torch.equal(x, y))', []),
        ('print(f"{name:<12} {n:>8} {decimal(x, 2):>7} {n:04}", round(x))', []),
    ],
)
def test_english_marks_are_found(code: str, found: list[str]) -> None:
    assert in_one_language(code) == found


@pytest.mark.parametrize("path", LABS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_text_of_the_labs_writes_numbers_in_the_language_of_the_reader(path: Path) -> None:
    if str(path.relative_to(ROOT / "dlojz" / "labs")) in NOT_FOR_READERS:
        return
    formats = formats_of(path.read_text(encoding="utf-8"))
    assert [one for one in formats if MARKS.search(one[1]) and not NO_MARKS.fullmatch(one[1])] == []


def test_what_is_let_through_is_there() -> None:
    for name in NOT_FOR_READERS:
        code = (ROOT / "dlojz" / "labs" / name).read_text(encoding="utf-8")
        assert any(MARKS.search(text) and not NO_MARKS.fullmatch(text) for _, text in formats_of(code)), name
