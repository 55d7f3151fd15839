"""The book of solutions: whole without a network or a script, links that lead somewhere, formulas drawn."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import LANGUAGES, use_language
from dlojz.cli.main import DONE, REFUSED, main
from dlojz.labs.kit.book import EM_POINTS, Book, Shelf, formula_html, make_book, markdown_html, notebook_page, relinked
from dlojz.labs.kit.contents import LABS, LabEntry
from dlojz.labs.kit.source import ProseCells, read_source

ROOT = Path(__file__).resolve().parents[2]
SOLUTIONS = ROOT / "solutions"
DOCUMENTS = [path.stem for path in (ROOT / "docs").glob("*.md")]
BOTH = Shelf("en", ("01_big_models.ipynb",), both=True)
VOID = {"meta", "img", "br", "hr", "col", "input", "link", "path", "use"}


class Reader(HTMLParser):
    """Tags that are open, addresses, ids, pictures without a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.scripts = 0
        self.without_alt = 0
        self.alts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.scripts += tag == "script" or any(name.startswith("on") for name in given)
        self.links += [given["href"] or ""] if tag == "a" and "href" in given else []
        self.loads += [given[name] or "" for name in ("src", "data", "srcset") if name in given]
        self.ids += [given["id"] or ""] if "id" in given else []
        self.without_alt += tag == "img" and not given.get("alt")
        self.alts += [given["alt"] or ""] if tag == "img" and "alt" in given else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID and tag in self.open:
            while self.open.pop() != tag:
                pass


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("somewhere") / "book"
    made = make_book(folder, ["01", "07"])
    assert made.pages == 9 + len(DOCUMENTS)
    assert made.first == folder / "index.html"
    assert made.missing == ()
    assert made.size_bytes == sum(path.stat().st_size for path in folder.rglob("*.html"))
    return folder


def pages(book: Path) -> dict[str, Reader]:
    return {str(path.relative_to(book)): Reader(path.read_text(encoding="utf-8")) for path in book.rglob("*.html")}


def test_the_pages_are_those_of_both_languages(book: Path) -> None:
    names = {"index.html", "glossary.html", "01_big_models.html", "07_hybrid_3d.html"}
    both = {f"{one}/{name}" for one in LANGUAGES for name in names}
    assert set(pages(book)) == {"index.html", *both, *(f"en/{name}.html" for name in DOCUMENTS)}


def test_make_book_writes_pages_that_run_and_load_nothing(book: Path) -> None:
    for name, page in pages(book).items():
        assert page.scripts == 0, name
        assert page.open == [], name
        assert page.without_alt == 0, name
        assert [load[:40] for load in page.loads if not load.startswith("data:image/")] == [], name
        text = (book / name).read_text(encoding="utf-8")
        assert "default-src 'none'" in text
        assert "@import" not in text and "mathjax" not in text.lower()


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_figure_says_in_the_book_what_it_says_in_the_notebook(book: Path, language: str) -> None:
    """To those who do not see it: its own description, which nbconvert alone would drop."""
    for name in ("01_big_models", "07_hybrid_3d"):
        notebook = nbformat.read(SOLUTIONS / language / f"{name}.ipynb", as_version=4)
        shown = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ())]
        described = []
        for data in shown:  # a panel's static twin is HTML, whose picture has its own description
            described += [" ".join(data["text/plain"].split())] if "image/png" in data else []
            described += Reader(data.get("text/html", "")).alts
        assert described and all(len(words) > 20 for words in described)
        assert pages(book)[f"{language}/{name}.html"].alts == described


def test_every_link_leads_somewhere_and_no_formula_shares_an_id(book: Path) -> None:
    read = pages(book)
    for name, page in read.items():
        for link in page.links:
            if link.startswith(("http://", "https://")):
                continue
            target, _, anchor = link.partition("#")
            other = (book / name).parent / target if target else book / name
            assert other.is_file(), f"{name} links to {link}"
            ids = read[str(other.resolve().relative_to(book.resolve()))].ids
            assert not anchor or anchor in ids or unquote(anchor) in ids, f"{name} links to {link}"
    for page in read.values():
        assert all(page.ids.count(one) == 1 for one in page.ids if one.startswith("cell-id="))


def test_a_page_has_text_code_output_and_figure_in_its_language(book: Path) -> None:
    english, french = ((book / one / "01_big_models.html").read_text(encoding="utf-8") for one in LANGUAGES)
    assert '<html lang="fr">' in french and "l’auto-attention" in french and "TP 01 — Gros modèles" in french
    assert "Lab 01 — Big models" in english
    for text in (english, french):
        assert "celltag_solution" in text
        assert "data:image/png;base64," in text
        assert text.count('<span aria-label="') + text.count('class="math"') >= 6
        assert "$$" not in text
        assert "../../notebooks" not in text


@pytest.mark.parametrize(
    ("plain", "alt"),
    [
        ('1 < 2 & "3"\nranks', '1 < 2 & "3" ranks'),
        ("figure", "Figure drawn by the cell above"),
        ("<Figure size 640x480 with 1 Axes>", "Figure drawn by the cell above"),
        (None, "Figure drawn by the cell above"),
    ],
)
def test_notebook_page_gives_a_figure_without_words_those_of_all(plain: str | None, alt: str) -> None:
    data = {"image/png": "iVBORw0KGgo="} | ({} if plain is None else {"text/plain": plain})
    cell = nbformat.v4.new_code_cell("show()", outputs=[nbformat.v4.new_output("display_data", data=data)])
    page = notebook_page(nbformat.v4.new_notebook(cells=[cell]), "x.html", "x", BOTH)
    assert Reader(page).alts == [alt]
    assert "metadata" not in data and cell.outputs[0].metadata == {}


def test_make_book_hides_nothing_on_paper(book: Path) -> None:
    """What is shown in a window that scrolls is whole on paper, where the inline style would cut it."""
    printed = (book / "en" / "01_big_models.html").read_text(encoding="utf-8").partition("@media print {")[2]
    for rule in ("max-height: none !important", "overflow: visible !important", "white-space: pre-wrap !important"):
        assert rule in printed


def test_notebook_page_breaks_the_title_of_a_column_within_a_setting() -> None:
    table = '<table><tr><th scope="col">DDP (a_view=False) ×2</th><td>a_b=c</td></tr></table>'
    output = nbformat.v4.new_output("display_data", data={"text/html": table})
    cell = nbformat.v4.new_code_cell("show()", outputs=[output])
    page = notebook_page(nbformat.v4.new_notebook(cells=[cell]), "x.html", "x", BOTH)
    assert '<th scope="col">DDP (a_<wbr>view=<wbr>False) ×2</th><td>a_b=c</td>' in page


def test_a_lab_without_a_page_is_named_without_a_link(book: Path) -> None:
    text = (book / "en" / "index.html").read_text(encoding="utf-8")
    for entry in LABS:
        assert entry.heading("en") in text
        assert (f'href="{entry.file}.html"' in text) == (entry.number in ("01", "07"))


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ('<a href="01_big_models.ipynb">x</a>', '<a href="01_big_models.html">x</a>'),
        ('<a href="../../notebooks/en/contents.ipynb">x</a>', '<a href="index.html">x</a>'),
        ('<a href="glossary.ipynb">x</a>', '<a href="glossary.html">x</a>'),
        ('<a href="02_memory_footprint.ipynb">x</a>', "x"),
        ('<a href="https://example.org">x</a>', '<a href="https://example.org">x</a>'),
        ('<a href="#part">x</a>', '<a href="#part">x</a>'),
        (
            '<a href="../../dlojz/models/experts/layer.py">x</a>',
            '<span class="code-path" title="dlojz/models/experts/layer.py">x</span>',
        ),
    ],
)
def test_relinked_prose_has_the_links_of_the_book(link: str, expected: str) -> None:
    assert relinked(link, BOTH) == expected


def test_markdown_html_draws_formulas_with_their_tex_as_text() -> None:
    shown = markdown_html(r"Before $\sqrt{D}$ and `a$b$`" + "\n\n" + r"$$t = \alpha + \frac{a}{b}\, n$$")
    assert shown.count("<svg") == 2
    assert r'aria-label="\sqrt{D}"' in shown
    assert '<div class="formula">' in shown
    assert "<code>a$b$</code>" in shown
    assert "<style" not in shown and "fill: #000" not in shown


FORMULA = re.compile(r"\$\$(.*?)\$\$|\$([^$]+)\$", re.DOTALL)


@pytest.mark.parametrize("entry", [one for one in LABS if (ROOT / "solutions" / f"{one.file}.py").is_file()])
def test_every_formula_of_the_labs_is_drawn(entry: LabEntry) -> None:
    cells = read_source(ROOT / "solutions" / f"{entry.file}.py").cells
    prose = [cell.text[language] for cell in cells if isinstance(cell, ProseCells) for language in LANGUAGES]
    for text in prose:
        for found in FORMULA.finditer(re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)):
            tex = found[1] or found[2]
            assert "<svg" in formula_html(tex, block=bool(found[1])), tex


def test_a_formula_that_cannot_be_drawn_is_shown_as_its_tex() -> None:
    shown = formula_html(r"\begin{cases} a < b \end{cases}", block=True)
    assert shown == r'<div class="formula"><code class="tex">\begin{cases} a &lt; b \end{cases}</code></div>'


def test_markdown_html_keeps_a_formula_in_a_sentence_in_its_line() -> None:
    assert 'class="math"' in markdown_html("so $x$ is") and 'class="formula"' not in markdown_html("so $x$ is")
    assert 'class="formula"' in markdown_html("$$x$$")


@pytest.mark.parametrize(
    ("first", "second"),
    [(r"\sum_{\text{samples}}", r"\sum_{\text{classes}}"), (r"\prod_{abcdef}^{b}", r"\sum_{ghijkl}")],
)
def test_formula_html_keeps_the_limits_of_two_sums_apart(first: str, second: str) -> None:
    """mathtext alone sets an operator edge to edge with the one before it."""
    air_em = 2 / EM_POINTS  # round each picture
    edge_to_edge_em = width_em(first) + width_em(second) - air_em
    assert width_em(f"{first} {second}") > edge_to_edge_em + 0.1


def width_em(tex: str) -> float:
    return float(re.findall(r"width:([0-9.]+)em", formula_html(tex, block=True))[0])


def test_the_same_formula_is_the_same_picture() -> None:
    assert formula_html(r"a^2", block=False) == formula_html(r"a^2", block=False)
    ids = set(re.findall(r'id="([^"]+)"', formula_html(r"a^2", block=False)))
    assert ids.isdisjoint(re.findall(r'id="([^"]+)"', formula_html(r"a^3", block=False)))


def test_a_book_of_one_language_has_no_link_to_the_other(tmp_path: Path) -> None:
    made = make_book(tmp_path / "livre", ["07"], "fr")
    assert made.pages == 4
    assert not (tmp_path / "livre" / "en").exists()
    assert "English" not in (tmp_path / "livre" / "fr" / "index.html").read_text(encoding="utf-8")


def test_make_book_refuses_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="is no folder"):
        make_book(tmp_path / "file", ["00"])
    with pytest.raises(LabError, match="holds no executed solution"):
        make_book(tmp_path / "book", root=tmp_path)
    with pytest.raises(LabError, match="unknown lab '99'"):
        make_book(tmp_path / "book", ["99"])
    with pytest.raises(LabError, match="unknown language 'de'"):
        make_book(tmp_path / "book", language="de")
    (tmp_path / "solutions" / "en").mkdir(parents=True)
    (tmp_path / "solutions" / "en" / "00_getting_started.ipynb").write_text("{")
    with pytest.raises(LabError, match="cannot be read as a notebook"):
        make_book(tmp_path / "book", ["00"], "en", root=tmp_path)
    use_language("fr")
    assert main(["labs", "book", "--out", str(tmp_path / "file")]) == REFUSED
    assert "n’est pas un dossier" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["07", "--out", "b"], ["--out", "b", "07"], ["--out=b", "07"], ["--language", "en", "--out", "b", "07"]],
)
def test_main_labs_book_takes_options_before_or_after_the_labs(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, list[str]]] = []

    def make(out: Path, labs: list[str], language: str | None) -> Book:
        asked.append((out, labs))
        return Book(tmp_path, 0, 0, ())

    monkeypatch.setattr("dlojz.labs.kit.book.make_book", make)
    assert main(["labs", "book", *words]) == DONE
    assert asked == [(Path("b"), ["07"])]


def test_main_labs_book_says_where_the_book_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["labs", "book", "07", "--out", str(tmp_path / "b"), "--language", "en"]) == DONE
    told = capsys.readouterr()
    assert told.out.startswith(f"{4 + len(DOCUMENTS)} pages, ")
    assert told.out.endswith(f"{tmp_path / 'b' / 'index.html'}\n")
    assert told.err == ""
