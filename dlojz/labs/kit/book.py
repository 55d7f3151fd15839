"""Build the book, `dlojz labs book`: static pages of all executed solutions, contents and glossary, in both languages.

The pages of docs/ are in its English half; so is a link to the pages of the package's modules where `make site` has put
them beside it, in api/.

Nothing is executed: a page shows the outputs that are stored beside the code, rendered by nbconvert. It holds no script
and nothing from elsewhere; a link leads to another page of the book or to the web, and is plain text otherwise. A lab
whose solution is not there is named in the contents, without a page.

Formulas become SVG by matplotlib's mathtext and keep their TeX as the text that is read aloud and copied; one that
mathtext does not know is shown as its TeX.
"""

import copy
import hashlib
import io
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from string import Template
from typing import Any

from dlojz.base.errors import LabError
from dlojz.base.files import CHECKOUT, write_atomic
from dlojz.base.language import LANGUAGES, Language, one_of, refusal
from dlojz.base.table import safe
from dlojz.labs.kit.build import pages_labs_table
from dlojz.labs.kit.contents import (
    CONTENTS,
    GLOSSARY,
    LABS,
    LabEntry,
    duration,
    entry_of,
    glossary_markdown,
    total_minutes,
)
from dlojz.labs.kit.source import BEGIN, MAX_NOTEBOOK_BYTES, french_spaces

EM_POINTS = 11.0
"""Size at which a formula is drawn; the page scales it to its own text, as lengths are given in em."""
_SVG = re.compile(r"<svg\b.*</svg>", re.DOTALL)
_LIMIT = r"\s*(?:\{(?:[^{}]|\{[^{}]*\})*\}|\\[a-zA-Z]+|[^\\{}\s])"
_PLAIN = (
    # What mathtext calls otherwise, or does not size.
    (re.compile(r"\\(?:big|Big|bigg|Bigg)[lrm]?(?![a-zA-Z])"), ""),
    (re.compile(r"\\(?:displaystyle|textstyle|nolimits|limits)(?![a-zA-Z])"), ""),
    (re.compile(r"\\(?:lVert|rVert)(?![a-zA-Z])"), r"\\Vert"),
    (re.compile(r"\\(?:lvert|rvert)(?![a-zA-Z])"), r"|"),
    (re.compile(r"\\texttt(?=\{)"), r"\\mathtt"),
    (re.compile(r"\\operatorname\*?(?=\{)"), r"\\mathrm"),
    (re.compile(r"\\(?:le|leqslant)(?![a-zA-Z])"), r"\\leq"),
    (re.compile(r"\\(?:ge|geqslant)(?![a-zA-Z])"), r"\\geq"),
    # An operator right after another one: TeX parts their limits, mathtext sets them edge to edge.
    (re.compile(rf"(\\(?:sum|prod)(?:[_^]{_LIMIT})+)\s*(?=\\(?:sum|prod)(?![a-zA-Z]))"), r"\1\\;"),
)


def formula_html(tex: str, *, block: bool) -> str:
    """A formula as HTML: an inline SVG in the colour of the text, or its TeX where it cannot be drawn.

    Args:
        tex: Without its dollar signs.
        block: On a separate line, with fractions at full size.
    """
    label = safe(" ".join(tex.split()))
    drawn = _drawn(tex.strip(), block)
    if drawn is None:
        html = f'<code class="tex">{label}</code>'
    else:
        picture, width_em, height_em, depth_em = drawn
        opening = (
            f'<span class="math" role="img" aria-label="{label}" style="width:{width_em:.3f}em;'
            f'height:{height_em:.3f}em;vertical-align:{-depth_em:.3f}em">'
        )
        html = "".join((opening, picture, "</span>"))
    return "".join(('<div class="formula">', html, "</div>")) if block else html


@cache
def _drawn(tex: str, block: bool) -> tuple[str, float, float, float] | None:
    """The SVG, its width, height and depth below the line of writing, in em; None where mathtext gives up."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties
    from matplotlib.mathtext import MathTextParser

    text = tex
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    if block:
        text = re.sub(r"\\frac(?![a-zA-Z])", r"\\dfrac", text)
    text = f"${' '.join(text.split())}$"
    font = FontProperties(size=EM_POINTS, math_fontfamily="dejavusans")
    # Glyphs as paths need no font at the reader's; with a fixed salt, a formula gives the same bytes again.
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "dlojz"}):
        try:
            # At 72 dpi a pixel is a point, and so is the unit of what is returned.
            width, height, depth, _, _ = MathTextParser("path").parse(text, dpi=72, prop=font)
        except (ValueError, RuntimeError):
            return None
        # A point of air all round, as glyphs may stand out of their boxes.
        width, height, depth = width + 2, height + 2, depth + 1
        figure = Figure(figsize=(width / 72, height / 72))
        # In shares of the figure: one point from the left, on the line of writing.
        figure.text(1 / width, depth / height, text, fontproperties=font)
        picture = io.StringIO()
        figure.savefig(picture, format="svg", transparent=True, metadata={"Date": None})
    match = _SVG.search(picture.getvalue())
    if match is None:
        return None
    svg = re.sub(r"<metadata>.*?</metadata>|<style\b.*?</style>|<!--.*?-->|\n\s*", " ", match[0], flags=re.DOTALL)
    return _own_names(svg, text + str(block)), width / EM_POINTS, height / EM_POINTS, depth / EM_POINTS


def _own_names(svg: str, text: str) -> str:
    """Ids that no other formula of the page has, and no size: the page gives it."""
    mark = hashlib.sha256(text.encode()).hexdigest()[:8]
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{mark}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{mark}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{mark}-\1)", svg)
    return re.sub(
        r'(<svg\b[^>]*?)\s(?:width|height)="[^"]*"', r"\1", re.sub(r'(<svg\b[^>]*?)\swidth="[^"]*"', r"\1", svg)
    )


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
API, GAME = "api", "game"
"""Folders of the pages of modules and of the game of schedules, beside those of the languages."""
OTHER: dict[Language, Language] = {"en": "fr", "fr": "en"}
NAMES: dict[Language, str] = {"en": "English", "fr": "Français"}


@dataclass(frozen=True)
class Shelf:
    """The pages of one language.

    Args:
        notebooks: File names of the notebooks that have a page in the book.
        both: Whether each page has its twin in the other language.
        documents: File names of the pages of docs/ that are in the book; they are in English.
    """

    language: Language
    notebooks: Collection[str]
    both: bool
    documents: Collection[str] = ()

    def page_of(self, target: str) -> str | None:
        """Where a link of a notebook leads in the book; None where the book has no such page."""
        name = Path(target.partition("#")[0]).name
        if target == API:
            return f"../{API}/{HOME}"
        if target == GAME:
            return f"../{GAME}/{self.language}.html"
        if name == CONTENTS:
            return HOME
        if name == GLOSSARY:
            return WORDS
        if name in self.notebooks or name in self.documents:
            return Path(name).stem + ".html"
        return None


def notebook_page(notebook: Any, file: str, title: str, shelf: Shelf) -> str:
    """One executed notebook as a page."""
    # A copy: the tags are the page's, not the notebook's.
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
    other_language = OTHER[shelf.language]
    links = [(HOME, words["contents"], ""), (WORDS, words["glossary"], "")]
    if shelf.both:
        links.append((f"../{other_language}/{file}", NAMES[other_language], other_language))
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
        f'<a lang="{safe(code)}" href="{safe(code)}/{safe(HOME)}">{safe(NAMES[code])}</a>' for code in languages
    )
    headings = "".join(f'<h1 lang="{safe(code)}">{safe(_TITLES[code])}</h1>' for code in languages)
    body = "".join((headings, '<p class="languages">', lines, "</p>"))
    html = page(body, HOME, _TITLES["en"], shelf)
    # This page belongs to no language, so it links to no contents.
    return re.sub(r"<nav\b.*?</nav>", "", html, flags=re.DOTALL)


def _nav_link(target: str, text: str, spoken: str) -> str:
    if spoken:
        return f'<a href="{safe(target)}" hreflang="{safe(spoken)}" lang="{safe(spoken)}">{safe(text)}</a>'
    return f'<a href="{safe(target)}">{safe(text)}</a>'


def _outline(body: str, name: str) -> str:
    """The headings of a page, beside it; empty where there are hardly any."""
    headings = list(_HEADING.finditer(body))
    if len(headings) < 3:
        return ""
    parts = [f'<nav class="outline" aria-label="{safe(name)}"><ol>']
    for heading in headings:
        kind = ' class="sub"' if heading["level"] == "3" else ""
        parts += ["<li", kind, '><a href="#', heading["id"], '">', re.sub(r"<[^>]+>", "", heading["text"]), "</a></li>"]
    return "".join([*parts, "</ol></nav>"])


def relinked(body: str, shelf: Shelf) -> str:
    """HTML of a notebook whose links lead to pages of the book, to the web, or nowhere."""
    return _LINK.sub(partial(_relink, shelf), body)


def _relink(shelf: Shelf, link: re.Match[str]) -> str:
    target = link["target"]
    if target.startswith(_WEB):
        return link[0]
    page_name = shelf.page_of(target)
    if page_name is not None:
        return "".join(('<a href="', page_name, '">', link["text"], "</a>"))
    if target.endswith(".ipynb"):  # a lab that this book does not hold
        return link["text"]
    # A notebook lies two folders deep in the checkout: `../../dlojz/…` is named as `dlojz/…`.
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


@dataclass(frozen=True)
class Book:
    """What was written.

    Args:
        folder: Of the book; its first page is `index.html`.
        missing: Labs without a solution to show.
    """

    folder: Path
    pages: int
    size_bytes: int
    missing: tuple[LabEntry, ...]

    @property
    def first(self) -> Path:
        """The page to open."""
        return self.folder / HOME


def make_book(
    folder: Path, labs: Iterable[str] | None = None, language: str | None = None, *, root: Path | None = None
) -> Book:
    """Write the book.

    Args:
        folder: Folder to write into; pages of an earlier book are replaced, nothing else is touched.
        labs: Numbers of the labs that get a page; by default all.
        language: `en` or `fr`; by default both.
        root: The checkout; by default the one this package lies in.

    Raises:
        LabError: if a lab or language is unknown, no solution is there, or `folder` is no folder.
    """
    from tqdm.auto import tqdm

    root = root or CHECKOUT
    if language is not None and language not in LANGUAGES:
        raise LabError(one_of("language", language, LANGUAGES))
    if folder.exists() and not folder.is_dir():
        raise refusal(
            en=f"{folder} is no folder: name one for the book with --out.",
            fr=f"{folder} n’est pas un dossier : nommez-en un pour le livre avec --out.",
        )
    chosen = [name for name in LANGUAGES if language in (None, name)]
    entries = LABS if labs is None else tuple(entry_of(number) for number in labs)
    available = [entry for entry in entries if all(_solution(root, entry, name).is_file() for name in chosen)]
    if not available:
        raise refusal(
            en=f"{root / 'solutions'} holds no executed solution: the book is made from a checkout of the course.",
            fr=f"{root / 'solutions'} ne contient aucune solution exécutée : le livre se fait à partir d’une copie "
            "du cours.",
        )
    documents = sorted((root / "docs").glob("*.md")) if "en" in chosen else []
    # Each language has its labs, its contents and its glossary.
    total = len(chosen) * (len(available) + 2) + len(documents)
    size_bytes = 0
    # disable=None: a bar where somebody looks, nothing in a log.
    with tqdm(total=total, unit="page", file=sys.stderr, disable=None, dynamic_ncols=True) as bar:
        for path, text in _pages(root, folder, chosen, available, documents):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text)
            size_bytes += len(text.encode())
            bar.update()
    front_html = front_page(chosen)
    write_atomic(folder / HOME, front_html)
    return Book(
        folder,
        total + 1,
        size_bytes + len(front_html.encode()),
        tuple(entry for entry in entries if entry not in available),
    )


def _heading(document: Path) -> str:
    return document.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def _pages(
    root: Path, folder: Path, languages: list[Language], available: list[LabEntry], documents: list[Path]
) -> Iterator[tuple[Path, str]]:
    for name in languages:
        in_english = documents if name == "en" else []
        notebooks, pages = (
            frozenset(entry.notebook for entry in available),
            frozenset(document.name for document in in_english),
        )
        shelf = Shelf(name, notebooks, both=len(languages) > 1, documents=pages)
        glossary = "\n\n".join(glossary_markdown(name))
        titles = ("Sommaire", "Glossaire") if name == "fr" else ("Contents", "Glossary")
        links = "".join(f"- [{_heading(document)}]({document.name})\n" for document in in_english)
        if name == "en" and (folder / API / HOME).is_file():
            links += f"- [The modules of the package, from their docstrings]({API})\n"
        if (folder / GAME / f"{name}.html").is_file():
            title = "Le jeu des ordonnancements" if name == "fr" else "The game of schedules"
            links += f"- [{title}]({GAME})\n"
        contents = f"{_contents(name)}\n## Documentation\n\n{links}" if links else _contents(name)
        yield folder / name / HOME, markdown_page(contents, HOME, titles[0], shelf)
        for document in in_english:
            # The pages of docs/ have no twin in French.
            text, file = document.read_text(encoding="utf-8"), f"{document.stem}.html"
            yield folder / name / file, markdown_page(text, file, _heading(document), replace(shelf, both=False))
        yield folder / name / WORDS, markdown_page(glossary, WORDS, titles[1], shelf)
        for entry in available:
            file = f"{entry.file}.html"
            notebook = _read(_solution(root, entry, name))
            yield folder / name / file, notebook_page(notebook, file, entry.heading(name), shelf)


def _solution(root: Path, entry: LabEntry, language: Language) -> Path:
    return root / "solutions" / language / entry.notebook


def _read(path: Path) -> Any:
    import nbformat

    try:
        if path.stat().st_size > MAX_NOTEBOOK_BYTES:
            raise ValueError("too large")
        return nbformat.read(path, as_version=4)
    except (OSError, ValueError, nbformat.ValidationError):
        raise refusal(
            en=f"{path} cannot be read as a notebook: run `dlojz labs build` first.",
            fr=f"{path} est illisible comme notebook : lancez d’abord `dlojz labs build`.",
        ) from None


def _contents(language: Language) -> str:
    """The first page of a language, as Markdown."""
    time = duration(total_minutes())
    if language == "fr":
        return french_spaces(
            f"# Sommaire\n\nLes solutions des {len(LABS)} TP, telles qu’elles ont été exécutées : l’énoncé, le code "
            "(une barre bleue signale ce que l’étudiant écrit), ce qu’il affiche, et les figures. La durée est celle "
            f"du TP pour un étudiant, {time} en tout.\n\n{pages_labs_table(language)}\n"
        )
    return (
        f"# Contents\n\nThe solutions of the {len(LABS)} labs as they were executed: the text, the code (a blue bar "
        "marks what students write), what it shows, and the figures. The time is that of the lab for a student, "
        f"{time} in all.\n\n{pages_labs_table(language)}\n"
    )
