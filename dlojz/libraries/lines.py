"""Lines of code of a program, and those by which two of them differ.

Layer 3, loads no torch. Invariant: docstrings, comments and blank lines count for nothing.
"""

from __future__ import annotations

import ast
import difflib
import io
import tokenize
from typing import NamedTuple


def code_lines(text: str) -> list[str]:
    """The lines of a program that are code: no docstring, no comment, nothing blank; without the spaces at either end.

    A statement that is broken over several lines counts as so many.
    """
    tree = ast.parse(text)
    silent: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            said = node.body[0]
            silent.update(range(said.lineno, (said.end_lineno or said.lineno) + 1))
    comments = {
        token.start[0]: token.start[1]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    lines = [
        line[: comments.get(number, len(line))].strip()
        for number, line in enumerate(text.splitlines(), start=1)
        if number not in silent
    ]
    return [line for line in lines if line]


class Change(NamedTuple):
    """From one program to another: lines that are new, that are gone, and the code lines of each."""

    added: int
    removed: int
    reference_lines: int
    lines: int

    @property
    def changed(self) -> int:
        """Lines that a user writes anew, or deletes."""
        return self.added + self.removed


def change(before: str, after: str) -> Change:
    """From the text of one program to another's, line by line as Python's `difflib` matches them."""
    old, new = code_lines(before), code_lines(after)
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    matched = sum(block.size for block in blocks)
    return Change(len(new) - matched, len(old) - matched, len(old), len(new))
