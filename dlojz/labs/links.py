"""The links that lead from one notebook to the next: one line at its top and one at its end.

Layer 6 (labs). Invariant: no source writes them; they are Markdown with relative addresses, so that they work in
JupyterLab, on a forge and, turned into addresses of pages, in the book. No code cell is touched, and none is between
the two, so that stored outputs stay those of the code.
"""

from __future__ import annotations

from typing import Any

from dlojz.labs.contents import LABS, LabEntry, neighbours
from dlojz.labs.source import french_spaces
from dlojz.text import Language

CONTENTS, GLOSSARY = "contents.ipynb", "glossary.ipynb"
TOP, END = "links-top", "links-end"


def entry_of_file(stem: str) -> LabEntry | None:
    """The lab whose source has this stem; None for one that is not of the set."""
    return next((entry for entry in LABS if entry.file == stem), None)


def linked(notebook: Any, stem: str, language: Language, *, student: bool) -> Any:
    """The notebook with its two lines of links; as it is where its lab is not of the set.

    Args:
        notebook: As composed from its source.
        stem: Of the source.
        language: Of the notebook.
        student: A solution lies in another folder than the page of contents, and links to it from there.
    """
    import nbformat.v4

    entry = entry_of_file(stem)
    if entry is None:
        return notebook
    pages = "" if student else f"../../notebooks/{language}/"
    line = link_line(entry, language, pages=pages)
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell(line, id=TOP))
    notebook.cells.append(nbformat.v4.new_markdown_cell(f"---\n{line}", id=END))
    return notebook


def link_line(entry: LabEntry, language: Language, *, pages: str = "") -> str:
    """Previous lab, contents, glossary, next lab, as Markdown.

    Args:
        pages: Folder of the contents and of the glossary, relative to the notebook; empty, or ending in a slash.
    """
    before, after = neighbours(entry.number)
    contents, glossary = ("Sommaire", "Glossaire") if language == "fr" else ("Contents", "Glossary")
    parts = [
        f"← [{before.heading(language)}]({before.notebook})" if before else "",
        f"[{contents}]({pages}{CONTENTS})",
        f"[{glossary}]({pages}{GLOSSARY})",
        f"[{after.heading(language)}]({after.notebook}) →" if after else "",
    ]
    line = " · ".join(part for part in parts if part)
    return french_spaces(line) if language == "fr" else line
