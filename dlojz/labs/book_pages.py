"""A notebook, or Markdown, as a page of the book: no script, nothing from elsewhere, readable in any browser.

Layer 6 (labs). Invariant: what a notebook says is rendered by nbconvert; this module only lays it out. A link leads to
another page of the book or to the web, and is plain text otherwise.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from string import Template
from typing import Any

from dlojz.labs.book_math import formula_html
from dlojz.labs.links import CONTENTS, GLOSSARY
from dlojz.labs.source import BEGIN
from dlojz.text import Language
from dlojz.viz.markup import safe

HOME, WORDS = "index.html", "glossary.html"
_FOLDER = Path(__file__).with_name("data")
_LINK = re.compile(r'<a href="(?P<target>[^"]*)"(?P<more>[^>]*)>(?P<text>.*?)</a>', re.DOTALL)
_HEADING = re.compile(r'<h(?P<level>[23]) id="(?P<id>[^"]*)">(?P<text>.*?)<a class="anchor-link"', re.DOTALL)
_COLUMN = re.compile(r'(?P<open><th scope="col"[^>]*>)(?P<text>[^<]*)</th>')
_NO_ALT = 'alt="No description has been provided for this image"'
_NO_WORDS = ("", "figure")
_WEB = ("http://", "https://", "mailto:", "#")
_TITLES = {"en": "Big models taken apart — solutions", "fr": "Démonter les gros modèles — solutions"}
_WORDS = {
    "en": {
        "skip": "Skip to the text",
        "pages": "Pages of the book",
        "contents": "Contents",
        "glossary": "Glossary",
        "outline": "On this page",
        "figure": "Figure drawn by the cell above",
        "footer": "Made by dlojz labs book from the executed solutions; figures and times are those of the machine "
        "that executed them.",
    },
    "fr": {
        "skip": "Aller au texte",
        "pages": "Pages du livre",
        "contents": "Sommaire",
        "glossary": "Glossaire",
        "outline": "Sur cette page",
        "figure": "Figure tracée par la cellule ci-dessus",
        "footer": "Fait par dlojz labs book à partir des solutions exécutées ; figures et durées sont celles de la "
        "machine qui les a exécutées.",
    },
}
OTHER: dict[Language, Language] = {"en": "fr", "fr": "en"}
NAMES: dict[Language, str] = {"en": "English", "fr": "Français"}


@dataclass(frozen=True)
class Shelf:
    """The pages of one language.

    Args:
        language: Of all texts.
        notebooks: File names of the notebooks that have a page in the book.
        both: Whether each page has its twin in the other language.
    """

    language: Language
    notebooks: Collection[str]
    both: bool

    def page_of(self, target: str) -> str | None:
        """Where a link of a notebook leads in the book; None where the book has no such page."""
        name = Path(target.partition("#")[0]).name
        if name == CONTENTS:
            return HOME
        if name == GLOSSARY:
            return WORDS
        return name.removesuffix(".ipynb") + ".html" if name in self.notebooks else None


def notebook_page(notebook: Any, file: str, title: str, shelf: Shelf) -> str:
    """One executed notebook as a page.

    Args:
        notebook: With its outputs.
        file: Name of the page.
        title: Of the window.
    """
    marked = copy.deepcopy(notebook)
    for cell in marked.cells:
        if cell.cell_type == "code" and BEGIN in cell.source:
            cell.metadata["tags"] = [*cell.metadata.get("tags", ()), "solution"]
        for output in cell.get("outputs", ()):
            _describe(output)
    body, _ = _exporter().from_notebook_node(marked)
    body = body.replace(_NO_ALT, f'alt="{safe(_WORDS[shelf.language]["figure"])}"')
    return page(relinked(_COLUMN.sub(_breakable, body), shelf), file, title, shelf)


def _breakable(column: re.Match[str]) -> str:
    """The title of a column, where a line may end within a setting such as gradient_as_bucket_view=False."""
    return "".join((column["open"], re.sub(r"([_=])(?=\w)", r"\1<wbr>", column["text"]), "</th>"))


def _describe(output: Any) -> None:
    """Tell nbconvert a figure's own description: what the figure says of itself where there are no pictures."""
    data = output.get("data", {})
    words = " ".join(str(data.get("text/plain", "")).split())
    if words in _NO_WORDS or words.startswith("<"):  # such as <Figure size 640x480 with 1 Axes>
        return
    for kind in data:
        if kind.startswith("image/"):
            output.metadata.setdefault(kind, {}).setdefault("alt", words)


def markdown_page(text: str, file: str, title: str, shelf: Shelf) -> str:
    """Markdown as a page."""
    return page(relinked(markdown_html(text), shelf), file, title, shelf)


def page(body: str, file: str, title: str, shelf: Shelf) -> str:
    """A whole page around its text.

    Args:
        body: HTML.
        file: Name of the page, the same in both languages.
    """
    words = _WORDS[shelf.language]
    other = OTHER[shelf.language]
    links = [(HOME, words["contents"], ""), (WORDS, words["glossary"], "")]
    if shelf.both:
        links.append((f"../{other}/{file}", NAMES[other], other))
    return _template().substitute(
        language=shelf.language,
        title=safe(title),
        style=_style(),
        skip=safe(words["skip"]),
        home=HOME,
        book=safe(_TITLES[shelf.language]),
        pages=safe(words["pages"]),
        links=" ".join(_nav_link(*link) for link in links),
        outline=_outline(body, words["outline"]),
        body=body,
        footer=safe(words["footer"]),
    )


def front_page(languages: Collection[Language]) -> str:
    """The first page: which language to read in."""
    shelf = Shelf("en", (), both=False)
    lines = "".join(
        f'<a lang="{safe(one)}" href="{safe(one)}/{safe(HOME)}">{safe(NAMES[one])}</a>' for one in languages
    )
    headings = "".join(f'<h1 lang="{safe(one)}">{safe(_TITLES[one])}</h1>' for one in languages)
    body = "".join((headings, '<p class="languages">', lines, "</p>"))
    whole = page(body, HOME, _TITLES["en"], shelf)
    return re.sub(r"<nav\b.*?</nav>", "", whole, flags=re.DOTALL)


def _nav_link(target: str, text: str, spoken: str) -> str:
    if spoken:
        return f'<a href="{safe(target)}" hreflang="{safe(spoken)}" lang="{safe(spoken)}">{safe(text)}</a>'
    return f'<a href="{safe(target)}">{safe(text)}</a>'


def _outline(body: str, name: str) -> str:
    """The headings of a page, beside it; empty where there are hardly any."""
    found = list(_HEADING.finditer(body))
    if len(found) < 3:
        return ""
    parts = [f'<nav class="outline" aria-label="{safe(name)}"><ol>']
    for one in found:
        kind = ' class="sub"' if one["level"] == "3" else ""
        parts += ["<li", kind, '><a href="#', one["id"], '">', re.sub(r"<[^>]+>", "", one["text"]), "</a></li>"]
    return "".join([*parts, "</ol></nav>"])


def relinked(body: str, shelf: Shelf) -> str:
    """HTML of a notebook whose links lead to pages of the book, to the web, or nowhere."""
    return _LINK.sub(partial(_relink, shelf), body)


def _relink(shelf: Shelf, link: re.Match[str]) -> str:
    target = link["target"]
    if target.startswith(_WEB):
        return link[0]
    found = shelf.page_of(target)
    if found is not None:
        return "".join(('<a href="', found, '">', link["text"], "</a>"))
    if target.endswith(".ipynb"):  # a lab that this book does not hold
        return link["text"]
    path = target.removeprefix("../../")
    return "".join((f'<span class="code-path" title="{safe(path)}">', link["text"], "</span>"))


def markdown_html(text: str) -> str:
    """Markdown as HTML, formulas drawn."""
    from nbconvert.filters.markdown_mistune import MarkdownWithMath

    return str(MarkdownWithMath(renderer=_renderer()).render(text))


@cache
def _exporter() -> Any:
    from jinja2 import pass_context
    from nbconvert import HTMLExporter

    class Exporter(HTMLExporter):
        """nbconvert's plainest HTML, with formulas drawn."""

        @pass_context
        def markdown2html(self, context: Any, source: str) -> str:
            return markdown_html(source)

    return Exporter(template_name="basic")


def _renderer() -> Any:
    from nbconvert.filters.markdown_mistune import IPythonRenderer

    class Drawn(IPythonRenderer):
        """Formulas as pictures; all else as nbconvert renders it."""

        def block_math(self, body: str) -> str:
            return formula_html(body, block=True)

        def multiline_math(self, text: str) -> str:
            return formula_html(text.strip().strip("$"), block=True)

        def inline_math(self, body: str) -> str:
            return formula_html(body, block=False)

    return Drawn(escape=False)


@cache
def _template() -> Template:
    return Template((_FOLDER / "book.html").read_text(encoding="utf-8"))


@cache
def _style() -> str:
    """The style of the book and of code, light and dark."""
    from pygments.formatters import HtmlFormatter

    def colours(name: str) -> str:
        formatter = HtmlFormatter(style=name, nobackground=True)
        return "\n".join(line for line in formatter.get_style_defs(".highlight").split("\n") if ".highlight ." in line)

    return "\n".join(
        (
            (_FOLDER / "book.css").read_text(encoding="utf-8"),
            "@media not all and (prefers-color-scheme: dark) {",
            colours("friendly"),
            "}",
            "@media screen and (prefers-color-scheme: dark) {",
            colours("github-dark"),
            "}",
        )
    )
